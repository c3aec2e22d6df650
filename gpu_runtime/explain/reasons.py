"""The sparsity record of a plan: for each layer with weights the verdict (sparse, dense, not eligible), its reason and the
numbers behind it, as plain data, which the other modules put into words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from gpu_runtime.network import Op, computes
from gpu_runtime.planning import batch_pieces, tables
from gpu_runtime.planning.counterfactuals import Counterfactuals, Timed, alternatives, is_dense_together
from gpu_runtime.planning.tables import Table, Times
from gpu_runtime.runtime.findings import (
    Floor,
    IfSparse,
    KernelTime,
    LibraryKernel,
    Sparsity,
    SparsityRecord,
    SparsityRow,
    Summary,
)
from gpu_runtime.stored_pattern import Stored, as_stored, together
from tactics import peers
from tactics.candidates import candidates, rejected
from tactics.families.conv_gemm import not_sparse
from tactics.format import DTYPES, PREFERRED
from tactics.kernels import ROWS
from tactics.measure.timing import Predicted, Time
from tactics.planner import plan
from tactics.planner.graph import to_us
from tactics.predict import PUBLISHED, Pick, p_faster, predict, predict_us, regime, saved_range
from tactics.problems.problem import ConvProblem
from tactics.reason import Reason
from tactics.roofline import floors
from tactics.tactic import Tactic

Best = tuple[Tactic, Time] | None
Patterns = dict[tuple, tuple[Op, tuple, tuple]]  # weights of an op -> (the op, their pattern in FP16, and in the file)
OTHER_FORM = "The plan runs the layer on channels in another order, in which its weights are not 2:4"


@dataclass(frozen=True, slots=True)
class Known:
    """The data that the rows of a sparsity record are made from.

    `table`: the planner's table of ops and times; `chosen`: the engine's plan; `others`: the best plans under other
    conditions; `mode`: --sparsity; `measured`: times are measured; `own`: the plan of this batch alone, where `chosen`
    serves all batches, else None; `single`: FP32 tensor -> the sentence on why it cannot be FP16; `stored`: layer -> the
    pattern of its weights as the file has them; `patterns`: a cache of weights' patterns; `forced`: as in BuildOptions.
    `_best` and `_if_sparse` are caches: equal ops share one table of times.
    """

    table: Table
    chosen: plan.Plan
    others: Counterfactuals
    mode: Sparsity
    measured: bool
    own: plan.Plan | None = None
    single: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, Stored] = field(default_factory=dict)
    patterns: Patterns = field(default_factory=dict)
    forced: bool = False
    _best: dict[tuple[int, bool], Best] = field(default_factory=dict)
    _if_sparse: dict[tuple[int, ...], IfSparse | None] = field(default_factory=dict)

    def best(self, times: Times, sparse: bool) -> Best:
        """Returns (tactic, time) of the fastest sparse or the fastest dense tactic in an op's times; None without one."""
        key = id(times), sparse
        if key not in self._best:
            self._best[key] = _best(times, sparse)
        return self._best[key]

    def alone(self, alternatives: list[Timed]) -> tuple[Op, tuple[Tactic, Time]] | None:
        """Returns (the op that the plan of this batch alone runs for a layer, (its tactic, its time)); None if this plan runs
        none of the layer's `alternatives` with a tactic.
        """
        own = self.own or self.chosen
        for op, times in alternatives:
            if (entry := own.entry_of(op.name, op.when)) and entry.tactic:
                return op, (entry.tactic, times[entry.tactic])
        return None

    def sparse(self, op: Op, times: Times, alternatives: list[Timed]) -> tuple[Best, Op]:
        """Returns (the best sparse kernel or None, the op that it runs): of `op`, else of the alternative with the fastest
        sparse kernel.
        """
        if own := self.best(times, True):
            return own, op
        found = [(best, other) for other, others in alternatives if (best := self.best(others, True))]
        return min(found, key=lambda pair: pair[0][1].us, default=(None, op))

    def if_sparse(self, op: Op, times: Times, alternatives: list[Timed]) -> IfSparse | None:
        """Returns the predictions of _if_sparse for an op with these times."""
        key = id(times), *(id(others) for _, others in alternatives)
        if key not in self._if_sparse:
            self._if_sparse[key] = _if_sparse(self.table, op, self.best(times, False), alternatives)
        return self._if_sparse[key]


