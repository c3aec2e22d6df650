"""The command line as its users meet it: what they type, what they read, and what is on disk afterwards.

Builds plan for a named device, so that nothing is measured; runs are emulated. `cli` runs the program inside this
process, `program` starts it, without installation, where that matters: imports, limits, signals, pipes.
"""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime import cli as command_line
from gpu_runtime.commands.options import parse_pools
from tests.conftest import DIGITS, ROOT, without_progress
from tests.engines import SPARSE_DEVICE
from tests.reference_run import model, node, ort_run, relative_error

ENV = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
SHAPES = "--shapes=x:8x1x8x8"
TENSORRT = (
    "build --onnx=sparse.onnx --saveEngine=sparse.engine --sparsity=enable --fp16 --verbose --separateProfileRun "
    "--profilingVerbosity=detailed --dumpProfile --dumpLayerInfo --exportProfile=li_profile.json "
    "--exportLayerInfo=li_layinfo.json"
)


LISTS = "Layers eligible for sparse math", "TRT inference plan picked sparse implementation for layers"


def start(args: str, folder: Path, **options) -> subprocess.Popen:
    line = [sys.executable, "-m", "gpu_runtime", *args.split()]
    return subprocess.Popen(line, cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def program(args: str, folder: Path, **options) -> tuple[int, str, str]:
    """`python -m gpu_runtime` in a process of its own -> (exit code, stdout, stderr)."""
    with start(args, folder, **options) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, without_progress(err)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


# ---- options and their results


def test_help_answers_at_once(tmp_path):
    """CPU seconds of the whole process, the best of a few: the wall clock of a busy machine says little."""
    best = 9.0
    for args in ("--help", "build --help", "--help"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code, out, err = program(args, tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert (code, err) == (0, "") and out.startswith("Usage: gpu-runtime")
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert best < 0.3
    heavy = {"onnx", "onnx_ir", "onnxscript", "onnxruntime", "cupy", "scipy", "rich", "numpy", "cuda"}
    source = (
        f"import sys; from gpu_runtime.cli import main\ntry: main(['build', '-h'])\nfinally: print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", source], env=ENV, cwd=tmp_path, capture_output=True, text=True)
    assert "--sparsity [disable|enable|force]" in done.stdout and done.stdout.endswith("\nset()\n")


def test_every_command_has_help(cli):
    for name in ("build", "run", "inspect", "explain", "inspect-sparsity"):
        code, out, _ = cli(name, "-h")
        assert code == 0 and out.startswith(f"Usage: gpu-runtime {name} [OPTIONS]")
        assert name in cli("--help")[1]


@pytest.mark.slow
def test_the_tensorrt_command_its_short_form_and_the_run(files, cli, monkeypatch):
    code, out, err = program(f"{TENSORRT} {SHAPES}", files)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("Planning for H200 SXM 141GB (sm_90a), the default where no GPU is found (another with --dev")
    assert " ".join(out.split()[:30]).split("; ")[1].startswith("times are predicted(h200), nothing is measured")
    assert "[time] block1/conv1 + block1/relu1\n" in err
    eligible, picked = (
        [name for name in re.search(rf"^\(Sparsity\) {text}:(.*)$", out, re.M)[1].strip().split(", ") if name] for text in LISTS
    )
    assert len(eligible) == 15 and eligible[0] == "block1/conv1" and set(picked) <= set(eligible)
    assert "=== Profile (1 iterations ) === predicted times, nothing was run\n" in out
    assert re.search(r"^ 0  stem/conv \+( stem/relu)? +conv ", out, re.M)  # --dumpLayerInfo
    assert re.fullmatch(r"Wrote sparse.engine: \d+ bytes, \d+ kernel launches, ~\d+\.\d\d us, predicted\(h200\)", lines[-2])
    assert lines[-1] == "gpu-runtime explain sparse.engine [LAYER] explains each layer"
    assert "\nWrote li_profile.json (--exportProfile)\nWrote li_layinfo.json (--exportLayerInfo)\n" in out

    info, profile = (json.loads((files / f"li_{name}.json").read_text()) for name in ("layinfo", "profile"))
    assert info["Bindings"] == ["x", "logits"]
    assert profile[0] == {"count": 1, "batch": info["Batch"], "predicted": True}
    assert [r["name"] for r in profile[1:]] == [layer["Name"] for layer in info["Layers"]]
    assert all(list(r) == ["name", "timeMs", "averageMs", "medianMs", "percentage"] for r in profile[1:])
    names = [layer["Name"].split(" // ") for layer in info["Layers"] if layer.get("SparsityChosen")]
    chosen = [" || ".join(part.split(" + ")[0] for part in parts) for parts in names]  # names as viewers can draw them
    assert chosen == picked

    monkeypatch.setattr(
        sys, "argv", ["build-engine", *f"sparse.onnx -o short.engine --sparsity=enable --device h200 {SHAPES}".split()]
    )
    command_line.build_engine()
    assert (files / "short.engine").read_bytes() == (files / "sparse.engine").read_bytes()
    code, out, err = cli("inspect sparse.engine --json")
    assert (code, err) == (0, "") and json.loads(out) == info

    heldout = np.load(DIGITS / "heldout.npz")
    np.save(files / "digits.npy", heldout["x"][:8])
    code, out, err = program("run sparse.engine --input x=digits.npy --output out.npz", files)
    assert (code, err) == (0, "") and out.startswith(
        "Ran sparse.engine on the CPU emulator; wrote out.npz\n  logits: float32 8x10, "
    )
    got = np.load(files / "out.npz")
    assert got.files == ["logits"] and got["logits"].dtype == np.float32
    assert np.array_equal(got["logits"].argmax(1), heldout["y"][:8])
    with gr.load(files / "sparse.engine").context(device="emulator") as ctx:
        assert np.array_equal(got["logits"], ctx.run({"x": heldout["x"][:8]})["logits"])


@pytest.mark.slow
def test_the_log_and_layer_information_name_the_same_sparse_layers(files, cli):
    line = f"build sparse.onnx -o s.engine --sparsity=enable --device {SPARSE_DEVICE} --exportLayerInfo=s.json "
    line += SHAPES.replace("8x1", "32x1")
    code, out, _ = cli(line)
    eligible, picked = (re.search(rf"^\(Sparsity\) {text}: (.*)$", out, re.M)[1].split(", ") for text in LISTS)
    assert code == 0 and set(picked) <= set(eligible) and len(eligible) == 15
    layers = json.loads((files / "s.json").read_text())["Layers"]
    chosen = [layer["Name"].split(" || ") for layer in layers if layer.get("SparsityChosen")]
    assert [part.split(" + ")[0] for parts in chosen for part in parts] == picked
    heldout = np.load(DIGITS / "heldout.npz")
    with gr.load(files / "s.engine").context(device="emulator") as ctx:
        assert np.array_equal(ctx.run({"x": heldout["x"][:32]})["logits"].argmax(1), heldout["y"][:32])
        assert sum(stats.mma_sp > 0 for stats in ctx.gpu.stats) == len(chosen)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("workspace:64", {"workspace": 64 << 20}),
        ("workspace:1.5G", {"workspace": 3 << 29}),
        ("Workspace:512KiB", {"workspace": 512 << 10}),
        ("activations:100B", {"activations": 100}),
        ("activations:64,workspace:0", {"activations": 64 << 20, "workspace": 0}),
        ("workspace:64 activations:1.5", {"workspace": 64 << 20, "activations": 3 << 19}),
        ("", {}),
    ],
)
def test_pools(text, nbytes):
    assert parse_pools(text.split()) == nbytes


