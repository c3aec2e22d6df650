"""Machine code read back: control words, registers, loops. Compiled kernels come from the cache."""

import pytest

from benchmarks.simulator import sass
from benchmarks.simulator.sass import Loop, NoMainLoop, ToolMissing, program
from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import ARCHITECTURES

TILE = {"ACT": 3, "RES": 1, "IN_LINEAR": 0, "OUT_LINEAR": 0, "SPLIT": 0}
DENSE = TILE | {"BM": 64, "BN": 64, "BK": 64, "WARPS_M": 2, "WARPS_N": 2, "STAGES": 4}


def compiled(kernel: str, sm: str):
    return compile_kernel(kernel, DENSE, sm)


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["conv_dense", "conv_sparse24"])
def test_reuse_bits_are_those_of_the_text(kernel, sm):
    """The reuse bits stand at the end of the control word: were one of its fields elsewhere, they would not agree."""
    code = program(compiled(kernel, sm).cubin)
    products = [i for i in code.instructions if i.mma]
    assert products and any(i.reuse for i in code.instructions)
    for i in products:  # operands in their order; the metadata of sparse products has a bit of its own, elsewhere
        assert [bool(i.reuse >> n & 1) for n in range(3)] == [".reuse" in operand for operand in i.operands[1:4]], i
    for i in code.instructions:
        if not i.mma:
            assert i.reuse.bit_count() == sum(operand.count(".reuse") for operand in i.operands), i


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_every_scoreboard_that_is_waited_for_was_set(sm):
    code = program(compiled("conv_dense", sm).cubin)
    set_by = {b for i in code.instructions for b in (i.write_barrier, i.read_barrier) if b is not None}
    waited = {b for i in code.instructions for b in range(6) if i.wait_mask >> b & 1}
    assert waited and waited <= set_by <= set(range(6))
    loads = [i for i in code.instructions if i.opcode.startswith(("LDG.", "S2R"))]
    assert loads and sum(i.write_barrier is not None for i in loads) > 0.6 * len(loads)
    assert all(i.write_barrier is None for i in code.instructions if i.opcode.startswith(("IADD3", "LOP3", "IMAD")))


@pytest.mark.sample(5)
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["conv_dense", "conv_sparse24"])
def test_the_main_loop_is_one_stage(kernel, sm):
    """64x64x64 by four warps: each has a 32x32 tile, 8 products a k-step; 2:4 products go over 32 of K, dense over 16."""
    found = compiled(kernel, sm)
    code = program(found.cubin, kernel)
    loop = code.main_loop
    once = code.iteration(loop)
    assert sum(i.mma for i in once) == 8 * (2 if kernel == "conv_sparse24" else 4)
    assert sum(i.opcode.startswith("BAR.SYNC") for i in once) == 1
    assert any(i.opcode.startswith("LDGSTS") for i in once) and any(i.opcode.startswith("LDSM") for i in once)
    assert once[-1].target == once[0].address and len({i.address for i in once}) == len(once)
    assert found.regs - 1 <= code.registers <= found.regs


def text(*rows: str) -> str:
    """nvdisasm's layout of instructions without control words of note."""
    lines, n = ["\t.target\tsm_80", ".text.f:"], 0
    for row in rows:
        if row.endswith(":"):
            lines.append(row)
        else:
            lines += [f"        /*{16 * n:04x}*/    {row} ;    /* 0x{n:016x} */", f"     /* 0x{0x000FE20000000000:016x} */"]
            n += 1
    return "\n".join(lines)


# fmt: off
BRANCHES = (
    ".L_top:", "BAR.SYNC 0x0", "@P0 BRA `(.L_products)",  # over a copy: not taken
    "LDGSTS.E.128 [R0], [R2.64]", "@!P1 BRA `(.L_same_tap)",  # over the step to the next tap: taken
    ".L_tap:", "IADD3 R4, R4, 0x1, RZ", "@P2 BRA `(.L_tap)",  # back, inside the loop: not taken
    ".L_same_tap:", "BRA `(.L_products)", "IADD3 R5, R5, 0x1, RZ",  # unconditional: taken
    ".L_products:", "HMMA.16816.F32 R8, R12, R16, R8", "@P3 BRA `(.L_out)", "@!P4 BRA `(.L_top)",  # out of the loop: not taken
    ".L_out:", "EXIT",
)
# fmt: on


