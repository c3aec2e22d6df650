"""Kernels for Hopper side by side: what ptxas makes of them, and the main loops of the warps that multiply."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cycles import Code
from benchmarks.sass.kernels import Assembled, Kernel
from benchmarks.simulator.sass import program
from benchmarks.simulator.warpgroups import Ring


def consumers(kernel: Kernel, code: Assembled, threads: int, smem: int) -> tuple[int, Ring | None]:
    """(warps that multiply at a time, what TMA brings them)."""
    found = Code("", program(code.cubin), threads, code.regs, smem + code.static_smem)
    found = replace(found, multiplying=1) if kernel.pingpong else found
    return 4 * found.warpgroups, found.ring


def record(code: Assembled, ring: Ring | None) -> dict[str, Any]:
    """Of an iteration of a warp: its products, groups of them that go on at the shortest wait, TMA's copies."""
    found = program(code.cubin)
    once = found.iteration(found.main_loop)
    return {
        "serialized": code.serialized,
        "products": sum(i.mma for i in once),
        "in_flight": found.in_flight,
        "bulk_copies": found.bulk_copies,
        "ring": {"bytes": ring.held, "stages": ring.stages} if ring else None,
    }


HEADER = """
sm_90a (H100): KiB, blocks on an SM; of a stage: products of a warpgroup, groups in flight at the shortest wait, TMA's copies,
instructions for each product; predicted share of the dense peak, lowest, centre, highest
kernel                                        regs spills C75xx  KiB blocks products wait TMA instr.   low centre  high  answer
""".rstrip()


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Of the records that `--out` writes."""
    return "\n".join([HEADER, *map(line, records)])


def line(r: Mapping[str, Any]) -> str:
    at, over = r["share_of_peak"], 2 if "sparse" in r["kernel"] else 1
    shares = " ".join(f"{over * at[name]:>6.2f}" for name in ("low", "centre", "high")) if at else "does not fit an SM"
    return (
        f"{r['kernel']:<45} {r['registers']:>4} {r['spills']:>6} {r['serialized']:>5} {r['shared_memory'] / 1024:>4.0f} "
        f"{r['blocks_per_sm']:>6} {r['products']:>8} {r['in_flight']:>4} {r['bulk_copies']:>3} "
        f"{r['machine_instructions_per_product']:>6.1f}{shares}  {'equal' if r['answers_equal'] else 'WRONG'}"
    )
