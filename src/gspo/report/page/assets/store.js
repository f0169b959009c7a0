// How elements are made, and how what the page carries is unpacked.

const byId = (id) => document.getElementById(id);

// Characters that nobody could see, or that change the direction of a text, are written out.
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/gu;

function visible(text) {
  return text.replace(HIDDEN, (letter) => {
    const code = letter.charCodeAt();
    return code < 32 ? String.fromCharCode(0x2400 + code) : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

// The only way that anything of a run comes onto the page: strings become text, never HTML. `attributes`: a class, or several.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  const pairs = typeof attributes === "string" ? { class: attributes } : attributes;
  for (const [name, value] of Object.entries(pairs)) if (value !== "") made.setAttribute(name, value);
  const there = children.flat().filter((child) => child !== null && child !== undefined);
  made.append(...there.map((child) => (typeof child === "string" ? visible(child) : child)));
  return made;
}

const button = (text, onclick) => Object.assign(element("button", { type: "button" }, text), { onclick });

function tableOf(heads, rows) {
  const head = element("tr", "", heads.map((content) => element("th", { scope: "col" }, content)));
  const body = rows.map((row) => element("tr", "", row.map((cell) => element("td", "", cell))));
  return element("div", "wide", element("table", "", element("thead", "", head), element("tbody", "", body)));
}

const listOf = (texts, className = "") => element("ul", className, texts.map((text) => element("li", "", text)));
const folded = (summary, ...content) => element("details", "", element("summary", "", summary), ...content);

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

function fill(select, options, wanted = select.value, otherwise = options[0]?.[0]) {
  select.length = options.length; // in place, so that a list that is open stays
  options.forEach(([value, text], place) => Object.assign(select.options[place], { value, text: visible(String(text)) }));
  select.value = wanted;
  if (select.selectedIndex < 0) select.value = otherwise ?? "";
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
