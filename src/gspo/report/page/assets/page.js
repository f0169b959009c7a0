// The beginning: text first, then the charts, one after another, then the samples.

function openDefinition() {
  const target = location.hash.startsWith("#metric-") && document.getElementById(location.hash.slice(1));
  if (!target) return;
  target.closest("details").open = true;
  target.scrollIntoView({ block: "center" });
}

// A page that is loaded again stands where it stood, once everything above is as high as it was.
function startScrolling() {
  history.scrollRestoration = "manual";
  const again = performance.getEntriesByType("navigation")[0]?.type === "reload";
  const before = again ? remembered("scroll") : undefined;
  const opened = () => [...document.querySelectorAll("details")];
  addEventListener("pagehide", () => {
    remember("scroll", scrollY);
    remember("open", opened().map((details) => details.open));
  });
  return () => {
    if (before === undefined) return;
    opened().forEach((details, place) => { details.open = (remembered("open") || [])[place] || false; });
    scrollTo(0, before);
  };
}

function startCopying() {
  document.addEventListener("click", (event) => {
    const block = event.target.closest(".copied");
    if (block && event.target.classList.contains("copy")) copyText(block.querySelector("pre").textContent, event.target);
  });
}

function reloadAfter(seconds) {
  if (!seconds) return;
  setInterval(() => {
    const busy = document.hidden || document.activeElement.closest("form") || String(getSelection());
    if (!busy) location.reload();
  }, seconds * 1000);
}

async function start() {
  startTheme();
  startCopying();
  const scrollBack = startScrolling();
  addEventListener("hashchange", openDefinition);
  const figures = JSON.parse(await unpackElement(document.getElementById("figures-data")));
  const library = document.createElement("script");
  library.textContent = await unpackElement(document.getElementById("plotly-data"));
  document.head.append(library);
  await startCharts(figures);
  await startSamples();
  openDefinition();
  scrollBack();
  reloadAfter(figures.reload_seconds);
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds to everything being there
}

start().catch((error) => {
  const told = document.createElement("p");
  told.className = "broken";
  const fix = typeof DecompressionStream === "undefined" ? " It needs a browser of 2023 or later." : "";
  told.textContent = `This page could not be shown: ${error.message}.${fix}`;
  document.querySelector("main").prepend(told);
  throw error;
});
