"""An interpreter of changed sources, in place of the emulator's own; compiled quickly, each unit cached by its sources."""

import hashlib
import subprocess
import tempfile
from pathlib import Path

from cuda_kernels.emulator import build
from cuda_kernels.files import cache_dir, write

# Faults are searched for in small programs: compiling takes most of the time. Any x86-64 CPU of the level takes the same paths.
FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build.FLAGS)


def use(sources: Path) -> None:
    """Uses the interpreter of these sources from now on. Call it before anything has run."""
    library = compiled(sources)
    build._load = lambda *_: build.ctypes.CDLL(str(library))  # type: ignore[assignment]
    build.PREBUILT = sources / "none"  # type: ignore[misc]


def compiled(sources: Path) -> Path:
    march = f"-march={build.LEVEL if build.has_level() else 'native'}"
    command = [*build.compiler().split(), *FLAGS, march]
    objects = [_object(command, sources / unit) for unit in build.UNITS]
    return _made([*command, "-shared", *map(str, objects)], " ".join(path.name for path in objects), ".so")


def _object(command: list[str], unit: Path) -> Path:
    read = subprocess.run([*command, "-E", "-P", str(unit)], capture_output=True, text=True, check=True).stdout
    return _made([*command, "-c", str(unit)], read, ".o")


def _made(command: list[str], text: str, suffix: str) -> Path:
    """Returns the file that the command writes to its -o, cached under the hash of `text`; BuildError if the command fails."""
    tools = " ".join(command[: len(FLAGS) + 2])
    path = cache_dir() / "independent" / f"emulator-{hashlib.sha256((tools + text).encode()).hexdigest()[:20]}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="gpu_runtime-") as folder:
            out = Path(folder) / "out"
            done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True)
            if done.returncode:
                raise build.BuildError(f"{' '.join(command)}:\n{done.stderr}")
            write(path, out.read_bytes())
    return path
