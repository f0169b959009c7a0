// The page of evaluations: numbers of each suite, how models differ, and the responses to each question.

const ROWS_AT_ONCE = 200; // of the table of questions: a filter finds the others
const results = JSON.parse(byId("data").textContent); // { written, models, suites }
const models = results.models.map(({ label }) => label), isAlone = models.length === 1;
const asked = byId("asked").elements, answers = byId("answers").elements;
const SOLVED = { // by the value of the field: whether a model's result is such a one
  none: ({ judged, passed }) => judged > 0 && passed === 0,
  some: ({ judged, passed }) => passed > 0 && passed < judged,
  all: ({ judged, passed }) => judged > 0 && passed === judged,
  unjudged: ({ judged }) => judged === 0,
};
const ANSWERED = {
  right: ({ passed }) => passed === true, wrong: ({ passed }) => passed === false, unscored: ({ passed }) => passed === null,
  cut: ({ finish_reason: end }) => end === "length",
};
const JUDGED = { true: ["right", "✓ right"], false: ["wrong", "✗ wrong"], null: ["unscored", "– not judged"] };
const unpacked = new Map(); // chunks of responses, once somebody has looked at them
let contents = null; // the chunks of each suite, packed
let questionOrder = ["place", 1]; // a column, and whether upwards
let open = null; // the question whose responses are shown

function shortNumber(value, digits = 4) {
  return Number.isFinite(value) ? String(+value.toPrecision(digits)).replace("-", "−") : "–";
}

function whole(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–";
}

function percent(value) {
  return Number.isFinite(value) ? `${+(100 * value).toPrecision(3)} %` : "–";
}

function withError(value, error) {
  const text = (number) => number.toFixed(3).replace("-", "−");
  if (!Number.isFinite(value)) return "–";
  return Number.isFinite(error) ? `${text(value)} ± ${text(error)}` : text(value);
}

function probability(value) {
  return value >= 0.001 ? shortNumber(value, 2) : value.toExponential(1).replace("-", "−");
}

function signedError(value, error) {
  return (value > 0 ? "+" : "") + withError(value, error);
}

// Overview: a row for each suite and model, of the columns that have any number, and below it how the models differ.

const COLUMNS = [
  ["pass@1 ± over questions", (own) => withError(own.pass_at_1, own.error_over_questions)],
  ["± over samples", (own) => withError(own.error_over_samples)],
  ["pass@k", ({ pass_at_k: rates }) => (rates.length > 1 ? `${withError(rates.at(-1)[1])} (k = ${rates.at(-1)[0]})` : "–")],
  ["mean reward", (own) => withError(own.reward_mean, own.reward_error)],
  ["tokens", (own) => whole(own.mean_response_tokens)],
  ["cut off", (own) => percent(own.truncated_fraction)],
  ["rating", ({ rating }) => (rating ? ratingText(rating) : "–")],
  ["questions", (own) => whole(own.num_questions)],
  ["responses", (own) => whole(own.num_responses)],
  ["failed to judge", (own) => whole(own.num_failed)],
  ["not judged", (own) => whole(own.num_unjudged)],
  ["seconds sampling + judging", (own) => `${shortNumber(own.seconds_sampling, 3)} + ${shortNumber(own.seconds_judging, 3)}`],
];

function ratingText({ rating, low, high, confidence }) {
  return `${whole(rating)} (${Number.isFinite(confidence) ? `${percent(confidence)}: ` : ""}${whole(low)} to ${whole(high)})`;
}

function evaluationOverview() {
  const rows = results.suites.flatMap((suite) => suite.numbers.map((own, place) => own && [place, suite, own]).filter(Boolean));
  const used = COLUMNS.filter(([, textOf]) => rows.some(([, , own]) => !/^(–|– \+ –)$/.test(textOf(own))));
  const cells = rows.map(([place, suite, own]) =>
    [suite.name, ...(isAlone ? [] : [named(place)]), ...used.map(([, textOf]) => textOf(own))]);
  return [
    element("div", "numbers", tableOf(["suite", ...(isAlone ? [] : ["model"]), ...used.map(([title]) => title)], cells)),
    ...(isAlone ? [] : differences()),
  ];
}

