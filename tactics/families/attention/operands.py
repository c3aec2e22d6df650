"""Addresses of attention's operands in each format of the tensors that they are parts of; code that both kernels share."""

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from tactics.format import Format, Strides, canonical, padded_channels, representative, strides, too_large
from tactics.problems.attention import AttentionProblem, Operand
from tactics.problems.protocol import Shape4
from tactics.step import Args, ints, linear, member
from tactics.tactic import Tactic, tactic_of

VECTOR = 8  # halfs of a 16-byte access
LINEAR, LAST = Format("fp16", "chw"), Format("fp16", "hwc8")
Lies = tuple[int, tuple[int, int, int, int]]  # the first element; the step in elements of each index
At = tuple[Strides, ...] | None


def formats(shape: Shape4) -> tuple[Format, ...]:
    """The names of linear memory and of channels last, padded to vectors, for a tensor of this shape."""
    wanted = {canonical(f, shape) for f in (LINEAR, LAST)}
    return tuple(f for f in representative(shape) if canonical(f, shape) in wanted)


def known(p: AttentionProblem, tactic: Tactic, strided: At = None) -> dict[str, Lies]:
    """Returns operand name -> (its first element, its steps), and the same for "y", in the memory of the tactic's formats;
    `strided`: as `launches` takes it.
    """
    fmts, shapes = (*tactic.ins, tactic.out), (*p.tensors, p.out)
    memory = strided or tuple(strides(f, s) for f, s in zip(fmts, shapes, strict=True))
    return {name: _lies(o, sizes, shapes[o.tensor], memory[o.tensor]) for name, o, sizes in p.operands()}


def _lies(operand: Operand, sizes: Shape4, shape: Shape4, memory: Strides) -> Lies:
    found = operand.along(sizes, shape)
    if found is None:
        raise ValueError(f"attention: {operand} leaves its tensor")
    first, steps = found
    per = memory.n, memory.block if memory.log2v == 0 else 1, memory.pixel
    b, h, i, j = (count * per[axis] for axis, count in steps)
    return sum(a * m for a, m in zip(first, per, strict=True)), (b, h, i, j)


def aligned(tactic: Tactic, strided: At) -> bool:
    """Whether each tensor begins at a multiple of 16 bytes: a linear one inside another tensor may not."""
    return strided is None or not any(linear(f) for f in (*tactic.ins, tactic.out))


def pairings(p: AttentionProblem, kernel: str) -> Iterator[Tactic]:
    """Yields a tactic for each combination of formats."""
    for *ins, out in product(*(formats(shape) for shape in (*p.tensors, p.out))):
        yield tactic_of(kernel, None, tuple(ins), out)


def padding(p: AttentionProblem, tactic: Tactic) -> int:
    """Padding channels of the output's memory."""
    return padded_channels(tactic.out.layout, p.out[1]) - p.out[1]


def reason(p: AttentionProblem, tactic: Tactic, along: int) -> str:
    """Why a tactic's formats are impossible, or "".

    `along`: the index of y that must run along its channels where these are padded.
    """
    if why := too_large((*p.tensors, p.out), (*tactic.ins, tactic.out)):
        return why
    size, pixels = (p.rows, p.width)[along - 2], p.out[2] * p.out[3]
    ends = p.heads * size == p.out[1] and p.y.step[along] in (pixels, 0) or size == p.out[1] == 1
    if padding(p, tactic) and not (ends and (p.heads == 1 or p.y.step[1] == size * pixels)):
        return "the output's padded channels do not follow the channels of a head"
    return ""


def vectors(at: Lies, contiguous: int, size: int) -> bool:
    """Whether an operand can be read 8 elements at a time along index `contiguous`, whose size is `size`."""
    start, steps = at
    others = [s for i, s in enumerate(steps) if i != contiguous]
    return steps[contiguous] == 1 and not any(v % VECTOR for v in (start, size, *others))


def operand_args(found: Mapping[str, Lies]) -> Args:
    """Returns the kernel's struct Operand for each operand: its first element and steps as members of `q_at`, `k_at`, ..."""
    args: Args = {}
    for name, (start, (batch, head, row, inner)) in found.items():
        args |= member(f"{name}_at", ints(start=start, batch=batch, head=head, row=row, inner=inner))
    return args


def pack(p: AttentionProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs the scale, and the constant that is added, as FP32 in the order of their axes."""
    return {name: np.ascontiguousarray(a, np.float32).reshape(-1) for name, a in weights.items()}


def section_bytes(p: AttentionProblem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    return {"scale": 4 * p.heads} | ({"bias": 4 * int(np.prod(p.span(p.bias)))} if p.bias else {})
