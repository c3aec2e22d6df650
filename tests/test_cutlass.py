"""CUTLASS's examples, unmodified but for types and sizes, CUB's scan and a grid's barrier, run on the emulator."""

import json
import re

import pytest

from tactics.families.hopper.maps import convolution_map
from tactics.format import Format, strides
from tactics.problems.problem import ConvProblem
from tests.independent import packages
from tests.independent.cuda_programs import (
    ALL_AT_ONCE,
    CONV,
    CONV_BYTES,
    DEPTHWISE,
    EXAMPLES,
    GEMM_SM90,
    GROUPED,
    SMALL,
    SPARSE_SM90,
    ptx,
    run,
)

WHY = packages.missing(packages.CUTLASS, *packages.TOOLKIT)
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)
# 256 x 256 x 512 in m16n8k32, of bytes in m16n8k64; 198 pixels as 256, 136 channels as 256, 9 taps of 72 as 128, in m16n8k16,
# twice; 198 pixels, 144 channels, 9 taps of 80 bytes as 128 in m16n8k32, twice; two convolutions, alone, then in one launch;
# 64 x 8 x 16 or 64 x 8 x 32 of a wgmma as four products; whole clusters
RUNS = [
    ("sparse_gemm", (), 8192),
    ("sparse_gemm_bytes", (), 4096),
    ("sparse_gemm_unsigned", (), 4096),
    ("conv_fprop", CONV, 73728),
    ("conv_fprop_bytes", CONV_BYTES, 36864),
    ("conv_depthwise", DEPTHWISE, 0),
    ("two_convs", (), 336128),
    ("wgmma", (), 7760),
    ("bulk_copies", (), 0),
    ("bulk_stores", (), 0),
    ("conv_sm90", (), 27136),
    ("conv_sm90_2x1", (), 40448),
    ("conv_sm90_1x2", (), 53248),
    ("gemm_sm90_2x2", GEMM_SM90, 32768),
    ("sparse_gemm_sm90", SPARSE_SM90, 6144),
    ("sparse_gemm_sm90_1x2", SPARSE_SM90, 12288),
    ("sparse_gemm_small_tile", (), 8192),
    ("sparse_gemm_bytes_small_tile", (), 4096),
    ("conv_fprop", SMALL, 1024),
    ("conv_grouped", GROUPED, 4608),
]


@pytest.mark.full
@pytest.mark.parametrize("order", [(), ("--late", "--seed", "3")], ids=["eager", "late"])
@pytest.mark.parametrize("name, arguments, products", RUNS[:15], ids=lambda v: v if isinstance(v, str) else "")
def test_an_example_of_cutlass_is_right(name, arguments, products, order):
    """The sparse one packs and reorders its metadata with CUTLASS's own code: ours cannot have told it how."""
    out, code = run(name, arguments, *order)
    assert code == 0 and "Pass" in out and f"after {products} products" in out, out


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name, arguments, products", RUNS, ids=lambda v: v if isinstance(v, str) else "")
def test_examples_of_cutlass_are_right_in_any_order(name, arguments, products, seed):
    out, code = run(name, arguments, "--seed", str(seed), *["--late"] * (seed % 2))
    assert code == 0 and "Pass" in out and f"after {products} products" in out, out


@pytest.mark.full
@pytest.mark.parametrize(
    "name, problems, seed, mode",
    [
        ("conv_sm90", 300, 1, ()),
        ("conv_sm90", 300, 2, ("--late",)),
        ("conv_sm90", 300, 3, ("--seed", "5")),
        ("conv_sm90_1x2", 100, 4, ("--late",)),
        ("conv_sm90_2x1", 100, 5, ("--seed", "6")),
    ],
)
def test_a_convolution_for_hopper_is_right_for_any_problem(name, problems, seed, mode):
    """Tensor maps of pixels, by CUTLASS's own arithmetic of corners, coordinates and offsets."""
    out, code = run(name, (str(problems), str(seed)), *mode)
    assert code == 0 and f"Passed: {problems} of {problems}" in out, out


DRAWN = re.compile(
    r"n (\d+) c (\d+) k (\d+), (\d+)x(\d+) by (\d+)x(\d+), padding ([\d ]+), stride (\d+) (\d+), dilation (\d+) (\d+)"
)


