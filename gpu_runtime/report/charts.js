// Roofline, pruning, memory.

function scatterAxes(root, box, xs, ys, titles) {
  xAxis(root, box, xs);
  yAxis(root, box, ys);
  root.append(label((box.left + box.right) / 2, box.bottom + 32, titles[0], { "text-anchor": "middle" }),
    label(box.left - 40, box.top - 8, titles[1]));
}

function point(page, nodes, at, x, y, more) {
  const layer = page.layers[at];
  const cls = `mark fill-${layer.kind}${at === selection.layer ? " selected" : ""}`;
  return gather(nodes, at, svg("circle", { class: cls, cx: x, cy: y, r: 5.5, onclick: () => select(at, "chart") },
    svg("title", {}, `${layerTitle(page, layer)}\n${more}`)));
}

// ---- roofline

function powers(low, high) {
  const found = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) found.push(10 ** e);
  return found.filter((value) => value >= low && value <= high);
}

function workers(page) {
  return page.layers.map((layer, i) => ({ layer, i })).filter(({ layer }) => layer.macs && layer.nbytes && layer.us)
    .map(({ layer, i }) => ({ i, x: (2 * layer.macs) / layer.nbytes, y: (2e-6 * layer.macs) / layer.us }));
}

function logBox(width, height, points, peaks) {
  const [left, right, top, bottom] = [48, width - 10, 26, height - 44];
  const ridge = (peaks.dense_tflops * 1e3) / peaks.dram_gbps;
  const x0 = Math.min(...points.map((p) => p.x), ridge / 10) * 0.7;
  const x1 = Math.max(...points.map((p) => p.x), ridge * 4) * 1.5;
  const y0 = Math.min(...points.map((p) => p.y)) * 0.5;
  const y1 = peaks.dense_tflops * 3;
  const share = (value, low, high) => Math.log(value / low) / Math.log(high / low);
  return { left, right, top, bottom, x0, x1, y0, y1,
    x: (value) => left + share(value, x0, x1) * (right - left), y: (value) => bottom - share(value, y0, y1) * (bottom - top) };
}

// A roof of slope `gbps` up to `tflops`, inside the box.
function roof(box, gbps, tflops, cls, text) {
  const at = (x) => Math.min(tflops, (gbps * x) / 1e3);
  const start = Math.max(box.x0, (box.y0 * 1e3) / gbps);
  const knee = Math.min(box.x1, (tflops * 1e3) / gbps);
  const path = [start, knee, box.x1].map((x) => `${box.x(x)} ${box.y(at(x))}`).join("L");
  return svg("path", { class: cls, d: `M${path}` }, svg("title", {}, text));
}

function roofline(page, nodes, points, width) {
  const { peaks } = page;
  const height = 340;
  const box = logBox(width, height, points, peaks);
  const root = frame(width, height, "Roofline of the device and the layers under it");
  scatterAxes(root, box, powers(box.x0, box.x1), powers(box.y0, box.y1), ["operations per byte moved at least", "TFLOP/s"]);
  root.append(roof(box, peaks.dram_gbps, peaks.dense_tflops, "roof", `DRAM ${peaks.dram_gbps} GB/s, dense ${rounded(peaks.dense_tflops)} TFLOP/s`),
    roof(box, peaks.l2_gbps, peaks.dense_tflops, "roof", `L2 ${rounded(peaks.l2_gbps)} GB/s`),
    roof(box, peaks.l2_gbps, 2 * peaks.dense_tflops, "roof2", `2:4 sparse, ${rounded(2 * peaks.dense_tflops)} TFLOP/s of the dense layer`),
    label(box.right - 4, box.y(peaks.dense_tflops) + 14, `dense ${rounded(peaks.dense_tflops)} TFLOP/s`, { "text-anchor": "end", class: "soft" }),
    label(box.right - 4, box.y(2 * peaks.dense_tflops) - 5, `2:4 sparse ${rounded(2 * peaks.dense_tflops)}`, { "text-anchor": "end", class: "soft" }));
  for (const p of points) {
    const more = `${rounded(p.x)} operations per byte, ${p.y.toPrecision(3)} TFLOP/s, ${percent(p.y / peaks.dense_tflops)} of the dense peak`;
    root.append(point(page, nodes, p.i, box.x(p.x), box.y(p.y), more));
  }
  return root;
}

function showRoofline(page) {
  const points = workers(page);
  const none = points.length ? "" : "No layer multiplies: there is nothing to compare with the device's peak.";
  const note = "Lines: DRAM and L2 bandwidth up to the peak of dense FP16 tensor cores with FP32 sums, at the boost clock; dashed: that of 2:4, counted in operations of the dense layer. A layer's bytes are counted once each; what stays in L2 can lie above the DRAM line.";
  showChart("roofline", (nodes, width) => roofline(page, nodes, points, width), note, none);
}

