"""Which layers could run 2:4 sparse, which do, and the numbers behind it for each: plain data, put into words by `explain`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from gpu_runtime.frontend.weights import Stored, together
from gpu_runtime.network import Op
from gpu_runtime.planning import tables
from gpu_runtime.planning.tables import Table
from tactics.candidates import candidates, rejected
from tactics.families.conv_gemm import not_sparse
from tactics.format import DTYPES
from tactics.measure.timing import Time, predicted
from tactics.planner import plan
from tactics.predict import SIGMA_RATIO, predict
from tactics.roofline import floors
from tactics.tactic import SPARSE, Tactic


def sparsity(table: Table, chosen: plan.Plan, mode: str, *, measured: bool, all_dense_us: float | None = None,
             single: Mapping[str, str] | None = None, stored: Mapping[str, Stored] | None = None) -> dict:  # fmt: skip
    """The engine's `sparsity` record: {mode, eligible, picked, rows, summary}, a row for every layer with weights.

    `reason` is one of picked, dense_faster, reformat_outweighs, within_noise (measured plans only), no_sparse_tactic,
    pattern_violation, channels_not_multiple_of_4, grouped_conv; runtime.engine lists the other keys. `all_dense_us`:
    what the best plan without sparse tactics takes. `single`: FP32 tensor -> the sentence on why it is none of FP16; `stored`:
    layer -> its weights as the file has them.
    """
    alternatives: dict[str, list[tuple[Op, Mapping[Tactic, Time]]]] = {}
    for op, times in zip(table.network.ops, table.times, strict=True):
        if op.layer:
            alternatives.setdefault(op.layer, []).append((op, times))
    ops = {i: op for i, op in enumerate(table.network.ops) if op.layer and plan.holds(op.when, chosen.options)}
    kernels = _Kernels(table)
    wanted = {
        op.layer: not chosen.entries[op.name].sparse
        for op in ops.values()
        if all(any(kernels.best(times, sparse) for _, times in alternatives[op.layer]) for sparse in (False, True))
    }
    forced = tables.forced(table, chosen, wanted)
    rows = [
        _row(table, kernels, chosen, op, table.times[i], mode, measured, forced.get(op.layer), alternatives[op.layer],
             single or {}, stored or {})
        for i, op in ops.items()
    ]
    return {
        "mode": mode,
        "eligible": [r["layer"] for r in rows if r["verdict"] != "not_eligible"],
        "picked": [r["layer"] for r in rows if r["verdict"] == "sparse"],
        "rows": rows,
        "summary": _summary(rows, chosen, all_dense_us),
    }


class _Kernels:
    """The best kernels of ops by their table of times, which is one for all ops alike (see planning.tabulate)."""

    def __init__(self, table: Table):
        self.table, self._best, self._if_sparse = table, {}, {}

    def best(self, times: Mapping[Tactic, Time], sparse: bool) -> tuple[Tactic, Time] | None:
        key = id(times), sparse
        if key not in self._best:
            self._best[key] = _best(times, sparse)
        return self._best[key]

    def if_sparse(
        self, op: Op, times: Mapping[Tactic, Time], alternatives: list[tuple[Op, Mapping[Tactic, Time]]]
    ) -> dict | None:
        key = id(times), *(id(others) for _, others in alternatives)
        if key not in self._if_sparse:
            self._if_sparse[key] = _if_sparse(self.table, op, self.best(times, False), alternatives)
        return self._if_sparse[key]


def _row(table: Table, kernels: _Kernels, chosen: plan.Plan, op: Op, times: Mapping[Tactic, Time], mode: str,
         measured: bool, forced: plan.Forced | None, alternatives: list[tuple[Op, Mapping[Tactic, Time]]],
         single: Mapping[str, str], stored: Mapping[str, Stored]) -> dict:  # fmt: skip
    """`forced`: the plan with this layer forced the other way. What `op` computes may be another form of the layer, over other
    channels; the first of its `alternatives` has the model's own weights, and only some may have sparse kernels."""
    own, dense, sparse, ran = alternatives[0][0], kernels.best(times, False), kernels.best(times, True), op
    if sparse is None:
        found = [(best, other) for other, others in alternatives if (best := kernels.best(others, True))]
        sparse, ran = min(found, key=lambda pair: pair[0][1].us, default=(None, op))
    row = {
        "layer": op.layer, "layers": list(op.layers or (op.layer,)), "op": op.name, "detail": None, **_patterns(own, stored),
        "c": own.problem.c, "k": own.weights["w"].shape[0], "groups": own.problem.groups,
        "kernel": [own.problem.r, own.problem.s],
        "best_dense": _timed(dense, op, table.device), "best_sparse": _timed(sparse, ran, table.device),
        "floor": _rounded(floors(op.problem, table.device, _sizes(times))),
        "us": chosen.entries[op.name].time_ps / 1e6, "if_sparse": None, "other": None,
        "other_cost_us": None, "flip_speedup": None, "p_sparse_faster": None,
    }  # fmt: skip
    if why := next((single[t] for t in (op.output, *op.inputs) if t in single), None):
        told = {"detail": "FP32", "sentence": f"Runs in FP32 on CUDA cores, where zeros gain nothing: {why}."}
        return row | {"verdict": "not_eligible", "reason": "no_sparse_tactic", "floor": None} | told
    if against := not_sparse(own.problem):
        would = kernels.if_sparse(op, times, alternatives) if against.code == "pattern_violation" else None
        return row | {"verdict": "not_eligible", "reason": against.code, "detail": against.sentence, "if_sparse": would}
    if sparse is None:
        detail = "--sparsity=disable was given" if mode == "disable" else _rejections(table, op)
        would = kernels.if_sparse(op, times, alternatives) if mode == "disable" else None
        return row | {"verdict": "dense", "reason": "no_sparse_tactic", "detail": detail, "if_sparse": would}
    if forced is not None:
        row["other"] = _other(table, chosen, forced)
        row["other_cost_us"] = row["other"]["cost_us"]
        row["flip_speedup"] = None if forced.speedup == math.inf else round(forced.speedup, 4)
    if not measured and dense is not None:
        row["p_sparse_faster"] = _p_faster(sparse[1].us, dense[1].us)
    if chosen.entries[op.name].sparse:
        return row | {"verdict": "sparse", "reason": "picked"}
    if measured and _within_noise(sparse[1], dense[1]):
        reason = "within_noise"
    elif sparse[1].us >= dense[1].us:
        reason = "dense_faster"
    else:
        reason = "reformat_outweighs"
    return row | {"verdict": "dense", "reason": reason}


