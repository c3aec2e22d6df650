"""What `inspect`, `build` and `run` say of a file that is not what they want, and what `inspect` says of a model."""

import json
import re
import shlex

import numpy as np
import onnx
import pytest

from gpu_runtime import file_kinds
from gpu_runtime.frontend.summaries.describe import describe
from tests.reference_run import model, node

META = b'{"task": "detect"}'
FILES = {
    "trt.engine": (b"ftrt" + bytes(range(200)), "an engine of TensorRT, which only TensorRT reads"),
    "yolo.engine": (len(META).to_bytes(4, "little") + META + b"ftrt" + bytes(64), "an engine of TensorRT"),
    "net.pt": (b"PK\x03\x04" + bytes(64), "PyTorch (.pt)"),
    "net.tflite": (b"\x1c\0\0\0TFL3" + bytes(64), "a TensorFlow Lite model"),
    "net.ort": (b"\x08\0\0\0ORTM" + bytes(64), "onnxruntime's own format"),
    "lfs.onnx": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "page.onnx": (b"<!doctype html><html></html>", "a web page"),
    "x.npy": (b"\x93NUMPY\x01\0" + bytes(100), "a NumPy array"),
}


@pytest.mark.parametrize("name", FILES)
def test_known_kinds_are_named_by_every_command(name, tmp_path, cli):
    data, text = FILES[name]
    (tmp_path / name).write_bytes(data)
    for command in (f"inspect {name}", f"build {name} --device h200", f"run {name} --output o.npz", f"explain {name}"):
        code, _, err = cli(command)
        assert code == 1 and err.startswith(f"error: {name}: ") and text in err and len(err.splitlines()) == 1


def test_a_random_file_is_neither(tmp_path, cli):
    (tmp_path / "random.bin").write_bytes(np.random.default_rng(0).bytes(300))
    code, out, err = cli("inspect random.bin")
    assert (code, out) == (1, "") and re.fullmatch(
        r"error: random.bin: neither an engine nor an ONNX model: it begins with the bytes [0-9a-f ]{23}; give one of them\n",
        err,
    )
    (tmp_path / "empty").write_bytes(b"")
    assert cli("inspect empty")[0] == 1
    assert cli("inspect nope.onnx")[2] == "error: nope.onnx: no such file; give the path of an ONNX model\n"
    assert cli("inspect nope.engine")[2].startswith("error: nope.engine: no such file. Build an engine with")


def test_engines_and_models_are_told_apart(files, cli):
    assert file_kinds.is_engine((files / "tiny.engine").read_bytes()) and file_kinds.is_onnx((files / "tiny.onnx").read_bytes())
    assert not any(map(file_kinds.recognized, ((files / "tiny.engine").read_bytes(), (files / "tiny.onnx").read_bytes())))
    code, _, err = cli("build tiny.engine --device h200")
    assert code == 1 and "expected an ONNX model, got an engine" in err
    code, _, err = cli("run tiny.onnx --input x=x.npy --output o.npz")
    assert code == 1 and "tiny.onnx: not an engine but an ONNX model: build-engine tiny.onnx -o model.engine builds one" in err


@pytest.mark.slow
def test_inspect_says_what_a_model_is_and_how_it_is_built(files, cli):
    code, out, err = cli("inspect sparse.onnx")
    assert (code, err) == (0, "")
    rows = dict(line.split(None, 1) for line in out.splitlines()[1:])
    assert out.startswith("sparse.onnx: an ONNX model, opset 17, IR version 8, made by benchmarks/digits/train.py, 1.")
    assert (rows["inputs"], rows["outputs"]) == ("x: float32 Nx1x8x8", "logits: float32 Nx10")
    assert rows["nodes"].startswith("53: 15 Conv, 15 BatchNormalization, 13 Relu, ")
    assert rows["sparsity"].startswith("2:4: all 15 layers that can have the pattern have it")
    command = rows["build"].split("  ")[0]
    assert command == "build-engine sparse.onnx -o sparse.engine"
    assert cli(command.replace("build-engine", "build --device h200"))[0] == 0  # as it says
    found = json.loads(cli("inspect sparse.onnx --json")[1])
    assert found["opsets"] == {"ai.onnx": 17} and found["layers"] == 29 and found["command"] == command


def test_inspect_of_a_model_with_open_sizes(files, cli):
    onnx.save(model([node("Relu", "x", "y")], {"x": ("N", 3, "H", "W")}, "y"), "open.onnx")
    out = cli("inspect open.onnx")[1]
    assert "build     build-engine open.onnx -o open.engine --shapes=x:1x3x224x224  (1 layers once fused; a plan may" in out
    assert "a plan may join or split them; choose its dynamic sizes with --shapes" in " ".join(out.split())


def test_the_command_can_be_pasted_whatever_the_file_is_called(files):
    (files / "m 1'ü.onnx").write_bytes((files / "sparse.onnx").read_bytes())
    command = describe(files / "m 1'ü.onnx").command
    assert shlex.split(command) == ["build-engine", str(files / "m 1'ü.onnx"), "-o", "m 1'ü.engine"]


def quantized(*more):
    nodes = [
        node("DynamicQuantizeLinear", "x", "a s z"),
        node("ConvInteger", "a w z", "i"),
        node("Cast", "i", "c", to=1),
        *more,
    ]
    return model(nodes, {"x": (1, 4, 3, 3)}, "c", {"w": np.ones((4, 4, 1, 1), np.uint8)})


def test_a_quantized_model_says_what_to_do_in_two_lines(tmp_path, cli):
    onnx.save(quantized(), tmp_path / "q.onnx")
    code, _, err = cli("build q.onnx --device h200")
    first, second = err.splitlines()
    assert code == 1 and first == (
        "error: q.onnx: it is quantized (1 DynamicQuantizeLinear, 1 ConvInteger), and no kernel computes in integers"
    )
    assert second.startswith("quantize it with QuantizeLinear and DequantizeLinear of stored scales")
    onnx.save(quantized(node("NonZero", "c", "d", name="nz")), tmp_path / "q.onnx")
    assert (
        cli("build q.onnx --device h200")[2]
        .splitlines()[0]
        .endswith("in integers; these operators have no kernel either: NonZero (nz)")
    )


def test_unsupported_operators_take_three_lines_however_many_there_are(tmp_path, cli):
    nodes = [node("Det", "x", f"d{i}") for i in range(200)]
    nodes += [node(f"Odd{i}", "x", f"o{i}", domain="com.example") for i in range(20)] + [node("Relu", "x", "y")]
    proto = model(nodes, {"x": (1, 4, 3, 3)}, "y")
    proto.opset_import.append(onnx.helper.make_opsetid("com.example", 2))
    onnx.save(proto, tmp_path / "odd.onnx")
    code, _, err = cli("build odd.onnx --device h200")
    first, second, third = err.splitlines()
    assert (
        code == 1
        and "220 nodes have an operator that is not supported: Det (d0, d1, d2 and 197 more), com.example.Odd0 (o0)," in first
    )
    assert first.endswith(" and 13 more operators") and "docs/operators.md" in second and len(third) < 1000
    out = cli("inspect odd.onnx")[1]
    assert "missing   220 nodes have no kernel here: Det d0," in out and "cannot be built: 220 nodes" in out
    flat = out.replace("\n          ", " ")
    assert "Odd19 o19, Det d1, " in flat and "Det d79 and 120 more" in flat
    assert "Odd19 o19" in json.loads(cli("inspect odd.onnx --json")[1])["unsupported"]
