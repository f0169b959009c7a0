// What the page carries with it, unpacked; what it remembers when it is loaded again; how its elements are made.

const byId = (id) => document.getElementById(id);

// The only way that anything of a run comes onto the page: strings become text, never HTML.
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function withAttributes(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function tableOf(heads, rows) {
  const head = element("tr", "", heads.map((text) => withAttributes(element("th", "", text), { scope: "col" })));
  const body = rows.map((row) => element("tr", "", row.map((cell) => element("td", "", cell))));
  return element("div", "wide", element("table", "", element("thead", "", head), element("tbody", "", body)));
}

// Closed unless it was open when the page was left; `name` is what that is remembered by.
function folded(summary, name, ...children) {
  const made = element("details", "", element("summary", "", summary), ...children);
  made.open = remembered("open " + name) ?? false;
  made.addEventListener("toggle", () => { if (!onPaper) remember("open " + name, made.open); });
  return made;
}

async function unpack(letters) {
  const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

const MEMORY = "gspo-report:" + location.pathname;
let memory = {};
try {
  memory = JSON.parse(sessionStorage.getItem(MEMORY) || "{}");
} catch { /* a browser that keeps nothing for files: the page itself remembers until it is closed */ }

function remember(name, value) {
  memory[name] = value;
  try {
    sessionStorage.setItem(MEMORY, JSON.stringify(memory));
  } catch { /* as above */ }
}

function remembered(name) {
  return memory[name];
}

async function copyText(text, button) {
  const label = button.textContent;
  button.textContent = await navigator.clipboard.writeText(text).then(() => "copied", () => "not allowed here");
  setTimeout(() => { button.textContent = label; }, 1200);
}
