"""What a sample finds in L2, which samples count on a clock that falls, rivals in one request, and copies of weights."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.device import current, why_no_gpu
from tactics.candidates import candidates
from tactics.launches import packing_key
from tactics.measure import racing, worker
from tactics.measure.child import Child
from tactics.problems import codec
from tactics.sampling import copies
from tactics.sampling.samples import LOW
from tactics.sampling.stopwatch import SPIN_US, Stopwatch
from tests.driver.test_driver_measuring import CONV, some, spoiled, verified
from tests.emulated_driver import settings
from tests.on_driver import passes, timed
from tests.problems import PROBLEMS

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY), timed]
emulated = pytest.mark.driver


@pytest.fixture(scope="module")
def device():
    return current()


@pytest.fixture(scope="module")
def bench(device):
    return worker.Bench(device)


def test_the_stopwatch_throws_away_what_the_host_was_too_slow_for(bench):
    watch = Stopwatch(bench.gpu)
    watch._slack, before = 1.0, watch.discarded
    assert len(watch.samples(lambda: time.sleep(0.001), lambda: None, 2)) == 2
    assert watch.discarded >= before + 4
    with pytest.raises(RuntimeError, match="overloaded"):
        watch.samples(lambda: time.sleep(0.02), lambda: None, 2)


def calls(bench, monkeypatch, tactic, **problem) -> list[str]:
    """What one sample of a tactic queues, in order: "flush", "spin", "copy", "run" (a graph of runs), other kernels by name."""
    found, gpu = [], bench.gpu
    launch, copy = gpu.launch, gpu.copy

    def launched(kernel, grid, *how):
        found.append(kernel.name if kernel.name != "flush_l2" else "spin" if grid == (1, 1, 1) else "flush")
        launch(kernel, grid, *how)

    monkeypatch.setattr(gpu, "launch", launched)
    monkeypatch.setattr(gpu, "copy", lambda *how: (found.append("copy"), copy(*how)))
    bench.set_problem(CONV, **problem)
    ready = bench.prepare(tactic)
    timed = replace(ready, timed=lambda: (found.append("run"), ready.timed()))
    for _ in range(20):  # a host that was too slow, or a low clock, makes a sample queue everything again: not that one
        found.clear()
        bench._sample(timed)
        if found.count("run") == 1:
            break
    return found


def test_weights_are_cold_and_the_input_is_as_a_kernel_wrote_it(bench, monkeypatch):
    tactic = candidates(CONV, bench.gpu.device)[0]
    assert calls(bench, monkeypatch, tactic) == ["flush", "spin", "copy", "run"]
    assert len(bench._copies.of(tactic, 0, 1, ()).sections) == worker.MAX_LAUNCHES and verified(bench, tactic) < 1e-3


def test_a_network_that_stays_in_l2_is_timed_warm(bench, monkeypatch):
    tactic = candidates(CONV, bench.gpu.device)[0]
    assert calls(bench, monkeypatch, tactic, warm_l2=True) == ["spin", "spin", tactic.kernel, "run"]
    assert len(bench._copies.of(tactic, 0, 1, ()).sections) == 1 and verified(bench, tactic) < 1e-3


def test_inputs_behind_a_relu_are_half_zeros_and_errors_are_still_seen(bench, monkeypatch):
    tactic = candidates(CONV, bench.gpu.device)[0]
    bench.set_problem(CONV, zeros=[True])
    assert 0.4 < (bench.inputs[0] == 0).mean() < 0.6 and verified(bench, tactic) < 1e-3
    bench.set_problem(CONV, zeros=[True])
    spoiled(bench, monkeypatch, lambda out: out[:64].fill(0x3C))
    with pytest.raises(RuntimeError, match="relative error"):
        bench.time([tactic], 1)


@pytest.mark.parametrize("budget", [1, 11 * 16384, 1 << 30])
def test_copies_of_weights_share_one_budget(bench, monkeypatch, budget):
    """Packings that no rival of the request has are given up; rivals have theirs together, at least one copy of each."""
    monkeypatch.setattr(copies, "BUDGET_BYTES", budget)
    problem = PROBLEMS["conv_stem"]
    packings = {packing_key(problem, t): t for t in reversed(candidates(problem, bench.gpu.device))}
    rivals = [*packings.values()][:3]
    bench.set_problem(problem)
    sizes = []  # of one copy: a stem's rows are packed for the warps of its tile
    for tactic in [*rivals, *rivals]:
        assert verified(bench, tactic) < 1e-3
        held = bench._copies.of(tactic, 0, 1, ())
        one = held.memory.nbytes // len(held.sections)
        sizes.append(one)
        assert len(held.sections) == min(max(budget // one, 1), worker.MAX_LAUNCHES) and bench._copies.nbytes <= max(
            budget, one
        )
    assert len(bench._copies._held) == (3 if budget == 1 << 30 else 1)
    reply = bench.time(rivals, 2)
    assert set(reply["us"]) == {t.name for t in rivals} and max(reply["rel_error"].values()) < 1e-3
    assert len(bench._copies._held) == 3 and bench._copies.nbytes <= max(budget, max(sizes)) + 2 * max(sizes)


# ---- on a clock that falls


@emulated
def test_the_spin_lasts_its_clocks_and_no_launch(bench):
    watch = Stopwatch(bench.gpu)
    _, spun_us = watch._sample(lambda: None, lambda: None)
    assert spun_us == pytest.approx(watch._clocks(SPIN_US) / bench.gpu.device.clock_mhz, abs=0.3)


def samples_of_rivals() -> None:
    """Of RIVALS tactics in one request, of one after the other, and of the first without an eye on the clock; the clocks."""
    bench, problem = worker.Bench(current()), PROBLEMS["conv"]
    rivals = [t for t in candidates(problem, bench.gpu.device) if t.kernel == "conv_dense"][:3]
    bench.set_problem(problem)
    together, apart = bench.time(rivals, 60), [bench.time([t], 60) for t in rivals]
    ready = bench.prepare(rivals[0])
    blind = [bench.stopwatch.sample(ready.before, ready.timed, ready.count) for _ in range(120)]
    print(json.dumps([[*together["us"].values()], [one["us"][t.name] for one, t in zip(apart, rivals, strict=True)], blind]))
    print(json.dumps([sum(together["mhz"].values(), []), together["slow"], bench.gpu.device.clock_mhz]))


def rivals(**changes) -> tuple[np.ndarray, ...]:
    """(microseconds of each rival's samples together, apart, the first's without an eye on the clock with the clock of each,
    clock of each sample over the device's, slow samples)."""
    first, second = passes(samples_of_rivals, checks=False, **changes).splitlines()
    (together, apart, blind), (mhz, slow, usual) = json.loads(first), json.loads(second)
    return np.array(together), np.array(apart), np.array(blind), np.array(mhz) / usual, slow


FALLS = {"throttle_from_us": 70e3, "throttle_to_us": 100e3, "throttle_every_us": 100e3, "throttle_factor": 0.8}


@pytest.fixture(scope="module")
def undisturbed():
    return np.median(rivals(noise=0.0)[0], axis=1)


@emulated
def test_samples_on_a_clock_that_falls_are_those_of_one_that_does_not(undisturbed):
    """For 30 of every 100 ms. A sample may meet the moment at which the clock falls: while its spin lasts, which then tells of
    a clock between both (kept from LOW on), or after it."""
    together, apart, blind, mhz, slow = rivals(noise=0.0, **FALLS)
    assert (blind[:, 0] > 1.2 * undisturbed[0]).sum() > 10 and (blind[:, 1] < 0.81 * blind[:, 1].max()).sum() > 10
    off = abs(np.array([together, apart]) / undisturbed[:, None] - 1) > 0.01
    assert np.median([together, apart], axis=2) == pytest.approx(np.array([undisturbed, undisturbed]), rel=0.01)
    assert off.mean() < 0.02 and slow == 0 and (mhz > 0.99 * LOW).all() and (mhz < 0.99).mean() < 0.02
    first = {"throttle_from_us": 20e3, "throttle_to_us": 50e3}  # while the new process looks at the clock
    noisy, _, _, mhz, slow = rivals(noise=0.02, seed=4, **FALLS | first)
    assert np.median(noisy, axis=1) == pytest.approx(undisturbed, rel=0.01) and slow == 0
    assert (mhz > 0.99 * LOW).all() and (abs(mhz - 1) > 0.01).mean() < 0.02


@emulated
def test_rivals_are_interleaved_so_that_none_meets_another_moment(undisturbed):
    """What drifts without the clock is in the samples of all; of tactics that are timed one after the other it is not."""
    together, apart, *_ = rivals(noise=0.0, drift_per_s=0.5)
    ratios = undisturbed / undisturbed[0]
    drifted = np.median(together, axis=1)
    assert drifted / drifted[0] == pytest.approx(ratios, rel=0.005) and drifted[0] > 1.01 * undisturbed[0]
    drifted = np.median(apart, axis=1) / ratios
    assert drifted[2] > 1.02 * drifted[0]


@emulated
def test_a_clock_that_stays_low_costs_a_few_samples(undisturbed):
    """From 150 ms on, as under a lower power limit: after the first tries it is the usual one."""
    together, apart, _, mhz, slow = rivals(noise=0.0, throttle_from_us=150e3, throttle_factor=0.8)
    assert slow <= 3 and np.median(apart, axis=1) == pytest.approx(undisturbed / 0.8, rel=0.01)


@emulated
@pytest.mark.parametrize("warm_l2", [False, True], ids=["cold", "warm"])
def test_several_tactics_are_one_request(device, monkeypatch, warm_l2):
    """The protocol of worker.py, for which a build's clock of before is too high."""
    fault = settings.Fault("conv_sparse24*", error="wrong")
    for name, value in settings.environment(faults=(fault,), checks=False, noise=0.0).items():
        monkeypatch.setenv(name, value)
    good, (bad,) = [t.name for t in some(device, "conv_dense")], [t.name for t in some(device, "conv_sparse24", 1)]
    process = Child(racing.WORKER)
    try:
        assert process.start(60)["device"] == device.key
        setup = {"op": "problem", "problem": codec.to_json(CONV), "warm_l2": warm_l2, "mhz": 2 * device.clock_mhz}
        assert process.ask(setup, 60) == {"id": 1}
        reply = process.ask({"op": "time", "tactics": good, "samples": 5}, 60)
        assert set(reply) == {"id", "us", "mhz", "rel_error", "slow"} and reply["slow"] == 0
        assert all(len(reply["us"][name]) == len(reply["mhz"][name]) == 5 and reply["rel_error"][name] < 1e-3 for name in good)
        assert sum(reply["mhz"].values(), []) == pytest.approx([device.clock_mhz] * 10, rel=0.01)
        assert "wrong" in process.ask({"op": "time", "tactics": [*good, bad], "samples": 5}, 60)["error"]
        assert process.ask(setup | {"zeros": [True], "mhz": None}, 60) == {"id": 4}
        assert set(process.ask({"op": "time", "tactics": good[:1], "samples": 1}, 60)["us"]) == {good[0]}
    finally:
        process.close()
