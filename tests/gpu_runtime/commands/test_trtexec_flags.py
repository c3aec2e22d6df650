"""Every option of trtexec, through the real parser: accepted, ignored and said so, or refused with the alternative."""

import json
import os

import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels import device as devices
from gpu_runtime.commands.build import build_command
from gpu_runtime.commands.trtexec_flags import LOOP, TRTEXEC_FLAGS
from tests.conftest import DIGITS
from tests.reference_run import model, node

OWN = {name for p in build_command.params if p.expose_value for name in p.opts}
# Accepted option -> a value with which only the model's absence is an error; FILE: any file to write.
# fmt: off
VALUES = {
    "--onnx": "nope.onnx", "--saveEngine": "FILE", "--timingCacheFile": "FILE", "--exportLayerInfo": "FILE",
    "--exportProfile": "FILE", "--shapes": "x:1x2", "--minShapes": "x:1x2", "--optShapes": "x:1x2", "--maxShapes": "x:1x2",
    "--inputIOFormats": "fp16:hwc8", "--outputIOFormats": "fp16:chw", "--memPoolSize": "workspace:64", "--sparsity": "enable",
    "--device": "h200", "--profile": "0", "--profilingVerbosity": "detailed", "--iterations": "10", "--loadInputs": "x:x.bin",
    "--exportTimes": "FILE", "--exportOutput": "FILE", "--builderOptimizationLevel": "2",
    "--precisionConstraints": "obey", "--layerPrecisions": "*:fp32", "--layerPrecision": "conv:fp32",
    "--layerOutputTypes": "conv:fp16",
}
# fmt: on
RESULTS = ("--loadInputs", "--dumpOutput", "--exportOutput", "--exportTimes")  # results that only an inference has
GONE = "error: nope.onnx: no such file; give the path of an ONNX model\n"


def forms(flag, value):
    return [f"{flag.name}={value}", f"{flag.name} {value}"] if flag.takes_value else [flag.name]


ACCEPTED = [f for f in TRTEXEC_FLAGS if f.verdict == "accepted" and f.name not in ("--help", "--loadEngine")]


OF_MEASURED = ("--iterations", "--timingCacheFile", "--errorOnTimingCacheMiss")  # of no use to a build that measures nothing


@pytest.mark.parametrize("flag", [f for f in ACCEPTED if f.sentence != LOOP or f.name == "--iterations"], ids=lambda f: f.name)
def test_accepted(flag, cli):
    assert flag.name in OWN or flag.sentence
    for form in forms(flag, VALUES.get(flag.name, "")):
        model_name = "" if flag.name == "--onnx" else " nope.onnx"
        code, out, err = cli(f"build {form}{model_name}")
        assert code == 1 and err.endswith(GONE) and ("ignored" in err) == (flag.name in OF_MEASURED), err


@pytest.mark.parametrize("flag", [f for f in ACCEPTED if f.sentence == LOOP and f.name != "--iterations"], ids=lambda f: f.name)
def test_of_inferences_where_none_is_run(flag, cli):
    """Without a GPU they are told, and refused where they ask for a result, which would not be there."""
    assert flag.name in OWN
    for form in forms(flag, VALUES.get(flag.name, "7")):
        name = "--streams" if flag.name == "--infStreams" else flag.name
        for more, why in (("", "none is run when times are predicted"), ("--skipInference", "--skipInference runs none")):
            code, _, err = cli(f"build {form} {more} --device h200 nope.onnx")
            if flag.name in RESULTS:
                assert code == 2 and f"Error: {name}: for timed inferences, but {why}: " in err, err
            else:
                assert code == 1 and (f"ignored: {name}: for timed inferences, but " in err) and err.endswith(GONE), err


@pytest.mark.parametrize("flag", [f for f in TRTEXEC_FLAGS if f.verdict == "ignored"], ids=lambda f: f.name)
def test_ignored_with_a_line_that_says_why(flag, cli):
    assert flag.name not in OWN
    for form in forms(flag, "7"):
        typed = form.replace(" ", "=")
        assert cli(f"build {form} nope.onnx")[::2] == (1, f"ignored: {typed}: {flag.sentence}\n{GONE}")


