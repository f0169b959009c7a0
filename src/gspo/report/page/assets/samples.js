// The samples: which are shown, in a row or side by side, and their cards.

const TOKENS_AT_ONCE = 20000; // that are put on the page before it asks
const SAMPLES_AT_ONCE = 4000; // that are looked through before it asks
const VERDICTS = { true: ["right", "✓ right"], false: ["wrong", "✗ wrong"], null: ["unscored", "– not judged"] };
const FILTERS = { // by the name of the field: whether a sample passes
  reward_low: (value, { reward }) => reward !== null && reward >= Number(value),
  reward_high: (value, { reward }) => reward !== null && reward <= Number(value),
  answer: (value, { passed }) => value === VERDICTS[passed][0],
  clipped: (value, { clipped }) => value === (clipped === null ? "untrained" : clipped > 0 ? "yes" : "no"),
  truncated: (value, sample) => value === (sample.finish_reason === "length" ? "yes" : "no"),
  text: (value, { texts }, { prompt }) => `${texts.join("")}\n${prompt.join("")}`.toLowerCase().includes(value.toLowerCase()),
};
const choice = byId("choice").elements, filter = byId("filter").elements;
const part = (name) => document.querySelector("#samples ." + name);
let shown = null; // what is chosen: its set, the places still to be looked at, the responses that wait, and counts

function startSamples() {
  for (const form of [byId("choice"), byId("filter")]) {
    form.addEventListener("input", drawSamples);
    form.addEventListener("reset", () => setTimeout(drawSamples)); // once its fields are as they were
  }
  byId("more-samples").addEventListener("click", () => showNext(shown));
  return drawSamples();
}

// The table of queries leads here.
async function openSamples(set, step, query) {
  [choice.set.value, choice.scope.value] = [set, "group"];
  fillPlaces(step, query);
  await drawSamples();
  byId("samples").scrollIntoView();
  choice.query.focus({ preventScroll: true });
}

// When more has come in the lists have it; what somebody reads stays.
function refreshSamples() {
  if (!shown.total) return drawSamples();
  part("coverage").textContent = fillPlaces().coverage;
}

async function drawSamples() {
  const set = fillPlaces(), all = chosenPlaces(set), places = all.filter((row) => row.place !== null);
  const total = sum(places, "count"), missing = sum(all, "count") - total;
  const filters = Object.entries(FILTERS).filter(([name]) => filter[name].value !== "");
  shown = { set, places, filters, total, missing, waiting: [], looked: 0, matched: 0, isNew: true };
  byId("filter").querySelector("summary").textContent = filters.length ? `Filter (${filters.length} in force)` : "Filter";
  part("coverage").textContent = set.coverage;
  part("legend").replaceChildren(...(choice.colour.value ? [legendOf(choice.colour.value)] : []));
  drawCurve(set);
  part("cards").ariaBusy = true;
  await showNext(shown);
}

async function showNext(mine) {
  const isBeside = choice.scope.value === "group" && choice.beside.value !== "";
  const showFailure = (error) => showCards(mine, [element("p", "failure", `These samples could not be read: ${error.message}`)], "cards");
  await (isBeside ? showSides(mine) : showMore(mine)).catch(showFailure);
}

// Fill the lists of steps and queries with what the set has, and keep what was chosen; the set.
function fillPlaces(step = choice.step.value, query = choice.query.value) {
  const scope = choice.scope.value, titles = source.sets.map((set) => [set.number, set.title]);
  fill(choice.set, titles);
  fill(choice.beside, [["", "nothing"], ...titles]);
  const set = source.sets[choice.set.value], steps = [...set.bySteps.keys()];
  const best = (rows, worth) => rows.filter((row) => row.place !== null).reduce((top, row) => (worth(row) >= worth(top) ? row : top), {});
  const lastGood = best([...set.bySteps.values()].flat(), ({ interest = -1 }) => Math.min(interest, 2));
  fill(choice.step, steps.map((number) => [number, number]), step, lastGood.step ?? steps.at(-1));
  const rows = scope === "query" ? set.table : set.bySteps.get(Number(choice.step.value)) || [];
  const textOf = ({ query, mean }) => `${query} (${mean === null ? "no reward" : `reward ${mean.toFixed(2)}`})`;
  fill(choice.query, rows.map((row) => [row.query, textOf(row)]), query, best([...rows].reverse(), ({ interest = -1 }) => interest).query);
  const there = twins().map((row) => [row.step, row.step]);
  fill(choice.beside_step, there);
  Object.assign(byId("choice").dataset, { scope, sets: source.sets.length, twins: there.length }); // the style hides by them
  return set;
}

