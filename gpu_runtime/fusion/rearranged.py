"""A Concat that joins all parts of one tensor in another order becomes Reshape, Transpose and Reshape: one op between views.

Exporters write windows so (unfold, the Focus of some detectors): a strided Slice for each place in a block.

Example. Concat of x[:, 0::2] and x[:, 1::2] along the channels, x [n,c,h,w]: x as [n,c/2,2,h*w] with its middle axes exchanged.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod

import numpy as np

from gpu_runtime.element_maps.joins import Ops, commons, followed
from gpu_runtime.element_maps.strides import sources
from gpu_runtime.lowering.moves import transposed
from gpu_runtime.network import Network, Op, Options, unique
from tactics.problems.gather import ViewProblem
from tactics.problems.problem import ConcatProblem, MoveProblem
from tactics.problems.protocol import Problem, Shape4

PARTS_PER_MOVE = 16  # from this many launches of parts on, one move of the whole tensor is faster


def rearrange(network: Network) -> Network:
    """Replaces each such Concat, with the moves before and behind it, by one op between views, or by a few ops."""
    options, done = Options(network), set[int]()
    for last in reversed(network.ops):
        if last.when or id(last) in done:
            continue
        joined = (found for found in commons(network, last) if any(isinstance(op.problem, ConcatProblem) for op in found[1]))
        all_of = [(_steps(network.tensors[x], x, passed), x, passed) for x, passed in joined]
        if found := [(steps, x, passed) for steps, x, passed in reversed(all_of) if steps is not None]:
            steps, x, passed = min(found, key=lambda one: len(one[0]))  # of equal ones the one that replaces most ops
            *before, final = _row(network.tensors[x], x, passed, steps)
            options.before(last, *before)
            options.instead(last, final)
            done.update(map(id, passed))
    return options.network()


def _steps(shape: Shape4, source: str, passed: Ops) -> tuple[Problem, ...] | None:
    """Returns moves, each over a shape of its own, that give the same result as the ops `passed` do from a tensor of `shape`;
    None if there are none.
    """
    images, index = followed(shape, source, passed)
    found = None if index is None else _axes(index)
    if index is None or found is None:
        return None
    (sizes, strides), (_, c, h, w) = found, shape
    for b in {*sizes} - {1}:
        deep, flat = (c * b * b, h // b, w // b), (c // (b * b), h * b, w * b)
        for kind, out in (("s2d_dcr", deep), ("s2d_crd", deep), ("d2s_dcr", flat), ("d2s_crd", flat)):
            with suppress(ValueError):  # the tensor has no whole blocks
                blocks = MoveProblem(*shape, kind, out, step=(1, b, b))
                if np.array_equal(sources(blocks, np.arange(index.size)), index):  # type: ignore[arg-type]
                    return (blocks,)
    order = sorted(range(len(sizes)), key=lambda a: -strides[a])
    steps = transposed((images, *(sizes[a] for a in order)), (0, *(order.index(a) + 1 for a in range(len(sizes)))))
    launches = sum(not isinstance(op.problem, ViewProblem) for op in passed)
    return steps if len(steps) < 2 or launches >= PARTS_PER_MOVE * len(steps) else None


def _axes(index: np.ndarray) -> tuple[list[int], list[int]] | None:
    """Returns (sizes, strides) of the fewest axes whose permutation gives a flat index array; None if no permutation of axes
    gives it.

    The order 0 2 4 1 3 5 is sizes (2, 3) with strides (1, 2): six elements as [3, 2], its two axes exchanged.
    """
    sizes, strides = list[int](), list[int]()
    while index.size > 1:
        step = int(index[1]) - int(index[0])
        size = int(np.argmax(np.append(np.diff(index) != step, True))) + 1
        if index.size % size or (np.diff(rows := index.reshape(-1, size)) != step).any():
            return None
        sizes, strides, index = [size, *sizes], [step, *strides], rows[:, 0]
    ordered = sorted(zip(strides, sizes, strict=True))
    dense = all(stride == prod(size for _, size in ordered[:i]) for i, (stride, _) in enumerate(ordered))
    return (sizes, strides) if dense and index[0] == 0 else None


def _row(shape: Shape4, source: str, passed: Ops, steps: Sequence[Problem]) -> Iterator[Op[Problem]]:
    """Yields ops of these steps, with views between them, in place of the ops `passed`."""
    last, row = passed[0], list[Problem]()
    for step in (*steps, None):
        wanted = last.problem.out_shape if step is None else step.in_shapes[0]
        row += [ViewProblem(shape, wanted)] * (shape != wanted or not steps)
        row += [] if step is None else [step]
        shape = wanted if step is None else step.out_shape
    nodes = unique(name for op in reversed(passed) for name in op.nodes)
    for i, problem in enumerate(row, 1):
        made, name = (f"{of} (rearranged {i})" if i < len(row) else of for of in (last.output, last.name))
        yield replace(last, name=name, problem=problem, inputs=(source,), output=made, nodes=nodes)
        source = made
