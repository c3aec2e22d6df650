"""Input arrays for timing an engine: random, the same for the same seed, or from the files that --loadInputs names."""

import math
import os
from collections.abc import Sequence

import numpy as np

from cuda_kernels import files
from gpu_runtime.runtime.arrays import host_input
from gpu_runtime.runtime.fields import TensorSpec
from gpu_runtime.runtime.plan_record import Bound
from tactics.format import DTYPES

OPTION = "--loadInputs"
NPY = ".npy"
HEADER = 1 << 16  # bytes that the header of a .npy file may take


def random_inputs(inputs: Sequence[TensorSpec], seed: int = 0, low: float = -1) -> dict[str, np.ndarray]:
    """Returns name -> a random array for each input, the same arrays for the same seed, in the ranges that trtexec draws from.

    Floating-point values are from `low` to 1, uint8 values from 0 to 255; bool arrays have both values, and arrays of other
    whole numbers, which may be indices, 0 and 1.
    """
    rng, found = np.random.default_rng(seed), {}
    for i in inputs:
        dtype = i.dtype
        high = 256 if dtype == np.uint8 else 2
        drawn = low + (1 - low) * rng.random(i.shape, np.float32) if dtype.kind == "f" else rng.integers(0, high, i.shape)
        found[i.name] = drawn.astype(dtype)
    return found


def named_files(text: str, names: Sequence[str]) -> dict[str, str]:
    """Parses `name:file,other:file` into {name: file}. Quotes may be around a name, and a name may contain colons.

    `names`: the names of the engine's inputs. Raises ValueError for a name that is not among them, or is given twice.

    >>> named_files("x:a.bin,'y:0':b.npy", ["x", "y:0"])
    {'x': 'a.bin', 'y:0': 'b.npy'}
    """
    found: dict[str, str] = {}
    for item in text.split(",") if text else ():
        plain = item.replace("'", "").replace('"', "")
        name = max((n for n in names if plain.startswith(f"{n}:")), key=len, default=None)
        if name is None or len(plain) == len(name) + 1:
            raise ValueError(f"{OPTION}: expected NAME:FILE (several with commas), NAME being {_any_of(names)}, got {item!r}")
        if name in found:
            raise ValueError(f"{OPTION}: input {name!r} is given twice, as {found[name]} and as {plain[len(name) + 1 :]}")
        found[name] = plain[len(name) + 1 :]
    return found


def _any_of(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names[:5])) + (f" or one of {len(names) - 5} more" if len(names) > 5 else "")


def read_input(info: Bound, path: str) -> np.ndarray:
    """Returns the array of an engine's input (`info`) from a file.

    The file at `path` is a .npy file, or has raw elements in C order and of the input's type, as numpy's tofile() writes.
    Raises ValueError for a file that cannot be read, or has another type, shape or size.
    """
    dtype = np.dtype(DTYPES[info.dtype])
    nbytes = math.prod(info.shape) * dtype.itemsize
    shape = "x".join(map(str, info.shape)) or "one element"
    where = f"{OPTION} {info.name}: {path}"
    try:
        with files.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if path.endswith(NPY):
                if size > 8 * math.prod(info.shape) + HEADER:
                    raise ValueError(f"it has {size} bytes, but the input has {nbytes}")
                array = np.lib.format.read_array(file, allow_pickle=False)
            elif size == nbytes:
                return np.frombuffer(file.read(), dtype).reshape(info.shape)
            else:
                array = None
    except OSError as e:
        raise ValueError(f"{where}: cannot be read: {e.strerror or e}; expected {nbytes} raw bytes, or a .npy file") from None
    except Exception as e:  # a damaged header makes NumPy raise errors of many types
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(f"{where}: not a readable .npy file, as numpy.save writes it: {reason}") from None
    if array is None:
        raise ValueError(
            f"{where}: expected {nbytes} bytes, {shape} of {dtype}, got {size}: write it with "
            f"array.astype(np.{dtype}).tofile(FILE), or give a .npy file"
        )
    try:
        return host_input(info, array)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


def load_inputs(text: str, inputs: Sequence[Bound]) -> dict[str, np.ndarray]:
    """Returns name -> the array of each input, from a file if `text`, the value of --loadInputs, names one, else random.

    Raises ValueError for a wrong `text` or a file that does not fit its input.
    """
    by_name = {i.name: i for i in inputs}
    given = {name: read_input(by_name[name], path) for name, path in named_files(text, list(by_name)).items()}
    return random_inputs([i.spec for i in inputs]) | given
