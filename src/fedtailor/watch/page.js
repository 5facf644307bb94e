// Asks once a second how the run stands, and shows what is new.
"use strict";
(() => {
  const PAUSE = 1000; // milliseconds
  const get = (id) => document.getElementById(id);
  const make = (tag, fields = {}, children = []) => {
    const element = Object.assign(document.createElement(tag), fields);
    element.append(...children);
    return element;
  };
  const chosen = { off: new Set(), focus: null };
  const views = new Map(); // a chart's element: its Vega view
  let state = null, drawn = "", heard = null;

  // ---- data: seeds become means ----
  function byMethod(pick) {
    const found = new Map();
    for (const trial of state.trials) {
      for (const [round, value] of pick(trial)) {
        const key = JSON.stringify([trial.method, round]);
        if (!found.has(key)) found.set(key, { method: trial.method, round, values: [] });
        found.get(key).values.push(value);
      }
    }
    return [...found.values()].sort((a, b) => a.round - b.round).map(({ values, ...row }) => {
      const value = values.reduce((a, b) => a + b, 0) / values.length;
      const squares = values.reduce((a, b) => a + (b - value) ** 2, 0);
      return { ...row, value, std: values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0 };
    });
  }
  function rowsOf(name) {
    if (name === "losses") return byMethod((trial) => trial.losses);
    const isBest = (row) => state.trials.filter((trial) =>
      trial.method === row.method && trial.best?.round === row.round).length;
    return byMethod((trial) => trial.curve).map((row) => ({
      ...row, split: "validation", reported: isBest(row),
      value: state.factor * row.value, std: state.factor * row.std,
    }));
  }

  // ---- charts ----
  const shown = () => state.labels.filter((label) => !chosen.off.has(label));
  const charts = () => [...document.querySelectorAll(".chart")];
  async function draw(element) {
    const name = element.dataset.chart, spec = structuredClone(state.specs[name]);
    views.get(element)?.finalize();
    spec.datasets = { [name]: rowsOf(name) };
    const values = { shown: shown(), outer: element.clientWidth };
    for (const param of spec.params) param.value = values[param.name] ?? null;
    const { view } = await vegaEmbed(element, spec, {
      config: chartTheme(state.look), renderer: "canvas", logLevel: vega.Error, actions: false,
      tooltip: { theme: darkTheme.matches ? "dark" : "light" },
    });
    views.set(element, view);
    element.view = view; // for the browser's console
  }
  async function fill(element) {
    const view = views.get(element);
    view?.data(element.dataset.chart, rowsOf(element.dataset.chart));
    await view?.runAsync();
  }
  async function showCurves() {
    get("curves").hidden = !state.trials.some((trial) => trial.losses.length);
    if (get("curves").hidden) return;
    const specs = JSON.stringify(state.specs);
    if (specs !== drawn) showMethods();
    await Promise.all(charts().map(specs === drawn ? fill : draw));
    drawn = specs;
  }
  function signal(name, value) {
    for (const view of views.values()) view.signal(name, value).runAsync();
  }
  function showMethods() {
    get("methods").replaceChildren(get("methods").firstElementChild, ...state.labels.map((label, k) => {
      const box = make("input", { type: "checkbox", value: label, checked: !chosen.off.has(label) });
      box.addEventListener("change", () => {
        chosen.off[box.checked ? "delete" : "add"](label);
        signal("shown", shown());
      });
      const dash = state.dashes[(k + Math.floor(k / 12)) % state.dashes.length].join(" ");
      const key = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      const looks = { x1: 0, y1: 5, x2: 26, y2: 5, stroke: `var(--m${k % 12})`, "stroke-width": 3,
        "stroke-dasharray": dash };
      for (const [name, value] of Object.entries(looks)) line.setAttribute(name, value);
      for (const [name, value] of Object.entries({ width: 26, height: 10, "aria-hidden": true })) {
        key.setAttribute(name, value);
      }
      key.append(line);
      const item = make("label", {}, [box, key, make("span", { textContent: label })]);
      item.addEventListener("pointerenter", () => signal("focus", label));
      item.addEventListener("pointerleave", () => signal("focus", null));
      box.addEventListener("focus", () => box.matches(":focus-visible") && signal("focus", label));
      box.addEventListener("blur", () => signal("focus", null));
      return item;
    }));
  }

  // ---- words and numbers ----
  const score = (one) => (one === null ? "–" : (state.factor * one.value).toFixed(state.digits));
  const fixed = (value, digits) => (value === null ? "–" : value.toFixed(digits));
  function size(bytes) {
    let power = 0;
    for (; bytes >= 999.5 && power < 4; power += 1) bytes /= 1000;
    return `${Number(bytes.toPrecision(3))} ${["", "k", "M", "G", "T"][power]}B`;
  }
  function showTable() {
    get("trials").hidden = state.trials.length === 0;
    get("measure").textContent = `Mean ${state.measure} over clients`;
    const hasRefused = state.trials.some((trial) => trial.refused);
    get("refused-head").hidden = !hasRefused;
    document.querySelector("tbody").replaceChildren(...state.trials.map((trial) => {
      const pace = fixed(trial.seconds_a_round, trial.seconds_a_round >= 10 ? 0 : 1);
      const cells = [
        trial.seed, `${trial.round} of ${trial.rounds}`, score(trial.latest), score(trial.best),
        trial.best?.round ?? "–", trial.state, score(trial.latest_global), fixed(trial.train_loss, 3), pace,
        trial.round ? size(trial.bytes) : "–", ...(hasRefused ? [trial.refused] : []),
      ].map((text) => make("td", { textContent: text }));
      cells[5].className = trial.state;
      return make("tr", {}, [make("th", { scope: "row", textContent: trial.method }), ...cells]);
    }));
    const reasons = state.trials.filter((trial) => trial.reason);
    get("reasons").replaceChildren(...reasons.map((trial) =>
      make("p", { textContent: `${trial.method}, seed ${trial.seed}: ${trial.reason}` })));
    get("refused").hidden = !hasRefused;
    get("refused").querySelector("ul").replaceChildren(...state.trials.flatMap((trial) =>
      trial.lately.map((text) => make("li", { textContent: `${trial.method}, seed ${trial.seed}: ${text}` }))));
  }
  function showSamples() {
    const trials = state.trials.filter((trial) => trial.samples.length);
    get("samples").hidden = trials.length === 0;
    const box = (name, text) => make("div", {}, [
      make("p", { className: "soft", textContent: name }), make("p", { textContent: text || "(nothing)" })]);
    get("samples").querySelector("div").replaceChildren(...trials.flatMap((trial) => [
      make("h3", { textContent: `${trial.method}, seed ${trial.seed}, after round ${trial.written}` }),
      ...trial.samples.flatMap((one) => [
        make("blockquote", { textContent: one.prompt }),
        make("div", { className: "said" }, [
          ...one.answers.map(([name, text]) => box(name, text)), box("the right answer", one.reference)]),
      ])]));
  }
  function showLog() {
    const log = get("log").querySelector("pre");
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    get("log").hidden = state.log.length === 0;
    log.textContent = state.log.join("\n");
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
  async function show() {
    document.title = `${state.name}: ${state.state} · fedtailor`;
    get("name").textContent = state.name;
    get("place").textContent = state.run;
    const note = `${state.name} ${state.note}`;
    if (get("note").textContent !== note) get("note").textContent = note;
    get("bar").max = Math.max(1, state.rounds);
    get("bar").value = state.round;
    get("report").hidden = !(state.isOver && state.report);
    showTable();
    showSamples();
    showLog();
    await showCurves();
    document.documentElement.dataset.version = state.version;
  }

  // ---- asking ----
  async function news() {
    try {
      return await (await fetch(`state?known=${state?.version ?? 0}`, { cache: "no-store" })).json();
    } catch {
      const since = heard ? ` This is from ${heard.toLocaleTimeString("en-GB")}.` : "";
      return { error: `fedtailor watch does not answer.${since}` };
    }
  }
  async function ask() {
    const found = await news();
    get("trouble").hidden = !found.error;
    get("trouble").textContent = found.error ?? "";
    if (found.error) return;
    heard = new Date();
    get("share").textContent = found.share;
    if (found.trials) {
      state = found;
      await show();
    }
  }
  let timer = null;
  async function follow() {
    timer = null;
    await ask();
    timer = setTimeout(follow, PAUSE);
  }
  document.addEventListener("visibilitychange", () => { // browsers slow the timers of hidden pages
    if (document.hidden || timer === null) return;
    clearTimeout(timer);
    follow();
  });
  darkTheme.addEventListener("change", () => state && !get("curves").hidden && charts().forEach(draw));
  follow();
})();
