"""Bad input at the command line: a clear message, exit code not 0, nothing written or overwritten."""

import importlib.util
import pickle
import resource
import signal
import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime import cli as command_line
from gpu_runtime import engine as engines
from gpu_runtime import engine_header
from gpu_runtime.commands import targets
from tests.gpu_runtime.test_cli import ENV, SHAPES, contents, program, start
from tests.reference_run import model, node

OLD = {
    "engine": bytes(8) + b"{the old engine",
    "json": b"the old JSON",
    "onnx": b"\x08\x07\x12the old model",
    "npz": b"PK\x03\x04",
}


def make_old(folder):
    for suffix, data in OLD.items():
        (folder / f"old.{suffix}").write_bytes(data)


@pytest.fixture
def refused(files, cli):
    """refused(args, *texts): the command fails with those texts on stderr and leaves every file as it was."""
    make_old(files)
    (files / "folder").mkdir()
    (files / "link.engine").symlink_to("old.engine")

    def check(args: str, *texts: str, code: int = 1) -> str:
        before = contents(files)
        got, _, err = cli(args)
        assert got == code, err
        for text in texts:
            assert text in err
        assert contents(files) == before
        return err

    return check


def unsupported() -> onnx.ModelProto:
    nodes = [node("NonZero", "x", "a", name="nz"), node("Relu", "a", "b"), node("Det", "b", "y", name="last")]
    return model(nodes, {"x": (1, 8, 6, 6)}, "y")


OUTPUTS = "-o old.engine --exportLayerInfo=old.json --sparsity=force --savePruned=old.onnx --device h200"


