// The charts' colours, light or dark as the system has it; on paper always light.

const dark = matchMedia("(prefers-color-scheme: dark)");
let onPaper = false;
const cssOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (number) => cssOf(`--line-${number % 7}`);
const withOpacity = (colour, opacity) => colour + Math.round(255 * opacity).toString(16).padStart(2, "0");

// On paper all charts are there, those of closed families too.
function startTheme() {
  let closed = [];
  const print = (isPaper) => {
    onPaper = document.documentElement.classList.toggle("paper", isPaper);
    if (isPaper) closed = [...document.querySelectorAll("#charts > details:not([open])")];
    for (const family of closed) family.open = isPaper;
    repaintAll();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  dark.addEventListener("change", repaintAll);
}
