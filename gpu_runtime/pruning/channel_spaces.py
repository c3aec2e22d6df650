"""Finds the channels of a network that may change places without changing its outputs.

Every tensor has labels: the channel at each position of the axes with channels. A convolution makes new channels; an Add
identifies the channels at the same position of its inputs; a Concat joins channels; a grouped convolution keeps each channel in
its group; an operator that may treat channels differently pins the channels of its inputs to their places (channel_rules.py has
one rule per operator). Identified channels form a class. Two classes may change places if they occur alike on every recorded
axis; such classes form a space.

Proof: let t be a permutation of the classes of a space. On each axis it induces a permutation of positions, p -> q, where q has
class t(class of p) under p's tag. A tag distinguishes the occurrences of a class on one axis (the piece of a Concat, the pixel
of a flattened image); a class that occurs twice under one tag is pinned. A rule accepts an operator only if it commutes with
these permutations. So all tensors, and the constants with them, are permuted along their labels, and the network's outputs,
which are pinned, stay unchanged. Sums are taken in another order: equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tactics.planner.grouping import grouped

MOST_LABELS = 1 << 20  # of one tensor; larger tensors are pinned


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a tensor: the number of the channel (`ids`) and a tag at each position.

    Both arrays have the tensor's rank, and size 1 along axes without channels.
    """

    ids: np.ndarray
    tags: np.ndarray

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the tensor along which its elements belong to different channels: those of more than one label."""
        return tuple(i for i, size in enumerate(self.ids.shape) if size > 1)

    @property
    def flat(self) -> Labels:
        return Labels(self.ids.reshape(-1), self.tags.reshape(-1))

    def along(self, axis: int, rank: int) -> Labels:
        """Returns labels of one axis, reshaped to a tensor of that rank with the channels on `axis`."""
        shape = [1] * rank
        shape[axis] = self.ids.size
        return Labels(self.ids.reshape(shape), self.tags.reshape(shape))


@dataclass(frozen=True, slots=True)
class ConstantAxis:
    """An axis of a constant that moves with channels. `part` of `parts`: the block of axis 0 (the columns of a grouped
    convolution's weights are different channels in each group)."""

    name: str
    axis: int
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Port:
    """The places of a space's channels on a constant's axis: `positions` [channels], in the order of the space's classes."""

    constant: ConstantAxis
    positions: np.ndarray


@dataclass(frozen=True, slots=True)
class Space:
    """`size` channels that may change places with each other, and their places in constants (`ports`)."""

    size: int
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class Spaces:
    """The found spaces, each of at least two channels. `pins`: constant axis -> why none of its channels can move."""

    spaces: tuple[Space, ...]
    pins: Mapping[ConstantAxis, str]


@dataclass(slots=True)
class Recorder:
    """The collected results of the rules. An element is a channel of one tensor at one position.

    `elements`, `blocks`, `tags`: the numbers given so far; `edges`: pairs of id arrays that are the same channels; `records`:
    (ids, block of each, tag of each) of each axis; `pins`: ids that keep their places, and why; `constants`: the labels along
    an axis of a constant; `parts`: the number of parts of an axis.
    """

    elements: int = 0
    blocks: int = 0
    edges: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    records: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)  # ids, blocks, tags
    pins: list[tuple[np.ndarray, str]] = field(default_factory=list)
    constants: dict[ConstantAxis, Labels] = field(default_factory=dict)
    parts: dict[tuple[str, int], int] = field(default_factory=dict)
    tags: dict[tuple[object, ...], int] = field(default_factory=dict)

    def fresh(self, size: int, blocks: np.ndarray | None = None) -> Labels:
        """Returns labels of `size` new channels on an axis of their own.

        `blocks`: the number of each channel's block; only channels of one block may change places. None: all may.
        """
        ids = np.arange(self.elements, self.elements + size)
        self.elements += size
        return self.record(Labels(ids, np.zeros(size, np.int64)), blocks)

    def pinned(self, size: int, why: str) -> Labels:
        """Returns labels of `size` new channels that all keep their places, for the reason `why`."""
        labels = self.fresh(size, np.arange(size))
        self.pins.append((labels.ids, why))
        return labels

    def record(self, labels: Labels, blocks: np.ndarray | None = None) -> Labels:
        """Records these labels as an axis and returns them. `blocks`: the block of each channel, in which it must stay; None:
        one for all.
        """
        within = np.zeros(labels.ids.size, np.int64) if blocks is None else blocks
        self.records.append((labels.ids.reshape(-1), self.blocks + within, labels.tags.reshape(-1)))
        self.blocks += int(within.max(initial=0)) + 1
        return labels

    def pin(self, labels: Labels | None, why: str) -> None:
        if labels is not None:
            flat = labels.flat
            self.record(flat, np.arange(flat.ids.size))
            self.pins.append((flat.ids, why))

    def join(self, a: Labels, b: Labels) -> Labels:
        """Records that a and b, of one shape, have the same channels at the same positions; returns the labels for both."""
        if a.ids is not b.ids:
            self.edges.append((a.ids.reshape(-1), b.ids.reshape(-1)))
        if not np.array_equal(a.tags, b.tags):
            pairs, which = np.unique(np.stack([a.tags.reshape(-1), b.tags.reshape(-1)]), axis=1, return_inverse=True)
            numbers = np.array([self.tag("pair", *map(int, pair)) for pair in pairs.T])
            self.record(Labels(a.ids.reshape(-1), numbers[which.reshape(-1)]))
        return a

    def tag(self, *key: object) -> int:
        return self.tags.setdefault(key, len(self.tags) + 1)

    def retagged(self, tags: np.ndarray, *key: object) -> np.ndarray:
        """Returns new tags of the same shape: equal tags stay equal, and none equals a tag of another key."""
        kinds, which = np.unique(tags, return_inverse=True)
        return np.array([self.tag(int(t), *key) for t in kinds])[which].reshape(tags.shape)

    def use(self, name: str, dims: Sequence[int], moving: Mapping[int, Sequence[Labels]], why: str) -> None:
        """Records that a node reads a constant.

        `moving`: the labels of axes that move with channels, one for each part of the axis. Every other axis must stay, for the
        reason `why`.
        """
        for axis, size in enumerate(dims):
            if size > 1 and axis not in moving:
                self._use(name, axis, [self.pinned(size, why)])
        for axis, parts in moving.items():
            self._use(name, axis, parts)

    def _use(self, name: str, axis: int, parts: Sequence[Labels]) -> None:
        if self.parts.setdefault((name, axis), len(parts)) != len(parts):
            for labels in (*(v for k, v in self.constants.items() if (k.name, k.axis) == (name, axis)), *parts):
                self.pin(labels, f"{name} is read by grouped and by ungrouped nodes")
            return
        for i, labels in enumerate(parts):
            key = ConstantAxis(name, axis, i, len(parts))
            if key in self.constants:
                self.join(self.constants[key], labels)
            else:
                self.constants[key] = labels

    def spaces(self) -> Spaces:
        """Returns the spaces: classes (channels that are the same in several tensors) with the same signature may change
        places.
        """
        classes = self._classes()
        groups = grouped((signature, c) for c, signature in enumerate(self._signatures(classes)))
        space_of, rank = np.full(len(classes) and classes.max() + 1, -1), np.zeros(len(classes) and classes.max() + 1, np.int64)
        sizes: list[int] = []
        for members in groups.values():
            if len(members) > 1:
                space_of[members], rank[members] = len(sizes), np.arange(len(members))
                sizes.append(len(members))
        ports: list[list[Port]] = [[] for _ in sizes]
        why = {int(classes[i]): text for ids, text in reversed(self.pins) for i in ids}
        pins = {}
        for key, labels in self.constants.items():
            flat = classes[labels.ids]
            found = _ports(key, space_of[flat], rank[flat], labels.tags)
            for space, port in found:
                ports[space].append(port)
            if not found:
                pins[key] = next((why[int(c)] for c in flat if int(c) in why), "no two of its channels can be exchanged")
        return Spaces(tuple(Space(n, tuple(p)) for n, p in zip(sizes, ports, strict=True) if p), pins)

    def _classes(self) -> np.ndarray:
        """Returns for each element the number of its class: elements that `join` put at the same channel, directly or through
        others, are one class."""
        if not self.edges:
            return np.arange(self.elements)
        a, b = (np.concatenate([e[i] for e in self.edges]) for i in (0, 1))
        graph = coo_array((np.ones(a.size, np.int8), (a, b)), shape=(self.elements, self.elements))
        return connected_components(graph, directed=False)[1].astype(np.int64)

    def _signatures(self, classes: np.ndarray) -> list[bytes]:
        """Returns each class's blocks and tags; a unique signature if it occurs twice on an axis under one tag."""
        if not self.records:
            return []
        axis = np.concatenate([np.full(ids.size, i) for i, (ids, _, _) in enumerate(self.records)])
        ids, blocks, tags = (np.concatenate([r[i] for r in self.records]) for i in range(3))
        rows = np.stack([classes[ids], axis, tags, blocks], axis=1)
        rows = rows[np.lexsort(rows.T[::-1])]
        twice = np.zeros(len(rows), bool)
        twice[1:] = (rows[1:, :3] == rows[:-1, :3]).all(axis=1)
        stuck = set(rows[twice, 0].tolist())
        starts = np.flatnonzero(np.r_[True, rows[1:, 0] != rows[:-1, 0]])
        found = [b""] * (int(classes.max()) + 1)
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            c = int(rows[start, 0])
            found[c] = b"pinned %d" % c if c in stuck else np.ascontiguousarray(rows[start:end, 1:]).tobytes()
        return found


def _ports(key: ConstantAxis, spaces: np.ndarray, ranks: np.ndarray, tags: np.ndarray) -> list[tuple[int, Port]]:
    """Returns (number of the space, its port) for each space and tag on a constant's axis."""
    found = []
    for space, tag in {*zip(spaces.tolist(), tags.tolist(), strict=True)}:
        if space >= 0:
            here = np.flatnonzero((spaces == space) & (tags == tag))
            positions = np.empty(here.size, np.int64)
            positions[ranks[here]] = here
            found.append((space, Port(key, positions)))
    return sorted(found, key=lambda f: (f[0], int(f[1].positions.min())))