function named(place) {
  return element("span", `model model-${place % 7}`, models[place]);
}

function differences() {
  const rows = results.suites.flatMap((suite) => suite.differences.map((own, place) => own && [suite, own, place]).filter(Boolean));
  const leading = (number, suite, place, kind) => button(whole(number), () => askFor(suite, place, kind));
  const cells = rows.map(([suite, own, place]) => [suite.name, named(place), ...(own.why ? [`not compared: ${own.why}`] : [
    signedError(own.mean, own.error_over_questions), withError(own.error_over_samples), whole(own.num_questions) +
      (own.num_left_out ? ` (${whole(own.num_left_out)} left out: judged of one model alone)` : ""),
    leading(own.won.length, suite, place, "won"), leading(own.lost.length, suite, place, "lost"), probability(own.sign_test),
  ])]);
  const heads = ["suite", "model", "difference ± over questions", "± over samples", "questions", "won", "lost", "p of the sign test"];
  return [
    element("h3", "", "Paired differences in pass@1 from ", named(0)),
    element("div", "numbers differences", tableOf(heads, cells)),
    element("p", "hint", "Won and lost are questions that the model passes more, or less, often than the first. A click lists them."),
  ];
}

// Suites: curves and distributions.

function evaluationSuites() {
  return results.suites.map((suite) => {
    const rates = suite.numbers.map((own) => own?.pass_at_k ?? []);
    return element("article", "",
      element("h3", "", suite.name),
      element("div", "charts",
        rates.some(({ length }) => length > 1) ? element("figure", "chart", element("h4", "", "pass@k"), curveOf(rates), tableOfRates(rates)) : null,
        suite.rates.length ? element("figure", "chart", element("h4", "", "Questions by the share of responses that pass"), barsOf(suite.rates)) : null,
        suite.lengths.length ? element("figure", "chart", element("h4", "", "Responses by their tokens"), barsOf(suite.lengths)) : null,
        suite.numbers.map((own, place) => own?.rating && ratingOf(own.rating, place))));
  });
}

function drawn(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.flat(2));
  return made;
}

// pass@k of each model over k, which doubles from mark to mark.
function curveOf(rates) {
  const ks = [...new Set(rates.flat().map(([k]) => k))].sort((low, high) => low - high), last = Math.log2(ks.at(-1)) || 1;
  const across = (k) => 46 + 340 * Math.log2(k) / last, up = (rate) => 190 - 176 * rate;
  const levels = [0, 0.25, 0.5, 0.75, 1].map((rate) => [
    drawn("line", { x1: 46, x2: 386, y1: up(rate), y2: up(rate) }), drawn("text", { x: 38, y: up(rate) + 4, "text-anchor": "end" }, String(rate)),
  ]);
  const marks = ks.map((k) => drawn("text", { x: across(k), y: 208, "text-anchor": "middle" }, String(k)));
  const lines = rates.map((pairs, place) => drawn("g", { class: `model-${place % 7}` },
    drawn("polyline", { points: pairs.map(([k, rate]) => `${across(k)},${up(rate)}`).join(" ") }),
    pairs.map(([k, rate]) => drawn("circle", { cx: across(k), cy: up(rate), r: 4 }, drawn("title", {}, `${models[place]}, k = ${k}: ${rate}`)))));
  const label = "pass@k over k; the table below has the numbers";
  return drawn("svg", { viewBox: "0 0 400 214", role: "img", "aria-label": label, class: "curve-of-rates" }, levels, marks, lines);
}

function tableOfRates(rates) {
  const ks = [...new Set(rates.flat().map(([k]) => k))].sort((low, high) => low - high);
  const rows = rates.map((pairs, place) => [named(place), ...ks.map((k) => withError(new Map(pairs).get(k)))]).filter((_, place) => rates[place].length);
  return element("div", "numbers", tableOf(["k", ...ks], rows));
}

