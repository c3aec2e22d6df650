"""`gpu-runtime triton-repo`: what it writes, and what it does not touch. tests/servers runs Triton on it."""

import shutil

import pytest

import gpu_runtime as gr
from cuda_kernels import device
from gpu_runtime.runtime.fields import Batch, TensorSpec
from gpu_runtime.serving import triton_repo
from tests.engines import build
from tests.reference_run import model, node

ONE = "only requests of exactly 1 rows, each run alone; an engine of a range of batches answers and joins others"
WORDS = "triton-repo tiny.engine -o repo --name net"


def test_the_model_and_its_next_version(cli, files):
    code, out, err = cli(WORDS)
    assert (code, err) == (0, "") and out == f"Wrote repo/net, version 1: {ONE}\n"
    folder = files / "repo" / "net"
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) == [
        "1",
        "1/model.engine",
        "1/model.py",
        "config.pbtxt",
    ]
    assert (folder / "1" / "model.engine").read_bytes() == (files / "tiny.engine").read_bytes()
    config = (folder / "config.pbtxt").read_text()
    for line in (
        'name: "net"',
        'backend: "python"',
        "max_batch_size: 1",
        'input [ { name: "x" data_type: TYPE_FP32 dims: [8, 6, 6] } ]',
        'output [ { name: "y" data_type: TYPE_FP32 dims: [8, 6, 6] } ]',
        "instance_group [ { count: 2 kind: KIND_GPU } ]",
        "  preferred_batch_size: [1]",
        'parameters { key: "emulate" value { string_value: "false" } }',
    ):
        assert line in config.splitlines()
    (folder / "config.pbtxt").write_text(config := config.replace("count: 2", "count: 3"))  # as its owner may
    assert cli(WORDS)[1] == "Wrote repo/net, version 2\n" and (folder / "2" / "model.py").is_file()
    shutil.rmtree(folder / "1")
    assert cli(WORDS)[1] == "Wrote repo/net, version 3\n"
    assert (folder / "config.pbtxt").read_text() == config
    assert [p.name for p in (files / "repo").iterdir()] == ["net"] and not list(folder.glob(".*"))


def test_only_the_kind_cpu_emulates(cli, files):
    assert cli(WORDS, "--kind cpu --instances 1")[0] == 0
    config = (files / "repo" / "net" / "config.pbtxt").read_text()
    assert "count: 1 kind: KIND_CPU" in config and '"emulate" value { string_value: "true" }' in config


def test_a_repository_may_be_new_and_the_folder_around_it_not(cli, files):
    code, _, err = cli(WORDS.replace("-o repo", "-o none/repo"))
    assert code == 1 and "none/repo: the model could not be written: No such file" in err and not (files / "none").exists()


def test_models_of_others_are_not_touched(cli, files):
    folder = files / "repo" / "net"
    folder.mkdir(parents=True)
    for text in (None, 'name: "net"\n'):
        if text:
            (folder / "config.pbtxt").write_text(text)
        code, out, err = cli(WORDS)
        assert code == 1 and "triton-repo did not write it: give another --name" in err
    assert [p.name for p in folder.iterdir()] == ["config.pbtxt"] and (folder / "config.pbtxt").read_text() == text


def test_a_version_has_the_interface_of_the_first(cli, files):
    assert cli(WORDS)[0] == 0
    other = model([node("Relu", "x", "z")], {"x": (1, 8, 6, 6)}, "z")
    build(files, other).save(files / "tiny.engine")
    code, _, err = cli(WORDS)
    assert code == 1 and "all versions have the same: give another --name" in err and '"z"' in err
    assert not (files / "repo" / "net" / "2").exists()


def test_what_cannot_be_served_is_refused(cli, files, monkeypatch):
    for name in ("../up", ".hidden", "a/b"):
        assert "--name: expected letters" in cli(f"triton-repo tiny.engine -o repo --name={name}")[2]
    (files / "file").write_text("")
    code, _, err = cli("triton-repo tiny.engine -o file --name net")
    assert code == 2 and "--output file: expected a folder, Triton's model repository, got a file" in err
    build(files, model([node("Transpose", "x", "y", perm=(1, 0))], {"x": (4, 8)}, "y")).save(files / "flat.engine")
    assert "first dimension" in cli("triton-repo flat.engine -o repo --name net")[2]
    monkeypatch.setattr(triton_repo, "_check_runs_here", lambda *_: (_ for _ in ()).throw(gr.EngineError("another GPU")))
    assert cli(WORDS)[2] == "error: another GPU\n" and not (files / "repo").exists()


def test_an_engine_for_another_gpu_is_refused_where_one_is_visible(files, monkeypatch):
    engine = gr.load(files / "tiny.engine")
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "current", lambda: device.named("rtx3090"))
    with pytest.raises(gr.EngineError, match="was built for H200 .* this device is sm_86"):
        triton_repo._check_runs_here(engine, "gpu")
    triton_repo._check_runs_here(engine, "cpu")
    monkeypatch.setattr(device, "current", lambda: engine.record.device)
    triton_repo._check_runs_here(engine, "gpu")


def test_every_type_of_an_input_has_a_type_of_tritons():
    from tactics.format import DTYPES

    found = {triton_repo._tensor(TensorSpec("x", (1, 2), dtype)).split()[4] for dtype in DTYPES.values()}
    assert found == {f"TYPE_{name}" for name in ("FP32", "FP16", "UINT8", "INT8", "INT32", "INT64", "BOOL")}


def test_the_requests_that_it_answers_are_told():
    assert "requests of exactly 1 or 4 rows" in triton_repo._served(Batch(4, (1, 4), (1, 4)))
    assert triton_repo._served(Batch(8, (2, 16))) == "requests of 1 to 16 rows, joined into runs of 2..16 rows"