def _patterns(op: Op, stored: Mapping[str, Stored]) -> dict:
    """`pattern` of an op's weights, of several in one launch together, and of what the file has for them `stored_share`, that
    of the groups that fit, and `lost_energy`, as gpu_runtime.frontend.weights defines them; None where the file has no such."""
    rows = [pattern(op.weights[name]) for name in ("w", "w2") if name in op.weights]
    layers = [stored.get(layer) for layer in op.layers or (op.layer,)]
    whole = together(layers) if all(layers) else None
    row = rows[0] | {"stored_share": whole and whole.share, "lost_energy": whole and whole.lost_energy}
    if len(rows) == 1 or None in (r["pattern_groups"] for r in rows):
        return row
    groups = [r["pattern_groups"] for r in rows]
    return row | {
        "pattern_groups": sum(groups),
        "pattern_share": sum(r["pattern_share"] * g for r, g in zip(rows, groups, strict=True)) / sum(groups),
        "first_violation": next((r["first_violation"] for r in rows if r["first_violation"]), None),
    }


def pattern(w: np.ndarray) -> dict:
    """How w [K,C,R,S], as kernels hold it, stands to 2:4: `pattern_groups`, the number of its 4-groups, `pattern_share` of
    them that fit, and `first_violation` [k, c, r, s]. All None where C is no multiple of 4."""
    row = dict.fromkeys(("pattern_groups", "pattern_share", "first_violation"))
    if w.shape[1] % 4:
        return row
    ok = sparse24.fits(w)
    row |= {"pattern_groups": int(ok.size), "pattern_share": float(ok.mean())}
    if not ok.all():
        k, group, r, s = (int(i) for i in np.argwhere(~ok)[0])
        row |= {"first_violation": [k, 4 * group, r, s]}
    return row


def _other(table: Table, chosen: plan.Plan, forced: plan.Forced) -> dict:
    """What forcing the layer changes, in microseconds: `cost_us`, the whole plan's, is the sum of `kernel_us`, the change of
    the `kernels` that hold its weights (`us` together; `tactic`, `in` and `out` are the first one's), `reformat_us`, of all
    reformats, and `around_us`, of all other kernels."""
    mine = forced.after[0]
    kernel = sum(e.time_ps for e in forced.after) - sum(e.time_ps for e in forced.before)
    gone, new = ([table.graph.reformat_ps(*hop) for hop in hops] for hops in (forced.change.gone, forced.change.new))
    reformat = sum(new) - sum(gone)
    total = forced.total_ps - chosen.total_ps
    tactic = mine.tactic
    return {
        "total_us": forced.total_ps / 1e6, "cost_us": total / 1e6, "kernel_us": kernel / 1e6, "reformat_us": reformat / 1e6,
        "around_us": (total - kernel - reformat) / 1e6, "reformats": sum(map(bool, new)) - sum(map(bool, gone)),
        "tactic": mine.name, "in": str(tactic.ins[0]), "out": str(tactic.out),
        "us": sum(e.time_ps for e in forced.after) / 1e6, "kernels": len(forced.after),
    }  # fmt: skip


