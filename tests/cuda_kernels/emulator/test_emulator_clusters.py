"""Clusters of blocks: results beside NumPy's, and each check proven by a kernel with exactly that fault."""

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.emulator import EmulatorError, Memory, Options, launch, load
from tests.map_calls import encode_im2col, encode_tiled

HERE = Path(__file__).parents[2] / "faulty"
ORDERS = [
    Options(),
    Options(async_mode="late"),
    *(Options(seed=seed, async_mode=("eager", "late")[seed % 2]) for seed in (1, 2, 3)),
    Options(resident_blocks=4, threads=1),
]


def clusters(fault: int, options: Options = ORDERS[0]) -> bool:
    """Whether y has what the kernel's comment says, of two clusters."""
    memory, x = Memory(), np.random.default_rng(0).integers(-99, 99, (4, 2, 32)).astype(np.float32)
    y = memory.alloc(4 * 192 * 4, name="y")
    program = load(compile_kernel(str(HERE / "clusters.cu"), {"FAULT": fault}, "sm_90a").ptx)
    launch(program, (4, 1, 1), (64, 1, 1), 0, struct.pack("<QQ", memory.upload(x, "x"), y), memory, options=options)
    both = x.reshape(2, 2, 2, 32)[:, :, :, np.arange(32) ^ 1]  # cluster, rank, round
    sent = np.concatenate([both[:, [0, 0]], both[:, [1, 1]]], axis=-1).reshape(4, 2, 64)
    read = sent[[1, 0, 3, 2], 0, ::-1]
    return np.array_equal(memory.view(y).view(np.float32).reshape(4, 192), np.concatenate([sent.reshape(4, 128), read], axis=1))


@pytest.mark.parametrize("options", ORDERS)
def test_without_a_fault_it_is_right(options):
    assert clusters(0, options)


FAULTS = {  # fault -> the beginning of the message, or several of which each order gives one
    1: r"cluster: it uses the shared memory of block \(.,0,0\), and no cluster barrier shows that this block has started",
    2: r"cluster: it uses the shared memory of block \(.,0,0\), which has ended|cluster: the block ends, and no",
    3: "mbarrier: shared address .* holds no mbarrier|mbarrier: warp 0 of block .* initialised",
    4: "bulk copy: a multicast to the blocks 0x6 of a cluster of 2",
    5: "deadlock: every resident block waits",
    6: "cluster: barrier.cluster.wait without barrier.cluster.arrive",
    7: r"deadlock: every resident block waits .* block \([13],0,0\): ended",
    8: "deadlock: no warp of the cluster can run: .*barrier.cluster.wait.acquire.aligned, for the cluster; .* at barrier 1",
    9: "cluster: barrier.cluster.arrive for the second time",
    10: "race: (read after write|write after read)|in flight: (read of|write to)",
    11: "cluster: the block ends while a bulk copy that it sent to another block's shared memory",
    12: "pending: the block ends|race: (read after write|write after read)",
    13: "race: read after write .* warp . of block .* wrote it",
    14: "mbarrier: no fence.mbarrier_init or fence.proxy.async",
    15: "mbarrier: (warp 0 of block .* initialised|no fence.mbarrier_init)",
    16: "cluster: the mbarrier at shared address .* is of another block: only arrivals reach that",
    17: "cluster: mapa to block 2 of a cluster of 2",
    18: "uninitialised: read of 4 bytes|mbarrier: .* expects too few",
    19: "bulk copy: a copy to shared address .* ends at the mbarrier .* of another block",
    20: "race: (write after read|read after write) .* warp . of block",
    21: "out of bounds: shared load",
    22: "out of bounds: shared load of 4 bytes at shared address 0x[12]000..., which is of another block",
    23: "race: (read after write|write after read) .* warp . of block",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault):
    for options in ORDERS:
        with pytest.raises(EmulatorError) as caught:
            clusters(fault, replace(options, threads=1))  # on one thread each order is the same every time
        assert re.match(FAULTS[fault], str(caught.value)), caught.value


# ---- PTX of a few instructions

HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry kernel({params}) .maxntid 32, 1, 1 {cluster}
{{
.shared .align 1024 .b8 tile[{room}];
.shared .align 8 .b8 bar[8];
.reg .pred %p<8>;
.reg .b16 %h<4>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r2, bar; mov.u32 %r3, %cluster_ctarank;
setp.eq.u32 %p0, %r0, 0;
{body}
ret;
}}
"""
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"


def run(body: str, params: list[tuple[str, bytes]], grid, cluster, memory: Memory, options: Options, room: int = 1024):
    """`params`: declaration and bytes of each; by order of alignment."""
    declared = f".reqnctapercluster {', '.join(map(str, cluster))}" if options.cluster is None else ".explicitcluster"
    text = HEAD.format(params=", ".join(f".param {d}" for d, _ in params), cluster=declared, room=room, body=body)
    return launch(load(text), grid, (32, 1, 1), 0, b"".join(b for _, b in params), memory, options=options)


REGISTERS = [f"{name}.{axis}" for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for axis in "xyz"]
REGISTERS += ["cluster_ctarank", "cluster_nctarank"]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("options", [*ORDERS[:3], Options(resident_blocks=17)])
def test_registers_tell_a_blocks_place(options, declared):
    """Clusters of 2 x 1 x 3 in a grid of 4 x 3 x 3."""
    memory, cluster, grid = Memory(), (2, 1, 3), (4, 3, 3)
    y = memory.alloc(36 * 16 * 4, name="y")
    moves = "".join(f"mov.u32 %r8, %{n}; st.global.u32 [%rd1+{4 * i}], %r8;\n" for i, n in enumerate(REGISTERS))
    body = (
        "ld.param.u64 %rd0, [y]; mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z;\n"
        "mad.lo.u32 %r5, %r6, 3, %r5; mad.lo.u32 %r4, %r5, 4, %r4; mad.wide.u32 %rd1, %r4, 64, %rd0;\n"
        f"setp.ne.u32 %p1, %r0, 0; @%p1 ret;\n{moves}"
        "mov.pred %p2, %is_explicit_cluster; selp.u32 %r8, 1, 0, %p2; st.global.v2.u32 [%rd1+56], {%r8, %r3};"
    )
    how = options if declared else replace(options, cluster=cluster)
    run(body, [(".u64 y", struct.pack("<Q", y))], grid, cluster, memory, how)
    z, yy, x = np.meshgrid(range(3), range(3), range(4), indexing="ij")
    rank = x % 2 + 2 * z
    zeros = np.zeros_like(x)
    want = [x // 2, yy, zeros, zeros + 2, zeros + 3, zeros + 1, x % 2, zeros, z, zeros + 2, zeros + 1, zeros + 3]
    want += [rank, zeros + 6, zeros + 1, rank]
    np.testing.assert_array_equal(memory.view(y).view(np.uint32).reshape(36, 16), np.stack(want, -1).reshape(36, 16))


@pytest.mark.parametrize(
    "grid, cluster, options, message",
    [
        ((3, 1, 1), (2, 1, 1), Options(), "expected whole clusters of"),
        ((9, 1, 1), (9, 1, 1), Options(), "expected 1 to 8, which every device can run"),
        ((4, 1, 1), (4, 1, 1), Options(resident_blocks=3), "expected at least a cluster's 4"),
        ((4, 1, 1), (4, 1, 1), Options(cluster=(0, 1, 1)), "expected 1 to 8"),
    ],
)
def test_what_cannot_be_launched_is_refused(grid, cluster, options, message):
    with pytest.raises(ValueError, match=message):
        run("", [], grid, cluster, Memory(), options)


def test_a_declared_cluster_is_launched_as_declared():
    text = HEAD.format(params="", cluster=".reqnctapercluster 2, 1, 1", room=16, body="")
    with pytest.raises(ValueError, match="as the kernel declares"):
        launch(load(text), (4, 1, 1), (32, 1, 1), 0, b"", Memory(), options=Options(cluster=(4, 1, 1)))


# The text stores the `tile` of every block of a cluster of four after block 1 has sent `size` bytes to the blocks in mask 13.
SENT = (
    """ld.param.u64 %rd0, [seen]; mov.b64 %rd2, from; cvta.param.u64 %rd2, %rd2;