@pytest.mark.full
def test_activations_take_no_more_than_the_command_line_says(files, cli):
    def build(limit: str) -> tuple[int, str, str]:
        return cli(f"build sparse.onnx -o m.engine --device=h200 {SHAPES} {limit}")

    assert build("")[0] == 0
    whole = gr.load(files / "m.engine").plan.memory.activation_bytes
    code, out, err = build(f"--memPoolSize=workspace:64 --memPoolSize=activations:{whole - 1}B")
    engine = gr.load(files / "m.engine")
    assert code == 0 and engine.plan.memory.activation_bytes < whole and "pieces" in out
    assert engine.record.flags.workspace == 64 << 20 and engine.record.flags.activations == whole - 1
    code, out, _ = cli("inspect m.engine")
    assert code == 0 and f"--memPoolSize=workspace:64,activations:{whole - 1}B" in " ".join(out.split())


@pytest.mark.slow
def test_plan_for_several_devices(files, cli):
    code, out, err = cli(f"plan sparse.onnx --devices a100,RTX4090,h200 {SHAPES.replace('8x1', '2048x1')}")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 120 and out.isascii()
    assert re.search(r"\nlayer +a100 +rtx4090 +h200\n", out) and re.search(r"\nblock1/conv1 +sparse +sparse +sparse\n", out)
    assert re.search(r"\nstem/conv +C not 4n +C not 4n +C not 4n\n", out) and "were measured" not in out
    assert re.search(r"\nblock2/proj: dense on a100 \(sparse kernel 1.02x; bound by [\s\S]*?sparse on rtx4090", out)
    assert "rtx4090: Ada whitepaper" in out and "Assumed: launch_us" in " ".join(out.split())
    limits = out.partition("dense kernels limited")[2].partition("A cell:")[0]
    assert len(re.findall(r"\d+ [A-Za-z]", limits.splitlines()[0])) == 3, limits
    found = json.loads(cli(f"plan sparse.onnx --devices l4,b200 {SHAPES} --json")[1])
    assert [p["device"]["name"] for p in found] == ["l4", "b200"] and found[1]["timing"]["kind"] == "predicted"
    assert all(p["sparsity"]["summary"]["eligible"] == 15 for p in found)
    assert "; tensor work is predicted at 60 to 75 % of the boost clock" in " ".join(
        cli(f"plan sparse.onnx --devices l4 {SHAPES}")[1].split()
    )
    code, out, err = cli("plan sparse.onnx --devices a100,volta")
    assert code == 2 and "--devices: unknown device 'volta': expected one of a10, a100" in err


