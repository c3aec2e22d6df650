"""The table of simulated shares: what it holds, how it is read, how it is written, and what estimates make of it."""

import json
import math
from dataclasses import replace

import pytest

from benchmarks import cycle_shares, cycles
from benchmarks.cycle_shares import MACHINES, Loop, loops
from benchmarks.simulator.machine import Residency, machine
from benchmarks.simulator.sass import Instruction
from cuda_kernels import shares
from cuda_kernels.compile import nvrtc_version as nvrtc
from cuda_kernels.device import named, relative, reported
from tactics import main_loops
from tactics.families import conv_bytes, conv_gemm
from tactics.predict import OURS, predict
from tactics.problems.problem import ConvProblem
from tactics.problems.prologue import Prologue
from tactics.roofline import tensor_peak
from tactics.tactic import Tactic, Tile
from tactics.tiles import DENSE_TILES
from tests.cuda_kernels.test_device import attributes, props

A100, TILE = named("a100"), "64x64x64_w2x2_s4"
SMALL = Loop("conv_dense", next(t for t in DENSE_TILES if str(t) == TILE), "vectors")


@pytest.fixture
def given(monkeypatch):
    """A table in place of the committed one."""
    tables: dict = {}

    def clear():
        for cached in (shares.rows, shares.share):
            cached.cache_clear()

    monkeypatch.setattr(shares, "table", lambda: tables)
    clear()
    yield tables
    clear()


def test_the_newest_compiler_s_rows_serve_whatever_the_sources_are(given):
    old = {TILE: {"vectors": {"sm_80/1024": ["", [0.1]]}}}
    given["9.1.0"] = {"conv_dense": {"source": "", "shares": old}}
    given["13.0.88"] = {
        "conv_dense": {
            "source": "another",
            "shares": {
                TILE: {
                    "vectors": {"sm_80/1024": ["", [0.5, 0.6], [0.4, 0.7]], "sm_86/512": ["", [0.8]], "sm_86/256": ["", [0.9]]},
                    "linear": {"sm_80/1024": ["", [0.2]]},
                }
            },
        }
    }

    def share(device, blocks=1, loop="vectors", tile=TILE):
        return shares.share("conv_dense", tile, loop, named(device) if isinstance(device, str) else device, blocks)

    assert [share("a100", blocks) for blocks in (1, 2, 3)] == [0.5, 0.6, 0.6], "no more than fit when it was simulated"
    assert share("a100", loop="linear") == 0.2
    assert (share("a40"), share("rtx3090")) == (0.8, 0.9), "a GeForce card's rate is another machine"
    orin = reported(props("Orin", 87, 16), attributes())
    assert relative(orin).sm == "sm_87" and share(orin) == share("orin_nx8") == 0.5, "an Orin's loops are as an A100's"
    b300 = reported(props("NVIDIA B300", 103, 148), attributes())
    with pytest.raises(LookupError, match="on sm_100a/1024"):
        share(b300)
    assert share("a100", loop="gated") == 0.5, "a prologue that was not simulated counts as none"
    assert share("a100", tile="8x8x8_w1x1_s2") == 0.2, "an unknown tile has the least that its kernel has there"
    assert shares.span("conv_dense", TILE, "vectors", "sm_80/1024") == shares.Share(0.4, 0.6, 0.7)
    assert shares.span("conv_dense", TILE, "vectors", "sm_86/512") is None
    with pytest.raises(LookupError, match="no share of conv_dense on sm_90a/1366: python -m benchmarks.cycle_shares"):
        share("h100")


def test_the_committed_table_is_as_it_is_written():
    assert cycle_shares.written(shares.table()) == shares.TABLE.read_text()


