// A response's text, each token with the colour of its number. Texts are only ever set as text.

const NO_RATIO = "ratio";

// [[text, log ratio or null, advantage], …]; offsets count characters, of which JavaScript makes two where it must.
function tokensOf(sample) {
  const letters = Array.from(sample.completion);
  const lengths = sample.token_characters || [letters.length];
  const known = sample.token_characters !== null && sample.token_characters !== undefined;
  let place = 0;
  return lengths.map((length, number) => {
    const text = letters.slice(place, (place += length)).join("");
    const ratio = known && sample.token_log_ratios ? sample.token_log_ratios[number] : null;
    const own = known && sample.token_advantages ? sample.token_advantages[number] : sample.advantage;
    return [text, ratio, own];
  });
}

function numberOf(token, colour) {
  return colour === NO_RATIO ? token[1] : colour === "advantage" ? token[2] : null;
}

function largest(samples, colour) {
  let most = 0;
  for (const sample of samples) {
    for (const token of tokensOf(sample)) most = Math.max(most, Math.abs(numberOf(token, colour) || 0));
  }
  return most;
}

function colouredText(sample, colour, scale) {
  const text = document.createElement("pre");
  text.className = "completion";
  text.tabIndex = 0;
  for (const token of tokensOf(sample)) {
    const number = numberOf(token, colour);
    if (number === null || number === undefined) {
      text.append(token[0]);
      continue;
    }
    const span = document.createElement("span");
    span.textContent = token[0];
    span.className = number < 0 ? "less" : "more";
    span.style.setProperty("--heat", scale ? Math.sqrt(Math.abs(number) / scale).toFixed(3) : 0);
    const ratio = token[1] === null ? "not trained" : `log ratio ${signed(token[1])}, ratio ${Math.exp(token[1]).toFixed(4)}`;
    span.title = `${ratio}; advantage ${signed(token[2])}`;
    text.append(span);
  }
  return text;
}

function signed(number) {
  if (number === null || number === undefined) return "–";
  return (number < 0 ? "−" : "+") + Math.abs(number).toPrecision(3);
}

function showLegend(element, colour, most, scale) {
  element.replaceChildren();
  if (!colour) return;
  const [less, more] = colour === NO_RATIO ? ["less likely than before", "more likely"] : ["worse than its group", "better"];
  const bar = document.createElement("span");
  bar.className = "bar";
  const what = colour === NO_RATIO ? "log π_θ/π_old of the token" : "advantage";
  const end = scale > most ? `the clip range, for the largest shown is no more than ${most.toPrecision(3)}` : "the largest shown";
  element.append(`${signed(-scale)} ${less} `, bar, ` ${more} ${signed(scale)} (${what}; the scale's end is ${end}). A card with an orange edge was clipped.`);
  if (colour === NO_RATIO && !most) {
    element.replaceChildren("All log ratios shown are 0: the policy still was π_old (its first mini-batch), or nothing here was trained.");
  }
}
