"""Attention with rows of scores of any length (attention.cu): 64 rows of one head in a block, scores in registers only."""

import math
from collections.abc import Mapping

import numpy as np

from cuda_kernels.device import Device
from tactics.families.attention import operands
from tactics.problems.attention import AttentionProblem, Operand
from tactics.reason import Candidates, no_room, unsupported
from tactics.roofline import L2_LATENCY_CLK, LATENCY_CLK, Counts, sm_l2, tensor_rate, traffic
from tactics.step import NONFINITE, NULL, Launch, floats, ints, launch
from tactics.tactic import Tactic

MAX_DIM = 128  # sizes of a row of q and k, and of v: a warp holds 16 rows of the output
ROWS, KEYS, THREADS = 64, 32, 128  # as in attention.cu
NOWHERE: operands.Lies = (0, (0, 0, 0, 0))
# Clocks of one of an SM's four scheduler slots.
STEP_CLK, ELEMENT_CLK = 14, 12  # 16 x 16 x 16 of a product (ldmatrix, movmatrix, two products); an element copied by itself
SCORE_CLK, ADD_CLK = 10, 8  # a score (scale, maximum, exponential, sum); more for a score with an addend
TURN_CLK = 500  # the chain of both products and the softmax in one turn, with no other warp at work
_Q, _K, _V = (Operand(0, first, (864, 16, 96, 1)) for first in (0, 32, 64))
_CASE = AttentionProblem(
    2, 2, 9, 9, 16, 16, ((18, 96, 1, 1),), (18, 32, 1, 1), _Q, _K, _V, Operand(1, 0, (288, 16, 32, 1)), bias="chw"
)
CASES = {"attention": (_CASE,)}


def candidates(p: AttentionProblem, device: Device) -> Candidates:
    """Yields (tactic or kernel, reason against it or None)."""
    if max(p.inner, p.width) > MAX_DIM:
        yield "attention", unsupported(f"more than {MAX_DIM} channels of a head")
        return
    for tactic in operands.pairings(p, "attention"):
        yield tactic, unsupported(operands.reason(p, tactic, along=3) or no_room(_shared(_dim(p)), device))


def _dim(p: AttentionProblem) -> int:
    return -(-max(p.inner, p.width) // 16) * 16


def _shared(dim: int) -> int:
    return (ROWS + 4 * KEYS) * (dim + 8) * 2


def _in_vectors(p: AttentionProblem, tactic: Tactic, strided: operands.At = None) -> bool:
    at, of = operands.known(p, tactic, strided), {"q": p.inner, "k": p.inner, "v": p.width, "y": p.width}
    return operands.aligned(tactic, strided) and all(operands.vectors(at[name], 3, size) for name, size in of.items())


def launches(p: AttentionProblem, tactic: Tactic, strided: operands.At = None) -> tuple[Launch, ...]:
    dim, tiles, found = _dim(p), -(-p.rows // ROWS), operands.known(p, tactic, strided)
    args = {"nonfinite": NONFINITE, "scale": ("weights", "scale"), "y": ("out", 0), "q": ("in", p.q.tensor)}
    args |= {"k": ("in", p.k.tensor), "v": ("in", p.v.tensor)}
    args |= operands.operand_args({"bias": _constant(p), "mask": NOWHERE, **found})
    args |= {"bias": ("weights", "bias") if p.bias else NULL, "mask": ("in", p.mask.tensor) if p.mask else NULL}
    args |= ints(heads=p.heads, tiles=tiles, rows=p.rows, columns=p.columns, inner=p.inner, width=p.width)
    args |= ints(padding=operands.padding(p, tactic)) | floats(epsilon=p.epsilon)
    added = bool(p.bias) + 2 * (p.mask is not None)
    values = {"DIM": dim, "NORM": int(p.unit), "ADDED": added, "VECTOR": int(_in_vectors(p, tactic, strided))}
    return (launch("attention", values, (tiles * p.heads * p.batch, 1, 1), THREADS, _shared(dim), args),)


def _constant(p: AttentionProblem) -> operands.Lies:
    """The start and steps of the added constant in its section."""
    _, c, h, w = p.span(p.bias)
    n, head, row, column = (s if a in p.bias else 0 for a, s in zip("nchw", (c * h * w, h * w, w, 1), strict=True))
    return 0, (n, head, row, column)


def pack(p: AttentionProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs the weights as `operands.pack` does, but the added constant times log2 e; finite numbers stay finite."""
    sections = operands.pack(p, tactic, weights)
    if p.bias:
        bias, most = sections["bias"], np.finfo(np.float32).max
        exact = np.clip(bias.astype(np.float64) * np.log2(np.e), -most, most)
        sections["bias"] = np.where(np.isfinite(bias), exact, bias).astype(np.float32)
    return sections


section_bytes = operands.section_bytes


def counts(p: AttentionProblem, tactic: Tactic, device: Device) -> Counts:
    """Counts bytes and clocks: a block reads its rows of q once, and all keys and values of its head 32 at a time; each turn
    waits for the one before.
    """
    (step,) = launches(p, tactic)
    dim, blocks, turns = _dim(p), step.grid[0], -(-p.columns // KEYS)
    resident = max(1, min(device.smem_per_sm // step.smem, device.regs_per_sm // (255 * THREADS)))
    waves = math.ceil(blocks / (device.num_sms * resident))
    together = min(resident, math.ceil(blocks / device.num_sms))  # blocks of an SM at once
    read = 2 * (min(ROWS, p.rows) * p.inner + p.columns * (p.inner + p.width))
    products = 2 * (ROWS // 16) * turns * (KEYS // 16) * (dim // 16)
    added = ROWS * turns * KEYS * (bool(p.bias) + (p.mask is not None))
    copied = 0 if _in_vectors(p, tactic) else ELEMENT_CLK * (read // 2) / 32
    issue = (products * STEP_CLK + (ROWS * turns * KEYS * SCORE_CLK + added * ADD_CLK) / 32 + copied) / 4
    mma = 2 * ROWS * turns * KEYS * dim / tensor_rate(device, THREADS // 32 * together)
    flow = (read + 4 * added) / sm_l2(device, min(blocks, device.num_sms * resident)) * together
    busy = max(together * max(issue, mma), turns * TURN_CLK, flow) + LATENCY_CLK + L2_LATENCY_CLK
    weights, limits = sum(section_bytes(p, tactic).values()), {"latency": waves * busy / device.clock_mhz}
    return Counts(*traffic((*p.tensors, p.out), tactic), weights, limits)
