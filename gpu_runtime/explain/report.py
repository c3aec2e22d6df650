"""A plan as text for people: a table of its layers, its total time, its rivals, its memory.

All functions take an engine's record (gpu_runtime.runtime.plan_record) and return plain text.
"""

from gpu_runtime.explain.facts import ends_of, layer_rows
from gpu_runtime.explain.figures import PREDICTED, tactic_text, times_are, us_text
from gpu_runtime.explain.plan_facts import NOTED, ORIGIN, plan_facts
from gpu_runtime.explain.points import points_text, size_options
from gpu_runtime.explain.wording import sparsity_text
from gpu_runtime.runtime.plan_record import Bound, EngineRecord
from gpu_runtime.text import listed, printable, table, wrap

KEY = 9  # columns of a fact's key
TOTALS = ("total", "calls", *NOTED, "rivals", "memory")


def plan_text(record: EngineRecord) -> str:
    """Returns the plan as a table with a row per layer in execution order, then its total, its rivals and its memory.

    The pieces of a batch that one op computes share a row.
    """
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
    return "\n".join([*lines, "", *listed(plan_facts(record, TOTALS), KEY)]) + "\n"


def trust_text(record: EngineRecord, checked: bool) -> str:
    """Returns the sentence on whether the engine's steps were checked against its layers, as `checked` says."""
    if not checked:
        return "not checked: the engine was built with other kernel sources, so it cannot run here"
    coded, text = record.num_cubins, "checked: every launch, argument and place in memory follows from its layers"
    return text + (f"; nothing checks the machine code of {coded} kernels: you have to trust it" if coded else "")


def inspect_text(record: EngineRecord, checked: bool = False) -> str:
    """Returns the text that `gpu-runtime inspect ENGINE` prints: the engine's origin, inputs and outputs, the plan, the
    sparsity log. `checked`: Engine.checked.
    """
    facts = [
        ("trust", trust_text(record, checked)),
        ("flags", _flags(record)),
        *(("input", _io_text(t)) for t in record.plan.inputs),
        *(("output", _io_text(t)) for t in record.plan.outputs),
    ]
    lines = listed([*plan_facts(record, ORIGIN), *((key, printable(value)) for key, value in facts)], KEY)
    sizes = [points_text(record)] if record.profiles else []
    return "\n".join([*lines, "", *sizes, plan_text(record), sparsity_text(record)]).rstrip() + "\n"


def _flags(record: EngineRecord) -> str:
    """Returns the engine's build options as the command line takes them."""
    flags = record.flags
    pools = [f"--memPoolSize={flags.pools}"] if flags.pools else []
    alike = ["--batchInvariant"] if flags.batch_invariant else []
    return " ".join([*pools, *size_options(record), f"--sparsity={flags.sparsity}", *alike])


def _io_text(t: Bound) -> str:
    """Returns an input or output as text: `x: fp16[1,3,224,224], in memory fp16:chw`."""
    return f"{t.name}: {t.dtype}[{','.join(map(str, t.shape))}], in memory {t.format}"
