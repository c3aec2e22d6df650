"""Why layers run sparse or dense, in words: the sparsity log and the full account of a layer, from the engine's plan alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpu_runtime.explain.figures import chance_text, counts_text, summing, sure, tactic_text, times_are, us_text
from gpu_runtime.explain.names import matching
from gpu_runtime.runtime.findings import Flip, IfSparse, KernelTime, OtherChoice, SparsityRecord, SparsityRow
from gpu_runtime.runtime.plan_record import EngineRecord, Explained, Timing
from gpu_runtime.text import lost_text, printable, share_text, table, versus, wrap
from tactics.predict import RANGE

PREDICTED = Timing("predicted", "predicted")  # whose times a measured plan marks all the same
ELIGIBLE_LINE = "(Sparsity) Layers eligible for sparse math:"
PICKED_LINE = "(Sparsity) TRT inference plan picked sparse implementation for layers:"
# fmt: off
RESOURCES = {"mma": "tensor cores", "dram": "DRAM", "l2": "L2", "smem": "shared memory", "launch": "launch",
             "latency": "memory latency", "issue": "instruction issue", "alu": "arithmetic"}
# fmt: on
SHOWN_US = 0.005  # what is less is not written as microseconds: two decimals show nothing of it
NO_GAIN = 1.05  # a smaller gain is not called worth retraining for


def sparsity_text(record: Explained) -> str:
    """The sparsity log: whose plan, TensorRT's two lines, a row per layer, and a sentence per layer in plain words."""
    sparsity, device = record.sparsity, record.device
    whose = f"{record.model.name} for {device.title} ({device.sm}), --sparsity={sparsity.mode}"
    lines = _forced(sparsity) if sparsity.mode == "force" else []
    lines += [
        *wrap(printable(f"Sparsity of {whose}; {times_are(record.timing)}")),
        f"{ELIGIBLE_LINE} {', '.join(map(printable, sparsity.eligible))}".rstrip(),
        f"{PICKED_LINE} {', '.join(map(printable, sparsity.picked))}".rstrip(),
        "",
    ]
    header = ["layer\n  verdict: reason", "best dense", "best sparse", "cost of the\nother choice"]
    rows = [
        [
            f"{printable(row.layer)}\n  {row.verdict}: {row.reason}",
            _best(row.best_dense, record.timing),
            _best(row.best_sparse, record.timing),
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
    """What the plan would take more with the layer forced the other way."""
    cost = row.other_cost_us
    return "-" if cost is None else "none" if abs(cost) < SHOWN_US else us_text(cost, record.timing, sign="+")


def _forced(sparsity: SparsityRecord) -> list[str]:
    """What --sparsity=force did to the model: {pruned: [initializer], not_pruned: [(initializer, why)]}."""
    lines = ["--sparsity=force changed nothing: all weights that can have the 2:4 pattern have it"]
    if sparsity.pruned:
        energy = sparsity.pruned_energy
        taken = "" if energy is None else f", {lost_text(energy)} of their energy (the sum of their squares)"
        lines = wrap(
            f"--sparsity=force set the two smallest of each four weights to zero in {len(sparsity.pruned)} "
            f"initializers{taken}: the outputs are not those of the model as it was given"
        )
    for name, why in sparsity.not_pruned:
        lines += wrap(printable(f"not pruned: {name}: {why}"))
    return lines


def network_lines(record: Explained) -> list[str]:
    """The network in a few sentences: eligible, picked, time saved, and what is the most there could be."""
    sparsity, solution = record.sparsity, record.solution
    total, dense = solution.total_us, solution.rivals.all_dense_us
    counted = counts_text(sparsity)
    text = f"{counted[0].upper()}{counted[1:]}; the plan takes {us_text(total, record.timing)}"
    if not sparsity.eligible:
        return wrap(text)
    if dense is not None:
        text += f", the best one without sparse tactics {us_text(dense, record.timing)} ({versus(dense, total)})"
    if dense is not None and (ranged := range_text(record)):
        text += f". Sparse kernels save {us_text(dense - total, record.timing)}, {ranged}"
    ceiling = sparsity.summary.ceiling_us if sparsity.summary else None
    if ceiling is not None and dense:
        text += (
            ". With all eligible kernels at twice their dense speed, where launch and memory allow it, it would take "
            f"{us_text(ceiling, record.timing)} ({versus(ceiling, dense)})"
        )
    return wrap(text)


def range_text(record: Explained) -> str:
    """Where what sparse kernels save together lies, given the errors of predictions; empty where times are measured."""
    span = record.sparsity.summary.saved_range_us if record.sparsity.summary else None
    if not span:
        return ""
    low, high = (us_text(us, record.timing) for us in span)
    return f"given the errors of predictions, {100 * RANGE:.0f} % likely between {low} and {high}"


# ---- one layer


def sentence(row: SparsityRow, record: Explained) -> str:
    """Why a layer does or does not run sparse, in plain words, from a sparsity row's reason and numbers."""
    if row.sentence:
        return row.sentence
    say = _REASONS.get(row.reason)
    text = say(row, record) if say else row.reason
    text = text[0].upper() + text[1:]
    text = text if text.endswith(".") else text + "."
    return text + _form(row) + _branches(row, record) + _forced_text(row, record) + _limit(row, record)


def _form(row: SparsityRow) -> str:
    """What the form that the plan chose for the layer costs its weights."""
    return f" {row.detail}." if row.detail and row.best_sparse else ""


def _branches(row: SparsityRow, record: Explained) -> str:
    """What was merged into the layer, and what that gained."""
    if not row.branches:
        return ""
    what = f"adds {len(row.layers)} parallel convolutions of one input" if len(row.layers) > 1 else "adds its own input"
    text = f" One convolution {what}, exactly; 2:4 is a pattern of the merged weights"
    cost = row.apart_cost_us
    if cost is not None and cost >= SHOWN_US:
        text += f". With the branches apart, the whole plan would take {us_text(cost, record.timing)} more"
    return text + "."


def _time(best: KernelTime | None, timing: Timing) -> str:
    return us_text(best.us, timing) if best else "an unknown time"


def _picked(row: SparsityRow, record: Explained) -> str:
    dense, sparse = row.best_dense, row.best_sparse
    head = ""
    both = f"the best sparse kernel takes {_time(sparse, record.timing)}, the best dense one {_time(dense, record.timing)}"
    if sparse and row.us is not None and abs(row.us - sparse.us) >= SHOWN_US:
        head, both = f", in {us_text(row.us, record.timing)} with the plan's formats", f"in any, {both}"
    text = f"runs sparse{head}: {both}"
    if dense and sparse and dense.us > sparse.us > 0:
        text += f" ({dense.us / sparse.us:.2f}x)"
    if dense and sparse and dense.us < sparse.us:
        text += ", but dense would need costlier formats around it"
    return text


def _dense_faster(row: SparsityRow, record: Explained) -> str:
    dense, sparse = row.best_dense, row.best_sparse
    if dense and sparse and dense.us == sparse.us:
        return f"could run sparse, but would gain nothing: both take {_time(dense, record.timing)}"
    return f"could run sparse, but dense is faster: {_time(dense, record.timing)} against {_time(sparse, record.timing)}"


def _uncertain(row: SparsityRow, record: Explained) -> str:
    dense, sparse, other = row.best_dense, row.best_sparse, row.other
    text = f"sparse is predicted to be faster ({_time(sparse, record.timing)} against {_time(dense, record.timing)}), but not "
    text += f"surely enough: P = {chance_text(row.p_sparse_faster or 0)}"
    if other and other.premium_us:
        text += f", for which --risk adds {us_text(other.premium_us, record.timing)} to its time"
    return text + ". Building on the GPU, where both are measured, would settle it"


def _reformat_outweighs(row: SparsityRow, record: Explained) -> str:
    dense, sparse, other = row.best_dense, row.best_sparse, row.other
    text = f"sparse alone is faster ({_time(sparse, record.timing)} against {_time(dense, record.timing)}), but the "
    text += "formats it needs "
    if sparse:
        text += f"({sparse.in_} in, {sparse.out} out) "
    if other and other.reformat_us <= 0 < other.around_us:
        return text + "make the layers around it slower by more than that"
    return text + "cost the plan more than that"


def _one_launch(row: SparsityRow, record: Explained) -> str:
    dense, sparse = _time(row.best_dense, record.timing), _time(row.best_sparse, record.timing)
    only = f"of its layers only {', '.join(row.able)} " if len(row.able) < len(row.layers) else ""
    text = f"{only}could run sparse, but its {len(row.layers)} layers run dense in one launch ({dense})"
    return f"{text}; a sparse one of them alone takes {sparse}"


def _within_noise(row: SparsityRow, record: Explained) -> str:
    dense, sparse = row.best_dense, row.best_sparse
    return (
        f"sparse ({_time(sparse, record.timing)}) and dense ({_time(dense, record.timing)}) are closer than their spread "
        f"(Q20 to Q80), so the plan stays {row.verdict}: neither choice would be wrong"
    )


def _no_sparse_tactic(row: SparsityRow, record: Explained) -> str:
    if record.sparsity.mode == "disable":
        return "its weights have the 2:4 pattern, but --sparsity=disable allows dense tactics only"
    return f"its weights have the 2:4 pattern, but no sparse tactic can run it{_detail(row)}"


def _pattern_violation(row: SparsityRow, record: Explained) -> str:
    text, share, lost = "its weights do not have the 2:4 pattern", row.pattern_share, row.lost_energy
    if share is not None:
        text += f": {share_text(share)}{_as_stored(row)} of its groups of 4 input channels have two zeros or more"
        if row.first_violation:
            text += ", the first that has not is at [k,c,r,s] = [{},{},{},{}]".format(*row.first_violation)
    if lost is not None:
        how = "the nearest pattern" if row.branches else "the nearest pattern (--sparsity=force)"
        text += f". Pruning to {how} takes away {lost_text(lost)} of their energy"
    return text


def _channels(row: SparsityRow, record: Explained) -> str:
    return f"its input channels do not come in fours, which 2:4 is a pattern of{_detail(row)}"


def _grouped(row: SparsityRow, record: Explained) -> str:
    if row.groups == row.c:
        return "it is a depthwise convolution: each output has one input channel, and 2:4 is a pattern of four"
    return f"it is a grouped convolution whose groups no sparse tactic takes{_detail(row)}"


_REASONS: dict[str, Callable[[SparsityRow, Explained], str]] = {
    "picked": _picked,
    "dense_faster": _dense_faster,
    "reformat_outweighs": _reformat_outweighs,
    "uncertain": _uncertain,
    "one_launch": _one_launch,
    "within_noise": _within_noise,
    "no_sparse_tactic": _no_sparse_tactic,
    "pattern_violation": _pattern_violation,
    "channels_not_multiple_of_4": _channels,
    "grouped_conv": _grouped,
}


def _detail(row: SparsityRow) -> str:
    return f" ({row.detail})" if row.detail else ""


def _other_choice(row: SparsityRow) -> str:
    return "dense" if row.verdict == "sparse" else "sparse"


def _forced_text(row: SparsityRow, record: Explained) -> str:
    cost, other = row.other_cost_us, row.other
    if cost is None:
        return ""
    more = f"{us_text(abs(cost), record.timing)} {'more' if cost > 0 else 'less'}"
    change = more if abs(cost) >= SHOWN_US else "the same time"
    text = f" Forced {_other_choice(row)}, the whole plan would take {change}"
    best = row.best_dense if row.verdict == "sparse" else row.best_sparse
    if other and best and abs(other.us - best.us) >= SHOWN_US:
        which = "a kernel of" if other.kernels == 1 else "kernels of together"
        text += f", with {which} {us_text(other.us, record.timing)} for the formats around it"
    if other and (abs(other.reformat_us) >= SHOWN_US or abs(other.around_us) >= SHOWN_US):
        text += f" ({_parts(other, record.timing)})"
    return text + "."


def _parts(other: OtherChoice, timing: Timing) -> str:
    """Where the cost of the other choice lies: its parts, those that are nothing left out; what is shown adds up to it."""
    named = ("its own kernel", "reformats", "the layers around it")
    shares = summing(other.cost_us, (other.kernel_us, other.reformat_us, other.around_us))
    parts = [f"{what} {us_text(us, timing, sign='+')}" for what, us in zip(named, shares, strict=True) if us]
    return ", ".join(parts) or "no part changes"


def _flip(row: SparsityRow, timing: Timing) -> str:
    """What would have to change for the other choice, and how likely the predictions have it wrong."""
    kind, flip, chance = _other_choice(row), row.flip, row.p_sparse_faster
    if row.reason == "uncertain":
        text = f"a lower --risk, or times that are measured: by the predicted ones the {kind} choice costs no more"
    elif (row.other_cost_us or 0) <= 0:
        text = f"the {kind} choice costs no more"
    elif flip is None:
        text = f"no speed of its {kind} kernels would do: what surrounds them costs more than they save"
    else:
        text = _needed(flip, kind, timing)
    if chance is not None:
        faster, p = ("sparse", chance) if chance >= 0.5 else ("dense", round(1 - chance, 4))
        text += f"; P({faster} kernel faster) = {chance_text(p)}, given the error of predictions: {sure(p)}"
    return text


def _needed(flip: Flip, kind: str, timing: Timing) -> str:
    """How much faster the other kind's kernels would have to be, as the times that are shown have it."""
    much = f"{100 * (flip.speedup - 1):.2g} % faster" if flip.speedup < 1.5 else f"{flip.speedup:.2f}x as fast"
    times = f"{us_text(flip.needed_us, timing)} instead of {us_text(flip.us, timing)}"
    doubt = f" (for doubt, --risk adds {us_text(flip.premium_us, timing)} to sparse)" if flip.premium_us >= SHOWN_US else ""
    return f"its {kind} kernels would have to be {much}, {times}{doubt}"


def _limit(row: SparsityRow, record: Explained) -> str:
    """What 2:4 would give a layer that does without, and the most that it could, where a reader would ask that next."""
    floor, dense = row.floor, row.best_dense
    if not floor or not dense or row.reason not in ("dense_faster", "no_sparse_tactic", "pattern_violation"):
        return ""
    most = dense.us / floor.sparse_us
    if row.if_sparse:
        return _would(row.if_sparse, row.reason == "pattern_violation", most)
    if most < NO_GAIN:
        return f" 2:4 has next to nothing to give here: no sparse kernel could be more than {_up(most)} as fast as that."
    if row.reason == "dense_faster":
        bound = RESOURCES[floor.bound]
        return f" No sparse kernel could be more than {_up(most)} as fast as that dense one (bound by {bound})."
    if row.reason == "pattern_violation" and len(row.layers) > 1 and not row.branches:
        return " Pruned to 2:4, each of its layers would have a launch of its own: --sparsity=force shows what that would take."
    return ""


def _up(ratio: float) -> str:
    """Rounded up, as a bound must be."""
    return f"{math.ceil(100 * ratio - 1e-9) / 100:.2f}x"


def _would(would: IfSparse, pruned: bool, most: float) -> str:
    """The predictions for a layer's best kernels with and without the pattern, whatever the plan's times are."""
    sparse, dense, gain = f"~{would.us:.2f} us", f"~{would.dense_us:.2f} us", would.dense_us / would.us
    head = "Pruned to 2:4" if pruned else "With --sparsity=enable"
    if gain <= 1:
        return f" {head} it would gain nothing: its kernel is predicted to take {sparse} sparse and {dense} dense."
    text = f" {head} its kernel is predicted to take {sparse} instead of {dense} ({gain:.2f}x, limited by "
    text += f"{RESOURCES[would.bound]}); no sparse kernel could be more than {_up(most)} as fast"
    if gain >= NO_GAIN:
        return text + (": prune and retrain it if that is worth it." if pruned else ".")
    return text + ("; a larger batch or image would give the tensor cores more to do." if would.bound == "launch" else ".")


def _best(best: KernelTime | None, timing: Timing) -> str:
    if not best:
        return "-"
    return f"{us_text(best.us, timing)} {best.in_}->{best.out}\n{tactic_text(best.tactic)}"


# ---- the full account


def layer_facts(row: SparsityRow, record: Explained) -> list[tuple[str, str]]:
    """Everything known about one layer's choice: (what, in words), in the order in which to read it."""
    facts = [("why", sentence(row, record)), ("weights", _weights(row))]
    facts += [("dense", _kernel(row.best_dense, record.timing)), ("sparse", _kernel(row.best_sparse, record.timing))]
    if row.if_sparse:
        facts.append(("if 2:4", f"{_kernel(row.if_sparse, PREDICTED)}; predicted"))
    other = row.other
    if other:
        kernel = f"{us_text(other.us, record.timing)} {other.in_}->{other.out} {tactic_text(other.tactic)}"
        cost = us_text(other.cost_us, record.timing, sign="+")
        facts.append((f"as {_other_choice(row)}", f"{kernel}; plan {cost}: {_parts(other, record.timing)}"))
        facts.append(("to flip", _flip(row, record.timing)))
    floor = row.floor
    if floor:
        parts = (("mma", floor.mma_us), ("dram", floor.dram_us), ("l2", floor.l2_us), ("launch", floor.launch_us))
        times = ", ".join(f"{RESOURCES[key]} {us_text(us, record.timing)}" for key, us in parts)
        least = [us_text(us, record.timing) for us in (floor.dense_us, floor.sparse_us)]
        facts.append(
            (
                "bound",
                f"{RESOURCES[floor.bound]}; at the device's peak: {times}. Forming every product, no dense kernel "
                f"could take less than {least[0]}, no sparse one less than {least[1]}",
            )
        )
    return facts


def layer_text(row: SparsityRow, record: EngineRecord) -> str:
    """Everything known about one layer's choice, a line per fact: first what it runs."""
    lines = wrap(f"{printable(row.layer)}   {row.verdict}: {row.reason}")
    for key, value in (*_runs(row, record), *layer_facts(row, record)):
        lines += wrap(f"  {key:9} {printable(value)}", indent=12)
    return "\n".join(lines) + "\n"


def _runs(row: SparsityRow, record: EngineRecord) -> list[tuple[str, str]]:
    """The kernel and formats that the plan has for a layer, and its share of the whole."""
    total, facts = record.solution.total_us, []
    for layer in record.plan.layers:
        if layer.tactic and row.layer == (layer.layer or layer.name):
            ins, out = dict.fromkeys(str(t.format) for t in layer.inputs), layer.outputs[0].format
            text = f"{us_text(layer.time_us, record.timing)} {','.join(ins)}->{out} {tactic_text(layer.tactic)}"
            facts.append(("runs", text + (f", {100 * layer.time_us / total:.1f} % of the plan" if total else "")))
    return facts


def _weights(row: SparsityRow) -> str:
    text = f"[{row.k},{row.c // row.groups},{row.kernel[0]},{row.kernel[1]}], groups {row.groups}; "
    if row.pattern_share is None:
        return text + f"{row.c // row.groups} input channels per group are no multiple of 4"
    text += f"2:4: {share_text(row.pattern_share)}{_as_stored(row)} of {row.pattern_groups} groups of 4 fit"
    if row.first_violation:
        text += ", first that does not: [k,c,r,s] = [{},{},{},{}]".format(*row.first_violation)
        if row.lost_energy is not None:
            text += f"; the nearest pattern loses {lost_text(row.lost_energy)} of the energy"
    return text


def _as_stored(row: SparsityRow) -> str:
    """The file's own share of fitting groups, where FP16 has turned tiny weights into zeros and so changed it."""
    stored = row.stored_share
    if stored is None or row.pattern_share is None or share_text(stored) == share_text(row.pattern_share):
        return ""
    return f" in FP16 ({share_text(stored)} as stored)"


def _kernel(best: KernelTime | None, timing: Timing) -> str:
    if not best:
        return "no kernel"
    text = f"{us_text(best.us, timing)} {best.in_}->{best.out} {tactic_text(best.tactic)}"
    text += f" ({us_text(best.low_us, timing)} to {us_text(best.high_us, timing)})"
    return f"{text}, limited by {RESOURCES.get(best.bound, best.bound)}"


def rows_of(record: EngineRecord, layers: Sequence[str] = ()) -> list[SparsityRow]:
    """The sparsity rows of these layers, in the plan's order; all of them where none is named. A name may be a layer's or an
    op's, a pattern, or any part of a layer's that only one has (names.matching). ValueError where it is none."""
    rows, wanted = record.sparsity.rows, set[str]()
    for name in layers:
        if any(name in (layer.name, *layer.nodes) for layer in record.plan.layers if not layer.layer):
            raise ValueError(f"{name!r} has no weights that could be sparse: `gpu-runtime inspect` shows what it runs")
        wanted |= {row.op for row in matching(name, rows, lambda row: (row.layer, row.op, *row.layers), "layer with weights")}
    return [row for row in rows if not layers or row.op in wanted]


def explain_text(record: EngineRecord, rows: Sequence[SparsityRow]) -> str:
    """The account of these layers, after a line on whose plan it is and the network's sentence."""
    device, mode = record.device, record.sparsity.mode
    head = f"{record.model.name} for {device.title} ({device.sm}), --sparsity={mode}; {times_are(record.timing)}"
    return "\n".join([*wrap(printable(head)), *network_lines(record), "", *(layer_text(row, record) for row in rows)])
