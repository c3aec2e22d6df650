"""Quantised networks, published ones and drawn ones that onnxruntime quantised, against onnxruntime without its optimizer."""

import logging
from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import gpu_runtime as gr
from benchmarks import topologies
from gpu_runtime.network import Network
from gpu_runtime.rewrites import integers
from tactics.planner.graph import holds
from tactics.problems.pointwise_ops import ROUNDING, Activation
from tactics.problems.problem import ConvProblem
from tactics.sampling.data import reference
from tests.engines import emulated, resized
from tests.reference_run import given_model, model, network, node, ort_run, relative_error, run

FORMS = ("u8s8", "s8s8sym", "trt", "modelopt")
SHAPE = (4, 3, 32, 32)
FEEDS = {"input": np.random.default_rng(7).random(SHAPE).astype(np.float32)}
# Quantised networks are chaotic: a sum in another order rounds otherwise. Even onnxruntime's optimizer moves these outputs, by
# up to 2 % on processors with VNNI, and on others, where it saturates sums of 16 bits, by a tenth and more.
CHAOS = 0.04


@pytest.mark.parametrize("form", FORMS)
def test_resnet20(form):
    path = given_model(f"quantized/resnet20_cifar10.{form}")
    net = network(path)
    (name, expected), *_ = ort_run(path, FEEDS, optimized=False).items()
    assert relative_error(run(net, FEEDS)[name], expected) < CHAOS
    ends = [op.problem.epilogue for op in net.ops if isinstance(op.problem, ConvProblem)]
    assert sum("quantize" in (end.act.name, end.last.name) for end in ends) >= 9, ends


def test_resnet20_of_integer_operators():
    """It is u8s8's network, which onnxruntime computes in floating point, and this one in integers."""
    net = network(given_model("quantized/resnet20_cifar10.qop"))
    (expected,) = ort_run(given_model("quantized/resnet20_cifar10.u8s8"), FEEDS, optimized=False).values()
    (got,) = run(net, FEEDS).values()
    assert relative_error(got, expected) < CHAOS


@pytest.mark.parametrize(
    "form, launches",
    [
        ("u8s8", 26),
        ("modelopt", 29),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("s8s8sym", 26), ("trt", 29), ("qop", 28))),
    ],
)
def test_a_build_fuses_quantisers_into_convolutions(form, launches):
    """resnet20 has 19 convolutions and a product; of 55 QuantizeLinear at most 5 are left, and no tensor is FP32."""
    path = given_model(f"quantized/resnet20_cifar10.{form}")
    engine = gr.build(path, device="h200", shapes={"input": SHAPE})
    plan = engine.record.plans[0]
    assert len(plan.steps) <= launches and all(layer.time_us > 0 for layer in engine.plan.layers)
    assert not any("fp32" in str(layer.tactic) for layer in engine.plan.layers[1:-1])
    exact = "u8s8" if form == "qop" else form
    (expected,) = ort_run(given_model(f"quantized/resnet20_cifar10.{exact}"), FEEDS, optimized=False).values()
    (got,) = emulated(engine, FEEDS).values()
    assert relative_error(got, expected) < CHAOS


# ---- layer by layer: every op gets the whole numbers that onnxruntime has


