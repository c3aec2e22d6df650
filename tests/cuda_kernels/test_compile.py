"""Every kernel variant compiles for every architecture without spills, and its machine code holds the MMAs its tile needs."""

import itertools
import json
from dataclasses import replace

import pytest

from cuda_kernels import compile as compiling
from cuda_kernels.compile import CompileError, compile_kernel, cubin_path, virtual
from cuda_kernels.device import ARCHITECTURES, NAMED
from cuda_kernels.named_devices import SMEM_PER_BLOCK
from tactics.families.conv_gemm import conv_smem, tile_reason
from tactics.format import Format
from tactics.launches import launches
from tactics.problems.pointwise_ops import Activation
from tactics.step import epilogue_instructions
from tactics.tactic import Tactic
from tactics.tiles import DENSE_TILES, SPARSE_TILES, early_residual, out_of_registers
from tests import compiled as recorded
from tests import other_nvrtc
from tests.compiled import RECORD, compiler, fits, measured, record, takes
from tests.conftest import ROOT
from tests.problems import conv_case

TILES = [("conv_dense", t) for t in DENSE_TILES] + [("conv_sparse24", t) for t in SPARSE_TILES]
HWC8 = Format("fp16", "hwc8")
PAIRS = list(itertools.product(("hwc8", "chw"), repeat=2))
# fmt: off
OTHERS = [
    *(("pointwise", {"VEC": v, "OPS": ops, "OPERANDS": operands, "SOURCES": sources, "ROWS": rows})
      for v in (1, 8) for rows in (0, 1) for ops, operands, sources in ((3020, 12, 133), (2846454230222320, 65432, 123411))),
    *(("move", {"KIND": k, "IN_VEC": i, "OUT_VEC": o, "IN_LINEAR": 1 - i, "OUT_LINEAR": 1 - o, "IN_TYPE": t, "OUT_F32": f,
                "ITEMS": n})
      for t, f, kinds in ((0, 0, range(8)), (1, 0, (0, 7)), (2, 0, (7,)), (0, 1, (0, 7)), (1, 1, (0, 7)))
      for k in kinds for i in (0, 1) for o in (0, 1) for n in {1, 1 + i} if not (i and k in (3, 5, 6))),
    *((k, {"VEC": v, "AVG": a}) for k in ("pool", "pool_global") for v in (1, 8) for a in (0, 1)),
    *(("reduce", {"KIND": k, "VEC": v, "MIX": m, "C_FAST": c})
      for k in (1, 9, 10, 11, 13) for m in (0, 1) for v, c in ((1, 0), (8, 1))),
    *(("gather", {"IN_VEC": i, "OUT_VEC": o, "BY_CHANNEL": n})
      for i, o, n in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 1))),
    *(("matmul", {"A_PAIRS": a, "B_PAIRS": b}) for a in (0, 1) for b in (0, 1)),
    *(("resize", {"VEC": v}) for v in (1, 8)),
    # Both sides FP32: the variants of these kernels for values that FP16 cannot hold.
    *(("pointwise", {"VEC": 1, "OPS": 2846454230222320, "OPERANDS": 65432, "SOURCES": s, "ROWS": r, "Y_F32": 1})
      for s, r in ((563411, 1), (563455, 0))),
    *((k, values | {"X_F32": 1, "Y_F32": 1}) for k, values in (
        ("pool", {"VEC": 1, "AVG": 0}), ("pool", {"VEC": 1, "AVG": 1}), ("resize", {"VEC": 1}),
        ("reduce", {"KIND": 11, "VEC": 1, "MIX": 1, "C_FAST": 0}), ("reduce", {"KIND": 13, "VEC": 1, "MIX": 0, "C_FAST": 0}),
        ("gather", {"IN_VEC": 0, "OUT_VEC": 0, "BY_CHANNEL": 0}))),
    ("matmul_fp32", {"A_F32": 1, "B_F32": 1, "Y_F32": 1}),
]
# fmt: on


