"""The product of two computed tensors (matmul.cu; matmul_fp32.cu where one of the three is FP32).

All tensors are linear: their rows and columns are the last two axes.
"""

from math import prod

from cuda_kernels.device import Device
from tactics.format import Format, Strides, canonical, representative
from tactics.problems.problem import MatmulProblem
from tactics.problems.protocol import Shape4
from tactics.reason import Candidates
from tactics.roofline import Counts, streamed, traffic
from tactics.step import NONFINITE, Launch, grid, ints, launch
from tactics.tactic import Tactic, tactic_of

LINEAR = Format("fp16", "chw")
TILE = 64  # rows and columns of a block's output
LOADS_PER_STEP = 32  # load instructions of a warp per step of 16 along K
# For a product in matmul_fp32.cu: two loads, two addresses, the product, a share of the loop; products with loads in flight.
INSTRUCTIONS_FP32, AT_ONCE_FP32 = 6, 8
STEP_LATENCY_CLK = 60  # clocks until a step's loads arrive from L1, less those of other warps' steps meanwhile
CASES = {
    "matmul": (MatmulProblem((2, 3), (1, 3), 20, 66, 48),),
    "matmul_fp32": (MatmulProblem((1, 2), (2, 1), 9, 17, 40, True, True),),
}


def candidates(p: MatmulProblem, device: Device) -> Candidates:
    """Yields the one tactic, without a reason against it."""
    a, b, c = (_linear(shape) for shape in p.all_shapes)
    yield tactic_of("matmul", None, (a, b), c), None


def _linear(shape: Shape4) -> Format:
    """Returns the format that stands for linear memory among the representative formats of this shape."""
    return next(f for f in representative(shape) if canonical(f, shape) == canonical(LINEAR, shape))


def launches(p: MatmulProblem, tactic: Tactic, strided: tuple[Strides, ...] | None = None) -> tuple[Launch, ...]:
    outer, inner = p.batch
    a_rows, a_columns = (p.k, p.m) if p.trans_a else (p.m, p.k)
    b_rows, b_columns = (p.n, p.k) if p.trans_b else (p.k, p.n)
    a_outer, a_inner = _batch(p.a_batch, a_rows * a_columns)
    b_outer, b_inner = _batch(p.b_batch, b_rows * b_columns)
    (a_m, a_k), (b_k, b_n) = (1, a_columns) if p.trans_a else (a_columns, 1), (1, b_columns) if p.trans_b else (b_columns, 1)
    args = {"nonfinite": NONFINITE, "a": ("in", 0), "b": ("in", 1), "c": ("out", 0)}
    args |= ints(batch=outer * inner, inner=inner, m=p.m, n=p.n, k=p.k, c_batch=p.m * p.n, c_m=p.n)
    args |= ints(a_outer=a_outer, a_inner=a_inner, a_m=a_m, a_k=a_k, b_outer=b_outer, b_inner=b_inner, b_k=b_k, b_n=b_n)
    if tactic.kernel == "matmul_fp32":
        types = zip(("A_F32", "B_F32", "Y_F32"), (*tactic.ins, tactic.out), strict=True)
        values = {name: int(fmt.dtype == "fp32") for name, fmt in types}
        return (launch("matmul_fp32", values, grid(outer * inner * p.m * p.n), 256, 0, args),)
    blocks = -(-p.n // TILE) * -(-p.m // TILE) * outer * inner
    pairs = {"A_PAIRS": int(not p.trans_a and p.k % 2 == 0), "B_PAIRS": int(p.trans_b and p.k % 2 == 0)}
    return (launch("matmul", pairs, (blocks, 1, 1), 128, 0, args),)


def _batch(sizes: tuple[int, int], matrix: int) -> tuple[int, int]:
    """Returns the strides, in elements, of the two batch dimensions of matrices of `matrix` elements; 0 along a broadcast
    one."""
    return (sizes[1] * matrix if sizes[0] > 1 else 0), (matrix if sizes[1] > 1 else 0)


def counts(p: MatmulProblem, tactic: Tactic, device: Device) -> Counts:
    """Returns counts of the launch. Limits: loads of fragments from L1, one load instruction per clock and SM, and their
    latency; of matmul_fp32, instructions and waits for loads.
    """
    read, written = traffic(p.all_shapes, tactic)
    if tactic.kernel == "matmul_fp32":
        instructions = INSTRUCTIONS_FP32 * p.k * prod(p.out_shape)
        return streamed(device, launches(p, tactic), read, written, instructions, turns=-(-p.k // AT_ONCE_FP32))
    steps, clk_us = -(-p.k // 16), 1 / device.clock_mhz
    waves = -(-launches(p, tactic)[0].grid[0] // device.num_sms)
    limits = {"loads": waves * steps * 4 * LOADS_PER_STEP * clk_us, "latency": steps * STEP_LATENCY_CLK * clk_us}
    return Counts(read, written, limits=limits)
