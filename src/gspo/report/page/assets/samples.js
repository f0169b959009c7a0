// The samples: which are shown, in a row or side by side, and their cards.

const TOKENS_AT_ONCE = 20000; // that are put on the page before it asks
const SAMPLES_AT_ONCE = 4000; // that are looked through before it asks
const NEIGHBOURS = 7; // steps with a query that are named before and after the one shown
const VERDICTS = { true: ["right", "✓ right"], false: ["wrong", "✗ wrong"], null: ["unscored", "– not judged"] };
const YES_NO = [["", "any"], ["yes", "yes"], ["no", "no"]];
const SCOPES = [["group", "one query"], ["query", "one query in all steps"], ["step", "one step"], ["run", "all steps"]];
const COLOURS = [["ratio", "log ratio"], ["advantage", "advantage"], ["", "nothing"]];
const ORDERS = {
  reward: (sample) => -(sample.reward ?? -Infinity), lowest: (sample) => sample.reward ?? Infinity,
  ratio: (sample) => -Math.abs(Math.log(sample.sequence_ratio ?? 1)), tokens: (sample) => -sample.tokens,
};
const FILTERS = [ // [name, label, type or choices, whether a sample passes]
  ["reward_low", "reward from", "number", (value, { reward }) => reward !== null && reward >= Number(value)],
  ["reward_high", "to", "number", (value, { reward }) => reward !== null && reward <= Number(value)],
  ["answer", "answer", [["", "any"], ["right", "right"], ["wrong", "wrong"], ["unscored", "not judged"]], (value, { passed }) => value === VERDICTS[passed][0]],
  ["clipped", "clipped", [...YES_NO, ["untrained", "not trained"]], (value, { clipped }) => value === (clipped === null ? "untrained" : clipped > 0 ? "yes" : "no")],
  ["truncated", "cut off", YES_NO, (value, sample) => value === (sample.finish_reason === "length" ? "yes" : "no")],
  ["tokens_low", "tokens from", "number", (value, { tokens }) => tokens >= Number(value)],
  ["tokens_high", "to", "number", (value, { tokens }) => tokens <= Number(value)],
  ["text", "text", "search", (value, { completion }, { prompt }) => `${completion}\n${prompt}`.toLowerCase().includes(value.toLowerCase())],
];
let openSamples = () => {}; // of a query: the table of queries calls it

