"""Packages of others whose sources and compilers are read here and never installed: wheels, unpacked in the cache.

    python -m tests.independent.packages     downloads missing packages (110 MB), and prints their folders

Nothing is downloaded at any other time: a test that finds a package missing skips, and says why.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from cuda_kernels.files import cache_dir

CUTLASS = "nvidia-cutlass==4.2.0.0"  # BSD-3-Clause; its dependencies are for its Python, which is not run
TOOLKIT = (  # NVIDIA's compiler, as wheels
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-nvvm==13.0.88",
)


def root() -> Path:
    return cache_dir() / "independent"


def unpacked(name: str) -> Path:
    """Returns the folder of a package; the wheels of the toolkit share one, as the compiler looks for its parts beside
    itself.
    """
    return root() / ("toolkit-13.0" if name in TOOLKIT else name.replace("==", "-"))


def present(name: str) -> bool:
    return (unpacked(name) / f".{name}").exists()


def missing(*names: str) -> str:
    """Says why these packages cannot be read, or ""."""
    absent = [name for name in names if not present(name)]
    return f"{', '.join(absent)} not downloaded: make truth" if absent else ""


def cutlass() -> Path:
    """Returns the folder with include/, tools/ and examples/."""
    return unpacked(CUTLASS) / "cutlass_library" / "source"


def toolkit() -> Path:
    """Returns the folder with bin/nvcc and include/."""
    return unpacked(TOOLKIT[0]) / "nvidia" / "cu13"


def fetch(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", "--dest", folder, name], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        target = unpacked(name)
        target.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
            for entry in archive.infolist():  # a wheel's programs are executable
                if entry.external_attr >> 16 & 0o100:
                    os.chmod(target / entry.filename, 0o755)
    (target / f".{name}").touch()


def main() -> None:
    for name in (CUTLASS, *TOOLKIT):
        if not present(name):
            fetch(name)
        print(f"{name}: {unpacked(name)}")


if __name__ == "__main__":
    main()
