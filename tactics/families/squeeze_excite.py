"""Squeeze-excite's scale in one launch or two (squeeze_excite.cu): global average, two fully connected layers; packing, time.

Separately these would be two or three launches of a few microseconds each, too small for a whole GPU. Here many blocks read the
image, and each multiplies its share of the average by the first layer's weights. The remaining work is done by the blocks of a
cluster together, by the last block of an image, or by the blocks of a second launch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

from cuda_kernels.device import Device
from cuda_kernels.named_devices import MAX_GRID
from tactics.format import HALF_FORMATS, Format, num_bytes, padded_channels, strides
from tactics.problems.epilogue import RELU, Epilogue
from tactics.problems.pointwise_ops import ACTIVATION_CODES, Activation
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem
from tactics.reason import Candidates, unsupported
from tactics.roofline import L2_LATENCY_CLK, LATENCY_CLK, Counts, clusters_at_once, resident, sm_l2
from tactics.step import (
    NULL,
    Args,
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
from tactics.tactic import Only, Parts, Tactic, restrict, tactic_of

THREADS, WARPS, HELD, MAX_HIDDEN = 256, 8, 3, 1024  # as in squeeze_excite.cu
# Groups of 8 pixels that a warp has in flight: FEW_AHEAD, or MANY_AHEAD if it needs several turns and there are at most
# AHEAD_BLOCKS blocks.
FEW_AHEAD, MANY_AHEAD, AHEAD_BLOCKS = 7, 14, 32
# Blocks per SM for which the kernel's registers suffice: by default; if blocks store partial sums; with MANY_AHEAD.
TOGETHER, WITH_PARTIAL, ALONE_ON_SM = 2, 3, 1
# Instructions of a warp in sm_90a's machine code, without those for pixels and tiles. The first three: before it waits for the
# launch ahead, if its launch computes both layers, the first, the second.
BEFORE_BOTH, BEFORE_FIRST, BEFORE_SECOND = 200, 135, 75
FIRST, MEET = 105, 130  # of the first layer after that wait; to sum the shares of a block's warps, or of a cluster's blocks
JOIN, JOIN_TURN = 200, 55  # to join the sums that blocks stored, with one turn; for each turn
JOINED = 8  # blocks whose sums a thread loads in one turn
# For a second launch that scales a tensor.
SCALED_WARPS, SCALED_JOINED = (4, 8), 16  # warps of a block with few and with many hidden values; in place of JOINED
SCALED_PIXELS = 4  # pixels of a thread, with 8 channels each
SCALE_ONCE, SCALE_PIXEL = 90, 38  # instructions of a warp to scale pixels: once, and for each pixel of a thread
# Numbers of an image's blocks that are tried: CLUSTERS in a cluster; up to MOST_TICKETS in one launch; APART: (blocks of the
# first of two launches, factor by which more blocks share the hidden values). The best of these is predicted to take 1.3 %
# longer than the best of all powers of 2 (benchmarks/NOTES.md).
CLUSTERS, MOST_TICKETS, APART = (2, 4, 8), 32, ((8, 1), (32, 1), (8, 2), (32, 2), (16, 4), (8, 8))
MOST_BLOCKS = 512  # blocks of an image: bounds the kernel's divisor
FEW, MANY = 8, 1024  # blocks of all images: fewer leave SMs idle, more are no faster
MMA_CLK = 33  # clocks between two products of one sum
# Clocks in which sums reach the block that adds them: in a cluster (274, 292, 320 for 2, 4, 8 blocks on an H200); through
# memory, with a fence and a counter.
CLUSTER_CLK, TICKET_CLK = 300, 2000
# sm -> clocks to load a launch's code, if it has no more blocks than there are SMs; further blocks find it cached. Seen in 12
# layers of NFNet-L0 on an H200, of two launches each: 2.3 us per launch more than where one binary is repeated. After a
# convolution both launches wait so at any batch: 28 layers of EfficientNet-B0, MobileNetV3-L and RegNetY-400MF.
COLD_CLK = {"sm_90a": 3000}
_CASE = SqueezeExciteProblem(
    PoolProblem(2, 40, 30, 26, "avg", 30, 26, (1, 1)),
    ConvProblem(2, 40, 1, 1, 12, 1, 1, epilogue=RELU),
    ConvProblem(2, 12, 1, 1, 40, 1, 1, epilogue=Epilogue(bias=True, act=Activation("sigmoid"))),
)
CASES = {"squeeze_excite": (_CASE,)}


def reason_against(pool: PoolProblem, first: ConvProblem, second: ConvProblem) -> str:
    """Returns why the pool and the two layers cannot be one tactic, or ""."""
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
    """Yields (tactic or kernel, reason against it or None). `only`: restricts the parts."""
    if why := reason_against(p.average, p.first, p.second):
        yield "squeeze_excite", unsupported(why)
        return
    for parts, x, y in product(restrict("squeeze_excite", ways(p), only), HALF_FORMATS, HALF_FORMATS):
        reason = "only whole vectors of 8 channels are read and written" if linear(x) or linear(y) else ""
        if parts.cluster and device.cc < 90:
            reason = f"{device.sm} has no clusters"
        yield tactic_of("squeeze_excite", parts, (x,), y), unsupported(reason)


@lru_cache(maxsize=4096)
def ways(p: SqueezeExciteProblem) -> tuple[Parts, ...]:
    """Returns the ways in which blocks may share an image: one block, a cluster, or more blocks in one or two launches.

    A thread has at least one vector to load; all images together have FEW to MANY blocks, if possible.
    """
    c8, n, vectors = -(-p.average.c // 8), p.average.n, -(-p.average.c // 8) * p.average.h * p.average.w
    least, useful = _power(-(-c8 // THREADS)), _power(-(-vectors // THREADS))
    least = max(least, min(useful, FEW // n))
    most = max(least, min(useful, MANY // n))
    one = [_shared(c8, 1)] if least == 1 else []
    clusters = [replace(_shared(c8, b), cluster=True) for b in CLUSTERS if least <= b <= most and (b > 2 or n > 2 * FEW)]
    ticket = max(least, min(MOST_TICKETS, most))
    rows = -(-p.first.k // 16)
    apart = [(b, a) for b, a in APART if least <= b <= most and (a == 1 or (a < 2 * rows and n * b * a <= MANY))]
    many = [(ticket, 0), *(apart or [(ticket, 1)])] if ticket > 1 else []
    return (*one, *clusters, *(replace(_shared(c8, b), apart=a) for b, a in many))


def _power(number: int) -> int:
    """Returns the least power of 2 that is >= `number`."""
    return 1 << max(number - 1, 0).bit_length()


def _shared(c8: int, blocks: int) -> Parts:
    """Returns the split of an image of `c8` vectors of 8 channels among `blocks` blocks: into slices of at least 8 vectors (a
    line of 128 bytes), then into runs of pixels.
    """
    slices = 1
    while slices < blocks and -(-c8 // (2 * slices)) >= 8:
        slices *= 2
    return Parts(slices, blocks // slices)


def launches(p: SqueezeExciteProblem, tactic: Tactic) -> tuple[Launch, ...]:
    sizes, parts, n = _sizes(p, tactic), tactic.parts, p.average.n
    blocks, alone = parts.slices * parts.runs, parts.slices * parts.runs == 1 or parts.cluster
    args = _arguments(p, tactic, sizes)
    values = {"ACT1": act_code(p.first), "ACT2": act_code(p.second), "CLUSTER": blocks if parts.cluster else 1, "LAYER": 0}
    values |= {"PARTIAL": int(not alone), "AHEAD": sizes.ahead, "SUMMED": int(sizes.summed)}
    grid, smem, workspace = (blocks, n, 1), _smem(p, values["CLUSTER"]), 0 if alone else n * blocks * p.first.k * 4
    if alone:
        return (launch("squeeze_excite", values, grid, THREADS, smem, args),)
    args |= {"partial": ("workspace", 0), "counters": NULL if parts.apart else ("counters", 0)}
    if not parts.apart:
        return (launch("squeeze_excite", values, grid, THREADS, smem, args, workspace, n * 4),)
    last = values | {"LAYER": 2, "AHEAD": FEW_AHEAD, "SUMMED": 0}
    return (
        launch("squeeze_excite", values | {"LAYER": 1}, (blocks * parts.apart, n, 1), THREADS, smem, args, workspace),
        launch("squeeze_excite", last, (-(-sizes.tiles_out // sizes.each), n, 1), THREADS, smem, args, workspace),
    )


def _arguments(p: SqueezeExciteProblem, tactic: Tactic, sizes: "_Sizes", warps: int = WARPS) -> Args:
    """Returns the arguments that every launch has; `sizes`, `warps`: of the block."""
    x, y = own_strides(p, tactic)
    one, two, parts = p.first, p.second, tactic.parts
    of_one, of_two, pixels = conv_pointers(one), conv_pointers(two, "2"), p.average.h * p.average.w
    args = {name: of_one[name] for name in ("nonfinite", "x", "y")} | {"w1": of_one["w"], "b1": of_one["bias"]}
    args |= {"w2": of_two["w"], "b2": of_two["bias"]}
    args |= view_args("in", x) | view_args("out", y) | ints(c=_whole(p.average.c, 8), pixels=pixels, mid=one.k, k=two.k)
    args |= ints(deep=sizes.deep, wide=sizes.wide, k_wide=sizes.k_wide, run=sizes.run, chunks=sizes.chunks)
    args |= ints(log_near=_log(sizes.near), log_rows=_log(sizes.near_rows), log_mid=_log(sizes.width), each=sizes.each)
    args |= ints(log_apart=_log(parts.apart or 1), log_deep=_log(warps // sizes.each) if parts.apart else 0)
    args |= member("runs", _divisor(parts.runs)) | ints(blocks=parts.slices * parts.runs)
    args |= alpha_beta(one, "1") | alpha_beta(two, "2")
    return args | floats(down=sizes.down, scale=1 / (pixels * sizes.down))


def _divisor(d: int) -> Args:
    """Returns the members of the kernel's struct Divisor for the divisor `d`."""
    return ints(d=d, inverse=-(-(1 << 22) // d))


def scale_launch(p: SqueezeExciteProblem, fmt: Format, blocks: int, act: Activation) -> Launch:
    """Returns the second of two launches of conv_scaled: it multiplies the convolution's output, in format `fmt`, by its scale
    and applies `act`, in place.

    The first launch, the convolution, has `blocks` blocks per image, each of which wrote its share of the hidden values to the
    workspace.
    """
    tactic = tactic_of("squeeze_excite", Parts(1, blocks, apart=1), (fmt,), fmt)
    (sizes, across, runs), warps = _scaled_sizes(p, tactic), _scaled_warps(p)
    args = _arguments(p, tactic, sizes, warps)
    lies = strides(fmt, p.in_shapes[0])
    args |= {"x": NULL, "w1": NULL, "w2": ("weights", "w22"), "b1": ("weights", "b2"), "b2": ("weights", "b22")}
    args |= {"partial": ("workspace", 0), "counters": NULL}
    args |= view_args("out", lies) | member("vectors", _divisor(2 * sizes.each))
    alpha, beta = (*act.params, 0.0, 0.0)[:2]
    args |= floats(alpha3=alpha, beta3=beta)
    values = {"ACT1": act_code(p.first), "ACT2": act_code(p.second), "ACT3": ACTIVATION_CODES[act.name], "CLUSTER": 1}
    values |= {"LAYER": 2, "PARTIAL": 1, "AHEAD": FEW_AHEAD, "SUMMED": 0, "SCALED": warps}
    workspace, smem = p.average.n * blocks * p.first.k * 4, _smem(p, 1, warps)
    return launch("squeeze_excite", values, (across, p.average.n, runs), 32 * warps, smem, args, workspace)


def _scaled_warps(p: SqueezeExciteProblem) -> int:
    few, many = SCALED_WARPS
    return many if p.first.k > 32 * few else few


def _scaled_sizes(p: SqueezeExciteProblem, tactic: Tactic) -> tuple["_Sizes", int, int]:
    """Returns, for scale_launch, (sizes of a block, number of blocks along channels, along pixels)."""
    warps = _scaled_warps(p)
    sizes = _sizes(p, tactic, warps)
    across = -(-sizes.tiles_out // sizes.each)
    each = -(-sizes.tiles_out // across)
    run = SCALED_PIXELS * (32 * warps // (2 * each))
    return replace(sizes, each=each, run=run), across, -(-p.average.h * p.average.w // run)


def _smem(p: SqueezeExciteProblem, cluster: int, warps: int = WARPS) -> int:
    """Returns the bytes of a block's shared memory: for each hidden value the FP32 sums of its warps and of the `cluster`
    blocks, and 4 values in FP16.
    """
    return _whole(p.first.k, 32) * (4 * warps + 4 * cluster + 2 * 4)


def _whole(number: int, of: int) -> int:
    return -(-number // of) * of


def _log(number: int) -> int:
    return _power(number).bit_length() - 1


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a block's work. `deep`, `wide`, `k_wide`: input channels, hidden values and output channels of the problem,
    padded.

    A block has `chunks` chunks of 32 channels, `run` pixels of each, and `each` tiles of 16 output channels. The work of a
    chunk is shared by `near` warps along pixels times `near_rows` along hidden values. `ahead`: groups of 8 pixels in flight.
    """

    deep: int
    wide: int
    k_wide: int
    chunks: int
    run: int
    near: int
    near_rows: int
    each: int
    ahead: int
    rows: int  # tiles of 16 hidden values that the block has
    width: int  # hidden values that are joined at a time

    @property
    def tiles_out(self) -> int:
        """The number of tiles of 16 output channels of the problem."""
        return -(-self.k_wide // 16)

    @property
    def groups(self) -> int:
        """The number of groups of 8 pixels that a warp has of each chunk."""
        return -(-self.run // (8 * self.near))

    @property
    def own_chunks(self) -> int:
        """The number of chunks of 32 channels that a warp has."""
        return -(-self.chunks * self.near * self.near_rows // WARPS)

    @property
    def own_rows(self) -> int:
        """The number of tiles of 16 hidden values that a warp has."""
        return -(-self.rows // self.near_rows)

    @property
    def turns(self) -> int:
        """The number of times that a warp loads `ahead` groups of pixels."""
        return self.own_chunks * -(-self.groups // self.ahead)

    @property
    def instructions(self) -> tuple[int, int]:
        """The instructions of a warp for pixels and the first layer's weights, in two ways: (the pixels of each turn multiplied
        by the weights; the pixels added first, and the sums multiplied).
        """
        direct, added = (62 + 4 * self.ahead) * self.own_rows, 17 * self.ahead
        return self.turns * direct, self.turns * added + self.own_chunks * (70 + 55 * self.own_rows)

    @property
    def summed(self) -> bool:
        """Whether pixels are added before the products: if that takes fewer instructions."""
        direct, added = self.instructions
        return added < direct and self.groups > 1

    @property
    def clk(self) -> float:
        """The clocks of a warp for pixels and the first layer's weights, if two warps share each issue slot."""
        return 2 * (110 * self.turns + self.instructions[self.summed]) + LATENCY_CLK * self.turns

    @property
    def down(self) -> float:
        """The factor, a power of 2, with which a sum of pixels fits FP16."""
        return 1 / _power(self.groups) if self.summed else 1.0


def _sizes(p: SqueezeExciteProblem, tactic: Tactic, warps: int = WARPS) -> _Sizes:
    return _sizes_of(p, tactic.parts, padded_channels(tactic.out.layout, p.second.k), warps)


@lru_cache(maxsize=4096)
def _sizes_of(p: SqueezeExciteProblem, parts: Parts, k_wide: int, warps: int) -> _Sizes:
    deep, wide = _whole(p.average.c, 32), _whole(p.first.k, 32)
    chunks, run = -(-deep // (32 * parts.slices)), _whole(-(-p.average.h * p.average.w // parts.runs), 8)
    each = -(-k_wide // (16 * (parts.slices * parts.runs if parts.cluster else 1)))
    if parts.apart:  # a warp of the second layer has HELD times 32 hidden values, or more if there are too few warps
        each = max(1, warps // _power(-(-wide // (32 * HELD))))
    width, rows = min(_power(max(p.first.k, 32)), 32 * warps), math.ceil(p.first.k / 16 / (parts.apart or 1))
    sizes = _Sizes(deep, wide, k_wide, chunks, run, 1, 1, each, FEW_AHEAD, rows, width)
    ticket = not parts.apart and not parts.cluster and parts.slices * parts.runs > 1  # a warp then has all hidden values
    pairs = [(near, of) for near, of in product((1, 2, 4, 8), repeat=2) if near * of <= (near if ticket else WARPS)]
    shared = [replace(sizes, near=near, near_rows=of) for near, of in pairs]
    few = min(shared, key=lambda s: s.clk)
    if few.turns == 1 or p.average.n * parts.slices * parts.runs > AHEAD_BLOCKS:
        return few
    return min((replace(s, ahead=MANY_AHEAD) for s in shared), key=lambda s: s.clk)


def pack(p: SqueezeExciteProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns w [mid padded to 16][c padded to 32] and w2 [k padded to 16][mid padded to 32] in FP16 tiles of 16 x 32, each of
    two operands A of mma.m16n8k16 (PTX ISA, 9.7.14.5.8); biases in FP32, zeros if the problem has none.

    In a tile, lane 4g + t has columns 8t to 8t+3 of rows g and g + 8 in the first operand, 8t+4 to 8t+7 in the second, in
    pairs: lane 5 (g 1, t 1) has columns 8, 9 of row 1, then of row 9, columns 10, 11 of row 1, then of row 9; then the second
    operand's.
    """
    sizes, packed = section_bytes(p, tactic), dict[str, np.ndarray]()
    for name, conv in (("w", p.first), ("w2", p.second)):
        w = np.zeros((sizes[name] // (2 * _whole(conv.c, 32)), _whole(conv.c, 32)), np.float16)
        w[: conv.k, : conv.c] = weights[name].reshape(conv.k, conv.c)
        row, low_high, g, column, t, factor, pair, two = range(8)
        parts = w.reshape(len(w) // 16, 2, 8, -1, 4, 2, 2, 2)
        packed[name] = parts.transpose(row, column, factor, g, t, pair, low_high, two).reshape(-1)
    for name in ("b", "b2"):
        packed[name] = np.zeros(sizes[name] // 4, np.float32)
        if weights.get(name) is not None:
            packed[name][: len(weights[name])] = weights[name]
    return packed


def section_bytes(p: SqueezeExciteProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    mid, rows = p.first.k, _whole(padded_channels(tactic.out.layout, p.second.k), 16)
    w, w2 = _whole(mid, 16) * _whole(p.average.c, 32), rows * _whole(mid, 32)
    return {"w": 2 * w, "w2": 2 * w2, "b": 4 * _whole(mid, 32), "b2": 4 * rows}


def counts(p: SqueezeExciteProblem, tactic: Tactic, device: Device) -> Counts:
    """Returns counts of the one or two launches. All blocks read and multiply their shares; then a cluster's blocks, an image's
    last block or the second launch does the rest, in which each load waits for the one before.

    Weights are fetched into L2 while the pixels arrive. Blocks of an SM share its issue slots and its part of L2's bandwidth.
    The numbers of instructions are those of sm_90a's machine code: per turn of pixels, per 16 output channels, and per 16, or
    32, hidden values of these. Products of one sum wait for each other.
    """
    sizes, n, shares = _sizes(p, tactic), p.average.n, tactic.parts.slices * tactic.parts.runs
    blocks = shares * (tactic.parts.apart or 1)
    alone, apart = shares == 1 or tactic.parts.cluster, bool(tactic.parts.apart)
    bound = ALONE_ON_SM if sizes.ahead == MANY_AHEAD else TOGETHER if alone else WITH_PARTIAL
    registers = device.regs_per_sm // (bound * THREADS) // 8 * 8
    resident_blocks = resident(device, THREADS, registers, _smem(p, blocks if tactic.parts.cluster else 1))
    per_sm = min(resident_blocks, -(-n * blocks // device.num_sms))
    tiles, each = -(-sizes.each // WARPS), THREADS / 32 / 4  # warps that share an issue slot
    in_a_row = -(-min(sizes.groups, sizes.ahead) // (1 if apart else 2))  # products
    products = sizes.own_chunks if sizes.summed else sizes.turns * in_a_row
    first = sizes.turns * LATENCY_CLK + sizes.own_rows * products * MMA_CLK
    shown = not device.dependent_launch  # overlapping launches hide the instructions before the wait
    issue = shown * (BEFORE_BOTH if alone else BEFORE_FIRST) + sizes.instructions[sizes.summed]
    issue += FIRST + MEET * alone + 110 * (sizes.turns - 1)
    of_tile, tile = _tile_clk(sizes, WARPS // sizes.each if apart else 1, WARPS, L2_LATENCY_CLK)
    rate, at_once = sm_l2(device, n * blocks) / per_sm, device.num_sms * resident_blocks
    if tactic.parts.cluster:
        at_once = blocks * clusters_at_once(device, blocks) * resident_blocks
    own = max(64 * sizes.chunks * (sizes.run + 16 * sizes.rows) / rate, first)
    last = max(32 * sizes.each * sizes.wide / sm_l2(device, n), tiles * tile)
    meet: float = CLUSTER_CLK if tactic.parts.cluster else 0
    if not alone:
        join = _join_clk(sizes, shares, BEFORE_SECOND * (shown or not apart), WARPS, JOINED)
        rounds = math.ceil(n * (-(-sizes.tiles_out // sizes.each) if apart else 1) / at_once)
        last, meet = 0.0, (0 if apart else TICKET_CLK) + rounds * (last + join)
    together = per_sm * (each * issue + (tiles * of_tile if alone else 0))
    clk = math.ceil(n * blocks / at_once) * max(own + last + each * issue, together) + meet
    clk += (1 + apart) * COLD_CLK.get(device.sm, 0) * (n * blocks <= device.num_sms)
    read, written = num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.out, p.out_shape)
    us, packed = clk / device.clock_mhz, sum(section_bytes(p, tactic).values())
    return Counts(read, written, packed, {"latency": us}, launches=1 + apart)


def _tile_clk(sizes: _Sizes, near: int, warps: int, least: float) -> tuple[float, float]:
    """Returns (clocks of issue, all clocks) for a tile of 16 output channels whose hidden values `near` of the block's `warps`
    share.

    `least`: clocks until the tile's weights arrive; 0 if they were loaded before the hidden values were known.
    """
    deep = -(-sizes.wide // (32 * near))
    issue = warps / 4 * (110 + 20 * deep)
    return issue, max(issue + deep * MMA_CLK, least) + (-(-deep // HELD) - 1) * L2_LATENCY_CLK


def _join_clk(sizes: _Sizes, shares: int, before: float, warps: int, joined: int) -> float:
    """Returns the clocks in which a block joins the sums of `shares` blocks. `before`: instructions before that, if no wait
    hides them; `joined`: shares whose sums a thread loads in one turn.
    """
    turns = -(-sizes.wide // sizes.width) * -(-shares * sizes.width // (joined * 32 * warps))
    of_turn = JOIN_TURN * joined / JOINED
    return warps / 4 * (before + JOIN - JOIN_TURN + of_turn * turns) + turns * L2_LATENCY_CLK


def scaled_counts(p: SqueezeExciteProblem, fmt: Format, blocks: int, device: Device) -> Counts:
    """Returns counts of `scale_launch`: its blocks join the hidden values, compute the scale, then multiply the pixels, which
    they loaded meanwhile.
    """
    tactic = tactic_of("squeeze_excite", Parts(1, blocks, apart=1), (fmt,), fmt)
    (sizes, across, runs), before = _scaled_sizes(p, tactic), 0 if device.dependent_launch else BEFORE_SECOND
    warps, registers = _scaled_warps(p), device.regs_per_sm // (WITH_PARTIAL * THREADS) // 8 * 8
    at_once, share = resident(device, 32 * warps, registers, _smem(p, 1, warps)), warps / 4
    issue, tile = _tile_clk(sizes, warps // sizes.each, warps, 0)
    scale = SCALE_ONCE + SCALE_PIXEL * -(-min(sizes.run, p.average.h * p.average.w) // (sizes.run // SCALED_PIXELS))
    alone = _join_clk(sizes, blocks, before, warps, SCALED_JOINED) + tile + share * scale
    per_sm = -(-p.average.n * across * runs // device.num_sms)
    together = per_sm * (share * (before + JOIN + scale) + issue)
    us = (max(-(-per_sm // at_once) * alone, together) + COLD_CLK.get(device.sm, 0)) / device.clock_mhz
    moved, sections = num_bytes(fmt, p.in_shapes[0]), section_bytes(p, tactic)
    weights = sum(sections[name] for name in ("w2", "b", "b2"))
    return Counts(moved, moved, weights, {"latency": us}, kernel="squeeze_excite")