def test_branches_take_their_commonest_path(monkeypatch):
    monkeypatch.setattr(sass, "disassembly", lambda cubin: text(*BRANCHES))
    f = program(b"branches")
    assert f.loops == (Loop(0, 10), Loop(4, 5)) and f.main_loop == Loop(0, 10)
    assert [i.address // 16 for i in f.iteration(f.main_loop)] == [0, 1, 2, 3, 6, 8, 9, 10]
    assert [i.address // 16 for i in f.iteration(f.main_loop, {3 * 16: False})] == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert [i.address // 16 for i in f.iteration(f.main_loop, {16: True})] == [0, 1, 8, 9, 10]
    with pytest.raises(ValueError, match="f: a branch back, at 0x50, cannot be taken within one iteration"):
        f.iteration(f.main_loop, {3 * 16: False, 5 * 16: True})
    before, behind = f.around(f.main_loop)
    assert before == () and [i.opcode for i in behind] == ["EXIT"]


@pytest.mark.parametrize(
    "row, reads, writes",
    [
        ("HMMA.16816.F32 R4, R8.reuse, R2, R4", "R8 R9 R10 R11 R2 R3 R4 R5 R6 R7", "R4 R5 R6 R7"),
        ("HMMA.16816.F16 R4, R8, R2, RZ", "R8 R9 R10 R11 R2 R3", "R4 R5"),
        ("HMMA.1688.F32 R4, R8, R2, R12", "R8 R9 R2 R12 R13 R14 R15", "R4 R5 R6 R7"),
        ("IMMA.16832.S8.U8 R4, R8.reuse.ROW, R2.COL, R4", "R8 R9 R10 R11 R2 R3 R4 R5 R6 R7", "R4 R5 R6 R7"),
        ("IMMA.SP.16864.S8.S8 R4, R8.ROW, R12.COL, R4, R2, 0x0", "R8 R9 R10 R11 R12 R13 R14 R15 R4 R5 R6 R7 R2", "R4 R5 R6 R7"),
        ("HMMA.SP.16832.F32 R4, R8, R12, R4, R2.reuse, 0x0", "R8 R9 R10 R11 R12 R13 R14 R15 R4 R5 R6 R7 R2", "R4 R5 R6 R7"),
        ("LDSM.16.M88.4 R172, [R172+0x2000]", "R172", "R172 R173 R174 R175"),
        ("LDSM.16.MT88.2 R0, [R3+UR4]", "R3 UR4", "R0 R1"),
        ("LDS.128 R8, [UR4+0x10]", "UR4", "R8 R9 R10 R11"),
        ("@P0 LDG.E.64 R8, desc[UR6][R2.64+0x8]", "P0 UR6 R2 R3", "R8 R9"),
        ("STS.128 [R4], R8", "R4 R8 R9 R10 R11", ""),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R29+0x2000], [R24.64], !P2", "R29 R24 R25 P2", ""),
        ("IADD3 R20, P5, P6, R212, R33.reuse, R180", "R212 R33 R180", "R20 P5 P6"),
        ("IADD3.X R21, R182, R30, R3, P5, P6", "R182 R30 R3 P5 P6", "R21"),
        ("ISETP.GE.AND P0, PT, R20, c[0x0][0x1c8], PT", "R20", "P0"),
        ("@!PT LDS RZ, [RZ]", "", ""),
        ("IMAD.WIDE R20, R195, c[0x0][0x1c8], R2", "R195 R2 R3", "R20 R21"),
        ("UISETP.NE.AND UP0, UPT, UR4, 0x3, UPT", "UR4", "UP0"),
        ("CS2R R4, SRZ", "", "R4 R5"),
        ("MOV R3, c[0x0][R2+0x10]", "R2", "R3"),
        (
            "HGMMA.64x8x16.F32 R8, R4, gdesc[UR20], R8, UP0, gsb0",
            "R4 R5 R6 R7 UR20 UR21 UR22 UR23 R8 R9 R10 R11 UP0",
            "R8 R9 R10 R11",
        ),
        ("HGMMA.64x8x16.F16 R8, gdesc[UR4], RZ, !UPT", "UR4 UR5 UR6 UR7", "R8 R9"),
        (
            "HGMMA.SP.64x8x32.F32 R8, gdesc[UR4], R8, R88, 0x0, gsb0",
            "UR4 UR5 UR6 UR7 R8 R9 R10 R11 R88",
            "R8 R9 R10 R11",
        ),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R5+URZ], R4", "R5 R4", "P1"),
        ("SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R4+URZ], RZ", "R4", ""),
        ("UTMALDG.4D.IM2COL [UR16], [UR4], UR6", "UR16 UR4 UR6", ""),
    ],
)
def test_registers(monkeypatch, row, reads, writes):
    monkeypatch.setattr(sass, "disassembly", lambda cubin: text(row))
    (i,) = program(row.encode()).instructions
    assert (" ".join(i.reads), " ".join(i.writes)) == (reads, writes)
    assert str(i) == row and (i.stall, i.yields, i.write_barrier, i.read_barrier, i.wait_mask) == (1, False, None, None, 0)


