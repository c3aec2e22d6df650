"""The interface of every problem (`Problem`), and the steps that only some kernels support (`Feature`)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np

from cuda_kernels.hashed import Hashed

Shape4 = tuple[int, int, int, int]


def spanned(shape: Shape4, axes: str) -> Shape4:
    """The shape of a tensor that spans only `axes`, a substring of "nchw", of `shape`, and has size 1 along the others."""
    n, c, h, w = (d if a in axes else 1 for a, d in zip("nchw", shape, strict=True))
    return n, c, h, w


class Feature(StrEnum):
    """A step that a kernel supports only if its row says so (`supports` in tactics.kernels).

    A log says "no" and the value of a family without the step.
    """

    RESIDUAL = "residual"
    UPSAMPLED_RESIDUAL = "residual with fewer pixels"
    SCALED_INPUT = "scale and shift of its input"
    GATED_INPUT = "gate of its input"
    NORMALIZED_INPUT = "norm of its input"
    DEPTH_TO_SPACE = "depth-to-space in its stores"
    MAX_POOL = "max pool in its stores"
    AFFINE = "scale and shift behind its activation"
    LAST_ACTIVATION = "second activation"
    MULTIPLIED = "multipliers of its sums"
    RESIDUAL_MULTIPLIED = "multipliers of its residual"


class Problem(Hashed):
    """A frozen record. `str()` is its key in caches, on one line. Shapes are NCHW; `macs` counts products."""

    __slots__ = ()
    TYPE: ClassVar[str] = ""  # of its layers, in engines and reports; "": the type of its first part
    PARTS: ClassVar[tuple[str, ...]] = ()  # the fields that are problems, in the order in which a launch computes them
    LATER: ClassVar[str] = ""  # follows the names of the weights of each part behind the first that has any
    only_dense: ClassVar[bool] = False  # its kernels multiply zeros of 2:4 weights, too

    @property
    def parts(self) -> "tuple[Problem, ...]":
        """The problems that it is made of, nested parts resolved; without parts, itself alone."""
        return tuple(leaf for name in self.PARTS for leaf in getattr(self, name).parts) or (self,)

    @property
    def judged(self) -> "Problem":
        """The part whose weights decide whether the layer is sparse."""
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
        """The steps that a kernel must support in addition to the computation of the problem's class."""
        return frozenset()

    @property
    def macs(self) -> int:
        return 0

    def reference(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Computes the output: FP32 arrays of in_shapes and weights by name -> an FP32 array of out_shape."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class OneTensor(Problem):
    """A problem of a tensor whose sizes are the first fields: the only input, as large as the output unless a class says
    otherwise."""

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
