"""The steps that a convolution's kernel applies to its sums before it stores them."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from cuda_kernels.hashed import Hashed
from tactics.codec import As, from_json
from tactics.problems.pointwise_ops import NONE, STORED, Activation
from tactics.problems.protocol import Feature

Pair = tuple[int, int]  # along rows, along columns
Given = np.ndarray | None  # an optional weight or tensor of a problem
AFFINE = ("scales", "shifts")  # the weights of Epilogue.affine
MULTIPLIERS = ("multipliers", "residual_multipliers")  # the weights of Epilogue.multiplied and .residual_multiplied
VECTORS = ("b", "slope", *AFFINE, *MULTIPLIERS)  # every weight that has an element for each output channel


def _column(v: np.ndarray) -> np.ndarray:
    """Returns v [k] as FP32 [1,k,1,1]."""
    return np.asarray(v, np.float32).reshape(1, -1, 1, 1)


class MaxPool(NamedTuple):
    """A max pool without dilation; `pad`: before the first row and column. Keys and JSON have its eight numbers in a row."""

    window: Pair
    stride: Pair
    pad: Pair
    out: Pair


def _pool(numbers: object) -> MaxPool | None:
    """Reads a pool from its eight numbers, None from an empty list."""
    flat = from_json(tuple[int, ...], numbers)
    return MaxPool(*zip(flat[::2], flat[1::2], strict=True)) if flat else None


@dataclass(frozen=True, slots=True)
class Epilogue(Hashed):
    """The steps between a convolution's sums [n,k,p,q] and its stores, all optional, in this order:

    1. `multiplied`: sums times a value per channel, to dequantise whole numbers; `residual_multiplied`: so is the residual
    2. `bias`: + a value per channel
    3. `residual`: + a tensor of the output's shape; with `act_first` this is step 6
    4. `act`: the activation
    5. `affine`: * scale + shift per channel
    6. the residual, with `act_first`
    7. `last`: a second activation
    8. `pool`: a max pool; or `d2s` = b > 1: ONNX DepthToSpace by b, `d2s_mode` dcr or crd, to k/b^2 channels; the residual then
       has the shape after it

    `up` = u > 1: the residual has 1/u of the output's height and width, and each of its pixels is added to u x u pixels of the
    output; with depth-to-space u = d2s.
    """

    bias: bool = False
    residual: bool = False
    act: Activation = NONE
    act_first: bool = False
    affine: bool = False
    last: Activation = NONE
    d2s: int = 1
    d2s_mode: str = "dcr"
    pool: Annotated[MaxPool | None, As("a list of 8 numbers", _pool, lambda v: np.ravel(v or ()).tolist(), list)] = None
    up: int = 1
    multiplied: bool = False
    residual_multiplied: bool = False

    def __post_init__(self) -> None:
        if self.residual_multiplied and not self.residual:
            raise ValueError(f"conv: expected multipliers of a residual only with a residual, got {self}")
        if self.act.name in STORED and self.last.name in STORED:
            raise ValueError(f"conv: expected one activation with a slope or table, got {self}")
        if self.up != 1 and (not self.residual or self.d2s not in (1, self.up)):
            raise ValueError(f"conv: expected a residual whose pixels are repeated as often as the output's, got {self}")
        if self.pool and (self.residual or self.d2s > 1):
            raise ValueError(f"conv: expected a pool after a convolution with no residual or d2s, got {self}")
        if self.d2s < 1 or self.d2s_mode not in ("dcr", "crd"):
            raise ValueError(f"conv: expected d2s = b with k a multiple of b*b, mode dcr or crd, got {self}")

    @property
    def needs(self) -> frozenset[Feature]:
        found = {
            Feature.RESIDUAL: self.residual,
            Feature.DEPTH_TO_SPACE: self.d2s > 1,
            Feature.UPSAMPLED_RESIDUAL: self.up > 1,
            Feature.MAX_POOL: bool(self.pool),
            Feature.AFFINE: self.affine,
            Feature.LAST_ACTIVATION: self.last != NONE,
            Feature.TABLE: bool(self.table),
            Feature.MULTIPLIED: self.multiplied,
            Feature.RESIDUAL_MULTIPLIED: self.residual_multiplied,
        }
        return frozenset(feature for feature, needed in found.items() if needed)

    @property
    def table(self) -> tuple[float, ...]:
        """The entries of the activation that is a table; () without one."""
        return next((act.params[2:] for act in (self.act, self.last) if act.name == "table"), ())

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the weights of shape [k] that the kernel reads; "b", the bias, is always among them."""
        return ("b", *(["slope"] if self.act.name == "prelu" else []), *(AFFINE if self.affine else ()), *self.multipliers)

    @property
    def multipliers(self) -> tuple[str, ...]:
        """The names in MULTIPLIERS that the kernel reads."""
        return tuple(name for name, used in zip(MULTIPLIERS, (self.multiplied, self.residual_multiplied), strict=True) if used)

    def finish(self, y: np.ndarray, bias: Given, residual: Given, slope: Given, **vectors: Given) -> np.ndarray:
        """Returns the sums y [n,k,p,q] after steps 1 to 7, in FP32. `residual`: [n,k,p,q]; `bias`, `slope` (of prelu) and
        `vectors`, by the names in AFFINE and MULTIPLIERS: [k].
        """
        (scales, shifts), (sums, added) = ([vectors.get(name) for name in names] for names in (AFFINE, MULTIPLIERS))
        y = y if sums is None else y * _column(sums)
        residual = residual if residual is None or added is None else residual * _column(added)
        y = y if bias is None else y + _column(bias)
        y = self.act.apply(y if residual is None or self.act_first else y + residual, slope)
        y = y if scales is None or shifts is None else y * _column(scales) + _column(shifts)
        return self.last.apply(y if residual is None or not self.act_first else y + residual)


RELU = Epilogue(bias=True, act=Activation("relu"))  # most convolutions have this one
