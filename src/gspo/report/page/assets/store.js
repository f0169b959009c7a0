// What the page carries with it, unpacked; and what it remembers when it is loaded again.

async function unpack(letters) {
  const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function unpackElement(element) {
  const text = await unpack(element.textContent);
  element.textContent = "";
  return text;
}

const MEMORY = "gspo-report:" + location.pathname;

function remember(name, value) {
  try {
    const all = JSON.parse(sessionStorage.getItem(MEMORY) || "{}");
    sessionStorage.setItem(MEMORY, JSON.stringify({ ...all, [name]: value }));
  } catch { /* a browser that keeps nothing for files */ }
}

function remembered(name) {
  try {
    return JSON.parse(sessionStorage.getItem(MEMORY) || "{}")[name];
  } catch {
    return undefined;
  }
}

async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page from the disk may not be let to the clipboard
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = label; }, 1200);
}
