"""Where attention's operands lie in memory, in each format of the tensors that they are parts of; what both kernels share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from tactics.format import Format, canonical, num_elements, padded_channels, representative, strides
from tactics.problems.attention import AttentionProblem, Operand
from tactics.problems.protocol import Shape4
from tactics.step import Args, ints, member
from tactics.tactic import Tactic

VECTOR = 8  # halfs of a 16-byte access
LINEAR, LAST = Format("fp16", "chw"), Format("fp16", "hwc8")
Lies = tuple[int, tuple[int, int, int, int]]  # the first element, and elements from one index to the next


def formats(shape: Shape4) -> tuple[Format, ...]:
    """The names of linear memory and of channels last, padded to vectors, for a tensor of that shape."""
    wanted = {canonical(f, shape) for f in (LINEAR, LAST)}
    return tuple(f for f in representative(shape) if canonical(f, shape) in wanted)


def lies(operand: Operand, sizes: Shape4, fmt: Format, shape: Shape4) -> Lies | None:
    """The operand's start and steps in a tensor's memory; None where one of its indices follows no one step there."""
    steps = [s if n > 1 else 0 for s, n in zip(operand.step, sizes, strict=True)]
    b, h, i, j = steps
    if canonical(fmt, shape) == canonical(LINEAR, shape):
        return operand.start, (b, h, i, j)
    _, c, height, width = shape
    pixels, at = height * width, strides(fmt, shape)
    units, room = (c * pixels, pixels, 1), (shape[0], c, pixels)
    memory = at.n, 1, at.pixel
    first = operand.start // units[0], operand.start // pixels % c, operand.start % pixels
    reach, found = list(first), []
    for step, size in zip(steps, sizes, strict=True):
        axis = next(a for a, unit in enumerate(units) if step % unit == 0)
        reach[axis] += (size - 1) * (step // units[axis])
        found.append(step // units[axis] * memory[axis])
    if any(r >= n for r, n in zip(reach, room, strict=True)):
        return None
    return sum(f * m for f, m in zip(first, memory, strict=True)), (found[0], found[1], found[2], found[3])


def placed(p: AttentionProblem, tactic: Tactic) -> dict[str, Lies | None]:
    """Each operand, and "y", in the memory of the tactic's formats."""
    fmts, shapes = (*tactic.ins, tactic.out), (*p.tensors, p.out)
    return {name: lies(o, sizes, fmts[o.tensor], shapes[o.tensor]) for name, o, sizes in p.operands()}


def known(p: AttentionProblem, tactic: Tactic) -> dict[str, Lies]:
    """The same of a tactic without a reason against it."""
    return {name: at for name, at in placed(p, tactic).items() if at is not None}


def pairings(p: AttentionProblem, kernel: str) -> Iterator[Tactic]:
    """A tactic for each combination of formats, of large numbers of tensors all alike."""
    for *ins, out in product(*(formats(shape) for shape in (*p.tensors, p.out))):
        yield Tactic(kernel, None, tuple(ins), out)


def padding(p: AttentionProblem, tactic: Tactic) -> int:
    """Channels of the output's memory behind those that it has."""
    return padded_channels(tactic.out.layout, p.out[1]) - p.out[1]


def reason(p: AttentionProblem, tactic: Tactic, along: int) -> str:
    """Why operands cannot be read, or outputs written, in a tactic's formats; `along`: the index of y's that is to run along
    its channels where these are padded."""
    found = placed(p, tactic)
    if any(at is None for at in found.values()):
        return "an operand is no strided part of a tensor in this format"
    if any(num_elements(f, s) >= 2**31 for f, s in zip((*tactic.ins, tactic.out), (*p.tensors, p.out), strict=True)):
        return "a tensor of 2^31 elements or more: they are counted in 32 bits"
    size, pixels = (p.rows, p.width)[along - 2], p.out[2] * p.out[3]
    ends = p.heads * size == p.out[1] and p.y.step[along] in (pixels, 0) or size == p.out[1] == 1
    if padding(p, tactic) and not (ends and (p.heads == 1 or p.y.step[1] == size * pixels)):
        return "padding of the output that no head's channels end with"
    return ""


def vectors(at: Lies, contiguous: int, size: int) -> bool:
    """Whether an operand is read 8 elements at a time along one of its indices, of that size."""
    start, steps = at
    others = [s for i, s in enumerate(steps) if i != contiguous]
    return steps[contiguous] == 1 and not any(v % VECTOR for v in (start, size, *others))


def operand_args(found: Mapping[str, Lies]) -> Args:
    """The kernels' struct Operand of each, as `q_at`, ..."""
    args: Args = {}
    for name, (start, (batch, head, row, inner)) in found.items():
        args |= member(f"{name}_at", ints(start=start, batch=batch, head=head, row=row, inner=inner))
    return args


def pack(p: AttentionProblem, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scale, and the constant that is added, FP32 in the order of their axes."""
    return {name: np.ascontiguousarray(a, np.float32).reshape(-1) for name, a in weights.items()}


def section_bytes(p: AttentionProblem) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    return {"scale": 4 * p.heads} | ({"bias": 4 * int(np.prod(p.span(p.bias)))} if p.bias else {})
