"""Problem, the interface of all problems, and Feature, the steps that only some kernels support."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

from cuda_kernels.hashed import Hashed

Shape4 = tuple[int, int, int, int]


def spanned(shape: Shape4, axes: str) -> Shape4:
    """Returns `shape` with size 1 along each axis that is not in `axes`, a substring of "nchw".

    >>> spanned((2, 8, 4, 4), "nc")
    (2, 8, 1, 1)
    """
    n, c, h, w = (d if a in axes else 1 for a, d in zip("nchw", shape, strict=True))
    return n, c, h, w


class Feature(StrEnum):
    """A step of a problem that a kernel supports only if its row in tactics.kernels lists it in `supports`.

    A log says "no" and the value as the reason against a kernel that lacks the step.
    """

    RESIDUAL = "residual"
    UPSAMPLED_RESIDUAL = "residual with fewer pixels"
    SCALED_INPUT = "scale and shift of its input"
    GATED_INPUT = "gate of its input"
    NORMALIZED_INPUT = "norm of its input"
    BORDER = "numbers other than 0 around its input"
    DEPTH_TO_SPACE = "depth-to-space in its stores"
    MAX_POOL = "max pool in its stores"
    AFFINE = "scale and shift behind its activation"
    LAST_ACTIVATION = "second activation"
    TABLE = "table as an activation"
    MULTIPLIED = "multipliers of its sums"
    RESIDUAL_MULTIPLIED = "multipliers of its residual"


class Problem(Hashed):
    """The base class of problems, which are frozen records. `str()`: the problem's key in caches, one line. Shapes are NCHW.
    `macs`: the number of multiplications that matrix products and convolutions need."""

    __slots__ = ()
    TYPE: ClassVar[str] = ""  # of its layers, in engines and reports; "": the type of its first part
    PARTS: ClassVar[tuple[str, ...]] = ()  # the fields that are problems, in the order in which a launch computes them
    LATER: ClassVar[str] = ""  # appended to the weights' names of each part after the first part with weights: "2" gives "w2"
    only_dense: ClassVar[bool] = False  # whether its kernels multiply the zeros of 2:4 weights too

    @property
    def parts(self) -> "tuple[Problem, ...]":
        """The problems in PARTS and in their PARTS, in order; (self,) if there are none."""
        return tuple(leaf for name in self.PARTS for leaf in getattr(self, name).parts) or (self,)

    @property
    def judged(self) -> "Problem":
        """The problem, self or a part, whose weights decide whether the layer is sparse."""
        return self

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        raise NotImplementedError

    @property
    def out_shape(self) -> Shape4:
        raise NotImplementedError

    @property
    def all_shapes(self) -> tuple[Shape4, ...]:
        """The shapes of the inputs, then of the output."""
        return (*self.in_shapes, self.out_shape)

    @property
    def needs(self) -> frozenset[Feature]:
        """The optional steps that this problem has, which its kernel must support."""
        return frozenset()

    @property
    def table(self) -> tuple[float, ...]:
        """The entries of the activation that is a table, the problem's or that of one of its parts; () without one."""
        return next((part.table for part in self.parts if part is not self and part.table), ())

    @property
    def macs(self) -> int:
        return 0

    def reference(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Returns the output, an FP32 array of out_shape, from FP32 arrays of in_shapes and weights by name."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OneTensor(Problem):
    """The base class of problems whose first fields are the sizes of input 0. Unless a subclass says otherwise, that is the
    only input, and the output has the same shape."""

    n: int
    c: int
    h: int
    w: int

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return ((self.n, self.c, self.h, self.w),)

    @property
    def out_shape(self) -> Shape4:
        return (self.n, self.c, self.h, self.w)
