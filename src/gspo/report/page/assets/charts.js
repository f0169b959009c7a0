// Which charts there are, as data: families of charts, and for each the columns of numbers that it draws, in words.

const STAGES = ["publish", "rollout", "reward", "appraisal", "likelihood", "advantage", "update", "checkpoint", "evaluation"];
const QUANTILES = "ratio/sequence_quantiles"; // at 1, 5, 25, 50, 75, 95 and 99 %
const AXES = { steps: "step", tokens: "generated tokens", minutes: "time, minutes" };
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 4]];

// zero: the y axis starts there; percent: a fraction; linear: no log scale; wide: two places of three; evaluated: with the
// scores of every set, or of the one whose metrics begin so.
const CHARTS = {
  "Learning": [
    { title: "Reward, and score on held-out queries", unit: "reward; fraction passed", zero: true, evaluated: true, wide: true,
      lines: [["reward/mean", "mean reward in training"]] },
    { title: "Response length", unit: "tokens", zero: true, lines: [["response/mean_tokens", "mean length"]] },
    { title: "Responses cut off at the length limit", unit: "of the responses", percent: true,
      lines: [["response/truncated_fraction", "cut off"]] },
    { title: "Groups without a signal: all rewards equal", unit: "of the groups", percent: true,
      lines: [["group/zero_variance_fraction", "equal rewards"]] },
    { title: "Loss of the cold start", unit: "nats a token", xTitle: "step of the cold start", cold: true, zero: true,
      lines: [["loss", "loss"]] },
  ],
  "Ratio and clipping": [
    { title: "Sequence ratio: how far the updates moved the policy", unit: "ratio s", linear: true, quantiles: true, wide: true, digits: 5,
      lines: [] },
    { title: "Clipped: how much was left out of the gradient", unit: "clipped", percent: true,
      lines: [["clip/sequence_fraction", "of the sequences"], ["clip/token_fraction", "of the tokens"]] },
    { title: "Clipped tokens of better and worse responses", unit: "of the tokens", percent: true,
      lines: [["clip/token_fraction_positive", "better than their group"], ["clip/token_fraction_negative", "worse"]] },
    { title: "Effective sample size", unit: "fraction of the samples", digits: 6, lines: [["ratio/effective_fraction", "effective"]] },
    { title: "Why ratios differ from 1", unit: "log ratio a token, rms", zero: true,
      lines: [["ratio/staleness_log_std", "updates since sampling"], ["ratio/mismatch_log_std", "the engine: numerics, and its age"]] },
  ],
  "Policy": [
    { title: "Entropy", unit: "nats a token", zero: true, lines: [["policy/entropy", "entropy"]] },
    { title: "Gradient norm before clipping", unit: "norm", zero: true,
      lines: [["policy/grad_norm", "policy"], ["critic/grad_norm", "value model"]] },
    { title: "Signal to noise of the gradient", unit: "signal / noise", lines: [["gradient/signal_to_noise", "signal / noise"]] },
    { title: "Distance from the reference model", unit: "KL, nats a token", lines: [["reference/kl", "KL"]] },
    { title: "Variance of the returns that the value model explains", unit: "explained variance",
      lines: [["critic/explained_variance", "explained"]] },
  ],
  "Experts": [
    { title: "Experts that an update changes", unit: "of the choices", percent: true, wide: true,
      lines: [["moe/expert_change_fraction", "mean over layers"]] },
    { title: "Routers' balance loss", unit: "loss", lines: [["moe/balance_loss", "balance loss"]] },
  ],
  "Speed and memory": [
    { title: "Where the time of a step goes", unit: "seconds", zero: true, linear: true, stack: true,
      lines: STAGES.map((name) => [`time/${name}_seconds`, name]),
      whole: [["time/total_seconds", "whole step"]] },
    { title: "The bubble: when trainer (left) and engine (right) work in each step", unit: "seconds of the step", zero: true, linear: true,
      wide: true, timeline: true, lines: [] },
    { title: "Share of the step that is waited", unit: "of the step", percent: true, zero: true, linear: true,
      lines: [["source/trainer_idle_fraction", "trainer waits"], ["source/engine_idle_fraction", "engine stands still"]] },
    { title: "Groups ahead of the training", unit: "groups", zero: true, linear: true,
      lines: [["source/waiting", "sampled"], ["source/in_flight", "in flight"]] },
    { title: "Age of the tokens", unit: "steps", zero: true, linear: true,
      lines: [["staleness/mean", "mean"], ["staleness/max", "oldest"]] },
    { title: "Tokens by age in steps", unit: "tokens", zero: true, linear: true, stack: true, listed: "staleness/tokens_by_age",
      lines: [], whole: [["staleness/mean", "mean age"]] },
    { title: "Speed", unit: "tokens a second", zero: true,
      lines: [["throughput/generated_tokens_per_second", "generated"], ["throughput/trained_tokens_per_second", "trained"]] },
    { title: "Peak memory", unit: "MiB", zero: true, scale: 2 ** -20, lines: [["memory/peak_bytes", "most held so far"]] },
  ],
};

