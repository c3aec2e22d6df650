"""The problem of one output of a library function: an operator that NumPy or CuPy computes (array_functions.py)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tactics.format import DTYPES
from tactics.problems.array_functions import FUNCTIONS, bound
from tactics.problems.protocol import Problem, Shape4

FLOAT = "fp16"  # the type of floating-point tensors in memory
MOST_TAPS = 1 << 16  # elements of a window along an axis (of a Conv's whole window); each is one pass over the output
LARGEST = 2**31  # the most elements of a tensor, and the largest magnitude of an attribute
EXACT = ("int32", "int64", "bool", "int8", "uint8")  # the types of all other tensors, which are stored without conversion
PIXELS = "uint8"  # kernels read a network's input of this type directly


@dataclass(frozen=True, slots=True)
class LibraryProblem(Problem):
    """Output number `part` of a function in FUNCTIONS over whole tensors, each in its ONNX shape.

    `arguments`: for each argument of the function "t<i>", input i, "c<i>", the weight of that name, or "", absent. `shapes`,
    `dtypes`: of the inputs; `shape`, `dtype`: of the output; a dtype is FLOAT or one of EXACT. `constants`: (shape, NumPy type)
    of each weight. `attributes`: (name, value) as the function takes them. `shapes4`: the NCHW shapes of the inputs, then of
    the output, with as many elements as `shapes` and `shape`.
    """

    TYPE: ClassVar[str] = "library"
    function: str
    arguments: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    shapes4: tuple[Shape4, ...]
    attributes: tuple[tuple[str, object], ...] = ()
    constants: tuple[tuple[tuple[int, ...], str], ...] = ()
    part: int = 0

    def __post_init__(self) -> None:
        if self.function not in FUNCTIONS:
            raise ValueError(f"library: unknown function {self.function!r}, expected one of {', '.join(FUNCTIONS)}")
        known = {*(f"t{i}" for i in range(len(self.shapes))), *(f"c{i}" for i in range(len(self.constants)))}
        if unknown := set(self.arguments) - known - {""}:
            raise ValueError(f"library: {self.function} takes {min(unknown)!r}, expected some of {', '.join(sorted(known))}")
        for shape, shape4 in zip((*self.shapes, self.shape), self.shapes4, strict=True):
            if math.prod(shape) != math.prod(shape4):
                raise ValueError(f"library: {shape} and {shape4} have different numbers of elements")

    def excess(self) -> str:
        """Returns a text on an attribute with which the function would take far more time or memory than these tensors justify;
        "" if there is none. An engine file is refused with this text.
        """
        given: dict[str, Any] = dict(self.attributes)
        numbers = [v for value in given.values() for v in (value if isinstance(value, tuple) else (value,)) if type(v) is int]
        if any(abs(v) > LARGEST for v in numbers):
            return f"{self.function}: attributes above {LARGEST}"
        window = (math.prod if self.function == "Conv" else max)((1, *given.get("kernel_shape", ())))
        if max(min(given.get("size", 0), 2 * max(self.shapes4[0])), window) > MOST_TAPS:
            return f"{self.function}: windows of more than {MOST_TAPS} elements"
        windows = zip(
            *(given.get(name, ()) for name in ("kernel_shape", "out", "strides", "dilations", "pads")),
            self.shapes[0][2:] if self.shapes else (),
            strict=False,
        )
        padded = [max((o - 1) * s + (k - 1) * d + 1, size + before) for k, o, s, d, before, size in windows]
        if math.prod((*self.shapes4[0][:2], *padded)) > LARGEST:
            return f"{self.function}: with its padding, its input has the size {padded}"
        if max(given.get("k", 0), *given.get("counts", ()), 0) > max((*self.shape, 1)):
            return f"{self.function}: more elements than its output {self.shape} has"
        if self.function == "Tile" and math.prod(given["repeats"]) * math.prod(self.shapes[0]) != math.prod(self.shape):
            return f"{self.function}: {given['repeats']} times {self.shapes[0]} is not {self.shape}"
        return ""

    def __str__(self) -> str:
        tensors = (f"{d}[{','.join(map(str, s))}]" for s, d in zip(self.shapes, self.dtypes, strict=True))
        weights = (f"{d}[{','.join(map(str, s))}]" for s, d in self.constants)
        how = "".join(f" {name}={value!r}" for name, value in self.attributes).replace(" ,", ",")
        part = f" part{self.part}" if self.part else ""
        out = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        return f"library {self.function}({' '.join(self.arguments)}) {' '.join((*tensors, *weights))} -> {out}{how}{part}"

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return self.shapes4[:-1]

    @property
    def out_shape(self) -> Shape4:
        return self.shapes4[-1]

    def reference(self, *tensors: np.ndarray, **weights: np.ndarray) -> np.ndarray:
        """Returns the output, of out_shape (FP32 if floating-point). `tensors`: arrays of in_shapes; `weights`: c0, c1, ... by
        name."""
        given = {f"t{i}": np.asarray(x).reshape(s) for i, (x, s) in enumerate(zip(tensors, self.shapes, strict=True))}
        for i, dtype in enumerate(self.dtypes):
            given[f"t{i}"] = given[f"t{i}"].astype(np.float32 if dtype == FLOAT else DTYPES[dtype])
        given |= {name: np.asarray(a) for name, a in weights.items()}
        y = bound(self.function, dict(self.attributes), self.part)(np, [given.get(a) for a in self.arguments])
        return y.astype(np.float32 if self.dtype == FLOAT else DTYPES[self.dtype]).reshape(self.out_shape)
