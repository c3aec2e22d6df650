"""The planner's view of a network: ops with their entries, tensors with their formats, fusion options; and a plan of it.

The planner compares keys for equality only, and tactics by name only, to break ties. A tensor is produced once, in one format;
its other formats are made by reformats (tactics.planner.reformats).

A time is a float of microseconds everywhere else, as it is measured, predicted and shown. Here it is an integer of picoseconds:
sums of integers are exact, so ties are ties, and a proof holds to the last digit. `to_ps` and `to_us` alone convert.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from operator import contains

from tactics.format import Key
from tactics.planner.factors import NEVER
from tactics.planner.grouping import each_once, grouped
from tactics.tactic import IN_PLACE, Tactic

MOST_STATES = 1 << 20  # combinations of the fusion groups that decide about one tensor or one op
MOST_ALIKE = 1000  # ops that have one name, or that produce one tensor
MAX_FORMATS = 12  # per tensor: its table of reformats has 2**formats rows
PS_PER_US = 1e6

Literals = tuple[tuple[str, str], ...]
Cell = tuple[tuple[Key, ...], Key]  # keys of an op's inputs, key of its output
Hop = tuple[str, Key, Key]  # a reformat: tensor, from, to


def to_ps(us: float, factor: float = 1.0) -> int:
    return round(us * PS_PER_US * factor)


def to_us(ps: int) -> float:
    return ps / PS_PER_US


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to run an op: a tactic with the formats (keys) of its tensors; without a tactic, nothing is launched.

    `ins`: one key per input position; (tactic, ins, out) is unique. `time_ps`: its cost in a plan, of which `premium_ps` is
    added because a predicted time is uncertain. `timed` False: `time_ps` is a lower bound of a time that was not taken.
    """

    tactic: Tactic | None
    ins: tuple[Key, ...]
    out: Key
    time_ps: int
    sparse: bool = False
    premium_ps: int = 0
    timed: bool = True

    @property
    def us(self) -> float:
        """The entry's time in microseconds, without the premium."""
        return to_us(self.time_ps - self.premium_ps)

    @property
    def name(self) -> str:
        """The tactic's name, or IN_PLACE."""
        return IN_PLACE if self.tactic is None else str(self.tactic)

    def precedes(self, other: Entry) -> bool:
        """Whether to prefer this entry to another one in the same formats: the faster one; ties: dense first, then by name."""
        mine, its = (self.time_ps, self.sparse), (other.time_ps, other.sparse)
        return mine < its or (mine == its and self.name < other.name)


@dataclass(frozen=True, slots=True)
class Choice:
    """An op that may be in the plan: it exists if all literals (group, option) of `when` hold; of two options of one group,
    either holds.

    Choices that never exist together may share a name, and may produce the same tensor.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    entries: tuple[Entry, ...]
    when: Literals = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """The ops that may run. A tensor whose producer is not in the plan is absent; then its readers must be absent too.

    `groups`: (fusion group, options), of which exactly one option is taken. `pinned`: the format in which a network input
    exists (all inputs are pinned), and the one in which a network output must be delivered; an output without one stays in its
    produced format. `formats`: the formats that each tensor may take; entries with other formats are ignored.
    `reformat_ps(tensor, src, dst)`: NEVER or None if there is no such reformat.
    """

    choices: tuple[Choice, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    pinned: Mapping[str, Key]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    formats: Mapping[str, tuple[Key, ...]]
    reformat_ps: Callable[[str, Key, Key], int | None]

    def reformat_us(self, tensor: str, src: Key, dst: Key) -> float:
        """Returns the microseconds of a reformat; 0 if it moves nothing."""
        return to_us(self.reformat_ps(tensor, src, dst) or 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan. `entries`: op name -> entry, for the ops that exist, in the graph's order; `options`: group -> option taken.

    `reformats`: (tensor, src, dst) with src != dst, each (tensor, dst) once and after the hop that makes its src; a hop of 0 ps
    is listed too. `total_ps`: the time of entries and reformats, premiums included. `status`: "proven" or "gap"; `gap`: (total
    - lower bound) / total, 0.0 when proven, inf where no bound was computed (rivals). `method`: "elimination", "milp", "greedy"
    or "single format". `width`: as in eliminate.Solution.
    """

    entries: Mapping[str, Entry]
    options: Mapping[str, str]
    reformats: tuple[Hop, ...]
    total_ps: int
    status: str
    method: str
    width: int
    gap: float

    @property
    def us(self) -> float:
        """The plan's time in microseconds, without the premiums."""
        return to_us(self.total_ps - sum(e.premium_ps for e in self.entries.values()))

    def entry_of(self, name: str, when: Literals) -> Entry | None:
        """Returns an op's entry, by the op's name and literals; None if the op does not exist in the plan."""
        return self.entries.get(name) if holds(when, self.options) else None