let page = null; // the data
let arms = [];
let coldArms = [];
const view = byId("view").elements; // the x axis, its range, smoothing, log scale: what the form says

function load(data) {
  page = { ...data, lists: new Map(), definitions: new Map(Object.entries(data.definitions)) };
  const allOf = ({ columns, steps, tokens, minutes }) => Object.entries({ ...columns, steps, tokens, minutes });
  const runs = data.runs.map((run) => ({ ...run, columns: new Map(allOf(run).flatMap(columnsIn)) }));
  const cold = data.runs.map((run) => ({ steps: run.cold_start.step, columns: new Map([["loss", run.cold_start.loss]]) }));
  const armsOf = (those) => data.arms.map((arm, number) => armOf(arm.label, number, arm.runs.map((place) => those[place])));
  [arms, coldArms] = [armsOf(runs), armsOf(cold)];
}

// A column of a run; of lists a column for each of their places.
function columnsIn([name, values]) {
  const length = Math.max(0, ...values.filter(Array.isArray).map((list) => list.length));
  if (!length) return [[name, values]];
  const names = Array.from({ length }, (_, place) => `${name}/${place}`);
  if (!(page.lists.get(name)?.length > length)) page.lists.set(name, names);
  return names.map((own, place) => [own, values.map((list) => list?.[place])]);
}

function armOf(label, number, runs) {
  const steps = [...new Set(runs.flatMap((run) => run.steps))].sort((low, high) => low - high);
  return { label, number, runs, steps, series: new Map(), rows: runs.map((run) => new Map(run.steps.map((step, row) => [step, row]))) };
}

const meanOf = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

// A number's mean and standard deviation (n − 1) over the runs that have it at a step.
function seriesOf(arm, column) {
  if (!arm.series.has(column)) arm.series.set(column, spreadOf(arm, column));
  return arm.series.get(column);
}

function spreadOf(arm, column) {
  const rows = arm.steps.map((step) =>
    arm.runs.map((run, number) => run.columns.get(column)?.[arm.rows[number].get(step)]).filter(Number.isFinite));
  if (!rows.some((row) => row.length)) return null;
  const means = rows.map(meanOf), deviations = rows.map(deviationOf);
  if (arm.steps[0] === 0 && means[0] === null) means[0] = undefined; // before training there is nothing, not a gap
  return { means, deviations, spreads: deviations.some((deviation) => deviation !== null) };
}

function deviationOf(values) {
  const mean = meanOf(values);
  return values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1)) : null;
}

// Where an arm's steps lie on the x axis.
const xOf = (arm) => seriesOf(arm, view.axis.value)?.means ?? arm.steps;

// By family; where the runs are evaluated on several sets, with a chart of each.
function chartsByFamily() {
  const homes = page.measures.filter(isPassRate).map(([name]) => homeOfMetric(name)), { Learning, ...others } = CHARTS;
  const words = { unit: "fraction passed; reward", zero: true, lines: [] };
  const charts = homes.map((home) => ({ ...words, title: `Score on ${home.replace("evaluation/", "")}`, evaluated: home }));
  return homes.length < 2 ? CHARTS : { Learning, "Evaluated sets": charts, ...others };
}