@pytest.mark.parametrize("flag", [f for f in TRTEXEC_FLAGS if f.verdict == "refused"], ids=lambda f: f.name)
def test_refused_with_the_alternative(flag, cli, tmp_path):
    assert flag.name not in OWN
    for form in forms(flag, "7"):
        code, out, err = cli(f"build {form} nope.onnx -o new.engine --sparsity=maybe")  # this error precedes all others
        assert (code, out) == (2, "")
        assert err.endswith(f"\nError: {form.replace(' ', '=')}: {flag.sentence.format(value='7')}\n")
    assert not list(tmp_path.iterdir())


def test_the_table_is_well_formed():
    names = [flag.name for flag in TRTEXEC_FLAGS]
    assert len(set(names)) == len(names) > 160
    for flag in TRTEXEC_FLAGS:
        assert flag.verdict == "accepted" or (flag.sentence and not flag.sentence.endswith(".") and "\n" not in flag.sentence)


def test_what_is_ignored_for_one_reason_is_one_line(cli):
    typed = "--warmUp=200 --duration=3 --avgRuns=10 --percentile 99 --avgTiming=8 --minTiming 2 --useCudaGraph --device h200"
    code, _, err = cli(f"build nope.onnx {typed}")
    lines = err.splitlines()
    assert code == 1 and len(lines) == 3 and lines[0].startswith("ignored: --avgTiming=8, --minTiming=2: every tactic")
    assert lines[1].startswith(
        "ignored: --warmUp, --duration, --avgRuns, --percentile: for timed inferences, but none is run when "
    )


def test_what_a_build_without_a_gpu_cannot_use_and_what_is_given_twice(cli):
    given = "--onnx=a.onnx --onnx=nope.onnx --errorOnTimingCacheMiss --iterations=50 --tuningTime=5 -q --fp16 --fp16"
    code, _, err = cli(f"build {given} --device h200")
    lines = err.splitlines()
    assert code == 1 and lines[0] == "ignored: all but the last --onnx: each is given more than once"
    assert lines[1].startswith("ignored: --iterations: for timed inferences, but none is run when times are predicted: ")
    assert lines[2:] == [
        "ignored: --errorOnTimingCacheMiss, --tuningTime: times are predicted, so none is measured or cached",
        GONE.strip(),
    ]


# ---- --loadEngine


def test_an_engine_that_was_built_before(files, cli, monkeypatch):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "the CUDA driver reports no device")
    code, out, err = cli("build --loadEngine=tiny.engine")
    assert (code, out) == (1, "") and "error: no GPU can be used here to time inferences: " in err
    assert err.endswith("gpu-runtime bench tiny.engine --predict prints the predicted time\n")
    written = "--exportLayerInfo=l.json --exportProfile=p.json --exportTrace=t.json"
    code, out, err = cli(f"build --loadEngine=tiny.engine --skipInference --dumpProfile --dumpLayerInfo --fp16 {written}")
    assert (code, err) == (0, "") and "Plan of tiny for H200" in out and "Wrote p.json (--exportProfile)" in out
    assert json.loads((files / "l.json").read_text())["Layers"][0]["Name"] and json.loads((files / "p.json").read_text())
    assert json.loads((files / "t.json").read_text())


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("tiny.onnx", "--loadEngine reads an engine and builds none: leave out MODEL"),
        ("--onnx=tiny.onnx --saveEngine=new.engine", "leave out --onnx, -o"),
        ("--device=a100", "--device: expected the number of a GPU here, got 'a100'"),
        ("--skipInference --exportTimes=t.json", "--exportTimes: for timed inferences, but --skipInference runs none"),
    ],
)
def test_what_does_not_go_with_an_engine(typed, words, files, cli):
    code, out, err = cli(f"build --loadEngine=tiny.engine {typed}")
    assert (code, out) == (2, "") and words in err and not (files / "new.engine").exists()