// A row for each label, and in it a bar for each model: the share of its values, and how many these are.
function barsOf(rows) {
  const totals = models.map((_, place) => rows.reduce((total, [, counts]) => total + counts[place], 0));
  const longest = Math.max(...rows.flatMap(([, counts]) => counts.map((count, place) => count / (totals[place] || 1))));
  const bar = (count, place) => {
    const share = count / (totals[place] || 1);
    const style = `width: ${(100 * share / longest).toFixed(1)}%`;
    return element("div", `bar-row model-${place % 7}`, element("span", { class: "bar-fill", style }),
      element("span", { class: "bar-text", title: models[place] }, `${percent(share)} (${whole(count)})`));
  };
  const cells = rows.map(([label, counts]) => [label, element("div", "", counts.map(bar).filter((_, place) => totals[place]))]);
  return element("div", "bars", isAlone ? null : element("p", "legend", models.map((_, place) => named(place))), tableOf(["", "share (number)"], cells));
}

function ratingOf(rating, place) {
  const heads = ["contest", "rank", "among humans", "rating", "solved"];
  return element("figure", "chart", element("h4", "", isAlone ? null : named(place), `rating ${ratingText(rating)}`),
    rating.note ? element("p", "about", rating.note) : null,
    folded(`runs in contests: ${rating.contests.length}`, tableOf(heads, rating.contests)),
    rating.left_out.length ? folded(`contests that do not count: ${rating.left_out.length}`, tableOf(["contest", "why"], rating.left_out)) : null);
}

// Questions: which are listed, and in what order.

function countedQuestions(suite) {
  return suite.questions.map(([query, prompt, own, at], place) => ({
    query, prompt, place, at, own: own.map((row) => {
      if (!row) return null;
      const [count, judged, passed, mean, tokens, cut] = row;
      return { count, judged, passed, mean, tokens, cut, rate: judged ? passed / judged : null };
    }),
  }));
}

function questionColumns(suite, model) {
  const others = suite.differences[model], of = (name) => ({ own }) => own[model]?.[name] ?? null;
  const rates = models.map((label, place) => [`rate ${place}`, isAlone ? "right" : label, ({ own }) => own[place]?.rate ?? null, rateCell]);
  const change = ({ own }) => (own[0]?.rate == null || own[model]?.rate == null ? null : own[model].rate - own[0].rate);
  return [
    ["place", "question", ({ place }) => place, (_, row) => button(row.query, () => showQuestion(suite, row))],
    ["prompt", "prompt", ({ prompt }) => prompt, (prompt) => prompt],
    ...rates,
    ...(others && !others.why ? [["change", "change", change, (value) => (value > 0 ? "+" : "") + (value === null ? "–" : percent(value).replace("-", "−"))]] : []),
    ["mean", "mean reward", of("mean"), (value) => shortNumber(value, 3)],
    ["tokens", "mean tokens", of("tokens"), whole],
    ["cut", "cut off", of("cut"), whole],
    ["count", "responses", of("count"), whole],
  ];
}

function rateCell(rate, row) {
  return rate === null ? "–" : element("span", "rate", element("meter", { value: rate }), ` ${Math.round(100 * rate)} %`);
}

function listedQuestions(suite, model, columns) {
  const text = asked.text.value.toLowerCase(), own = suite.differences[model];
  const wanted = { won: own?.won, lost: own?.lost, changed: own?.won && [...own.won, ...own.lost] }[asked.changed.value];
  const changed = wanted && new Set(wanted);
  const [name, sign] = questionOrder, worthOf = (columns.find(([one]) => one === name) || columns[0])[2];
  const compare = (one, other) => (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : (one ?? -Infinity) - (other ?? -Infinity));
  return suite.rows
    .filter(({ query, prompt }) => `${query}\n${prompt}`.toLowerCase().includes(text))
    .filter(({ own }) => !asked.solved.value || (own[model] && SOLVED[asked.solved.value](own[model])))
    .filter(({ query }) => !changed || changed.has(query))
    .sort((one, other) => sign * compare(worthOf(one), worthOf(other)) || one.place - other.place);
}