const isPassRate = ([name]) => name.endsWith("/pass_at_1");
const homeOfMetric = (name) => name.slice(0, name.lastIndexOf("/"));

// The scores that a chart draws, with words and error: of several sets pass@1 alone, of one set all that it has.
function scoresOf({ evaluated }, alone) {
  if (!evaluated) return [];
  if (evaluated === true) return page.measures.filter((own) => isPassRate(own) || (alone && page.measures.filter(isPassRate).length < 2));
  const own = page.measures.filter(([name]) => homeOfMetric(name) === evaluated), start = `${evaluated}/pass_at_`;
  const names = [...new Set(arms.flatMap((arm) => arm.runs.flatMap((run) => [...run.columns.keys()])))];
  const ks = names.filter((name) => name.startsWith(start)).map((name) => Number(name.slice(start.length))).filter((k) => k > 1);
  return alone ? [...own, ...ks.map((k) => [start + k, `pass@${k}`])] : own.filter(isPassRate);
}

const scaled = (values, factor) => values?.map((value) => (Number.isFinite(value) ? value * factor : value));

// What a chart draws: a line for each column of each arm. Arms differ by colour, columns by dashes, or colour in a single arm.
function modelOf(spec) {
  const those = spec.cold ? coldArms : arms, alone = those.length === 1;
  if (spec.timeline) return timelineOf(spec);
  const isKnown = ([name]) => those.some((arm) => seriesOf(arm, name));
  const places = spec.listed ? (page.lists.get(spec.listed) || []).map((name, place) => [name, `age ${place}`]) : spec.lines;
  const lines = (spec.stack && !alone ? spec.whole : places).filter(isKnown); // of several, what a step takes in all
  const measures = scoresOf(spec, alone).filter(isKnown);
  const count = lines.length + measures.length;
  const looks = (arm, place, words) => ({
    label: alone ? words : count > 1 ? `${arm.label}: ${words}` : arm.label,
    colour: alone ? place : arm.number,
    dash: DASHES[alone ? 0 : place % DASHES.length],
    x: spec.cold ? arm.steps : xOf(arm),
  });
  const series = those.flatMap((arm) => [
    ...(spec.quantiles ? quantilesOf(arm) : []),
    ...lines.map(([name, words], place) => lineOf(seriesOf(arm, name), looks(arm, place, words), spec.scale)),
    ...measures.map(([name, words, error], place) => pointsOf(arm, name, error, looks(arm, lines.length + place, words))),
  ]).filter(Boolean);
  if (!series.length) return null;
  return {
    ...spec, zero: spec.zero || spec.percent, shared: !spec.cold, xTitle: spec.xTitle || AXES[view.axis.value],
    metric: spec.quantiles ? QUANTILES : (lines[0] || measures[0])?.[0],
    series: spec.stack && alone ? stackOf(series) : series,
  };
}

// Of one run, a bar a step for the trainer and one for the engine, filled while they work; in the legend the sums of that.
function timelineOf(spec) {
  const [arm] = arms, [run] = arm.runs;
  if (arms.length > 1 || arm.runs.length > 1 || !seriesOf(arm, "source/trainer_idle_fraction")) return null;
  const bars = arm.steps.map((step) => {
    const row = arm.rows[0].get(step), whole = run.columns.get("time/total_seconds")?.[row];
    const momentsOf = (name) => (page.lists.get(name) || []).map((column) => run.columns.get(column)[row]).filter(Number.isFinite);
    const begun = Number.isFinite(run.columns.get("source/trainer_idle_fraction")?.[row]); // else by an earlier process
    const waits = momentsOf("source/trainer_waited_seconds"), samples = momentsOf("source/engine_sampled_seconds");
    return { whole, lanes: begun ? [[0, ...waits, whole], samples].map((moments) => pairsOf(moments, whole)) : [[], []] }; // the trainer works between its waits
  });
  const looks = (label, colour) => ({ label, colour, x: xOf(arm), hidden: true, stepped: true });
  const summed = (lane) => bars.map(({ whole, lanes }) => Number.isFinite(whole) ? lanes[lane].reduce((sum, [from, to]) => sum + to - from, 0) : null);
  const series = [
    { ...looks("trainer works", 0), y: summed(0) }, { ...looks("engine samples", 1), y: summed(1) },
    { ...looks("whole step", 2), y: bars.map(({ whole }) => whole) },
  ];
  return { ...spec, shared: true, xTitle: AXES[view.axis.value], metric: "source/trainer_waited_seconds", bars, series };
}

