"""Chooses the sizes of inputs that an engine takes, and the batches that get plans.

A range of batches gets a plan at the powers of two in it, at its optimal batch and at its largest one; of these the plans that
are worth their place in the file remain. A batch in between is padded to the next larger plan's.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu_runtime.building.load import lowered
from gpu_runtime.building.planner import PlannedNetwork
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.network import Network
from gpu_runtime.planning import independent_images, invariant
from gpu_runtime.runtime.bounds import MOST_PLANS
from gpu_runtime.runtime.plan_record import Profile
from gpu_runtime.text import dims

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
MOST_POINTS = 12  # of a profile
WORTH = 1.03  # a plan stays if the next larger one, padded, would take longer by this factor
INNER = (
    "inner layers see the padding of a smaller image, so a range of heights and widths has no sound answer: give each size a "
    "--profile=N of its own (in Python: shapes=[{...}, {...}])"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A requested profile: `shapes` of its inputs at the optimal batch; `ranged`: the inputs with a range of batches, `min` to
    `max`.

    Without ranged inputs it takes only these shapes.
    """

    shapes: Shapes
    ranged: tuple[str, ...] = ()
    min: int = 1
    opt: int = 1
    max: int = 1


def asked(shapes: object) -> tuple[Asked, ...]:
    """Parses `build`'s argument to profiles; () where it names one size, or nothing. Raises TypeError and ValueError.

    >>> asked({"x": ((1, 3, 8, 8), (4, 3, 8, 8), (64, 3, 8, 8))})
    (Asked(shapes={'x': (4, 3, 8, 8)}, ranged=('x',), min=1, opt=4, max=64),)
    """
    several = isinstance(shapes, (list, tuple)) and bool(shapes) and all(isinstance(s, Mapping) for s in shapes)
    listed: Any = shapes if several else [shapes]
    if not several and not (isinstance(shapes, Mapping) and any(_is_range(v) for v in shapes.values())):
        return ()  # one size, which the importer checks
    found = tuple(_profile(s) for s in listed)
    if (least := sum(map(_least, found))) > MOST_PLANS:
        raise ValueError(f"shapes: expected {MOST_PLANS} plans at most, two for each range and one for each size, got {least}")
    return found


def _least(wanted: Asked) -> int:
    """The least number of plans of a profile: two of a range, to find the tensors with a batch."""
    return 2 if wanted.ranged else 1


def _is_range(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, (list, tuple)) for v in value)


def _profile(shapes: Mapping[str, object]) -> Asked:
    exact: dict[str, Shape] = {}
    firsts: dict[str, tuple[int, int, int]] = {}
    for name, value in shapes.items():
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"shapes: expected the sizes of {name!r}, got {value!r}")
        if not _is_range(value):
            exact[name] = _shape(name, value)
            continue
        if len(value) != 3 or not all(isinstance(v, (list, tuple)) and v for v in value):
            raise ValueError(f"shapes: expected three shapes of {name!r}, its smallest, optimal and largest, got {value!r}")
        low, opt, high = (_shape(name, v) for v in value)
        if not low[1:] == opt[1:] == high[1:]:
            got = ", ".join(map(dims, (low, opt, high)))
            raise ValueError(f"{name}: expected sizes that differ in the batch alone, got {got}: {INNER}")
        if not 1 <= low[0] <= opt[0] <= high[0]:
            raise ValueError(f"{name}: expected 1 <= min <= opt <= max, got {low[0]}, {opt[0]} and {high[0]} rows")
        exact[name] = opt
        if low != high:
            firsts[name] = (low[0], opt[0], high[0])
    if len(set(firsts.values())) > 1:
        listed = "; ".join(f"{name} {', '.join(map(str, v))}" for name, v in firsts.items())
        raise ValueError(f"shapes: expected one range of batches for all inputs, got {listed}")
    return Asked(exact, tuple(firsts), *next(iter(firsts.values()), (1, 1, 1)))


