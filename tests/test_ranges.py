"""Values that FP16 cannot hold: found before they happen, stored times a power of two, and never NaN in silence."""

import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from reference_run import model, node, ort_run
from test_moves import build

from gpu_runtime import ranges
from gpu_runtime.cli import program
from gpu_runtime.fuse import fuse
from gpu_runtime.lower import lower
from gpu_runtime.onnx_import import read


def weights(*shape, scale=1.0, seed=0):
    w = np.random.default_rng(seed).standard_normal(shape) * scale / np.sqrt(np.prod(shape[1:]))
    return w.astype(np.float16).astype(np.float32)


def large(last=()):
    """Convolutions, a residual, a pool, a concat and pointwise operators, in the middle 5 times what FP16 holds."""
    w = {
        "a": weights(16, 8, 3, 3, scale=2000), "b": weights(16, 16, 3, 3, scale=1000, seed=1),
        "c": weights(16, 16, 1, 1, seed=2), "bias": weights(16, scale=5e3, seed=3),
        "d": weights(8, 32, 1, 1, scale=1e-3, seed=4), "one": np.float32([1000.0]),
    }  # fmt: skip
    nodes = [
        node("Conv", "x a", "p", pads=(1, 1, 1, 1)), node("Relu", "p", "q"), node("Conv", "q b bias", "r", pads=(1, 1, 1, 1)),
        node("Relu", "r", "s"), node("Conv", "s c", "t"), node("Add", "t s", "u"), node("Relu", "u", "v"),
        node("Add", "v one", "v2"), node("MaxPool", "v2", "m", kernel_shape=(2, 2), strides=(2, 2)),
        node("MaxPool", "s", "n", kernel_shape=(2, 2), strides=(2, 2)), node("Concat", "m n", "o", axis=1),
        node("Conv", "o d", "z"), *last,
    ]  # fmt: skip
    return model(nodes, {"x": (1, 8, 10, 10)}, (last or nodes)[-1].output[0], w)


def lowered(tmp_path, proto):
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    return lower(fuse(read(tmp_path / "m.onnx")))


LAST = {
    "conv": (), "sigmoid": (node("Sigmoid", "z", "y"),), "softmax": (node("Softmax", "z", "y", axis=1),),
}  # fmt: skip


@pytest.mark.parametrize("name", ["conv", "sigmoid", "softmax"])
def test_a_network_that_would_overflow_is_right(tmp_path, name):
    proto = large(LAST[name])
    engine = build(tmp_path, proto)
    found = engine.plan["range"]
    assert found["source"] == "random values from 0 to 1" and found["high"][0][1] > 5 * 65504 and not found["stuck"]
    assert {"s", "o"} <= set(found["exponents"]) and not {"x", "z", "y"} & set(found["exponents"])
    x = {"x": np.random.default_rng(0).random((1, 8, 10, 10), np.float32)}
    with warnings.catch_warnings(), engine.context(device="emulator") as ctx:
        warnings.simplefilter("error")
        (got,) = ctx.run(x).values()
    (expected,) = ort_run(proto, x).values()
    assert np.abs(got - expected).max() < 3e-3 * np.ptp(expected)


def test_powers_of_two_change_nothing_but_the_range(tmp_path):
    """Every stored tensor is its value times 2^e, to the last bit of FP32."""
    network = lowered(tmp_path, large())
    feeds = {"x": np.random.default_rng(1).random((1, 8, 10, 10), np.float32)}
    fitted, found = ranges.fit(network, feeds)
    before, after = ranges.largest(network, feeds), ranges.largest(fitted, feeds)
    assert found.exponents and max(after.values()) <= ranges.HIGH < max(before.values())
    for tensor, value in before.items():
        assert after[tensor] == pytest.approx(value * 2.0 ** found.exponents.get(tensor, 0), rel=1e-6), tensor


def test_what_fits_is_left_alone(tmp_path):
    network = lowered(tmp_path, model([node("Conv", "x w", "y")], {"x": (1, 4, 5, 5)}, "y", {"w": weights(4, 4, 3, 3)}))
    fitted, found = ranges.fit(network)
    assert fitted is network and not found.high and not found.exponents


