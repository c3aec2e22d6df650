"""Which layers could run 2:4 sparse, which do, and the numbers behind it for each: plain data, put into words by `explain`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from gpu_runtime.frontend.weights import Stored, as_stored, together
from gpu_runtime.network import Op, computes
from gpu_runtime.planning import tables
from gpu_runtime.planning.tables import Table
from gpu_runtime.runtime.findings import (
    Flip,
    Floor,
    IfSparse,
    KernelTime,
    OtherChoice,
    Sparsity,
    SparsityRecord,
    SparsityRow,
    Summary,
)
from tactics.candidates import candidates, rejected
from tactics.families.conv_gemm import not_sparse
from tactics.format import DTYPES
from tactics.kernels import ROWS
from tactics.measure.timing import Time, predicted
from tactics.planner import plan
from tactics.planner.changes import Change
from tactics.planner.reformats import hop_ps
from tactics.predict import Pick, p_faster, predict, predict_us, saved_range
from tactics.problems.problem import ConvProblem, SqueezeExciteProblem
from tactics.roofline import floors
from tactics.tactic import Tactic

_Timed = tuple[Op, Mapping[Tactic, Time]]
OTHER_FORM = "As the plan runs the layer, over channels that lie otherwise, its weights lose the 2:4 pattern"


def sparsity(
    table: Table,
    chosen: plan.Plan,
    mode: Sparsity,
    *,
    measured: bool,
    all_dense_us: float | None = None,
    single: Mapping[str, str] | None = None,
    stored: Mapping[str, Stored] | None = None,
) -> SparsityRecord:
    """The engine's sparsity record, a row for every layer with weights.

    Reason within_noise is of measured plans only. `all_dense_us`: what the best plan without sparse tactics takes. `single`:
    FP32 tensor -> the sentence on why it is none of FP16; `stored`: layer -> its weights as the file has them.
    """
    ops = {i: op for i, op in enumerate(table.network.ops) if op.layer and plan.holds(op.when, chosen.options)}
    alternatives = _by_layer(table, ops.values())
    kernels = _Kernels(table)
    wanted = {
        op.layer: not chosen.entries[op.name].sparse
        for op in ops.values()
        if all(any(kernels.best(times, sparse) for _, times in alternatives[op.layer]) for sparse in (False, True))
    }
    forced = tables.forced(table, chosen, wanted)
    apart = tables.apart(table, chosen, [op for op in ops.values() if op.branches])
    rows = [
        _row(
            table,
            kernels,
            chosen,
            op,
            table.times[i],
            mode,
            measured,
            forced.get(op.layer),
            alternatives[op.layer],
            single or {},
            stored or {},
        )
        for i, op in ops.items()
    ]
    rows = [replace(row, branches=True, apart_cost_us=apart[row.op]) if row.op in apart else row for row in rows]
    found = SparsityRecord(
        mode,
        tuple(layer for r in rows for layer in r.able),
        tuple(layer for r in rows if r.verdict == "sparse" for layer in r.layers),
        tuple(rows),
    )
    return replace(found, summary=_summary(found, chosen, all_dense_us, None if measured else table.device))


def _by_layer(table: Table, chosen: Iterable[Op]) -> dict[str, list[_Timed]]:
    """Layer -> all ops with its weights, and their times; of one launch of several layers that is dense whatever their weights,
    also those of its layers apart, which may run sparse."""
    found: dict[str, list[_Timed]] = {}
    for op, times in zip(table.network.ops, table.times, strict=True):
        if op.layer:
            found.setdefault(op.layer, []).append((op, times))
    for op in chosen:
        if _is_dense_together(op):
            found[op.layer] += [each for layer in op.layers if layer != op.layer for each in found.get(layer, ())]
    return found


def _is_dense_together(op: Op) -> bool:
    """Whether an op is several layers in one launch that cannot be sparse, whether or not one of them alone could: a
    squeeze-excite, or convolutions that were merged and do not all have the pattern."""
    merged = isinstance(op.problem, ConvProblem) and len(op.layers) > 1 and not op.problem.sparse24
    return merged or isinstance(op.problem, SqueezeExciteProblem)


class _Kernels:
    """The best kernels of ops by their table of times, which is one for all ops alike (see planning.tabulate)."""

    def __init__(self, table: Table):
        self.table = table
        self._best: dict[tuple[int, bool], tuple[Tactic, Time] | None] = {}
        self._if_sparse: dict[tuple[int, ...], IfSparse | None] = {}

    def best(self, times: Mapping[Tactic, Time], sparse: bool) -> tuple[Tactic, Time] | None:
        key = id(times), sparse
        if key not in self._best:
            self._best[key] = _best(times, sparse)
        return self._best[key]

    def sparse(self, op: Op, times: Mapping[Tactic, Time], alternatives: list[_Timed]) -> tuple[tuple[Tactic, Time] | None, Op]:
        """The best sparse kernel of an op, or else of its alternatives, and whose it is."""
        if own := self.best(times, True):
            return own, op
        found = [(best, other) for other, others in alternatives if (best := self.best(others, True))]
        return min(found, key=lambda pair: pair[0][1].us, default=(None, op))

    def if_sparse(
        self, op: Op, times: Mapping[Tactic, Time], alternatives: list[tuple[Op, Mapping[Tactic, Time]]]
    ) -> IfSparse | None:
        key = id(times), *(id(others) for _, others in alternatives)
        if key not in self._if_sparse:
            self._if_sparse[key] = _if_sparse(self.table, op, self.best(times, False), alternatives)
        return self._if_sparse[key]


def _row(
    table: Table,
    kernels: _Kernels,
    chosen: plan.Plan,
    op: Op,
    times: Mapping[Tactic, Time],
    mode: str,
    measured: bool,
    forced: plan.Forced | None,
    alternatives: list[tuple[Op, Mapping[Tactic, Time]]],
    single: Mapping[str, str],
    stored: Mapping[str, Stored],
) -> SparsityRow:
    """`forced`: the plan with this layer forced the other way. What `op` computes may be another form of the layer, over other
    channels; the first of its `alternatives` has the model's own weights, and only some may have sparse kernels."""
    own, dense = alternatives[0][0], kernels.best(times, False)
    sparse, ran = kernels.sparse(op, times, alternatives)
    pair = isinstance(op.problem, SqueezeExciteProblem)  # more than the sparse kernels of a layer compute
    row = _blank(op, own, stored)
    row = replace(
        row,
        best_dense=dense and _timed(dense, op, table.device),
        best_sparse=sparse and _timed(sparse, ran, table.device),
        us=chosen.entries[op.name].us,
    )
    why = next((single[t] for t in (op.output, *op.inputs) if t in single), None)
    if why and not table.network.is_straight(op):
        return replace(row, detail="FP32", sentence=f"Runs in FP32 on CUDA cores, where zeros gain nothing: {why}.")
    row = replace(row, floor=Floor(**_rounded(floors(op.problem, table.device, _sizes(times)))))
    apart = _able_apart(op, alternatives)
    against = None if apart else not_sparse(own.problem.first if isinstance(own.problem, SqueezeExciteProblem) else own.problem)
    if against:
        would = kernels.if_sparse(op, times, alternatives) if against.code == "pattern_violation" and not pair else None
        return replace(row, reason=against.code, detail=against.sentence, if_sparse=would)
    row = replace(row, verdict="dense", able=apart or row.layers)
    if sparse is None:
        detail = "--sparsity=disable was given" if mode == "disable" else _rejections(table, op)
        would = kernels.if_sparse(op, times, alternatives) if mode == "disable" and not apart else None
        return replace(row, detail=detail, if_sparse=would)
    row = replace(row, detail=_form(own, op))
    if forced is not None:
        other = _other(table, chosen, forced)
        row = replace(row, other=other, other_cost_us=other.cost_us, flip=_flip(forced))
    if apart:
        return replace(row, reason="one_launch")
    if dense is None:
        return replace(row, verdict="sparse", reason="picked")
    if not measured and row.best_sparse:
        chance = p_faster(dense[1].us, sparse[1].us, row.best_sparse.bound, table.device)
        row = replace(row, p_sparse_faster=round(chance, 4))
    if chosen.entries[op.name].sparse:
        return replace(row, verdict="sparse", reason="picked")
    return replace(row, reason=_why_dense(row, sparse[1], dense[1], measured, table.risk))


