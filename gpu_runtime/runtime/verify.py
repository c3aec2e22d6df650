"""Derives a plan's steps from its layers, and checks the plan against them: an engine compiles, allocates and runs only steps
that follow from the problems, tactics and places of its layers.

A kernel family must offer the layer's tactic for it on the plan's device. The layer's steps are derived (derive.py). Its
weights must have the sizes, and their tables the values, that the family packs. Tensors must not overlap live ones
(dataflow.py). So a file cannot introduce an address, stride, grid or tile of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from cuda_kernels.device import Device
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import dataflow, derive
from gpu_runtime.runtime.compatibility import planned_device
from gpu_runtime.runtime.dataflow import Fault
from gpu_runtime.runtime.fields import ALIGN, Span
from gpu_runtime.runtime.plan_record import Container, EngineRecord, Layer, Memory, PlanRecord, Section, Step, TensorPlace
from tactics.candidates import accepts
from tactics.format import DTYPES, LAYOUTS, CanonicalFormat, Format, canonical, is_bytes, part_format
from tactics.kernels import KERNELS
from tactics.launches import launches, section_bytes, tables
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.problem import ConvProblem, ConvTransposeProblem
from tactics.problems.protocol import Feature, Problem
from tactics.step import Call, Launch
from tactics.tactic import Tactic

_launches, _tables = lru_cache(maxsize=4096)(launches), lru_cache(maxsize=1024)(tables)


Work = tuple[Launch | Call, ...]  # a layer's launches; empty if it only shares memory


def derived(record: EngineRecord, weights: np.ndarray | None = None) -> EngineRecord:
    """Returns the record with the steps of its plans, and the memory that is free after each step.

    The record must have passed bounds.fault. `weights`: the record's arena of weights, whose tables are checked; None: they
    are not. Raises Fault if the record contradicts its layers.
    """
    try:
        device = planned_device(record.device)
    except EngineError as e:
        raise Fault(str(e)) from None
    plans = []
    for number, plan in enumerate(record.plans):
        try:
            plans.append(_derived(plan, device, record.weight_sections, weights))
        except Fault as e:
            raise Fault(f"plans[{number}]: {e}" if record.plans[1:] else str(e)) from None
    return replace(record, plans=tuple(plans))


def _derived(plan: PlanRecord, device: Device, stored: Mapping[str, Section], weights: np.ndarray | None) -> PlanRecord:
    """Returns a plan with its steps. `stored`: name -> section of weights in the file; `weights`: as for `derived`."""
    held = sum(s.nbytes for s in stored.values())
    sections = {**stored, **{name: stored[other] for name, other in plan.renamed.items()}}
    todo: list[Work] = []
    for i, layer in enumerate(plan.layers):
        try:
            todo.append(_work(layer, device, sections, held))
            if weights is not None:
                _check_tables(layer, sections, weights)
        except (ValueError, ArithmeticError) as e:  # arithmetic errors come from impossible sizes
            raise Fault(f"layers[{i}] ({layer.name[:40]!r}): {e}") from None
    scratch = _scratch(plan.memory, todo)
    freed = dataflow.prove(plan, [i for i, work in enumerate(todo) if any(launch.workspace for launch in work)])
    section_at = {name: s.offset for name, s in sections.items()}
    steps: list[Step] = []
    frees: dict[int, list[Span]] = {}
    for i, (layer, work) in enumerate(zip(plan.layers, todo, strict=True)):
        steps += derive.steps(work, layer, i, section_at, scratch)
        if freed[i] and steps:
            frees.setdefault(len(steps) - 1, []).extend(freed[i])
    rows = tuple((step, tuple(sorted(spans))) for step, spans in frees.items())
    return replace(plan, steps=tuple(steps), frees=rows)


# ---- a layer


def _work(layer: Layer, device: Device, sections: Mapping[str, Section], held: int) -> Work:
    """Checks a layer and returns its launches. `held`: the bytes of all sections. Raises Fault."""
    if len(layer.outputs) != 1:
        raise Fault(f"expected one output, got {len(layer.outputs)}")
    for t in layer.tensors:
        _check_place(t)
    problem, tactic = layer.problem, layer.tactic
    if layer.images and layer.images[1] != layer.outputs[0].shape4[0]:
        raise Fault(f"expected an output of the {layer.images[1]} images of its piece, got {layer.outputs[0].shape4[0]}")
    if problem is None:
        if tactic or [t.shape4 for t in layer.inputs] != [layer.outputs[0].shape4]:
            raise Fault("it has no problem, so its input and output must have one shape, and it must have no tactic")
        return ()
    _check_problem(problem)
    if [*problem.in_shapes, problem.out_shape] != [t.shape4 for t in layer.tensors]:
        raise Fault(f"the shapes of its tensors differ from its problem, {problem}")
    if tactic is None:
        return ()
    if [*tactic.ins, tactic.out] != [t.format for t in layer.tensors]:
        raise Fault(f"the formats of its tensors differ from its tactic, {tactic}")
    _check_weights_fit(problem, held)
    if not accepts(problem, tactic, device):
        raise Fault(f"tactic {tactic} cannot compute {problem} on {device.sm}")
    _check_lying(layer, problem, tactic)
    for name, size in section_bytes(problem, tactic).items():
        found = sections.get(f"{layer.name}.{name}")
        if found is None or found.nbytes != size:
            got = None if found is None else found.nbytes
            raise Fault(f"expected a section {f'{layer.name}.{name}'!r} of {size} bytes, got {got}")
    work = _launches(problem, tactic, derive.layer_strides(layer))
    _check_maps(layer, work, sections)
    return work


def _check_problem(problem: Problem) -> None:
    if isinstance(problem, LibraryProblem):
        try:
            why = problem.excess()
        except (KeyError, TypeError):
            why = f"{problem.function}: its attributes have wrong types"
        if why:
            raise Fault(why)
    for shape in problem.all_shapes:
        if min(shape) < 1:
            raise Fault(f"every size must be positive, got {problem}")


def _check_weights_fit(problem: Problem, held: int) -> None:
    """Raises Fault if a convolution has more weights than the file has bytes, before anything is computed from its sizes."""
    for p in problem.parts:
        if isinstance(p, (ConvProblem, ConvTransposeProblem)) and p.k * (p.c // p.groups) * p.r * p.s > held:
            raise Fault(f"{p}: needs more weights than the engine holds")


def _format_inside(whole: Container, c: int) -> CanonicalFormat | None:
    """Returns the format of `c` channels inside `whole`; None: they are no tensor.

    A block of a blocked layout may itself be a tensor whose last dimension is its channels, with others inside: of 48 channels
    in chw32 the first 32, and of those 16.
    """
    (n, channels, h, w), first, lay = whole.shape4, whole.channel, LAYOUTS[whole.format.layout]
    found, block = part_format(whole.format, whole.shape4, first, c), first // lay.vector
    if found or not lay.blocked or block != (first + c - 1) // lay.vector or (block + 1) * lay.vector > channels:
        return found
    last = Format(whole.format.dtype, "hwc16" if is_bytes(whole.format) else "hwc8")
    return part_format(last, (n, lay.vector, h, w), first % lay.vector, c)


def _check_place(t: TensorPlace) -> None:
    """Raises Fault unless a tensor's place is aligned and, inside another tensor, at the start of its channels."""
    fmt, whole = t.format, t.inside
    if t.offset % (16 if LAYOUTS[fmt.layout].vector >= 8 else DTYPES[fmt.dtype].itemsize):
        raise Fault(f"tensor {t.name[:40]!r}: byte {t.offset} is not aligned for {fmt}")
    if not whole:
        return
    (n, channels, h, w), first, c = whole.shape4, whole.channel, t.shape4[1]
    if (n, c, h, w) != t.shape4 or first + c > channels:
        raise Fault(f"tensor {t.name[:40]!r} does not fit the tensor that contains it")
    if _format_inside(whole, c) != canonical(fmt, t.shape4):
        raise Fault(f"tensor {t.name[:40]!r}: channels {first} to {first + c} of {whole.format} are not a tensor of {fmt}")
    if t.offset != whole.first_byte:
        raise Fault(f"tensor {t.name[:40]!r}: expected offset {whole.first_byte}, got {t.offset}")


