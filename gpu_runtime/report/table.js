// Layers as bars: in a strip in execution order, and in a table that sorts, filters and searches.

const COLUMNS = [
  { key: "index", text: "#", value: (_, i) => i, number: true },
  { key: "name", text: "Layer", value: (layer) => layer.name },
  { key: "us", text: "Time", value: (layer) => layer.us, falling: true },
  { key: "formats", text: "Formats", value: (layer) => layer.formats || "", wide: true },
  { key: "kind", text: "Verdict", value: (layer) => Object.keys(KINDS).indexOf(layer.kind) },
  { key: "cost", text: "Other choice", value: (layer) => layer.cost_us ?? -Infinity, falling: true, number: true, wide: true },
];

function showStrip(page) {
  const strip = by("strip");
  const nodes = new Map();
  strip.classList.toggle("many", page.layers.length > 120);
  page.layers.forEach((layer, i) => {
    if (!layer.us) return;
    const style = { flexGrow: layer.us };
    strip.append(gather(nodes, i, el("i", { class: `fill-${layer.kind}`, style, title: layerTitle(page, layer), onclick: () => select(i, "strip") })));
  });
  onSelect((layer, before) => mark(nodes, layer, before));
}

function bar(layer, most) {
  const share = (value) => `${100 * value / most}%`;
  const known = layer.low_us !== undefined && layer.us;
  return el("div", { class: "bar" }, el("i", { class: `fill-${layer.kind}`, style: { width: share(layer.us) } }),
    known ? el("u", { style: { left: share(layer.low_us), width: share(layer.high_us - layer.low_us) } }) : null);
}

// "a, b -> c", a line for each part.
function lines(formats) {
  return formats.split(/(?<=,) | (?=->)/).map((part) => el("div", {}, part));
}

function row(page, layer, i, most) {
  const cost = layer.cost_us === undefined ? "-" : us(layer.cost_us, page.verdict, "+");
  const share = page.verdict.total_us ? percent(layer.us / page.verdict.total_us) : "";
  return el("tr", { tabindex: -1, "data-layer": i, onclick: () => select(i, "table") },
    el("td", { class: "number" }, i),
    el("td", {}, el("div", { class: "name", title: layer.name }, layer.name), el("div", { class: "sub tactic" }, tactic(page, layer))),
    el("td", {}, ...(layer.tactic === undefined ? ["-"] : [`${us(layer.us, page.verdict)} `, el("span", { class: "sub share" }, share), bar(layer, most)])),
    el("td", { class: "wide code" }, ...lines(layer.formats)),
    el("td", {}, badge(layer.kind), el("div", { class: "sub" }, layer.reason)),
    el("td", { class: "wide number" }, cost));
}

