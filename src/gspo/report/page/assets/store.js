// How elements are made, what the page remembers when it is loaded again, and how what it carries is unpacked.

const byId = (id) => document.getElementById(id);

// The only way that anything of a run comes onto the page: strings become text, never HTML. `attributes`: a class, or several.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  const pairs = typeof attributes === "string" ? { class: attributes } : attributes;
  for (const [name, value] of Object.entries(pairs)) if (value !== "") made.setAttribute(name, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function button(text, action) {
  const made = element("button", { type: "button" }, text);
  made.addEventListener("click", action);
  return made;
}

function tableOf(heads, rows) {
  const head = element("tr", "", heads.map((content) => element("th", { scope: "col" }, content)));
  const body = rows.map((row) => element("tr", "", row.map((cell) => element("td", "", cell))));
  return element("div", "wide", element("table", "", element("thead", "", head), element("tbody", "", body)));
}

function listOf(texts, className = "") {
  return element("ul", className, texts.map((text) => element("li", "", text)));
}

// Details that are open if they were when the page was left.
function keepOpen(details, name, otherwise = false) {
  details.open = remembered("open " + name) ?? otherwise;
  details.addEventListener("toggle", () => { if (!onPaper) remember("open " + name, details.open); });
  return details;
}

function folded(summary, name, content, otherwise) {
  return keepOpen(element("details", "", element("summary", "", summary), content), name, otherwise);
}

function saveForm(form) {
  remember(form.id, Object.fromEntries(new FormData(form)));
}

function restoreForm(form) {
  const values = remembered(form.id);
  for (const field of values ? form.querySelectorAll("[name]") : []) {
    const value = values[field.name];
    if (field.type === "checkbox") field.checked = value !== undefined;
    else if (value !== undefined) field.value = value;
    if (field.localName === "select" && value && field.value !== value) field.add(new Option("", value, true, true)); // to be filled
  }
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

async function unpack(letters) {
  const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
