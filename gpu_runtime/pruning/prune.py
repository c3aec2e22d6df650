"""Gives an ONNX model 2:4 weights. Nothing else changes, except on request the order of channels."""

import difflib
import fnmatch
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from gpu_runtime.accuracy.metrics import Metric, judge
from gpu_runtime.errors import ModelError, bounded
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.load import copied, load_whole, named, with_weights
from gpu_runtime.frontend.files.source import Examples, ModelLike, source_of
from gpu_runtime.frontend.files.weights import Weight, check, prune_one, weights
from gpu_runtime.fusion.branches import Sum
from gpu_runtime.fusion.common_pattern import common
from gpu_runtime.progress import Listener, Progress, ignore, logged, report
from gpu_runtime.pruning import merged_branches, wording
from gpu_runtime.pruning import permute as channels
from gpu_runtime.pruning.benefit import NO_DEVICE, Forecast, forecast, paying
from gpu_runtime.pruning.calibrate import Calibrated, Reference, calibrate
from gpu_runtime.pruning.result import Pruned, Result, Shared
from gpu_runtime.stored_pattern import as_stored
from tactics.planner.grouping import grouped

Found = tuple[list[Pruned], list[Weight]]  # a row for each weight, and the weights to prune
AUTO = "auto"  # as `layers`
NONE_CAN = "no weight of the model can have the 2:4 pattern: gpu-runtime inspect-sparsity gives the reason for each"


@dataclass(frozen=True, slots=True)
class Choice:
    """The weights to prune: those that `only` names (None: all) and `skip` does not.

    Names are shell patterns over layers and stored weights. `paying`: the layers that a plan runs sparse, the only ones to
    prune; None without a plan.
    """

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()
    paying: Collection[str] | None = None

    def against(self, name: str, layers: Sequence[str]) -> str:
        """Returns why a weight stays unchanged, "" if it is to be pruned. `name`: of the weight; `layers`: of its readers."""
        if any(_matches(p, name, layers) for p in self.skip):
            return "named in skip"
        if self.only is not None and not any(_matches(p, name, layers) for p in self.only):
            return "not named in layers"
        if self.paying is not None and not any(layer in self.paying for layer in layers):
            return "the plan runs it dense even if it is pruned"
        return ""


def _matches(pattern: str, name: str, layers: Sequence[str]) -> bool:
    return any(pattern == text or fnmatch.fnmatchcase(text, pattern) for text in (name, *layers))


@bounded
def prune(
    model: ModelLike,
    *,
    example_inputs: Sequence[object] | None = None,
    layers: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    device: str | None = None,
    permute: bool = False,
    separate: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    calibration: Mapping[str, np.ndarray] | None = None,
    labels: object = None,
    metric: Metric | None = None,
    min_snr: float | None = None,
    max_drop: float | None = None,
    tell: Callable[[Forecast], None] | None = None,
    progress: Listener = ignore,
) -> Result:
    """Prune weights of convolutions and matrix products to 2:4 along their input channels, by magnitude.

    `layers`, `skip`: names of layers or weights, or shell patterns, to prune only these or to leave these dense; layers="auto":
    the layers that the plan for `device` runs sparse. `example_inputs`, `device`: as for `build`, the GPU for which
    `result.forecast` is what 2:4 gains, which `tell` gets before anything is pruned; "none": no forecast, which takes a plan.
    Branches that may run as one convolution (merged_branches.py) get one pattern, the convolution's too, unless `separate`.

    `permute`: reorder channels to lose less; without pruning the network computes the same up to rounding. `shapes`: sizes of
    dynamic inputs, for tracing channels. `calibration`: inputs by name, several samples along their first axes; on them
    onnxruntime compares the pruning of each layer, and of all, with the original model. `labels`: the class of each sample, for
    top-1 accuracy, or whatever `metric` takes: a function of outputs by name and labels, the higher the better. `min_snr` (dB,
    of the worst output) and `max_drop` (of accuracy or the metric; without labels the share of samples whose top-1 changes):
    the most harmful layers stay dense until both hold. Raises ModelError for the model, ValueError for other arguments.
    """
    progress, judged = logged(progress), judge(labels, metric)
    if calibration is None and (judged, min_snr, max_drop) != (None, None, None):
        raise ValueError("labels, min_snr and max_drop need calibration, inputs by name: without it nothing is measured")
    if max_drop is not None and not 0 <= max_drop <= (1 if metric is None else math.inf):
        raise ValueError(f"max_drop: expected a share from 0 to 1, got {max_drop!r}")
    if min_snr is not None and math.isnan(min_snr):
        raise ValueError("min_snr: expected a number of dB, got nan")
    choice, auto = _choice(layers, skip, device)
    source = source_of(model, Examples(example_inputs, shapes, as_written=True), progress)
    progress(Progress("import", str(source)))
    with named(source):
        whole = load_whole(source)
        reference = None if calibration is None else Reference.of(whole, calibration, judged, min_snr, max_drop)
        check(checked := copied(whole))
        importer.check_shapes(checked.graph.input, shapes or {})
        found = _rows(checked.graph, choice)
    gain = forecast(source, device, shapes, progress)
    if tell:
        tell(gain)
    if auto:
        found = _rows(checked.graph, replace(choice, paying=paying(gain)))
    with named(source):
        result = _pruned(whole, checked, found, reference, _Ways(permute, separate, shapes or {}, progress))
    result = replace(result, forecast=gain)
    result = replace(result, text=wording.forecast(gain, auto) + wording.text(result))
    report(result.__str__)
    return result


