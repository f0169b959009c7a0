// The charts' colours, light or dark as the system has it; on paper always light.

// Okabe and Ito's colours, which people who do not see red and green apart can tell from each other; on white the
// darker, on black the lighter of each.
const PALETTES = {
  light: { ink: "#5f6670", grid: "#e6e9ec", lines: ["#0072b2", "#d55e00", "#00805e", "#a6407a", "#8c6d00", "#3a86a8", "#4d4d4d"] },
  dark: { ink: "#a2a9b3", grid: "#2b3038", lines: ["#56b4e9", "#e69f00", "#2fc49a", "#e39ac6", "#f0e442", "#9fd3f0", "#c8c8c8"] },
};
const dark = matchMedia("(prefers-color-scheme: dark)");
let onPaper = false;

function palette() {
  return PALETTES[dark.matches && !onPaper ? "dark" : "light"];
}

function colourOf(number) {
  const { lines } = palette();
  return lines[number % lines.length];
}

function withOpacity(colour, opacity) {
  return colour + Math.round(255 * opacity).toString(16).padStart(2, "0");
}

// On paper all charts are there, those of closed families too.
function startTheme() {
  let closed = [];
  const print = (isPaper) => {
    onPaper = isPaper;
    if (isPaper) closed = [...document.querySelectorAll("#charts > details:not([open])")];
    for (const family of closed) family.open = isPaper;
    repaintAll();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  dark.addEventListener("change", repaintAll);
}
