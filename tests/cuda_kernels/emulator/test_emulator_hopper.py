"""Hopper's asynchronous instructions: results beside NumPy's, and each check proven by a kernel with exactly that fault."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.emulator import EmulatorError, Memory, Options, launch, load
from tests.independent import micro
from tests.independent.layouts import table

HERE = Path(__file__).parents[2] / "faulty"
ORDERS = [
    Options(),
    Options(async_mode="late"),
    *(Options(seed=seed, async_mode=("eager", "late")[seed % 2]) for seed in (1, 2, 3)),
]
PLAIN, LATE = ORDERS[:2]


def compiled(name: str, fault: int, **values: int):
    return load(compile_kernel(str(HERE / f"{name}.cu"), {"FAULT": fault, **values}, "sm_90a").ptx)


def wgmma(fault: int, options: Options = PLAIN) -> bool:
    """Whether y = x w^T comes out."""
    rng, memory = np.random.default_rng(0), Memory()
    x, w = (rng.integers(-4, 5, (rows, 32)).astype(np.float16) for rows in (64, 16))
    y = memory.alloc(64 * 16 * 4, name="y")
    arguments = struct.pack("<QQQ", memory.upload(x, "x"), memory.upload(w, "w"), y)
    launch(compiled("wgmma", fault), (1, 1, 1), (128, 1, 1), 0, arguments, memory, options=options)
    return np.array_equal(memory.view(y).view(np.float32).reshape(64, 16), x.astype(np.float64) @ w.T.astype(np.float64))


def mbarrier(fault: int, options: Options = PLAIN) -> bool:
    memory, x = Memory(), np.arange(32, dtype=np.float32)
    y = memory.alloc(256, name="y")
    program = compiled("mbarrier", fault)
    launch(program, (1, 1, 1), (64, 1, 1), 0, struct.pack("<QQ", memory.upload(x, "x"), y), memory, options=options)
    return np.array_equal(memory.view(y).view(np.float32), np.concatenate([x[np.arange(32) ^ 5] + i for i in (0, 1)]))


def setmaxnreg(fault: int, options: Options = PLAIN) -> bool:
    memory = Memory()
    y = memory.alloc(4 * 384, name="y")
    launch(compiled("setmaxnreg", fault), (1, 1, 1), (384, 1, 1), 0, struct.pack("<Q", y), memory, options=options)
    return np.array_equal(memory.view(y).view(np.float32), np.arange(384))


RUNS = {"wgmma": wgmma, "mbarrier": mbarrier, "setmaxnreg": setmaxnreg}
NO_WAIT = "no wgmma.wait_group has covered it"
FAULTS = {  # kernel, fault -> the beginning of the message, or several of which each order gives one
    ("wgmma", 1): "proxy fence: shared address .* no fence.proxy.async stands between",
    ("wgmma", 2): "proxy fence",
    ("wgmma", 3): "race: read after write|uninitialised: read of 16 bytes at shared",
    ("wgmma", 4): "descriptor: matrix descriptor .* all lanes must have the same",
    ("wgmma", 5): "descriptor: .* a base offset",
    ("wgmma", 6): "descriptor: .* wider than a row of the swizzle's pattern",
    ("wgmma", 7): "warpgroup: the warps of a warpgroup disagree: operands",
    ("wgmma", 8): "out of bounds: shared wgmma operand",
    ("wgmma", 9): "wgmma: .* no wgmma.fence stands between",
    ("wgmma", 10): "wgmma: .* no wgmma.fence stands between",
    ("wgmma", 11): "wgmma: its sums are in flight in a wgmma of another shape",
    ("wgmma", 12): "deadlock: no warp of the block can run: .* for the other warps of its warpgroup",
    ("wgmma", 13): f"wgmma: accesses a sum of a wgmma in flight: {NO_WAIT}",
    ("wgmma", 14): f"wgmma: accesses a register that a wgmma in flight reads: {NO_WAIT}",
    ("wgmma", 15): "race: write after read at shared address .*: a wgmma read it|race: read after write|proxy fence",
    ("wgmma", 16): "wgmma: (accesses a sum of a wgmma in flight|one of its registers is in flight in another role)",
    ("wgmma", 17): "pending: the block ends while a wgmma is in flight",
    ("wgmma", 18): f"wgmma: accesses a sum of a wgmma in flight: {NO_WAIT}",
    ("mbarrier", 1): "mbarrier: shared address .* holds no mbarrier",
    ("mbarrier", 2): "deadlock: every resident block waits",
    ("mbarrier", 3): "deadlock: every resident block waits",
    ("mbarrier", 4): "mbarrier: mbarrier of 0 arrivals: 1 to 1048575",
    ("mbarrier", 5): "mbarrier: mbarrier of 1048576 arrivals",
    ("mbarrier", 6): "mbarrier: shared address .* already holds an mbarrier",
    ("mbarrier", 7): "mbarrier: warp 0 initialised .* no barrier orders that|mbarrier: .* holds no mbarrier",
    ("mbarrier", 8): "race: write after (read|write) at shared|deadlock|race: read after write",
    ("mbarrier", 9): "deadlock: every resident block waits",
    ("mbarrier", 10): "mbarrier: transaction count 1048576 .* 20 bits",
    ("mbarrier", 11): "race: read after write .* warp 0 wrote it|race: write after read .* warp 1 read it",
    ("mbarrier", 12): "race: read after write|uninitialised|race: write after read|deadlock",
    ("mbarrier", 13): "race: read after write|race: write after read|deadlock",
    ("mbarrier", 14): "mbarrier: parity 2",
    ("mbarrier", 15): "mbarrier: read of shared address .* its bits are opaque",
    ("mbarrier", 16): "mbarrier: shared address .* holds no mbarrier",
    ("mbarrier", 17): "race: read after write .* warp 0 wrote it",
    ("setmaxnreg", 1): "warpgroup: the warps of a warpgroup disagree",
    ("setmaxnreg", 2): "registers: setmaxnreg to 176 registers a thread, which has 168",
    ("setmaxnreg", 3): "warpgroup: .* some ended without executing it|deadlock: no warp .* for registers",
    ("setmaxnreg", 4): "deadlock: no warp of the block can run: .* or for registers",
    ("setmaxnreg", 5): "registers: setmaxnreg to 160 registers a thread, which has 168",
}


@pytest.mark.parametrize("name, fault", FAULTS)
def test_a_fault_is_caught(name, fault):
    for options in ORDERS:
        with pytest.raises(EmulatorError) as caught:
            RUNS[name](fault, options)
        assert re.match(FAULTS[name, fault], str(caught.value)), caught.value


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("name", RUNS)
def test_without_a_fault_it_is_right(name, options):
    assert RUNS[name](0, options)


@pytest.mark.parametrize("options", ORDERS)
def test_a_lane_may_arrive_for_its_warp_behind_a_syncwarp(options):
    assert mbarrier(18, options)


def test_the_check_of_proxy_fences_has_a_switch():
    for mode in ("eager", "late"):
        assert wgmma(1, Options(proxy_fences=False, async_mode=mode))
    with pytest.raises(EmulatorError, match="^race: read after write"):  # and it is that check alone
        wgmma(3, Options(proxy_fences=False))


# ---- one warp


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_stores_as_cute_loads(count, trans):
    """A fragment stored and read back by rows is where CuTe's ldmatrix would find it."""
    rng = np.random.default_rng(count)
    halves, row = rng.permutation(64 * count).astype(np.uint16).reshape(32, 2 * count), rng.permutation(32)
    form = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16"
    body = (
        f"mov.u32 %t0, tile; mad.lo.u32 %t1, %i{count}, 16, %t0; mad.lo.u32 %t2, %lane, 16, %t0;\n"
        f"st.shared.v4.b32 [%t1], {{%lane, %lane, %lane, %lane}}; bar.sync 0;\n{form} [%t1], {micro.group('i', 0, count)};\n"
        f"bar.sync 0; ld.shared.v4.b32 {micro.group('o', 0, 4)}, [%t1];"
    )
    given = np.concatenate([micro.words(halves), row[:, None].astype(np.uint32)], axis=1)
    got = micro.run(micro.ptx(body, count + 1, 4, shared=512), given, 4).view(np.uint16).reshape(-1)[: 64 * count]
    want = np.empty(64 * count, np.uint16)
    want[table()[f"ldmatrix x{count}{' trans' if trans else ''}"]["at"]] = halves
    np.testing.assert_array_equal(got, want)


