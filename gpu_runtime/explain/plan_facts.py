"""The facts of a plan as a whole, in words, each under a key of FACTS; the views of a plan choose the keys that they show."""

from collections.abc import Callable, Iterable, Sequence

from gpu_runtime.explain.facts import facts_of, pieces_text
from gpu_runtime.explain.figures import ceiling_text, counts_text, dense_text, gain_text, library_text, proof_text, us_text
from gpu_runtime.explain.names import fitting, grouped
from gpu_runtime.explain.points import batches_text
from gpu_runtime.runtime.findings import Apart
from gpu_runtime.runtime.plan_record import FORMAT_VERSION, EngineRecord, Memory
from gpu_runtime.text import printable, several, size_text, versus

ORIGIN = ("model", "device", "times", "driver", "policy", "made by", "format", "kernels")  # facts of the engine's origin
# Facts that only a plan out of the ordinary has, which every view shows.
NOTED = ("int8", "pieces", "whole", "in place", "replaced", "left out", "merged", "FP32", "scaled", "overflow", "compared")
Most = int | None  # the largest number of names or tensors that a fact lists; None for all


def plan_facts(record: EngineRecord, keys: Iterable[str], most: Most = None) -> list[tuple[str, str]]:
    """Returns (key, printable text) for each of `keys`, keys of FACTS, whose fact the plan has.

    A fact of several paragraphs has its key at the first paragraph and "" at the others. `most`: the largest number of items
    in a list; None: all.
    """
    found = [(key, FACTS[key](record, most)) for key in keys]
    texts = [(key, [text] if isinstance(text, str) else text) for key, text in found]
    return [(key * (not i), printable(text)) for key, every in texts for i, text in enumerate(every) if text]


def _some(items: Sequence[str], most: Most, sep: str = ", ") -> str:
    """Returns the first `most` items, joined by `sep`, and the number of the others."""
    more = [] if most is None or len(items) <= most else [f"{len(items) - most} more"]
    return sep.join([*items[:most], *more])


# ---- times


def _time(record: EngineRecord, _: Most) -> str:
    """Returns the plan's time, its proof, and the time without sparse kernels."""
    time = f"{us_text(record.solution.total_us, record.timing)}, {proof_text(record.plan, record.timing)}"
    return "; ".join(filter(None, (time, dense_text(record))))


def _total(record: EngineRecord, _: Most) -> str:
    """Returns the plan's time, its proof, the planner's method, and the time of reformats."""
    plan, timing, p = record.plan, record.timing, record.plan.solution
    reformats = [layer.time_us for layer in plan.layers if layer.type == "reformat"]
    noops = sum(layer.type == "noop" for layer in plan.layers)
    method = ", ".join(filter(None, (p.method, None if p.width is None else f"width {p.width}")))
    return (
        f"{us_text(p.total_us, timing)}, {proof_text(plan, timing)}{f' ({method})' if method else ''}; "
        f"reformats: {len(reformats)}, together {us_text(sum(reformats), timing)}; free NoOps: {noops}"
    )


def _calls(record: EngineRecord, _: Most) -> str:
    """Returns the number and time of layers that a library's function computes; "" without such layers."""
    found = [layer.time_us for layer in record.plan.layers if layer.type == "library"]
    basis = ", estimated as one launch that moves each byte once" if record.timing.is_predicted else ""
    together = us_text(sum(found), record.timing)
    return f"{len(found)} functions without a kernel, together {together}{basis}" if found else ""


def _whole(record: EngineRecord, _: Most) -> str:
    """Returns the measured time of the whole network; "" if it was not measured."""
    p = record.solution
    if p.measured_us is None:
        return ""
    return f"{us_text(p.measured_us, record.timing)} measured end to end, {versus(p.measured_us, p.total_us)} than the sum"


