"""What a network's plan takes if each of its convolutions may also be a Hopper kernel with one of some tiles.

A layer keeps its formats and its fusions, and takes the faster of today's tactic and of the best tile: what a plan that chose
formats anew would gain more is not counted. A pair of 1x1 convolutions in one launch may become two.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp
from statistics import NormalDist

from tactics.families.hopper.figures import Figures
from benchmarks.hopper.layers import HWC8, WAYS, Estimate, estimate, reason, strips
from benchmarks.hopper.plans import Plan, PlannedLayer
from tactics.families.hopper.tiles import K_STAGE, HopperTile, candidates
from cuda_kernels.device import Device
from tactics import peers
from tactics.format import Format
from tactics.predict import RISK, regime, sigma_ratio
from tactics.problems.problem import BackToBackProblem, ConvProblem

Shares = Mapping[tuple[int, int], float]  # of a plan, by (plan, convolution)


@dataclass(frozen=True, slots=True)
class Choice:
    """A tile with its estimate for a convolution."""

    tile: HopperTile
    estimate: Estimate
    charged: float  # the time that a predicted plan compares: of 2:4 with its premium (tactics.predict)


def convolutions(layer: PlannedLayer) -> Iterator[tuple[ConvProblem, tuple[Format, ...]]]:
    """Each with its formats."""
    p = layer.problem
    if isinstance(p, BackToBackProblem):
        yield p.first, (layer.ins[0], HWC8)
        yield p.second, (HWC8, *layer.ins[1:], layer.out)
    else:
        yield p, (*layer.ins, layer.out)


def refusal(layer: PlannedLayer, least_k: int = K_STAGE) -> str:
    """Why it stays with today's kernels, or an empty string."""
    reasons = (reason(p, formats[:-1], formats[-1], least_k) for p, formats in convolutions(layer))
    return next(filter(None, reasons), "")


@lru_cache(maxsize=200_000)
def choice(
    p: ConvProblem, formats: tuple[Format, ...], tile: HopperTile, device: Device, figures: Figures, ways: tuple[str, ...]
) -> Choice | None:
    found = estimate(p, tile, device, figures, formats, ways)
    if found is None or (tile.sparse and not p.sparse24):
        return None
    charged = found.us
    if tile.sparse:
        charged *= exp(NormalDist().inv_cdf(RISK) * sigma_ratio(regime(found.bound), found.us, device))
    return Choice(tile, found, charged)


@lru_cache(maxsize=4096)
def tiles_of(p: ConvProblem) -> tuple[HopperTile, ...]:
    return (*candidates(), *strips(p))


def choices(
    p: ConvProblem, formats: tuple[Format, ...], device: Device, figures: Figures, ways: tuple[str, ...] = WAYS
) -> Iterator[Choice]:
    for tile in tiles_of(p):
        if found := choice(p, formats, tile, device, figures, ways):
            yield found


@dataclass(frozen=True, slots=True)
class Allowed:
    """Which tiles, and ways to share K, a plan may take. `kinds`: all where none is named; `least_k`: of a layer."""

    strips: bool = False
    one_copy: bool = False
    shared: bool = True
    cluster_sums: bool = True
    sparse: bool = True
    loader: str = "tma"
    kinds: frozenset[str] | None = None
    least_k: int = K_STAGE

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.cluster_sums else tuple(way for way in WAYS if way != "cluster")

    def allows(self, tile: HopperTile) -> bool:
        strip = tile.box is None or (self.strips and (tile.box.copies > 1 or self.one_copy))
        other = (self.shared or not tile.shared) and (self.sparse or not tile.sparse) and tile.loader == self.loader
        return strip and other and (self.kinds is None or family(tile) in self.kinds)


def family(tile: HopperTile) -> str:
    """The kernel's variant that a tile is, strips of any shape together."""
    return tile.kind if tile.box is None else f"{'2:4' if tile.sparse else 'dense'} {tile.m}-row {tile.kind.split()[2]} strip"