function drawQuestions() {
  const suite = results.suites[asked.suite.value], model = Number(asked.model.value), columns = questionColumns(suite, model);
  asked.changed.parentElement.hidden = !suite.differences[model]?.won;
  if (asked.changed.parentElement.hidden) asked.changed.value = "";
  const rows = listedQuestions(suite, model, columns), [ordered, sign] = questionOrder;
  const heads = columns.map(([name, title]) =>
    button(title, () => { questionOrder = [name, name === ordered ? -sign : 1]; drawQuestions(); }));
  const table = tableOf(heads, rows.slice(0, ROWS_AT_ONCE).map((row) => columns.map(([, , worthOf, cellOf]) => cellOf(worthOf(row), row))));
  table.dataset.suite = suite.name; // another suite's table is another one, though it look alike: its buttons lead elsewhere
  table.querySelectorAll("th").forEach((head, place) => {
    head.ariaSort = columns[place][0] !== ordered ? "none" : sign > 0 ? "ascending" : "descending";
  });
  const shown = rows.length > ROWS_AT_ONCE ? `, the first ${ROWS_AT_ONCE} of them listed` : "";
  byId("num-questions").textContent =
    `${whole(rows.length)} of ${whole(suite.rows.length)} questions${shown}; a click shows responses. ${suite.coverage}`;
  renew(document.querySelector(".queries"), table);
  suite.listed = rows;
  showNeighbours();
}

// The number of questions that were won or lost leads here.
function askFor(suite, model, kind) {
  byId("asked").reset();
  [asked.suite.value, asked.model.value, asked.changed.value] = [results.suites.indexOf(suite), model, kind];
  drawQuestions();
  byId("questions").scrollIntoView();
}

// Responses to one question, of each model beside each other.

async function showQuestion(suite, row, isScrolled = true) {
  open = { suite, row };
  const content = row.at && (await chunkOf(suite, row.at[0]))[row.at[1]];
  if (open.row !== row) return; // another question was chosen meanwhile
  const sides = models.map((label, place) => row.own[place] && sideOf(row.own[place], content?.responses[place] ?? [], place));
  document.querySelector("#responses > div").replaceChildren(...[
    element("h3", "where", row.query),
    content ? element("pre", { class: "prompt", tabindex: 0 }, content.prompt) : element("p", "about", "This page does not carry its responses."),
    content?.columns ? element("p", "columns", content.columns) : null,
    element("div", isAlone ? "cards" : "cards sides", sides.filter(Boolean)),
  ].filter(Boolean));
  showNeighbours();
  if (isScrolled) byId("responses").scrollIntoView();
}

// Whether there is a question before, and after, the one that is shown in the list as it is filtered now.
function showNeighbours() {
  const listed = open?.suite.listed ?? [], place = listed.indexOf(open?.row);
  [answers.previous.disabled, answers.next.disabled] = [place < 1, place < 0 || place === listed.length - 1];
}

async function chunkOf(suite, number) {
  const packed = contents[results.suites.indexOf(suite)][number];
  if (!unpacked.has(packed)) unpacked.set(packed, unpack(packed));
  return unpacked.get(packed);
}

function sideOf({ count, judged, passed }, carried, place) {
  const isKept = ANSWERED[answers.verdict.value] || (() => true), equal = new Map();
  for (const response of carried.filter(isKept)) {
    const key = JSON.stringify([response.completion, response.passed, response.failure, response.extra]);
    equal.set(key, [...(equal.get(key) || []), response]);
  }
  const missing = carried.length < count ? `; this page carries ${carried.length}` : "";
  return element("div", "side", isAlone ? null : element("h4", "", named(place)),
    element("p", "about", `${passed} of ${judged} judged responses pass, of ${count}${missing}.`), [...equal.values()].map(answerCard));
}