def test_models_that_cannot_be_read(files, refused):
    data = (files / "sparse.onnx").read_bytes()
    (files / "text.onnx").write_text("not a model\n" * 20)
    (files / "torn.onnx").write_bytes(data[: len(data) // 2])
    (files / "empty.onnx").write_bytes(b"")
    refused(f"build nope.onnx {OUTPUTS}", "error: nope.onnx: no such file; give the path of an ONNX model\n")
    refused(f"build folder {OUTPUTS}", "error: folder: cannot be read: expected a file, got a folder\n")
    for name in ("text", "torn", "empty"):
        refused(f"build {name}.onnx {OUTPUTS}", f"error: {name}.onnx: expected an ONNX model", "export or download it again")
        refused(f"inspect-sparsity {name}.onnx", f"error: {name}.onnx: expected an ONNX model")
    refused("inspect-sparsity nope.onnx", "error: nope.onnx: no such file")


@pytest.mark.parametrize(
    "words,message",
    [
        (["report", "", "-o", "r.html"], "expected the path of an engine file, got an empty one"),
        (["report", "tiny.engine", "-o", "r.html", "--compare", ""], "expected the path of an engine file, got an empty one"),
        (["inspect-sparsity", ""], "expected the path of an ONNX model, got an empty one"),
    ],
)
def test_empty_names(files, monkeypatch, capsys, words, message):
    monkeypatch.chdir(files)
    with pytest.raises(SystemExit) as ended:
        command_line.main(words)
    assert ended.value.code == 1 and capsys.readouterr().err == f"error: {message}\n" and not (files / "r.html").exists()


def test_unsupported_operators(files, refused):
    onnx.save(unsupported(), files / "odd.onnx")
    listed = "not supported: NonZero (nz), Det (last)\nexport the model without them, or compute them outside it; "
    refused(
        f"build odd.onnx {OUTPUTS}",
        "odd.onnx: 2 nodes have an operator that is ",
        listed,
        "docs/operators.md the supported ones",
    )


@pytest.mark.parametrize(
    ("shapes", "code", "text"),
    [
        (
            "x:8x1x9x8",
            1,
            "input 'x': the model declares Nx1x8x8, the shape given is 8x1x9x8; axis 2 is fixed at 8, got 9, and only ",
        ),
        ("x:8x8", 1, "input 'x': the model declares Nx1x8x8, the shape given is 8x8; expected 4 sizes, got 2"),
        ("z:8x1x8x8", 1, "a shape is given for 'z', but the inputs are 'x'"),
        ("x:1,1,8,8", 2, "(several with commas), got 'x:1,1,8,8'"),
        ("x:-1x1x8x8", 2, "got 'x:-1x1x8x8'; sizes are at least 1"),
        ("x:9999999999x1x8x8", 1, "input 'x': expected sizes of at least 1 and 2147483647 elements at most, got 9999999999x1"),
        ("x:8x1x8x8,x:9x1x8x8", 2, "--shapes: two sizes for input 'x'"),
        *(
            (bad, 2, f"--shapes: expected name:1x3x224x224 (several with commas), got {bad!r}")
            for bad in ("x", "x:", "8x1x8x8", ":8x1", "x:0x1x8x8", "x:-1x1x8x8", "x:8x1xN", "x:8x", "x:1.5x1")
        ),
    ],
)
def test_sizes(refused, shapes, code, text):
    refused(f"build sparse.onnx --shapes={shapes} {OUTPUTS}", text, code=code)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
@pytest.mark.parametrize("option", ["--ray", "--ray=head:6379"])
def test_a_cluster_takes_the_extra_ray(refused, option):
    refused(f"build tiny.onnx {option} -o old.engine", "Ray is not installed", "pip install '.[ray]'")


def test_wrong_usage(refused):
    refused("build tiny.onnx -o old.engine --sparsity=maybe", "'maybe' is not one of 'disable', 'enable', 'force'", code=2)
    refused("build tiny.onnx -o old.engine --device=4090", "; did you mean --device=rtx4090?", code=2)
    refused(
        "build tiny.onnx -o old.engine --device nonsense",
        "--device: unknown device 'nonsense': expected one of a10, a100, a100_40gb",
        code=2,
    )
    refused(
        "build tiny.onnx --savePruned=old.onnx", "--savePruned needs --sparsity=force: without it nothing is pruned", code=2
    )
    refused("build tiny.onnx --onnx=tiny.onnx", "give the model once", code=2)
    refused("build -o old.engine", "give the model once", code=2)
    refused("build tiny.onnx --iterations=0", "--iterations", code=2)
    for seconds in ("0", "-1", "nan", "inf", "x"):
        refused(f"build tiny.onnx --tuningTime={seconds}", "--tuningTime", code=2)
    refused("build tiny.onnx --ray --device a100", "--ray measures on the GPUs of a cluster: leave --device out", code=2)
    refused("build tiny.onnx --builderOptimizationLevel=6", "--builderOptimizationLevel", code=2)
    refused("build tiny.onnx --saveEngin=old.engine", "--saveEngin", code=2)
    refused("build tiny.onnx --sparsity", "'--sparsity' requires an argument. Expected one of disable, enable, force", code=2)
    refused("build tiny.onnx --sparcity=enable", "Did you mean '--sparsity'?", code=2)
    refused("rum tiny.engine", "No such command 'rum'; did you mean 'run' instead of 'rum'?", code=2)
    refused("help", "No such command 'help'; gpu-runtime --help lists the commands", code=2)
    refused("serve tiny.engine", "serve run gpu_runtime.serving.ray:app", code=2)
    refused("run tiny.engine --input x=x.npy --output y.txt", "--output y.txt: expected a name that ends in .npz", code=2)
    refused("run tiny.engine --input x.npy --output old.npz", "--input: expected NAME=FILE.npy, got 'x.npy'", code=2)
    refused("run tiny.engine --input x=x.npy --input x=y.npy --output old.npz", "'x' is given twice", code=2)


def test_wrong_usage_is_told_before_anything_else(cli, files):
    """Of a build, the values that no check of a single option finds."""
    for option in ("--shapes=x", "--memPoolSize=workspace:-1", "--minShapes=x:1x8x6x6", "--layerPrecisions=a"):
        code, out, err = cli(f"build tiny.onnx --device h200 {option} --optShapes=x:2x8x6x6")
        assert (code, out) == (2, "") and "expected" in err


@pytest.mark.parametrize(
    "command", ["build tiny.onnx --device h200 {} -o", "run tiny.engine --emulate --input x=x.npy {} --output"]
)
def test_targets_that_cannot_be_written(files, refused, command):
    before = command.format("")
    refused(f"{before} tiny.onnx/new", "tiny.onnx is not a folder")
    refused(f"{before} nowhere/new", "nowhere is no existing folder: create it first")
    refused(f"{before} folder", "expected a file, got a folder")
    refused(f"{before} folder/new/", "expected a file, got a folder")
    refused(f"{before} -", "nothing is written to standard output: give the name of a file, or ./- for one of that name")
    refused(f"{before} /proc/new.{'engine' if before.startswith('build') else 'npz'}", "no file can be made in /proc: ")
    refused(f"{before} /dev/null", "expected a regular file, got a device or a pipe")
    own = "tiny.onnx" if before.startswith("build") else "x.npy"
    refused(f"{before} {own}", f"{own}: is a file that this command reads: give another name")
    if before.startswith("build"):
        refused(
            f"{before} old.engine --exportLayerInfo=tiny.onnx/i.json",
            "error: --exportLayerInfo tiny.onnx/i.json: ",
            "not a fol",
        )
        refused(
            f"{before} old.engine --exportProfile=folder --exportLayerInfo=old.json",
            "error: --exportProfile folder: expected a",
        )
        refused(
            f"{before} link.engine --exportProfile=old.engine", "--saveEngine link.engine: is also the file of --exportProfile"
        )
        refused(f"{before} old.engine --sparsity=force --savePruned=nowhere/p.onnx", "error: --savePruned nowhere/p.onnx: ")
        refused(f"{before}=new.engine", "--saveEngine =new.engine: expected the name of a file: write it after a space")
        refused(
            f"{before} old.engine --timingCacheFile=old.engine", "--timingCacheFile old.engine: is also the file of --saveEng"
        )
        refused(f"{before} old.engine --exportProfile=", "--exportProfile: expected the name of a file, got none")


def test_a_warning_is_a_sentence(cli, monkeypatch):
    monkeypatch.setattr(command_line.program, "main", lambda *_, **__: warnings.warn("a sentence", stacklevel=2))
    assert cli("inspect x") == (0, "", "warning: a sentence\n")


def test_a_link_is_followed(files, cli):
    (files / "link.engine").symlink_to("real.engine")
    assert cli("build tiny.onnx --device h200 -o link.engine")[0] == 0
    assert (files / "link.engine").is_symlink() and gr.load(files / "real.engine").record.model.name == "tiny"


@pytest.mark.slow
def test_disk_full(files, cli):
    """With room for every file but the last, the engine: none of them is written."""
    assert cli(f"build tiny.onnx {OUTPUTS}")[0] == 0
    sizes = {name: (files / name).stat().st_size for name in ("old.engine", "old.json", "old.onnx")}
    make_old(files)
    before, room = contents(files), sizes["old.engine"] - 1
    assert room > max(sizes["old.json"], sizes["old.onnx"])
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))}
    code, out, err = program(f"build tiny.onnx {OUTPUTS}", files, **full)
    assert code == 1 and "Wrote" not in out
    assert err == (
        f"error: {files}/old.engine: could not be written: File too large; nothing was written or overwritten. "
        "Check that its folder is writable and has space\n"
    )
    assert contents(files) == before


