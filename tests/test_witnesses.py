"""The suite can notice: where the emulator takes an instruction for something else, programs of others go wrong."""

import json
import re
import signal

import pytest

from cuda_kernels.emulator import EmulatorError
from tests.independent import cuda_programs, packages, witnesses
from tests.independent.faults import HINTS, faulty, form, forms
from tests.independent.products import Mma, wrong
from tests.independent.triton_programs import COMMITTED, all_kernels, committed, installed
from tests.independent.witnesses import (
    HINT,
    LAYOUTS,
    layout_notices,
    notices,
    our_instructions,
    program_notices,
    record,
    witnessed,
)

RECORD = record()
NO_CUDA = packages.missing(packages.CUTLASS, *packages.TOOLKIT)
BY_COMMITTED = [f for f, row in RECORD.items() if row["witness"].removeprefix("triton: ") in COMMITTED]
BY_OTHERS = [f for f, row in RECORD.items() if row["witness"].startswith("triton: ") and f not in BY_COMMITTED]
BY_OTHERS = [f for f in BY_OTHERS if RECORD[f]["witness"] != "triton: all"]
# Of those that a program in CUDA notices: some whose program the compiler has in seconds, not CUTLASS's.
QUICK = (
    "add.b16",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster",
    "wgmma.mma_async.sp.sync.m64n224k32.f32.f16.f16",
    "wgmma.mma_async.sync.m64n256k16.f32.f16.f16",
)
BY_CUDA = {f: row["witness"].removeprefix("cuda: ") for f, row in RECORD.items() if row["witness"].startswith("cuda: ")}
BY_LAYOUTS = [f for f, row in RECORD.items() if row["witness"].startswith("layouts: ")]


@pytest.mark.sample(12)
@pytest.mark.parametrize("wanted", BY_COMMITTED)
def test_a_committed_program_notices(wanted):
    assert notices(committed(RECORD[wanted]["witness"].removeprefix("triton: ")), wanted)


@pytest.mark.parametrize("wanted", BY_LAYOUTS)
def test_the_layouts_notice(wanted):
    assert layout_notices(LAYOUTS[wanted], wanted)


@pytest.mark.full
@pytest.mark.skipif(not installed(), reason="Triton is not installed: make truth")
@pytest.mark.parametrize("wanted", BY_OTHERS)
def test_a_program_of_triton_notices(wanted):
    assert notices(all_kernels()[RECORD[wanted]["witness"].removeprefix("triton: ")], wanted)


@pytest.mark.full
@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
@pytest.mark.parametrize("wanted", [pytest.param(w, marks=pytest.mark.long if w not in QUICK else ()) for w in BY_CUDA])
def test_a_cuda_program_notices(wanted):
    assert program_notices(BY_CUDA[wanted], wanted)


BEGUN = f"{cuda_programs.BEGINS}\n"


@pytest.mark.parametrize(
    "out, code, seen",
    [
        (BEGUN + "Passed", 0, False),
        (BEGUN + "Failed", 1, True),
        (BEGUN + "Traceback: StopIteration", 1, True),  # a reader that the fault has broken
        (BEGUN, -signal.SIGSEGV, True),
        ("no other meaning of it can be decoded", cuda_programs.UNMADE, ValueError),
        ("Traceback: ModuleNotFoundError", 1, RuntimeError),
    ],
)
def test_a_program_notices_by_how_it_ends(monkeypatch, out, code, seen):
    monkeypatch.setattr(cuda_programs, "run", lambda *_: (out, code))
    if isinstance(seen, bool):
        assert program_notices("wgmma", "add.b32") == seen
        return
    with pytest.raises(seen, match="has not run with a fault in add.b32"):
        program_notices("wgmma", "add.b32")


