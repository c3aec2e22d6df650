"""Makes the network for smaller inputs, if the model's sizes are dynamic: its tensors' magnitudes stand for the large one's."""

import itertools
import math
from collections.abc import Iterator, Mapping

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from gpu_runtime.network import Network
from gpu_runtime.precision import execution

SMALLEST = 32  # for a chosen height or width
TRIES = 3  # networks tried per budget
Shapes = Mapping[str, tuple[int, ...]]


def smaller(loaded: importer.Loaded, network: Network, images: bool) -> Network | None:
    """Returns the model for smaller inputs (with `images`, only for fewer images): the largest within QUICK, else the smallest
    within MOST, else None.

    `network`: the model for the requested sizes.
    """
    sizes = {t.name: t.shape for t in network.inputs}
    axes = {name: tuple(a for a in found if not a or not images) for name, found in loaded.open_axes.items()}
    share = execution.multiplications(network) / _elements(sizes)
    tried = list(smaller_sizes(sizes, axes))
    quick = [shapes for shapes in tried if share * _elements(shapes) <= execution.QUICK.macs]
    for shapes, budget in [(s, execution.QUICK) for s in quick[:TRIES]] + [(s, execution.MOST) for s in tried[::-1][:TRIES]]:
        try:
            found = fuse.fuse(lower.lower(importer.sized(loaded, shapes)))
        except ModelError:  # something else fixes its size
            continue
        if not execution.too_large(found, budget):
            return found
    return None


def smaller_sizes(sizes: Shapes, open_axes: Mapping[str, tuple[int, ...]]) -> Iterator[Shapes]:
    """Yields decreasing sizes that the model allows: one image, then half the height and width, and so on.

    A common divisor of a size and 32 also divides the smaller size, because networks halve their images.
    """
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
