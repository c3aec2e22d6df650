"""Elementwise operators between 8-bit tensors become one table, with the bits of onnxruntime without its optimizer."""

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import gpu_runtime as gr
from gpu_runtime.network import Network
from tactics.problems.problem import ConvProblem, PointwiseProblem
from tests.engines import emulated
from tests.reference_run import model, network, node, ort_run, relative_error, run

SCALES = {"a": 0.03131, "b": 0.0117, "c": 0.01953125, "d": 0.0251}
ZEROS = {"int8": {"a": 0, "b": 3, "c": -128, "d": -7}, "uint8": {"a": 128, "b": 0, "c": 9, "d": 17}}
RANGES = {"int8": (-128, 127), "uint8": (0, 255)}


class Drawn:
    """A network whose tensors are quantised by one of four scales and zero points, a to d."""

    def __init__(self, dtype: str, symmetric: bool = False) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, Any] = {name: np.float32(scale) for name, scale in SCALES.items()}
        self.stored |= {f"{name}_zero": np.array(zero * (not symmetric), dtype) for name, zero in ZEROS[dtype].items()}

    def q(self, x: str, by: str) -> str:
        self.nodes.append(node("QuantizeLinear", f"{x} {by} {by}_zero", f"{x}_q{by}", name=f"{x}_quantize"))
        self.nodes.append(node("DequantizeLinear", f"{x}_q{by} {by} {by}_zero", f"{x}_{by}", name=f"{x}_dequantize"))
        return f"{x}_{by}"

    def add(self, op: str, *inputs: str, by: str = "", **attributes) -> str:
        y = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(node(op, " ".join(inputs), y, name=y, **attributes))
        return self.q(y, by) if by else y

    def conv(self, x: str, c: int, k: int, groups: int = 1) -> str:
        rng, w = np.random.default_rng(len(self.nodes)), f"w{len(self.nodes)}"
        self.stored[f"{w}_int8"] = rng.integers(-127, 128, (k, c // groups, 1, 1)).astype(np.int8)
        self.stored[f"{w}_scale"] = np.float32(0.01 / np.sqrt(c / groups))
        self.nodes.append(node("DequantizeLinear", f"{w}_int8 {w}_scale", w))
        return self.add("Conv", x, w, group=groups)

    def model(self, y: str, shape: tuple[int, ...]) -> onnx.ModelProto:
        self.nodes.append(node("Identity", y, "y"))
        return model(self.nodes, {"x": shape}, "y", self.stored, opset=20)


def silu(net: Drawn, x: str) -> str:
    return net.add("Mul", x, net.add("Sigmoid", x, by="b"), by="d")


def after(op: str, **attributes):
    return lambda net, x: net.add(op, x, by="d", **attributes)


CHAINS = {
    "silu": silu,
    "silu in one": lambda net, x: net.add("Mul", net.add("Sigmoid", x), x, by="d"),
    "hard swish": lambda net, x: net.add("Mul", x, net.add("HardSigmoid", x, by="b", alpha=1 / 6), by="d"),
    "two silus": lambda net, x: silu(net, silu(net, x)),
    "leaky relu": after("LeakyRelu", alpha=0.137),
    "gelu": after("Gelu"),
    "tanh": after("Tanh"),
    "elu": after("Elu", alpha=0.7),
    "another scale": lambda net, x: net.q(x, "d"),
}


def tables(net: Network) -> list[tuple[float, ...]]:
    stages = (s for op in net.ops if isinstance(op.problem, PointwiseProblem) for s in op.problem.stages)
    return [s.params for s in stages if s.op == "table"] + [
        op.problem.epilogue.table for op in net.ops if isinstance(op.problem, ConvProblem) and op.problem.epilogue.table
    ]


@pytest.mark.parametrize("dtype", ZEROS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_table_has_onnxruntime_s_bits(name, dtype):
    net = Drawn(dtype)
    y = CHAINS[name](net, net.q("x", "a"))
    proto = net.model(y, (1, 1, 1, 256))
    found = network(proto)
    (made,) = (op for op in found.ops if any(s.op == "table" for s in op.problem.stages))
    (low, high, *entries), z = made.problem.stages[-1].params, ZEROS[dtype]
    assert len(found.ops) == 2 and (low, high) == tuple(v - z["a"] for v in RANGES[dtype])
    assert {name for op in found.ops for name in op.nodes} >= {n.name for n in net.nodes[:-1]}
    proto.graph.output.append(helper.make_empty_tensor_value_info(f"{y.removesuffix('_d')}_qd"))
    x = {"x": np.arange(low, high + 1, dtype=np.float32).reshape(1, 1, 1, 256) * np.float32(SCALES["a"])}
    expected = ort_run(proto, x, optimized=False)[f"{y.removesuffix('_d')}_qd"]
    assert np.array_equal(entries, expected.reshape(-1).astype(np.float32) - z["d"])


@pytest.mark.parametrize("name", ["silu", "leaky relu"])
def test_a_convolution_computes_a_table(name):
    net = Drawn("int8")
    y = net.conv(CHAINS[name](net, net.q(net.conv(net.q("x", "c"), 16, 32), "a")), 32, 16)
    found = network(net.model(y, (1, 16, 5, 4)))
    ends = [op.problem.epilogue for op in found.ops if isinstance(op.problem, ConvProblem) and op.problem.epilogue.table]
    assert ends and all(end.act.name == "table" for end in ends) and not [t for t in tables(found) if len(t) == 258]


def test_a_tensor_with_other_readers_stays():
    net = Drawn("int8")
    x = net.q(net.conv(net.q("x", "c"), 16, 16), "a")
    y = net.add("Add", silu(net, x), net.conv(x, 16, 16))
    found = network(net.model(y, (1, 16, 5, 4)))
    assert any(s.op == "table" for op in found.ops if isinstance(op.problem, PointwiseProblem) for s in op.problem.stages)
    feeds = {"x": np.random.default_rng(0).normal(0, 2, (1, 16, 5, 4)).astype(np.float32)}
    proto = net.model(y, (1, 16, 5, 4))
    del proto.graph.node[-2]
    expected = ort_run(proto, feeds, optimized=False)["y"]
    assert np.abs(run(found, feeds)["y"] - expected).max() < 1.5 * SCALES["d"]


def test_what_a_clip_computes_is_no_table():
    net = Drawn("int8")
    x = net.q("x", "a")
    assert not tables(network(net.model(net.q(x, "a"), (1, 1, 1, 8))))
    net = Drawn("int8")
    x = net.q("x", "a")
    assert not tables(network(net.model(net.add("Relu", x, by="a"), (1, 1, 1, 8))))


def test_another_tensor_or_a_scale_of_channels_is_no_table():
    net = Drawn("int8")
    x, other = net.q("x", "a"), net.q(net.add("MaxPool", net.q("x", "b"), kernel_shape=[1, 3], pads=[0, 1, 0, 1]), "c")
    assert not tables(network(net.model(net.add("Mul", x, other, by="d"), (1, 1, 1, 8))))
    net = Drawn("int8")
    net.stored["slope"] = np.array([[[0.1]], [[0.2]]], np.float32)
    assert not tables(network(net.model(net.add("PRelu", net.q("x", "a"), "slope", by="d"), (1, 2, 1, 8))))


def block(net: Drawn) -> onnx.ModelProto:
    """A residual block with tables before and behind the sum, one of two layers with groups."""
    x = silu(net, net.q(net.conv(net.q("x", "c"), 32, 64), "a"))
    y = silu(net, net.q(net.conv(x, 64, 64, groups=64), "a"))
    y = silu(net, net.q(net.conv(y, 64, 64), "a"))
    y = CHAINS["hard swish"](net, net.add("Add", y, x, by="a"))
    return net.model(net.conv(y, 64, 16, groups=2), (2, 32, 6, 5))


@pytest.mark.parametrize("symmetric", [False, True])
def test_networks_with_tables_are_built_and_run(symmetric):
    proto = block(Drawn("int8" if symmetric else "uint8", symmetric))
    feeds = {"x": np.random.default_rng(0).normal(0, 1, (2, 32, 6, 5)).astype(np.float32)}
    engine = gr.build(proto, device="l4")
    steps = [layer.problem for layer in engine.plan.layers if layer.tactic]
    assert sum("table" in str(p) for p in steps) == 4 and len(steps) <= 9, [str(p) for p in steps]
    expected = ort_run(proto, feeds, optimized=False)["y"]
    (got,) = emulated(engine, feeds).values()
    assert relative_error(got, expected) < 0.02


def test_a_chain_of_all_whole_numbers_equals_numpy_in_doubles():
    """The reciprocal's product, in doubles, is the quotient of FP32: drawn scales, all whole numbers."""
    rng = np.random.default_rng(1)
    for a, d in itertools.islice(zip(rng.uniform(0.001, 0.2, 200), rng.uniform(0.001, 0.2, 200), strict=True), 200):
        v = np.arange(-128, 128, dtype=np.float32) * np.float32(a)
        quotient = v / np.float32(d)
        assert np.array_equal((v * np.float64(1 / np.float64(np.float32(d)))).astype(np.float32), quotient)
