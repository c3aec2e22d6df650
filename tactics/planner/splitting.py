"""Splits a graph whose tables are too wide into narrower graphs: one for each option of a few fusion groups.

The best plan of the graph is the best of its parts' plans, since exactly one option of a group is taken. One group is often
enough: an option that moves many tensors to other channels brings together the formats of all of them.
"""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from tactics.planner import eliminate, formulation
from tactics.planner.formulation import Model
from tactics.planner.graph import Graph, Impossible, tensors_of

MOST_GROUPS = 3  # groups by which a graph is split, one after the other
MOST_TRIED = 8  # groups that are tried for each split

_Part = tuple[Model, list[int]]  # (a part of the graph, the variables that elimination leaves in it)


def parts(model: Model, max_cells: int) -> list[Model]:
    """Returns models of parts of the graph that elimination can solve with tables of at most `max_cells` cells; [] if a split
    by MOST_GROUPS groups does not suffice.

    Each plan of the graph is a plan of exactly one part.
    """
    found = [_part(model, max_cells)]
    for _ in range(MOST_GROUPS):
        each = [_split(part, max_cells) if part[-1] else [part] for part in found]
        found = [part for split in each for part in split or ()]
        if None in each:
            return []
        if not any(core for _, core in found):
            return [part for part, _ in found]
    return []


def restricted(graph: Graph, group: str, option: str) -> Graph | None:
    """Returns the graph with only one option of a group; None where an op would read a tensor that nothing makes."""
    groups = tuple((g, (option,) if g == group else names) for g, names in graph.groups)
    choices = []
    for c in graph.choices:
        if any(g == group for g, _ in c.when):
            if (group, option) not in c.when:
                continue
            c = replace(c, when=tuple((g, o) for g, o in c.when if g != group or o == option))
        choices.append(c)
    found = replace(graph, groups=groups, choices=tuple(choices))
    made = {*tensors_of(found)}
    return found if made.issuperset((*graph.outputs, *(t for c in choices for t in c.inputs))) else None


def _part(model: Model, max_cells: int) -> _Part:
    return model, eliminate.core(model.sizes, model.factors, max_cells)


def _split(part: _Part, max_cells: int) -> list[_Part] | None:
    """Splits a part by the group that leaves the fewest variables to eliminate; returns the new parts that have a plan, or None
    if no group can be split.
    """
    (model, core), tried = part, list[tuple[int, int, list[Graph]]]()
    for group in _candidates(model, core)[:MOST_TRIED]:
        options = dict(model.graph.groups)[group]
        found = [restricted(model.graph, group, option) for option in options]
        if all(g is not None for g in found):
            left = sum(_left(model, group, state, max_cells) for state in range(len(options)))
            tried.append((left, len(tried), [g for g in found if g is not None]))
    if not tried:
        return None
    made = []
    for g in min(tried, key=lambda t: t[:2])[2]:
        with contextlib.suppress(Impossible):
            made.append(_part(formulation.model_of(g), max_cells))
    return made


def _left(model: Model, group: str, state: int, max_cells: int) -> int:
    """Estimates how many variables elimination leaves if a group has one option: the ops of its other options are gone, but
    tensors keep the formats that only those used.
    """
    v, _ = model.groups[group]
    sizes = [1 if u == v else n for u, n in enumerate(model.sizes)]
    factors = [(scope, table.take([state], scope.index(v)) if v in scope else table) for scope, table in model.factors]
    return len(eliminate.core(sizes, [(scope, table) for scope, table in factors if table.any()], max_cells))


def _candidates(model: Model, core: Collection[int]) -> Sequence[str]:
    """Returns the groups with several options that decide about ops of the variables in `core`, the group with most such ops
    first.
    """
    graph = model.graph
    inside, counts = set(core), dict.fromkeys((g for g, names in graph.groups if len(names) > 1), 0)
    for i, c in enumerate(graph.choices):
        if not inside.isdisjoint(formulation.tensors(model, i)):
            for group in {g for g, _ in c.when} & counts.keys():
                counts[group] += 1
    return sorted((g for g, n in counts.items() if n), key=lambda g: -counts[g])
