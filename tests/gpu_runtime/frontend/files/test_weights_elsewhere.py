"""Weights that are 2:4 along another axis or order than input channels: the order is named, and never by chance."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels import sparse24
from gpu_runtime.explain.log import log_text
from gpu_runtime.frontend.summaries import pattern
from gpu_runtime.stored_pattern import Stored, as_stored, elsewhere, together
from tests.reference_run import model, node

OUT, FLAT, TAPS = "2:4 along the output channels (axis 0)", "2:4 along the kernel flattened to C x R x S", "2:4 along the taps"
SHAPES = [(64, 64, 3, 3), (128, 64, 1, 1), (32, 16, 3, 3), (64, 12, 5, 5), (16, 8, 7, 7), (64, 4, 3, 3), (48, 32), (24, 16, 5)]


def flat_groups(a: np.ndarray) -> np.ndarray:
    """2:4 along the last axis, as far as whole groups go."""
    rows = a.reshape(-1, a.shape[-1]).copy()
    whole = rows.shape[1] // 4 * 4
    rows[:, :whole] = sparse24.prune(rows[:, :whole]) if whole else rows[:, :0]
    return rows.reshape(a.shape)


PRUNERS = {
    "output": lambda w: sparse24.prune(w, 0),
    "flat": lambda w: flat_groups(w.reshape(len(w), -1)).reshape(w.shape),
    "taps": lambda w: flat_groups(w.reshape(*w.shape[:2], -1)).reshape(w.shape),
}


def drawn(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("pruner", "says"), [("output", OUT), ("flat", FLAT), ("taps", TAPS)])
def test_the_order_in_which_weights_were_pruned_is_named(shape, pruner, says):
    w = PRUNERS[pruner](drawn(shape))
    taps = int(np.prod(shape[2:]))
    if pruner == "output" or taps > 1:
        few = pruner == "taps" and w.size // 4 < 40
        assert elsewhere(w, 1).startswith("" if few else says)
    if pruner == "flat" and taps == 1:
        assert as_stored(w, 1).fits and not as_stored(w, 1).elsewhere, "the same as along input channels"


def test_the_axis_is_the_file_s():
    """A Gemm without transB and a ConvTranspose have input channels first."""
    w = sparse24.prune(drawn((64, 48, 3, 3)), 1)
    assert elsewhere(w, 0) == "2:4 along the output channels (axis 1)" and as_stored(w, 1).elsewhere == ""
    assert elsewhere(sparse24.prune(drawn((64, 48)), 1), 0) == "2:4 along the output channels (axis 1)"
    assert elsewhere(drawn((2, 3, 64, 48)), 2) == "", "a stack of matrices has no order of its own"


def test_a_few_groups_that_fine_tuning_filled_do_not_hide_the_order():
    w = sparse24.prune(drawn((64, 64, 3, 3)), 0)
    rng = np.random.default_rng(1)
    filled = np.where(rng.random(w.shape) < 0.001, 0.1, w)
    assert elsewhere(filled, 1).startswith("nearly 2:4 along the output channels (axis 0): 99.") and "by chance" in elsewhere(
        filled, 1
    )
    assert elsewhere(np.where(rng.random(w.shape) < 0.05, 0.1, w), 1) == ""


def test_one_order_of_several_weights_is_theirs_together():
    assert together([Stored(1, 0, 0, 1, "a"), Stored(2, 0, 0, 1, "a")]) == Stored(3, 0, 0, 2, "a")
    assert together([Stored(1, 0, 0, 1, "a"), Stored(2, 2, 0, 1)]).elsewhere == "" == together([]).elsewhere


def layer(seed: int) -> tuple[str, np.ndarray]:
    """A drawn layer that is dense, or sparse in a way that is no 2:4 along another axis."""
    rng = np.random.default_rng(seed)
    k, c = (4 * int(rng.integers(1, 33)) for _ in "kc")
    shape = [(k, c), (k, c, 1, 1), (k, c, 3, 3), (k, c, 5, 5), (k, c, 2, 2), (k, c, 7)][rng.integers(6)]
    w = rng.normal(size=shape) * rng.lognormal(0, 1, (k, *(1,) * (len(shape) - 1)))
    if len(shape) > 2:  # the taps at the rim are smaller, as trained ones are
        w = w * rng.lognormal(0, 0.7, shape[2:])
    zeros = float(rng.choice([0, 0.3, 0.5, 0.6, 0.75, 0.9, 0.95, 0.99]))
    kind = ("dense", "random", "magnitude", "input channels", "output channels", "2:4", "1:4", "4:8")[seed % 8]
    channels = {"input channels": 1, "output channels": 0}.get(kind)
    if kind == "random":
        w = np.where(rng.random(shape) < zeros, 0, w)
    elif kind == "magnitude":
        w = np.where(np.abs(w) < np.quantile(np.abs(w), zeros), 0, w)
    elif channels is not None:
        along = [1] * len(shape)
        along[channels] = -1
        w = w * (rng.random(shape[channels]) >= zeros).reshape(along)
    elif kind in ("2:4", "1:4"):
        w = sparse24.prune(w)
        w = np.where(rng.random(shape) < (0.5 if kind == "1:4" else 0), 0, w)
    elif kind == "4:8" and c % 8 == 0:
        eights = np.moveaxis(w, 1, -1).reshape(-1, 8)
        rank = np.argsort(np.argsort(-np.abs(eights), axis=-1), axis=-1)
        w = np.moveaxis(np.where(rank < 4, eights, 0).reshape(np.moveaxis(w, 1, -1).shape), -1, 1)
    return f"{kind} {zeros} {shape}", w


def alarms(seeds: range) -> list[str]:
    return [f"{name}: {said}" for name, w in map(layer, seeds) if (said := as_stored(w, 1).elsewhere)]


@pytest.mark.slow
def test_no_false_alarm_of_a_thousand_layers():
    assert alarms(range(1000)) == []


@pytest.mark.long
def test_no_false_alarm_of_ten_thousand_layers():
    assert alarms(range(1000, 11000)) == []


def test_every_view_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = {"u": sparse24.prune(drawn((64, 64, 3, 3)), 0), "v": drawn((64, 64, 3, 3), 1)}
    nodes = [node("Conv", "x u", "a", pads=(1, 1, 1, 1), name="first"), node("Relu", "a", "b")]
    nodes += [node("Conv", "b v", "y", pads=(1, 1, 1, 1), name="second")]
    onnx.save(model(nodes, {"x": (1, 64, 14, 14)}, "y", weights), "m.onnx")
    rows = pattern.inspect("m.onnx")
    assert [r["elsewhere"] for r in rows] == [OUT, ""]
    text = " ".join(pattern.text(rows).split())
    assert f"{OUT}, not along C" in text and "the weights of 1 layer are 2:4 along another axis or order" in text
    said = " ".join(str(gr.prune("m.onnx")).split())
    assert "Before, the weights of 1 layer were 2:4 along another axis or order" in said
    e = gr.build("m.onnx", device="l4", sparsity="enable")
    assert {r.layer: r.elsewhere for r in e.sparsity.rows} == {"first": OUT, "second": None}
    one = " ".join(str(e.explain("first")).split())
    assert f"They are {OUT}; tensor cores need it along the input channels: prune them again along these" in one
    assert "They are" not in str(e.explain("second"))
    assert f"1 layer is {OUT}, not along the input channels; pruned, " in " ".join(log_text(e.record, 120, 50).split())