Force = Mapping[str, Callable[[Entry], bool]]


class Impossible(ValueError):
    """Raised if no plan exists."""


def holds(when: Iterable[tuple[str, str]], options: Mapping[str, str]) -> bool:
    """Whether, for each group named in `when`, one of the options named there is taken."""
    return {g for g, _ in when} == {g for g, o in when if options[g] == o}


def exclusive(a: Literals, b: Literals) -> bool:
    """Whether a and b can never hold together, because they require different options of some group."""
    return any(not {o for h, o in a if h == g} & {o for h, o in b if h == g} for g in {g for g, _ in a} & {g for g, _ in b})


def always(groups: Mapping[str, tuple[str, ...]], whens: list[Literals]) -> bool:
    """Whether at least one of `whens` holds under all combinations of options of the `groups`."""
    if () in whens:
        return True
    over = sorted({g for when in whens for g, _ in when})
    if math.prod(len(groups[g]) for g in over) > MOST_STATES:
        raise ValueError(f"{len(over)} fusion decisions meet at one tensor: more than {MOST_STATES} combinations")
    return all(
        any(holds(when, dict(zip(over, state, strict=True))) for when in whens)
        for state in itertools.product(*(groups[g] for g in over))
    )


def cells_of(graph: Graph, choice: Choice) -> dict[Cell, Entry]:
    """Returns (ins, out) -> the cheapest usable entry; ties: dense first, then by name."""
    return _cells(choice.entries, [formats_of(graph, t) for t in (*choice.inputs, choice.output)])


def all_cells(graph: Graph) -> list[dict[Cell, Entry]]:
    """Returns the cells (`cells_of`) of every choice; choices with the same tuple of entries over the same formats share one
    table.
    """
    formats = {t: formats_of(graph, t) for t in tensors_of(graph)}
    known: dict[tuple, dict[Cell, Entry]] = {}
    found = []
    for c in graph.choices:
        over = tuple(formats[t] for t in (*c.inputs, c.output))
        alike = id(c.entries), over
        if alike not in known:
            known[alike] = _cells(c.entries, over)
        found.append(known[alike])
    return found


def _cells(entries: tuple[Entry, ...], formats: Iterable[tuple[Key, ...]]) -> dict[Cell, Entry]:
    allowed = [*map(frozenset, formats)]
    best: dict[Cell, Entry] = {}
    for e in entries:
        cell = (e.ins, e.out)
        old = best.get(cell)
        if old is None:
            if e.time_ps < NEVER and all(map(contains, allowed, (*e.ins, e.out))):
                best[cell] = e
        elif e.time_ps <= old.time_ps and e.precedes(old):
            best[cell] = e
    return best


def tensors_of(graph: Graph) -> list[str]:
    return list(dict.fromkeys((*graph.inputs, *(c.output for c in graph.choices))))


def formats_of(graph: Graph, tensor: str) -> tuple[Key, ...]:
    pinned = (graph.pinned[tensor],) if tensor in graph.pinned else ()
    return tuple(dict.fromkeys((*graph.formats.get(tensor, ()), *pinned)))


def worst_ps(graph: Graph) -> int:
    """Returns a time in picoseconds that is greater than any plan's."""
    total = sum(each_once(_slowest, (c.entries for c in graph.choices)))
    for t in tensors_of(graph):
        formats = formats_of(graph, t)
        hops = [graph.reformat_ps(t, a, b) for a in formats for b in formats if a != b]
        # Each format but the produced one is made once at most, by the slowest hop.
        total += (len(formats) - 1) * max((ps for ps in hops if ps is not None and ps < NEVER), default=0)
    return total


def _slowest(entries: Iterable[Entry]) -> int:
    return max((e.time_ps for e in entries if e.time_ps < NEVER), default=0)


