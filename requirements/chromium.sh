#!/bin/sh
# Install Debian's Chromium, in which the tests of the report's page run. Without it they are skipped.
set -eu
command -v chromium >/dev/null && exit
command -v apt-get >/dev/null || { echo "no apt-get: the tests of the page will be skipped" >&2; exit; }
apt-get -qq update
apt-get -qq install --no-install-recommends chromium fonts-dejavu-core >/dev/null