function answerCard([response, ...copies]) {
  const [kind, verdict] = JUDGED[response.passed], { rewards, extra, finish_reason: end } = response;
  const pairs = (those) => Object.entries(those).map(([name, value]) => `${name}: ${textOfValue(value)}`);
  const facts = [
    ["reward", shortNumber(response.reward, 3)], ...(Object.keys(rewards).length > 1 ? [["functions", pairs(rewards).join(", ")]] : []),
    ["tokens", whole(response.tokens)], ["ended", { length: "cut off at the limit", stop: "by itself" }[end] || end],
  ];
  return element("article", `card ${kind}`,
    element("div", "verdicts", element("strong", `verdict ${kind}`, verdict),
      copies.length ? element("span", "note", `× ${copies.length + 1} equal responses`) : null),
    element("dl", "facts", facts.map(([name, value]) => element("div", "", element("dt", "", name), element("dd", "", value)))),
    response.failure ? element("p", "failure", response.failure) : null,
    element("pre", { class: "completion", tabindex: 0 }, response.completion),
    Object.keys(extra).length ? folded("logged by the verifier", element("pre", "", pairs(extra).join("\n"))) : null);
}

function textOfValue(value) {
  return typeof value === "object" && value !== null ? JSON.stringify(value) : String(value);
}

// Models and settings, and the page's life.

function evaluationSettings() {
  const tableOfLeaves = (trees) => {
    const keys = [...new Set(trees.flatMap((tree) => Object.keys(tree ?? {})))];
    return tableOf(["key", ...models], keys.map((key) => [element("code", "", key), ...trees.map((tree) => tree?.[key] ?? "–")]));
  };
  return [
    tableOfLeaves(results.models.map(({ about }) => about)),
    ...results.suites.map((suite) => folded(element("h3", "", suite.name), tableOfLeaves(suite.settings))),
  ];
}

// The models' colours, from the style, which has others for dark and for paper.
function colourModels() {
  for (let place = 0; place < 7; place++) document.documentElement.style.setProperty(`--model-${place}`, colourOf(place));
}

function fillChoice(select, options) {
  select.replaceChildren(...options.map((text, value) => element("option", { value: String(value) }, text)));
  select.parentElement.hidden = options.length < 2;
}

function startEvaluation() {
  dark.addEventListener("change", colourModels);
  for (const [event, isPaper] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => { document.documentElement.classList.toggle("paper", isPaper); colourModels(); });
  }
  addEventListener("submit", (event) => event.preventDefault());
  fillChoice(asked.suite, results.suites.map(({ name }) => name));
  fillChoice(asked.model, models);
  asked.model.value = String(models.length - 1);
  byId("asked").addEventListener("input", drawQuestions);
  answers.verdict.addEventListener("input", () => open && showQuestion(open.suite, open.row, false));
  for (const [name, change] of [["previous", -1], ["next", 1]]) {
    answers[name].onclick = () => showQuestion(open.suite, open.suite.listed[open.suite.listed.indexOf(open.row) + change], false);
  }
}

async function showEvaluation() {
  byId("written").textContent = `gspo evaluation page of ${results.written}`;
  for (const suite of results.suites) suite.rows = countedQuestions(suite);
  colourModels();
  startEvaluation();
  renew(document.querySelector("#overview > div"), evaluationOverview());
  renew(document.querySelector("#suites > div"), evaluationSuites());
  renew(document.querySelector("#settings > div"), evaluationSettings());
  if (results.suites.length) drawQuestions();
  contents = JSON.parse(byId("responses-data").textContent);
  const suite = results.suites[0], row = suite?.listed.find(({ at }) => at);
  if (row) await showQuestion(suite, row, false);
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds
}

showEvaluation().catch((error) => {
  const fix = typeof DecompressionStream === "undefined" ? " It needs a browser of 2023 or later." : "";
  document.querySelector("main").prepend(element("p", "broken", `This page could not be shown: ${error.message}.${fix}`));
  throw error;
});
