// The samples: which are shown, side by side or in a row, and their cards.

const TOKENS_AT_ONCE = 20000; // that are put on the page before it asks
const SAMPLES_AT_ONCE = 4000; // that are looked through before it asks
const NEIGHBOURS = 7; // steps with a query that are named before and after the one shown
const VERDICTS = { true: ["right", "✓ right"], false: ["wrong", "✗ wrong"], null: ["unscored", "– not judged"] };
const YES_NO = [["", "any"], ["yes", "yes"], ["no", "no"]];
const ORDERS = {
  reward: (sample) => -(sample.reward ?? -Infinity), lowest: (sample) => sample.reward ?? Infinity,
  ratio: (sample) => -Math.abs(Math.log(sample.sequence_ratio ?? 1)), tokens: (sample) => -sample.tokens,
};
const FILTERS = [
  ["reward_low", (value, { sample }) => sample.reward !== null && sample.reward >= value],
  ["reward_high", (value, { sample }) => sample.reward !== null && sample.reward <= value],
  ["answer", (value, { sample }) => value === VERDICTS[sample.passed][0]],
  ["clipped", (value, { sample }) => value === (sample.clipped === null ? "untrained" : sample.clipped > 0 ? "yes" : "no")],
  ["truncated", (value, { sample }) => value === (sample.finish_reason === "length" ? "yes" : "no")],
  ["tokens_low", (value, { sample }) => sample.tokens >= value],
  ["tokens_high", (value, { sample }) => sample.tokens <= value],
  ["text", (value, { sample, group }) => `${sample.completion}\n${group.prompt}`.toLowerCase().includes(value.toLowerCase())],
];
let openSamples = () => {}; // of a query: the table of queries calls it

function showSamples(root, data, source) {
  if (root.firstChild) return;
  const form = samplesForm(source), fields = form.elements, parts = {};
  for (const name of ["legend", "told", "curve", "steps", "count", "cards"]) parts[name] = element("div", name);
  const more = button("show more", () => showMore(search));
  let search = null;
  root.append(form, parts.curve, parts.steps, parts.legend, parts.count, parts.cards, more, parts.told);
  const draw = async () => {
    const set = fillPlaces(source, fields);
    remember("samples", Object.fromEntries([...fields].filter((field) => field.name).map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value])));
    const active = FILTERS.filter(([name]) => fields[name].value !== "").length;
    form.querySelector("summary").textContent = active ? `Filter and order (${active} in force)` : "Filter and order";
    parts.told.replaceChildren(element("p", "hint", set.told));
    parts.legend.replaceChildren(...(fields.colour.value ? [legendOf(fields.colour.value)] : []));
    showSteps(parts, set, fields, draw);
    if (search) search.isOver = true;
    search = { source, set, fields, parts, more, places: placesOf(set, fields), waiting: [], looked: 0, matched: 0, missing: 0, last: null };
    search.total = sum(search.places, "count");
    await (fields.scope.value === "group" && fields.beside.value !== "" ? showSides(search) : showMore(search));
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", draw);
  form.addEventListener("reset", (event) => { event.preventDefault(); for (const name of [...FILTERS.map(([name]) => name), "order"]) fields[name].value = ""; draw(); });
  for (const [name, by] of [["before", -1], ["after", 1]]) fields[name].addEventListener("click", () => { fields.step.selectedIndex = Math.max(0, Math.min(fields.step.length - 1, fields.step.selectedIndex + by)); draw(); });
  openSamples = async ({ set, step, query }) => {
    Object.assign(fields.set, { value: set });
    fields.scope.value = "group";
    fillPlaces(source, fields, step, query);
    await draw();
    root.closest("section").scrollIntoView();
    fields.query.focus({ preventScroll: true });
  };
  source.changed.push(() => (search.total ? parts.told.replaceChildren(element("p", "hint", fillPlaces(source, fields).told)) : draw()));
  restore(source, fields);
  draw();
}

