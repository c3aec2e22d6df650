"""The simulated SM on loops whose clocks are worked out by hand, on a published table of issue clocks, and its bounds."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.machine import (
    CENTRE,
    LOADED_SWEEP,
    SHIFTED,
    SOURCES,
    SWEEP,
    SWEEP_SOURCES,
    SWEPT,
    Machine,
    Residency,
    device_of,
    interval,
    machine,
    residency,
)
from benchmarks.simulator.sass import Instruction, Program, program
from benchmarks.simulator.simulate import steady, steady_of, tile_clocks
from benchmarks.simulator.sm import Course, Sm, begins
from benchmarks.simulator.steps import GLOBAL, LOAD, TENSOR_PIPE, steps, usual_wavefronts
from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import ARCHITECTURES, NAMED, named

A100 = machine(named("a100"))
PLAIN = {"ACT": 3, "RES": 1, "IN_LINEAR": 0, "OUT_LINEAR": 0, "SPLIT": 0}
SMALL = PLAIN | {"BM": 64, "BN": 64, "BK": 64, "WARPS_M": 2, "WARPS_N": 2, "STAGES": 4}
ONE_EACH, TWO_EACH = Residency(4, 1), Residency(8, 1)  # warps of a sub-core


def code(*rows, stalls=None, **control) -> tuple[Instruction, ...]:
    """Instructions from "OPCODE A, B"; `stalls`: of each row; else each word of control by its row's number."""
    found = []
    for n, row in enumerate(rows):
        words = {name: of[n] for name, of in control.items() if n in of}
        guard, _, rest = row.partition(" ") if row.startswith("@") else ("", "", row)
        opcode, _, operands = rest.partition(" ")
        found.append(
            Instruction(
                16 * n,
                opcode,
                tuple(operands.split(", ")) if operands else (),
                guard.lstrip("@"),
                None,
                (stalls or {}).get(n, 1),
                False,
                words.get("write"),
                words.get("read"),
                words.get("wait", 0),
                0,
            )
        )
    return tuple(found)


def products(n: int, first: int = 32) -> list[str]:
    """Independent ones."""
    return [f"HMMA.16816.F32 R{first + 4 * k}, R0, R4, R{first + 4 * k}" for k in range(n)]


@pytest.mark.parametrize(
    "device, each",
    [
        ("a100", 8),
        ("a10", 16),
        ("l40s", 16),
        ("rtx3090", 32),
        ("rtx4090", 32),
        ("h100", 6),
        ("b200", 8),
        ("rtx_pro_6000", 16),
        ("rtx5090", 32),
    ],
)
def test_independent_products_fill_the_pipe(device, each):
    found = steady_of(code(*products(8)), ONE_EACH, machine(named(device)))
    assert (found.clocks_per_stage, found.mma_share) == (8 * each, 1.0)
    two = steady_of(code(*products(8)), TWO_EACH, machine(named(device)))
    assert (two.clocks_per_stage, two.mma_share) == (16 * each, 1.0)


def test_dependent_products_take_their_latency():
    """24.7 clocks on an A100; a second warp of each sub-core has room in them."""
    chain = code("HMMA.16816.F32 R8, R0, R4, R8")
    assert steady_of(chain, ONE_EACH, A100).clocks_per_stage == 25
    both = steady_of(chain, TWO_EACH, A100)
    assert both.clocks_per_stage == 25 and both.mma_share == pytest.approx(2 * 8 / 25)
    assert steady_of(chain, ONE_EACH, A100).waited[0] == {"wait": 24.0}, "Nsight Compute's word for a fixed latency"


@pytest.mark.parametrize("r, independent, clocks", [(ONE_EACH, 1, 24.7), (ONE_EACH, 3, 27.4), (TWO_EACH, 2, 32.6)])
def test_products_take_what_was_measured_on_an_a100(r, independent, clocks):
    """arXiv 2206.02874, table of mma on the A100, m16n8k16: latency of so many independent products."""
    assert steady_of(code(*products(independent)), r, A100).clocks_per_stage == pytest.approx(clocks, rel=0.10)