def best(layer: PlannedLayer, allowed: Allowed, device: Device, figures: Figures) -> tuple[Choice, ...] | None:
    """The best tile of each convolution of a layer; None where today's kernel stays, the faster one or the only one."""
    if refusal(layer, allowed.least_k):
        return None
    found = []
    for p, formats in convolutions(layer):
        of = [c for c in choices(p, formats, device, figures, allowed.ways) if allowed.allows(c.tile)]
        if not of:
            return None
        found.append(min(of, key=lambda c: c.charged))
    return tuple(found) if sum(c.charged for c in found) < layer.us else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan's microseconds, and of its layers how many moved to a Hopper kernel, and how many of all are sparse."""

    us: float
    moved: int
    sparse: int


def outcome(plan: Plan, allowed: Allowed, device: Device, figures: Figures) -> Outcome:
    us, moved, sparse = plan.us, 0, 0
    for layer in plan.layers:
        found = best(layer, allowed, device, figures)
        if found is None:
            sparse += layer.count * ("sparse" in layer.tactic)
            continue
        us -= layer.count * (layer.us - sum(c.estimate.us for c in found))
        moved += layer.count
        sparse += layer.count * any(c.tile.sparse for c in found)
    return Outcome(us, moved, sparse)


def library_us(plan: Plan, device: Device) -> float:
    """The plan with each convolution at tactics.peers' estimate of a library's dense kernels: no library publishes times of 2:4
    convolutions on Hopper."""
    us = plan.us
    for layer in plan.layers:
        if found := peers.time_of(layer.problem, device):
            us -= layer.count * (layer.us - found.us)
    return us


def stays(plan: Plan) -> dict[str, float]:
    """Microseconds of today's plan by why a layer cannot move; "" for those that can."""
    found: dict[str, float] = defaultdict(float)
    for layer in plan.layers:
        found[refusal(layer)] += layer.us * layer.count
    return dict(found)


def saved(plans: Iterable[tuple[Plan, Device]], allowed: Allowed, figures: Figures) -> Mapping[str, Shares]:
    """For each kernel variant, by (plan, convolution): the share of the plan that its best tile takes, beside the share that
    today's kernel takes under the name "". A pair of convolutions is two, of which today's take halves."""
    table: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for number, (plan, device) in enumerate(plans):
        at = 0
        for layer in plan.layers:
            if refusal(layer, allowed.least_k):
                continue
            parts = list(convolutions(layer))
            for p, formats in parts:
                table[""][number, at] = layer.us * layer.count / len(parts) / plan.us
                for c in choices(p, formats, device, figures, allowed.ways):
                    if allowed.allows(c.tile):
                        share = c.charged * layer.count / plan.us
                        row = table[family(c.tile)]
                        row[number, at] = min(row.get((number, at), share), share)
                at += 1
    return table


def beside(tables: Sequence[Mapping[str, Shares]], plans: int) -> Mapping[str, Shares]:
    """Tables of so many plans each as one of all: a plan at each point of a sweep counts as another."""
    found: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for first, table in zip(range(0, plans * len(tables), plans), tables, strict=True):
        for kind, row in table.items():
            found[kind] |= {(first + number, at): us for (number, at), us in row.items()}
    return found


def greedy(table: Mapping[str, Shares], least: float, most: int) -> list[tuple[str, float]]:
    """Variants one after the other, each the one that saves most beside those before it, as (name, share of a plan that it
    saves in the mean over plans), while that is `least` or more."""
    now, plans = dict(table[""]), 1 + max(number for number, _ in table[""])
    picked: list[tuple[str, float]] = []
    names = sorted(set(table) - {""})
    while len(picked) < most:
        gains = {n: sum(max(0.0, now[at] - us) for at, us in table[n].items()) / plans for n in names}
        name = max(gains, key=gains.__getitem__)
        if gains[name] < least:
            break
        picked.append((name, gains[name]))
        for at, us in table[name].items():
            now[at] = min(now[at], us)
    return picked


def wins(plan: Plan, allowed: Allowed, device: Device, figures: Figures) -> dict[str, tuple[int, float]]:
    """(layers, microseconds) that each variant is the fastest of, and under "today" that today's kernels keep; most time
    first."""
    found: dict[str, tuple[int, float]] = {}

    def more(kind: str, layers: int, us: float) -> None:
        before = found.get(kind, (0, 0.0))
        found[kind] = before[0] + layers, round(before[1] + us, 1)

    for layer in plan.layers:
        if (of := best(layer, allowed, device, figures)) is None:
            more("today", layer.count, layer.us * layer.count)
        for c in of or ():
            more(family(c.tile), layer.count, c.estimate.us * layer.count)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))