def whole_numbers(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a model's QuantizeLinears in onnxruntime, by the names of a network's tensors: as they are, and with their
    zero points subtracted."""
    wide, stored = onnx.ModelProto(), {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    wide.CopyFrom(proto)
    zeros = {
        n.output[0]: stored[n.input[2]] for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] not in stored
    }
    kinds = {name: helper.np_dtype_to_tensor_dtype(zero.dtype) for name, zero in zeros.items()}
    wide.graph.output.extend(helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items())
    found = ort_run(wide, dict(feeds), optimized=False)
    held = {name: found[name].astype(np.float32) - zero.astype(np.float32) for name, zero in zeros.items()}
    between = {f"{n.input[0]}, whole numbers": held[n.output[0]] for n in proto.graph.node if n.output[0] in held}
    subtracted = {f"{name}, zero point subtracted": v for name, v in held.items()}
    return between | subtracted | {name: found[name].astype(np.float32) for name in held}


def steepness(end: Activation) -> float:
    """Returns the largest difference of neighbouring entries of a table, at least 1; 1 for other activations."""
    return max(1.0, *np.abs(np.diff(end.params[2:]))) if end.name == "table" else 1.0


def off(net: Network, feeds: Mapping[str, np.ndarray], known: Mapping[str, np.ndarray], fp16: bool) -> tuple[float, float]:
    """Runs each op on onnxruntime's whole numbers; returns (the share of whole numbers that differ, the largest difference).

    The options of a network's groups are the last ones, which fuse most. What an op narrows, as ReLU does, is narrowed there.
    """
    choice = {group: options[-1] for group, options in net.groups}
    rounded = (lambda a: a.astype(np.float16).astype(np.float32)) if fp16 else (lambda a: a)
    tensors = {t.name: rounded(np.asarray(feeds[t.name], np.float32).reshape(t.shape4)) for t in net.inputs}
    differ = count = most = 0.0
    for op in net.ops:
        if not holds(op.when, choice):
            continue
        y = reference(op.problem, [tensors[t] for t in op.inputs], op.weights)
        end = integers.ending(op.problem)
        if op.output in known and end.name in ROUNDING:
            whole = known[op.output].reshape(y.shape)
            expected = np.clip(whole, *end.params) if end.name == "quantize" else whole
            step = np.abs(y - expected) / (steepness(end) if fp16 else 1)
            differ, count, most = differ + np.count_nonzero(step > 1e-3), count + y.size, max(most, float(step.max()))
            y = expected
        tensors[op.output] = rounded(y.astype(np.float32))
    assert count
    return differ / count, most


@pytest.mark.parametrize("form", ["u8s8", "s8s8sym", "trt"])
def test_every_layer_of_resnet20_rounds_as_onnxruntime(form):
    """In FP32 all but 1 of 10,000 whole numbers are equal, and others off by 1; FP16 rounds what a residual adds, too; where a
    table follows, its entries' largest step is the unit."""
    path = given_model(f"quantized/resnet20_cifar10.{form}")
    net, known = network(path), whole_numbers(onnx.load(path), FEEDS)
    share, most = off(net, FEEDS, known, fp16=False)
    assert share < 1e-4 and most <= 1
    share, most = off(net, FEEDS, known, fp16=True)
    assert share < 0.006 and most <= 2


@pytest.mark.parametrize("form", ["u8s8", "s8s8sym", "trt"])
def test_a_tensor_of_onnx_s_name_has_its_values(form):
    """So that `compare` may compare it; whole numbers in place of others have names of their own."""
    path = given_model(f"quantized/resnet20_cifar10.{form}")
    net, wide = network(path), onnx.load(path)
    outputs = [op.output for op in net.ops if op.output in {name for n in wide.graph.node for name in n.output}]
    given = {v.name for v in wide.graph.output}
    wide.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs if name not in given)
    expected, tensors = ort_run(wide, FEEDS, optimized=False), dict(FEEDS)
    for op in net.ops:
        if holds(op.when, {group: options[0] for group, options in net.groups}):
            tensors[op.output] = reference(op.problem, [tensors[t] for t in op.inputs], op.weights)
    compared = [name for name in outputs if name in tensors]
    assert len(compared) > 20
    for name in compared:
        assert relative_error(tensors[name].reshape(-1), expected[name].astype(np.float32).reshape(-1)) < 0.1, name


# ---- drawn networks