@pytest.mark.slow
def test_plan_for_several_devices_with_another_risk(files, cli):
    """The more probable it must be that a sparse kernel is the faster one, the fewer are taken."""
    picked = []
    for risk in (0.5, 0.6, 0.95):
        (found,) = json.loads(cli(f"plan sparse.onnx --devices h200 --risk {risk} --json {SHAPES.replace('8x1', '2048x1')}")[1])
        assert found["risk"] == risk
        picked.append(found["sparsity"]["summary"]["picked"])
    assert picked[0] >= picked[1] > picked[2]
    out = " ".join(cli(f"plan sparse.onnx --devices h200 --risk 0.95 {SHAPES.replace('8x1', '2048x1')}")[1].split())
    assert "sparse kernels are taken where P(faster) is 95 % or more (--risk)" in out and "uncertain" in out
    code, _, err = cli("plan sparse.onnx --devices h200 --risk 1")
    assert code == 2 and "--risk" in err and "0.5<=x<1" in err


@pytest.mark.slow
def test_explain(files, cli):
    """Everything from the engine alone: the model may be gone."""
    assert cli(f"build sparse.onnx -o e.engine --sparsity=enable --device h200 {SHAPES}")[0] == 0
    (files / "sparse.onnx").unlink()
    code, out, err = cli("explain e.engine stem block1/conv1")
    assert (code, err) == (0, "") and out.count("\n  why ") == 2 and "\nblock1/conv1   " in out
    assert re.search(r"not_eligible: channels_not_multiple_of_4\n  runs .*\n  why +Its number of input channels", out)
    assert cli("explain e.engine")[1].count("\n  why ") == 15  # block4/conv1 || block4/proj is one
    found = json.loads(cli("explain e.engine block1/conv1 --json")[1])
    assert found["timing"] == "predicted(h200)" and [r["layer"] for r in found["layers"]] == ["block1/conv1"]
    assert found["layers"][0]["sentence"] and found["summary"]["eligible"] == 15
    code, out, err = cli("explain e.engine --what-if stem/conv=hwc8 --what-if block1/conv1=dense")
    assert (code, err) == (0, "") and out.startswith("What if stem/conv=hwc8, block1/conv1=dense? ")
    assert "reformat of x added" in out
    assert json.loads(cli("explain e.engine --json --what-if stem/conv=hwc8")[1])["reformats_new"][0]["tensor"] == "x"
    code, out, err = cli("explain e.engine block{1..2}/conv1 head* --what-if stem/conv=hwc8")
    layers = re.findall(r"^(\S+)   \S+: \w+\n  runs +~\d+\.\d\d us fp16:hwc8->.* % of the plan\n  why", out, re.M)
    assert (code, err) == (0, "") and layers == ["block1/conv1", "block2/conv1", "head/gemm"]
    assert out.index("head/gemm") < out.index("\nWhat if stem/conv=hwc8? ")
    both = json.loads(cli("explain e.engine stem --json --what-if stem/conv=hwc8")[1])
    assert [r["layer"] for r in both["layers"]] == ["stem/conv"] and both["what_if"]["reformats_new"]
    for args, sentence in (
        ("conv1", "'conv1' is part of the names of 5 layers: block1/conv1, "),
        ("nope", "'nope' is not a layer with weights: expected one of stem/conv"),
        ("blok1/conv1", "'blok1/conv1' is not a layer with weights: did you mean block1/conv1, "),
        ("head/pool", "'head/pool' has no weights that could be sparse: `gpu-runtime inspect` shows its tactic"),
        ("--what-if stem/conv=sparse", "stem/conv=sparse: no sparse kernel can run this layer"),
    ):
        code, out, err = cli(f"explain e.engine {args}")
        assert code == 1 and out == "" and err.startswith("error: ") and sentence in err
    for args in ("--what-if stem/conv", "--what-if a=dense --what-if a=sparse"):
        assert cli(f"explain e.engine {args}")[0] == 2