def test_the_lowest_lane_of_a_mask_is_elected():
    body = "elect.sync %t1|%p1, 0xf0; selp.b32 %o0, 1, 0, %p1; mov.b32 %o1, %t1;"
    start = "mov.b32 %o0, 2; mov.b32 %o1, 0; shr.u32 %t0, %lane, 2; setp.eq.u32 %p0, %t0, 1; @!%p0 bra L;"
    got = micro.run(micro.ptx(f"{start}\n{body}\nL:", 1, 2), np.zeros((32, 1), np.uint32), 2)
    np.testing.assert_array_equal(got[:, 0], [2] * 4 + [1, 0, 0, 0] + [2] * 24)
    assert (got[4:8, 1] == 4).all()


REFUSED = {
    "barrier.cluster.arrive.acquire.aligned;": "unknown opcode 'barrier.cluster.arrive.acquire.aligned'",
    "mapa.u32 %t0, %t1, 0;": "generic addresses have 64 bits",
    "mapa.shared::cluster.u64 %in, %in, 0;": "a shared address has 32 bits here",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u64 [%t0], %t1, [%t2];": "unknown opcode 'st.async",
    "st.async.release.gpu.global.u32 [%in], %t1;": "unknown opcode 'st.async",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%t0], {%t1, %t1, %t1}, [%t2];": "3 values for a vector of 2",
    "red.async.relaxed.cluster.global.u32 [%t0], %t1;": "unknown opcode 'red.async",
    "mbarrier.arrive.shared::cluster.b64 %in, [%t1];": "an arrival in .shared::cluster has no state",
    "mbarrier.arrive_drop.shared.b64 _, [%t1];": "form of mbarrier",
    "setmaxnreg.dec.sync.aligned.u32 40;": "nothing tells how many registers",
    "setmaxnreg.dec.sync.aligned.u32 41;": "in steps of 8",
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%o0, %o1, %o2, %o3}, %in, %in, %t0, 1, 1, 1, 1, 0, 0;": "selector 1",
    "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%o0, %o1, %o2, %o3}, %in, %in, 1;": "unknown opcode 'wgmma.mma_async",
    "wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {%o0, %o1, %o2, %o3}, %in, %in, 1, 1, 1, 0, 0;": "shape or types",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_no_program_has_shown_is_refused(text):
    with pytest.raises(EmulatorError, match=REFUSED[text]):
        load(micro.ptx(text, 1, 4), "micro")