function pairsOf(moments, end) {
  const within = moments.map((moment) => Math.min(moment, end));
  return within.flatMap((moment, place) => (place % 2 ? [[within[place - 1], moment]] : []));
}

// A line; of several seeds with the band of one standard deviation around it.
function lineOf(series, looks = {}, scale = 1) {
  if (!series) return null;
  const y = scaled(series.means, scale), deviations = scaled(series.deviations, scale);
  const edge = (sign) => y.map((value, place) => (Number.isFinite(value) ? value + sign * (deviations[place] || 0) : value));
  return { ...looks, y, ...(series.spreads && { deviations, low: edge(-1), high: edge(1) }) };
}

// A number that few steps have: points, with its standard error, or the deviation over seeds, as bars.
function pointsOf(arm, name, error, looks) {
  const series = seriesOf(arm, name);
  if (!series) return null;
  const bars = series.spreads ? series.deviations : seriesOf(arm, error)?.means ?? [];
  const there = arm.steps.map((_, place) => place).filter((place) => Number.isFinite(series.means[place]));
  const pick = (values) => there.map((place) => values[place] ?? null);
  return { ...looks, points: true, x: pick(looks.x), y: pick(series.means), deviations: pick(bars) };
}

// Of a single arm 1 to 99, 5 to 95 and 25 to 75 % of the sequences, of several 5 to 95 %; the middle; what is not clipped.
function quantilesOf(arm) {
  const rows = (page.lists.get(QUANTILES) || []).map((column) => seriesOf(arm, column)?.means), alone = arms.length === 1;
  if (rows.length < 7 || !rows.every(Boolean)) return [];
  const looks = (words) => ({ label: alone ? words : `${arm.label}: ${words}`, colour: arm.number, x: xOf(arm) });
  const band = (low, high, share, opacity) => ({ ...looks(`${share} of the sequences`), opacity, low: rows[low], high: rows[high] });
  const limit = (name, sign, words) => {
    const width = arm.runs[0].clips_sequences && seriesOf(arm, name)?.means;
    const y = width && scaled(width, sign).map((value) => value && 1 + value);
    return y && { ...looks(words), colour: alone ? 1 : arm.number, dash: [5, 4], width: 1.5, y };
  };
  return [
    alone && { ...band(0, 6, "1–99 %", 0.12), auto: false }, band(1, 5, "5–95 %", 0.18), alone && band(2, 4, "25–75 %", 0.3),
    { ...looks("middle (50 %)"), y: rows[3] },
    limit("clip/high", 1, "upper limit: 1 + clip high"), limit("clip/low", -1, "lower limit: 1 − clip low"),
  ].filter(Boolean);
}

// Layers that lie on each other.
function stackOf(curves) {
  let high = curves[0].x.map(() => 0);
  return curves.map((curve) => {
    const low = high;
    high = low.map((sum, place) => sum + (curve.y[place] || 0));
    return { ...curve, low, high, shown: curve.y, y: null, opacity: 0.6, stepped: true };
  });
}

// A chart of any metric: of a list as many curves as the page has of it.
function anyModel(metric) {
  const columns = page.lists.get(metric) || [metric];
  return modelOf({ title: metric, unit: "value", lines: columns.map((column) => [column, column.slice(metric.length + 1) || metric]) });
}
