"""Bulk copies beside NumPy's indexing and CuTe's swizzles, and each check proven by a text with exactly that fault."""

import contextlib
import itertools
import re
import struct
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.emulator import EmulatorError, Memory, Options, launch, load
from tests.copied_boxes import swizzled
from tests.map_calls import encode_im2col, encode_tiled

ORDERS = [Options(), Options(async_mode="late"), Options(seed=1), Options(seed=2, async_mode="late")]

# Thread 0 loads a box into `tile`; all 64 threads wait and copy its bytes as they lie to `seen`; with a store thread 0 sends
# the box on.
TEXT = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry kernel(.param .align 64 .b8 from[128], .param .align 64 .b8 to[128], .param .u64 seen, .param .u64 plain)
.maxntid 64, 1, 1
{{
.shared .align 1024 .b8 tile[{room}];
.shared .align 8 .b8 bar[8];
.reg .pred %p<4>;
.reg .b16 %h<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<8>;
mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r2, bar; mov.u32 %r3, 0;
ld.param.u64 %rd0, [seen]; ld.param.u64 %rd1, [plain];
mov.b64 %rd2, from; cvta.param.u64 %rd2, %rd2; mov.b64 %rd3, to; cvta.param.u64 %rd3, %rd3;
setp.ne.u32 %p0, %r0, 0; setp.eq.u32 %p2, %r0, 32;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
@%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {size};
{load}
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
@!%p1 bra WAIT;
mov.u32 %r4, %r0;
LOOP: setp.ge.u32 %p1, %r4, {words}; @%p1 bra DONE;
mad.lo.u32 %r5, %r4, 4, %r1; ld.shared.u32 %r6, [%r5];
mad.wide.u32 %rd4, %r4, 4, %rd0; st.global.u32 [%rd4], %r6;
add.u32 %r4, %r4, 64; bra LOOP;
DONE: bar.sync 0;
{more}
@%p0 bra END;
{store}
END: ret;
}}
"""
TILED = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {{{at}}}], [%r2];"
IM2COL = (
    "cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
    "[%r1], [%rd2, {{{at}}}], [%r2], {{{off}}};"
)
STORED = "cp.async.bulk.tensor.{rank}d.global.shared::cta{kind}.bulk_group [%rd3, {{{at}}}], [%r1];\n"
WAITED = "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;"


def listed(values) -> str:
    return ", ".join(map(str, values))


def program(size: int, load_: str, store: str = "", more: str = ""):
    return TEXT.format(room=size, size=size, words=size // 4, load=load_, store=store, more=more)


def run(text: str, source: bytes, target: bytes, size: int, memory: Memory, options: Options = ORDERS[0]) -> np.ndarray:
    """What lay in shared memory."""
    seen = memory.alloc(size, name="seen")
    params = source.ljust(128, b"\0") + target.ljust(128, b"\0") + struct.pack("<QQ", seen, seen)
    launch(load(text, "kernel"), (1, 1, 1), (64, 1, 1), 0, params, memory, options=options)
    memory.check_red_zones()
    return memory.view(seen)


def tensor(rng: np.random.Generator, dims: tuple[int, ...], pitch: int = 16) -> tuple[np.ndarray, list[int], np.ndarray]:
    """(halves with the innermost dimension last, its map's strides, the padded memory), none of them 0."""
    room = -(-dims[0] * 2 // pitch) * pitch // 2
    memory = rng.integers(1, 1 << 15, (*dims[:0:-1], room), dtype=np.uint16)
    strides = [room * 2 * int(np.prod(dims[1 : i + 1])) for i in range(len(dims) - 1)]
    return memory[..., : dims[0]], strides, memory


def boxed(x: np.ndarray, at: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
    """Rows of the box that begins at these coordinates, zeros outside."""
    ranges = [[c + i for i in range(0, b, s)] for c, b, s in zip(at, box, (1, *steps[1:]), strict=True)]
    rows = []
    for outer in itertools.product(*ranges[:0:-1]):
        inside = all(0 <= c < n for c, n in zip(outer, x.shape, strict=False))
        rows.append([x[(*outer, c)] if inside and 0 <= c < x.shape[-1] else 0 for c in ranges[0]])
    return np.array(rows, np.uint16)


CASES = [  # dims, box, coordinates, element strides, swizzle
    ((37,), (16,), (3,), (1,), 0),
    ((40, 9), (16, 8), (0, 0), (1, 1), 32),
    ((40, 9), (32, 8), (16, 4), (1, 1), 64),
    ((70, 9), (64, 16), (-8, -3), (1, 1), 128),
    ((70, 9, 3), (64, 3, 4), (10, 7, -1), (1, 1, 1), 128),
    ((24, 5, 4, 3), (8, 4, 4, 2), (20, 2, 1, 2), (1, 2, 3, 1), 0),
    ((24, 5, 4, 3, 2), (16, 2, 3, 1, 2), (0, 3, -1, 2, 1), (1, 1, 1, 1, 1), 32),
    ((8, 300), (8, 256), (0, 100), (1, 8), 0),
]


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("dims, box, at, steps, swizzle", CASES)
def test_a_tile_is_what_indexing_gives(dims, box, at, steps, swizzle, options):
    """Loaded, and stored from there into another tensor of the same shape: what lies outside is left alone."""
    memory = Memory()
    x, strides, room = tensor(np.random.default_rng(len(dims)), dims)
    y = memory.upload(np.full_like(room, 7), "y")
    maps = [encode_tiled("float16", p, dims, strides, box, steps, swizzle) for p in (memory.upload(room, "x"), y)]
    want = boxed(x, at, box, steps)
    words = {"rank": len(dims), "at": listed(at)}
    text = program(want.nbytes, TILED.format(**words), STORED.format(kind="", **words) + WAITED)
    seen = run(text, *maps, want.nbytes, memory, options)
    np.testing.assert_array_equal(seen, swizzled(want.view(np.uint8), swizzle))
    stored = memory.view(y).view(np.uint16).reshape(room.shape)
    where = boxed(np.arange(1, x.size + 1, dtype=np.uint16).reshape(x.shape), at, box, steps)
    expected = np.full(x.size, 7, np.uint16)
    expected[where[where > 0] - 1] = want[where > 0]
    np.testing.assert_array_equal(stored[..., : dims[0]].reshape(-1), expected)
    assert (stored[..., dims[0] :] == 7).all()


def columns(x: np.ndarray, at, lower, upper, steps, offset, channels: int, pixels: int) -> np.ndarray:
    """Rows of `channels`, of pixels in the order of images: a list of all pixels in the boxes, from `at` on."""
    spatial = x.shape[-2:0:-1]  # W first
    grid = [range(lo, n - 1 + up + 1, s) for n, lo, up, s in zip(spatial, lower, upper, steps[1:-1], strict=True)]
    order = [(*p[:0:-1], p[0]) for n in range(x.shape[0] + 9) for p in [(n, *q) for q in itertools.product(*grid[::-1])]]
    first = order.index(tuple(at[1:]))
    rows = np.zeros((pixels, channels), np.uint16)
    for row, pixel in enumerate(order[first : first + pixels]):
        place = [c + o for c, o in zip(pixel[:-1], offset, strict=True)]
        if pixel[-1] < x.shape[0] and all(0 <= c < n for c, n in zip(place, spatial, strict=True)):
            values = x[(pixel[-1], *place[::-1])][at[0] : at[0] + channels]
            rows[row, : len(values)] = values
    return rows


PIXELS = [  # dims C, W, ...; lower, upper, element strides, coordinates, offsets, channels, pixels, swizzle
    ((16, 9, 2), (-1,), (-1,), (1, 1, 1), (0, -1, 0), (2,), 16, 12, 32),
    ((64, 5, 4, 2), (-1, -1), (-1, -1), (1, 1, 1, 1), (0, -1, -1, 0), (0, 0), 64, 24, 128),
    ((64, 5, 4, 2), (-1, -1), (-1, -1), (1, 1, 1, 1), (0, 1, 0, 0), (2, 1), 64, 40, 128),
    ((40, 7, 6, 3), (-1, -2), (0, -1), (1, 2, 2, 1), (32, 1, 0, 0), (1, 2), 32, 30, 64),
    ((24, 7, 6, 3), (0, 0), (0, 0), (1, 3, 2, 1), (0, 3, 4, 2), (0, 0), 16, 16, 32),
    ((8, 4, 3, 3, 2), (-1, 0, -1), (0, -1, 0), (1, 1, 1, 2, 1), (0, -1, 1, 1, 0), (1, 0, 2), 8, 50, 0),
]


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("dims, lower, upper, steps, at, offset, channels, pixels, swizzle", PIXELS)
def test_columns_of_pixels_are_what_indexing_gives(dims, lower, upper, steps, at, offset, channels, pixels, swizzle, options):
    memory = Memory()
    x, strides, room = tensor(np.random.default_rng(len(dims)), dims)
    source = encode_im2col("float16", memory.upload(room, "x"), dims, strides, lower, upper, channels, pixels, steps, swizzle)
    want = columns(x, at, lower, upper, steps, offset, channels, pixels)
    text = program(want.nbytes, IM2COL.format(rank=len(dims), at=listed(at), off=listed(offset)))
    np.testing.assert_array_equal(
        run(text, source, source, want.nbytes, memory, options), swizzled(want.view(np.uint8), swizzle)
    )


@pytest.mark.parametrize("options", ORDERS)
def test_columns_of_pixels_are_stored_without_offsets(options):
    memory, dims = Memory(), (16, 5, 4, 2)
    x, strides, room = tensor(np.random.default_rng(0), dims)
    y = memory.alloc(room.nbytes, fill=0, name="y")
    maps = [encode_im2col("float16", p, dims, strides, (0, 0), (0, 0), 16, 24, swizzle=32) for p in (memory.upload(room), y)]
    words = {"rank": 4, "at": "0, 3, 1, 0"}
    text = program(768, IM2COL.format(off="0, 0", **words), STORED.format(kind=".im2col_no_offs", **words) + WAITED)
    run(text, *maps, 768, memory, options)
    got = memory.view(y).view(np.uint16).reshape(-1, 16)
    np.testing.assert_array_equal(got[8:32], x.reshape(-1, 16)[8:32])
    assert not got[:8].any() and not got[32:].any()


PLAIN = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], {}, [%r2];"
PLAIN_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], {};\n"


def plain(text: str, memory: Memory, options: Options) -> bool:
    """Whether 256 bytes come from x into shared memory; they are stored where they were."""
    x = np.arange(64, dtype=np.uint32)
    address, seen = memory.upload(x, "x"), memory.alloc(256, name="seen")
    params = bytes(256) + struct.pack("<QQ", seen, address)
    launch(load(text, "kernel"), (1, 1, 1), (64, 1, 1), 0, params, memory, options=options)
    return np.array_equal(memory.view(seen).view(np.uint32), x) and np.array_equal(memory.view(address).view(np.uint32), x)


FENCE = "fence.proxy.async.shared::cta;"
STORE_ANEW = "st.shared.u32 [%r1], %r3;"
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;\n@!%p1 bra WAIT;"
EARLY = "(in flight: read of|race: read after write|uninitialised|deadlock)"
STORED_TO = "(in flight: write to|race|proxy fence)"
FAULTS = {  # name -> (text, its replacement, the message's beginning)
    "too many bytes expected": ("_, [%r2], 256", "_, [%r2], 272", "deadlock: every resident block waits"),
    "too few bytes expected": (
        "_, [%r2], 256;",
        "_, [%r2], 128;",
        "mbarrier: the mbarrier .* completes its phase while|deadlock|pending: .* transaction count|race",
    ),
    "no init": ("mbarrier.init.shared::cta.b64 [%r2], 1;", "", "mbarrier: shared address .* holds no mbarrier"),
    "init not fenced": ("fence.mbarrier_init.release.cluster;", "", "mbarrier: no fence.mbarrier_init or fence.proxy.async"),
    "no barrier after init": (
        "READY: bar.sync 0;",
        "READY:",
        "mbarrier: (warp 0 initialised .* no barrier|.* holds no mbarrier)",
    ),
    "wrong parity": ("b64 %p1, [%r2], 0;", "b64 %p1, [%r2], 1;", EARLY),
    "no wait": (WAIT, "WAIT:", EARLY),
    "nobody waits": (WAIT, "WAIT: bra END;", "pending: the block ends"),
    "destination stored to": ("WAIT: mb", f"WAIT: @%p2 {STORE_ANEW}\nmb", STORED_TO),
    "destination misaligned": ("[%r1], [%rd1], 256", "[%r1+8], [%rd1], 240", "bulk copy: 240 bytes .* multiples of 16"),
    "size misaligned": ("[%rd1], 256, [%r2]", "[%rd1], 248, [%r2]", "bulk copy: 248 bytes"),
    "outside shared memory": ("[%r1], [%rd1], 256", "[%r1+1024], [%rd1], 256", "out of bounds: shared bulk copy"),
    "outside global memory": ("[%r1], [%rd1], 256", "[%r1], [%rd1+16], 256", "out of bounds: global bulk load"),
    "stored to before, not fenced": (
        "READY: bar",
        f"READY: @%p2 {STORE_ANEW}\nbar",
        "proxy fence: shared address .* by warp 1",
    ),
    "source stored to, not fenced": (
        "DONE: bar",
        f"DONE: bar.sync 0; @%p2 {STORE_ANEW}\nbar",
        "proxy fence: shared address .* by warp 1",
    ),
    "fenced by a lane that did not store": (
        "DONE: bar",
        f"DONE: bar.sync 0; add.u32 %r7, %r0, -1; setp.ne.u32 %p3, %r7, 0; @!%p3 {STORE_ANEW}\n@!%p0 {FENCE}\nbar",
        "proxy fence: shared address .* by warp 0",
    ),
    "source stored to while it is read": (
        "cp.async.bulk.wait_group 0;",
        f"{STORE_ANEW}\ncp.async.bulk.wait_group 0;",
        "race: write after read .* a bulk store read",
    ),
    "store not committed": ("cp.async.bulk.commit_group;", "", "pending: the block ends while a bulk store"),
    "store not waited for": ("cp.async.bulk.wait_group 0;", "", "pending: the block ends while a bulk store"),
    "a wait short": (
        "cp.async.bulk.wait_group 0;",
        "cp.async.bulk.wait_group 1;",
        "pending: the block ends while a bulk store",
    ),
}


@pytest.mark.parametrize("options", ORDERS)
def test_bytes_are_copied(options):
    assert plain(program(256, PLAIN.format(256), PLAIN_STORE.format(256) + WAITED), Memory(), options)
    read = WAITED.replace("wait_group", "wait_group.read")
    assert plain(program(256, PLAIN.format(256), PLAIN_STORE.format(256) + read), Memory(), options)
    anew = f"@%p0 bra F;\n{STORE_ANEW}\nF: {FENCE}\nbar.sync 0;"  # thread 0 stores the value that was there, 0
    assert plain(program(256, PLAIN.format(256), PLAIN_STORE.format(256) + WAITED, anew), Memory(), options)


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name, options):
    old, new, message = FAULTS[name]
    text = program(256, PLAIN.format(256), PLAIN_STORE.format(256) + WAITED)
    assert text.count(old) == 1
    with pytest.raises(EmulatorError) as caught:
        plain(text.replace(old, new), Memory(), options)
    assert re.match(message, str(caught.value)), caught.value


