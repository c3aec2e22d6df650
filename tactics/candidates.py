"""Lists every tactic that can run a problem on a device (`candidates`), and the others with reasons (`rejected`)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from types import ModuleType

from cuda_kernels.device import Device
from tactics import fp32
from tactics.families import array_function, table
from tactics.format import WHOLE, Format, is_bytes
from tactics.kernels import KERNELS
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.problem import Problem, ReformatProblem
from tactics.reason import Candidates, Reason, unsupported
from tactics.step import linear
from tactics.tactic import Only, Parts, Patch, Tactic, Tile, tactic_of

Rejection = tuple[Tactic | str, Reason]


@lru_cache(maxsize=4096)
def candidates(problem: Problem, device: Device, dtypes: tuple[str, ...] = (), only: Only = None) -> tuple[Tactic, ...]:
    """Returns every tactic that can run `problem` on `device`.

    `dtypes`: types of its inputs and its output, where some are FP32, or may be "int8" or "uint8" as well as FP16; `only`:
    restricts a convolution to these tiles.
    """
    return tuple(t for t, why in _judged(problem, device, dtypes, only) if not why and isinstance(t, Tactic))


@lru_cache(maxsize=256)
def rejected(problem: Problem, device: Device, dtypes: tuple[str, ...] = ()) -> tuple[Rejection, ...]:
    """Returns (tactic, or the name of a kernel or family; reason) for each one that cannot run `problem` on `device`."""
    return tuple((t, why) for t, why in _judged(problem, device, dtypes) if why)


def at_edges(tactic: Tactic, ins: Sequence[Collection[Format]], out: Collection[Format]) -> Iterator[Tactic]:
    """Yields `tactic`, then the same kernel on other formats that a network's inputs (`ins`, per input) or outputs may have.

    Only the first input varies; the output does not vary where a second input shares its format. But kernels that compute in
    FP32 anyway may also write FP32, with a second input of the same layout.
    """
    kernel = KERNELS[tactic.kernel]

    def others(fmt: Format, asked: Collection[Format], able: bool) -> list[Format]:
        if not able or str(fmt) not in ("fp16:hwc8", "fp16:chw"):
            return [fmt]
        return [fmt, *(f for f in asked if f.dtype == "fp16" and linear(f) == linear(fmt) and f != fmt)]

    alone = len(tactic.ins) == 1
    ends = others(tactic.ins[0], ins[0], kernel.any_input), others(tactic.out, out if alone else (), kernel.any_output)
    yield tactic
    for x, y in list(product(*ends))[1:]:
        yield tactic_of(tactic.kernel, tactic.tile, (x, *tactic.ins[1:]), y)
    others_in = tactic.ins if kernel.fp32_output == "linear" else [f for f in tactic.ins[1:] if f != tactic.ins[0]]
    same = {str(f) for f in others_in} | {str(tactic.out)}  # of convolutions a residual; a gate lies as the first input does
    if kernel.fp32_output and same == {"fp16:chw"}:
        yield from (replace(tactic, out=f) for f in out if f.dtype == "fp32" and f.layout in ("chw", "hwc")[: 1 + alone])


def _judged(problem: Problem, device: Device, dtypes: tuple[str, ...], only: Only = None) -> Candidates:
    """Yields every tactic with the reason against it, or None."""
    yield from ((t, _denied(t, device)) for t in _of_bytes(problem, dtypes, device, only))
    if "fp32" in dtypes and not isinstance(problem, LibraryProblem):  # a library function takes either type anyway
        if against := unsupported(fp32.reason(problem)):
            yield type(problem).__name__, against
            return
        yield from ((t, _denied(t, device)) for t in fp32.candidates(problem, dtypes))
        return
    for family, first in table.OF_PROBLEM.get(type(problem), {}).items():
        if first.sm not in ("", device.sm):
            continue  # of another architecture: no reason that a user could do anything about
        if against := unsupported(table.missing(problem, first)):
            yield first.family.rpartition(".")[2], against
            continue
        found = family.candidates(problem, device, *filter(None, [only]))
        if device.left_out:
            found = ((tactic, reason or _denied(tactic, device)) for tactic, reason in found)
        yield from found


def _of_bytes(problem: Problem, dtypes: Sequence[str], device: Device, only: Only = None) -> Iterator[Tactic]:
    """Yields the tactics of which at least one tensor is bytes of whole numbers. `dtypes`: of each input, then of the output;
    "int8" or "uint8" where the tensor may be that or FP16.
    """
    for family, first in table.OF_WHOLE.get(type(problem), {}).items() if {*dtypes} & {*WHOLE} else ():
        if table.missing(problem, first):
            continue
        more = (device, *filter(None, [only])) if first.tile else ()
        yield from family.byte_candidates(problem, dtypes, *more)


def _denied(tactic: Tactic | str, device: Device) -> Reason | None:
    """Why plans for the device may not hold this tactic, although it could run; None if they may."""
    names = (tactic.kernel, base_runner(tactic)) if isinstance(tactic, Tactic) else ()
    return next((Reason.of("failed_here", tested=name, why=why) for name, why in device.left_out if name in names), None)


def base_runner(tactic: Tactic) -> str:
    """A tactic's kernel with its tile, without split-K: the unit (smaller than a kernel) that a device may be denied."""
    return replace(tactic, tile=_base(tactic.tile)).runner


def accepts(problem: Problem, tactic: Tactic, device: Device) -> bool:
    """Whether a plan may hold `tactic` for `problem` on `device`: as a candidate, at the network's edge, or on FP32 tensors.
    Only candidates of its own kernel and tile are computed.
    """
    family = table.OF_KERNEL[tactic.kernel]
    formats = (*tactic.ins, tactic.out)
    if len(tactic.ins) != len(problem.in_shapes):
        return False
    if isinstance(problem, LibraryProblem):
        return tactic.kernel == "library" and array_function.accepts(problem, tactic)
    around = [(f,) for f in tactic.ins], (tactic.out,)
    single = _single(problem, tuple("fp32" if f.dtype == "fp32" else "fp16" for f in formats))
    if tactic in single or any(tactic in at_edges(t, *around) for t in single):
        return True
    if any(map(is_bytes, formats)) and not isinstance(problem, ReformatProblem):
        only = _base(tactic.tile)
        return tactic in set(_of_bytes(problem, [f.dtype for f in formats], device, only))
    first = table.OF_PROBLEM.get(type(problem), {}).get(family)
    if first is None or first.sm not in ("", device.sm) or table.missing(problem, first):
        return False
    able = (t for t in _of_tile(problem, device, family, _base(tactic.tile)) if t.kernel == tactic.kernel)
    return any(tactic in at_edges(t, *around) for t in able if t.tile == tactic.tile)


def _base(tile: Tile | Patch | Parts | None) -> Tile | Patch | Parts | None:
    """A tile without its split of K."""
    return tile.whole if isinstance(tile, Tile) else tile


@lru_cache(maxsize=4096)
def _single(problem: Problem, dtypes: tuple[str, ...]) -> frozenset[Tactic]:
    return frozenset(fp32.candidates(problem, dtypes)) if "fp32" in dtypes and not fp32.reason(problem) else frozenset()


@lru_cache(maxsize=4096)
def _of_tile(problem: Problem, device: Device, family: ModuleType, tile: Tile | Patch | Parts | None) -> tuple[Tactic, ...]:
    found = family.candidates(problem, device, only=tile) if tile else family.candidates(problem, device)
    return tuple(t for t, reason in found if not reason)
