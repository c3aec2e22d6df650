"""What a plan looks like to people: its layers as a table, its total, its rivals, its memory.

Everything here reads an engine's record (gpu_runtime.runtime.plan_record) and returns plain text.
"""

from gpu_runtime.explain.facts import ends_of, facts_of, layer_rows, pieces_text
from gpu_runtime.explain.figures import PREDICTED, proof_text, tactic_text, times_are, us_text, whole_texts
from gpu_runtime.explain.points import points_text
from gpu_runtime.explain.wording import sparsity_text
from gpu_runtime.runtime.findings import Compared
from gpu_runtime.runtime.plan_record import FORMAT_VERSION, Bound, EngineRecord, Flags, Memory
from gpu_runtime.text import printable, size_text, table, versus, wrap


def plan_text(record: EngineRecord) -> str:
    """The plan as a table, a row per layer in execution order, of pieces of a batch one for all; then its total, its rivals and
    its memory."""
    total, tuned = record.plan.solution.total_us, record.plan.solution.tuned
    estimated = tuned.missing if tuned else ()
    rows = []
    for same in layer_rows(layers := record.plan.layers):
        layer, us = layers[same[0]], sum(layers[i].time_us for i in same)
        rows.append(
            [
                str(same[0]),
                printable(layer.op_name + (f", {len(same)} pieces" if layer.images else "")),
                layer.type,
                " -> ".join(ends_of(layer)),
                tactic_text(layer.tactic),
                us_text(us, PREDICTED if layer.name in estimated else record.timing, unit=""),
                f"{100 * us / total:.1f}" if total else "-",
            ]
        )
    lines = [*wrap(printable(f"Plan of {record.model.name} for {record.device.title}, {times_are(record.timing)}")), ""]
    header = ["#", "layer", "type", "formats", "tactic", "us", "%"]
    lines += table(header, rows, right=(0, 5, 6))
    return "\n".join([*lines, "", *_totals(record)]) + "\n"


def _totals(record: EngineRecord) -> list[str]:
    plan, timing, p = record.plan, record.timing, record.plan.solution
    reformats = [layer.time_us for layer in plan.layers if layer.type == "reformat"]
    noops = sum(layer.type == "noop" for layer in plan.layers)
    method = ", ".join(filter(None, (p.method, None if p.width is None else f"width {p.width}")))
    lines = wrap(
        f"total    {us_text(p.total_us, timing)}, {proof_text(plan, timing)}{f' ({method})' if method else ''}; "
        f"reformats: {len(reformats)}, together {us_text(sum(reformats), timing)}; free NoOps: {noops}"
    )
    library = [layer.time_us for layer in plan.layers if layer.type == "library"]
    if library:
        basis = ", estimated as one launch that moves each byte once" if timing.is_predicted else ""
        lines += wrap(f"library  {len(library)} functions without a kernel, together {us_text(sum(library), timing)}{basis}")
    lines += wrap(f"pieces   {text}", indent=9) if (text := pieces_text(record)) else []
    lines += _range_lines(record)
    for key, text in whole_texts(plan, timing):
        lines += wrap(printable(f"{key:8} {text}"))
    single, whose = p.rivals.best_single_format, "" if p.rivals.own_us is None else "this batch alone: "
    named = [
        ("without sparse tactics", p.rivals.all_dense_us),
        (f"{whose}one format, {single.format}" if single else "", single.us if single else None),
        (f"{whose}layer by layer", p.rivals.greedy_us),
        ("without --batchInvariant", p.rivals.own_us),
    ]
    texts = [f"{what} {us_text(us, timing)} ({versus(us, p.total_us)})" for what, us in named if us is not None]
    if texts:
        lines += wrap("rivals   " + "; ".join(texts))
    activations = f"activations {size_text(plan.memory.activation_bytes)}{_least(plan.memory)}"
    return lines + wrap(f"memory   {activations}, weights {size_text(record.weight_bytes)}")


