// The verdict, the environment, and what the page as a whole can do.

function tile(value, what, cls = "") {
  return el("div", { class: "tile" }, el("b", { class: cls }, value), el("span", {}, what));
}

function against(verdict) {
  if (verdict.pruned_us !== undefined && verdict.pruned_us !== null) {
    const text = `with pruned weights, predicted, instead of ${us(verdict.now_us, { predicted: true })}; ${verdict.pruned_picked} layers would run sparse`;
    return [tile(us(verdict.pruned_us, { predicted: true }), text, judged(verdict.pruned_us - verdict.now_us, false))];
  }
  if (verdict.dense_us === undefined || verdict.dense_us === null) return [];
  const saved = verdict.dense_us - verdict.total_us;
  const span = verdict.saved_range ? `; ${verdict.saved_range}` : "";
  const text = Math.abs(saved) < SHOWN_US ? "nothing" : us(saved, verdict);
  return [tile(text, `saved by sparse kernels: all dense, the plan takes ${us(verdict.dense_us, verdict)}${span}`, judged(-saved, false))];
}

function ceiling(verdict) {
  if (verdict.ceiling_us === undefined || verdict.ceiling_us === null) return [];
  return [tile(us(verdict.ceiling_us, verdict), "ceiling: all eligible kernels at twice their dense speed, launch and memory allowing")];
}

function library(verdict) {
  if (verdict.library_us === undefined || verdict.library_us === null) return [];
  const text = "with a library's dense kernels (cuBLAS, CUTLASS), estimated: 2:4 pays where the plan is faster than this";
  return [tile(us(verdict.library_us, { predicted: true }), text, judged(verdict.total_us - verdict.library_us, false))];
}

function showVerdict(page) {
  const v = page.verdict;
  by("verdict").append(
    el("p", { class: "headline" }, el("b", {}, v.model), ` at batch ${v.batch} on ${v.device}: `, el("b", {}, us(v.total_us, v)),
      `, ${v.timing}${v.predicted ? ": nothing was measured" : ""}`),
    el("div", { class: "tiles" },
      tile(us(v.total_us, v), `${v.predicted ? "predicted" : "measured"} per run, ${page.memory.steps.length} launches`),
      ...against(v), ...library(v), ...ceiling(v),
      tile(`${v.picked} of ${v.eligible}`, `eligible layers run sparse${v.sure ? `: ${v.sure}` : ""}`),
      tile(v.proof.startsWith("proven") ? "proven" : "not proven", v.proof)),
    el("p", {}, `${v.sentence}.`),
    ...(v.warning ? [el("p", { class: "warning" }, v.warning)] : []));
}

function showEnvironment(pages) {
  for (const page of pages) {
    by("environment").append(
      ...(pages.length > 1 ? [el("h3", {}, page.verdict.model)] : []), factList(page.environment, { class: "code" }),
      el("p", {}, "To build it again:"), el("pre", {}, page.command));
  }
}

function switchTheme() {
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;
  const next = themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % themes.length];
  root.dataset.theme = next;
  by("theme").textContent = `Theme: ${next}`;
}

function download(data) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
  const name = data.pages[0].verdict.model.replace(/[^\w.-]+/g, "_");
  el("a", { href: url, download: `${name}.report.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
