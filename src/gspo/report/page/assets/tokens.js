// A response's text, each token in the colour of its number, which a key or a tap shows. Texts are only ever set as text.

const COLOURINGS = { // the levels at which colours get stronger, in every view the same, and in words
  ratio: { levels: [0.001, 0.01, 0.1, 0.5], less: "less likely than before the step", more: "more likely", what: "log ratio" },
  advantage: { levels: [0.01, 0.5, 1, 2], less: "worse than its group", more: "better", what: "advantage" },
};

function paint(made, number, colour) {
  const level = COLOURINGS[colour]?.levels.filter((least) => Math.abs(number ?? 0) >= least).length;
  if (level) made.classList.add(number < 0 ? "less" : "more", `level-${level}`);
  return made;
}

const FOLDED = 400; // characters of what others say, from which on it is folded
const total = (numbers) => numbers.reduce((all, number) => all + number, 0);

// Turns one below the other, each with its numbers, and its text where the tokens are not known. Contexts are counted.
function inTurns(tokens, spans, turns, starts, isTraining) {
  const contexts = [...new Set([0, ...starts])];
  const isKnown = total(turns.map(([, , count]) => count)) === spans.length;
  let end = 0, before = 0;
  return turns.map(([role, text, count, reward]) => {
    const own = tokens.slice(end, end + count);
    const pre = element("pre", "", isKnown ? spans.slice(end, end += count) : text);
    const isOwn = role === "assistant", isOpen = isOwn || pre.textContent.length < FOLDED;
    const mean = (name) => signed(total(own.map((token) => token[name])) / count);
    const changes = isOwn && isTraining && isKnown ? [`advantage ${mean("advantage")}`, `mean log ratio ${mean("ratio")}`] : [];
    const numbers = [`${count} token${count === 1 ? "" : "s"}`, ...(reward === undefined ? [] : [`reward ${signed(reward)}`]), ...changes];
    const number = contexts.length > 1 ? 1 + contexts.indexOf(before) : 0;
    before += count;
    const branch = number ? [`context ${number} of ${contexts.length}`] : [];
    const title = element("summary", "", [...branch, isOwn ? "policy" : role, ...numbers].join(" · "));
    return element("details", { class: `turn${isOwn ? " own" : ""}${number > 1 ? " branch" : ""}`, ...(isOpen && { open: "open" }) }, title, pre);
  });
}

// The text and, below it, the numbers of the token that is chosen by mouse, finger or arrow keys.
function colouredText({ texts, advantage, turns = [], starts = [], ...sample }, colour, isTraining) {
  const [ratios, advantages] = [sample.token_log_ratios ?? [], sample.token_advantages ?? []];
  const tokens = texts.map((text, place) => ({ text, ratio: ratios[place], advantage: advantages[place] ?? advantage }));
  const numbers = element("p", { class: "token-numbers", role: "status" });
  const spans = tokens.map((token) => paint(element("span", "token", token.text), token[colour], colour));
  const text = element(turns.length ? "div" : "pre",
    { class: "completion", tabindex: 0, "aria-label": "response; the arrow keys go through its tokens" },
    turns.length ? inTurns(tokens, spans, turns, starts, isTraining) : spans);
  let chosen = -1;
  const choose = (place) => {
    spans[chosen]?.classList.remove("chosen");
    spans[chosen = place].classList.add("chosen");
    spans[chosen].scrollIntoView({ block: "nearest" });
    numbers.textContent = numbersOf(tokens[chosen], chosen, tokens.length);
  };
  text.addEventListener("click", ({ target }) => {
    const token = target.closest(".token");
    if (token && !String(getSelection())) choose(spans.indexOf(token));
  });
  text.addEventListener("keydown", (event) => {
    const place = placeByKey(event, chosen, tokens.length);
    if (place !== null) choose(place);
  });
  if (colour !== "ratio" || !isTraining || text.querySelector(".less, .more")) return [text, numbers];
  const why = ratios.length ? `no log ratio reaches ±${COLOURINGS.ratio.levels[0]}` : "it has no log ratios";
  return [text, element("p", "about", `No token is coloured: ${why}.`), numbers];
}

function numbersOf({ text, ratio, advantage }, place, count) {
  const change = Number.isFinite(ratio) ? `log ratio ${signed(ratio)}, ratio ${Math.exp(ratio).toPrecision(5)}` : "no log ratio: not trained";
  return `token ${place + 1} of ${count}, “${text || "end of the text"}”: ${change}; advantage ${signed(advantage)}`;
}

const signed = (number) =>
  Number.isFinite(number) ? (number < 0 ? "−" : "+") + String(Number(Math.abs(number).toPrecision(3))) : "–";

function legendOf(colour) {
  const { levels, less, more, what } = COLOURINGS[colour];
  const swatches = (sign) => levels.map((level) => paint(element("span", "swatch", signed(sign * level)), sign * level, colour));
  return element("p", "legend", `${what} of a token: ${less} `, swatches(-1).reverse(), swatches(1), ` ${more}`);
}