function samplesForm(source) {
  const sets = source.sets.map((set) => [set.number, set.title]), step = chooser("step", "step", []);
  const steps = element("span", "step-choice", named(button("‹"), "before", "step before"), step, named(button("›"), "after", "step after"));
  const folded = input("folded", "equal responses as one card", "checkbox"), cleared = button("no filter");
  folded.firstElementChild.checked = true;
  cleared.type = "reset";
  return element("form", "samples-form",
    element("div", "bar", chooser("set", "of", sets), chooser("scope", "show", [["group", "one query"], ["query", "one query in all steps"], ["step", "one step"], ["run", "all steps"]]), steps, chooser("query", "query", []),
      chooser("beside", "beside it", [["", "nothing"], ...sets]), chooser("beside_step", "in step", []), chooser("colour", "tokens coloured by", [["ratio", "log ratio"], ["advantage", "advantage"], ["", "nothing"]])),
    element("details", "filters", element("summary", "", "Filter and order"), element("div", "bar",
      input("reward_low", "reward from", "number"), input("reward_high", "to", "number"), chooser("answer", "answer", [["", "any"], ["right", "right"], ["wrong", "wrong"], ["unscored", "not judged"]]),
      chooser("clipped", "clipped", [...YES_NO, ["untrained", "not trained"]]), chooser("truncated", "cut off", YES_NO), input("tokens_low", "tokens from", "number"), input("tokens_high", "to", "number"),
      input("text", "text", "search", "in prompt or response"), chooser("order", "order", [["", "as sampled"], ["reward", "highest reward first"], ["lowest", "lowest reward first"], ["ratio", "largest change first"], ["tokens", "longest first"]]), folded, cleared)));
}

function named(made, name, label) {
  made.name = name;
  made.setAttribute("aria-label", label);
  return made;
}

function restore(source, fields) {
  const before = remembered("samples") || {}, places = ["set", "step", "query", "beside", "beside_step"];
  if (source.sets[before.set]) fields.set.value = before.set;
  fillPlaces(source, fields, before.step, before.query);
  for (const [name, value] of Object.entries(before)) {
    if (fields[name]?.type === "checkbox") fields[name].checked = value;
    else if (fields[name] && !places.includes(name)) fields[name].value = value;
  }
}

// Fill the lists of steps and queries with what the set has, and keep what was chosen; the set.
function fillPlaces(source, fields, step = fields.step.value, query = fields.query.value) {
  const set = source.sets[fields.set.value] || source.sets[0], steps = [...set.bySteps.keys()], scope = fields.scope.value;
  fill(fields.step, steps.map((one) => [one, one]), step, steps.at(-1));
  const rows = scope === "query" ? set.table.filter((row) => row.steps) : set.bySteps.get(Number(fields.step.value)) || [];
  const mixed = rows.reduce((best, row) => (evenness(row) > evenness(best) ? row : best), rows[0]);
  fill(fields.query, rows.map((row) => [row.query, `${visible(set.queries[row.query][0])} (${row.mean === null ? "no reward" : `reward ${row.mean.toFixed(2)}`})`]), query, mixed?.query);
  const other = source.sets[fields.beside.value], id = set.queries[fields.query.value]?.[0];
  const twin = other ? other.queries.findIndex(([name]) => name === id) : -1, there = twin < 0 ? [] : other.byQuery[twin].filter((row) => row.place !== null);
  fill(fields.beside_step, there.map((row) => [row.step, row.step]), fields.beside_step.value, there[0]?.step);
  for (const [name, isShown] of [["set", source.sets.length > 1], ["step", scope === "group" || scope === "step"], ["query", scope === "group" || scope === "query"], ["beside", scope === "group"], ["beside_step", scope === "group" && other]]) {
    (name === "step" ? fields.step.closest(".step-choice") : fields[name].parentElement).hidden = !isShown;
  }
  return set;
}

const evenness = (row) => Math.min(row.passed, row.count - row.passed) + (row.place === null ? -1e9 : 0);

function fill(select, options, wanted, otherwise) {
  const isNew = select.length !== options.length || options.some(([value, text], place) => select[place].value !== String(value) || select[place].text !== String(text));
  if (isNew) select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.value = options.some(([value]) => String(value) === String(wanted)) ? wanted : otherwise ?? "";
}

// Where the groups lie that are asked for.
function placesOf(set, fields) {
  const scope = fields.scope.value, step = Number(fields.step.value), query = Number(fields.query.value);
  const rows = scope === "run" ? [...set.bySteps.values()].flat() : scope === "query" ? set.byQuery[query] || [] : set.bySteps.get(step) || [];
  return rows.filter((row) => scope !== "group" || row.query === query);
}

