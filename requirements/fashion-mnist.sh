#!/bin/sh
# Put Fashion-MNIST's IDX files into the cache, from Debian's package dataset-fashion-mnist (MIT).
set -eu
cache=${FEDTAILOR_CACHE:-$HOME/.cache/fedtailor}
command -v apt-get >/dev/null || { echo "apt-get is needed; elsewhere the data come from the hub" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get -qq download dataset-fashion-mnist 2>/dev/null || { apt-get -qq update; apt-get -qq download dataset-fashion-mnist; }
dpkg -x dataset-fashion-mnist_*.deb .
mkdir -p "$cache/fashion-mnist"
cp usr/share/datasets/fashion-mnist/* "$cache/fashion-mnist/"
echo "Fashion-MNIST is in $cache/fashion-mnist"
