"""Every kernel variant compiles for every architecture without spills, and its machine code holds the MMAs its tile needs."""

import collections
import importlib.util
import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_kernels import compile as compiling
from cuda_kernels.compile import CompileError, compile_kernel, cubin_path, virtual
from cuda_kernels.device import ARCHITECTURES, NAMED, SMEM_PER_BLOCK
from tactics.conv_gemm import DENSE_TILES, SPARSE_TILES, conv_smem, out_of_registers, tile_reason
from tactics.format import Format
from tactics.launches import launches
from tactics.pointwise_ops import Activation
from tactics.problem import ConvProblem
from tactics.tactic import Tactic
from tests.registers import BASELINE, baseline, compiler, fits, hold

TILES = [("conv_dense", t) for t in DENSE_TILES] + [("conv_sparse24", t) for t in SPARSE_TILES]
HWC8 = Format("fp16", "hwc8")
PAIRS = list(itertools.product(("hwc8", "chw"), repeat=2))
OTHERS = [
    *(("pointwise", {"VEC": v, "OPS": ops, "OPERANDS": operands, "SOURCES": sources, "ROWS": rows})
      for v in (1, 8) for rows in (0, 1) for ops, operands, sources in ((3020, 12, 133), (2846454230222320, 65432, 123411))),
    *(("move", {"KIND": k, "IN_VEC": i, "OUT_VEC": o, "IN_TYPE": 0, "OUT_F32": 0})
      for k in range(7) for i in (0, 1) for o in (0, 1) if not (i and k > 1)),
    *(("move", {"KIND": 0, "IN_VEC": 0, "OUT_VEC": 1, "IN_TYPE": t, "OUT_F32": 0}) for t in (1, 2)),
    ("move", {"KIND": 0, "IN_VEC": 1, "OUT_VEC": 0, "IN_TYPE": 0, "OUT_F32": 1}),
    *((k, {"VEC": v, "AVG": a}) for k in ("pool", "pool_global") for v in (1, 8) for a in (0, 1)),
    *(("rows", {"KIND": k, "VEC": v, "MIX": m, "C_FAST": c})
      for k in (1, 9, 10, 11, 13) for m in (0, 1) for v, c in ((1, 0), (8, 1))),
    *(("gather", {"IN_VEC": i, "OUT_VEC": o}) for i in (0, 1) for o in (0, 1)),
    *(("matmul", {"A_PAIRS": a, "B_PAIRS": b}) for a in (0, 1) for b in (0, 1)),
    *(("resize", {"VEC": v}) for v in (1, 8)),
    # Both sides FP32: what these kernels are where FP16 cannot hold the values.
    *(("pointwise", {"VEC": 1, "OPS": 2846454230222320, "OPERANDS": 65432, "SOURCES": s, "ROWS": r, "Y_F32": 1})
      for s, r in ((563411, 1), (563455, 0))),
    *((k, values | {"X_F32": 1, "Y_F32": 1}) for k, values in (
        ("pool", {"VEC": 1, "AVG": 0}), ("pool", {"VEC": 1, "AVG": 1}), ("resize", {"VEC": 1}),
        ("rows", {"KIND": 11, "VEC": 1, "MIX": 1, "C_FAST": 0}), ("rows", {"KIND": 13, "VEC": 1, "MIX": 0, "C_FAST": 0}),
        ("gather", {"IN_VEC": 0, "OUT_VEC": 0}))),
    ("matmul_fp32", {"A_F32": 1, "B_F32": 1, "Y_F32": 1}),
    ("move", {"KIND": 0, "IN_VEC": 0, "OUT_VEC": 0, "IN_TYPE": 1, "OUT_F32": 1}),
]  # fmt: skip


def disassemble(cubin: bytes, folder: Path) -> collections.Counter:
    """Mnemonic -> how often it stands in the machine code."""
    tool = Path(importlib.util.find_spec("nvidia.cu13").submodule_search_locations[0]) / "bin" / "nvdisasm"
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    return collections.Counter(re.findall(r"\b([A-Z][A-Z0-9]+(?:\.[A-Z0-9_]+)*)\b", text))


def conv_launch(kernel, tile, x, y, residual, act, out="fp16"):
    """The launch of a problem in which nothing can be left out."""
    problem = ConvProblem(2, 24, 9, 9, 40, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=residual, act=Activation(act),
                          sparse24=True)  # fmt: skip
    formats = (Format("fp16", x), Format("fp16", y))
    tactic = Tactic(kernel, tile, (formats[0], formats[1]) if residual else formats[:1], Format(out, y))
    return tactic, launches(problem, tactic)[0]


def compiled(kernel, tile, x, y, residual, act, sm, judge, out="fp16"):
    """(tactic, its kernel, after `judge` has seen what it takes), or None where the tile cannot run."""
    tactic, launch = conv_launch(kernel, tile, x, y, residual, act, out)
    limit = SMEM_PER_BLOCK[int(sm[3:].rstrip("a"))]
    if reason := tile_reason(tactic, replace(NAMED["h200"], sm=sm, smem_per_block=limit)):
        assert "shared memory" in reason if conv_smem(tactic) > limit else "linear input" in reason
        return None
    c = compile_kernel(kernel, dict(launch.values), sm)
    judge(c)
    assert c.regs * tile.threads <= 65536
    return tactic, c


