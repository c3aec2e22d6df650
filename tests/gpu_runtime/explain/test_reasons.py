"""Each reason of the sparsity log, constructed: a network of one or two layers and a timer that says what we want."""

import math
from dataclasses import replace
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest

from cuda_kernels import sparse24
from cuda_kernels.device import named
from cuda_kernels.rates import rates
from gpu_runtime.explain import reasons, wording
from gpu_runtime.explain.reason_texts import REASONS, time_text
from gpu_runtime.network import Network, Op, TensorInfo
from gpu_runtime.planning import tables
from gpu_runtime.planning.counterfactuals import counterfactuals
from gpu_runtime.runtime.findings import Floor, Summary
from gpu_runtime.runtime.plan_record import Timing
from gpu_runtime.stored_pattern import as_stored
from tactics.format import Format
from tactics.measure.timing import Time
from tactics.planner import plan
from tactics.predict import SIGMA_RATIO, regime
from tactics.problems.problem import ConvProblem, ReformatProblem
from tactics.roofline import floors, one_launch_us

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


def timer(dense, sparse, reformat, spread=0.0, sparse_layouts=("hwc8", "chw32", "chw"), sparse_timed=True):
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
            found[t] = Time(us, us - spread, us + spread, timed=sparse_timed or not t.sparse)
        return found

    time.prepare = lambda work: None
    return time


def row(net, times, mode="enable", measured=False):
    io = {t.name: Format("fp16", "chw") for t in (*net.inputs, *net.outputs)}
    table = tables.tabulate(net, DEVICE, times, io=io, how=tables.Considered(mode != "disable"))
    w = net.ops[0].weights["w"]
    stored = {} if w.shape[1] % 4 else {"conv": as_stored(w, 1)}
    return told(table, mode, measured=measured, stored=stored).rows[0]


def told(table, mode="enable", **facts):
    chosen = plan.solve(table.graph)
    return reasons.sparsity(reasons.Known(table, chosen, counterfactuals(table, chosen), mode, **facts))


W = np.random.default_rng(0).standard_normal((64, 64, 1, 1)).astype(np.float16).astype(np.float32)
W24 = sparse24.prune(W)


def test_picked():
    r = row(network(W24), timer(10, 8, 1))
    assert (r.verdict, r.reason) == ("sparse", "picked")
    assert r.other_cost_us == pytest.approx(2) and r.best_dense.us == 10 and r.best_sparse.us == 8
    for scale in (1, 10):  # the error of a sparse kernel's fixed cost weighs less in a longer one
        r = row(network(W24), timer(10 * scale, 8 * scale, 1))
        rate = rates(DEVICE).sparse_rate_sigma if regime(r.best_sparse.bound) == "math" else 0
        error = math.hypot(SIGMA_RATIO[regime(r.best_sparse.bound)], rate, rates(DEVICE).sparse_us_sigma / (8 * scale))
        assert r.p_sparse_faster == pytest.approx(NormalDist().cdf(math.log(10 / 8) / error), abs=1e-4)


def test_dense_faster_and_ties_stay_dense():
    r = row(network(W24), timer(8, 10, 1))
    assert (r.verdict, r.reason) == ("dense", "dense_faster") and r.other_cost_us == pytest.approx(2)
    r = row(network(W24), timer(8, 8, 1))
    assert (r.verdict, r.reason) == ("dense", "dense_faster") and r.p_sparse_faster == 0.5


def test_reformat_outweighs():
    """Sparse runs in chw32 only and is 2 us faster; getting there and back costs 2 x 3 us that dense does not pay."""
    r = row(network(W24), timer(10, 8, 3, sparse_layouts=("chw32",)))
    assert (r.verdict, r.reason) == ("dense", "reformat_outweighs")
    assert r.best_sparse.us < r.best_dense.us and r.other_cost_us == pytest.approx(4)
    parts = {key: getattr(r.other, key) for key in ("kernel_us", "reformat_us", "around_us", "reformats")}
    assert parts == pytest.approx({"kernel_us": -2, "reformat_us": 6, "around_us": 0, "reformats": 2})
    assert (r.flip.us, r.flip.needed_us, r.flip.premium_us) == pytest.approx((8, 4, 0))  # 8 us must become 10 - 6


def test_no_speed_makes_up_for_reformats_that_cost_more_than_the_dense_kernel():
    r = row(network(W24), timer(10, 8, 6, sparse_layouts=("chw32",)))
    assert r.reason == "reformat_outweighs" and r.flip is None and r.other_cost_us == pytest.approx(10)