function fill(select, options, wanted = select.value, otherwise = options[0]?.[0]) {
  select.length = options.length; // in place, so that a list that is open stays
  options.forEach(([value, text], place) => Object.assign(select.options[place], { value, text }));
  select.value = wanted;
  if (select.selectedIndex < 0) select.value = otherwise ?? "";
}

// What the chosen query got in the set that is shown beside.
function twins() {
  return source.sets[choice.beside.value]?.byQuery.get(choice.query.value) || [];
}

function chosenPlaces(set) {
  const scope = choice.scope.value, query = choice.query.value;
  if (scope === "run") return [...set.bySteps.values()].flat();
  if (scope === "query") return [...(set.byQuery.get(query) || [])];
  return (set.bySteps.get(Number(choice.step.value)) || []).filter((row) => scope === "step" || row.query === query);
}

// How the rewards of the query changed over the steps that have it.
function drawCurve(set) {
  const query = choice.query.value, rows = (["group", "query"].includes(choice.scope.value) && set.byQuery.get(query)) || [];
  part("curve").hidden = rows.length < 2;
  if (rows.length < 2) return;
  const series = { "mean reward": rows.map((row) => row.mean), "share right": rows.map((row) => row.passed / row.count) };
  const title = `rewards of ${query}`;
  drawSeries(part("curve"), { title, unit: "reward", x: rows.map((row) => row.step), series });
}

// Look through groups until there is enough to show, or to ask whether to go on.
async function showMore(mine) {
  const { places, waiting } = mine, until = mine.looked + SAMPLES_AT_ONCE, cards = [];
  const isMore = () => waiting.length || (places.length && mine.looked < until && shown === mine);
  for (let tokens = 0; tokens < TOKENS_AT_ONCE && isMore();) {
    if (!waiting.length) waiting.push(...await entriesAt(mine, mine.set, places.shift()));
    for (; waiting.length && tokens < TOKENS_AT_ONCE; tokens += waiting.shift().tokens) {
      if (waiting[0].group !== mine.group) cards.push(element("div", "group", headOf(waiting[0])));
      cards.push(cardOf(waiting[0]));
      mine.group = waiting[0].group;
    }
  }
  showCards(mine, cards, "cards");
}

// The same query of two sets or steps, one beside the other.
async function showSides(mine) {
  const twin = twins().find((row) => String(row.step) === choice.beside_step.value), sides = [];
  for (const [set, place] of [[mine.set, mine.places.shift()], [source.sets[choice.beside.value], twin]]) {
    const entries = place && place.place !== null ? await entriesAt(mine, set, place) : [];
    const head = entries.length ? headOf(entries[0]) : element("p", "about", "no such sample of this query");
    sides.push(element("div", "side", element("h3", "", set.title), head, entries.map(cardOf)));
  }
  mine.total = mine.looked;
  showCards(mine, sides, "cards sides");
}

function showCards(mine, cards, className) {
  if (shown !== mine) return; // another choice was made meanwhile
  const home = part("cards"), text = (name) => mine[name].toLocaleString("en");
  if (mine.isNew) home.replaceChildren();
  mine.isNew = false;
  home.append(...cards);
  home.className = className;
  home.ariaBusy = null;
  byId("more-samples").hidden = !mine.waiting.length && !mine.places.length;
  const all = mine.looked < mine.total ? `${text("looked")} looked through, of ${text("total")} samples` : `${text("total")} samples`;
  const missing = mine.missing ? `; ${text("missing")} are not in this page: gspo view shows them` : "";
  part("count").textContent = `${text("matched")} of ${all}${missing}`;
}