@pytest.mark.parametrize(("name", "sm"), [("a100", "sm_80"), ("rtx4090", "sm_89"), ("H200", "sm_90a")])
def test_named_devices(files, cli, name, sm):
    code, out, err = cli(f"build tiny.onnx -o new.engine --device {name}")
    assert (code, err) == (0, "")
    assert re.match(rf"Planning for .*\({sm}\); times are predicted\({name.lower()}\), nothing is measured\n", out)
    code, out, _ = cli("inspect new.engine")
    assert code == 0 and f"({sm}, " in out and f"times    predicted({name.lower()})" in out
    assert "(Sparsity) Layers eligible for sparse math:\n" in out and "--sparsity=disable" in out
    code, out, _ = cli("run new.engine --input x=x.npy --output y.npz --emulate")
    assert code == 0
    expected = ort_run("tiny.onnx", {"x": np.load("x.npy")})["y"]
    assert relative_error(np.load("y.npz")["y"], expected) < 2e-3


def test_without_an_engine_file(files, cli):
    before = contents(files)
    code, out, err = cli("build tiny.onnx --device h200 --timingCacheFile=times.jsonl --useCudaGraph --separateProfileRun")
    assert code == 0 and out.endswith("No engine was written: give -o FILE to write one\n")
    assert err == "ignored: --timingCacheFile: times are predicted, so none is measured or cached\n"
    assert contents(files) == before


@pytest.mark.parametrize("verbosity", ["layer_names_only", "none"])
def test_less_layer_information(files, cli, verbosity):
    assert cli(f"build tiny.onnx --device h200 --exportLayerInfo=i.json --profilingVerbosity={verbosity}")[0] == 0
    info = json.loads(Path("i.json").read_text())
    assert info["Bindings"] == ["x", "y"] and (len(info["Layers"]) > 1) == (verbosity != "none")
    assert all(isinstance(name, str) for name in info["Layers"])


def test_force_and_the_model_it_saves(files, cli):
    Path("pruned.onnx").touch()
    code, out, err = cli("build tiny.onnx -o f.engine --device h200 --sparsity=force --savePruned=pruned.onnx")
    assert (code, err) == (0, "") and "--sparsity=force set the two smallest of each four weights to zero in 2 init" in out
    assert (
        "(Sparsity) Layers eligible for sparse math: first, second\n" in out and "\nWrote pruned.onnx (--savePruned)\n" in out
    )
    code, out, _ = cli("inspect-sparsity pruned.onnx")
    assert code == 0 and out.endswith(
        "\n2:4: all 2 layers that can have the pattern have it; build with --sparsity=enable to consider sparse kernels\n"
    )
    assert cli("run f.engine --input x=x.npy --output y.npz --emulate")[0] == 0
    expected = ort_run("pruned.onnx", {"x": np.load("x.npy")})["y"]
    assert relative_error(np.load("y.npz")["y"], expected) < 2e-3
    code, out, _ = cli("build pruned.onnx --device h200 --sparsity=force --savePruned=again.onnx")
    assert code == 0 and "\n--sparsity=force changed nothing: all weights that can have the 2:4 pattern have it\n" in out
    assert Path("again.onnx").read_bytes() == Path("pruned.onnx").read_bytes()