def sparsity(known: Known, all_dense_us: float | None = None) -> SparsityRecord:
    """Returns the engine's sparsity record, with a row for every layer that has weights.

    The reasons within_noise, not_timed and in_network occur only in measured plans. `all_dense_us`: microseconds of the plan
    without sparse kernels; None: the time in `known.others.rivals`.
    """
    table, chosen = known.table, known.chosen
    ops = [op for op in table.network.ops if op.layer and chosen.entry_of(op.name, op.when)]
    timed = alternatives(table, ops)
    rows = tuple(_row(known, op, timed[op.layer]) for op in ops)
    found = SparsityRecord(
        known.mode,
        tuple(layer for r in rows for layer in r.able),
        tuple(layer for r in rows if r.verdict == "sparse" for layer in r.layers),
        rows,
    )
    least_us, device = known.others.rivals.all_dense_us, None if known.measured else table.device
    return replace(found, summary=_summary(found, chosen, all_dense_us or least_us, least_us, device))


def _row(known: Known, op: Op, alternatives: list[Timed]) -> SparsityRow:
    """Returns the sparsity row of the layer that an op of the plan computes.

    The op may compute the layer over other channels than the model does. `alternatives`: all ops that compute the layer. The
    row has the sizes and weights of the alternative with the model's own weights (`_own`). Its dense time is of `op`; so is
    its sparse time, or of the fastest alternative if `op` has no sparse kernel.
    """
    table, own, others = known.table, _own(op.layer, alternatives, known.stored), known.others
    times = next(times for same, times in alternatives if same is op)
    dense, (sparse, ran) = known.best(times, False), known.sparse(op, times, alternatives)
    pair = op.problem.only_dense  # only dense kernels compute it: several layers in one launch
    entry, alone = known.chosen.entries[op.name], known.alone(alternatives)
    row = replace(
        _blank(op, own, known),
        best_dense=dense and _timed(dense, op, table.device),
        best_sparse=sparse and _timed(sparse, ran, table.device),
        alone=_timed(alone[1], alone[0], table.device) if alone and alone[1][0] != entry.tactic else None,
        us=entry.us,
        branches=op.branches,
        apart_cost_us=others.apart_us.get(op.name),
    )
    why = next((known.single[t] for t in (op.output, *op.inputs) if t in known.single), None)
    if why and not table.network.is_straight(op):
        return replace(
            row, why=Reason(row.reason, "FP32"), sentence=f"Runs in FP32 on CUDA cores, where zeros gain nothing: {why}."
        )
    floor = Floor(**_rounded(floors(batch_pieces.whole(op), table.device, _sizes(times))))
    row = replace(row, floor=floor, library=_library(op, table.device))
    apart = _eligible_in_own_launches(op, alternatives)
    against = None if apart else not_sparse(own.problem.judged)
    if against:
        would = known.if_sparse(op, times, alternatives) if against.code == "pattern_violation" and not pair else None
        return replace(row, why=against, if_sparse=would, elsewhere=_elsewhere(own, known.stored))
    row = replace(row, verdict="dense", able=apart or row.layers)
    if sparse is None:
        disabled = known.mode == "disable"
        would = known.if_sparse(op, times, alternatives) if disabled and not apart else None
        why = "--sparsity=disable was given" if disabled else _rejections(table, op)
        return replace(row, why=Reason(row.reason, why), if_sparse=would)
    alike = alone is not None and alone[1][0].sparse == entry.sparse
    if alike and (other := others.other.get(op.layer)):
        row = replace(row, other=other, other_cost_us=other.cost_us, flip=others.flip.get(op.layer))
    form = _form(own, op)
    if apart:
        return replace(row, why=Reason("one_launch", form))
    if dense is None:
        return replace(row, verdict="sparse", why=Reason("picked", form))
    if not known.measured and row.best_sparse:
        chance = p_faster(dense[1].us, sparse[1].us, row.best_sparse.bound, table.device)
        row = replace(row, p_sparse_faster=round(chance, 4))
    if not alike:
        return replace(row, verdict="sparse" if entry.sparse else "dense", why=Reason("other_batches", form))
    if entry.sparse:
        loses = known.forced and row.other_cost_us is not None and row.other_cost_us < to_us(entry.premium_ps)
        return replace(row, verdict="sparse", why=Reason("forced" if loses else "picked", form))
    return replace(row, why=Reason(_why_dense(row, sparse[1], dense[1], known.measured, table.how.risk), form))


