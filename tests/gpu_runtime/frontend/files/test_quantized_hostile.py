"""Damaged quantisers: refused with a sentence, or read as onnxruntime reads them."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gpu_runtime.errors import ModelError
from tests.reference_run import model, network, node, ort_run, run

X = (1, 4, 6, 6)
OPSETS = (10, 13, 19, 21, 23)


def healthy(opset: int = 19) -> onnx.ModelProto:
    """A convolution between quantisers, its weights and bias quantised, too."""
    rng, axis = np.random.default_rng(0), {"axis": 0} if opset > 12 else {}
    several = 8 if opset > 12 else ()
    weights = {
        "s": np.float32(0.05), "z": np.uint8(120), "w": rng.integers(-127, 128, (8, 4, 3, 3)).astype(np.int8),
        "ws": np.asarray(rng.uniform(0.01, 0.02, several), np.float32), "wz": np.zeros(several, np.int8),
        "b": rng.integers(-999, 999, 8, np.int32), "bs": np.asarray(rng.uniform(0.001, 0.002, several), np.float32),
        "t": np.float32(0.5), "u": np.int8(-3),
    }  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x s z", "q", name="Q"), node("DequantizeLinear", "q s z", "d", name="DQ"),
        node("DequantizeLinear", "w ws wz", "wd", name="DQ of w", **axis),
        node("DequantizeLinear", "b bs", "bd", name="DQ of b", **axis),
        node("Conv", "d wd bd", "c", name="conv"), node("Relu", "c", "r", name="relu"),
        node("QuantizeLinear", "r t u", "p", name="Q behind"), node("DequantizeLinear", "p t u", "y", name="DQ behind"),
    ]  # fmt: skip
    return model(nodes, {"x": X}, "y", weights, opset=opset)


def put(proto: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    t = next(t for t in proto.graph.initializer if t.name == name)
    t.CopyFrom(numpy_helper.from_array(np.asarray(array), name))


def named(proto: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in proto.graph.node if n.name == name)


def attribute(proto: onnx.ModelProto, name: str, **values: int) -> None:
    n = named(proto, name)
    kept = [a for a in n.attribute if a.name not in values]
    del n.attribute[:]
    n.attribute.extend([*kept, *(helper.make_attribute(k, v) for k, v in values.items())])


REFUSED = {
    "scale 0": (lambda m: put(m, "s", np.float32(0)), "expected scales above zero"),
    "scale 0 of weights": (lambda m: put(m, "ws", np.zeros(8, np.float32)), "expected scales above zero"),
    "negative": (lambda m: put(m, "s", np.float32(-0.1)), "expected scales above zero.*got -0.1"),
    "subnormal": (lambda m: put(m, "t", np.float32(1e-40)), "expected scales above zero"),
    "NaN": (lambda m: put(m, "s", np.float32("nan")), "NaN or infinite"),
    "infinite": (lambda m: put(m, "s", np.float32("inf")), "got inf"),
    "NaN among several": (lambda m: put(m, "ws", np.array([1, *[np.nan] * 7], np.float32)), "NaN or infinite"),
    "scale of integers": (lambda m: put(m, "s", np.int32(1)), "expected a scale in floating point, got int32"),
    "another zero point": (lambda m: put(m, "wz", np.zeros(8, np.uint8)), "expected an input and a zero point of one type"),
    "zero point of 16 bits": (lambda m: put(m, "z", np.uint16(7)), "its zero point is of type uint16, which no kernel has"),
    "zero point in floating point": (lambda m: put(m, "z", np.float32(7)), "its zero point is of type float"),
    "weights of 16 bits": (lambda m: put(m, "w", np.zeros((8, 4, 3, 3), np.int16)), "its input is of type int16"),
    "scales too few": (lambda m: put(m, "ws", np.ones(7, np.float32)), "expected a scale and a zero point of one shape"),
    "scales and zeros too few": (
        lambda m: (put(m, "ws", np.ones(7, np.float32)), put(m, "wz", np.zeros(7, np.int8))),
        "expected 7 elements along axis 0"),
    "axis beyond": (lambda m: attribute(m, "DQ of w", axis=4), "along axis 4"),
    "axis far below": (lambda m: attribute(m, "DQ of w", axis=-9), "along axis -9"),
    "axis of another size": (lambda m: attribute(m, "DQ of w", axis=2), "expected 8 elements along axis 2"),
    "scale matrix": (lambda m: put(m, "s", np.ones((2, 2), np.float32)), "shape"),
    "no scale": (lambda m: named(m, "Q").input.pop() and named(m, "Q").input.pop(), "expected a tensor, a scale"),
    "four inputs": (lambda m: named(m, "Q").input.append("s"), "expected a tensor, a scale"),
    "two outputs": (lambda m: named(m, "Q").output.append("more"), "expected a tensor, a scale"),
    "blocks": (lambda m: attribute(m, "DQ of w", block_size=2), "its attribute block_size is 2"),
    "float8": (lambda m: attribute(m, "Q", output_dtype=TensorProto.FLOAT8E4M3FN), "its output_dtype is float8e4m3fn"),
    "scale computed": (
        lambda m: (m.graph.node.insert(0, node("ReduceMax", "x", "m", keepdims=0)), named(m, "Q").input.__setitem__(1, "m"),
                   named(m, "DQ").input.__setitem__(1, "m")), "its scale is computed while the network runs"),
    "integers in a Relu": (lambda m: named(m, "relu").input.__setitem__(0, "q"), "has unsupported type: tensor.uint8"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_each_fault_is_named(what):
    """With the node, what is wrong and what is expected."""
    damage, says = REFUSED[what]
    proto = healthy(21 if what in ("blocks", "float8") else 19)
    damage(proto)
    with pytest.raises(ModelError, match=says):
        network(proto)


def test_types_of_4_bits_are_named():
    for kind in (TensorProto.INT4, TensorProto.UINT4):
        proto = healthy(21)
        t = next(t for t in proto.graph.initializer if t.name == "w")
        t.CopyFrom(helper.make_tensor("w", kind, [8, 4, 3, 3], [1] * 288))
        put(proto, "wz", np.zeros(8, np.int8))
        named(proto, "DQ of w").input.pop()
        with pytest.raises(ModelError, match="its input is of type u?int4, which no kernel has: quantize the model to int8"):
            network(proto)


def damaged(seed: int) -> onnx.ModelProto:
    """A model with one to three random faults."""
    rng = np.random.default_rng(seed)
    proto = healthy(int(rng.choice(OPSETS)))
    for _ in range(int(rng.integers(1, 4))):
        names, nodes = [t.name for t in proto.graph.initializer], [n for n in proto.graph.node if "Linear" in n.op_type]
        n, name = nodes[rng.integers(len(nodes))], str(rng.choice(names))
        match int(rng.integers(8)):
            case 0:
                shape = tuple(int(d) for d in rng.integers(0, 9, int(rng.integers(0, 4))))
                put(proto, name, rng.integers(-5, 6, shape).astype(str(rng.choice(["int8", "uint8", "int32", "float32"]))))
            case 1:
                kinds = ["int8", "uint8", "int16", "int32", "float16", "float32", "float64", "bool"]
                t = next(t for t in proto.graph.initializer if t.name == name)
                put(proto, name, numpy_helper.to_array(t).astype(str(rng.choice(kinds))))
            case 2:
                put(proto, name, np.asarray(rng.choice([0.0, -1.0, np.nan, np.inf, 1e-45, 1e38]), np.float32))
            case 3:
                n.attribute.append(helper.make_attribute("axis", int(rng.integers(-7, 7))))
            case 4 if len(n.input) > 1:
                del n.input[int(rng.integers(len(n.input)))]
            case 5 if n.input:
                n.input[int(rng.integers(len(n.input)))] = str(rng.choice([*names, "x", "q", ""]))
            case 6:
                extra = ("block_size", "output_dtype", "saturate", "precision")
                n.attribute.append(helper.make_attribute(str(rng.choice(extra)), int(rng.integers(-1, 30))))
            case _:
                n.op_type = str(rng.choice(["QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv"]))
    return proto


@pytest.mark.parametrize("seed", range(100))
def test_damage_is_refused_or_harmless(seed):
    """What is not refused gives what onnxruntime gives, where that runs it."""
    x = {"x": np.random.default_rng(seed).uniform(-3, 3, X).astype(np.float32)}
    try:
        got = run(network(damaged(seed)), x)
    except ModelError as e:
        assert len(str(e)) > 40
        return
    try:
        expected = ort_run(damaged(seed), x, optimized=False)
    except Exception:
        return  # onnxruntime is stricter
    for name, y in expected.items():
        wrong = np.abs(got[name] - y) > 1e-4 * max(1, np.abs(y).max())
        assert wrong.mean() < 0.02, name  # a sum in another order may round otherwise


@pytest.mark.parametrize("opset", OPSETS)
def test_the_undamaged_model_is_read(opset):
    x = {"x": np.random.default_rng(0).uniform(-3, 3, X).astype(np.float32)}
    got, expected = run(network(healthy(opset)), x)["y"], ort_run(healthy(opset), x, optimized=False)["y"]
    assert np.abs(got - expected).max() < 0.51 and (np.abs(got - expected) > 0.1).mean() < 0.01
