"""Files that a command writes, all or none, and arrays that it reads."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from cuda_kernels import files
from gpu_runtime import file_kinds

if TYPE_CHECKING:
    import numpy as np

MOST_NPZ_BYTES = 1 << 32  # of calibration inputs, decompressed


class TooLargeError(ValueError):
    """A file holds more bytes than expected."""


WRITTEN: list[str] = []  # files that this process has put in place
KEPT: list[str] = []  # what an interrupted command leaves besides


# What a command writes by an option, if it is no text, and how a file of that kind begins.
KINDS: Mapping[str, tuple[str, Callable[[bytes], bool]]] = {
    "engine": ("an engine", file_kinds.is_engine),
    "onnx": ("an ONNX model", file_kinds.is_onnx),
    "npz": ("a .npz file", lambda head: head.startswith(b"PK")),
    "npy": ("a .npy file", lambda head: head.startswith(b"\x93NUMPY")),
    "text": ("a text", lambda head: b"\0" not in head and not file_kinds.is_onnx(head)),
}


def _of_another_kind(path: Path, kind: str) -> str | None:
    """Why an existing file is not overwritten: it is not what the command writes there."""
    what, fits = KINDS[kind]
    if not path.is_file() or not (head := file_kinds.head_of(path)) or fits(head):
        return None
    return f"is an existing file of another kind, which {what} would overwrite: give another name, or remove the file"


def check_targets(
    targets: Mapping[str, str | None], sources: Iterable[str], kinds: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Path]:
    """Option -> real path of each file to write. ValueError where one cannot be written, before any work is done. `kinds`:
    option -> which of KINDS it writes, if not a text."""
    found: dict[str, Path] = {}
    for option, name in targets.items():
        if name is None:
            continue
        path = Path(os.path.realpath(name))
        twin = next((o for o, other in found.items() if other == path), None)
        if name.startswith("="):  # -o=FILE
            problem: str | None = "expected the name of a file: write it after a space, or as --option=FILE"
        elif problem := files.fault(name):
            pass
        elif any(os.path.exists(s) and os.path.samefile(s, name) for s in sources if path.exists()):
            problem = "is a file that this command reads: give another name"
        elif twin:
            problem = f"is also the file of {twin}: give two names"
        else:
            found[option] = path
            continue
        raise ValueError(f"{option} {name}: {problem}" if name else f"{option}: {problem}")
    for option, path in found.items():
        if problem := _of_another_kind(path, kinds.get(option, "text")):
            raise ValueError(f"{option} {targets[option]}: {problem}")
    return found


def write_all(contents: Mapping[str | os.PathLike[str], bytes]) -> None:
    """Write every file or none. Raises ValueError that says what went wrong and what was written."""
    try:
        files.write_all(contents, WRITTEN)
    except OSError as e:
        raise ValueError(
            f"{e.filename}: could not be written: {e.strerror}; {written()}. Check that its folder is writable and has space"
        ) from None


def written() -> str:
    return f"already written: {', '.join(WRITTEN)}" if WRITTEN else "nothing was written or overwritten"


def read_array(option: str, path: str, most: int) -> np.ndarray:
    """The array in a .npy file whose elements take up to `most` bytes, whatever their type: it is checked later."""
    import numpy as np

    try:
        with files.open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > most + (1 << 16):
                raise ValueError(f"it has {size} bytes, expected {most} at most")
            return np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{option}: {path}: no such file; expected a .npy file, as numpy.save writes it") from None
    except Exception as e:  # whatever a damaged header makes NumPy raise
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(f"{option}: {path}: not a readable .npy file, as numpy.save writes it: {reason}") from None


def split_labels(labels: str | None, arrays: dict[str, np.ndarray] | None) -> tuple[dict[str, np.ndarray] | None, Any]:
    """The arrays without those of --labels, and these: one of the arrays, or of a .npy file. Raises ValueError."""
    if labels is None or arrays is None:
        return arrays, None
    if labels in arrays:
        return {name: a for name, a in arrays.items() if name != labels}, arrays[labels]
    return arrays, read_array(f"--labels (the inputs' file holds {', '.join(arrays)})", labels, MOST_NPZ_BYTES)


def read_arrays(option: str, path: str | None) -> dict[str, np.ndarray] | None:
    """The arrays of an .npz file by name, None where no file is given. Raises ValueError."""
    if path is None:
        return None
    try:
        with files.open_regular(path) as file:
            return arrays_in(file, MOST_NPZ_BYTES)
    except FileNotFoundError:
        raise ValueError(f"{option} {path}: no such file; expected a .npz file, as numpy.savez writes it") from None
    except Exception as e:  # whatever a damaged archive makes zipfile and NumPy raise
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(
            f"{option} {path}: not a readable .npz file: {reason}; numpy.savez(FILE, NAME=array) writes one, with the names of "
            "inputs"
        ) from None


def arrays_in(file: BinaryIO, most: int) -> dict[str, np.ndarray]:
    """The arrays of an .npz file that anyone may have made. TooLargeError, before anything is decompressed, where they take
    more than `most` bytes; else whatever a damaged file makes zipfile and NumPy raise."""
    import numpy as np

    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if (size := sum(entry.file_size for entry in entries)) > most:
        raise TooLargeError(f"it holds {size} bytes, expected {most} at most")
    if odd := [entry.filename for entry in entries if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]:
        raise ValueError(f"{odd[0]} is not compressed as numpy.savez_compressed does: decompression may take any memory")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def npy(array: Any) -> bytes:
    """The bytes of an .npy file."""
    import numpy as np

    data = io.BytesIO()
    np.lib.format.write_array(data, np.asarray(array), allow_pickle=False)
    return data.getvalue()


def npz(arrays: Mapping[str, Any]) -> bytes:
    """The bytes of an .npz file; unlike numpy.savez this takes any name."""
    import numpy as np

    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, a in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(a), allow_pickle=False)
    return data.getvalue()