@pytest.mark.slow
def test_an_unstructured_network_is_told_from_a_2_4_one(files, cli):
    stored = onnx.load("sparse.onnx")
    rng = np.random.default_rng(0)
    for t in stored.graph.initializer:
        w = onnx.numpy_helper.to_array(t)
        if w.ndim > 1:  # 80 % zeros, anywhere
            t.CopyFrom(
                onnx.numpy_helper.from_array(
                    np.where(rng.random(w.shape) < 0.8, 0, rng.normal(size=w.shape)).astype(w.dtype), t.name
                )
            )
    onnx.save(stored, "anywhere.onnx")
    code, out, err = cli("inspect-sparsity anywhere.onnx")
    assert (code, err) == (0, "")
    verdict = (
        r"\nsparse \((?:79|80)\.\d % zeros\) but not 2:4: (\d\d\.\d\d) % of groups fit, and a layer runs sparse only if all"
    )
    share = re.search(verdict, out)
    assert 96 < float(share[1]) < 98.5  # P(at most 2 of 4) = 97.28 %
    assert len(re.findall(r"^block.* % +9\d\.\d\d % +\d\.\d\d %  sparse, not 2:4$", out, re.M)) == 14
    assert re.search(
        r"^stem/conv +64x1x3x3 +\d\d\.\d\d % +- +-  the input channels \(axis 1\) are not a multiple of 4$", out, re.M
    )
    assert max(map(len, out.splitlines())) <= 120
    code, out, _ = cli("inspect-sparsity sparse.onnx")
    assert code == 0 and len(re.findall(r"^.* 100\.00 % +0\.00 %  2:4$", out, re.M)) == 15
    assert "\n2:4: all 15 layers that can have the pattern have it;" in out

    rows = json.loads(cli("inspect-sparsity anywhere.onnx --json")[1])
    assert rows["summary"] == share[0].strip() + " of its groups do"
    row = next(r for r in rows["layers"] if r["layer"] == "head/gemm")
    assert (row["op"], row["shape"], row["groups"], row["verdict"]) == ("Gemm", [10, 256], 640, "sparse, not 2:4")
    code, out, _ = cli(f"build anywhere.onnx --device h200 --sparsity=enable {SHAPES}")
    assert code == 0 and "(Sparsity) Layers eligible for sparse math:\n" in out and "pattern_violation" in out


def test_sparsity_of_partly_pruned_and_computed_weights(files, cli):
    """One weight 2:4, one dense and shared, one computed, one grouped; an operator that no engine can have."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=(8, 8, 1, 1))
    half[:, ::2] = 0
    w = {
        "half": half,
        "full": rng.normal(size=(8, 8, 1, 1)),
        "grouped": rng.normal(size=(8, 4, 1, 1)),
        "flat": rng.normal(size=64),
    }
    w = {k: a.astype(np.float32) for k, a in w.items()} | {"shape": np.int64([8, 8, 1, 1])}
    nodes = [
        node("Conv", "x half", "a"),
        node("Conv", "a full", "b"),
        node("Conv", "b full", "c"),
        node("NonZero", "c", "nz"),
        node("Neg", "flat", "flipped"),
        node("Reshape", "flipped shape", "made"),
        node("Conv", "c made", "d"),
        node("Conv", "d grouped", "y", group=2),
    ]
    onnx.save(model(nodes, {"x": ("N", 8, "H", "W")}, "y", w), "mixed.onnx")
    code, out, _ = cli("inspect-sparsity mixed.onnx")
    assert code == 0
    assert [line.split()[0] + " " + line.split("  ")[-1] for line in out.splitlines()[4:9]] == [
        "a 2:4",
        "b dense",
        "c dense",
        "d computed by Reshape made, not stored",
        "y dense",
    ]
    assert out.endswith(
        "\npartly 2:4: 1 of the 4 layers that can be 2:4 are 2:4; overall 14.3 % zeros, 28.57 % of groups fit\n"
        "--sparsity=force would prune 2 initializers, which would lose 12.68 % of their energy\n"
    )


@pytest.mark.slow
def test_output_cut_off_by_a_pipe(files):
    """`build-engine ... | head -1` still writes its engine, and does not complain."""
    with start("build tiny.onnx -o new.engine --device h200", files) as process:
        assert process.stdout.readline().startswith("Planning for H200")
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait() == 0
    assert gr.load(files / "new.engine").record.model.name == "tiny"


@pytest.mark.parametrize(("error", "expected"), [(errno.EPIPE, 0), (errno.ENOSPC, 1)])
def test_files_are_written_whatever_becomes_of_stdout(files, cli, monkeypatch, error, expected):
    def full(*_, err=False, **__):
        if not err:
            raise OSError(error, os.strerror(error))
        said.append(_[0])

    said = []
    monkeypatch.setattr(click, "echo", full)
    assert cli("build tiny.onnx -o new.engine --device h200 --verbose --dumpLayerInfo")[0] == expected
    assert gr.load(files / "new.engine").record.model.name == "tiny"
    problem = f"error: standard output cannot be written: {os.strerror(error)}; already written: {files / 'new.engine'}"
    assert [text for text in said if "error" in text] == [problem] * expected
    assert cli("explain new.engine")[0] == expected
