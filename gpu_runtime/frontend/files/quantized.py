"""Gives quantised operators of a ModelProto one spelling, and checks them.

QLinearConv and the like, of ONNX and com.microsoft, become floating-point operators between DequantizeLinear of their inputs
and QuantizeLinear of their output, which is their definition. Their weights stay the stored integers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend.files.load import (
    graphs_in,
    int_attribute,
    opset_version,
    put_nodes,
    stored_tensors,
    title,
    to_array,
    type_name,
)

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
MICROSOFT = "com.microsoft"
BYTES = (TensorProto.INT8, TensorProto.UINT8)
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
LEAST_SCALE = 2.0**-126  # its reciprocal is finite in FP32
CURE = "quantize the model to int8, with one scale for each tensor or channel"
WITH_AXIS = 13  # the opset from which DequantizeLinear has an axis, and Softmax one alone
ALWAYS = ("QLinearConv", "QLinearMatMul")  # operators of ONNX itself


@dataclass(frozen=True, slots=True)
class Form:
    """How an operator of integers is spelled: the floating-point operator, and the places among its inputs.

    `tensors`: the first place of each tensor, its scale and zero point; `result`: of the result's scale and zero point; `bias`:
    of an int32 bias, whose scale is the product of the tensors' scales; 0: none.
    """

    op: str
    tensors: tuple[int, ...]
    result: int
    bias: int = 0


FORMS = {
    "QLinearConv": Form("Conv", (0, 3), 6, 8),
    "QLinearMatMul": Form("MatMul", (0, 3), 6),
    "QLinearAdd": Form("Add", (0, 3), 6),
    "QLinearMul": Form("Mul", (0, 3), 6),
    "QLinearGlobalAveragePool": Form("GlobalAveragePool", (0,), 3),
    "QLinearAveragePool": Form("AveragePool", (0,), 3),
    "QLinearSigmoid": Form("Sigmoid", (0,), 3),
    "QLinearLeakyRelu": Form("LeakyRelu", (0,), 3),
    "QLinearSoftmax": Form("Softmax", (0,), 3),
    "QLinearConcat": Form("Concat", (), 0),  # tensors from place 2 on
    "QGemm": Form("Gemm", (0, 3), 7, 6),
}


def is_quantizer(node: onnx.NodeProto) -> bool:
    """Returns whether the node is a QuantizeLinear or DequantizeLinear."""
    return node.op_type in (QUANTIZE, DEQUANTIZE) and node.domain in ("", "ai.onnx", MICROSOFT)


def spell(proto: onnx.ModelProto) -> None:
    """Spells all operators of integers with QuantizeLinear and DequantizeLinear of ONNX, without the attributes of newer
    opsets. Raises ModelError where these need other kernels.
    """
    for graph in (*graphs_in(proto.graph.node), proto.graph):
        if any(map(_form, graph.node)):
            _Spelling(graph, opset_version(proto)).run()
    for node in chain(proto.graph.node, *(each.node for each in graphs_in(proto.graph.node))):
        if is_quantizer(node):
            node.domain = ""
            _spell_attributes(proto.graph, node)


def _form(node: onnx.NodeProto) -> Form | None:
    domains = ("", "ai.onnx", MICROSOFT) if node.op_type in ALWAYS else (MICROSOFT,)
    return FORMS.get(node.op_type) if node.domain in domains else None


class _Spelling:
    """Spells the operators of integers of a graph. `tensors`: its stored ones; `known`: inputs of a DequantizeLinear -> its
    output.
    """

    def __init__(self, graph: onnx.GraphProto, opset: int) -> None:
        self.graph, self.opset = graph, opset
        self.tensors = dict(stored_tensors(graph))
        self.known: dict[tuple[object, ...], str] = {}
        self.nodes: list[onnx.NodeProto] = []

    def run(self) -> None:
        for node in list(self.graph.node):
            form = _form(node)
            if form is None:
                self.nodes.append(node)
            else:
                self._node(node, form)
        put_nodes(self.graph, self.nodes)

    def _node(self, node: onnx.NodeProto, form: Form) -> None:
        given = {a.name: a for a in node.attribute}
        inputs = [*node.input, *[""] * 9]
        first = form.tensors or tuple(range(2, len(node.input), 3))
        if len(node.output) != 1 or not first or not all(inputs[i] and inputs[i + 1] for i in first):
            raise ModelError(f"{title(node)}: expected tensors with their scales, got {list(node.input)}")
        if "channels_last" in given and given.pop("channels_last").i:
            raise ModelError(f"{title(node)}: its channels are the last axis; expected them on axis 1: export the model again")
        if form.op == "Softmax":
            self._softmax(node, given)
        (y,), scale, zero = node.output, inputs[form.result], inputs[form.result + 1]
        read = [self._dequantized(node, i, inputs[i : i + 3]) for i in first]
        if form.bias and inputs[form.bias]:
            factor = given["alpha"].f if "alpha" in given else 1.0
            scales = self._product(node, [inputs[i + 1] for i in first], factor)
            read.append(self._dequantized(node, form.bias, [inputs[form.bias], scales, ""]))
        if scale and not zero:
            raise ModelError(f"{title(node)}: expected a zero point of its result, got none: quantize the model again")
        made = f"{y}, floating point" if scale else y
        self.nodes.append(helper.make_node(form.op, read, [made], node.name))
        self.nodes[-1].attribute.extend(given.values())
        if scale:
            self.nodes.append(helper.make_node(QUANTIZE, [made, scale, zero], [y], f"{node.name or y}_quantize"))

    def _softmax(self, node: onnx.NodeProto, given: dict[str, onnx.AttributeProto]) -> None:
        """Changes `given`, the attributes of a QLinearSoftmax, to the attributes of Softmax: "axis" stays, "opset" goes. Raises
        ModelError if "opset" and the model's opset are on different sides of opset 13, which changed Softmax's axis."""
        meant = given.pop("opset").i if "opset" in given else WITH_AXIS
        if (meant >= WITH_AXIS) != (self.opset >= WITH_AXIS):
            raise ModelError(
                f"{title(node)}: it is of opset {meant} in a model of opset {self.opset}: quantize the model again"
            )
        given.setdefault("axis", helper.make_attribute("axis", -1))

    def _dequantized(self, node: onnx.NodeProto, place: int, inputs: Sequence[str]) -> str:
        """Returns a tensor in floating point; `inputs`: it, its scale and its zero point or "".

        Only second inputs, and the bias, have several scales: along the output's channels.
        """
        of_second = {"QLinearConv": 0, "QGemm": 0 if int_attribute(node, "transB", 0) else 1}
        axis = of_second.get(node.op_type, -1) if place == 3 else 0
        key = (*inputs, axis)
        if key not in self.known:
            y = self.known[key] = f"{node.output[0]}, input {place}"
            several = inputs[1] in self.tensors and math.prod(self.tensors[inputs[1]].dims) > 1
            if several and self.opset < WITH_AXIS:
                self.nodes += self._along(inputs, axis, y)
            else:
                self.nodes.append(helper.make_node(DEQUANTIZE, [n for n in inputs if n], [y]))
                self.nodes[-1].attribute.extend([helper.make_attribute("axis", axis)] if several else [])
            self.nodes[-1].name = f"{node.name or node.output[0]}_input_{place}"
        return self.known[key]

    def _along(self, inputs: Sequence[str], axis: int, y: str) -> list[onnx.NodeProto]:
        """Returns DequantizeLinear with a scale for each index of an axis, in the operators of an older opset."""
        x, scale, zero = inputs
        rank = len(self.tensors[x].dims) if x in self.tensors else 0
        if not -rank <= axis < rank:
            raise ModelError(f"tensor {x!r}: expected a stored one, since it has several scales: quantize the model again")
        shape = [-1 if i == axis % rank else 1 for i in range(rank)]
        cast, shifted = f"{y}, cast", f"{y}, shifted"
        nodes = [helper.make_node("Cast", [x], [cast], to=TensorProto.FLOAT)]
        if zero:
            nodes.append(
                helper.make_node("Sub", [cast, self._stored(f"{y}, zero", self._array(zero).reshape(shape))], [shifted])
            )
        scales = self._stored(f"{y}, scale", self._array(scale).reshape(shape))
        return [*nodes, helper.make_node("Mul", [nodes[-1].output[0], scales], [y])]

    def _product(self, node: onnx.NodeProto, scales: Sequence[str], factor: float) -> str:
        arrays = [self._array(name) for name in scales]
        return self._stored(f"{node.output[0]}, bias scale", np.float32(factor) * arrays[0].reshape(-1)[:1] * arrays[1])

    def _array(self, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise ModelError(f"tensor {name!r}: expected a stored scale, got a computed one: quantize statically")
        array = to_array(name, self.tensors[name]).astype(np.float32)
        if array.size != 1 and array.ndim != 1:
            raise ModelError(f"tensor {name!r}: its shape is {list(array.shape)}; expected a number or a vector: {CURE}")
        return array

    def _stored(self, name: str, array: np.ndarray) -> str:
        self.tensors[name] = numpy_helper.from_array(np.asarray(array, np.float32), name)
        self.graph.initializer.append(self.tensors[name])
        return name


def _spell_attributes(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    for a in [a for a in node.attribute if a.name != "axis"]:
        to, what = a.i, f"{title(node)}: its attribute {a.name} is {a.i}"
        if a.name == "block_size" and to:
            raise ModelError(f"{what}; expected no scale for each block of an axis: {CURE}")
        if a.name == "output_dtype" and to and to not in (BYTES if node.op_type == QUANTIZE else FLOATS):
            raise ModelError(f"{title(node)}: its output_dtype is {type_name(to).lower()}, which no kernel has: {CURE}")
        if a.name == "output_dtype" and to in BYTES and not any(node.input[2:]):
            name = f"{title(node)}, zero point"
            graph.initializer.append(helper.make_tensor(name, to, [], [0]))
            del node.input[2:]
            node.input.append(name)
        node.attribute.remove(a)


def check(graph: onnx.GraphProto) -> None:
    """Raises ModelError for the first QuantizeLinear or DequantizeLinear whose types, scale or zero point are invalid."""
    tensors = dict(stored_tensors(graph))
    for node in graph.node:
        if is_quantizer(node):
            _check_node(node, tensors)


def _check_node(node: onnx.NodeProto, tensors: Mapping[str, TensorProto]) -> None:
    if not 2 <= len(node.input) <= 3 or len(node.output) != 1 or not all(node.input[:2]):
        raise ModelError(f"{title(node)}: expected a tensor, a scale and perhaps a zero point, got {list(node.input)}")
    x, scale, zero = (tensors.get(name) for name in (*node.input, "")[:3])
    allowed = BYTES if node.op_type == QUANTIZE else (*BYTES, TensorProto.INT32)
    of_numbers = [("zero point", zero)] if node.op_type == QUANTIZE else [("zero point", zero), ("input", x)]
    for what, t in of_numbers:
        if t is not None and t.data_type not in allowed:
            raise ModelError(
                f"{title(node)}: its {what} is of type {type_name(t.data_type).lower()}, which no kernel has: {CURE}"
            )
    if node.op_type == DEQUANTIZE and x is not None and zero is not None and x.data_type != zero.data_type:
        types = f"{type_name(x.data_type).lower()} and {type_name(zero.data_type).lower()}"
        raise ModelError(f"{title(node)}: expected an input and a zero point of one type, got {types}")
    if scale is None:
        return  # computed: respell examines it once constants are folded
    if scale.data_type not in FLOATS:
        raise ModelError(f"{title(node)}: expected a scale in floating point, got {type_name(scale.data_type).lower()}")
    scales, zeros = to_array(scale.name, scale).astype(np.float32), None if zero is None else to_array(zero.name, zero)
    check_parameters(title(node), scales, zeros, None if x is None else list(x.dims), int_attribute(node, "axis", 1))


def check_parameters(node: str, scale: np.ndarray, zero: np.ndarray | None, dims: Sequence[int] | None, axis: int) -> None:
    """Raises ModelError for a scale, FP32, or zero point that ONNX does not allow. `dims`: of the tensor, None if unknown."""
    if bad := [float(s) for s in scale.reshape(-1) if not LEAST_SCALE <= s < np.inf][:1]:
        raise ModelError(f"{node}: expected scales above zero, not subnormal, got {bad[0]:g}: calibrate the model again")
    if zero is not None and zero.shape != scale.shape and (zero.size, scale.size) != (1, 1):
        raise ModelError(f"{node}: expected a scale and a zero point of one shape, got {scale.shape} and {zero.shape}")
    if scale.size == 1 and scale.ndim < 2:
        return
    if scale.ndim != 1:
        raise ModelError(f"{node}: its scale has the shape {list(scale.shape)}; expected a number or a vector: {CURE}")
    if dims is not None and not (-len(dims) <= axis < len(dims) and dims[axis] == scale.size):
        raise ModelError(
            f"{node}: expected {scale.size} elements along axis {axis}, one for each scale, got the shape {list(dims)}"
        )
