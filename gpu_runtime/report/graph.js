// The plan's graph: nodes where the data says, edges in the colour of their format, reformats marked.

const PALETTE = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#868e98"];
const BOX = { width: 190, height: 40 };

// Formats, the most frequent first, each with its colour.
function formatColours(page) {
  const seen = new Map();
  for (const [, , t] of page.graph.edges) seen.set(page.tensors[t].format, (seen.get(page.tensors[t].format) || 0) + 1);
  const order = [...seen].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([format]) => format);
  return new Map(order.map((format, i) => [format, PALETTE[Math.min(i, PALETTE.length - 1)]]));
}

// Down the rows: between two of them it bends, past the nodes of one it is straight.
function curve(points) {
  const [first, ...rest] = points;
  const last = points[points.length - 1][1];
  let path = `M${first[0]} ${first[1] + BOX.height / 2}`;
  let [x, y] = [first[0], first[1] + BOX.height / 2];
  for (const [nx, ny] of rest) {
    const end = ny - BOX.height / 2;
    const middle = (end - y) / 2;
    path += Math.abs(nx - x) < 0.5 ? `L${nx} ${end}` : `C${x} ${y + middle} ${nx} ${end - middle} ${nx} ${end}`;
    if (ny !== last) path += `V${ny + BOX.height / 2}`;
    [x, y] = [nx, ny + BOX.height / 2];
  }
  return path;
}

function showEdges(page, root, colours, nodes) {
  page.graph.edges.forEach(([from, to, t], i) => {
    const tensor = page.tensors[t];
    const path = svg("path", { class: "edge", d: curve(page.graph.drawing.edges[i]), stroke: colours.get(tensor.format) },
      svg("title", {}, `${tensor.name}\n${tensor.shape.join("x")} ${tensor.format}, ${bytes(tensor.nbytes)}`));
    gather(nodes, from, path);
    gather(nodes, to, path);
    root.append(path);
  });
}

// "scope/conv + relu + add" -> "scope/conv +2"; of a long name its end, where names differ.
function brief(name) {
  const [first, ...others] = name.split(" + ");
  const more = others.length ? ` +${others.length}` : "";
  const most = 25 - more.length;
  return (first.length > most ? `\u2026${first.slice(1 - most)}` : first) + more;
}

function heading(layer, name) {
  if (!layer) return short(name, 26);
  return layer.kind === "reformat" ? short(layer.formats, 28) : brief(name);
}

function nodeBox(page, at) {
  const [cx, cy] = page.graph.drawing.nodes[at];
  const [x, y] = [cx - BOX.width / 2, cy - BOX.height / 2];
  const layer = page.layers[at];
  const ends = [...page.graph.inputs.map((name) => ["input", name]), ...page.graph.outputs.map((name) => ["output", name])];
  const [what, name] = layer ? [layer.kind, layer.name] : ends[at - page.layers.length];
  const under = layer ? (layer.kind === "noop" ? "no launch" : `${us(layer.us, page.verdict)} ${layer.type}`) : what;
  return svg("g", { class: `node ${what}`, onclick: layer ? () => select(at, "graph") : null },
    svg("rect", { class: "box", x, y, width: BOX.width, height: BOX.height, rx: layer ? 5 : 20 }),
    svg("rect", { class: layer ? `fill-${layer.kind}` : "fill-noop", x, y: y + 5, width: 6, height: BOX.height - 10, rx: 2 }),
    svg("svg", { x: x + 14, y, width: BOX.width - 18, height: BOX.height }, label(0, 17, heading(layer, name)), label(0, 32, under, { class: "soft" })),
    svg("title", {}, layer ? layerTitle(page, layer) : `${what} ${name}`));
}

function zoomed(view, factor) {
  view.zoom = Math.min(2, Math.max(0.02, factor));
  view.root.setAttribute("width", view.width * view.zoom);
  view.root.setAttribute("height", view.height * view.zoom);
}

function showNode(page, view, at) {
  const [x, y] = page.graph.drawing.nodes[at];
  view.box.scrollLeft = (x + 10) * view.zoom - view.box.clientWidth / 2;
  view.box.scrollTop = (y + 10) * view.zoom - view.box.clientHeight / 2;
}

function graphTools(page, view, colours) {
  const button = (text, title, onclick) => el("button", { type: "button", title, onclick }, text);
  const fit = () => zoomed(view, (view.box.clientWidth - 20) / view.width);
  const keys = [...colours].map(([format, background]) => el("span", { class: "badge" }, el("i", { class: "dot", style: { background } }), format));
  const reformats = page.layers.filter((layer) => layer.kind === "reformat").length;
  return el("div", { class: "legend" },
    button("\u2212", "Smaller", () => zoomed(view, view.zoom / 1.3)), button("+", "Larger", () => zoomed(view, view.zoom * 1.3)),
    button("fit", "As wide as this box", fit), button("selected", "To the selected layer", () => showNode(page, view, selection.layer)),
    "edges:", ...keys, badge("reformat", `${reformats} reformats, dashed`));
}

function showGraph(page) {
  const { drawing } = page.graph;
  const [width, height] = [drawing.width + 20, drawing.height + 20];
  const nodes = new Map();
  const colours = formatColours(page);
  const root = svg("svg", { viewBox: `-10 -10 ${width} ${height}`, role: "img", "aria-label": "Layers and the tensors between them" });
  const view = { root, width, height, box: el("div", { class: "scroll", tabindex: 0, "aria-label": "Plan graph" }, root) };
  showEdges(page, root, colours, nodes);
  drawing.nodes.forEach((_, at) => root.append(gather(nodes, at, nodeBox(page, at))));
  by("graph").append(graphTools(page, view, colours), view.box);
  zoomed(view, Math.min(1, Math.max(0.6, (view.box.clientWidth - 20) / width)));
  if (page.layers.length) view.box.scrollLeft = (drawing.nodes[0][0] + 10) * view.zoom - view.box.clientWidth / 2;
  onSelect((layer, before, from) => {
    mark(nodes, layer, before);
    if (from !== "graph" && from !== "start") showNode(page, view, layer);
  });
}
