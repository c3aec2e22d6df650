"""Kernels for Hopper side by side: ptxas' numbers, and the main loops of the warps that multiply."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cycles import Code, from_l2
from benchmarks.sass.kernels import Assembled, Kernel
from benchmarks.simulator.sass import program
from benchmarks.simulator.warpgroups import Ring


def consumers(kernel: Kernel, code: Assembled, threads: int, smem: int) -> tuple[int, Ring | None]:
    """Returns (the number of warps that multiply at a time, the ring of stages that TMA fills or None)."""
    found = Code("", program(code.cubin), threads, code.regs, smem + code.static_smem)
    found = replace(
        found, multiplying=int(kernel.pingpong), drawn=from_l2(kernel.name, kernel.tile) if kernel.maker == "ours" else 0
    )
    return 4 * found.warpgroups, found.ring


def record(code: Assembled, ring: Ring | None) -> dict[str, Any]:
    """Returns numbers of a warp's iteration: its products, groups of products that go on at the shortest wait, TMA's copies."""
    found = program(code.cubin)
    once = found.iteration(found.main_loop)
    return {
        "serialized": code.serialized,
        "products": sum(i.mma for i in once),
        "in_flight": found.in_flight,
        "bulk_copies": found.bulk_copies,
        "ring": {"bytes": ring.held, "stages": ring.stages} if ring else None,
    }


SAYS = """
sm_90a (H100): KiB, blocks on an SM; of a stage: products of a warpgroup, groups in flight at the shortest wait, TMA's copies,
instructions for each product; predicted share of the dense peak, lowest, centre, highest
"""
COLUMNS = "regs spills C75xx  KiB blocks products wait TMA instr.   low centre  high  answer"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of the records that `--out` writes."""
    width = max(len(r["kernel"]) for r in records)
    return SAYS + "\n".join([f"{'kernel':<{width}} {COLUMNS}", *(line(r, width) for r in records)])


def line(r: Mapping[str, Any], width: int) -> str:
    at, over = r["share_of_peak"], 2 if "sparse" in r["kernel"] else 1
    shares = " ".join(f"{over * at[name]:>6.2f}" for name in ("low", "centre", "high")) if at else "does not fit an SM"
    return (
        f"{r['kernel']:<{width}} {r['registers']:>4} {r['spills']:>6} {r['serialized']:>5} {r['shared_memory'] / 1024:>4.0f} "
        f"{r['blocks_per_sm']:>6} {r['products']:>8} {r['in_flight']:>4} {r['bulk_copies']:>3} "
        f"{r['machine_instructions_per_product']:>6.1f}{shares}  {'equal' if r['answers_equal'] else 'WRONG'}"
    )
