// Draws the page's charts with Vega, and joins them to its tables and controls.
"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const page = read("content"), specs = read("specs");
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const make = (tag, fields = {}, children = []) => {
    const element = Object.assign(document.createElement(tag), fields);
    element.append(...children);
    return element;
  };
  const labels = page.methods;
  const state = { shown: [...labels], focus: null, picked: null };
  const views = new Map(); // element -> Vega view
  document.documentElement.classList.add("live");

  // ---- data: columns become rows ----
  const rows = (columns) => {
    const names = Object.keys(columns), count = names.length ? columns[names[0]].length : 0;
    return Array.from({ length: count }, (_, i) => {
      const row = Object.fromEntries(names.map((name) => [name, columns[name][i]]));
      return "method" in row ? { ...row, method: labels[row.method] } : row;
    });
  };
  const keyOf = (group, client) => `${group}:${client}`;
  const results = rows(page.results).map((row, i) => {
    const group = page.groups[row.group];
    return {
      ...row, key: keyOf(row.group, row.client), name: group.names[row.client],
      group: group.title, train: group.train[row.client], test: group.test[row.client],
      jitter: Math.sin(2.4 * i),
    };
  });
  const fixed = {
    curves: rows(page.curves), results, boxes: rows(page.boxes), costs: rows(page.costs),
    ahead: rows(page.ahead),
  };
  const unpacked = page.pictures.map((picture) => {
    const bytes = Uint8Array.from(atob(picture.data), (c) => c.charCodeAt(0));
    return new Uint16Array(bytes.buffer);
  });
  const chosen = new Map(); // a figure's select or slider: its value
  const choice = (figure, name) => Number(chosen.get(`${figure}.${name}`) ?? 0);

  function labelCells(figure) {
    const g = choice(figure, "group"), group = page.groups[g];
    if (!group.labels) return [];
    return group.order.flatMap((k) => {
      const total = group.labels[k].reduce((a, b) => a + b, 0) || 1;
      return group.labels[k].map((count, c) => ({
        key: keyOf(g, k), name: group.names[k], class: group.classes[c], count,
        share: (100 * count) / total,
      }));
    });
  }
  function sizeRows(figure) {
    const g = choice(figure, "group"), group = page.groups[g];
    return group.train.map((train, k) => ({ key: keyOf(g, k), name: group.names[k], train }))
      .sort((a, b) => b.train - a.train);
  }
  function confusionCells(figure) {
    const { classes, counts } = page.confusion[choice(figure, "method")];
    return counts.flatMap((row, t) => {
      const total = row.reduce((a, b) => a + b, 0) || 1;
      return row.map((count, p) => ({
        true: classes[t], predicted: classes[p], count, share: (100 * count) / total,
      }));
    });
  }
  function pictureCells(figure, method) {
    const versions = pictureOf(method);
    const index = versions[choice(figure, "group")], picture = page.pictures[index];
    const step = stepOf(figure, picture), codes = unpacked[index];
    const { clients, columns, rounds, low, step: size } = picture, cells = [];
    const group = page.groups[picture.group];
    clients.forEach((client, k) => columns.forEach((column, c) => {
      const code = codes[(step * clients.length + k) * columns.length + c];
      if (code !== 65535) cells.push({
        key: keyOf(picture.group, client), name: group.names[client], column, place: k + 1,
        value: low + size * code, round: rounds[step], truth: group.clusters?.[client],
      });
    }));
    return cells;
  }
  const pictureOf = (method) =>
    page.pictures.map((_, i) => i).filter((i) => page.pictures[i].method === method);
  const figureOf = (name) => document.querySelector(`.chart[data-chart="${name}"]`).dataset.figure;
  const stepOf = (figure, picture) =>
    Math.min(Number(chosen.get(`${figure}.step`) ?? Infinity), picture.rounds.length - 1);

  function clientRows(name) {
    if (state.picked === null) return [];
    const [g, k] = state.picked.split(":").map(Number), group = page.groups[g];
    if (name === "clientLabels") {
      return (group.labels ? group.labels[k] : []).map((count, c) => ({ class: group.classes[c], count }));
    }
    return page.clientCurves.filter((curve) => curve.group === g).flatMap((curve) =>
      curve.rounds.map((round, r) => ({ method: labels[curve.method], round, value: curve.values[r][k] }))
        .filter((row) => row.value !== null));
  }
  function dataOf(element) {
    const name = element.dataset.chart, figure = element.dataset.figure;
    if (name === "labels") return { labels: labelCells(figure) };
    if (name === "sizes") return { sizes: sizeRows(figure) };
    if (name === "confusion") return { confusion: confusionCells(figure) };
    if (name.startsWith("picture")) return { cells: pictureCells(figure, Number(name.split("-")[1])) };
    if (name.startsWith("client-")) {
      const data = name === "client-labels" ? "clientLabels" : "clientCurves";
      return { [data]: clientRows(data) };
    }
    return fixed;
  }

  // ---- drawing, in the colours of the theme ----
  async function draw(element) {
    views.get(element)?.finalize();
    const { chart, figure } = element.dataset, data = dataOf(element);
    const spec = structuredClone(specs[chart]);
    const file = chart.startsWith("picture-") ? figure : chart; // a name that says what is shown
    spec.datasets = data;
    for (const param of spec.params) param.value = { ...state, outer: element.clientWidth }[param.name];
    const { view } = await vegaEmbed(element, spec, {
      config: chartTheme(page.look), renderer: "canvas", downloadFileName: file,
      logLevel: vega.Error, // warnings of sizes and of empty data are no concern of readers
      actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
      tooltip: { theme: darkTheme.matches ? "dark" : "light" },
    });
    views.set(element, view);
    element.view = view; // for the browser's console
    const menu = element.querySelector("summary");
    if (menu) menu.setAttribute("aria-label", `Save the chart: ${spec.description}`);
    view.addEventListener("click", (_, item) => item?.datum?.key && pick(item.datum.key));
  }
  async function fill(element) {
    const view = views.get(element);
    if (!view) return;
    for (const [name, values] of Object.entries(dataOf(element))) view.data(name, values);
    await view.runAsync();
  }
  function signal(name) {
    for (const view of views.values()) view.signal(name, state[name]).runAsync();
  }
  const charts = (from = document) => all(".chart", from);
  const inClient = charts(document.getElementById("client"));

  // ---- methods ----
  const rowLabel = (text) => labels.find((label) => text === label || text.startsWith(`${label} (`));
  function show(shown) {
    state.shown = labels.filter((label) => shown.includes(label));
    signal("shown");
    for (const box of all("#methods input")) box.checked = shown.includes(box.value);
    for (const row of all("tbody tr")) {
      const label = rowLabel(row.cells[0].textContent.trim());
      if (label) row.classList.toggle("off", !shown.includes(label));
    }
    for (const table of all("table")) {
      for (const [k, cell] of [...(table.tHead?.rows[0].cells ?? [])].entries()) {
        const label = cell.textContent.trim();
        if (!labels.includes(label)) continue;
        for (const row of table.rows) row.cells[k]?.classList.toggle("off", !shown.includes(label));
      }
    }
    for (const section of all("section")) { // a method's own figures
      if (!section.dataset.method) continue;
      const off = !shown.includes(labels[section.dataset.method]);
      section.classList.toggle("off", off);
      document.querySelector(`#contents a[href="#${section.id}"]`).parentElement.classList.toggle("off", off);
    }
    if (state.picked !== null) pick(state.picked);
  }
  function focus(label) {
    if (state.focus === label) return;
    state.focus = label;
    signal("focus");
  }
  for (const item of all("#methods label")) {
    const box = item.querySelector("input");
    box.addEventListener("change", () => {
      focus(box.checked ? box.value : null);
      show(all("#methods input").filter((one) => one.checked).map((one) => one.value));
    });
    item.addEventListener("pointerenter", () => focus(box.checked ? box.value : null));
    item.addEventListener("pointerleave", () => focus(null));
    box.addEventListener("focus", () => box.matches(":focus-visible") && focus(box.value));
    box.addEventListener("blur", () => focus(null));
  }
  document.getElementById("all-methods").addEventListener("click", () => show(labels));
  document.getElementById("no-methods").addEventListener("click", () => show([]));

  // ---- one client ----
  const groupSelect = document.getElementById("client-group");
  const clientSelect = document.getElementById("client-name");
  function offer(g) {
    const options = page.groups[g].names.map((name, k) => make("option", { value: k, textContent: name }));
    clientSelect.replaceChildren(make("option", { value: "", textContent: "choose a client" }), ...options);
  }
  const format = (value) => value === null || value === undefined ? "–"
    : value.toFixed(page.metric.isPercentage ? 1 : 3);
  function pick(key) {
    state.picked = key;
    signal("picked");
    for (const row of all("tr[data-key]")) row.classList.toggle("picked", row.dataset.key === key);
    const panel = document.getElementById("client-panel");
    panel.hidden = key === null;
    if (key === null) return;
    const [g, k] = key.split(":").map(Number), group = page.groups[g];
    groupSelect.value = g;
    offer(g);
    clientSelect.value = k;
    document.getElementById("client-title").textContent = `Client ${group.names[k]}, ${group.title}`;
    const facts = [["training examples", group.train[k]], ["validation examples", group.validation[k]],
      ["test examples", group.test[k]]];
    if (group.clusters) facts.push(["true cluster", group.clusters[k]]);
    document.getElementById("client-facts").replaceChildren(...facts.flatMap(([name, value]) =>
      [make("dt", { textContent: name }), make("dd", { textContent: value.toLocaleString("en") })]));
    const own = new Map(results.filter((row) => row.key === key).map((row) => [row.method, row.value]));
    const sign = page.metric.higher ? -1 : 1;
    const order = state.shown.filter((label) => own.has(label)).sort((a, b) => sign * (own.get(a) - own.get(b)));
    const best = own.get(order[0]);
    document.getElementById("client-results").replaceChildren(...order.map((label) => make("tr", {}, [
      Object.assign(make("th", { scope: "row", textContent: label })),
      make("td", { textContent: format(own.get(label)), className: own.get(label) === best ? "best" : "" }),
    ])));
    document.getElementById("client-learned").replaceChildren(...learned(g, k));
    document.getElementById("client-labels").hidden = !group.labels;
    for (const element of inClient) if (!element.closest("[hidden]")) draw(element);
  }
  function learned(g, k) { // what methods learned of this client, at the rounds that are shown
    return page.pictures.flatMap((picture, index) => {
      const place = picture.clients.indexOf(k);
      if (picture.group !== g || place < 0 || !state.shown.includes(labels[picture.method])) return [];
      const step = stepOf(figureOf(`picture-${picture.method}`), picture), width = picture.columns.length;
      const start = (step * picture.clients.length + place) * width;
      const values = [...unpacked[index].slice(start, start + width)].map((code) =>
        code === 65535 ? "–" : String(Number((picture.low + picture.step * code).toPrecision(4))));
      const of = picture.column ? ` by ${picture.column}` : "";
      const text = `${labels[picture.method]}, ${picture.valueName}${of} after round ` +
        `${picture.rounds[step]}: `;
      return [make("p", {}, [make("b", { textContent: text }), values.join(", ")])];
    });
  }
  page.groups.forEach((group, g) => groupSelect.append(make("option", { value: g, textContent: group.title })));
  groupSelect.closest("label").hidden = page.groups.length < 2;
  groupSelect.addEventListener("change", () => { offer(Number(groupSelect.value)); pick(null); });
  clientSelect.addEventListener("change", () =>
    pick(clientSelect.value === "" ? null : keyOf(groupSelect.value, clientSelect.value)));
  for (const row of all("tr[data-key]")) {
    const button = make("button", { type: "button", className: "plain", textContent: row.cells[0].textContent });
    button.addEventListener("click", () => {
      pick(row.dataset.key);
      document.getElementById("client").scrollIntoView();
    });
    row.cells[0].replaceChildren(button);
  }
  const search = document.getElementById("client-search");
  search?.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    for (const row of all("tr[data-key]")) {
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
    }
  });

  // ---- selects and sliders of figures ----
  for (const control of all("[data-control]")) {
    const figure = control.dataset.figure, name = `${figure}.${control.dataset.control}`;
    const changed = () => {
      chosen.set(name, control.value);
      if (control.dataset.rounds) {
        const rounds = JSON.parse(control.dataset.rounds);
        const round = rounds[Math.min(Number(control.value), rounds.length - 1)];
        control.nextElementSibling.textContent = round;
        control.setAttribute("aria-valuetext", round);
      }
      for (const element of charts()) if (element.dataset.figure === figure) fill(element);
    };
    control.addEventListener("input", changed);
  }

  // ---- tables ----
  const UNITS = { k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
  function parsed(text) {
    const found = text.replace(/[,★*]/g, "").trim().match(/^([+-]?[\d.]+)(?:±[\d.]+)?\s*([kMGT])?/);
    return found ? Number(found[1]) * (UNITS[found[2]] ?? 1) : null;
  }
  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((head, column) => {
      const button = make("button", { type: "button", className: "plain", textContent: head.textContent });
      button.addEventListener("click", () => {
        const value = (row) => row.cells[column].textContent;
        const rows = [...table.tBodies[0].rows], now = head.getAttribute("aria-sort");
        const isText = column === 0 || rows.every((row) => parsed(value(row)) === null);
        const up = now ? now === "descending" : isText;
        all("thead th", table).forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const compare = (a, b) => {
          const x = parsed(value(a)), y = parsed(value(b));
          if (x === null && y === null) return value(a).localeCompare(value(b), "en", { numeric: true }) * (up ? 1 : -1);
          return x === null ? 1 : y === null ? -1 : up ? x - y : y - x;
        };
        table.tBodies[0].append(...rows.sort(compare));
      });
      head.replaceChildren(button);
    });
  }

  // where a table is wider than its place, its edge fades until it is scrolled to the end
  for (const place of all(".scroll")) {
    const mark = () =>
      place.classList.toggle("more", place.scrollLeft + place.clientWidth < place.scrollWidth - 4);
    place.addEventListener("scroll", mark);
    new ResizeObserver(mark).observe(place);
  }
  if (matchMedia("(max-width: 60rem)").matches) {
    for (const id of ["contents", "methods"]) document.getElementById(id).open = false;
  }

  const drawAll = () => Promise.all(charts().filter((element) => !element.closest("[hidden]")).map(draw));
  darkTheme.addEventListener("change", drawAll);
  offer(0);
  drawAll().then(() => document.documentElement.classList.add("drawn"));
})();
