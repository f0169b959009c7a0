// Drawing a chart by uPlot, in the colours of the theme; all charts over steps show the same range of them.

const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [power, 2 * power, 5 * power]); // between two marks of steps
const PAPER_WIDTH = 640; // pixels, of A4 and of US letter
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) if (isIntersecting && !target.chart) drawPlot(target);
}, { rootMargin: "300px" });

addEventListener("resize", () => {
  for (const host of allPlots()) if (host.chart && host.clientWidth && host.clientWidth !== host.chart.width) drawPlot(host);
});

// A place for a chart, which is drawn when it comes into view. `make` gives what is drawn, null for nothing.
function placePlot(host, make) {
  host.make = make;
  host.classList.add("plot");
  host.tabIndex = 0;
  if (host.chart) drawPlot(host);
  else seen.observe(host);
}

const allPlots = (within = document) => within.querySelectorAll(".plot");

// Before their places are taken away: a chart listens to the window.
function destroyPlots(within) {
  for (const host of allPlots(within)) host.chart?.destroy();
}

function repaintAll() {
  for (const host of allPlots()) if (host.chart || onPaper) drawPlot(host);
}

// A chart of other numbers than metrics: { title, unit, stack, x, series: [[label, numbers]] }, by step or by something else.
function drawSeries(host, { series, x, ...words }) {
  const curves = series.map(([label, y], colour) => ({ label, colour, x, y, points: !words.stack }));
  placePlot(host, () => ({ xTitle: "step", ...words, linear: words.stack, zero: true, series: words.stack ? stackOf(curves) : curves }));
}

function drawPlot(host) {
  const model = host.make();
  host.chart?.destroy();
  host.chart = null;
  if (!model) return;
  const columns = columnsOf(model);
  host.chart = new uPlot(optionsOf(host, model, columns), dataOf(model, columns), host);
  host.chart.model = model;
  listenToKeys(host, host.chart);
}

function smoothed(values) {
  const width = Number(view.smoothing.value);
  if (!values || width < 2) return values;
  const last = (place) => values.slice(Math.max(0, place - width + 1), place + 1).filter(Number.isFinite);
  return values.map((value, place) => (Number.isFinite(value) ? meanOf(last(place)) : value));
}

function isLog(model) {
  return view.log.checked && !model.linear && model.series.some((curve) => (curve.y || []).some((value) => value > 0));
}

// The columns that uPlot draws, with their options: of an area its edges; of a line the line, and faintly what was smoothed.
// One of a curve's columns is in the legend.
function columnsOf(model) {
  return model.series.flatMap((curve) => {
    const colour = colourOf(curve.colour), smooth = curve.points || curve.stepped ? (values) => values : smoothed;
    const paths = curve.stepped ? uPlot.paths.stepped({ align: -1 }) : uPlot.paths.linear();
    const few = (curve.y || curve.high).filter(Number.isFinite).length < 3;
    const dots = { show: true, size: 6, fill: colour }, none = { show: false };
    const named = { label: curve.label, value: (chart) => shownText(curve, model, limitOf(chart)) }, unnamed = { class: "unnamed" };
    const line = { ...named, stroke: colour, width: curve.width || 2, dash: curve.dash, paths, points: few ? dots : none };
    const of = (values, options) => ({ x: curve.x, values, options });
    if (curve.hidden) return [{ ...of(curve.y, { ...line, width: 0, points: none }), mark: colour }]; // drawn as bars
    const edge = { width: curve.stepped ? 1 : 0, stroke: colour, paths, points: none, auto: curve.auto ?? true };
    if (curve.points) {
      const marks = { ...line, width: few ? 0 : 1, dash: [2, 4], spanGaps: true, points: { ...dots, size: 8 } };
      const end = (sign) => of(curve.deviations.map((bar, place) => curve.y[place] + sign * bar), { ...unnamed, width: 0, points: none });
      return [{ ...of(curve.y, marks), mark: colour }, ...(curve.deviations ? [end(-1), end(1)] : [])]; // y has the bars' ends, too
    }
    const faint = { ...line, ...unnamed, width: 1, stroke: withOpacity(colour, 0.3), points: none };
    const area = withOpacity(colour, curve.opacity || 0.18);
    return [
      ...(curve.high ? [
        { ...of(smooth(curve.high), { ...edge, ...(curve.y ? unnamed : named) }), area, mark: area },
        of(smooth(curve.low), { ...edge, ...unnamed, width: 0 }),
      ] : curve.y && smooth(curve.y) !== curve.y ? [of(curve.y, faint)] : []),
      ...(curve.y ? [of(smooth(curve.y), line)] : []),
    ];
  });
}

