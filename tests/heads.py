"""Random heads of detectors, pose models and flow networks: convolutions, and ops that decode their outputs to pixels.

The convolutions' sums are exact in FP32, but not in FP16: inputs are FP16 numbers, weights are 1 and 2^-9. So onnxruntime and
an engine decode the same numbers, and differ only in the ops after the convolutions.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx

from tests.reference_run import model, node


@dataclass
class Head:
    """A head under construction. `size`: the image's width in pixels; `h`, `w`: the numbers of cells of the grid, each `stride`
    pixels wide.
    """

    rng: random.Random
    size: int
    stride: int
    h: int
    w: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def constant(self, values: object, dtype: type = np.float32) -> str:
        name = f"k{len(self.weights)}"
        self.weights[name] = np.asarray(values, dtype)
        return name

    def add(self, op: str, *inputs: str, count: int = 1, **attributes: object) -> str:
        """Adds a node with these inputs; returns the name of its first output. Further outputs have the suffixes 1, 2, ..."""
        out = f"v{len(self.nodes)}"
        outs = " ".join([out, *(f"{out}_{i}" for i in range(1, count))])
        self.nodes.append(node(op, " ".join(inputs), outs, **attributes))
        return out

    def raw(self, channels: int) -> str:
        """Adds a convolution and returns the name of its output [1, channels, h, w], whose channels are each an input channel
        plus 2^-9 times another one.
        """
        x = f"x{len(self.inputs)}"
        self.inputs[x] = (1, 8, self.h, self.w)
        w = np.zeros((channels, 8, 1, 1), np.float32)
        for k in range(channels):
            a, b = self.rng.sample(range(8), 2)
            w[k, a], w[k, b] = 1, 2.0**-9
        return self.add("Conv", x, self.constant(w))

    def grid(self, axes: int) -> np.ndarray:
        """Returns the (x, y) in pixels of the cells' corners, [h, w, 2]; with `axes` 1 as [h * w, 2]."""
        ys, xs = np.meshgrid(np.arange(self.h), np.arange(self.w) + self.size // self.stride - self.w, indexing="ij")
        pixels = self.stride * np.stack([xs, ys], -1)
        return pixels.reshape(-1, 2) if axes == 1 else pixels

    def reshaped(self, x: str, *shape: int) -> str:
        return self.add("Reshape", x, self.constant(shape, np.int64))

    def cut(self, x: str, start: int, end: int, axis: int) -> str:
        return self.add("Slice", x, *(self.constant([v], np.int64) for v in (start, end, axis)))


def anchors(d: Head) -> str:
    """Adds YOLO's decoding: the centre is twice a sigmoid minus a half plus the cell, the size a squared double sigmoid times
    the anchor; [1, n, 4].
    """
    many, classes = d.rng.choice([1, 3]), d.rng.choice([1, 3])
    each = 5 + classes
    x = d.reshaped(d.raw(many * each), 1, many, each, d.h * d.w)
    s = d.add("Sigmoid", d.add("Transpose", x, perm=[0, 1, 3, 2]))
    xy, wh = d.cut(s, 0, 2, 3), d.cut(s, 2, 4, 3)
    xy = d.add("Add", d.add("Mul", xy, d.constant(2 * d.stride)), d.constant(d.grid(1) - 0.5 * d.stride))
    sizes = d.constant(np.round(np.random.default_rng(d.rng.randrange(99)).uniform(8, d.size / 4, (1, many, 1, 2))))
    wh = d.add("Mul", d.add("Pow", d.add("Mul", wh, d.constant(2)), d.constant(2)), sizes)
    return d.reshaped(d.add("Concat", xy, wh, axis=3), 1, many * d.h * d.w, 4)


def points(d: Head) -> str:
    """Adds FCOS's decoding: distances from the cell's centre to four sides, exponential or rectified; [1, n, 4]."""
    x = d.raw(4)
    x = d.add("Exp", x) if d.rng.random() < 0.5 else d.add("Relu", x)
    x = d.add("Mul", x, d.constant(d.stride))
    x = d.reshaped(d.add("Transpose", x, perm=[0, 2, 3, 1]), 1, d.h * d.w, 4)
    centre = d.constant(d.grid(1) + d.stride / 2)
    first, last = d.add("Sub", centre, d.cut(x, 0, 2, 2)), d.add("Add", centre, d.cut(x, 2, 4, 2))
    if d.rng.random() < 0.5:  # centre and size instead of corners
        middle = d.add("Mul", d.add("Add", first, last), d.constant(0.5))
        first, last = middle, d.add("Sub", last, first)
    boxes = d.add("Concat", first, last, axis=2)
    return d.add("Clip", boxes, d.constant(0), d.constant(d.size - 1)) if d.rng.random() < 0.5 else boxes


def distribution(d: Head) -> str:
    """Adds DFL's decoding: a side's distance is the expectation of a softmax over 16 bins, as a 1x1 convolution or a product;
    [1, n, 4].
    """
    bins, n = 16, d.h * d.w
    x = d.reshaped(d.raw(4 * bins), 1, 4, bins, n)
    if d.rng.random() < 0.5:
        x = d.add("Softmax", d.add("Transpose", x, perm=[0, 2, 1, 3]), axis=1)
        x = d.reshaped(d.add("Conv", x, d.constant(np.arange(bins).reshape(1, bins, 1, 1))), 1, 4, n)
    else:
        x = d.add("Mul", d.add("Softmax", x, axis=2), d.constant(np.arange(bins).reshape(1, 1, bins, 1)))
        x = d.add("ReduceSum", x, d.constant([2], np.int64), keepdims=0)
    centre = d.constant(d.grid(1).T / d.stride + 0.5)
    first, last = d.add("Sub", centre, d.cut(x, 0, 2, 1)), d.add("Add", centre, d.cut(x, 2, 4, 1))
    boxes = d.add("Mul", d.add("Concat", first, last, axis=1), d.constant(d.stride))
    return d.add("Transpose", boxes, perm=[0, 2, 1])


def heat(d: Head) -> str:
    """Adds CenterNet's decoding: the peaks of a heat map, their rows and columns by division, plus an offset gathered there;
    [1, k, 2].
    """
    k, n = d.rng.randrange(2, 9), d.h * d.w
    x = d.raw(1)
    if d.rng.random() < 0.5:
        s = d.add("Sigmoid", x)
        kept = d.add("Equal", s, d.add("MaxPool", s, kernel_shape=[3, 3], pads=[1] * 4))
        x = d.add("Mul", s, d.add("Cast", kept, to=1))
    top = d.add("TopK", d.reshaped(x, 1, n), d.constant([k], np.int64), count=2, axis=1)
    index = f"{top}_1"
    if d.rng.random() < 0.5:
        f = d.add("Cast", index, to=1)
        ys = d.add("Floor", d.add("Div", f, d.constant(d.w)))
        xs = d.add("Sub", f, d.add("Mul", ys, d.constant(d.w)))
    else:
        ys = d.add("Cast", d.add("Div", index, d.constant(d.w, np.int64)), to=1)
        xs = d.add("Cast", d.add("Mod", index, d.constant(d.w, np.int64)), to=1)
    d.outputs.append(index)
    both = d.add("Concat", d.reshaped(xs, 1, k, 1), d.reshaped(ys, 1, k, 1), axis=2)
    return d.add("Mul", both, d.constant(d.stride))


def bins(d: Head) -> str:
    """Adds SimCC's decoding: the first of the largest of many bins along an axis, half a pixel each; [1, h, 1]."""
    best = d.add("ArgMax", d.raw(1), axis=3, keepdims=0)
    half = d.add("Div", d.add("Cast", best, to=1), d.constant(2))
    return d.reshaped(d.add("Add", half, d.constant(d.size - d.w)), 1, d.h, 1)


def marks(d: Head) -> str:
    """Adds the index of the largest value as one-hot numbers that count pixels; [1, 1, 1]."""
    n = d.h * d.w
    best = d.add("ArgMax", d.reshaped(d.raw(1), 1, n), axis=1, keepdims=1)
    hot = d.add("Cast", d.add("Equal", best, d.constant(np.arange(n)[None], np.int64)), to=1)
    total = d.add("ReduceSum", d.add("Mul", hot, d.constant(d.stride * np.arange(n)[None])), d.constant([1], np.int64))
    return d.reshaped(total, 1, 1, 1)


def flow(d: Head) -> str:
    """Adds the end points of a flow, in pixels, and as GridSample takes them; [1, n, 2]."""
    to = d.add("Add", d.raw(2), d.constant(d.grid(2).transpose(2, 0, 1)))
    return d.add("Transpose", d.reshaped(to, 1, 2, d.h * d.w), perm=[0, 2, 1])


KINDS: tuple[Callable[[Head], str], ...] = (anchors, points, distribution, heat, bins, marks, flow)


def draw(seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray], float]:
    """Returns (a model, its inputs, the width of its image in pixels)."""
    rng = random.Random(seed)
    size = rng.choice([256, 640, 1024, 2048, 4096])
    stride = rng.choice([s for s in (4, 8, 16, 32) if size // s <= 512])
    d = Head(rng, size, stride, rng.randrange(1, 5), rng.randrange(8, min(64, size // stride) + 1))
    boxes = KINDS[seed % len(KINDS)](d)
    if rng.random() < 0.4 and (n := min(_rows(d, boxes), d.h * d.w)) > 2:  # the boxes with the best scores of another head
        scores = d.add("Sigmoid", d.reshaped(d.raw(1), 1, d.h * d.w))
        top = d.add("TopK", d.cut(scores, 0, n, 1), d.constant([3], np.int64), count=2, axis=1)
        d.outputs.append(f"{top}_1")
        boxes = d.add("Gather", boxes, d.reshaped(f"{top}_1", 3), axis=1)
    d.outputs.append(boxes)
    proto = model(d.nodes, d.inputs, " ".join(d.outputs), d.weights, opset=17)
    del proto.graph.value_info[:]  # inferred while all outputs counted as floating-point
    for index in proto.graph.output[:-1]:
        index.type.tensor_type.elem_type = onnx.TensorProto.INT64
    values = np.random.default_rng(seed)
    feeds = {name: values.uniform(-2, 2, shape).astype(np.float16).astype(np.float32) for name, shape in d.inputs.items()}
    return proto, feeds, float(size)


def _rows(d: Head, boxes: str) -> int:
    """Returns the number of boxes of a head."""
    found = onnx.shape_inference.infer_shapes(model(d.nodes, d.inputs, boxes, d.weights))
    return found.graph.output[0].type.tensor_type.shape.dim[1].dim_value
