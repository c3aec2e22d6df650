"""A network for smaller inputs, where the model leaves their sizes open: what its tensors reach there tells what they reach."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.source import Source
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from gpu_runtime.network import Network
from gpu_runtime.precision import ranges

SMALLEST = 32  # of a height or a width that is chosen
TRIES = 3  # networks that are made
Shapes = Mapping[str, tuple[int, ...]]


def smaller(source: Path | Source, imported: importer.Imported, network: Network, *, prune: bool) -> Network | None:
    """The model of `source` for inputs so small that it is run quickly, None if there are none. `imported`, `network`: of that
    model for the sizes asked for."""
    macs, sizes = ranges.multiplications(network), {t.name: t.shape for t in network.inputs}
    most = ranges.QUICK[0] * _elements(sizes)
    fit = (shapes for shapes in smaller_sizes(sizes, imported.open_axes) if macs * _elements(shapes) <= most)
    for shapes in itertools.islice(fit, TRIES):
        try:
            found = lower.lower(fuse.fuse(importer.read(source, shapes=shapes, prune=prune, masks=imported.masks)))
        except ModelError:  # it has another reason for its size
            continue
        if not ranges.too_large(found, *ranges.QUICK):
            return found
    return None


def smaller_sizes(sizes: Shapes, open_axes: Mapping[str, tuple[int, ...]]) -> Iterator[Shapes]:
    """Ever smaller sizes that the model allows: one image, then half the height and width, and so on. What divides a size and
    32 divides the smaller one too, since networks halve their images."""
    chosen = {name: (1, *dims[1:]) if 0 in open_axes.get(name, ()) and dims else dims for name, dims in sizes.items()}
    if chosen != sizes:
        yield chosen
    before = chosen
    for halvings in itertools.count(1):
        found = {
            name: tuple(_scaled(d, halvings) if i and i in open_axes.get(name, ()) else d for i, d in enumerate(dims))
            for name, dims in chosen.items()
        }
        if found == before:
            return
        yield found
        before = found


def _scaled(size: int, halvings: int) -> int:
    step = math.gcd(size, SMALLEST)
    return min(size, max(SMALLEST, step * round(size / 2**halvings / step)))


def _elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))