def test_sparse_products_go_over_twice_the_k():
    sparse = code("HMMA.SP.16832.F32 R8, R0, R4, R8, R20, 0x0")[0]
    dense = code("HMMA.16816.F32 R8, R0, R4, R8")[0]
    devices = [machine(named(name)) for name in ("a100", "rtx4090", "h100")]
    assert [(interval(m, dense), interval(m, sparse)) for m in devices] == [(8, 8), (32, 32), (6, 9)]
    with pytest.raises(ValueError, match=r"IMMA.16816.S8.S8 at 0x0: no published rate is in the table"):
        interval(A100, code("IMMA.16816.S8.S8 R8, R0, R4, R8")[0])
    with pytest.raises(ValueError, match=r"HGMMA.64x64x8.F32.TF32 at 0x0: no published rate is in the table"):
        interval(A100, code("HGMMA.64x64x8.F32.TF32 R24, gdesc[UR4], R24")[0])


def of_bytes(n: int, first: int = 32, sparse: bool = False) -> list[str]:
    """Independent products of whole numbers of 8 bits, of either sign."""
    if sparse:
        return [f"IMMA.SP.16864.S8.U8 R{first + 4 * k}, R0, R4, R{first + 4 * k}, R20, 0x0" for k in range(n)]
    return [f"IMMA.16832.S8.S8 R{first + 4 * k}, R0, R4, R{first + 4 * k}" for k in range(n)]


@pytest.mark.parametrize(
    "device, dense, sparse",
    [("a100", 8, 8), ("a10", 16, 16), ("rtx3090", 16, 16), ("l4", 16, 16), ("rtx4090", 16, 16), ("orin_agx64", 8, 8)]
    + [("h100", 6, 9), ("rtx5090", 16, 16)],
)
def test_geforce_cards_multiply_bytes_as_workstation_cards(device, dense, sparse):
    """Four times as fast as FP16 with FP32 sums, others twice; 2:4 goes over twice the K in the same clocks."""
    m = machine(named(device))
    assert interval(m, code(*of_bytes(1))[0]) == dense and interval(m, code(*of_bytes(1, sparse=True))[0]) == sparse
    assert steady_of(code(*of_bytes(8)), TWO_EACH, m).clocks_per_stage == 16 * dense


@pytest.mark.parametrize(
    "sparse, r, independent, clocks, rate",
    [
        (False, ONE_EACH, 1, 24.7, None),
        (False, ONE_EACH, 3, 27.1, 1812.4),
        (False, TWO_EACH, 2, 32.9, 1986.5),
        (True, ONE_EACH, 1, 24.7, None),
        (True, ONE_EACH, 3, None, 3544.7),
        (True, TWO_EACH, 2, None, 3961.5),
    ],
)
def test_products_of_bytes_take_what_was_measured_on_an_a100(sparse, r, independent, clocks, rate):
    """arXiv 2206.02874, tables 3 and 6: latency of m16n8k32 and of sparse m16n8k64, products per clock and SM."""
    found = steady_of(code(*of_bytes(independent, sparse=sparse)), r, A100).clocks_per_stage
    assert clocks is None or found == pytest.approx(clocks, rel=0.10)
    products = r.warps * independent * 16 * 8 * (64 if sparse else 32)
    assert rate is None or products / found == pytest.approx(rate, rel=0.11)


def test_a_loop_of_bytes_by_hand():
    """Four loads of four wavefronts and six products a warp, eight warps: the port takes 8 * 4 * 4 = 128 clocks; the tensor
    core of a sub-core 2 * 6 * 8 = 96 on an A100, twice that on an RTX 4090. The larger one is the loop's."""
    loop = code(*(f"LDSM.16.M88.4 R{100 + 4 * n}, [R99]" for n in range(4)), *of_bytes(6))
    fast, slow = (steady_of(loop, TWO_EACH, machine(named(name)), stages=STAGES, warm=FULL) for name in ("a100", "rtx4090"))
    assert fast.clocks_per_stage == pytest.approx(128, rel=0.02) and fast.mma_share == pytest.approx(0.75, abs=0.02)
    assert slow.clocks_per_stage == pytest.approx(192, rel=0.02) and slow.mma_share == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("width, wavefronts", [("32", 1), ("64", 2), ("128", 4)])
def test_loads_are_bound_by_the_port(width, wavefronts):
    """128 bytes a clock; a load of 32 bits takes the two clocks that any request does."""
    loads = code(*(f"LDS{'' if width == '32' else '.' + width} R{4 * n}, [R100]" for n in range(16)))
    found = steady_of(loads, TWO_EACH, A100)
    assert found.clocks_per_stage == pytest.approx(16 * 8 * max(2, wavefronts), rel=0.01)
    assert found.port_share == pytest.approx(1, abs=0.01) and found.mma_share == 0