// The curve of the query's rewards, and the steps that have it.
function showSteps(parts, set, fields, draw) {
  const isOne = ["group", "query"].includes(fields.scope.value), rows = isOne ? set.byQuery[fields.query.value] || [] : [];
  const key = JSON.stringify([set.number, fields.query.value, rows.length]);
  parts.curve.hidden = parts.steps.hidden = rows.length < 2;
  if (rows.length < 2) return;
  if (parts.curve.dataset.key !== key) {
    parts.curve.dataset.key = key;
    const series = [{ label: "mean reward", values: rows.map((row) => row.mean) }, { label: "share right", values: rows.map((row) => row.passed / row.count) }];
    drawSeries(parts.curve, { title: `Rewards of ${visible(set.queries[fields.query.value][0])}`, unit: "", xTitle: "step", x: rows.map((row) => row.step), series, kind: "points" });
  }
  const here = Math.max(0, rows.findIndex((row) => String(row.step) === fields.step.value)), hadFocus = parts.steps.contains(document.activeElement);
  const near = rows.filter((_, place) => place === 0 || place === rows.length - 1 || Math.abs(place - here) <= NEIGHBOURS);
  parts.steps.replaceChildren(`This query in steps${near.length < rows.length ? ` (the nearest of ${rows.length})` : ""}: `, ...near.map((row) => {
    const made = button(String(row.step), () => { fields.step.value = row.step; draw(); });
    if (fields.scope.value === "group" && row.step === rows[here].step) made.setAttribute("aria-current", "step");
    return made;
  }));
  if (hadFocus) parts.steps.querySelector("[aria-current]")?.focus();
}

// Put more cards on the page: those that wait, or those of groups that are looked through until there are enough.
async function showMore(search) {
  const { fields, parts, more, waiting, places } = search, order = ORDERS[fields.order.value], cards = [];
  let looked = 0, tokens = 0;
  while (!waiting.length ? places.length && looked < SAMPLES_AT_ONCE : places.length && (order ? looked && looked < SAMPLES_AT_ONCE : tokens < TOKENS_AT_ONCE)) {
    const place = places.shift(), entries = await entriesAt(search, search.set, place);
    if (search.isOver) return;
    looked += place.count;
    tokens += sum(entries, "tokens");
    waiting.push(...entries);
  }
  if (order && looked) waiting.sort((one, other) => order(one.lead) - order(other.lead));
  for (tokens = 0; waiting.length && tokens < TOKENS_AT_ONCE;) {
    const entry = waiting.shift();
    if (entry.group !== search.last && !order) cards.push(...headOf(entry));
    cards.push(cardOf(entry, fields.colour.value, order ? headOf(entry) : []));
    search.last = entry.group;
    tokens += entry.tokens;
  }
  if (search.isFilled) parts.cards.append(...cards);
  else parts.cards.replaceChildren(...cards);
  search.isFilled = true;
  parts.cards.className = "cards";
  more.hidden = !waiting.length && !places.length;
  tellCount(search);
}

// The same query of two sets or steps, one beside the other.
async function showSides(search) {
  const { source, set, fields, parts, more, places } = search, other = source.sets[fields.beside.value];
  const twin = other.queries.findIndex(([name]) => name === set.queries[fields.query.value]?.[0]);
  const there = (other.byQuery[twin] || []).filter((row) => String(row.step) === fields.beside_step.value);
  const sides = [];
  for (const [own, row] of [[set, places[0]], [other, there[0]]]) {
    const entries = row ? await entriesAt(search, own, row) : [];
    const head = element("h3", "", `${own.title}${row ? `, step ${row.step}: ${scoreOf(row)}` : ": this query was not sampled there"}`);
    sides.push(element("div", "side", head, ...entries.slice(0, 1).flatMap((entry) => headOf(entry).slice(1)), ...entries.map((entry) => cardOf(entry, fields.colour.value, []))));
  }
  if (search.isOver) return;
  parts.cards.replaceChildren(...sides);
  parts.cards.className = "cards sides";
  more.hidden = true;
  search.total = search.looked;
  tellCount(search);
}

const scoreOf = (row) => `${row.passed} of ${row.count} right${row.mean === null ? "" : `, mean reward ${row.mean.toPrecision(3)}`}`;

function tellCount({ parts, matched, looked, missing, total }) {
  const all = total.toLocaleString("en"), part = looked < total ? `${looked.toLocaleString("en")} looked through, of ${all} samples` : `${all} samples`;
  const left = missing ? `; ${missing.toLocaleString("en")} are not in this page: gspo view shows them` : "";
  parts.count.replaceChildren(element("p", "hint", `${matched.toLocaleString("en")} of ${part}${left}`));
}

