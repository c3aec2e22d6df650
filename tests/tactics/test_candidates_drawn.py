"""Convolutions, pools and resizes with all their parameters drawn: each tactic's kernels, in the emulator, against reference().

A case is its seed, which stands in the test's name; sizes, pads, strides and the like are arguments at run time, so that
draws compile little. Pointwise chains and rows are drawn likewise in test_pointwise_ops.py and test_reductions.py.
"""

import math
import random
import sys

import numpy as np
import pytest

from cuda_kernels.launch import Emulated
from tactics import fp32
from tactics.problems.gather import COORDINATES, ROUNDINGS, GatherProblem, ResizeProblem, nearest
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem, PoolProblem, Problem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Tactic
from tests.problems import assert_right, conv_case, execute
from tests.tactics.test_kernels import DEVICE, by_tile, variants

ACTIVATIONS = (Activation(), Activation("relu"), Activation("relu"), Activation("clip", (-0.5, 1.0)), Activation("prelu"))


def window(pick: random.Random, sizes: tuple[int, ...]):
    """(kernel, stride, dilation, pad before, pad behind, image) of one axis in which at least one window has a place; no
    padding is as long as a window, so that each has a pixel in the image."""
    kernel, stride, dilation = pick.choice(sizes), pick.choice((1, 1, 2, 3)), pick.choice((1, 1, 1, 2))
    reach = (kernel - 1) * dilation + 1
    before, behind = (pick.choice((0, pick.randint(0, kernel - 1))) for _ in range(2))
    return kernel, stride, dilation, before, behind, max(1, reach - before - behind) + pick.randint(0, 9)


def conv(seed: int) -> ConvProblem:
    pick = random.Random(f"conv {seed}")
    rows, columns = (window(pick, (1, 1, 2, 3, 3, 5)) for _ in range(2))
    groups = pick.choice((1, 1, 1, 1, 2, 3, 8))
    c, k = (pick.choice(sizes) for sizes in ((1, 3, 4, 8, 12, 16, 24, 40), (1, 3, 8, 12, 16, 20, 36, 72)))
    d2s = 2 if groups == 1 and k % 4 == 0 and pick.random() < 0.2 else 1
    pads = (rows[3], columns[3], rows[4], columns[4])
    pre = (rows[0], columns[0], groups) == (1, 1, 1) and not any(pads) and d2s == 1 and pick.random() < 0.3
    residual = not pre and pick.random() < 0.4
    return conv_case(
        pick.choice((1, 1, 2, 3)),
        c * groups,
        rows[5],
        columns[5],
        k * groups,
        rows[0],
        columns[0],
        (rows[1], columns[1]),
        pads,
        (rows[2], columns[2]),
        groups,
        bias=pick.random() < 0.7,
        residual=residual,
        act=pick.choice(ACTIVATIONS),
        sparse24=c % 4 == 0 and pick.random() < 0.7,
        d2s=d2s,
        d2s_mode=pick.choice(("dcr", "crd")),
        act_first=residual and pick.random() < 0.3,
        scaled=pre,
    )


