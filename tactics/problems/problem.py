"""Problems: frozen, hashable records that each state a computation, without a method for it. `str()` is the key in caches,
`reference()` the meaning in NumPy.

Shapes are NCHW. Tensors are FP16 in memory unless a tactic's formats differ; arithmetic is FP32 inside one problem and rounded
once at its end.
"""

from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import numpy as np

from tactics.problems.attention import AttentionProblem
from tactics.problems.convolution import ConvProblem, ConvTransposeProblem, Keyed, PoolProblem
from tactics.problems.epilogue import Epilogue
from tactics.problems.gather import GatherProblem, ResizeProblem, ViewProblem
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.pointwise_ops import NONE, Activation, Stage
from tactics.problems.protocol import OneTensor, Problem, Shape4, spanned
from tactics.problems.reductions import NormalizeProblem, ReduceProblem


@dataclass(frozen=True, slots=True)
class PointwiseProblem(Keyed, OneTensor):
    """A chain of elementwise stages: v = tensor 0, then v = stage(v) for each of `stages`; the output is v, [n,c,h,w].

    `tensors`, `constants`: the axes that each one spans; along the others it has size 1 and is broadcast. "nchw": a whole
    tensor; "nc": a value per image and channel; "hw": a value per pixel; "": one value. The operand "t<i>" of a stage is input
    i, and "c<i>" is constant i, the weight of that name. Example: stages (add(c0), relu), constants ("c",): relu(t0 + a value
    per channel).
    """

    TYPE: ClassVar[str] = "pointwise"
    stages: tuple[Stage, ...] = ()
    tensors: tuple[str, ...] = ("nchw",)
    constants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = {f"t{i}" for i in range(len(self.tensors))} | {f"c{i}" for i in range(len(self.constants))}
        if unknown := [s for s in self.stages if s.operand and s.operand not in named]:
            raise ValueError(f"pointwise: {unknown[0]} reads an unknown tensor, expected one of {', '.join(sorted(named))}")
        if wrong := [a for a in (*self.tensors, *self.constants) if a != "".join(x for x in "nchw" if x in a)]:
            raise ValueError(f"pointwise: axes are written in the order nchw, got {wrong[0]!r}")

    def span(self, axes: str) -> Shape4:
        """Returns the shape of a tensor or constant that spans `axes`."""
        return spanned(self.out_shape, axes)

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return tuple(self.span(axes) for axes in self.tensors)

    @property
    def table(self) -> tuple[float, ...]:
        """The entries of the stage that is a table; () without one."""
        return next((s.params[2:] for s in self.stages if s.op == "table"), ())

    def reference(self, *tensors: np.ndarray, **constants: np.ndarray) -> np.ndarray:
        """Returns the chain's output, FP32. `tensors`: FP32 arrays of in_shapes; `constants`: c0, c1, ... by name, each with as
        many elements as span(its axes)."""
        operands = {f"t{i}": np.asarray(x, np.float32) for i, x in enumerate(tensors)}
        for i, axes in enumerate(self.constants):
            operands[f"c{i}"] = np.asarray(constants[f"c{i}"], np.float32).reshape(self.span(axes))
        v = operands["t0"]
        with np.errstate(all="ignore"):
            for stage in self.stages:
                v = stage.apply(v, operands.get(stage.operand)).astype(np.float32)
        return np.array(np.broadcast_to(v, self.out_shape))


class _Pair(Problem):
    """The base class of two convolutions, `first` and `second`, in one kernel. As sizes of the pair, c, r, s and groups are the
    first's, k is the second's."""

    __slots__ = ()
    PARTS: ClassVar[tuple[str, ...]] = ("first", "second")
    LATER: ClassVar[str] = "2"
    first: ConvProblem
    second: "ConvProblem | SqueezeExciteProblem"
    c, r, s, groups = (property(attrgetter(f"first.{name}")) for name in ("c", "r", "s", "groups"))
    k = property(attrgetter("second.k"))

    @property
    def out_shape(self) -> Shape4:
        return self.second.out_shape

    @property
    def epilogue(self) -> Epilogue:
        return self.second.epilogue

    @property
    def sparse24(self) -> bool:
        """Whether the weights of both have the 2:4 pattern; the kernel of the pair is dense nevertheless."""
        return self.first.sparse24 and self.second.sparse24

    @property
    def macs(self) -> int:
        return self.first.macs + self.second.macs