def _library(op: Op, device: Device) -> LibraryKernel | None:
    """Returns the estimated time of a library's kernels for the op; None if no library computes it."""
    found = peers.time_of(batch_pieces.whole(op), device)
    if found is None:
        return None
    sparse = None if found.sparse_us is None else round(found.sparse_us, 4)
    return LibraryKernel(round(found.us, 4), found.bound, PUBLISHED[regime(found.bound)], sparse)


def _blank(op: Op, own: Op, known: Known) -> SparsityRow:
    """Returns a layer's row with its name and its weights' pattern, and with the verdict not_eligible, which the caller
    replaces. `own`: the op with the model's own weights.
    """
    weights = *map(id, own.weights.values()), own.layers, own.branches
    if weights not in known.patterns:  # the value keeps the op alive, so that no other weights get the same id
        known.patterns[weights] = own, _pattern(own), _stored(own, known.stored)
    _, (groups, share, first), (stored_share, energy) = known.patterns[weights]
    return SparsityRow(
        op.layer,
        tuple(op.layers or (op.layer,)),
        op.name,
        "not_eligible",
        Reason("no_sparse_tactic"),
        own.problem.c,
        own.weights["w"].shape[0],
        own.problem.groups,
        (own.problem.r, own.problem.s),
        pattern_groups=groups,
        pattern_share=share,
        first_violation=first,
        stored_share=stored_share,
        lost_energy=energy,
    )


def _own(layer: str, alternatives: list[Timed], stored: Mapping[str, Stored]) -> Op:
    """Returns the op among a layer's alternatives (its forms in the planner's table) that has the layer's weights as the model
    has them.

    This is the first alternative, with one exception. If the first is a convolution whose weights are not 2:4, another
    convolution with as many weights is preferred: one with 2:4 weights, else, if the first's input channels are no multiple
    of 4, one whose input channels are. An example is a Gemm over a flattened image: the file's weights may be 2:4 along all
    features, though not along the image's channels. `layer`, `stored`: the exception is made only if `stored` has the file's
    weights of this layer.
    """
    first = alternatives[0][0]
    if layer not in stored or not computes(first, ConvProblem) or not_sparse(first.problem) is None:
        return first
    flat = [o for o, _ in alternatives if computes(o, ConvProblem) and o.weights["w"].size == first.weights["w"].size]
    fit = [o for o in flat if not_sparse(o.problem) is None]
    return next(iter(fit or [o for o in flat if first.problem.c % 4 and o.problem.c % 4 == 0]), first)


def _eligible_in_own_launches(op: Op, alternatives: list[Timed]) -> tuple[str, ...]:
    """Returns the names of the layers that could run sparse in launches of their own, if `op` computes several layers in one
    dense launch; () for other ops.
    """
    if not is_dense_together(op):
        return ()
    single = {o.layer for o, _ in alternatives if isinstance(o.problem, ConvProblem) and not_sparse(o.problem) is None}
    return tuple(layer for layer in op.layers if layer in single)


def _form(own: Op, ran: Op) -> str | None:
    """Returns a sentence if the layer's weights, 2:4 in the model's form `own`, are not 2:4 in the form `ran`; else None."""
    lost = computes(own, ConvProblem) and computes(ran, ConvProblem) and own.problem.sparse24 > ran.problem.sparse24
    return OTHER_FORM if lost else None