@!%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
setp.eq.u32 %p1, %r3, 1; @%p1 bra READY;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size};
READY:
"""
    + SYNC
    + """setp.eq.u32 %p1, %r3, 1; mov.u16 %h0, 13;
@!%p1 bra WAIT; @!%p0 bra DONE;
{load}
bra DONE;
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
mad.lo.u32 %r6, %r3, {size}, 0; cvt.u64.u32 %rd4, %r6; add.u64 %rd4, %rd4, %rd0;
mov.u32 %r4, %r0;
LOOP: setp.ge.u32 %p2, %r4, {words}; @%p2 bra DONE;
mad.lo.u32 %r5, %r4, 4, %r1; ld.shared.u32 %r6, [%r5];
mad.wide.u32 %rd5, %r4, 4, %rd4; st.global.u32 [%rd5], %r6;
add.u32 %r4, %r4, 32; bra LOOP;
DONE: bar.warp.sync -1;
"""
    + SYNC
)
TILED = (
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
    "[%r1], [%rd2, {0, 1, 2, 1}], [%r2], %h0, %rd9;"
)
PIXELS = (
    "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%r1], [%rd2, {0, 0, 0, 0}], [%r2], {1, 2}, %h0;"
)


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("load_", [TILED, PIXELS])
def test_tensors_are_multicast(load_, options):
    memory, dims = Memory(), (32, 6, 5, 2)
    x = np.random.default_rng(0).integers(1, 1 << 15, dims[::-1], dtype=np.uint16)
    address, strides = memory.upload(x, "x"), [64, 384, 1920]
    seen = memory.alloc(4 * 1024, fill=0, name="seen")
    if load_ is TILED:
        source = encode_tiled("float16", address, dims, strides, (32, 4, 4, 1))
        want = np.zeros((4, 4, 32), np.uint16)
        want[:3] = x[1, 2:5, 1:5]
    else:
        source = encode_im2col("float16", address, dims, strides, (0, 0), (-2, -2), 32, 16)
        places = [(n, h + 2, w + 1) for n in range(2) for h in range(3) for w in range(4)][:16]
        want = np.stack([x[p] for p in places])
    text = SENT.format(size=1024, words=256, load=load_)
    params = [(".align 64 .b8 from[128]", source), (".u64 seen", struct.pack("<Q", seen))]
    run(text, params, (4, 1, 1), (4, 1, 1), memory, options)
    got = memory.view(seen).view(np.uint16).reshape(4, -1)
    np.testing.assert_array_equal(got, [np.zeros_like(want).ravel() if r == 1 else want.ravel() for r in range(4)])


BETWEEN = (
    """ld.param.u64 %rd0, [y]; mad.lo.u32 %r4, %r0, 4, %r1; mad.lo.u32 %r5, %r3, 100, %r0; st.shared.u32 [%r4], %r5;
@!%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
READY: fence.proxy.async.shared::cta;
"""
    + SYNC
    + """@!%p0 bra WAIT;
