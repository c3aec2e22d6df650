"""`gpu-runtime run --shapes`: random inputs of a size that the engine takes, or the sizes that the files must have."""

import numpy as np
import pytest

import gpu_runtime as gr
from tests.reference_run import model, node, ort_run

W = {"w": (np.random.default_rng(0).standard_normal((8, 8, 3, 3)) / 8).astype(np.float32)}
PROTO = model(
    [node("Conv", "x w", "a", pads=(1, 1, 1, 1)), node("Add", "a z", "y")], {"x": ("n", 8, 6, 6), "z": ("n", 8, 1, 1)}, "y", W
)


@pytest.fixture(scope="module")
def engine():
    """1 to 8 images; two inputs have the batch."""
    sizes = {name: ((1, 8, n, n), (4, 8, n, n), (8, 8, n, n)) for name, n in (("x", 6), ("z", 1))}
    return gr.build(PROTO, device="h200", shapes=sizes)


@pytest.fixture
def folder(tmp_path, monkeypatch, engine):
    monkeypatch.chdir(tmp_path)
    engine.save("range.engine")
    for name, n in (("x", 6), ("z", 1)):
        np.save(f"{name}.npy", np.ones((5, 8, n, n), np.float32))
    return tmp_path


@pytest.mark.parametrize(("shapes", "rows"), [("3", 3), ("x:7x8x6x6", 7), ("z:8x8x1x1,x:8x8x6x6", 8)])
def test_random_inputs_of_that_size_are_drawn(folder, cli, shapes, rows):
    """In every input that has the batch, though only one is named; the same each time."""
    for name in ("a.npy", "b.npy"):
        code, out, _ = cli(f"run range.engine --emulate --output {name} --shapes={shapes}")
        assert code == 0 and f"random inputs: x {rows}x8x6x6, z {rows}x8x1x1" in out and f"y: float32 {rows}x8x6x6" in out
        said = f"Ran range.engine on the CPU emulator, by the plan for batch {4 if rows < 5 else 8}, random inputs: x "
        assert out.startswith(said) and " us" not in out
    a, b = np.load("a.npy"), np.load("b.npy")
    assert a.shape == (rows, 8, 6, 6) and a.tobytes() == b.tobytes() and len(np.unique(a)) > 100


@pytest.mark.parametrize(
    ("shapes", "code", "words"),
    [
        ("9", 1, "x: expected 1 to 8 rows of 8x6x6, got 9"),
        ("x:5x8x6x7", 1, "x: expected 1 to 8 rows of 8x6x6, got 5x8x6x7"),
        ("q:5x8", 1, "there is no input 'q', expected x, z"),
        ("x", 2, "--shapes: expected name:1x3x224x224 (several with commas), got 'x'"),
    ],
)
def test_a_size_that_it_does_not_take(folder, cli, shapes, code, words):
    got, _, err = cli(f"run range.engine --emulate --output o.npz --shapes={shapes}")
    assert got == code and words in err and not (folder / "o.npz").exists()


def test_files_of_another_size_are_refused(folder, cli):
    files = "--input x=x.npy --input z=z.npy"
    assert cli(f"run range.engine --emulate --output o.npz {files} --shapes=5")[0] == 0
    want = ort_run_of(np.load("x.npy"), np.load("z.npy"))
    assert np.abs(np.load("o.npz")["y"] - want).max() < 0.01
    (folder / "o.npz").unlink()
    code, _, err = cli(f"run range.engine --emulate --output o.npz {files} --shapes=4")
    assert code == 1 and not (folder / "o.npz").exists()
    assert "--shapes=4: expected x 4x8x6x6, z 4x8x1x1, but --input gives x 5x8x6x6, z 5x8x1x1: leave one of them out" in err
    code, _, err = cli("run range.engine --emulate --output o.npz --input x=x.npy --shapes=5")
    assert code == 1 and "expected the names ['x', 'z'], got ['x']" in err  # random values beside given ones are no answer


def ort_run_of(x, z):
    return ort_run(PROTO, {"x": x, "z": z})["y"]


def test_an_engine_of_one_size(folder, cli):
    gr.build(PROTO, device="h200", shapes={"x": (2, 8, 6, 6), "z": (2, 8, 1, 1)}).save("one.engine")
    code, out, _ = cli("run one.engine --emulate --output o.npz --shapes=x:2x8x6x6")
    assert code == 0 and "random inputs: x 2x8x6x6, z 2x8x1x1" in out
    code, _, err = cli("run one.engine --emulate --output o.npz --shapes=3")
    assert code == 1 and "x: expected 2x8x6x6, the engine's only size, got 3x8x6x6" in err
    code, out, _ = cli("run one.engine --emulate")
    assert code == 0 and "random inputs: x 2x8x6x6, z 2x8x1x1\n" in out and "wrote" not in out, "nothing need be given"


@pytest.mark.parametrize("name", ["o.txt", "o", "o.NPZ"])
def test_outputs_go_to_files_of_numpy_only(folder, cli, name):
    code, _, err = cli(f"run range.engine --emulate --output {name} --shapes=2")
    assert code == 2 and f"--output {name}: expected a name that ends in .npz, or for one output in .npy" in err
    assert not (folder / name).exists()


def test_a_name_in_another_case_is_recognized(folder, cli):
    code, _, err = cli("run range.engine --emulate --input X=x.npy --input z=z.npy")
    assert code == 1 and "expected the names ['x', 'z'], got ['X', 'z']; did you mean 'x' instead of 'X'?" in err
