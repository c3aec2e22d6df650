"""A launch as plain data, and how kernel arguments are written; shared by all kernel families.

A family names each argument as the kernel's parameter struct does: {"x": ("in", 0), "k": ("i32", 64), ...}. Values are
("in", i), ("out", 0), ("weights", section), ("workspace", 0), ("counters", 0) for addresses, ("i32" | "i64" | "f32", value), or
("map", cuda_kernels.tensor_maps.Map) of one of those addresses.
`launch` puts them in the struct's order, which it reads from the source (cuda_kernels/params.py). NONFINITE is a 4-byte word
that the launch sets to 1 when it stores infinity or NaN (include/nonfinite.cuh), and else leaves as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cuda_kernels.params import arrange
from tactics.format import LAYOUTS, WHOLE, Format, Strides, padded_channels, strides
from tactics.problems.epilogue import AFFINE, MULTIPLIERS
from tactics.problems.pointwise_ops import ACTIVATION_CODES, NONE, POINTWISE
from tactics.problems.problem import ConvProblem, PoolProblem
from tactics.problems.protocol import Problem, Shape4
from tactics.tactic import Tactic

Arg = tuple[str, Any]  # (kind, value): a number, or the name of a section of weights
Args = dict[str, Arg]
NULL: Arg = ("i64", 0)
NONFINITE: Arg = ("nonfinite", 0)


@dataclass(frozen=True, slots=True)
class Store:
    """The output pixels of a convolution: its pixel (oh, ow) is pixel first + step * (oh, ow) of an output of shape `out`,
    NCHW.

    `name` is appended to the names of the weight sections.
    """

    out: tuple[int, int, int, int]
    first: tuple[int, int] = (0, 0)
    step: tuple[int, int] = (1, 1)
    name: str = ""

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Returns the index of pixel (0, 0) in a row-major image, and the distances in pixels between neighbours along oh and
        along ow.
        """
        return self.first[0] * self.out[3] + self.first[1], self.step[0] * self.out[3], self.step[1]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch; `grid` and `block` count blocks and threads, `smem` is dynamic shared memory in bytes.

    `workspace`: bytes of scratch memory, in any state; `counters`: bytes that are zero before and left zero after.
    """

    kernel: str
    values: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    args: tuple[Arg, ...]
    workspace: int = 0
    counters: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a squeeze-excite's hidden values that a convolution's launch computes in addition to its outputs
    (include/hidden_share.cuh): its arguments, and bytes of dynamic shared memory and of workspace.
    """

    args: tuple[tuple[str, Arg], ...]
    smem: int
    workspace: int

    def behind(self, smem: int) -> tuple[Args, int]:
        """Returns (its arguments, bytes of shared memory in all), with `smem` bytes of the convolution's own before it."""
        own = -(-smem // 16) * 16
        return member("share", dict(self.args) | ints(held_at=own)), own + self.smem


class CallArray(NamedTuple):
    """An array that a library function reads or writes, linear in memory. `at`: its address."""

    at: Arg
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A library function (tactics.problems.array_functions) instead of a launch.

    `ins`: in the function's order, None for an absent one; `part`: the number of the output that is stored in `out`.
    """

    function: str
    attributes: tuple[tuple[str, object], ...]
    ins: tuple[CallArray | None, ...]
    out: CallArray
    part: int = 0
    workspace: ClassVar[int] = 0
    counters: ClassVar[int] = 0


def linear(fmt: Format) -> bool:
    """Whether channels lie in planes of their own (V = 1), so that 16-byte accesses along channels are impossible."""
    return LAYOUTS[fmt.layout].vector < 8


def launch(
    kernel: str,
    values: Mapping[str, int],
    grid: tuple[int, int, int],
    block: int,
    smem: int,
    args: Mapping[str, Arg],
    workspace: int = 0,
    counters: int = 0,
) -> Launch:
    """Makes a launch of blocks of `block` threads. Raises ValueError where `args` are not the members of the kernel's
    parameters.
    """
    fixed = tuple(sorted(values.items()))
    return Launch(kernel, fixed, grid, (block, 1, 1), smem, arrange(kernel, fixed, args), workspace, counters)


def ints(**values: int) -> Args:
    """Arguments that are 32-bit integers."""
    return {name: ("i32", int(v)) for name, v in values.items()}


def floats(**values: float) -> Args:
    return {name: ("f32", float(v)) for name, v in values.items()}


def member(name: str, args: Mapping[str, Arg]) -> Args:
    """Arguments of a struct that is the member `name` of the parameters: each name becomes `name.inner`."""
    return {f"{name}.{inner}": value for inner, value in args.items()}


def view_args(name: str, s: Strides) -> Args:
    """The strides of a tensor as the kernels' struct View, or, if `name` ends in "_", as four members that begin with it."""
    joined = name if name.endswith("_") else name + "."
    parts = ("n", s.n), ("block", s.block), ("pixel", s.pixel), ("log2v", s.log2v)
    return {joined + part: ("i32", int(v)) for part, v in parts}


def spread_args(name: str, s: Strides, axes: str, width: int, rows: bool) -> Args:
    """The kernels' struct Spread of a tensor that spans `axes` and is repeated along the others; `width`: its own columns.

    Without `rows`, the kernel does not split pixels: all of them are columns of one row.
    """
    row = s.pixel * width if "h" in axes else 0
    column = s.pixel if "w" in axes or (not rows and "h" in axes) else 0
    log2v, mask = (s.log2v, (1 << s.log2v) - 1) if "c" in axes else (31, 0)
    return member(name, ints(n=s.n if "n" in axes else 0, block=s.block, row=row, column=column, log2v=log2v, mask=mask))


def conv_pointers(p: ConvProblem, name: str = "") -> Args:
    """The addresses in every convolution's struct; `name` is appended to the names of the weight sections."""
    vectors = (*(AFFINE if p.epilogue.affine else ()), *p.epilogue.multipliers)
    slope: Arg = ("weights", "slope" + name) if p.epilogue.act.name == "prelu" else NULL
    more: Args = {vector: ("weights", vector + name) for vector in vectors}
    return more | {
        "nonfinite": NONFINITE,
        "x": ("in", 0),
        "w": ("weights", "w" + name),
        "bias": ("weights", "b" + name),
        "slope": ("weights", "table") if p.epilogue.table else slope,
        "residual": ("in", 1) if p.epilogue.residual else NULL,
        "y": ("out", 0),
    }


def window_args(p: ConvProblem | PoolProblem) -> Args:
    (stride_h, stride_w), (dil_h, dil_w) = p.stride, p.dilation
    return ints(stride_h=stride_h, stride_w=stride_w, pad_t=p.pad[0], pad_l=p.pad[1], dil_h=dil_h, dil_w=dil_w)


def conv_args(
    p: ConvProblem, tactic: Tactic, store: Store | None, strided: tuple[Strides, ...] | None, views: tuple[str, str, str]
) -> Args:
    """Arguments of convolutions without tensor cores' tiles: pointers, sizes, window, and the strides of each tensor.

    `views`: the prefixes of the names of input, output and residual. `strided`: as `launches` takes it.
    """
    store, y_fmt = store or Store(p.out_shape), tactic.out
    added = tactic.ins[1] if p.epilogue.residual else y_fmt
    x, *_, y = ends = strided or (strides(tactic.ins[0], p.in_shapes[0]), strides(added, store.out), strides(y_fmt, store.out))
    args = conv_pointers(p, store.name) | window_args(p) | alpha_beta(p) | pixel_args(store)
    for name, lies in zip(views, (x, y, ends[1]), strict=True):
        args |= view_args(name, lies)
    return args | ints(h=p.h, w_in=p.w, k=p.k, p=p.p, q=p.q, y_c=padded_channels(y_fmt.layout, store.out[1]))


def pixel_args(store: Store) -> Args:
    first, row, column = store.pixels
    return ints(first=first, row_pixels=row, column_pixels=column)


def vector_sections(
    p: ConvProblem, weights: Mapping[str, np.ndarray], size: int, at: Any = None, taken: Any = slice(None)
) -> dict[str, np.ndarray]:
    """The epilogue's weights as FP32 sections of `size` elements, zeros where none are given.

    The elements `taken` of the problem's vectors go to the positions `at`; None: to the first ones.
    """
    sections = {name: np.zeros(size, np.float32) for name in p.epilogue.vectors}
    for name, section in sections.items():
        if weights.get(name) is not None:
            section[slice(p.k) if at is None else at] = np.asarray(weights[name], np.float32).reshape(-1)[taken]
    return sections


CONSTANT_VECTOR = 32  # channels of a broadcast constant are padded to these, the widest vector of any format


def constant_strides(shape: Shape4) -> Strides:
    """The strides of a constant of this shape in the layout of `constant_section`."""
    _, c, h, w = shape
    c = c if c == 1 else padded_channels("chw32", c)
    return Strides(c * h * w, CONSTANT_VECTOR, c, CONSTANT_VECTOR.bit_length() - 1)


def constant_section(array: np.ndarray, shape: Shape4) -> np.ndarray:
    """Converts a constant to FP32 in the order n, h, w, c, with channels padded to whole vectors of any format."""
    array = np.asarray(array, np.float32).reshape(shape).transpose(0, 2, 3, 1)
    more = 0 if array.shape[3] == 1 else -array.shape[3] % CONSTANT_VECTOR
    return np.ascontiguousarray(np.pad(array, ((0, 0), (0, 0), (0, 0), (0, more)))).reshape(-1)


def constant_bytes(shape: Shape4) -> int:
    """Bytes of `constant_section`."""
    n, c, h, w = shape
    return 4 * n * h * w * (c if c == 1 else padded_channels("chw32", c))


def own_strides(problem: Problem, tactic: Tactic) -> tuple[Strides, ...]:
    """The strides of the inputs, then of the output, where each has memory of its own."""
    return tuple(strides(f, s) for f, s in zip((*tactic.ins, tactic.out), problem.all_shapes, strict=True))


def epilogue_values(problem: ConvProblem) -> dict[str, int]:
    """The kernels' compile-time values of the epilogue (include/activation.cuh).

    ACT; RES: 0 no residual, 1 added before the activation, 2 after it; AFFINE and LAST where scale and shift, or a second
    activation follow; MULTIPLIED and RES_MULTIPLIED; TABLE: which of the two activations is a table.
    """
    end = problem.epilogue
    values = {"ACT": act_code(problem), "RES": (2 if end.act_first else 1) if end.residual else 0}
    last = {"LAST": ACTIVATION_CODES[end.last.name]} if end.last != NONE else {}
    multiplied = {
        macro: 1 for macro, name in zip(("MULTIPLIED", "RES_MULTIPLIED"), MULTIPLIERS, strict=True) if name in end.vectors
    }
    table = {"TABLE": 1 + (end.last.name == "table")} if end.table else {}
    return values | ({"AFFINE": 1} if end.affine else {}) | last | multiplied | table


def epilogue_instructions(problem: ConvProblem) -> int:
    """Instructions per output of its epilogue beyond a bias and a ReLU, which every family counts."""
    end = problem.epilogue
    return sum(POINTWISE[act.name].instructions - 2 for act in (end.act, end.last)) + int(end.affine) + len(end.multipliers)


def act_code(problem: ConvProblem) -> int:
    """The activation's number in include/activation.cuh."""
    return ACTIVATION_CODES[problem.epilogue.act.name]


def f32_values(x: Format, y: Format) -> dict[str, int]:
    """The compile-time values of include/types.cuh where a kernel's input or output is FP32; else none."""
    found = {"X_F32": int(x.dtype == "fp32"), "Y_F32": int(y.dtype == "fp32")}
    return found if any(found.values()) else {}


def byte_values(side: str, fmt: Format) -> dict[str, int]:
    """The compile-time value of include/types.cuh where that side of a kernel, "X" or "Y", is a tensor of bytes; else none."""
    return {f"{side}_BYTES": 1 + (fmt.dtype == "uint8")} if fmt.dtype in WHOLE else {}


def alpha_beta(problem: ConvProblem, number: str = "") -> Args:
    """Arguments with the activations' parameters; `number` is appended to the names of the first one's."""
    (a, b), last = (*problem.epilogue.act.params, 0.0, 0.0)[:2], problem.epilogue.last
    args = floats(**{"alpha" + number: a, "beta" + number: b})
    if last != NONE:
        a, b = (*last.params, 0.0, 0.0)[:2]
        args |= floats(alpha_last=a, beta_last=b)
    return args


def grid(threads: int) -> tuple[int, int, int]:
    """The grid of blocks of 256 threads for this many threads."""
    return (max(1, -(-threads // 256)), 1, 1)


def store_pixels(store: Store, step: int) -> Args:
    """Returns the arguments with which the epilogue finds the address of a GEMM pixel in y; `step`: elements from one pixel of
    y to the next.
    """
    first, row, column = store.pixels
    return ints(y_row=row * step, y_col=column * step, y_first=first * step, y_corner=store.out[3] * step)


def residual_pixels(p: ConvProblem, store: Store, step: int) -> Args:
    """Returns the arguments with which the epilogue finds the residual of a GEMM pixel (include/conv.cuh); `step`: elements
    from one pixel to the next.
    """
    first, row, column = store.pixels
    up = p.epilogue.up
    if up > 1:  # one pixel of it for up x up of y: those of one GEMM pixel, or of as many GEMM pixels
        row = p.out_shape[3] // up * step
        return ints(r_first=0, r_row=row, r_col=step, r_up=up // p.epilogue.d2s, r_corner=0, r_step=0)
    corner = store.out[3] * step
    return ints(r_first=first * step, r_row=row * step, r_col=column * step, r_up=1, r_corner=corner, r_step=step)