def mapped(change=lambda source: source, **words) -> None:
    memory, dims = Memory(), (64, 6, 6, 2)
    _, strides, room = tensor(np.random.default_rng(0), dims)
    address = memory.upload(room, "x")
    tiled = encode_tiled("float16", address, dims, strides, (64, 2, 2, 1), swizzle=128)
    pixels = encode_im2col("float16", address, dims, strides, (-1, -1), (-1, -1), 64, 4, (1, 2, 2, 1), 128)
    text = words.get("form", TILED).format(
        rank=words.get("rank", 4), at=words.get("at", "0, 0, 0, 0"), off=words.get("off", "0, 0")
    )
    source = change(pixels if "form" in words else tiled)
    run(program(512, words.get("before", "") + text), source, source, 512, memory)


REFUSED = {
    "bulk copy: a tensor map of 4 dimensions, the instruction has 3": {"rank": 3, "at": "0, 0, 0"},
    "bulk copy: a tensor map of the other kind": {"form": TILED},
    "bulk copy: what it takes for a tensor map is none": {"change": lambda m: bytes(128)},
    "bulk copy: what it takes for a tensor map is n": {"change": lambda m: m[:94] + b"\0" + m[95:]},
    "bulk copy: a box of 33554432 bytes": {"change": lambda m: m[:68] + struct.pack("<4H", 64, 256, 256, 4) + m[76:]},
    "bulk copy: im2col from coordinate 0 of dimension 1": {"form": IM2COL, "at": "0, 0, -1, 0"},
    "bulk copy: im2col from coordinate 7 of dimension 2": {"form": IM2COL, "at": "0, -1, 7, 0"},
    "bulk copy: im2col offset 256": {"form": IM2COL, "at": "0, -1, -1, 0", "off": "256, 0"},
    "bulk copy: shared address": {"before": "add.u32 %r1, %r1, 64;\n"},
    "out of bounds: global bulk load": {"change": lambda m: m[:8] + struct.pack("<Q", 1 << 40) + m[16:]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_map_does_not_allow_is_refused(message):
    mapped()
    mapped(form=IM2COL, at="0, -1, 1, 0")
    with pytest.raises(EmulatorError, match=f"^{message}"):
        mapped(**REFUSED[message])


@pytest.mark.parametrize(
    "text, message",
    [
        (TILED.replace("bytes ", "bytes.multicast::cluster "), "unknown name"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 16;", "unknown opcode 'cp.reduce"),
        (IM2COL.replace(", {{{off}}}", ""), "operands"),
        (PLAIN.format(16).replace("[%rd1]", "[%r1]"), "64 bits"),
    ],
)
def test_forms_that_are_not_executed_are_refused(text, message):
    with pytest.raises(EmulatorError, match=message):
        load(program(512, text.format(rank=4, at="0, 0, 0, 0", off="0, 0")), "kernel")


def test_what_lies_outside_may_be_no_number():
    memory, dims = Memory(), (24, 3)
    x, strides, room = tensor(np.random.default_rng(0), dims)
    address = memory.upload(room, "x")
    source = encode_tiled("float16", address, dims, strides, (16, 4), nan_fill=True)
    seen = run(program(128, TILED.format(rank=2, at="16, 1")), source, source, 128, memory).view(np.float16).reshape(4, 16)
    outside = np.ones((4, 16), bool)
    outside[:2, :8] = False
    assert np.isnan(seen[outside]).all()
    np.testing.assert_array_equal(seen[:2, :8].view(np.uint16), x[1:, 16:])


def test_a_copy_reads_nothing_that_the_launch_ahead_may_write():
    text = program(256, PLAIN.format(256))
    with pytest.raises(EmulatorError, match="^dependent launch: global load .* before griddepcontrol.wait"):
        plain(text, Memory(), Options(dependent=True))
    waits = text.replace("mov.u32 %r0, %tid.x;", "griddepcontrol.wait; mov.u32 %r0, %tid.x;")
    assert plain(waits, Memory(), Options(dependent=True))


BLOCKS = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 y, .param .u64 flag, .param .u64 out)
.maxntid 32, 1, 1
{{
.shared .align 128 .b8 tile[128];
.reg .pred %p<4>;
.reg .b32 %r<8>;
.reg .b64 %rd<8>;
mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mad.lo.u32 %r2, %r0, 4, %r1; mov.u32 %r3, %ctaid.x;
ld.param.u64 %rd0, [y]; ld.param.u64 %rd1, [flag]; ld.param.u64 %rd2, [out];
setp.ne.u32 %p0, %r3, 0; setp.ne.u32 %p1, %r0, 0;
@%p0 bra READS;
st.shared.u32 [%r2], %r0; fence.proxy.async.shared::cta; bar.sync 0;
@%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 128; cp.async.bulk.commit_group;
{wait}
membar.gl; st.relaxed.gpu.global.u32 [%rd1], 1; bra END;
READS: ld.relaxed.gpu.global.u32 %r4, [%rd1]; setp.eq.u32 %p2, %r4, 0; @%p2 bra READS;
membar.gl; mad.wide.u32 %rd3, %r0, 4, %rd0; ld.global.u32 %r5, [%rd3];
mad.wide.u32 %rd4, %r0, 4, %rd2; st.global.u32 [%rd4], %r5;
END: ret;
}}
"""


@pytest.mark.parametrize("options", ORDERS)
def test_another_block_reads_a_store_that_was_waited_for(options):
    """Sources that are free again are not enough: the writes may come later than the flag."""
    for wait, right in (("cp.async.bulk.wait_group 0;", True), ("cp.async.bulk.wait_group.read 0;", False)):
        memory = Memory()
        y, flag, out = (memory.alloc(128, fill=0, name=name) for name in ("y", "flag", "out"))
        how = replace(options, resident_blocks=2)
        program_ = load(BLOCKS.format(wait=wait), "kernel")
        with contextlib.nullcontext() if right else pytest.raises(EmulatorError, match="^global order"):
            launch(program_, (2, 1, 1), (32, 1, 1), 0, struct.pack("<QQQ", y, flag, out), memory, options=how)
            np.testing.assert_array_equal(memory.view(out).view(np.uint32), np.arange(32))


@pytest.mark.parametrize("threads, right", [(992, True), (1024, False)])
def test_a_block_leaves_a_number_to_its_copies(threads, right):
    """Warps and asynchronous operations share 32 numbers in the check of races."""
    text = program(256, PLAIN.format(256)).replace(".maxntid 64", f".maxntid {threads}")
    memory = Memory()
    address = memory.upload(np.arange(64, dtype=np.uint32), "x")
    params = bytes(256) + struct.pack("<QQ", memory.alloc(256, name="seen"), address)
    words = "^asynchronous: .* more than 992 threads"
    with contextlib.nullcontext() if right else pytest.raises(EmulatorError, match=words):
        launch(
            load(text.replace("add.u32 %r4, %r4, 64", f"add.u32 %r4, %r4, {threads}"), "kernel"),
            (1, 1, 1),
            (threads, 1, 1),
            0,
            params,
            memory,
        )