xor.b32 %r6, %r3, 1; add.u32 %r7, %r1, 128; mapa.shared::cluster.u32 %r7, %r7, %r6; mapa.shared::cluster.u32 %r8, %r2, %r6;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r1], 128, [%r8];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
bar.sync 0;
ld.shared.u32 %r9, [%r4+128]; mov.u32 %r10, %ctaid.x; mad.lo.u32 %r10, %r10, 32, %r0; mad.wide.u32 %rd1, %r10, 4, %rd0;
st.global.u32 [%rd1], %r9;
"""
)


@pytest.mark.parametrize("options", ORDERS)
def test_shared_memory_is_copied_to_another_block(options):
    """And its source must not end, or change, before it was read."""
    memory = Memory()
    y = memory.alloc(256, name="y")
    params = [(".u64 y", struct.pack("<Q", y))]
    run(BETWEEN + SYNC, params, (2, 1, 1), (2, 1, 1), memory, options)
    lanes = np.arange(32)
    np.testing.assert_array_equal(memory.view(y).view(np.uint32), np.concatenate([100 + lanes, lanes]))
    for old, new, message in (
        ("st.global.u32 [%rd1], %r9;\n", "st.global.u32 [%rd1], %r9; ret;\n", "cluster: the block ends while a bulk copy"),
        ("bar.sync 0;\n", "bar.sync 0; st.shared.u32 [%r4], %r0;\n", "race: write after read .* a bulk copy read it"),
        ("fence.proxy.async.shared::cta", "bar.warp.sync -1", "proxy fence: shared address .* by warp 0 of block"),
    ):
        text = (BETWEEN + SYNC).replace(old, new)
        with pytest.raises(EmulatorError, match=f"^{message}"):
            run(text, params, (2, 1, 1), (2, 1, 1), Memory() if not new else memory, options)


SENT_VALUES = (
    """ld.param.u64 %rd0, [y]; mad.lo.u32 %r4, %r0, 16, %r1; mad.lo.u32 %r5, %r3, 100, %r0;
@!%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;
READY: bar.warp.sync -1;
"""
    + SYNC
    + """xor.b32 %r6, %r3, 1; mapa.shared::cluster.u32 %r7, %r4, %r6; mapa.shared::cluster.u32 %r8, %r2, %r6; mov.u32 %r9, 7;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r7], %r5, [%r8];
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r7+4], %r9, [%r8];
st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r7+8], {%r0, %r3}, [%r8];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r4]; mad.lo.u32 %r10, %r3, 32, %r0; mad.wide.u32 %rd1, %r10, 16, %rd0;
st.global.v4.u32 [%rd1], {%r6, %r7, %r8, %r9};
"""
)


@pytest.mark.parametrize("options", ORDERS)
def test_values_are_sent_to_another_block(options):
    """Nothing but the receiver's mbarrier orders them; the sender may end at once."""
    memory = Memory()
    y = memory.alloc(1024, name="y")
    params = [(".u64 y", struct.pack("<Q", y))]
    run(SENT_VALUES, params, (2, 1, 1), (2, 1, 1), memory, options)
    want = [[(100 * (1 - r) + i, 7, i, 1 - r) for i in range(32)] for r in range(2)]
    np.testing.assert_array_equal(memory.view(y).view(np.uint32).reshape(2, 32, 4), want)
    wait = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;"
    early = "uninitialised: read|race: read after write .* st.async|in flight: read of"
    for old, new, message in (
        (wait, "", early),
        ("_, [%r2], 512", "_, [%r2], 384", f"mbarrier: .* expects too few|pending: the block ends|{early}"),
        ("[%r7], %r5, [%r8]", "[%r7], %r5, [%r2]", "bulk copy: a copy to shared address .* ends at the mbarrier .* of another"),
        ("[%r7+8], {", "[%r7+4], {", "misaligned: st.async"),
        ("[%r7+4]", "[%r7+99996]", "out of bounds: shared st.async"),
        (wait, "ret;", "pending: the block ends|cluster: it uses the shared memory of .* has ended"),
    ):
        with pytest.raises(EmulatorError, match=f"^({message})"):
            run(SENT_VALUES.replace(old, new), params, (2, 1, 1), (2, 1, 1), memory, options)


def test_values_are_sent_within_a_cluster_alone():
    text, one = SENT_VALUES.replace("xor.b32 %r6, %r3, 1", "mov.u32 %r6, %r3"), (1, 1, 1)
    with pytest.raises(EmulatorError, match="^bulk copy: st.async in a cluster of one block"):
        run(text, [(".u64 y", bytes(8))], one, one, Memory(), ORDERS[0])