def only(graph: Graph, force: Force) -> Graph:
    unknown = sorted(set(force) - {c.name for c in graph.choices})
    if unknown:
        raise ValueError(f"force names ops that the graph does not have: {', '.join(unknown)}")
    if not force:
        return graph
    choices, known = [], {}  # choices that share a tuple of entries share its filtered copy, too
    for c in graph.choices:
        if c.name in force:
            test = force[c.name]
            alike = id(c.entries), test
            if alike not in known:
                known[alike] = tuple(filter(test, c.entries))
            c = replace(c, entries=known[alike])
        choices.append(c)
    return replace(graph, choices=tuple(choices))


def why_none(graph: Graph) -> str:
    bare = [c.name for c in graph.choices if not cells_of(graph, c)]
    if bare:
        return f"no plan exists: no usable tactic (as forced, in the formats of its tensors) for {', '.join(bare)}"
    return "no plan exists: every op has tactics, but no reformats and fusion options connect them"


def cycle(graph: Graph, options: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the options (group -> option) of ops that wait for each other in a cycle if these options are taken; None if
    there is no cycle.
    """
    maker = {c.output: c for c in graph.choices if holds(c.when, options)}
    waits = {t: [i for i in c.inputs if i in maker] for t, c in maker.items()}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as e:
        return {g: options[g] for t in e.args[1] for g, _ in maker[t].when}
    return None


def may_close(graph: Graph) -> bool:
    """Whether an op reads the output of an op listed after it. If not, no options can close a cycle."""
    last = {c.output: i for i, c in enumerate(graph.choices)}
    return any(last.get(t, -1) >= i for i, c in enumerate(graph.choices) for t in c.inputs)


def check(graph: Graph) -> None:
    """Raises ValueError if the graph contradicts itself."""
    _check_ends(graph)
    _check_choices(graph)
    _check_tensors(graph)


def _check_ends(graph: Graph) -> None:
    options, inputs, outputs = dict(graph.groups), set(graph.inputs), set(graph.outputs)
    if len(options) != len(graph.groups) or not all(options.values()):
        raise ValueError("fusion groups must have distinct names and at least one option each")
    if lost := [t for t in graph.pinned if t not in inputs and t not in outputs]:
        raise ValueError(f"pinned tensor {lost[0]} is neither an input nor an output of the network")
    if free := [t for t in graph.inputs if t not in graph.pinned]:
        raise ValueError(f"network input {free[0]} is not pinned to the format in which it exists")


def _check_choices(graph: Graph) -> None:
    options, inputs = dict(graph.groups), set(graph.inputs)
    sound: set[tuple[int, int]] = set()  # (id of a tuple of entries, number of inputs) that were checked
    for c in graph.choices:
        for g, o in c.when:
            if o not in options.get(g, ()):
                raise ValueError(f"op {c.name} exists when {g} = {o!r}, which is not an option of a group")
        if c.output in inputs:
            raise ValueError(f"network input {c.output} is also produced by {c.name}")
        if (id(c.entries), len(c.inputs)) not in sound:
            sound.add((id(c.entries), len(c.inputs)))
            if wrong := [e for e in c.entries if len(e.ins) != len(c.inputs) or e.time_ps < 0]:
                raise ValueError(f"op {c.name}: {wrong[0]} must have {len(c.inputs)} input formats and no negative time")


def _check_tensors(graph: Graph) -> None:
    makers, names = grouped((c.output, c) for c in graph.choices), grouped((c.name, c) for c in graph.choices)
    readers = dict.fromkeys(graph.outputs, "the network's output") | {t: c.name for c in graph.choices for t in c.inputs}
    for t, by in readers.items():
        if t not in graph.inputs and t not in makers:
            raise ValueError(f"tensor {t}, read by {by}, is neither a network input nor produced by an op")
    for what, sets in (("produce tensor", makers), ("are named", names)):
        for key, same in sets.items():
            if len(same) > MOST_ALIKE:
                raise ValueError(f"{len(same)} ops {what} {key}, expected at most {MOST_ALIKE}")
            for a, b in itertools.combinations(same, 2):
                if not exclusive(a.when, b.when):
                    raise ValueError(f"two ops that may exist together {what} {key}: {a.name}, {b.name}")
    for t in tensors_of(graph):
        if not 1 <= (count := len(formats_of(graph, t))) <= MAX_FORMATS:
            raise ValueError(f"tensor {t} has {count} formats, expected 1 to {MAX_FORMATS}")
