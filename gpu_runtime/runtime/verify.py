"""Whether a plan says what follows from it: an engine is run, compiled and given memory only where every step is one that its
layer's problem, tactic and placement give.

A layer's problem is decoded, its tactic must be one that a kernel family offers for it on the plan's device, its steps are
derived again (derive.py) and compared, every argument; its weights have the sizes, and the tables in them the values, that
its family packs; tensors lie where no other is (regions.py). So a file can name no address, stride, grid or tile of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cuda_kernels.device import SMEM_PER_BLOCK, Device
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import derive, regions
from tactics.candidates import accepts
from tactics.families.table import STRIDED, STRIDED_RESIDUAL
from tactics.format import DTYPES, LAYOUTS, Format, canonical, part_format
from tactics.launches import launches, section_bytes, tables
from tactics.problems import codec
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.library import LibraryProblem
from tactics.problems.problem import ConcatProblem, ConvProblem, ConvTransposeProblem, MoveProblem, Problem
from tactics.problems.protocol import Feature
from tactics.step import Call, Launch
from tactics.tactic import Tactic

ALIGN = 256  # bytes, of whatever has memory of its own
LARGEST_DEVICE = {  # of a GPU's facts, what none exceeds
    "num_sms": 1 << 12, "smem_per_block": 256 << 10, "smem_per_sm": 512 << 10, "max_threads_per_sm": 1 << 12,
    "max_blocks_per_sm": 1 << 7, "regs_per_sm": 1 << 20,
}  # fmt: skip
IN_PLACE = (ConcatProblem, MoveProblem, ViewProblem, GatherProblem)  # problems that a layer without launches may have
_launches = lru_cache(maxsize=4096)(launches)


class _Fault(Exception):
    """What is wrong with a plan, in words."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A layer's launches; none: it declares only what shares memory."""

    problem: Problem | None
    tactic: Tactic | None
    launches: tuple[Launch | Call, ...]


def planned_device(plan: Mapping) -> Device:
    """The device a plan was made for, with the facts that it recorded. Raises EngineError where they are none of a GPU."""
    fields = Device.__dataclass_fields__
    facts = {k: v for k, v in plan["device"].items() if k in fields}
    if odd := [k for k, v in facts.items() if type(v).__name__ not in (fields[k].type, fields[k].type.replace("float", "int"))]:
        raise EngineError(f"the engine's device record is wrong: {odd[0]} is {facts[odd[0]]!r}; build the engine again")
    numbers = {k: v for k, v in facts.items() if type(v) in (int, float)}
    if odd := [k for k, v in numbers.items() if not 0 < v <= LARGEST_DEVICE.get(k, 1 << 40)]:
        raise EngineError(f"the engine's device record is wrong: no GPU's {odd[0]} is {facts[odd[0]]}; build the engine again")
    try:
        device = Device(**(facts | {"measured": False}))
        if device.cc not in SMEM_PER_BLOCK:
            raise ValueError(f"{device.sm} is not known")
    except (TypeError, ValueError) as e:
        raise EngineError(f"the engine's device record is incomplete or wrong ({e}): build the engine again") from None
    return device


def fault(plan: Mapping, weights: np.ndarray | None = None) -> str | None:
    """What in a plan does not follow from its layers, or None. The plan fits plan_schema; `weights`: its arena, whose tables
    are looked at where it is given."""
    try:
        _check(plan, weights)
    except EngineError as e:
        return str(e)
    except _Fault as e:
        return str(e)
    return None


def _check(plan: Mapping, weights: np.ndarray | None) -> None:
    device = planned_device(plan)
    sections = {s["name"]: s for s in plan["sections"] if s["kind"] == "weights"}
    section_at = {name: s["offset"] for name, s in sections.items()}
    todo = []
    for i, layer in enumerate(plan["layers"]):
        try:
            work = _work(layer, device, sections)
            if weights is not None and work.tactic:
                _check_tables(layer, work, sections, weights)
        except (_Fault, ValueError, ArithmeticError) as e:  # an arithmetic one: of sizes that no tensor has
            raise _Fault(f"layers[{i}] ({layer['name'][:40]!r}): {e}") from None
        todo.append(work)
    scratch = _scratch(plan, todo)
    offsets = {name: block.start for name, block in scratch.items()}
    derived = (
        step for i, (layer, work) in enumerate(zip(plan["layers"], todo, strict=True))
        for step in derive.steps(work.launches, layer, i, section_at, offsets)
    )  # fmt: skip
    _compare_steps(plan["steps"], derived)
    _check_memory(plan, todo, list(scratch.values()))


# ---- a layer