@pytest.mark.slow
@pytest.mark.parametrize("at", ["[import]", "[time]"])
def test_interrupted_build(files, at):
    make_old(files)
    before = contents(files)
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with start(f"build sparse.onnx --verbose {SHAPES} {OUTPUTS}", files, **default) as process:
        while not process.stderr.readline().startswith(at):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err and "Wrote" not in out
    message = "interrupted: nothing was written or overwritten"  # times are predicted: none is kept
    assert err.splitlines()[-1] == message
    assert contents(files) == before


def test_an_interrupted_import_ends_as_any_interrupt(files):
    """Dataclasses are made by exec(), and a process in which Ctrl-C ended one would die by SIGINT."""
    code = (
        "from gpu_runtime import cli\ndef main(*_, **__): exec('raise KeyboardInterrupt')\ncli.program.main = main\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, cwd=files, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted: nothing was written or overwritten\n")


def test_files_of_another_kind_are_not_overwritten(files, refused):
    """A slip of the file's name must not cost a model, an engine or somebody's notes."""
    (files / "notes.txt").write_text("notes")
    build = "build tiny.onnx --device h200"
    for target in ("old.onnx", "old.npz", "notes.txt", "old.json", "x.npy"):
        refused(f"{build} -o {target}", f"--saveEngine {target}: is an existing file of another kind, which an engine would")
    refused(f"{build} -o old.engine --exportLayerInfo=old.onnx", "--exportLayerInfo old.onnx: is an existing file")
    refused(
        f"{build} --sparsity=force --savePruned=old.engine",
        "--savePruned old.engine: is an existing file of another kind, which an ONNX",
    )
    refused("prune tiny.onnx -o old.engine", "--output old.engine: is an existing file of another kind, which an ONNX")
    run = "run tiny.engine --emulate --input x=x.npy --output"
    refused(f"{run} old.onnx", "--output old.onnx: is an existing file of another kind, which a .npz file")
    refused(f"{run} old.npz.npy".replace("old.npz.npy", "x.npy"), "--output x.npy: is a file that this command reads")
    refused("report tiny.engine -o old.engine", "--output old.engine: is an existing file of another kind, which a text")