def _blank(op: Op, own: Op, stored: Mapping[str, Stored]) -> SparsityRow:
    """The layer itself, and its weights' pattern; not eligible, until that is known."""
    pattern, (share, energy) = _pattern(own), _stored(own, stored)
    return SparsityRow(
        op.layer,
        tuple(op.layers or (op.layer,)),
        op.name,
        "not_eligible",
        "no_sparse_tactic",
        own.problem.c,
        own.weights["w"].shape[0],
        own.problem.groups,
        (own.problem.r, own.problem.s),
        pattern_groups=pattern.groups,
        pattern_share=pattern.share,
        first_violation=pattern.first,
        stored_share=share,
        lost_energy=energy,
    )


def _able_apart(op: Op, alternatives: list[tuple[Op, Mapping[Tactic, Time]]]) -> tuple[str, ...]:
    """Of layers that are one dense launch, those that could run sparse apart."""
    if not _is_dense_together(op):
        return ()
    single = {o.layer for o, _ in alternatives if isinstance(o.problem, ConvProblem) and not_sparse(o.problem) is None}
    return tuple(layer for layer in op.layers if layer in single)


def _form(own: Op, ran: Op) -> str | None:
    """What the form that runs costs the layer's weights; None: nothing."""
    lost = computes(own, ConvProblem) and computes(ran, ConvProblem) and own.problem.sparse24 > ran.problem.sparse24
    return OTHER_FORM if lost else None


