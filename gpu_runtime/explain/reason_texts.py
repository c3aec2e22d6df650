"""The texts for each reason of a sparsity row, in one table (REASONS) for the log, the tables, the full account and the
comparison of devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_runtime.explain.figures import (
    NO_GAIN,
    PREDICTED,
    RESOURCES,
    SHOWN_US,
    chance_text,
    pruned_costs,
    ratio_text,
    span_text,
    us_text,
)
from gpu_runtime.runtime.findings import IfSparse, KernelTime, SparsityRow
from gpu_runtime.runtime.plan_record import EngineRecord, Explained, Timing
from gpu_runtime.text import lost_text, several, share_text
from tactics.tactic import Tile

MOST_GAIN = 2.0  # the largest speed-up: 2:4 halves a layer's products
Rows = Sequence[SparsityRow]


@dataclass(frozen=True, slots=True)
class ReasonText:
    """The texts for one reason of a sparsity row.

    `label`: for a table's cell; `group`: writes the log's text on all layers with this reason; `sentence`: writes the text
    on one layer, given the times of its best dense and best sparse kernel as texts; `cure`: writes a further sentence, on a
    change that would help or on the most that 2:4 could give.
    """

    label: str
    group: Callable[[Rows, EngineRecord], str]
    sentence: Callable[[SparsityRow, Explained, str, str], str]
    cure: Callable[[SparsityRow, Explained], str] = lambda row, record: ""


# ---- texts on many layers (ReasonText.group)


def _speed(rows: Rows) -> str:
    """Returns the range of dense time / sparse time of the best kernels, as text."""
    ratios = [r.best_dense.us / r.best_sparse.us for r in rows if r.best_dense and r.best_sparse and r.best_sparse.us]
    return span_text(ratios, ratio_text)


def _chance(rows: Rows) -> str:
    """Returns the range of the probabilities that the sparse kernels are faster, as text."""
    return span_text([r.p_sparse_faster for r in rows], chance_text)


def _picks(rows: Rows, record: EngineRecord) -> str:
    costs = [r.other_cost_us for r in rows if r.other_cost_us is not None]
    cost = f", dense would cost {span_text(costs, lambda us: us_text(us, record.timing))} each" if costs else ""
    chance = f", P(faster) = {_chance(rows)}" if rows[0].p_sparse_faster is not None else ""
    return f"sparse kernels are {_speed(rows)} as fast as dense ones{chance}{cost}"


def _uncertain_picks(rows: Rows, record: EngineRecord) -> str:
    risk = "" if record.flags.risk is None else f", --risk asks for {100 * record.flags.risk:.0f} %"
    return f"sparse is predicted to be {_speed(rows)} as fast, but P(faster) = {_chance(rows)}{risk}"


def _without_tactic(rows: Rows, record: EngineRecord) -> str:
    if rows[0].verdict == "not_eligible":
        return "layers in FP32 run on CUDA cores, where zeros gain nothing"
    if record.sparsity.mode == "disable":
        text = "the weights are 2:4, but --sparsity=disable allows dense kernels only"
        faster = _faster(rows)
        return text + (f"; with enable, {len(faster)} would be faster, up to {ratio_text(max(faster))}" if faster else "")
    return f"no sparse kernel runs them{_detail(rows[0])}"


def _not_2_4(rows: Rows, record: EngineRecord) -> str:
    """Returns the log's text on layers whose weights are not 2:4: the share of groups that fit, the energy that pruning takes,
    and the number of layers that would gain by it.
    """
    whose = "weights of merged branches" if rows[0].branches else "weights"
    text = f"{span_text([r.pattern_share for r in rows], share_text)} of the groups of 4 {whose} fit 2:4"
    if lost := [r.lost_energy for r in rows if r.lost_energy is not None]:
        text += f"; pruning loses {span_text(lost, lost_text)} of their energy"
    if astray := [r.elsewhere for r in rows if r.elsewhere]:
        verb = "is" if len(astray) == 1 else "are"
        text += f"; {several(len(astray), 'layer')} {verb} {', '.join(dict.fromkeys(astray))}, not along the input channels"
    if costs := pruned_costs(record):
        gaining = sum(costs.get(name, 0.0) < -SHOWN_US for row in rows for name in row.layers)
        return f"{text}; pruned, {f'these {gaining}' if gaining else 'none'} would shorten the plan"
    if faster := _faster(rows):
        return f"{text}; pruned, {len(faster)} would be faster, up to {ratio_text(max(faster))}"
    return text + ("; pruned, none would be faster" if any(r.if_sparse for r in rows) else "")


def _faster(rows: Rows) -> list[float]:
    """Returns dense time / time of the best sparse kernel, for each layer of these rows where this ratio is NO_GAIN or more."""
    gains = (r.if_sparse.dense_us / r.if_sparse.us for r in rows if r.if_sparse and r.if_sparse.us for _ in r.layers)
    return [gain for gain in gains if gain >= NO_GAIN]


# ---- texts on one layer (ReasonText.sentence)


def time_text(best: KernelTime | None, timing: Timing) -> str:
    """Returns the time of a kernel in us as text, marked as predicted if it was not timed. `timing`: the origin of times."""
    return us_text(best.us, timing if best.timed else PREDICTED) if best else "an unknown time"


def _detail(row: SparsityRow) -> str:
    return f" ({row.detail})" if row.detail else ""


def _picked(row: SparsityRow, record: Explained, dense: str, sparse: str) -> str:
    best_dense, best_sparse = row.best_dense, row.best_sparse
    head, both = "", f"the best sparse kernel takes {sparse}, the best dense one {dense}"
    if best_sparse and row.us is not None and abs(row.us - best_sparse.us) >= SHOWN_US:
        where = "as one tactic for all batches" if row.alone else "with the plan's formats"
        head, both = f", in {us_text(row.us, record.timing)} {where}", f"in any format, {both}"
    text = f"runs sparse{head}: {both}"
    if best_dense and best_sparse and best_dense.us > best_sparse.us > 0:
        text += f" ({ratio_text(best_dense.us / best_sparse.us)})"
    if (row.other_cost_us or 0) < 0 and not record.timing.is_predicted:
        text += "; the whole network, run in turns, is faster with it than with dense"
    elif best_dense and best_sparse and best_dense.us < best_sparse.us:
        text += ", but dense would need costlier formats around it"
    return text


def _forced(row: SparsityRow, record: Explained, dense: str, sparse: str) -> str:
    return f"runs sparse because it is forced to, in {sparse}; the best dense kernel takes {dense}"


def _dense_faster(row: SparsityRow, record: Explained, dense: str, sparse: str) -> str:
    if row.best_dense and row.best_sparse and row.best_dense.us == row.best_sparse.us:
        return f"could run sparse, but would gain nothing: both take {dense}"
    return f"could run sparse, but dense is faster: {dense} against {sparse}{_since(row.best_sparse, row, record)}"


def _since(best: KernelTime | None, row: SparsityRow, record: Explained) -> str:
    """Returns the clause on why a layer's best sparse kernel (`best`) gains little: the resource or count that limits it by
    prediction; "" where no single one does.
    """
    if best is None or row.floor is None:
        return ""
    tile, bound, device, floor = best.tactic.tile, best.bound, record.device, row.floor
    channels, taps = row.c // row.groups, row.kernel[0] * row.kernel[1]
    megabytes = 2e-6 * row.k * channels * taps  # of weights
    rates = {"dram": (floor.dram_us, device.dram_gbps), "l2": (floor.l2_us, device.l2_bytes_per_clk * device.clock_mhz / 1e3)}
    if bound in rates:
        moved = math.prod(rates[bound]) / 1e3
        return f", since {RESOURCES[bound]} moves {moved:.3g} MB: 2:4 shrinks the {megabytes:.2g} MB of weights alone"
    if bound == "launch":
        return ", since a kernel so short takes hardly longer than its launch"
    if not isinstance(tile, Tile):
        return ""
    if bound == "latency":
        stages = several(math.ceil(channels * taps / tile.k), "stage")
        return f", since it waits for memory in {stages}, which 2:4 does not shorten"
    if channels < tile.k:
        what = f"groups of {channels}" if row.groups > 1 else f"its {channels} input"
        return f", since {what} channels are padded to a tile of {tile.k}"
    if row.k < tile.m:
        return f", since its {row.k} output channels are padded to a tile of {tile.m}"
    return f", since {RESOURCES[bound]} limits it, which 2:4 relieves little" if bound in ("smem", "issue", "alu") else ""


def _uncertain(row: SparsityRow, record: Explained, dense: str, sparse: str) -> str:
    text = f"sparse is predicted to be faster ({sparse} against {dense}), but not with enough certainty: "
    text += f"P(faster) = {chance_text(row.p_sparse_faster or 0)}"
    if row.other and row.other.premium_us:
        text += f"; --risk therefore adds {us_text(row.other.premium_us, record.timing)} to the sparse time"
    return text


def _reformat_outweighs(row: SparsityRow, record: Explained, dense: str, sparse: str) -> str:
    best, other = row.best_sparse, row.other
    needed = f" ({best.in_} in, {best.out} out)" if best else ""
    text = f"the sparse kernel is faster ({sparse} against {dense}), but needs formats{needed}"
    if other and other.reformat_us <= 0 < other.around_us:
        return f"{text} in which neighbouring layers lose more than it saves"
    return f"{text} that cost the plan more than it saves"


def _one_launch(row: SparsityRow, record: Explained, dense: str, sparse: str) -> str:
    only = f"only {', '.join(row.able)} " if len(row.able) < len(row.layers) else ""
    text = f"{only}could run sparse, but its {len(row.layers)} layers run dense in one tactic ({dense})"
    return f"{text}; launched alone, such a layer takes {sparse} sparse"


def _other_batches(row: SparsityRow, record: Explained, *_: str) -> str:
    """Returns the text on a layer whose kind, sparse or dense, is another one in the plan of this batch alone."""
    kind = "dense" if row.verdict == "sparse" else "sparse"
    own = f"has a {kind} kernel of {us_text(row.alone.us, record.timing)}" if row.alone else "computes it in another form"
    time = us_text(row.us or 0, record.timing)
    return f"runs {row.verdict}, in {time}, because one tactic runs all batches; the plan of this batch alone {own}"


def _no_sparse_tactic(row: SparsityRow, record: Explained, *_: str) -> str:
    if record.sparsity.mode == "disable":
        return "its weights have the 2:4 pattern, but --sparsity=disable allows dense tactics only"
    return f"its weights have the 2:4 pattern, but no sparse tactic can run it{_detail(row)}"


def _pattern_violation(row: SparsityRow, record: Explained, *_: str) -> str:
    text, share, lost = "its weights do not have the 2:4 pattern", row.pattern_share, row.lost_energy
    if share is not None:
        text += f": {fitting_text(row)} of its groups of 4 input channels have two zeros or more"
        if row.first_violation:
            text += f", {first_violation(row)}"
    if row.elsewhere:
        text += f". They are {row.elsewhere}; tensor cores need it along the input channels: prune them again along these"
    if lost is not None:
        how = "the nearest pattern" if row.branches else "the nearest pattern (--sparsity=force)"
        text += f". Pruning to {how} loses {lost_text(lost)} of their energy"
    return text


def fitting_text(row: SparsityRow) -> str:
    """Returns the share of groups of 4 weights that fit 2:4, as text; also the share in the file if it differs from FP16's.

    FP16 turns tiny weights into zeros, so that more groups fit.
    """
    share = share_text(row.pattern_share or 0.0)
    stored = share if row.stored_share is None else share_text(row.stored_share)
    return share if stored == share else f"{share} in FP16 ({stored} as stored)"


def first_violation(row: SparsityRow) -> str:
    """Returns the clause with the place of the first group that does not fit 2:4."""
    return "the first that does not fit is at [k,c,r,s] = [{},{},{},{}]".format(*row.first_violation or ())


def _grouped(row: SparsityRow, record: Explained, *_: str) -> str:
    if row.groups == row.c:
        return "it is a depthwise convolution: each output channel reads one input channel, but a 2:4 group needs four"
    return f"it is a grouped convolution, and no sparse tactic supports its groups{_detail(row)}"


# ---- cures and limits (ReasonText.cure)


def _limit(row: SparsityRow, record: Explained) -> str:
    """Returns the sentence on the gain of 2:4 in a dense layer, predicted and at most; "" where neither is known."""
    floor, dense = row.floor, row.best_dense
    if not floor or not dense:
        return ""
    most = min(MOST_GAIN, dense.us / floor.sparse_us)
    if row.if_sparse:
        return _would(row, row.if_sparse, record, most)
    if most < NO_GAIN:
        return f"2:4 can gain next to nothing here: no sparse kernel could be more than {_up(most)} as fast."
    if row.reason == "dense_faster":
        bound = RESOURCES[floor.bound]
        return f"No sparse kernel could be more than {_up(most)} as fast as the best dense one (limited by {bound})."
    if row.reason == "pattern_violation" and len(row.layers) > 1 and not row.branches:
        return "If pruned to 2:4, its layers run as separate launches; --sparsity=force shows their times."
    return ""


def _up(ratio: float) -> str:
    """Returns a ratio rounded up, as an upper bound must be, as text."""
    return ratio_text(math.ceil(100 * ratio - 1e-9) / 100)


def _would(row: SparsityRow, would: IfSparse, record: Explained, most: float) -> str:
    """Returns the sentence on the predictions for a layer's best sparse and best dense kernel (`would`), also in a measured
    plan. `most`: the largest possible ratio of their times.
    """
    sparse, dense, gain = us_text(would.us, PREDICTED), us_text(would.dense_us, PREDICTED), would.dense_us / would.us
    pruned, since = row.reason == "pattern_violation", _since(would, row, record) if gain < NO_GAIN else ""
    head = "Pruned to 2:4" if pruned else "With --sparsity=enable"
    if gain <= 1:
        return f"{head} it would gain nothing: its kernel is predicted to take {sparse} sparse and {dense} dense{since}."
    text = f"{head} its kernel is predicted to take {sparse} instead of {dense} ({ratio_text(gain)}, limited by "
    text += f"{RESOURCES[would.bound]}){since}; no sparse kernel could be more than {_up(max(most, gain))} as fast"
    if gain >= NO_GAIN:
        return text + (": prune and retrain it if that is worth it." if pruned else ".")
    return text + ("; a larger batch or image would give the tensor cores more to do." if would.bound == "launch" else ".")


REASONS: dict[str, ReasonText] = {  # code of a reason (tactics.reason.OF_LAYERS) -> its texts, in the order of the log's rows
    "picked": ReasonText("sparse", _picks, _picked),
    "forced": ReasonText("forced", lambda rows, _: f"forced; sparse kernels are {_speed(rows)} as fast as dense ones", _forced),
    "dense_faster": ReasonText(
        "dense faster", lambda rows, _: f"sparse kernels are {_speed(rows)} as fast as dense ones", _dense_faster, _limit
    ),
    "reformat_outweighs": ReasonText(
        "reformats",
        lambda rows, _: f"sparse kernels alone are {_speed(rows)} as fast, but their formats cost the plan more",
        _reformat_outweighs,
    ),
    "one_launch": ReasonText(
        "one tactic",
        lambda rows, _: (
            f"one tactic runs these layers dense; launched alone, {sum(len(r.able) for r in rows)} could run sparse"
        ),
        _one_launch,
    ),
    "uncertain": ReasonText(
        "uncertain",
        _uncertain_picks,
        _uncertain,
        lambda *_: "Build on the GPU to decide: it measures both kernels.",
    ),
    "within_noise": ReasonText(
        "within noise",
        lambda *_: "sparse and dense times overlap",
        lambda row, _, dense, sparse: (
            f"sparse ({sparse}) and dense ({dense}) times overlap (20 to 80 % quantiles); the plan keeps {row.verdict}; either "
            "is fine"
        ),
    ),
    "in_network": ReasonText(
        "in network",
        lambda *_: "sparse is faster alone, but the whole network is faster with dense",
        lambda _, __, dense, sparse: (
            f"sparse is faster alone ({sparse} against {dense}), but the whole network, run in turns, is faster with dense"
        ),
    ),
    "not_timed": ReasonText(
        "not timed",
        lambda *_: "timing ended before both kinds of kernels were timed",
        lambda _, __, dense, sparse: (
            f"timing ended before both kinds of kernels were timed: sparse takes {sparse}, dense {dense}"
        ),
        lambda *_: "The same build with the same timing cache goes on from there.",
    ),
    "pattern_violation": ReasonText("not 2:4", _not_2_4, _pattern_violation, _limit),
    "channels_not_multiple_of_4": ReasonText(
        "C not 4n",
        lambda *_: "2:4 needs groups of four input channels",
        lambda row, *_: f"its number of input channels is not a multiple of 4, as 2:4 requires{_detail(row)}",
    ),
    "grouped_conv": ReasonText("grouped", lambda *_: "no sparse kernel runs these groups of channels", _grouped),
    "other_batches": ReasonText(
        "all batches",
        lambda *_: "one tactic runs all batches; the plan of this batch alone has the other kind, or another form",
        _other_batches,
    ),
    "no_sparse_tactic": ReasonText("no kernel", _without_tactic, _no_sparse_tactic, _limit),
}
