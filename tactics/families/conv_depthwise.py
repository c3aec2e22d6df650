"""Depthwise convolution (conv_depthwise.cu): patches of output pixels, launches, packing, time.

Prediction: a block takes the largest of these times

    issue     instructions of its threads (products, conversions, loads, addresses): 128 per clock and SM if enough warps fit
    tensor    products of tensor cores: 16 pixels of a row with a band matrix, zeros included
    l1        bytes that its threads load, overlaps included, and a wavefront per weight and warp, 128 bytes per clock; if the
              patch is copied to shared memory, the copy and the warps' loads from there
    l2        bytes that its patch reads and writes, halo included, at the SM's share of L2 bandwidth

plus its latency (a thread waits once per input row), which other resident blocks hide. On tensor cores the first three add up:
blocks that begin together copy, multiply and store together. This sum, with a clock for each line of 128 bytes that a warp's
access touches, predicts 0.96 of an H200's times in the median (0.80 to 1.04; the kernel's first version, stride 1); the largest
of the three by itself is 1.9 times too fast.
"""

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import product

import numpy as np

from cuda_kernels.device import Device
from tactics.format import HALF_FORMATS, LAYOUTS, Format, Strides, padded_channels, too_large
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem
from tactics.reason import Candidates, unsupported
from tactics.roofline import LATENCY_CLK, Counts, Extra, Spent, convolved, resident, rounds_us, sm_l2, tensor_rate
from tactics.step import (
    Launch,
    Share,
    Store,
    conv_args,
    epilogue_instructions,
    epilogue_values,
    ints,
    launch,
    linear,
    vector_sections,
)
from tactics.tactic import Only, Patch, Tactic, restrict, tactic_of

STATIC_SMEM = 48 * 1024  # the most bytes of static shared memory, which holds the weights
# The most columns of input that registers hold at once, and the most taps of a channel that fit shared memory with its vectors.
MOST_COLUMNS, MOST_TAPS = 32, 12_000
SLICE = {8: 8, 1: 16}  # channels of a thread -> columns of a larger filter that it takes at once
# Sums and input columns of a thread, at most -> registers of a staged tactic, few enough for other blocks to hide latency.
STAGED_REGISTERS = {54: 72, 60: 80, 70: 96, 106: 128, 10**9: 168}
MAX_REGISTERS = 240  # of a thread, as _registers estimates them; the compiler spills above it
ISSUE_EFFICIENCY, ISSUE_PER_WARP = 0.8, 0.065  # the share of an SM's issue slots used by all of its warps at most; by one warp
L1_BYTES_PER_CLK = 128
# Instructions, by the machine code, with which a thread copies 8 columns of 8 channels, transposed, to shared memory.
COPY_INSTRUCTIONS = 121
STORE_INSTRUCTIONS = 13  # with which a thread stores 8 channels of a pixel from there
L1_LATENCY_CLK = 250  # of an input row, most of whose columns other threads load too
EPILOGUE_CLK = 300
# Fitted to half of an H200's times (benchmarks/our_times.py); other GPUs were not measured. Without a stride a staged block
# waits for issue slots and for shared memory in turn (root of the sum of squares), and for memory once a launch.
MEASURED_ON, SCALAR_LATENCY = ("sm_90a",), 1.4  # SCALAR_LATENCY: factor on the latency of blocks that load straight from memory
STAGED_ISSUE = ((1.0, 0.045), (0.85, 0.057))  # (ISSUE_EFFICIENCY, ISSUE_PER_WARP) of staged blocks, without and with a stride
STAGED_OF_FEW = 0.18  # n warps use at least this times sqrt(n) of the issue slots

