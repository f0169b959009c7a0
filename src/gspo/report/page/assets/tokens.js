// A response's text, each token in the colour of its number, which a key or a tap shows. Texts are only ever set as text.

const COLOURINGS = { // the levels at which colours get stronger, in every view the same, and in words
  ratio: { levels: [0.001, 0.01, 0.1, 0.5], less: "less likely than before the step", more: "more likely", what: "log ratio" },
  advantage: { levels: [0.01, 0.5, 1, 2], less: "worse than its group", more: "better", what: "advantage" },
};

function levelOf(number, colour) {
  const level = number === null || number === undefined ? 0 : COLOURINGS[colour].levels.filter((least) => Math.abs(number) >= least).length;
  return number < 0 ? -level : level;
}

function paint(made, level) {
  if (level) made.classList.add(level < 0 ? "less" : "more", `level-${Math.abs(level)}`);
  return made;
}

// The text and, below it, the numbers of the token that is chosen by mouse, finger or arrow keys.
function colouredText(sample, colour, isTraining) {
  const { texts, token_log_ratios: ratios, token_advantages: advantages } = sample;
  const tokens = texts.map((text, place) => [text, ratios?.[place], advantages ? advantages[place] : sample.advantage]);
  const numbers = element("p", "token-numbers");
  const text = element("pre", "completion", ...tokens.map((token) => {
    const level = colour ? levelOf(token[colour === "ratio" ? 1 : 2], colour) : 0;
    return paint(element("span", "token", token[0]), level);
  }));
  text.tabIndex = 0;
  text.setAttribute("aria-label", "response; the arrow keys go through its tokens");
  numbers.setAttribute("role", "status");
  let chosen = -1;
  const choose = (place) => {
    text.children[chosen]?.classList.remove("chosen");
    chosen = place;
    text.children[chosen].classList.add("chosen");
    text.children[chosen].scrollIntoView({ block: "nearest" });
    numbers.textContent = numbersOf(tokens[chosen], chosen, tokens.length);
  };
  text.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token && !String(getSelection())) choose([...text.children].indexOf(token));
  });
  text.addEventListener("keydown", (event) => {
    const place = placeByKey(event, chosen, tokens.length);
    if (place !== null) choose(place);
  });
  if (colour !== "ratio" || !isTraining || text.querySelector(".less, .more")) return [text, numbers];
  const why = ratios ? `no log ratio reaches ±${COLOURINGS.ratio.levels[0]}` : "it has no log ratios";
  return [text, element("p", "about", `No token is coloured: ${why}.`), numbers];
}

function numbersOf([text, ratio, advantage], place, count) {
  const isTrained = ratio !== null && ratio !== undefined;
  const change = isTrained ? `log ratio ${signed(ratio)}, ratio ${Math.exp(ratio).toPrecision(5)}` : "no log ratio: not trained";
  return `token ${place + 1} of ${count}, “${text || "end of the text"}”: ${change}; advantage ${signed(advantage)}`;
}

function signed(number) {
  if (number === null || number === undefined) return "–";
  return (number < 0 ? "−" : "+") + String(Number(Math.abs(number).toPrecision(3)));
}

function legendOf(colour) {
  const { levels, less, more, what } = COLOURINGS[colour];
  const swatches = (sign) => levels.map((level, place) => paint(element("span", "swatch", signed(sign * level)), sign * (place + 1)));
  return element("p", "legend", `${what} of a token: ${less} `, swatches(-1).reverse(), swatches(1), ` ${more}`);
}
