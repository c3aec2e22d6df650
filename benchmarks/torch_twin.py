"""The network of an ONNX model in PyTorch, as its user would write it, to be timed beside an engine.

`torch_module(model)` is a torch.fx.GraphModule: Python code of calls in torch and torch.nn.functional, whose weights are
buffers. Shapes and scales are constants in it, so that a CUDA graph can hold it. A convolution has the BatchNormalization
behind it in its weights; group norms and SiLUs, as torch.onnx.export writes them, are PyTorch's own functions again.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper


def prepared() -> tuple[Any, dict[str, Any]]:
    """Returns (torch, whose cuDNN will time its algorithms; the versions of both and of CUDA). ImportError without PyTorch."""
    import torch

    torch.backends.cudnn.benchmark = True
    return torch, {"version": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def event_us(torch: Any, run: Callable[[], object]) -> float:
    """Returns the microseconds of `run` between two events on PyTorch's current stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return 1e3 * float(start.elapsed_time(stop))


class Node(NamedTuple):
    op: str
    name: str
    inputs: list[str]
    output: str
    attributes: dict[str, Any]


def _padded(torch: Any, a: Mapping[str, Any], x: Any, value: float) -> tuple[Any, tuple[int, int]]:
    """Returns (the image with the rows and columns that PyTorch cannot add on one side only, the padding that PyTorch is to
    add).
    """
    if a.get("auto_pad", "NOTSET") != "NOTSET":
        raise ValueError(f"auto_pad is {a['auto_pad']}")
    top, left, bottom, right = a.get("pads", (0, 0, 0, 0))
    if (top, left) == (bottom, right):
        return x, (top, left)
    return torch.nn.functional.pad(x, (left, right, top, bottom), value=value), (0, 0)


def _conv(torch: Any, a: Mapping[str, Any], x: Any, w: Any, bias: Any = None) -> Any:
    x, pads = _padded(torch, a, x, 0.0)
    strides, dilations = (tuple(a.get(name, (1, 1))) for name in ("strides", "dilations"))
    return torch.nn.functional.conv2d(x, w, bias, strides, pads, dilations, a.get("group", 1))


def _max_pool(torch: Any, a: Mapping[str, Any], x: Any) -> Any:
    x, pads = _padded(torch, a, x, float("-inf"))
    strides, dilations = (tuple(a.get(name, (1, 1))) for name in ("strides", "dilations"))
    return torch.nn.functional.max_pool2d(x, tuple(a["kernel_shape"]), strides, pads, dilations, bool(a.get("ceil_mode", 0)))


def _gemm(torch: Any, a: Mapping[str, Any], x: Any, w: Any, bias: Any = None) -> Any:
    if a.get("transA", 0) or a.get("alpha", 1.0) != 1 or a.get("beta", 1.0) != 1:
        raise ValueError("it is no fully connected layer")
    return torch.nn.functional.linear(x, w if a.get("transB", 0) else w.t(), bias)


def _resize(torch: Any, a: Mapping[str, Any], x: Any, _: Any, scales: list[float] | None = None, sizes: Any = None) -> Any:
    mode, where = a.get("mode", "nearest"), a.get("coordinate_transformation_mode", "half_pixel")
    known = {
        ("nearest", "asymmetric"): "nearest",
        ("linear", "half_pixel"): "bilinear",
        ("linear", "pytorch_half_pixel"): "bilinear",
    }
    if (mode, where) not in known or (mode == "nearest" and a.get("nearest_mode") != "floor"):
        raise ValueError(f"mode {mode}, {where}")
    if sizes or not scales or scales[:2] != [1, 1] or any(s < 1 or s % 1 for s in scales):
        raise ValueError(f"scales {scales}: expected whole ones of height and width")
    return torch.nn.functional.interpolate(x, scale_factor=tuple(scales[2:]), mode=known[mode, where])


def _depth_to_space(torch: Any, a: Mapping[str, Any], x: Any) -> Any:
    if a.get("mode", "DCR") != "CRD":
        raise ValueError("mode DCR")
    return torch.nn.functional.pixel_shuffle(x, a["blocksize"])


# (torch, attributes, a tensor for each input, or a list for a constant one of FIXED) -> the output
OPS: dict[str, Callable[..., Any]] = {
    "Add": lambda torch, a, x, y: x + y,
    "BatchNormalization": lambda torch, a, x, scale, bias, mean, var: torch.nn.functional.batch_norm(
        x, mean, var, scale, bias, False, 0.0, a.get("epsilon", 1e-5)
    ),
    "Concat": lambda torch, a, *x: torch.cat(x, a["axis"]),
    "Conv": _conv,
    "DepthToSpace": _depth_to_space,
    "Flatten": lambda torch, a, x: torch.flatten(x, a.get("axis", 1)),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda torch, a, x: torch.nn.functional.adaptive_avg_pool2d(x, 1),
    "GroupNorm": lambda torch, a, x, scale, bias: torch.nn.functional.group_norm(
        x, a["groups"], scale.reshape(-1), bias.reshape(-1), a["epsilon"]
    ),
    "Identity": lambda torch, a, x: x,
    "InstanceNormalization": lambda torch, a, x, scale, bias: torch.nn.functional.instance_norm(
        x, weight=scale, bias=bias, eps=a.get("epsilon", 1e-5)
    ),
    "LeakyRelu": lambda torch, a, x: torch.nn.functional.leaky_relu(x, a.get("alpha", 0.01)),
    "MaxPool": _max_pool,
    "Mul": lambda torch, a, x, y: x * y,
    "PRelu": lambda torch, a, x, slope: torch.nn.functional.prelu(x, slope.reshape(-1)),
    "Relu": lambda torch, a, x: torch.nn.functional.relu(x),
    "Reshape": lambda torch, a, x, shape: x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape)]),
    "Resize": _resize,
    "Sigmoid": lambda torch, a, x: torch.sigmoid(x),
    "Silu": lambda torch, a, x: torch.nn.functional.silu(x),
}
FIXED = {"Reshape", "Resize"}  # the constants among their inputs are numbers in the code