def conv_problem(residual, act):
    """A problem in which nothing can be left out."""
    return conv_case(2, 24, 9, 9, 40, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=residual, act=Activation(act), sparse24=True)


def conv_launch(kernel, tile, x, y, residual, act, out="fp16"):
    problem = conv_problem(residual, act)
    formats = (Format("fp16", x), Format("fp16", y))
    tactic = Tactic(kernel, tile, (formats[0], formats[1]) if residual else formats[:1], Format(out, y))
    return tactic, launches(problem, tactic)[0]


def variant(kernel, tile, x, y, residual, act, sm, out="fp16"):
    """(tactic, its compile-time values), or None where the tile cannot run on that architecture."""
    tactic, launch = conv_launch(kernel, tile, x, y, residual, act, out)
    limit = SMEM_PER_BLOCK[int(sm[3:].rstrip("a"))]
    if reason := tile_reason(tactic, replace(NAMED["h200"], sm=sm, smem_per_block=limit)):
        assert "shared memory" in reason if conv_smem(tactic) > limit else "linear input" in reason
        return None
    return tactic, launch.values


def hold(kernel, tile, x, y, sm, out="fp16"):
    """With most live registers, residual and per-channel slope: what the variant takes, where the tile can run."""
    found = variant(kernel, tile, x, y, True, "prelu", sm, out)
    if found is None:
        return None
    taken = takes(kernel, found[1], sm)
    assert taken.regs * tile.threads <= 65536
    return found[0], taken


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kernel,tile", TILES, ids=lambda v: str(v))
def test_conv_tiles_compile_without_spills(kernel, tile, pair, sm):
    """The main loop is that of the input's side: as many MMAs as the tile has, dense or sparse and never both; twice as many
    where a residual is copied during the last turn, which stands behind the loop."""
    found = hold(kernel, tile, *pair, sm)
    if found is None:
        return
    tactic, taken = found
    per_warp = (tile.m // tile.warps_m // 16) * (tile.n // tile.warps_n // 8) * (1 + early_residual(tactic))
    if tactic.sparse:
        assert (taken.mma_sp, taken.mma) == (per_warp * tile.k // 32, 0), "a sparse tactic that runs dense"
    else:
        assert (taken.mma, taken.mma_sp) == (per_warp * tile.k // 16, 0)
    if pair[0] == pair[1]:
        assert taken.copies and taken.matrices


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("way", [{"split": 2}, {"stream": 100}], ids=str)
@pytest.mark.parametrize("y", ["hwc8", "chw"])
@pytest.mark.parametrize("kernel,tile", TILES, ids=lambda v: str(v))
def test_shared_tiles_compile_without_spills(kernel, tile, y, way, sm):
    if not ("stream" in way and out_of_registers(Tactic(kernel, tile, (HWC8,), Format("fp16", y)))):
        hold(kernel, replace(tile, **way), "hwc8", y, sm)


@pytest.mark.long
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kernel,tile", TILES, ids=lambda v: str(v))
def test_other_epilogues_compile_without_spills(kernel, tile, pair, sm):
    """Their main loops are those of the variants above, whose machine code is looked at."""
    for residual, act in ((False, "none"), (False, "silu"), (True, "relu")):
        found = variant(kernel, tile, *pair, residual, act, sm)
        if found is not None:
            fits(compile_kernel(kernel, dict(found[1]), sm))


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("kernel,tile", TILES, ids=lambda v: str(v))
def test_fp32_outputs_compile_without_spills(kernel, tile, split, sm):
    hold(kernel, replace(tile, split=split), "hwc8", "chw", sm, "fp32")


@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel,values", OTHERS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())))
def test_other_kernels_compile_without_spills(kernel, values, sm):
    takes(kernel, values, sm)


@pytest.mark.parametrize("sm", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("act", ["gelu", "hard_swish"])
def test_an_activation_takes_the_instructions_that_its_price_counts(act, sm):
    """Of an output, beyond a ReLU's, in all of the machine code: its main loop is the same."""
    tile = DENSE_TILES[0]
    found = {
        a: measured(compile_kernel("conv_dense", dict(variant("conv_dense", tile, "hwc8", "hwc8", False, a, sm)[1]), sm))
        for a in ("relu", act)
    }
    assert found[act].mma == found["relu"].mma
    more = (found[act].instructions - found["relu"].instructions) / (tile.m * tile.n / tile.threads)
    assert more == pytest.approx(epilogue_instructions(conv_problem(False, act)), abs=1.2)


# ---- the record


def test_the_record_is_of_this_compiler_and_these_sources():
    if compiler() not in record():
        pytest.skip(f"{RECORD.name} knows nothing of NVRTC {compiler()}: `make compiled` adds it")
    table = record()[compiler()]
    stale = [kernel for kernel in table if table[kernel]["source"] != compiling.source_hash(kernel)]
    assert not stale, f"{', '.join(stale)}: changed since {RECORD.name} was written: run `make compiled`"
    tiles = {"conv_dense": len(DENSE_TILES), "conv_sparse24": len(SPARSE_TILES)}
    assert all(len(table[kernel]["variants"]) >= 4 * number for kernel, number in tiles.items())


@pytest.fixture
def one_row(monkeypatch, tmp_path):
    """A record of one variant as it is, which a test may write otherwise; `row`: its fields."""
    monkeypatch.setattr(recorded, "RECORD", tmp_path / "compiled.json")
    monkeypatch.setattr(recorded, "record", lambda base="": {"": table, "older": older, "without": {}}[base])
    monkeypatch.delenv(recorded.RECOMPILE, raising=False)
    monkeypatch.delenv(recorded.WRITE, raising=False)
    row = list(recorded.measured(compile_kernel("flush_l2", {}, "sm_80")).row)
    entry = {"source": compiling.source_hash("flush_l2"), "variants": {"": {"sm_80": row}}}
    table = {compiler(): {"flush_l2": entry}}
    older = {compiler(): {"flush_l2": entry | {"variants": {}}}}  # a base commit that did not have this variant yet
    return entry, row


def test_a_row_is_believed_while_its_sources_are_the_recorded_ones(one_row, monkeypatch):
    monkeypatch.setattr(recorded, "compile_kernel", lambda *a: pytest.fail("compiled"))
    assert takes("flush_l2", {}, "sm_80") == recorded.Taken(*one_row[1])


@pytest.mark.parametrize("wish", ["all", "seed:older"])
def test_a_row_that_is_not_so_is_noticed_where_it_is_compiled_again(one_row, monkeypatch, wish):
    monkeypatch.setenv(recorded.RECOMPILE, wish)
    monkeypatch.setattr(recorded, "CHANGED", 1)
    assert takes("flush_l2", {}, "sm_80").regs == one_row[1][0]
    one_row[1][0] += 1
    with pytest.raises(AssertionError, match="run `make compiled`"):
        takes("flush_l2", {}, "sm_80")


def test_a_base_without_a_record_asks_for_nothing(one_row, monkeypatch):
    monkeypatch.setenv(recorded.RECOMPILE, "seed:without")
    monkeypatch.setattr(recorded, "DRAWN", 1 << 40)
    monkeypatch.setattr(recorded, "compile_kernel", lambda *a: pytest.fail("compiled"))
    takes("flush_l2", {}, "sm_80")


def test_other_sources_are_compiled_and_unknown_variants_asked_for(one_row, monkeypatch):
    one_row[0]["source"], one_row[1][0] = "another", 99
    assert takes("flush_l2", {}, "sm_80").regs != 99
    with pytest.raises(AssertionError, match="is not in compiled.json: run `make compiled`"):
        takes("flush_l2", {}, "sm_86")


def test_rows_are_drawn_by_the_seed_changed_ones_more_often(monkeypatch, one_row):
    def drawn(known):
        return [i for i in range(4000) if recorded._again("k", f"A={i}", "sm_80", known)]

    monkeypatch.setenv(recorded.RECOMPILE, "c0ffee:older")
    found, taken = drawn(None), recorded.Taken(*one_row[1])
    assert 150 < len(found) < 250 and 900 < len(drawn(taken)) < 1100 and set(found) <= set(drawn(taken))
    monkeypatch.setenv(recorded.RECOMPILE, "decaf:older")
    assert drawn(None) != found


PRODUCTS = r"""
extern "C" __global__ void __launch_bounds__(128) products(float* out, unsigned long long a, unsigned long long b, int n) {
  float d[4] = {};
  for (int i = 0; i < n; ++i) {
    asm volatile("wgmma.fence.sync.aligned;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\n"
                 "wgmma.commit_group.sync.aligned;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a + i), "l"(b));
    if (TOUCHED) d[0] += 1;
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"PENDING": 1, "TOUCHED": 0}, "not in compiled.json"),
        ({"PENDING": 0, "TOUCHED": 0}, "a main loop waits for all its products"),
        ({"PENDING": 1, "TOUCHED": 1}, "ptxas serialises asynchronous products"),
    ],
)
def test_asynchronous_products_that_are_waited_for_are_noticed(values, says, one_row, tmp_path):
    """The wait for all behind a loop is none within it; sums that change in flight make ptxas wait."""
    source = tmp_path / "products.cu"
    source.write_text(PRODUCTS)
    with pytest.raises(AssertionError, match=says):
        takes(str(source), values, "sm_90a")
    found = recorded.measured(compile_kernel(str(source), values, "sm_90a"))
    assert found.mma and found.bulk == 0 and found.row[-2] == found.in_flight == values["PENDING"] * (not values["TOUCHED"])
    assert (found.serialized > 0) == bool(values["TOUCHED"])


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
        return [path.name for path in compiling.sources(compiling.source_path(kernel))]

    assert names("conv_dense")[0] == "conv_dense.cu" and {"conv.cuh", "ptx.cuh"} <= set(names("conv_dense"))
    assert "conv.cuh" not in names("reduce")
    assert compiling.source_hash("reduce") != compiling.source_hash("pool") != compiling.source_hash()


# ---- which NVRTC


def test_an_architecture_that_nvrtc_does_not_know_is_told_with_those_that_it_does():
    with pytest.raises(CompileError, match=r"^NVRTC [\d.]+ does not compile for sm_30: it knows .*80, .*90"):
        compiling.compile_anew("flush_l2", {}, "sm_30")


def test_an_nvrtc_that_is_not_found_is_told_with_the_extras_that_bring_it(monkeypatch):
    class Bindings:
        @staticmethod
        def nvrtcVersion():
            raise RuntimeError('Failure finding "libnvrtc.so"')

    monkeypatch.setattr(compiling, "_bindings", Bindings)
    compiling.nvrtc_version.cache_clear()
    with pytest.raises(CompileError, match=r"NVRTC's library is not found.*pip install '\.\[cuda13\]' in a clone.*cuda12"):
        compiling.nvrtc_version()
    assert compiling.installed_nvrtc() == "none"


def test_the_record_of_cuda_12s_nvrtc_has_the_variants_without_spills():
    """Of sources that both records know; what it lacks, `make test-wheel` compiles. docs/install.md says how many rows."""
    first, other = (next(iter(json.loads(path.read_text()).values())) for path in (other_nvrtc.FIRST, other_nvrtc.OTHER))
    same = [kernel for kernel in first if kernel in other and other[kernel]["source"] == first[kernel]["source"]]
    wanted = {(kernel, key) for kernel in same for key in first[kernel]["variants"]}
    there = {(kernel, key) for kernel in same for key in other[kernel]["variants"]}
    assert len(wanted & there) >= 0.9 * len(wanted)
    rows = [row for table in other.values() for found in table["variants"].values() for row in found.values()]
    assert not any(spills for _, _, spills in rows)
    assert f"has {len(rows)} rows" in (ROOT / "docs" / "install.md").read_text()
