"""QuantizeLinear that travels up and DequantizeLinear that travels down: the same values, and operators on whole numbers."""

import numpy as np
import onnx
import pytest

from gpu_runtime.network import Network
from tactics.problems.problem import ConvProblem, MoveProblem, PointwiseProblem, PoolProblem
from tests.reference_run import choices, model, network, node, ort_run, run

SHAPE = (2, 4, 6, 8)
# Powers of two, with which FP32 has every value exactly, so that results must be equal.
PARAMETERS = {"a": (0.25, np.uint8(7)), "b": (0.5, np.uint8(130)), "c": (0.25, np.int8(0)), "d": (0.125, np.int8(-5))}


class Drawn:
    """A random network of quantisers and the operators between them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes, self.weights, self.shapes = [], {}, {"x": SHAPE}
        for name, (scale, zero) in PARAMETERS.items():
            self.weights |= {f"s{name}": np.float32(scale), f"z{name}": zero}

    def add(self, op: str, inputs: str, shape, **attributes) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(node(op, inputs, name, **attributes))
        self.shapes[name] = shape
        return name

    def stored(self, *values: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.array(values, np.int64)
        return name

    def pair(self, x: str, of: str) -> str:
        """Quantises and dequantises."""
        q = self.add("QuantizeLinear", f"{x} s{of} z{of}", self.shapes[x])
        if self.rng.random() < 0.2:
            q = self.moved(q, of)
        return self.add("DequantizeLinear", f"{q} s{of} z{of}", self.shapes[q])

    def moved(self, x: str, of: str = "") -> str:
        n, c, h, w = self.shapes[x]
        match int(self.rng.integers(8)):
            case 0:
                return self.add("MaxPool", x, (n, c, h, w), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
            case 1:
                return self.add("Transpose", x, (n, c, w, h), perm=[0, 1, 3, 2])
            case 2 if h > 2:
                return self.add("Slice", f"{x} {self.stored(1)} {self.stored(h)} {self.stored(2)}", (n, c, h - 1, w))
            case 3:
                self.weights["fill"] = np.float32(1.5)
                fill = f"z{of}" if of else str(self.rng.choice(["", "fill"]))
                return self.add("Pad", f"{x} {self.stored(0, 0, 1, 0, 0, 0, 0, 0)} {fill}".strip(), (n, c, h + 1, w))
            case 4 if h < 9:
                name = f"w{len(self.weights)}"
                self.weights[name] = np.array([1, 1, 2, 1], np.float32)
                names = f"{x}  {name}".split(" ")
                made = onnx.helper.make_node("Resize", names, [f"t{len(self.nodes)}"], mode="nearest",
                                             coordinate_transformation_mode="asymmetric", nearest_mode="floor")  # fmt: skip
                self.nodes.append(made)
                self.shapes[made.output[0]] = (n, c, 2 * h, w)
                return made.output[0]
            case 5:
                return self.add("Reshape", f"{x} {self.stored(n, c, w, h)}", (n, c, w, h))
            case 6 if not of:
                return self.add("Relu", x, (n, c, h, w))
            case _:
                return self.add("Identity", x, (n, c, h, w))

    def model(self) -> onnx.ModelProto:
        live, last = ["x"], "x"
        for _ in range(int(self.rng.integers(4, 14))):
            x = live[int(self.rng.integers(max(0, len(live) - 3), len(live)))]
            of = str(self.rng.choice(list(PARAMETERS)[: int(self.rng.integers(1, 5))]))
            kind = self.rng.random()
            others = [t for t in live if self.shapes[t] == self.shapes[x] and t != x]
            if kind < 0.45:
                last = self.pair(x, of)
            elif kind < 0.75 or not others:
                last = self.moved(x)
            elif kind < 0.87:
                last = self.add("Add", f"{x} {others[-1]}", self.shapes[x])
            else:
                n, c, h, w = self.shapes[x]
                last = self.add("Concat", f"{x} {others[-1]}", (n, 2 * c, h, w), axis=1) if c < 16 else self.pair(x, of)
            live.append(last)
        outputs = dict.fromkeys([self.pair(last, "a"), live[len(live) // 2 or 1]])
        return model(self.nodes, {"x": SHAPE}, " ".join(outputs), self.weights, opset=14)


@pytest.mark.parametrize("seed", range(120))
def test_every_value_stays(seed):
    proto = Drawn(seed).model()
    x = {"x": np.random.default_rng(seed).integers(-400, 400, SHAPE).astype(np.float32) / 16}
    expected, net = ort_run(proto, x, optimized=False), network(proto)
    for choice in choices(net):
        for name, y in run(net, x, choice).items():
            assert np.array_equal(y, expected[name]), (name, choice)


def pairs(x: str, y: str, of: str) -> list[onnx.NodeProto]:
    return [
        node("QuantizeLinear", f"{x} s{of} z{of}", f"{y}_q", name=f"quantize {y}"),
        node("DequantizeLinear", f"{y}_q s{of} z{of}", y, name=f"dequantize {y}"),
    ]


def built(*nodes: onnx.NodeProto, shape=SHAPE, y: str = "y", **weights: np.ndarray) -> Network:
    given = {f"{k}{n}": v for n, (s, z) in PARAMETERS.items() for k, v in (("s", np.float32(s)), ("z", z))}
    used = {name for each in nodes for name in each.input}
    proto = model(list(nodes), {"x": shape}, y, {k: v for k, v in (given | weights).items() if k in used}, opset=14)
    x = {"x": np.random.default_rng(0).integers(-400, 400, shape).astype(np.float32) / 16}
    net, expected = network(proto), ort_run(proto, x, optimized=False)
    for choice in choices(net):
        for name, got in run(net, x, choice).items():
            assert np.allclose(got, expected[name], rtol=1e-6, atol=1e-6)
    return net


def kinds(net: Network) -> list[str]:
    """The ops in short: "q" quantises, "d" dequantises, else its type."""
    found = []
    for op in net.ops:
        names = [s.op for s in op.problem.stages] if isinstance(op.problem, PointwiseProblem) else []
        found.append({"mul quantize": "q", "mul": "d"}.get(" ".join(names), " ".join(names) or op.problem.TYPE))
    return found


def test_a_pool_between_equal_pairs_sees_whole_numbers():
    net = built(*pairs("x", "a", "a"), node("MaxPool", "a", "m", kernel_shape=[2, 2]), *pairs("m", "y", "a"))
    assert kinds(net) == ["q", "pool", "d"]
    assert isinstance(net.ops[1].problem, PoolProblem)


def test_a_pool_between_other_pairs_sees_whole_numbers():
    net = built(*pairs("x", "a", "a"), node("MaxPool", "a", "m", kernel_shape=[2, 2]), *pairs("m", "y", "b"))
    assert kinds(net) == ["q", "pool", "mul mul quantize", "d"] or kinds(net)[:2] == ["q", "pool"]


def test_equal_pairs_are_one():
    net = built(
        *pairs("x", "a", "a"), *pairs("x", "b", "a"), *pairs("a", "c", "a"), node("Sub", "b c", "u"), node("Add", "u a", "y")
    )
    assert kinds(net)[:2] == ["q", "d"] and sum("quantize" in s or s == "q" for s in kinds(net)) == 1


def test_a_slice_and_a_pad_see_whole_numbers():
    net = built(
        *pairs("x", "a", "a"), node("Slice", "a first last axes", "t"), *pairs("t", "b", "a"), node("Pad", "b pads", "p"),
        *pairs("p", "y", "a"), first=np.array([2]), last=np.array([4]), axes=np.array([1]),
        pads=np.array([0, 1, 0, 0, 0, 1, 0, 0]),
    )  # fmt: skip
    assert kinds(net) == ["q", "move", "move", "d"] and isinstance(net.ops[1].problem, MoveProblem)


def test_a_concat_of_equal_scales_joins_whole_numbers():
    relu = node("Relu", "x", "r")
    net = built(relu, *pairs("x", "a", "a"), *pairs("r", "b", "a"), node("Concat", "a b", "c", axis=1), *pairs("c", "y", "a"))
    assert kinds(net)[-2:] == ["concat", "d"]


def test_a_relu_narrows_the_bounds():
    w = np.random.default_rng(0).integers(-8, 9, (8, 4, 1, 1)).astype(np.float32) / 8
    for between in (node("Relu", "c", "r"), node("Clip", "c low high", "r")):
        net = built(node("Conv", "x w", "c"), between, *pairs("r", "a", "a"), node("Conv", "a v", "y"),
                    w=w, v=w.repeat(2, 1), low=np.float32(-0.3), high=np.float32(6))  # fmt: skip
        convs = [op for op in net.ops if isinstance(op.problem, ConvProblem)]
        bounds = convs[0].problem.epilogue.act.params
        assert bounds == ((0, 248) if between.op_type == "Relu" else (-1, 24)), bounds


def test_a_residual_of_whole_numbers_is_scaled_once():
    """(a s + b t) / u is a (s / u) + b (t / u): the convolution scales its own whole numbers, and adds the others."""
    w = np.random.default_rng(0).integers(-8, 9, (4, 4, 3, 3)).astype(np.float32) / 16
    net = built(
        *pairs("x", "a", "a"), node("Conv", "a w", "c", pads=[1, 1, 1, 1], name="conv"), *pairs("c", "d", "c"),
        node("Add", "d a", "e", name="sum"), node("Relu", "e", "r"), *pairs("r", "f", "b"),
        node("Conv", "f w", "y", pads=[1, 1, 1, 1]), w=w,
    )  # fmt: skip
    assert [group for group, _ in net.groups] == ["sum"]
    one = next(op for op in net.ops if ("sum", "into conv") in op.when)
    end = one.problem.epilogue
    assert (str(end.act), end.affine, end.residual, end.act_first, str(end.last)) == (
        "quantize(-128,127)", True, True, True, "quantize(130,255)")  # fmt: skip
    assert np.all(one.weights["scales"] == 0.5) and np.all(one.weights["shifts"] == 130)  # the zero point of the sum


@pytest.mark.parametrize("groups", [2, 4])
def test_convolutions_of_groups_have_the_scale_in_their_weights(groups):
    """No kernel computes them in integers."""
    w = np.random.default_rng(0).integers(-8, 9, (8, 4 // groups, 3, 3)).astype(np.float32) / 16
    net = built(*pairs("x", "a", "a"), node("Conv", "a w", "c", group=groups), *pairs("c", "y", "c"), w=w)
    assert kinds(net) == ["q", "conv"]
