"""Finds branches of an ONNX file that may run as one convolution: their own weights and the merged weights.

The merged weights are in no file, so finding them needs an import of the model. If the import fails, for example on an
unsupported operator, a reason replaces the sums; each stored weight can still be inspected alone.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from cuda_kernels import sparse24
from gpu_runtime.errors import ModelError, bounded
from gpu_runtime.explain.figures import span_text
from gpu_runtime.explain.names import grouped
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.load import copied
from gpu_runtime.frontend.files.weights import checked, weights
from gpu_runtime.frontend.summaries import pattern
from gpu_runtime.fusion import fuse
from gpu_runtime.fusion.branches import Sum
from gpu_runtime.fusion.common_pattern import common, no_fours
from gpu_runtime.pruning.permute import EXAMPLE
from gpu_runtime.stored_pattern import Stored, as_stored
from gpu_runtime.text import lost_text, one_line, printable, share_text, table, wrap

CURE = "gpu-runtime prune and --sparsity=force give its branches one pattern"
DENSE = "Prune the original model, in which all branches are dense"


@dataclass(frozen=True, slots=True)
class Found:
    """The sums of a model (branches that are added and may become one convolution); `unknown`: why the search failed,
    else "".
    """

    sums: tuple[Sum, ...] = ()
    unknown: str = ""


def find(proto: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Found:
    """Returns the sums of a model. `shapes`: of inputs; other dynamic sizes are 1 for a batch, else EXAMPLE.

    Raises ModelError if `shapes` do not fit the model's inputs. Another failure is recorded in the result's `unknown`.
    """
    importer.check_shapes(proto.graph.input, shapes)
    ops = {node.op_type for node in proto.graph.node}
    if "Conv" not in ops or not ops & {"Add", "Sub", "Sum"}:
        return Found()
    sizes = {v.name: _size(v) for v in proto.graph.input}
    try:
        return Found(tuple(fuse.sums(importer.of_proto(copied(proto), "", {**sizes, **shapes}))))
    except ModelError as e:
        dims = {v.name: v.type.tensor_type.shape.dim for v in proto.graph.input if v.name not in shapes}
        guessed = [name for name, shape in dims.items() if any(not d.HasField("dim_value") for d in shape)]
        cure = (
            f"; the dynamic sizes of {', '.join(map(repr, guessed))} were guessed: give them with --shapes" if guessed else ""
        )
        return Found(unknown=f"{e}{cure}")


def _size(v: onnx.ValueInfoProto) -> tuple[int, ...]:
    dims = v.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else EXAMPLE if i else 1 for i, d in enumerate(dims))


def own_weights(graph: onnx.GraphProto) -> dict[str, str]:
    """Returns layer -> its stored weight, if the weight can have the pattern and no other layer reads it."""
    found = [(w.node.name, w.name) for w in weights(graph) if not w.reason]
    readers = Counter(name for _, name in found)
    return {layer: name for layer, name in found if readers[name] == 1}


# ---- the output of inspect-sparsity


@dataclass(frozen=True, slots=True)
class Part:
    """A branch of a sum: its layer, and its own weights [K, C/g, r, s].

    `at`: the tap (row, column) of the merged window where these weights begin; `fit`: the share of its groups of 4 that fit
    2:4, None without such groups.
    """

    layer: str
    shape: tuple[int, ...]
    at: tuple[int, int]
    fit: float | None


@dataclass(frozen=True, slots=True)
class Merged:
    """The merged convolution. `itself`: whether the input itself is added; `stored`: facts on the merged weights, None if these
    cannot be 2:4; `taps`: (r, s, share of all groups) of taps with misfits; `lost`: the share of the squared merged weights
    that a common pattern removes, None without one; `reason`: why it is not 2:4; `cure`: the remedy."""

    node: str
    shape: tuple[int, ...]
    itself: bool
    parts: tuple[Part, ...]
    verdict: str
    stored: Stored | None = None
    taps: tuple[tuple[int, int, float], ...] = ()
    lost: float | None = None
    reason: str = ""
    cure: str = ""


@bounded
def inspect_file(
    path: str | os.PathLike, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[dict[str, Any]], tuple[Merged, ...], str]:
    """Returns (the rows of pattern.inspect for the file's weights, the file's sums, why the search for sums failed or "").

    `shapes`: of inputs. Raises ModelError.
    """
    proto = checked(path)
    rows, found = pattern.of_weights(weights(proto.graph)), find(proto, shapes)
    able = own_weights(proto.graph) if found.sums else {}
    return rows, tuple(_merged(s, able) for s in found.sums), found.unknown


def _merged(s: Sum, able: Mapping[str, str]) -> Merged:
    parts = tuple(
        Part(b.conv, _own_shape(s, i), b.at, None if s.w.shape[1] % 4 else float(sparse24.fits(b.w).mean()))
        for i, b in enumerate(s.branches)
    )
    head = (s.node, tuple(s.w.shape), s.itself is not None, parts)
    if s.w.shape[1] % 4:
        return Merged(*head, "cannot be 2:4", reason=no_fours(s))
    ok, stored = sparse24.fits(s.w), as_stored(s.w, 1)
    if stored.fits:
        return Merged(*head, "2:4", stored)
    broken = (~ok).mean(axis=(0, 1)) / (ok.shape[2] * ok.shape[3])
    taps = tuple((int(r), int(c), float(broken[r, c])) for r, c in np.argwhere(broken))
    shared = common(s, able)
    lost = None if shared.against else shared.lost / stored.energy if stored.energy else 0.0
    cure = f"{CURE}; {lost_text(lost or 0.0)} of its energy is lost"
    cure = f"No common pattern: {shared.against}. {DENSE}" if shared.against else cure
    return Merged(*head, "not 2:4", stored, taps, lost, _why(s, parts, taps), cure)


def _own_shape(s: Sum, i: int) -> tuple[int, ...]:
    k, c, *window = s.branches[i].w.shape
    return (k, c * s.groups // s.branches[i].groups, *window)


def _why(s: Sum, parts: Sequence[Part], taps: Sequence[tuple[int, int, float]]) -> str:
    """Returns why a sum is not 2:4: the branches that do not fit, or the taps at which fitting branches are added."""
    if dense := [p.layer for p in parts if p.fit is not None and p.fit < 1]:
        return f"{len(dense)} of {len(parts)} branches {'is' if len(dense) == 1 else 'are'} not 2:4"
    where = f"at tap {list(taps[0][:2])}" if len(taps) == 1 else f"at {len(taps)} of {s.w.shape[2] * s.w.shape[3]} taps"
    return f"the branches' patterns differ {where}"


def text(rows: Sequence[Merged], unknown: str) -> str:
    """Returns a table of each sum's branches and merged convolution, with one line for the sums that can never be 2:4.

    `unknown`: why sums could not be searched for, which then is the text.
    """
    if unknown:
        return "\n" + "\n".join(wrap(not_looked_for(unknown))) + "\n"
    if not rows:
        return ""
    able, cannot = ([m for m in rows if (m.stored is not None) == can] for can in (True, False))
    lines = ["", *wrap(summary(rows)), ""]
    if able:
        cells = [cell for m in able for cell in _cells(m)]
        lines += [*table(["branch\n  = as one", "weights", "groups fit", "energy lost", "verdict"], cells, (2, 3)), ""]
    lines += _cures([m for m in able if m.verdict != "2:4"])
    for reason in dict.fromkeys(m.reason for m in cannot):
        first = grouped(m.parts[0].layer for m in cannot if m.reason == reason)
        lines += wrap(printable(f"Merged with the branches added to them, {', '.join(first)} cannot be 2:4: {reason}"))
    return "\n".join(lines).rstrip() + "\n"


def not_looked_for(unknown: str) -> str:
    return printable(f"The search for branches that may run as one convolution failed: {one_line(unknown)}")


def _cells(m: Merged) -> list[list[str]]:
    cells = [
        [
            printable(p.layer),
            "x".join(map(str, p.shape)),
            "-" if p.fit is None else share_text(p.fit),
            "",
            "" if p.fit is None else "2:4" if p.fit == 1 else "not 2:4",
        ]
        for p in m.parts
    ]
    if m.itself:
        cells.append(["the input itself", "", "", "", ""])
    share, lost = ("-", "-") if m.stored is None else (share_text(m.stored.share), lost_text(m.stored.lost_energy))
    line = f"{m.verdict}: {m.reason}" if m.reason else m.verdict
    return [*cells, ["  = as one", "x".join(map(str, m.shape)), share, lost, line]]


def _cures(rows: Sequence[Merged]) -> list[str]:
    """Returns lines with the remedies for sums that are not 2:4, and with the sums that have none."""
    curable, others = [m for m in rows if m.lost is not None], [m for m in rows if m.lost is None]
    lines = []
    if curable:
        span = span_text([m.lost for m in curable], lost_text)
        which = "" if len(curable) == 1 else f" of {len(curable)} of these sums"
        line = f"Prune with gpu-runtime prune or --sparsity=force: the branches{which} get one pattern, so the merged "
        lines += wrap(f"{line}convolution is 2:4 and loses {span} of its energy")
    if others:
        more = f" (this applies to {len(others)} of these sums)" if len(others) > 1 else ""
        lines += wrap(printable(f"{others[0].cure}{more}"))
    return lines


def summary(rows: Sequence[Merged]) -> str:
    """Returns the sentence on the number of sums, and of those that are 2:4; "" without sums."""
    if not rows:
        return ""
    able = [m for m in rows if m.stored is not None]
    fit = sum(m.verdict == "2:4" for m in able)
    line = f"{len(rows)} sums of branches may each run as one merged convolution: "
    return line + (f"{fit} of the {len(able)} that can be 2:4 are 2:4" if able else "none can be 2:4")


def data(rows: Sequence[Merged]) -> list[dict[str, Any]]:
    return [
        {
            "node": m.node,
            "layers": [p.layer for p in m.parts],
            "adds_input": m.itself,
            "shape": m.shape,
            "groups": m.stored.groups if m.stored else None,
            "fit": m.stored.share if m.stored else None,
            "lost_energy": m.stored.lost_energy if m.stored else None,
            "common_lost_energy": m.lost,
            "verdict": m.verdict,
            "reason": m.reason,
            "cure": m.cure or None,
            "taps": [{"r": r, "s": s, "broken": share} for r, s, share in m.taps],
            "branches": [{"layer": p.layer, "shape": p.shape, "at": p.at, "fit": p.fit} for p in m.parts],
        }
        for m in rows
    ]