def _why_dense(row: SparsityRow, sparse: Time, dense: Time, measured: bool, risk: float | None) -> str:
    if measured and _within_noise(sparse, dense):
        return "within_noise"
    doubt = row.p_sparse_faster is not None and row.p_sparse_faster < (risk or 0)
    if sparse.us < dense.us and (doubt or (row.other_cost_us or 0) < 0):  # faster, but for the premium
        return "uncertain"
    return "dense_faster" if sparse.us >= dense.us else "reformat_outweighs"


@dataclass(frozen=True, slots=True)
class Pattern:
    """How weights as kernels hold them stand to 2:4: the number of their 4-groups, the `share` of them that fit, and the
    `first` element [k, c, r, s] of a group that does not. All None where C is no multiple of 4."""

    groups: int | None = None
    share: float | None = None
    first: tuple[int, int, int, int] | None = None


def _pattern(op: Op) -> Pattern:
    """Of all weights of an op, of several in one launch together; the first ones' alone where others have no pattern."""
    found = [pattern(op.weights[name]) for name in ("w", "w2") if name in op.weights]
    known = [(p.groups, p.share) for p in found if p.groups is not None and p.share is not None]
    if len(found) == 1 or len(known) < len(found):
        return found[0]
    groups = sum(n for n, _ in known)
    return Pattern(groups, sum(share * n for n, share in known) / groups, next((p.first for p in found if p.first), None))


def _stored(op: Op, stored: Mapping[str, Stored]) -> tuple[float | None, float | None]:
    """Of what the file has for an op's weights, the share of the groups that fit and the energy that pruning takes away, as
    gpu_runtime.frontend.weights defines them; None where the file has no such. Merged branches have only the energy, of
    the weights that they are together: the file has none of these."""
    if op.branches:
        w = op.weights["w"]
        return None, as_stored(w, 1).lost_energy if w.shape[1] % 4 == 0 else None
    layers = op.layers or (op.layer,)
    found = [stored[layer] for layer in layers if layer in stored]
    whole = together(found) if len(found) == len(layers) else None
    return (whole.share, whole.lost_energy) if whole else (None, None)


def pattern(w: np.ndarray) -> Pattern:
    """Of weights w [K,C,R,S], stored in FP16."""
    if w.shape[1] % 4:
        return Pattern()
    ok = sparse24.fits(sparse24.stored(w))
    if ok.all():
        return Pattern(int(ok.size), 1.0)
    k, group, r, s = (int(i) for i in np.argwhere(~ok)[0])
    return Pattern(int(ok.size), float(ok.mean()), (k, 4 * group, r, s))


def _other(table: Table, chosen: plan.Plan, forced: plan.Forced) -> OtherChoice:
    """What forcing the layer changes, in microseconds."""
    tactic = forced.after[0].tactic
    if tactic is None:
        raise RuntimeError("planner: a layer with weights was forced into an entry that launches nothing")
    kernel = sum(e.us for e in forced.after) - sum(e.us for e in forced.before)
    gone, new = ([hop_ps(table.graph, hop) for hop in hops] for hops in (forced.change.gone, forced.change.new))
    reformat = (sum(new) - sum(gone)) / 1e6
    total_us = forced.total_ps / 1e6 - _premium_us(forced.change, chosen)
    cost = total_us - chosen.us
    return OtherChoice(
        total_us=total_us,
        cost_us=cost,
        kernel_us=kernel,
        reformat_us=reformat,
        around_us=cost - kernel - reformat,
        reformats=sum(map(bool, new)) - sum(map(bool, gone)),
        tactic=tactic,
        in_=tactic.ins[0],
        out=tactic.out,
        us=sum(e.us for e in forced.after),
        kernels=len(forced.after),
        premium_us=sum(e.premium_ps for e in forced.after) / 1e6,
    )


def _flip(forced: plan.Forced) -> Flip | None:
    """When the layer's other kind would do as well; None: never."""
    if forced.speedup == math.inf:
        return None
    us, by = sum(e.us for e in forced.flipped), forced.speedup
    doubt = sum(e.premium_ps for e in forced.flipped) / by + sum(e.premium_ps for e in forced.before)
    return Flip(us, us / by, doubt / 1e6)


def _premium_us(change: Change, chosen: plan.Plan) -> float:
    """What the changed plan pays for doubt."""
    entries = {**chosen.entries, **change.entries}
    return sum(e.premium_ps for e in entries.values() if e is not None) / 1e6


