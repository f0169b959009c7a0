// Which charts there are, as data: families of charts, and for each the columns of numbers that it draws, in words.

const STAGES = ["rollout", "reward", "appraisal", "likelihood", "advantage", "update", "checkpoint", "evaluation"];
const QUANTILES = "ratio/sequence_quantiles"; // at 1, 5, 25, 50, 75, 95 and 99 %
const BY_LAYER = "moe/expert_change_fraction_by_layer";

// zero: the y axis starts there; percent: a fraction; linear: no log scale; wide: two places of three.
const CHARTS = {
  "Learning": [
    { title: "Reward, and score on held-out queries", unit: "reward; fraction passed", zero: true, evaluated: true, wide: true,
      lines: [["reward/mean", "mean reward in training"]] },
    { title: "Response length", unit: "tokens", zero: true, lines: [["response/mean_tokens", "mean length"]] },
    { title: "Responses cut off at the length limit", unit: "of the responses", percent: true, lines: [["response/truncated_fraction", "cut off"]] },
    { title: "Groups without a signal: all rewards equal", unit: "of the groups", percent: true, lines: [["group/zero_variance_fraction", "equal rewards"]] },
    { title: "Loss of the cold start", unit: "nats a token", xTitle: "step of the cold start", cold: true, zero: true, lines: [["loss", "loss"]] },
  ],
  "Ratio and clipping": [
    { title: "Sequence ratio: how far the updates moved the policy", unit: "ratio s", linear: true, quantiles: true, wide: true, digits: 5, lines: [] },
    { title: "Clipped: how much was left out of the gradient", unit: "clipped", percent: true,
      lines: [["clip/sequence_fraction", "of the sequences"], ["clip/token_fraction", "of the tokens"]] },
    { title: "Clipped tokens of better and worse responses", unit: "of the tokens", percent: true,
      lines: [["clip/token_fraction_positive", "better than their group"], ["clip/token_fraction_negative", "worse"]] },
    { title: "Effective sample size", unit: "fraction of the samples", digits: 6, lines: [["ratio/effective_fraction", "effective"]] },
    { title: "Why ratios differ from 1", unit: "log ratio a token, rms", zero: true,
      lines: [["ratio/staleness_log_std", "updates since sampling"], ["ratio/mismatch_log_std", "numerics of the engine"]] },
  ],
  "Policy": [
    { title: "Entropy", unit: "nats a token", zero: true, lines: [["policy/entropy", "entropy"]] },
    { title: "Gradient norm before clipping", unit: "norm", zero: true, lines: [["policy/grad_norm", "policy"], ["critic/grad_norm", "value model"]] },
    { title: "Signal to noise of the gradient", unit: "signal / noise", lines: [["gradient/signal_to_noise", "signal / noise"]] },
    { title: "Distance from the reference model", unit: "KL, nats a token", lines: [["reference/kl", "KL"]] },
    { title: "Variance of the returns that the value model explains", unit: "explained variance", lines: [["critic/explained_variance", "explained"]] },
  ],
  "Experts": [
    { title: "Experts that an update changes", unit: "of the choices", percent: true, layers: true, wide: true, lines: [["moe/expert_change_fraction", "mean over layers"]] },
    { title: "Routers' balance loss", unit: "loss", lines: [["moe/balance_loss", "balance loss"]] },
  ],
  "Speed and memory": [
    { title: "Where the time of a step goes", unit: "seconds", zero: true, linear: true, stack: true, lines: STAGES.map((name) => [`time/${name}_seconds`, name]),
      whole: [["time/total_seconds", "whole step"]] },
    { title: "Speed", unit: "tokens a second", zero: true,
      lines: [["throughput/generated_tokens_per_second", "generated"], ["throughput/trained_tokens_per_second", "trained"]] },
    { title: "Peak memory", unit: "MiB", zero: true, scale: 2 ** -20, lines: [["memory/peak_bytes", "most held so far"]] },
  ],
};

let page = null; // the data
let arms = [];
let coldArms = [];
const view = { axis: "steps", smoothing: 1, log: false, range: null }; // range: [from, to] of the x axis; null: all

function load(data) {
  page = { ...data, lists: new Map(Object.entries(data.lists).map(([name, places]) => [name, places.map((place) => name + place)])) };
  const runs = data.runs.map((run) => ({ ...run, columns: new Map(Object.entries(run.columns)) }));
  const cold = data.runs.map((run) => ({ steps: run.cold_start.step, columns: new Map([["loss", run.cold_start.loss]]) }));
  arms = data.arms.map((arm, number) => armOf(arm.label, number, arm.runs.map((place) => runs[place])));
  coldArms = data.arms.map((arm, number) => armOf(arm.label, number, arm.runs.map((place) => cold[place])));
}