SPARSE = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 words, .param .u64 out)
.maxntid 128, 1, 1
{
.shared .align 128 .b8 b[512];
.reg .b16 %h<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<8>;
.reg .f32 %f<4>;
mov.u32 %r0, %tid.x; mov.u32 %r1, b; ld.param.u64 %rd0, [words]; ld.param.u64 %rd1, [out];
shr.u32 %r2, %r0, 4; and.b32 %r3, %r0, 15; shr.u32 %r4, %r3, 2; and.b32 %r5, %r3, 3;
mad.lo.u32 %r6, %r2, 16, %r1; mad.lo.u32 %r6, %r4, 128, %r6; mad.lo.u32 %r6, %r5, 4, %r6;
shl.b32 %r7, %r2, 5; mad.lo.u32 %r7, %r3, 2, %r7; add.u32 %r8, %r7, 1;
cvt.rn.f16.u32 %h0, %r7; cvt.rn.f16.u32 %h1, %r8; mov.b32 %r9, {%h0, %h1}; st.shared.b32 [%r6], %r9;
fence.proxy.async.shared::cta; bar.sync 0;
mad.wide.u32 %rd2, %r0, 4, %rd0; ld.global.u32 %r10, [%rd2]; mov.b32 %r11, 0x3c003c00;
shr.u32 %r12, %r1, 4; cvt.u64.u32 %rd3, %r12; or.b64 %rd3, %rd3, 0x0000000800080000;
mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r11, %r11, %r11, %r11}, %rd3, %r10, 0, 1, 1, 1, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mad.wide.u32 %rd4, %r0, 16, %rd1; st.global.v4.f32 [%rd4], {%f0, %f1, %f2, %f3};
ret;
}
"""


@pytest.mark.parametrize("options", ORDERS)
def test_metadata_by_hand_where_the_lanes_of_a_pair_differ(options):
    """A is 1, B of column n and row k is 32 n + k. Of four lanes the first describes columns 0 to 15, the second 16 to 31: a
    row in the low half, the eighth below it in the high one; the third and fourth are not read (PTX ISA, metadata of k32)."""
    words = np.tile(np.array([0xEEEE4444, 0xCCCC9999, 0xFFFFFFFF, 0], np.uint32), 32)
    kept = {"low": [(0, 1)] * 4 + [(1, 2)] * 4, "high": [(2, 3)] * 4 + [(0, 3)] * 4}
    columns = {name: [4 * i + j for i, pair in enumerate(pairs) for j in pair] for name, pairs in kept.items()}
    memory = Memory()
    out = memory.alloc(128 * 16, name="out")
    arguments = struct.pack("<QQ", memory.upload(words, "words"), out)
    launch(load(SPARSE), (1, 1, 1), (128, 1, 1), 0, arguments, memory, options=options)
    got = memory.view(out).view(np.float32).reshape(4, 8, 4, 2, 2)  # warp, row, lane of four, half, column of two
    for half, name in enumerate(("low", "high")):
        want = [sum(32 * n + k for k in columns[name]) for n in range(8)]
        np.testing.assert_array_equal(got[:, :, :, half].reshape(32, 8), np.tile(want, (32, 1)))


def test_a_try_wait_may_fail_and_a_test_wait_tells_how_it_is():
    """Of a phase that is complete, with a seed; by parity and by state, which an arrival before it returned."""
    body = (
        "mov.u32 %t0, tile; setp.eq.u32 %p0, %lane, 0; @%p0 mbarrier.init.shared.b64 [%t0], 1; bar.warp.sync -1;\n"
        ".reg .b64 %state; @%p0 mbarrier.arrive.shared.b64 %state, [%t0]; bar.warp.sync -1;\n"
        "mbarrier.try_wait.parity.shared.b64 %p1, [%t0], 0; selp.b32 %o0, 1, 0, %p1;\n"
        "mbarrier.test_wait.parity.shared.b64 %p1, [%t0], 0; selp.b32 %o1, 1, 0, %p1;\n"
        "mbarrier.test_wait.parity.shared.b64 %p1, [%t0], 1; selp.b32 %o2, 1, 0, %p1; mov.b32 %o3, 1;\n"
        "@%p0 mbarrier.test_wait.shared.b64 %p1, [%t0], %state; @%p0 selp.b32 %o3, 1, 0, %p1;"
    )
    text, tried = micro.ptx(body, 1, 4, shared=16), set()
    for seed in range(20):
        got = micro.run(text, np.zeros((32, 1), np.uint32), 4, Options(seed=seed))
        np.testing.assert_array_equal(got[:, 1:], [[1, 0, 1]] * 32)
        tried |= {(bool(seed), int(v)) for v in got[:, 0]}
    assert tried == {(False, 1), (True, 0), (True, 1)}