def test_options_of_a_build_are_ignored_with_an_engine(files, cli):
    code, _, err = cli("build --loadEngine=tiny.engine --skipInference --sparsity=enable --shapes=x:1x8x6x6 --avgTiming=8")
    assert code == 0 and err.splitlines() == [
        "ignored: --avgTiming=8: every tactic that may be the fastest is timed, until its times agree; "
        "--builderOptimizationLevel times fewer",
        "ignored: --sparsity: --loadEngine builds nothing",
    ]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("--loadEngin=x", ()),
        ("--loadengine=x", ()),
        ("--engine=x", ()),
        ("--saveEngin=x", ("--saveEngine",)),
        ("--exportProfil=x", ("--exportProfile",)),
        ("--shape=x", ("--shapes",)),
        ("--sparcity=x", ("--sparsity",)),
    ],
)
def test_a_typo_is_offered_no_file_to_overwrite(typed, offered, cli):
    code, _, err = cli(f"build {typed} nope.onnx")
    assert code == 2 and "No such option" in err
    assert all(name in err for name in offered)
    written = [
        name
        for name in ("--saveEngine", "--savePruned", "--exportProfile", "--exportLayerInfo", "--timingCacheFile")
        if name in err
    ]
    assert all(name[:6] == typed[:6] for name in written), err


@pytest.mark.parametrize("typed", ["-onnx=nope.onnx", "-saveEngine=new.engine", "-fp16", "-loadEngine=x"])
def test_one_dash_is_not_the_file_of_a_short_option(typed, cli, tmp_path):
    code, out, err = cli(f"build nope.onnx {typed}")
    assert (code, out) == (2, "") and err.endswith(f"Error: {typed}: expected two dashes before a name: -{typed}\n")
    assert not list(tmp_path.iterdir())


# ---- sizes


@pytest.mark.slow
def test_an_open_batch_is_one(files, cli):
    code, out, err = cli("build sparse.onnx -o one.engine --device h200")
    assert code == 0
    assert (
        err == "warning: the batch of input 'x' (Nx1x8x8) is dynamic and set to 1; for another batch give --shapes=x:8x1x8x8\n"
    )
    assert gr.load("one.engine").inputs[0].shape == (1, 1, 8, 8)
    with pytest.warns(UserWarning, match="is dynamic and set to 1"):
        assert gr.build(DIGITS / "digits_sparse.onnx", device="h200").inputs[0].shape == (1, 1, 8, 8)


def test_an_open_height_is_refused_with_an_example_that_works(files, cli):
    nodes = [node("MaxPool", "x", "a", kernel_shape=[2, 2]), node("Add", "a z", "y")]
    onnx.save(model(nodes, {"x": ("N", 3, "H", 9), "z": ("N", 1, 1, 1)}, "y"), "open.onnx")
    code, _, err = cli("build open.onnx --device h200")
    assert code == 1 and err.endswith(
        "open.onnx: the size of input 'x' (Nx3xHx9) is dynamic: give it, for example --shapes=x:1x3x224x9\n"
    )
    example = err.split()[-1]
    code, _, err = cli(f"build open.onnx --device h200 {example}")
    assert code == 0 and err.startswith("warning: the batch of input 'z' (Nx1x1x1) is dynamic and set to 1;")


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        "--minShapes=x:2x1x8x8 --optShapes=x:2x1x8x8 --maxShapes=x:2x1x8x8",
        "--optShapes=x:2x1x8x8",
        "--shapes=x:2x1x8x8 --maxShapes x:2x1x8x8",
        "--minShapes='x':2x1x8x8",
    ],
)
def test_equal_sizes_are_the_size(given, files, cli):
    assert cli(f"build sparse.onnx -o two.engine --device h200 {given}")[::2] == (0, "")
    assert gr.load("two.engine").inputs[0].shape == (2, 1, 8, 8)


@pytest.mark.parametrize("given", ["--minShapes=x:1x1x8x8 --maxShapes=x:8x1x8x8", "--shapes=x:2x1x8x8 --optShapes=x:4x1x8x8"])
def test_half_a_range_is_refused(given, files, cli):
    code, _, err = cli(f"build sparse.onnx -o two.engine {given}")
    assert code == 2 and "Error: input 'x': expected --minShapes, --optShapes and --maxShapes for a range of batches" in err
    assert cli("build sparse.onnx --optShapes=x:0")[2].count("--optShapes: expected name:1x3x224x224") == 1


