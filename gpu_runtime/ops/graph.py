"""The ONNX graph of one convolution with its epilogue, from which the planner makes the operator's plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gpu_runtime.text import dims

# Activation -> its operators, one after the other; Mul also takes the tensor ahead of all of them.
ACTIVATIONS = {
    "": (),
    "relu": ("Relu",),
    "sigmoid": ("Sigmoid",),
    "tanh": ("Tanh",),
    "silu": ("Sigmoid", "Mul"),
    "gelu": ("Gelu",),
    "hardswish": ("HardSwish",),
    "mish": ("Mish",),
    "softplus": ("Softplus",),
}
OPSET = 20  # the first one with Gelu


class Geometry(NamedTuple):
    """Strides, padding (top, left, bottom, right), dilations and groups of a convolution."""

    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int

    @staticmethod
    def of(sizes: Sequence[int]) -> Geometry:
        """Returns the geometry of nine numbers: two strides, padding (top, left, bottom, right), two dilations, groups."""
        down, across, top, left, bottom, right, apart, aside, groups = sizes
        return Geometry((down, across), (top, left, bottom, right), (apart, aside), groups)

    def out_shape(self, weight: Sequence[int], x: Sequence[int]) -> tuple[int, int, int, int]:
        """Returns y's shape [N, K, P, Q] for x [N, C, H, W] and weights [K, C / groups, R, S]. Raises ValueError if they do
        not fit.
        """
        if len(x) != 4 or min(x) < 1 or x[1] != weight[1] * self.groups:
            raise ValueError(f"x: expected [N, {weight[1] * self.groups}, H, W], got {dims(tuple(x))}")
        top, left, bottom, right = self.padding
        ends = zip((x[2] + top + bottom, x[3] + left + right), weight[2:], self.stride, self.dilation, strict=True)
        p, q = ((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in ends)
        if min(p, q) < 1:
            raise ValueError(f"x: {dims(tuple(x))} is smaller than the kernel {list(weight[2:])}")
        return x[0], weight[0], p, q


def graph(
    arrays: Mapping[str, np.ndarray], geometry: Geometry, activation: str, shape: Sequence[int], residual: Sequence[int] = ()
) -> onnx.ModelProto:
    """Returns the ONNX model of y = activation(conv(x, weight) + bias + residual) in FP32.

    `arrays`: "weight" [K, C / groups, R, S] and optionally "bias" [K]; `activation`: "" for none; `shape`: of x; `residual`:
    its shape, () for none.
    """
    fp32 = onnx.TensorProto.FLOAT
    conv = helper.make_node("Conv", ["x", *arrays], ["conv"], "conv", strides=geometry.stride, group=geometry.groups,
                            pads=geometry.padding, dilations=geometry.dilation)  # fmt: skip
    nodes, last, own = [conv], "conv", "conv"
    if residual:
        nodes.append(helper.make_node("Add", [last, "residual"], [own := "sum"], "sum"))
        last = own
    for op in ACTIVATIONS[activation]:
        nodes.append(helper.make_node(op, [last, own] if op == "Mul" else [last], [last := op.lower()], op.lower()))
    nodes[-1].output[0] = "y"
    ends = {"x": shape, "residual": residual} if residual else {"x": shape}
    ins = [helper.make_tensor_value_info(name, fp32, size) for name, size in ends.items()]
    stored = [numpy_helper.from_array(np.asarray(a, np.float32), name) for name, a in arrays.items()]
    made = helper.make_graph(nodes, "operator", ins, [helper.make_tensor_value_info("y", fp32, None)], stored)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