def test_what_would_fill_the_memory_is_not_run(tmp_path):
    """8 GB of input: planned like any other, but not run on random values without being asked to."""
    network = lowered(tmp_path, model([node("Relu", "x", "y")], {"x": (1, 1, 32768, 65535)}, "y"))
    fitted, found = ranges.fit(network)
    assert fitted is network and found.source == "not checked: 4295 M elements in all tensors; give a calibration input"


def test_what_cannot_be_scaled_is_named(tmp_path):
    """The network's output itself is too large for FP16 inside."""
    proto = model([node("Conv", "x w", "y")], {"x": (1, 4, 5, 5)}, "y", {"w": weights(4, 4, 3, 3, scale=20000) + 30000})
    with pytest.warns(RuntimeWarning, match="m: on random values from 0 to 1, 'y' reaches .*: FP16 ends at 65504"):
        engine = build(tmp_path, proto)
    assert engine.plan["range"]["stuck"] == ["y"]
    with engine.context(device="emulator") as ctx:
        with pytest.warns(RuntimeWarning, match="outputs hold infinite values or NaN, first written by y"):
            ctx.run({"x": np.ones((1, 4, 5, 5), np.float32)})
        assert ctx.nonfinite()[0] == "y"


def test_an_overflow_that_the_outputs_hide_is_named(tmp_path):
    """100 * 4 * 400 is no FP16 number; HardSigmoid makes 1 of it."""
    proto = model(
        [node("Conv", "x w", "a"), node("MaxPool", "a", "b", kernel_shape=[2, 2]), node("HardSigmoid", "b", "y")],
        {"x": (1, 4, 5, 5)}, "y", {"w": np.full((4, 4, 1, 1), 100, np.float32)},
    )  # fmt: skip
    engine, feeds = build(tmp_path, proto), {"x": np.full((1, 4, 5, 5), 400, np.float32)}
    with engine.context(device="emulator") as ctx:
        with pytest.warns(RuntimeWarning, match="layers hold infinite values or NaN, first written by a, b"):
            assert (ctx.run(feeds)["y"] == 1).all()
        assert ctx.nonfinite() == ["a", "b"]
        assert ctx.run({"x": np.zeros((1, 4, 5, 5), np.float32)})["y"].max() < 1 and not ctx.nonfinite()
    engine.save(tmp_path / "m.engine")
    np.save(tmp_path / "x.npy", feeds["x"])
    files = ["--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "y.npz")]
    ran = CliRunner().invoke(program, ["run", str(tmp_path / "m.engine"), *files, "--emulate"])
    assert ran.exit_code == 0 and "since FP16 ends at 65504, were written by 2 layers: a, b\n" in ran.output


def test_a_calibration_input_decides(tmp_path):
    proto = model(
        [node("Conv", "x w", "a"), node("Relu", "a", "b"), node("Conv", "b v", "y")], {"x": (1, 4, 5, 5)}, "y",
        {"w": np.full((4, 4, 1, 1), 100, np.float32), "v": np.full((4, 4, 1, 1), 1e-3, np.float32)},
    )  # fmt: skip
    bright = {"x": np.full((1, 4, 5, 5), 255, np.float32)}
    assert not build(tmp_path, proto).plan["range"]["exponents"]
    engine = build(tmp_path, proto, calibration=bright)
    assert engine.plan["range"]["source"] == "calibration input" and engine.plan["range"]["exponents"] == {"b": -3}
    with engine.context(device="emulator") as ctx:
        assert np.allclose(ctx.run(bright)["y"], 408, rtol=2e-3)
    with pytest.raises(ValueError, match=r"calibration: expected input 'x' of shape \(1, 4, 5, 5\), got none"):
        build(tmp_path, proto, calibration={"z": np.zeros(3)})


def test_a_large_network_is_not_run_without_being_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(ranges, "MOST_MACS", 10)
    network = lowered(tmp_path, large())
    fitted, found = ranges.fit(network)
    assert fitted is network and found.source.startswith("not checked: 0.0 G multiplications")
