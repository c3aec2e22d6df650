"""A graph whose tables are too wide, as narrower ones: one for each option of a few fusion groups.

The best plan of the graph is the best of those of its parts, since exactly one option of a group is taken. One group is often
enough: an option that moves many tensors to other channels brings together the formats of all of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tactics.planner import eliminate, formulation
from tactics.planner.formulation import Model
from tactics.planner.graph import Graph, Impossible, tensors_of

MOST_GROUPS = 3  # split one after the other
MOST_TRIED = 8  # groups looked at for each of them


def parts(graph: Graph, max_cells: int) -> list[Graph]:
    """Graphs which elimination can solve with tables of at most `max_cells`, each plan of `graph` being one of exactly one of
    them; none where MOST_GROUPS groups do not suffice."""
    whole = [graph]
    for _ in range(MOST_GROUPS):
        each = [_split(g, max_cells) for g in whole]
        whole = [part for split in each if split for part in split]
        if None in each:
            return []
        if all(not _core(part, max_cells)[1] for part in whole):
            return whole
    return []


def restricted(graph: Graph, group: str, option: str) -> Graph | None:
    """The graph with one option of a group alone; None where an op is then to read what nothing makes."""
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


def _split(graph: Graph, max_cells: int) -> list[Graph] | None:
    """The graph itself if it is narrow enough, else its parts with a plan by the group that leaves the least to other means;
    None if no group can be split."""
    model, core = _core(graph, max_cells)
    if not core:
        return [graph]
    tried: list[tuple[int, int, list[Graph]]] = []
    for group in _candidates(graph, model, core)[:MOST_TRIED]:
        found = [restricted(graph, group, option) for option in dict(graph.groups)[group]]
        if all(part is not None for part in found):
            left = [(part, _left(part, max_cells)) for part in found if part is not None]
            able = [(part, n) for part, n in left if n is not None]
            tried.append((sum(n for _, n in able), len(tried), [part for part, _ in able]))
    return min(tried, key=lambda t: t[:2])[2] if tried else None


def _left(graph: Graph, max_cells: int) -> int | None:
    """How many variables elimination leaves; None where the graph has no plan."""
    try:
        return len(_core(graph, max_cells)[1])
    except Impossible:
        return None


def _core(graph: Graph, max_cells: int) -> tuple[Model, list[int]]:
    """The variables that elimination leaves because its tables would be too large."""
    model = formulation.model_of(graph, formulation.costs_of(graph))
    return model, eliminate.core(model.sizes, model.factors, max_cells)


def _candidates(graph: Graph, model: Model, core: Collection[int]) -> Sequence[str]:
    """The groups with several options that decide about ops of these variables, those of most ops first."""
    inside, counts = set(core), dict.fromkeys((g for g, names in graph.groups if len(names) > 1), 0)
    for i, c in enumerate(graph.choices):
        if not inside.isdisjoint(formulation.tensors(graph, model, i)):
            for group in {g for g, _ in c.when} & counts.keys():
                counts[group] += 1
    return sorted((g for g, n in counts.items() if n), key=lambda g: -counts[g])
