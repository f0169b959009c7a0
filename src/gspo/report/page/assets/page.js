// The sections in their order: overview, curves, queries, samples, recipes, definitions; and the page's life after that.

const MEASURED = ["reward/mean", "response/mean_tokens"];

function listOf(texts) {
  return element("ul", "", texts.map((text) => element("li", "", text)));
}

function showOverview() {
  const place = document.querySelector("#overview > div");
  byId("written").textContent = `gspo report of ${page.written}`;
  place.replaceChildren(...(page.runs.length === 1 ? overviewOf(page.runs[0]) : comparison()));
}

function overviewOf({ overview }) {
  const tiles = overview.scores.map(([about, value]) => element("div", "", element("dt", "", about), element("dd", "", value)));
  const diagnoses = overview.diagnoses.length ? withAttributes(listOf(overview.diagnoses), { class: "diagnoses" }) : element("p", "", "None.");
  return [
    element("p", "state", overview.state), element("dl", "tiles", tiles), element("h3", "", "Diagnoses"), diagnoses,
    ...(overview.notes.length ? [element("h3", "", "Not read"), listOf(overview.notes)] : []),
    element("h3", "", "What was trained, on what"), ...overview.introduction.map((line) => element("p", "", line)),
    ...(overview.history.length ? [folded("history", "history", listOf(overview.history))] : []),
  ].filter(Boolean);
}

// Of several runs a row each; of arms with seeds the first and the last numbers; and where the recipes differ.
function comparison() {
  const columns = [...new Set(page.runs.flatMap(({ overview }) => overview.scores.map(([about]) => about)))];
  const rows = page.runs.map(({ label, overview }) => {
    const scores = new Map(overview.scores);
    return [label, overview.state, ...columns.map((column) => scores.get(column) || "–"), listOf([...overview.diagnoses, ...overview.notes])];
  });
  const made = [tableOf(["run", "state", ...columns, "diagnoses"], rows)];
  if (arms.some((arm) => arm.runs.length > 1)) {
    const names = [...page.measures.map(([label, name]) => [label, name]), ...MEASURED.map((name) => [name, name])];
    const cells = (arm) => names.map(([, name]) => fromTo(seriesOf(arm, name)));
    const table = tableOf(["arm", "seeds", ...names.map(([label]) => label)], arms.map((arm) => [arm.label, arm.runs.map((run) => run.seed).join(", "), ...cells(arm)]));
    made.push(element("h3", "", "Arms: mean ± standard deviation over their seeds"), table);
  }
  if (arms.length > 1) {
    const table = tableOf(["key", ...arms.map((arm) => arm.label)], page.differences.map(([key, values]) => [element("code", "", key), ...values]));
    made.push(withAttributes(element("h3", "", "Where the recipes differ"), { id: "differences" }), table);
  }
  return made;
}

function fromTo(series) {
  const texts = (series?.means || []).map((mean, place) => (Number.isFinite(mean) ? withSpread(mean, series.deviations[place]) : null)).filter(Boolean);
  return texts.length > 1 ? `${texts[0]} → ${texts.at(-1)}` : texts[0] || "–";
}

function showCharts() {
  const home = byId("charts"), isPhone = matchMedia("(max-width: 600px)").matches;
  const families = Object.entries(CHARTS)
    .map(([family, specs]) => [family, specs.map((spec) => [modelOf(spec), () => modelOf(spec)]).filter(([model]) => model)])
    .filter(([, charts]) => charts.length);
  const shape = JSON.stringify(families.map(([family, charts]) => [family, charts.map(([model]) => model.title)]));
  if (home.shape === shape) return repaintAll(); // the same charts of more steps
  home.shape = shape;
  removePlots(home);
  home.replaceChildren(...families.map(([family, charts], place) => {
    const made = folded(element("h3", "", family), `family ${family}`, element("div", "charts", charts.map(([model, make]) => chartOf(model, make))));
    made.open = remembered(`open family ${family}`) ?? (place === 0 || !isPhone);
    return made;
  }));
  if (!families.length) home.append(element("p", "", "There is no line in metrics.jsonl yet: no step is done."));
  if (page.num_drawn < page.num_steps) {
    home.prepend(element("p", "hint", `Of ${page.num_steps.toLocaleString("en")} steps ${page.num_drawn.toLocaleString("en")}, evenly spread, are drawn; all are in metrics.jsonl.`));
  }
}

function chartOf(model, make) {
  const title = element("h4", "", model.metrics[0] ? linkTo(model.metrics[0], model.title) : model.title);
  const host = element("div");
  placePlot(host, make);
  return element("figure", model.wide ? "chart wide2" : "chart", title, host);
}

