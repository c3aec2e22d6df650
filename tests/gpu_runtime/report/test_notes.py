"""What other viewers get: a trace in Chrome's format, and the model annotated for Netron."""

import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest

import gpu_runtime as gr
from gpu_runtime.report import notes
from tests.conftest import model_path
from tests.engines import SPARSE_DEVICE
from tests.gpu_runtime.report.test_page import EVIL, hostile
from tests.reference_run import ort_run


@pytest.fixture(scope="module")
def record():
    return gr.build(model_path("mnist8"), device=SPARSE_DEVICE, sparsity="force").record


def check_trace(found: dict) -> list[dict]:
    """Its complete events, where it holds to the Trace Event Format."""
    found = json.loads(json.dumps(found))
    assert found["displayTimeUnit"] in ("ns", "ms") and isinstance(found["otherData"], dict)
    for event in found["traceEvents"]:
        assert event["ph"] in "XCM" and isinstance(event["name"], str) and isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "C" or all(isinstance(v, int) for v in event["args"].values())
        assert event["ph"] != "X" or (event["dur"] >= 0 and isinstance(event["tid"], int) and isinstance(event["cat"], str))
    done = [event for event in found["traceEvents"] if event["ph"] == "X"]
    for before, after in zip(done, done[1:], strict=False):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.0015, "one track: no two at a time"
    return done


def test_a_trace_has_each_launch_on_one_track(record):
    done = check_trace(notes.trace(record))
    launched = [layer for layer in record.plan.layers if layer.tactic]
    assert [e["name"] for e in done] == [layer.name for layer in launched]
    assert sum(e["dur"] for e in done) == pytest.approx(record.plan.solution.total_us)
    assert [e["args"]["tactic"] for e in done] == [layer.tactic.runner for layer in launched]
    assert done[2]["args"]["verdict"] == "dense" and "dense is faster" in done[2]["args"]["why"]
    assert all(e["args"]["time"].startswith("~") and e["args"]["timing"] == f"predicted({SPARSE_DEVICE})" for e in done)
    alive = [e["args"]["bytes"] for e in notes.trace(record)["traceEvents"] if e["ph"] == "C"]
    assert 0 < max(alive) <= record.plan.memory.largest_live_bytes and len(alive) == len(record.plan.steps) + 1


def test_measured_times_are_drawn_by_their_medians(record):
    measured = replace(record, timing=replace(record.timing, kind="measured", label="measured(GPU)", sigma=None))
    runs = [[float(us) for _ in record.plan.layers] for us in (1, 5, 2)]
    done = check_trace(notes.trace(measured, runs))
    assert {e["dur"] for e in done} == {2.0} and {e["args"]["time"] for e in done} == {"2.00 us"}


def test_names_in_a_trace_are_printable(record):
    assert json.dumps(notes.trace(hostile(record)), ensure_ascii=False).isprintable() and not EVIL.isprintable()


def test_the_annotated_model_is_valid_and_computes_the_same(record, tmp_path):
    path = model_path("mnist8")
    made = notes.annotated(record, path)
    assert made == notes.annotated(record, path)
    proto = onnx.load_from_string(made)
    onnx.checker.check_model(proto, full_check=True)
    x = {"Input3": np.random.default_rng(0).random((1, 1, 28, 28), np.float32)}
    for name, y in ort_run(path, x).items():
        assert np.array_equal(ort_run(proto, x)[name], y)
    known = {node.name: {e.key: e.value for e in node.metadata_props} for node in proto.graph.node}
    told = known["Plus112"]
    assert told["gpu_runtime.layer"] == "Convolution110 + ReLU114" and told["gpu_runtime.time"].startswith("~3.")
    assert told["gpu_runtime.nodes"] == "Convolution110, Plus112, ReLU114" and told["gpu_runtime.verdict"] == "dense"
    assert all("gpu_runtime.verdict" in one for one in known.values())
    covered = {node for layer in record.plan.layers for node in layer.nodes}
    assert {name for name, one in known.items() if "gpu_runtime.layer" in one} == covered & set(known)
    text = next(node.doc_string for node in proto.graph.node if node.name == "Plus112")
    assert "conv_" in text and "dense is faster" in text
    assert {e.key: e.value for e in proto.metadata_props}["gpu_runtime.total"].startswith("~")


def test_nodes_without_names_get_those_of_the_plan_and_notes_are_not_doubled(tmp_path):
    proto = onnx.load(model_path("mnist8"))
    for node in proto.graph.node:
        node.name = ""
        node.doc_string = "mine"
        node.metadata_props.add(key="gpu_runtime.time", value="old")
        node.metadata_props.add(key="other", value="kept")
    onnx.save(proto, tmp_path / "m.onnx")
    engine = gr.build(tmp_path / "m.onnx", device=SPARSE_DEVICE)
    made = onnx.load_from_string(notes.annotated(engine.record, tmp_path / "m.onnx"))
    onnx.checker.check_model(made)
    onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    conv = next(node for node in made.graph.node if node.op_type == "Conv")
    keys = [e.key for e in conv.metadata_props]
    assert len(keys) == len(set(keys)) and "other" in keys and conv.doc_string.startswith("mine\n")
    assert next(e.value for e in conv.metadata_props if e.key == "gpu_runtime.time").startswith("~")


def test_build_and_inspect_write_the_same_files(files, cli):
    code, out, _ = cli("build tiny.onnx -o t.engine --device h200 --exportTrace a.json --exportOnnx a.onnx")
    assert code == 0 and "Wrote a.json (--exportTrace)\nWrote a.onnx (--exportOnnx)\n" in out
    code, out, _ = cli("inspect t.engine --exportTrace b.json --exportOnnx b.onnx --onnx tiny.onnx")
    assert code == 0 and out.endswith("Wrote b.json (--exportTrace)\nWrote b.onnx (--exportOnnx)\n")
    for name in ("json", "onnx"):
        assert (files / f"a.{name}").read_bytes() == (files / f"b.{name}").read_bytes()
    check_trace(json.loads((files / "a.json").read_text()))
    code, out, err = cli("inspect t.engine --json --exportTrace c.json")
    assert code == 0 and json.loads(out)["Layers"] and err == "Wrote c.json (--exportTrace)\n"


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("inspect tiny.engine --exportOnnx o.onnx", 2, "--exportOnnx and --onnx go together"),
        ("inspect tiny.engine --onnx tiny.onnx", 2, "--exportOnnx and --onnx go together"),
        ("inspect tiny.onnx --exportTrace o.json", 2, "need an engine, but tiny.onnx is a model: build one first"),
        ("inspect tiny.engine --exportOnnx o.onnx --onnx sparse.onnx", 1, "the engine was built from another model"),
        ("inspect tiny.engine --exportOnnx o.onnx --onnx none.onnx", 1, "none.onnx"),
        ("inspect tiny.engine --exportOnnx tiny.onnx --onnx tiny.onnx", 1, "is a file that this command reads"),
        ("build tiny.onnx --device h200 --exportTrace no/such/t.json", 1, "no/such"),
    ],
)
def test_what_cannot_be_exported_is_told(files, cli, line, code, told):
    before = {path.name for path in files.iterdir()}
    got, _, err = cli(line)
    assert got == code and told in err and {path.name for path in files.iterdir()} == before
