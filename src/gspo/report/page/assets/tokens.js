// A response's text, each token in the colour of its number, which a key or a tap shows. Texts are only ever set as text.

const LEVELS = { ratio: [0.001, 0.01, 0.1, 0.5], advantage: [0.01, 0.5, 1, 2] }; // at which colours get stronger: in every view the same
const MEANINGS = {
  ratio: ["less likely than before the step", "more likely", "log ratio"],
  advantage: ["worse than its group", "better", "advantage"],
};
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

// Control and direction characters, which would hide or reorder what is around them, are written out.
function visible(text) {
  return String(text ?? "").replace(UNSEEN, (letter) => {
    const code = letter.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "␡" : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

// [[text, log ratio or null, advantage], …]; lengths count characters, of which JavaScript makes two where it must.
function tokensOf(sample) {
  const letters = Array.from(sample.completion), lengths = sample.token_characters || [letters.length];
  const isKnown = Boolean(sample.token_characters);
  let place = 0;
  return lengths.map((length, number) => {
    const text = letters.slice(place, (place += length)).join("");
    const ratio = isKnown && sample.token_log_ratios ? sample.token_log_ratios[number] : null;
    return [text, ratio, isKnown && sample.token_advantages ? sample.token_advantages[number] : sample.advantage];
  });
}

function levelOf(number, colour) {
  const level = number === null || number === undefined ? 0 : LEVELS[colour].filter((least) => Math.abs(number) >= least).length;
  return number < 0 ? -level : level;
}

function paint(made, level) {
  if (level) made.classList.add(level < 0 ? "less" : "more", `level-${Math.abs(level)}`);
  return made;
}

// The text and, below it, the numbers of the token that is chosen by mouse, finger or arrow keys.
function colouredText(sample, colour, isTraining) {
  const tokens = tokensOf(sample), numbers = element("p", "token-numbers");
  const text = element("pre", "completion", ...tokens.map((token) => {
    const level = colour ? levelOf(token[colour === "ratio" ? 1 : 2], colour) : 0;
    return paint(element("span", "token", visible(token[0])), level);
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
  const why = colour === "ratio" && isTraining && !text.querySelector(".less, .more") ? uncolouredOf(sample) : null;
  return [text, why && element("p", "about", `No token is coloured: ${why}.`), numbers];
}

function uncolouredOf({ token_log_ratios: ratios, mini_batch: trainedIn, reward }) {
  if (trainedIn === null) return `the response was not trained (${reward === null ? "no reward" : "advantage 0"})`;
  if (!ratios) return "the run kept no numbers of tokens (report.tokens: false)";
  return trainedIn === 0 ? "in the first mini-batch the policy had not changed yet" : `no log ratio reaches ±${LEVELS.ratio[0]}`;
}

function numbersOf([text, ratio, advantage], place, count) {
  const isTrained = ratio !== null && ratio !== undefined;
  const change = isTrained ? `log ratio ${signed(ratio)}, ratio ${Math.exp(ratio).toPrecision(5)}` : "no log ratio: not trained";
  return `token ${place + 1} of ${count}, “${visible(text) || "end of the text"}”: ${change}; advantage ${signed(advantage)}`;
}

function signed(number) {
  if (number === null || number === undefined) return "–";
  return (number < 0 ? "−" : "+") + String(Number(Math.abs(number).toPrecision(3)));
}

function legendOf(colour) {
  const [less, more, what] = MEANINGS[colour], levels = LEVELS[colour];
  const marks = [...levels.map((_, place) => -levels.length + place), ...levels.map((_, place) => place + 1)];
  const textOf = (level) => `${level < 0 ? "−" : "+"}${levels[Math.abs(level) - 1]}`;
  const swatches = marks.map((level) => paint(element("span", "swatch", textOf(level)), level));
  return element("p", "legend", `${what} of a token: ${less} `, ...swatches, ` ${more}`);
}