@dataclass(frozen=True, slots=True)
class BackToBackProblem(_Pair):
    """second(first(x)): two ConvProblems, the second with a 1x1 kernel; only the second may have a residual."""

    TYPE: ClassVar[str] = "conv"
    only_dense: ClassVar[bool] = True
    first: ConvProblem
    second: ConvProblem

    def __post_init__(self) -> None:
        if self.second.in_shapes[0] != self.first.out_shape or self.first.epilogue.residual:
            raise ValueError(f"back to back: expected a second convolution of the first one's output, got {self}")

    def __str__(self) -> str:
        return f"back_to_back {self.first} -> {self.second}"

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return (*self.first.in_shapes, *self.second.in_shapes[1:])

    def reference(self, x: np.ndarray, residual: np.ndarray | None = None, **weights: np.ndarray) -> np.ndarray:
        """Returns second(first(x)), FP32; arrays are FP32. Weights: "w", "b", "slope" of the first, "w2", "b2", "slope2" of the
        second convolution.
        """
        z = self.first.reference(x, weights["w"], weights.get("b"), None, weights.get("slope"))
        return self.second.reference(z, weights["w2"], weights.get("b2"), residual, weights.get("slope2"))


@dataclass(frozen=True, slots=True)
class SqueezeExciteProblem(_Pair):
    """second(first(average(x))): a global average pool and two 1x1 convolutions."""

    TYPE: ClassVar[str] = "squeeze_excite"
    PARTS: ClassVar[tuple[str, ...]] = ("average", "first", "second")
    only_dense: ClassVar[bool] = True
    average: PoolProblem
    first: ConvProblem
    second: ConvProblem

    def __post_init__(self) -> None:
        if self.first.in_shapes[0] != self.average.out_shape or self.second.in_shapes != (self.first.out_shape,):
            raise ValueError(f"squeeze_excite: expected each to read the one before, got {self}")

    def __str__(self) -> str:
        return f"squeeze_excite {self.average} -> {self.first} -> {self.second}"

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return self.average.in_shapes

    @property
    def judged(self) -> Problem:
        return self.first

    def reference(self, x: np.ndarray, **weights: np.ndarray) -> np.ndarray:
        """Returns the gate [n,c,1,1]: the average of x [n,c,h,w] through both 1x1 convolutions, in FP32. Weights: "w", "b" of
        the first and "w2", "b2" of the second convolution."""
        hidden = self.first.reference(self.average.reference(x), weights["w"], weights.get("b"))
        return self.second.reference(hidden, weights["w2"], weights.get("b2"))


@dataclass(frozen=True, slots=True)
class ScaledConvProblem(_Pair):
    """act(y * second(y)) with y = first(x): a convolution whose output is scaled, per image and channel, by squeeze-excite."""

    TYPE: ClassVar[str] = "conv"
    only_dense: ClassVar[bool] = True
    first: ConvProblem
    second: SqueezeExciteProblem
    act: Activation = NONE

    def __post_init__(self) -> None:
        y = self.first.out_shape
        if self.second.in_shapes != (y,) or self.second.k != y[1] or self.first.epilogue.residual:
            raise ValueError(f"scaled conv: expected the scale of the convolution's output, got {self}")

    def __str__(self) -> str:
        return f"scaled {self.first} -> {self.second}{f' {self.act}' if self.act != NONE else ''}"

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return self.first.in_shapes

    @property
    def out_shape(self) -> Shape4:
        return self.first.out_shape

    @property
    def epilogue(self) -> Epilogue:
        return self.first.epilogue

    @property
    def judged(self) -> Problem:
        return self.second.judged

    def reference(self, x: np.ndarray, **weights: np.ndarray) -> np.ndarray:
        """Returns the scaled output, FP32; arrays are FP32. Weights: "w", "b", "slope" of the convolution, and squeeze-excite's
        with a 2 appended: "w2", "b2", "w22", "b22".
        """
        y = self.first.reference(x, weights["w"], weights.get("b"), None, weights.get("slope"))
        scale = self.second.reference(y, **{name[:-1]: w for name, w in weights.items() if name in ("w2", "b2", "w22", "b22")})
        return self.act.apply(y * scale)


