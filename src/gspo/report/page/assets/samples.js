// The samples: which are shown, in a row or side by side, and their cards.

const SAMPLES_AT_ONCE = 1000; // that are looked through before it asks
const CARDS_AT_ONCE = 200; // that are put on the page before it asks
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
let shown = null; // what is chosen: its set, the places still to be looked at, the cards that wait, and counts

function startSamples() {
  choice.set.addEventListener("input", () => { choice.beside.value = source.sets[choice.set.value].beside ?? ""; });
  for (const form of [byId("choice"), byId("filter")]) {
    form.addEventListener("input", drawSamples);
    form.addEventListener("reset", () => setTimeout(drawSamples)); // once its fields are as they were
  }
  byId("more-samples").addEventListener("click", () => showNext(shown));
  fillPlaces();
  choice.beside.value = source.sets[0]?.beside ?? "";
  return drawSamples();
}

// The table of queries leads here.
async function openSamples(set, step, query) {
  [choice.set.value, choice.scope.value, choice.beside.value] = [set.number, "group", set.beside ?? ""];
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
  const set = fillPlaces(), all = chosenPlaces(set), places = all.filter((row) => row.isThere);
  const total = sum(places, "count"), missing = sum(all, "count") - total;
  const filters = Object.entries(FILTERS).filter(([name]) => filter[name].value !== "");
  shown = { set, places, filters, total, missing, looked: 0, matched: 0, isNew: true };
  byId("filter").querySelector("summary").textContent = filters.length ? `Filter (${filters.length} in force)` : "Filter";
  part("coverage").textContent = set.coverage;
  part("legend").replaceChildren(...(choice.colour.value && !isEvaluation ? [legendOf(choice.colour.value)] : []));
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
  const best = (rows, worth) => rows.filter((row) => row.isThere).reduce((top, row) => (worth(row) >= worth(top) ? row : top), {});
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

// What the chosen query got in the set that is shown beside.
const twins = () => source.sets[choice.beside.value]?.byQuery.get(choice.query.value) || [];

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
  const series = [["mean reward", rows.map((row) => row.mean)], ["share right", rows.map((row) => row.rate)]];
  const title = `rewards of ${query}`;
  drawSeries(part("curve"), { title, unit: "reward", x: rows.map((row) => row.step), series });
}

// Look through groups until there is enough to show, or to ask whether to go on.
async function showMore(mine) {
  const { places } = mine, until = mine.looked + SAMPLES_AT_ONCE, made = [];
  while (places.length && mine.looked < until && made.length < CARDS_AT_ONCE && shown === mine) {
    const place = places.shift(), { group, cards } = await groupAt(mine, mine.set, place);
    if (cards.length) made.push(element("div", "group", headOf(group, place)), ...cards);
  }
  showCards(mine, made, "cards");
}

// The same query of two sets or steps, one beside the other.
async function showSides(mine) {
  const twin = twins().find((row) => String(row.step) === choice.beside_step.value), sides = [];
  for (const [set, place] of [[mine.set, mine.places.shift()], [source.sets[choice.beside.value], twin]]) {
    const { group, cards } = place?.isThere ? await groupAt(mine, set, place) : {};
    const head = group ? headOf(group, place) : element("p", "about", "no such sample of this query");
    sides.push(element("div", "side", element("h3", "", set.title), head, cards));
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
  byId("more-samples").hidden = !mine.places.length;
  const all = mine.looked < mine.total ? `${text("looked")} looked through, of ${text("total")} samples` : `${text("total")} samples`;
  const missing = mine.missing ? `; ${text("missing")} are not in this page` : "";
  part("count").textContent = `${text("matched")} of ${all}${missing}`;
}

// A group, and the cards of its responses that pass the filters: one for those that are equal.
async function groupAt(mine, set, place) {
  const group = await source.group(set.number, place.step, place.place), equal = new Map();
  const kept = group.samples.filter((sample) => mine.filters.every(([name, passes]) => passes(filter[name].value, sample, group)));
  mine.looked += group.samples.length;
  mine.matched += kept.length;
  kept.forEach((sample, number) => {
    const { texts, reward, finish_reason: end, failure } = sample;
    const key = filter.folded.checked ? JSON.stringify([texts.join(""), reward, end, failure]) : number;
    equal.set(key, [...(equal.get(key) || []), sample]);
  });
  return { group, cards: [...equal.values()].map((copies) => cardOf(copies, set.kind === "training")) };
}

// Which group it is, its prompt, where the user's words stand out, and what the data has beside it, such as the answer.
function headOf({ query, prompt: [before, words, behind], columns }, { step, judged, passed, mean }) {
  const score = `${passed} of ${judged} right${mean === null ? "" : `, mean reward ${mean.toPrecision(3)}`}`;
  return [
    element("h3", "where", `${isEvaluation ? "" : `step ${step}, `}query ${query}: ${score}`),
    element("pre", { class: "prompt", tabindex: 0 }, before, element("span", "words", words), behind),
    columns ? element("p", "columns", columns) : null,
  ];
}

// The reward, and of several functions what each gave.
function rewardOf(sample) {
  const text = (value) => (value === null ? "none" : value.toPrecision(3)), functions = Object.entries(sample.rewards);
  if (functions.length < 2) return text(sample.reward);
  return `${text(sample.reward)} (${functions.map(([name, value]) => `${name} ${text(value)}`).join(", ")})`;
}

const loggedText = ([name, value]) => `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`;

const FACTS = [
  ["reward", rewardOf],
  ["advantage", (sample) => (sample.reward === null || isEvaluation ? null : signed(sample.advantage))],
  ["sequence ratio s", (sample) => sample.sequence_ratio?.toFixed(5)],
  ["tokens", (sample) => sample.tokens],
  ["ended", (sample) => ({ length: "cut off at the limit", stop: "by itself" })[sample.finish_reason] || sample.finish_reason],
  ["mini-batch", (sample) => sample.mini_batch],
  ["logged", (sample) => Object.entries(sample.extra ?? {}).map(loggedText).join("; ") || null],
  ["sampled after", (sample) => (isEvaluation ? null : `${sample.policy_version} updates`)],
];

function clippingOf({ clipped, reward, mini_batch: trained, sequence_ratio: ratio }) {
  if (clipped > 0) return `clipped: no gradient from ${clipped === 1 ? "it" : `${Math.round(100 * clipped)} % of its tokens`}`;
  return clipped === null && ratio === null && trained === null ? `not trained: ${reward === null ? "no reward" : "advantage 0"}` : null;
}

// Of equal responses, in the colours of the one that has changed most.
function cardOf(copies, isTraining) {
  const changeOf = ({ sequence_ratio: ratio }) => Math.abs(Math.log(ratio ?? 1));
  const lead = copies.reduce((most, copy) => (changeOf(copy) > changeOf(most) ? copy : most));
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