def _check_lying(layer: Layer, problem: Problem, tactic: Tactic) -> None:
    """Raises Fault if a tensor lies inside another or off a vector boundary, but the tactic's kernel has no strides for it."""
    placed = [t.is_placed for t in layer.tensors]
    if any(placed) and not KERNELS[tactic.kernel].placed:
        raise Fault(f"{tactic.kernel} reads and writes whole tensors, not parts of one")
    if Feature.RESIDUAL in problem.needs and placed[1] != placed[-1] and not KERNELS[tactic.kernel].placed_residual:
        raise Fault(f"{tactic.kernel} cannot read a residual with other strides than its output")


def _check_maps(layer: Layer, work: Work, sections: Mapping[str, Section]) -> None:
    """Raises Fault unless the bytes that each tensor map describes lie in the memory of its argument."""
    for launch in work:
        for m in (value for kind, value in launch.args if kind == "map") if isinstance(launch, Launch) else ():
            of, which = m.of
            if of in ("in", "out"):
                t = layer.inputs[which] if of == "in" else layer.outputs[0]
                inside, offset = dataflow.holds(t, m), t.offset
            elif of == "weights":
                s = sections[f"{layer.name}.{which}"]
                inside, offset = m.nbytes <= s.nbytes, s.offset
            else:
                inside, offset = m.nbytes <= {derive.WORKSPACE: launch.workspace, derive.COUNTERS: launch.counters}[of], 0
            if not inside or offset % 16:
                raise Fault(f"a tensor map describes memory outside of its argument, {of} {which}: {m} at byte {offset}")


