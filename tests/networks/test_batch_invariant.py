"""What a reader is told of an engine with one tactic for all batches is true: of it, and of the plan of each batch alone."""

from functools import cache

import pytest

import gpu_runtime as gr
from tests.conftest import DIGITS

pytestmark = pytest.mark.slow
RANGES = {"a100": (32, 32, 63), "rtx4090": (32, 32, 63)}


@cache
def built(device: str, alike: bool, sparsity: str = "enable") -> gr.Engine:
    shapes = {"x": tuple((n, 1, 8, 8) for n in RANGES[device])}
    return gr.build(DIGITS / "digits_sparse.onnx", device=device, sparsity=sparsity, shapes=shapes, batch_invariant=alike)


def plans(device: str):
    """(batch, its plan in the engine, its own plan), for each batch."""
    ours, free = built(device, True), built(device, False)
    assert ours.points == free.points
    return [(n, ours.at(n), free.at(n)) for n in ours.points]


def of_layer(engine: gr.Engine, name: str):
    return next(layer for layer in engine.plan.layers if name in (layer.layer, layer.name) and layer.tactic)


@pytest.mark.parametrize("device", RANGES)
def test_each_layer_is_compared_with_the_plan_of_the_batch_alone(device):
    reasons, kinds, moved = set(), set(), 0
    for _, ours, free in plans(device):
        others = {row.layer: row for row in free.sparsity.rows}
        assert set(others) == {row.layer for row in ours.sparsity.rows}
        for row in ours.sparsity.rows:
            alone, runs, would = others[row.layer], of_layer(ours, row.layer), of_layer(free, row.layer)
            text = ours.explain(row.layer).layers[0].sentence
            assert (row.alone is None) == (runs.tactic == would.tactic), row.layer
            if row.alone:
                moved += 1
                assert row.alone.tactic == would.tactic and row.alone.us == pytest.approx(would.time_us, abs=1e-6)
                assert "ne tactic runs all batches" in text and f"~{would.time_us:.2f} us" in text
                assert f"alone     ~{would.time_us:.2f} us" in str(ours.explain(row.layer))
            if row.verdict != alone.verdict:
                kinds.add(row.verdict)
                assert row.reason == "other_batches" and row.other is None and row.other_cost_us is None
                assert text.startswith(f"Runs {row.verdict}, in ~{row.us:.2f} us, because one tactic runs all batches")
                assert f"has a {alone.verdict} kernel of ~{would.time_us:.2f} us" in text
            else:
                assert (row.reason, row.other, row.flip) == (alone.reason, alone.other, alone.flip), row.layer
                assert "Forced" not in text or ", the plan of this batch alone would take" in text
                assert "costlier formats" not in text or alone.best_dense.us < alone.best_sparse.us
            reasons.add(row.reason)
    assert "other_batches" in reasons and moved > 4
    assert kinds == ({"sparse"} if device == "a100" else {"sparse", "dense"})


def test_the_network_is_compared_with_one_dense_tactic_for_all_batches():
    """Not with the dense plan of a batch alone, which may beat it though sparse kernels gain."""
    dense = built("a100", True, "disable")
    assert dense.points == built("a100", True).points
    for batch, ours, free in plans("a100"):
        total, rivals = ours.plan.solution.total_us, ours.plan.solution.rivals
        without = dense.at(batch).plan.solution.total_us
        assert rivals.all_dense_us == ours.sparsity.summary.all_dense_us == pytest.approx(without, abs=1e-6)
        assert rivals.all_dense_us > free.plan.solution.rivals.all_dense_us
        assert rivals.own_us == pytest.approx(free.plan.solution.total_us) and rivals.own_us < total
        assert ours.sparsity.summary.saved_us == pytest.approx(without - total, abs=1e-5)
        assert ours.sparsity.summary.ceiling_us == pytest.approx(free.sparsity.summary.ceiling_us, abs=1e-5)  # still a bound
        assert f"without sparse kernels ~{without:.2f} us" in " ".join(str(ours.explain()).split())
        alone = f"; one tactic runs all batches, the plan of this batch alone takes ~{rivals.own_us:.2f} us;"
        assert alone in " ".join(str(ours.explain()).split()) and "this batch alone" not in str(free.explain())


def test_what_if_says_that_it_plans_one_batch_alone():
    ours, free = built("a100", True).at(32), built("a100", False).at(32)
    found = ours.what_if({"block2/conv2": "sparse"})
    assert found.before_us == pytest.approx(free.plan.solution.total_us)
    assert "For this batch alone, without --batchInvariant, the plan would take" in str(found)
    assert "The plan would take" in str(free.what_if({"block2/conv2": "sparse"}))
    same = ours.what_if({"block2/conv2": "dense"})
    assert "Nothing changes: this is already the plan of this batch alone." in str(same)


def test_the_log_names_the_layers_that_other_batches_decide(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = " ".join(f"--{k}Shapes=x:{n}x1x8x8" for k, n in zip(("min", "opt", "max"), RANGES["a100"], strict=True))
    _, out, _ = cli(
        f"build {DIGITS / 'digits_sparse.onnx'} -o e.engine --sparsity=enable --device=a100 {sizes} --batchInvariant"
    )
    words = " ".join(out.split())
    assert "other_batches, toss-up: one tactic runs all batches; the plan of this batch alone has the other kind" in words
    assert "this batch alone: one format" in " ".join(cli("inspect e.engine")[1].split())