def test_loads_issue_when_they_did_on_an_ampere_gpu(monkeypatch):
    """arXiv 2503.20481, table 1: the clock, beside the first, at which the i-th load in a row issues, by active sub-cores."""
    table = {1: [0, 1, 2, 3, 4, 11, 15, 19, 23], 4: [0, 1, 2, 3, 4, 17, 25, 33, 41]}  # of four, that of the last
    path = steps(code(*(f"LDS R{n}, [R100]" for n in range(9))), A100, ())
    for active, expected in table.items():
        sm = Sm(Course(path, 0, len(path) - 1), Residency(active, 1), A100, CENTRE)
        issued: dict[int, list[int]] = {}
        one = sm.issue

        def issue(warp, core, step, clock, one=one, issued=issued):
            issued.setdefault(warp.number, []).append(clock)
            return one(warp, core, step, clock)

        monkeypatch.setattr(sm, "issue", issue)
        sm.run(active)
        last = [max(clocks[n] for clocks in issued.values() if len(clocks) > n) for n in range(len(path))]
        assert last == expected


@pytest.mark.parametrize("row, latency", [("LDS R8, [R0]", 24), ("LDS.64 R8, [R0]", 24), ("LDS.128 R8, [R0]", 26)])
def test_a_load_takes_its_latency(row, latency):
    """arXiv 2503.20481, table 2: until what reads its result issues."""
    found = steady_of(code(row, "IADD3 R0, R8, R8, RZ", write={0: 1}, wait={1: 2}), Residency(1, 1), A100)
    assert found.clocks_per_stage == latency + 1
    assert found.waited[1] == {"short scoreboard": latency - 1}


@pytest.mark.parametrize(
    "opcode, wavefronts",
    [
        ("LDS", 1),
        ("LDS.64", 2),
        ("LDS.U.128", 4),
        ("LDSM.16.M88", 1),
        ("LDSM.16.MT88.2", 2),
        ("LDSM.16.M88.4", 4),
        ("STS.128", 4),
        ("LDGSTS.E.BYPASS.LTC128B.128", 4),
        ("LDGSTS.E.LTC128B.64", 2),
        ("LDGSTS.E", 1),
        ("LDG.E.128", 4),
    ],
)
def test_wavefronts_without_conflicts(opcode, wavefronts):
    assert usual_wavefronts(code(f"{opcode} R0, [R1]")[0]) == wavefronts


@pytest.mark.parametrize("barrier", [10, 30])
def test_a_barrier_waits_for_the_last_warp(barrier):
    sweep = replace(CENTRE, barrier=barrier)
    alone = code("BAR.SYNC.DEFER_BLOCKING 0x0")
    assert steady_of(alone, Residency(2, 1), A100, sweep).clocks_per_stage == barrier
    # Five warps: two share a sub-core, which issues one instruction a clock.
    assert steady_of(alone, Residency(5, 1), A100, sweep).clocks_per_stage == barrier + 1
    # Each warp has 8 products: the last of 16 issues at clock 120, its warp's barrier at 121, where the other warp waits.
    found = steady_of(code(*products(8), "BAR.SYNC 0x0"), TWO_EACH, A100, sweep)
    assert found.clocks_per_stage == 121 + barrier and found.waited[0]["barrier"] >= barrier - 2
    blocks = steady_of(code(*products(8), "BAR.SYNC 0x0"), Residency(4, 2), A100, sweep)
    assert blocks.mma_share > found.mma_share, "one block's products hide the other's barrier"


def test_what_never_executes_takes_an_issue_slot():
    nothing = steady_of(code(*["@!PT LDS RZ, [RZ]"] * 8), ONE_EACH, A100)
    assert (nothing.clocks_per_stage, nothing.port_share, nothing.issue_share) == (8, 0, 1)