// The responses of a group that pass the filters: one entry for those that are equal.
async function entriesAt(mine, set, place) {
  const group = await source.group(set.number, place.step, place.place), equal = new Map();
  const kept = group.samples.filter((sample) => mine.filters.every(([name, passes]) => passes(filter[name].value, sample, group)));
  mine.looked += place.count;
  mine.matched += kept.length;
  kept.forEach((sample, number) => {
    const { texts, reward, finish_reason: end, failure } = sample;
    const key = filter.folded.checked ? JSON.stringify([texts.join(""), reward, end, failure]) : number;
    equal.set(key, [...(equal.get(key) || []), sample]);
  });
  return [...equal.values()].map((copies) => {
    const changeOf = ({ sequence_ratio: ratio }) => Math.abs(Math.log(ratio ?? 1));
    const lead = copies.reduce((most, copy) => (changeOf(copy) > changeOf(most) ? copy : most)); // its colours have most to show
    return { group, copies, lead, place, isTraining: set.kind === "training", tokens: lead.tokens + 20 };
  });
}

// Which group it is, its prompt, where the user's words stand out, and what the data has beside it, such as the answer.
function headOf({ group, place }) {
  const [before, words, behind] = group.prompt;
  const score = `${place.passed} of ${place.count} right${place.mean === null ? "" : `, mean reward ${place.mean.toPrecision(3)}`}`;
  return [
    element("h3", "where", `step ${place.step}, query ${group.query}: ${score}`),
    element("pre", { class: "prompt", tabindex: 0 }, before, element("span", "words", words), behind),
    group.columns ? element("p", "columns", group.columns) : null,
  ];
}

// The reward, and of several functions what each gave.
function rewardOf(sample) {
  const text = (value) => (value === null ? "none" : value.toPrecision(3)), functions = Object.entries(sample.rewards);
  if (functions.length < 2) return text(sample.reward);
  return `${text(sample.reward)} (${functions.map(([name, value]) => `${name} ${text(value)}`).join(", ")})`;
}

const FACTS = [
  ["reward", rewardOf],
  ["advantage", (sample) => (sample.reward === null || sample.advantage === null ? null : signed(sample.advantage))],
  ["sequence ratio s", (sample) => sample.sequence_ratio?.toFixed(5)],
  ["tokens", (sample) => sample.tokens],
  ["ended", (sample) => ({ length: "cut off at the limit", stop: "by itself" })[sample.finish_reason] || sample.finish_reason],
  ["mini-batch", (sample) => sample.mini_batch],
  ["logged", (sample) => Object.entries(sample.extra ?? {}).map(([name, value]) => `${name}: ${value}`).join("; ") || null],
  ["sampled after", (sample) => (sample.policy_version === null ? null : `${sample.policy_version} updates`)],
];

function clippingOf({ clipped, reward, mini_batch: trained, sequence_ratio: ratio }) {
  if (clipped > 0) return `clipped: no gradient from ${clipped === 1 ? "it" : `${Math.round(100 * clipped)} % of its tokens`}`;
  return clipped === null && ratio === null && trained === null ? `not trained: ${reward === null ? "no reward" : "advantage 0"}` : null;
}

function cardOf({ copies, lead, isTraining }) {
  const [kind, verdict] = VERDICTS[lead.passed];
  const distinct = (of) => [...new Set(copies.map(of))].filter((value) => value !== null && value !== undefined);
  const notes = [...(copies.length > 1 ? [`× ${copies.length} equal responses`] : []), ...(isTraining ? distinct(clippingOf) : [])];
  const facts = FACTS.map(([name, of]) => [name, distinct(of)]).filter(([, values]) => values.length).map(([name, values]) =>
    element("div", "", element("dt", "", name),
      element("dd", "", values.slice(0, 4).join(", ") + (values.length > 4 ? ", …" : ""))));
  return element("article", `card ${kind}`,
    element("div", "verdicts", element("strong", `verdict ${kind}`, verdict), notes.map((note) => element("span", "note", note))),
    element("dl", "facts", facts),
    lead.failure ? element("p", "failure", lead.failure) : null,
    colouredText(lead, choice.colour.value, isTraining));
}