// ---- pruning

function pruningPoints(page) {
  return page.layers.map((layer, i) => ({ layer, i })).filter(({ layer }) => layer.lost_energy !== undefined && layer.saved_us !== undefined)
    .map(({ layer, i }) => ({ i, x: 100 * layer.lost_energy, y: layer.saved_us }));
}

function pruning(page, nodes, points, width) {
  const height = 340;
  const [left, right, top, bottom] = [52, width - 14, 26, height - 44];
  const x1 = Math.max(...points.map((p) => p.x)) * 1.1 || 1;
  const high = Math.max(...points.map((p) => p.y), 0.01) * 1.15;
  const low = Math.min(...points.map((p) => p.y), 0) * 1.15;
  const box = { left, right, top, bottom, x: (v) => left + (v / x1) * (right - left), y: (v) => bottom - ((v - low) / (high - low)) * (bottom - top) };
  const root = frame(width, height, "Time saved and weight energy lost by 2:4");
  scatterAxes(root, box, steps(0, x1, 5), steps(low, high, 5), ["weight energy that pruning to 2:4 removes (%)", "us saved"]);
  root.append(line(left, box.y(0), right, box.y(0), "roof"));
  for (const p of points) root.append(point(page, nodes, p.i, box.x(p.x), box.y(p.y), `${us(p.y, page.verdict)} saved for ${p.x.toFixed(2)} % of its weight energy`));
  return root;
}

function showPruning(page) {
  const points = pruningPoints(page);
  const none = points.length ? "" : "The engine holds no layer's gain from 2:4 together with its loss: build with --sparsity=force, or from a model whose weights have the pattern.";
  const fit = points.every((p) => !p.x) ? " All these weights had the pattern already." : "";
  const note = `For a sparse layer: how much longer the plan would take with the layer dense. For a dense one: what 2:4 would save (below zero: cost). Energy: share of the sum of squared weights.${fit}`;
  showChart("pruning", (nodes, width) => pruning(page, nodes, points, width), note, none);
}

// ---- memory

function memoryBlock(page, nodes, block, x, y) {
  const layer = block.layer ?? null;
  const kind = layer === null ? "input" : page.layers[layer].kind;
  const [left, top] = [x(block.first), y(block.offset + block.nbytes)];
  const rect = svg("rect", {
    class: `block fill-${kind}${layer !== null && layer === selection.layer ? " selected" : ""}`, x: left, y: top,
    width: Math.max(1, x(block.last + 1) - left), height: Math.max(1, y(block.offset) - top),
    onclick: layer === null ? null : () => select(layer, "chart"),
  }, svg("title", {}, `${block.tensors.join("\n")}\n${bytes(block.nbytes)} at ${block.offset}, launches ${block.first} to ${block.last}`));
  return layer === null ? rect : gather(nodes, layer, rect);
}

function memoryMap(page, nodes, width) {
  const { memory } = page;
  const [left, right, top, bottom, height] = [66, width - 10, 18, 276, 316];
  const launches = Math.max(1, memory.steps.length);
  const x = (step) => left + (step / launches) * (right - left);
  const y = (offset) => bottom - (offset / (memory.nbytes || 1)) * (bottom - top);
  const root = frame(width, height, "Memory of activations over the launches");
  const unit = memory.nbytes > 2 << 20 ? 1 << 20 : 1 << 10;
  const figure = (value) => `${plain(value / unit)} ${unit > 1024 ? "MiB" : "KiB"}`;
  yAxis(root, { y, left, right }, steps(0, memory.nbytes / unit, 5).map((value) => value * unit), figure);
  for (const step of steps(0, launches, Math.min(launches, width / 90)).filter(Number.isInteger)) {
    root.append(label(x(step), bottom + 15, plain(step), { "text-anchor": "middle", class: "soft" }));
  }
  root.append(label((left + right) / 2, bottom + 33, "launch", { "text-anchor": "middle" }));
  for (const block of memory.blocks) root.append(memoryBlock(page, nodes, block, x, y));
  root.append(line(left, y(memory.most_alive), right, y(memory.most_alive), "most"));
  return root;
}

function showMemory(page) {
  const { memory } = page;
  const scratch = memory.workspace ? `; of them ${bytes(memory.workspace[1])} of scratch memory at ${memory.workspace[0]}` : "";
  const spare = memory.nbytes - memory.most_alive;
  const verdict = spare > 0 ? `${bytes(memory.most_alive)} is live at once (dashed)` : "all of it is live at once: no packing could take less in this order";
  const note = `${bytes(memory.nbytes)} in all${scratch}; ${verdict}. A block is coloured by the layer that writes it first.`;
  showChart("memory", (nodes, width) => memoryMap(page, nodes, width), note);
}
