"""The reasons why layers run sparse or dense as text, from a plan's record: the sparsity log, the account of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpu_runtime.explain.facts import ends_of, layer_rows, pieces_text
from gpu_runtime.explain.figures import (
    PREDICTED,
    RESOURCES,
    SHOWN_US,
    chance_text,
    network_lines,
    pruned_costs,
    pruned_text,
    ratio_text,
    summing,
    sure,
    tactic_text,
    us_text,
    whose_text,
)
from gpu_runtime.explain.names import matching, others_of
from gpu_runtime.explain.reason_texts import REASONS, first_violation, fitting_text, time_text
from gpu_runtime.runtime.fields import Told
from gpu_runtime.runtime.findings import (
    Flip,
    KernelTime,
    LibraryKernel,
    LibraryPlan,
    OtherChoice,
    SparsityRecord,
    SparsityRow,
    Summary,
)
from gpu_runtime.runtime.plan_record import EngineRecord, Explained, Timing
from gpu_runtime.text import listed, lost_text, printable, table, wrap

ELIGIBLE_LINE = "(Sparsity) Layers eligible for sparse math:"
PICKED_LINE = "(Sparsity) TRT inference plan picked sparse implementation for layers:"


def tensorrt_lines(sparsity: SparsityRecord) -> list[str]:
    """Returns TensorRT's two lines, on eligible and on picked layers, with all names; they are not wrapped, since programs read
    them.
    """
    lists = ((ELIGIBLE_LINE, sparsity.eligible), (PICKED_LINE, sparsity.picked))
    return [f"{line} {', '.join(map(printable, names))}".rstrip() for line, names in lists]


def sparsity_text(record: Explained) -> str:
    """Returns the sparsity log: the line that identifies the plan, TensorRT's two lines, a table with a row per layer, the
    network's summary, and a sentence per layer.
    """
    sparsity, timing = record.sparsity, record.timing
    lines = []
    if sparsity.mode == "force":
        lines += wrap(pruned_text(sparsity))
        lines += [line for name, why in sparsity.not_pruned for line in wrap(printable(f"not pruned: {name}: {why}"))]
    lines += [
        *wrap(printable(f"Sparsity of {whose_text(record)}")),
        *tensorrt_lines(sparsity),
        "",
    ]
    header = ["layer\n  verdict: reason", "best dense", "best sparse", "cost of the\nother choice"]
    rows = [
        [
            f"{printable(row.layer)}\n  {row.verdict}: {row.reason}",
            *(_kernel(best, timing, "\n") if best else "-" for best in (row.best_dense, row.best_sparse)),
            cost_text(row, record),
        ]
        for row in sparsity.rows
    ]
    lines += table(header, rows, right=(3,), gap=True)
    lines += ["", *network_lines(record), ""]
    for row in sparsity.rows:
        lines += wrap(f"{printable(row.layer)}: {sentence(row, record)}")
    return "\n".join(lines).rstrip() + "\n"


def cost_text(row: SparsityRow, record: Explained) -> str:
    """Returns the time that the plan would take more with the layer forced to the other kind, as text; "-" if it is not known.

    For a layer whose weights are not 2:4 it is the time that the pruned plan would take more with the layer sparse than dense,
    marked "if pruned".
    """
    cost, pruned = row.other_cost_us, pruned_costs(record)
    if cost is None and (costs := [pruned[name] for name in row.layers if name in pruned]):
        return "none\nif pruned" if abs(costs[0]) < SHOWN_US else f"{us_text(costs[0], PREDICTED, sign='+')}\nif pruned"
    return "-" if cost is None else "none" if abs(cost) < SHOWN_US else us_text(cost, record.timing, sign="+")


# ---- one layer


def sentence(row: SparsityRow, record: Explained) -> str:
    """Returns the sentences on why a layer runs sparse or dense, made from its row's reason and numbers; `row.sentence`
    replaces the first of them.
    """
    if row.sentence:
        return " ".join(filter(None, (row.sentence, _alone(row, record))))
    words = REASONS[row.reason]
    text = words.sentence(row, record, *(time_text(best, record.timing) for best in (row.best_dense, row.best_sparse)))
    form = f"{row.detail}." if row.detail and row.best_sparse else ""  # the sentence that weights lose 2:4 in the plan's form
    parts = (f"{text[0].upper()}{text[1:]}.", form, _alone(row, record), _branches(row, record), _forced_text(row, record))
    return " ".join(filter(None, (*parts, words.cure(row, record))))


def _alone(row: SparsityRow, record: Explained) -> str:
    """Returns the sentence on the layer's kernel in the plan of this batch alone; "" if that plan runs the same kernel."""
    if row.alone is None or row.us is None or row.reason == "other_batches":
        return ""
    ours, own = us_text(row.us, record.timing), us_text(row.alone.us, record.timing)
    return f"One tactic runs all batches, here in {ours}; the plan of this batch alone has one of {own}."


