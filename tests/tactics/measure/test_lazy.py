"""Builds that time few tactics, on a simulated GPU: the truth is an estimate with a drawn error, never below the floor."""

import math
import random
import zlib
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest

import gpu_runtime as gr
from cuda_kernels.device import named
from gpu_runtime.building import build as building
from gpu_runtime.engine import encode
from gpu_runtime.explain import report
from gpu_runtime.runtime.plan_record import Timing
from tactics.candidates import candidates
from tactics.measure import lazy
from tactics.measure.lazy import LEVELS, Lazy
from tactics.measure.timing import Predicted, Time
from tactics.predict import predict_us
from tactics.problems.problem import ConvProblem
from tactics.roofline import least_us
from tests.conftest import MODELS

H200 = named("h200")
PROBLEM = ConvProblem(8, 64, 28, 28, 64, 3, 3, pad=(1, 1, 1, 1))


def drawn(text: str) -> float:
    return random.Random(zlib.crc32(text.encode())).gauss(0, 1)


class Truth(Predicted):
    """A GPU whose kernels take `factor` times what is estimated, give or take; `failing` names tactics that fault."""

    def __init__(self, factor=1.0, failing=()):
        super().__init__(H200)
        self.factor, self.failing, self.cache, self.asked = factor, failing, {}, 0
        self.faulted = set()

    def us(self, problem, tactic):
        error = 0.15 * drawn(str(problem)) + 0.10 * drawn(f"{problem}{tactic.name}")
        return max(least_us(problem, tactic, H200)[0], predict_us(problem, tactic, H200) * self.factor * math.exp(error))

    def __call__(self, problem, tactics):
        found = {}
        for t in tactics:
            if t.name in self.failing:
                self.failures[str(problem), t.name] = "it faulted"
                self.faulted.add((problem, t.name))
                continue
            if (problem, t) not in self.cache:
                self.asked += 1
                us = self.us(problem, t)
                self.cache[problem, t] = Time(us, us, us)
            found[t] = self.cache[problem, t]
        return found

    def known(self, problem, tactics):
        self.failures |= {(str(problem), t.name): "it faulted" for t in tactics if (problem, t.name) in self.faulted}
        return {t: self.cache[problem, t] for t in tactics if (problem, t) in self.cache}


def built(truth, level, path, ended=lambda: False, **options):
    timers = []

    def make(device, *_):
        timers.append(Lazy(truth, device, LEVELS[level], ended) if level in LEVELS else truth)
        return timers[-1]

    with mock.patch.object(building, "make_timer", make):
        return gr.build(path, sparsity="force", device="h200", risk=0.5, optimization_level=level, **options), timers[0]


NETWORKS = {
    "resnet20": (MODELS / "resnet20_cifar10.onnx", {"input": (32, 3, 32, 32)}, 0.10),
    "squeezenet": (MODELS / "squeezenet11_fp16.onnx", None, 0.20),
}


@cache
def lazily(network, factor):
    """(truth, engine, timer) of a build at level 3."""
    path, shapes, _ = NETWORKS[network]
    truth = Truth(factor)
    return truth, *built(truth, 3, path, shapes=shapes)


@pytest.mark.parametrize("factor", [1.0, pytest.param(1.5, marks=pytest.mark.full), pytest.param(0.7, marks=pytest.mark.full)])
@pytest.mark.parametrize("network", ["resnet20", pytest.param("squeezenet", marks=pytest.mark.full)])
def test_few_pairs_are_timed_and_the_plan_is_as_good(network, factor):
    path, shapes, most = NETWORKS[network]
    best, _ = built(Truth(factor), 5, path, shapes=shapes)
    truth, engine, timer = lazily(network, factor)
    timed, every = timer.counts
    assert timed == truth.asked <= most * every
    assert engine.plan.solution.total_us <= 1.005 * best.plan.solution.total_us
    tuned = engine.plan.solution.tuned
    assert (tuned.timed, tuned.untimed, tuned.sigmas, tuned.missing) == (timed, every - timed, 2.0, ())
    assert best.plan.solution.tuned is None


def test_what_is_said_of_a_plan_is_timed():
    """Each layer's best kernels, and the entries of the plan with a layer forced the other way."""
    truth, engine, _ = lazily("resnet20", 1.0)
    names = {t.name for _, t in truth.cache}
    rows = [r for r in engine.sparsity.rows if r.best_sparse and r.best_dense]
    assert len(rows) > 15
    assert all({r.best_sparse.tactic.name, r.best_dense.tactic.name} <= names for r in rows)
    answer = engine.what_if({rows[3].layer: "dense" if rows[3].verdict == "sparse" else "sparse"})
    assert all(c.after is None or c.after.timed for c in answer.layers) and "at least" not in answer.text


