"""Computes the position of each channel of each tensor if every channel slice that is split off or joined begins at a whole
vector of 8 channels.

Tensors that share channels through an op are cut alike: where a Split or a Concat cuts one tensor, the tensors that are added
to it, pooled or split from it are cut too. The channels between two cuts are a slice; every slice that another one follows is
padded to whole vectors. So all tensors that contain a slice have the same layout of it, and one tensor can lie inside the
other.

If the readers of a slice have 2:4 weights, its first channel keeps its position modulo 4 in the tensor they read: four channels
of the padded tensor are then channels of one group of the original tensor, and zeros.

In the example, x has 52 channels: its first 26 are tensor a, its last 26 tensor b. The second slice begins at channel 32.

>>> slices = ChannelSlices([Link("x", 0, "a", 0, 26), Link("x", 26, "b", 0, 26)], {"x": 52, "a": 26, "b": 26}, {})
>>> slices.size("x"), slices.size("a"), slices.slots("x")[25:28]
(58, 32, (25, 32, 33))
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tactics.planner.grouping import Together, grouped

VECTOR = 8
SliceStart = tuple[str, int]  # (tensor, its channel at which the slice begins)


@dataclass(frozen=True, slots=True)
class Link:
    """Channels `a_first` .. + `count` of tensor `a` have the same layout as `count` channels of `b` from `b_first` on."""

    a: str
    a_first: int
    b: str
    b_first: int
    count: int

    def turned(self) -> Link:
        return Link(self.b, self.b_first, self.a, self.a_first, self.count)


class ChannelSlices:
    """The channel slices of all tensors. `channels`: the number of channels of every tensor.

    `phases`: (tensor, first channel of a slice) -> the position modulo 4 at which the slice must begin; if several tensors give
    one for a slice, the first counts.
    """

    def __init__(self, links: Sequence[Link], channels: Mapping[str, int], phases: Mapping[SliceStart, int]) -> None:
        self._channels = channels
        self._links = grouped((way.a, way) for link in links for way in (link, link.turned()))
        self._cuts: dict[str, set[int]] = {t: {0} for t in self._links}
        self._cut()
        self._alike: Together[SliceStart] = Together()
        cuts = {t: sorted(found) for t, found in self._cuts.items()}
        for link in links:
            first, end = (bisect_left(cuts[link.a], at) for at in (link.a_first, link.a_first + link.count))
            for at in cuts[link.a][first:end]:
                self._alike.unite((link.a, at), (link.b, at - link.a_first + link.b_first))
        self._phase: dict[SliceStart, int] = {}
        for (t, at), phase in phases.items():
            for cut in self._cuts.get(t, ()):
                if cut == at:
                    self._phase.setdefault(self._alike.root((t, cut)), phase)
        self._followed = {self._alike.root((t, at)) for t in self._cuts for at, _ in self._in(t)[:-1]}

        self._known: dict[str, tuple[int, tuple[int, ...]]] = {}

    def size(self, tensor: str) -> int:
        """Returns the number of channels of the padded tensor."""
        return self._layout(tensor)[0]

    def slots(self, tensor: str) -> tuple[int, ...]:
        """Returns the position in the padded tensor of each channel of the tensor."""
        return self._layout(tensor)[1]

    def _layout(self, tensor: str) -> tuple[int, tuple[int, ...]]:
        if tensor not in self._known:
            self._known[tensor] = self._laid(tensor)
        return self._known[tensor]

    def _laid(self, tensor: str) -> tuple[int, tuple[int, ...]]:
        found: list[int] = []
        first = 0
        for at, count in self._in(tensor):
            start = first + self._phase.get(self._alike.root((tensor, at)), 0)
            found += range(start, start + count)
            first += self._width(tensor, at, count)
        return first, tuple(found)

    def moved(self, tensor: str) -> bool:
        """Whether the padded tensor has more channels than the tensor: between its slices, before the first or behind the
        last.
        """
        return tensor in self._cuts and self.size(tensor) != self._channels[tensor]

    def starts(self, tensor: str) -> list[int]:
        """Returns the channels of the tensor at which its slices begin, rising."""
        return sorted(self._cuts.get(tensor, {0}))

    def _in(self, tensor: str) -> list[tuple[int, int]]:
        """Returns (first channel, number of channels) of each slice of the tensor."""
        starts = self.starts(tensor)
        return [(a, b - a) for a, b in zip(starts, (*starts[1:], self._channels[tensor]), strict=True)]

    def _width(self, tensor: str, at: int, count: int) -> int:
        root = self._alike.root((tensor, at))
        end = self._phase.get(root, 0) + count
        return -(-end // VECTOR) * VECTOR if root in self._followed or end > count else count

    def _cut(self) -> None:
        """Cuts tensors until each that shares channels with a cut tensor is cut at the same channel."""
        todo = [(t, at) for t, links in self._links.items() for x in links for at in (x.a_first, x.a_first + x.count)]
        rising = {t: sorted(links, key=lambda link: link.a_first) for t, links in self._links.items()}
        firsts = {t: [link.a_first for link in links] for t, links in rising.items()}
        reach = {t: [*accumulate((x.a_first + x.count for x in links), max)] for t, links in rising.items()}
        while todo:
            t, at = todo.pop()
            if at in self._cuts[t] or at == self._channels[t]:
                continue
            self._cuts[t].add(at)
            i = bisect_right(firsts[t], at) - 1
            while i >= 0 and reach[t][i] > at:  # all earlier links end before `at`
                link = rising[t][i]
                if at < link.a_first + link.count:
                    todo.append((link.b, at - link.a_first + link.b_first))
                i -= 1
