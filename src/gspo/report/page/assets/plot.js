// Drawing a chart by uPlot, in the colours of the theme; all charts over steps show the same range of them.

const plots = new Map(); // element -> make(), which gives what is drawn, null for nothing; the chart is the element's `chart`
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((first) => first * 10 ** power)); // between two marks of an axis of steps
const PAPER_WIDTH = 640; // pixels, of A4 and of US letter
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const { chart } = target;
    if (chart && !onPaper && target.clientWidth && chart.width !== target.clientWidth) chart.setSize({ width: target.clientWidth, height: chart.height });
  }
});
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting && !target.chart) drawPlot(target);
}, { rootMargin: "300px" });

// A place for a chart, which is drawn when it comes into view.
function placePlot(host, make) {
  plots.set(host, make);
  host.classList.add("plot");
  host.tabIndex = 0;
  seen.observe(host);
  resized.observe(host);
}

function removePlots(within) {
  for (const host of plots.keys()) {
    if (!within.contains(host)) continue;
    host.chart?.destroy();
    host.chart = null;
    plots.delete(host);
    seen.unobserve(host);
    resized.unobserve(host);
  }
}

function repaintAll() {
  for (const host of plots.keys()) if (host.chart || onPaper) drawPlot(host);
}

// For others: { title, unit, xTitle, x, series: [{ label, values }], kind: "lines" | "points" | "stack", low, high }.
function drawSeries(host, { unit, xTitle, x, series, kind, low, high, percent, title = "" }) {
  const stack = kind === "stack";
  const lines = series.map(({ label, values }, place) => ({ label, colour: place, dash: dashOf(Math.floor(place / 7)), x, y: values, points: kind === "points" }));
  removePlots(host);
  placePlot(host, () => ({ title, unit, xTitle, percent, linear: stack, zero: stack, limits: [low, high], series: stack ? stackOf(lines) : lines, shared: false }));
}

function drawPlot(host) {
  const model = plots.get(host)();
  host.chart?.destroy();
  host.chart = null;
  if (!model) return host.replaceChildren();
  const key = element("ul", "key");
  host.replaceChildren(key);
  host.chart = new uPlot(optionsOf(host, model, key), dataOf(model), (chart, start) => { host.prepend(chart.root); start(); });
  host.chart.model = model;
  listenToKeys(host, host.chart);
}

function smoothed(values) {
  if (!values || view.smoothing < 2) return values;
  return values.map((value, place) => {
    if (!Number.isFinite(value)) return value;
    return meanOf(values.slice(Math.max(0, place - view.smoothing + 1), place + 1).filter(Number.isFinite));
  });
}

function isLog(model) {
  return view.log && !model.linear && model.series.some((curve) => (curve.y || []).some((value) => value > 0));
}

// The columns that uPlot draws, each with its options: for an area its two edges, for a line the line, and a faint line of what was smoothed.
function columnsOf(model) {
  return model.series.flatMap((curve) => {
    const colour = colourOf(curve.colour), smooth = curve.points || curve.stepped ? (values) => values : smoothed;
    const paths = curve.stepped ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.linear();
    const few = (curve.y || curve.high).filter(Number.isFinite).length < 3;
    const line = { stroke: colour, width: curve.width || 2, dash: curve.dash, paths, points: { show: few, size: 6, fill: colour } };
    const edge = { width: curve.stepped ? 1 : 0, stroke: curve.stepped ? colour : undefined, paths, points: { show: false } };
    const made = [];
    if (curve.high) made.push([curve, smooth(curve.high), { ...edge, area: withOpacity(colour, curve.opacity || 0.18) }], [curve, smooth(curve.low), { ...edge, width: 0 }]);
    if (curve.y && smooth(curve.y) !== curve.y && !curve.high) made.push([curve, curve.y, { ...line, width: 1, stroke: withOpacity(colour, 0.3), points: { show: false } }]);
    if (curve.points) made.push([curve, curve.y, { ...line, width: few ? 0 : 1, dash: [2, 4], spanGaps: true, points: { show: true, size: 8, fill: colour } }]);
    else if (curve.y) made.push([curve, smooth(curve.y), line]);
    return made;
  });
}

// The same x for all; undefined where a curve has no point there, null where it has a gap.
function dataOf(model) {
  const xs = [...new Set(model.series.flatMap((curve) => curve.x))].filter(Number.isFinite).sort((low, high) => low - high);
  const places = new Map(xs.map((x, place) => [x, place]));
  const log = isLog(model);
  const spread = (x, values) => {
    const made = Array(xs.length).fill(undefined);
    x.forEach((at, place) => { if (places.has(at)) made[places.get(at)] = log && values[place] <= 0 ? null : values[place]; });
    return made;
  };
  return [xs, ...columnsOf(model).map(([curve, values]) => spread(curve.x, values))];
}

