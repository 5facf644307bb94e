// The look of charts in the colours of the page, which follow the reader's theme: "--ink" is that
// colour of the style.
"use strict";
const darkTheme = matchMedia("(prefers-color-scheme: dark)");
function chartTheme(look) {
  const css = getComputedStyle(document.documentElement);
  if (Array.isArray(look)) return look.map(chartTheme);
  if (look && typeof look === "object") {
    return Object.fromEntries(Object.entries(look).map(([name, of]) => [name, chartTheme(of)]));
  }
  if (typeof look !== "string" || !look.startsWith("--")) return look;
  const colours = css.getPropertyValue(look).trim().split(" ");
  return colours.length > 1 ? colours : colours[0];
}
