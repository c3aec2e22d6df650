"""Operators of integers, spelled with QuantizeLinear and DequantizeLinear, against onnxruntime's; and invalid ones."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.source import Source
from tests.reference_run import model, network, node, ort_run, run

X = (2, 4, 6, 5)
MICROSOFT = onnx.helper.make_opsetid("com.microsoft", 1)
Q = {"xs": np.float32(0.031), "xz": np.uint8(120), "ys": np.float32(0.07), "yz": np.uint8(99), "bs": np.float32(0.02),
     "bz": np.uint8(140), "fs": np.float32(1 / 256), "fz": np.uint8(0)}  # fmt: skip
PAIR = "q xs xz"
# operator, its inputs, its attributes, the opset, its share of results that differ at most: sums in another order may round
# otherwise.
CASES = [
    ("QLinearConv", f"{PAIR} w ws wz ys yz bias", dict(pads=[1, 1, 1, 1]), 13),
    ("QLinearConv", f"{PAIR} w ws wz ys yz", dict(strides=[2, 2]), 10),
    ("QLinearConv", f"{PAIR} w bs wz0 ys yz bias", dict(dilations=[2, 2]), 10),
    ("QLinearMatMul", f"{PAIR} m bs bz ys yz", {}, 13),
    ("QLinearMatMul", f"{PAIR} mi ms mz ys yz", {}, 13),
    ("QLinearAdd", f"{PAIR} r bs bz ys yz", {}, 13),
    ("QLinearMul", f"{PAIR} r bs bz ys yz", {}, 13),
    ("QLinearAdd", f"{PAIR} q xs xz ys yz", {}, 11),
    ("QLinearGlobalAveragePool", f"{PAIR} ys yz", {}, 13),
    ("QLinearAveragePool", f"{PAIR} ys yz", dict(kernel_shape=[3, 3], strides=[2, 2]), 13),
    ("QLinearAveragePool", f"{PAIR} ys yz", dict(kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1), 13),
    ("QLinearSigmoid", f"{PAIR} ys yz", {}, 13),
    ("QLinearLeakyRelu", f"{PAIR} ys yz", dict(alpha=0.3), 13),
    ("QLinearSoftmax", f"{PAIR} fs fz", dict(axis=1, opset=13), 13),
    ("QLinearSoftmax", f"{PAIR} fs fz", dict(axis=2, opset=11), 11),
    ("QLinearConcat", f"ys yz {PAIR} r bs bz", dict(axis=1), 13),
]
GEMMS = [("g gs gz", dict(transB=1)), ("h gs gz", {}), ("h gs gz", dict(alpha=0.5))]


def weights() -> dict[str, np.ndarray]:
    """Of 7 bits, since onnxruntime saturates pairs of larger products on processors without VNNI."""
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {
        "w": rng.integers(-63, 64, (8, 4, 3, 3)).astype(np.int8), "ws": rng.uniform(0.01, 0.03, 8).astype(np.float32),
        "wz": np.zeros(8, np.int8), "wz0": np.asarray(3, np.int8), "bias": rng.integers(-3000, 3000, 8, np.int32),
        "m": rng.integers(0, 256, (5, 7)).astype(np.uint8), "mi": rng.integers(-63, 64, (5, 7)).astype(np.int8),
        "ms": rng.uniform(0.01, 0.03, 7).astype(np.float32), "mz": np.zeros(7, np.int8),
        "r": rng.integers(0, 256, X).astype(np.uint8),
        "g": rng.integers(-63, 64, (9, 120)).astype(np.int8), "h": rng.integers(-63, 64, (120, 9)).astype(np.int8),
        "gs": rng.uniform(0.01, 0.03, 9).astype(np.float32), "gz": np.zeros(9, np.int8),
        "c": rng.integers(-3000, 3000, 9, np.int32),
    }  # fmt: skip
    return found | {name: np.asarray(v) for name, v in Q.items()}


def of(nodes: list[onnx.NodeProto], opset: int, shape=X) -> onnx.ModelProto:
    read = {name for n in nodes for name in n.input}
    proto = model(nodes, {"x": shape}, "y", {name: w for name, w in weights().items() if name in read}, opset=opset)
    proto.opset_import.append(MICROSOFT)
    return proto


def compared(proto: onnx.ModelProto, shape=X, step=Q["ys"]) -> None:
    feeds = {"x": np.random.default_rng(1).uniform(-4, 4, shape).astype(np.float32)}
    (got,), (expected,) = run(network(proto), feeds).values(), ort_run(proto, feeds, optimized=False).values()
    steps = np.abs(got - expected) / step
    assert got.shape == expected.shape and len(np.unique(expected)) > 5
    assert steps.max() < 1.01 and (steps > 0.5).mean() < 0.01, (steps.max(), (steps > 0.5).mean())


def domain(op: str) -> str:
    return "" if op in ("QLinearConv", "QLinearMatMul") else "com.microsoft"


@pytest.mark.parametrize("op, inputs, attributes, opset", CASES)
def test_an_operator_of_integers(op, inputs, attributes, opset):
    end = next(pair for pair in ("ys yz", "fs fz") if pair in inputs)
    nodes = [node("QuantizeLinear", "x xs xz", "q"), node(op, inputs, "p", domain=domain(op), **attributes),
             node("DequantizeLinear", f"p {end}", "y")]  # fmt: skip
    compared(of(nodes, opset), step=Q[end[:2]])


@pytest.mark.parametrize("matrix, attributes", GEMMS)
@pytest.mark.parametrize("end", ["_", "c"])
@pytest.mark.parametrize("floating", [False, True])
def test_qgemm(matrix, attributes, end, floating):
    inputs = f"q xs xz {matrix} {end}" + ("" if floating else " ys yz")
    last = node("QGemm", inputs, "y" if floating else "p", domain="com.microsoft", **attributes)
    nodes = [node("QuantizeLinear", "x xs xz", "q"), last, *([] if floating else [node("DequantizeLinear", "p ys yz", "y")])]
    compared(of(nodes, 13, (4, 120)), (4, 120))


def test_microsofts_pairs_are_onnxs():
    nodes = [node("QuantizeLinear", "x xs xz", "q", domain="com.microsoft"),
             node("DequantizeLinear", "q xs xz", "y", domain="com.microsoft")]  # fmt: skip
    compared(of(nodes, 13))


@pytest.mark.parametrize("op, inputs, attributes, says", [
    ("QLinearGlobalAveragePool", f"{PAIR} ys yz", dict(channels_last=1), "its channels are the last axis"),
    ("QLinearAdd", f"{PAIR} r bs bz ys", {}, "expected a zero point of its result"),
    ("QLinearAdd", f"{PAIR} r", {}, "expected tensors with their scales"),
    ("QLinearSoftmax", f"{PAIR} ys yz", dict(axis=1, opset=11), "it is of opset 11 in a model of opset 13"),
    ("QLinearReduceMean", f"{PAIR} ys yz", dict(axes=[1]), "it is quantized .1 QLinearReduceMean"),
])  # fmt: skip
def test_operators_of_integers_that_are_refused(op, inputs, attributes, says):
    nodes = [node("QuantizeLinear", "x xs xz", "q"), node(op, inputs, "p", domain=domain(op), **attributes),
             node("DequantizeLinear", "p ys yz", "y")]  # fmt: skip
    with pytest.raises(ModelError, match=says):
        network(of(nodes, 13))


# ---- invalid QuantizeLinear and DequantizeLinear

VALID = {"s": np.full(4, 0.1, np.float32), "z": np.zeros(4, np.int8), "w": np.ones((4, 4, 1, 1), np.int8),
         "ws": np.full(4, 0.1, np.float32), "wz": np.zeros(4, np.int8)}  # fmt: skip


def pair(opset=21, axis=1, weights_axis=0, more=None, **changes) -> onnx.ModelProto:
    nodes = [
        node("QuantizeLinear", "x s z", "q", axis=axis, **(more or {})), node("DequantizeLinear", "q s z", "d", axis=axis),
        node("DequantizeLinear", "w ws wz", "wd", axis=weights_axis), node("Conv", "d wd", "y"),
    ]  # fmt: skip
    return model(nodes, {"x": (2, 4, 5, 5)}, "y", {**VALID, **changes}, opset=opset)


def int4(value: int) -> onnx.TensorProto:
    return onnx.helper.make_tensor("", TensorProto.INT4, [4], [value] * 4)


@pytest.mark.parametrize("changes, says", [
    (dict(s=np.zeros(4, np.float32)), "expected scales above zero, not subnormal, got 0"),
    (dict(s=np.array([0.1, -1, 0.1, 0.1], np.float32)), "expected scales above zero, not subnormal, got -1"),
    (dict(ws=np.float32(1e-40)), "expected scales above zero"),
    (dict(s=np.full(4, np.nan, np.float32)), "NaN or infinite"),
    (dict(ws=np.full(4, np.inf, np.float32)), "NaN or infinite"),
    (dict(s=np.float32(np.inf), z=np.int8(0)), "expected scales above zero"),
    (dict(z=np.zeros(4, np.int16)), "its zero point is of type int16, which no kernel has: quantize the model to int8"),
    (dict(z=np.zeros(4, np.float32)), "its zero point is of type float"),
    (dict(wz=np.zeros(4, np.uint8)), "expected an input and a zero point of one type, got int8 and uint8"),
    (dict(z=np.zeros(3, np.int8)), r"expected a scale and a zero point of one shape, got \(4,\) and \(3,\)"),
    (dict(z=np.int8(0)), "expected a scale and a zero point of one shape"),
    (dict(s=np.full(3, 0.1, np.float32), z=np.zeros(3, np.int8)), "expected 3 elements along axis 1, one for each scale"),
    (dict(s=np.full((4, 1), 0.1, np.float32), z=np.zeros((4, 1), np.int8)), "expected a number or a vector"),
    (dict(axis=4), "along axis 4"), (dict(axis=-5), "along axis -5"), (dict(weights_axis=7), "along axis 7"),
    (dict(weights_axis=2), "expected 4 elements along axis 2, one for each scale"),
    (dict(more=dict(block_size=2)), "its attribute block_size is 2; expected no scale for each block"),
    (dict(more=dict(output_dtype=TensorProto.INT4)), "its output_dtype is int4, which no kernel has"),
    (dict(s=np.full(4, 1, np.int32)), "expected a scale in floating point, got int32"),
    (dict(w=np.ones((4, 4, 1, 1), np.int16)), "its input is of type int16"),
])  # fmt: skip
def test_invalid_pairs(changes, says):
    with pytest.raises(ModelError, match=says):
        network(pair(**changes))


def test_pairs_of_newer_types_are_refused_by_name():
    proto = pair()
    for t in proto.graph.initializer:
        if t.name == "z":
            t.CopyFrom(int4(1))
            t.name = "z"
    with pytest.raises(ModelError, match="its zero point is of type int4, which no kernel has"):
        network(proto)


def test_attributes_of_newer_opsets():
    network(pair(more=dict(output_dtype=TensorProto.INT8, block_size=0)))
    proto = pair(opset=23, more=dict(precision=TensorProto.FLOAT))
    proto.graph.node[1].attribute.append(onnx.helper.make_attribute("output_dtype", TensorProto.FLOAT))
    network(proto)


@pytest.mark.parametrize("seed", range(100))
def test_damaged_pairs_raise_one_error(seed):
    """Nodes with random faults either are read or raise a ModelError; nothing crashes."""
    rng = np.random.default_rng(seed)
    proto = pair(opset=int(rng.choice([10, 13, 19, 21, 23])))
    for _ in range(rng.integers(1, 4)):
        damage(proto, rng)
    try:
        importer.sized(importer.load(Source("damaged", proto.SerializeToString())))
    except ModelError as e:
        assert str(e).startswith("damaged: ")


def damage(proto: onnx.ModelProto, rng: np.random.Generator) -> None:
    n, t = proto.graph.node[rng.integers(4)], proto.graph.initializer[rng.integers(len(proto.graph.initializer))]
    kind = rng.integers(8)
    if kind == 0 and n.attribute:
        n.attribute[0].i = int(rng.integers(-9, 9))
    elif kind == 1 and n.input:
        n.input[int(rng.integers(len(n.input)))] = str(rng.choice(["", "x", "s", "z", "w", "q", "nothing"]))
    elif kind == 2:
        t.dims[:] = [int(d) for d in rng.integers(-1, 5, rng.integers(0, 5))]
    elif kind == 3:
        t.data_type = int(rng.integers(0, 26))
    elif kind == 4:
        del n.input[int(rng.integers(0, 4)) :]
    elif kind == 5:
        n.op_type = str(rng.choice(["QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul", "Relu"]))
    elif kind == 6:
        n.attribute.append(onnx.helper.make_attribute(str(rng.choice(["block_size", "output_dtype", "saturate", "axis"])), 3))
    else:
        t.raw_data = bytes(rng.integers(0, 256, len(t.raw_data), dtype=np.uint8))
