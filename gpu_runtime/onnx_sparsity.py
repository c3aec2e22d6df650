"""How sparse the weights of an ONNX file are, as stored: what tells a 2:4 network from one that is merely sparse."""

from __future__ import annotations

import os

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime import onnx_import


def inspect(path: str | os.PathLike) -> list[dict]:
    """One row per Conv, Gemm and MatMul weight: {layer, op, weight, shape, groups, zeros, fit, lost_energy, verdict}.

    `zeros`: share of weights that are zero; `fit`: share of 4-groups of input channels with at most 2 non-zeros;
    `lost_energy`: share of the squared weights that the nearest 2:4 pattern would zero. Raises ModelError.
    """
    rows = []
    for layer, op, name, w, axis, reason in onnx_import.stored_weights(path):
        row = {"layer": layer, "op": op, "weight": name, "shape": list(w.shape), "zeros": float(np.mean(w == 0)),
               "fit": None, "lost_energy": None}  # fmt: skip
        if not reason:
            ok = sparse24.fits(w, axis)
            row |= {"fit": float(ok.mean()), "lost_energy": sparse24.lost_energy(w, axis)}
            reason = "2:4" if ok.all() else "not 2:4"
        rows.append(row | {"verdict": reason})
    return rows


def text(rows: list[dict]) -> str:
    """The rows as a table, with the network's verdict below."""
    header = ("layer", "weight shape", "zeros", "4-groups that fit", "energy lost by 2:4", "verdict")
    lines = [header]
    for r in rows:
        fit = "-" if r["fit"] is None else f"{100 * r['fit']:.2f} %"
        lost = "-" if r["lost_energy"] is None else f"{100 * r['lost_energy']:.2f} %"
        lines.append((r["layer"], "x".join(map(str, r["shape"])), f"{100 * r['zeros']:.1f} %", fit, lost, r["verdict"]))
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    out = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    fit = sum(r["verdict"] == "2:4" for r in rows)
    able = sum(r["fit"] is not None for r in rows)
    return f"{out}\n{fit} of {len(rows)} weights are 2:4 along their input channels; {able - fit} more could be pruned to it\n"