def _choice(layers: str | Sequence[str], skip: str | Sequence[str], device: str | None) -> tuple[Choice, bool]:
    """Returns (the choice, whether a plan has to make it, layers="auto"). Raises ValueError for "auto" beside names or without
    a device.
    """
    only, skipped = ((names,) if isinstance(names, str) else tuple(names) for names in (layers, skip))
    if AUTO not in only:
        return Choice(only or None, skipped), False
    if len(only) > 1 or device == NO_DEVICE:
        raise ValueError(f"layers: {AUTO!r} cannot be combined with names, and needs device, the GPU that is planned for")
    return Choice(None, skipped), True


@dataclass(frozen=True, slots=True)
class _Ways:
    """How weights are pruned: arguments of `prune` of the same names."""

    permute: bool
    separate: bool
    shapes: Mapping[str, tuple[int, ...]]
    progress: Listener


def _pruned(whole: onnx.ModelProto, checked: onnx.ModelProto, found: Found, reference: Reference | None, ways: _Ways) -> Result:
    rows, chosen = _ordered(checked, found, ways) if ways.permute and found[1] else found
    dense = {w.name: _values(w).copy() for w in chosen} if reference else {}
    added = merged_branches.find(checked, ways.shapes) if chosen and not ways.separate else merged_branches.Found()
    patterns = _patterns(added.sums, chosen, merged_branches.own_weights(checked.graph))
    by_itself = {w.name: as_stored(_values(w), w.axis).lost_energy for w in chosen if w.node.name in patterns.masks}
    before = {w.name: was for w in chosen if (was := prune_one(w, patterns.masks.get(w.node.name)))}
    rows = [replace(r, stored=before[r.weight]) if r.weight in before else r for r in rows]
    rows = [replace(r, sum=patterns.sum_of.get(r.layers[0], ""), by_itself=by_itself.get(r.weight)) for r in rows]
    accuracy = None
    if reference:
        units, able = {r.weight: r.sum for r in rows if r.sum}, [w for w in chosen if w.name in before]
        accuracy = calibrate(reference, checked, able, dense, units, ways.progress)
        rows = [_measured(r, accuracy) for r in rows]
    return Result(
        with_weights(whole, checked), tuple(rows), ways.permute, accuracy, patterns.shared, added.unknown, ways.separate
    )


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The common patterns of sums. `masks`: layer -> a boolean array, true for weights that stay; `sum_of`: layer -> node of
    its sum.

    `shared`: the result's row for each sum.
    """

    masks: Mapping[str, np.ndarray]
    sum_of: Mapping[str, str]
    shared: tuple[Shared, ...]


def _patterns(found: Sequence[Sum], chosen: Sequence[Weight], own: Mapping[str, str]) -> _Patterns:
    """Returns the common patterns of branches that may run as one convolution; sums without a pruned branch are left out.

    `chosen`: the weights to prune; `own`: layer -> its weight, if no other layer reads it.
    """
    names = {w.name for w in chosen}
    prunable = {layer for layer, name in own.items() if name in names}
    masks, sum_of, shared = dict[str, np.ndarray](), dict[str, str](), list[Shared]()
    for s in found:
        layers = tuple(b.conv for b in s.branches)
        if not any(layer in prunable for layer in layers):
            continue
        one = common(s, prunable)
        energy = float(np.square(s.w).sum())
        shared.append(Shared(s.node, layers, None if one.against else one.lost / energy if energy else 0.0, one.against))
        masks |= one.masks
        sum_of |= dict.fromkeys(one.masks, s.node)
    return _Patterns(masks, sum_of, tuple(shared))


def _ordered(checked: onnx.ModelProto, found: Found, ways: _Ways) -> Found:
    """Reorders channels of the model in place, so that pruning the chosen weights loses less energy.

    `found`: (a row for each weight, the weights to prune). Returns both anew: rows with the energy that is lost without the new
    order, and why a weight's channels could not move; weights in the new order.
    """
    rows, chosen = found
    unpermuted = {w.name: as_stored(_values(w), w.axis).lost_energy for w in chosen}
    fixed = [r.weight for r in rows if r.stored and r.stored.fits]  # reordering must not destroy existing 2:4 patterns
    moving = [w for w in chosen if w.name not in fixed]
    unmoved = channels.unmoved(channels.permute(checked, moving, ways.shapes, fixed, ways.progress), moving)
    rows = [replace(r, unpermuted=unpermuted.get(r.weight), unmoved=unmoved.get(r.weight, "")) for r in rows]
    return rows, [w for w in _distinct(checked.graph) if w.name in unpermuted]


def _values(w: Weight) -> np.ndarray:
    values = w.values
    if values is None:
        raise ModelError(f"{w.name}: expected a stored weight")
    return values


def _distinct(graph: onnx.GraphProto) -> list[Weight]:
    return list({w.name: w for w in reversed(weights(graph))}.values())[::-1]


def _rows(graph: onnx.GraphProto, choice: Choice) -> Found:
    """Returns (a row for each weight, as if all chosen ones were pruned; the chosen weights). Raises ModelError."""
    found, rows, chosen = weights(graph), [], []
    layers = grouped((w.name, w.node.name) for w in found)
    _check_patterns((*(choice.only or ()), *choice.skip), layers)
    if not any(not w.reason for w in found):
        raise ModelError(NONE_CAN)
    for w in _distinct(graph):
        values, mine = w.values, tuple(layers[w.name])
        shape = None if values is None else tuple(values.shape)
        if w.reason or values is None:
            rows.append(Pruned(w.name, mine, shape, "kept", w.reason))
        elif why := choice.against(w.name, mine):
            rows.append(Pruned(w.name, mine, shape, "skipped", why, as_stored(values, w.axis)))
        else:
            stored = as_stored(values, w.axis)
            rows.append(Pruned(w.name, mine, shape, "2:4" if stored.fits else "pruned", "", stored))
            chosen.append(w)
    return rows, chosen


def _check_patterns(patterns: Collection[str], layers: Mapping[str, Sequence[str]]) -> None:
    for pattern in patterns:
        if not any(_matches(pattern, name, mine) for name, mine in layers.items()):
            names = [*layers, *(n for mine in layers.values() for n in mine)]
            close = difflib.get_close_matches(pattern, names, 3, 0.5)
            hint = (
                f"did you mean {', '.join(map(repr, close))}?" if close else f"expected a name such as {', '.join(names[-3:])}"
            )
            raise ModelError(f"no layer or weight is named {pattern!r}: {hint}")


def _measured(row: Pruned, accuracy: Calibrated) -> Pruned:
    alone = accuracy.alone.get(row.weight)
    if alone is None:
        return row
    row = replace(row, snr_db=alone.snr_db, agreement=alone.agreement, score=alone.score)
    return (
        replace(row, verdict="restored", reason="pruning it changes the outputs the most")
        if row.weight in accuracy.restored
        else row
    )
