// The samples: a run, a step, a query; filters; cards.

const TOKENS_AT_ONCE = 20000; // that are put on the page before it asks
const NEIGHBOURS = 7; // steps with a query that are named before and after the one shown
const byId = (id) => document.getElementById(id);
let loaded = null; // the chosen run's steps: [{step, queries, letters}], and once looked at groups: [{query, prompt, samples}]
let numShown = 0;
let numDrawings = 0; // begun: an older one that is ready later is not shown

async function startSamples() {
  const scripts = [...document.querySelectorAll("script.samples-data")];
  const form = byId("samples-form"), fields = form.elements;
  const indices = new Map();
  fields.run.append(...scripts.map((script, number) => new Option(script.dataset.run, number)));
  byId("run-label").hidden = scripts.length < 2;
  const load = async () => {
    const number = Number(fields.run.value);
    if (!indices.has(number)) indices.set(number, await readIndex(scripts[number]));
    loaded = indices.get(number);
    const old = fields.step.value;
    fields.step.replaceChildren(...loaded.map((one) => new Option(one.step, one.step)));
    fields.step.value = loaded.some((one) => String(one.step) === old) ? old : loaded.length ? loaded[loaded.length - 1].step : "";
    await fillQueries(fields);
  };
  const before = remembered("samples") || {};
  if (before.run !== undefined && scripts[before.run]) fields.run.value = before.run;
  await load();
  await restore(fields, before);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", async (event) => {
    if (event.target === fields.run) await load();
    if (event.target === fields.step) await fillQueries(fields);
    await changed(fields);
  });
  form.addEventListener("reset", (event) => { event.preventDefault(); clearFilters(fields); changed(fields); });
  fields.before.addEventListener("click", () => moveStep(fields, -1));
  fields.after.addEventListener("click", () => moveStep(fields, 1));
  byId("more").addEventListener("click", () => showCards(fields, true));
  repaints.push(() => showCards(fields, false));
  await changed(fields);
}

async function readIndex(script) {
  const [index, ...steps] = script.textContent.split("\n");
  script.textContent = "";
  return JSON.parse(await unpack(index)).map((one, number) => ({ ...one, letters: steps[number], groups: null }));
}

async function groupsOf(step) {
  if (!step.groups) {
    step.groups = JSON.parse(await unpack(step.letters));
    step.letters = "";
  }
  return step.groups;
}

async function restore(fields, before) {
  if (loaded.some((one) => String(one.step) === before.step)) {
    fields.step.value = before.step;
    await fillQueries(fields);
  }
  for (const [name, value] of Object.entries(before)) {
    if (!["run", "step"].includes(name) && fields[name]) fields[name].value = value;
  }
  if (fields.query.selectedIndex < 0) fields.query.selectedIndex = 0;
}

async function fillQueries(fields) {
  const old = fields.query.value, step = currentStep(fields);
  const groups = step ? await groupsOf(step) : [];
  if (step !== currentStep(fields)) return; // another has been chosen while this one was unpacked
  fields.query.replaceChildren(...groups.map((group) => new Option(`${group.query} (${meanReward(group)})`, group.query)));
  if (groups.some((group) => group.query === old)) fields.query.value = old;
  else if (groups.length) fields.query.value = groups.reduce((most, group) => (moved(group) > moved(most) ? group : most)).query;
}

// How far the policy has moved on a group: 0 where nothing was trained. The group with the most to see is shown first.
function moved(group) {
  return Math.max(...group.samples.map((sample) => (sample.sequence_ratio === null ? 0 : Math.abs(Math.log(sample.sequence_ratio)))));
}

function meanReward(group) {
  const rewards = group.samples.map((sample) => sample.reward).filter((reward) => reward !== null);
  if (!rewards.length) return "no reward";
  return `reward ${(rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length).toFixed(2)}`;
}

function currentStep(fields) {
  return loaded.find((one) => String(one.step) === fields.step.value);
}

