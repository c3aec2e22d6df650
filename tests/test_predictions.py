"""Estimates are judged by published times, bounds are beaten by none, and the command that says so works on small sets."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.bench_predictions import below_bounds, by_device, fit, judge, main
from benchmarks.published_rows import FOLDER, Row, product, read
from cuda_kernels.device import NAMED, named, relative, reported
from cuda_kernels.rates import RATES, rates
from tactics import peers
from tactics.families.conv_gemm import REGISTERS
from tests.compiled import RECORD
from tests.test_device import attributes, props

ROWS, LEFT = read(FOLDER)
JUDGED = [r for r in ROWS if r.judged]


def test_no_published_row_beats_its_bound():
    assert below_bounds(ROWS) == []
    fast = Row("gemm", "h200", "too fast", 1.0, True, product(8192, 8192, 8192, 1.0))
    assert len(below_bounds([fast])) == 1


@pytest.mark.parametrize("device", RATES)
def test_no_estimate_is_below_the_bound(device):
    d, sizes = named(device), (64, 512, 4096)
    for m in sizes:
        for n in sizes:
            for k in sizes:
                work = product(m, n, k, 1.0)
                assert peers.estimate(work, d, rates(d).library)[0] > peers.least(work, d, rates(d).clock[1])


@pytest.mark.parametrize("device, most", {"a100": 0.15, "l40s": 0.18, "h100": 0.18, "h200": 0.18, "b200": 0.2,
                                          "rtx_pro_6000": 0.2}.items())  # fmt: skip
def test_dense_products_of_libraries(device, most):
    """Mean |log error| of 4 us and more, on rows that nothing was fitted to."""
    found = judge(by_device(JUDGED, "gemm")[device])
    error = found.error[found.published >= 4]
    assert len(error) > 300 and np.abs(error).mean() <= most and abs(error.mean()) <= 0.07


def test_tensorrt_s_layers_and_the_decisions_between_sparse_and_dense():
    found = judge([r for r in ROWS if r.kind == "layer" and r.device == "a100_pcie"])
    ratio = found.us / found.published
    assert abs(found.us.sum() / found.published.sum() - 1) < 0.12 and (abs(ratio - 1) < 0.25).mean() >= 0.75
    confirmed = []
    for rows in by_device(JUDGED, "pair").values():
        gain = judge(rows).us / judge(rows, sparse=True).us
        confirmed += [(g > 1) == (r.us > r.sparse_us) for g, r in zip(gain, rows, strict=True)]
    assert np.mean(confirmed) >= 0.9


def test_a_fit_finds_the_constants_that_made_the_rows():
    d, rng = named("h100"), np.random.default_rng(0)
    true = rates(d).library
    rows = []
    for _ in range(60):
        m, n, k = (int(2**x) for x in rng.uniform(5, 13, 3))
        work = product(m, n, k, 5.0)
        rows.append(Row("gemm", "h100", "", 1.1 * peers.estimate(work, d, true)[0][0], False, work))
    found = judge(rows, library=fit(rows))
    assert abs(judge(rows).error.mean() + np.log(1.1)) < 1e-9 and np.abs(found.error).mean() < 0.05


def test_the_command_on_a_small_set(tmp_path):
    lines = FOLDER.joinpath("gemm_bf16.csv").read_text().splitlines()
    few = [lines[0], *(line for line in lines[1:] if line.startswith("a100,"))][:40]
    (tmp_path / "few.csv").write_text("\n".join([*few, "t4,64,64,64,9.5"]))
    done = CliRunner().invoke(main, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "left out: device t4: compute capability 7.5" in done.output and "a100          >= 4 us" in done.output
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert "expected the columns of one of" in str(CliRunner().invoke(main, [str(tmp_path)]).exception)


def test_every_device_has_rates_with_a_source_and_unnamed_ones_their_relative_s():
    assert set(RATES) == set(NAMED) and all(r.source and r.library.source for r in RATES.values())
    cut = reported(props("NVIDIA RTX A6000", 86, 84), attributes())
    assert relative(cut).name == "a10" and rates(cut).l2 == pytest.approx(RATES["a10"].l2 * 84 / 72)
    assert rates(named("a40")) == RATES["a40"]


def test_registers_are_those_of_what_is_compiled():
    """The table that residency rests on is the most of any architecture in the record, of vectors in and out."""
    (kernels,) = json.loads(RECORD.read_text()).values()
    found: dict[tuple, int] = {}
    for kernel in ("conv_dense", "conv_sparse24"):
        for text, takes in kernels[kernel]["variants"].items():
            v = dict(part.split("=") for part in text.split(","))
            if {"GROUPED", "PRO"} & set(v) or (v["IN_LINEAR"], v["OUT_LINEAR"]) != ("0", "0") or v["SPLIT"] == "2":
                continue
            key = (kernel == "conv_sparse24", *(int(v[name]) for name in ("BM", "BN", "BK", "WARPS_N")))
            found[key] = max(found.get(key, 0), *(row[0] for row in takes.values()))
    assert found == REGISTERS
