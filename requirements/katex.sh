#!/bin/sh
# Fetch KaTeX, which draws the formulas of the documentation's pages, into docs/_static/katex.
# Needs npm. Run it from the repository's root after a change of the version below.
set -eu
KATEX=0.19.1
out=docs/_static/katex
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
npm install --silent --prefix "$work" --ignore-scripts --no-audit --no-fund "katex@$KATEX"
from="$work/node_modules/katex"
rm -rf "$out"
mkdir -p "$out/fonts"
cp "$from/LICENSE" "$from/dist/katex.min.js" "$out"
# browsers take the first form of a font that they know: woff2, which all have
sed 's/,url([^)]*) format("woff"),url([^)]*) format("truetype")//g' "$from/dist/katex.min.css" \
  > "$out/katex.min.css"
cp "$from"/dist/fonts/*.woff2 "$out/fonts"
du -sh "$out"