async function moveStep(fields, by) {
  const place = loaded.indexOf(currentStep(fields)) + by;
  if (!loaded[place]) return;
  fields.step.value = loaded[place].step;
  await fillQueries(fields);
  await changed(fields);
}

function clearFilters(fields) {
  for (const name of ["reward_low", "reward_high", "scored", "clipped", "truncated", "tokens_low", "tokens_high", "text", "order"]) {
    fields[name].value = "";
  }
}

async function changed(fields) {
  remember("samples", Object.fromEntries(
    [...fields].filter((field) => field.name && field.type !== "button").map((field) => [field.name, field.value])));
  document.querySelector(".step-choice").hidden = fields.scope.value === "run" || fields.scope.value === "query";
  document.querySelector(".query-choice").hidden = !["group", "query"].includes(fields.scope.value);
  showElsewhere(fields);
  await showCards(fields, false);
}

// Every sample in the chosen part of the run, with its group and step.
async function inScope(fields) {
  const scope = fields.scope.value, query = fields.query.value;
  const steps = scope === "group" || scope === "step" ? loaded.filter((one) => one === currentStep(fields))
    : scope === "query" ? loaded.filter((one) => one.queries.includes(query)) : loaded;
  const groups = await Promise.all(steps.map(groupsOf));
  return steps.flatMap((step, number) => groups[number]
    .filter((group) => scope === "step" || scope === "run" || group.query === query)
    .flatMap((group) => group.samples.map((sample) => ({ step: step.step, floor: step.floor, group, sample }))));
}

function passes({ sample, group }, fields) {
  const between = (value, low, high) =>
    (low.value === "" || (value !== null && value >= Number(low.value))) &&
    (high.value === "" || (value !== null && value <= Number(high.value)));
  const clipped = sample.clipped === null ? "untrained" : sample.clipped > 0 ? "yes" : "no";
  const truncated = sample.finish_reason === "length" ? "yes" : "no";
  const text = fields.text.value.toLowerCase();
  return between(sample.reward, fields.reward_low, fields.reward_high) &&
    between(sample.tokens, fields.tokens_low, fields.tokens_high) &&
    (!fields.scored.value || fields.scored.value === (sample.reward === null ? "no" : "yes")) &&
    (!fields.clipped.value || fields.clipped.value === clipped) &&
    (!fields.truncated.value || fields.truncated.value === truncated) &&
    (!text || sample.completion.toLowerCase().includes(text) || String(group.prompt).toLowerCase().includes(text));
}

const ORDERS = {
  reward: ({ sample }) => -(sample.reward === null ? -Infinity : sample.reward),
  lowest: ({ sample }) => (sample.reward === null ? Infinity : sample.reward),
  ratio: ({ sample }) => -(sample.sequence_ratio === null ? -1 : Math.abs(Math.log(sample.sequence_ratio))),
  tokens: ({ sample }) => -sample.tokens,
};

async function showCards(fields, more) {
  const drawing = ++numDrawings;
  const all = await inScope(fields);
  if (drawing !== numDrawings) return;
  const found = all.filter((one) => passes(one, fields));
  const order = ORDERS[fields.order.value];
  if (order) found.sort((one, other) => order(one) - order(other));
  const numBefore = more ? numShown : 0;
  let tokens = 0;
  numShown = numBefore;
  while (numShown < found.length && tokens < TOKENS_AT_ONCE) tokens += found[numShown++].sample.tokens + 20;
  const shown = found.slice(0, numShown);
  const colour = fields.colour.value, most = largest(shown.map((one) => one.sample), colour);
  const scale = colour === NO_RATIO ? Math.max(most, ...shown.map((one) => one.floor)) : most;
  byId("found").textContent = `${found.length} of ${all.length} samples${numShown < found.length ? `, the first ${numShown} shown` : ""}`;
  byId("more").hidden = numShown >= found.length;
  showLegend(byId("legend"), colour, most, scale);
  const cards = [];
  let last = null;
  for (const one of shown) {
    if (one.group !== last && !order) cards.push(groupHead(one));
    last = one.group;
    cards.push(card(one, colour, scale, Boolean(order)));
  }
  byId("cards").replaceChildren(...cards);
}