def _in_place(record: EngineRecord, _: Most) -> str:
    """Returns the three layers whose times within the network differ most from their times alone."""

    def text(a: Apart) -> str:
        at = f" behind {a.behind}" if a.behind else ""
        return f"{a.layer} took {us_text(a.us, record.timing)}{at}, {us_text(a.alone_us, record.timing)} alone"

    worst = sorted(record.solution.apart, key=lambda a: -abs(a.us - a.alone_us))
    return _some([text(a) for a in worst], 3, "; ")


def _replaced(record: EngineRecord, _: Most) -> list[str]:
    """Returns a paragraph for each tactic that was replaced because the whole network is faster with another one."""
    times = [[us_text(us, record.timing) for us in (r.after_us, r.before_us)] for r in record.solution.replaced]
    return [
        f"{r.op}: {r.after.partition('__')[0]} for {r.before.partition('__')[0]}, as the whole took {after} instead of {before}"
        for r, (after, before) in zip(record.solution.replaced, times, strict=True)
    ]


def _int8(record: EngineRecord, most: Most) -> list[str]:
    """Returns paragraphs on the number of layers in INT8, and on the layers that stay in FP16, by reason."""
    against = record.plan.int8
    if not against:
        return []
    reasons = {
        why: [layer for layer, other in against.items() if other == why] for why in dict.fromkeys(against.values()) if why
    }
    found = [f"{list(against.values()).count('')} of {several(len(against), 'layer')} with weights in INT8"]
    if tables := sum(bool(layer.problem and layer.problem.table) for layer in record.plan.layers):
        found.append(f"{several(tables, 'layer')} with a table in place of operators between 8-bit tensors")
    return found + [f"in FP16: {_some(layers, most)}: {why}" for why, layers in reasons.items()]


def _merged(record: EngineRecord, _: Most) -> str:
    found = [len(row.layers) for row in record.sparsity.rows if row.branches]
    text = f"{sum(found)} convolutions run as {len(found)}, each the sum of parallel branches of one input"
    return f"{text}; the merged weights need the 2:4 pattern" if found else ""


def _rivals(record: EngineRecord, _: Most) -> str:
    """Returns the times of the best plans under other conditions: dense, in one format, layer by layer."""
    total, rivals = record.solution.total_us, record.solution.rivals
    single, whose = rivals.best_single_format, "" if rivals.own_us is None else "this batch alone: "
    named = [
        ("without sparse tactics", rivals.all_dense_us),
        (f"{whose}one format, {single.format}" if single else "", single.us if single else None),
        (f"{whose}layer by layer", rivals.greedy_us),
        ("without --batchInvariant", rivals.own_us),
    ]
    return "; ".join(f"{what} {us_text(us, record.timing)} ({versus(us, total)})" for what, us in named if us is not None)


def _memory(record: EngineRecord, _: Most) -> str:
    memory = record.plan.memory
    return f"activations {size_text(memory.activation_bytes)}{_least(memory)}, weights {size_text(record.weight_bytes)}"


def _least(memory: Memory) -> str:
    """Returns the words that compare the activations' arena with the most bytes alive at once, its lower bound."""
    bound, total = memory.largest_live_bytes, memory.activation_bytes
    if total <= bound:
        return " (proven minimal for this order: all of it is live at once)"
    return f" ({size_text(bound)} is live at once: at most {100 * (total - bound) / total:.2f} % could be saved)"


# ---- tensors that FP16 cannot hold, and their cures


def _wide(record: EngineRecord, most: Most) -> list[str]:
    """Returns the names of layers with FP32 tensors, and the reasons."""
    wide = {f.layer.op_name: f.wide for f in facts_of(record) if f.wide}
    names = fitting([*wide], lambda texts: most is None or len(texts) <= most, list if most is None else grouped)
    reasons = [*dict.fromkeys(why for whys in wide.values() for why in whys)]
    found = [f"{len(wide)} layers: {', '.join(names)}", *reasons[: most and 1]] if wide else []
    return found if most is None else ["; ".join(found)]  # the log has few lines


