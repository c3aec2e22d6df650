"""Whether a plan says what follows from it: an engine is run, compiled and given memory only where every step is one that its
layer's problem, tactic and placement give.

A layer's tactic must be one that a kernel family offers for it on the plan's device, its steps are derived again (derive.py)
and compared, every argument; its weights have the sizes, and the tables in them the values, that its family packs; tensors lie
where no other is (regions.py). So a file can name no address, stride, grid or tile of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cuda_kernels.device import Device
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import derive, regions
from gpu_runtime.runtime.compatibility import planned_device
from gpu_runtime.runtime.fields import ALIGN, padded
from gpu_runtime.runtime.plan_record import EngineRecord, Layer, Memory, PlanRecord, Section, Step, TensorPlace
from tactics import codec
from tactics.candidates import accepts
from tactics.format import DTYPES, LAYOUTS, canonical, part_format
from tactics.kernels import KERNELS
from tactics.launches import launches, section_bytes, tables
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.problem import (
    AnyProblem,
    BackToBackProblem,
    ConcatProblem,
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    SqueezeExciteProblem,
)
from tactics.problems.protocol import Feature, Problem
from tactics.step import Call, Launch
from tactics.tactic import Tactic

IN_PLACE = (ConcatProblem, MoveProblem, ViewProblem, GatherProblem)  # problems that a layer without launches may have
_launches = lru_cache(maxsize=4096)(launches)


class _Fault(Exception):
    """What is wrong with a plan, in words."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A layer's launches; none: it declares only what shares memory."""

    problem: AnyProblem | None
    tactic: Tactic | None
    launches: tuple[Launch | Call, ...]


def fault(record: EngineRecord, weights: np.ndarray | None = None) -> str | None:
    """What in a plan does not follow from its layers, or None. The record is within its bounds; `weights`: its arena, whose
    tables are looked at where it is given."""
    try:
        _check(record, weights)
    except (EngineError, _Fault) as e:
        return str(e)
    return None


def _check(record: EngineRecord, weights: np.ndarray | None) -> None:
    plan, device, sections = record.plan, planned_device(record.device), record.weight_sections
    section_at = {name: s.offset for name, s in sections.items()}
    todo = []
    for i, layer in enumerate(plan.layers):
        try:
            work = _work(layer, device, sections)
            if weights is not None:
                _check_tables(layer, work, sections, weights)
        except (_Fault, ValueError, ArithmeticError) as e:  # an arithmetic one: of sizes that no tensor has
            raise _Fault(f"layers[{i}] ({layer.name[:40]!r}): {e}") from None
        todo.append(work)
    scratch = _scratch(plan.memory, todo)
    offsets = {name: block.start for name, block in scratch.items()}
    derived = (
        step for i, (layer, work) in enumerate(zip(plan.layers, todo, strict=True))
        for step in derive.steps(work.launches, layer, i, section_at, offsets)
    )  # fmt: skip
    _compare_steps(plan.steps, derived)
    _check_memory(plan, todo, list(scratch.values()))


# ---- a layer


def _work(layer: Layer, device: Device, sections: Mapping[str, Section]) -> _Work:
    if len(layer.outputs) != 1:
        raise _Fault(f"expected one output, got {len(layer.outputs)}")
    for t in layer.tensors:
        _check_place(t)
    problem, tactic = layer.problem, layer.tactic
    if problem is None:
        if tactic or [t.shape4 for t in layer.inputs] != [layer.outputs[0].shape4]:
            raise _Fault("without a problem it can only give a tensor another name")
        return _Work(None, None, ())
    _check_problem(problem)
    if [*problem.in_shapes, problem.out_shape] != [t.shape4 for t in layer.tensors]:
        raise _Fault(f"its tensors' shapes are not those of its problem, {problem}")
    if tactic is None:
        if not isinstance(problem, IN_PLACE) or not _shares(layer):
            raise _Fault(f"{problem}: takes a tactic, or tensors that share memory")
        return _Work(problem, None, ())
    if [*tactic.ins, tactic.out] != [t.format for t in layer.tensors]:
        raise _Fault(f"its tensors' formats are not those of its tactic, {tactic}")
    _check_weights_fit(problem, sections)
    if not accepts(problem, tactic, device):
        raise _Fault(f"{tactic} is no tactic for {problem} on {device.sm}")
    _check_lying(layer, problem, tactic)
    for name, size in section_bytes(problem, tactic).items():
        found = sections.get(f"{layer.name}.{name}")
        if found is None or found.nbytes != size:
            got = None if found is None else found.nbytes
            raise _Fault(f"expected a section {f'{layer.name}.{name}'!r} of {size} bytes, got {got}")
    return _Work(problem, tactic, _launches(problem, tactic, derive.layer_strides(layer)))