RANGE = "--minShapes=x:{}x1x8x8 --optShapes=x:{}x1x8x8 --maxShapes=x:{}x1x{}x8"


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (RANGE.format(9, 8, 64, 8), 1, "error: x: expected 1 <= min <= opt <= max, got 9, 8 and 64 rows"),
        (
            RANGE.format(1, 8, 64, 9),
            1,
            "x: expected sizes that differ in the batch alone, got 1x1x8x8, 8x1x8x8, 64x1x9x8: inner",
        ),
        ("--profile=1 --shapes=x:1x1x8x8", 2, "--profile: expected the numbers 0 to 0, got 1"),
        (
            "--profile=0 --profile=0 --shapes=x:1x1x8x8",
            2,
            "--profile: expected a number of its own for each profile, from 0 on",
        ),
        ("--shapes=x:1x1x8x8 --profile=0", 2, "expected behind the --profile=N that they belong to"),
        (
            " ".join(f"--profile={i} --shapes=x:{i + 1}x1x8x8" for i in range(17)),
            1,
            "shapes: expected 16 plans at most, two for each range",
        ),
    ],
)
def test_ranges_that_have_no_answer(given, code, words, files, cli):
    got, _, err = cli(f"build sparse.onnx -o two.engine {given}")
    assert got == code and words in err and not (files / "two.engine").exists()


@pytest.mark.full
def test_a_range_and_two_profiles(files, cli):
    """The plan of another batch is shown by --shapes, in each command that shows one."""
    assert cli(f"build sparse.onnx -o range.engine --device h200 --sparsity=enable {RANGE.format(1, 8, 64, 8)}")[::2] == (0, "")
    shown = cli("inspect range.engine")[1]
    assert "x 8x1x8x8 (shown)" in shown and "A context takes the largest arena" in shown
    assert "x 64x1x8x8 (shown)" in cli("inspect range.engine --shapes 64")[1]
    assert json.loads(cli("inspect range.engine --json --shapes x:64x1x8x8")[1])["Points"][-1]["shown"]
    assert "range.engine: sparse, batch 64 of x 1..64x1x8x8: ~" in cli("explain range.engine --shapes 64")[1]
    assert ", batch 64 of x 1..64x1x8x8: ~" in cli("bench range.engine --predict --shapes 64")[1]
    assert cli("report range.engine -o r.html --shapes 64")[::2] == (0, "")
    for command in ("inspect {}", "explain {}", "bench {} --predict", "report {} -o r.html"):
        code, _, err = cli(f"{command.format('range.engine')} --shapes 65")
        assert code == 1 and err.endswith(
            "error: x: expected 1 to 64 rows of 1x8x8, got 65; more take an engine built with a larger --maxShapes\n"
        ), err
    both = f"--profile=0 {RANGE.format(1, 2, 4, 8)} --profile=1 --shapes=x:9x1x8x8"
    assert cli(f"build sparse.onnx -o both.engine --device h200 {both}")[::2] == (0, "")
    assert "x 9x1x8x8 (shown)" in cli("inspect both.engine --shapes x:9x1x8x8")[1]


# ---- --device=N


def test_the_gpu_of_a_number(cli, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code, _, err = cli("build nope.onnx --device=0")
    if code == 2:  # no GPU here
        assert "--device: GPU number 0 cannot be used here: " in err and "CUDA driver " in err and "give a name to plan" in err
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "")
    devices.only(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1234")
    devices.only(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1234"
    with pytest.raises(ValueError, match="number 1 cannot be used here: CUDA_VISIBLE_DEVICES leaves 1; give a name"):
        devices.only(1)
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "the CUDA driver reports no device")
    with pytest.raises(ValueError, match="number 0 .*reports no device"):
        devices.only(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1234"


@pytest.mark.parametrize("other", ["--timingCacheFile=t", "--errorOnTimingCacheMiss"])
def test_no_timing_cache_and_one(cli, other):
    code, _, err = cli(f"build --noBuilderCache {other} nope.onnx")
    assert code == 2 and "--noBuilderCache reads and writes no timing cache: " in err
