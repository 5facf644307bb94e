#!/bin/sh
# Fetch the libraries that draw the report's page, and write them into the package as one file.
# Needs npm. Run it from the repository's root after a change of the versions below.
set -eu
VEGA=6.4.0 LITE=6.5.0 EMBED=7.3.0
out=src/fedtailor/report/vega
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
npm install --silent --prefix "$work" --ignore-scripts --no-audit --no-fund \
  "vega@$VEGA" "vega-lite@$LITE" "vega-embed@$EMBED"
from="$work/node_modules"
mkdir -p "$out"
{
  printf '/*! Vega %s, Vega-Lite %s, Vega-Embed %s\n\n' "$VEGA" "$LITE" "$EMBED"
  cat "$from/vega/LICENSE"
  printf '\nThey contain parts of D3:\n\n'
  cat "$from/d3-array/LICENSE"
  printf '\nThe licences of all parts: report/vega/LICENSES.txt of the package fedtailor. */\n'
  for file in vega/build/vega vega-lite/build/vega-lite vega-embed/build/vega-embed; do
    grep -v '^//# sourceMappingURL' "$from/$file.min.js"
  done
} > "$out/vega.js"
# each licence once, with the packages that have it
for license in "$from"/*/LICENSE* "$from"/*/license*; do
  [ -f "$license" ] || continue
  sum=$(cksum < "$license" | tr ' ' '-')
  cp "$license" "$work/$sum.text"
  basename "$(dirname "$license")" >> "$work/$sum.names"
done
for text in "$work"/*.text; do
  tr '\n' ' ' < "${text%.text}.names"
  printf '\n\n'
  cat "$text"
  printf '\n%s\n\n' ----------------------------------------
done > "$out/LICENSES.txt"
if grep -q '</script' "$out/vega.js"; then
  echo "vega.js can't stand in a page: it contains </script" >&2
  exit 1
fi
wc -c "$out/vega.js"