// The responses of a group that pass the filters: one entry for those that are equal.
async function entriesAt(search, set, place) {
  const { source, fields } = search, asked = FILTERS.filter(([name]) => fields[name].value !== "");
  search.looked += place.count;
  if (place.place === null) { search.missing += place.count; return []; }
  const group = await source.group(set.number, place.step, place.place).catch((error) => ({ query: set.queries[place.query][0], prompt: error.message, samples: [] }));
  const kept = group.samples.filter((sample) => asked.every(([name, passes]) => passes(["text", "answer", "clipped", "truncated"].includes(name) ? fields[name].value : Number(fields[name].value), { sample, group })));
  const equal = new Map();
  kept.forEach((sample, number) => {
    const key = fields.folded.checked ? JSON.stringify([sample.completion, sample.reward, sample.finish_reason, sample.failure]) : number;
    equal.set(key, [...(equal.get(key) || []), sample]);
  });
  search.matched += kept.length;
  return [...equal.values()].map((copies) => {
    const lead = copies.reduce((most, sample) => (ORDERS.ratio(sample) < ORDERS.ratio(most) ? sample : most)); // its colours have the most to show
    return { group, copies, lead, place, isTraining: set.kind === "training", tokens: lead.tokens + 20 };
  });
}

// Which group it is, its prompt, and what the data has beside it, such as the answer.
function headOf({ group, place }) {
  const prompt = element("pre", "prompt", visible(group.prompt));
  prompt.tabIndex = 0;
  const columns = Object.entries(group.columns || {}).map(([name, value]) => `${name}: ${value}`);
  return [element("h3", "where", `step ${place.step}, query ${visible(group.query)}: ${scoreOf(place)}`), prompt, ...(columns.length ? [element("p", "columns", visible(columns.join("; ")))] : [])];
}

// The reward, and of several functions what each gave.
function rewardOf(sample) {
  const total = sample.reward === null ? "none" : sample.reward.toPrecision(3), functions = Object.entries(sample.rewards);
  return functions.length < 2 ? total : `${total} (${functions.map(([name, value]) => `${name} ${value === null ? "none" : value.toPrecision(3)}`).join(", ")})`;
}

const FACTS = [
  ["reward", rewardOf], ["advantage", (sample) => (sample.reward === null || sample.advantage === null ? null : signed(sample.advantage))],
  ["sequence ratio s", (sample) => sample.sequence_ratio?.toFixed(5)], ["tokens", (sample) => sample.tokens],
  ["ended", (sample) => ({ length: "cut off at the limit", stop: "by itself" })[sample.finish_reason] || sample.finish_reason],
  ["mini-batch", (sample) => sample.mini_batch], ["sampled after", (sample) => (sample.policy_version === null ? null : `${sample.policy_version} updates`)],
];

function clippingOf({ clipped, reward, mini_batch: trained, sequence_ratio: ratio }) {
  if (clipped > 0) return `clipped: no gradient from ${clipped === 1 ? "it" : `${Math.round(100 * clipped)} % of its tokens`}`;
  return clipped === null && ratio === null && trained === null ? `not trained: ${reward === null ? "no reward" : "advantage 0"}` : "";
}

function cardOf({ group, copies, lead, place, isTraining }, colour, head) {
  const [kind, verdict] = VERDICTS[lead.passed], distinct = (of) => [...new Set(copies.map((sample) => of(sample) ?? null))];
  const notes = [copies.length > 1 ? `× ${copies.length} equal responses` : "", ...(isTraining ? distinct(clippingOf) : [])].filter(Boolean);
  const facts = FACTS.map(([name, of]) => [name, distinct(of).filter((value) => value !== null)]).filter(([, values]) => values.length);
  const list = element("dl", "facts", ...facts.map(([name, values]) => element("div", "", element("dt", "", name), element("dd", "", visible(values.slice(0, 4).join(", ") + (values.length > 4 ? ", …" : ""))))));
  const copied = copies.map(({ passed, ...sample }) => ({ step: place.step, query: group.query, prompt: group.prompt, ...(group.columns && { columns: group.columns }), ...sample }));
  const copy = button("copy as JSON", () => copyText(JSON.stringify(copied.length > 1 ? copied : copied[0]), copy));
  copy.className = "copy";
  const failures = [lead.failure, lead.not_read && `left out, not being what they should be: ${lead.not_read}`].filter(Boolean);
  return element("article", `card ${kind}`, ...head, element("div", "verdicts", element("strong", `verdict ${kind}`, verdict), ...notes.map((note) => element("span", "note", note)), copy),
    list, ...failures.map((text) => element("p", "failure", visible(text))), ...colouredText(lead, colour));
}
