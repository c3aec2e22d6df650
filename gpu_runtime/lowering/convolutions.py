"""Conv, ConvTranspose, Gemm and MatMul -> problems, weights as stored. A tensor of rank 3 has one row of pixels."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpu_runtime.frontend.queries import Node, Value, attribute, constant, name_of, operand, operands, per_channel, shape_of
from gpu_runtime.lowering.moves import Problems, Refused, Shapes, Weights
from gpu_runtime.lowering.units import Unit, of_nodes
from gpu_runtime.progress import warn
from tactics.problems.epilogue import VECTORS, Epilogue
from tactics.problems.gather import GatherProblem
from tactics.problems.problem import ConvProblem, ConvTransposeProblem, MatmulProblem
from tactics.problems.protocol import Problem, Shape4

# The node's input, its weights [K, ...], the axis of its output that has the K rows of the weights.
_Product = tuple[Value, np.ndarray, int]
MOST_PHASES = 1024  # of a transposed convolution: each is a launch of its own


# ---- weights and bias


def _of_conv(node: Node) -> _Product | None:
    w = constant(node.inputs[1])
    return None if w is None else (operand(node), w, 1)


def _of_conv_transpose(node: Node) -> _Product | None:
    w, groups = constant(node.inputs[1]), attribute(node, "group", 1)
    if w is None or w.ndim not in (3, 4) or w.shape[0] % groups:
        return None
    c, k, *size = w.shape
    w = w.reshape(groups, c // groups, k, *size).swapaxes(1, 2).reshape(groups * k, c // groups, *size)
    return operand(node), w, 1


def _of_gemm(node: Node) -> _Product | None:
    w, alpha = constant(node.inputs[1]), attribute(node, "alpha", 1.0)
    if w is None or w.ndim != 2 or len(shape_of(operand(node))) != 2 or attribute(node, "transA", 0):
        return None
    w = w if alpha == 1 else w.astype(np.float64) * alpha
    return operand(node), w if attribute(node, "transB", 0) else w.T, 1


def _of_matmul(node: Node) -> _Product | None:
    (x, y), (left, right) = operands(node), map(constant, node.inputs)
    if left is not None and len(shape_of(y)) > 1:  # rows of the constant are output channels
        return (y, left, len(shape_of(y)) - 2) if left.ndim == 2 else None
    return None if right is None or right.ndim != 2 else (x, right.T, len(shape_of(x)) - 1)


CONVOLUTIONS = {"Conv": _of_conv, "ConvTranspose": _of_conv_transpose, "Gemm": _of_gemm, "MatMul": _of_matmul}


def product_at(node: Node) -> Unit | None:
    """Returns the unit of a Conv, ConvTranspose, Gemm or MatMul with constant weights and bias; None for any other node."""
    third = node.inputs[2] if len(node.inputs) > 2 else None
    found = CONVOLUTIONS[node.op_type](node) if node.op_type in CONVOLUTIONS else None
    if found is None:
        return None
    x, w, axis = found
    weights = {"w": w}
    if third is not None:
        bias = constant(third)
        if bias is not None and node.op_type == "Gemm":
            bias = per_channel(bias * attribute(node, "beta", 1.0), shape_of(node.outputs[0]))
        if bias is None or bias.shape not in ((1,), w.shape[:1]):
            return None
        weights["b"] = np.broadcast_to(bias.astype(np.float64), w.shape[:1])
    return of_nodes(node.op_type, node, [node], x, weights, axis)


# ---- problems


def conv(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problems:
    node, (n, c, h, w) = unit.node, shapes[0]
    if len(shape_of(operand(node))) == 5:
        return _volume(unit, weights)
    kernel, size, groups = _kernel(unit, weights, shapes[0])
    stride, dilation, pad = window(node, size, (h, w))
    weights["w"] = kernel
    return ConvProblem(
        n, c, h, w, kernel.shape[0], *size, pair(stride), around(pad), pair(dilation), groups, epilogue=_epilogue(weights)
    )


def around(pads: Sequence[int]) -> Shape4:
    """Returns pads as (top, left, bottom, right)."""
    top, left, bottom, right = pads
    return top, left, bottom, right


def _volume(unit: Unit, weights: Weights) -> tuple[Problem, ...]:
    """Lowers a convolution of rank 5: for each image of the output's depth, a gather puts the input images under its taps along
    the depth side by side as channels.

    Groups become zeros between the channels of other groups: dense kernels, which suffice where volumes are rare.
    """
    node, (n, c, *image), (_, _, depth, *_) = unit.node, shape_of(operand(unit.node)), shape_of(unit.node.outputs[0])
    kernel, groups = unit.weights["w"], attribute(node, "group", 1)
    k, share, *size = kernel.shape
    if share * groups != c or last(attribute(node, "kernel_shape", tuple(size)), 1, 3) != tuple(size):
        raise Refused(f"weights {list(kernel.shape)} in {groups} group(s) do not fit its input {[n, c, *image]}")
    stride, dilation, pad = window(node, size, image)
    whole = np.zeros((k, size[0], c, *size[1:]), kernel.dtype)
    for g in range(groups):
        rows = slice(g * k // groups, (g + 1) * k // groups)
        whole[rows, :, g * share : (g + 1) * share] = kernel[rows].swapaxes(1, 2)
    weights["w"] = whole.reshape(k, size[0] * c, *size[1:])
    at = np.arange(depth)[:, None] * stride[0] + np.arange(size[0]) * dilation[0] - pad[0]
    table = np.where((at >= 0) & (at < image[0]), at, -1).reshape(-1).tolist()
    spread = GatherProblem((n, c, image[0], image[1] * image[2]), (0, 2, 1, 3), ((), tuple(table), (), ()))
    product = ConvProblem(
        n * depth,
        size[0] * c,
        image[1],
        image[2],
        k,
        size[1],
        size[2],
        pair(stride[1:]),
        around((*pad[1:3], *pad[4:])),
        pair(dilation[1:]),
        epilogue=_epilogue(weights),
    )
    back = GatherProblem((n, depth, k, math.prod(product.out_shape[2:])), (0, 2, 1, 3))
    return spread, product, back


def conv_transpose(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problem:
    """Lowers a ConvTranspose. Where kernel and stride agree, output blocks do not overlap: a 1x1 convolution with
    depth-to-space. With stride 1: a convolution whose taps stand in reverse."""
    node, (n, c, h, w) = unit.node, shapes[0]
    rank = len(shape_of(operand(node)))
    if len(shape_of(unit.output)) != rank:  # shape inference gives up on output_shape smaller than the input
        raise Refused(f"expected an output of rank {rank} at least as large as its input, got {list(shape_of(unit.output))}")
    kernel, size, groups = _kernel(unit, weights, shapes[0])
    weights["w"], k = kernel, kernel.shape[0]
    stride, dilation = (pair(last(attribute(node, name), 1)) for name in ("strides", "dilations"))
    pad, to = _cropped(unit, size, (h, w), out), (out[2], out[3])
    b, end = size[0], _epilogue(weights)
    whole = size == stride == (b, b) and pad == (0, 0) and dilation == (1, 1) and to == (h * b, w * b)
    if whole and b > 1 and (groups == 1 or c > groups):  # depthwise kernels store as they compute
        weights["w"] = np.ascontiguousarray(kernel.transpose(0, 2, 3, 1)).reshape(b * b * k, c // groups, 1, 1)
        weights.update({name: np.repeat(weights[name], b * b) for name in VECTORS if name in weights})
        end = replace(end, d2s=b, d2s_mode="crd")
        return ConvProblem(n, c, h, w, b * b * k, 1, 1, groups=groups, epilogue=end)
    top, left = (d * (t - 1) - p for d, t, p in zip(dilation, size, pad, strict=True))
    bottom, right = (o - i + p for o, i, p in zip(to, (h, w), pad, strict=True))
    if stride == (1, 1) and min(top, left, bottom, right) >= 0:  # a convolution leaves out no input
        weights["w"] = np.ascontiguousarray(kernel[:, :, ::-1, ::-1])
        around = top, left, bottom, right
        return ConvProblem(n, c, h, w, k, *size, pad=around, dilation=dilation, groups=groups, epilogue=end)
    if math.prod(stride) > MOST_PHASES:
        raise Refused(f"strides {list(stride)}; expected a product of {MOST_PHASES} at most, since each phase is a launch")
    return ConvTransposeProblem(n, c, h, w, k, *size, to, stride, pad, dilation, groups, epilogue=end)


def _cropped(unit: Unit, size: tuple[int, int], image: tuple[int, int], out: Shape4) -> tuple[int, int]:
    """Returns (rows, columns) that a ConvTranspose cuts off before the output: the given pads, or their share of the excess
    over the output's size."""
    node, rank = unit.node, len(shape_of(unit.output))
    mode = attribute(node, "auto_pad", "NOTSET")
    if not mode.startswith("SAME") and attribute(node, "output_shape") is None:
        return pair(last(attribute(node, "pads", (0,) * 4)[: rank - 2], 0))
    stride, dilation = last(attribute(node, "strides"), 1), last(attribute(node, "dilations"), 1)
    extra = last(attribute(node, "output_padding"), 0)
    total = [max(stride[i] * (image[i] - 1) + extra[i] + (size[i] - 1) * dilation[i] + 1 - out[2 + i], 0) for i in range(2)]
    rows, columns = (t // 2 if mode == "SAME_UPPER" else t - t // 2 for t in total)
    return rows, columns


def matmul(unit: Unit, shapes: Shapes, out: Shape4, weights: Weights) -> Problems:
    """Lowers a product by a constant to a 1x1 convolution, or to one as large as the image that was flattened; a product of two
    computed tensors to a MatmulProblem."""
    if "w" not in weights:
        return _product(unit) if len(unit.inputs) == 2 else _by_matrices(unit, weights)
    shape, (n, c, h, w) = shape_of(unit.inputs[0]), shapes[0]
    r, s = h, w
    if unit.axis == len(shape) - 2:  # constant @ x: the rows of x are channels
        n, c, h, w, r, s = math.prod(shape[:-2]), shape[-2], 1, shape[-1], 1, 1
    elif len(shape) != 2:
        n, c, h, w, r, s = math.prod(shape[:-1]), shape[-1], 1, 1, 1, 1
    kernel = weights["w"] = unit.weights["w"].reshape(-1, c, r, s)
    return ConvProblem(n, c, h, w, kernel.shape[0], r, s, epilogue=_epilogue(weights))


def _by_matrices(unit: Unit, weights: Weights) -> tuple[Problem, ...]:
    """Lowers a product with a constant matrix, or vector, for each index of some leading axes: each is a group of channels."""
    node, shape = unit.node, shape_of(unit.inputs[0])
    first = constant(node.inputs[0]) is not None
    matrices = np.asarray(constant(node.inputs[0 if first else 1]))
    if matrices.ndim == 1:
        matrices = matrices[None] if first else matrices[:, None]
    if len(shape) == 1:
        shape = (*shape, 1) if first else (1, *shape)
    *batch, rows, columns = shape
    *own, m, k = matrices.shape if first else matrices.swapaxes(-1, -2).shape
    own = [1] * (len(batch) - len(own)) + own
    pixels = columns if first else rows
    split = next((i for i, d in enumerate(own) if d != 1), len(own))
    outer, groups = math.prod(batch[:split]), math.prod(own)
    if math.prod(batch) == 1:
        channels, outer, share = k, 1, 1  # one tensor by all matrices
    elif own[split:] == batch[split:]:
        channels, share = groups * k, groups
    else:
        raise Refused(f"expected constant matrices with the last batch dimensions of {list(shape)}, got {list(matrices.shape)}")
    w = matrices if first else matrices.swapaxes(-1, -2)
    weights["w"] = w.reshape(groups * m, k, 1, 1)
    product = ConvProblem(outer, channels, 1, pixels, groups * m, 1, 1, groups=share, epilogue=_epilogue(weights))
    if first:
        return (product,)
    before = GatherProblem((1, outer * share, pixels, k), (0, 1, 3, 2))
    return before, product, GatherProblem((1, outer * groups, m, pixels), (0, 1, 3, 2))


def _product(unit: Unit) -> MatmulProblem:
    node = unit.node
    a, b = (shape_of(v) for v in unit.inputs)
    if attribute(node, "alpha", 1.0) != 1:
        raise Refused("expected alpha = 1, since both operands are computed")
    a = (1, *a) if len(a) == 1 else a
    b = (*b, 1) if len(b) == 1 else b
    over = np.broadcast_shapes(a[:-2], b[:-2])
    batches = []
    for shape in (a, b):
        sizes = (1,) * (len(over) - len(shape) + 2) + shape[:-2]
        if len(over) > 2 and sizes not in (over, (1,) * len(over)):
            raise Refused(f"expected at most two batch dimensions that broadcast, got {list(a)} and {list(b)}")
        batches.append((math.prod(sizes[:-1]), sizes[-1] if sizes else 1))
    trans_a, trans_b = (bool(attribute(node, name, 0)) for name in ("transA", "transB"))
    m, k = a[-2:][::-1] if trans_a else a[-2:]
    n = b[-2] if trans_b else b[-1]
    return MatmulProblem(batches[0], batches[1], m, n, k, trans_a, trans_b)


# ---- functions that they share


def _kernel(unit: Unit, weights: Weights, shape: Shape4) -> tuple[np.ndarray, tuple[int, int], int]:
    """Returns (weights as [K, C/g, R, S], (R, S), the number of groups g) for an input of that shape."""
    rank, groups = len(shape_of(operand(unit.node))), attribute(unit.node, "group", 1)
    computed = [v.name for v in operands(unit.node)[1:] if constant(v) is None]
    if computed:
        raise Refused(f"expected constant weights, got the computed {', '.join(map(repr, computed))}")
    if "w" not in weights or rank not in (3, 4) or unit.weights["w"].ndim != rank:
        raise Refused(f"expected constant weights and bias over an input of rank 3 or 4, got rank {rank}")
    kernel = unit.weights["w"]
    kernel = kernel if rank == 4 else kernel[:, :, None]
    size = pair(kernel.shape[2:])
    if kernel.shape[1] * groups != shape[1] or last(attribute(unit.node, "kernel_shape", size), 1) != size:
        raise Refused(f"weights {list(kernel.shape)} in {groups} group(s) do not fit its input {list(shape)}")
    return kernel, size, groups


def _epilogue(weights: Weights) -> Epilogue:
    return Epilogue(bias="b" in weights)


def last(values: Sequence[int] | None, default: int, count: int = 2) -> tuple[int, ...]:
    """Returns an attribute's values for the last `count` axes, rows and columns; a single value is the columns'."""
    return (*(default,) * count, *(values or ()))[-count:]


def pair(values: Sequence[int]) -> tuple[int, int]:
    """Returns (rows, columns)."""
    rows, columns = values
    return rows, columns


def begins(total: int, mode: str) -> int:
    """Returns the padding before an axis, of `total` padding by auto_pad: half; the odd unit lies behind with SAME_UPPER,
    before with SAME_LOWER. A negative total cuts off, as ONNX's formula for pools has it."""
    half = int(total / 2)
    return total - half if mode == "SAME_LOWER" else half


def window(
    node: Node, size: Sequence[int], image: Sequence[int], crop: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns (stride, dilation, pads before each axis, then behind) of a Conv or pool over the axes of `image`, with auto_pad
    resolved.

    `crop`: SAME gives negative pads where the stride is larger than the window, as ONNX's formula for pools has it; for Conv
    ONNX gives no formula, and implementations pad by nothing.
    """
    count = len(image)
    stride, dilation = last(attribute(node, "strides"), 1, count), last(attribute(node, "dilations"), 1, count)
    mode = attribute(node, "auto_pad", "NOTSET")
    if mode == "NOTSET":
        pads = attribute(node, "pads", (0,) * (2 * count))
        half = len(pads) // 2
        return stride, dilation, (*last(pads[:half], 0, count), *last(pads[half:], 0, count))
    begin: list[int] = []
    end: list[int] = []
    for i in range(count):
        reach = (size[i] - 1) * dilation[i] + 1
        total = (-(-image[i] // stride[i]) - 1) * stride[i] + reach - image[i] if mode != "VALID" else 0
        total = total if crop else max(total, 0)
        if total < 0 and mode == "SAME_LOWER" and node.op_type in ("AveragePool", "LpPool"):
            cut = f"SAME_LOWER with a stride above the window cuts {-begins(total, mode)} before the image, as ONNX has it"
            warn(f"{node.op_type} {name_of(node)}: {cut}; onnxruntime cuts one less")
        begin.append(begins(total, mode))
        end.append(total - begin[i])
    return stride, dilation, (*begin, *end)
