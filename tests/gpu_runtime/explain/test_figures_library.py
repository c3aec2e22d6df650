"""What 2:4 gains beside a library's kernels: the estimate is counted again from other sources, and every sentence on it."""

import json
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks import networks
from benchmarks.published_rows import network
from cuda_kernels.device import named
from cuda_kernels.rates import rates
from gpu_runtime.explain.figures import gain_text, library_text
from gpu_runtime.runtime.findings import LibraryPlan
from tactics import peers
from tactics.problems.problem import ConvProblem
from tests.conftest import DIGITS

SHAPES = {"x": (2048, 1, 8, 8)}
ESTIMATE = LibraryPlan(90.0, 80.0, 100.0, 70.0, 5, 1, 4.0, "fitted", 1)


@pytest.fixture(scope="module")
def digits():
    return gr.build(DIGITS / "digits_sparse.onnx", sparsity="enable", device="a100", shapes=SHAPES)


def test_the_estimate_is_the_dense_plan_with_a_librarys_kernels(digits):
    """Of a build without sparse tactics, whose layers have their own times and problems."""
    dense = gr.build(DIGITS / "digits_sparse.onnx", device="a100", shapes=SHAPES)
    found, own_us, us, sparse_us, launches = digits.plan.solution.rivals.library, 0.0, 0.0, 0.0, 0
    for layer in dense.plan.layers:
        known = peers.time_of(layer.problem, named("a100")) if layer.problem else None
        if known is None:
            own_us += layer.time_us
        else:
            us, sparse_us, launches = us + known.us, sparse_us + min(known.us, known.sparse_us or known.us), launches + 1
    assert found.own_us == pytest.approx(own_us) and found.us == pytest.approx(own_us + us)
    assert found.sparse_us == pytest.approx(own_us + sparse_us)
    assert (found.layers, found.layers + found.own) == (launches, sum(bool(x.tactic) for x in dense.plan.layers))
    assert found.low_us < found.us < found.high_us and found.timed and dense.plan.solution.rivals.library == found


def test_rows_add_up(digits):
    rows = digits.sparsity.rows
    found = digits.plan.solution.rivals.library
    assert sum(row.library.us for row in rows if row.library) == pytest.approx(found.us - found.own_us, abs=0.01)
    assert all(row.library.sparse_us for row in rows if row.verdict != "not_eligible")
    assert next(row for row in rows if row.layer == "stem/conv").library.sparse_us is None


@pytest.mark.parametrize(
    "device,dense_us,sparse_us",
    [("h200", 1358, 1272), ("b200", 790, 811), ("a100", 3856, 3329), ("rtx4090", 5186, 3913), ("l4", 15414, 13186)],
)
def test_resnet50_as_it_was_counted(device, dense_us, sparse_us):
    """All convolutions at batch 64: microseconds of a library's dense kernels, and of its 2:4 kernels for each of them."""
    work, library = network("resnet50", 64), rates(named(device)).library
    found = [peers.estimate(work, named(device), library, sparse=sparse)[0].sum() for sparse in (False, True)]
    assert np.round(found) == pytest.approx([dense_us, sparse_us], abs=1)


def test_depthwise_convolutions_count_at_our_time(tmp_path):
    net = networks.Net("n", (1, 32, 28, 28))
    onnx.save(net.finish(net.conv(net.conv("x", "depthwise", 32, groups=32), "pointwise", 64, r=1)), tmp_path / "n.onnx")
    engine = gr.build(tmp_path / "n.onnx", device="l4")
    found, rows = engine.plan.solution.rivals.library, {row.layer: row for row in engine.sparsity.rows}
    assert found.layers == 1 and found.own >= 1 and not found.timed
    assert rows["depthwise"].library is None and rows["pointwise"].library.us > 0
    assert peers.time_of(ConvProblem(1, 32, 28, 28, 32, 3, 3, groups=32), named("l4")) is None
    assert "the library was not timed on this GPU; its rates are taken from similar GPUs" in library_text(engine.record)


