"""Which layers could run 2:4 sparse, which do, and why each of the others does not."""

from __future__ import annotations

import math

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime import planning
from gpu_runtime.lower import Op
from gpu_runtime.planning import Table
from tactics import plan
from tactics.candidates import candidates, rejected
from tactics.conv_gemm import sparse_family_reason
from tactics.predict import SIGMA_RATIO
from tactics.tactic import Tactic
from tactics.timing import Time


def sparsity(table: Table, chosen: plan.Plan, mode: str, *, measured: bool) -> dict:
    """The engine's `sparsity` record: {mode, eligible, picked, rows}, a row for every layer with weights.

    `reason` is one of picked, dense_faster, reformat_outweighs, within_noise (measured plans only), no_sparse_tactic,
    pattern_violation, channels_not_multiple_of_4, grouped_conv.
    """
    ops = {i: op for i, op in enumerate(table.network.ops) if op.layer and plan.holds(op.when, chosen.options)}
    wanted = {
        op.layer: not chosen.entries[op.name].sparse
        for i, op in ops.items()
        if _best(table.times[i], sparse=True) and _best(table.times[i], sparse=False)
    }
    forced = planning.forced_us(table, wanted)
    rows = [_row(table, chosen, op, table.times[i], mode, measured, forced.get(op.layer)) for i, op in ops.items()]
    return {
        "mode": mode,
        "eligible": [r["layer"] for r in rows if r["verdict"] != "not_eligible"],
        "picked": [r["layer"] for r in rows if r["verdict"] == "sparse"],
        "rows": rows,
    }


def _row(table: Table, chosen: plan.Plan, op: Op, times: dict[Tactic, Time], mode: str, measured: bool,
         other_us: float | None) -> dict:  # fmt: skip
    """`other_us`: the plan's total with this layer forced the other way."""
    share, offender = pattern(op.weights["w"])
    dense = _best(times, sparse=False)
    sparse = _best(times, sparse=True)
    picked = chosen.entries[op.name].sparse
    family = sparse_family_reason(op.problem)
    row = {
        "layer": op.layer, "op": op.name, "pattern_share": share, "first_violation": offender, "detail": None,
        "best_dense": _summary(dense), "best_sparse": _summary(sparse), "other_cost_us": None, "p_sparse_faster": None,
    }  # fmt: skip
    if family:
        code, _, detail = family.partition(": ")
        return row | {"verdict": "not_eligible", "reason": code, "detail": detail}
    if sparse is None:
        detail = "--sparsity=disable was given" if mode == "disable" else _rejections(table, op)
        return row | {"verdict": "dense", "reason": "no_sparse_tactic", "detail": detail}
    row["other_cost_us"] = None if other_us is None else other_us - chosen.total_ps / 1e6
    if not measured and dense is not None:
        row["p_sparse_faster"] = _p_faster(sparse[1].us, dense[1].us)
    if picked:
        return row | {"verdict": "sparse", "reason": "picked"}
    if measured and _within_noise(sparse[1], dense[1]):
        reason = "within_noise"
    elif sparse[1].us >= dense[1].us:
        reason = "dense_faster"
    else:
        reason = "reformat_outweighs"
    return row | {"verdict": "dense", "reason": reason}


def pattern(w: np.ndarray) -> tuple[float | None, list[int] | None]:
    """Share of the 4-groups of w [K,C,R,S] that fit 2:4, and the first that does not as [k, c, r, s]; None if C % 4."""
    if w.shape[1] % 4:
        return None, None
    ok = sparse24.fits(w)
    bad = np.argwhere(~ok)
    if not len(bad):
        return 1.0, None
    k, group, r, s = (int(i) for i in bad[0])
    return float(ok.mean()), [k, 4 * group, r, s]


def _best(times: dict[Tactic, Time], sparse: bool) -> tuple[Tactic, Time] | None:
    rows = [(t, time) for t, time in times.items() if t.sparse == sparse]

    def order(layout: str) -> int:  # an edge's own layout comes last
        return (*planning.PREFERRED, layout).index(layout)

    return min(rows, key=lambda r: (r[1].us, order(r[0].ins[0].layout), order(r[0].out.layout), r[0].name), default=None)


def _summary(best: tuple[Tactic, Time] | None) -> dict | None:
    if best is None:
        return None
    tactic, time = best
    return {"tactic": tactic.name, "in": str(tactic.ins[0]), "out": str(tactic.out), "us": round(time.us, 6)}


def _rejections(table: Table, op: Op) -> str:
    if any(t.sparse for t in candidates(op.problem, table.device)):
        return "every sparse tactic failed when it was timed"
    reasons = [r for name, r in rejected(op.problem, table.device) if "sparse24" in name]
    return "; ".join(dict.fromkeys(reasons))


def _p_faster(sparse_us: float, dense_us: float) -> float:
    """P(sparse is faster) when the quotient of the two predictions errs log-normally with SIGMA_RATIO."""
    return round(0.5 * (1 + math.erf(math.log(dense_us / sparse_us) / SIGMA_RATIO / math.sqrt(2))), 4)


def _within_noise(a: Time, b: Time) -> bool:
    """Medians closer together than the joint spread between the 20 % and 80 % quantiles."""
    return abs(a.us - b.us) < (a.high_us - a.low_us) / 2 + (b.high_us - b.low_us) / 2
