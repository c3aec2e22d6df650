"""What a plan looks like to people: its layers as a table, its total, its rivals, its memory.

Everything here reads the engine's plan (gpu_runtime.runtime.engine describes it) and returns plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_runtime.explain.wording import sparsity_text
from gpu_runtime.text import (
    fp32_reasons,
    is_predicted,
    printable,
    size_text,
    table,
    tactic_text,
    times_are,
    us_text,
    versus,
    wrap,
)


def plan_text(plan: Mapping) -> str:
    """The plan as a table, a row per layer in execution order, then its total, its rivals and its memory."""
    total = plan["plan"]["total_us"]
    rows = [
        [
            str(i),
            printable(layer["name"]),
            layer["type"],
            _formats(layer),
            tactic_text(layer["tactic"]),
            us_text(layer["time_us"], plan, unit=""),
            f"{100 * layer['time_us'] / total:.1f}" if total else "-",
        ]
        for i, layer in enumerate(plan["layers"])
    ]
    lines = [f"Plan of {plan['model']['name']} for {plan['device']['title']}, {times_are(plan)}", ""]
    header = ["#", "layer", "type", "formats", "tactic", "us", "%"]
    lines += table(header, rows, caps=(4, 28, 9, 24, 32, 9, 5), right=(0, 5, 6))
    return "\n".join([*lines, "", *_totals(plan)]) + "\n"


def _totals(plan: Mapping) -> list[str]:
    p, memory = plan["plan"], plan["memory"]
    reformats = [layer["time_us"] for layer in plan["layers"] if layer["type"] == "reformat"]
    noops = sum(layer["type"] == "noop" for layer in plan["layers"])
    method = ", ".join(
        str(part) for part in (p.get("method"), f"width {p['width']}" if p.get("width") is not None else None) if part
    )
    if p.get("status") == "proven":
        verdict = "proven minimal for serial execution and these times"
    elif p.get("gap") is not None:
        verdict = f"not proven minimal: one that takes up to {100 * p['gap']:.2f} % less may exist"
    else:
        verdict = "not proven minimal"
    lines = wrap(
        f"total    {us_text(p['total_us'], plan)}, {verdict}{f' ({method})' if method else ''}; "
        f"reformats: {len(reformats)}, together {us_text(sum(reformats), plan)}; free NoOps: {noops}"
    )
    library = [layer["time_us"] for layer in plan["layers"] if layer["type"] == "library"]
    if library:
        basis = ", counted as each byte once, in one launch" if is_predicted(plan) else ""
        lines += wrap(f"library  {len(library)} functions without a kernel, together {us_text(sum(library), plan)}{basis}")
    lines += _range_lines(plan)
    measured = p.get("measured_us")
    if measured is not None:
        lines.append(f"whole    {measured:.2f} us measured end to end, {versus(measured, p['total_us'])} than the sum")
    rivals = p.get("rivals") or {}
    single = rivals.get("best_single_format")
    named = [
        ("without sparse tactics", rivals.get("all_dense_us")),
        (f"one format, {single['format']}" if single else "", single["us"] if single else None),
        ("layer by layer", rivals.get("greedy_us")),
    ]
    texts = [f"{what} {us_text(us, plan)} ({versus(us, p['total_us'])})" for what, us in named if us is not None]
    if texts:
        lines += wrap("rivals   " + "; ".join(texts))
    activations = f"activations {size_text(memory['activation_bytes'])}{_least(memory)}"
    lines += wrap(f"memory   {activations}, weights {size_text(memory['weight_bytes'])}")
    return lines


def _range_lines(plan: Mapping) -> list[str]:
    """What FP16 cannot hold, and what was done about it."""
    found = plan.get("range") or {}
    reached, lines = dict(found.get("high") or ()), []
    wide = [layer["name"] for layer in plan["layers"] if fp32_reasons(plan, layer)]
    if wide:
        lines += wrap(printable(f"FP32     {len(wide)} layers: {', '.join(wide)}"), indent=9)
        lines += [line for _, why in found["single"] for line in wrap(printable(f"         {why}"), indent=9)]
    for tensor, e in (found.get("exponents") or {}).items():
        if reached.get(tensor):
            text = f"scaled   {tensor!r} reaches {reached[tensor]:g} on {found['source']}: stored times 2^{e}"
            lines += wrap(printable(text), indent=9)
    compared = found.get("compared") or {}
    if compared.get("skipped"):
        lines += wrap(printable(f"compared not run on the calibration input: {compared['skipped']}"), indent=9)
    elif compared.get("outputs"):
        told = "; ".join(f"{t!r} {_off(e)}, rounding it once {own:.1e}" for t, e, own in compared["outputs"])
        text = f"compared with FP32 on the calibration input, relative errors: {told}"
        lines += wrap(printable(f"{text}; after {compared['rounds']} rounds of layers put into FP32"), indent=9)
    return lines


def _off(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _least(memory: Mapping) -> str:
    """How the activations' arena stands to the most that is alive at once, below which no packing can go."""
    bound, total = memory.get("largest_live_bytes"), memory["activation_bytes"]
    if bound is None:
        return ""
    if total <= bound:
        return " (proven minimal for this order: that much is alive at once)"
    return f" ({size_text(bound)} is alive at once: at most {100 * (total - bound) / total:.2f} % could be saved)"


