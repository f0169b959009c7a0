// Where samples come from, and the table of queries: what each got, and how that changed.

const ROWS_AT_ONCE = 12;

// The samples that the page carries, or that the server of `gspo view` reads: both are asked for one group at a time.
async function makeSource() {
  const carried = JSON.parse(document.getElementById("samples-data").textContent);
  const source = { live: Boolean(carried.live), sets: [], changed: [] };
  const take = (sets) => { source.sets = sets.map(counted); };
  if (source.live) {
    let tag = null;
    source.refresh = async () => {
      const answer = await fetch("samples.json", { cache: "no-cache" }).catch(() => null); // the server has ended
      if (!answer?.ok || answer.headers.get("ETag") === tag) return;
      tag = answer.headers.get("ETag");
      take(await answer.json());
      for (const listener of source.changed) await listener();
    };
    source.group = async (set, step, place) => {
      const answer = await fetch(`samples/${set}/${step}/${place}.json`, { cache: "no-cache" });
      if (!answer.ok) throw new Error(await answer.text());
      return answer.json();
    };
    await source.refresh();
  } else {
    const unpacked = {};
    source.refresh = async () => {};
    source.group = async (set, step, place) => {
      unpacked[`${set}/${step}`] ||= unpack(carried.contents[set][step]).then(JSON.parse);
      return (await unpacked[`${set}/${step}`])[place];
    };
    take(JSON.parse(await unpack(carried.index)));
  }
  return source;
}

// A set with what each query got in each step: `byQuery` and `bySteps` hold {query, step, count, passed, mean, place}.
function counted(set, number) {
  const byQuery = set.queries.map(() => []), bySteps = new Map();
  for (const { step, groups } of set.steps) {
    const rows = groups.map(([query, count, passed, mean, place]) => ({ query, step, count, passed, mean, place }));
    bySteps.set(step, rows);
    for (const row of rows) byQuery[row.query].push(row);
  }
  const table = set.queries.map(([id, prompt], query) => {
    const rows = byQuery[query], count = sum(rows, "count"), scored = rows.filter((row) => row.mean !== null);
    const mean = scored.length ? scored.reduce((total, row) => total + row.mean * row.count, 0) / sum(scored, "count") : null;
    const passed = sum(rows, "passed");
    return { query, id, prompt, steps: rows.length, count, passed, rate: passed / count, mean, last: rows.at(-1).step };
  });
  return { ...set, number, byQuery, bySteps, table, title: `${set.name} · ${set.kind}` };
}

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
const QUERY_COLUMNS = [["id", "query"], ["prompt", "prompt"], ["rate", "right"], ["mean", "mean reward"], ["count", "responses"], ["steps", "steps"], ["last", "last step"]];
const OUTCOMES = [["", "any answers"], ["never", "never right"], ["some", "right and wrong"], ["always", "always right"]];

function showQueries(root, data, source) {
  if (root.firstChild) return;
  const form = element("form", "bar", field("set", "of", source.sets.map((set) => [set.number, set.title])), field("text", "text", "search"), field("least", "right from %", "number"), field("most", "to %", "number"), field("outcome", "with", OUTCOMES));
  const figure = element("figure", "chart"), count = element("p", "about"), table = element("div", "queries"), more = button("show more", () => { shown *= 4; draw(); });
  let order = ["rate", 1], shown = ROWS_AT_ONCE;
  root.append(element("h3", "", "How the rewards are distributed"), figure, form, count, table, more);
  const draw = () => {
    const set = source.sets[form.elements.set.value || 0], rows = rowsOf(set, form.elements, order), { steps, labels, shares } = set.rewards;
    count.textContent = `${rows.length.toLocaleString("en")} of ${set.table.length.toLocaleString("en")} queries; a click shows one’s samples. ${set.told}`;
    const heads = QUERY_COLUMNS.map(([name, title]) => button(title, () => { order = [name, order[0] === name ? -order[1] : 1]; draw(); }));
    table.replaceChildren(tableOf(heads, rows.slice(0, shown).map((row) => cellsOf(set, row))));
    table.querySelectorAll("th").forEach((head, place) => withAttributes(head, { "aria-sort": QUERY_COLUMNS[place][0] !== order[0] ? "none" : order[1] > 0 ? "ascending" : "descending" }));
    more.hidden = rows.length <= shown;
    root.firstChild.hidden = figure.hidden = !steps.length;
    if (figure.dataset.key === (figure.dataset.key = JSON.stringify([set.number, steps]))) return;
    if (steps.length) drawSeries(figure, { title: "rewards", unit: "share of the responses", xTitle: "step", x: steps, series: labels.map((label, place) => ({ label, values: shares[place] })), kind: "stack", low: 0, high: 1 });
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => { shown = ROWS_AT_ONCE; draw(); });
  form.elements.set.parentElement.hidden = source.sets.length < 2;
  source.changed.push(draw);
  draw();
}

function rowsOf(set, fields, [name, sign]) {
  const text = fields.text.value.toLowerCase(), { least, most, outcome } = fields, worth = (row) => row[name] ?? -Infinity;
  const rows = set.table.filter((row) => (!text || `${row.id}\n${row.prompt}`.toLowerCase().includes(text)) &&
    row.rate >= Number(least.value) / 100 && (most.value === "" || row.rate <= Number(most.value) / 100) &&
    (!outcome.value || outcome.value === (row.passed === 0 ? "never" : row.passed === row.count ? "always" : "some")));
  return rows.sort((one, other) => sign * (typeof worth(one) === "string" ? one[name].localeCompare(other[name], "en", { numeric: true }) : worth(one) - worth(other)));
}

function cellsOf(set, row) {
  const open = button(visible(row.id), () => openSamples({ set: set.number, step: row.last, query: row.query }));
  const rate = element("span", "rate", withAttributes(element("meter", ""), { value: row.rate }), ` ${Math.round(100 * row.rate)} %`);
  return [open, visible(row.prompt), rate, row.mean === null ? "–" : row.mean.toPrecision(3), ...[row.count, row.steps, row.last].map(String)];
}

function button(text, action) {
  const made = withAttributes(element("button", "", text), { type: "button" });
  if (action) made.addEventListener("click", action);
  return made;
}

// A labelled field: of choices [[value, text], …], or of a type.
function field(name, label, type) {
  const made = Array.isArray(type) ? element("select", "", type.map(([value, text]) => new Option(text, value))) : withAttributes(element("input", ""), { type });
  if (type === "number") made.step = "any";
  made.name = name;
  return element("label", "", `${label} `, made);
}
