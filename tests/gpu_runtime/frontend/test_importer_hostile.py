"""Foreign files neither hang nor end in a traceback: whatever is wrong with them is one of four exceptions and a sentence."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.frontend.summaries import pattern
from tactics.measure.cache import Cache
from tests import hostile

EXPECTED = (
    "ModelError",
    "NoModelError",
    "EngineError",
    "NoEngineError",
    "CompileError",
    "OSError",
    "FileNotFoundError",
    "IsADirectoryError",
    "ValueError",
)
LIMIT_S = 30.0  # on a busy machine; idle, the slowest takes about 4


@pytest.fixture(scope="module")
def victim():
    victim = hostile.Victim()
    yield victim
    victim.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile.MODELS)
def test_hostile_models_are_refused_or_built(victim, tmp_path, name):
    """`build`, with the inspection of what it gives, and `inspect-sparsity`."""
    path = hostile.write(name, tmp_path)
    for what in ("build", "sparsity"):
        came = victim.meet(what, path, LIMIT_S)
        assert came["error"] in (None, "ModelError"), (what, came)
        assert came["error"] is None or len(re.findall(r"\w+", came["text"].replace(str(path), ""))) >= 4, came
        assert "Traceback" not in came["text"]


@pytest.fixture
def odd(tmp_path) -> list[Path]:
    """Files that are none: a pipe without a writer, devices, a folder, one larger than memory, one that is not there, ..."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").touch()
    with open(tmp_path / "huge", "wb") as f:
        f.truncate(40 << 30)
    (tmp_path / "text").write_text("[" * 1_000_000)
    names = ("pipe", "loop", "empty", "huge", "text", "absent", "n" * 300, "zero\0byte")
    return [*(tmp_path / name for name in names), Path("/dev/zero"), Path("/dev/null"), tmp_path]


def sentence(e: BaseException) -> None:
    assert type(e).__name__ in EXPECTED, repr(e)
    assert len(re.findall(r"[a-z]+", str(e))) >= 4, str(e)


def test_what_is_no_file_is_refused_as_a_model_an_engine_an_input(victim, odd, tmp_path):
    for path in odd:
        for call in (lambda p: gr.build(p, device="h200"), gr.load, pattern.inspect):
            with pytest.raises((gr.ModelError, gr.EngineError)) as e:
                call(path)
            sentence(e.value)


def test_what_is_no_file_is_refused_as_an_array(odd, tmp_path, capsys):
    from gpu_runtime import cli

    model = tmp_path / "model.onnx"
    model.write_bytes(hostile.MODELS["concat_axis_1"](tmp_path).SerializeToString())
    gr.build(model, device="h200").save(tmp_path / "model.engine")
    with open(tmp_path / "claims.npy", "wb") as f:  # a header that promises more than memory holds
        np.lib.format.write_array_header_1_0(f, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    for path in (*odd, tmp_path / "claims.npy"):
        if "\0" in str(path):
            continue  # no command line holds one
        with pytest.raises(SystemExit) as e:
            cli.main(["run", str(tmp_path / "model.engine"), "--input", f"x={path}", "--output", str(tmp_path / "y.npz")])
        out, err = capsys.readouterr()
        assert e.value.code == 1 and err.startswith("error: --input x: ") and "Traceback" not in err, (path, err)
    assert not (tmp_path / "y.npz").exists()


def test_what_is_no_file_is_refused_as_a_timing_cache(odd):
    for path in (p for p in odd if "\0" not in str(p)):
        try:
            assert len(Cache(path)) == 0  # absent or without a measurement in it
        except (OSError, ValueError) as e:
            sentence(e)
    for path in (odd[0], odd[3], Path("/dev/zero")):
        with pytest.raises(OSError, match="expected a"):
            Cache(path)


def test_arrays_that_are_none_are_bad_arguments(tmp_path):
    path = hostile.write("concat_axis_1", tmp_path)
    engine = gr.build(path, device="h200")
    shape = tuple(engine.plan.inputs[0].shape)
    bad = [
        np.ones(shape, "U3"),
        np.full(shape, None),
        np.ones(shape, complex),
        [[1, 2], [3]],
        "text",
        object(),
        [2**70] * 4,
        np.ones((0,)),
        np.float32(1),
    ]
    with engine.context(device="emulator") as ctx:
        for array in bad:
            for call in (lambda a: ctx.run({"x": a}), lambda a: gr.build(path, device="h200", calibration={"x": a})):
                with pytest.raises((TypeError, ValueError)) as e:
                    call(array)
                if not str(e.value).startswith("input 'x': expected an array of shape 1x4x8x8"):  # a TypeError in words
                    sentence(e.value)
    for dims in (7, None, "abc", (1, 2.5), (1, -4), ("a",) * 4, (2**70,) * 4):
        with pytest.raises(ValueError) as e:
            gr.build(path, device="h200", shapes={"x": dims})
        sentence(e.value)
