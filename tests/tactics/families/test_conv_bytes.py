"""Convolutions of whole numbers on every tile, bit for bit beside NumPy's integers, in bytes and in FP16."""

import random
import zlib
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels import sparse24
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.candidates import accepts, candidates
from tactics.families import conv_bytes
from tactics.format import DTYPES, WHOLE
from tactics.problems.convolution import window_sums
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.problem import ConvProblem
from tactics.problems.prologue import Prologue
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Tactic
from tests.problems import assert_written_once, check, conv_case, execute, table_of

DEVICE = named("a100")
RANGE = {"int8": (-128.0, 127.0), "uint8": (0.0, 255.0)}
ROUNDED = {y: (Activation("quantize", ends), table_of(-37, 90, ends)) for y, ends in RANGE.items()}


def drawn(pick: random.Random) -> tuple[ConvProblem, tuple[str, ...]]:
    """A problem, and the types of its inputs and its output."""
    x, y = pick.choice(WHOLE), pick.choice(("fp16", *WHOLE, *WHOLE))
    residual = pick.random() < 0.4
    rounded = pick.choice(ROUNDED[y]) if y in WHOLE else NONE
    act = pick.choice((NONE, Activation("relu"), rounded))
    last = rounded if act != rounded else NONE
    end = Epilogue(
        bias=True,
        residual=residual,
        act=act,
        act_first=residual and last != NONE and pick.random() < 0.5,
        affine=pick.random() < 0.3 and last != NONE,
        last=last,
        multiplied=True,
        residual_multiplied=residual and (y in WHOLE or pick.random() < 0.5),
    )
    r = pick.choice((1, 1, 3))
    sizes = pick.choice((1, 2)), 4 * pick.randint(1, 30), pick.randint(3, 11), pick.randint(3, 11)
    return ConvProblem(
        *sizes,
        pick.choice((8, 24, 33, 72, 130)),
        r,
        r,
        stride=pick.choice(((1, 1), (2, 2), (2, 1))),
        pad=(r // 2,) * 4 if pick.random() < 0.7 else (0, 1, 2, 0),
        dilation=(pick.choice((1, 1, 2)) if r == 3 and min(sizes[2:]) > 5 else 1,) * 2,
        sparse24=pick.random() < 0.6,
        epilogue=end,
        prologue=Prologue(border=float(pick.choice((0, 0, *RANGE[x], 37)))),
    ), (x, *((y,) if residual else ()), y)


def data(p: ConvProblem, dtypes: tuple[str, ...], rng: np.random.Generator):
    """Inputs and weights over all of their types, multipliers that are powers of two, so that nothing is rounded before the
    activation."""
    end = p.epilogue
    of = {"int8": (-128, 128), "uint8": (0, 256), "fp16": (-40, 41)}
    xs = [rng.integers(*of[d], shape).astype(np.float16) for d, shape in zip(dtypes, p.in_shapes, strict=False)]
    w = rng.integers(-128, 128, (p.k, p.c, p.r, p.s)).astype(np.float32)
    power = -7 - int(np.log2(np.sqrt(p.c * p.r * p.s)))
    weights = {
        "w": sparse24.prune(w) if p.sparse24 else w,
        "b": rng.integers(-64, 64, p.k).astype(np.float32) / 2,
        "multipliers": 2.0 ** rng.integers(power - 1, power + 1, p.k),
        "residual_multipliers": 2.0 ** rng.integers(-2, 1, p.k),
        "scales": 2.0 ** rng.integers(-1, 2, p.k),
        "shifts": rng.integers(-8, 8, p.k).astype(np.float32),
    }
    return xs, {name: v.astype(np.float32) for name, v in weights.items() if name in ("w", *end.vectors)}


def exact(p: ConvProblem, xs, weights) -> np.ndarray:
    """The convolution of integers, then its epilogue in FP64."""
    x, w = (np.asarray(a, np.int64) for a in (xs[0], weights["w"]))
    top, left, bottom, right = p.pad
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=int(p.prologue.border))
    y = np.zeros((p.n, p.k, p.p, p.q), np.int64)
    for i, j in np.ndindex(p.r, p.s):
        rows, columns = i * p.dilation[0], j * p.dilation[1]
        part = x[:, :, rows : rows + (p.p - 1) * p.stride[0] + 1, columns : columns + (p.q - 1) * p.stride[1] + 1]
        y += np.einsum("kc,nchw->nkhw", w[:, :, i, j], part[:, :, :: p.stride[0], :: p.stride[1]])
    column = {name: v.astype(np.float64).reshape(1, -1, 1, 1) for name, v in weights.items() if name != "w"}
    end, v = p.epilogue, y * column["multipliers"] + column["b"]
    added = xs[1].astype(np.float64) * column.get("residual_multipliers", 1.0) if end.residual else 0.0
    clip = {"quantize": lambda a, act: np.clip(np.rint(a), *act.params), "relu": lambda a, act: np.maximum(a, 0)}
    clip["table"] = lambda a, act: np.array(act.params)[(2 + np.clip(np.rint(a), *act.params[:2]) - act.params[0]).astype(int)]
    same = lambda a, act: a  # noqa: E731
    v = clip.get(end.act.name, same)(v if end.act_first else v + added, end.act)
    v = v * column["scales"] + column["shifts"] if end.affine else v
    return clip.get(end.last.name, same)(v + added if end.act_first else v, end.last)