@dataclass(frozen=True, slots=True)
class ChainedProblem(Problem):
    """A pool or a normalization, `first`, then a chain of elementwise stages, `chain`, whose tensor 0 is the output of
    `first`."""

    PARTS: ClassVar[tuple[str, ...]] = ("first", "chain")
    first: PoolProblem | NormalizeProblem
    chain: PointwiseProblem

    def __post_init__(self) -> None:
        if self.chain.out_shape != self.first.out_shape or self.chain.tensors[:1] != ("nchw",) or not self.chain.stages:
            raise ValueError(
                f"chained: expected a chain whose first tensor is the whole output of the first problem, got {self}"
            )

    def __str__(self) -> str:
        return f"chained {self.first} -> {self.chain}"

    @property
    def n(self) -> int:
        return self.first.n

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return (*self.first.in_shapes, *self.chain.in_shapes[1:])

    @property
    def out_shape(self) -> Shape4:
        return self.first.out_shape

    def reference(self, x: np.ndarray, *tensors: np.ndarray, **weights: np.ndarray) -> np.ndarray:
        """Returns the chain's output, FP32; arrays are FP32. `tensors`: further inputs of `first`, then the chain's tensors 1,
        2, ...; `weights`: of both, by name.
        """
        constants = {f"c{i}": weights[f"c{i}"] for i in range(len(self.chain.constants))}
        own = {name: array for name, array in weights.items() if name not in constants}
        own_inputs = len(self.first.in_shapes)
        first = self.first.reference(x, *tensors[: own_inputs - 1], **own)
        return self.chain.reference(first, *tensors[own_inputs - 1 :], **constants)