GENERIC = (
    """ld.param.u64 %rd0, [y]; mad.lo.u32 %r4, %r0, 4, %r1; st.shared.u32 [%r4], %r0;
cvt.u64.u32 %rd1, %r4; cvta.shared.u64 %rd1, %rd1;
"""
    + SYNC
    + """add.u32 %r5, %r3, 1; rem.u32 %r5, %r5, 3; mapa.u64 %rd2, %rd1, %r5; getctarank.u64 %r6, %rd2;
atom.relaxed.cluster.add.u32 %r7, [%rd2], 100;
isspacep.shared::cta %p1, %rd2; isspacep.shared::cluster %p2, %rd2;
selp.u32 %r8, 1, 0, %p1; selp.u32 %r9, 2, 0, %p2; or.b32 %r8, %r8, %r9;
cvt.u64.u32 %rd3, %r4; cvta.shared::cluster.u64 %rd3, %rd3; isspacep.shared::cta %p1, %rd3;
selp.u32 %r10, 4, 0, %p1; or.b32 %r8, %r8, %r10;
mapa.shared::cluster.u32 %r11, %r4, %r5; getctarank.shared::cluster.u32 %r12, %r11;
red.relaxed.cluster.shared::cluster.add.u32 [%r11], 1000;
"""
    + SYNC
    + """ld.shared.u32 %r13, [%r4]; mad.lo.u32 %r14, %r3, 32, %r0; mad.wide.u32 %rd4, %r14, 32, %rd0;
st.global.v4.u32 [%rd4], {%r6, %r7, %r8, %r12}; st.global.u32 [%rd4+16], %r13;
"""
)


@pytest.mark.parametrize("options", ORDERS)
def test_addresses_of_other_blocks(options):
    """Generic ones and shared ones name the same words; atomics reach them."""
    memory = Memory()
    y = memory.alloc(3 * 32 * 32, fill=0, name="y")
    run(GENERIC, [(".u64 y", struct.pack("<Q", y))], (3, 1, 1), (3, 1, 1), memory, options)
    got = memory.view(y).view(np.uint32).reshape(3, 32, 8)[:, :, :5]
    np.testing.assert_array_equal(got, [[[(r + 1) % 3, i, 6, (r + 1) % 3, i + 1100] for i in range(32)] for r in range(3)])


DIVERGED = """setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW;
barrier.cluster.arrive; barrier.cluster.wait; bra NEXT;
LOW: barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;
NEXT: setp.eq.u32 %p2, %r3, 0; @%p2 ret;
barrier.cluster.arrive; barrier.cluster.wait;
"""


@pytest.mark.parametrize("options", ORDERS)
def test_lanes_meet_at_the_barrier_apart(options):
    """At different instructions; threads that have ended are not waited for."""
    run(DIVERGED, [], (4, 1, 1), (2, 1, 1), Memory(), options)
    with pytest.raises(EmulatorError, match="^deadlock"):
        run(
            DIVERGED.replace("LOW: barrier.cluster.arrive.relaxed;", "LOW: bar.sync 0;"),
            [],
            (4, 1, 1),
            (2, 1, 1),
            Memory(),
            options,
        )


ORDERED = (
    "ld.param.u64 %rd0, [y]; mad.wide.u32 %rd1, %r0, 4, %rd0; setp.eq.u32 %p1, %r3, 0; @%p1 st.global.u32 [%rd1], %r0;\n"
    + SYNC
    + "@!%p1 ld.global.u32 %r4, [%rd1]; @!%p1 st.global.u32 [%rd1+128], %r4;"
)


@pytest.mark.parametrize("options", ORDERS)
def test_the_barrier_orders_global_memory(options):
    """Unless its arrivals are relaxed, and no fence stands before them."""
    arrive, relaxed = "barrier.cluster.arrive.aligned", "barrier.cluster.arrive.relaxed.aligned"
    for text, right in (
        (ORDERED, True),
        (ORDERED.replace(arrive, relaxed), False),
        (ORDERED.replace(arrive, f"fence.acq_rel.gpu; {relaxed}"), True),
    ):
        memory = Memory()
        y = memory.alloc(256, fill=0, name="y")
        params = [(".u64 y", struct.pack("<Q", y))]
        if right:
            run(text, params, (2, 1, 1), (2, 1, 1), memory, options)
            np.testing.assert_array_equal(memory.view(y).view(np.uint32), np.tile(np.arange(32), 2))
        else:
            with pytest.raises(EmulatorError, match="^global order"):
                run(text, params, (2, 1, 1), (2, 1, 1), memory, options)
