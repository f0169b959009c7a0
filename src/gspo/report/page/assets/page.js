// The sections in their order: overview, curves, recipes, definitions; and the page's life after that.

const homeOf = (section) => document.querySelector(`#${section} > div`);

function showOverview() {
  byId("written").textContent = `gspo report of ${page.written}`;
  renew(homeOf("overview"), page.runs.length === 1 ? overviewOf(page.runs[0]) : comparison());
}

function overviewOf({ state, diagnoses, notes, introduction, history, time }) {
  const scores = [...measured(arms[0]), ["time", time]].filter(([, text]) => text !== "–");
  const tiles = scores.map(([words, text]) => element("div", "", element("dt", "", words), element("dd", "", text)));
  return [
    element("p", "state", state), element("dl", "tiles", tiles),
    element("h3", "", "Diagnoses"), diagnoses.length ? listOf(diagnoses, "diagnoses") : element("p", "", "None."),
    ...(notes.length ? [element("h3", "", "Not read"), listOf(notes)] : []),
    element("h3", "", "What was trained, on what"), ...introduction.map((line) => element("p", "", line)),
    folded("history", tableOf(["time", "event", "how", "step", "step of the cold start", "why"], history)),
  ];
}

// A row for each run, and for each arm; and where the recipes differ.
function comparison() {
  const runs = page.runs.map((run) => [run.label, run.time, run.state, listOf([...run.diagnoses, ...run.notes])]);
  const rows = arms.map((arm) => [arm.label, arm.runs.map((run) => run.seed).join(", "), ...measured(arm).map(([, text]) => text)]);
  const keys = page.differences.map(([key, values]) => [element("code", "", key), ...values]);
  return [
    tableOf(["run", "time", "state", "diagnoses"], runs),
    element("h3", "", "Arms: first and last numbers, mean ± standard deviation over their seeds; of one seed ± standard error"),
    tableOf(["arm", "seeds", ...measured(arms[0]).map(([words]) => words)], rows),
    ...(keys.length ? [element("h3", "", "Where the recipes differ"), tableOf(["key", ...arms.map((arm) => arm.label)], keys)] : []),
  ];
}

// Scores in words: the first → the last one, with what they are uncertain by; reward and length as the terminal has them.
function measured(arm) {
  const scores = page.measures.map(([name, words, error]) => {
    const { x = [], y = [], deviations } = pointsOf(arm, name, error, { x: arm.steps }) || {};
    const [first, last] = [0, y.length - 1].map((place) => withSpread(y[place], deviations?.[place]));
    return [words, y.length === 1 ? `${first} after step ${x[0]}` : y.length ? `${first} → ${last}` : "–"];
  });
  const means = Object.keys(arm.runs[0].means).map((words) => {
    const [first, last] = [0, 1].map((end) => arm.runs.map((run) => run.means[words][end]).filter(Number.isFinite));
    const texts = [first, last].map((values) => withSpread(meanOf(values), deviationOf(values)));
    return [`${words}, means of the first → last few steps`, first.length ? texts.join(" → ") : "–"];
  });
  return [...scores, ...means];
}

function showCharts() {
  const home = byId("charts"), isPhone = matchMedia("(max-width: 600px)").matches;
  const families = Object.entries(chartsByFamily()).map(([family, specs]) => [family, specs.filter(modelOf)]).filter(([, specs]) => specs.length);
  const shape = families.flat(2).map((part) => part.title || part).join();
  if (home.shape === shape) return; // the same charts of more steps
  home.shape = shape;
  destroyPlots(home);
  renew(home, families.map(([family, specs], place) => {
    const charts = specs.map((spec) => element("figure", spec.wide ? "chart wide2" : "chart", chartOf(() => modelOf(spec))));
    const made = folded(element("h3", "", family), element("div", "charts", charts));
    made.open = place === 0 || !isPhone;
    return made;
  }));
  if (!families.length) home.append(element("p", "", "There is no line in metrics.jsonl yet: no step is done."));
}

const idOf = (metric) => "metric-" + encodeURIComponent(metric);

// Its title, which leads to the metric's definition where there is one, and the place where it is drawn.
function chartOf(make) {
  const { title, metric } = make(), name = page.definitions.get(metric)?.[0], host = element("div", "");
  placePlot(host, make);
  return [element("h4", "", name ? element("a", { href: "#" + idOf(name) }, title) : title), host];
}