def _scaled(record: EngineRecord, most: Most) -> str:
    """Returns the tensors that are stored scaled by a power of two, since FP16 cannot hold them; "" without such tensors."""
    found = record.plan.range
    high = {t: v for t, v in found.high if v is not None} if found else {}
    scaled = {t: e for t, e in found.exponents.items() if high.get(t)} if found else {}
    largest = sorted(scaled, key=lambda t: -high[t])
    texts = [f"{t!r} reaches {high[t]:g}, stored times 2^{scaled[t]}" for t in largest]
    head = f"{len(texts)} tensors exceed FP16's maximum of 65504" + (f" on {found.source}" if found else "")
    return f"{head}: {_some(texts, most and 1, '; ')}" if texts else ""


def _overflow(record: EngineRecord, most: Most) -> str:
    """Returns the tensors that may exceed FP16's range, with the reasons why no cure was possible; "" without such tensors."""
    stuck = record.plan.range.stuck if record.plan.range else ()
    texts = [f"{t!r}: {why}" for t, why in stuck]
    return f"{len(stuck)} tensors may exceed FP16's range: {_some(texts, most and 2, '; ')}" if stuck else ""


def _compared(record: EngineRecord, most: Most) -> str:
    """Returns the words for the plan's errors against FP32; "" without a comparison. With a limit `most`: only wrong tensors,
    "" if there are none.
    """
    found = record.plan.range.compared if record.plan.range else None
    if found is None or (most and not (found.skipped or found.far)):
        return ""
    errors = [f"{t!r} {'not finite' if e is None else f'{e:.1e}'}, rounding alone {own:.1e}" for t, e, own in found.outputs]
    parts = [f"not run: {found.skipped}"] if found.skipped else []
    parts += [f"{len(found.far)} tensors are far off: {_some(found.far, most)}"] if found.far else []
    if errors and not most:
        parts += [f"relative errors: {'; '.join(errors)}; after {found.rounds} rounds of moving layers to FP32"]
    return f"with FP32 on the calibration input: {'; '.join(parts)}" if parts else ""


# ---- the engine's origin


def _kernels(record: EngineRecord, _: Most) -> str:
    return f"sources {record.source_hash}, {f'{record.num_cubins} embedded' if record.num_cubins else 'compiled on loading'}"


def _launches(record: EngineRecord, _: Most) -> str:
    calls = sum(layer.type == "library" for layer in record.plan.layers)
    return f"{len(record.plan.steps)}" + (f", including {calls} of a library" if calls else "")


# Key -> the function that returns the fact in words, one text or several paragraphs; "" or [] where the plan lacks it.
FACTS: dict[str, Callable[[EngineRecord, Most], str | list[str]]] = {
    "model": lambda record, _: f"{record.model.name}, sha256 {record.model.sha256}",
    "device": lambda record, _: str(record.device),
    "sources": lambda record, _: record.device.sources,
    "assumed": lambda record, _: record.device.assumed,
    "times": lambda record, _: record.timing.label,
    "driver": lambda record, _: record.timing.driver or "",
    "policy": lambda record, _: record.timing.policy or "",
    "made by": lambda record, _: f"gpu_runtime {record.producer.version}, NVRTC {record.producer.nvrtc}",
    "format": lambda *_: f"{FORMAT_VERSION}",
    "kernels": _kernels,
    "launches": _launches,
    "pruning": lambda record, _: gain_text(record),
    "sparsity": lambda record, _: counts_text(record.sparsity),
    "time": _time,
    "total": _total,
    "calls": _calls,
    "pieces": lambda record, _: pieces_text(record),
    "whole": _whole,
    "in place": _in_place,
    "replaced": _replaced,
    "batches": lambda record, _: batches_text(record) if record.profiles else "",
    "library": lambda record, _: library_text(record),
    "ceiling": lambda record, _: ceiling_text(record),
    "left out": lambda record, _: "; ".join(f"{k}, which failed on this GPU: {why}" for k, why in record.device.left_out),
    "int8": _int8,
    "merged": _merged,
    "FP32": _wide,
    "scaled": _scaled,
    "overflow": _overflow,
    "compared": _compared,
    "rivals": _rivals,
    "memory": _memory,
}