@dataclass(frozen=True, slots=True)
class MoveProblem(Keyed, OneTensor):
    """A copy of input elements to other places; `out` = (c, h, w) of the output. `start`, `step`: for (c, h, w), by `kind`:

    kind "window": out[n, c, h, w] = x[n, start_c + c*step_c, start_h + h*step_h, start_w + w*step_w] (Slice, Pad),
    or `fill` where that is outside of x;

    kind "upsample": out[n, c, h, w] = x[n, c, h // step_h, w // step_w] (nearest Resize by integer factors);

    kind "d2s_dcr" / "d2s_crd": ONNX DepthToSpace with blocks of step_h x step_h; "s2d_dcr" / "s2d_crd": its inverse;

    kind "channels": a shuffle of step_h groups, out[n, j*groups + g] = x[n, g*(c/groups) + j].
    """

    TYPE: ClassVar[str] = "move"
    kind: str
    out: tuple[int, int, int]
    start: tuple[int, int, int] = (0, 0, 0)
    step: tuple[int, int, int] = (1, 1, 1)
    fill: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("window", "upsample", "d2s_dcr", "d2s_crd", "s2d_dcr", "s2d_crd", "channels"):
            raise ValueError(f"move: unknown kind {self.kind!r}")
        b, (k, high, wide) = self.step[1], self.out
        fits = {
            "window": True,
            "channels": b > 0 and self.c % b == 0 and self.out == (self.c, self.h, self.w),
            "upsample": k == self.c and high <= self.h * b and wide <= self.w * self.step[2],
            "d2s": (self.c, self.h * b, self.w * b) == (k * b * b, high, wide),
            "s2d": (self.c * b * b, self.h, self.w) == (k, high * b, wide * b),
        }
        if not fits[self.kind.partition("_")[0]]:
            raise ValueError(f"move: expected an output of the size that {self.kind} gives, got {self}")

    @property
    def out_shape(self) -> Shape4:
        return (self.n, *self.out)

    @property
    def is_part(self) -> bool:
        """Whether the output is a contiguous range of the input's channels and nothing else is changed."""
        rows_and_columns = (self.start[1:], self.step, self.out[1:]) == ((0, 0), (1, 1, 1), (self.h, self.w))
        return self.kind == "window" and rows_and_columns and self.start[0] >= 0 and self.start[0] + self.out[0] <= self.c

    def source(self, c: np.ndarray, h: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the input's (c, h, w) for output coordinates c, h, w: integer arrays that broadcast. Some may lie outside
        x."""
        b = self.step[1]
        if self.kind == "window":
            c, h, w = (s + i * t for s, i, t in zip(self.start, (c, h, w), self.step, strict=True))
            return c, h, w
        if self.kind == "upsample":
            return c, h // self.step[1], w // self.step[2]
        if self.kind == "d2s_dcr":
            return ((h % b) * b + w % b) * self.out[0] + c, h // b, w // b
        if self.kind == "d2s_crd":
            return (c * b + h % b) * b + w % b, h // b, w // b
        if self.kind == "channels":
            return c % b * (self.c // b) + c // b, h, w
        corner, c = (c // self.c, c % self.c) if self.kind == "s2d_dcr" else (c % b**2, c // b**2)
        return c, h * b + corner // b, w * b + corner % b

    def reference(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x, np.float32)
        c, h, w = np.meshgrid(*(np.arange(d) for d in self.out), indexing="ij")
        c, h, w = self.source(c, h, w)
        ok = (c >= 0) & (c < self.c) & (h >= 0) & (h < self.h) & (w >= 0) & (w < self.w)
        picked = x[:, np.clip(c, 0, self.c - 1), np.clip(h, 0, self.h - 1), np.clip(w, 0, self.w - 1)]
        return np.where(ok, picked, np.float32(self.fill))


@dataclass(frozen=True, slots=True)
class ConcatProblem(Keyed):
    """The join of inputs along `axis`: input i has size sizes[i] there; all have the sizes `rest` along the other three
    axes."""

    TYPE: ClassVar[str] = "concat"
    sizes: tuple[int, ...]
    rest: tuple[int, int, int]
    axis: int = 1

    def __post_init__(self) -> None:
        if self.axis not in range(4) or len(self.rest) != 3 or not self.sizes:
            raise ValueError(f"concat: expected an axis 0 to 3, sizes along it and 3 sizes along the others, got {self}")

    def _shape(self, size: int) -> Shape4:
        dims = *self.rest[: self.axis], size, *self.rest[self.axis :]
        n, c, h, w = dims
        return n, c, h, w

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return tuple(self._shape(size) for size in self.sizes)

    @property
    def out_shape(self) -> Shape4:
        return self._shape(sum(self.sizes))

    def reference(self, *xs: np.ndarray) -> np.ndarray:
        return np.concatenate([np.asarray(x, np.float32) for x in xs], axis=self.axis)


@dataclass(frozen=True, slots=True)
class ReformatProblem(Keyed, OneTensor):
    """A copy of a tensor from format `src` to format `dst`, as Format prints them, for example "fp16:hwc8"."""

    TYPE: ClassVar[str] = "reformat"
    src: str
    dst: str

    def reference(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x, np.float32)


@dataclass(frozen=True, slots=True)
class MatmulProblem(Keyed):
    """The product a @ b of two tensors that the network computes: a [*a_batch, m, k], b [*b_batch, k, n] -> [*batch, m, n].

    There are two batch dimensions; a 1 in `a_batch` or `b_batch` is broadcast. `trans_a`: a is [*a_batch, k, m]; `trans_b`: b
    is [*b_batch, n, k].
    """

    TYPE: ClassVar[str] = "matmul"
    a_batch: tuple[int, int]
    b_batch: tuple[int, int]
    m: int
    n: int
    k: int
    trans_a: bool = False
    trans_b: bool = False

    def __post_init__(self) -> None:
        if any(a != b and 1 not in (a, b) for a, b in zip(self.a_batch, self.b_batch, strict=True)):
            raise ValueError(f"matmul: batches {self.a_batch} and {self.b_batch} do not broadcast")

    @property
    def batch(self) -> tuple[int, int]:
        (a, b), (c, d) = self.a_batch, self.b_batch
        return max(a, c), max(b, d)

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        a = (self.k, self.m) if self.trans_a else (self.m, self.k)
        b = (self.n, self.k) if self.trans_b else (self.k, self.n)
        return (*self.a_batch, *a), (*self.b_batch, *b)

    @property
    def out_shape(self) -> Shape4:
        return (*self.batch, self.m, self.n)

    @property
    def macs(self) -> int:
        return self.batch[0] * self.batch[1] * self.m * self.n * self.k

    def reference(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        return (a.swapaxes(2, 3) if self.trans_a else a) @ (b.swapaxes(2, 3) if self.trans_b else b)


# Every kind of problem that a file may name.
# fmt: off
AnyProblem = (
    ConvProblem | BackToBackProblem | SqueezeExciteProblem | ScaledConvProblem | ConvTransposeProblem | PoolProblem
    | PointwiseProblem | MoveProblem | ConcatProblem | MatmulProblem | AttentionProblem | ReformatProblem | ViewProblem
    | GatherProblem | ResizeProblem | ReduceProblem | NormalizeProblem | ChainedProblem | LibraryProblem
)
# fmt: on