function headings(table) {
  return el("tr", {}, ...COLUMNS.map((column) => {
    const cls = [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ");
    const button = el("button", { type: "button", onclick: () => sortBy(table, column) }, column.text);
    return el("th", { class: cls, scope: "col", "data-key": column.key }, button);
  }));
}

function sortBy(table, column, falling = null) {
  const now = table.sorted;
  const down = falling ?? (now.key === column.key ? !now.down : Boolean(column.falling));
  table.sorted = { key: column.key, down };
  const order = table.layers.map((layer, i) => [column.value(layer, i), i]);
  const sign = down ? -1 : 1;
  order.sort(([a, i], [b, j]) => (a < b ? -sign : a > b ? sign : i - j));
  table.body.append(...order.map(([, i]) => table.rows[i]));
  for (const head of table.head.children) {
    if (head.dataset.key === column.key) head.setAttribute("aria-sort", down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
}

function filter(table) {
  const words = table.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  let sum = 0;
  table.layers.forEach((layer, i) => {
    const fits = table.kinds.has(layer.kind) && (!table.type.value || layer.type === table.type.value)
      && words.every((word) => table.texts[i].includes(word));
    table.rows[i].hidden = !fits;
    shown += fits;
    sum += fits ? layer.us : 0;
  });
  table.shown.textContent = `${shown} of ${table.layers.length} rows, ${us(sum, table.page.verdict)}`;
}

function chip(table, kind, layers) {
  const sum = layers.reduce((total, layer) => total + layer.us, 0);
  const nodes = layers.reduce((total, layer) => total + (layer.layers || 1), 0); // of the model, of what has weights
  const button = el("button", {
    type: "button", class: "chip", "aria-pressed": "true", "data-kind": kind,
    title: `${us(sum, table.page.verdict)} together; click to hide or show`,
    onclick: () => {
      const on = !table.kinds.has(kind);
      on ? table.kinds.add(kind) : table.kinds.delete(kind);
      button.setAttribute("aria-pressed", on);
      filter(table);
    },
  }, dot(kind), `${KINDS[kind]} ${nodes}`);
  return button;
}

function showFilters(table) {
  const groups = new Map();
  for (const layer of table.layers) gather(groups, layer.kind, layer);
  const types = [...new Set(table.layers.map((layer) => layer.type))].sort();
  table.kinds = new Set(groups.keys());
  table.search = el("input", {
    type: "search", id: "search", placeholder: "Search names, nodes, tactics, formats ( / )", "aria-label": "Search layers",
    oninput: () => filter(table),
  });
  table.type = el("select", { id: "type", "aria-label": "Type of layer", onchange: () => filter(table) },
    el("option", { value: "" }, "all types"), ...types.map((type) => el("option", { value: type }, type)));
  table.shown = el("span", { id: "shown", class: "soft", role: "status" });
  const kinds = Object.keys(KINDS).filter((kind) => groups.has(kind));
  by("filters").append(...kinds.map((kind) => chip(table, kind, groups.get(kind))), table.type, table.search, table.shown);
}

function searchable(page, layer) {
  return [layer.name, layer.type, layer.reason, layer.formats, tactic(page, layer), ...(layer.nodes || [])].join("\n").toLowerCase();
}

// Arrows move among the rows that are shown, "/" goes to the search, Escape empties it.
function keys(table, event) {
  if (event.key === "/" && !/INPUT|SELECT/.test(event.target.tagName)) {
    event.preventDefault();
    table.search.focus();
  } else if (event.key === "Escape" && event.target === table.search) {
    table.search.value = "";
    filter(table);
  }
}

function move(table, event) {
  const shown = [...table.body.children].filter((one) => !one.hidden);
  const at = shown.indexOf(event.target.closest("tr"));
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1, Enter: at, " ": at }[event.key];
  if (to === undefined || !shown[to]) return;
  event.preventDefault();
  shown[to].focus();
  select(Number(shown[to].dataset.layer), "table-keys");
}

function follow(table, layer, before, from) {
  for (const [i, on] of [[before, false], [layer, true]]) {
    if (i === null) continue;
    table.rows[i].classList.toggle("selected", on);
    table.rows[i].tabIndex = on ? 0 : -1;
  }
  if (!["table", "table-keys", "start"].includes(from)) table.rows[layer].scrollIntoView({ block: "nearest" });
}

function showTable(page) {
  const most = longest(page);
  const table = { page, layers: page.layers, sorted: {} };
  table.rows = page.layers.map((layer, i) => row(page, layer, i, most));
  table.texts = page.layers.map((layer) => searchable(page, layer));
  table.head = headings(table);
  table.body = el("tbody", { onkeydown: (event) => move(table, event) });
  by("table").append(el("table", { id: "layer-table" }, el("thead", {}, table.head), table.body));
  showFilters(table);
  sortBy(table, COLUMNS.find((column) => column.key === "us"), true);
  filter(table);
  document.addEventListener("keydown", (event) => keys(table, event));
  onSelect((layer, before, from) => follow(table, layer, before, from));
}
