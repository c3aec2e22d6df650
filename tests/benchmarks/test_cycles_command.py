"""`python -m benchmarks.cycles`: what it prints of our kernels, and what it says of bad input."""

import re

import pytest
from click.testing import CliRunner

from benchmarks import cycle_shares, cycles
from benchmarks.cycle_shares import MACHINES, loops
from benchmarks.simulator import sass
from benchmarks.simulator.machine import SHIFTED
from benchmarks.simulator.simulate import points_of
from benchmarks.simulator.state import REASONS
from cuda_kernels import shares
from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import NAMED
from tactics.families.hopper.tiles import HopperTile
from tactics.tiles import DENSE_TILES, SPARSE_TILES
from tests.benchmarks.simulator.test_sass import text
from tests.benchmarks.simulator.test_warpgroups import consumer


def run(*args: str):
    return CliRunner().invoke(cycles.main, list(args))


@pytest.fixture
def few_points(monkeypatch):
    """Of what is swept."""
    monkeypatch.setattr(cycles, "points_of", lambda once: points_of(once)[::7])
    monkeypatch.setattr(cycles, "SHIFTED", [of[:2] for of in SHIFTED])


def test_a_loop_is_listed_and_summed_up(few_points):
    result = run("conv_dense", "64x64x64", "--sm", "sm_80")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 120
    listed = [line for line in lines if re.match(r" *[0-9a-f]+ +\d+ ", line)]
    issued = [int(line.split()[1]) for line in listed]
    assert issued == sorted(issued) and "HMMA" in result.output and "BAR.SYNC" in result.output
    words = {line[25:52].strip().removesuffix(" and more") for line in listed} - {""}
    assert words and words <= set(REASONS)
    assert sum("HMMA" in line for line in listed) == 32
    assert "conv_dense 64x64x64_w2x2_s4 on A100" in result.output and "limited by " in result.output
    centre, low, high = map(int, re.search(r"peak: (\d+)% \(from (\d+)% to (\d+)%", result.output).groups())
    assert 20 < low <= centre <= high <= 100
    assert re.search(r"\n  l2_latency: 261 \d+%, 400 \d+%, 600 \d+%\n", result.output)
    assert re.fullmatch(r"  noise .*: 261 ([\d.]+% to [\d.]+%), 400 .*, 600 .*", lines[-1])


def test_a_loop_of_bytes_is_listed_too(few_points):
    for kernel, product in (("conv_dense_int8", "IMMA.16832.S8.S8"), ("conv_sparse24_int8", "IMMA.SP.16864.S8.S8")):
        for device in ("a100", "rtx4090", "orin_agx64"):
            result = run(kernel, "64x64x64_w2x2_s4", "--device", device, *(("--brief",) if device != "a100" else ()))
            assert result.exit_code == 0, result.output
            assert f"{kernel} 64x64x64_w2x2_s4 on " in result.output and " products. " in result.output
            assert (result.output.count(f" {product} ") >= 16) == (device == "a100")


def test_slower_tensor_cores_are_busier():
    busy = {}
    for device in ("a100", "a10", "rtx3090"):
        result = run("conv_sparse24", "64x64x64_w2x2_s4", "--device", device, "--brief")
        assert result.exit_code == 0, result.output
        busy[device] = float(re.search(r"tensor cores ([\d.]+)%", result.output)[1])
    assert busy["a100"] < busy["a10"] < busy["rtx3090"] <= 100


def test_asynchronous_products_are_simulated(few_points):
    """A warpgroup of 64x64 weights and pixels: weights from shared memory, or 2:4 ones from registers."""
    for kernel, of_dense in (("conv_dense_sm90", False), ("conv_sparse24_sm90", True)):
        result = run(kernel, "64x64x64_w4x1_s12")
        assert result.exit_code == 0, result.output
        assert f"{kernel} 64x64x64_w4x1_s12 on H100" in result.output
        assert "1 warpgroup multiplies; groups of products in flight behind the shortest wait: 1\n" in result.output
        assert "  depth: " in result.output and f"stages of {64 * 128 * (2 - of_dense)} bytes" in result.output
        assert ("  of the dense peak: " in result.output) == of_dense


# A kernel as CUTLASS's are: a warpgroup whose thread copies, others that multiply, and mbarriers between them.
# fmt: off
SPECIALISED = (
    "@P0 BRA `(.L_consume)",
    ".L_produce:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R12+URZ+0x18], R11", "SYNCS.ARRIVE.TRANS64 RZ, [R12+URZ], R11",
    "UTMALDG.4D.IM2COL [UR16], [UR4], UR6", "UTMALDG.3D [UR8], [UR24]", "@P5 BRA `(.L_produce)", "EXIT",
    ".L_consume:", *consumer(HopperTile(128, 128))[:-1], "@P3 BRA `(.L_consume)", "EXIT",
)
# fmt: on


