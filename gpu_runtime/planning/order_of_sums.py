"""Finds the order in which a tactic adds: whether an image's result has the same bits in different batches.

A tactic fixes the order of an output element's sums, wherever the element is in a tile or a batch, with two exceptions:
stream-K cuts the stages of all tiles evenly, and reductions share a row among more threads where rows are few. Blocks that go
on from tile to tile change nothing: each batch may have its own number of them.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from cuda_kernels.params import members
from gpu_runtime.runtime.plan_record import Layer
from tactics.launches import launches
from tactics.problems.problem import Problem
from tactics.step import Call
from tactics.tactic import Tactic, Tile

APART = frozenset(("pointwise", "move", "gather"))  # kernels that compute no sums
# Functions in which a library adds in an order of its own.
SUMS = frozenset("Conv CumSum GlobalLpPool LpNormalization ScatterElements ScatterND".split())
PIXELS = "P_THREAD"  # compile-time value that only counts a thread's pixels, each of which has its own sums
# Launch arguments that count images or address them: single ones, and structs all of whose members do.
COUNTS = frozenset("n c.n tiles units map y_map r_map im2col batch inner a_outer b_outer rows".split())
PLACES = ("kept.", "out.", "x.spread.", "added.", "source[", "q_at.", "k_at.", "v_at.", "y_at.", "mask_at.")


def order(problem: Problem, tactic: Tactic) -> Hashable | None:
    """Returns a key of the order in which a tactic adds; batches with equal keys add in the same order. None if the order
    always depends on the batch.
    """
    if isinstance(tactic.tile, Tile) and tactic.tile.stream:
        return None
    found: list[Hashable] = []
    for step in launches(problem, tactic):
        if isinstance(step, Call):
            if step.function in SUMS:
                return None
            found.append(step.function)
        elif step.kernel in APART:
            found.append(step.kernel)
        else:
            named = zip((m.name for m in members(step.kernel, step.values)), step.args, strict=True)
            args = [(n, a) for n, a in named if a[0] != "f32" and n not in COUNTS and not n.startswith(PLACES)]
            found.append((step.kernel, step.block, tuple(v for v in step.values if v[0] != PIXELS), tuple(args)))
    return tuple(found)


def agreeing(points: Sequence[Iterable[Layer]]) -> list[tuple[int, ...]]:
    """Groups the points whose plans compute an image with the same bits: returns tuples of their numbers. `points`: the layers
    of each point's plan.
    """
    found: dict[Hashable, list[int]] = {}
    for i, layers in enumerate(points):
        launched = [(layer.op_name, layer.problem, layer.tactic) for layer in layers if layer.problem and layer.tactic]
        rows = ((name, steady(t), i if (how := order(p, t)) is None else how) for name, p, t in launched)
        found.setdefault(tuple(dict.fromkeys(rows)), []).append(i)  # all pieces of a batch run the same tactic
    return [tuple(alike) for alike in found.values()]


def steady(tactic: Tactic) -> Tactic:
    """Returns the tactic without its number of persistent blocks, which does not change the order of sums."""
    return replace(tactic, tile=replace(tactic.tile, persist=0)) if isinstance(tactic.tile, Tile) else tactic