def _plan(record: Explained) -> str:
    """Returns the words for the plan that counterfactual plans (one layer forced) are compared with."""
    return "whole plan" if record.solution.rivals.own_us is None else "plan of this batch alone"


def _branches(row: SparsityRow, record: Explained) -> str:
    """Returns the sentences on the branches that were merged into the layer, and on the gain of merging; "" for other
    layers.
    """
    if not row.branches:
        return ""
    what = f"{len(row.layers)} parallel convolutions of one input" if len(row.layers) > 1 else "a convolution and its own input"
    text = f"One convolution computes the exact sum of {what}; the merged weights need the 2:4 pattern"
    cost = row.apart_cost_us
    if cost is not None and cost >= SHOWN_US:
        text += f". Without merging, the {_plan(record)} would take {us_text(cost, record.timing)} more"
    return text + "."


def _other_choice(row: SparsityRow) -> str:
    return "dense" if row.verdict == "sparse" else "sparse"


def _forced_text(row: SparsityRow, record: Explained) -> str:
    """Returns the sentence on the plan's time with the layer forced to the other kind; "" if it is not known."""
    cost, other = row.other_cost_us, row.other
    if cost is None:
        return ""
    more = f"{us_text(abs(cost), record.timing)} {'more' if cost > 0 else 'less'}"
    change = more if abs(cost) >= SHOWN_US else "the same time"
    text = f"Forced {_other_choice(row)}, the {_plan(record)} would take {change}"
    best = row.best_dense if row.verdict == "sparse" else row.best_sparse
    if other and best and abs(other.us - best.us) >= SHOWN_US:
        which = "a kernel that takes" if other.kernels == 1 else "kernels that take together"
        text += f", with {which} {us_text(other.us, record.timing)} in the surrounding formats"
    if other and (abs(other.reformat_us) >= SHOWN_US or abs(other.around_us) >= SHOWN_US):
        text += f" ({_parts(other, record.timing)})"
    return text + "."


def _parts(other: OtherChoice, timing: Timing) -> str:
    """Returns the parts of the other choice's cost as text, without zeros; the numbers shown add up to the cost shown."""
    named = ("its own kernel", "reformats", "the layers around it")
    shares = summing(other.cost_us, (other.kernel_us, other.reformat_us, other.around_us))
    parts = [f"{what} {us_text(us, timing, sign='+')}" for what, us in zip(named, shares, strict=True) if us]
    return ", ".join(parts) or "no part changes"


def _flip(row: SparsityRow, timing: Timing) -> str:
    """Returns the words for the change that would make the other choice pay, and for the probability that the faster kernel is
    the one that predictions say.
    """
    kind, flip, chance = _other_choice(row), row.flip, row.p_sparse_faster
    if row.reason == "uncertain":
        text = f"lower --risk, or measure on the GPU: by predicted times the {kind} choice is no slower"
    elif (row.other_cost_us or 0) <= 0:
        text = f"the {kind} choice costs no more"
    elif flip is None:
        text = f"even an infinitely fast {kind} kernel would not pay: the other layers and reformats lose more than it saves"
    else:
        text = _needed(flip, kind, timing)
    if chance is not None:
        faster, p = ("sparse", chance) if chance >= 0.5 else ("dense", round(1 - chance, 4))
        text += f"; P({faster} kernel faster) = {chance_text(p)}, given the error of predictions: {sure(p)}"
    return text