def _shape(name: str, value: Sequence[object]) -> Shape:
    try:
        return tuple(operator.index(v) for v in value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"shapes: expected whole numbers for the sizes of {name!r}, got {value!r}") from None


def candidates(wanted: Asked, most: int = MOST_POINTS) -> tuple[int, ...]:
    """Returns the batches to plan, rising; if there are more than `most`, those nearest below another one are left out.

    >>> candidates(Asked({}, ("x",), 1, 6, 20)), candidates(Asked({}, ("x",), 1, 6, 20), most=4)
    ((1, 2, 4, 6, 8, 16, 20), (2, 6, 8, 20))
    """
    if not wanted.ranged:
        return (1,)
    powers = {1 << i for i in range(wanted.max.bit_length())}
    found = sorted({n for n in powers if wanted.min <= n <= wanted.max} | {wanted.min, wanted.opt, wanted.max})
    while len(found) > most:
        ratios = {n: after / n for n, after in zip(found, found[1:], strict=False) if n != wanted.opt}
        found.remove(min(ratios, key=lambda n: (ratios[n], -n)))
    return tuple(found)


def worth(times: Mapping[int, float], opt: int) -> tuple[int, ...]:
    """Returns the batches whose plans stay: the optimal and the largest one, and each that is faster than the next larger of
    these.

    >>> worth({1: 50.0, 2: 50.2, 4: 50.5, 8: 60.0}, opt=4)
    (4, 8)
    """
    after = max(times)
    kept = [after]
    for batch in sorted(times, reverse=True)[1:]:
        if batch == opt or times[after] > WORTH * times[batch]:
            kept.append(batch)
            after = batch
    return tuple(sorted(kept))


@dataclass(frozen=True, slots=True)
class Cell:
    """A plan to make: the number of its profile, and its batch."""

    profile: int
    batch: int