// The same x for all curves, each with a gap where it has null.
function dataOf(model, columns) {
  const log = isLog(model), drawn = (value) => (log && value <= 0 ? null : value);
  return uPlot.join(columns.map(({ x, values }) => {
    const places = x.map((_, place) => place).filter((place) => Number.isFinite(x[place]));
    return [places.map((place) => x[place]), places.map((place) => drawn(values[place]))];
  }));
}

function optionsOf(host, model, columns) {
  const { xTitle, shared, zero, percent } = model;
  const marks = [["resumed", "┊ resumed"], ["phases", "¦ new phase"]].filter(([name]) => markedAt(model, name).length);
  const label = marks.length ? `${xTitle} (${marks.map(([, text]) => text).join(", ")})` : xTitle;
  const dashOf = ({ mark, options }) => (mark || !options.dash?.length ? "solid" : "dashed");
  const mode = zero ? 1 : 0, [isNarrow, isTouch] = ["(max-width: 600px)", "(pointer: coarse)"].map((query) => matchMedia(query).matches);
  return {
    width: onPaper ? PAPER_WIDTH : host.clientWidth || 360, height: isNarrow ? 210 : 240, padding: [10, 14, 0, 0],
    series: [{ label, value: (chart) => numberText(limitOf(chart), { digits: 5 }) }, ...columns.map(({ options }) => options)],
    bands: columns.flatMap(({ area }, place) => (area ? [{ series: [place + 1, place + 2], fill: area }] : [])),
    legend: { markers: { fill: (_, place) => columns[place - 1].mark, dash: (_, place) => dashOf(columns[place - 1]) } },
    scales: {
      x: { time: false, ...(shared && { range: shownRange }), ...(model.doubling && { distr: 3, log: 2 }) },
      y: isLog(model) ? { distr: 3 } : { range: { min: { pad: 0.06, soft: 0, mode }, max: { pad: 0.06, soft: percent ? 0.01 : 0, mode } } },
    },
    axes: axesOf(model),
    cursor: {
      drag: { x: Boolean(shared) && !isTouch, y: false, setScale: false }, // a finger that scrolls must not zoom
      points: { size: 6 },
      bind: { dblclick: () => () => zoom("", ""), click: () => null },
      ...(shared && { sync: { key: xTitle, setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } } }),
    },
    hooks: {
      draw: [(chart) => drawExtras(chart, model)],
      setScale: [(chart) => chart.setLegend({ idx: chart.cursor.idx ?? null })],
      setLegend: [(chart) => { if (document.activeElement === host) readOut(chart); }],
      setSelect: [(chart) => {
        const { left, width } = chart.select;
        if (width > 3) zoom(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
        chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  };
}

function axesOf(model) {
  const [ink, grid] = [cssOf("--quiet"), cssOf("--grid")], font = "12px system-ui";
  const axis = { stroke: ink, font, labelFont: font, labelSize: 18, ticks: { stroke: grid, size: 4 }, grid: { stroke: grid, width: 1 } };
  const texts = (splits, options) => splits.map((value) => (value === null ? "" : numberText(value, { ...options, digits: 6 })));
  const incrs = model.xTitle.startsWith("step") ? WHOLE : undefined;
  const widest = (values) => Math.max(3, ...(values || []).map((text) => text.length));
  return [
    { ...axis, label: model.xTitle, size: 26, ...(incrs && { incrs }), values: (_, splits) => texts(splits, {}) },
    { ...axis, label: model.unit, size: (_, values) => 12 + 7 * widest(values), values: (_, splits) => texts(splits, model) },
  ];
}

function fullRange() {
  const xs = arms.flatMap(xOf).filter(Number.isFinite);
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  return xs.length === 0 ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// What is in view: as the form has it; an end that is not chosen goes on with the run.
function shownRange() {
  const [low, high] = fullRange(), { from, to } = view;
  const range = [from.value === "" ? low : from.valueAsNumber, to.value === "" ? high : Math.min(to.valueAsNumber, high)];
  return range[0] < range[1] ? range : [low, high];
}

// The same range in every chart, which the form says, too; a chart with steps of its own is always shown whole.
function zoom(from, to) {
  const short = (value) => (value === "" ? "" : Number(value.toFixed(2)));
  [view.from.value, view.to.value] = [short(from), to >= fullRange()[1] ? "" : short(to)];
  showRange();
}

function showRange() {
  for (const { chart } of allPlots()) if (chart?.model.shared) chart.setScale("x", { min: 0, max: 1 }); // which asks shownRange
}

function numberText(value, { percent, digits = 4 } = {}) {
  if (!Number.isFinite(value)) return "–";
  if (percent) return `${+(value * 100).toPrecision(Math.min(digits, 4))} %`;
  if (Math.abs(value) >= 1e5) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: digits }).format(value);
  return String(+value.toPrecision(digits)).replace("-", "−");
}

function withSpread(mean, deviation, options) {
  return numberText(mean, options) + (Number.isFinite(deviation) ? ` ± ${numberText(deviation, { ...options, digits: 2 })}` : "");
}

// Below a chart, what its lines are, and their numbers under the cursor; without a cursor the last ones in view.
function limitOf({ data: [xs], cursor, scales }) {
  return xs[cursor.idx ?? xs.findLastIndex((x) => x <= (scales.x.max ?? Infinity))] ?? 0;
}

function shownText(curve, model, limit) {
  const values = curve.shown || curve.y || curve.high;
  const place = curve.x.findLastIndex((x, at) => x <= limit && Number.isFinite(values[at]));
  if (place < 0) return "–";
  if (values === curve.high) return `${numberText(curve.low[place], model)} … ${numberText(curve.high[place], model)}`;
  return withSpread(values[place], curve.deviations?.[place], model);
}

// What the legend shows, for who does not see it.
function readOut(chart) {
  const rows = [...chart.root.querySelectorAll(".u-series:not(.unnamed)")].map(({ cells }) => cells);
  byId("status").textContent = rows.map(([head, value]) => `${head.textContent} ${value.textContent}`).join("; ");
}

function markedAt(model, name) {
  if (!model.shared || arms.length > 1 || arms[0].runs.length > 1) return [];
  const x = xOf(arms[0]);
  return arms[0].runs[0][name].map((step) => x[arms[0].steps.indexOf(step)]).filter(Number.isFinite);
}

// Of each step a bar for the trainer and one beside it for the engine, filled in the seconds in which they work.
function drawBars(chart, { bars, series: [{ x: xs }] }) {
  const { ctx, bbox } = chart, middles = xs.map((x) => chart.valToPos(x, "x", true));
  const gaps = middles.map((middle, place) => middle - middles[place - 1]).filter((gap) => gap > 0);
  const width = Math.max(1, Math.min(30 * uPlot.pxRatio, ...gaps.map((gap) => 0.4 * gap)));
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  bars.forEach(({ whole, lanes }, place) => lanes.forEach((spans, lane) => {
    const fill = ([from, to], opacity) => {
      const [low, high] = [from, to].map((second) => chart.valToPos(second, "y", true));
      ctx.fillStyle = withOpacity(colourOf(lane), opacity);
      ctx.fillRect(middles[place] - (lane ? 0 : width), high, width, low - high);
    };
    if (Number.isFinite(whole)) fill([0, whole], 0.15);
    for (const span of spans) fill(span, 0.9);
  }));
  ctx.restore();
}

// Error bars, a dotted line where the run was resumed, and a dashed one where a phase begins.
function drawExtras(chart, model) {
  const { ctx, scales: { x: across, y: up } } = chart;
  const line = (x, low, high, colour, dash) => {
    if (!(low <= high) || x < across.min || x > across.max) return;
    ctx.strokeStyle = colour;
    ctx.lineWidth = 1.5 * uPlot.pxRatio;
    ctx.setLineDash(dash.map((length) => length * uPlot.pxRatio));
    ctx.beginPath();
    for (const y of [low, high]) ctx.lineTo(chart.valToPos(x, "x", true), chart.valToPos(y, "y", true));
    ctx.stroke();
  };
  if (model.bars) drawBars(chart, model);
  ctx.save();
  for (const { x, y, deviations = [], colour } of model.series.filter((curve) => curve.points)) {
    x.forEach((at, place) => line(at, Math.max(y[place] - deviations[place], up.min), y[place] + deviations[place], colourOf(colour), []));
  }
  for (const x of markedAt(model, "resumed")) line(x, up.min, up.max, cssOf("--quiet"), [2, 3]);
  for (const x of markedAt(model, "phases")) line(x, up.min, up.max, cssOf("--quiet"), [8, 4]);
  ctx.restore();
}

function listenToKeys(host, chart) {
  host.role = "group";
  host.ariaLabel = `chart: ${chart.model.title}; arrow keys read off its numbers`;
  host.onkeydown = (event) => {
    const { min, max } = chart.scales.x, xs = chart.data[0].filter((x) => x >= min && x <= max);
    const now = xs.indexOf(chart.data[0][chart.cursor.idx ?? -1]);
    const to = placeByKey(event, now, xs.length);
    if (to !== null) chart.setCursor({ left: chart.valToPos(xs[to], "x"), top: chart.over.clientHeight / 2 });
  };
}
