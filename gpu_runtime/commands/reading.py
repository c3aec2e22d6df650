"""The files that a command reads: engines, and arrays in .npy and .npz files."""

import io
import os
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from cuda_kernels import files
from gpu_runtime.commands.options import sizes_of
from gpu_runtime.engine import Engine, load
from gpu_runtime.errors import EngineError
from gpu_runtime.text import suggest

MOST_NPZ_BYTES = 1 << 32  # bytes of all arrays in a file, decompressed


class TooLargeError(ValueError):
    """Raised when a file holds more bytes than expected."""


def opened(path: str, allow_cubins: bool, text: str = "", cure: str = "--allow-cubins") -> Engine:
    """Returns the engine in a file. An engine with several plans shows the plan for the sizes in `text`, the value of --shapes.

    `allow_cubins`: machine code in the file may run. Raises ValueError for a file that is no engine; if its machine code is
    refused, the message names the option `cure`.
    """
    try:
        engine = load(path, allow_cubins=allow_cubins)
    except EngineError as e:
        raise ValueError(str(e).replace("allow_cubins=True", cure)) from None
    return engine.at(sizes_of(text)) if text else engine


def read_array(option: str, path: str, most: int) -> np.ndarray:
    """Returns the array in a .npy file; the caller checks its type and shape. `option`: for messages. Raises ValueError for a
    file that cannot be read or has more than `most` bytes.
    """
    try:
        with files.open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > most + (1 << 16):
                raise ValueError(f"it has {size} bytes, expected {most} at most")
            return np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{option}: {path}: no such file; expected a .npy file, as numpy.save writes it") from None
    except Exception as e:  # a damaged header makes NumPy raise errors of many types
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(f"{option}: {path}: not a readable .npy file, as numpy.save writes it: {reason}") from None


def split_labels(labels: str | None, arrays: dict[str, np.ndarray] | None) -> tuple[dict[str, np.ndarray] | None, Any]:
    """Returns (the arrays without the labels, the labels). `labels`: the value of --labels, the name of one of the arrays or of
    a .npy file.

    Without labels or arrays (None) it returns (arrays, None). Raises ValueError for a name of neither.
    """
    if labels is None or arrays is None:
        return arrays, None
    if labels in arrays:
        return {name: a for name, a in arrays.items() if name != labels}, arrays[labels]
    if not os.path.exists(labels):
        held = f"{', '.join(arrays)}{suggest([labels], arrays)}"
        raise ValueError(f"--labels: expected an array in the file of inputs, or a .npy file, got {labels!r}; it holds {held}")
    return arrays, read_array("--labels", labels, MOST_NPZ_BYTES)


def read_arrays(option: str, path: str | None) -> dict[str, np.ndarray] | None:
    """Returns the arrays of an .npz file by name; None if `path` is None. `option`: for messages. Raises ValueError for a file
    that cannot be read.
    """
    if path is None:
        return None
    try:
        with files.open_regular(path) as file:
            return arrays_in(file, MOST_NPZ_BYTES)
    except FileNotFoundError:
        raise ValueError(f"{option} {path}: no such file; expected a .npz file, as numpy.savez writes it") from None
    except Exception as e:  # a damaged archive makes zipfile and NumPy raise errors of many types
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(
            f"{option} {path}: not a readable .npz file: {reason}; numpy.savez(FILE, NAME=array) writes one, with the names of "
            "inputs"
        ) from None


def arrays_in(file: BinaryIO, most: int) -> dict[str, np.ndarray]:
    """Returns the arrays of an untrusted .npz file by name.

    Raises TooLargeError, before anything is decompressed, if the arrays take more than `most` bytes; ValueError for another
    compression than NumPy's; a damaged file raises any error of zipfile or NumPy.
    """
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
    """Returns the bytes of an .npy file with this array."""
    data = io.BytesIO()
    np.lib.format.write_array(data, np.asarray(array), allow_pickle=False)
    return data.getvalue()


def npz(arrays: Mapping[str, Any]) -> bytes:
    """Returns the bytes of an uncompressed .npz file with these arrays by name; numpy.savez refuses some names."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, a in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(a), allow_pickle=False)
    return data.getvalue()
