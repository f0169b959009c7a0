// Light or dark: as the system has it, or as chosen; on paper always light.

// Okabe and Ito's colours, which people who do not see red and green apart can tell from each other; on white the
// darker, on black the lighter of each.
const PALETTES = {
  light: ["#0072b2", "#d55e00", "#00805e", "#a6407a", "#8c6d00", "#3a86a8", "#4d4d4d"],
  dark: ["#56b4e9", "#e69f00", "#2fc49a", "#e39ac6", "#f0e442", "#9fd3f0", "#c8c8c8"],
};

const dark = matchMedia("(prefers-color-scheme: dark)");
let onPaper = false;
const repaints = []; // called when the colours change

function theme() {
  if (onPaper) return "light";
  const chosen = byId("theme").value;
  return chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
}

function applyTheme() {
  document.documentElement.dataset.theme = theme();
  for (const repaint of repaints) repaint();
}

function startTheme() {
  const choice = byId("theme");
  choice.value = remembered("theme") || "auto";
  choice.addEventListener("change", () => { remember("theme", choice.value); applyTheme(); });
  dark.addEventListener("change", applyTheme);
  addEventListener("beforeprint", () => { onPaper = true; applyTheme(); });
  addEventListener("afterprint", () => { onPaper = false; applyTheme(); });
  document.documentElement.dataset.theme = theme();
}

function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The colours repeat: whoever needs more of them has dashes, too.
function colourOf(number) {
  const palette = PALETTES[theme()];
  return palette[number % palette.length];
}

function withOpacity(hex, opacity) {
  const [red, green, blue] = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${red},${green},${blue},${opacity})`;
}