@pytest.mark.full
def test_our_maps_are_cutlasss():
    """Of the same problems: corners, strides, swizzle and all else that its collective gives to cuTensorMapEncodeIm2col, but
    for the type, which is uint16 there."""
    out, code = run("conv_sm90", ("300", "11"))
    maps, problems = re.findall(r"^im2col (.*)$", out, re.M), DRAWN.findall(out)
    assert code == 0 and len(maps) == len(problems) == 300
    for (*sizes, padding, stride_h, stride_w, dilation_h, dilation_w), text in zip(problems, maps, strict=True):
        n, c, k, h, w, r, s = map(int, sizes)
        top, bottom, left, right = map(int, padding.split())
        window = (int(stride_h), int(stride_w)), (top, left, bottom, right), (int(dilation_h), int(dilation_w))
        p, theirs = ConvProblem(n, c, h, w, k, r, s, *window), json.loads(text)
        ours = convolution_map(p, strides(Format("fp16", "hwc8"), p.in_shapes[0]), theirs["channels"], theirs["pixels"])
        assert json.loads(json.dumps({name: getattr(ours, name) for name in theirs})) == theirs, p


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 30))
def test_a_convolution_for_hopper_is_right_for_thousands_of_problems(seed):
    name = ("conv_sm90", "conv_sm90_1x2", "conv_sm90_2x1")[seed // 2 % 3]
    out, code = run(name, ("100", str(seed)), "--seed", str(seed), *["--late"] * (seed % 2))
    assert code == 0 and "Passed: 100 of 100" in out, out


WRONG = {
    # sparse metadata: the selector; the halves of a word; rows' kept values
    "selector": ("sparse_gemm", r"(mma\.sp\S+ [^;]*), 0x0;", r"\1, 0x1;"),
    "b": ("sparse_gemm", r"(mma\.sp\S+ \{[^}]*\}, *\{[^}]*\}, *)\{(\S+), *(\S+), *(\S+), *(\S+)\}", r"\1{\2, \4, \3, \5}"),
    "a": ("sparse_gemm", r"(mma\.sp\S+ \{[^}]*\}, *)\{(\S+), *(\S+), *(\S+), *(\S+)\}", r"\1{\2, \4, \3, \5}"),
    "b of bytes": (
        "sparse_gemm_bytes",
        r"(mma\.sp\S+ \{[^}]*\}, *\{[^}]*\}, *)\{(\S+), *(\S+), *(\S+), *(\S+)\}",
        r"\1{\2, \4, \3, \5}",
    ),
    "a of bytes": ("sparse_gemm_bytes", r"(mma\.sp\S+ \{[^}]*\}, *)\{(\S+), *(\S+), *(\S+), *(\S+)\}", r"\1{\2, \4, \3, \5}"),
    "sign of b": ("sparse_gemm_unsigned", r"s32\.s8\.u8\.s32", "s32.s8.s8.s32"),
    "sign of a": ("sparse_gemm_bytes", r"s32\.s8\.s8\.s32", "s32.u8.s8.s32"),
    "zero fill": ("conv_fprop", r"(cp\.async\.\S+ \[[^]]*\], *\[[^]]*\], *16), *[^;]*;", r"\1;"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", WRONG)
def test_an_example_of_cutlass_notices(fault):
    name, old, new = WRONG[fault]
    out, code = run(name, CONV if name == "conv_fprop" else (), "--replace", json.dumps({old: new}))
    assert code != 0 and re.search("launch refused|Failed|Error", out) and "Traceback" not in out, out


# Example 47's blocks hand their sums on. One of its five schedules waits by an atomicCAS and a barrier and reads with no fence
# between, which hardware forgives and the memory model does not promise: it is refused as written, and right with .acquire.
STREAM_K = "--iterations=1 --m=256 --n=256 --k=512".split()
ACQUIRE = json.dumps({r"atom\.global\.cas": "atom.acquire.gpu.global.cas"})


@pytest.mark.full
@pytest.mark.parametrize("order", ["", "--seed 3 --resident 16 --late", "--seed 5 --resident 16"])
def test_stream_k_is_right_in_any_order(order):
    out, code = run("gemm_stream_k", STREAM_K, *order.split(), "--replace", ACQUIRE)
    assert code == 0 and out.count("Disposition: Passed") == 5 and "after 163840 products" in out, out
    out, code = run("gemm_stream_k", STREAM_K, *order.split())
    assert code != 0 and out.count("Disposition: Passed") == 4 and "launch refused: global order" in out, out


@pytest.mark.full
def test_stream_k_without_room_for_its_blocks_is_a_deadlock():
    out, code = run("gemm_stream_k", STREAM_K, "--seed", "3", "--resident", "2", "--replace", ACQUIRE)
    assert code != 0 and "launch refused: deadlock" in out, out


# CUB's scan is a witness of fences and their order: neither too strict, it runs, nor too kind, without its fences it does not.


@pytest.mark.full
@pytest.mark.parametrize("order", ["", "--late --seed 3", "--seed 5", "--seed 6"])
def test_cubs_scan_is_right(order):
    out, code = run("scan", (), *ALL_AT_ONCE, *order.split())
    assert code == 0 and "Passed" in out, out


@pytest.mark.full
@pytest.mark.parametrize("seed", ["0", "3"])
@pytest.mark.parametrize(
    "change, words",
    [
        ({r"st\.release\.gpu": "st.relaxed.gpu"}, "no chain of __threadfence"),
        ({r"membar\.gl;": ""}, "between the atomic"),  # though the load behind it is ld.cg
    ],
    ids=["release", "acquire"],
)
def test_cubs_scan_notices_a_missing_fence(change, words, seed):
    out, code = run("scan", (), *ALL_AT_ONCE, "--seed", seed, "--replace", json.dumps(change))
    assert code != 0 and "launch refused: global order" in out and words in out, out


@pytest.mark.full
def test_a_scan_whose_blocks_do_not_start_in_order_is_a_deadlock():
    """CUB counts on the order in which hardware starts blocks: with fewer places, in another order, it never ends."""
    out, code = run("scan", (), "--resident", "4", "--seed", "5")
    assert code != 0 and "launch refused: deadlock" in out, out


@pytest.mark.full
@pytest.mark.parametrize("seed", ["0", "3", "5"])
def test_the_barrier_of_a_grid_orders_what_all_have_stored(seed):
    """Cooperative groups': a barrier, one thread's atomic with .release, its loads with .acquire, a barrier."""
    out, code = run("grid_sync", (), "--resident", "8", "--seed", seed)
    assert code == 0 and "Passed" in out, out
    for old, new, words in [
        (r"atom\.add\.release", "atom.add.relaxed", "no chain of __threadfence"),
        (r"ld\.acquire", "ld.relaxed", "between the atomic"),
        (r"(setp\.ne\.s32[^;]*;\s*)barrier\.sync\s+0;", r"\1", "behind a barrier"),  # the one in front of the release
    ]:
        out, code = run("grid_sync", (), "--resident", "8", "--seed", seed, "--replace", json.dumps({old: new}))
        assert code != 0 and "launch refused: global order" in out and words in out, out


@pytest.mark.full
def test_copies_meet_a_new_barrier_behind_a_fence_alone():
    """libcu++'s ring: the lane that has initialised the barriers executes fence.proxy.async itself, before __syncthreads()."""
    out, code = run("bulk_copies", (), "--replace", json.dumps({r"fence\.proxy\.async\S*;": ""}))
    assert code != 0 and "launch refused: mbarrier: no fence.mbarrier_init or fence.proxy.async" in out, out


@pytest.mark.full
@pytest.mark.parametrize("seed", ["0", "3", "5"])
def test_a_cluster_shares_its_memory(seed):
    """By cooperative groups: generic addresses of other blocks, atomics there, barriers whose two halves stand apart."""
    out, code = run("cluster_groups", (), "--seed", seed)
    assert code == 0 and "Passed" in out, out
    for old, new, words in [
        (r"barrier\.cluster\.arrive;", "barrier.cluster.arrive.relaxed;", "race: "),
        (r"barrier\.cluster\.(arrive|wait);", "", "cluster: it uses the shared memory"),
        (r"barrier\.cluster\.wait;(?![\s\S]*barrier\.cluster\.wait;)", "", "cluster: (it uses .* has ended|the block ends)"),
    ]:
        out, code = run("cluster_groups", (), "--seed", seed, "--replace", json.dumps({old: new}))
        assert code != 0 and re.search(f"launch refused: {words}", out), out


# CUB's merge sort is a chain of launches that may begin early. As CUDA 13.0 ships it (CCCL 3.0) its merge kernel reads where a
# block begins before it waits for the launch that computes that: known by crashes on H100s (github.com/NVIDIA/cccl, issue 5297)
# and mended by waiting before (#5456). The emulator refuses it at that load; with the wait there it is right.
BEGINS = r"(ld\.global\.u32 \S+ \[%rd\d+\];\s*sub\.s32[^;]*;\s*ld\.global\.u32 \S+ \[%rd\d+\+4\];)"
MENDED = {BEGINS: r"griddepcontrol.wait; \1"}


@pytest.mark.full
@pytest.mark.parametrize("order", ["", "--seed 3", "--late --seed 5"])
def test_cubs_merge_sort_is_refused_where_it_crashed_on_hardware_and_right_where_it_was_mended(order):
    out, code = run("merge_sort", (), *order.split())
    assert code != 0 and "launch refused: dependent launch: global load" in out and "cudaMalloc of 36607" in out, out
    out, code = run("merge_sort", (), *order.split(), "--replace", json.dumps(MENDED))
    assert code == 0 and "Passed" in out, out


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["BlockSort", "Partition"])
def test_cubs_merge_sort_notices_a_dropped_wait(kernel):
    first_wait = rf"(?s)(\.entry \S*DeviceMergeSort{kernel}Kernel(?:(?!\.entry).)*?)griddepcontrol\.wait;"
    assert len(re.findall(first_wait, ptx("merge_sort"))) == 1
    out, code = run("merge_sort", (), "--replace", json.dumps({**MENDED, first_wait: r"\1"}))
    assert code != 0 and "launch refused: dependent launch" in out, out


@pytest.mark.full
@pytest.mark.parametrize("seed", ["0", "3", "7"])
def test_lanes_that_leave_a_loop_one_by_one_keep_their_flags(seed):
    out, code = run("divergence", (), "--seed", seed)
    assert code == 0 and "Passed" in out, out


def test_there_is_a_run_of_every_example():
    others = {"scan", "merge_sort", "divergence", "grid_sync", "gemm_stream_k", "cluster_groups"}
    assert others | {name for name, *_ in RUNS} == set(EXAMPLES)
