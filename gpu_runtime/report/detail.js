// One layer: why it runs as it does, its candidates, its tensors, its place in the graph.

const FEW = 14; // rows of candidates that are shown at first

// A row for each pair of formats of a form: the fastest first.
function candidateRows(page, layer) {
  const rows = [];
  for (const form of layer.forms || []) {
    const pairs = new Map();
    for (const [number, time, premium] of form.candidates) {
      gather(pairs, page.tactics[number].formats, { number, time, premium });
    }
    const own = form.op === layer.name;
    for (const [formats, found] of pairs) rows.push({ form, own, formats, found, best: Math.min(...found.map((c) => c.time)) });
  }
  return rows.sort((a, b) => b.own - a.own || a.form.op.localeCompare(b.form.op) || a.best - b.best);
}

function candidateMark(page, layer, candidate, own, x, y) {
  const facts = page.tactics[candidate.number];
  const chosen = own && candidate.number === layer.tactic;
  const cls = `mark fill-${facts.sparse ? "sparse" : "dense"}${chosen ? " chosen" : ""}`;
  const shape = facts.sparse
    ? svg("path", { class: cls, d: `M${x - 6} ${y}L${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}Z` })
    : svg("circle", { class: cls, cx: x, cy: y, r: 5 });
  const doubt = candidate.premium ? `\nplus ${us(candidate.premium, page.verdict)} for doubt` : "";
  shape.append(svg("title", {}, `${facts.name}\n${facts.formats}\n${us(candidate.time, page.verdict)}${doubt}${chosen ? "\nchosen" : ""}`));
  return shape;
}

function candidatePlot(page, layer, rows, width) {
  const names = rows.map((row) => (row.own ? row.formats : `${row.formats} *`));
  const left = Math.min(190, width * 0.5);
  const times = rows.flatMap((row) => row.found.map((c) => c.time));
  const [low, high] = [layer.low_us ?? layer.us, layer.high_us ?? layer.us];
  const [least, most] = [Math.min(low, ...times) * 0.95, Math.max(high, ...times) * 1.03];
  const height = 20 * rows.length + 26;
  const root = frame(width, height, "Candidates by formats and time");
  const x = (value) => left + 8 + ((value - least) / (most - least || 1)) * (width - left - 20);
  root.append(svg("rect", { class: "error", x: x(low), y: 0, width: x(high) - x(low), height: height - 22 }));
  xAxis(root, { x, top: 4, bottom: height - 23 }, steps(least, most, 4));
  rows.forEach((row, i) => {
    const y = 20 * i + 14;
    root.append(svg("text", { x: 0, y: y + 4, class: row.own ? "" : "soft" }, short(names[i], Math.floor(left / 6.4)), svg("title", {}, `${row.form.op}\n${row.formats}`)),
      line(left, y, width - 12, y, "axis"),
      ...row.found.map((c) => candidateMark(page, layer, c, row.own, x(c.time), y)));
  });
  return root;
}

function showCandidates(page, layer, place) {
  const rows = candidateRows(page, layer);
  if (!rows.length) return;
  place.append(el("h3", {}, "Candidates (us)"),
    el("div", { class: "legend" }, badge("dense", "dense"), badge("sparse", "2:4 sparse (diamond)"), "outlined: chosen; shaded: its error"));
  const box = el("div", { class: "candidates" });
  place.append(box);
  chart(box, (width) => candidatePlot(page, layer, rows.slice(0, FEW), width));
  if (rows.length > FEW) {
    const more = el("button", { type: "button", onclick: () => {
      box.replaceChildren();
      chart(box, (width) => candidatePlot(page, layer, rows, width));
      more.remove();
    } }, `all ${rows.length} pairs of formats`);
    place.append(more);
  }
  const other = rows.some((row) => !row.own) ? " * fused another way, which computes more or less than this layer." : "";
  place.append(el("p", { class: "sub" }, `The engine holds, of the tactics with the same formats, the fastest dense and the fastest sparse one.${other}`));
}

function tensorList(page, numbers, what) {
  return numbers.map((number) => {
    const t = page.tensors[number];
    return el("div", {}, `${what} `, el("span", { class: "code" }, t.name), el("div", { class: "sub" }, `${t.shape.join("x")} ${t.format}, ${bytes(t.nbytes)} at ${t.offset}`));
  });
}

function nearButton(page, node, tensor) {
  const layers = page.layers.length;
  const t = page.tensors[tensor];
  const text = `${t.shape.join("x")} ${t.format}`;
  if (node >= layers) {
    const what = node - layers < page.graph.inputs.length ? "network input" : "network output";
    return el("div", { class: "sub" }, `${what} ${t.name}, ${text}`);
  }
  const layer = page.layers[node];
  const style = { borderLeftColor: `var(--${layer.kind})` };
  return el("button", { type: "button", style, "data-near": node, onclick: () => select(node, "near") },
    layer.name, el("div", { class: "sub" }, `${us(layer.us, page.verdict)}, ${KINDS[layer.kind]}; ${text}`));
}

function showNear(page, at, place) {
  const edges = page.graph.edges;
  const before = edges.filter(([, to]) => to === at).map(([from, , t]) => nearButton(page, from, t));
  const after = edges.filter(([from]) => from === at).map(([, to, t]) => nearButton(page, to, t));
  place.append(el("h3", {}, "Place in the graph"), el("div", { class: "near" },
    ...before, el("div", { class: "here" }, page.layers[at].name), ...after));
}

function numbers(page, layer) {
  const band = errorBand(layer, page.verdict);
  const work = layer.macs ? `; ${count(layer.macs)} products, ${bytes(layer.nbytes)} moved at least` : "";
  return el("p", {}, badge(layer.kind), ` ${us(layer.us, page.verdict)}${band && `, ${band} with its error`}${work}`);
}

function showDetail(page, at, from) {
  const layer = page.layers[at];
  const place = by("detail");
  const [why, more] = [true, false].map((first) => (layer.facts || []).filter(([key]) => (key === "why") === first));
  place.replaceChildren(el("p", { class: "title" }, layer.name), numbers(page, layer),
    el("p", { class: "code" }, tactic(page, layer)), factList(why));
  showCandidates(page, layer, place);
  if (more.length) place.append(el("h3", {}, "More facts"), factList(more));
  showNear(page, at, place);
  place.append(el("h3", {}, "Tensors"), ...tensorList(page, layer.inputs || [], "reads"), ...tensorList(page, layer.outputs || [], "writes"));
  if (layer.nodes) place.append(el("h3", {}, "ONNX nodes"), el("p", { class: "code" }, layer.nodes.join(", ")));
  place.scrollTop = 0;
  const below = matchMedia("(max-width: 1080px)").matches;
  if (below && from !== "start" && from !== "table-keys") place.scrollIntoView({ block: "nearest" });
}
