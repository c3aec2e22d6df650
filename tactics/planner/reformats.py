"""Reformats: the cost of having a tensor in several formats, and of a plan with its reformats.

A tensor is produced in one format, and its others are made from this one or from one made before, so a chain's first hop serves
every reader of that format. Each (tensor, target format) is made and charged once, however many ops read it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from tactics.format import Key
from tactics.planner.factors import NEVER
from tactics.planner.graph import Choice, Entry, Graph, Hop, formats_of, holds, tensors_of
from tactics.planner.grouping import grouped


def cost(
    graph: Graph, options: Mapping[str, str], entries: Mapping[str, Entry], copies: Mapping[str, Copies] | None = None
) -> tuple[int, tuple[Hop, ...]]:
    """Returns (total_ps, reformats): the least time of these entries together with the reformats that they need. Raises
    ValueError if no reformats suffice.

    `copies`: the reformat tables of all tensors, if they are known already.
    """
    live = [c for c in graph.choices if holds(c.when, options)]
    made = {t: graph.pinned[t] for t in graph.inputs} | {c.output: entries[c.name].out for c in live}
    wanted = _wanted(graph, live, entries, made)
    todo = [t for t, formats in wanted.items() if formats - {made[t]}]
    copies = copies or copies_of(graph, todo, 1, 0)
    reformats: list[Hop] = []
    for t in todo:
        hops = copies[t].hops(made[t], wanted[t])
        if hops is None:
            raise ValueError(f"tensor {t}: no reformats lead from {made[t]} to {', '.join(sorted(map(str, wanted[t])))}")
        reformats += [(t, src, dst) for src, dst in hops]
    total = sum(entries[c.name].time_ps for c in live) + sum(hop_ps(graph, hop) for hop in reformats)
    return total, tuple(reformats)


def _wanted(graph: Graph, live: list[Choice], entries: Mapping[str, Entry], made: Mapping[str, Key]) -> dict[str, set[Key]]:
    """Returns tensor -> the formats in which it is read, or bound as an output, for the tensors that exist."""
    reads = [(t, f) for c in live for t, f in zip(c.inputs, entries[c.name].ins, strict=True)]
    if lost := [t for t in (*(t for t, _ in reads), *graph.outputs) if t not in made]:
        raise ValueError(f"tensor {lost[0]} is read, but no op in the plan produces it")
    wanted: dict[str, set[Key]] = {t: set() for t in tensors_of(graph) if t in made}
    for t, f in (*reads, *((t, graph.pinned.get(t, made[t])) for t in graph.outputs)):
        wanted[t].add(f)
    return wanted


def hop_ps(graph: Graph, hop: Hop) -> int:
    """Returns the picoseconds of a reformat in a plan. Raises ValueError if no kernel does it."""
    time = graph.reformat_ps(*hop)
    if time is None:
        raise ValueError(f"reformat of {hop[0]} from {hop[1]} to {hop[2]}: no kernel does it")
    return time


@dataclass(frozen=True, slots=True)
class Copies:
    """The costs of a tensor's reformats, by the set A of formats to have (a bit mask, bit i: formats[i]) and the produced
    format p.

    `step[a, b]`: one reformat from a to b. `near[A, f]`: the cheapest reformat to f from a member of A. `exact[A, p]`: making
    exactly the formats of A, of which p is one. `serve[A, p]`: making at least the formats of A; its reformats may pass through
    others.

    With formats a, b, c and steps a -> b 5, b -> c 2, a -> c 9: exact[{a, b, c}, a] = serve[{c}, a] = 7, as c is made from b.
    """

    formats: tuple[Key, ...]
    step: np.ndarray
    near: np.ndarray
    exact: np.ndarray
    serve: np.ndarray

    def mask(self, formats: Iterable[Key]) -> int:
        mask = 0
        for f in formats:
            mask |= 1 << self.formats.index(f)
        return mask

    def hops(self, produced: Key, wanted: Iterable[Key]) -> list[tuple[Key, Key]] | None:
        """Returns the cheapest list of (src, dst) that makes `wanted` from `produced`, sources first; None if that is
        impossible.
        """
        p, need = self.formats.index(produced), self.mask(wanted)
        least = int(self.serve[need, p])
        if least >= NEVER:
            return None
        sets = [a for a in range(len(self.exact)) if a & need == need and self.exact[a, p] == least]
        made = min(sets, key=lambda a: (a.bit_count(), a))
        hops = []
        while made != 1 << p:  # undo the reformats, the last one first
            members = [f for f in range(len(self.formats)) if made >> f & 1]
            for f in members:
                before = made & ~(1 << f)
                if f != p and self.exact[before, p] + self.near[before, f] == self.exact[made, p]:
                    src = min((a for a in members if a != f), key=self.step[:, f].__getitem__)
                    hops.append((self.formats[src], self.formats[f]))
                    made = before
                    break
        return hops[::-1]


def copies_of(graph: Graph, tensors: list[str], scale: int, launch: int) -> dict[str, Copies]:
    """Computes the reformat tables of these tensors; a reformat costs its picoseconds * scale + launch.

    Tensors with the same number of formats are computed together, as arrays whose first axis is the tensor.
    """
    found: dict[str, Copies] = {}
    for n, all_ts in grouped((len(formats_of(graph, t)), t) for t in tensors).items():
        rows = {t: (formats_of(graph, t), _steps(graph, t, scale, launch)) for t in all_ts}
        first: dict[tuple, str] = {}  # tensors with equal formats and steps share their tables
        alike = {t: first.setdefault(row, t) for t, row in rows.items()}
        ts = [*first.values()]
        step = np.array([rows[t][1] for t in ts], np.int64).reshape(len(ts), n, n)
        near = np.full((len(ts), 1 << n, n), NEVER, np.int64)
        exact = np.full((len(ts), 1 << n, n), NEVER, np.int64)
        for f in range(n):  # sets whose highest member is f: a set of lower members, and f
            np.minimum(near[:, : 1 << f], step[:, f, None], out=near[:, 1 << f : 2 << f])
            exact[:, 1 << f, f] = 0
        for sets, members in _sets_by_size(n):  # a set from its subsets without one member: any member may be made last
            before = sets[:, None] ^ (1 << members)
            ways = exact[:, before] + near[:, before, members, None]
            exact[:, sets] = np.minimum(ways.min(axis=2), exact[:, sets])
        serve = exact.copy()
        for f in range(n):  # minimum over supersets, one format at a time
            pairs = serve.reshape(len(ts), -1, 2, 1 << f, n)
            np.minimum(pairs[:, :, 0], pairs[:, :, 1], out=pairs[:, :, 0])
        tables = {t: Copies(rows[t][0], step[i], near[i], exact[i], serve[i]) for i, t in enumerate(ts)}
        found |= {t: tables[alike[t]] for t in all_ts}
    return found


@cache
def _sets_by_size(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, for k = 2 to n, (all sets of k of n formats as bit masks, the k members of each)."""
    chosen = [np.array([*itertools.combinations(range(n), k)]) for k in range(2, n + 1)]
    return [((1 << members).sum(axis=1), members) for members in chosen]


def _steps(graph: Graph, tensor: str, scale: int, launch: int) -> tuple[tuple[int, ...], ...]:
    formats = formats_of(graph, tensor)
    rows = []
    for src in formats:
        times = [0 if src == dst else graph.reformat_ps(tensor, src, dst) for dst in formats]
        if any(ps is not None and ps < 0 for ps in times):
            raise ValueError(f"tensor {tensor}: a reformat from {src} takes negative time")
        rows.append(tuple(NEVER if ps is None or ps >= NEVER else ps * scale + launch for ps in times))
    return tuple(rows)
