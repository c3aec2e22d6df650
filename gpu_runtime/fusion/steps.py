"""Pointwise ops as steps: the operations that an op applies to one of its inputs, and one op made of the steps of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpu_runtime.lowering.pointwise import SWAPPED, Affine, then
from gpu_runtime.network import Network, Op, computes, unique
from tactics.problems.pointwise_ops import ACTIVATIONS, NONE, Activation, Stage
from tactics.problems.problem import PointwiseProblem
from tactics.problems.protocol import Problem, Shape4

UNSCALED: Affine = (np.ones(1), np.zeros(1))


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant operand: its array, as stored or FP64, and its shape when broadcast against a tensor [n,c,h,w]."""

    array: np.ndarray
    shape: Shape4

    def along(self, axis: str, size: int) -> np.ndarray | None:
        """Returns the values along `axis` of nchw, [size] or [1]; with axis "" a scalar's [1]; None where they vary along
        another axis."""
        apart = all(d == 1 for a, d in zip("nchw", self.shape, strict=True) if a != axis)
        return self.array.reshape(-1) if apart and self.array.size in (1, size) else None


class Step(NamedTuple):
    """An operation; its operand is a tensor's name or a constant; without one, the operation's parameter is its scalar."""

    op: str
    operand: str | Constant | None
    params: tuple[float, ...] = ()


def steps(op: Op[Problem] | None, tensor: str) -> list[Step] | None:
    """Returns the steps that an op applies to `tensor`, one of its inputs; None if the op is not pointwise, or `tensor` is
    neither its first input nor the other operand of its only stage.
    """
    if not computes(op, PointwiseProblem):
        return None
    stages = op.problem.stages
    if op.inputs[0] == tensor:
        return [Step(stage.op, _operand(op, stage), () if stage.operand else stage.params) for stage in stages]
    if len(stages) != 1 or stages[0].op == "prelu" or stages[0].operand != "t1" or op.inputs[1] != tensor:
        return None
    return [Step(SWAPPED.get(stages[0].op, stages[0].op), op.inputs[0])]


def _operand(op: Op[PointwiseProblem], stage: Stage) -> str | Constant | None:
    if not stage.operand:
        return None
    i = int(stage.operand[1:])
    if stage.operand.startswith("t"):
        return op.inputs[i]
    return Constant(op.weights[stage.operand], op.problem.span(op.problem.constants[i]))


def along(step: Step, axis: str, size: int) -> np.ndarray | None:
    """Returns the step's constant along `axis` of nchw as FP64 [size], or [1] if it is the same for all; None if it varies
    along another axis.
    """
    if isinstance(step.operand, Constant):
        found = step.operand.along(axis, size)
        return None if found is None else found.astype(np.float64)
    return np.array(step.params, np.float64) if step.operand is None and len(step.params) == 1 else None


class Activated(NamedTuple):
    """An activation, its slope (None except for prelu), and the ops that spell it."""

    act: Activation = NONE
    slope: np.ndarray | None = None
    ops: tuple[Op[Any], ...] = ()


def activation(step: Step, axis: str, size: int) -> Activated | None:
    """Returns the activation that a step is, with a slope along `axis` of nchw, [size] or [1], and no ops; None for others."""
    slope = along(step, axis, size) if step.op == "prelu" else None
    fits = step.op in ACTIVATIONS and (step.operand is None or slope is not None)
    return Activated(Activation(step.op, step.params), slope if slope is None else slope.astype(np.float32)) if fits else None


def scaled(affine: Affine, step: Step, axis: str, size: int) -> Affine | None:
    """Composes scale and shift, each [size] or [1], with a step; None where the step is neither a scale nor a shift."""
    c = along(step, axis, size)
    return None if c is None else then(affine, step.op, c)


def leading_affine(found: Sequence[Step], channels: int) -> tuple[Affine, int]:
    """Returns (scale and shift per channel, each [channels] or [1] FP64, of all leading steps that scale or shift; the number
    of these steps).
    """
    affine, count = UNSCALED, 0
    while count < len(found) and (more := scaled(affine, found[count], "c", channels)) is not None:
        affine, count = more, count + 1
    return affine, count


@dataclass(frozen=True, slots=True)
class Chain:
    """Ops in a row, each the only reader of the one before; together they apply `steps` to `tensor`."""

    tensor: str
    ops: tuple[Op[Any], ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def output(self) -> str:
        return self.ops[-1].output if self.ops else self.tensor

    @property
    def inputs(self) -> tuple[str, ...]:
        return unique((self.tensor, *(s.operand for s in self.steps if isinstance(s.operand, str))))

    @property
    def constants(self) -> list[Constant]:
        return [s.operand for s in self.steps if isinstance(s.operand, Constant)]

    def op(self, tensors: Mapping[str, Shape4]) -> Op[PointwiseProblem]:
        """Makes one op of the chain, with the names and nodes of all its ops. `tensors`: tensor -> NCHW shape."""
        over, inputs, weights, stages = tensors[self.output], self.inputs, dict[str, np.ndarray](), list[Stage]()

        def span(shape: Shape4) -> str:
            return "nchw" if shape == over else "".join(a for a, d, o in zip("nchw", shape, over, strict=True) if d == o > 1)

        for op, other, params in self.steps:
            name = f"t{inputs.index(other)}" if isinstance(other, str) else ""
            if isinstance(other, Constant):
                name = f"c{len(weights)}"
                weights[name] = other.array
            stages.append(Stage(op, name, () if name else params))
        read, constants = (span(tensors[t]) for t in inputs), (span(c.shape) for c in self.constants)
        problem = PointwiseProblem(*over, tuple(stages), tuple(read), tuple(constants))
        label, nodes = " + ".join(op.name for op in self.ops), tuple(n for op in self.ops for n in op.nodes)
        return Op(label, problem, inputs, self.output, weights, nodes)


def rest(network: Network, op: Op[PointwiseProblem], count: int, tensor: str) -> Op[PointwiseProblem]:
    """Makes an op of the stages behind the first `count`; it reads `tensor`, a new tensor with the shape of the op's output."""
    left = (steps(op, op.inputs[0]) or [])[count:]
    return Chain(tensor, (op,), tuple(left)).op({**network.tensors, tensor: network.tensors[op.output]})