function armOf(label, number, runs) {
  const steps = [...new Set(runs.flatMap((run) => run.steps))].sort((low, high) => low - high);
  return { label, number, runs, steps, series: new Map(), rows: runs.map((run) => new Map(run.steps.map((step, row) => [step, row]))) };
}

function meanOf(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

// Mean and standard deviation (n − 1) over the runs that have the number at a step; null where that is none.
function seriesOf(arm, column) {
  if (!arm.series.has(column)) arm.series.set(column, spreadOf(arm, (run) => run.columns.get(column)));
  return arm.series.get(column);
}

function spreadOf(arm, valuesOf) {
  const rows = arm.steps.map((step) => arm.runs.map((run, number) => valuesOf(run)?.[arm.rows[number].get(step)]).filter(Number.isFinite));
  if (!rows.some((row) => row.length)) return null;
  const means = rows.map(meanOf);
  const deviations = rows.map((row, place) =>
    row.length > 1 ? Math.sqrt(row.reduce((sum, value) => sum + (value - means[place]) ** 2, 0) / (row.length - 1)) : null);
  if (arm.steps[0] === 0 && means[0] === null) means[0] = undefined; // before training there is nothing, not a gap
  return { means, deviations, spreads: deviations.some((deviation) => deviation !== null) };
}

function axisTitle() {
  if (view.axis === "steps") return "step";
  return view.axis === "tokens" ? "generated tokens" : `time, ${secondsAUnit() === 60 ? "minutes" : "hours"}`;
}

function secondsAUnit() {
  const longest = Math.max(0, ...arms.flatMap((arm) => arm.runs.map((run) => run.seconds.at(-1) ?? 0)));
  return longest > 2 * 3600 ? 3600 : 60;
}

// Where an arm's steps lie on the x axis.
function xOf(arm) {
  if (view.axis === "steps" || arm.runs[0].seconds === undefined) return arm.steps;
  const scale = view.axis === "seconds" ? 1 / secondsAUnit() : 1;
  return spreadOf(arm, (run) => run[view.axis])?.means.map((value) => (value === null ? null : value * scale)) ?? arm.steps;
}

function dashOf(number) {
  return [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 4]][number % 5];
}

// What a chart draws: a line for each column of each arm; arms differ by colour, columns by dashes, or colour in a single arm.
function modelOf(spec) {
  const those = spec.cold ? coldArms : arms;
  const several = spec.stack && arms.length > 1; // then what a step takes in all
  const known = (several ? spec.whole : spec.lines).filter(([column]) => those.some((arm) => seriesOf(arm, column)));
  const evaluated = spec.evaluated ? page.measures.filter(([, name]) => (arms.length === 1 || name.endsWith("/pass_at_1")) && arms.some((arm) => seriesOf(arm, name))) : [];
  const count = known.length + evaluated.length;
  const looks = (arm, place, words) => ({
    label: those.length === 1 ? words : count > 1 ? `${arm.label}: ${words}` : arm.label,
    colour: those.length === 1 ? place : arm.number,
    dash: dashOf((those.length === 1 ? Math.floor(place / 7) : place) + Math.floor(arm.number / 7)),
    x: spec.cold ? arm.steps : xOf(arm),
  });
  const series = those.flatMap((arm) => [
    ...(spec.quantiles ? quantilesOf(arm) : []),
    ...(spec.layers ? layersOf(arm) : []),
    ...known.map(([column, words], place) => lineOf(seriesOf(arm, column), looks(arm, place, words), spec.scale || 1)),
    ...evaluated.map(([words, name, error], place) => pointsOf(arm, name, error, looks(arm, known.length + place, words))),
  ]).filter((curve) => curve !== null);
  const metrics = [...known.map(([column]) => column), ...(spec.quantiles ? [QUANTILES] : [])];
  const zero = spec.zero || spec.percent;
  const limit = spec.quantiles ? clipRanges() : null; // the y axis ends there: an odd sequence would flatten the rest
  return series.length ? { ...spec, zero, limit, metrics, series: spec.stack && !several ? stackOf(series, 0.005) : series, shared: !spec.cold, xTitle: spec.xTitle || axisTitle() } : null;
}