// A link to the definition, where there is one.
function linkTo(metric, text) {
  const name = Object.hasOwn(page.definitions.names, metric) ? page.definitions.names[metric] : null;
  return name === null ? text : withAttributes(element("a", "", text), { href: "#metric-" + encodeURIComponent(name) });
}

function showOther() {
  const select = byId("other"), figure = byId("other-chart"), chosen = remembered("other") ?? "";
  const inLists = new Set([...page.lists.values()].flat());
  const names = [...new Set([...page.lists.keys(), ...page.runs.flatMap((run) => Object.keys(run.columns))])].filter((name) => !inLists.has(name)).sort();
  select.replaceChildren(new Option("choose …", ""), ...names.map((name) => new Option(name, name)));
  select.value = names.includes(chosen) ? chosen : "";
  removePlots(figure);
  figure.hidden = !select.value;
  const definition = page.definitions.names[select.value];
  byId("other-definition").replaceChildren(definition && Object.hasOwn(page.definitions.names, select.value) ? marked(page.definitions.texts[definition][0]) : "");
  if (!select.value) return figure.replaceChildren();
  const model = anyModel(select.value);
  if (model) figure.replaceChildren(...chartOf(model, () => anyModel(select.value)).childNodes);
}

// The numbers of the charts without their pictures: a row a step, of the steps in view.
function showTable() {
  const specs = Object.values(CHARTS).flat().filter((spec) => !spec.cold);
  const known = [...page.measures.map(([label, name]) => [label, name]), ...specs.flatMap((spec) => spec.lines.map(([column, words]) => [words, column, spec.scale]))]
    .filter(([, column]) => arms.some((arm) => seriesOf(arm, column)));
  const table = () => {
    const [low, high] = shownRange();
    const rows = arms.flatMap((arm) => {
      const x = xOf(arm), lines = known.map(([, column, scale = 1]) => lineOf(seriesOf(arm, column), {}, scale));
      return arm.steps.map((step, place) => [step, place]).filter(([, place]) => x[place] >= low && x[place] <= high).map(([step, place]) => [
        String(step), ...(arms.length > 1 ? [arm.label] : []),
        ...lines.map((line) => withSpread(line?.y[place], line?.deviations?.[place])),
      ]);
    }).sort((row, next) => row[0] - next[0]);
    const every = Math.ceil(rows.length / 300);
    const names = known.map(([words, column]) => element("span", "", words, element("br"), element("code", "", column)));
    return tableOf(["step", ...(arms.length > 1 ? ["arm"] : []), ...names], rows.filter((_, place) => place % every === 0 || place === rows.length - 1));
  };
  const made = folded("Table of the steps in view", "steps");
  byId("steps").fill = () => { if (made.open) made.replaceChildren(made.firstChild, table()); };
  made.addEventListener("toggle", byId("steps").fill);
  byId("steps").replaceChildren(made);
  byId("steps").fill();
}

function startView() {
  const form = byId("view"), fields = form.elements;
  Object.assign(view, { axis: remembered("axis") || "steps", smoothing: remembered("smoothing") || 1, log: remembered("log") || false, range: remembered("range") || null });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => { event.preventDefault(); zoom(null); });
  form.addEventListener("change", ({ target }) => {
    if (target.name === "from" || target.name === "to") return zoomTyped(fields);
    if (target.name === "axis") view.range = null;
    Object.assign(view, { axis: fields.axis.value, smoothing: Number(fields.smoothing.value), log: fields.log.checked });
    for (const name of ["axis", "smoothing", "log", "range"]) remember(name, view[name]);
    repaintAll();
    tellRange();
  });
  byId("other").addEventListener("change", () => { remember("other", byId("other").value); showOther(); });
}

function zoomTyped(fields) {
  const [low, high] = fullRange(), [from, to] = [fields.from, fields.to].map((field) => (field.value === "" ? null : field.valueAsNumber));
  const last = to === null || to >= high ? null : to;
  if ((from ?? low) < (last ?? high)) zoom(from === null && last === null ? null : [from, last]);
  tellRange();
}

// What the form says is what the charts show.
function tellRange() {
  const fields = byId("view").elements;
  const text = (value) => (value === null ? "" : view.axis === "steps" ? Math.round(value) : +value.toPrecision(4));
  [fields.from.value, fields.to.value] = (view.range || [null, null]).map(text);
  byId("steps").fill?.();
}

function showView() {
  const fields = byId("view").elements, runs = page.runs;
  const axes = [["steps", "steps"], ["tokens", "generated tokens"], ["seconds", "time"]].filter(([name]) => name === "steps" || runs.every((run) => run[name].some((value) => value > 0)));
  fields.axis.replaceChildren(...axes.map(([name, words]) => new Option(words, name)));
  if (!axes.some(([name]) => name === view.axis)) view.axis = "steps";
  [fields.axis.value, fields.smoothing.value, fields.log.checked] = [view.axis, String(view.smoothing), view.log];
  tellRange();
}

