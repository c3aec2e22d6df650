"""Squeeze-excite's scale in one launch (squeeze_excite.cu): global average, two fully connected layers; packing and time.

Apart these are three launches of a few microseconds each that fill no GPU. One block per image does them in a row, which pays
as long as an image's pixels are few enough for one SM to read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from cuda_kernels.device import Device
from tactics.format import HALF_FORMATS, num_bytes, padded_channels
from tactics.problems.problem import ConvProblem, PoolProblem, SqueezeExciteProblem
from tactics.roofline import L2_LATENCY_CLK, LATENCY_CLK, moved_us, result, sm_l2
from tactics.step import Launch, act_code, alpha_beta, conv_pointers, floats, ints, launch, linear, own_strides, view_args
from tactics.tactic import Tactic

THREADS, ROOM = 512, 12  # as in squeeze_excite.cu
MAX_CHANNELS, MAX_HIDDEN = 4096, 1024  # what lies between, in FP32, fits 48 KiB of shared memory


def reason_against(pool: PoolProblem, first: ConvProblem, second: ConvProblem) -> str:
    """Why the three cannot be one launch, or an empty string."""
    if not pool.is_global or pool.kind != "avg":
        return "no global average"
    for p, before in ((first, pool), (second, first)):
        if p.in_shapes[0] != before.out_shape or (p.h, p.w, p.r, p.s) != (1, 1, 1, 1) or any(p.pad):
            return "no two fully connected layers behind the average"
        if p.groups > 1 or p.needs or p.epilogue.act.name == "prelu":
            return "groups, a residual, a depth-to-space, a pool, a prologue or PRelu"
    if max(first.c, second.k) > MAX_CHANNELS or first.k > MAX_HIDDEN:
        return f"more than {MAX_CHANNELS} channels or {MAX_HIDDEN} hidden values"
    return ""


def candidates(p: SqueezeExciteProblem, device: Device) -> Iterator[tuple[Tactic | str, str]]:
    """(tactic or kernel, reason against it or "")."""
    if why := reason_against(p.average, p.first, p.second):
        yield "squeeze_excite", why
        return
    for x, y in product(HALF_FORMATS, HALF_FORMATS):
        reason = "only whole vectors of 8 channels are read and written" if linear(x) or linear(y) else ""
        yield Tactic("squeeze_excite", None, (x,), y), reason


def launches(p: SqueezeExciteProblem, tactic: Tactic) -> tuple[Launch, ...]:
    x, y = own_strides(p, tactic)
    one, two = p.first, p.second
    c8, k8 = padded_channels("hwc8", p.average.c) // 8, padded_channels(tactic.out.layout, two.k) // 8
    smem = 4 * (c8 * ROOM + -(-one.k // 4) * 4 + THREADS // 32 * 8 * ROOM)
    of_one, of_two, pixels = conv_pointers(one), conv_pointers(two, "2"), p.average.h * p.average.w
    args = {name: of_one[name] for name in ("nonfinite", "x", "y")} | {"w1": of_one["w"], "b1": of_one["bias"]}
    args |= {"w2": of_two["w"], "b2": of_two["bias"]} | view_args("in", x) | view_args("out", y)
    args |= ints(c8=c8, pixels=pixels, mid=one.k, k=two.k, k8=k8) | floats(scale=1 / pixels)
    args |= alpha_beta(one, "1") | alpha_beta(two, "2")
    values = {"ACT1": act_code(one), "ACT2": act_code(two)}
    return (launch("squeeze_excite", values, (p.average.n, 1, 1), THREADS, smem, args),)


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


def predict(p: SqueezeExciteProblem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    """An SM reads its image, then both layers' weights; each of the three waits for the one before."""
    image = num_bytes(tactic.ins[0], (1, *p.in_shapes[0][1:]))
    weights = 2 * p.first.k * (padded_channels("hwc8", p.average.c) + padded_channels("hwc8", p.second.k))
    turns = -(-p.average.c // 64)
    clk = (image + weights) / sm_l2(device, p.average.n) + turns * 2 * L2_LATENCY_CLK + 4 * LATENCY_CLK
    sm = math.ceil(p.average.n / device.num_sms) * clk / device.clock_mhz
    moved = moved_us(device, num_bytes(tactic.ins[0], p.in_shapes[0]), num_bytes(tactic.out, p.out_shape), weights)
    return result(device, {"latency": sm, **moved})