def test_the_layers_around_are_told_apart_from_reformats():
    """Two layers between which chw32 is dear for the second: sparse in the first costs the second, not a reformat."""
    first, second = network(W24).ops[0], network(W24).ops[0]
    ops = (
        replace(first, output="m"),
        replace(
            second, name="next", layer="next", inputs=("m",), weights={"w": W}, problem=replace(second.problem, sparse24=False)
        ),
    )
    base = network(W24)
    net = replace(base, tensors={**base.tensors, "m": SHAPE}, ops=ops)

    def time(problem, tactics):
        if isinstance(problem, ReformatProblem):
            return {t: Time(9, 9, 9) for t in tactics}
        found = {}
        for t in tactics:
            ins, out = t.ins[0].layout, t.out.layout
            if t.sparse and (ins, out) == ("chw", "chw32"):
                found[t] = Time(8, 8, 8)
            elif not t.sparse and out == "chw" and problem.sparse24 and ins == "chw":
                found[t] = Time(10, 10, 10)
            elif not t.sparse and not problem.sparse24 and out == "chw" and ins in ("chw", "chw32"):
                us = 5 if ins == "chw" else 11
                found[t] = Time(us, us, us)
        return found

    time.prepare = lambda work: None
    io = {t.name: Format("fp16", "chw") for t in (*net.inputs, *net.outputs)}
    table = tables.tabulate(net, DEVICE, time, io=io, how=tables.Considered(True))
    r = told(table, measured=False).rows[0]
    assert r.reason == "reformat_outweighs" and r.other_cost_us == pytest.approx(4)
    parts = {key: getattr(r.other, key) for key in ("kernel_us", "reformat_us", "around_us", "reformats")}
    assert parts == pytest.approx({"kernel_us": -2, "reformat_us": 0, "around_us": 6, "reformats": 0})


def test_within_noise_only_where_times_are_measured():
    r = row(network(W24), timer(10, 10.5, 1, spread=0.6), measured=True)
    assert (r.verdict, r.reason) == ("dense", "within_noise") and r.p_sparse_faster is None
    r = row(network(W24), timer(10, 10.5, 1, spread=0.6), measured=False)
    assert r.reason == "dense_faster"
    r = row(network(W24), timer(10, 12, 1, spread=0.6), measured=True)
    assert r.reason == "dense_faster"


def test_an_estimate_among_measured_times_is_no_verdict():
    r = row(network(W24), timer(10, 12, 1, sparse_timed=False), measured=True)
    assert (r.verdict, r.reason) == ("dense", "not_timed")
    assert r.best_dense.timed and not r.best_sparse.timed
    timing = SimpleNamespace(timing=Timing("measured", "measured"))
    times = (time_text(best, timing.timing) for best in (r.best_dense, r.best_sparse))
    assert "sparse takes ~12.00 us, dense 10.00 us" in REASONS[r.reason].sentence(r, timing, *times)


def test_no_sparse_tactic():
    r = row(network(W24), timer(10, 8, 1), mode="disable")
    assert (r.verdict, r.reason) == ("dense", "no_sparse_tactic") and "--sparsity=disable" in r.detail
    r = row(network(W24), timer(10, 8, 1, sparse_layouts=()))
    assert (r.verdict, r.reason) == ("dense", "no_sparse_tactic") and "failed when it was timed" in r.detail


def test_pattern_violation():
    w = W24.copy()
    w[5, 8:11, 0, 0] = 1
    r = row(network(w), timer(10, 8, 1))
    assert (r.verdict, r.reason) == ("not_eligible", "pattern_violation")
    assert r.first_violation == (5, 8, 0, 0) and r.pattern_share == pytest.approx(1 - 1 / (64 * 16))
    assert r.pattern_groups == 1024 and r.lost_energy == pytest.approx(
        np.sort(np.square(w[5, 8:12, 0, 0]))[:2].sum() / np.square(w).sum(), rel=1e-2
    )
    would = r.if_sparse  # predicted, also beside the 10 us that dense is said to take
    assert would.us < would.dense_us < 10 and would.tactic.sparse
    r = row(network(W24), timer(10, 8, 1))
    assert (r.pattern_share, r.first_violation, r.lost_energy) == (1.0, None, 0.0) and r.if_sparse is None


