"""What Python callers are told of a wrong or missing argument: what was expected, what was given, and what to do.

Inputs and outputs of a run have their tables in test_arrays.py, the command line in test_cli_refused.py.
"""

import os
import re

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime import EngineError, ModelError
from tests.reference_run import model, node

SHAPE = (2, 3)
X = np.ones(SHAPE, np.float32)


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory):
    """A folder with files of every wrong kind, which is the current one."""
    folder, before = tmp_path_factory.mktemp("files"), os.getcwd()
    os.chdir(folder)
    proto = model([node("Add", "x x", "y")], {"x": SHAPE}, "y")
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    (folder / "empty").write_bytes(b"")
    (folder / "junk").write_bytes(b"hello world " * 10)
    (folder / "folder").mkdir()
    np.save("x.npy", X)
    gr.build("m.onnx", device="a100").save("m.engine")
    (folder / "torn.engine").write_bytes((folder / "m.engine").read_bytes()[:-1])
    yield folder
    os.chdir(before)


def build(**options):
    return lambda: gr.build("m.onnx", **options)


def context(**options):
    return lambda: gr.load("m.engine").context(**{"device": "emulator"} | options)


def in_context(function):
    def call():
        with gr.load("m.engine").context(device="emulator") as ctx:
            function(ctx)

    return call


def closed(function):
    def call():
        ctx = gr.load("m.engine").context(device="emulator")
        ctx.close()
        ctx.close()
        function(ctx)

    return call