@pytest.mark.parametrize("stop", [0, 3, 1000])
def test_an_interrupted_table_loses_nothing_and_goes_on(stop, tmp_path, monkeypatch):
    """What is done is written beside what was there; the hash of sources comes last, rows of other compilers stay."""
    path = tmp_path / "shares.json"
    old = {name: ["00000000", [0.1]] for name in MACHINES}
    before = {
        nvrtc(): {
            "conv_dense": {"source": "of before", "shares": {TILE: {"vectors": old}}},
            "conv_sparse24": {"source": "of before", "shares": {}},
        },
        "12.9": {"conv_dense": {"source": "", "shares": {TILE: {"vectors": old}}}},
    }
    path.write_text(cycle_shares.written(before))
    monkeypatch.setattr(cycle_shares, "TABLE", path)
    monkeypatch.setattr(cycle_shares, "table", lambda: json.loads(path.read_text()))
    new = {name: ["11111111", [0.2, 0.3]] for name in MACHINES}

    def results():
        for n, loop in enumerate(reversed([*loops()])):
            if n == stop:
                raise KeyboardInterrupt
            yield loop, new

    known = before[nvrtc()]
    if stop < 1000:
        with pytest.raises(KeyboardInterrupt):
            cycle_shares.make(known, nvrtc(), results())
    else:
        assert cycle_shares.make(known, nvrtc(), results()) == len([*loops()])
    left = json.loads(path.read_text())
    assert left["12.9"] == before["12.9"]
    rows = {
        (kernel, tile, loop): row
        for kernel, of in left[nvrtc()].items()
        for tile, by in of["shares"].items()
        for loop, row in by.items()
    }
    assert sum(row == new for row in rows.values()) == min(stop, len([*loops()]))
    assert rows["conv_dense", TILE, "vectors"] == (new if stop == 1000 else old)
    assert left[nvrtc()]["conv_dense"]["source"] == (cycle_shares.source("conv_dense") if stop == 1000 else "of before")


def test_a_loop_that_a_change_leaves_as_it_was_is_not_simulated_again(monkeypatch):
    asked = []
    monkeypatch.setattr(cycle_shares, "_shares", lambda loop, once, r, at, swept: [asked.append(loop) or [0.5] * r.blocks])
    first = cycle_shares.simulated(SMALL, "sm_80", {})
    (row,) = first.values()
    assert list(first) == ["sm_80/1024"] and row[1] == [0.5, 0.5] and asked == [SMALL]
    assert cycle_shares.simulated(SMALL, "sm_80", {row[0]: row}) == first and asked == [SMALL]
    assert cycle_shares.simulated(SMALL, "sm_80", {"0" * 8: row}) == first and len(asked) == 2


def instruction(address: int, opcode: str, operands: str) -> Instruction:
    return Instruction(address, opcode, tuple(operands.split(", ")), "", 7 * address, 1, False, None, None, 0, 0)


def test_the_hash_of_a_loop_leaves_out_where_it_lies():
    def digest(*rows, at=0, blocks=1, device="a100"):
        once = [instruction(at + 16 * n, opcode, operands) for n, (opcode, operands) in enumerate(rows)]
        return cycle_shares._hash(once, Residency(8, blocks), machine(named(device)))

    rows = ("LDS.128", "R0, [R4]"), ("BRA", "`(.L_x_12)")
    same = digest(*rows)
    assert digest(rows[0], ("BRA", "`(.L_x_90)"), at=256) == same
    others = [digest(("LDS.128", "R0, [R8]"), rows[1]), digest(*rows, blocks=2), digest(*rows, device="a40"), digest(rows[0])]
    assert len({same, *others}) == 5


