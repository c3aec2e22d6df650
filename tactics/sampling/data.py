"""Random inputs and weights of a problem, and its output by the reference, with which tactics are verified and timed.

Two tables have a function for each class of problem: `INPUTS` moves random inputs into the problem's domain, `WEIGHTS` draws
its weights.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuda_kernels import sparse24
from tactics.format import DTYPES, WHOLE, Format, is_bytes
from tactics.problems.attention import AttentionProblem
from tactics.problems.epilogue import AFFINE, MULTIPLIERS
from tactics.problems.library_problem import FLOAT, LibraryProblem
from tactics.problems.pointwise_ops import ROUNDING
from tactics.problems.problem import (
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    Problem,
    ReformatProblem,
)
from tactics.problems.protocol import Feature
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

POSITIVE = frozenset(("log", "sqrt", "pow", "rpow", "log_sum"))  # operations whose inputs are drawn at 0.5 and above
DIVISORS = frozenset(("div", "rdiv"))  # operations whose inputs are drawn at least 0.5 away from 0
Arrays = list[np.ndarray]
Weights = dict[str, np.ndarray]
Rng = np.random.Generator


def random_data(
    problem: Problem, seed: int | None = None, zeros: Sequence[bool] = (), formats: Sequence[Format] = ()
) -> tuple[Arrays, Weights]:
    """Returns (inputs, as FP16 NCHW arrays; weights by name, as FP32 arrays).

    Weights of convolutions are rounded to FP16, and are 2:4 if the problem says sparse24. Outputs have a variance near 1.
    Without `seed` the seed follows from the problem's text. `zeros`: for each input, whether its negative values become 0, as
    after a ReLU (a problem whose domain excludes 0 then moves them away from 0). `formats`: the inputs' formats; an input in a
    format of bytes gets whole numbers that the format holds.
    """
    rng = np.random.default_rng(zlib.crc32(str(problem).encode()) if seed is None else seed)
    inputs = [_normal(rng, shape) for shape in problem.in_shapes]
    for i, zero in enumerate(zeros):
        inputs[i] = np.maximum(inputs[i], 0) if zero else inputs[i]
    if type(problem) in INPUTS:
        inputs = INPUTS[type(problem)](problem, rng, inputs)
    for i, fmt in enumerate(formats):
        if not fits(inputs[i], fmt):
            inputs[i] = _bytes(rng, inputs[i], fmt.dtype)
    if problem.PARTS:
        return inputs, _part_weights(problem, seed)
    return inputs, WEIGHTS[type(problem)](problem, rng, seed) if type(problem) in WEIGHTS else {}


def reference(problem: Problem, inputs: Sequence[np.ndarray], weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the problem's output, FP32 NCHW, computed by its `reference` from random_data's inputs and weights."""
    if isinstance(problem, (ConvProblem, ConvTransposeProblem)):
        residual = inputs[1] if problem.epilogue.residual else None
        more = {name: weights[name] for name in ("scale", "shift", *AFFINE, *MULTIPLIERS) if name in weights}
        more |= {"gate": inputs[-1]} if Feature.GATED_INPUT in problem.needs else {}
        return problem.reference(inputs[0], weights["w"], weights.get("b"), residual, weights.get("slope"), **more)
    return problem.reference(*inputs, **weights)


def images(problem: Problem) -> int:
    """Returns the number of images, if each is computed independently; 0 if an image's result may depend on other images."""
    if isinstance(problem, (ReduceProblem, NormalizeProblem)):
        return 0 if "n" in problem.axes else problem.n
    if isinstance(problem, PointwiseProblem):
        return 0 if any("n" in axes for axes in problem.constants) else problem.n
    if problem.PARTS:
        return min(images(part) for part in problem.parts)
    return problem.n if isinstance(problem, (ConvTransposeProblem, PoolProblem, MoveProblem, ReformatProblem)) else 0


def of_images(problem: Problem, count: int) -> Problem:
    """Returns the problem at a batch of `count` images."""
    sizes: dict[str, Any] = {name: of_images(getattr(problem, name), count) for name in problem.PARTS} or {"n": count}
    changed: Problem = replace(problem, **sizes)  # type: ignore[type-var]  # every problem is a dataclass
    return changed