# Small patches suit small images and give many blocks, large ones have less halo with large filters; multiples of 7 fit images
# of 224 pixels divided by powers of 2.
# fmt: off
VECTOR_PATCHES = tuple(
    Patch(*t)
    for t in ((64, 8, 8, 2, 4), (32, 16, 16, 2, 4), (16, 28, 28, 2, 4), (16, 32, 32, 2, 4))
)
# Patches of blocks that first copy their input to shared memory: a thread's tile is small and so needs few registers.
STAGED_PATCHES = tuple(
    Patch(*t)
    for t in (
        (64, 7, 7, 1, 7), (32, 8, 8, 2, 4), (32, 14, 14, 2, 7), (32, 16, 16, 2, 8),
        (16, 28, 28, 4, 7), (64, 14, 14, 2, 7),
    )
)
# Patches for tensor cores: a warp has 8 channels of up to 16 tiles, each 8 wide and as high as registers allow.
TENSOR_PATCHES = tuple(
    Patch(*t, mma=True)
    for t in ((32, 28, 32, 7, 8), (16, 28, 32, 7, 8), (32, 56, 16, 7, 8), (16, 16, 32, 4, 8), (32, 14, 16, 2, 8))
)
# fmt: on
HWC_PATCHES, STAGED = VECTOR_PATCHES + STAGED_PATCHES + TENSOR_PATCHES, frozenset(STAGED_PATCHES)
# Patches of a linear image, which is read along its rows: a wide patch wastes least of a row's first and last sector.
LINEAR_PATCHES = tuple(
    Patch(*t) for t in ((16, 8, 8, 8, 1), (8, 16, 16, 8, 1), (2, 32, 32, 8, 1), (1, 32, 64, 8, 1), (1, 16, 128, 8, 1))
)
CASES = {
    "conv_depthwise": (
        ConvProblem(2, 32, 18, 21, 32, 3, 3, pad=(1, 1, 1, 1), groups=32, epilogue=RELU),
        ConvProblem(1, 48, 23, 17, 48, 3, 3, (2, 2), (1, 1, 1, 1), groups=48, epilogue=RELU),
    )
}


def candidates(p: ConvProblem, device: Device, only: Only = None, limit: float | None = None) -> Candidates:
    """Yields (tactic or kernel, reason against it or None). `limit`: of `halo`, by default `halo_limit`; `only`: one patch."""
    if p.groups != p.c or p.c == 1:
        yield "conv_depthwise", unsupported(f"not depthwise: {p.groups} groups of {p.c} channels")
        return
    if why := too_large(p.all_shapes):
        yield "conv_depthwise", unsupported(why)
        return
    limit = limit or (math.inf if only else halo_limit(p))
    known: dict[tuple[Patch, bool], str] = {}  # (patch, input is linear) -> the reason against it, the same for all formats
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        for patch in restrict("conv_depthwise", LINEAR_PATCHES if linear(x) else HWC_PATCHES, only):
            tactic = tactic_of("conv_depthwise", patch, (x, y) if p.epilogue.residual else (x,), y)
            if linear(x) != linear(y):
                yield tactic, unsupported("input and output have different vector widths")
                continue
            if (patch, linear(x)) not in known:
                known[patch, linear(x)] = reason(p, tactic, device, limit)
            yield tactic, unsupported(known[patch, linear(x)])


