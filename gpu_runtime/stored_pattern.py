"""The 2:4 pattern of weights as a file stores them: what fits, and what pruning costs."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.text import share_text


@dataclass(frozen=True, slots=True)
class Stored:
    """The 2:4 pattern of weights as the file stores them, before anything is folded into them and before FP16.

    `groups`: number of 4-groups of input channels; `fitting`: those with at most 2 non-zeros; `energy`: sum of the squared
    weights; `lost`: the part of it that the nearest 2:4 pattern, which --sparsity=force prunes to, sets to zero; `elsewhere`:
    along what other axis or order they are 2:4, in words, or "".
    """

    groups: int
    fitting: int
    lost: float
    energy: float
    elsewhere: str = ""

    @property
    def fits(self) -> bool:
        return self.fitting == self.groups

    @property
    def share(self) -> float:
        return self.fitting / self.groups if self.groups else 1.0

    @property
    def lost_energy(self) -> float:
        """The share of the squared weights that pruning would set to zero, 0 to 0.5: the value that every command shows."""
        return self.lost / self.energy if self.energy else 0.0


def as_stored(w: np.ndarray, axis: int, before: Stored | None = None) -> Stored:
    """Measures the pattern of weights along an axis. `before`: of the same weights ahead of pruning, whose energies are
    kept.
    """
    ok = sparse24.fits(w, axis)
    energies = (before.lost, before.energy) if before else sparse24.energy(w, axis)
    return Stored(ok.size, int(ok.sum()), *energies, "" if ok.all() else elsewhere(w, axis))


# Orders of weights [K, C, taps] other than along C in which pruners have formed groups of 4, the last axis. K is the last axis
# of TensorFlow's kernels; torchao's sparsifier flattens a kernel; R x S x C is along C, where C is a multiple of 4.
ORDERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "the output channels (axis {out})": lambda v: np.moveaxis(v, 0, -1),
    "the kernel flattened to C x R x S": lambda v: v.reshape(len(v), -1),
    "the taps R x S of each channel": lambda v: v,
}
LEAST_FIT = 0.99  # share of groups from which an order is named: fine-tuning without a mask fills a few
MOST_DENSE = 0.6  # share of weights that are not zero: 2:4 leaves half
MOST_CHANCE = 0.95  # of a group to fit by its number of zeros alone: above it, 1:4 apart, uneven zeros look like a pattern
FALSE_ALARM = 1e-6  # probability that so many groups fit by chance, at most (Chernoff's bound)


def elsewhere(w: np.ndarray, axis: int) -> str:
    """Returns, in words, the other axis or order along which weights that do not fit along `axis` are 2:4; "" if there is none,
    or if chance may explain it.
    """
    if axis > 1 or w.ndim < 2 or np.count_nonzero(w) > MOST_DENSE * w.size:
        return ""  # of a stack of matrices, or dense as most are
    v = (w if axis else w.swapaxes(0, 1)).reshape(w.shape[1 - axis], w.shape[axis], -1) != 0
    alive = np.ones_like(v)  # outside of whole channels and taps that are zero, whose zeros are one choice each, not many
    for at in range(3):
        alive &= v.any(axis=tuple(i for i in range(3) if i != at), keepdims=True)
    dense = int(np.count_nonzero(v)) / (int(np.count_nonzero(alive)) or 1)
    chance = math.fsum(math.comb(4, n) * dense**n * (1 - dense) ** (4 - n) for n in range(3))
    if chance >= MOST_CHANCE or dense > MOST_DENSE:
        return ""
    for name, order in ORDERS.items():
        groups, whole = (a[..., : a.shape[-1] // 4 * 4].reshape(-1, 4) for a in (order(v), order(alive)))
        groups = groups[whole.all(axis=1)]
        share = float((np.count_nonzero(groups, axis=1) <= 2).mean()) if len(groups) else 0.0
        if share >= LEAST_FIT and len(groups) * _divergence(share, chance) > -math.log(FALSE_ALARM):
            along = name.format(out=1 - axis)
            if share == 1:
                return f"2:4 along {along}"
            return f"nearly 2:4 along {along}: {share_text(share)} of these groups fit, {share_text(chance)} by chance"
    return ""


def _divergence(share: float, chance: float) -> float:
    """Returns the Kullback-Leibler divergence of two coins' probabilities, the larger one first."""
    rest = (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    return share * math.log(share / chance) + rest if share > chance else 0.0


def together(parts: Iterable[Stored]) -> Stored:
    """Sums the counts and energies of several weights' patterns, as if they were one; all zero for none."""
    parts = list(parts)
    if not parts:
        return Stored(0, 0, 0.0, 0.0)
    rows, orders = [(p.groups, p.fitting, p.lost, p.energy) for p in parts], {p.elsewhere for p in parts}
    groups, fitting, lost, energy = (sum(column) for column in zip(*rows, strict=True))
    return Stored(int(groups), int(fitting), lost, energy, orders.pop() if len(orders) == 1 else "")