def _summary(rows: list[dict], chosen: plan.Plan, all_dense_us: float | None) -> dict:
    """Counts, and the plan beside `all_dense_us` and `ceiling_us`: that with each eligible layer's best dense kernel at twice
    its speed, launch aside, but no faster than any sparse kernel of the layer could be."""
    total = chosen.total_ps / 1e6
    able = [r for r in rows if r["verdict"] != "not_eligible"]
    ceiling = None if all_dense_us is None else all_dense_us - sum(map(_most_us, able))
    return {
        "layers": len(rows), "eligible": len(able), "picked": sum(r["verdict"] == "sparse" for r in rows),
        "total_us": total, "all_dense_us": all_dense_us,
        "saved_us": None if all_dense_us is None else round(all_dense_us - total, 6),
        "ceiling_us": ceiling and round(ceiling, 6),
    }  # fmt: skip


def _most_us(row: dict) -> float:
    """The most that 2:4 could take off a layer's dense time."""
    if row["best_dense"] is None:
        return 0.0
    dense, floor = row["best_dense"]["us"], row["floor"]
    halved = floor["launch_us"] + (dense - floor["launch_us"]) / 2
    return max(0.0, dense - max(floor["sparse_us"], halved))


def _best(times: Mapping[Tactic, Time], sparse: bool) -> tuple[Tactic, Time] | None:
    rows = [(t, time) for t, time in times.items() if t.sparse == sparse]

    def order(layout: str) -> int:  # an edge's own layout comes last
        return (*tables.PREFERRED, layout).index(layout)

    return min(rows, key=lambda r: (r[1].us, order(r[0].ins[0].layout), order(r[0].out.layout), r[0].name), default=None)


def _timed(best: tuple[Tactic, Time] | None, op: Op, device: Device) -> dict | None:
    """`bound`: what limits this kernel according to its family's prediction, also where its time was measured."""
    if best is None:
        return None
    tactic, time = best
    return {
        "tactic": tactic.name, "in": str(tactic.ins[0]), "out": str(tactic.out), "us": round(time.us, 6),
        "low_us": round(time.low_us, 6), "high_us": round(time.high_us, 6),
        "bound": predict(op.problem, tactic, device)["bound"],
    }  # fmt: skip


def _if_sparse(table: Table, op: Op, dense: tuple[Tactic, Time] | None,
               alternatives: list[tuple[Op, Mapping[Tactic, Time]]]) -> dict | None:  # fmt: skip
    """What the op's best sparse kernel is predicted to take if its weights had the pattern, {tactic, in, out, us, low_us,
    high_us, bound}, and `dense_us`, the prediction for its best dense one: a pair that compares, also in a measured plan. Where
    no sparse kernel runs this form of the layer, that of the `alternatives` whose is fastest, as in `_row`."""
    if dense is None:
        return None
    for forms in ([op], [other for other, _ in alternatives if other is not op]):
        able, timer = [tables.if_sparse(table, form) for form in forms], predicted(table.device)
        times = [(_best(timer(form.problem, tactics), sparse=True), form) for form, tactics in able if tactics]
        if times:
            best, form = min(times, key=lambda pair: pair[0][1].us)
            dense_us = predict(op.problem, dense[0], table.device)["total_us"]
            return _timed(best, form, table.device) | {"dense_us": round(dense_us, 6)}
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
    reasons = [r for x, r in rejected(op.problem, table.device) if x in SPARSE or (isinstance(x, Tactic) and x.sparse)]
    return "; ".join(dict.fromkeys(reasons))


def _p_faster(sparse_us: float, dense_us: float) -> float:
    """P(sparse is faster) when the quotient of the two predictions errs log-normally with SIGMA_RATIO."""
    return round(0.5 * (1 + math.erf(math.log(dense_us / sparse_us) / SIGMA_RATIO / math.sqrt(2))), 4)


def _within_noise(a: Time, b: Time) -> bool:
    """Medians closer together than the joint spread between the 20 % and 80 % quantiles."""
    return abs(a.us - b.us) < (a.high_us - a.low_us) / 2 + (b.high_us - b.low_us) / 2