def test_a_second_build_times_nothing_and_gives_the_same_bytes():
    path, shapes, _ = NETWORKS["resnet20"]
    truth, first, _ = lazily("resnet20", 1.0)
    asked = truth.asked
    second, _ = built(truth, 3, path, shapes=shapes)
    assert truth.asked == asked
    assert encode(first) == encode(second)


@pytest.mark.full
def test_what_else_a_cache_holds_changes_no_second_build():
    """Times that another build added, of a higher level: the next builds agree with each other and use them."""
    path, shapes, _ = NETWORKS["resnet20"]
    truth = Truth()
    low, high = built(truth, 1, path, shapes=shapes)[0], built(truth, 4, path, shapes=shapes)[0]
    asked = truth.asked
    again = [built(truth, 3, path, shapes=shapes)[0] for _ in range(2)]
    assert truth.asked == asked
    assert encode(again[0]) == encode(again[1])
    assert high.plan.solution.total_us <= again[0].plan.solution.total_us <= low.plan.solution.total_us


def test_the_end_of_tuning_leaves_the_best_plan_so_far():
    path, shapes, _ = NETWORKS["resnet20"]
    left = iter([False] * 9)
    engine, timer = built(Truth(), 3, path, lambda: next(left, True), shapes=shapes)
    tuned = engine.plan.solution.tuned
    assert timer.early and 0 < timer.counts[0] < 60
    assert (
        tuned.early
        and tuned.missing
        and set(tuned.missing) <= {name for layer in engine.plan.layers for name in (layer.name, *layer.nodes)}
    )
    assert "not proven minimal: timing ended early, without " in report.plan_text(engine.record)
    measured = replace(engine.record, timing=Timing("measured", "measured"))
    table = report.plan_text(measured).split("total ")[0]
    assert table.count("~") == sum(layer.name in tuned.missing for layer in engine.plan.layers) > 0


@pytest.mark.full
def test_a_tactic_that_fails_is_left_out():
    path, shapes, _ = NETWORKS["resnet20"]
    usual, _ = built(Truth(), 3, path, shapes=shapes)
    failing = {layer.tactic_name for layer in usual.plan.layers}
    truth = Truth(failing=failing)
    engine, timer = built(truth, 3, path, shapes=shapes)
    assert not failing & {layer.tactic_name for layer in engine.plan.layers}
    assert timer.failures
    truth.failures.clear()  # the next build reads them from the cache
    again, _ = built(truth, 3, path, shapes=shapes)
    assert encode(again) == encode(engine)


def test_corrections_do_not_depend_on_the_order_of_times():
    tactics, bounds = candidates(PROBLEM, H200), []
    some = tactics[:40]
    for order in (some, some[::-1], random.Random(1).sample(some, len(some))):
        timer = Lazy(Truth(1.3), H200, lazy.Level(2.0, 0))
        timer(PROBLEM, tactics)
        for t in order:
            timer.refine([(PROBLEM, t)])
        bounds.append(timer(PROBLEM, tactics))
    assert bounds[0] == bounds[1] == bounds[2]
    assert sum(time.timed for time in bounds[0].values()) == len(some) < len(tactics)


def test_bounds():
    """Never over the truth by much, never below the floor, and close to it once a kernel has been timed often."""
    truth, tactics = Truth(1.4), candidates(PROBLEM, H200)
    timer = Lazy(truth, H200, lazy.Level(2.0, 0))
    before = timer(PROBLEM, tactics)
    assert not any(time.timed for time in before.values())
    assert all(time.us >= least_us(PROBLEM, t, H200)[0] for t, time in before.items())
    assert timer.refine([(PROBLEM, t) for t in tactics[::3]])
    assert not timer.refine([(PROBLEM, t) for t in tactics[::3]])
    after = timer(PROBLEM, tactics)
    assert {t for t, time in after.items() if time.timed} == set(tactics[::3])
    open_ = [t for t, time in after.items() if not time.timed]
    over = sum(after[t].us > truth.us(PROBLEM, t) for t in open_)
    assert over < 0.05 * len(open_)
    assert sum(after[t].us for t in open_) > 1.2 * sum(before[t].us for t in open_)


@pytest.mark.parametrize("level", [-1, 6, True, 2.5, "3"])
def test_levels_are_checked(level):
    with pytest.raises(ValueError, match="optimization_level: expected a whole number from 0 to 5"):
        gr.build(NETWORKS["squeezenet"][0], optimization_level=level)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "5", True])
def test_the_time_of_tuning_is_checked(seconds):
    with pytest.raises(ValueError, match="tuning_time: expected seconds"):
        gr.build(NETWORKS["squeezenet"][0], tuning_time=seconds)
