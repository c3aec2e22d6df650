// Elements, figures in words, and which layer is selected. No text of the data ever becomes markup.

const SVG = "http://www.w3.org/2000/svg";
const KINDS = {}; // kind of a layer -> what it is called, from the data

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function by(id) {
  return document.getElementById(id);
}

function line(x1, y1, x2, y2, cls) {
  return svg("line", { x1, y1, x2, y2, class: cls });
}

function label(x, y, text, options = {}) {
  return svg("text", { x, y, ...options }, text);
}

function dot(kind) {
  return el("i", { class: `dot fill-${kind}` });
}

function badge(kind, text = KINDS[kind]) {
  return el("span", { class: "badge" }, dot(kind), text);
}

// Keys and texts in two columns.
function factList(facts, attributes = {}) {
  return el("dl", {}, ...facts.flatMap(([key, text]) => [el("dt", {}, key), el("dd", attributes, text)]));
}

// ---- figures

function us(value, verdict, sign = "") {
  if (value === null || value === undefined) return "-";
  const mark = verdict.predicted ? "~" : "";
  return `${mark}${sign && value > 0 ? sign : ""}${value.toFixed(2)} us`;
}

const SHOWN_US = 0.005; // a smaller time would be shown as 0.00 us

// "1.20 us to 1.40 us": a layer's time with its error; empty where that is not known.
function errorBand(layer, verdict) {
  return layer.low_us === undefined ? "" : `${us(layer.low_us, verdict)} to ${us(layer.high_us, verdict)}`;
}

function bytes(n) {
  if (n < 1024) return `${n} B`;
  return n < 1 << 20 ? `${(n / 1024).toFixed(1)} KiB` : `${(n / (1 << 20)).toFixed(1)} MiB`;
}

function percent(share) {
  const value = 100 * share;
  return `${value.toFixed(Math.abs(value) < 10 ? 1 : 0)} %`;
}

function count(n) {
  return n >= 1e9 ? `${(n / 1e9).toFixed(2)} G` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} M` : n.toLocaleString("en");
}

// "3.2 % faster", as the command line has it.
function versus(value, base) {
  if (!base || value === base) return "no difference";
  const change = 100 * (value / base - 1);
  const amount = Math.abs(change) < 0.05 ? "less than 0.1" : Math.abs(change).toFixed(1);
  return `${amount} % ${change >= 0 ? "slower" : "faster"}`;
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}\u2026` : text;
}

// The longest time of a layer of the pages, with its error.
function longest(...pages) {
  return Math.max(...pages.flatMap((page) => page.layers.map((layer) => layer.high_us ?? layer.us)), 1e-9);
}

function tactic(page, layer) {
  return layer.tactic === undefined ? "-" : page.tactics[layer.tactic].name;
}

function layerTitle(page, layer) {
  const band = errorBand(layer, page.verdict);
  return `${layer.name}\n${us(layer.us, page.verdict)}${band && ` (${band})`}, ${KINDS[layer.kind]}\n${tactic(page, layer)}\n${layer.formats}`;
}

// ---- which layer is selected

const selection = { layer: null, watchers: [] };

function onSelect(watcher) {
  selection.watchers.push(watcher);
}

// `from`: which view asks: it does not scroll to what was just clicked there.
function select(layer, from = "") {
  if (layer === selection.layer) return;
  const before = selection.layer;
  selection.layer = layer;
  for (const watcher of selection.watchers) watcher(layer, before, from);
}

function mark(nodes, layer, before) {
  for (const node of nodes.get(before) || []) node.classList.remove("selected");
  for (const node of nodes.get(layer) || []) node.classList.add("selected");
}

// Elements by the layer that they stand for.
function gather(nodes, layer, node) {
  if (!nodes.has(layer)) nodes.set(layer, []);
  nodes.get(layer).push(node);
  return node;
}

// ---- drawings as wide as their place

function chart(place, draw) {
  const holder = el("div");
  place.append(holder);
  let width = 0;
  const redraw = () => {
    const now = Math.floor(holder.clientWidth);
    if (now && now !== width) {
      width = now;
      holder.replaceChildren(draw(width));
    }
  };
  new ResizeObserver(redraw).observe(holder);
  redraw();
}

// A drawing in a section of the page, in which the selected layer is marked, with a note; or `none`, why there is no drawing.
function showChart(id, draw, note, none = "") {
  const place = by(id);
  if (none) return place.append(el("p", { class: "soft" }, none));
  let nodes = new Map();
  chart(place, (width) => draw((nodes = new Map()), width));
  place.append(el("p", { class: "sub" }, note));
  return onSelect((layer, before) => mark(nodes, layer, before));
}

function frame(width, height, title) {
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
}

// Multiples of a round step, for an axis from `low` to `high`.
function steps(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

function xAxis(root, { x, top, bottom }, values) {
  for (const value of values) {
    root.append(line(x(value), top, x(value), bottom, "axis"),
      label(x(value), bottom + 15, plain(value), { "text-anchor": "middle", class: "soft" }));
  }
}

function yAxis(root, { y, left, right }, values, text = plain) {
  for (const value of values) {
    root.append(line(left, y(value), right, y(value), "axis"),
      label(left - 6, y(value) + 4, text(value), { "text-anchor": "end", class: "soft" }));
  }
}

function rounded(value) {
  return plain(Number(value.toPrecision(3)));
}

function plain(value) {
  return Number(value.toPrecision(6)).toString();
}