def trust_text(plan: Mapping, checked: bool) -> str:
    """Whether an engine is held to what its layers say, or has to be trusted."""
    coded = sum(s["kind"] == "cubin" for s in plan["sections"])
    if not checked:
        return "not checked: its steps are those of other kernel sources, with which it cannot be run here"
    text = "checked: every launch, argument and place in memory follows from its layers"
    return text + (f"; the machine code of {coded} kernels is not: it has to be trusted" if coded else "")


def inspect_text(plan: Mapping, checked: bool = False) -> str:
    """What `gpu-runtime inspect` prints: the file's facts, then the plan, then the sparsity log. `checked`: Engine.checked."""
    producer, device = plan.get("producer") or {}, plan["device"]
    flags = " ".join(f"--{k}={_flag(v)}" for k, v in sorted((plan.get("flags") or {}).items()) if v not in ({}, None))
    coded = sum(s["kind"] == "cubin" for s in plan["sections"])
    facts = [
        ("model", f"{plan['model']['name']}, sha256 {plan['model']['sha256'][:16]}"),
        ("device", f"{device['title']} ({device['sm']}, {device.get('num_sms')} SMs, {device.get('clock_mhz')} MHz)"),
        ("times", plan["timing"]["label"]),
        ("made by", f"gpu_runtime {producer.get('version')}, NVRTC {producer.get('nvrtc')}"),
        ("format", f"{plan['format_version']}" if "format_version" in plan else "not saved yet"),
        (
            "kernels",
            f"sources {plan['source_hash'][:16]}, " + (f"{coded} embedded" if coded else "compiled on loading"),
        ),
        ("trust", trust_text(plan, checked)),
        ("flags", flags or "-"),
        *(("input", _io_text(t)) for t in plan["inputs"]),
        *(("output", _io_text(t)) for t in plan["outputs"]),
    ]
    lines = [line for key, value in facts for line in wrap(f"{key:8} {printable(value)}", indent=9)]
    return "\n".join([*lines, "", plan_text(plan), sparsity_text(plan)]).rstrip() + "\n"


def _flag(value) -> str:
    """A flag's value as the command line takes it: sizes as `x:1x3x224x224`."""
    if not isinstance(value, Mapping):
        return str(value)
    return ",".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in value.items())


def _formats(layer: Mapping) -> str:
    def joined(tensors: Sequence[Mapping]) -> str:
        return ",".join(dict.fromkeys(t["format"] for t in tensors))

    return f"{joined(layer['inputs'])} -> {joined(layer['outputs'])}"


def _io_text(t: Mapping) -> str:
    return f"{t['name']}: {t['dtype']}[{','.join(map(str, t['shape']))}], in memory {t['format']}"
