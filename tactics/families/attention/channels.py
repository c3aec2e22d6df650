"""Attention with few scores over long rows (cross_covariance.cu), such as channels that attend to each other over all
tokens.
"""

import math

from cuda_kernels.device import Device
from tactics.families.attention import operands
from tactics.problems.attention import AttentionProblem, Operand
from tactics.reason import Candidates, no_room, unsupported
from tactics.roofline import L2_LATENCY_CLK, LATENCY_CLK, Counts, sm_l2, tensor_rate, traffic
from tactics.step import NONFINITE, Launch, floats, ints, launch
from tactics.tactic import Tactic

MAX_DIM = 128  # rows and columns of the scores: a block holds all of a head
V_TOKENS, MOST_CHUNKS = 64, 16  # outputs that a block writes at a time; the most blocks of a head
# Clocks of one of an SM's four scheduler slots: a step of 16 x 16 x 16 in a stripe (ldmatrix, movmatrix, two products); an
# element that is copied by itself.
STEP_CLK, ELEMENT_CLK = 24, 12
_Q, _K, _V = (Operand(0, first, (1440, 8, 1, 72)) for first in (0, 24, 48))
_Y = Operand(1, 0, (480, 8, 1, 24))
_CASE = AttentionProblem(2, 3, 8, 8, 20, 20, ((40, 72, 1, 1),), (40, 24, 1, 1), _Q, _K, _V, _Y, unit=True, epsilon=1e-12)
CASES = {"cross_covariance": (_CASE,)}


def candidates(p: AttentionProblem, device: Device) -> Candidates:
    """Yields (tactic or kernel, reason against it or None)."""
    if max(p.rows, p.columns) > MAX_DIM:
        yield "cross_covariance", unsupported(f"more than {MAX_DIM} rows or columns of scores")
        return
    if p.mask is not None or p.bias:
        yield "cross_covariance", unsupported("a mask or bias on the scores is not supported")
        return
    for tactic in operands.pairings(p, "cross_covariance"):
        yield tactic, unsupported(operands.reason(p, tactic, along=2) or no_room(_shared(_dim(p)), device))


def _dim(p: AttentionProblem) -> int:
    return -(-max(p.rows, p.columns) // 16) * 16


def _warps(dim: int) -> tuple[int, int]:
    """Returns (stripes of 16 rows, warps that share a stripe), as in cross_covariance.cu."""
    return dim // 16, max(1, 8 // (dim // 16))


def _stages(dim: int) -> tuple[int, int]:
    """Returns (elements of a row in a stage, stages)."""
    return 128 if dim <= 32 else 64, 3 if dim <= 64 else 2


def _shared(dim: int) -> int:
    (tokens, stages), (_, sharing), line = _stages(dim), _warps(dim), dim + 8
    ring, parts = stages * 2 * tokens * line * 2, sharing * dim * line * 4
    return max(ring, parts) + (dim + V_TOKENS) * line * 2 + (2 * sharing + 1) * dim * 4


def _chunk(p: AttentionProblem) -> int:
    """Returns the number of outputs of a row that a block writes."""
    return V_TOKENS * -(-p.width // (V_TOKENS * MOST_CHUNKS))


def _in_vectors(p: AttentionProblem, tactic: Tactic, strided: operands.At = None) -> bool:
    at, of = operands.known(p, tactic, strided), {"q": p.rows, "k": p.columns, "v": p.columns, "y": p.rows}
    return operands.aligned(tactic, strided) and all(operands.vectors(at[name], 2, size) for name, size in of.items())


def launches(p: AttentionProblem, tactic: Tactic, strided: operands.At = None) -> tuple[Launch, ...]:
    dim, chunk = _dim(p), _chunk(p)
    chunks, (stripes, sharing) = -(-p.width // chunk), _warps(dim)
    args = {"nonfinite": NONFINITE, "scale": ("weights", "scale"), "y": ("out", 0), "q": ("in", p.q.tensor)}
    args |= {"k": ("in", p.k.tensor), "v": ("in", p.v.tensor)} | operands.operand_args(operands.known(p, tactic, strided))
    args |= ints(heads=p.heads, rows=p.rows, columns=p.columns, inner=p.inner, width=p.width, chunk=chunk, chunks=chunks)
    args |= ints(padding=operands.padding(p, tactic)) | floats(epsilon=p.epsilon)
    values = {"DIM": dim, "NORM": int(p.unit), "VECTOR": int(_in_vectors(p, tactic, strided))}
    grid = (chunks * p.heads * p.batch, 1, 1)
    return (launch("cross_covariance", values, grid, 32 * stripes * sharing, _shared(dim), args),)


pack = operands.pack
section_bytes = operands.section_bytes


def counts(p: AttentionProblem, tactic: Tactic, device: Device) -> Counts:
    """Counts bytes and clocks: a block reads q and k of its head whole and its part of v, some stages at once, then computes
    its outputs; all blocks of a head compute the same scores.
    """
    (step,) = launches(p, tactic)
    dim, (blocks, _, _) = _dim(p), step.grid
    (tokens, stages), (stripes, sharing) = _stages(dim), _warps(dim)
    turns, chunk, smem = -(-p.inner // tokens), min(_chunk(p), p.width), max(step.smem, 1)
    resident = max(1, min(device.smem_per_sm // smem, device.max_threads_per_sm // step.block[0]))
    waves = math.ceil(blocks / (device.num_sms * resident))
    together = min(resident, math.ceil(blocks / device.num_sms))  # blocks of an SM at once
    read = 2 * (p.inner * (p.rows + p.columns) + chunk * p.columns)
    squares = (turns * tokens * stripes * stripes + chunk * stripes * stripes) // 16
    copied = 0 if _in_vectors(p, tactic) else ELEMENT_CLK * read // 2 / 32
    issue = (squares * STEP_CLK + copied + chunk * p.rows / 32 * 8 + dim * dim * sharing / 32 * 8) / 4
    mma = (turns * tokens * dim * dim + chunk * dim * dim) / tensor_rate(device, stripes * sharing * together)
    wait = LATENCY_CLK + (turns / max(1, stages - 1) + 4) * L2_LATENCY_CLK
    flow = read / sm_l2(device, min(blocks, device.num_sms * resident)) * together
    busy = max(together * max(issue, mma) + wait, flow + wait)
    return Counts(*traffic((*p.tensors, p.out), tactic), limits={"latency": waves * busy / device.clock_mhz})