function copied(text) {
  const copy = withAttributes(button("copy", () => copyText(text, copy)), { class: "copy" });
  return element("div", "copied", copy, element("pre", "", text));
}

function showRecipes() {
  document.querySelector("#recipe > div").replaceChildren(...page.runs.map((run) => {
    const rows = Object.entries(run.environment);
    return element("article", "", element("h3", "", run.label), element("p", "", "Run it again:"), copied(run.rerun),
      folded("environment", `environment ${run.path}`, rows.length ? tableOf(["environment", ""], rows) : "No environment is recorded."),
      folded("recipe.yaml: every key with its value", `recipe ${run.path}`, copied(run.recipe)));
  }));
}

// Text with `code` in it, as Markdown has it.
function marked(text) {
  return element("span", "", text.split(/`([^`]+)`/).map((part, place) => (place % 2 ? element("code", "", part) : part)));
}

function showDefinitions() {
  const listed = Object.entries(page.definitions.texts).flatMap(([name, [text, healthy]]) => [
    withAttributes(element("dt", "", element("code", "", name)), { id: "metric-" + encodeURIComponent(name) }),
    element("dd", "", marked(text), ...(healthy ? [" ", element("em", "", "Healthy: ", marked(healthy), ".")] : [])),
  ]);
  document.querySelector("#metrics > div").replaceChildren(folded("every metric of this page", "metrics", element("dl", "", listed)));
}

function openDefinition() {
  const target = location.hash.startsWith("#metric-") && byId(location.hash.slice(1));
  if (!target) return;
  target.closest("details").open = true;
  target.scrollIntoView({ block: "center" });
}

// A page that is loaded again stays where it was.
function startScrolling() {
  history.scrollRestoration = "manual";
  const before = performance.getEntriesByType("navigation")[0]?.type === "reload" ? remembered("scroll") : undefined;
  addEventListener("pagehide", () => remember("scroll", scrollY));
  return () => { if (before !== undefined) scrollTo(0, before); };
}

// On paper all charts are there, those of closed families too.
function startPrinting() {
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("#charts > details:not([open])")];
    for (const family of closed) family.open = true;
    repaintAll();
  });
  addEventListener("afterprint", () => { for (const family of closed) family.open = false; });
}

function showAll(data) {
  load(data);
  for (const show of [showOverview, showView, showCharts, showOther, showTable, showRecipes, showDefinitions]) show();
}

function isBusy() {
  return document.hidden || document.activeElement.closest("form") || String(getSelection());
}

// A page of a server asks it for what is new, and redraws what has changed; any other page of a run under way loads itself again.
function keepUp(redraw) {
  if (page.reload_seconds) setInterval(() => { if (!isBusy()) location.reload(); }, page.reload_seconds * 1000);
  if (!page.live) return;
  let last = "";
  const ask = async () => {
    const text = await fetch("data.json", { cache: "no-cache" }).then((answer) => (answer.ok ? answer.text() : null), () => null);
    if (text === null) byId("written").textContent = `The server has ended; this is what there was at ${page.written}.`;
    else await redraw(text === last ? null : JSON.parse(text));
    last = text;
    setTimeout(ask, text === null ? 15000 : 3000);
  };
  setTimeout(ask, 3000);
}

async function start() {
  startTheme();
  startView();
  startPrinting();
  const scrollBack = startScrolling();
  addEventListener("hashchange", openDefinition);
  showAll(JSON.parse(byId("data").textContent));
  const first = document.querySelector("#charts .plot");
  if (first) drawPlot(first);
  await new Promise(requestAnimationFrame);
  document.documentElement.dataset.firstChart = Math.round(performance.now()); // milliseconds
  repaints.push(repaintAll);
  if (document.readyState === "loading") await new Promise((resolve) => addEventListener("DOMContentLoaded", resolve));
  const source = await makeSource();
  const [queries, samples] = ["#queries > div", "#samples > div"].map((place) => document.querySelector(place));
  const showRest = async () => { await showQueries(queries, page, source); await showSamples(samples, page, source); };
  await showRest();
  openDefinition();
  scrollBack();
  keepUp(async (data) => { if (data) showAll(data); await source.refresh(); if (data) await showRest(); });
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds to everything being there
}

start().catch((error) => {
  const fix = typeof DecompressionStream === "undefined" ? " It needs a browser of 2023 or later." : "";
  document.querySelector("main").prepend(element("p", "broken", `This page could not be shown: ${error.message}.${fix}`));
  throw error;
});
