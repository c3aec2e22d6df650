"""Random networks by seed, whose tensors may have several readers, small enough for the emulator."""

import math
import random
from collections.abc import Callable

import numpy as np
import onnx

from tests.reference_run import model, node

MOST_ELEMENTS = 1500  # of a tensor
Shape = tuple[int, ...]


class Drawn:
    """A network under construction. A rule, as the functions below, adds nodes that read existing tensors and returns the name
    of the output; None if it cannot. `pick`: the random numbers; `shapes`: tensor -> its shape."""

    def __init__(self, seed: str):
        self.pick = random.Random(seed)
        self.rng = np.random.default_rng(list(seed.encode()))
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.shapes: dict[str, Shape] = {}
        self.inputs: dict[str, Shape] = {}

    def input(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = self.shapes[name] = shape
        return name

    def any(self, holds: Callable[[Shape], bool] = lambda shape: True) -> str | None:
        """Returns the name of a tensor whose shape satisfies `holds`, more often a late one; None if there is none."""
        able = [t for t, shape in self.shapes.items() if holds(shape)]
        return self.pick.choice(able + 3 * able[-3:]) if able else None

    def image(self) -> str | None:
        return self.any(lambda shape: len(shape) == 4)

    def constant(self, *shape: int, near: float = 0.0, spread: float = 1.0) -> str:
        return self.given((near + spread * self.rng.uniform(-1, 1, shape)).astype(np.float32))

    def given(self, array) -> str:
        """Adds a constant and returns its name; its values are rounded to FP16, so that this causes no error later."""
        name = f"c{len(self.weights)}"
        array = np.asarray(array)
        self.weights[name] = array.astype(np.int64) if array.dtype.kind == "i" else array.astype(np.float16).astype(np.float32)
        return name

    def add(self, op: str, inputs: str, *shapes: Shape, **attributes) -> str | None:
        if any(min(shape, default=1) < 1 or math.prod(shape) > MOST_ELEMENTS for shape in shapes):
            return None
        names = [f"t{len(self.shapes) + i}" for i in range(len(shapes))]
        self.nodes.append(node(op, inputs, " ".join(names), **attributes))
        self.shapes |= dict(zip(names, map(tuple, shapes), strict=True))
        return names[0]

    def model(self) -> onnx.ModelProto:
        """Returns the model; its outputs are the tensors without readers, and sometimes tensors with readers too."""
        read = {name for n in self.nodes for name in n.input}
        made = [name for n in self.nodes for name in n.output]
        outputs = [name for name in made if name not in read]
        outputs += [t for t in made if t in read and self.pick.random() < 0.08]
        used = {x: shape for x, shape in self.inputs.items() if x in read}
        return model(self.nodes, used, " ".join(outputs), self.weights, opset=19)


# ---- rules


def conv(d: Drawn):
    if (x := d.image()) is None:
        return None
    n, c, h, w = d.shapes[x]
    r, s = d.pick.choice((1, 1, 3, 3, 5)), d.pick.choice((1, 3))
    stride, dilation = d.pick.choice((1, 1, 2)), d.pick.choice((1, 1, 2))
    groups = d.pick.choice((1, 1, 1, c, math.gcd(c, 4)))
    k = c if groups == c else groups * d.pick.choice((1, 3, 8, 8, 12))
    pads = [d.pick.choice((0, (k - 1) // 2, (k - 1) // 2 * dilation)) for k in (r, s)] * 2
    axes = zip((h, w), (r, s), pads[:2], strict=True)
    out = [(size + 2 * around - (reach - 1) * dilation - 1) // stride + 1 for size, reach, around in axes]
    if min(out) < 1:
        return None
    spread = (c // groups * r * s / 3) ** -0.5
    bias = d.constant(k, spread=0.3) if d.pick.random() < 0.6 else "_"
    return d.add(
        "Conv",
        f"{x} {d.constant(k, c // groups, r, s, spread=spread)} {bias}",
        (n, k, *out),
        pads=pads,
        group=groups,
        strides=[stride] * 2,
        dilations=[dilation] * 2,
    )


def norm(d: Drawn):
    if (x := d.image()) is None:
        return None
    c = d.shapes[x][1]
    stats = [d.constant(c, near=near, spread=0.3) for near in (1, 0, 0, 1)]
    return d.add("BatchNormalization", " ".join((x, *stats)), d.shapes[x])


def pointwise(d: Drawn):
    x = d.any()
    op, attributes = d.pick.choice(
        (
            ("Relu", {}),
            ("Relu", {}),
            ("Sigmoid", {}),
            ("Tanh", {}),
            ("LeakyRelu", {"alpha": 0.2}),
            ("HardSwish", {}),
            ("Neg", {}),
            ("Abs", {}),
            ("Elu", {}),
            ("Softplus", {}),
        )
    )
    return d.add(op, x, d.shapes[x], **attributes)


def binary(d: Drawn):
    x = d.any()
    shape = d.shapes[x]
    op = d.pick.choice(("Add", "Add", "Mul", "Sub", "Max", "Min"))
    if d.pick.random() < 0.3:
        return d.add(op, f"{x} {d.constant(*(s if d.pick.random() < 0.5 else 1 for s in shape))}", shape)
    y = d.any(lambda other: len(other) == len(shape) and all(b in (1, a) for a, b in zip(shape, other, strict=True)))
    return d.add(op, f"{x} {y}" if d.pick.random() < 0.7 else f"{y} {x}", shape)


def concat(d: Drawn):
    x = d.any()
    shape = d.shapes[x]
    axis = d.pick.choice((0, 1, 1, 1, 1, 2, 3)) % len(shape)

    def joins(other: Shape) -> bool:
        return len(other) == len(shape) and shape[:axis] + shape[axis + 1 :] == other[:axis] + other[axis + 1 :]

    xs = [x, *(d.any(joins) for _ in range(d.pick.choice((1, 1, 2))))]
    d.pick.shuffle(xs)
    size = sum(d.shapes[t][axis] for t in xs)
    return d.add("Concat", " ".join(xs), (*shape[:axis], size, *shape[axis + 1 :]), axis=axis)


def split(d: Drawn):
    if (x := d.any(lambda shape: shape[1] > 1)) is None:
        return None
    shape, first = d.shapes[x], d.pick.choice((1, 8, d.shapes[x][1] // 2, 4))
    if not 0 < first < shape[1]:
        return None
    parts = [(shape[0], size, *shape[2:]) for size in (first, shape[1] - first)]
    return d.add("Split", f"{x} {d.given([first, shape[1] - first])}", *parts, axis=1)


def pool(d: Drawn):
    if (x := d.image()) is None:
        return None
    n, c, h, w = d.shapes[x]
    op = d.pick.choice(("MaxPool", "AveragePool", "AveragePool", "GlobalAveragePool"))
    if op == "GlobalAveragePool":
        return d.add(op, x, (n, c, 1, 1))
    k, stride = d.pick.choice((1, 2, 3)), d.pick.choice((1, 2, 2, 3))
    attributes: dict[str, int | str | list[int]] = {"kernel_shape": [k, k], "strides": [stride, stride]}
    if op == "AveragePool":
        attributes["count_include_pad"] = d.pick.choice((0, 1))
    if d.pick.random() < 0.3 and (stride <= k or (op == "AveragePool" and k > 1)):  # onnxruntime refuses other shapes
        attributes["auto_pad"] = d.pick.choice(("SAME_UPPER", "SAME_LOWER")) if stride <= k else "SAME_UPPER"
        return d.add(op, x, (n, c, -(-h // stride), -(-w // stride)), **attributes)
    pads = [d.pick.randint(0, k - 1) for _ in range(4)] if k > 1 else [0] * 4
    pads = [min(p, k // 2) for p in pads]
    ceil = d.pick.random() < 0.3
    out = []
    for size, a, b in zip((h, w), pads[:2], pads[2:], strict=True):
        room = size + a + b - k
        if room < 0:
            return None
        last = -(-room // stride) if ceil else room // stride
        if last * stride >= size + a:  # such a window has no pixel; onnx's shape inference counts it for MaxPool
            return None
        out.append(1 + last)
    return d.add(op, x, (n, c, *out), pads=pads, ceil_mode=int(ceil), **attributes)


def resize(d: Drawn):
    if (x := d.any(lambda shape: len(shape) == 4 and shape[2] * shape[3] > 1)) is None:  # onnxruntime fails on one pixel
        return None
    n, c, h, w = d.shapes[x]
    mode = d.pick.choice(("nearest", "linear", "linear", "cubic"))
    turn = d.pick.choice(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
    out = [max(1, d.pick.choice((size * 2, size * 2, size * 3, size // 2, size + d.pick.randint(-2, 3)))) for size in (h, w)]
    attributes = {"mode": mode, "coordinate_transformation_mode": turn}
    if mode == "nearest":
        attributes["nearest_mode"] = d.pick.choice(("floor", "round_prefer_floor"))
    if d.pick.random() < 0.5:
        return d.add("Resize", f"{x} _ _ {d.given([n, c, *out])}", (n, c, *out), **attributes)
    scales = [d.pick.choice((0.5, 2.0, 3.0, 1.5, 1.25)) for _ in (h, w)]  # of which FP32 holds every product
    out = [math.floor(size * s) for size, s in zip((h, w), scales, strict=True)]
    return d.add("Resize", f"{x} _ {d.given(np.array([1, 1, *scales], np.float32))}", (n, c, *out), **attributes)


def slice_(d: Drawn):
    x = d.any()
    shape, axis = d.shapes[x], d.pick.choice((0, 1, 1, 2, 3)) % len(d.shapes[x])
    step = d.pick.choice((1, 1, 1, 2, -1))
    first, last = sorted(d.pick.sample(range(shape[axis] + 1), 2))
    start, end = (first, last) if step > 0 else (last - 1, first - 1 if first else -shape[axis] - 1)
    size = len(range(shape[axis])[first:last:step]) if step > 0 else last - first
    given = " ".join(d.given([v]) for v in (start, end, axis, step))
    return d.add("Slice", f"{x} {given}", (*shape[:axis], size, *shape[axis + 1 :]))


def transpose(d: Drawn):
    x = d.any()
    perm = list(range(len(d.shapes[x])))
    d.pick.shuffle(perm)
    perm = d.pick.choice((perm, perm, [0, 2, 3, 1] if len(perm) == 4 else perm))
    return d.add("Transpose", x, tuple(d.shapes[x][p] for p in perm), perm=perm)


def pad(d: Drawn):
    if (x := d.image()) is None:
        return None
    shape, mode = d.shapes[x], d.pick.choice(("constant", "constant", "edge", "reflect"))
    pads = [0, 0, *(d.pick.randint(0, 2) for _ in (2, 3)), 0, d.pick.choice((0, 0, 2)), *(d.pick.randint(0, 2) for _ in (2, 3))]
    if mode == "reflect" and any(max(pads[i], pads[i + 4]) >= shape[i] for i in range(4)):
        return None
    value = f" {d.given(np.float32(d.pick.choice((0.0, 0.5))))}" if mode == "constant" else ""
    out = tuple(s + a + b for s, a, b in zip(shape, pads[:4], pads[4:], strict=True))
    return d.add("Pad", f"{x} {d.given(pads)}{value}", out, mode=mode)


def reshape(d: Drawn):
    x = d.any()
    left, shape = math.prod(d.shapes[x]), []
    for _ in range(d.pick.choice((1, 2, 3, 3, 3))):  # 2 to 4 axes
        shape.append(d.pick.choice([k for k in range(1, left + 1) if left % k == 0][:8]))
        left //= shape[-1]
    shape.append(left)
    d.pick.shuffle(shape)
    return d.add("Reshape", f"{x} {d.given(shape)}", tuple(shape))


def softmax(d: Drawn):
    x = d.any()
    return d.add("Softmax", x, d.shapes[x], axis=d.pick.choice((1, -1)))


def gemm(d: Drawn):
    if (x := d.any(lambda shape: math.prod(shape[1:]) <= 200)) is None:
        return None
    shape, k = d.shapes[x], d.pick.choice((1, 5, 8, 16))
    c = math.prod(shape[1:])
    flat = x if len(shape) == 2 else d.add("Flatten", x, (shape[0], c))
    w, b = d.constant(k, c, spread=(c / 3) ** -0.5), d.constant(k, spread=0.3)
    return d.add("Gemm", f"{flat} {w} {b}", (shape[0], k), transB=1)


def shuffle(d: Drawn):
    if (x := d.image()) is None:
        return None
    n, c, h, w = d.shapes[x]
    if c % 4 == 0 and d.pick.random() < 0.7:
        return d.add("DepthToSpace", x, (n, c // 4, 2 * h, 2 * w), blocksize=2, mode=d.pick.choice(("DCR", "CRD")))
    return d.add("SpaceToDepth", x, (n, 4 * c, h // 2, w // 2), blocksize=2) if h % 2 == w % 2 == 0 else None


def mean(d: Drawn):
    if (x := d.image()) is None:
        return None
    n, c, _, _ = d.shapes[x]
    return d.add("ReduceMean", f"{x} {d.given([2, 3])}", (n, c, 1, 1))


MOVES = (concat, concat, concat, split, reshape, reshape, reshape, transpose, transpose, slice_, pointwise)


def squeeze_excite(d: Drawn):
    """Adds a grouped convolution and a squeeze-excite of its output. It is not in ALL, so that seeds keep their networks."""
    if (x := d.image()) is None or math.prod(d.shapes[x]) > MOST_ELEMENTS:
        return None
    shape = n, c, *_ = d.shapes[x]
    groups = d.pick.choice((c, c, math.gcd(c, 4), math.gcd(c, 3)))
    w = d.constant(c, c // groups, 3, 3, spread=(3 * c // groups) ** -0.5)
    y = d.add("Relu", d.add("Conv", f"{x} {w} {d.constant(c, spread=0.3)}", shape, pads=(1,) * 4, group=groups), shape)
    s = d.add("GlobalAveragePool", y, (n, c, 1, 1))
    for k, after in ((d.pick.randint(1, 9), "Relu"), (c, "Sigmoid")):
        w = d.constant(k, d.shapes[s][1], 1, 1, spread=d.shapes[s][1] ** -0.5)
        s = d.add(after, d.add("Conv", f"{s} {w}", (n, k, 1, 1)), (n, k, 1, 1))
    return d.add("Mul", d.pick.choice((f"{y} {s}", f"{s} {y}")), shape)


# fmt: off
ALL = (conv, conv, conv, norm, pointwise, pointwise, binary, binary, concat, concat, split, pool, resize, slice_, transpose,
       pad, reshape, softmax, gemm, shuffle, mean)
# fmt: on


def network(seed: int, rules=ALL, nodes: tuple[int, int] = (4, 12)) -> onnx.ModelProto:
    """Returns the network of a seed: one or two images, and a drawn number of nodes."""
    d = Drawn(f"{seed} {len(rules)}")
    n, c = d.pick.choice((1, 1, 1, 2, 4)), d.pick.choice((3, 4, 8, 8, 16, 20, 24))
    h, w = (d.pick.choice((1, 2, 3, 4, 4, 6, 7)) for _ in range(2))
    for _ in range(d.pick.choice((1, 2))):
        d.input(n, c, h, w)
    wanted = d.pick.randint(*nodes)
    for _ in range(10 * wanted):
        if len(d.nodes) >= wanted:
            break
        d.pick.choice(rules)(d)
    return d.model()