function showOther() {
  const select = byId("other"), figure = byId("other-chart");
  const names = new Set(page.runs.flatMap((run) => Object.keys(run.columns)));
  fill(select, [["", "choose …"], ...[...names].sort().map((name) => [name, name])], select.value);
  const metric = select.value;
  if (figure.metric === metric) return;
  figure.metric = metric;
  destroyPlots(figure);
  figure.hidden = !metric;
  byId("other-definition").replaceChildren(marked(page.definitions.get(metric)?.[1] || ""));
  figure.replaceChildren(...(metric ? chartOf(() => anyModel(metric)) : []));
}

// An x axis can be chosen that all runs have numbers of.
function showAxes() {
  for (const option of view.axis.options) {
    option.hidden = option.value !== "steps" && !page.runs.every((run) => run[option.value].some((value) => value > 0));
  }
}

function showRecipes() {
  renew(homeOf("recipe"), page.runs.map((run) => element("article", "",
    element("h3", "", run.label),
    folded("environment", tableOf(["environment", ""], Object.entries(run.environment))),
    folded("recipe.yaml: every key with its value", element("pre", "again", run.recipe)))));
}

// Text with `code` in it, as Markdown has it.
const marked = (text) =>
  element("span", "", text.split(/`([^`]+)`/).map((part, place) => (place % 2 ? element("code", "", part) : part)));

function showDefinitions() {
  const byName = new Map([...page.definitions.values()].map(([name, ...texts]) => [name, texts]));
  const listed = [...byName].flatMap(([name, [text, healthy]]) => [
    element("dt", { id: idOf(name) }, element("code", "", name)),
    element("dd", "", marked(text), healthy ? [" ", element("em", "", "Healthy: ", marked(healthy), ".")] : []),
  ]);
  renew(homeOf("metrics"), element("dl", "", listed));
}

function showAll(data) {
  load(data);
  for (const show of [showOverview, showAxes, showCharts, showOther, showRecipes, showDefinitions, repaintAll]) show();
}

function startForms() {
  const form = byId("view"), changed = () => { repaintAll(); showRange(); };
  form.addEventListener("reset", () => setTimeout(changed)); // once its fields are as they were
  form.addEventListener("change", ({ target }) => {
    if (target === view.axis) view.from.value = view.to.value = "";
    changed();
  });
  byId("other").addEventListener("change", showOther);
}

// A page of a server asks it for what is new, and redraws what has changed.
async function keepUp(last = "") {
  try {
    const text = await ask("data.json");
    if (text !== last) showAll(JSON.parse(text));
    if (await source.refresh()) { drawQueries(); await refreshSamples(); }
    setTimeout(keepUp, 3000, text);
  } catch (error) {
    byId("written").textContent = `This is what there was at ${page.written}: ${error.message}.`;
    setTimeout(keepUp, 15000); // then all of it is drawn again
  }
}

async function start() {
  const { dataset } = document.documentElement, data = JSON.parse(byId("data").textContent);
  addEventListener("submit", (event) => event.preventDefault());
  startTheme();
  if (isEvaluation) page = data;
  else {
    startForms();
    showAll(data);
    const first = document.querySelector("#charts .plot");
    if (first) drawPlot(first);
    await new Promise(requestAnimationFrame);
    dataset.firstChart = Math.round(performance.now()); // milliseconds
  }
  if (document.readyState === "loading") await new Promise((resolve) => addEventListener("DOMContentLoaded", resolve));
  const carried = JSON.parse(byId("samples-data").textContent);
  source = carried.live ? servedSource() : carriedSource(carried);
  await source.refresh();
  if (isEvaluation) showEvaluation();
  byId("which").addEventListener("input", drawQueries);
  drawQueries();
  await startSamples();
  if (carried.live) setTimeout(keepUp, 3000);
  dataset.ready = Math.round(performance.now()); // milliseconds to everything being there
}

start().catch((error) => {
  const fix = typeof DecompressionStream === "undefined" ? " It needs a browser of 2023 or later." : "";
  document.querySelector("main").prepend(element("p", "broken", `This page could not be shown: ${error.message}.${fix}`));
  throw error;
});