function showElsewhere(fields) {
  const element = byId("elsewhere"), hadFocus = element.contains(document.activeElement);
  element.replaceChildren();
  if (fields.scope.value !== "group") return;
  const steps = loaded.filter((one) => one.queries.includes(fields.query.value));
  if (steps.length < 2) return;
  const here = steps.indexOf(currentStep(fields));
  const near = steps.filter((_, place) => place === 0 || place === steps.length - 1 || Math.abs(place - here) <= NEIGHBOURS);
  const count = near.length < steps.length ? ` (the nearest of ${steps.length})` : "";
  element.append(`This query in steps${count}: `, ...near.map((one) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = one.step;
    if (String(one.step) === fields.step.value) button.setAttribute("aria-current", "step");
    button.addEventListener("click", () => moveStep(fields, loaded.indexOf(one) - loaded.indexOf(currentStep(fields))));
    return button;
  }));
  if (hadFocus) element.querySelector("[aria-current]").focus();
}

function element(tag, className, ...content) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...content);
  return made;
}

function groupHead({ step, group }) {
  return element("div", "group", element("h3", "", `step ${step}, query ${group.query}: ${meanReward(group)}`), ...promptOf(group));
}

// The prompt, and what the data has beside it, such as the answer.
function promptOf(group) {
  const prompt = element("pre", "prompt", String(group.prompt));
  prompt.tabIndex = 0;
  const columns = Object.entries(group.columns || {}).map(([name, value]) => `${name}: ${value}`);
  return columns.length ? [prompt, element("p", "columns", columns.join("; "))] : [prompt];
}

// The reward, and of several functions what each has said.
function rewardOf(sample) {
  const total = sample.reward === null ? "none" : sample.reward.toPrecision(3);
  const parts = Object.entries(sample.rewards || {});
  if (parts.length < 2) return total;
  return `${total} (${parts.map(([name, value]) => `${name} ${value === null ? "none" : value.toPrecision(3)}`).join(", ")})`;
}

function card(one, colour, scale, withPrompt) {
  const { sample, group, step } = one;
  const facts = [
    ["reward", rewardOf(sample)],
    ["advantage", sample.reward === null ? "–" : signed(sample.advantage)],
    ["s", sample.sequence_ratio === null ? "not trained" : sample.sequence_ratio.toFixed(5)],
    ["clipped", sample.clipped === null ? "–" : sample.clipped === 1 ? "yes" : sample.clipped === 0 ? "no" : `${Math.round(100 * sample.clipped)} % of tokens`],
    ["tokens", sample.tokens],
    ["finish", sample.finish_reason === "length" ? "cut off" : sample.finish_reason],
    ["mini-batch", sample.mini_batch === null || sample.mini_batch === undefined ? "–" : sample.mini_batch],
    ["policy", sample.policy_version ?? "–"],
  ];
  const list = element("dl", "facts", ...facts.map(([name, value]) => element("div", "", element("dt", "", name), element("dd", "", String(value)))));
  const copy = element("button", "copy", "copy as JSON");
  copy.type = "button";
  copy.addEventListener("click", () => copyText(JSON.stringify({ step, query: group.query, prompt: group.prompt, ...(group.columns && { columns: group.columns }), ...sample }), copy));
  const made = element("article", sample.clipped > 0 ? "card clipped" : "card", list, copy);
  if (withPrompt) made.append(element("p", "where", `step ${step}, query ${group.query}`), ...promptOf(group));
  if (sample.failure) made.append(element("p", "failure", sample.failure));
  if (sample.not_read) made.append(element("p", "failure", `left out, not being what they should be: ${sample.not_read}`));
  made.append(colouredText(sample, colour, scale));
  return made;
}
