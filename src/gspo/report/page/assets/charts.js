// The curves: drawn by plotly, in the colours of the theme, all zoomed to the same steps.

const drawn = new Map(); // element -> figure
let shownSteps = null; // [from, to]; null: all
let resumedAt = [];

function painted(trace) {
  const { meta, ...rest } = trace;
  if (meta.colour === undefined) return rest;
  const palette = PALETTES[theme()];
  const colour = palette[meta.colour % palette.length];
  const fill = meta.fill ? { fillcolor: withOpacity(colour, meta.fill) } : {};
  return { ...rest, ...fill, line: { ...rest.line, color: colour }, marker: { color: colour, size: 5 } };
}

const PAPER_WIDTH = 640; // pixels, of A4 and of US letter

function layoutOf(figure) {
  const grid = cssColour("--grid");
  const isMap = figure.traces.some((trace) => trace.type === "heatmap");
  const coarse = matchMedia("(pointer: coarse)").matches; // a finger that scrolls must not zoom
  const named = figure.traces.filter((trace) => trace.showlegend !== false && !isMap).length;
  return {
    margin: { l: 56, r: 12, t: 24, b: 36 },
    height: 280,
    ...(onPaper ? { width: PAPER_WIDTH, autosize: false } : { autosize: true, width: undefined }),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: cssColour("--ink") },
    hovermode: isMap ? "closest" : "x unified",
    hoverlabel: { bgcolor: cssColour("--paper"), font: { color: cssColour("--ink") }, namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: cssColour("--quiet"), activecolor: cssColour("--ink") },
    dragmode: coarse ? false : "zoom",
    showlegend: named > 1,
    legend: { orientation: "h", y: -0.16, yanchor: "top", x: 0, itemsizing: "constant" },
    xaxis: {
      gridcolor: grid, zerolinecolor: grid, hoverformat: "d", ticks: "",
      unifiedhovertitle: { text: "step %{x}" },
      ...(shownSteps ? { range: shownSteps.slice(), autorange: false } : { autorange: true }),
    },
    yaxis: { gridcolor: grid, zerolinecolor: grid, automargin: true, ...figure.axis },
    shapes: resumedAt.map((step) => ({
      type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1,
      line: { color: cssColour("--quiet"), width: 1, dash: "dot" },
    })),
  };
}

// All steps are all steps, not those that the page was loaded or painted again with, which plotly would go back to.
const CONFIG = { responsive: true, displaylogo: false, doubleClick: "autosize", modeBarButtons: [["toImage", "autoScale2d"]] };

async function draw(element, figure) {
  const isNew = !drawn.has(element);
  drawn.set(element, figure);
  await Plotly.react(element, figure.traces.map(painted), layoutOf(figure), CONFIG);
  if (isNew) element.on("plotly_relayout", (change) => relaid(element, change));
}

function relaid(element, change) {
  if (change["xaxis.autorange"]) return zoom(null, element);
  const range = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (range[0] !== undefined && range[1] !== undefined) zoom(range, element);
}

function zoom(range, origin) {
  const same = range === shownSteps || (range && shownSteps && range.every((one, place) => one === shownSteps[place]));
  if (same) return; // the answer of a chart to having been zoomed with the others
  shownSteps = range;
  remember("steps", range);
  tellRange();
  const change = range ? { "xaxis.range": range.slice(), "xaxis.autorange": false } : { "xaxis.autorange": true };
  for (const element of drawn.keys()) if (element !== origin) Plotly.relayout(element, change);
}

function tellRange() {
  const fields = document.getElementById("range").elements;
  const first = shownSteps && Math.ceil(shownSteps[0]);
  fields.from.value = shownSteps ? first : "";
  fields.to.value = shownSteps ? Math.max(first, Math.floor(shownSteps[1])) : ""; // of a range between two steps, too
}

function startRange() {
  const form = document.getElementById("range");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    const [from, to] = [form.elements.from, form.elements.to].map((input) => input.valueAsNumber);
    if (Number.isNaN(from) && Number.isNaN(to)) return zoom(null);
    const steps = [...drawn.values()].flatMap((figure) => figure.traces.flatMap((trace) => trace.x));
    const last = steps.reduce((most, step) => Math.max(most, step), 0);
    const range = [Number.isNaN(from) ? 0 : from, Number.isNaN(to) ? last : Math.min(to, last)];
    if (range[0] >= range[1]) return;
    zoom(range);
    tellRange(); // where a last step beyond the last was typed, and nothing else has changed, too
  });
  form.addEventListener("reset", () => zoom(null));
}

async function startCharts(figures) {
  resumedAt = figures.resumed;
  shownSteps = remembered("steps") || null;
  startRange();
  tellRange();
  startOther(figures.others);
  for (const element of document.querySelectorAll(".plot[data-chart]")) {
    await draw(element, figures.charts[Number(element.dataset.chart)]);
    document.documentElement.dataset.firstChart ??= Math.round(performance.now()); // milliseconds
    await new Promise((resolve) => setTimeout(resolve)); // what is drawn is seen, and clicks are heard, before the next
  }
  repaints.push(() => { for (const [element, figure] of drawn) draw(element, figure); });
}

function startOther(others) {
  const select = document.getElementById("other");
  select.append(new Option("choose …", ""), ...Object.keys(others).map((name) => new Option(name, name)));
  const link = document.getElementById("other-definition");
  const show = () => {
    remember("other", select.value);
    link.hidden = !select.value || !others[select.value].definition;
    if (!select.value) return;
    link.href = "#" + others[select.value].definition;
    draw(document.getElementById("other-plot"), others[select.value]);
  };
  select.addEventListener("change", show);
  select.value = others[remembered("other")] ? remembered("other") : "";
  show();
}
