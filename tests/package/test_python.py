"""What the commands can, Python can: the same texts and JSON, short representations, names that nothing shadows, a logger."""

import json
import logging
import subprocess
import sys
import types

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.frontend.files import source
from tests.conftest import DIGITS
from tests.reference_run import model, node

PATH = DIGITS / "digits_sparse.onnx"
SHAPES = {"x": (32, 1, 8, 8)}
MOST_REPR = 600  # characters


@pytest.fixture(scope="module")
def engine() -> gr.Engine:
    return gr.build(PATH, sparsity="enable", device="rtx3090", shapes=SHAPES)


@pytest.fixture(scope="module")
def plans():
    return gr.plan(PATH, ["a100", "l4"], shapes=SHAPES)


@pytest.fixture
def file(engine, tmp_path) -> str:
    engine.save(tmp_path / "e.engine")
    return "e.engine"


@pytest.mark.full
def test_names_are_the_same_after_every_module_was_imported(tmp_path):
    """A module of the same name as a function would take its place when it is imported first."""
    code = (
        "import importlib, pkgutil, sys, gpu_runtime as gr\n"
        "for m in pkgutil.walk_packages(gr.__path__, 'gpu_runtime.'):\n"
        "    others = 'polygraphy_runner', 'torch_backend', 'ops.torch', 'serving.ray', 'serving.triton'\n"
        "    if not m.name.endswith(('__main__', *others)):\n"
        "        importlib.import_module(m.name)\n"
        "assert [n for n in gr.__all__ if not callable(getattr(gr, n))] == []\n"
        f"path, options = {str(PATH)!r}, {{'shapes': {SHAPES}}}\n"
        "engine = gr.build(path, device='a100', **options)\n"
        "engine.save('e.engine'); gr.load('e.engine'); gr.InferenceSession('e.engine'); engine.explain(); engine.what_if({})\n"
        "gr.plan(path, 'a100', **options); gr.prune(path, device='none'); gr.compare(path, engine)\n"
        "engine.report('r.html'); assert isinstance(gr.ModelError('m'), ValueError) and gr.installed_version()"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_records_are_what_the_commands_print(engine, plans, file, cli):
    assert json.loads(cli(f"explain {file} --json")[1]) == jsoned(engine.explain())
    assert str(engine.explain()) == cli(f"explain {file}")[1]
    assert engine.explain().to_dict()["library"]["us"] == engine.plan.solution.rivals.library.us
    layer = engine.explain().layers[0].layer
    assert json.loads(cli(f"explain {file} {layer} --json")[1]) == jsoned(engine.explain(layer))
    dense = engine.sparsity.picked[0]
    assert json.loads(cli(f"explain {file} --what-if {dense}=dense --json")[1]) == jsoned(engine.what_if({dense: "dense"}))
    command = f"plan {PATH} --devices a100,l4 --shapes x:32x1x8x8"
    assert json.loads(cli(f"{command} --json")[1]) == jsoned(plans) and cli(command)[1] == str(plans)
    assert [p.device.name for p in plans] == ["a100", "l4"]
    with pytest.raises(ValueError, match="batches: a page draws times by batch"):
        plans.report("p.html")


def jsoned(record) -> object:
    return json.loads(json.dumps(record.to_dict()))


@pytest.mark.slow
def test_pages_are_those_of_the_commands(engine, file, cli, tmp_path):
    cli(f"report {file} -o a.html")
    engine.report("b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    cli(f"plan {PATH} --devices a100 --batches 1,8 --report c.html")
    gr.plan(PATH, "a100", [1, 8]).report("d.html")
    assert (tmp_path / "c.html").read_bytes() == (tmp_path / "d.html").read_bytes()


@pytest.mark.slow
def test_pruning_and_comparing_give_what_the_commands_print(engine, file, cli, tmp_path):
    dense = DIGITS / "digits_dense.onnx"
    result = gr.prune(dense, layers="block1/*", device="a100")
    result.save("p.onnx")
    assert json.loads(cli(f"prune {dense} -o q.onnx --layers block1/* --device a100 --json")[1]) == jsoned(result)
    assert cli(f"prune {dense} -o q.onnx --layers block1/* --device a100")[1].startswith(str(result))
    assert (tmp_path / "p.onnx").read_bytes() == (tmp_path / "q.onnx").read_bytes()
    found = gr.compare(PATH, engine, seed=3)
    code, out, _ = cli(f"compare {PATH} {file} --seed 3 --json")
    assert code == 0 and json.loads(out) == jsoned(found) and cli(f"compare {PATH} {file} --seed 3")[1].endswith(str(found))
    assert len(repr(result)) < MOST_REPR and len(repr(found)) < MOST_REPR


def test_models_may_be_in_memory(engine, plans):
    proto = onnx.load(PATH)
    assert gr.plan(proto, "a100", shapes=SHAPES)[0].solution == plans[0].solution
    assert gr.prune(PATH.read_bytes(), device="none").to_dict() == gr.prune(PATH, device="none").to_dict()
    assert gr.compare(PATH.read_bytes(), engine).to_dict() == gr.compare(PATH, engine).to_dict()


def test_representations_are_short(engine, plans):
    dense = engine.sparsity.picked[0]
    shown = [engine.sparsity, engine.sparsity.rows[0], engine.plan, engine.record, engine.plan.solution, engine.explain()]
    for record in (*shown, engine.what_if({dense: "dense"}), plans, plans[0], engine.plan.range, engine.plan.choices):
        assert len(repr(record)) < MOST_REPR and "\n" not in repr(record), type(record)
        assert json.dumps(record.to_dict())


def test_what_nothing_grants_is_a_value_error(engine):
    for call in (lambda: engine.explain("conv99"), lambda: engine.what_if({"conv99": "dense"})):
        with pytest.raises(ValueError, match="'conv99' is not a layer"):
            call()
    for wishes in ({1: 2}, {"conv99": 2}, "conv99", None):
        with pytest.raises(TypeError, match="wishes: expected layers and their kinds or formats, {'conv1': 'sparse'}, got "):
            engine.what_if(wishes)
    with pytest.raises(TypeError, match="other: expected an Engine or None, got str"):
        engine.report("r.html", "other.engine")
    for devices in (None, 3, ["l4", 3]):
        with pytest.raises(ValueError, match="unknown device (None|'?3'?): expected one of a10, "):
            gr.plan(PATH, devices)


def test_the_logger_has_what_the_commands_print(file, cli, caplog):
    with caplog.at_level(logging.INFO, "gpu_runtime"):
        gr.build(PATH, sparsity="enable", device="rtx3090", shapes=SHAPES)
    told = [r.getMessage() for r in caplog.records]
    printed = cli(f"build {PATH} --sparsity=enable --device rtx3090 --shapes x:32x1x8x8")[1]
    assert told[0].startswith("reading ") and " ".join(told[-1].split()) in " ".join(printed.split())
    assert not [text for text in told if text.startswith("times of layers")]  # each is DEBUG
    assert cli(f"inspect {file}")[2] == "" and not logging.getLogger("gpu_runtime").level


def test_pruning_tells_the_logger_each_stage_once(caplog):
    with caplog.at_level(logging.INFO, "gpu_runtime"):
        result = gr.prune(DIGITS / "digits_dense.onnx", device="a100", shapes=SHAPES)
    told = [r.getMessage() for r in caplog.records]
    assert len(set(told)) == len(told) and told[-1] == str(result)
    assert not [text for text in told if "\n" in text and text != str(result)]  # no table of the plan
    assert any(text.startswith("choosing the plan of") for text in told)


def test_an_exported_program_is_a_model(monkeypatch):
    """torch is not needed for it: a stand-in has what torch.export and torch.onnx.export have."""
    proto = model([node("Conv", "x w", "y")], {"x": (1, 8, 5, 5)}, "y", {"w": np.ones((8, 8, 1, 1), np.float32)})
    torch = types.ModuleType("torch")

    class Module:
        pass

    class ExportedProgram:
        graph_module = types.SimpleNamespace(meta={})

    class Exported:
        model_proto = proto

    def export(*given, **options):
        assert len(given) == 1 and isinstance(given[0], ExportedProgram) and options["dynamo"]
        return Exported

    torch.nn, torch.export, torch.onnx = (types.SimpleNamespace() for _ in range(3))
    torch.nn.Module, torch.export.ExportedProgram, torch.onnx.export = Module, ExportedProgram, export
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert source.source_of(ExportedProgram()).data == proto.SerializeToString()
    assert gr.build(ExportedProgram(), device="a100").plan.layers
    with pytest.raises(ValueError, match="example_inputs: only a torch.nn.Module needs them"):
        gr.build(ExportedProgram(), example_inputs=())