function showSamples(root, data, source) {
  if (root.firstChild) return;
  const form = samplesForm(source), fields = form.elements, search = { source, fields, number: 0 };
  const tell = (error) => show(search, [element("p", "failure", `These samples could not be read: ${error.message}`)], "cards");
  search.more = button("show more", () => showMore(search).catch(tell));
  for (const name of ["curve", "steps", "legend", "count", "cards", "told"]) search[name] = element("div", name);
  root.append(form, search.curve, search.steps, search.legend, search.count, search.cards, search.more, search.told);
  search.draw = async () => {
    const set = fillPlaces(source, fields);
    remember("samples", [...fields].map((field) => (field.type === "checkbox" ? field.checked : field.value)));
    const active = FILTERS.filter(([name]) => fields[name].value !== "").length;
    form.querySelector("summary").textContent = active ? `Filter and order (${active} in force)` : "Filter and order";
    search.told.replaceChildren(element("p", "about", set.told));
    search.legend.replaceChildren(...(fields.colour.value ? [legendOf(fields.colour.value)] : []));
    const all = placesOf(set, fields), places = all.filter((row) => row.place !== null), total = sum(places, "count");
    Object.assign(search, { set, places, total, missing: sum(all, "count") - total, waiting: [], looked: 0, matched: 0, number: search.number + 1, isNew: true });
    showSteps(search);
    search.cards.setAttribute("aria-busy", "true");
    await (fields.scope.value === "group" && fields.beside.value !== "" ? showSides(search) : showMore(search)).catch(tell);
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", search.draw);
  form.addEventListener("reset", (event) => { event.preventDefault(); for (const name of [...FILTERS.map(([name]) => name), "order"]) fields[name].value = ""; search.draw(); });
  for (const [name, by] of [["before", -1], ["after", 1]]) fields[name].addEventListener("click", () => { fields.step.selectedIndex = Math.max(0, Math.min(fields.step.length - 1, fields.step.selectedIndex + by)); search.draw(); });
  openSamples = async ({ set, step, query }) => {
    fields.set.value = set;
    fields.scope.value = "group";
    fillPlaces(source, fields, step, query);
    await search.draw();
    root.closest("section").scrollIntoView();
    fields.query.focus({ preventScroll: true });
  };
  source.changed.push(() => (search.total ? search.told.replaceChildren(element("p", "about", fillPlaces(source, fields).told)) : search.draw()));
  (remembered("samples") || []).forEach((value, place) => {
    const field = fields[place];
    if (field?.type === "checkbox") field.checked = value;
    else if (field && field.type !== "submit") field.value = value;
    if (["set", "scope", "step", "query", "beside"].includes(field?.name)) fillPlaces(source, fields);
  });
  return search.draw();
}

function samplesForm(source) {
  const sets = source.sets.map((set) => [set.number, set.title]), folded = field("folded", "equal responses as one card", "checkbox");
  const steps = element("span", "step-choice", withAttributes(button("‹"), { name: "before", "aria-label": "step before" }), field("step", "step", []), withAttributes(button("›"), { name: "after", "aria-label": "step after" }));
  folded.lastElementChild.checked = true;
  const order = [["", "as sampled"], ["reward", "highest reward first"], ["lowest", "lowest reward first"], ["ratio", "largest change first"], ["tokens", "longest first"]];
  return element("form", "",
    element("div", "bar", field("set", "of", sets), field("scope", "show", SCOPES), steps, field("query", "query", []), field("beside", "beside it", [["", "nothing"], ...sets]), field("beside_step", "in step", []), field("colour", "tokens coloured by", COLOURS)),
    element("details", "filters", element("summary", ""), element("div", "bar", FILTERS.map(([name, label, type]) => field(name, label, type)), field("order", "order", order), folded, withAttributes(button("no filter"), { type: "reset" }))));
}

// Fill the lists of steps and queries with what the set has, and keep what was chosen; the set.
function fillPlaces(source, fields, step = fields.step.value, query = fields.query.value) {
  const set = source.sets[fields.set.value] || source.sets[0], scope = fields.scope.value, steps = [...set.bySteps.keys()];
  fill(fields.step, steps.map((one) => [one, one]), step, steps.at(-1));
  const rows = scope === "query" ? set.table : set.bySteps.get(Number(fields.step.value)) || [];
  const evenness = (row) => Math.min(row.passed, row.count - row.passed) - (row.place === null ? 1e9 : 0);
  const mixed = rows.reduce((best, row) => (evenness(row) > evenness(best) ? row : best), rows[0]); // there is most to see
  fill(fields.query, rows.map((row) => [row.query, `${visible(set.queries[row.query][0])} (${row.mean === null ? "no reward" : `reward ${row.mean.toFixed(2)}`})`]), query, mixed?.query);
  const there = twinsOf(source, set, fields).map((row) => [row.step, row.step]);
  fill(fields.beside_step, there, fields.beside_step.value, there[0]?.[0]);
  const shown = { set: source.sets.length > 1, step: scope === "group" || scope === "step", query: scope === "group" || scope === "query", beside: scope === "group", beside_step: scope === "group" && there.length };
  for (const [name, isShown] of Object.entries(shown)) fields[name].closest(name === "step" ? "span" : "label").hidden = !isShown;
  return set;
}

function fill(select, options, wanted, otherwise) {
  const isSame = select.length === options.length && options.every(([value, text], place) => select[place].value === String(value) && select[place].text === String(text));
  if (!isSame) select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.value = wanted;
  if (select.selectedIndex < 0) select.value = otherwise ?? "";
}

// What the chosen query got in the set that is shown beside.
function twinsOf(source, set, fields) {
  const other = source.sets[fields.beside.value], id = set.queries[fields.query.value]?.[0];
  return (other && other.byQuery[other.queries.findIndex(([name]) => name === id)]) || [];
}

// Where the groups lie that are asked for.
function placesOf(set, fields) {
  const scope = fields.scope.value, query = Number(fields.query.value);
  if (scope === "run") return [...set.bySteps.values()].flat();
  if (scope === "query") return [...(set.byQuery[query] || [])];
  return (set.bySteps.get(Number(fields.step.value)) || []).filter((row) => scope === "step" || row.query === query);
}

// The curve of the query's rewards, and the steps that have it.
function showSteps({ set, fields, curve, steps, draw }) {
  const query = fields.query.value, rows = (["group", "query"].includes(fields.scope.value) && set.byQuery[query]) || [], key = JSON.stringify([set.number, query, rows]);
  curve.hidden = steps.hidden = rows.length < 2;
  if (rows.length < 2) return;
  if (curve.dataset.key !== key) {
    curve.dataset.key = key;
    const series = [{ label: "mean reward", values: rows.map((row) => row.mean) }, { label: "share right", values: rows.map((row) => row.passed / row.count) }];
    drawSeries(curve, { title: `rewards of ${visible(set.queries[query][0])}`, unit: "reward", xTitle: "step", x: rows.map((row) => row.step), series, kind: "points", low: Math.min(0, ...rows.map((row) => row.mean)), high: Math.max(1, ...rows.map((row) => row.mean)) });
  }
  const here = Math.max(0, rows.findIndex((row) => String(row.step) === fields.step.value)), hadFocus = steps.contains(document.activeElement);
  const near = rows.filter((_, place) => place === 0 || place === rows.length - 1 || Math.abs(place - here) <= NEIGHBOURS);
  steps.replaceChildren(`This query in steps${near.length < rows.length ? ` (the nearest of ${rows.length})` : ""}: `, ...near.map((row) => {
    const made = button(String(row.step), () => { fields.step.value = row.step; draw(); });
    return fields.scope.value === "group" && row === rows[here] ? withAttributes(made, { "aria-current": "step" }) : made;
  }));
  if (hadFocus) steps.querySelector("[aria-current]")?.focus();
}

// Put more cards on the page: those that wait, or those of groups that are looked through until there are enough.
async function showMore(search) {
  const { fields, waiting, places, number } = search, order = ORDERS[fields.order.value], cards = [], isFull = (tokens) => tokens >= TOKENS_AT_ONCE;
  let looked = 0, tokens = 0;
  if (!waiting.length) {
    while (places.length && looked < SAMPLES_AT_ONCE && (order || !isFull(tokens))) {
      const place = places.shift(), entries = await entriesAt(search, search.set, place);
      if (search.number !== number) return; // another choice was made meanwhile
      looked += place.count;
      tokens += sum(entries, "tokens");
      waiting.push(...entries);
    }
    if (order) waiting.sort((one, other) => order(one.lead) - order(other.lead));
  }
  for (tokens = 0; waiting.length && !isFull(tokens); tokens += waiting.shift().tokens) {
    const [entry] = waiting;
    if (!order && (entry.group !== search.last || (search.isNew && !cards.length))) cards.push(element("div", "group", headOf(entry)));
    cards.push(cardOf(entry, fields.colour.value, order ? headOf(entry) : []));
    search.last = entry.group;
  }
  show(search, cards, "cards");
}

// The same query of two sets or steps, one beside the other.
async function showSides(search) {
  const { source, set, fields, places, number } = search, other = source.sets[fields.beside.value], sides = [];
  const twin = twinsOf(source, set, fields).find((row) => String(row.step) === fields.beside_step.value);
  for (const [own, place] of [[set, places.shift()], [other, twin]]) {
    const entries = place && place.place !== null ? await entriesAt(search, own, place) : [];
    const cards = entries.map((entry) => cardOf(entry, fields.colour.value, []));
    sides.push(element("div", "side", element("h3", "", own.title), entries.length ? headOf(entries[0]) : element("p", "about", "no such sample of this query"), cards));
  }
  search.total = search.looked;
  if (search.number === number) show(search, sides, "cards sides");
}

function show(search, cards, className) {
  const { matched, looked, missing, total, waiting, places } = search, [some, all] = [looked, total].map((one) => one.toLocaleString("en"));
  if (search.isNew) search.cards.replaceChildren();
  search.cards.append(...cards);
  search.cards.className = className;
  search.cards.removeAttribute("aria-busy");
  search.isNew = false;
  search.more.hidden = !waiting.length && !places.length;
  const left = missing ? `; ${missing.toLocaleString("en")} are not in this page: gspo view shows them` : "";
  search.count.replaceChildren(element("p", "about", `${matched.toLocaleString("en")} of ${looked < total ? `${some} looked through, of ${all} samples` : `${all} samples`}${left}`));
}

// The responses of a group that pass the filters: one entry for those that are equal.
async function entriesAt(search, set, place) {
  const { source, fields } = search, asked = FILTERS.filter(([name]) => fields[name].value !== ""), equal = new Map();
  search.looked += place.count;
  const group = await source.group(set.number, place.step, place.place);
  const kept = group.samples.filter((sample) => asked.every(([name, , , passes]) => passes(fields[name].value, sample, group)));
  kept.forEach((sample, number) => {
    const key = fields.folded.checked ? JSON.stringify([sample.completion, sample.reward, sample.finish_reason, sample.failure]) : number;
    equal.set(key, [...(equal.get(key) || []), sample]);
  });
  search.matched += kept.length;
  return [...equal.values()].map((copies) => {
    const lead = copies.reduce((most, sample) => (ORDERS.ratio(sample) < ORDERS.ratio(most) ? sample : most)); // its colours have most to show
    return { group, copies, lead, place, isTraining: set.kind === "training", tokens: lead.tokens + 20 };
  });
}

// Which group it is, its prompt, and what the data has beside it, such as the answer.
function headOf({ group, place }) {
  const columns = Object.entries(group.columns || {}).map(([name, value]) => `${name}: ${value}`).join("; ");
  const score = `${place.passed} of ${place.count} right${place.mean === null ? "" : `, mean reward ${place.mean.toPrecision(3)}`}`;
  return [element("h3", "where", `step ${place.step}, query ${visible(group.query)}: ${score}`),
    withAttributes(element("pre", "prompt", visible(group.prompt)), { tabindex: 0 }), columns ? element("p", "columns", visible(columns)) : null];
}

// The reward, and of several functions what each gave.
function rewardOf(sample) {
  const text = (value) => (value === null ? "none" : value.toPrecision(3)), functions = Object.entries(sample.rewards);
  return functions.length < 2 ? text(sample.reward) : `${text(sample.reward)} (${functions.map(([name, value]) => `${name} ${text(value)}`).join(", ")})`;
}

const FACTS = [
  ["reward", rewardOf], ["advantage", (sample) => (sample.reward === null || sample.advantage === null ? null : signed(sample.advantage))],
  ["sequence ratio s", (sample) => sample.sequence_ratio?.toFixed(5)], ["tokens", (sample) => sample.tokens],
  ["ended", (sample) => ({ length: "cut off at the limit", stop: "by itself" })[sample.finish_reason] || sample.finish_reason],
  ["mini-batch", (sample) => sample.mini_batch], ["sampled after", (sample) => (sample.policy_version === null ? null : `${sample.policy_version} updates`)],
];

function clippingOf({ clipped, reward, mini_batch: trained, sequence_ratio: ratio }) {
  if (clipped > 0) return `clipped: no gradient from ${clipped === 1 ? "it" : `${Math.round(100 * clipped)} % of its tokens`}`;
  return clipped === null && ratio === null && trained === null ? `not trained: ${reward === null ? "no reward" : "advantage 0"}` : null;
}

function cardOf({ group, copies, lead, place, isTraining }, colour, head) {
  const [kind, verdict] = VERDICTS[lead.passed], distinct = (of) => [...new Set(copies.map(of))].filter((value) => value !== null && value !== undefined);
  const notes = [...(copies.length > 1 ? [`× ${copies.length} equal responses`] : []), ...(isTraining ? distinct(clippingOf) : [])];
  const facts = FACTS.map(([name, of]) => [name, distinct(of)]).filter(([, values]) => values.length).map(([name, values]) =>
    element("div", "", element("dt", "", name), element("dd", "", visible(values.slice(0, 4).join(", ")) + (values.length > 4 ? ", …" : ""))));
  const copied = copies.map(({ passed, ...sample }) => ({ step: place.step, query: group.query, prompt: group.prompt, ...(group.columns && { columns: group.columns }), ...sample }));
  const copy = button("copy as JSON", () => copyText(JSON.stringify(copied.length > 1 ? copied : copied[0]), copy));
  copy.className = "copy";
  const failures = [lead.failure, lead.not_read && `left out, not being what they should be: ${lead.not_read}`].filter(Boolean).map((text) => element("p", "failure", visible(text)));
  const line = element("div", "verdicts", element("strong", `verdict ${kind}`, verdict), notes.map((note) => element("span", "note", note)), copy);
  return element("article", `card ${kind}`, head, line, element("dl", "facts", facts), failures, colouredText(lead, colour));
}