def test_stalls_and_scoreboards():
    assert steady_of(code("NOP", "NOP", stalls={0: 5, 1: 3}), ONE_EACH, A100).clocks_per_stage == 8
    s2r = code("S2R R0, SR_TID.X", "IADD3 R1, R0, R0, RZ", write={0: 3}, wait={1: 8})
    assert steady_of(s2r, ONE_EACH, A100).clocks_per_stage == A100.other_latency + 1
    listed = code("LDS R8, [R0]", "S2R R1, SR_TID.X", "DEPBAR.LE SB0, 0x1, {2,1}", write={0: 0, 1: 2}, stalls={1: 2})
    found = steady_of(listed, Residency(1, 1), A100)
    latency = A100.other_latency
    assert found.clocks_per_stage == 1 + latency + 1 and found.waited[2] == {"short scoreboard": latency - 2}
    # Two groups of copies, of which the first must have landed: as much of a copy's latency as one iteration does not hide.
    ring = code("LDGSTS.E.128 [R0], [R2.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x1", "NOP", write={1: 0}, stalls={2: 4})
    found = steady_of(ring, Residency(1, 1), A100)
    latency = A100.to_port + A100.l2_latency + 4  # to the port, from L2, the write
    assert found.clocks_per_stage == pytest.approx(latency / 2, abs=8)
    assert "long scoreboard" in found.waited[2] or "long scoreboard" in found.waited[3]


def test_conflicts_never_make_a_loop_faster():
    rows = [row for k in range(8) for row in (f"LDSM.16.M88.4 R{4 * k}, [R100]", *products(4, 40))]
    loop = code(*rows, "BAR.SYNC 0x0", stalls={n: 1 for n in range(len(rows))})
    loads = [i.address for i in loop if i.opcode.startswith("LDSM")]
    clocks = [steady_of(loop, TWO_EACH, A100, CENTRE, dict.fromkeys(loads, 4 * ways)).clocks_per_stage for ways in (1, 2, 4, 8)]
    assert clocks == sorted(clocks) and clocks[-1] == pytest.approx(8 * 8 * 32, rel=0.1)


# fmt: off
ROWS = (
    "HMMA.16816.F32 R32, R0, R4, R32", "HMMA.16816.F32 R36, R0, R4, R36", "HMMA.SP.16832.F32 R40, R0, R4, R40, R60, 0x0",
    "LDSM.16.M88.4 R44, [R100]", "LDS.128 R48, [R100]", "LDS R52, [R100]", "STS.128 [R100], R48", "LDGSTS.E.128 [R0], [R2.64]",
    "LDGDEPBAR", "DEPBAR.LE SB5, 0x1", "BAR.SYNC 0x0", "IADD3 R8, R9, R10, RZ", "IMAD R8, R9, R10, RZ", "@!PT LDS RZ, [RZ]",
    "MUFU.RCP R9, R9", "UIADD3 UR4, UR4, 0x1, URZ", "LDG.E.128 R56, [R2.64]",
)
# fmt: on


