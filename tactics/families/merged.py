"""Groups of a convolution merged into products of matrices, and the K to which their weights are padded."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tactics.format import padded_channels
from tactics.problems.problem import ConvProblem

K_STAGE = 64  # packed weights are padded along K to this, so that every tile of a kernel reads the same bytes


@dataclass(frozen=True, slots=True)
class Merged:
    """A grouped convolution as `count` ordinary ones like `one`, each with `groups` of its groups side by side.

    `parts`: the number of matrix products, each with its own tiles: one per convolution, times images if there is a gate. For
    each product: `k`, the padded K; `pixels`; output `channels`, before padding.
    """

    one: ConvProblem
    count: int
    groups: int
    parts: int
    k: int
    pixels: int
    channels: int


@lru_cache(maxsize=4096)
def merged(p: ConvProblem) -> Merged:
    """Packs groups block-diagonally, until their channels start and end at multiples of 8, and further as long as the number of
    MMAs falls.
    """
    found, b = [], p.epilogue.d2s
    images = p.n if p.prologue.gated else 1
    for groups in _divisors(p.groups):
        c, k, count = groups * (p.c // p.groups), groups * (p.k // p.groups), p.groups // groups
        # Depth-to-space: in mode crd the channels of one group become whole channels of y, in mode dcr corners of all.
        stored = k // b**2 if k % b**2 == 0 and (b == 1 or p.epilogue.d2s_mode == "crd") else 1
        if count == 1 or c % 8 == stored % 8 == 0:
            one = replace(p, c=c, k=k, groups=1)
            channels = (p if count == 1 else one).out_shape[1]
            m = Merged(one, count, groups, count * images, padded_k(one), p.n // images * p.p * p.q, channels)
            found.append((count * -(-k // 16) * m.k, groups, m))
    return min(found)[2]


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def padded_k(problem: ConvProblem) -> int:
    """Returns the logical K of the packed weights: taps x channels padded to 8, padded to whole stages of 64."""
    return -(-problem.r * problem.s * padded_channels("hwc8", problem.c) // K_STAGE) * K_STAGE