def _check_problem(problem: Problem) -> None:
    if isinstance(problem, LibraryProblem):
        try:
            why = problem.excess()
        except (KeyError, TypeError):
            why = f"{problem.function}: its attributes are not of their kinds"
        if why:
            raise _Fault(why)
    for shape in (*problem.in_shapes, problem.out_shape):
        if min(shape) < 1:
            raise _Fault(f"every size must be positive, got {problem}")


def _check_weights_fit(problem: Problem, sections: Mapping[str, Section]) -> None:
    """Before anything counts taps or channels: there are no more weights than bytes of them."""
    held = sum(s.nbytes for s in sections.values())
    for p in (problem.first, problem.second) if isinstance(problem, (BackToBackProblem, SqueezeExciteProblem)) else (problem,):
        if isinstance(p, (ConvProblem, ConvTransposeProblem)) and p.k * (p.c // p.groups) * p.r * p.s > held:
            raise _Fault(f"{p}: has more weights than the engine")


def _check_place(t: TensorPlace) -> None:
    """A tensor's place: aligned, or where its channels begin in the tensor that it lies in."""
    fmt, whole = t.format, t.inside
    if t.offset % (16 if LAYOUTS[fmt.layout].vector >= 8 else DTYPES[fmt.dtype].itemsize):
        raise _Fault(f"tensor {t.name[:40]!r}: no {fmt} begins at byte {t.offset}")
    if not whole:
        return
    (n, channels, h, w), first, c = whole.shape4, whole.channel, t.shape4[1]
    if (n, c, h, w) != t.shape4 or first + c > channels:
        raise _Fault(f"tensor {t.name[:40]!r} does not fit the one that it lies in")
    if part_format(whole.format, whole.shape4, first, c) != canonical(fmt, t.shape4):
        raise _Fault(f"tensor {t.name[:40]!r}: channels {first} to {first + c} of {whole.format} are no tensor of {fmt}")
    if t.offset != whole.first_byte:
        raise _Fault(f"tensor {t.name[:40]!r}: expected offset {whole.first_byte}, got {t.offset}")


def _check_lying(layer: Layer, problem: Problem, tactic: Tactic) -> None:
    """Which tensors may lie inside others, or begin at any element: those of kernels that take strides."""
    placed = [t.is_placed for t in layer.tensors]
    if any(placed) and not KERNELS[tactic.kernel].placed:
        raise _Fault(f"{tactic.kernel} reads and writes whole tensors")
    if Feature.RESIDUAL in problem.needs and placed[1] != placed[-1] and not KERNELS[tactic.kernel].placed_residual:
        raise _Fault(f"{tactic.kernel} reads a residual as it writes its output")


def _shares(layer: Layer) -> bool:
    """Whether each input lies in the output's memory, or the output in each input's."""
    (out,) = layer.outputs
    return all(_holds(out, x) or _holds(x, out) for x in layer.inputs)


def _holds(outer: TensorPlace, inner: TensorPlace) -> bool:
    """Whether `inner` lies in the memory that `outer` does."""
    whole, region = outer.whole, regions.region(inner)
    return whole.offset <= region.start and region.end <= whole.offset + whole.nbytes


def _check_tables(layer: Layer, work: _Work, sections: Mapping[str, Section], weights: np.ndarray) -> None:
    """What kernels take addresses from is what the problem says."""
    if work.problem is None or work.tactic is None:
        return
    for name, table in _tables(work.problem, work.tactic).items():
        s = sections[f"{layer.name}.{name}"]
        if not np.array_equal(weights[s.offset : s.end], table.view(np.uint8)):
            raise _Fault(f"section '{s.name[:60]}' holds other numbers than its problem")


@lru_cache(maxsize=1024)
def _tables(problem: AnyProblem, tactic: Tactic) -> dict[str, np.ndarray]:
    return tables(problem, tactic)


# ---- steps


def _compare_steps(given: Sequence[Step], derived: Iterator[Step]) -> None:
    count = 0
    for count, step in enumerate(derived, 1):  # noqa: B007
        if count > len(given):
            raise _Fault(f"steps: there are {len(given)}, its layers launch more")
        if given[count - 1] != step:
            raise _Fault(_difference(given[count - 1], step, f"steps[{count - 1}]"))
    if count != len(given):
        raise _Fault(f"steps: there are {len(given)}, its layers launch {count}")


def _difference(got: Step, expected: Step, at: str) -> str:
    if type(got) is not type(expected):
        return f"{at}: expected a {type(expected).__name__}, got a {type(got).__name__}"
    mine, its = (codec.to_json(type(expected), step, defaults=True) for step in (got, expected))
    key = next(key for key in its if mine[key] != its[key])
    have, want = mine[key], its[key]
    if key == "args" and len(have) == len(want):
        key, have, want = next((f"args[{i}]", a, b) for i, (a, b) in enumerate(zip(have, want, strict=True)) if a != b)
    return f"{at}.{key}: expected {str(want)[:80]}, got {str(have)[:80]}"


# ---- memory


def _scratch(memory: Memory, todo: list[_Work]) -> dict[str, regions.Block]:
    """Workspace and counters, by name: as large, and alive as long, as the launches need them."""
    using = [(i, launch) for i, work in enumerate(todo, 1) for launch in work.launches if launch.workspace]
    given = {derive.WORKSPACE: memory.workspace, derive.COUNTERS: memory.zeros[0] if memory.zeros else None}
    need = {}
    if using:
        when = [i for i, _ in using]
        need = {
            derive.WORKSPACE: (max(s.workspace for _, s in using), min(when), max(when)),
            derive.COUNTERS: (max(s.counters for _, s in using), 0, len(todo) + 1),
        }
    blocks = {}
    for name, place in given.items():
        wrong = name in need if place is None else name not in need or place[1] != need[name][0] or place[0] % ALIGN != 0
        if wrong or memory.zeros[1:]:
            raise _Fault(f"memory: expected {need.get(name, (0,))[0]} bytes of {name} at a multiple of {ALIGN}, got {place}")
        if place:
            blocks[name] = regions.Block(place[0], sum(place), *need[name][1:])
    return blocks


def _check_memory(plan: PlanRecord, todo: list[_Work], scratch: list[regions.Block]) -> None:
    problem, blocks = regions.fault(plan, [work.tactic is not None for work in todo], scratch)
    if problem:
        raise _Fault(problem)
    last_step, steps = [], 0
    for work in todo:
        steps += len(work.launches)
        last_step.append(steps - 1)
    if bad := [b for b in blocks if b.start % ALIGN]:
        raise _Fault(f"memory: expected tensors at multiples of {ALIGN}, got {bad[0].start}")
    end = max((padded(b.end) for b in blocks), default=0)
    if plan.memory.activation_bytes != end:
        raise _Fault(f"memory.activation_bytes: its tensors end at {end}, got {plan.memory.activation_bytes}")
    if plan.memory.frees != derive.frees([(b.start, b.end - b.start, b.last) for b in blocks], last_step):
        raise _Fault("memory.frees: not what its layers leave unread")


def check(record: EngineRecord, weights: np.ndarray) -> None:
    """EngineError where a step or place of the plan does not follow from its layers."""
    if problem := fault(record, weights):
        raise EngineError(f"the engine's plan is not one that this gpu_runtime makes: {problem}. Build the engine again")