def test_of_a_norm_s_loop_the_tile_s_own_products_count():
    """64 products of the tile and 8 of sums, all of 8 clocks, also of 2:4 ones; with 16 rows as many of sums as of the tile."""
    at, mma, sp = machine(A100), "HMMA.16816.F32", "HMMA.SP.16832.F32"
    dense = Loop("conv_dense", Tile(128, 256, 32, 2, 4, 3), "normalized")
    sparse = Loop("conv_sparse24", Tile(256, 128, 64, 4, 2, 3), "normalized")
    assert cycle_shares._own(replace(dense, name="vectors"), [instruction(0, mma, "R0")] * 64, at) == 1
    assert cycle_shares._own(dense, [instruction(0, mma, "R0")] * 72, at) == pytest.approx(64 / 72)
    both = [instruction(0, sp, "R0")] * 64 + [instruction(0, mma, "R0")] * 8
    assert cycle_shares._own(sparse, both, at) == pytest.approx(64 / 72)
    assert cycle_shares._own(sparse, both * 2, at) == pytest.approx(64 / 72), "two stages in an iteration"
    few = replace(dense, tile=Tile(16, 128, 64, 1, 4, 4))
    assert cycle_shares._own(few, [instruction(0, mma, "R0")] * 32, at) == 0.5
    with pytest.raises(ValueError, match="an iteration has 71 products, expected 72 or several times as many"):
        cycle_shares._own(dense, [instruction(0, mma, "R0")] * 71, at)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["conv_dense", "conv_sparse24", "conv_dense_int8", "conv_sparse24_int8"])
def test_a_row_of_the_table_is_what_the_simulation_says(kernel):
    of = shares.table().get(nvrtc(), {}).get(kernel)
    if of is None or of["source"] != cycle_shares.source(kernel):
        pytest.skip("the table is of other sources or another compiler: python -m benchmarks.cycle_shares")
    for name in of["shares"][TILE]:
        rows = cycle_shares.simulated(replace(SMALL, kernel=kernel, name=name), "sm_80", {})
        assert of["shares"][TILE][name]["sm_80/1024"] == rows["sm_80/1024"], name


def test_a_stage_takes_its_products_at_the_peak_over_the_share():
    for kernel, tiles in cycles.TILES.items():
        for tile in tiles:
            tactic = cycles.tactic(kernel, tile)
            _, clocks, products = main_loops.stage(tactic, Prologue(), A100, 1)
            assert products == pytest.approx(tile.m * tile.n * tile.k / tensor_peak(A100, tactic.sparse))
            assert clocks == pytest.approx(products / shares.share(kernel, str(tile), "vectors", A100, 1))
            for shared in (replace(tile, split=4), replace(tile, stream=108)):
                assert main_loops.stage(replace(tactic, tile=shared), Prologue(), A100, 1)[1] == clocks


def test_a_prologue_and_planes_have_loops_of_their_own():
    def clocks(tactic: Tactic, **prologue):
        return main_loops.stage(tactic, Prologue(**prologue), A100, 1)[1]

    for kernel in cycles.TILES:
        tile = next(t for t in cycles.TILES[kernel] if str(t).startswith("128x128x"))
        vectors, planes = (replace(SMALL, kernel=kernel, tile=tile, name=name).tactic for name in ("vectors", "linear"))
        plain = clocks(vectors)
        assert clocks(planes) > 2 * plain
        assert all(clocks(vectors, **{name: True}) > 1.05 * plain for name in ("scaled", "gated"))


@pytest.mark.parametrize("sparse", [False, True])
def test_products_of_bytes_take_the_shares_of_their_own_loops(given, sparse):
    """Halving their rows makes them slower, and FP16's not: with a long K nearly by half of their clocks."""
    p = ConvProblem(32, 1024, 28, 28, 1024, 3, 3, pad=(1, 1, 1, 1), sparse24=True, epilogue=conv_bytes.QUANTIZED)
    kernels = ("conv_sparse24", "conv_sparse24_int8") if sparse else ("conv_dense", "conv_dense_int8")
    whole, us = json.loads(shares.TABLE.read_text()), {}
    for factor in (1, 0.5):
        given |= json.loads(json.dumps(whole))
        for by in given[max(given, key=shares._numbers)][kernels[1]]["shares"].values():
            for row in by["vectors"].values():
                row[1] = [factor * share for share in row[1]]
        for cached in (shares.rows, shares.share, main_loops.stage):
            cached.cache_clear()
        for kernel in kernels:
            tactic = cycles.tactic(kernel, cycles.TILES[kernels[0]][0])
            us[kernel, factor] = (
                max(conv_bytes.counts(p, tactic, A100).limits.values())
                if "int8" in kernel
                else (max(conv_gemm.counts(p, tactic, A100).limits.values()))
            )
    main_loops.stage.cache_clear()
    assert us[kernels[0], 0.5] == us[kernels[0], 1] > us[kernels[1], 1] and us[kernels[1], 0.5] > 1.6 * us[kernels[1], 1]


