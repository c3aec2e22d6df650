"""Each reason of the sparsity log, constructed: a network of one or two layers and a timer that says what we want."""

import numpy as np
import pytest

from cuda_kernels import sparse24
from cuda_kernels.device import named
from gpu_runtime import planning, reasons
from gpu_runtime.lower import Network, Op, TensorInfo
from tactics import plan
from tactics.format import Format
from tactics.problem import ConvProblem, ReformatProblem
from tactics.timing import Time

DEVICE = named("h200")
SHAPE = (1, 64, 8, 8)


def network(w: np.ndarray, groups: int = 1) -> Network:
    """x -> one convolution -> y, both ends fp16:chw outside."""
    k, c = w.shape[0], w.shape[1] * groups
    fits = w.shape[1] % 4 == 0 and bool(sparse24.fits(w).all())
    problem = ConvProblem(1, c, 8, 8, k, 1, 1, groups=groups, sparse24=fits)
    ends = [TensorInfo("x", (1, c, 8, 8), "fp16", (1, c, 8, 8)), TensorInfo("y", (1, k, 8, 8), "fp16", (1, k, 8, 8))]
    op = Op("conv", problem, ("x",), "y", {"w": w}, ("conv",), (), "conv")
    return Network("net", (ends[0],), (ends[1],), {t.name: t.shape4 for t in ends}, (op,))


def timer(dense, sparse, reformat, spread=0.0, sparse_layouts=("hwc8", "chw32", "chw")):
    """Times in microseconds by layout of the input: numbers, or {layout: number}."""

    def time(problem, tactics):
        found = {}
        for t in tactics:
            if isinstance(problem, ReformatProblem):
                us = reformat.get(t.out.layout, 2.0) if isinstance(reformat, dict) else reformat
            elif t.sparse and not {t.ins[0].layout, t.out.layout} <= set(sparse_layouts):
                continue
            else:
                us = sparse if t.sparse else dense
            found[t] = Time(us, us - spread, us + spread)
        return found

    return time


def row(net, times, mode="enable", measured=False):
    io = {t.name: Format("fp16", "chw") for t in (*net.inputs, *net.outputs)}
    table = planning.tabulate(net, DEVICE, times, sparse=mode != "disable", io=io)
    return reasons.sparsity(table, plan.solve(table.graph), mode, measured=measured)["rows"][0]


W = np.random.default_rng(0).standard_normal((64, 64, 1, 1)).astype(np.float16).astype(np.float32)
W24 = sparse24.prune(W)


def test_picked():
    r = row(network(W24), timer(10, 8, 1))
    assert (r["verdict"], r["reason"]) == ("sparse", "picked")
    assert r["other_cost_us"] == pytest.approx(2) and r["best_dense"]["us"] == 10 and r["best_sparse"]["us"] == 8
    assert r["p_sparse_faster"] > 0.9


def test_dense_faster_and_ties_stay_dense():
    r = row(network(W24), timer(8, 10, 1))
    assert (r["verdict"], r["reason"]) == ("dense", "dense_faster") and r["other_cost_us"] == pytest.approx(2)
    r = row(network(W24), timer(8, 8, 1))
    assert (r["verdict"], r["reason"]) == ("dense", "dense_faster") and r["p_sparse_faster"] == 0.5


def test_reformat_outweighs():
    """Sparse runs in chw32 only and is 2 us faster; getting there and back costs 2 x 3 us that dense does not pay."""
    r = row(network(W24), timer(10, 8, 3, sparse_layouts=("chw32",)))
    assert (r["verdict"], r["reason"]) == ("dense", "reformat_outweighs")
    assert r["best_sparse"]["us"] < r["best_dense"]["us"] and r["other_cost_us"] == pytest.approx(4)


def test_within_noise_only_where_times_are_measured():
    r = row(network(W24), timer(10, 10.5, 1, spread=0.6), measured=True)
    assert (r["verdict"], r["reason"]) == ("dense", "within_noise") and r["p_sparse_faster"] is None
    r = row(network(W24), timer(10, 10.5, 1, spread=0.6), measured=False)
    assert r["reason"] == "dense_faster"
    r = row(network(W24), timer(10, 12, 1, spread=0.6), measured=True)
    assert r["reason"] == "dense_faster"


def test_no_sparse_tactic():
    r = row(network(W24), timer(10, 8, 1), mode="disable")
    assert (r["verdict"], r["reason"]) == ("dense", "no_sparse_tactic") and "--sparsity=disable" in r["detail"]
    r = row(network(W24), timer(10, 8, 1, sparse_layouts=()))
    assert (r["verdict"], r["reason"]) == ("dense", "no_sparse_tactic") and "failed when it was timed" in r["detail"]


def test_pattern_violation():
    w = W24.copy()
    w[5, 8:11, 0, 0] = 1
    r = row(network(w), timer(10, 8, 1))
    assert (r["verdict"], r["reason"]) == ("not_eligible", "pattern_violation")
    assert r["first_violation"] == [5, 8, 0, 0] and r["pattern_share"] == pytest.approx(1 - 1 / (64 * 16))


def test_channels_not_multiple_of_4():
    r = row(network(W[:, :6]), timer(10, 8, 1))
    assert (r["verdict"], r["reason"], r["detail"]) == ("not_eligible", "channels_not_multiple_of_4", "C = 6")


def test_grouped_layers_are_eligible_where_a_group_has_a_multiple_of_4_channels():
    r = row(network(W24[:, :32], groups=2), timer(10, 8, 1))
    assert (r["verdict"], r["reason"]) == ("sparse", "picked")
    r = row(network(W[:, :32], groups=2), timer(10, 8, 1))
    assert (r["verdict"], r["reason"]) == ("not_eligible", "pattern_violation")
    r = row(network(W[:, :2], groups=32), timer(10, 8, 1))
    assert (r["verdict"], r["reason"]) == ("not_eligible", "grouped_conv") and "2 input channels" in r["detail"]


def test_one_row_per_layer_wherever_fusion_puts_it():
    """Two options hold the same layer; the row is that of the option taken."""
    base = network(W24)
    op = base.ops[0]
    apart = Op("conv", op.problem, op.inputs, "y", op.weights, (), (("g", "apart"),), "conv")
    fused = Op("conv + add", op.problem, op.inputs, "y", op.weights, (), (("g", "into conv"),), "conv")
    net = Network("net", base.inputs, base.outputs, base.tensors, (apart, fused), (("g", ("apart", "into conv")),))
    io = {t.name: Format("fp16", "chw") for t in (*net.inputs, *net.outputs)}
    table = planning.tabulate(net, DEVICE, timer(10, 8, 1), sparse=True, io=io)
    rows = reasons.sparsity(table, plan.solve(table.graph), "enable", measured=False)["rows"]
    assert [r["layer"] for r in rows] == ["conv"] and rows[0]["other_cost_us"] == pytest.approx(2)