def _range_lines(record: EngineRecord) -> list[str]:
    """What FP16 cannot hold, and what was done about it."""
    found, lines = record.plan.range, []
    if found is None:
        return []
    reached = dict(found.high)
    wide = [facts.layer.name for facts in facts_of(record) if facts.wide]
    if wide:
        lines += wrap(printable(f"FP32     {len(wide)} layers: {', '.join(wide)}"), indent=9)
        reasons = dict.fromkeys(why for _, why in found.single)
        lines += [line for why in reasons for line in wrap(printable(f"         {why}"), indent=9)]
    for tensor, e in found.exponents.items():
        if reached.get(tensor):
            text = f"scaled   {tensor!r} reaches {reached[tensor]:g} on {found.source}: stored times 2^{e}"
            lines += wrap(printable(text), indent=9)
    return lines + (_compared_lines(found.compared) if found.compared else [])


def _compared_lines(compared: Compared) -> list[str]:
    if compared.skipped:
        return wrap(printable(f"compared not run on the calibration input: {compared.skipped}"), indent=9)
    errors = "; ".join(f"{t!r} {_error_text(e)}, rounding alone {own:.1e}" for t, e, own in compared.outputs)
    text = f"compared with FP32 on the calibration input, relative errors: {errors}"
    return wrap(printable(f"{text}; after {compared.rounds} rounds of moving layers to FP32"), indent=9) if errors else []


def _error_text(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def _least(memory: Memory) -> str:
    """Compares the activations' arena with the most that is alive at once: no packing can take less."""
    bound, total = memory.largest_live_bytes, memory.activation_bytes
    if total <= bound:
        return " (proven minimal for this order: all of it is live at once)"
    return f" ({size_text(bound)} is live at once: at most {100 * (total - bound) / total:.2f} % could be saved)"


def trust_text(record: EngineRecord, checked: bool) -> str:
    """Whether the engine's steps were checked against its layers."""
    if not checked:
        return "not checked: the engine was built with other kernel sources, so it cannot run here"
    coded, text = record.num_cubins, "checked: every launch, argument and place in memory follows from its layers"
    return text + (f"; nothing checks the machine code of {coded} kernels: you have to trust it" if coded else "")


def inspect_text(record: EngineRecord, checked: bool = False) -> str:
    """What `gpu-runtime inspect` prints: the file's facts, then the plan, then the sparsity log. `checked`: Engine.checked."""
    device, coded = record.device, record.num_cubins
    facts = [
        ("model", f"{record.model.name}, sha256 {record.model.sha256[:16]}"),
        ("device", f"{device.title} ({device.sm}, {device.num_sms} SMs, {device.clock_mhz} MHz)"),
        ("times", record.timing.label),
        ("made by", f"gpu_runtime {record.producer.version}, NVRTC {record.producer.nvrtc}"),
        ("format", f"{FORMAT_VERSION}"),
        (
            "kernels",
            f"sources {record.source_hash[:16]}, " + (f"{coded} embedded" if coded else "compiled on loading"),
        ),
        ("trust", trust_text(record, checked)),
        ("flags", _flags(record.flags)),
        *(("input", _io_text(t)) for t in record.plan.inputs),
        *(("output", _io_text(t)) for t in record.plan.outputs),
    ]
    lines = [line for key, value in facts for line in wrap(f"{key:8} {printable(value)}", indent=9)]
    sizes = [points_text(record)] if record.profiles else []
    return "\n".join([*lines, "", *sizes, plan_text(record), sparsity_text(record)]).rstrip() + "\n"


def _flags(flags: Flags) -> str:
    """As the command line takes them: sizes as `x:1x3x224x224`."""
    sizes = ",".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in flags.shapes.items())
    given = {
        "memPoolSize": flags.pools,
        "shapes": sizes,
        "sparsity": flags.sparsity,
    }
    alike = " --batchInvariant" if flags.batch_invariant else ""
    return " ".join(f"--{name}={value}" for name, value in given.items() if value) + alike


def _io_text(t: Bound) -> str:
    return f"{t.name}: {t.dtype}[{','.join(map(str, t.shape))}], in memory {t.format}"