def _needed(flip: Flip, kind: str, timing: Timing) -> str:
    """Returns the words for the speed that the other choice needs of its kernels. `kind`: the other choice, sparse or dense."""
    much = f"{100 * (flip.speedup - 1):.2g} % faster" if flip.speedup < 1.5 else f"{ratio_text(flip.speedup)} as fast"
    times = f"{us_text(flip.needed_us, timing)} instead of {us_text(flip.us, timing)}"
    doubt = f" (--risk adds {us_text(flip.premium_us, timing)} to the sparse time)" if flip.premium_us >= SHOWN_US else ""
    return f"its {kind} kernels would have to be {much}, {times}{doubt}"


def layer_facts(row: SparsityRow, record: Explained) -> list[tuple[str, str]]:
    """Returns (topic, text) for each known fact on one layer's choice, in the order of reading."""
    facts = [("why", sentence(row, record)), ("weights", _weights(row))]
    facts += [("dense", _measured(row.best_dense, record.timing)), ("sparse", _measured(row.best_sparse, record.timing))]
    if row.alone:
        facts.append(("alone", f"{_measured(row.alone, record.timing)}; in the plan of this batch alone"))
    if row.library:
        facts.append(("library", _library(row.library)))
    if row.if_sparse:
        facts.append(("if 2:4", f"{_measured(row.if_sparse, PREDICTED)}; predicted"))
    other = row.other
    if other:
        cost = us_text(other.cost_us, record.timing, sign="+")
        text = f"{_kernel(other, record.timing)}; plan {cost}: {_parts(other, record.timing)}"
        facts.append((f"as {_other_choice(row)}", text))
        facts.append(("to flip", _flip(row, record.timing)))
    floor = row.floor
    if floor:
        parts = (("mma", floor.mma_us), ("dram", floor.dram_us), ("l2", floor.l2_us), ("launch", floor.launch_us))
        times = ", ".join(f"{RESOURCES[key]} {us_text(us, record.timing)}" for key, us in parts)
        least = [us_text(us, record.timing) for us in (floor.dense_us, floor.sparse_us)]
        text = f"{RESOURCES[floor.bound]}; at the device's peak: {times}. If it computes every product, a dense kernel takes "
        facts.append(("bound", f"{text}at least {least[0]}, a sparse one at least {least[1]}"))
    return facts


def _library(found: LibraryKernel) -> str:
    """Returns the words for the estimated times of a library's kernels for a layer."""
    limited, us = RESOURCES.get(found.bound, found.bound), us_text(found.us, PREDICTED)
    text = f"a library's dense kernel is estimated at {us}, limited by {limited}; error {100 * found.error:.0f} %"
    return text if found.sparse_us is None else f"{text}; its 2:4 kernel at {us_text(found.sparse_us, PREDICTED)}"


def layer_text(row: SparsityRow, record: EngineRecord) -> str:
    """Returns the account of one layer as text, with a line per fact; the layer's launches come first."""
    facts = [(f"  {key}", printable(value)) for key, value in (*_runs(row, record), *layer_facts(row, record))]
    return "\n".join([*wrap(f"{printable(row.layer)}   {row.verdict}: {row.reason}"), *listed(facts, 12)]) + "\n"


def _runs(row: SparsityRow, record: EngineRecord) -> list[tuple[str, str]]:
    """Returns ("runs", text) for each launch of a layer: its time, formats and kernel, and its share of the plan's time."""
    total, facts = record.solution.total_us, []
    layers = record.plan.layers
    for same in layer_rows(layers):
        layer, us = layers[same[0]], sum(layers[i].time_us for i in same)
        if layer.tactic and row.layer == (layer.layer or layer.name):
            ins, out = ends_of(layer)
            text = f"{us_text(us, record.timing)} {ins}->{out} {tactic_text(layer.tactic)}"
            text += f", in {len(same)} pieces of the batch" if layer.images else ""
            facts.append(("runs", text + (f", {100 * us / total:.1f} % of the plan" if total else "")))
    return facts