def _normal(rng: Rng, shape: tuple[int, ...]) -> np.ndarray:
    """Returns FP16 values from N(0, 1); a large array repeats the first million or so, an odd number, so that images differ."""
    size = int(np.prod(shape))
    return np.resize(rng.standard_normal(min(size, 1_000_003), np.float32).astype(np.float16), size).reshape(shape)


def _whole(x: np.ndarray) -> np.ndarray:
    """Returns 4 * |x| rounded to whole numbers, in the type and shape of x. Inputs are near N(0, 1), so uint8 can hold the
    results without a clip (none is made).
    """
    return np.round(4 * np.abs(x))


def _convolution_inputs(p: ConvProblem, inputs: Arrays) -> Arrays:
    """Makes whole numbers of x if it may be quantised or is an image (4 channels at most), and of the residual if it may be
    quantised; at most 127 where sums are multiplied.

    `inputs`: x, then the residual and the gate, if any.
    """
    end = p.epilogue
    whole = (end.multiplied or p.c <= 4, *((end.residual_multiplied,) if end.residual else ()), False)
    found = (_whole(x) if w else x for x, w in zip(inputs, whole, strict=False))
    return [np.minimum(8 * x, 127) if w and end.multiplied else x for x, w in zip(found, whole, strict=False)]


def fits(x: np.ndarray, fmt: Format) -> bool:
    """Returns whether the format holds the values of `x` exactly, if it is a format of bytes; True for other formats."""
    info = np.iinfo(DTYPES[fmt.dtype]) if is_bytes(fmt) else None
    return info is None or bool(((x == np.rint(x)) & (x >= info.min) & (x <= info.max)).all())


def _bytes(rng: Rng, x: np.ndarray, dtype: str) -> np.ndarray:
    """Returns random whole numbers in the range of the 8-bit type `dtype`, as an array of the type and shape of x."""
    least, most = np.iinfo(DTYPES[dtype]).min, np.iinfo(DTYPES[dtype]).max
    return rng.integers(least, most + 1, x.shape).astype(x.dtype)


def _reformat_inputs(p: ReformatProblem, rng: Rng, inputs: Arrays) -> Arrays:
    ends = (Format.parse(p.dst).dtype, Format.parse(p.src).dtype)
    return next(([_bytes(rng, x, dtype) for x in inputs] for dtype in ends if dtype in WHOLE), inputs)


def _library_inputs(p: LibraryProblem, rng: Rng, inputs: Arrays) -> Arrays:
    zipped = zip(inputs, p.dtypes, strict=True)
    return [x if d == FLOAT else rng.integers(0, 2, x.shape).astype(DTYPES[d]) for x, d in zipped]


def _within(operations: set[str], inputs: Arrays) -> Arrays:
    """Returns the inputs moved into the domain of all these operations: away from 0, and positive if POSITIVE has one."""
    if operations & POSITIVE:
        return [np.abs(x) + np.float16(0.5) for x in inputs]
    if operations & DIVISORS:
        return [np.where(x < 0, x - np.float16(0.5), x + np.float16(0.5)) for x in inputs]
    return inputs


def _reduce_inputs(p: ReduceProblem, rng: Rng, inputs: Arrays) -> Arrays:
    """Returns the inputs with each row scaled by its own factor, so that the rows' statistics differ by more than rounding."""
    return _within({p.kind}, [(x * rng.uniform(0.2, 2, p.out_shape)).astype(np.float16) for x in inputs])


