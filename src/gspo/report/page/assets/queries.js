// Where samples come from, and the table of queries: what each got, and how that changed.

const MOST_ROWS = 200; // of the table: a filter finds the others
const which = byId("which").elements;
let source = null; // of samples: { sets, group(set, step, place), refresh() }
let queryOrder = ["rate", 1]; // a column, and whether upwards

// The samples that the page carries; or below, those that the server of `gspo view` reads. Both are asked for one group at a time.
function carriedSource({ index, contents }) {
  const steps = {};
  const refresh = async () => { source.sets = (await unpack(index)).map(counted); };
  const group = async (set, step, place) => (await (steps[`${set}/${step}`] ||= unpack(contents[set][step])))[place];
  return { group, refresh };
}

function servedSource() {
  let last = "";
  const refresh = async () => { // whether there is anything new
    const text = await ask("samples.json");
    if (text === last) return false;
    source.sets = JSON.parse(last = text).map(counted);
    return true;
  };
  const group = async (set, step, place) => JSON.parse(await ask(`samples/${set}/${step}/${place}.json`));
  return { group, refresh };
}

async function ask(name) {
  const answer = await fetch(name, { cache: "no-cache" }).catch(() => { throw new Error("the server has ended"); });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.text();
}

// A set with what each query got in each step: `byQuery` and `bySteps` hold the rows, by the query's id and by step.
function counted(set, number) {
  const byQuery = new Map(Object.keys(set.prompts).map((query) => [query, []])), bySteps = new Map();
  for (const { step, carried, groups } of set.steps) {
    bySteps.set(step, groups.map(([query, count, judged, passed, mean, interest], place) => {
      const rate = judged ? passed / judged : null;
      return { query, step, count, judged, passed, rate, mean, interest, place, isThere: place < carried };
    }));
    for (const row of bySteps.get(step)) byQuery.get(row.query).push(row);
  }
  const prompts = new Map(Object.entries(set.prompts));
  const table = [...byQuery].map(([query, rows]) => ({ query, prompt: prompts.get(query), ...totalOf(rows) }));
  const numModels = isEvaluation ? page.models.length : 1, first = number - (number % numModels);
  const beside = numModels > 1 ? (number === first ? first + 1 : first) : null; // of an evaluation the first model's, or its second's
  return { ...set, number, byQuery, bySteps, table, beside, title: `${set.name} · ${set.kind}` };
}

function totalOf(rows) {
  const [count, judged, passed] = ["count", "judged", "passed"].map((name) => sum(rows, name));
  const scored = rows.filter((row) => row.mean !== null);
  const mean = scored.length ? sum(scored.map((row) => ({ all: row.mean * row.count })), "all") / sum(scored, "count") : null;
  return { steps: rows.length, count, judged, passed, rate: judged ? passed / judged : null, mean, last: rows.at(-1).step };
}

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

// Each with a function that gives what is sorted by, and one that gives what is shown.
function queryColumns(set) {
  const beside = source.sets[set.beside], before = ({ query }) => beside?.byQuery.get(query)?.[0].rate ?? null;
  const rateCell = (rate) => (rate === null ? "–" : element("span", "rate", element("meter", { value: rate }), ` ${Math.round(100 * rate)} %`));
  const column = (name, title, show = String) => [name, title, (row) => row[name], show];
  return [
    ["query", "query", ({ query }) => query, (query, row) => button(query, () => openSamples(set, row.last, query))],
    column("prompt", "prompt"), column("rate", "right", rateCell), ...(beside ? [["before", `right: ${beside.name}`, before, rateCell]] : []),
    column("mean", "mean reward", (mean) => numberText(mean, { digits: 3 })), column("count", "responses"),
    ...(isEvaluation ? [] : [column("steps", "steps"), column("last", "last step")]),
  ];
}

function drawQueries() {
  fill(which.set, source.sets.map((set) => [set.number, set.title])); // a run that goes on may be evaluated on more of them
  which.set.parentElement.hidden = source.sets.length < 2;
  const set = source.sets[which.set.value], columns = queryColumns(set), [ordered, sign] = queryOrder;
  if (!set) return;
  which.changed.parentElement.hidden = !set.difference?.won;
  const rows = chosenRows(set, columns);
  byId("num-queries").textContent =
    `${[rows, set.table].map(({ length }) => length.toLocaleString("en")).join(" of ")} queries; a click shows samples. ${set.coverage}`;
  const heads = columns.map(([name, title]) =>
    button(title, () => { queryOrder = [name, name === ordered ? -sign : 1]; drawQueries(); }));
  const table = tableOf(heads, rows.slice(0, MOST_ROWS).map((row) => columns.map(([, , of, show]) => show(of(row), row))));
  table.dataset.set = set.number; // another set's table is another one, though it look alike: its buttons lead elsewhere
  table.querySelectorAll("th").forEach((head, place) => {
    head.ariaSort = columns[place][0] !== ordered ? "none" : sign > 0 ? "ascending" : "descending";
  });
  renew(document.querySelector(".queries"), table);
  drawRewards(set.rewards);
}

function drawRewards({ steps, series } = { steps: [] }) {
  byId("rewards").hidden = !steps.length;
  const words = { title: "rewards", unit: "share of the responses", stack: true };
  if (steps.length) drawSeries(byId("rewards").lastChild, { ...words, x: steps, series: Object.entries(series) });
}

function chosenRows(set, columns) {
  const text = which.text.value.toLowerCase(), [least, most] = [which.least.value, which.most.value];
  const changed = which.changed.value && set.difference?.won ? new Set(set.difference[which.changed.value]) : null;
  const [name, sign] = queryOrder, worth = (columns.find(([one]) => one === name) || columns[0])[2];
  const compare = (one, other) => (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : (one ?? -1) - (other ?? -1));
  return set.table
    .filter((row) => `${row.query}\n${row.prompt}`.toLowerCase().includes(text) && (!changed || changed.has(row.query)))
    .filter(({ rate }) => (least === "" || (rate !== null && 100 * rate >= least)) && (most === "" || (rate !== null && 100 * rate <= most)))
    .sort((one, other) => sign * compare(worth(one), worth(other)));
}