def _work(layer: Mapping, device: Device, sections: Mapping[str, Mapping]) -> _Work:
    if len(layer["outputs"]) != 1:
        raise _Fault(f"expected one output, got {len(layer['outputs'])}")
    tensors = (*layer["inputs"], *layer["outputs"])
    for t in tensors:
        _check_place(t)
    if layer["problem"] is None:
        x, *more = layer["inputs"] or [None]
        if layer["tactic"] or more or x is None or x["shape4"] != layer["outputs"][0]["shape4"]:
            raise _Fault("without a problem it can only give a tensor another name")
        _compare(layer, derive.description(None, None))
        return _Work(None, None, ())
    problem = _decoded(layer["problem"])
    shapes = [*problem.in_shapes, problem.out_shape]
    if [list(s) for s in shapes] != [t["shape4"] for t in tensors]:
        raise _Fault(f"its tensors' shapes are not those of its problem, {problem}")
    if not layer["tactic"]:
        if not isinstance(problem, IN_PLACE) or not _shares(layer):
            raise _Fault(f"{problem}: takes a tactic, or tensors that share memory")
        _compare(layer, derive.description(problem, None))
        return _Work(problem, None, ())
    tactic = Tactic.parse(layer["tactic"])
    if [str(f) for f in (*tactic.ins, tactic.out)] != [t["format"] for t in tensors]:
        raise _Fault(f"its tensors' formats are not those of its tactic, {tactic}")
    _check_weights_fit(problem, sections)
    if not accepts(problem, tactic, device):
        raise _Fault(f"{tactic} is no tactic for {problem} on {device.sm}")
    _check_lying(layer, problem, tactic)
    sizes = {f"{layer['name']}.{name}": n for name, n in section_bytes(problem, tactic).items()}
    if bad := [n for n, size in sizes.items() if n not in sections or sections[n]["nbytes"] != size]:
        raise _Fault(f"expected a section {bad[0]!r} of {sizes[bad[0]]} bytes, got {sections.get(bad[0], {}).get('nbytes')}")
    _compare(layer, derive.description(problem, tactic))
    return _Work(problem, tactic, _launches(problem, tactic, derive.layer_strides(layer)))


def _decoded(data: Mapping) -> Problem:
    problem = codec.from_json(data)
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
    return problem