function optionsOf(host, model, key) {
  const columns = columnsOf(model), [ink, grid] = [cssColour("--quiet"), cssColour("--grid")], log = isLog(model);
  const axis = { stroke: ink, font: "12px system-ui", labelFont: "12px system-ui", labelSize: 18, ticks: { stroke: grid, size: 4 }, grid: { stroke: grid, width: 1 } };
  const bands = columns.flatMap(([, , { area }], place) => (area ? [{ series: [place + 1, place + 2], fill: area }] : []));
  return {
    width: onPaper ? PAPER_WIDTH : host.clientWidth || 360, height: matchMedia("(max-width: 600px)").matches ? 210 : 240,
    padding: [10, 14, 0, 0],
    series: [{}, ...columns.map(([, , { area, ...options }]) => options)],
    bands, legend: { show: false },
    scales: { x: { time: false, range: (chart) => rangeOf(chart, model) }, y: { distr: log ? 3 : 1, range: (_, low, high) => heightOf(model, low, high, log) } },
    axes: [
      { ...axis, label: model.xTitle, size: 26, ...(model.xTitle.startsWith("step") ? { incrs: WHOLE } : {}), values: (_, splits) => splits.map((value) => numberText(value, { digits: 6 })) },
      { ...axis, label: model.unit, size: (_, values) => 12 + 7 * Math.max(3, ...(values || []).map((text) => (text || "").length)),
        values: (_, splits) => splits.map((value) => (value === null ? "" : numberText(value, { ...model, digits: 6 }))) },
    ],
    cursor: {
      drag: { x: model.shared && !matchMedia("(pointer: coarse)").matches, y: false, setScale: false }, // a finger that scrolls must not zoom
      points: { size: 6 },
      bind: { dblclick: () => () => zoom(null) },
      ...(model.shared ? { sync: { key: "steps", setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } } } : {}),
    },
    hooks: {
      draw: [(chart) => drawBars(chart, model), (chart) => drawMarks(chart, model)],
      setCursor: [(chart) => tellKey(chart, model, key)],
      setSelect: [(chart) => {
        const { left, width } = chart.select;
        if (width > 3) zoom([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
        chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
      ready: [(chart) => tellKey(chart, model, key)],
    },
  };
}

function fullRange() {
  const xs = arms.flatMap(xOf).filter(Number.isFinite);
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  return xs.length === 0 ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// What is in view; an end that is not chosen goes on with the run.
function shownRange() {
  const [low, high] = fullRange(), [from, to] = view.range || [null, null];
  return [from ?? low, to ?? high];
}

function rangeOf(chart, model) {
  if (model.shared) return shownRange();
  const xs = chart.data[0];
  return (xs.length > 1 ? [xs[0], xs.at(-1)] : [(xs[0] ?? 0) - 0.5, (xs[0] ?? 0) + 0.5]);
}

function heightOf(model, low, high, log) {
  if (low === null || !Number.isFinite(low)) return log ? [0.1, 1] : [0, 1];
  if (log) return uPlot.rangeLog(low, high, 10, false);
  for (const limit of model.limits || []) if (Number.isFinite(limit)) [low, high] = [Math.min(low, limit), Math.max(high, limit)];
  for (const curve of model.series) if (curve.points) curve.y.forEach((value, place) => { [low, high] = [Math.min(low, value - (curve.deviations?.[place] || 0)), Math.max(high, value + (curve.deviations?.[place] || 0))]; });
  if (model.limit) [low, high] = [Math.max(low, 1 - model.limit), Math.min(high, 1 + model.limit)];
  const spare = 0.06 * (high - low || Math.abs(high) || 1);
  if (!model.zero) return [low - spare, high + spare];
  const top = Math.max(high, model.percent ? 0.01 : 0);
  return [low < 0 ? low - spare : 0, top > 0 ? top * 1.06 : low < 0 ? 0 : 1];
}

// The same range of steps in every chart; a chart of steps of its own is always shown whole.
function zoom(range) {
  view.range = range;
  remember("range", range);
  for (const { chart } of plots.keys()) if (chart?.model.shared) chart.setScale("x", { min: 0, max: 1 }); // which asks rangeOf
  tellRange();
}

function numberText(value, { percent, digits = 4 } = {}) {
  if (!Number.isFinite(value)) return "–";
  if (percent) return `${+(value * 100).toPrecision(Math.min(digits, 4))} %`;
  if (Math.abs(value) >= 1e5) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: digits }).format(value);
  return String(+value.toPrecision(digits)).replace("-", "−");
}

// The last number up to a place of the chart's x.
function upTo(x, values, limit) {
  for (let place = x.length - 1; place >= 0; place--) if (x[place] <= limit && Number.isFinite(values[place])) return place;
  return -1;
}

function withSpread(mean, deviation, options) {
  return numberText(mean, options) + (Number.isFinite(deviation) ? ` ± ${numberText(deviation, { ...options, digits: 2 })}` : "");
}

function shownText(curve, model, limit) {
  const values = curve.shown || curve.y || curve.high, place = upTo(curve.x, values, limit);
  if (place < 0) return "–";
  if (values === curve.high) return `${numberText(curve.low[place], model)} … ${numberText(curve.high[place], model)}`;
  return withSpread(values[place], curve.deviations?.[place], model);
}

// Below a chart, what its lines are, and their numbers under the cursor; without a cursor the last ones in view.
function tellKey(chart, model, key) {
  const xs = chart.data[0], limit = xs[chart.cursor.idx ?? upTo(xs, xs, chart.scales.x.max ?? Infinity)] ?? 0;
  if (key.limit === limit && key.children.length) return;
  key.limit = limit;
  const where = `${model.xTitle} ${numberText(limit, { digits: Number.isInteger(limit) ? 6 : 3 })}`;
  const rows = model.series.map((curve) => [curve, curve.label, shownText(curve, model, limit)]);
  const marks = rows.map(([curve, label, text]) => element("li", "", markOf(curve), `${label} `, element("b", "", text)));
  key.replaceChildren(element("li", "where", where), ...marks, resumedAt(model).length ? element("li", "", "┊ resumed") : "");
  if (document.activeElement === key.parentElement) byId("status").textContent = `${where}: ${rows.map(([, label, text]) => `${label} ${text}`).join("; ")}`;
}

function markOf(curve) {
  const mark = element("i", curve.points ? "dot" : curve.y ? "" : "area");
  const colour = colourOf(curve.colour), dash = curve.dash?.length ? (curve.dash[0] < 4 ? "dotted" : "dashed") : "solid";
  if (curve.points || !curve.y) mark.style.background = curve.points ? colour : withOpacity(colour, curve.opacity || 0.18);
  else mark.style.borderTop = `${curve.width || 2}px ${dash} ${colour}`;
  return mark;
}

function resumedAt(model) {
  if (!model.shared || arms.length > 1 || arms[0].runs.length > 1) return [];
  const x = xOf(arms[0]);
  return arms[0].runs[0].resumed.map((step) => x[arms[0].steps.indexOf(step)]).filter(Number.isFinite);
}

function stroke(chart, colour, dash, draw) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.5 * uPlot.pxRatio;
  ctx.setLineDash(dash.map((length) => length * uPlot.pxRatio));
  ctx.beginPath();
  draw(ctx, (x) => chart.valToPos(x, "x", true), (y) => chart.valToPos(y, "y", true));
  ctx.stroke();
  ctx.restore();
}

function drawBars(chart, model) {
  const log = isLog(model), half = 4 * uPlot.pxRatio;
  for (const curve of model.series) {
    if (!curve.points || !curve.deviations) continue;
    stroke(chart, colourOf(curve.colour), [], (ctx, left, top) => curve.x.forEach((x, place) => {
      const [value, error] = [curve.y[place], curve.deviations[place]];
      if (!Number.isFinite(value) || !error || (log && value - error <= 0)) return;
      for (const y of [value - error, value + error]) { ctx.moveTo(left(x) - half, top(y)); ctx.lineTo(left(x) + half, top(y)); }
      ctx.moveTo(left(x), top(value - error));
      ctx.lineTo(left(x), top(value + error));
    }));
  }
}

function drawMarks(chart, model) {
  const { top, height } = chart.bbox;
  for (const x of resumedAt(model)) stroke(chart, cssColour("--quiet"), [2, 3], (ctx, left) => { ctx.moveTo(left(x), top); ctx.lineTo(left(x), top + height); });
}

function listenToKeys(host, chart) {
  host.setAttribute("role", "group");
  host.setAttribute("aria-label", `chart: ${chart.model.title}; arrow keys read off its numbers`);
  host.onkeydown = (event) => {
    const xs = chart.data[0].filter((x) => x >= chart.scales.x.min && x <= chart.scales.x.max);
    const now = chart.cursor.idx === null || chart.cursor.idx === undefined ? -1 : xs.indexOf(chart.data[0][chart.cursor.idx]);
    const to = { ArrowRight: now + 1, ArrowLeft: now < 0 ? xs.length - 1 : now - 1, Home: 0, End: xs.length - 1 }[event.key];
    if (to === undefined || !xs.length) return;
    event.preventDefault();
    chart.setCursor({ left: chart.valToPos(xs[Math.max(0, Math.min(xs.length - 1, to))], "x"), top: chart.over.clientHeight / 2 });
  };
}
