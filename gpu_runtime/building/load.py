"""Loads the model at the planned sizes, and lowers it."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gpu_runtime.frontend import importer
from gpu_runtime.frontend.queries import name_of, shape_of
from gpu_runtime.frontend.source import Source, stem_of
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
    """Returns the model, and the sizes of its inputs for each plan.

    If pruned, branches that may become one convolution get one common pattern; to find them takes an import before.
    """
    loaded = importer.load(source)
    points = sizes(loaded)
    if not prune:
        return loaded, points

    before = importer.sized(loaded, points[0])
    points[0] = {name_of(v): shape_of(v) for v in before.model.graph.inputs}  # of all, to warn once
    return importer.load(source, prune=True, masks=fuse.common_masks(before), save_pruned=save_pruned), points


def lowered(loaded: importer.Loaded, shapes: Shapes | None, progress: Listener = ignore) -> Network:
    """Returns the network for inputs of these shapes, in FP16 types, not yet fitted."""
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
