"""--calibration FILE.npz, and what is said of inputs that are NaN or infinite."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.text import not_finite
from tests.reference_run import model, node, ort_run, relative_error


@pytest.fixture
def growing(tmp_path, monkeypatch):
    """The path of a network whose middle reaches 90000 on inputs of 3, and nothing near FP16's limit on those below 1."""
    monkeypatch.chdir(tmp_path)
    w = {"a_w": np.full((8, 8, 1, 1), 60.0), "b_w": np.full((8, 8, 1, 1), 1 / 500)}
    nodes = [node("Conv", "x a_w", "a"), node("Mul", "a a", "s"), node("Conv", "s b_w", "y")]
    onnx.save(model(nodes, {"x": (1, 8, 4, 4)}, "y", {k: v.astype(np.float32) for k, v in w.items()}), "net.onnx")
    return "net.onnx"


def x(value=3.0):
    return np.full((1, 8, 4, 4), value, np.float32)


def test_calibration_on_the_command_line(growing, cli):
    np.savez("inputs.npz", x=x())
    code, _, err = cli("build net.onnx -o with.engine --device h200 --calibration inputs.npz")
    assert (code, err) == (0, "")
    engine = gr.load("with.engine")
    assert engine.plan.range.source == "calibration input" and engine.plan.range.high[0][1] > 65504
    with engine.context(device="emulator") as ctx:
        assert relative_error(ctx.run({"x": x()})["y"], ort_run("net.onnx", {"x": x()})["y"]) < 5e-3
    assert gr.build("net.onnx", device="h200", calibration={"x": x()}).record.plan.range == engine.record.plan.range


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda: None, "--calibration in.npz: no such file; expected a .npz file, as numpy.savez writes it"),
        (lambda: Path("in.npz").write_bytes(b"PK\x03\x04 torn"), "--calibration in.npz: not a readable .npz file: "),
        (
            lambda: (np.save("in.npy", x()), Path("in.npy").rename("in.npz")),
            "file: File is not a zip file; numpy.savez(FILE, NAME",
        ),
        (lambda: np.savez("in.npz", np.array([{}])), "not a readable .npz file: "),
        (lambda: np.savez("in.npz", x()), "calibration: expected an array for each input, 'x', got 'arr_0'"),
        (
            lambda: np.savez("in.npz", x=x(), z=x()),
            "calibration: expected an array for each input, 'x', got 'x', 'z'; leave the others out",
        ),
        (lambda: np.savez("in.npz", x=x()[0]), "calibration: expected input 'x' of shape (1, 8, 4, 4), got (8, 4, 4)"),
        (lambda: np.savez("in.npz", x=x().astype("U3")), "calibration: expected numbers for input 'x', got <U3"),
    ],
)
def test_calibration_files_that_cannot_be_used(write, text, growing, cli):
    write()
    code, _, err = cli("build net.onnx -o new.engine --device h200 --calibration=in.npz")
    assert code == 1 and err.startswith("error: ") and text in err and len(err.splitlines()) == 1
    assert not Path("new.engine").exists()


def test_the_calibration_file_is_not_written_over(growing, cli):
    np.savez("inputs.npz", x=x())
    code, _, err = cli("build net.onnx -o inputs.npz --calibration inputs.npz --device h200")
    assert code == 1 and "inputs.npz: is a file that this command reads: give another name" in err


@pytest.mark.parametrize(("value", "what"), [(np.nan, "NaN"), (-np.inf, "infinity")])
def test_what_is_not_finite_is_named_with_its_place(value, what, growing, cli):
    bad = x(0.5)
    bad[0, 2, 1, 3] = bad[0, 7, 3, 3] = value
    told = f"input 'x' holds {what} at [0, 2, 1, 3], the first of 2 values that are not finite"
    np.savez("in.npz", x=bad)
    code, _, err = cli("build net.onnx --device h200 --calibration=in.npz")
    assert (code, err) == (1, f"error: calibration: expected finite numbers, {told}\n")

    assert cli("build net.onnx --device h200 -o n.engine")[0] == 0
    np.save("x.npy", bad)
    code, out, err = cli("run n.engine --emulate --input x=x.npy --output out.npz")
    assert (code, err) == (0, told + "\n") and "FP16" not in out
    with gr.load("n.engine").context(device="emulator") as ctx:
        with pytest.warns(RuntimeWarning) as warned:
            ctx.run({"x": bad})
        assert [str(w.message) for w in warned] == [told]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ctx.run({"x": x(0.5)})


def test_not_finite():
    assert not_finite(np.arange(5)) == "" == not_finite(np.ones((2, 2), np.float16)) == not_finite(np.zeros((0, 3), np.float32))
    assert not_finite(np.float32([1, np.inf])) == "infinity at [1]" and not_finite(np.float32(np.nan)) == "NaN at []"
