"""Measures how sparse the stored weights of an ONNX file are, and how a 2:4 network differs from one that is merely sparse."""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from gpu_runtime.errors import bounded
from gpu_runtime.frontend.files.weights import Weight, stored_weights
from gpu_runtime.stored_pattern import as_stored
from gpu_runtime.text import lost_text, several, share_text, table

SHARES = (("zeros", share_text), ("fit", share_text), ("lost_energy", lost_text))  # columns, and the functions that format them
SPARSE = 0.1  # share of zeros from which weights are called sparse rather than dense


@bounded
def inspect(path: str | os.PathLike) -> list[dict]:
    """Returns a dict per Conv, Gemm and MatMul weight: {layer, op, weight, shape, zeros, groups, fit, lost_energy, energy,
    verdict}.

    `zeros`: share of weights that are zero; `groups`: number of groups of 4 input channels; `fit`: share of these with at
    most 2 non-zeros; `lost_energy`: share of the squared weights that the nearest 2:4 pattern would set to zero; `energy`:
    sum of the squared weights. These four are None if 2:4 cannot apply, and the verdict says why. Raises ModelError.
    """
    return of_weights(stored_weights(path))


def of_weights(found: Iterable[Weight]) -> list[dict]:
    """Returns the rows of `inspect` for weights that are already read."""
    rows: list[dict[str, Any]] = []
    for weight in found:
        w, node = weight.values, weight.node
        row: dict[str, Any] = {"layer": node.name, "op": node.op_type, "weight": weight.name}
        row |= {"shape": None if w is None else list(w.shape), "zeros": None, "groups": None, "fit": None}
        row |= {"lost_energy": None, "energy": None, "verdict": weight.reason, "elsewhere": ""}
        if w is not None and w.size:
            row["zeros"] = float(np.mean(w == 0))
        if w is not None and not weight.reason:
            s = as_stored(w, weight.axis)
            row |= {"groups": s.groups, "fit": s.share, "lost_energy": s.lost_energy, "energy": s.energy}
            row["verdict"] = "2:4" if s.fits else "sparse, not 2:4" if row["zeros"] >= SPARSE else "dense"
            row["elsewhere"] = s.elsewhere
        rows.append(row)
    return rows


def summary(rows: list[dict]) -> str:
    """Returns the network's verdict in one line."""
    able = [r for r in rows if r["fit"] is not None]
    if not able:
        return f"none of {len(rows)} layers with weights can be 2:4"
    fit = sum(r["verdict"] == "2:4" for r in able)
    if fit == len(able):
        return (
            f"2:4: all {fit} layers that can have the pattern have it; build with --sparsity=enable to consider sparse kernels"
        )
    total = sum(r["groups"] for r in able)
    zeros, share = (sum(r[key] * r["groups"] for r in able) / total for key in ("zeros", "fit"))
    if fit:
        counts = f"{fit} of the {len(able)} layers that can be 2:4 are 2:4"
        return f"partly 2:4: {counts}; overall {100 * zeros:.1f} % zeros, {share_text(share)} of groups fit"
    kind = f"sparse ({100 * zeros:.1f} % zeros) but not" if zeros >= SPARSE else f"dense ({100 * zeros:.1f} % zeros), not"
    return f"{kind} 2:4: {share_text(share)} of groups fit, and a layer runs sparse only if all of its groups do"


def not_24(rows: list[dict]) -> list[str]:
    """Returns the layers whose weights can be 2:4 but are not."""
    return [r["layer"] for r in rows if r["fit"] is not None and r["verdict"] != "2:4"]


def pruning(rows: list[dict]) -> str:
    """Returns the words for the energy that --sparsity=force would remove from weights that can be 2:4 but are not; ""
    without any.
    """
    shared = {r["weight"]: r for r in rows if r["fit"] is not None and r["verdict"] != "2:4"}.values()  # each counts once
    lost, energy = sum(r["lost_energy"] * r["energy"] for r in shared), sum(r["energy"] for r in shared)
    if not shared:
        return ""
    share = lost_text(lost / energy if energy else 0.0)
    return f"--sparsity=force would prune {several(len(shared), 'initializer')}, which would lose {share} of their energy"


def text(rows: list[dict]) -> str:
    """Returns the rows as a table, with the meaning of its columns and the network's verdict below."""
    cells = []
    for r in rows:
        shape = "-" if r["shape"] is None else "x".join(map(str, r["shape"]))
        shares = (write(r[key]) if r[key] is not None else "-" for key, write in SHARES)
        verdict = r["verdict"].removeprefix(f"shape {r['shape']}: ")
        cells.append([r["layer"], shape, *shares, f"{r['elsewhere']}, not along C" if r["elsewhere"] else verdict])
    out = table(["layer", "weights", "zeros", "groups fit", "energy lost", "verdict"], cells, right=(2, 3, 4))
    legend = (
        "groups fit: share of the groups of 4 consecutive input channels that have at most 2 non-zeros\n"
        "energy lost: share of the squared weights, as the file has them, that --sparsity=force would set to zero\n"
    )
    return (
        "\n".join([*out, "", legend, summary(rows), *filter(None, [astray(r["elsewhere"] for r in rows), pruning(rows)])])
        + "\n"
    )


def astray(elsewhere: Iterable[str], verb: str = "are") -> str:
    """Returns the sentence and cure for weights that are 2:4 elsewhere than along input channels; "" without any.

    `elsewhere`: Stored.elsewhere of each layer.
    """
    count = sum(map(bool, elsewhere))
    if not count:
        return ""
    text = f"the weights of {several(count, 'layer')} {verb} 2:4 along another axis or order than the input channels (C)"
    return f"{text}, along which tensor cores need it: prune the dense weights again, along C"