def _why_dense(row: SparsityRow, sparse: Time, dense: Time, measured: bool, risk: float | None) -> str:
    """Returns the code of the reason why an eligible layer runs dense. `sparse`, `dense`: the times of its best kernels;
    `risk`: --risk.
    """
    if not (sparse.timed and dense.timed):
        return "not_timed"
    if measured and _within_noise(sparse, dense):
        return "within_noise"
    if measured and sparse.us < dense.us and (row.other_cost_us or 0) < 0:
        return "in_network"
    doubt = row.p_sparse_faster is not None and row.p_sparse_faster < (risk or 0)
    if sparse.us < dense.us and (doubt or (row.other_cost_us or 0) < 0):  # faster without the premium
        return "uncertain"
    return "dense_faster" if sparse.us >= dense.us else "reformat_outweighs"


def _pattern(op: Op) -> tuple[int | None, float | None, tuple[int, int, int, int] | None]:
    """Returns (the number of groups of 4 weights, the share of groups that fit 2:4, the first element [k, c, r, s] of the first
    group that does not fit, or None), for an op's weights in FP16, as kernels hold them.

    If an op has several weights, all count, or only the first if another has no groups of 4. (None, None, None) if the first
    has no groups, since C is no multiple of 4.
    """
    weights = op.layer_weights
    if len(weights) > 2 and weights[0].shape[1] % 4:  # a depthwise convolution before squeeze-excite, for example
        weights = weights[1:]
    able = weights[:1] if any(w.shape[1] % 4 for w in weights) else weights
    if able[0].shape[1] % 4:
        return None, None, None
    fits = [sparse24.fits(sparse24.stored(w)) for w in able]
    groups, found = sum(ok.size for ok in fits), next((np.argwhere(~ok)[0] for ok in fits if not ok.all()), None)
    share = sum(int(ok.sum()) for ok in fits) / groups
    if found is None:
        return groups, share, None
    k, group, r, s = (int(i) for i in found)
    return groups, share, (k, 4 * group, r, s)


def _stored(op: Op, stored: Mapping[str, Stored]) -> tuple[float | None, float | None]:
    """Returns (the share of groups of 4 that fit 2:4, the share of the energy that pruning sets to zero) for an op's weights as
    the file has them.

    gpu_runtime.stored_pattern defines both. (None, None) if the file does not have these weights. For merged branches the
    first is None, and the second is computed from the merged weights.
    """
    if op.branches:
        w = op.weights["w"]
        return None, as_stored(w, 1).lost_energy if w.shape[1] % 4 == 0 else None
    layers = op.layers or (op.layer,)
    found = [stored[layer] for layer in layers if layer in stored]
    whole = together(found) if len(found) == len(layers) else None
    return (whole.share, whole.lost_energy) if whole else (None, None)


def _elsewhere(op: Op, stored: Mapping[str, Stored]) -> str | None:
    """Returns the words for another axis or order along which the layer's weights in the file are 2:4, or None."""
    return together(stored[layer] for layer in op.layers or (op.layer,) if layer in stored).elsewhere or None


def _summary(
    found: SparsityRecord,
    chosen: plan.Plan,
    all_dense_us: float | None,
    least_us: float | None,
    predicted_for: Device | None,
) -> Summary:
    """Returns the counts of layers, the plan's time, `all_dense_us`, and `ceiling_us`, a lower bound on the time of any 2:4
    plan.

    `ceiling_us` is `least_us`, the time of the fastest dense plan, with each eligible layer's best dense kernel at twice its
    speed (launch excepted), but no faster than the layer's floor for sparse kernels. All times are in microseconds.
    `predicted_for`: the device, if times are predicted; then the range of the time that all picks save together is included.
    None: times are measured.
    """
    total, sparse = chosen.us, [r for r in found.rows if r.verdict == "sparse"]
    counts = len(found.layers), len(found.eligible), len(found.picked)
    if all_dense_us is None or least_us is None:
        return Summary(*counts, total)
    ceiling = least_us - sum(_most_us(r) for r in found.rows if r.verdict != "not_eligible")
    saved, span = round(all_dense_us - total, 6), None
    if predicted_for and sparse:
        low, high = saved_range(saved, [pick for r in sparse if (pick := _pick(r))], predicted_for)
        span = round(low, 6), round(high, 6)
    return Summary(*counts, total, all_dense_us, saved, round(ceiling, 6), span)


