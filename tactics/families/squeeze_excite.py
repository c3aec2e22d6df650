"""Squeeze-excite's scale in one launch (squeeze_excite.cu): global average, two fully connected layers; packing and time.

Apart these are two or three launches of a few microseconds each that fill no GPU. Here many blocks read the image, each
multiplies its share of the average with the first layer's weights, and the last of an image's blocks does the rest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from cuda_kernels.device import MAX_GRID, Device
from tactics.format import HALF_FORMATS, num_bytes, padded_channels
from tactics.problems.epilogue import RELU, Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem
from tactics.reason import Candidates, unsupported
from tactics.roofline import L2_LATENCY_CLK, LATENCY_CLK, Counts, resident, sm_l2
from tactics.step import (
    Launch,
    act_code,
    alpha_beta,
    conv_pointers,
    floats,
    ints,
    launch,
    linear,
    member,
    own_strides,
    view_args,
)
from tactics.tactic import Only, Parts, Tactic, restrict

THREADS, AHEAD, HELD, MOST_PARTS, MAX_HIDDEN = 256, 6, 4, 32, 1024  # as in squeeze_excite.cu
REGISTERS, SMEM = 64, 20 << 10  # of a thread and of a block, in bytes, at most
CLUSTERS, TICKETS = (2, 4, 8), (8, 32, 128)  # blocks of an image that are tried
MOST_BLOCKS = 512  # of an image: what the kernel divides by
FEW, MANY = 8, 1024  # blocks of all images: fewer leave SMs idle, more are no faster
INSTRUCTIONS = 650  # of a warp beyond loads and what follows from them: about as many are counted in machine code
CLUSTER_CLK, TICKET_CLK = 600, 2000  # sums meet: two barriers of a cluster; stored, a fence, counted, a fence, read
_CASE = SqueezeExciteProblem(
    PoolProblem(2, 40, 30, 26, "avg", 30, 26, (1, 1)),
    ConvProblem(2, 40, 1, 1, 12, 1, 1, epilogue=RELU),
    ConvProblem(2, 12, 1, 1, 40, 1, 1, epilogue=Epilogue(bias=True, act=Activation("sigmoid"))),
)
CASES = {"squeeze_excite": (_CASE,)}
WITHOUT_CLUSTERS = ("sm_80", "sm_86", "sm_89")


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
    if pool.c > 8 * THREADS * MOST_BLOCKS:
        return f"more than {8 * THREADS * MOST_BLOCKS} channels"
    if first.k > MAX_HIDDEN:
        return f"more than {MAX_HIDDEN} hidden values"
    return ""


def candidates(p: SqueezeExciteProblem, device: Device, only: Only = None) -> Candidates:
    """(tactic or kernel, reason against it or None). `only`: of the parts these alone."""
    if why := reason_against(p.average, p.first, p.second):
        yield "squeeze_excite", unsupported(why)
        return
    for parts, x, y in product(restrict("squeeze_excite", ways(p), only), HALF_FORMATS, HALF_FORMATS):
        reason = "only whole vectors of 8 channels are read and written" if linear(x) or linear(y) else ""
        if parts.cluster and device.sm in WITHOUT_CLUSTERS:
            reason = f"{device.sm} has no clusters"
        yield Tactic("squeeze_excite", parts, (x,), y), unsupported(reason)


@lru_cache(maxsize=4096)
def ways(p: SqueezeExciteProblem) -> tuple[Parts, ...]:
    """How blocks may share an image: one alone, some as a cluster, or more. A thread has a vector to load, and the blocks of
    all images are neither few nor too many, where that is possible."""
    c8, n, vectors = -(-p.average.c // 8), p.average.n, -(-p.average.c // 8) * p.average.h * p.average.w
    least, useful = _power(-(-c8 // THREADS)), _power(-(-vectors // THREADS))
    least = max(least, min(useful, FEW // n))
    most = max(least, min(useful, MANY // n))
    counts = [(1, False), *((b, True) for b in CLUSTERS), *((b, False) for b in sorted({*TICKETS, least} - {1}))]
    return tuple(_shared(c8, blocks, cluster) for blocks, cluster in counts if least <= blocks <= most)


def _power(number: int) -> int:
    """The power of 2 that is not below it."""
    return 1 << max(number - 1, 0).bit_length()


def _shared(c8: int, blocks: int, cluster: bool) -> Parts:
    """Slices of 8 vectors at least, of a line of 128 bytes; then runs of pixels."""
    slices = 1
    while slices < blocks and -(-c8 // (2 * slices)) >= 8:
        slices *= 2
    return Parts(slices, blocks // slices, cluster)


def launches(p: SqueezeExciteProblem, tactic: Tactic) -> tuple[Launch, ...]:
    x, y = own_strides(p, tactic)
    one, two, sizes, parts = p.first, p.second, _sizes(p, tactic), tactic.parts
    of_one, of_two, pixels = conv_pointers(one), conv_pointers(two, "2"), p.average.h * p.average.w
    args = {name: of_one[name] for name in ("nonfinite", "x", "y")} | {"w1": of_one["w"], "b1": of_one["bias"]}
    args |= {"w2": of_two["w"], "b2": of_two["bias"]}
    args |= view_args("in", x) | view_args("out", y) | ints(c8=sizes.c8, pixels=pixels, mid=one.k, k=two.k, k8=sizes.k8)
    args |= ints(run=sizes.run, lanes=sizes.lanes, fold=max(32 // sizes.vecs, 1) * sizes.vecs)
    args |= ints(log_near=_log(min(sizes.vecs, 32)), log_mid=_log(min(max(one.k, 32), THREADS)))
    args |= ints(parts=sizes.parts, each=sizes.each) | floats(scale=1 / pixels)
    for name, divisor in (("vecs", sizes.vecs), ("runs", parts.runs), ("width", sizes.width)):
        args |= member(name, ints(d=divisor, inverse=-(-(1 << 22) // divisor)))
    args |= alpha_beta(one, "1") | alpha_beta(two, "2")
    blocks, n, tickets = parts.slices * parts.runs, p.average.n, parts.slices * parts.runs > 1 and not parts.cluster
    values = {"ACT1": act_code(one), "ACT2": act_code(two), "CLUSTER": blocks if parts.cluster else 1, "TICKETS": int(tickets)}
    if not tickets:
        return (launch("squeeze_excite", values, (blocks, n, 1), THREADS, 0, args),)
    args |= {"partial": ("workspace", 0), "counters": ("counters", 0)}
    return (launch("squeeze_excite", values, (blocks, n, 1), THREADS, 0, args, n * blocks * one.k * 4, n * 4),)


def _log(number: int) -> int:
    return _power(number).bit_length() - 1


@dataclass(frozen=True, slots=True)
class _Sizes:
    """In vectors of 8 channels: `c8`, `k8` of the input and output; of a block `vecs` of `run` pixels, by `lanes` threads each,
    and `each` of the output, `width` at a time, by `parts` threads each."""

    c8: int
    k8: int
    vecs: int
    run: int
    lanes: int
    each: int
    width: int
    parts: int


def _sizes(p: SqueezeExciteProblem, tactic: Tactic) -> _Sizes:
    parts = tactic.parts
    c8, k8 = -(-p.average.c // 8), padded_channels(tactic.out.layout, p.second.k) // 8
    vecs, run = -(-c8 // parts.slices), -(-p.average.h * p.average.w // parts.runs)
    each = -(-k8 // (parts.slices * parts.runs)) if parts.cluster else k8
    width = min(each, THREADS)
    return _Sizes(c8, k8, vecs, run, THREADS // vecs, each, width, min(THREADS // width, MOST_PARTS, p.first.k))


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
    """All blocks read and multiply their shares, then those of a cluster, or an image's last block, do the rest, load behind
    load. Weights are fetched into L2 while the pixels arrive. Blocks of one SM share its instructions and its part of L2."""
    sizes, n, mid, blocks = _sizes(p, tactic), p.average.n, p.first.k, tactic.parts.slices * tactic.parts.runs
    resident_blocks = resident(device, THREADS, REGISTERS, SMEM)
    per_sm = min(resident_blocks, -(-n * blocks // device.num_sms))
    loads = (
        -(-sizes.run // sizes.lanes),
        mid * _power(min(sizes.vecs, 32)) // THREADS * -(-sizes.vecs // 32),
        -(-mid // sizes.parts),
    )
    turns = -(-loads[0] // AHEAD), -(-loads[1] // HELD), -(-loads[2] // HELD) * -(-sizes.each // sizes.width)
    issue = THREADS / 32 / 4 * (INSTRUCTIONS + sum(25 * size * t for size, t in zip((AHEAD, HELD, HELD), turns, strict=True)))
    rate, vector = sm_l2(device, n * blocks) / per_sm, 16 * sizes.vecs
    own = max(vector * sizes.run / rate, turns[0] * LATENCY_CLK) + max(vector * mid / rate, turns[1] * L2_LATENCY_CLK)
    last = max(16 * sizes.each * mid / sm_l2(device, n), turns[2] * L2_LATENCY_CLK)
    meet: float = CLUSTER_CLK if tactic.parts.cluster else TICKET_CLK if blocks > 1 else 0
    at_once = device.num_sms * resident_blocks
    if meet == TICKET_CLK:
        last, meet = 0.0, meet + math.ceil(n / at_once) * last
    clk = math.ceil(n * blocks / at_once) * max(own + last + issue, per_sm * issue) + meet
    packed = 2 * mid * (padded_channels("hwc8", p.average.c) + 8 * sizes.k8)
    read, written = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.out, p.out_shape)
    return Counts(read, written, packed, {"latency": clk / device.clock_mhz})