def test_only_named_instructions_and_new_ones_are_asked(monkeypatch, tmp_path):
    """The others keep their witness; the kernels that use them are found anew."""
    rows = {"add.b32": {"witness": "old", "kernels": ["k"]}, "bra": {"witness": "old", "kernels": ["k"]}}
    (tmp_path / "r.json").write_text(json.dumps({**rows, "gone": rows["bra"]}))
    monkeypatch.setattr(witnesses, "RECORD", tmp_path / "r.json")
    monkeypatch.setattr(witnesses, "why_not", lambda: "")
    monkeypatch.setattr(witnesses, "all_kernels", dict)
    monkeypatch.setattr(witnesses, "our_instructions", lambda: dict.fromkeys(("add.b32", "bra", "ret"), ["k", "l"]))
    monkeypatch.setattr(witnesses, "witness", lambda form, programs: "new")
    witnesses.main(["bra"])
    assert {f: row["witness"] for f, row in record().items()} == {"add.b32": "old", "bra": "new", "ret": "new"}
    assert all(row["kernels"] == ["k", "l"] for row in record().values())
    with pytest.raises(SystemExit, match=r"no kernel uses mul\.f32; they use add\.b32, bra, ret"):
        witnesses.main(["mul.f32"])
    witnesses.main([])
    assert {row["witness"] for row in record().values()} == {"new"}


# ---- wrong readings of mma.sp's operands; %i12 is the metadata, {%i4 .. %i7} B, of an instruction with 13 registers

SPARSE = [Mma(32, "f16", sparse=True), Mma(64, "s8", "s32", sparse=True, other="u8")]
NIBBLES = "and.b32 %t0, %i12, 0x0f0f0f0f; shl.b32 %t0, %t0, 4; shr.u32 %t1, %i12, 4; and.b32 %t1, %t1, 0x0f0f0f0f;"
BYTES = "and.b32 %t0, %i12, 0x00ff00ff; shl.b32 %t0, %t0, 8; shr.u32 %t1, %i12, 8; and.b32 %t1, %t1, 0x00ff00ff;"
PAIRS = "and.b32 %t0, %i12, 0x33333333; shl.b32 %t0, %t0, 2; shr.u32 %t1, %i12, 2; and.b32 %t1, %t1, 0x33333333;"
OTHER_LANE = "and.b32 %t1, %lane, {}; shl.b32 %t1, %t1, {}; shr.u32 %t2, %lane, {}; or.b32 %t1, %t1, %t2;"
METADATA = {
    "rows' halves exchanged": "shf.l.wrap.b32 %t0, %i12, %i12, 16;",
    "columns' lanes exchanged": "shfl.sync.bfly.b32 %t0, %i12, 1, 31, -1;",
    "nibbles of a byte exchanged": f"{NIBBLES} or.b32 %t0, %t0, %t1;",
    "bytes of a half exchanged": f"{BYTES} or.b32 %t0, %t0, %t1;",
    "a code's two indices exchanged": f"{PAIRS} or.b32 %t0, %t0, %t1;",
    "the selector's other lanes": "shfl.sync.bfly.b32 %t0, %i12, 2, 31, -1;",
    "by eight lanes": f"{OTHER_LANE.format(7, 2, 3)} shfl.sync.idx.b32 %t0, %i12, %t1, 31, -1;",
}


def noticed(m: Mma, text: str) -> bool:
    assert text != m.ptx
    try:
        return wrong(m, text=text) > 0
    except EmulatorError as e:
        return e.check == "metadata"


@pytest.mark.parametrize("m", SPARSE, ids=lambda m: m.opcode)
@pytest.mark.parametrize("fault", METADATA)
def test_wrong_metadata_is_noticed(fault, m):
    line = next(n for n in m.ptx.splitlines() if n.startswith("mma"))
    assert not noticed(m, m.ptx + "\n")
    assert noticed(m, m.ptx.replace(line, METADATA[fault] + "\n" + line.replace("%i12", "%t0")))


DENSE = [Mma(16, "f16"), Mma(16, "bf16"), Mma(16, "f16", "f16"), Mma(8, "tf32"), Mma(16, "s8", "s32"), Mma(32, "s8", "s32")]
SIGNS = [Mma(k, a, "s32", k == 64, other=b) for k in (16, 32, 64) for a in ("s8", "u8") for b in ("s8", "u8")]