def test_an_empty_file_and_one_of_the_same_kind_are_overwritten(files, cli):
    (files / "empty.engine").touch()
    for name in ("empty.engine", "tiny.engine"):
        assert cli(f"build tiny.onnx --device h200 -o {name}")[0] == 0


def test_outputs_as_npy(files, cli):
    run = "run tiny.engine --emulate --input x=x.npy --output"
    assert cli(f"{run} out.npz")[0] == 0 and cli(f"{run} out.npy")[0] == 0
    with np.load(files / "out.npz") as both:
        (name,) = both.files
        assert np.array_equal(np.load(files / "out.npy"), both[name])


def test_quiet(files, cli):
    for command in (
        "build tiny.onnx --device h200 -o q.engine",
        "run q.engine --emulate --input x=x.npy --output q.npz",
        "report q.engine -o q.html",
        "prune sparse.onnx -o q.onnx",
    ):
        assert cli(f"{command} --quiet") == (0, "", ""), command
        assert (files / command.split()[-1]).exists()
    code, out, err = cli("build missing.onnx -q --device h200")
    assert (code, out) == (1, "") and "no such file" in err
    assert cli("inspect q.engine")[1]  # the next command speaks


def test_a_missing_file_is_also_a_file_not_found_error(files):
    for call, kind in (
        (lambda: gr.load("none.engine"), gr.EngineError),
        (lambda: gr.build("none.onnx", device="h200"), gr.ModelError),
        (lambda: gr.InferenceSession("none.onnx", device="h200"), gr.ModelError),
        (lambda: gr.InferenceSession("none.engine"), ValueError),
    ):
        with pytest.raises(FileNotFoundError, match="no such file") as caught:
            call()
        e = pickle.loads(pickle.dumps(caught.value))
        for error in (caught.value, e):
            assert isinstance(error, kind) and error.errno == 2 and str(error.filename).startswith("none."), error
        assert str(e) == str(caught.value) and "[Errno" not in str(e)


def test_the_files_of_a_failed_set_are_taken_back(files):
    (files / "old").write_text("old")
    targets.WRITTEN.clear()
    with pytest.raises(ValueError, match="could not be written: File name too long; nothing was written or overwritten"):
        targets.write_all({files / "old": b"new", files / "other": b"new", files / ("n" * 300): b"new"})
    assert (files / "old").read_text() == "old" and not [p for p in files.iterdir() if p.name.startswith((".", "other"))]


def test_wrong_inputs_of_a_run(files, refused):
    x = np.load(files / "x.npy")
    np.save(files / "half.npy", x.astype(np.float16))
    np.save(files / "wide.npy", np.ones((1, 8, 6, 7), np.float32))
    np.save(files / "objects.npy", np.array([{}]), allow_pickle=True)
    np.savez(files / "many.npz", x)
    (files / "empty.npy").write_bytes(b"")
    (files / "torn.npy").write_bytes((files / "x.npy").read_bytes()[:500])
    run = "run tiny.engine --emulate --output old.npz --input"
    refused(f"{run} z=x.npy", "error: inputs: expected the names ['x'], got ['z']: give --input x=FILE.npy\n")
    refused(f"{run} x=half.npy", "input 'x': expected dtype float32, got float16; convert it with .astype(np.float32)")
    refused(f"{run} x=wide.npy", "input 'x': expected shape 1x8x6x6, got 1x8x6x7.", "build one with --shapes")
    refused(f"{run} x=nope.npy", "error: --input x: nope.npy: no such file; expected a .npy file, as numpy.save writes it\n")
    for name in ("objects.npy", "many.npz", "empty.npy", "torn.npy", "tiny.onnx", "folder"):
        refused(f"{run} x={name}", f"error: --input x: {name}: not a readable .npy file, as numpy.save writes it: ")