def _summary(found: SparsityRecord, chosen: plan.Plan, all_dense_us: float | None, predicted_for: Device | None) -> Summary:
    """Counts, and the plan beside `all_dense_us` and `ceiling_us`: that with each eligible layer's best dense kernel at twice
    its speed, launch aside, but no faster than any sparse kernel of the layer could be. Of predictions also the range of what
    the picks save together."""
    total, sparse = chosen.us, [r for r in found.rows if r.verdict == "sparse"]
    counts = len(found.layers), len(found.eligible), len(found.picked)
    if all_dense_us is None:
        return Summary(*counts, total)
    ceiling = all_dense_us - sum(_most_us(r) for r in found.rows if r.verdict != "not_eligible")
    saved, span = round(all_dense_us - total, 6), None
    if predicted_for and sparse:
        low, high = saved_range(saved, [pick for r in sparse if (pick := _pick(r))], predicted_for)
        span = round(low, 6), round(high, 6)
    return Summary(*counts, total, all_dense_us, saved, round(ceiling, 6), span)


def _pick(row: SparsityRow) -> Pick | None:
    """None where no dense kernel is known, beside which the sparse one could save anything."""
    if row.us is None or row.best_sparse is None or row.best_dense is None:
        return None
    saved = row.best_dense.us - row.us if row.other_cost_us is None else row.other_cost_us
    return Pick(row.us, row.best_sparse.bound, saved, row.best_dense.bound)


def _most_us(row: SparsityRow) -> float:
    """The most that 2:4 could take off a layer's dense time."""
    if row.best_dense is None or row.floor is None:
        return 0.0
    dense, floor = row.best_dense.us, row.floor
    halved = floor.launch_us + (dense - floor.launch_us) / 2
    return max(0.0, dense - max(floor.sparse_us, halved))


def _best(times: Mapping[Tactic, Time], sparse: bool) -> tuple[Tactic, Time] | None:
    rows = [(t, time) for t, time in times.items() if t.sparse == sparse]

    def order(layout: str) -> int:  # an edge's own layout comes last
        return (*tables.PREFERRED, layout).index(layout)

    return min(rows, key=lambda r: (r[1].us, order(r[0].ins[0].layout), order(r[0].out.layout), r[0].name), default=None)


def _timed(best: tuple[Tactic, Time], op: Op, device: Device) -> KernelTime:
    """`bound`: what limits this kernel according to its family's prediction, also where its time was measured."""
    tactic, time = best
    low, high = round(time.low_us, 6), round(time.high_us, 6)
    bound = str(predict(op.problem, tactic, device)["bound"])
    return KernelTime(tactic, tactic.ins[0], tactic.out, round(time.us, 6), low, high, bound)


def _if_sparse(
    table: Table, op: Op, dense: tuple[Tactic, Time] | None, alternatives: list[tuple[Op, Mapping[Tactic, Time]]]
) -> IfSparse | None:
    """What the op's best sparse kernel is predicted to take if its weights had the pattern, and its best dense one: a pair that
    compares, also in a measured plan. Where no sparse kernel runs this form of the layer, that of the `alternatives` whose is
    fastest, as in `_row`."""
    if dense is None:
        return None
    for forms in ([op], [other for other, _ in alternatives if other is not op]):
        able, timer = [tables.if_sparse(table, form) for form in forms], predicted(table.device)
        times = [(best, form) for form, tactics in able if (best := _best(timer(form.problem, tactics), sparse=True))]
        if times:
            best, form = min(times, key=lambda pair: pair[0][1].us)
            dense_us = predict_us(op.problem, dense[0], table.device)
            k = _timed(best, form, table.device)
            return IfSparse(k.tactic, k.in_, k.out, k.us, k.low_us, k.high_us, k.bound, round(dense_us, 6))
    return None


def _sizes(times: Mapping[Tactic, Time]) -> tuple[int, ...]:
    """Bytes of an element of each input and the output, in the smallest type that any tactic takes."""
    around = ([DTYPES[f.dtype].itemsize for f in (*t.ins, t.out)] for t in times)
    return tuple(min(column) for column in zip(*around, strict=True))


def _rounded(record: Mapping) -> dict:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}


def _rejections(table: Table, op: Op) -> str:
    if any(t.sparse for t in candidates(op.problem, table.device)):
        return "every sparse tactic failed when it was timed"
    sparse = {kernel.name for kernel in ROWS if kernel.sparse}
    reasons = [r for x, r in rejected(op.problem, table.device) if (x.kernel if isinstance(x, Tactic) else x) in sparse]
    return "; ".join(map(str, dict.fromkeys(reasons)))


def _within_noise(a: Time, b: Time) -> bool:
    """Medians closer together than the joint spread between the 20 % and 80 % quantiles."""
    return abs(a.us - b.us) < (a.high_us - a.low_us) / 2 + (b.high_us - b.low_us) / 2
