"""Loads the model at the planned sizes, and lowers it."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.source import Source, stem_of
from gpu_runtime.frontend.queries import name_of, shape_of
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from gpu_runtime.network import Network
from gpu_runtime.progress import Listener, Progress, ignore

Shapes = Mapping[str, tuple[int, ...]]


def load(
    source: Path | Source,
    sizes: Callable[[importer.Loaded], list[Shapes | None]],
    prune: bool,
    save_pruned: BinaryIO | None = None,
) -> tuple[importer.Loaded, list[Shapes | None]]:
    """Returns (the loaded model, the sizes of its inputs for each plan: a mapping of shapes, or None for the model's own).

    `sizes`: computes the sizes from the loaded model. `prune`: weights are pruned to 2:4, and branches that may become one
    convolution get one common pattern; to find them the model is imported twice. `save_pruned`: a file to which the pruned
    model is written; None: it is not written. Raises ModelError.
    """
    loaded = importer.load(source)
    points = sizes(loaded)
    if not prune:
        return loaded, points

    before = importer.sized(loaded, points[0])
    points[0] = {name_of(v): shape_of(v) for v in before.model.graph.inputs}  # of all, to warn once
    return importer.load(source, prune=True, masks=fuse.common_masks(before), save_pruned=save_pruned), points


def lowered(loaded: importer.Loaded, shapes: Shapes | None, progress: Listener = ignore) -> Network:
    """Imports the model at these input shapes, lowers and fuses it, and returns its network with all floating-point tensors in
    FP16.

    The network is not yet fitted: precision.ranges.fit later scales tensors, or moves them to FP32, so that their values do
    not overflow FP16. `shapes`: input -> shape, for inputs whose shape the model leaves open; None: the model's own shapes.
    Raises ModelError.
    """
    progress(Progress("lower", stem_of(loaded.source)))
    network = fuse.fuse(lower.lower(importer.sized(loaded, shapes)))
    gc.collect(0)  # the model's graph, in cycles with its weights
    return network


def shared(network: Network, first: Network) -> Network:
    """Returns the network with the arrays of `first` where it has equal weights: plans of many batches hold them once."""
    known = {op.name: op.weights for op in first.ops}

    def same(name: str, weights: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        others = known.get(name, {})
        return {k: others[k] if k in others and np.array_equal(others[k], w) else w for k, w in weights.items()}

    return replace(network, ops=tuple(replace(op, weights=same(op.name, op.weights)) for op in network.ops))
