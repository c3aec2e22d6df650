"""How sparse the weights of an ONNX file are, as stored: what tells a 2:4 network from one that is merely sparse."""

from __future__ import annotations

import math
import os

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.onnx_weights import stored_weights

SPARSE = 0.1  # share of zeros from which weights are called sparse rather than dense


def inspect(path: str | os.PathLike) -> list[dict]:
    """One row per Conv, Gemm and MatMul weight: {layer, op, weight, shape, zeros, groups, fit, lost_energy, verdict}.

    `zeros`: share of weights that are zero; `groups`: number of 4-groups of input channels; `fit`: share of them with at
    most 2 non-zeros; `lost_energy`: share of the squared weights that the nearest 2:4 pattern would set to zero. The
    last three are None where 2:4 cannot apply, and the verdict says why. Raises ModelError.
    """
    rows = []
    for layer, op, name, w, axis, reason in stored_weights(path):
        row = {"layer": layer, "op": op, "weight": name, "shape": None if w is None else list(w.shape)}
        row |= {"zeros": None, "groups": None, "fit": None, "lost_energy": None, "verdict": reason}
        if w is not None and w.size:
            row["zeros"] = float(np.mean(w == 0))
        if not reason:
            ok = sparse24.fits(w, axis)
            row |= {"groups": ok.size, "fit": float(ok.mean()), "lost_energy": sparse24.lost_energy(w, axis)}
            row["verdict"] = "2:4" if ok.all() else "sparse, not 2:4" if row["zeros"] >= SPARSE else "dense"
        rows.append(row)
    return rows


def summary(rows: list[dict]) -> str:
    """The network's verdict in one line."""
    able = [r for r in rows if r["fit"] is not None]
    if not able:
        return f"none of {len(rows)} layers with weights can be 2:4"
    fit = sum(r["verdict"] == "2:4" for r in able)
    if fit == len(able):
        return f"2:4: all {fit} layers that can be are; build with --sparsity=enable to consider sparse kernels"
    total = sum(r["groups"] for r in able)
    zeros, share = (sum(r[key] * r["groups"] for r in able) / total for key in ("zeros", "fit"))
    if fit:
        counts = f"{fit} of the {len(able)} layers that can be are"
        return f"partly 2:4: {counts}; in all {100 * zeros:.1f} % zeros, {_percent(share)} of groups fit"
    kind = f"sparse ({100 * zeros:.1f} % zeros) but not" if zeros >= SPARSE else f"dense ({100 * zeros:.1f} % zeros), not"
    return f"{kind} 2:4: {_percent(share)} of groups fit, and a layer runs sparse only if all of its groups do"


def text(rows: list[dict]) -> str:
    """The rows as a table, with what its columns mean and the network's verdict below."""
    lines = [("layer", "weights", "zeros", "groups fit", "energy lost", "verdict")]
    for r in rows:
        shape = "-" if r["shape"] is None else "x".join(map(str, r["shape"]))
        shares = (_percent(r[key]) for key in ("zeros", "fit", "lost_energy"))
        lines.append((r["layer"], shape, *shares, r["verdict"].removeprefix(f"shape {r['shape']}: ")))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    out = []
    for line in lines:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False))]
        out.append("  ".join([*cells, line[5]]))
    out.insert(1, "  ".join("-" * w for w in (*widths, len("verdict"))))
    legend = (
        "groups fit: share of the groups of 4 consecutive input channels that have at most 2 non-zeros\n"
        "energy lost: share of the squared weights that pruning to the nearest 2:4 pattern would set to zero\n"
    )
    return "\n".join(out) + f"\n\n{legend}\n{summary(rows)}\n"


def _percent(share: float | None) -> str:
    """Rounded down, so that 100 means all."""
    return "-" if share is None else f"{math.floor(share * 10_000) / 100:.2f} %"
