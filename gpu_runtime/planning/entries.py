"""Finds the tactics of one op that are worth timing, and makes the planner's entries from them, in every place of its
tensors.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from operator import itemgetter

from cuda_kernels.device import Device
from gpu_runtime.network import Network, Op
from gpu_runtime.planning import places
from tactics.candidates import at_edges, candidates
from tactics.format import CanonicalFormat, Format, Key, canonical
from tactics.kernels import KERNELS
from tactics.launches import launches
from tactics.measure.timing import Time
from tactics.planner.factors import NEVER
from tactics.planner.graph import Entry, to_ps
from tactics.predict import kept_premium, premium
from tactics.problems.batches import BatchPiecesProblem
from tactics.problems.problem import ConcatProblem, Problem
from tactics.problems.protocol import Feature
from tactics.tactic import Tactic, tactic_of

Times = Mapping[Tactic, Time]
Cost = Callable[..., int]  # (problem, tactic, its time, whether it runs pieces of a batch) -> picoseconds
Priced = tuple[Tactic, int, int, bool]  # (tactic, picoseconds in the plan, premium, timed)
MANY_PLACES = 64  # ways to place the inputs of one Concat that is copied; beyond, each has memory of its own
# For each input, then the output: (its formats, further formats at the network's edge).
FormatsByTensor = tuple[tuple[tuple[Format, ...], tuple[Format, ...]], ...]


def runnable(problem: Problem, device: Device, dtypes: tuple[str, ...], straight: bool) -> tuple[Tactic, ...]:
    """Returns every tactic that can run the problem on tensors of these types.

    `straight`: includes FP16 tactics, whose kernels can store their FP32 sums as an FP32 output (see at_edges); on tensor cores
    they replace arithmetic on CUDA cores.
    """
    half = candidates(problem, device) if straight else ()
    on_tensor_cores = any(KERNELS[t.kernel].fp32_output == "any" and str(t.out) == "fp16:chw" for t in half)
    return half if on_tensor_cores else candidates(problem, device, dtypes) + half


def namesakes(problem: Problem, tactics: Iterable[Tactic], timed: Iterable[Tactic]) -> dict[Tactic, Tactic]:
    """Returns, for each tactic of `tactics` that is not among `timed`: tactic -> the timed one with the same kernel, tile and
    addresses.
    """
    known = {(t.kernel, t.tile, addresses(problem, t)): t for t in timed}
    found = {t: known.get((t.kernel, t.tile, addresses(problem, t))) for t in tactics}
    return {t: same for t, same in found.items() if same is not None and same != t}


def addresses(problem: Problem, tactic: Tactic) -> tuple[CanonicalFormat, ...]:
    return tuple(canonical(f, s) for f, s in zip((*tactic.ins, tactic.out), problem.all_shapes, strict=True))


def with_namesakes(problem: Problem, times: Times, others: Times) -> dict[Tactic, Time]:
    best = {(t.kernel, t.tile, addresses(problem, t)): time for t, time in times.items()}
    for t, time in others.items():
        key = t.kernel, t.tile, addresses(problem, t)
        best[key] = min(best.get(key, time), time, key=lambda x: x.us)
    return {t: best[t.kernel, t.tile, addresses(problem, t)] for t in times}


def to_time(problem: Problem, tactics: Iterable[Tactic], around: FormatsByTensor, scratch: int | None) -> list[Tactic]:
    """Returns the tactics to time: `tactics` and their versions at the network's edges, one for each combination of kernel,
    tile and addresses.

    Of tactics that are alike in these, the one with the most usual format names is returned. Tactics are left out if their
    tensors cannot have such addresses, or if they need more than `scratch` bytes.
    """
    usable, (*ins, out) = [fmts for fmts, _ in around], [edges for _, edges in around]
    allowed = [{canonical(f, s) for f in fmts} for fmts, s in zip(usable, problem.all_shapes, strict=True)]
    known: dict[int, list[tuple[int, int, Tactic]]] = {}  # kind -> (number of kernel and addresses, unusual formats, tactic)
    numbers: dict[tuple, int] = {}
    best: dict[tuple, tuple[int, Tactic]] = {}
    for tactic in tactics:
        kind = tactic.kind
        if kind not in known:
            known[kind] = []
            for t in at_edges(tactic, ins, out):
                ends = addresses(problem, t)
                if all(at in formats for at, formats in zip(ends, allowed, strict=True)):
                    odd = sum(f not in fmts for f, fmts in zip((*t.ins, t.out), usable, strict=True))
                    known[kind].append((numbers.setdefault((t.kernel, ends), len(numbers)), odd, t))
        for number, odd, t in known[kind]:
            cell = number, tactic.tile
            if (found := best.get(cell)) is None or odd < found[0]:
                best[cell] = (
                    odd,
                    tactic if t.ins is tactic.ins and t.out is tactic.out else tactic_of(t.kernel, tactic.tile, t.ins, t.out),
                )
    return [t for _, t in best.values() if scratch is None or workspace(problem, t) <= scratch]


def fastest(problem: Problem, times: Times, cost: Cost) -> list[Priced]:
    """Returns the fastest dense and the fastest sparse tactic for each combination of addresses and of places that its kernel
    can reach.

    A plan can want no other one. `cost`: gives the planner's cost of a tactic.
    """
    cells: dict[int, list[tuple[int, Tactic]]] = {}  # independent of the tile
    rows: dict[tuple, list[tuple[int, Tactic]]] = {}
    for t, time in times.items():
        if t.kind not in cells:
            kernel = KERNELS[t.kernel]
            cell = addresses(problem, t), t.sparse, kernel.placed, kernel.placed_residual
            cells[t.kind] = rows.setdefault(cell, [])
        cells[t.kind].append((to_ps(time.us), t))
    found = []
    for of_cell in rows.values():
        best, least = of_cell[0][1], NEVER
        for us_ps, t in sorted(of_cell, key=itemgetter(0)):
            if us_ps > least:
                break  # a premium is never negative
            ps = cost(problem, t, times[t])
            if ps < least or (ps == least and t.name < best.name):
                best, least = t, ps
        found.append((best, least, least - to_ps(times[best].us), times[best].timed))
    return found


def kernels(problem: Problem, tactics: list[Priced], homes: tuple[tuple[Key, ...], ...]) -> Iterator[Entry]:
    """Yields the planner's entries that run a problem: one for each tactic and each combination of places of its tensors.

    An entry names each tensor by a Key: its format, and its home, the name of a place inside another tensor's memory ("" for
    memory of its own). Every tactic has the entry with all tensors in memory of their own; a kernel that can address other
    places also has those with homes. `homes`: for each input, then the output, the keys with a home that this tensor may
    have. A copied Concat with more than MANY_PLACES combinations keeps its inputs in memory of their own.
    """
    for tactic, ps, premium_ps, timed in tactics:
        own = [Key(at) for at in addresses(problem, tactic)]
        ways = [[k] for k in own]
        if KERNELS[tactic.kernel].placed:
            ways = [[k, *(p for p in keys if p.format == k.format)] for k, keys in zip(own, homes, strict=True)]
        if isinstance(problem, ConcatProblem) and math.prod(map(len, ways)) > MANY_PLACES:
            ways[:-1] = [[k] for k in own[:-1]]
        free = KERNELS[tactic.kernel].placed_residual
        if Feature.RESIDUAL in problem.needs and not free:  # it is read with the output's strides
            ways[1:] = [[k] for k in own[1:]]
        for *ins, out in product(*ways):
            yield Entry(tactic, tuple(ins), out, ps, tactic.sparse, premium_ps, timed)


def in_place(op: Op, inside: Mapping[str, tuple[Key, ...]], dtypes: tuple[str, ...]) -> Iterator[Entry]:
    """Yields the entries by which an op launches nothing. `inside`: tensor -> its keys that have a home in another tensor;
    `dtypes`: as of places.types.
    """
    for cell in places.entries(op, dtypes):
        ends = zip((*cell[0], cell[1]), (*op.inputs, op.output), strict=True)
        ways = ([k] if k.home else [k, *(p for p in inside[t] if p.format == k.format)] for k, t in ends)
        for *ins, out in product(*ways):
            yield Entry(None, tuple(ins), out, 0)
    own = ((Key(x), Key(y)) for x, y in places.views(op, dtypes))
    for x, y in (*own, *places.through_views(op, inside)):
        yield Entry(None, (x,), y, 0)
    if isinstance(op.problem, BatchPiecesProblem):
        for at, made_at in dict.fromkeys(places.images(op, dtypes)):
            yield Entry(None, (Key(at),), Key(made_at), to_ps(op.problem.us))


def cost_of(device: Device, risk: float | None) -> Cost:
    """Returns the function that gives a tactic's cost: its time; for a sparse tactic also the premium for `risk` (None where
    times are measured); for a tactic that runs pieces of a batch also the premium for data that L2 may not keep.
    """

    def cost(problem: Problem, tactic: Tactic, time: Time, pieces: bool = False) -> int:
        factor = 1.0 if risk is None else premium(problem, tactic, device, risk)
        return to_ps(time.us, factor * (kept_premium(problem, tactic, device) if pieces else 1.0))

    return cost


def fitting(network: Network, op: Op, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yields the entries in which every tensor that must be FP32 is FP32."""
    tensors = (*op.inputs, op.output)
    must = [
        None if fmts == network.formats(t) else {canonical(f, network.tensors[t]) for f in fmts}
        for t, fmts in zip(tensors, network.formats_in(op), strict=True)
    ]
    for e in entries:
        if all(formats is None or k.format in formats for k, formats in zip((*e.ins, e.out), must, strict=True)):
            yield e


def workspace(problem: Problem, tactic: Tactic) -> int:
    """Returns the bytes of scratch memory that a tactic's launches need."""
    return max(launch.workspace for launch in launches(problem, tactic))
