"""Layers that read tensors with a zero point, in FP16 and on whole numbers, against onnxruntime without its optimizer."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.frontend.whole_numbers import SUBTRACTED
from gpu_runtime.network import Network
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.rewrites import integers
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import ConvProblem
from tactics.problems.protocol import Feature
from tests.engines import emulated
from tests.reference_run import model, network, node, ort_run, run

SHAPE = (1, 16, 6, 7)
BOUNDS = {np.uint8: (0, 255), np.int8: (-128, 127)}
ZERO_POINT = "its input has a zero point, so that its numbers have 9 bits"


class Drawn:
    """A random quantised network: convolutions of windows, groups and borders, products, sums and what places elements."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def add(self, op: str, inputs: str, **attributes) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(node(op, inputs, name, name=f"{op}_{name}", **attributes))
        return name

    def stored(self, values) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(values)
        return name

    def quantized(self, x: str, scale: float) -> tuple[str, str]:
        """Returns (the quantised tensor, its scale and zero point)."""
        kind = (np.uint8, np.int8)[self.rng.integers(2)]
        names = f"{self.stored(np.float32(scale))} {self.stored(kind(self.rng.integers(*BOUNDS[kind])))}"
        return self.add("QuantizeLinear", f"{x} {names}"), names

    def pair(self, x: str, scale: float) -> str:
        q, names = self.quantized(x, scale)
        if self.rng.random() < 0.3:
            q = self.add("MaxPool", q, kernel_shape=[2, 2], pads=[0, 0, 1, 1])
        return self.add("DequantizeLinear", f"{q} {names}")

    def conv(self, x: str, size: int, pad: int, group: int = 1) -> str:
        w = self.rng.integers(-99, 100, (16, 16 // group, size, size)).astype(np.int8)
        scale = self.stored((self.rng.uniform(0.5, 1, 16) / 60 / np.sqrt(w[0].size)).astype(np.float32))
        stored = self.add("DequantizeLinear", f"{self.stored(w)} {scale}", axis=0)
        bias = self.stored(self.rng.normal(0, 0.3, 16).astype(np.float32))
        return self.add("Conv", f"{x} {stored} {bias}", pads=[pad] * 4, group=group)

    def layer(self, x: str) -> str:
        match int(self.rng.integers(7)):
            case 0:
                return self.conv(x, 3, 1)
            case 1:
                return self.conv(x, 3, 1, group=16)
            case 2:
                return self.add("Add", f"{self.pair(self.conv(x, 1, 0), 0.0137)} {x}")
            case 3:
                return self.add("Mul", f"{self.pair(self.add('Sigmoid', self.conv(x, 1, 0)), 0.0039)} {x}")
            case 4:
                return self.add("Add", f"{self.conv(x, 1, 0)} {x}")
            case 5:
                other = self.pair(self.conv(x, 3, 1), 0.0137)
                return self.add("Add", f"{self.add('Mul', f'{other} {other}')} {x}")
            case _:
                return self.conv(x, 1, 0)

    def model(self) -> tuple[onnx.ModelProto, float]:
        """Returns (a model, the scale of its output)."""
        x = self.pair("x", self.rng.uniform(0.01, 0.02))
        for _ in range(3):
            x = self.pair(self.layer(x), self.rng.uniform(0.01, 0.03))
        scale = self.rng.uniform(0.01, 0.02)
        q, names = self.quantized(self.conv(x, 1, 0), scale)
        self.nodes.append(node("DequantizeLinear", f"{q} {names}", "y"))
        return model(self.nodes, {"x": SHAPE}, "y", self.weights, opset=17), scale


def with_twins(net: Network) -> list[str]:
    return [op.layer for op in net.ops if Feature.MULTIPLIED in op.problem.needs]


def ways(net: Network) -> list[dict[str, str]]:
    """Options that plans may take: all first ones, all last ones, and three drawn; each tensor in FP16 is made."""
    rng = np.random.default_rng(0)
    picks = (lambda of: of[0], lambda of: of[-1], *[rng.choice] * 3)
    return [{g: str(of[0] if g.endswith(" in FP16") else pick(of)) for g, of in net.groups} for pick in picks]


@pytest.mark.parametrize("seed", range(24))
def test_drawn_networks_are_onnxruntime_s_in_every_way(seed):
    """One whole number that rounds the other way moves a few behind it by one."""
    proto, scale = Drawn(seed).model()
    feeds = {"x": np.random.default_rng(seed).uniform(-1.5, 1.5, SHAPE).astype(np.float32)}
    net, expected = alternatives(network(proto)), ort_run(proto, feeds, optimized=False)["y"]
    assert with_twins(net)
    for choice in ways(net):
        off = np.abs(run(net, feeds, choice)["y"] - expected) / scale
        assert (off > 0.5).mean() < 0.02 and off.max() < 1.5, choice


def pointwise(scale: float, zero, size: int = 1, readers: int = 1, more=(), shape=SHAPE) -> onnx.ModelProto:
    """A quantised tensor of that scale and zero point, which convolutions of that size and `more` read."""
    rng = np.random.default_rng(1)
    weights = {"s": np.float32(scale), "z": zero, "one": np.float32(1)}
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "d"), *more]
    for i in range(readers):
        weights |= {f"w{i}": rng.integers(-4, 5, (16, shape[1], size, size)).astype(np.float32) / 8}
        nodes.append(node("Conv", f"d w{i}", f"c{i}", pads=[size // 2] * 4, name=f"conv{i}"))
    outputs = [n.output[0] for n in nodes if not any(n.output[0] in other.input for other in nodes)]
    nodes.append(node("Sum", " ".join(outputs), "y"))
    return model(nodes, {"x": shape}, "y", weights, opset=17)


DEPTHWISE = node("Conv", "d wd", "dc", group=16, pads=[1, 1, 1, 1])


@pytest.mark.parametrize(
    "scale, zero, size, kept",
    [
        (0.0123, np.uint8(131), 1, True),
        (0.0123, np.int8(-7), 1, True),
        (0.25, np.uint8(130), 1, True),  # halves move by an even number, and stay the same
        (0.25, np.uint8(131), 1, False),  # 0.125 / 0.25 = 0.5 is 0 and 131, but 131.5 is 132
        (0.0123, np.uint8(131), 3, True),
        (0.0123, np.uint8(0), 1, True),
    ],
)
def test_a_tensor_keeps_its_zero_point_where_that_is_exact(scale, zero, size, kept):
    proto = pointwise(scale, zero, size)
    net = network(proto)
    assert any(SUBTRACTED in op.output for op in net.ops) != kept
    step = 0.125 if scale == 0.25 else 0.3717 * scale
    feeds = {"x": (np.random.default_rng(0).integers(-300, 300, SHAPE) * step).astype(np.float32)}
    expected = ort_run(proto, feeds, optimized=False)["y"]
    for choice in ways(net):
        assert np.abs(run(net, feeds, choice)["y"] - expected).max() <= 2e-5 * np.abs(expected).max()


def test_other_readers_decide_for_all():
    """A depthwise convolution reads numbers without the zero point, in no launch more."""
    proto = pointwise(0.0123, np.uint8(131), more=(DEPTHWISE,))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((16, 1, 3, 3), np.float32), "wd"))
    assert any(SUBTRACTED in op.output for op in network(proto).ops)
    assert not any(SUBTRACTED in op.output for op in network(pointwise(0.0123, np.uint8(131), readers=2)).ops)


def test_a_sum_that_is_quantised_is_one_launch():
    """The zero points of both terms and of the result are one number behind the convolution."""
    rng = np.random.default_rng(3)
    q, d = "QuantizeLinear", "DequantizeLinear"
    nodes = [
        node(q, "x sa za", "qa"), node(d, "qa sa za", "a"), node("Conv", "a w", "c", name="conv"),
        node(q, "c sb zb", "qb"), node(d, "qb sb zb", "b"), node("Add", "b a", "e", name="sum"),
        node(q, "e sc zc", "qc"), node(d, "qc sc zc", "f"), node("Conv", "f w", "y", name="last"),
    ]  # fmt: skip
    w = rng.integers(-99, 100, (16, 16, 1, 1)) / 500
    weights = {"w": w.astype(np.float32), "sa": np.float32(0.0123), "za": np.uint8(131), "sb": np.float32(0.0117),
               "zb": np.uint8(118), "sc": np.float32(0.0211), "zc": np.uint8(127)}  # fmt: skip
    proto = model(nodes, {"x": SHAPE}, "y", weights, opset=17)
    net = alternatives(network(proto))
    one = next(op for op in net.ops if ("sum", "into conv") in op.when and Feature.MULTIPLIED in op.problem.needs)
    assert one.problem.epilogue.residual and str(one.problem.epilogue.last) == "quantize(0,255)"
    assert net.type(one.output).whole == "uint8"
    feeds = {"x": rng.uniform(-1.5, 1.5, SHAPE).astype(np.float32)}
    expected = ort_run(proto, feeds, optimized=False)["y"]
    for choice in ways(net):
        assert (np.abs(run(net, feeds, choice)["y"] - expected) > 1e-3).mean() < 0.02, choice


def test_a_layer_whose_numbers_have_9_bits_says_so():
    proto = pointwise(0.25, np.uint8(131), readers=3)
    assert set(gr.build(proto, device="l4").record.plan.int8.values()) == {ZERO_POINT}


@pytest.mark.parametrize("size", [1, 3])
def test_an_engine_of_bytes_is_saved_and_runs(size, tmp_path):
    shape = (4, 256, 28, 28)
    proto = pointwise(0.0123, np.uint8(131), size, shape=shape)
    feeds = {"x": np.random.default_rng(0).uniform(-1.5, 1.5, shape).astype(np.float32)}
    gr.build(proto, device="l4").save(tmp_path / "m.engine")
    engine = gr.load(tmp_path / "m.engine")
    assert set(engine.record.plan.int8.values()) == {""}
    (layer,) = [layer for layer in engine.plan.layers if isinstance(layer.problem, ConvProblem)]
    assert layer.tactic.ins[0].dtype == "uint8" and layer.problem.prologue.border == (131 if size == 3 else 0)
    expected, (got,) = ort_run(proto, feeds, optimized=False)["y"], emulated(engine, feeds).values()
    assert np.abs(got - expected).max() <= 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("zero, read", [(131, True), (7, True), (130.5, False), (300, False)])
def test_a_source_has_a_zero_point_that_bytes_hold(zero, read):
    """Other numbers are a network's own operators, not a quantiser's."""
    net = network(pointwise(0.0123, np.uint8(131)))
    (op,) = [source.op for source in integers._sources(net).values()]
    stages = (Stage("add", params=(-float(zero),)), op.problem.stages[1])
    changed = replace(op, problem=replace(op.problem, stages=stages))
    found = integers._sources(replace(net, ops=tuple(changed if o is op else o for o in net.ops)))
    assert [source.zero for source in found.values()] == ([zero] if read else [])
