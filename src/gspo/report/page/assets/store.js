// How elements are made, and how what the page carries is unpacked.

const byId = (id) => document.getElementById(id);

// The only way that anything of a run comes onto the page: strings become text, never HTML. `attributes`: a class, or several.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  const pairs = typeof attributes === "string" ? { class: attributes } : attributes;
  for (const [name, value] of Object.entries(pairs)) if (value !== "") made.setAttribute(name, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function button(text, onclick) {
  return Object.assign(element("button", { type: "button" }, text), { onclick });
}

function tableOf(heads, rows) {
  const head = element("tr", "", heads.map((content) => element("th", { scope: "col" }, content)));
  const body = rows.map((row) => element("tr", "", row.map((cell) => element("td", "", cell))));
  return element("div", "wide", element("table", "", element("thead", "", head), element("tbody", "", body)));
}

function listOf(texts, className = "") {
  return element("ul", className, texts.map((text) => element("li", "", text)));
}

function folded(summary, ...content) {
  return element("details", "", element("summary", "", summary), ...content);
}

// Put other content in a place; open folds, scrolling and focus stay. What has not changed is left as it is.
function renew(home, ...content) {
  const made = element("div", "", ...content), parts = () => [...home.querySelectorAll("details, summary, button, .wide, pre, dl")];
  if (home.made?.isEqualNode(made)) return;
  const states = parts().map(({ open, scrollTop, scrollLeft }) => ({ open, scrollTop, scrollLeft }));
  const active = document.activeElement, place = parts().indexOf(active);
  home.made = made.cloneNode(true);
  home.replaceChildren(...made.childNodes);
  parts().forEach((part, number) => Object.assign(part, states[number]));
  const isAlike = (part) => part.tagName === active.tagName && part.textContent === active.textContent;
  if (place >= 0) (parts().find(isAlike) || parts()[place])?.focus({ preventScroll: true });
}

// Where a key leads in a row of things; before the first step to the left, the last one.
function placeByKey(event, now, count) {
  const to = { ArrowRight: now + 1, ArrowLeft: now < 0 ? count - 1 : now - 1, Home: 0, End: count - 1 }[event.key];
  if (to === undefined || !count || event.altKey || event.ctrlKey || event.metaKey) return null;
  event.preventDefault();
  return Math.max(0, Math.min(count - 1, to));
}

async function unpack(letters) {
  const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
