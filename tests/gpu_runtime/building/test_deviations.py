"""The error that a record states for a plan on its calibration input, beside the plan's error from the model as given.

Two FP32 results of a product that cancels differ, too. So errors may exceed the record by the error of onnxruntime from the
model in doubles, and by as much again: the error of NumPy, which is the reference of the record.
"""

import warnings

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import gpu_runtime as gr
from tests.reference_run import model, node, ort_run, relative_error

C, MID = 8, 32


def half(a):
    return np.asarray(a).astype(np.float16).astype(np.float32)


def cancelling(rng, eps, *, exact=False):
    """Matrices a [MID, C] and b [C, MID] whose product is `eps` times what each term of it is; `exact`: FP16 holds them."""
    a = rng.standard_normal((MID, C))
    a = half(a) if exact else a
    nowhere = np.linalg.svd(a.T)[2][C:]  # rows n with n @ a = 0
    b = rng.standard_normal((C, MID - C)) @ nowhere + eps * rng.standard_normal((C, MID))
    return a.astype(np.float32), (half(b) if exact else b.astype(np.float32))


def in_doubles(proto, feeds):
    """The output "y" of the model as onnx's own reference computes it in doubles."""
    wide = onnx.ModelProto.FromString(proto.SerializeToString())
    for value in (*wide.graph.input, *wide.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for w in wide.graph.initializer:
        w.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(w).astype(np.float64), w.name))
    (y,) = ReferenceEvaluator(wide).run(["y"], {name: np.asarray(x, np.float64) for name, x in feeds.items()})
    assert y.dtype == np.float64
    return y


def built(proto, feeds):
    """(the engine for these calibration inputs, its output's error beside onnxruntime's, the error that its record states, and
    onnxruntime's own error)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        engine = gr.build(proto, device="h200", calibration=feeds)
    with engine.context(device="emulator") as ctx:
        y = ctx.run(feeds)["y"]
    (row,) = (row for row in engine.plan.range.compared.outputs if row[0] == "y")
    expected = ort_run(proto, feeds)["y"]
    return engine, relative_error(y, expected), row[1], relative_error(expected, in_doubles(proto, feeds))


@pytest.mark.parametrize("eps", [1e-2, 1e-3])
@pytest.mark.parametrize("exact", [True, False])
def test_products_that_cancel(eps, exact):
    rng = np.random.default_rng(3)
    a, b = cancelling(rng, eps, exact=exact)
    nodes = [node("Conv", "x a", "h"), node("Conv", "h b", "y")]
    proto = model(nodes, {"x": (1, C, 8, 8)}, "y", {"a": a[:, :, None, None], "b": b[:, :, None, None]})
    engine, error, stated, noise = built(proto, {"x": half(rng.uniform(-1, 1, (1, C, 8, 8)))})
    assert error < 1e-3 and error < 1.25 * stated + 2 * noise
    if not exact:
        assert [layer.tactic.kernel for layer in engine.plan.layers] == ["conv_fp32", "conv_fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_record_states_no_less_than_the_error(seed):
    """Of drawn networks: a first step, a product of two layers that cancels more or less, spelled in one of several ways."""
    rng = np.random.default_rng(seed)
    a, b = cancelling(rng, 10.0 ** -rng.uniform(0.5, 3), exact=seed % 2 == 0)
    shape = (2, C, 6, 7)
    weights = {
        "scale": rng.uniform(0.5, 2, C),
        "shift": rng.standard_normal(C),
        "mean": rng.standard_normal(C) / 8,
        "var": rng.uniform(0.5, 2, C),
        "wide": np.tile(a[:, :, None, None], (1, 1, 3, 3)) / 9,
        "a": a[:, :, None, None],
        "at": a.T[:, :, None, None],
        "b": b[:, :, None, None],
        "am": a,
        "bm": b,
    }
    first = [
        [node("Identity", "x", "p")],
        [node("BatchNormalization", "x scale shift mean var", "n"), node("Relu", "n", "p")],
        [node("Sigmoid", "x", "s"), node("Mul", "x s", "p")],
    ][rng.integers(3)]
    middle = [
        [node("Conv", "p a", "h"), node("Conv", "h b", "y")],
        [node("Conv", "p wide", "h", pads=[1] * 4), node("Conv", "h b", "y")],
        [node("ConvTranspose", "p at", "h"), node("Conv", "h b", "y")],
    ][rng.integers(3)]
    used = {n for step in (*first, *middle) for n in step.input}
    proto = model([*first, *middle], {"x": shape}, "y", {k: np.asarray(v, np.float32) for k, v in weights.items() if k in used})
    _, error, stated, noise = built(proto, {"x": half(rng.uniform(-1, 1, shape))})
    assert error < 1.25 * stated + 2 * noise, (error, stated, noise)
