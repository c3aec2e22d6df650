// From the data that the page carries to what it shows.

async function readData() {
  const holder = by("data");
  if (holder.dataset.encoding === "plain") return JSON.parse(holder.textContent);
  const packed = Uint8Array.from(atob(holder.textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function costliest(layers) {
  return layers.reduce((best, layer, i) => (layer.us > layers[best].us ? i : best), 0);
}

function showPage(data) {
  const [page] = data.pages;
  Object.assign(KINDS, Object.fromEntries(data.kinds));
  showVerdict(page);
  if (data.pages.length > 1) showCompare(data.pages, data.joined);
  showStrip(page);
  showTable(page);
  showGraph(page);
  showRoofline(page);
  showPruning(page);
  showMemory(page);
  showEnvironment(data.pages);
  onSelect((layer, _, from) => showDetail(page, layer, from));
  by("theme").addEventListener("click", switchTheme);
  by("download").addEventListener("click", () => download(data));
  if (page.layers.length) select(costliest(page.layers), "start");
}

readData().then(showPage).then(() => { document.documentElement.dataset.ready = "yes"; });