def pool(seed: int) -> PoolProblem:
    pick = random.Random(f"pool {seed}")
    rows, columns = (window(pick, (1, 2, 3, 3, 5)) for _ in range(2))
    ceil, out = pick.random() < 0.5, []
    for kernel, stride, dilation, before, behind, image in (rows, columns):
        room = image + before + behind - (kernel - 1) * dilation - 1
        last = -(-room // stride) if ceil else room // stride
        out.append(1 + min(last, (image + before - 1) // stride))  # none begins behind the image
    n, c = pick.choice((1, 2, 3)), pick.choice((1, 3, 8, 20, 40, 65))
    kind = pick.choice(("max", "avg"))
    if pick.random() < 0.15:
        return PoolProblem(n, c, rows[5], columns[5], kind, rows[5], columns[5], (1, 1))
    return PoolProblem(
        n,
        c,
        rows[5],
        columns[5],
        kind,
        rows[0],
        columns[0],
        tuple(out),
        (rows[1], columns[1]),
        (rows[3], columns[3], rows[4], columns[4]),
        (rows[2], columns[2]),
        count_pad=pick.random() < 0.5,
    )


def resize(seed: int) -> ResizeProblem | GatherProblem:
    pick = random.Random(f"resize {seed}")
    n, c, image = pick.choice((1, 2)), pick.choice((1, 3, 8, 20, 40)), (pick.randint(1, 12), pick.randint(1, 12))
    scale = tuple(pick.choice((2.0, 3.0, 0.5, 1.0, round(pick.uniform(0.3, 3), 3))) for _ in range(2))
    out = tuple(max(1, math.floor(size * s)) for size, s in zip(image, scale, strict=True))
    mode, turn = pick.choice(("linear", "cubic", "nearest")), pick.choice(list(COORDINATES))
    roi = (0.0, 1.0, 0.0, 1.0) if turn != "tf_crop_and_resize" else tuple(round(pick.uniform(-0.2, 1.2), 2) for _ in range(4))
    outside = round(pick.uniform(-1, 1), 2) if turn == "tf_crop_and_resize" else 0.0
    if mode == "nearest":
        rounding = pick.choice(list(ROUNDINGS))
        index = (nearest(image[a], out[a], scale[a], turn, rounding, roi[2 * a : 2 * a + 2]) for a in range(2))
        return GatherProblem((n, c, *image), index=((), (), *index), fill=outside)
    return ResizeProblem(
        n,
        c,
        *image,
        out,
        mode,
        turn,
        scale,
        pick.choice((-0.75, -0.5)),
        pick.random() < 0.3 and turn != "tf_crop_and_resize",
        pick.random() < 0.3,
        roi,
        outside,
    )


DRAWS = {"conv": conv, "pool": pool, "resize": resize}


def with_fp32(problem: Problem) -> list[Tactic]:
    """One tactic for each mix of FP16 and FP32 tensors, where any is FP32; the layouts of the others drawn."""
    found = {}
    tactics = [] if fp32.reason(problem) else [*fp32.candidates(problem, ("fp16",) * (len(problem.in_shapes) + 1))]
    for t in random.Random(str(problem)).sample(tactics, len(tactics)):
        found.setdefault(tuple(f.dtype for f in (*t.ins, t.out)), t)
    return [t for dtypes, t in sorted(found.items()) if "fp32" in dtypes]


def check(problem: Problem, tactics) -> None:
    """All of them are run; the first error is raised and says which went wrong. The test's name says how to draw it again."""
    inputs, weights = random_data(problem)
    expected = reference(problem, inputs, weights)
    wrong = {}
    for tactic in tactics:
        try:
            assert_right(problem, tactic, execute(Emulated(DEVICE), problem, tactic, inputs, weights), expected)
        except Exception as e:  # of the emulator's checks too
            wrong[tactic] = e
    if wrong:
        first = next(iter(wrong.values()))
        names = "\n".join(str(tactic) for tactic in wrong)
        first.add_note(f"{problem}: wrong with {len(wrong)} of {len(tactics)} tactics, this with the first of\n{names}")
        raise first


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", DRAWS)
def test_drawn(kind, seed):
    """One tile of every kernel that applies, between linear and vector sides; two tactics where only other tiles can."""
    problem = DRAWS[kind](seed)
    tactics = variants(problem) or random.Random(seed).sample(by_tile(problem), 2)
    check(problem, tactics)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1567))
@pytest.mark.parametrize("kind", DRAWS)
def test_many_drawn(kind, seed):
    """Every kernel and tile between linear and vector sides, and every mix of FP16 and FP32; what differs in nothing but
    layouts shares these binaries and is drawn. With the 300 chains of test_pointwise_ops.py, 2,001 draws."""
    problem = DRAWS[kind](seed)
    tactics = by_tile(problem)
    assert tactics, f"no tactic for {problem}"
    check(problem, tactics + with_fp32(problem))


def test_wrong_tactics_are_named(monkeypatch):
    def wrong(gpu, problem, tactic, inputs, weights):
        if linear(tactic.ins[0]) and linear(tactic.out):
            raise RuntimeError("a fault of the emulated kernel")
        return np.zeros(problem.out_shape, np.float16)

    monkeypatch.setattr(sys.modules[__name__], "execute", wrong)
    problem = ResizeProblem(1, 8, 2, 2, (4, 4), "linear", "asymmetric", (2.0, 2.0))
    tactics = by_tile(problem)
    with pytest.raises((RuntimeError, AssertionError)) as e:
        check(problem, tactics)
    (note,) = e.value.__notes__
    assert note.startswith(f"{problem}: wrong with {len(tactics)} of {len(tactics)} tactics")
    assert all(str(t) in note for t in tactics)


def test_draws_reach_every_parameter():
    convs = [conv(seed) for seed in range(1000, 1567)]
    for name in ("stride", "dilation", "pad", "groups", "sparse24", "prologue"):
        assert len({getattr(p, name) for p in convs}) > 1, name
    for name in ("bias", "residual", "act", "d2s", "act_first"):
        assert len({getattr(p.epilogue, name) for p in convs}) > 1, name
    pools, resizes = [pool(seed) for seed in range(1000, 1567)], [resize(seed) for seed in range(1000, 1567)]
    assert {(p.kind, p.count_pad, p.is_global) for p in pools} >= {(k, c, False) for k in ("max", "avg") for c in (True, False)}
    linear = [p for p in resizes if isinstance(p, ResizeProblem)]
    assert {(p.mode, p.coordinate_mode) for p in linear} == {(m, t) for m in ("linear", "cubic") for t in COORDINATES}
    assert {(p.antialias, p.exclude_outside) for p in linear} == {(a, b) for a in (True, False) for b in (True, False)}