STAGES = 40
FULL = 8 * STAGES // 2  # iterations in which a queue of 8 fills up, where it grows by more than the slack of 2 / STAGES each


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_loop_is_faster_than_its_pipes_port_and_issue(data):
    rows = data.draw(st.lists(st.sampled_from(ROWS), min_size=1, max_size=24))
    draw = {n: data.draw(st.integers(0, 63)) for n in range(len(rows))}
    boards = {n: x % 6 for n, x in draw.items() if rows[n].startswith(("LD", "MUFU")) and (x < 40 or rows[n] == "LDGDEPBAR")}
    waits = {n: 1 << x % 6 for n, x in draw.items()}
    loop = code(*rows, stalls={n: 1 + x % 11 for n, x in draw.items()}, write=boards, wait=waits)
    r = Residency(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3)))
    m = machine(NAMED[data.draw(st.sampled_from(sorted(NAMED)))])
    found = steady_of(loop, r, m, data.draw(st.sampled_from(SWEEP)), stages=STAGES, warm=FULL)
    warps, path = r.warps * r.blocks, steps(loop, m, ())
    # Of all warps of the SM; between two of many iterations' beginnings, at each of which some warp is in the middle of one.
    slack = 1 + 2 / STAGES
    assert 0 <= found.mma_share <= slack and found.issue_share <= slack
    clocks = slack * found.clocks_per_stage
    assert clocks * 4 >= warps * max(len(loop), sum(s.interval for s in path if s.pipe == TENSOR_PIPE))
    assert clocks >= warps * sum(max(2, s.wavefronts if s.kind == LOAD else 0) for s in path if LOAD <= s.kind <= GLOBAL)
    assert clocks >= sum(s.stall for s in path) * min(1, warps / (4 * -(-warps // 4)))
    assert all(sum(w.values()) >= 0 for w in found.waited) and len(found.issued_at) == len(loop)


@pytest.mark.parametrize("stages", [1, 2, 40])
def test_a_tile_has_what_is_around_its_loop_once(stages):
    """Before: three instructions. Four products of 8 clocks an iteration, whose branch fits between them. Behind: what reads
    the last product, 25 clocks after that, and the end."""
    rows = (*["NOP"] * 3, *products(4), "@P0 BRA `(.L_x_0)", "FADD R0, R44, R45", "EXIT")
    flat = list(code(*rows))
    flat[7] = replace(flat[7], target=flat[3].address)
    whole = Program("f", "sm_80", tuple(flat))
    assert [len(part) for part in whole.around(whole.main_loop)] == [3, 2]
    last = 3 + 32 * stages - 8  # the clock at which the last product issues
    assert tile_clocks(whole, stages, ONE_EACH, A100) == last + 25 + 2
    with pytest.raises(ValueError, match="0 stages: expected one or more"):
        tile_clocks(whole, 0, ONE_EACH, A100)


def test_a_tile_takes_its_steady_state_for_each_further_stage():
    found = compile_kernel("conv_dense", SMALL, "sm_80")
    whole, r = program(found.cubin), Residency(4, 2)
    one, two = (tile_clocks(whole, n, r, A100) for n in (20, 60))
    assert (two - one) / 40 == pytest.approx(steady(whole, r, A100).clocks_per_stage, rel=0.05)
    assert one > 20 * steady(whole, r, A100).clocks_per_stage


def test_a_point_of_the_sweep_has_its_own_l2_latency():
    """A load, and a product that waits for it: an iteration takes as much longer as L2 does."""
    loop = code("LDG.E.128 R56, [R2.64]", *products(1), write={0: 0}, wait={1: 1})
    idle, same, loaded = (steady_of(loop, ONE_EACH, A100, replace(CENTRE, l2_latency=n)) for n in (0, 261, 600))
    assert idle == same and loaded.clocks_per_stage - idle.clocks_per_stage == pytest.approx(600 - 261, abs=1)


def test_starts_are_shifted_alike_each_time_and_only_where_asked():
    """The same shift is the same simulation, whoever runs it."""
    starts = {shift: begins(Residency(4, 2), 512, shift) for shift in (0, 1, 2)}
    assert starts[0] == [0] * 4 + [256] * 4 and starts[1] == begins(Residency(4, 2), 512, 1) != starts[2]
    assert all(0 <= start < 2 * 512 for start in starts[1])
    assert [{replace(p, shift=0) for p in of} for of in SHIFTED] == [{replace(CENTRE, l2_latency=n)} for n in (0, 400, 600)]
    assert all(len({p.shift for p in of} - {0}) == 8 for of in SHIFTED)


def test_a_sub_core_without_room_is_said():
    with pytest.raises(ValueError, match="wait for each other"):
        steady_of(code("LDS R0, [R1]"), ONE_EACH, A100, replace(CENTRE, queue=0))


def test_every_figure_has_its_source():
    assert {f.name for f in fields(Machine)} == set(SOURCES) and set(SWEPT) == set(SWEEP_SOURCES)
    assert all(len(text) > 10 for text in (*SOURCES.values(), *SWEEP_SOURCES.values()))
    assert len(SWEEP) == len(set(SWEEP)) == math.prod(len(values) for values in SWEPT.values())
    for sm in {device.sm for device in NAMED.values()} & {*ARCHITECTURES}:
        device = device_of(sm)
        assert device.sm == sm and machine(device).products_per_clk * 4 == pytest.approx(
            device.mma_fma_per_clk * device.mma_sync_share
        )
    assert len(set(LOADED_SWEEP)) == 2 * len(SWEEP) and {p.l2_latency for p in LOADED_SWEEP} == {400, 600}
    assert repr(CENTRE) == repr(replace(CENTRE, l2_latency=600, shift=1)), "hashes of shares.json have neither"
    with pytest.raises(ValueError, match="architecture sm_75: expected one of sm_100a, sm_120, sm_80"):
        device_of("sm_75")


def test_what_fits_an_sm():
    a100 = named("a100")
    assert residency(a100, 256, 217, 72 * 1024) == Residency(8, 1, "registers")
    assert residency(a100, 256, 128, 72 * 1024) == Residency(8, 2, "registers")
    assert residency(a100, 256, 64, 60 * 1024) == Residency(8, 2, "shared memory")
    assert residency(a100, 1024, 32, 1024) == Residency(32, 2, "registers")
    assert residency(a100, 32, 16, 0).blocks == 32
    with pytest.raises(ValueError, match="shared memory: no block of 256 threads of 64 registers, 200000 bytes fits A100"):
        residency(a100, 256, 64, 200_000)
