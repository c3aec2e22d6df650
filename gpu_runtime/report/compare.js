// Two engines side by side: layers joined by name, what differs most first.

function pairFacts(a, b, [i, j]) {
  const [left, right] = [i === null ? null : a.layers[i], j === null ? null : b.layers[j]];
  const change = (right ? right.us : 0) - (left ? left.us : 0);
  const one = (page, layer) => (layer ? `${tactic(page, layer)} ${layer.formats} ${layer.kind}` : "");
  return { i, left, right, change, same: Boolean(left && right) && one(a, left) === one(b, right) && Math.abs(change) < SHOWN_US };
}

function side(page, layer, most) {
  if (!layer) return el("td", { class: "soft" }, "not in this plan");
  return el("td", {}, us(layer.us, page.verdict), " ", badge(layer.kind), " ", el("span", { class: "sub" }, layer.reason), bar(layer, most),
    el("div", { class: "sub tactic" }, `${tactic(page, layer)}, ${layer.formats}`));
}

// B is only a baseline, a plan without sparse kernels: slower is then not worse.
function isBaseline(a, b) {
  return a.verdict.picked > 0 && b.verdict.picked === 0;
}

function judged(change, baseline) {
  return baseline || Math.abs(change) < SHOWN_US ? "" : change > 0 ? "worse" : "better";
}

function changeCell(a, b, pair) {
  const cls = judged(pair.change, isBaseline(a, b));
  const verdict = pair.left && pair.right && pair.left.kind !== pair.right.kind ? "verdict differs" : "";
  return el("td", { class: "number" }, el("span", { class: cls }, us(pair.change, a.verdict, "+")), el("div", { class: "sub" }, verdict));
}

function pairRow(a, b, pair, most) {
  const layer = pair.left || pair.right;
  const open = pair.i === null ? null : () => select(pair.i, "compare");
  return el("tr", { onclick: open, hidden: pair.same },
    el("td", {}, el("div", { class: "name", title: layer.name }, layer.name)), side(a, pair.left, most), side(b, pair.right, most), changeCell(a, b, pair));
}

function about(letter, verdict) {
  return `${letter}: ${verdict.model}, --sparsity=${verdict.sparsity}, ${verdict.timing}, ${verdict.picked} of ${verdict.eligible} eligible layers sparse`;
}

function compareHead(a, b, pairs) {
  const [x, y] = [a.verdict, b.verdict];
  const cls = judged(y.total_us - x.total_us, isBaseline(a, b));
  const differ = pairs.filter((pair) => !pair.same).length;
  const notes = [x.model !== y.model && `the models are ${x.model} and ${y.model}`, x.device !== y.device && `the devices are ${x.device} and ${y.device}`,
    x.predicted !== y.predicted && "one has measured times, the other predicted times"].filter(Boolean);
  return [
    el("div", { class: "tiles" }, tile(us(x.total_us, x), about("A", x)),
      tile(us(y.total_us, y), about("B", y)),
      tile(us(y.total_us - x.total_us, x, "+"), `B against A: ${versus(y.total_us, x.total_us)}`, cls),
      tile(`${differ} of ${pairs.length}`, "layers differ in time, tactic, formats or verdict")),
    ...(notes.length ? [el("p", { class: "warning" }, `Not the same: ${notes.join("; ")}.`)] : []),
  ];
}

function showCompare(pages, joined) {
  const [a, b] = pages;
  const pairs = joined.map((pair) => pairFacts(a, b, pair)).sort((p, q) => p.same - q.same || Math.abs(q.change) - Math.abs(p.change));
  const rows = pairs.map((pair) => pairRow(a, b, pair, longest(...pages)));
  const same = pairs.filter((pair) => pair.same).length;
  const toggle = el("button", { type: "button", id: "show-same", "aria-pressed": "false", onclick: () => {
    const on = toggle.getAttribute("aria-pressed") === "false";
    toggle.setAttribute("aria-pressed", on);
    pairs.forEach((pair, i) => { rows[i].hidden = pair.same && !on; });
  } }, `Show the ${same} that are the same`);
  const head = ["Layer", "A", "B", "B - A"].map((text) => el("th", { scope: "col", class: text === "B - A" ? "number" : "" }, text));
  const place = by("compare");
  place.hidden = false;
  place.append(el("h2", {}, "Side by side"), ...compareHead(a, b, pairs), ...(same ? [el("p", {}, toggle)] : []),
    el("div", { class: "scroll" }, el("table", { id: "pairs" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))),
    el("p", { class: "sub" }, "Everything below shows A. Layers are joined by name, else by an ONNX node that both have."));
}