@pytest.mark.parametrize("given", ["z=x.npy", "x=wide.npy", "x=half.npy"])
def test_wrong_inputs_are_refused_before_a_kernel_or_the_emulator_is_compiled(files, given):
    """In a process of its own, whose cache is empty and stays it."""
    np.save(files / "half.npy", np.load(files / "x.npy").astype(np.float16))
    np.save(files / "wide.npy", np.ones((1, 8, 6, 7), np.float32))
    (files / "cache").mkdir()
    before = contents(files)
    code = (
        "import sys; from gpu_runtime.cli import main\n"
        f"try: main('run tiny.engine --emulate --output out.npz --input {given}'.split())\n"
        "finally: print([m for m in ('cuda.bindings.nvrtc', 'cuda_kernels.emulator.build', 'cupy') if m in sys.modules])"
    )
    env = ENV | {"GPU_RUNTIME_CACHE": str(files / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=files, capture_output=True, text=True)
    assert done.returncode == 1 and "error: input" in done.stderr and done.stdout == "[]\n", done.stderr
    assert contents(files) == before


def test_engines_that_cannot_be_used(files, refused, monkeypatch):
    data = (files / "tiny.engine").read_bytes()
    loaded = gr.load(files / "tiny.engine")
    (files / "torn.engine").write_bytes(data[:-100])
    (files / "flipped.engine").write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    engines.Engine(replace(loaded.record, source_hash="0" * 64), loaded.weights).save(files / "other.engine")
    with monkeypatch.context() as patch:
        patch.setattr(engine_header, "FORMAT_VERSION", 9)
        engines.Engine(loaded.record, loaded.weights).save(files / "newer.engine")
    coded = engines.Engine(loaded.record, loaded.weights, {"pool(V=1)": b"\x7fELF"})
    coded.save(files / "coded.engine")
    for name, *texts in (
        ("nope", "no such file. Build an engine with: build-engine model.onnx -o nope.engine"),
        ("torn", "torn.engine: truncated: expected ", "Copy the file again, or build the engine again"),
        ("flipped", "flipped.engine: damaged: ", "Copy the file again, or build the engine again"),
        (
            "newer",
            "newer.engine: made by a newer gpu_runtime: format 9; this one reads 5.",
            "Update gpu_runtime",
        ),
    ):
        refused(f"run {name}.engine --emulate --input x=x.npy --output old.npz", *texts)
        refused(f"inspect {name}.engine", *texts)
    run = "run {}.engine --emulate --input x=x.npy --output old.npz"
    refused(
        run.format("other"), "error: other.engine: the engine was built with other kernel sources: hash 000000000000, here "
    )
    refused(run.format("coded"), "coded.engine: holds machine code for 1 kernels", "--allow-cubins")
    refused("run tiny.onnx --input x=x.npy --output old.npz", "tiny.onnx: not an engine")


def test_an_engine_for_another_architecture(files, refused, monkeypatch):
    """What `run` says on a GPU that is not the engine's; the GPU is pretended, and is not reached."""
    from cuda_kernels import device as devices

    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "current", lambda: devices.named("a100"))
    text = "error: tiny.engine: the engine was built for H200 SXM 141GB (sm_90a); this device is sm_80. Build the engine again"
    refused("run tiny.engine --input x=x.npy --output old.npz", text)


def test_a_pool_that_is_none_is_refused(refused):
    command = "build tiny.onnx -o old.engine --device=h200 --memPoolSize="
    for text in ("64", "tacticDram:64", "workspace:-1", "activations:many", f"activations:{'9' * 400}", "workspace:1,,"):
        refused(command + text, "--memPoolSize: expected workspace:MIB or activations:MIB", code=2)
    for text in ("activations:1,activations:2", "activations:1 --memPoolSize=Activations:1"):
        refused(command + text, "--memPoolSize: activations is given twice", code=2)
    refused(command + "activations:99999999999G", "error: activations: expected 0 to 4611686018427387904 bytes, got ")
    refused(command + "activations:0", "at batch 1: activations need ", "activations:", "B), or give a smaller batch")
    text = "--loadEngine reads an engine and builds none: leave out --memPoolSize"
    refused("build --loadEngine=tiny.engine --memPoolSize=activations:64", text, code=2)