class Drawn:
    """A random FP32 network of the operators that onnxruntime quantises."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes, self.weights = [], {}

    def add(self, op: str, inputs: str, **attributes) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(node(op, inputs, name, name=f"{op}_{name}", **attributes))
        return name

    def stored(self, *shape: int, scale: float = 1.0) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = (scale * self.rng.standard_normal(shape)).astype(np.float32)
        return name

    def conv(self, x: str, c: int, k: int) -> str:
        size, groups = int(self.rng.choice([1, 3])), 2 if c % 2 == 0 and k % 2 == 0 and self.rng.random() < 0.2 else 1
        w = self.stored(k, c // groups, size, size, scale=(c // groups * size * size) ** -0.5)
        return self.add("Conv", f"{x} {w} {self.stored(k, scale=0.1)}", pads=[size // 2] * 4, group=groups)

    def block(self, x: str, c: int) -> str:
        match int(self.rng.integers(7)):
            case 0:
                return self.add("Add", f"{self.conv(x, c, c)} {x}")
            case 1:
                return self.add("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
            case 2:
                return self.add("Mul", f"{self.add('Sigmoid', self.conv(x, c, c))} {x}")
            case 3:
                return self.add("LeakyRelu", self.conv(x, c, c), alpha=0.137)  # no halves of whole numbers
            case 4:
                half = [self.conv(x, c, c // 2), self.conv(x, c, c - c // 2)]
                return self.add("Concat", " ".join(half), axis=1)
            case 5:
                return self.add("AveragePool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
            case _:
                return self.add("Relu", self.conv(x, c, c))

    def model(self) -> onnx.ModelProto:
        c = int(self.rng.choice([8, 16, 24]))
        x = self.add("Relu", self.conv("x", 3, c))
        for _ in range(int(self.rng.integers(2, 5))):
            x = self.block(x, c)
        x = self.add("Flatten", self.add("GlobalAveragePool", x))
        self.nodes.append(node("Gemm", f"{x} {self.stored(10, c, scale=c**-0.5)} {self.stored(10)}", "y", transB=1))
        return model(self.nodes, {"x": (2, 3, 12, 12)}, "y", self.weights, opset=int(self.rng.choice([13, 15, 17])))


def quantised(
    proto: onnx.ModelProto, folder, feeds, operators: bool, signed: bool, per_channel: bool, prepared: bool = False
) -> onnx.ModelProto:
    """What onnxruntime.quantization makes of a model, which is `prepared` as its manual asks. Weights have 7 bits: onnxruntime
    saturates sums of two products of 8 bits on processors without VNNI.
    """
    quantization = pytest.importorskip("onnxruntime.quantization")

    left = iter([feeds])
    reader = type("Reader", (quantization.CalibrationDataReader,), {"get_next": lambda self: next(left, None)})
    logging.disable(logging.WARNING)
    onnx.save(proto, folder / "fp32.onnx")
    if prepared:
        quantization.quant_pre_process(folder / "fp32.onnx", folder / "fp32.onnx")
    types = {
        "activation_type": getattr(quantization.QuantType, "QInt8" if signed else "QUInt8"),
        "weight_type": quantization.QuantType.QInt8,
    }
    form = quantization.QuantFormat.QOperator if operators else quantization.QuantFormat.QDQ
    more = {"ActivationSymmetric": signed, "WeightSymmetric": True}
    quantization.quantize_static(
        folder / "fp32.onnx", folder / "m.onnx", reader(), quant_format=form, per_channel=per_channel, reduce_range=True,
        extra_options=more, **types,
    )  # fmt: skip
    logging.disable(logging.NOTSET)
    return onnx.load(folder / "m.onnx")


@pytest.mark.parametrize("seed", range(12))
def test_drawn_networks_in_pairs(seed, tmp_path):
    """Each op on onnxruntime's whole numbers: a sum in another order rounds one of thousands otherwise."""
    x = {"x": np.random.default_rng(seed).uniform(-1, 1, (2, 3, 12, 12)).astype(np.float32)}
    proto = quantised(Drawn(seed).model(), tmp_path, x, False, signed=bool(seed % 2), per_channel=bool(seed // 2 % 2))
    net = network(proto)
    share, most = off(net, x, whole_numbers(proto, x), fp16=False)
    assert share < 3e-4 and most <= 1
    got, expected = run(net, x)["y"], ort_run(proto, x, optimized=False)["y"]
    assert relative_error(got, expected) < CHAOS


@pytest.mark.parametrize("seed", range(8))
def test_drawn_networks_of_integer_operators(seed, tmp_path):
    """onnxruntime computes these in integers, and Sigmoid by a table: the outputs' distance, not each layer's."""
    x = {"x": np.random.default_rng(seed).uniform(-1, 1, (2, 3, 12, 12)).astype(np.float32)}
    proto = quantised(Drawn(seed).model(), tmp_path, x, True, signed=bool(seed % 2), per_channel=bool(seed // 2 % 2))
    assert any(n.op_type == "QLinearConv" for n in proto.graph.node)
    got, expected = run(network(proto), x)["y"], ort_run(proto, x, optimized=False)["y"]
    assert relative_error(got, expected) < CHAOS


# ---- networks of torchvision, whose weights are drawn

GROUPS = "no INT8 kernel has groups"
FASTER = "the plan is faster with it in FP16"


@pytest.mark.full
@pytest.mark.parametrize(
    "signed, operators",
    [
        pytest.param(True, False, id="s8s8", marks=pytest.mark.long),
        pytest.param(False, False, id="u8s8"),
        pytest.param(False, True, id="operators", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "name, least, grouped", [pytest.param("tv_resnext50", 33, 16, marks=pytest.mark.long), ("tv_mobilenet_v3_large", 34, 15)]
)
def test_topologies(name, least, grouped, signed, operators, tmp_path):
    """Every layer rounds as onnxruntime's, and the network is as near as onnxruntime's two runs are to each other, on 8 images:
    on most of these they are equal, and on others one rounding moves all that follow. All layers that can compute in INT8 are
    offered to the plan, and it takes most of them.
    """
    if name not in topologies.NAMES:
        pytest.skip(f"{name} is not in {topologies.FOLDER}")
    given = resized(topologies.filled(name), 64)
    xs = [{"x": np.random.default_rng(seed).uniform(-1, 1, (1, 3, 64, 64)).astype(np.float32)} for seed in range(8)]
    proto = pairs = quantised(given, tmp_path, xs[5], False, signed=signed, per_channel=True, prepared=True)
    if operators:
        proto = quantised(given, tmp_path, xs[5], True, signed=signed, per_channel=True, prepared=True)
    runs = [[next(iter(ort_run(pairs, x, optimized=way).values())) for way in (False, True)] for x in xs]
    spread = max(relative_error(other, plain) for plain, other in runs)
    share, most = (0.0, 0.0) if operators else off(network(proto), xs[5], whole_numbers(proto, xs[5]), fp16=False)
    assert share < 3e-5 and most <= 2  # a residual's launch rounds twice, and may enlarge the first step
    engine = gr.build(tmp_path / "m.onnx", device="l4")
    assert relative_error(next(iter(emulated(engine, xs[5]).values())), runs[5][0]) < 3 * spread + 0.01
    onnx.save(resized(proto, 224), tmp_path / "m.onnx")
    reasons = Counter(gr.build(tmp_path / "m.onnx", device="l4").record.plan.int8.values())
    assert reasons[GROUPS] == grouped and reasons[""] >= least, reasons
    assert reasons[""] + reasons[FASTER] + reasons[GROUPS] == sum(reasons.values()), reasons