def _check_tables(layer: Layer, sections: Mapping[str, Section], weights: np.ndarray) -> None:
    """Raises Fault unless the tables by which kernels address memory are as the problem requires."""
    if layer.problem is None or layer.tactic is None:
        return
    for name, table in _tables(layer.problem, layer.tactic).items():
        s = sections[f"{layer.name}.{name}"]
        if not np.array_equal(weights[s.offset : s.end], table.view(np.uint8)):
            raise Fault(f"section '{s.name[:60]}' differs from the table of its problem")


# ---- memory


def _scratch(memory: Memory, todo: Sequence[Work]) -> dict[str, int]:
    """Returns name -> offset of workspace and counters, after a check that each is as large as the launches need. Raises
    Fault.
    """
    using = [launch for work in todo for launch in work if launch.workspace]
    need = {
        derive.WORKSPACE: max((s.workspace for s in using), default=None),
        derive.COUNTERS: max((s.counters for s in using), default=None),
    }
    given = {derive.WORKSPACE: memory.workspace, derive.COUNTERS: memory.zeros[0] if memory.zeros else None}
    for name, place in given.items():
        wrong = need[name] is not None if place is None else place[1] != need[name] or place[0] % ALIGN != 0
        if wrong or memory.zeros[1:]:
            raise Fault(f"memory: expected {need[name] or 0} bytes of {name} at a multiple of {ALIGN}, got {place}")
    return {name: place[0] for name, place in given.items() if place}


def checked(record: EngineRecord, weights: np.ndarray) -> EngineRecord:
    """Returns the record with its steps. Raises EngineError if the plan contradicts its layers."""
    try:
        return derived(record, weights)
    except Fault as e:
        raise EngineError(f"the engine's plan is not valid: {e}. Build the engine again") from None