def test_what_bounds_a_layer_and_the_most_that_sparsity_could_gain():
    """64x64x1x1 on 8x8: 262,144 products take no time on 132 SMs; a launch takes longer."""
    launch = one_launch_us(DEVICE)
    f = row(network(W24), timer(10, 8, 1)).floor
    assert f.bound == "launch" and f.mma_us == pytest.approx(262144 / (132 * 2048 * 1830 * 1.08), rel=1e-3)
    p = ConvProblem(32, 512, 28, 28, 512, 3, 3, pad=(1, 1, 1, 1), sparse24=True)
    f = Floor(**floors(p, DEVICE))
    assert f.bound == "mma" and f.sparse_us - launch == pytest.approx((f.dense_us - launch) / 2)
    f = Floor(**floors(replace(p, k=8, r=1, s=1, pad=(0, 0, 0, 0)), DEVICE))
    assert f.bound in ("l2", "dram") and f.sparse_us == pytest.approx(f.dense_us, rel=0.01)


def test_the_network_line():
    net = network(W24)
    io = {t.name: Format("fp16", "chw") for t in (*net.inputs, *net.outputs)}
    table = tables.tabulate(net, DEVICE, timer(10, 8, 1), io=io, how=tables.Considered(True))
    found = told(table, measured=False)
    floor, launch = found.rows[0].floor, one_launch_us(DEVICE)
    assert floor.launch_us == launch and floor.sparse_us < launch + 0.1
    low, high = found.summary.saved_range_us
    assert low < 2.0 < high and high - 2.0 == pytest.approx(2.0 - low)
    plain = replace(found.summary, saved_range_us=None)
    assert plain == Summary(1, 1, 1, 8.0, 10.0, 2.0, pytest.approx(launch + (10 - launch) / 2))


def test_channels_not_multiple_of_4():
    r = row(network(W[:, :6]), timer(10, 8, 1))
    assert (r.verdict, r.reason, r.detail) == ("not_eligible", "channels_not_multiple_of_4", "C = 6")


def test_grouped_layers_are_eligible_where_a_group_has_a_multiple_of_4_channels():
    r = row(network(W24[:, :32], groups=2), timer(10, 8, 1))
    assert (r.verdict, r.reason) == ("sparse", "picked")
    r = row(network(W[:, :32], groups=2), timer(10, 8, 1))
    assert (r.verdict, r.reason) == ("not_eligible", "pattern_violation")
    r = row(network(W[:, :2], groups=32), timer(10, 8, 1))
    assert (r.verdict, r.reason) == ("not_eligible", "grouped_conv") and "2 input channels" in r.detail
    r = row(network(W[:, :1], groups=64), timer(10, 8, 1))
    plan_of = SimpleNamespace(timing=Timing("predicted", "predicted(h200)"), solution=SimpleNamespace(rivals=None))
    assert "depthwise convolution: each output channel reads one input channel" in wording.sentence(r, plan_of)


def test_one_row_per_layer_wherever_fusion_puts_it():
    """Two options hold the same layer; the row is that of the option taken."""
    base = network(W24)
    op = base.ops[0]
    apart = Op("conv", op.problem, op.inputs, "y", op.weights, (), (("g", "apart"),), "conv")
    fused = Op("conv + add", op.problem, op.inputs, "y", op.weights, (), (("g", "into conv"),), "conv")
    net = Network("net", base.inputs, base.outputs, base.tensors, (apart, fused), (("g", ("apart", "into conv")),))
    io = {t.name: Format("fp16", "chw") for t in (*net.inputs, *net.outputs)}
    table = tables.tabulate(net, DEVICE, timer(10, 8, 1), io=io, how=tables.Considered(True))
    rows = told(table, measured=False).rows
    assert [r.layer for r in rows] == ["conv"] and rows[0].other_cost_us == pytest.approx(2)


def test_a_sparse_kernel_that_is_not_likely_enough_the_faster_one_stays_out():
    """9.9 us against 10 us: faster, with a probability that --risk does not take; measured times need none."""
    net = network(W24)
    io = {t.name: Format("fp16", "chw") for t in (*net.inputs, *net.outputs)}
    for risk, verdict, reason in ((0.6, "dense", "uncertain"), (0.5, "sparse", "picked"), (None, "sparse", "picked")):
        table = tables.tabulate(net, DEVICE, timer(10, 9.9, 1), io=io, how=tables.Considered(True, risk=risk))
        found = told(table, measured=risk is None)
        (r,) = found.rows
        assert (r.verdict, r.reason) == (verdict, reason)
        assert r.p_sparse_faster is None if risk is None else 0.5 < r.p_sparse_faster < 0.6