def reason(p: ConvProblem, tactic: Tactic, device: Device, limit: float) -> str:
    """Returns why this patch cannot run, or is too wasteful, or ""."""
    patch = tactic.patch
    columns = (patch.tw - 1) * lattice(p)[1][1] + (sliced(p, tactic) or p.s)
    registers, smem = _registers(p, tactic), _smem(p, tactic)
    if patch.mma and lattice(p)[1] != (1, 1):
        return f"tensor cores take stride 1 (over dilation), not {lattice(p)[1][0]} x {lattice(p)[1][1]}"
    if patch.mma and max(p.r, p.s) > 7:
        return f"tensor cores take filters of at most 7x7, not {p.r}x{p.s}"
    if (patch.mma or staged(tactic)) and p.k > p.c:
        return f"input in shared memory needs one output channel of each input channel, not {p.k // p.c}"
    if columns > MOST_COLUMNS:
        return f"a thread's window has {columns} columns, at most {MOST_COLUMNS} are supported"
    if registers > min(MAX_REGISTERS, device.regs_per_sm // (math.ceil(threads(tactic) / 128) * 128) // 8 * 8):
        return f"about {registers} registers for each of {threads(tactic)} threads would spill"
    if (whole := smem + patch_bytes(p, tactic)) > device.smem_per_block:
        return f"needs {whole} bytes of shared memory, a block has at most {device.smem_per_block}"
    if smem > STATIC_SMEM:
        return f"needs {smem} bytes of shared memory for weights, at most {STATIC_SMEM} bytes fit"
    if staged(tactic):  # halos are read again from L2 by asynchronous copies, so more halo is allowed
        limit = 4 * limit - 3
    often = limit < math.inf and not linear(tactic.ins[0]) and not sliced(p, tactic)  # else arithmetic takes longer than loads
    if often and halo(p, patch) > limit:
        return f"its blocks read and write the tensors {halo(p, patch):.2f} times, more than the limit of {limit:.2f} times"
    return ""


def vector(tactic: Tactic) -> int:
    """Returns the number of channels that a thread loads or stores in one access."""
    if staged(tactic):
        return 4 if tactic.patch.th * tactic.patch.tw <= 8 else 2
    return 1 if linear(tactic.ins[0]) else 8


def staged(tactic: Tactic) -> bool:
    return tactic.patch in STAGED


def sliced(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the number of filter columns that a thread takes at once, with weights from L1, if a filter is too large, or
    0."""
    fits = p.s <= MOST_COLUMNS and p.r * p.s <= MOST_TAPS
    return 0 if fits or tactic.patch.mma or staged(tactic) else min(p.s, SLICE[vector(tactic)])


def threads(tactic: Tactic) -> int:
    t = tactic.patch
    spots = (t.h // t.th) * (t.w // t.tw)
    return t.channels // vector(tactic) * (32 if t.mma else spots)


def lattice(p: ConvProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Splits a dilated convolution into interleaved ones without dilation: returns ((step along h, w), (stride E along h, w)).
    Outputs of one lie `step` pixels apart, its inputs a dilation apart, E of them per output. Dilation 2, stride 1: step 2, E
    1."""
    (stride_h, stride_w), (dil_h, dil_w) = p.stride, p.dilation
    h, w = math.gcd(stride_h, dil_h), math.gcd(stride_w, dil_w)
    return (dil_h // h, dil_w // w), (stride_h // h, stride_w // w)


def tiles(p: ConvProblem, patch: Patch) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns ((patches along h, w) of one interleaved convolution, (number of such convolutions along h, w))."""
    (step_h, step_w), _ = lattice(p)
    counts = math.ceil(math.ceil(p.p / step_h) / patch.h), math.ceil(math.ceil(p.q / step_w) / patch.w)
    return counts, (min(step_h, p.p), min(step_w, p.q))


@lru_cache(maxsize=4096)
def _read(p: ConvProblem, patch: Patch) -> tuple[int, int]:
    """Returns (pixels of an image that its blocks read, overlaps counted again; pixels that some output needs)."""
    covered, once = 1, 1
    for size, out, reach, pad, stride, dil, step, extent in zip(
        (p.h, p.w), (p.p, p.q), (p.r, p.s), p.pad[:2], p.stride, p.dilation, lattice(p)[0], (patch.h, patch.w), strict=True
    ):
        read = 0
        needed: set[int] = set()
        for phase in range(min(step, out)):
            for first in range(phase, out, step * extent):
                outs = range(first, min(out, first + step * extent), step)
                taps = reach
                if step * stride <= reach * dil:  # the windows of all these outputs together are one wider window
                    outs, taps = outs[:1], reach + (outs[-1] - first) * stride // dil
                ins = {at for o in outs for t in range(taps) if 0 <= (at := o * stride - pad + t * dil) < size}
                read += len(ins)
                needed |= ins
        covered, once = covered * read, once * len(needed)
    return covered, once


def halo(p: ConvProblem, patch: Patch) -> float:
    """Returns (pixels that blocks read and write) / (pixels of the output, and of the input that some output needs)."""
    (covered, once), y = _read(p, patch), p.p * p.q * p.k / p.c
    return (covered + y) / (once + y)


def halo_limit(p: ConvProblem) -> float:
    """Returns the largest allowed `halo`: 1.15 for 3x3, 1.20 for 5x5, 1.25 for 7x7, or the least of all patches if larger."""
    reach = max(p.r, p.s)
    return max(1.15 if reach <= 3 else 1.2 if reach <= 5 else 1.25, min(halo(p, patch) for patch in VECTOR_PATCHES))


def _smem(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the bytes of static shared memory: taps, bias and slope in FP32; on tensor cores pairs of taps in FP16."""
    parts = 2 if vector(tactic) == 8 else 1
    row = tactic.patch.channels * 4 // parts
    taps = 0 if tactic.patch.mma or sliced(p, tactic) else p.r * p.s
    rows = p.r + (p.r % 4 == 3)  # of words, loaded four at a time
    filters = tactic.patch.channels * (rows * 32 + 16) if tactic.patch.mma else 0
    return parts * (-(-(taps + 2) * row // 128) * 128 + 64) + filters


def shared_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the bytes of a block's shared memory, static and dynamic."""
    return _smem(p, tactic) + patch_bytes(p, tactic)


def patch_bytes(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the bytes of dynamic shared memory in which the kernel keeps a block's input patch; 0 if it is not copied."""
    t = tactic.patch
    if staged(tactic):
        return _staged_bytes(p, t)
    if not t.mma:
        return 0
    band = _band(t.th * (t.w // 8 + 1), t.h // t.th, t.w // 8)
    return t.channels // 8 * (8 * math.ceil((t.h - 1 + p.r) / t.th) * band * 16 + 1024 // t.channels)


@lru_cache
def _band(least: int, rows: int, columns: int) -> int:
    """Returns the least distance between rows of tiles, in units of 16 bytes and at least `least`, with which any eight
    neighbouring tiles, which eight lanes address at once, are in different banks."""

    def apart(band: int) -> bool:
        begin = [(row * band + column) % 8 for row, column in product(range(rows), range(columns))]
        return all(len(set(eight)) == len(eight) for eight in (begin[i : i + 8] for i in range(0, len(begin), 8)))

    return next(band for band in range(least, least + 8) if apart(band))


def _staged_bytes(p: ConvProblem, t: Patch) -> int:
    """Returns `patch_bytes` of a staged patch: tiles lie an odd number of pixels apart if a pixel does not fill the banks."""
    e_h, e_w = lattice(p)[1]
    turn, rows, columns, across = max(1, 64 // t.channels), t.th * e_h, t.tw * e_w, t.w // t.tw
    pitch = columns | 1 if turn > 1 else columns
    height, width = (t.h - 1) * e_h + p.r, (t.w - 1) * e_w + p.s
    row = width // columns * pitch + width % columns
    row = next((n for n in range(row, row + turn) if (rows * n - across * pitch) % turn == 0), row + turn - 1)
    return height * row * t.channels * 2


def _registers(p: ConvProblem, tactic: Tactic) -> int:
    """Returns an estimate of a thread's registers: sums, an input row in FP16 and half of it in FP32, addresses."""
    t, vec = tactic.patch, vector(tactic)
    columns = (t.tw - 1) * lattice(p)[1][1] + (sliced(p, tactic) or p.s)
    if staged(tactic):
        return next(bound for most, bound in STAGED_REGISTERS.items() if vec * (t.th * t.tw + columns) <= most)
    if t.mma:
        e = p.epilogue
        long_end = e.affine or e.residual or "softplus" in (e.act.name, e.last.name)
        return MAX_REGISTERS if t.th > 4 else 168 if long_end else 128  # as the kernel bounds them
    return t.th * t.tw * vec + columns * (8 if vec == 8 else 2) + 40


def launches(
    p: ConvProblem,
    tactic: Tactic,
    store: Store | None = None,
    strided: tuple[Strides, ...] | None = None,
    share: Share | None = None,
) -> tuple[Launch, ...]:
    """Returns one launch. `store`: of a ConvTranspose's phase; `strided`: tensors inside others; `share`: see conv_scaled."""
    t, vec, multiplier = tactic.patch, vector(tactic), p.k // p.c
    (steps, (e_h, e_w)), (counts, phases) = lattice(p), tiles(p, t)
    values = {
        "TENSOR": int(t.mma),
        "STAGED": int(staged(tactic)),
        "VEC": vec,
        "R": p.r,
        "S": p.s,
        "E_H": e_h,
        "E_W": e_w,
        "C_BLOCK": t.channels // vec,
        "H_BLOCK": t.h // t.th,
        "W_BLOCK": t.w // t.tw,
        "TH": t.th,
        "TW": t.tw,
        **epilogue_values(p),
        "MULTIPLIED": int(multiplier > 1),
        **({"SLICE": sliced(p, tactic)} if sliced(p, tactic) else {}),
        **({"HIDDEN": 1} if share else {}),
    }
    args = conv_args(p, tactic, store, strided, ("in", "out", "added")) | ints(w_pitch=_pitch(p), multiplier=multiplier)
    args |= ints(step_h=steps[0], step_w=steps[1], tiles_h=counts[0], tiles_w=counts[1], phases_h=phases[0], phases_w=phases[1])
    more, smem = share.behind(patch_bytes(p, tactic)) if share else ({}, patch_bytes(p, tactic))
    grid, workspace = (p.n * blocks_of(p, tactic), 1, 1), share.workspace if share else 0
    return (launch("conv_depthwise", values, grid, threads(tactic), smem, args | more, workspace),)


def blocks_of(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the number of blocks per image."""
    counts, phases = tiles(p, tactic.patch)
    return -(-padded_channels(tactic.out.layout, p.k) // tactic.patch.channels) * math.prod(counts) * math.prod(phases)


def _pitch(p: ConvProblem) -> int:
    """Returns the number of channels in a row of packed weights: k padded to whole sectors."""
    return padded_channels("hwc16", p.k)


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns weights [K,1,R,S] as FP16 [R*S][K padded to 16]; bias and slope as FP32 [K padded to 16]."""
    w = np.zeros((p.r * p.s, _pitch(p)), np.float16)
    w[:, : p.k] = np.asarray(weights["w"], np.float16).reshape(p.k, p.r * p.s).T
    return {"w": w.reshape(-1)} | vector_sections(p, weights, _pitch(p))


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    return {"w": p.r * p.s * _pitch(p) * 2} | dict.fromkeys(p.epilogue.vectors, 4 * _pitch(p))


def counts(p: ConvProblem, tactic: Tactic, device: Device, more: Extra | None = None) -> Counts:
    """Returns counts of the launch."""
    t, size, blocks, more = tactic.patch, threads(tactic), p.n * blocks_of(p, tactic), more or Extra()
    _, (e_h, e_w) = lattice(p)
    at_once = resident(device, size, _registers(p, tactic), shared_bytes(p, tactic) + more.smem)
    rows = (t.th - 1) * e_h + p.r
    if t.mma:
        clk, turns = _tensor(p, t, size, tensor_rate(device, at_once * size / 32))
        alone = (1 + turns) * LATENCY_CLK + EPILOGUE_CLK  # filters, and the patch
    elif staged(tactic):
        clk = _staged(p, tactic, size, rows)
        alone = 2 * LATENCY_CLK + EPILOGUE_CLK  # weights and patch together, after the block's place is known
    else:
        columns, turns = sliced(p, tactic), 1
        if columns:  # a slice's input and its weights are loaded in turn; rows outside of the image cost nothing
            rows, turns = min(rows, p.h), 2 * math.ceil(p.s / columns)
        clk = _scalar(p, tactic, size, rows)
        alone = 2 * LATENCY_CLK + rows * turns * L1_LATENCY_CLK + EPILOGUE_CLK  # weights and the first row are not in L1
    read = _read(p, t)[0] * p.n * padded_channels("hwc8", p.c) * 2 / blocks * _straddle(tactic.ins[0], p.c, t.channels)
    read += 2 * p.r * p.s * t.channels * (sliced(p, tactic) > 0)  # weights that are not in shared memory
    written = p.p * p.q * p.n * padded_channels("hwc8", p.k) * 2 / blocks * _straddle(tactic.out, p.k, t.channels)
    clk["issue"] += size * more.instructions / 128
    clk["l2"] = (read + written * (2 if p.epilogue.residual else 1)) / sm_l2(device, blocks)
    # A block's own instructions do not overlap with its latency, other blocks' instructions do.
    rounds, warps = partial(rounds_us, device, clk, blocks, at_once), math.ceil(size / 32)
    if t.mma:
        us = rounds(Spent(max(clk["tensor"] + clk["issue"] + clk["l1"], clk["l2"]), alone + more.clocks))
    elif device.sm in MEASURED_ON and staged(tactic):
        warps *= min(at_once, math.ceil(blocks / device.num_sms))
        strided = (e_h, e_w) != (1, 1)
        most, of_warp = STAGED_ISSUE[strided]
        clk["issue"] /= min(most, max(of_warp * warps, STAGED_OF_FEW * math.sqrt(warps)))
        if strided:
            us = rounds(Spent(max(clk.values()), alone + more.clocks))
        else:
            us = rounds(Spent(math.hypot(clk["issue"], clk["l1"]), 0, 2 * LATENCY_CLK + more.clocks))
    else:
        clk["issue"] /= min(ISSUE_EFFICIENCY, ISSUE_PER_WARP * at_once * warps)
        us = rounds(Spent(max(clk.values()), alone * (SCALAR_LATENCY if device.sm in MEASURED_ON else 1) + more.clocks))
    return convolved(p, tactic, weight_bytes(p), us)


def _tensor(p: ConvProblem, t: Patch, size: int, rate: float) -> tuple[dict[str, float], int]:
    """Returns, for tensor cores, (resource -> clocks of a block, with products of zeros and the port to shared memory and L1;
    how often a thread waits for memory while it copies its patch). `rate`: products of an SM in a clock."""
    height, units, fours = t.h - 1 + p.r, t.w // 8 + 1, math.ceil(p.r / 4)
    products, fragments = 8 * t.th * p.r, 8 * (t.th - 1 + p.r)
    filters = 8 * (fours + 1 + 2 * p.r)  # loads, and masks of the words of a row that have taps
    copies = height * units / 32  # of a thread: 8 columns of 8 channels each
    outputs = 4 * t.th  # pixels of a thread, 8 channels each, as products leave them
    stores = t.h * t.w / 32  # pixels that a thread stores
    each = 0.5 + epilogue_instructions(p) + 5 * p.epilogue.residual  # instructions for an output, by machine code
    if {p.epilogue.act.name, p.epilogue.last.name} & {"clip", "hard_sigmoid"}:  # a test for NaN
        each += 2
    epilogue = outputs * (8 * each + 1 + 12 * p.epilogue.residual) + stores * STORE_INSTRUCTIONS
    staging = copies * COPY_INSTRUCTIONS + fours * (5 * p.s + 30)
    instructions = products + fragments + filters + epilogue + staging + 430
    warp = 4 * fragments + 8 * (4 * fours + 1) + copies * 32 + 4 * outputs + 4 * stores
    # A clock for each line of 128 bytes that a warp's access touches: one per pixel, for residuals two per lane.
    lines = height * (t.w - 1 + p.s) + t.h * t.w * (1 + t.channels / 4 * p.epilogue.residual)
    tensor, issue = size / 32 * (products * 16 * 8 * 16) / rate, size * instructions / 128
    return {"tensor": tensor, "issue": issue, "l1": size / 32 * warp + lines}, math.ceil(copies / (3 if t.th > 4 else 2))


def _staged(p: ConvProblem, tactic: Tactic, size: int, rows: int) -> dict[str, float]:
    """Returns resource -> clocks of a block whose input patch is in shared memory, by the instructions of its machine code."""
    t, vec, e_w = tactic.patch, vector(tactic), lattice(p)[1][1]
    columns, filters, outputs = (t.tw - 1) * e_w + p.s, t.th * p.r, t.th * t.tw
    copies = patch_bytes(p, tactic) / 16 / size
    weights = p.r * p.s * t.channels / vec / size
    products = filters * (p.s * (1 + t.tw * vec) + 3) + rows * (columns * (1 + vec) + 10)
    epilogue = outputs * (vec * (1 + epilogue_instructions(p)) + (14 if p.epilogue.residual else 10))
    wavefronts = rows * columns * vec / 2 + filters * p.s * vec + outputs * 2
    return {
        "issue": size * (products + epilogue + 8 * copies + 20 * weights + 250) / 128,
        "l1": size * (wavefronts / 32 + 2 * copies * 16 / L1_BYTES_PER_CLK),
    }


def _scalar(p: ConvProblem, tactic: Tactic, size: int, rows: int) -> dict[str, float]:
    """Returns resource -> clocks of a block that loads straight from memory, without tensor cores."""
    t, vec, e_w = tactic.patch, vector(tactic), lattice(p)[1][1]
    slices, outputs, taps, each_weight = math.ceil(p.s / (sliced(p, tactic) or p.s)), t.th * t.tw, float(p.r * p.s), 1.5
    columns = slices * (t.tw - 1) * e_w + p.s
    if sliced(p, tactic):  # weights need addresses and conversions; filter rows outside of the image cost nothing
        taps, each_weight = min(p.r, rows * min(1, p.r / t.th)) * p.s, 3.5 + min(vec, 4)
    weight_loads = t.th * taps * (2 if vec == 8 else 1)
    extra = 15 if p.k > p.c and vec == 8 else 0
    columns_cost = rows * columns * (vec + 2 + extra)
    each = vec * (taps + 4 + epilogue_instructions(p)) + (4 if p.epilogue.residual else 2)
    instructions = outputs * each + columns_cost + weight_loads * each_weight + 60
    return {
        "issue": size * instructions / 128,
        "l1": size * (rows * columns * vec * 2 / L1_BYTES_PER_CLK + weight_loads / 32),
    }


def _straddle(fmt: Format, c: int, channels: int) -> float:
    """Returns (bytes of the touched sectors) / (bytes used) for a block that takes `channels` of a pixel's `c` channels: if
    pixels are an odd number of 16 bytes apart, every second block begins in the middle of a sector."""
    odd = not LAYOUTS[fmt.layout].blocked and padded_channels(fmt.layout, c) % 16 and channels < c
    return 1 + 8 / channels if odd else 1.0


def weight_bytes(p: ConvProblem) -> int:
    """Returns the bytes of packed weights and bias."""
    return _pitch(p) * (p.r * p.s * 2 + 4)