def _check_weights_fit(problem: Problem, sections: Mapping[str, Mapping]) -> None:
    """Before anything counts taps or channels: there are no more weights than bytes of them."""
    held = sum(s["nbytes"] for s in sections.values())
    for p in (problem, getattr(problem, "first", problem), getattr(problem, "second", problem)):
        if isinstance(p, (ConvProblem, ConvTransposeProblem)) and p.k * (p.c // p.groups) * p.r * p.s > held:
            raise _Fault(f"{p}: has more weights than the engine")


def _compare(layer: Mapping, derived: Mapping) -> None:
    """Every key of `derived` stands in the record."""
    if bad := [key for key, value in derived.items() if layer.get(key) != value]:
        raise _Fault(f"its {bad[0]} does not follow from its problem and tactic: expected {str(derived[bad[0]])[:200]}")


def _check_place(t: Mapping) -> None:
    """A tensor's place: aligned, or where its channels begin in the tensor that it lies in."""
    shape, whole = t["shape4"], t.get("inside")
    fmt = Format.parse(t["format"])
    if t["offset"] % (16 if LAYOUTS[fmt.layout].vector >= 8 else DTYPES[fmt.dtype].itemsize):
        raise _Fault(f"tensor {t['name'][:40]!r}: no {fmt} begins at byte {t['offset']}")
    if not whole:
        return
    around = Format.parse(whole["format"])
    n, channels, h, w = whole["shape4"]
    first, c = whole["channel"], shape[1]
    if [n, h, w] != [shape[0], *shape[2:]] or first + c > channels:
        raise _Fault(f"tensor {t['name'][:40]!r} does not fit the one that it lies in")
    if part_format(around, tuple(whole["shape4"]), first, c) != canonical(fmt, tuple(shape)):
        raise _Fault(f"tensor {t['name'][:40]!r}: channels {first} to {first + c} of {around} are no tensor of {fmt}")
    if t["offset"] != derive.first_byte(whole, first):
        raise _Fault(f"tensor {t['name'][:40]!r}: expected offset {derive.first_byte(whole, first)}, got {t['offset']}")


def _check_lying(layer: Mapping, problem: Problem, tactic: Tactic) -> None:
    """Which tensors may lie inside others, or begin at any element: those of kernels that take strides."""
    inside = [derive.is_placed(t) for t in (*layer["inputs"], *layer["outputs"])]
    if any(inside) and tactic.kernel not in STRIDED:
        raise _Fault(f"{tactic.kernel} reads and writes whole tensors")
    if Feature.RESIDUAL in problem.needs and inside[-2] != inside[-1] and tactic.kernel not in STRIDED_RESIDUAL:
        raise _Fault(f"{tactic.kernel} reads a residual as it writes its output")


def _shares(layer: Mapping) -> bool:
    """Whether each input lies in the output's memory, or the output in each input's."""
    (out,) = layer["outputs"]
    mine, around = regions.region(out), derive.block(out)
    for t in layer["inputs"]:
        x, whole = regions.region(t), derive.block(t)
        if not (around[0] <= x.start and x.end <= sum(around)) and not (whole[0] <= mine.start and mine.end <= sum(whole)):
            return False
    return True


def _check_tables(layer: Mapping, work: _Work, sections: Mapping[str, Mapping], weights: np.ndarray) -> None:
    """What kernels take addresses from is what the problem says."""
    for name, table in _tables(work.problem, work.tactic).items():
        s = sections[f"{layer['name']}.{name}"]
        if not np.array_equal(weights[s["offset"] : s["offset"] + s["nbytes"]], table.view(np.uint8)):
            raise _Fault(f"section '{s['name'][:60]}' holds other numbers than its problem")


@lru_cache(maxsize=1024)
def _tables(problem: Problem, tactic: Tactic) -> dict[str, np.ndarray]:
    return tables(problem, tactic)


# ---- steps


def _compare_steps(given: list, derived: Iterator[dict]) -> None:
    count = 0
    for count, step in enumerate(derived, 1):  # noqa: B007
        if count > len(given):
            raise _Fault(f"steps: there are {len(given)}, its layers launch more")
        got = given[count - 1]
        if bad := [k for k in step if got.get(k) != step[k]]:
            key, expected = bad[0], step[bad[0]]
            have = got.get(key)
            if key == "args" and isinstance(have, list) and len(have) == len(expected):
                key, have, expected = next(
                    (f"args[{i}]", a, b) for i, (a, b) in enumerate(zip(have, expected, strict=True)) if a != b
                )
            raise _Fault(f"steps[{count - 1}].{key}: expected {str(expected)[:80]}, got {str(have)[:80]}")
    if count != len(given):
        raise _Fault(f"steps: there are {len(given)}, its layers launch {count}")


# ---- memory


def _scratch(plan: Mapping, todo: list[_Work]) -> dict[str, regions.Block]:
    """Workspace and counters, by name: as large, and alive as long, as the launches need them."""
    memory, end = plan["memory"], len(todo) + 1
    using = [(i, launch) for i, work in enumerate(todo, 1) for launch in work.launches if launch.workspace]
    zeros = memory.get("zeros") or []
    given = {derive.WORKSPACE: memory.get("workspace"), derive.COUNTERS: zeros[0] if zeros else None}
    need = {}
    if using:
        when = [i for i, _ in using]
        need = {
            derive.WORKSPACE: (max(s.workspace for _, s in using), min(when), max(when)),
            derive.COUNTERS: (max(s.counters for _, s in using), 0, end),
        }
    blocks = {}
    for name, place in given.items():
        if (place is None) != (name not in need) or (place and (place[1] != need[name][0] or place[0] % ALIGN)) or zeros[1:]:
            raise _Fault(f"memory: expected {need.get(name, (0,))[0]} bytes of {name} at a multiple of {ALIGN}, got {place}")
        if place:
            blocks[name] = regions.Block(place[0], sum(place), *need[name][1:])
    return blocks


def _check_memory(plan: Mapping, todo: list[_Work], scratch: list[regions.Block]) -> None:
    problem, blocks = regions.fault(plan, [work.tactic is not None for work in todo], scratch)
    if problem:
        raise _Fault(problem)
    last_step, steps = [], 0
    for work in todo:
        steps += len(work.launches)
        last_step.append(steps - 1)
    memory = plan["memory"]
    if bad := [b for b in blocks if b.start % ALIGN]:
        raise _Fault(f"memory: expected tensors at multiples of {ALIGN}, got {bad[0].start}")
    end = max((-(-b.end // ALIGN) * ALIGN for b in blocks), default=0)
    ends = [s["offset"] + -(-s["nbytes"] // ALIGN) * ALIGN for s in plan["sections"] if s["kind"] == "weights"]
    if memory["weight_bytes"] != max(ends, default=0):
        raise _Fault(f"memory.weight_bytes: its sections end at {max(ends, default=0)}, got {memory['weight_bytes']}")
    if memory["activation_bytes"] != end:
        raise _Fault(f"memory.activation_bytes: its tensors end at {end}, got {memory['activation_bytes']}")
    if (memory.get("frees") or []) != derive.frees([(b.start, b.end - b.start, b.last) for b in blocks], last_step):
        raise _Fault("memory.frees: not what its layers leave unread")
