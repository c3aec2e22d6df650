"""Engines and arrays that a command reads."""

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

MOST_NPZ_BYTES = 1 << 32  # of calibration inputs, decompressed


class TooLargeError(ValueError):
    """A file holds more bytes than expected."""


def opened(path: str, allow_cubins: bool, text: str = "", cure: str = "--allow-cubins") -> Engine:
    """The engine of a file, showing the plan for the sizes of `text`; ValueError names the option, `cure`, where it is the
    machine code inside that is refused."""
    try:
        engine = load(path, allow_cubins=allow_cubins)
    except EngineError as e:
        raise ValueError(str(e).replace("allow_cubins=True", cure)) from None
    return engine.at(sizes_of(text)) if text else engine


def read_array(option: str, path: str, most: int) -> np.ndarray:
    """The array in a .npy file whose elements take up to `most` bytes, whatever their type: it is checked later."""
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
    data = io.BytesIO()
    np.lib.format.write_array(data, np.asarray(array), allow_pickle=False)
    return data.getvalue()


def npz(arrays: Mapping[str, Any]) -> bytes:
    """The bytes of an .npz file; unlike numpy.savez this takes any name."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, a in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(a), allow_pickle=False)
    return data.getvalue()