def test_of_a_specialised_kernel_the_consumers_are_simulated(monkeypatch, tmp_path):
    monkeypatch.setattr(sass, "disassembly", lambda cubin: text(*SPECIALISED))
    path = tmp_path / "of_others.cubin"
    path.write_bytes(b"specialised")
    given = (str(path), "--device", "h200", "--threads", "384", "--smem", str(200 << 10), "--registers", "168")
    result = run(*given, "--brief")
    assert result.exit_code == 0, result.output
    assert "1 block of 8 warps" in result.output and "2 warpgroups multiply" in result.output
    assert "TMA fills 6 stages of 32768 bytes, this SM draws 32768 of them" in result.output
    busy = {drawn: share(run(*given, "--brief", "--drawn", str(drawn)).output) for drawn in (8192, 24576, 32768)}
    assert busy[32768] == share(result.output) == pytest.approx(512 / (32768 / 38), rel=0.03)  # clocks of products, of L2
    assert busy[24576] == pytest.approx(512 / (24576 / 38), rel=0.03)
    assert busy[8192] == pytest.approx(512 / (8 * 6144 / 128 + 32768 / 128), rel=0.03)  # of the port: operands, TMA's writes
    alone = run(*given, "--brief", "--warpgroups", "1").output  # ping-pong: 64 rows at a time
    assert "1 warpgroup multiplies" in alone and "stages of 24576 bytes" in alone
    assert "--stages: expected without TMA" in run(*given, "--brief", "--stages", "9").output


def share(output: str) -> float:
    return float(re.search(r"tensor cores ([\d.]+)%", output)[1]) / 100


def test_a_cubin_is_read_as_our_kernels_are(tmp_path):
    tile = next(t for t in DENSE_TILES if str(t) == "64x32x64_w2x2_s4")
    code = cycles.ours("conv_dense", tile, "sm_86", {})
    direct = run("conv_dense", str(tile), "--sm", "sm_86", "--brief").output
    path = tmp_path / "some.cubin"
    launch = cycles.launches(cycles.LAYER, cycles.tactic("conv_dense", tile))[0]
    path.write_bytes(compile_kernel("conv_dense", dict(launch.values), "sm_86").cubin)
    result = run(
        str(path),
        "--sm",
        "sm_86",
        "--threads",
        str(code.threads),
        "--smem",
        str(code.smem),
        "--brief",
        "--registers",
        str(code.registers),
    )
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[1:] == direct.splitlines()[1:] and result.output.startswith("some.cubin conv_dense on ")
    fewer = run("conv_dense", str(tile), "--sm", "sm_86", "--brief", "--blocks", "1").output
    assert "1 block of 4 warps on an SM, limited by --blocks" in fewer


def test_every_tile_has_one_name():
    for kernel, tiles in cycles.TILES.items():
        assert [cycles.tile(kernel, str(t)) for t in tiles] == list(tiles)
    assert set(DENSE_TILES) | set(SPARSE_TILES) == {t for tiles in cycles.TILES.values() for t in tiles}
    assert str(cycles.tile("conv_dense", "128x256x32")) == "128x256x32_w2x4_s3"
    assert str(cycles.tile("conv_dense", "128x256x32_w2x4_s2")) == "128x256x32_w2x4_s2", (
        "one that is not tried can be looked at"
    )


@pytest.mark.parametrize(
    "args, says",
    [
        ((), "kernel '': expected conv_dense, conv_sparse24, conv_strip, conv_strip_sparse24, conv_dense_int8, "),
        (("conv_dense", "128x128x32"), "several begin so; expected one of 128x128x32_w2x4_s4, 128x128x32_w2x2_s4"),
        (("conv_dense", "7x7x7"), "conv_dense has no such tile; expected one of 128x256x32"),
        (("conv_dense", "64x64x64", "--sm", "sm_75"), "architecture sm_75: expected one of"),
        (("conv_dense", "64x64x64", "--device", "t4"), "compute capability 7.5"),
        (("conv_dense", "64x64x64", "-D", "GATE"), "-D GATE: expected NAME=VALUE with a whole number"),
        (("conv_dense", "64x64x64", "--blocks", "99"), "--blocks 99: expected 1 to "),
        (("absent.cubin", "--threads", "256"), "absent.cubin"),
        (("absent.cubin",), "expected --threads, how many a block has"),
    ],
)
def test_bad_input_is_said(args, says):
    result = run(*args)
    assert result.exit_code != 0 and says in result.output and "Traceback" not in result.output


def test_what_is_no_cubin_is_said(tmp_path):
    path = tmp_path / "text.cubin"
    path.write_text("not machine code")
    result = run(str(path), "--threads", "32")
    assert result.exit_code == 1 and "nvdisasm does not read these 16 bytes" in result.output


def test_the_table_of_shares_is_of_the_present_sources():
    """Estimates read the newest rows whatever their sources, so that none is lost while a kernel changes."""
    newest = shares.table()[max(shares.table(), key=shares._numbers)]
    for kernel in cycles.KERNELS:
        current = newest[kernel]["source"] == cycle_shares.source(kernel)
        assert current, f"shares.json was simulated from other sources of {kernel}: run `python -m benchmarks.cycle_shares`"


def test_the_committed_table_has_each_loop_that_may_be_launched():
    """On every named device where it fits: of vectors and of planes, and what a prologue makes of it."""
    for kernel, tiles in cycles.KERNELS.items():
        of = shares.rows(kernel)
        assert set(of) == {str(t) for t in tiles}
        for loop in (loop for loop in loops() if loop.kernel == kernel):
            found = of[str(loop.tile)].get(loop.name, {})
            fitting = set(loop.machines)
            assert set(found) == fitting, loop
            for digest, centre, *swept in found.values():
                assert len(digest) == 8 and centre and all(0 < share <= 1 for share in centre)
                assert all(low <= centre[-1] <= high <= 1 for low, high in swept)
    assert {shares.machine_name(d) for d in NAMED.values()} == set(MACHINES)
