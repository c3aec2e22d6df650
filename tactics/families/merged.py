"""Groups of a convolution merged into products of matrices, and the K to which their weights are padded."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tactics.format import padded_channels
from tactics.problems.problem import ConvProblem

K_STAGE = 64  # packed weights are padded along K to this, so that every tile of a kernel reads the same bytes


@dataclass(frozen=True, slots=True)
class Merged:
    """A grouped convolution as `count` convolutions without groups, each like `one`, of `groups` groups with block-diagonal
    weights.

    `parts`: the number of matrix products, each with tiles of its own: `count`, times images if there is a gate. Sizes of a
    product: `k`: padded_k of `one`; `pixels`; `channels`: output channels before padding.

    Example: 8 groups of 4 -> 4 channels, 3x3 taps: count 2, groups 4, `one` has 16 -> 16 channels.
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
    """Returns the merging with the fewest MMAs among those in which each convolution's channels start at a multiple of 8."""
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
    """Returns the K of the packed weights: taps x (channels padded to 8), padded to a multiple of K_STAGE."""
    return -(-problem.r * problem.s * padded_channels("hwc8", problem.c) // K_STAGE) * K_STAGE
