#!/bin/sh
# Install Debian's Chromium, in which the tests of the report's page run.
set -eu
command -v chromium >/dev/null && exit
command -v apt-get >/dev/null || { echo "no apt-get: install chromium in your system's way" >&2; exit 1; }
apt-get -qq update
apt-get -qq install --no-install-recommends chromium fonts-dejavu-core >/dev/null