@pytest.mark.parametrize("m", SIGNS, ids=lambda m: m.opcode)
def test_wrong_signs_are_noticed(m):
    for other in SIGNS:
        if other.k == m.k:
            assert (wrong(m, text=other.ptx) > 0) == (other != m)


@pytest.mark.parametrize("m", [*SPARSE, *DENSE], ids=lambda m: m.opcode)
def test_exchanged_registers_are_noticed(m):
    """Each pair of one operand; of C in C alone, because exchanged in D too it is the same product."""
    a, b, c = m.registers
    line = next(n for n in m.ptx.splitlines() if n.startswith("mma"))
    for first, count in ((0, a), (a, b), (a + b, c)):
        for i in range(first, first + count - 1):
            other = re.sub(rf"%i({i}|{i + 1})\b", lambda k, i=i: f"%i{2 * i + 1 - int(k[1])}", line)
            assert noticed(m, m.ptx.replace(line, other)), other


# ---- Hopper's instructions, before a kernel of ours uses them

ASYNCHRONOUS = ("wgmma", "mbarrier", "cp.async.bulk", "elect", "stmatrix", "fence.proxy")
HOPPER = {
    f: name for name in ("matmul_hopper", "tma_64x64x32") for f in forms(committed(name).ptx) if f.startswith(ASYNCHRONOUS)
}
HARMLESS = {"mbarrier.inval.b64"}  # a kernel that is right with it is right without


ENDLESS = {"mbarrier.try_wait.parity.b64"}  # until the limit of time


@pytest.mark.parametrize("wanted", [pytest.param(f, marks=pytest.mark.slow if f in ENDLESS else ()) for f in sorted(HOPPER)])
def test_a_kernel_for_hopper_notices(wanted):
    assert notices(committed(HOPPER[wanted]), wanted) == (wanted not in HARMLESS)


def test_which_of_hoppers_instructions_are_asked():
    assert len(HOPPER) == 15 and set(HOPPER) > HARMLESS


# ---- the record


@pytest.mark.full
def test_the_record_has_the_instructions_of_our_kernels():
    """One tile of each kind: what the record lacks has come with a new kernel (python -m tests.independent.witnesses)."""
    for used, kernels in our_instructions(some=True).items():
        assert set(kernels) <= set(RECORD[used]["kernels"])


@pytest.mark.long
def test_the_record_is_complete():
    assert our_instructions() == {f: row["kernels"] for f, row in RECORD.items()}


def test_our_instructions_have_a_witness():
    """It may only grow: what an instruction means to us alone, nobody has confirmed. Hints change no result."""
    assert len(witnessed(RECORD)) >= 191
    assert {f for f, row in RECORD.items() if row["witness"] == HINT} == HINTS
    for row in RECORD.values():
        assert row["kernels"]


def test_forms():
    text = "@%p1 ld.global.L1::evict_last.v4.u32 {%r1, %r2}, [%rd1];\nbar.sync 0;\nadd.s32 %r1, %r2, 3; // mul %r1;\nret;"
    assert forms(text) == {"ld.global.v4.b32", "barrier.sync", "add.b32", "ret"}
    assert form("mbarrier.arrive.release.cluster.shared::cluster.b64") == form("mbarrier.arrive.shared::cluster.b64")
    assert form("mbarrier.arrive.shared::cluster.b64") != form("mbarrier.arrive.shared::cta.b64") == "mbarrier.arrive.b64"
    assert form("barrier.cluster.arrive.release.aligned") == form("barrier.cluster.arrive.aligned")
    assert form("barrier.cluster.arrive.relaxed.aligned") != form("barrier.cluster.arrive.aligned")
    assert form("cp.async.bulk.tensor.2d.global.tile.mbarrier") == form("cp.async.bulk.tensor.2d.global.mbarrier")
    assert form("stmatrix.sync.aligned.x2.trans.m8n8.shared.b16") == form("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16")
    assert (form("setp.lt.s32"), form("cvt.u16.u32"), form("mul.rn.f32")) == ("setp.lt.s32", "cvt.u16.u32", "mul.f32")
    with pytest.raises(ValueError, match="there is no mul"):
        faulty(text, "mul.f32")
