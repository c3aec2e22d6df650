"""One choice for several batches: an image's result has the same bits in each, in the emulator; and what decides them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cuda_kernels.device import named
from gpu_runtime.assembly import assemble
from gpu_runtime.building.record import Built, engine_record, plan_record, solution_of
from gpu_runtime.engine import Engine
from gpu_runtime.errors import ModelError
from gpu_runtime.planning import invariant, order_of_sums, tables
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.runtime.findings import SparsityRecord
from gpu_runtime.runtime.plan_record import Flags, Model
from tactics.candidates import candidates
from tactics.format import Format
from tactics.launches import launches
from tactics.measure import timing
from tactics.planner import plan
from tactics.problems.array_functions import FUNCTIONS
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.problem import ConvProblem
from tactics.step import Call
from tactics.tactic import Tile
from tests import attention_models
from tests.reference_run import model, node
from tests.reference_run import network as lowered

POINTS = (1, 4, 16)
SIDE = 8
KERNEL = np.random.default_rng(7).standard_normal((64, 64, 3, 3)).astype(np.float32) / 24


def small(n: int):
    """A convolution with long sums, a softmax over channels, averages and a matrix."""
    rng = np.random.default_rng(3)
    nodes = [
        node("Conv", "x w b", "c", pads=(1, 1, 1, 1)),
        node("Softmax", "c", "s", axis=1),
        node("Add", "c s", "a"),
        node("GlobalAveragePool", "a", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f g", "y", transB=1),
    ]
    weights = {"b": rng.standard_normal(64), "g": rng.standard_normal((10, 64)) / 8, "w": KERNEL}
    return model(nodes, {"x": (n, 64, SIDE, SIDE)}, "y", {k: v.astype(np.float32) for k, v in weights.items()})


def table(proto, device: str = "h200", timer=None) -> tables.Table:
    net = alternatives(lowered(proto))
    io = {t.name: Format(t.dtype, "chw") for t in (*net.inputs, *net.outputs)}
    return tables.tabulate(net, named(device), timer or timing.Predicted(named(device)), io=io, how=tables.Considered(False))


def assembled(t: tables.Table, chosen: plan.Plan) -> Engine:
    data, arena = assemble.assemble(t, chosen)
    record = plan_record(data, (SparsityRecord("disable", (), (), ()), solution_of(chosen)))
    return Engine(engine_record(Model("m"), t.device, Built(Flags("disable"), data.sections, (record,))), arena)


def outputs(engine: Engine, images: np.ndarray) -> np.ndarray:
    with engine.context(device="emulator", graph=False) as ctx:
        return ctx.run({"x": images})["y"]


class Favouring:
    """Predicted times; at `batches`, a tenth for tactics that share K among blocks in a way: `split` or `stream`; elsewhere ten
    times as long."""

    def __init__(self, how: str, batches=POINTS):
        self.failures: dict = {}
        self.how, self.batches, self.times = how, batches, timing.Predicted(named("h200"))
        self.prepare = self.times.prepare

    def __call__(self, problem, tactics):
        def us(t, time):
            shared = isinstance(t.tile, Tile) and getattr(t.tile, self.how) > 1
            return time.us * (0.1 if problem.n in self.batches else 10) if shared else time.us

        return {t: replace(time, us=us(t, time)) for t, time in self.times(problem, tactics).items()}


@cache
def found_at(how: str, batches=POINTS) -> list[tables.Table]:
    return [table(small(n), timer=Favouring(how, batches) if how else None) for n in POINTS]


def engines_of(found, plans) -> list[Engine]:
    return [assembled(t, p) for t, p in zip(found, plans, strict=True)]


def answers(engines: list[Engine]) -> list[np.ndarray]:
    images = np.random.default_rng(0).uniform(-1, 1, (POINTS[-1], 64, SIDE, SIDE)).astype(np.float32)
    return [outputs(e, images[:n]) for e, n in zip(engines, POINTS, strict=True)]


@pytest.mark.parametrize("how", ["", "split", "stream"])
def test_an_image_has_the_same_bits_in_each_batch(how):
    """Also with K split; stream-K is left out, though it be the fastest."""
    found = found_at(how)
    plans = invariant.solve(found)
    engines = engines_of(found, plans)
    assert order_of_sums.agreeing([e.plan.layers for e in engines]) == [(0, 1, 2)]
    assert {len(p.entries) for p in plans} == {len(plans[0].entries)}
    tiles = [e.tactic.tile for p in plans for e in p.entries.values() if e.tactic and isinstance(e.tactic.tile, Tile)]
    assert any(t.split > 1 for t in tiles) == (how == "split") and not any(t.stream for t in tiles)
    ys = answers(engines)
    assert ys[2].shape == (16, 10) and np.abs(ys[2]).max() > 0.01
    assert all(np.array_equal(y, ys[2][: len(y)]) for y in ys)


def test_a_plan_of_many_batches_costs_what_its_tactics_take_at_each():
    found = found_at("")
    for t, p in zip(found, invariant.solve(found), strict=True):
        (op,) = (op for op in t.network.ops if op.name in p.entries and op.name.startswith("c"))
        rows = t.times[t.network.ops.index(op)]
        assert p.entries[op.name].us == pytest.approx(rows[p.entries[op.name].tactic].us)
        assert p.us >= plan.solve(t.graph).us - 1e-6
        assert p.total_ps == sum(e.time_ps for e in p.entries.values()) + sum(t.graph.reformat_ps(*hop) for hop in p.reformats)


def convolution(n: int):
    return model([node("Conv", "x w", "y", pads=(1, 1, 1, 1))], {"x": (n, 64, SIDE, SIDE)}, "y", {"w": KERNEL})


def test_free_plans_that_split_k_at_some_batches_are_told_apart_and_differ():
    found = [table(convolution(n), timer=Favouring("split", (1,))) for n in POINTS]
    engines = engines_of(found, [plan.solve(t.graph) for t in found])
    assert order_of_sums.agreeing([e.plan.layers for e in engines]) == [(0,), (1, 2)]
    one, four, sixteen = answers(engines)
    assert np.array_equal(four, sixteen[:4])
    assert not np.array_equal(one, four[:1]) and np.allclose(one, four[:1], atol=1e-2)
    one, four, sixteen = answers(engines_of(found, invariant.solve(found)))
    assert np.array_equal(four, sixteen[:4]) and np.array_equal(one, four[:1])


def normalization(n: int):
    scale = np.full((64, 32, 32), 3, np.float32)
    return model([node("LayerNormalization", "x s", "y", axis=1)], {"x": (n, 64, 32, 32)}, "y", {"s": scale})


def test_long_rows_are_shared_among_other_numbers_of_blocks_at_other_batches():
    """All by the one tactic that there is for their formats: the order of sums tells the points apart."""
    found = [table(normalization(n)) for n in POINTS]
    engines = engines_of(found, [plan.solve(t.graph) for t in found])
    assert order_of_sums.agreeing([e.plan.layers for e in engines]) == [(0,), (1,), (2,)]
    with pytest.raises(ModelError, match="batches 1, 4, 16 have no plan in common .* no usable tactic .* for y"):
        invariant.solve(found)
    engines = engines_of(found[:2], invariant.solve(found[:2]))
    assert order_of_sums.agreeing([e.plan.layers for e in engines]) == [(0, 1)]


@pytest.mark.parametrize("block", [attention_models.tokens, attention_models.cross_covariance, attention_models.windows])
def test_options_that_other_batches_lack_are_left_out(block):
    """At batch 1 axes vanish, so that attention apart has other ops there."""
    found = [table(block(b=b)) for b in (1, 2, 5)]
    plans = invariant.solve(found)
    assert order_of_sums.agreeing([e.plan.layers for e in engines_of(found, plans)]) == [(0, 1, 2)]


def test_networks_with_other_layers_have_no_plan_in_common():
    found = [table(attention_models.own_products(b=b)) for b in (1, 2, 5)]
    with pytest.raises(ModelError, match="axes of size 1 vanish: begin with batch 2"):
        invariant.solve(found)
    assert len(invariant.solve(found[1:])) == 2


# ---- the properties of a tactic that decide the order of sums


def test_every_number_that_a_batch_changes_is_known_to_leave_the_order_of_sums_alone():
    """Of all tactics of problems at batches 1, 3 and 40, only those of stream-K have other orders."""
    epilogue = replace(ConvProblem(1, 64, 8, 8, 64, 3, 3).epilogue, residual=True)
    problems = [
        ConvProblem(1, 64, 8, 8, 64, 3, 3, pad=(1, 1, 1, 1), epilogue=epilogue, sparse24=True),
        ConvProblem(1, 64, 8, 8, 64, 3, 3, pad=(1, 1, 1, 1), groups=8),
        ConvProblem(1, 64, 8, 8, 64, 3, 3, pad=(1, 1, 1, 1), groups=64),
        ConvProblem(1, 3, 32, 32, 32, 3, 3, stride=(2, 2)),
    ]
    for device in ("h200", "rtx4090"):
        for problem in problems:
            same = [
                {t: order_of_sums.order(p, t) for t in candidates(p, named(device))}
                for n in (1, 3, 40)
                if (p := replace(problem, n=n))
            ]
            for t in same[0]:
                orders = {own[t] for own in same if t in own}
                assert orders == {None} if isinstance(t.tile, Tile) and t.tile.stream else len(orders) == 1, (t, problem)


def test_functions_of_a_library_that_add_up():
    shape = (2, 3, 4)
    for name in FUNCTIONS:
        p = LibraryProblem(name, ("t0",), (shape,), ("fp16",), shape, "fp16", ((2, 3, 1, 4),) * 2)
        tactic = candidates(p, named("h200"))[0]
        (call,) = launches(p, tactic)
        assert isinstance(call, Call)
        assert (order_of_sums.order(p, tactic) is None) == (name in order_of_sums.SUMS), name
    adding = {"CumSum", "GlobalLpPool", "LpNormalization"}
    assert adding <= order_of_sums.SUMS <= FUNCTIONS.keys()
