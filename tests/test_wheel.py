"""The sdist and the wheel of this tree, installed into clean environments with each set of extras: what is promised works
there, and what is not there is said. `make test-wheel`; needs a package index, which pip's own settings name."""

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.pages.quotes import Paste, as_command, pastes
from cuda_kernels.emulator import build
from cuda_kernels.extras import EXTRAS, why_missing
from tests.conftest import ROOT, without_progress

pytestmark = pytest.mark.wheel

# Prefixes of variables of the caller's environment that a clean environment must not have.
OURS = ("PYTHON", "GPU_RUNTIME", "VIRTUAL_ENV", "CUDA", "LD_", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE", "CXX")
PACKAGES = ("cuda_kernels", "tactics", "gpu_runtime")
CUDA12_ROWS = 8  # of the record of CUDA 12's NVRTC, compiled again


def clean(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)} | variables


def done(*words: str | Path, cwd: Path, env: Mapping[str, str]) -> str:
    """What a program that must succeed prints."""
    found = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, f"{' '.join(map(str, words))}:\n{found.stdout[-2000:]}{found.stderr[-4000:]}"
    return found.stdout


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> None:
    """Skips where pip reaches no package index."""
    folder = tmp_path_factory.mktemp("index")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-cache-dir", "--no-deps", "click"]
    found = subprocess.run(words, cwd=folder, env=clean(), capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"pip reaches no package index: {found.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def dist(index, tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done(sys.executable, "-m", "build", "--outdir", out, source, cwd=source, env=clean())
    return out


@dataclass(frozen=True, slots=True)
class Environment:
    """With the wheel, and a folder to work in. No compiler is on its PATH where the wheel's emulator runs."""

    folder: Path
    work: Path
    megabytes: int

    @property
    def variables(self) -> dict[str, str]:
        path = str(self.folder / "bin") + ("" if build.has_level() else f":{os.environ['PATH']}")
        return clean(PATH=path, HOME=str(self.work), GPU_RUNTIME_CACHE=str(self.work / "cache"))

    def run(self, words: str) -> str:
        program, *args = words.split()
        return done(self.folder / "bin" / program, *args, cwd=self.work, env=self.variables)

    def fails(self, words: str) -> str:
        """What stderr says of a program that must fail, as one who expects it does: no traceback, nothing on stdout."""
        program, *args = words.split()
        found = subprocess.run(
            [self.folder / "bin" / program, *args], cwd=self.work, env=self.variables, capture_output=True, text=True
        )
        assert (found.returncode, found.stdout) == (1, ""), found.stderr
        return without_progress(found.stderr)

    def bash(self, commands: str) -> str:
        return done(shutil.which("bash") or "bash", "-ec", commands, cwd=self.work, env=self.variables)


@pytest.fixture
def installed(dist, files):
    """installed(extras) -> the test's environment with the wheel and these extras, in which the files of `files` lie."""
    folder = files / "env"

    def install(extras: str) -> Environment:
        if not folder.exists():
            done(sys.executable, "-m", "venv", "--without-pip", folder, cwd=files, env=clean())
        (wheel,), start = dist.glob("*.whl"), time.monotonic()
        pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-compile"]
        done(*pip, f"gpu-runtime{extras} @ {wheel.as_uri()}", cwd=files, env=clean())
        size = sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
        print(f"gpu-runtime{extras}: {size / 1e6:.0f} MB, {time.monotonic() - start:.0f} s")
        return Environment(folder, files, round(size / 1e6))

    yield install
    shutil.rmtree(folder, ignore_errors=True)  # hundreds of megabytes


# How torch.compile finds the backend, with a stand-in for PyTorch.
BACKEND = """
import importlib.metadata, sys
from unittest.mock import MagicMock
torch = MagicMock()
torch.nn.Module = object
sys.modules |= {"torch": torch, "torch.utils": torch.utils, "torch.utils.weak": torch.utils.weak}
(found,) = importlib.metadata.entry_points(group="torch_dynamo_backends")
assert found.load().__name__ == "backend", found
print(found.name)
"""
RUN = "gpu-runtime run tiny.engine --input x=x.npy --output out.npz"


def test_the_sdist_and_the_wheel_hold_what_they_need(dist):
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix != ".pyc")
    tree = {path.relative_to(ROOT).as_posix() for path in files}
    assert tree <= names
    brought = {name for name in names - tree if ".dist-info/" not in name}
    assert len(brought) == 1 and brought.pop().startswith("cuda_kernels/emulator/prebuilt/emulator-")
    assert "-py3-none-manylinux_2_" in wheel.name and wheel.stat().st_size < 3e6
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert tree | {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= inside


def test_the_wheel_alone_reads_engines(installed):
    env = installed("")
    assert env.megabytes < 100
    for words in ("explain tiny.engine", "inspect tiny.engine", "report tiny.engine -o page.html", "--version"):
        assert env.run(f"gpu-runtime {words}")
    assert env.run("gpu-runtime --version") == env.run("python -m gpu_runtime --version").replace("__main__.py", "gpu-runtime")
    assert env.fails(RUN) == f"error: {why_missing('cuda')}\n"
    assert env.fails("build-engine tiny.onnx") == f"error: {why_missing('onnx')}\n"
    held = "import sys, gpu_runtime as gr; gr.load('tiny.engine'); print(sorted(set(sys.modules) & set(sys.argv[1:])))"
    assert done(env.folder / "bin" / "python", "-c", held, *EXTRAS, cwd=env.work, env=env.variables) == "[]\n"


QUICKSTART = """
import numpy as np
import gpu_runtime as gr

x = np.load("x.npy")
gr.build("tiny.onnx", device="h200").save("own.engine")
with gr.load("own.engine").context() as ctx:
    y = ctx.run({"x": x})
np.testing.assert_array_equal(y["y"], np.load("out.npz")["y"])
print(ctx.engine.record.producer.nvrtc)
"""


@pytest.mark.parametrize(("cuda", "version"), [("cuda12", "12.9"), ("cuda13", "13.0")])
def test_engines_are_built_and_run_with_either_cuda(installed, cuda, version):
    """First with `build` alone, as far as that goes. No compiler is at hand where the wheel's emulator runs."""
    env = installed("[build]")
    assert done(env.folder / "bin" / "python", "-c", BACKEND, cwd=env.work, env=env.variables) == "gpu_runtime\n"
    env.run("build-engine tiny.onnx -o tiny.engine --device h200")
    assert env.fails(RUN) == f"error: {why_missing('cuda')}\n"
    installed(f"[{cuda}]")
    assert "Ran tiny.engine on the CPU emulator" in env.run(RUN)
    assert "first" in env.run("gpu-runtime explain tiny.engine")
    assert env.bash(as_command(Paste(ROOT, "python", "quick", "", QUICKSTART))) == f"{version}\n"
    assert not build.has_level() or not list((env.work / "cache" / "emulator").glob("*"))
    if cuda == "cuda12":
        (env.work / "tests").mkdir()
        for path in (ROOT / "tests" / "other_nvrtc.py", ROOT / "tests" / "golden"):
            (env.work / "tests" / path.name).symlink_to(path)
        seed = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        print(env.run(f"python -m tests.other_nvrtc check {seed or 'none'} {CUDA12_ROWS}"))


@pytest.mark.long
def test_the_quickstart_of_the_readme(installed):
    """As it is pasted, from the command line and from Python."""
    env = installed("[build,cuda13]")
    (env.work / "benchmarks").mkdir()
    (env.work / "benchmarks" / "digits").symlink_to(ROOT / "benchmarks" / "digits")
    env.bash("\n".join(as_command(paste) for paste in pastes(ROOT / "README.md") if paste.cost != "never"))


@pytest.mark.parametrize("example", ["ocr"])
def test_an_example_with_the_packages_of_others_runs(example, installed):
    """RapidOCR, its models in its own wheel, reads the same texts in the same boxes as on onnxruntime."""
    env = installed("[build,emulator]")
    pip = [sys.executable, "-m", "pip", "--python", env.folder / "bin" / "python", "install", "--quiet", "--no-compile"]
    done(*pip, "rapidocr-onnxruntime==1.4.4", cwd=env.work, env=clean())
    shutil.copy(ROOT / "examples" / f"{example}.py", env.work)
    said = env.run(f"python {example}.py")
    assert said.endswith("the same 3 texts and boxes as on onnxruntime\n") and "Sparse tensor cores" in said