def torch_module(model: onnx.ModelProto) -> Any:
    """Returns the model as a torch.nn.Module. ValueError for an operator or attributes that OPS lacks. ImportError without
    PyTorch.
    """
    import torch
    import torch.fx

    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    root, graph = torch.nn.Module(), torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    inputs = [v.name for v in model.graph.input if v.name not in weights]
    values: dict[str, Any] = {name: torch.fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i, name in enumerate(inputs)}

    def value(name: str, fixed: bool) -> Any:
        if not name or (fixed and name in weights):
            return weights[name].tolist() if name else None
        if name not in values:
            buffer = f"w{len(values)}"
            root.register_buffer(buffer, torch.from_numpy(weights[name].copy()))
            values[name] = torch.fx.Proxy(graph.get_attr(buffer), tracer)
        return values[name]

    for node in fused(model, weights):
        try:
            values[node.output] = OPS[node.op](torch, node.attributes, *(value(x, node.op in FIXED) for x in node.inputs))
        except KeyError as e:
            raise ValueError(f"{node.op} {node.name}: no PyTorch is known for it") from e
        except ValueError as e:
            raise ValueError(f"{node.op} {node.name}: {e}") from e
    outputs = [values[v.name].node for v in model.graph.output]
    graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
    return torch.fx.GraphModule(root, graph)


def fused(model: onnx.ModelProto, weights: dict[str, np.ndarray]) -> list[Node]:
    """Returns the model's nodes without constants, which join `weights`; nodes for which PyTorch has one function are one."""
    read = Counter([x for node in model.graph.node for x in node.input] + [v.name for v in model.graph.output])
    kept: dict[str, Node] = {}  # by output

    def before(tensor: str, op: str) -> Node | None:
        """Returns the node that writes the tensor, if it has this operator and no other node reads the tensor."""
        node = kept.get(tensor)
        return node if node and node.op == op and read[tensor] == 1 else None

    for proto in model.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
        attributes = {name: v.decode() if isinstance(v, bytes) else v for name, v in attributes.items()}
        node = Node(proto.op_type, proto.name, list(proto.input), proto.output[0], attributes)
        if node.op == "Constant" and "value" in attributes:
            weights[node.output] = numpy_helper.to_array(attributes["value"])
            continue
        if node.op == "BatchNormalization" and (conv := before(node.inputs[0], "Conv")):
            node = _scaled(kept.pop(conv.output), node, weights)
        elif node.op == "Mul":
            for x, y in (node.inputs, node.inputs[::-1]):
                if (gate := before(y, "Sigmoid")) and gate.inputs == [x]:
                    node = Node("Silu", node.name, kept.pop(y).inputs, node.output, {})
        elif node.op == "Add" and (parts := _group_norm(node, before, weights)):
            node = parts[-1]
            for part in parts[:-1]:
                del kept[part.output]
        kept[node.output] = node
    return list(kept.values())


def _scaled(conv: Node, norm: Node, weights: dict[str, np.ndarray]) -> Node:
    """Returns the convolution with the norm folded into its weights."""
    scale, shift, mean, var = (weights[x] for x in norm.inputs[1:])
    factor = scale / np.sqrt(var + norm.attributes.get("epsilon", 1e-5))
    w, *bias = (weights[x] for x in conv.inputs[1:])
    made = {f"{norm.output} w": w * factor[:, None, None, None], f"{norm.output} b": shift + (sum(bias) - mean) * factor}
    weights |= {name: a.astype(w.dtype) for name, a in made.items()}
    return Node("Conv", conv.name, [conv.inputs[0], *made], norm.output, conv.attributes)


def _group_norm(add: Node, before: Callable[[str, str], Node | None], weights: Mapping[str, np.ndarray]) -> list[Node] | None:
    """Returns the nodes of a group norm that ends with `add`, then that norm as one node; None if there is none."""
    parts = [add]
    for op in ("Mul", "Reshape", "InstanceNormalization", "Reshape"):
        if not (node := before(parts[0].inputs[0], op)):
            return None
        parts.insert(0, node)
    apart, norm, _, scale, _ = parts
    ones, zeros = (weights[x] for x in norm.inputs[1:])
    if (
        len(weights[apart.inputs[1]]) != 3
        or (ones != 1).any()
        or zeros.any()
        or not {scale.inputs[1], add.inputs[1]} <= set(weights)
    ):
        return None
    how = {"groups": len(ones), "epsilon": norm.attributes.get("epsilon", 1e-5)}
    made = Node("GroupNorm", norm.name, [apart.inputs[0], scale.inputs[1], add.inputs[1]], add.output, how)
    return [*parts[:-1], made]