def agrees(p: ConvProblem, dtypes: tuple[str, ...], tactic: Tactic, seed: int, gpu: Emulated) -> None:
    xs, weights = data(p, dtypes, np.random.default_rng(seed))
    expected = exact(p, xs, weights)
    if tactic.out.dtype == "fp16":
        expected = expected.astype(np.float16)
    found = np.asarray(execute(gpu, p, tactic, xs, weights))
    assert np.array_equal(found[:, : p.k], expected), (str(p), tactic.name, seed)
    assert not np.any(found[:, p.k :]), "padded channels are zero"


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(120))
def test_drawn_problems_equal_integers(seed):
    pick, gpu = random.Random(seed), Emulated(DEVICE)
    p, dtypes = drawn(pick)
    found = [t for t in candidates(p, DEVICE, dtypes) if t.kernel in conv_bytes.SOURCES]
    for tactic in pick.sample(found, 4):
        assert accepts(p, tactic, DEVICE) and Tactic.parse(tactic.name) == tactic
        agrees(p, dtypes, tactic, seed, gpu)


@pytest.mark.parametrize("y", WHOLE)
@pytest.mark.parametrize("x", WHOLE)
def test_a_residual_of_bytes_has_its_sign(x, y):
    end = Epilogue(True, True, Activation("quantize", RANGE[y]), multiplied=True, residual_multiplied=True)
    p = ConvProblem(1, 24, 5, 4, 40, 1, 1, sparse24=True, epilogue=end)
    found = [t for t in candidates(p, DEVICE, (x, y, y)) if t.out.dtype == y]
    for sparse in (False, True):
        tactic = random.Random(x + y).choice([t for t in found if t.sparse == sparse])
        agrees(p, (x, y, y), tactic, 1, Emulated(DEVICE))
        assert_written_once(p, tactic, DEVICE, *data(p, (x, y, y), np.random.default_rng(1)))


@pytest.mark.parametrize("y", WHOLE)
def test_a_silu_is_rounded_to_the_nearest_byte(y):
    """The kernel's SiLU is off by less than FP16's rounding: a result near a half may be rounded the other way."""
    last = Activation("quantize", RANGE[y])
    end = Epilogue(True, False, Activation("silu"), affine=True, last=last, multiplied=True)
    p = ConvProblem(1, 40, 9, 8, 72, 3, 3, pad=(1, 1, 1, 1), sparse24=True, epilogue=end)
    found = [t for t in candidates(p, DEVICE, ("int8", y)) if t.out.dtype == y]
    for tactic in random.Random(y).sample(found, 3):
        xs, weights = random_data(p)
        wrong = np.abs(execute(Emulated(DEVICE), p, tactic, xs, weights)[:, : p.k] - reference(p, xs, weights))
        assert wrong.max() <= 1 and (wrong > 0).mean() < 0.01


@pytest.mark.full
@pytest.mark.parametrize("x", WHOLE)
@pytest.mark.parametrize("y", ("fp16", *WHOLE))
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("every", [pytest.param(True, marks=pytest.mark.long, id="every"), pytest.param(False, id="drawn")])
def test_every_tile_equals_integers(every, x, y, residual):
    """Every tile with each type of result and one of four kinds of inputs, int8 or uint8, with a residual or without; with
    `every` kind in the long run.
    """
    act = ROUNDED[y][residual] if y in WHOLE else Activation("relu")
    end = Epilogue(True, residual, act, multiplied=True, residual_multiplied=residual)
    p = ConvProblem(1, 40, 9, 7, 72, 3, 3, pad=(1, 1, 1, 1), stride=(1, 2), sparse24=True, epilogue=end)
    dtypes, gpu, seen = (x, *((y,) if residual else ()), y), Emulated(DEVICE), set()
    for seed, tactic in enumerate(candidates(p, DEVICE, dtypes)):
        kind = tactic.kernel, replace(tactic.gemm, stream=min(tactic.gemm.stream, 1)), linear(tactic.out)
        if tactic.kernel in conv_bytes.SOURCES and kind not in seen and tactic.out.dtype == y:
            seen.add(kind)
            if every or zlib.crc32(repr(kind).encode()) % 4 == 2 * WHOLE.index(x) + residual:
                agrees(p, dtypes, tactic, seed, gpu)
    assert len(seen) > 50


