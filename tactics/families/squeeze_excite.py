"""Squeeze-excite's scale in one launch (squeeze_excite.cu): global average, two fully connected layers; packing and time.

Apart these are two or three launches of a few microseconds each that fill no GPU. Here many blocks read the image, each
multiplies its share of the average with the first layer's weights, and the last of an image's blocks does the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from cuda_kernels.device import MAX_GRID, Device
from tactics.format import HALF_FORMATS, num_bytes, padded_channels
from tactics.problems.epilogue import RELU, Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem
from tactics.reason import Candidates, unsupported
from tactics.roofline import L2_LATENCY_CLK, LATENCY_CLK, Counts, sm_l2
from tactics.step import Launch, act_code, alpha_beta, conv_pointers, floats, ints, launch, linear, own_strides, view_args
from tactics.tactic import Tactic

THREADS, AHEAD, MAX_HIDDEN = 512, 4, 1024  # as in squeeze_excite.cu
RESIDENT = 2  # blocks of an SM, by threads and registers
MOST_BLOCKS = 128  # of an image: what the last one adds up
SYNC_CLK = 60  # of a barrier of a block, and the few instructions around it
_CASE = SqueezeExciteProblem(
    PoolProblem(2, 40, 6, 5, "avg", 6, 5, (1, 1)),
    ConvProblem(2, 40, 1, 1, 12, 1, 1, epilogue=RELU),
    ConvProblem(2, 12, 1, 1, 40, 1, 1, epilogue=Epilogue(bias=True, act=Activation("sigmoid"))),
)
CASES = {"squeeze_excite": (_CASE,)}


def reason_against(pool: PoolProblem, first: ConvProblem, second: ConvProblem) -> str:
    """Why the three cannot be one launch, or an empty string."""
    if not pool.is_global or pool.kind != "avg":
        return "no global average"
    for p, before in ((first, pool), (second, first)):
        if p.in_shapes[0] != before.out_shape or (p.h, p.w, p.r, p.s) != (1, 1, 1, 1) or any(p.pad):
            return "the average is not followed by two fully connected layers"
        if p.groups > 1 or p.needs or p.epilogue.act.name == "prelu":
            return "groups, a residual, a depth-to-space, a pool, a prologue or PRelu"
    if pool.n > MAX_GRID[1]:
        return f"{pool.n} images: a grid holds at most {MAX_GRID[1]} along y"
    if first.k > MAX_HIDDEN:
        return f"more than {MAX_HIDDEN} hidden values"
    return ""


def candidates(p: SqueezeExciteProblem, device: Device) -> Candidates:
    """(tactic or kernel, reason against it or None)."""
    if why := reason_against(p.average, p.first, p.second):
        yield "squeeze_excite", unsupported(why)
        return
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        reason = "only whole vectors of 8 channels are read and written" if linear(x) or linear(y) else ""
        yield Tactic("squeeze_excite", None, (x,), y), unsupported(reason)


@dataclass(frozen=True, slots=True)
class Share:
    """What of an image a block reads: `vecs` vectors of 8 channels of `run` pixels; `slices` times `runs` blocks read all."""

    vecs: int
    run: int
    slices: int
    runs: int


def share(p: SqueezeExciteProblem) -> Share:
    """A thread loads AHEAD vectors at once, or more where that would be more than MOST_BLOCKS."""
    c8, pixels = -(-p.average.c // 8), p.average.h * p.average.w
    vecs = next(v for v in (8, 4, 2, 1) if 4 * (-(-c8 // v) * v) <= 5 * c8 or v == 1)  # a fifth of the threads idle at most
    slices, at_once = -(-c8 // vecs), THREADS // vecs * AHEAD
    runs = max(1, min(-(-pixels // at_once), MOST_BLOCKS // slices))
    run = -(-pixels // runs)
    return Share(vecs, run, slices, -(-pixels // run))


def launches(p: SqueezeExciteProblem, tactic: Tactic) -> tuple[Launch, ...]:
    x, y = own_strides(p, tactic)
    one, two, part = p.first, p.second, share(p)
    c8, k8 = padded_channels("hwc8", p.average.c) // 8, padded_channels(tactic.out.layout, two.k) // 8
    of_one, of_two, pixels = conv_pointers(one), conv_pointers(two, "2"), p.average.h * p.average.w
    args = {name: of_one[name] for name in ("nonfinite", "x", "y")} | {"w1": of_one["w"], "b1": of_one["bias"]}
    args |= {"w2": of_two["w"], "b2": of_two["bias"], "partial": ("workspace", 0), "counters": ("counters", 0)}
    args |= view_args("in", x) | view_args("out", y) | ints(c8=c8, pixels=pixels, mid=one.k, k=two.k, k8=k8)
    args |= ints(vecs=part.vecs, run=part.run, runs=part.runs) | floats(scale=1 / pixels)
    args |= alpha_beta(one, "1") | alpha_beta(two, "2")
    values, n, blocks = {"ACT1": act_code(one), "ACT2": act_code(two)}, p.average.n, part.slices * part.runs
    return (launch("squeeze_excite", values, (blocks, n, 1), THREADS, 0, args, n * blocks * one.k * 4, n * 4),)


def pack(p: SqueezeExciteProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """w [mid, c padded to 8] and w2, transposed, [mid, k padded as the output], FP16; biases FP32, zeros where none are."""
    mid, k, wide = p.first.k, p.second.k, padded_channels(tactic.out.layout, p.second.k)
    w1 = np.zeros((mid, padded_channels("hwc8", p.average.c)), np.float16)
    w1[:, : p.average.c] = weights["w"].reshape(mid, -1)
    w2 = np.zeros((mid, wide), np.float16)
    w2[:, :k] = weights["w2"].reshape(k, mid).T
    biases = {name: np.zeros(size, np.float32) for name, size in (("b", mid), ("b2", wide))}
    for name, array in biases.items():
        if weights.get(name) is not None:
            array[: len(weights[name])] = weights[name]
    return {"w": w1.reshape(-1), "w2": w2.reshape(-1), **biases}


def section_bytes(p: SqueezeExciteProblem, tactic: Tactic) -> dict[str, int]:
    """Bytes of the sections that `pack` makes."""
    mid, wide = p.first.k, padded_channels(tactic.out.layout, p.second.k)
    return {"w": 2 * mid * padded_channels("hwc8", p.average.c), "w2": 2 * mid * wide, "b": 4 * mid, "b2": 4 * wide}


def counts(p: SqueezeExciteProblem, tactic: Tactic, device: Device) -> Counts:
    """All blocks read and multiply their shares, then an image's last block does the rest, load behind load. Weights are
    fetched into L2 while the pixels arrive."""
    part, n, mid = share(p), p.average.n, p.first.k
    blocks, k8 = part.slices * part.runs, padded_channels(tactic.out.layout, p.second.k) // 8
    at_once = THREADS // part.vecs * AHEAD  # pixels, of each vector
    own = 16 * part.vecs * (part.run + mid) / sm_l2(device, n * blocks)
    own += -(-part.run // at_once) * LATENCY_CLK + L2_LATENCY_CLK + 5 * SYNC_CLK  # pixels, then weights
    handed = 3 * L2_LATENCY_CLK + 2 * SYNC_CLK  # sums stored, arrival counted and read
    width = min(-(-mid // 32) * 32, THREADS)
    turns = -(-mid // width) * -(-blocks // (8 * (THREADS // width)))  # of 8 loads at once
    last = 4 * blocks * mid / sm_l2(device, n) + turns * L2_LATENCY_CLK + 2 * SYNC_CLK
    width = min(k8, THREADS)
    turns = -(-k8 // width) * -(-mid // (4 * (THREADS // width)))  # of 4
    last += 16 * k8 * mid / sm_l2(device, n) + turns * L2_LATENCY_CLK + 2 * SYNC_CLK
    at_a_time = device.num_sms * RESIDENT
    clk = math.ceil(n * blocks / at_a_time) * own + handed + math.ceil(n / at_a_time) * last
    weights = 2 * mid * (padded_channels("hwc8", p.average.c) + 8 * k8)
    read, written = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.out, p.out_shape)
    return Counts(read, written, weights, {"latency": clk / device.clock_mhz})
