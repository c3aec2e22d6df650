"""What a library function computes, as a problem like others: frozen, hashable; `str()` the key, `reference()` the meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tactics.format import DTYPES
from tactics.library_functions import FUNCTIONS, bound

Shape4 = tuple[int, int, int, int]
FLOAT = "fp16"  # what floating-point tensors are in memory
EXACT = ("int32", "int64", "bool")  # what others may be: as they are


@dataclass(frozen=True, slots=True)
class LibraryProblem:
    """Output `part` of a function in FUNCTIONS over whole tensors, each in its ONNX shape.

    `arguments`: in the function's order, "t<i>" for input i, "c<i>" for weight c<i>, "" for an absent one. `shapes`, `dtypes`:
    of the inputs; `shape`, `dtype`: of the output; a dtype is FLOAT or one of EXACT. `constants`: shape and NumPy type of
    each weight. `attributes`: by name, as the function takes them. `shapes4`: of the inputs, then of the output, as NCHW.
    """

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

    def __post_init__(self):
        if self.function not in FUNCTIONS:
            raise ValueError(f"library: unknown function {self.function!r}, expected one of {', '.join(FUNCTIONS)}")
        for shape, shape4 in zip((*self.shapes, self.shape), self.shapes4, strict=True):
            if math.prod(shape) != math.prod(shape4):
                raise ValueError(f"library: {shape} and {shape4} have different numbers of elements")

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

    def reference(self, *tensors, **weights) -> np.ndarray:
        """Arrays of in_shapes, floating-point ones FP32, and weights c0, c1, ...; an array of out_shape."""
        given = {f"t{i}": np.asarray(x).reshape(s) for i, (x, s) in enumerate(zip(tensors, self.shapes, strict=True))}
        for i, dtype in enumerate(self.dtypes):
            given[f"t{i}"] = given[f"t{i}"].astype(np.float32 if dtype == FLOAT else DTYPES[dtype])
        given |= {name: np.asarray(a) for name, a in weights.items()}
        y = bound(self.function, dict(self.attributes), self.part)(np, [given.get(a) for a in self.arguments])
        return y.astype(np.float32 if self.dtype == FLOAT else DTYPES[self.dtype]).reshape(self.out_shape)