CLOSED = "this context is closed: make a new one with engine.context()"
TABLE = {
    # models
    "no model": (lambda: gr.build(), TypeError, "missing 1 required positional argument: 'model'"),
    "an engine as a model": (lambda: gr.build("m.engine"), ModelError, "m.engine: expected an ONNX model, got an engine"),
    "a folder as a model": (lambda: gr.build("folder"), ModelError, "folder: .*expected a file, got a folder"),
    "an empty model": (lambda: gr.build("empty"), ModelError, "empty: expected an ONNX model.*got 0 bytes"),
    "junk as a model": (lambda: gr.build("junk"), ModelError, "junk: expected an ONNX model .*got 120 bytes"),
    "an array as a model": (lambda: gr.build("x.npy"), ModelError, "x.npy: expected an ONNX model.* it is a NumPy array"),
    "no file": (lambda: gr.build("no.onnx"), ModelError, "no.onnx: no such file; give the path of an ONNX model"),
    "an empty path": (lambda: gr.build(""), ModelError, "expected the path of an ONNX model, got an empty one"),
    "no bytes": (lambda: gr.build(b""), ModelError, "model: expected an ONNX model"),
    # options of a build
    "shapes as on the command line": (build(shapes="x:2x3"), ValueError, "shapes: expected a mapping of .* got 'x:2x3'"),
    "a shape as text": (build(shapes={"x": "2x3"}), ValueError, "shapes: expected whole numbers .*'2x3'.* for 'x'"),
    "a shape of none": (build(shapes={"x": None}), ValueError, "shapes: expected whole numbers for each input, got "),
    "a shape of another": (build(shapes={"y": SHAPE}), ModelError, "a shape is given for 'y', but the inputs are 'x'"),
    "another shape": (
        build(shapes={"x": (2, 4)}),
        ModelError,
        "input 'x': the model declares 2x3, the shape given is 2x4; .*axis dynamic",
    ),
    "sparsity": (build(sparsity="on"), ValueError, "sparsity: expected one of disable, enable, force, got 'on'"),
    "an option nobody has": (build(sparse=True), TypeError, "build has no option 'sparse'; did you mean 'sparsity' "),
    "a device nobody has": (build(device="a1000"), ValueError, "unknown device 'a1000': did you mean a100 or"),
    "a device's number": (build(device=0), TypeError, "device: expected a name .*or None for the GPU at hand, got 0"),
    "risk": (build(risk=2), ValueError, "risk: expected a probability from 0.5 to below 1, got 2"),
    "workspace": (build(workspace="1GB"), TypeError, "workspace: expected a number of bytes or None, got '1GB'"),
    "activations": (build(activations=1.5), TypeError, "activations: expected a number of bytes or None, got 1.5"),
    "less than nothing": (build(activations=-1), ValueError, "activations: expected 0 to 4611686018427387904 bytes, got -1"),
    "more than all": (build(workspace=2**63), ValueError, "workspace: expected 0 to 4611686018427387904 bytes, got 92233720"),
    "log": (build(log="a.txt"), TypeError, "log: expected a function of a text, such as print, or None, got 'a.txt'"),
    "progress": (build(progress=None), TypeError, "progress: expected a function of .*, got None"),
    "a timing cache": (build(timing_cache=3), TypeError, "timing_cache: expected a path, None or False, got 3"),
    "a format": (build(input_formats="fp16:foo"), ValueError, "input format 'fp16:foo': unknown layout 'foo', expected one of"),
    "formats": (build(output_formats=3), TypeError, "output formats: expected text such as fp16:hwc8, .* got 3"),
    "calibration": (build(calibration=[X]), ValueError, "calibration: expected a mapping of input names to arrays, got list"),
    "calibration of another": (build(calibration={"z": X}), ValueError, "calibration: expected an array for .* 'x', got 'z'"),
    "ragged calibration": (
        build(calibration={"x": [[1], []]}),
        ValueError,
        "calibration: NumPy cannot make an array of the values for input 'x'",
    ),
    # engines
    "no engine": (lambda: gr.load(), TypeError, "missing 1 required positional argument: 'source'"),
    "a model as an engine": (lambda: gr.load("m.onnx"), EngineError, "m.onnx: not an engine but an ONNX model: build-engine"),
    "a folder as an engine": (lambda: gr.load("folder"), EngineError, "folder: .*expected a file, got a folder"),
    "an empty engine": (lambda: gr.load("empty"), EngineError, "empty: not an engine: it is empty.*build the engine again"),
    "empty bytes": (lambda: gr.load(b""), EngineError, "the engine: not an engine: it is empty"),
    "junk as an engine": (lambda: gr.load("junk"), EngineError, "junk: not an engine"),
    "bytes of something else": (
        lambda: gr.load(b"junk" * 99),
        EngineError,
        "the engine: not an engine: it begins with the bytes 6a 75 6e 6b",
    ),
    "an array as an engine": (lambda: gr.load("x.npy"), EngineError, "x.npy: not an engine: it is a NumPy array (.npy)"),
    "no engine file": (lambda: gr.load("no.engine"), EngineError, "no.engine: no such file. Build an engine with"),
    "an empty name": (lambda: gr.load(""), EngineError, "expected the path of an engine file, got an empty one"),
    "a torn engine": (lambda: gr.load("torn.engine"), EngineError, "torn.engine: truncated.*Copy the file again"),
    "saved to a number": (lambda: gr.load("m.engine").save(3), TypeError, "expected the path of a file, or a file .*, got int"),
    "saved to a folder": (lambda: gr.load("m.engine").save("folder"), EngineError, "folder: .* expected a file, got a folder"),
    # contexts
    "a device of contexts": (context(device="gpu"), ValueError, "device: expected None, 'cuda', .* or 'emulator', got 'gpu'"),
    "a misspelt option": (
        context(devise="cuda"),
        TypeError,
        "unknown option 'devise', expected one of .*did you mean 'device'",
    ),
    "no threads": (context(threads=0), ValueError, "threads: expected a whole number from 1 .*None (all cores), got 0"),
    "fewer threads": (context(threads=-1), ValueError, "threads: expected a whole number .*, got -1"),
    "half a thread": (context(threads=1.5), ValueError, "threads: expected a whole number from 1 .*, got 1.5"),
    "threads as text": (context(threads="2"), ValueError, "threads: expected a whole number from 1 .*, got '2'"),
    "threads that wrap round": (context(threads=2**32), ValueError, "threads: expected a whole number .*, got 4294967296"),
    "a seed": (context(seed=-1), ValueError, "seed: expected a whole number from 0 to 18446744073709551615, got -1"),
    "resident blocks": (context(resident_blocks=-1), ValueError, "resident_blocks: expected a whole number from 0 to .*got -1"),
    "a mode": (context(async_mode="lat"), ValueError, "async_mode: expected eager or late, got 'lat'"),
    "an end": (context(low_ends=("exp",)), ValueError, "low_ends, high_ends: got 'exp', expected names out of .*ex2"),
    "a path as an engine": (lambda: gr.Context("m.engine"), TypeError, "engine: expected an Engine, .* return, got str"),
    "no inputs": (in_context(lambda c: c.run()), TypeError, "missing 1 required positional argument: 'inputs'"),
    "inputs as keywords": (in_context(lambda c: c.run(x=X)), TypeError, "unexpected keyword argument 'x'"),
    "no such tensor": (in_context(lambda c: c.tensor("z")), ValueError, "no layer writes a tensor 'z'"),
    "profile in the emulator": (in_context(lambda c: c.profile({"x": X})), ValueError, "profile: layer times are measured"),
    "trace of a bare array": (in_context(lambda c: c.trace(X)), TypeError, "inputs: expected a mapping .*, got ndarray of"),
    "closed: run": (closed(lambda c: c.run({"x": X})), ValueError, CLOSED),
    "closed: run_async": (closed(lambda c: c.run_async({"x": X})), ValueError, CLOSED),
    "closed: trace": (closed(lambda c: c.trace({"x": X})), ValueError, CLOSED),
    "closed: with": (closed(lambda c: c.__enter__()), ValueError, CLOSED),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_wrong_argument_says_what_was_expected_and_what_to_do(case):
    call, error, text = TABLE[case]
    with pytest.raises(error, match=".*".join(re.escape(part) for part in text.split(".*"))) as caught:
        call()
    told = str(caught.value)
    assert len(told) < 400 and "\n" not in told and told.isprintable()
