// Evaluations: the numbers of each suite, how models differ, and settings. Questions and responses are shown as those of a run are.

const isEvaluation = document.documentElement.dataset.kind === "evaluation";
const RATES = ["0 %", "to 25 %", "to 50 %", "to 75 %", "below 100 %", "100 %", "not judged"];
const COLUMNS = [
  ["pass@1 ± over questions", (own) => fixed(own.pass_at_1, own.error_over_questions)],
  ["± over samples", (own) => fixed(own.error_over_samples)],
  ["pass@k", ({ pass_at_k: rates }) => Object.entries(rates).slice(1).map(([k, rate]) => `${fixed(rate)} (k = ${k})`).at(-1) ?? "–"],
  ["mean reward", (own) => fixed(own.reward_mean, own.reward_error)],
  ["tokens", (own) => whole(own.mean_response_tokens)],
  ["cut off", (own) => numberText(own.truncated_fraction, { percent: true, digits: 3 })],
  ["rating", ({ rating }) => (rating ? ratingText(rating) : "–")],
  ["questions", (own) => whole(own.num_questions)],
  ["responses", (own) => whole(own.num_responses)],
  ["failed to judge", (own) => whole(own.num_failed)],
  ["not judged", (own) => whole(own.num_unjudged)],
  ["seconds sampling", (own) => whole(own.seconds_sampling)],
  ["seconds judging", (own) => whole(own.seconds_judging)],
];

const whole = (value) => Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–";

function fixed(value, error) {
  if (!Number.isFinite(value)) return "–";
  return [value, error].filter(Number.isFinite).map((number) => number.toFixed(3).replace("-", "−")).join(" ± ");
}

function ratingText({ rating, low, high, confidence }) {
  return `${whole(rating)} (${numberText(confidence, { percent: true })}: ${whole(low)} to ${whole(high)})`;
}

const coloured = (place) => ({ style: `--own: var(--line-${place % 7})` });
const named = (place) => element("span", { class: "model", ...coloured(place) }, page.models[place].label);

// A row for each suite and model, of the columns that have any number, and below it how the models differ.
function evaluationOverview() {
  const rows = page.suites.flatMap((suite) => suite.numbers.map((own, place) => own && [suite.name, place, own]).filter(Boolean));
  const used = COLUMNS.filter(([, textOf]) => rows.some(([, , own]) => textOf(own) !== "–"));
  const cells = rows.map(([name, place, own]) => [name, named(place), ...used.map(([, textOf]) => textOf(own))]);
  const table = tableOf(["suite", "model", ...used.map(([title]) => title)], cells);
  return [element("div", "numbers", table), ...(page.models.length > 1 ? differences() : [])];
}

function differences() {
  const rows = page.suites.flatMap((suite, number) => suite.differences.map((own, place) => {
    const leading = (kind) => button(whole(own[kind].length), () => askFor(number * page.models.length + place, kind));
    return own && [suite.name, named(place), ...(own.why ? [`not compared: ${own.why}`] : [
      (own.mean > 0 ? "+" : "") + fixed(own.mean, own.error_over_questions), fixed(own.error_over_samples), whole(own.num_questions) +
        (own.num_left_out ? ` (${whole(own.num_left_out)} left out: judged of one model alone)` : ""),
      leading("won"), leading("lost"), numberText(own.sign_test, { digits: 2 }),
    ])];
  })).filter(Boolean);
  const heads = ["suite", "model", "difference ± over questions", "± over samples", "questions", "won", "lost", "p of the sign test"];
  return [
    element("h3", "", "Paired differences in pass@1 from ", named(0)),
    element("div", "numbers differences", tableOf(heads, rows)),
    element("p", "hint", "Won and lost are questions that the model passes more, or less, often than the first. A click lists them."),
  ];
}

// The number of questions that were won or lost leads here.
function askFor(set, kind) {
  byId("which").reset();
  [which.set.value, which.changed.value] = [set, kind];
  drawQueries();
  byId("queries").scrollIntoView();
}

function evaluationSuites() {
  return page.suites.map((suite, number) => {
    const ratings = suite.numbers.map((own, place) => own?.rating && ratingOf(own.rating, place));
    return element("article", "", element("h3", "", suite.name),
      element("div", "charts", passAtK(suite), barsOf(number * page.models.length), ratings));
  });
}

// pass@k of each model over k, which doubles from mark to mark.
function passAtK({ numbers }) {
  const rates = numbers.map((own) => own?.pass_at_k ?? {}), x = [...new Set(rates.flatMap(Object.keys))].map(Number).sort((low, high) => low - high);
  if (x.length < 2) return null;
  const series = rates.map((own, place) => [page.models[place].label, x.map((k) => own[k] ?? null)]);
  const host = element("div", "");
  drawSeries(host, { title: "pass@k", unit: "fraction passed", xTitle: "k", doubling: true, x, series });
  return element("figure", "chart", element("h4", "", "pass@k"), host);
}

// How many questions have which share of right responses: in each row a bar for each model.
function barsOf(first) {
  const tables = page.models.map((_, place) => source.sets[first + place].table);
  const placeOf = ({ rate }) => (rate === null ? 6 : rate === 0 ? 0 : rate === 1 ? 5 : Math.max(1, Math.min(4, Math.ceil(4 * rate))));
  const bar = (share, count, place) => element("div", { class: "bar-row", ...coloured(place) },
    element("span", { class: "bar-fill", style: `width: ${100 * share}%` }),
    element("span", "bar-text", `${numberText(share, { percent: true, digits: 3 })} (${whole(count)})`));
  const counts = RATES.map((label, at) => [label, tables.map((table) => table.filter((row) => placeOf(row) === at).length)]);
  const cells = counts.filter(([, row]) => row.some(Boolean)).map(([label, row]) =>
    [label, row.map((count, place) => bar(count / (tables[place].length || 1), count, place))]);
  return element("figure", "chart bars", element("h4", "", "Questions by the share of responses that pass"), tableOf(["", "share (number)"], cells));
}

function ratingOf({ contests, left_out: others, note, ...rating }, place) {
  const solvedText = (solved) => Object.entries(solved).map(([index, tries]) => `${index} at try ${tries}`).join(", ") || "none";
  const rows = contests.map((own) => [own.name, numberText(own.rank), numberText(own.num_humans), numberText(own.rating), solvedText(own.solved)]);
  return element("figure", "chart", element("h4", "", named(place), `rating ${ratingText(rating)}`), element("p", "about", note),
    folded(`runs in contests: ${rows.length}`, tableOf(["contest", "rank", "among humans", "rating", "solved"], rows)),
    folded(`contests that do not count: ${Object.keys(others).length}`, tableOf(["contest", "why"], Object.entries(others))));
}

function evaluationSettings() {
  const tableOfLeaves = (trees) => {
    const keys = [...new Set(trees.flatMap((tree) => Object.keys(tree ?? {})))];
    return tableOf(["key", ...page.models.map(({ label }) => label)],
      keys.map((key) => [element("code", "", key), ...trees.map((tree) => tree?.[key] ?? "–")]));
  };
  const suites = page.suites.map((suite) => folded(element("h3", "", suite.name), tableOfLeaves(suite.settings)));
  return [tableOfLeaves(page.models.map(({ about }) => about)), ...suites];
}

function showEvaluation() {
  byId("written").textContent = `gspo evaluation page of ${page.written}`;
  renew(homeOf("overview"), evaluationOverview());
  renew(homeOf("suites"), evaluationSuites());
  renew(homeOf("recipe"), evaluationSettings());
}