def test_loops_by_backward_branches(monkeypatch):
    rows = (
        ".L_a:",
        "NOP",
        ".L_b:",
        "HMMA.16816.F32 R4, R8, R2, R4",
        ".L_c:",
        "IADD3 R0, R0, 0x1, RZ",
        "@P1 BRA `(.L_c)",
        "@P0 BRA `(.L_b)",
        "@P2 BRA `(.L_a)",
        "EXIT",
        ".L_d:",
        "BRA `(.L_d)",
    )
    monkeypatch.setattr(sass, "disassembly", lambda cubin: text(*rows))
    code = program(b"loops")
    assert code.loops == (Loop(0, 5), Loop(1, 4), Loop(2, 3))
    assert code.main_loop == Loop(1, 4)
    assert [i.opcode for i in code.iteration(code.main_loop)] == ["HMMA.16816.F32", "IADD3", "BRA", "BRA"]


# fmt: off
SPINS = (
    ".L_top:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R5+URZ], R4", "@!P1 BRA `(.L_again)",
    ".L_full:", "HGMMA.64x8x16.F32 R8, gdesc[UR4], R8, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1", "@P2 BRA `(.L_top)",
    "HGMMA.64x8x16.F32 R8, gdesc[UR4], R8, gsb0", "HGMMA.64x8x16.F32 R8, gdesc[UR4], R8, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0", "EXIT",
    ".L_again:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R5+URZ], R4", "@!P1 BRA `(.L_again)", "BRA `(.L_full)",
)
# fmt: on


def test_a_wait_that_tries_again_elsewhere_is_no_loop(monkeypatch):
    """From the loop of tries control comes back into the middle of the main loop, which no loop begins there."""
    monkeypatch.setattr(sass, "disassembly", lambda cubin: text(*SPINS))
    f = program(b"spins")
    assert f.loops == (Loop(0, 4), Loop(9, 10)) and f.main_loop == Loop(0, 4)
    assert [i.pending for i in f.instructions if i.pending is not None] == [1, 0]
    assert [i.address // 16 for i in f.iteration(f.main_loop)] == [0, 1, 2, 3, 4]


def test_what_cannot_be_read_is_said(monkeypatch):
    with pytest.raises(ValueError, match="nvdisasm does not read these 4 bytes: .*; expected a cubin"):
        program(b"1234")
    cubin = compiled("conv_dense", "sm_80").cubin
    with pytest.raises(ValueError, match="no kernel 'gemm' in the cubin: expected one of conv_dense$"):
        program(cubin, "gemm")
    for row, why in (("NOP", "it has no tensor core"), ("HMMA.1688.F32 R4, R8, R2, R4", "its products are unro")):
        with monkeypatch.context() as m, pytest.raises(NoMainLoop, match=f"no loop multiplies on tensor cores .{why}"):
            m.setattr(sass, "disassembly", lambda cubin, row=row: text(row))
            _ = program(row.encode()).main_loop
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolMissing, match="pip install 'nvidia-cuda-nvdisasm"):
        sass.nvdisasm()
