"""The unit of lowering: an ONNX node, or several nodes in which exporters spell one operator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from gpu_runtime.frontend.queries import Node, Value, name_of, operands
from tactics.problems.pointwise_ops import Stage


@dataclass(frozen=True, slots=True)
class Unit:
    """One operator. `op`: its ONNX type, or the project's name for several nodes; `node`: the node with its attributes.

    `label` is its name and `nodes` every ONNX node covered. `weights`: conv "w" [K,C/g,R,S] (Gemm: [K,C]; ConvTranspose:
    [K,C,R,S]) and "b" [K], pointwise "c0", "c1", ..., Standardize "epsilon" [1], it and GroupNormalization "scale" and "bias"
    along `axis`: all as stored or FP64. `stages`: of a pointwise operator, over `inputs` (t0, t1, ...) and those constants.
    `axis`: of the output, along which the rows of "w" lie (of a MatMul: the last, or the one before). `block`: the size of a
    shuffle's blocks, or its number of groups.
    """

    op: str
    node: Node
    label: str
    nodes: tuple[str, ...]
    inputs: tuple[Value, ...]
    output: Value
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    axis: int = 1
    block: int = 1


def plain(node: Node) -> Unit:
    """Returns the unit of one node."""
    inputs = tuple(v for v in operands(node) if v.const_value is None)
    return Unit(node.op_type, node, name_of(node), (name_of(node),), inputs, node.outputs[0])


def of_nodes(
    op: str, node: Node, used: Sequence[Node], x: Value, weights: Mapping[str, np.ndarray] = MappingProxyType({}), axis: int = 1
) -> Unit:
    """Returns the unit that the nodes `used` spell, a function of `x`; `node`: the node with the attributes."""
    names = tuple(map(name_of, used))
    return Unit(op, node, " + ".join(names), names, (x,), used[-1].outputs[0], weights, axis=axis)