def cells(wanted: Sequence[Asked]) -> list[Cell]:
    """Returns all plans to make, at most MOST_PLANS; one where no profile is requested."""
    each = min(MOST_POINTS, MOST_PLANS // max(len(wanted), 1))
    return [Cell(i, n) for i, a in enumerate(wanted) for n in candidates(a, max(each, _least(a)))] or [Cell(0, 1)]


def sizes(loaded: importer.Loaded, wanted: Sequence[Asked], shapes: Any) -> list[Shapes | None]:
    """Returns the shapes of the inputs of each cell; `shapes`: of an engine of one size.

    Raises ModelError where the model has no batch of these inputs.
    """
    return [_shapes(loaded, wanted[cell.profile], cell.batch) for cell in cells(wanted)] if wanted else [shapes]


def _shapes(loaded: importer.Loaded, wanted: Asked, batch: int) -> Shapes:
    if not wanted.ranged:
        return wanted.shapes
    found = importer.at_batch(loaded, wanted.shapes, batch)
    for name in wanted.ranged:
        if found.get(name) != (batch, *wanted.shapes[name][1:]):
            text = f"{loaded.source}: the first size of input {name!r} is not the batch, which other inputs share"
            raise ModelError(f"{text}: give one size for it, and a range for the others")
    return found


def check_first(source: object, wanted: Sequence[Asked], plain: Sequence[Network]) -> None:
    """Raises ModelError unless, in a range, only the first size of an input or output follows the batch, as a multiple."""
    for number, asked in enumerate(wanted):
        of = [(cell.batch, n) for cell, n in zip(cells(wanted), plain, strict=True) if cell.profile == number and asked.ranged]
        for (few, less), (many, more) in zip(of[:1], of[-1:], strict=True):
            for kind, ends in (("input", (less.inputs, more.inputs)), ("output", (less.outputs, more.outputs))):
                for a, b in zip(*ends, strict=True):
                    if tuple(a.shape) == tuple(b.shape):
                        continue
                    if not a.shape or a.shape[1:] != b.shape[1:] or a.shape[0] * many != b.shape[0] * few or a.shape[0] % few:
                        got = f"got {dims(a.shape)} at batch {few}, {dims(b.shape)} at {many}"
                        text = f"{source}: {kind} {a.name!r}: expected the batch, or a multiple of it, as its first size alone"
                        cure = "put a Transpose to the batch in front of it, or give each batch a --profile=N of its own"
                        raise ModelError(f"{text}, {got}: {cure} (in Python: shapes=[{{...}}, {{...}}])")


def meeting(loaded: importer.Loaded, wanted: Sequence[Asked], plain: Sequence[Network]) -> list[str | None]:
    """Returns, for each profile, why images of a batch depend on each other, so that none may be padded; None if they do not.

    Found in the networks of its two largest batches, as lowered; `plain`: of all cells.
    """
    found: list[str | None] = []
    for number, asked in enumerate(wanted):
        pairs = zip(cells(wanted), plain, strict=True)
        of = [network for cell, network in pairs if cell.profile == number and cell.batch > 1][-2:]
        why = None
        if asked.ranged and len(of) < 2:
            try:
                of.append(lowered(loaded, _shapes(loaded, asked, asked.max + 1)))
            except ModelError as e:  # this batch was not requested
                why = f"at batch {asked.max + 1}, where images are looked at, {e}"
        found.append(why or independent_images.meeting(*of) if asked.ranged else None)
    return found


def kept(
    wanted: Sequence[Asked], planned: Sequence[PlannedNetwork], exact: Sequence[str | None]
) -> tuple[tuple[Profile, ...], list[int]]:
    """Returns the profiles, and the numbers of the plans that stay.

    `planned`: one for each cell; `exact`: why a profile takes only its plans' own batches.
    """
    if not wanted:
        return (), [0]
    profiles: list[Profile] = []
    stay: list[int] = []
    listed = cells(wanted)
    for number, a in enumerate(wanted):
        of = {cell.batch: i for i, cell in enumerate(listed) if cell.profile == number}
        why = exact[number]
        batches = tuple(of) if why else worth({n: planned[i].chosen.us for n, i in of.items()}, a.opt)
        few, many = (planned[of[n]].table.network for n in (min(of), max(of)))
        pairs = zip((*few.inputs, *few.outputs), (*many.inputs, *many.outputs), strict=True)
        batched = tuple(end.name for end, larger in pairs if tuple(end.shape) != tuple(larger.shape))
        plans = tuple(range(len(stay), len(stay) + len(batches)))
        profiles.append(Profile(a.min, a.opt, a.max, plans, batched, why if batched else None))
        stay += [of[n] for n in batches]
    return tuple(profiles), stay


def alike(profiles: Sequence[Profile], planned: Sequence[PlannedNetwork]) -> list[PlannedNetwork]:
    """Returns the plans of each profile with one tactic per layer for all its batches."""
    found = list(planned)
    for p in profiles:
        tables = [planned[i].table for i in p.plans]
        chosen = invariant.solve(tables)
        dense = invariant.solve(tables, dense=True) if any(e.sparse for e in chosen[0].entries.values()) else chosen
        for i, plan, without in zip(p.plans, chosen, dense, strict=True):
            found[i] = replace(planned[i], chosen=plan, own=planned[i].chosen, dense_us=without.us)
    return found


def optimal(wanted: Sequence[Asked], shapes: Any) -> dict[str, Shape]:
    """Returns the given sizes, of a range the optimal ones."""
    return {name: tuple(shape) for name, shape in sorted((wanted[0].shapes if wanted else shapes or {}).items())}


def repeated(calibration: Mapping[str, np.ndarray] | None, shapes: Shapes | None) -> Mapping[str, np.ndarray] | None:
    """Returns calibration inputs for another batch: their rows repeated to its size."""
    if calibration is None or shapes is None:
        return calibration
    return {
        name: np.resize(x, shapes[name]) if name in shapes and np.shape(x)[1:] == shapes[name][1:] else x
        for name, x in calibration.items()
    }
