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

// The text and, below it, the numbers of the token that is chosen by mouse, finger or arrow keys.
function colouredText({ texts, advantage, ...sample }, colour, isTraining) {
  const [ratios, advantages] = [sample.token_log_ratios ?? [], sample.token_advantages ?? []];
  const tokens = texts.map((text, place) => ({ text, ratio: ratios[place], advantage: advantages[place] ?? advantage }));
  const numbers = element("p", { class: "token-numbers", role: "status" });
  const text = element("pre", { class: "completion", tabindex: 0, "aria-label": "response; the arrow keys go through its tokens" },
    tokens.map((token) => paint(element("span", "token", token.text), token[colour], colour)));
  let chosen = -1;
  const choose = (place) => {
    text.children[chosen]?.classList.remove("chosen");
    text.children[chosen = place].classList.add("chosen");
    text.children[chosen].scrollIntoView({ block: "nearest" });
    numbers.textContent = numbersOf(tokens[chosen], chosen, tokens.length);
  };
  text.addEventListener("click", ({ target }) => {
    const token = target.closest(".token");
    if (token && !String(getSelection())) choose([...text.children].indexOf(token));
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
