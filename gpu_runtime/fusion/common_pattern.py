"""One 2:4 pattern for all branches of a sum, so that the one convolution that they may become has the pattern, too.

In each group of four input channels at one tap, the two channels with the largest merged weights stay. Some weights stay in
any case: the channel at which the sum adds the input itself, and the weights of a branch that is 2:4 already and must not
change. If these are more than two of four, there is no common pattern.

Example. A 3x3, a 1x1 and the input itself: at the tap in the middle of the 3x3, of the input channels 4 to 7 of output 5,
channel 5 stays, and the one of the others at which |w3 + w1| is largest; at the other taps the 3x3 keeps its two largest.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.fusion.branches import Branch, Sum

DIFFER = "its branches are 2:4 already, each with another pattern"
ITSELF = "its branch is 2:4 already, but its sum with the input is not"


@dataclass(frozen=True, slots=True)
class Common:
    """The common pattern of a sum. `masks`: convolution's node -> mask of the weights [K, C/groups, r, s] that stay, for
    branches without the pattern; `against`: the reason why there is no common pattern, or ""; `lost`: the sum of squares of the
    merged weights that the pattern sets to zero.
    """

    masks: Mapping[str, np.ndarray] = field(default_factory=dict)
    against: str = ""
    lost: float = 0.0


def common(s: Sum, prunable: Collection[str]) -> Common:
    """Returns the common pattern of a sum's branches. `prunable`: the convolutions whose stored weights may be changed."""
    if s.w.shape[1] % 4:
        return Common(against=no_fours(s))
    fixed = {b.conv: b for b in s.branches if sparse24.fits(b.w).all()}
    others = [b for b in s.branches if b.conv not in fixed]
    if not others and sparse24.fits(s.w).all():
        return Common()
    stays = held(s, fixed.values())
    if not sparse24.fits(stays).all():
        return Common(against=ITSELF if len(fixed) == 1 else DIFFER)
    if finer := [b for b in others if b.groups != s.groups]:
        return Common(against=f"{finer[0].conv} has {finer[0].groups} groups, and their sum {s.groups}")
    if dense := [b for b in others if b.conv not in prunable]:
        return Common(against=f"{dense[0].conv} is not 2:4 and is not pruned")
    keep = sparse24.prune(np.where(stays, np.inf, np.abs(s.w))) != 0
    return Common({b.conv: keep[_place(b)] for b in others}, "", float(np.square(np.where(keep, 0, s.w)).sum()))


def no_fours(s: Sum) -> str:
    channels = s.w.shape[1]
    if channels == 1 and s.groups > 1:
        return "depthwise: each output has one input channel"
    return f"{channels} input channels{' of each group' if s.groups > 1 else ''} are not a multiple of 4"


def held(s: Sum, branches: Iterable[Branch]) -> np.ndarray:
    """Marks the places of the sum's window at which these branches, or the input itself, are not zero: bool [K, C/groups, R,
    S]."""
    found = np.zeros(s.w.shape, bool)
    for b in branches:
        found[_place(b)] |= b.w != 0
    if s.itself is not None:  # row i of the input itself is its channel i
        row, each = np.arange(len(s.w)), len(s.w) // s.groups
        found[row, row - row // each * s.w.shape[1], *s.itself] = True
    return found


def _place(b: Branch) -> tuple[slice, slice, slice, slice]:
    (top, left), (_, _, r, s) = b.at, b.w.shape
    return slice(None), slice(None), slice(top, top + r), slice(left, left + s)