def _convolution_weights(p: ConvProblem | ConvTransposeProblem, rng: Rng, seed: int | None) -> Weights:
    shape = (p.k, p.c // p.groups, p.r, p.s)
    w = (rng.standard_normal(shape, np.float32) / np.sqrt(np.prod(shape[1:]))).astype(np.float16)
    weights = {"w": (sparse24.prune(w) if p.sparse24 else w).astype(np.float32)}
    if p.epilogue.bias:
        weights["b"] = 0.5 * rng.standard_normal(p.k, np.float32)
    if isinstance(p, ConvProblem) and p.prologue.scaled:
        weights["scale"] = rng.uniform(0.5, 2, p.c).astype(np.float16).astype(np.float32)
        weights["shift"] = rng.standard_normal(p.c).astype(np.float16).astype(np.float32)
    if p.epilogue.act.name == "prelu":
        weights["slope"] = rng.uniform(0.05, 0.5, p.k).astype(np.float32)
    for name in AFFINE if p.epilogue.affine else ():
        weights[name] = rng.uniform(-1, 1, p.k).astype(np.float32)
    return _whole_weights(p, rng, weights) if p.epilogue.multiplied else weights


def _whole_weights(p: ConvProblem | ConvTransposeProblem, rng: Rng, weights: Weights) -> Weights:
    """Scales the weights "w" to whole numbers up to 127, and adds the vectors by which the kernel multiplies sums and residual.

    With inputs up to 127, outputs then have a variance near 1, or, if the epilogue rounds them, spread over the whole numbers
    of 8 bits.
    """
    end = p.epilogue
    largest = np.abs(weights["w"]).max(initial=1e-9)
    whole = np.round(weights["w"] * (127 / largest))
    rounds = {end.act.name, end.last.name} & {*ROUNDING}
    unit = (32.0 if rounds and not end.affine else 1.0) * largest / 127 / 64
    found = {
        "multipliers": unit * rng.uniform(0.5, 1.5, p.k),
        "residual_multipliers": rng.uniform(0.01, 0.02, p.k) * (32.0 if rounds else 1.0),
    }
    if rounds and end.affine:
        found["scales"] = rng.uniform(20, 40, p.k)
    return weights | {"w": whole} | {name: v.astype(np.float32) for name, v in found.items() if name in end.vectors}


def _part_weights(p: Problem, seed: int | None) -> Weights:
    found: dict[str, np.ndarray] = {}
    for part in p.PARTS:
        own = random_data(getattr(p, part), seed)[1]
        found |= {name + (p.LATER if found else ""): array for name, array in own.items()}
    return found


def _normalize_weights(p: NormalizeProblem, rng: Rng, seed: int | None) -> Weights:
    names = ("scale", "bias") if p.affine else ()
    return {name: rng.uniform(-2, 2, p.span(p.affine)).astype(np.float32) for name in names}


def _attention_weights(p: AttentionProblem, rng: Rng, seed: int | None) -> Weights:
    """Returns weights with which scores have a variance near 1. An added constant that spans columns is -infinity in every
    third column, like a mask, which leaves each row some columns.
    """
    spread = np.sqrt(p.inner) if not p.unit else 0.1
    weights = {"scale": (rng.uniform(0.5, 2, p.heads) / spread).astype(np.float32)}
    if p.bias:
        bias = rng.standard_normal(p.span(p.bias)).astype(np.float32)
        if "w" in p.bias:
            bias[..., 1::3] = -np.inf
        weights["bias"] = bias
    return weights


def _library_weights(p: LibraryProblem, rng: Rng, seed: int | None) -> Weights:
    return {f"c{i}": rng.integers(0, 2, shape).astype(DTYPES[d]) for i, (shape, d) in enumerate(p.constants)}


INPUTS: dict[type[Problem], Callable[..., Arrays]] = {
    ConvProblem: lambda p, rng, xs: _convolution_inputs(p, xs),
    ReformatProblem: _reformat_inputs,
    ReduceProblem: _reduce_inputs,
    PointwiseProblem: lambda p, rng, xs: _within({s.op for s in p.stages}, xs),
    LibraryProblem: _library_inputs,
}
WEIGHTS: dict[type[Problem], Callable[..., Weights]] = {
    ConvProblem: _convolution_weights,
    ConvTransposeProblem: _convolution_weights,
    PointwiseProblem: lambda p, rng, seed: {
        f"c{i}": rng.uniform(0.5, 2, p.span(axes)).astype(np.float32) for i, axes in enumerate(p.constants)
    },
    NormalizeProblem: _normalize_weights,
    AttentionProblem: _attention_weights,
    LibraryProblem: _library_weights,
}
