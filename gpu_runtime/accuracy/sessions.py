"""ONNX models run by onnxruntime on the CPU, the reference for engines; no other module imports onnxruntime."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from gpu_runtime.errors import ModelError
from gpu_runtime.text import dims

Arrays = Mapping[str, np.ndarray]
NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


def require() -> Any:
    """Returns the onnxruntime module. Raises ValueError with the cure if it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        raise ValueError("onnxruntime is not installed, and this needs it: pip install onnxruntime") from None
    return onnxruntime


def session(proto: onnx.ModelProto, optimize: bool = True) -> Any:
    """Returns an onnxruntime session of a model on the CPU. `optimize`: onnxruntime may fuse nodes. Raises ModelError if it
    refuses the model.
    """
    ort = require()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as e:  # its exceptions share no base class
        raise ModelError(f"onnxruntime cannot load the model: {' '.join(str(e).split())}") from None


def run(found: Any, feeds: Arrays) -> dict[str, np.ndarray]:
    """Runs a session (`found`) on inputs by name (`feeds`) and returns its outputs by name. Raises ValueError if onnxruntime
    cannot run the model on these inputs.
    """
    names = [o.name for o in found.get_outputs()]
    try:
        return dict(zip(names, found.run(names, dict(feeds)), strict=True))
    except Exception as e:  # its exceptions share no base class
        raise ValueError(f"onnxruntime cannot run the model on these inputs: {' '.join(str(e).split())}") from None


def batches(inputs: Sequence[tuple[str, Sequence[object], np.dtype]], given: Arrays) -> Iterator[dict[str, np.ndarray]]:
    """Yields the `given` arrays by name, split along their first axes into batches of the model's size.

    For an input of shape (8, 10) an array of shape (24, 10) gives 3 batches. `inputs`: (name, shape, type) of each input; a
    size that is no number is dynamic. Raises TypeError unless `given` is a mapping, ValueError for other names or shapes, for a
    type that loses values, and for NaN or infinity.
    """
    wanted = {name for name, *_ in inputs}
    if not isinstance(given, Mapping):
        raise TypeError(f"inputs: expected a mapping of names to arrays, {{'x': x}}, got {type(given).__name__}")
    if others := set(given) ^ wanted:
        cure = "; --labels NAME, labels= in Python, says which array holds classes" if others < set(given) else ""
        raise ValueError(f"inputs: expected the names {sorted(wanted)}, got {sorted(given)}{cure}")
    fitted = {name: _fitted(name, shape, dtype, np.asarray(given[name])) for name, shape, dtype in inputs}
    counts = {_count(shape, fitted[name]) for name, shape, _ in inputs}
    if len(counts) > 1:
        raise ValueError("inputs: expected as many samples in each, got different numbers along their first axes")
    count = counts.pop()
    for i in range(count):
        yield {name: a if count == 1 else np.split(a, count)[i] for name, a in fitted.items()}


def _count(shape: Sequence[object], a: np.ndarray) -> int:
    """Returns the number of batches of this shape in an array; 1 if the shape's first axis is dynamic."""
    return a.shape[0] // shape[0] if shape and isinstance(shape[0], int) else 1


def _fitted(name: str, shape: Sequence[object], dtype: np.dtype, a: np.ndarray) -> np.ndarray:
    """Returns the array `a` in the type of the input `name`. Raises ValueError if its shape or type does not fit, or if it has
    a value that is not finite.
    """
    pairs = zip(shape[1:], a.shape[1:], strict=len(shape) == a.ndim)
    whole = len(shape) == a.ndim and all(not isinstance(d, int) or d == g for d, g in pairs)
    first = shape[0] if shape and isinstance(shape[0], int) else None
    if not whole or (shape and not a.shape[0]) or (first is not None and a.shape[0] % first):
        text = "x".join(str(d) if isinstance(d, int) else "?" for d in shape)
        raise ValueError(f"input {name!r}: expected shape {text} (or several along the first axis), got {dims(a.shape)}")
    if a.dtype != dtype and (a.dtype.kind != "f" or dtype.kind != "f"):
        raise ValueError(f"input {name!r}: expected dtype {dtype}, got {a.dtype}")
    if a.dtype.kind == "f" and not np.isfinite(a).all():
        raise ValueError(f"input {name!r} holds NaN or infinity: nothing can be compared on it")
    return a.astype(dtype)


def inputs_of(found: Any) -> list[tuple[str, Sequence[object], np.dtype]]:
    """Returns (name, shape, type) of each input of a session (`found`); sizes that are no numbers are dynamic. Raises
    ModelError for a type that NumPy lacks.
    """
    for i in found.get_inputs():
        if i.type not in NUMPY:
            raise ModelError(f"input {i.name!r} is a {i.type}: NumPy has no array of that type")
    return [(i.name, i.shape, np.dtype(NUMPY[i.type])) for i in found.get_inputs()]