def test_geforce_cards_take_the_rows_of_workstation_cards_for_bytes():
    for geforce, workstation in (("rtx4090", "l4"), ("rtx3090", "a10"), ("rtx5090", "rtx_pro_6000")):
        rows = [shares.rows(kernel)[TILE]["vectors"] for kernel in cycles.BYTES]
        name = shares.machine_name(conv_bytes.of_bytes(named(geforce)))
        assert name == shares.machine_name(named(workstation)) and all(name in row for row in rows)
        assert not any(shares.machine_name(named(geforce)) in row for row in rows)
    unknown = shares.share("conv_dense_int8", "8x8x8_w1x1_s2", "vectors", conv_bytes.of_bytes(named("rtx4090")), 1)
    assert unknown == min(row["vectors"]["sm_89/512"][1][0] for row in shares.rows("conv_dense_int8").values())


def test_the_rate_of_bytes_is_in_the_hashes_of_their_loops_only():
    at = machine(A100)
    other = replace(at, bytes_per_clk=at.bytes_per_clk / 2)
    for kernel in cycles.KERNELS:
        figures = [repr(cycle_shares._figures(kernel, m)) for m in (at, other)]
        assert (figures[0] == figures[1]) == (kernel not in cycles.BYTES)


def test_a_long_convolution_takes_its_products_at_the_share_and_what_tiles_begin_and_end_with():
    """56 rounds of two blocks and 576 stages: start and end are a few percent of it."""
    p = ConvProblem(64, 1024, 28, 28, 1024, 3, 3, pad=(1, 1, 1, 1))
    tile = next(t for t in DENSE_TILES if str(t) == "128x256x32_w2x4_s3")
    tactic = cycles.tactic("conv_dense", tile)
    rate = tensor_peak(A100) * shares.share("conv_dense", str(tile), "vectors", A100, 1) * A100.num_sms * A100.clock_mhz
    found = predict(p, tactic, A100)
    assert 1 < float(found["total_us"]) / (main_loops.UNTIMED * p.macs / rate) < 1.1 and found["bound"] == "mma"


def test_the_error_of_our_loops_is_what_the_sweep_leaves_open():
    """`predict.OURS`: half of the simulated range on sm_80, in logarithms, root mean square over all tiles."""
    plain = [loop for loop in loops() if loop.name == "vectors"]
    spans = [shares.span(loop.kernel, str(loop.tile), loop.name, "sm_80/1024") for loop in plain]
    halves = [math.log(span.high / span.low) / 2 for span in spans if span]
    assert len(halves) == len(spans) and math.sqrt(sum(x * x for x in halves) / len(halves)) == pytest.approx(OURS, abs=0.02)


def test_what_a_loaded_l2_would_make_of_the_table_is_said_and_not_written(monkeypatch):
    """A later answer of L2 leaves a loop of slow products as it is; the sweep's range grows where its latencies join."""
    monkeypatch.setattr(cycle_shares, "MACHINES", {name: MACHINES[name] for name in ("sm_80/1024", "sm_86/256")})
    for swept in ("SWEEP", "LOADED_SWEEP"):
        monkeypatch.setattr(cycle_shares, swept, getattr(cycle_shares, swept)[::5])
    found = cycle_shares.under_load(SMALL)
    at_400, at_600, idle, loaded = found["sm_80/1024"]
    assert idle <= loaded and max(abs(at_400), abs(at_600)) < 1 and len(found["sm_86/256"]) == 2
    head, fast, slow = cycle_shares.load_table([found, found]).splitlines()
    assert "L2 at 400: mean, least, most  L2 at 600: mean, least, most  half of the range" in head
    assert fast.split()[:3] == ["sm_80/1024", "2", f"{at_400:+.1%}"] and fast.endswith(f"{idle:.2f}, {loaded:.2f}")
    assert len(slow.split()) == 8
