// The look of charts in the colours of the page, which follow the reader's theme. A legend has as
// many columns as the element is wide enough for.
"use strict";
const darkTheme = matchMedia("(prefers-color-scheme: dark)");
function chartTheme(element) {
  const css = getComputedStyle(document.documentElement);
  const get = (name) => css.getPropertyValue(name).trim();
  const ink = get("--ink"), soft = get("--soft"), line = get("--line");
  return {
    background: get("--card"), // a saved chart keeps the ground on which its ink can be read
    font: "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    view: { stroke: null },
    axis: {
      labelColor: ink, titleColor: soft, gridColor: line, domainColor: soft, tickColor: soft,
      labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelFlush: false,
    },
    axisXQuantitative: { tickCount: { signal: "ceil(width / 70)" }, labelOverlap: true },
    legend: { labelColor: ink, titleColor: soft, titleFontWeight: "normal", labelFontSize: 12,
      columns: Math.max(1, Math.floor((element.clientWidth - 80) / 115)) },
    text: { color: ink }, rule: { color: ink }, line: { color: soft }, point: { stroke: ink },
    rect: { stroke: null }, bar: { color: get("--m0") }, circle: { color: ink },
    range: {
      category: Array.from({ length: 12 }, (_, k) => get(`--m${k}`)),
      heatmap: get("--heat").split(" "), ramp: get("--heat").split(" "),
      diverging: get("--diverging").split(" "),
    },
  };
}