function lineOf(series, looks, scale) {
  if (!series) return null;
  const times = (values) => values.map((value) => (Number.isFinite(value) ? value * scale : value));
  const y = times(series.means);
  if (!series.spreads) return { ...looks, y };
  const deviations = times(series.deviations);
  return { ...looks, y, deviations, low: y.map((value, place) => value === null ? null : value - (deviations[place] || 0)),
    high: y.map((value, place) => value === null ? null : value + (deviations[place] || 0)) };
}

// A number that few steps have: points, with its standard error, or the deviation over seeds, as bars.
function pointsOf(arm, name, error, looks) {
  const series = seriesOf(arm, name);
  if (!series) return null;
  const kept = arm.steps.map((_, place) => place).filter((place) => Number.isFinite(series.means[place]));
  const bars = series.spreads ? series.deviations : seriesOf(arm, error)?.means ?? [];
  return { ...looks, points: true, x: kept.map((place) => looks.x[place]), y: kept.map((place) => series.means[place]), deviations: kept.map((place) => bars[place] ?? null) };
}

// Of a single arm 1 to 99, 5 to 95 and 25 to 75 % of the sequences, of several 5 to 95 %; the middle; the range that is not clipped.
function quantilesOf(arm) {
  const rows = (page.lists.get(QUANTILES) || []).map((column) => seriesOf(arm, column)?.means);
  if (rows.length < 7 || rows.some((row) => !row)) return [];
  const alone = arms.length === 1, x = xOf(arm), who = alone ? "" : `${arm.label}: `;
  const band = (low, high, share, opacity) => ({ label: `${who}${share} of the sequences`, colour: arm.number, opacity, x, low: rows[low], high: rows[high] });
  const bands = [band(1, 5, "5–95 %", alone ? 0.16 : 0.2)];
  if (alone) bands.splice(0, 1, band(0, 6, "1–99 %", 0.12), bands[0], band(2, 4, "25–75 %", 0.3));
  const [down, up] = ["clip/low", "clip/high"].map((name) => arm.runs[0].clips_sequences && seriesOf(arm, name)?.means);
  const limit = (values, sign, label) => values && { label: who + label, colour: alone ? 1 : arm.number, dash: [5, 4], width: 1.5, x,
    y: values.map((value) => (Number.isFinite(value) ? 1 + sign * value : value)) };
  return [...bands, { label: `${who}middle (50 %)`, colour: arm.number, dash: dashOf(Math.floor(arm.number / 7)), x, y: rows[3] },
    limit(up, 1, "upper limit: 1 + clip high"), limit(down, -1, "lower limit: 1 − clip low")].filter(Boolean);
}

// From the layer with the least to the layer with the most, at each step.
function layersOf(arm) {
  const rows = (page.lists.get(BY_LAYER) || []).map((column) => seriesOf(arm, column)?.means).filter(Boolean);
  if (rows.length < 2) return [];
  const over = (pick) => arm.steps.map((_, place) => {
    const values = rows.map((row) => row[place]).filter(Number.isFinite);
    return values.length ? pick(...values) : null;
  });
  const label = `${arms.length > 1 ? `${arm.label}: ` : ""}least to most changed layer`;
  return [{ label, colour: arm.number, x: xOf(arm), low: over(Math.min), high: over(Math.max) }];
}

// How far from 1 the ratio chart goes at most: eight clip ranges.
function clipRanges() {
  const widths = arms.flatMap((arm) => ["clip/low", "clip/high"].flatMap((name) => (arm.runs[0].clips_sequences && seriesOf(arm, name)?.means) || [])).filter((width) => width > 0);
  return widths.length ? 8 * Math.max(...widths) : null;
}

// Layers that lie on each other, without those that are smaller than a share of the largest.
function stackOf(series, share = 0) {
  const sums = series.map((curve) => curve.y.reduce((sum, value) => sum + (value || 0), 0)), least = share * Math.max(...sums);
  let below = series[0].x.map(() => 0);
  return series.filter((_, place) => sums[place] >= least).map((curve, colour) => {
    const low = below;
    below = low.map((sum, place) => sum + (curve.y[place] || 0));
    return { ...curve, colour, dash: [], low, high: below, shown: curve.y, y: null, opacity: 0.6, stepped: true };
  });
}

// A chart of any metric: of a list as many curves as the page has of it.
function anyModel(metric) {
  const columns = page.lists.get(metric) || [metric];
  return modelOf({ title: metric, unit: "value", lines: columns.map((column) => [column, column.slice(metric.length + 1) || metric]) });
}
