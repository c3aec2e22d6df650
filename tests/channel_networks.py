"""Random networks for the tests of channel permutation: sums, concats, groups, shuffles, slices, pads and products.

Each rule adds nodes to a drawn.Drawn and returns their output, None if it cannot.
"""

import math

import numpy as np
import onnx

from tests import drawn
from tests.drawn import Drawn


def same_conv(d: Drawn):
    """Adds a convolution that keeps height and width, so that there are tensors of equal size for sums and concats."""
    if (x := d.image()) is None:
        return None
    n, c, h, w = d.shapes[x]
    r = d.pick.choice((1, 1, 3))
    groups = d.pick.choice((1, 1, 1, 1, c, math.gcd(c, 2), math.gcd(c, 4)))
    k = groups * d.pick.choice((1, 1, 2)) if groups == c else d.pick.choice((8, 8, 16)) // groups * groups
    bias = d.constant(k, spread=0.3) if d.pick.random() < 0.5 else "_"
    weights = d.constant(k, c // groups, r, r, spread=(c // groups * r * r / 3) ** -0.5)
    return d.add("Conv", f"{x} {weights} {bias}", (n, k, h, w), pads=[r // 2] * 4, group=groups) if k else None


def again(d: Drawn):
    """Adds a convolution with the weights of an earlier one."""
    convs = [n for n in d.nodes if n.op_type == "Conv"]
    if not convs:
        return None
    old = d.pick.choice(convs)
    shape = d.shapes[old.input[0]]
    x = d.any(lambda other: other == shape)
    given = {a.name: onnx.helper.get_attribute_value(a) for a in old.attribute}
    return d.add("Conv", f"{x} {old.input[1]} _", d.shapes[old.output[0]], **given)


def total(d: Drawn):
    x = d.image()
    y = x and d.any(lambda other: other == d.shapes[x])
    return y and d.add(d.pick.choice(("Add", "Add", "Mul", "Max")), f"{x} {y}", d.shapes[x])


def affine(d: Drawn):
    if (x := d.image()) is None:
        return None
    c = d.shapes[x][1]
    dims = d.pick.choice(((c, 1, 1), (1, c, 1, 1), (1,), (c, *d.shapes[x][2:])))
    return d.add(d.pick.choice(("Add", "Mul", "PRelu")), f"{x} {d.constant(*dims)}", d.shapes[x])


def shuffled(d: Drawn):
    x = d.any(lambda shape: len(shape) == 4 and shape[1] % 4 == 0)
    if x is None:
        return None
    n, c, h, w = d.shapes[x]
    g = d.pick.choice((2, 4))
    a = d.add("Reshape", f"{x} {d.given([n, g, c // g, h, w])}", (n, g, c // g, h, w))
    b = a and d.add("Transpose", a, (n, c // g, g, h, w), perm=[0, 2, 1, 3, 4])
    return b and d.add("Reshape", f"{b} {d.given([0, c, h, w])}", (n, c, h, w))


def excited(d: Drawn):
    if (x := d.image()) is None:
        return None
    n, c, _, _ = d.shapes[x]
    p = d.add("GlobalAveragePool", x, (n, c, 1, 1))
    q = d.add("Conv", f"{p} {d.constant(8, c, 1, 1)}", (n, 8, 1, 1))
    s = d.add("Conv", f"{q} {d.constant(c, 8, 1, 1)}", (n, c, 1, 1))
    return d.add("Mul", f"{x} {d.add('Sigmoid', s, (n, c, 1, 1))}", d.shapes[x])


def classified(d: Drawn):
    """Adds a Flatten of a small image and two products."""
    if (x := d.image()) is None:
        return None
    n, c, h, w = d.shapes[x]
    f = d.add("Flatten", x, (n, c * h * w)) if c * h * w <= 400 else None
    if f is None:
        return None
    a = d.add("Gemm", f"{f} {d.constant(8, c * h * w)} {d.constant(8)}", (n, 8), transB=1)
    return a and d.add("MatMul", f"{a} {d.constant(8, 8)}", (n, 8))


def padded(d: Drawn):
    x = d.image()
    if x is None:
        return None
    n, c, h, w = d.shapes[x]
    front, back = d.pick.choice(((4, 4), (0, 8), (2, 0)))
    return d.add("Pad", f"{x} {d.given([0, front, 0, 0, 0, back, 0, 0])}", (n, c + front + back, h, w))


def taken(d: Drawn):
    """Adds a Gather of some channels, or a Slice of every second one."""
    x = d.any(lambda shape: len(shape) == 4 and shape[1] >= 8)
    if x is None:
        return None
    n, c, h, w = d.shapes[x]
    if d.pick.random() < 0.5:
        index = d.pick.sample(range(c), 8)
        return d.add("Gather", f"{x} {d.given(index)}", (n, 8, h, w), axis=1)
    given = " ".join(d.given([v]) for v in (d.pick.choice((0, 1)), 2**62, 1, 2))
    start = int(d.weights[given.split()[0]][0])
    return d.add("Slice", f"{x} {given}", (n, len(range(start, c, 2)), h, w))


def last_axis(d: Drawn):
    """Adds a Transpose to channels last, a product and a Softmax along channels, and the Transpose back."""
    x = d.image()
    if x is None:
        return None
    n, c, h, w = d.shapes[x]
    t = d.add("Transpose", x, (n, h, w, c), perm=[0, 2, 3, 1])
    m = t and d.add("MatMul", f"{t} {d.constant(c, 8, spread=c**-0.5)}", (n, h, w, 8))
    s = m and d.add(d.pick.choice(("Relu", "Softmax")), m, (n, h, w, 8))
    return s and d.add("Transpose", s, (n, 8, h, w), perm=[0, 3, 1, 2])


def over_channels(d: Drawn):
    if (x := d.image()) is None:
        return None
    n, c, h, w = d.shapes[x]
    op = d.pick.choice(("Softmax", "ReduceMean", "CumSum", "InstanceNormalization"))
    if op == "Softmax":
        return d.add(op, x, d.shapes[x], axis=1)
    if op == "CumSum":
        return d.add(op, f"{x} {d.given(np.int64(1))}", d.shapes[x])
    if op == "InstanceNormalization":
        return d.add(op, f"{x} {d.constant(c, near=1)} {d.constant(c)}", d.shapes[x]) if h * w > 3 else None
    return d.add("ReduceMean", f"{x} {d.given([1])}", (n, 1, h, w))


# fmt: off
RULES = (
    same_conv, same_conv, same_conv, same_conv, same_conv, again, total, total, total, affine, drawn.norm, drawn.pointwise,
    drawn.concat, drawn.concat, drawn.split, shuffled, excited, classified, padded, taken, last_axis, over_channels,
    drawn.pool, drawn.resize, drawn.slice_, drawn.mean,
)
# fmt: on


def network(seed: int, nodes: tuple[int, int] = (8, 24)) -> onnx.ModelProto:
    return drawn.network(seed, RULES, nodes)