def test_no_number_is_told_where_no_2_4_kernel_of_a_library_is_faster(digits):
    def worded(found):
        solution = replace(digits.plan.solution, rivals=replace(digits.plan.solution.rivals, library=found))
        return library_text(replace(digits.record, plans=(replace(digits.plan, solution=solution),)))

    assert "its 2:4 kernels ~70.00 us; library times are estimated for 5 of" in worded(ESTIMATE)
    assert ", its 2:4 kernels no less; library times are estimated for 5 of" in worded(replace(ESTIMATE, sparse_us=ESTIMATE.us))


@pytest.mark.parametrize(
    "dense,library,sentence",
    [
        (
            110.0,
            ESTIMATE,
            "gains nothing: this plan runs at 0.90x the estimated speed of a library's dense kernels, and at 1.10x",
        ),
        (
            110.0,
            replace(ESTIMATE, us=98.0, high_us=105.0),
            "0.98x the estimated speed of a library's dense kernels, within the",
        ),
        (
            130.0,
            replace(ESTIMATE, us=120.0, low_us=105.0, high_us=135.0),
            "gains 1.20x over the fastest dense plan known, an est",
        ),
        (
            130.0,
            replace(ESTIMATE, us=102.0, high_us=115.0),
            "library's (less than the error of the estimate), and 1.30x over our",
        ),
        (
            105.0,
            replace(ESTIMATE, us=210.0),
            "gains 1.05x over our dense plan, the fastest known. A dense plan with a library's kernels is",
        ),
        (
            100.0,
            replace(ESTIMATE, us=150.0),
            "gains nothing over our dense plan, the fastest known. A dense plan with a library's",
        ),
        (100.3, None, "gains nothing measurable over our dense plan, the fastest known"),
        (
            130.0,
            replace(ESTIMATE, us=100.2, high_us=115.0),
            "gains nothing measurable over the fastest dense plan known, an estimate of a library's (less than",
        ),
        (105.0, None, "gains 1.05x over our dense plan, the fastest known. A dense plan with a library's kernels is not known"),
    ],
)
def test_sentences(digits, dense, library, sentence):
    """Of a plan of 100 us."""
    rivals = replace(digits.plan.solution.rivals, all_dense_us=dense, library=library)
    plan = replace(digits.plan, solution=replace(digits.plan.solution, total_us=100.0, rivals=rivals))
    assert sentence in gain_text(replace(digits.record, plans=(plan,)))


def test_where_it_is_said(digits, files, cli):
    """In the first fact of a build, in the accounts, the page, the layer information, and before a model is pruned."""
    code, out, _ = cli("build sparse.onnx --device b200 --sparsity=enable --shapes=x:2048x1x8x8")
    assert code == 0 and re.search(r"\n\npruning +gains nothing: this plan runs at 0\.\d\dx the estimated speed", out)
    assert "\nlibrary   dense kernels of a library (cuBLAS, CUTLASS) would take an estimated ~" in out
    digits.save(files / "a100.engine")
    code, out, _ = cli("explain a100.engine block4/conv2")
    assert "2:4 gains 1." in out and re.search(r"\n  library +a library's dense kernel is estimated at ~58", out)
    info = json.loads(cli("inspect a100.engine --json")[1])
    found = digits.plan.solution.rivals.library
    assert (info["LibraryEstimateUs"], info["LibraryEstimateTimed"]) == (found.us, 1)
    layer = next(x for x in info["Layers"] if "block4/conv2" in x["Metadata"])
    assert 0 < layer["LibraryEstimateSparseMs"] < layer["LibraryEstimateMs"]
    code, out, _ = cli(f"inspect-sparsity {DIGITS / 'digits_dense.onnx'} --device b200 --shapes=x:2048x1x8x8")
    assert "All of it together gains nothing: this plan runs at" in " ".join(out.split())
    code, out, _ = cli("plan sparse.onnx --devices a100,b200 --shapes=x:2048x1x8x8")
    rows = [line.split() for line in out.splitlines() if line.startswith(("a100 ", "b200 "))]
    assert [row[1] for row in rows[:2]] == ["2048", "2048"] and all(row[5].startswith("~") for row in rows[:2])
    assert [float(row[-1][:-1]) > 1 for row in rows[:2]] == [True, False] and all(float(row[-2][:-1]) > 1 for row in rows[:2])
