"""What stands in the main loop's machine code: that tensor cores need not wait for addresses, branches or fragments."""

import json

import pytest

from benchmarks.bench_sass import FOUND
from benchmarks.cycles import ours
from benchmarks.sass.kernels import SPARSE
from benchmarks.sass.required import SPARSE_WORST
from benchmarks.simulator.machine import CENTRE, LOADED_SWEEP, OLDEST, SWEEP, machine, residency
from benchmarks.simulator.sass import Instruction, program
from benchmarks.simulator.simulate import steady
from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named

# Of a convolution's large tiles: BM, BN, BK, WARPS_M, WARPS_N, STAGES; the most instructions per product.
LOOPS = [("conv_dense", (128, 256, 32, 2, 4, 3), 2.6), ("conv_sparse24", (256, 128, 64, 4, 2, 3), 3.1)]


def main_loop(kernel: str, tile: tuple[int, ...]) -> tuple[Instruction, ...]:
    """The main loop's instructions, with vectors in and out."""
    values = dict(zip(("BM", "BN", "BK", "WARPS_M", "WARPS_N", "STAGES"), tile, strict=True))
    values |= {"IN_LINEAR": 0, "OUT_LINEAR": 0, "ACT": 1, "RES": 0, "SPLIT": 0}
    code = program(compile_kernel(kernel, values, "sm_80").cubin)
    return code.instructions[code.main_loop.first : code.main_loop.last + 1]


@pytest.mark.parametrize("kernel, tile, most", LOOPS, ids=lambda v: str(v))
def test_main_loops_multiply_beside_their_loads(kernel, tile, most):
    """64 products of a warp per stage, one branch, one barrier; behind the barrier fragments of the next stage are loaded while
    there are products left, and none of these reads them."""
    loop = main_loop(kernel, tile)
    assert sum(i.mma for i in loop) == 64 and len(loop) <= most * 64
    assert [i.opcode for i in loop if i.target is not None] == ["BRA"] and loop[-1].opcode == "BRA"
    (barrier,) = [n for n, i in enumerate(loop) if i.opcode.startswith("BAR")]
    behind = loop[barrier + 1 :]
    loads = [n for n, i in enumerate(behind) if i.opcode.startswith(("LDSM", "LDS.128"))]
    assert loads and sum(i.mma for i in behind[loads[0] :]) >= 16
    for n in loads:
        assert not any(set(behind[n].writes) & set(i.reads) for i in behind[n + 1 :] if i.mma)


@pytest.mark.full
@pytest.mark.parametrize("tile", SPARSE, ids=str)
def test_split_sums_leave_a_sparse_loop_beside_cutlass(tile):
    """At every point of the sweep; of two warps on a sub-core the oldest is simulated as the youngest but one."""
    rows = {(row["kernel"], row["sm"]): row for row in json.loads(FOUND.read_text())["rows"]}
    theirs = rows[f"CUTLASS sparse_gemm {tile}", "sm_80"]["share_of_peak"]["points"]
    at, code = named("a100"), ours("conv_sparse24", tile, "sm_80", {"SPLIT": 1})
    fit = residency(at, code.threads, code.registers, code.smem)
    points = zip((CENTRE, *SWEEP, *LOADED_SWEEP), theirs, strict=True)
    shares = {p: (steady(code.program, fit, machine(at), p).mma_share, share) for p, share in points if p.arbitration != OLDEST}
    assert min(mine / share for mine, share in shares.values()) >= SPARSE_WORST


def test_an_epilogue_waits_once_for_what_it_loads():
    """Residuals are copied, and biases all loaded, before the first result is made: 8 rows of a warp's 64 have one each."""
    values = dict(zip(("BM", "BN", "BK", "WARPS_M", "WARPS_N", "STAGES"), (128, 128, 32, 2, 4, 4), strict=True))
    values |= {"IN_LINEAR": 0, "OUT_LINEAR": 0, "ACT": 1, "RES": 1, "SPLIT": 0}
    code = program(compile_kernel("conv_dense", values, "sm_80").cubin)
    behind = [i.opcode for i in code.instructions[code.main_loop.last + 1 :]]
    results = next(n for n, opcode in enumerate(behind) if opcode.startswith("MOVM"))
    loads = [n for n, opcode in enumerate(behind) if opcode.split(".")[0] == "LDG"]
    assert any(opcode.startswith("LDGSTS") for opcode in behind[:results])
    assert len(loads) == 8 and max(loads) < results, "loads among the results, each of which waits for its own"