def test_fp16_holds_the_same_numbers():
    pick, gpu = random.Random(1), Emulated(DEVICE)
    for seed in range(4):
        p, dtypes = drawn(pick)
        found = [t for t in candidates(p, DEVICE) if t.kernel not in conv_bytes.SOURCES]
        assert {t.kernel for t in found} <= {"conv_dense", "conv_sparse24"}
        agrees(p, dtypes, pick.choice(found), seed, gpu)


@pytest.mark.parametrize("how", [{"groups": 2}, {"d2s": 2}, {"d2s": 2, "d2s_mode": "crd", "up": 2}], ids=str)
def test_rows_of_groups_and_shuffles_have_their_own_multipliers(how):
    residual = {"residual": True, "residual_multiplied": True}
    p = conv_case(1, 128, 7, 6, 128, 3, 3, pad=(1,) * 4, bias=True, multiplied=True, sparse24=True, **residual, **how)
    found = candidates(p, DEVICE)
    for sparse in (False, True):
        check(p, random.Random(str(how)).choice([t for t in found if t.sparse == sparse]), DEVICE)


def test_bytes_are_offered_only_where_they_may_be():
    p, dtypes = drawn(random.Random(3))
    dtypes = ("int8", *dtypes[1:])
    for others in ((), ("fp16",) * len(dtypes), ("fp16", *dtypes[1:])):
        found = [t for t in candidates(p, DEVICE, others) if t.ins[0].dtype in WHOLE]
        assert not found
    plain = replace(p, epilogue=replace(p.epilogue, multiplied=False, residual_multiplied=False))
    assert not [t for t in candidates(plain, DEVICE, dtypes) if t.kernel in conv_bytes.SOURCES]


def test_random_data_stays_within_bytes():
    for seed in range(20):
        p, dtypes = drawn(random.Random(seed))
        xs, weights = random_data(p)
        assert np.abs(weights["w"]).max() <= 127 and np.array_equal(weights["w"], np.rint(weights["w"]))
        assert xs[0].min() >= 0 and xs[0].max() <= 127
        y = reference(p, xs, weights)
        assert y.std() > 0.1
        if dtypes[-1] in WHOLE:
            low, high = np.iinfo(DTYPES[dtypes[-1]]).min, np.iinfo(DTYPES[dtypes[-1]]).max
            assert low <= y.min() and y.max() <= high and np.array_equal(y, np.rint(y)) and len(np.unique(y)) > 10


def test_metadata_of_bytes_says_where_kept_weights_are():
    rng = np.random.default_rng(0)
    w = sparse24.prune(rng.integers(-128, 128, (48, 256)).astype(np.int8))
    sections = sparse24.byte_fragments(w, sparse=True)
    kept = sections["w"].view(np.int8).reshape(3, 4, 8, 4, 2, 2, 4)  # m16, k32 kept, g, t, column half, row half, byte
    words = sections["meta"].reshape(2, 2, 32, 2, 2)
    full = np.zeros((48, 256), np.int8)
    for m, k in np.ndindex(48, 128):  # kept column k of row m: bytes of a step are 32, of halves of it 16
        g, row_half, step, column = m % 8, m // 8 % 2, k // 32, k % 32
        value = kept[m // 16, step, g, column % 16 // 4, column // 16, row_half, column % 4]
        lane = 4 * g + 2 * (column // 16) + row_half
        code = int(words[m // 32, step // 2, lane, m // 16 % 2, step % 2]) >> 4 * (column % 16 // 2) & 15
        full[m, step * 64 + column // 2 * 4 + (code >> 2 * (column % 2) & 3)] = value
    assert np.array_equal(full, w)


def test_sums_are_those_of_integers():
    """NumPy's FP32 reference of the product is exact for sums below 2**24."""
    rng = np.random.default_rng(1)
    x, w = rng.integers(-128, 128, (1, 64, 5, 5)), rng.integers(-128, 128, (8, 64, 3, 3))
    found = window_sums(x.astype(np.float32), w.astype(np.float32), (3, 3), (1, 1), (1, 1))
    whole = sum(np.einsum("kc,nchw->nkhw", w[:, :, i, j], x[:, :, i : i + 3, j : j + 3]) for i in range(3) for j in range(3))
    assert np.array_equal(found, whole)


@pytest.mark.parametrize("border", [float("nan"), float("inf"), float("-inf")])
def test_a_border_is_finite(border):
    with pytest.raises(ValueError, match="expected a finite border"):
        Prologue(border=border)
