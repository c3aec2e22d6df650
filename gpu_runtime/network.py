"""What is to be computed, with every alternative: ops between named tensors of shape NCHW. Between ONNX and the plan all stages
take a `Network` and give one; none of them changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tactics.format import Format, representative
from tactics.problems.protocol import Feature, Problem, Shape4

FP32 = Format("fp32", "chw")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A network input or output. `shape` is ONNX's, `dtype` "fp32", "fp16", "uint8" (of inputs) or one of EXACT as declared;
    `shape4` the same elements, NCHW."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shape4: Shape4


@dataclass(frozen=True, slots=True)
class Op:
    """One problem between named tensors.

    `inputs`: conv (x,) or (x, residual), else in the problem's order. `weights`, FP32: conv "w" [K,C/g,R,S] holding FP16
    values (or what FP16 cannot hold, for precision.ranges to mend), "b" [K] if there is a bias; pointwise "c0", "c1", ...;
    prelu "slope" [K]. `nodes`: ONNX nodes covered.
    `when`: for every group named, the option chosen must be one of those listed, or the op does not exist (see `exists`).
    `layer`: the Conv or Gemm node whose weights these are, the same in every alternative; `layers`: those of several, where
    siblings are one.
    """

    name: str
    problem: Problem
    inputs: tuple[str, ...]
    output: str
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    when: tuple[tuple[str, str], ...] = ()
    layer: str = ""
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Network:
    """All ops with all alternatives, topologically ordered; `tensors`: NCHW shape of all that any op touches.

    `groups`: fusion decisions (name, options), exactly one option of each to be chosen. `only`: the one format of tensors
    that have no choice: those that are not floating-point, and those whose values FP16 cannot hold, are linear. `wide`: those
    that are written in FP32 since FP16 would round away what follows from them; the ops whose outputs are in `reads_wide` read
    them so, others may read a copy in FP16.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    tensors: Mapping[str, Shape4]
    ops: tuple[Op, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    only: Mapping[str, Format] = field(default_factory=dict)
    wide: frozenset[str] = frozenset()
    reads_wide: frozenset[str] = frozenset()

    def formats(self, tensor: str) -> tuple[Format, ...]:
        """Those that a tensor may have inside the network, one name for each memory layout."""
        if tensor in self.only:
            return (self.only[tensor],)
        return (*((FP32,) if tensor in self.wide else ()), *representative(self.tensors[tensor]))

    def is_single(self, tensor: str) -> bool:
        """Whether the tensor is written in FP32, since FP16 cannot hold its values or would round them too much."""
        return tensor in self.wide or (tensor in self.only and self.only[tensor].dtype == "fp32")

    def dtypes(self, op: Op) -> tuple[str, ...]:
        """Of the op's inputs, then of its output, if FP32 is among them; else nothing."""
        found = tuple(fmts[-1].dtype for fmts in self.formats_in(op))
        return found if "fp32" in found else ()

    def is_straight(self, op: Op) -> bool:
        """Whether the op makes an FP32 tensor of others, of values that FP16 could hold: so can kernels for FP16 tensors."""
        return op.output in self.wide and "fp32" not in self.dtypes(op)[:-1]

    def formats_in(self, op: Op) -> tuple[tuple[Format, ...], ...]:
        """Those that each of the op's inputs, then its output, may have in this op."""
        reads = op.output in self.reads_wide
        added = Feature.RESIDUAL in op.problem.needs and op.output in self.wide  # the sum is what is to be exact
        must = [t in self.wide and (reads or (added and i == 1)) for i, t in enumerate(op.inputs)]
        must.append(op.output in self.wide)
        return tuple((FP32,) if m else self.formats(t) for m, t in zip(must, (*op.inputs, op.output), strict=True))


def exists(op: Op, choice: Mapping[str, str]) -> bool:
    """Whether `op` is part of the network when each group has the option that `choice` names."""
    return all((group, choice[group]) in op.when for group, _ in op.when)


def readers_of(network: Network) -> dict[str, list[Op]]:
    """Tensor -> the ops that read it, each once, in the network's order."""
    found: dict[str, list[Op]] = {}
    for op in network.ops:
        for t in dict.fromkeys(op.inputs):
            found.setdefault(t, []).append(op)
    return found