def _pick(row: SparsityRow) -> Pick | None:
    """Returns a sparse layer's time and saving in microseconds, with the resources that limit its two kernels, for
    `saved_range`; None if no dense kernel is known to compare with.
    """
    if row.us is None or row.best_sparse is None or row.best_dense is None:
        return None
    saved = row.best_dense.us - row.us if row.other_cost_us is None else row.other_cost_us
    return Pick(row.us, row.best_sparse.bound, saved, row.best_dense.bound)


def _most_us(row: SparsityRow) -> float:
    """Returns the most microseconds that 2:4 could take off a layer's dense time."""
    if row.best_dense is None or row.floor is None:
        return 0.0
    dense, floor = row.best_dense.us, row.floor
    halved = floor.launch_us + (dense - floor.launch_us) / 2
    return max(0.0, dense - max(floor.sparse_us, halved))


def _best(times: Times, sparse: bool) -> Best:
    """Returns (the fastest tactic, its time) of the sparse or of the dense tactics in `times`; None without one. Ties are
    decided by formats, then by name.
    """
    rows = [(t, time) for t, time in times.items() if t.sparse == sparse]

    def order(layout: str) -> int:  # a layout that only the network's inputs and outputs have comes last
        return (*PREFERRED, layout).index(layout)

    def place(row: tuple[Tactic, Time]) -> tuple:
        tactic, time = row
        return time.us, not time.timed, order(tactic.ins[0].layout), order(tactic.out.layout), tactic.name

    return min(rows, key=place, default=None)


def _timed(best: tuple[Tactic, Time], op: Op, device: Device) -> KernelTime:
    """Returns a kernel with its time for `op` as a record, whose `bound` is the resource that limits it by prediction, also if
    the time is measured.
    """
    tactic, time = best
    low, high = round(time.low_us, 6), round(time.high_us, 6)
    bound = str(predict(op.problem, tactic, device)["bound"])
    return KernelTime(tactic, tactic.ins[0], tactic.out, round(time.us, 6), low, high, bound, timed=time.timed)


def _if_sparse(table: Table, op: Op, dense: Best, alternatives: list[Timed]) -> IfSparse | None:
    """Returns two predictions for a layer: for the best sparse kernel of `op`, if its weights had the pattern, and for `dense`,
    its best dense kernel.

    Both are predicted, so that they can be compared in a measured plan, too. If no sparse kernel runs this form of the
    layer, the fastest sparse kernel of the other `alternatives` is taken. None without a dense or without any sparse kernel.
    """
    if dense is None:
        return None
    for forms in ([op], [other for other, _ in alternatives if other is not op]):
        able, timer = [tables.if_sparse(table, form) for form in forms], Predicted(table.device)
        times = [(best, form) for form, tactics in able if (best := _best(timer(form.problem, tactics), sparse=True))]
        if times:
            best, form = min(times, key=lambda pair: pair[0][1].us)
            dense_us = predict_us(op.problem, dense[0], table.device)
            k = _timed(best, form, table.device)
            return IfSparse(k.tactic, k.in_, k.out, k.us, k.low_us, k.high_us, k.bound, round(dense_us, 6))
    return None


def _sizes(times: Times) -> tuple[int, ...]:
    """Returns the bytes per element of each input, then of the output, in the smallest type of any tactic in `times`."""
    around = ([DTYPES[f.dtype].itemsize for f in (*t.ins, t.out)] for t in times)
    return tuple(min(column) for column in zip(*around, strict=True))


def _rounded(record: Mapping) -> dict:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}


def _rejections(table: Table, op: Op) -> str:
    """Returns the reasons why no sparse tactic of the op has a time, in words."""
    if any(t.sparse for t in candidates(op.problem, table.device)):
        return "every sparse tactic failed when it was timed"
    sparse = {kernel.name for kernel in ROWS if kernel.sparse}
    reasons = [r for x, r in rejected(op.problem, table.device) if (x.kernel if isinstance(x, Tactic) else x) in sparse]
    return "; ".join(map(str, dict.fromkeys(reasons)))


def _within_noise(a: Time, b: Time) -> bool:
    """Returns whether two times are closer together than half the sum of their spreads (80 % quantile minus 20 % quantile)."""
    return abs(a.us - b.us) < (a.high_us - a.low_us) / 2 + (b.high_us - b.low_us) / 2
