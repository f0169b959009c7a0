// Where samples come from, and the table of queries: what each got, and how that changed.

const ROWS_AT_ONCE = 50;

// The samples that the page carries, or that the server of `gspo view` reads: both are asked for one group at a time.
async function makeSource() {
  const carried = JSON.parse(document.getElementById("samples-data").textContent);
  const source = { live: Boolean(carried.live), sets: [], changed: [] };
  const take = (sets) => { source.sets = sets.map(counted); };
  if (source.live) {
    let tag = null;
    source.refresh = async () => {
      const answer = await fetch("samples.json", { cache: "no-cache" });
      if (!answer.ok || answer.headers.get("ETag") === tag) return;
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
    return { query, id, prompt, steps: rows.length, count, rate: sum(rows, "passed") / count, mean, last: rows.at(-1)?.step };
  });
  return { ...set, number, byQuery, bySteps, table, title: `${set.name} · ${set.kind}` };
}

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
const COLUMNS = [["id", "query"], ["prompt", "prompt"], ["rate", "right"], ["mean", "mean reward"], ["count", "responses"], ["steps", "steps"], ["last", "last step"]];
const OUTCOMES = { "": "any", never: "never right", some: "right and wrong", always: "always right" };

function showQueries(root, data, source) {
  if (root.firstChild) return;
  const form = element("form", "bar",
    chooser("set", "of", source.sets.map((set) => [set.number, set.title])), input("text", "text", "search", "in query or prompt"),
    input("least", "right from %", "number"), input("most", "to %", "number"), chooser("outcome", "and", Object.entries(OUTCOMES)));
  const figure = element("figure", "chart"), count = element("p", "hint"), body = element("tbody", ""), more = button("show more");
  const heads = COLUMNS.map(([name, title]) => element("th", "", button(title, () => sortBy(name))));
  const table = element("div", "wide", element("table", "queries", element("thead", "", element("tr", "", ...heads)), body));
  let order = ["rate", 1], shown = ROWS_AT_ONCE;
  root.append(figure, form, count, table, more);
  const sortBy = (name) => { order = [name, order[0] === name ? -order[1] : 1]; draw(); };
  const draw = () => {
    const set = source.sets[form.elements.set.value || 0], rows = rowsOf(set, form.elements, order);
    count.textContent = set.table.length ? `${rows.length.toLocaleString("en")} of ${set.table.length.toLocaleString("en")} queries. ${set.told}` : set.told;
    heads.forEach((head, place) => head.setAttribute("aria-sort", COLUMNS[place][0] !== order[0] ? "none" : order[1] > 0 ? "ascending" : "descending"));
    body.replaceChildren(...rows.slice(0, shown).map((row) => tableRow(set, row)));
    more.hidden = rows.length <= shown;
    table.hidden = form.hidden = !set.table.length;
  };
  const drawRewards = () => {
    const { steps, labels, shares } = source.sets[form.elements.set.value || 0].rewards;
    figure.hidden = !steps.length;
    if (steps.length) drawSeries(figure, { title: "How the rewards are distributed", unit: "share of the responses", xTitle: "step", x: steps, series: labels.map((label, place) => ({ label, values: shares[place] })), kind: "stack", low: 0, high: 1 });
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => { shown = ROWS_AT_ONCE; draw(); if (event.target.name === "set") drawRewards(); });
  more.addEventListener("click", () => { shown += ROWS_AT_ONCE; draw(); });
  form.elements.set.parentElement.hidden = source.sets.length < 2;
  source.changed.push(() => { draw(); drawRewards(); });
  draw();
  drawRewards();
}

function rowsOf(set, fields, [name, sign]) {
  const text = fields.text.value.toLowerCase(), { least, most, outcome } = fields;
  const rows = set.table.filter((row) => (!text || `${row.id}\n${row.prompt}`.toLowerCase().includes(text)) &&
    (least.value === "" || row.rate >= least.value / 100) && (most.value === "" || row.rate <= most.value / 100) &&
    (!outcome.value || outcome.value === (row.rate === 0 ? "never" : row.rate === 1 ? "always" : "some")));
  const worth = (row) => row[name] ?? -Infinity;
  return rows.sort((one, other) => sign * (typeof worth(one) === "string" ? one[name].localeCompare(other[name], "en", { numeric: true }) : worth(one) - worth(other)));
}

function tableRow(set, row) {
  const open = button(visible(row.id), () => openSamples({ set: set.number, step: row.last, query: row.query }));
  const rate = element("meter", "");
  rate.value = row.rate;
  const cells = [open, visible(row.prompt), element("span", "rate", rate, ` ${Math.round(100 * row.rate)} %`), row.mean === null ? "–" : row.mean.toPrecision(3), row.count, row.steps, row.last];
  return element("tr", "", ...cells.map((cell, place) => element("td", place === 1 ? "prompt" : "", typeof cell === "number" ? String(cell) : cell)));
}

function button(text, action) {
  const made = element("button", "", text);
  made.type = "button";
  if (action) made.addEventListener("click", action);
  return made;
}

function chooser(name, label, options) {
  const select = element("select", "");
  select.name = name;
  select.append(...options.map(([value, text]) => new Option(text, value)));
  return element("label", "", `${label} `, select);
}

function input(name, label, type, placeholder = "") {
  const field = element("input", "");
  Object.assign(field, { name, type, placeholder });
  if (type === "number") Object.assign(field, { step: "any", inputMode: "decimal" });
  return element("label", "", `${label} `, field);
}
