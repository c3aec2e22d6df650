"""A virtual environment for each server, ROOT/.venv-NAME with pinned versions: made again only when these change."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.emulated_driver.build import CUPY
from tests.test_wheel import clean, done

# Server -> its packages. nvidia-pytriton's wheel has NVIDIA's server (2.51) with its python backend, which needs NumPy 1; the
# CuPy of the emulated driver needs NumPy 2.
PINS = {"ray": ("ray[serve]==2.60.0", f"cupy-cuda13x=={CUPY}"), "triton": ("nvidia-pytriton==0.7.0",)}
CUDA = {"ray": "build,cuda13", "triton": "emulator"}
DEBIAN = Path("/usr/bin/python3.11")  # Triton's stub needs a Python whose libpython is shared


def environment(server: str) -> Path:
    """Returns the folder of the server's environment. Skips with the reason if it cannot be made."""
    folder = ROOT / f".venv-{server}"
    wanted = "\n".join((CUDA[server], *PINS[server], (ROOT / "pyproject.toml").read_text()))
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    if not DEBIAN.exists():
        pytest.skip(f"{DEBIAN} is not there: the servers' environments are made with Debian's Python")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-cache-dir", "--no-deps", "--dest"]
    found = subprocess.run([*download, folder / "try", "click"], env=clean(), capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"pip reaches no package index: {found.stderr.strip().splitlines()[-1]}")
    done(DEBIAN, "-m", "venv", "--without-pip", "--clear", folder, cwd=ROOT, env=clean())
    done(*pip, "install", "--quiet", "-e", f"{ROOT}[{CUDA[server]},{server}]", *PINS[server], cwd=ROOT, env=clean())
    stamp.write_text(wanted)
    return folder