def _weights(row: SparsityRow) -> str:
    """Returns the words for the sizes [k,c,r,s] of a layer's weights and their 2:4 pattern."""
    text = f"[{row.k},{row.c // row.groups},{row.kernel[0]},{row.kernel[1]}], groups {row.groups}; "
    if row.pattern_share is None:
        return text + f"{row.c // row.groups} input channels per group are not a multiple of 4"
    text += f"2:4: {fitting_text(row)} of {row.pattern_groups} groups of 4 fit"
    if row.first_violation:
        text += f", {first_violation(row)}"
        if row.lost_energy is not None:
            text += f"; the nearest pattern loses {lost_text(row.lost_energy)} of the energy"
    return text


def _kernel(best: KernelTime | OtherChoice, timing: Timing, gap: str = " ") -> str:
    """Returns a kernel's time, formats and tactic as text, with `gap` before the tactic."""
    times = PREDICTED if isinstance(best, KernelTime) and not best.timed else timing
    return f"{us_text(best.us, times)} {best.in_}->{best.out}{gap}{tactic_text(best.tactic)}"


def _measured(best: KernelTime | None, timing: Timing) -> str:
    """Returns a kernel's time, formats, tactic, spread and limiting resource as text."""
    if not best:
        return "no kernel"
    spread = f"{us_text(best.low_us, timing)} to {us_text(best.high_us, timing)}"
    return f"{_kernel(best, timing)} ({spread}), limited by {RESOURCES.get(best.bound, best.bound)}"


def rows_of(record: EngineRecord, layers: Sequence[str] = ()) -> list[SparsityRow]:
    """Returns the sparsity rows of the named layers in the plan's order; all rows if `layers` is empty.

    `layers`: texts for names.matching: the name of a layer, an op, an ONNX node or a weight, a pattern, or a part of only one
    layer's name. Raises ValueError for a text that fits no layer with weights.
    """
    rows, wanted, others = record.sparsity.rows, set[str](), others_of(record.plan)
    for name in layers:
        if any(name in (layer.name, *layer.nodes) for layer in record.plan.layers if not layer.layer):
            raise ValueError(f"{name!r} has no weights that could be sparse: `gpu-runtime inspect` shows its tactic")
        found = matching(
            name,
            rows,
            lambda row: (row.layer, row.op, *row.layers),
            "layer with weights",
            lambda row: others(row.layer, row.layers),
        )
        wanted |= {row.op for row in found}
    return [row for row in rows if not layers or row.op in wanted]


def explain_text(record: EngineRecord, rows: Sequence[SparsityRow]) -> str:
    """Returns the account of these layers, after a line that identifies the plan and the sentences on the network."""
    head = [*wrap(printable(whose_text(record))), *network_lines(record)]
    head += wrap(text) if (text := pieces_text(record)) else []
    return "\n".join([*head, "", *(layer_text(row, record) for row in rows)])


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Told):
    """The account of why these `layers` run sparse or dense; each row has its sentences in `sentence`.

    `timing`: the label of the times' origin; `summary`: the network in numbers; `library`: the estimated plan with a library's
    kernels; `text`: the account as text.
    """

    timing: str
    summary: Summary | None
    library: LibraryPlan | None
    layers: tuple[SparsityRow, ...]


def explanation(record: EngineRecord, layers: Sequence[str] = ()) -> Explanation:
    """Returns the account of the named layers, of all layers with weights if `layers` is empty. `layers`: as for `rows_of`."""
    rows = rows_of(record, layers)
    worded = tuple(replace(row, sentence=sentence(row, record)) for row in rows)
    summary, library = record.sparsity.summary, record.solution.rivals.library
    return Explanation(record.timing.label, summary, library, worded, text=explain_text(record, rows))
