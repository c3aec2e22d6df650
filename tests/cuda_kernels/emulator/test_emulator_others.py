"""What others' programs need of the emulator: instructions, switches of checks, orders, sums as tensor cores form them."""

import struct
from fractions import Fraction
from math import frexp, trunc

import numpy as np
import pytest

from cuda_kernels.emulator import EmulatorError, Memory, Options, launch, load
from cuda_kernels.sparse24 import prune
from tests.independent import micro
from tests.independent.layouts import places
from tests.independent.products import Mma, dense_name, fragments

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 data) {\n"
REGISTERS = ".reg .b32 %r<12>; .reg .b64 %a<6>; .reg .pred %p<4>; ld.param.u64 %a0, [data]; mov.u32 %r0, %tid.x;\n"


def run(body: str, data: np.ndarray, threads: int = 64, blocks: int = 1, options: Options = Options(), shared: int = 0):  # noqa: B008
    """(stats, data afterwards) of PTX that finds its data's address in %a0 and its thread in %r0."""
    memory = Memory()
    address = memory.upload(data, "data")
    tile = f".shared .align 16 .b8 tile[{shared}];\n" if shared else ""
    program = load(f"{HEAD}{tile}{REGISTERS}{body}\nret;\n}}")
    stats = launch(program, (blocks, 1, 1), (threads, 1, 1), 0, struct.pack("<Q", address), memory, options=options)
    return stats, memory.read(address, data.nbytes).view(data.dtype)


# ---- instructions


def test_a_long_product_by_mad_with_carry():
    """Payne and Hanek's reduction in libdevice: 32 x 64 bits by mad.lo.cc and madc.hi."""
    rng = np.random.default_rng(0)
    given = rng.integers(0, 1 << 32, (32, 4), dtype=np.uint64).astype(np.uint32)
    given[:4] = 0xFFFFFFFF
    body = "mad.lo.cc.u32 %o0, %i0, %i1, %i2; madc.hi.u32 %o1, %i0, %i1, %i3;"
    got = micro.run(micro.ptx(body, 4, 2), given, 2).astype(object)
    a, b, low, high = given.astype(object).T
    want = (a * b + low + (high << 32)) % (1 << 64)
    assert ((got[:, 0] + (got[:, 1] << 32)) == want).all()


def test_fma_and_add_toward_zero_with_flushed_subnormals():
    rng = np.random.default_rng(1)
    given = (rng.standard_normal((32, 3)) * 2.0 ** rng.integers(-70, 10, (32, 3))).astype(np.float32)
    given[:8] *= np.float32(1e-38)  # subnormal factors and results
    given[:3, 2] = 0
    body = "fma.rz.ftz.f32 %o0, %i0, %i1, %i2; add.rz.ftz.f32 %o1, %i0, %i1;"
    got = micro.run(micro.ptx(body, 3, 2), given.view(np.uint32), 2).view(np.float32)
    tiny = 2.0**-126

    def cut(x: Fraction) -> float:
        if abs(x) < tiny:
            return 0.0
        e = frexp(float(x))[1]
        e += 1 if abs(x) >= Fraction(2) ** e else 0
        return float(trunc(x * Fraction(2) ** (24 - e)) * Fraction(2) ** (e - 24))

    a, b, c = ([Fraction(float(v)) if abs(v) >= tiny else Fraction(0) for v in column] for column in given.T)
    np.testing.assert_array_equal(got[:, 0], [cut(x * y + z) for x, y, z in zip(a, b, c, strict=True)])
    np.testing.assert_array_equal(got[:, 1], [cut(x + y) for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize(
    "line",
    [
        "red.global.add.noftz.v2.f16x2 [%a0], {%r0, %r0};",
        "red.global.add.v4.f32 [%a0], {%r0, %r0, %r0, %r0};",
        "madc.lo.u32 %r1, %r0, %r0, %r0;",
        "add.cc.u32 %r1, %r0, %r0;",
        "mad.lo.cc.s32 %r1, %r0, %r0, %r0;",
        f"{Mma(16, 'f16', sparse=True).opcode} {{%r1,%r2,%r3,%r4}}, {{%r0,%r0}}, {{%r0,%r0}}, {{%r0,%r0,%r0,%r0}}, %r0, 0;",
    ],
)
def test_what_nobody_uses_and_nothing_shows_is_refused(line):
    with pytest.raises(EmulatorError) as caught:
        run(line, np.zeros(4, np.int32))
    assert caught.value.check == "unknown instruction"


# ---- orders

# All threads go round until thread 0 has seen the flag: __syncthreads_or of a polled value, as stream-K's semaphores have it.
POLLED = """
AGAIN: mov.u32 %r1, 1;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra MEET;
ld.acquire.gpu.global.u32 %r1, [%a0];
MEET: setp.ne.u32 %p1, %r1, 0;
barrier.red.and.pred %p2, 0, %p1;
@!%p2 bra AGAIN;
"""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threads", [32, 96])
def test_a_flag_polled_between_barriers_is_a_deadlock_or_ends(threads, seed):
    options = Options(seed=seed)
    run(POLLED, np.ones(1, np.int32), threads, options=options)
    with pytest.raises(EmulatorError, match="every resident block waits") as caught:
        run(POLLED, np.zeros(1, np.int32), threads, options=options)
    assert caught.value.check == "deadlock"
    # block 1 sets the flag, late
    release = "mov.u32 %r5, %ctaid.x; setp.eq.u32 %p3, %r5, 0; @%p3 bra AGAIN; mov.u32 %r6, 0;\nLOOP: add.u32 %r6, %r6, 1;"
    release += "setp.lt.u32 %p3, %r6, 20000; @%p3 bra LOOP; st.release.gpu.global.u32 [%a0], 1; ret;\n"
    _, data = run(release + POLLED, np.zeros(1, np.int32), threads, 2, Options(seed=seed, resident_blocks=2, threads=1))
    assert data[0] == 1


@pytest.mark.parametrize("seed", range(8))
def test_what_waits_for_its_warp_is_counted_once(seed):
    """Lanes that leave a branch at different times meet at an mma, a shuffle and a barrier."""
    mma = Mma(16, "f16")
    zeros = "{%r6, %r6, %r6, %r6}"
    body = f"""
    mov.u32 %r6, 0; and.b32 %r1, %r0, 3;
    L: setp.eq.u32 %p0, %r1, 0; @%p0 bra D; sub.u32 %r1, %r1, 1; bra L;
    D: {mma.opcode} {{%r2, %r3, %r4, %r5}}, {zeros}, {{%r6, %r6}}, {zeros};
    shfl.sync.idx.b32 %r7, %r0, 0, 31, -1; bar.sync 0;"""
    stats, _ = run(body, np.zeros(1, np.int32), 64, options=Options(seed=seed))
    assert (stats.mma, sum(stats.mma_kinds.values())) == (2, 2)


# A block stores, one thread fences and counts; the last to arrive reads. BETWEEN: the text between store and fence.
ARRIVALS = """
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %r0; add.u32 %r3, %r3, 1;
mad.wide.u32 %a1, %r3, 4, %a0; st.global.u32 [%a1], %r3;
BETWEEN
setp.ne.u32 %p0, %r0, 0; @%p0 bra WAIT;
FENCE atom.global.add.u32 %r4, [%a0], 1; st.shared.u32 [tile], %r4;
WAIT: bar.sync 0; ld.shared.u32 %r4, [tile]; mov.u32 %r5, %nctaid.x; sub.u32 %r5, %r5, 1;
setp.ne.u32 %p1, %r4, %r5; @%p1 bra DONE;
membar.gl; xor.b32 %r1, %r1, 1; mad.lo.u32 %r3, %r1, %r2, %r0; add.u32 %r3, %r3, 1; mad.wide.u32 %a1, %r3, 4, %a0;
ld.global.u32 %r6, [%a1]; st.global.u32 [%a1], %r6;
DONE:
"""


def arrivals(between: str, fence: str, seed: int, threads: int = 64) -> None:
    body = ARRIVALS.replace("BETWEEN", between).replace("FENCE", fence)
    run(body, np.zeros(2 * threads + 1, np.int32), threads, 2, Options(seed=seed, resident_blocks=2), shared=4)


@pytest.mark.parametrize("seed", range(4))
def test_a_fence_covers_what_stands_before_it_and_before_the_last_barrier(seed):
    arrivals("bar.sync 0;", "membar.gl;", seed)  # cooperative groups' barrier of a grid
    arrivals("membar.gl; bar.sync 0;", "", seed)  # every thread for itself
    arrivals("bar.warp.sync -1;", "membar.gl;", seed, threads=32)
    arrivals("bar.sync 0;", "fence.acq_rel.gpu;", seed)
    for between, fence in (("", "membar.gl;"), ("bar.sync 0;", ""), ("bar.sync 0;", "membar.cta;")):
        with pytest.raises(EmulatorError, match="was written in this launch by block") as caught:
            arrivals(between, fence, seed)
        assert caught.value.check == "global order"


def test_a_named_barrier_orders_those_who_meet_there():
    """Warp 1's stores are behind no barrier of thread 0's: warps 0 and 2 meet without it."""
    meet = "shr.u32 %r7, %r0, 5; setp.eq.u32 %p2, %r7, 1; @%p2 bra ON; bar.sync 1, 64;\nON:"
    with pytest.raises(EmulatorError, match="was written in this launch by block"):
        arrivals(meet, "membar.gl;", 0, threads=96)


# ---- switches of checks

READS_FIRST = "ld.shared.u32 %r1, [tile]; xor.b32 %r1, %r1, %r1; mad.wide.u32 %a1, %r0, 4, %a0; st.global.u32 [%a1], %r1;"
SAME_ZERO = "mov.u32 %r1, 0; st.shared.u32 [tile], %r1;"
OWN_NUMBER = "st.shared.u32 [tile], %r0;"


def test_a_read_of_shared_memory_before_it_is_written_has_a_switch():
    with pytest.raises(EmulatorError) as caught:
        run(READS_FIRST, np.ones(64, np.int32), shared=16)
    assert caught.value.check == "uninitialised"
    assert not run(READS_FIRST, np.ones(64, np.int32), shared=16, options=Options(uninitialised_shared=False))[1].any()


@pytest.mark.parametrize("seed", range(3))
def test_a_race_that_changes_nothing_has_a_switch(seed):
    with pytest.raises(EmulatorError) as caught:
        run(SAME_ZERO, np.zeros(1, np.int32), shared=16, options=Options(seed=seed))
    assert caught.value.check == "race"
    kind = Options(seed=seed, same_value_races=False)
    run(SAME_ZERO, np.zeros(1, np.int32), shared=16, options=kind)
    with pytest.raises(EmulatorError, match="write after write"):
        run(OWN_NUMBER, np.zeros(1, np.int32), shared=16, options=kind)
    with pytest.raises(EmulatorError) as caught:  # the first to write is still a writer
        run(SAME_ZERO + "ld.shared.u32 %r2, [tile];", np.zeros(1, np.int32), shared=16, options=kind)
    assert caught.value.check == "race"


# ---- sums that are cut off


def exponent(x: Fraction, least: int) -> int:
    if x == 0:
        return -126
    e = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    return max(e if abs(x) >= Fraction(2) ** e else e - 1, least)


def tensor_core(a, b, c: float, bits: int, each: int, least: int, half: bool) -> float:
    """One element, as arXiv 2511.10909 has it: aligned to the largest exponent, cut off, added, cut off (a half: rounded)."""
    total = Fraction(float(c))
    for first in range(0, len(a), each):
        pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a[first:][:each], b[first:][:each], strict=True)]
        terms = [(total, exponent(total, -14 if half else -126))]
        terms += [(x * y, exponent(x, least) + exponent(y, least)) for x, y in pairs if x * y]
        unit = Fraction(2) ** (max(e for _, e in terms) - bits)
        total = sum(trunc(t / unit) for t, _ in terms) * unit
        if half:
            total = Fraction(float(np.float16(float(total))))
        elif total:
            place = Fraction(2) ** (exponent(total, -126) - 23)
            total = trunc(total / place) * place
    return float(total)


@pytest.mark.parametrize("bits", [24, 25])
@pytest.mark.parametrize(
    "m",
    [Mma(8, "f16"), Mma(16, "f16"), Mma(16, "bf16"), Mma(16, "f16", "f16"), Mma(8, "tf32"), Mma(32, "f16", sparse=True)],
    ids=lambda m: m.opcode,
)
def test_sums_are_cut_off_as_tensor_cores_do(m, bits):
    rng = np.random.default_rng(bits)
    scale = lambda shape: 2.0 ** rng.integers(-9, 4, shape)  # noqa: E731
    a: np.ndarray
    b: np.ndarray
    a, b, c = ((rng.standard_normal(shape) * scale(shape)).astype(np.float16) for shape in ((16, m.k), (m.k, 8), (16, 8)))
    if m.factor == "bf16":
        a, b = ((micro.bfloat16(x).astype(np.uint32) << 16).view(np.float32) for x in (a, b))
    kept = np.tile(np.arange(m.k), (16, 1))  # columns of A that are multiplied
    if m.sparse:
        a = prune(a)
        kept = np.array([np.flatnonzero(row) for row in a])
        assert kept.shape == (16, 16)
    got, name = {}, dense_name(Mma(16, m.factor) if m.sparse else m)
    for mode in (0, bits):
        out = micro.run(m.ptx, fragments(m, a, b, c), m.registers[2], Options(sum_bits=mode))
        got[mode] = np.empty((16, 8))
        got[mode][places(f"{name} C")] = out.view(np.float16 if m.sum == "f16" else np.float32).reshape(32, -1)
    whole = 16 if m.factor != "tf32" else 8
    each, half = whole // 2 if bits == 24 else whole, m.sum == "f16"
    least = -14 if m.factor == "f16" else -126
    want = [[tensor_core(a[i, kept[i]], b[kept[i], j], c[i, j], bits, each, least, half) for j in range(8)] for i in range(16)]
    np.testing.assert_array_equal(got[bits], want)
    assert half or (got[0] != got[bits]).any()


def test_only_known_sums_are_taken():
    with pytest.raises(ValueError, match="expected 0 .rounded., 24 .Ampere, Ada. or 25 .Hopper."):
        run("", np.zeros(1, np.int32), options=Options(sum_bits=23))