def look_at(tactic, c, tmp_path):
    """The main loop's machine code."""
    tile = tactic.tile
    ops = disassemble(c.cubin, tmp_path)
    per_warp = (tile.m // tile.warps_m // 16) * (tile.n // tile.warps_n // 8)
    if tactic.sparse:
        assert ops["HMMA.SP.16832.F32"] == per_warp * tile.k // 32
        assert not any(op.startswith("HMMA.16816") for op in ops), "a sparse tactic that runs dense"
    else:
        assert ops["HMMA.16816.F32"] == per_warp * tile.k // 16
        assert not any(op.startswith("HMMA.SP") for op in ops)
    assert any(op.startswith("LDGSTS") and op.endswith("128") for op in ops)
    assert any(op.startswith("LDSM") and op.endswith(".4") for op in ops)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kernel,tile", TILES, ids=lambda v: str(v))
def test_conv_tiles_compile_without_spills(kernel, tile, pair, sm, tmp_path):
    """The variant with most live registers: residual and per-channel slope. The main loop is that of the input's side."""
    found = compiled(kernel, tile, *pair, True, "prelu", sm, hold)
    if found and pair[0] == pair[1]:
        look_at(*found, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("way", [{"split": 2}, {"stream": 100}], ids=str)
@pytest.mark.parametrize("kernel,tile", TILES, ids=lambda v: str(v))
def test_shared_tiles_compile_without_spills(kernel, tile, way, sm):
    if not ("stream" in way and out_of_registers(Tactic(kernel, tile, (HWC8,), HWC8))):
        compiled(kernel, replace(tile, **way), "hwc8", "hwc8", True, "prelu", sm, hold)


@pytest.mark.long
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kernel,tile", TILES, ids=lambda v: str(v))
def test_other_epilogues_compile_without_spills(kernel, tile, pair, sm):
    """Their main loops are those of the variants above, whose machine code is looked at."""
    for residual, act in ((False, "none"), (False, "silu"), (True, "relu")):
        compiled(kernel, tile, *pair, residual, act, sm, fits)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel,tile", TILES, ids=lambda v: str(v))
def test_fp32_outputs_compile_without_spills(kernel, tile, sm):
    compiled(kernel, tile, "hwc8", "chw", True, "prelu", sm, hold, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel,values", OTHERS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())))
def test_other_kernels_compile_without_spills(kernel, values, sm):
    hold(compile_kernel(kernel, values, sm))


def test_the_baseline_knows_this_compiler():
    if compiler() not in baseline():
        pytest.skip(f"{BASELINE.name} has no registers for NVRTC {compiler()}: `make registers` adds them")
    tiles = {"conv_dense": len(DENSE_TILES), "conv_sparse24": len(SPARSE_TILES)}
    for kernel, number in tiles.items():
        assert len(baseline()[compiler()][kernel]) >= 4 * number


def test_error_shows_log_and_numbered_source(tmp_path):
    bad = tmp_path / "bad.cu"
    bad.write_text('extern "C" __global__ void bad() {\n  int x = nonsense;\n}\n')
    with pytest.raises(CompileError) as e:
        compile_kernel(str(bad), {"A": 1}, "sm_80")
    assert "bad.cu(2)" in str(e.value) and "   2   int x = nonsense;" in str(e.value) and "-DA=1" in str(e.value)
    with pytest.raises(CompileError, match="no source absent.cu"):
        compile_kernel(str(tmp_path / "absent.cu"), {}, "sm_80")


@pytest.mark.parametrize("kernel,values", [("pool", {"VEC": 8, "AVG": 1}), ("flush_l2", {})])
def test_a_virtual_architecture_gives_the_same_ptx_and_no_machine_code(kernel, values):
    real, light = (compile_kernel(kernel, values, sm) for sm in ("sm_90a", virtual("sm_90a")))
    code, same = ([line for line in c.ptx.splitlines() if not line.startswith("\t.file")] for c in (real, light))
    assert code == same and ".target sm_90a" in code
    assert real.regs > light.regs == 0 and not light.cubin
    with pytest.raises(ValueError, match=f"kernel {kernel} for compute_90a: no machine code"):
        cubin_path(light)


def test_hash_covers_the_headers_a_kernel_includes_and_no_others():
    def names(kernel):
        return [path.name for path in compiling._with_headers(compiling.source_path(kernel))]

    assert names("conv_dense")[0] == "conv_dense.cu" and {"conv.cuh", "ptx.cuh"} <= set(names("conv_dense"))
    assert "conv.cuh" not in names("rows")
    assert compiling.source_hash("rows") != compiling.source_hash("pool") != compiling.source_hash()
