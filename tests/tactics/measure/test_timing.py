"""The race, and a child process that hangs, dies or talks nonsense: all without a GPU.

The child is a script below that plays a worker; nothing it says ever comes near a real cache.
"""

import json
import os
import signal
from dataclasses import replace

import pytest

from cuda_kernels.compile import CompileError
from tactics.candidates import candidates
from tactics.measure import compiling, timing
from tactics.measure.cache import Cache
from tactics.measure.race import quantiles
from tests.tactics.measure.scripted import CHW, H200, PROBLEM, requests, tactics


def test_every_tactic_gets_a_time_and_a_second_timer_needs_no_child(fake):
    many = tactics(5)
    timer = fake({many[2].name: 40.0})
    times = timer(PROBLEM, many)
    assert set(times) == set(many) and not timer.failures
    assert times[many[2]].us == 40 > times[many[0]].high_us and times[many[0]].low_us <= times[many[0]].us
    lines = [json.loads(line) for line in fake.path.read_text().splitlines()]
    assert all(r["clock_mhz"] == 1755 and r["rel_error"] == 2e-4 and r["policy"].startswith(timing.POLICY) for r in lines)
    started = fake.log().count("started")
    assert fake()(PROBLEM, many) == times
    assert fake.log().count("started") == started == 1


def test_times_without_early_launches_are_others(fake, monkeypatch):
    """A cache of usual times has none for GPU_RUNTIME_LAUNCH=rawkernel, and is not told of what that takes."""
    (one,) = tactics(1)
    usual = fake().key(PROBLEM, one)
    monkeypatch.setenv("GPU_RUNTIME_LAUNCH", "rawkernel")
    assert fake().key(PROBLEM, one).device == f"{usual.device}|no early launches"


def test_those_far_behind_their_cell_stop_early(fake):
    dense, sparse, linear = tactics(3), tactics(2, kernel="conv_sparse24"), tactics(1, out=CHW)
    slow = {dense[1].name: 130.0, dense[2].name: 18.0, sparse[0].name: 50.0, sparse[1].name: 100.0, linear[0].name: 90.0}
    timer = fake(slow)
    timer(PROBLEM, [*dense, *sparse, *linear])
    counts = {t.name: timer.cache.get(timer.key(PROBLEM, t))["n"] for t in [*dense, *sparse, *linear]}
    assert counts[dense[1].name] == 1 and counts[sparse[1].name] == counts[dense[2].name] == 2
    # The best of the dense cell and of the sparse one; alone in the cell of another output format.
    assert min(counts[t.name] for t in (dense[0], sparse[0], linear[0])) > 2


def test_rivals_are_asked_for_together_once_each_has_run_alone(fake):
    many = tactics(3)
    fake()(PROBLEM, many)
    asked = [(len(r["tactics"]), r["samples"]) for r in requests(fake) if r["op"] == "time"]
    assert asked[:4] == [(1, 1), (1, 1), (1, 1), (3, 1)] and all(count == 3 for count, _ in asked[3:])


def test_what_is_known_of_a_cell_counts_in_a_later_race(fake):
    first, second, third = tactics(3)
    fake()(PROBLEM, [first])
    timer = fake({second.name: 99.0, third.name: 150.0})
    timer(PROBLEM, [first, second])
    timer(PROBLEM, [third])  # a build that asks for more when it needs more
    assert [timer.cache.get(timer.key(PROBLEM, t))["n"] for t in (second, third)] == [2, 1]


def test_known_measures_nothing(fake):
    one, two = tactics(2)
    timer = fake()
    assert timer.known(PROBLEM, [one, two]) == {} and not fake.log()
    times = timer(PROBLEM, [one])
    assert timer.known(PROBLEM, [one, two]) == times


def test_where_nothing_may_be_measured_a_miss_is_an_error_that_counts(fake):
    many = tactics(4)
    fake()(PROBLEM, many[:2])
    fake(driver="579")(PROBLEM, many[2:3])
    timer, before = fake(only_known=True), fake.log()
    assert set(timer(PROBLEM, many[:2])) == set(many[:2])
    timer.prepare([(PROBLEM, many)])
    with pytest.raises(ValueError, match="errorOnTimingCacheMiss") as e:
        timer(PROBLEM, many[2:3])
    assert f"lacks times that the build needs, as for {many[2].name}, {PROBLEM}" in str(e.value)
    assert "2 of 4 times used; 1 measured with another driver; 1 not in it)" in str(e.value) and fake.log() == before


def test_a_whole_network_is_timed_once(fake):
    timer, asked = fake(), []
    first = timer.remembered("network a", "whole", lambda: asked.append(1) or [5.0, 6.0, 7.0])
    assert first.us == 6.0 and fake(only_known=True).remembered("network a", "whole", lambda: pytest.fail("timed")) == first
    with pytest.raises(ValueError, match="as for layer 1, network a"):
        fake(only_known=True).remembered("network a", "layer 1", lambda: pytest.fail("timed"))
    assert asked == [1]


def test_a_timer_tells_at_its_end_what_the_cache_was_good_for(fake):
    many, told = tactics(3), []
    fake()(PROBLEM, many[:2])
    with fake.path.open("a") as file:
        file.write("junk\n")
    timer = fake(told=told.append)
    assert len(timer.known(PROBLEM, [*many, *tactics(5)])) == 2, "what is never asked for is not missed"
    timer(PROBLEM, many)
    assert told == []
    timer.close()
    assert told == [f"{fake.path}: 2 of 3 times used; 1 not in it; 1 of its lines are no measurements"]


def test_failures_that_the_cache_knows_are_told_without_measuring(fake):
    one = tactics(1)
    fake({one[0].name: "error"})(PROBLEM, one)
    timer = fake()
    assert timer.known(PROBLEM, one) == {} and "relative error" in timer.failures[str(PROBLEM), one[0].name]


def test_the_child_learns_the_clock_and_what_the_network_is_like(fake):
    one, timer = tactics(1), fake()
    timer.warm_l2, timer.zeros = True, {PROBLEM: (True,)}
    timer(PROBLEM, one)
    timer(replace(PROBLEM, n=2), one)
    asked = [(r["warm_l2"], r["mhz"], r["zeros"]) for r in requests(fake) if r["op"] == "problem"]
    assert asked == [(True, None, [True]), (True, 1755, [])]


@pytest.mark.parametrize("change", [{"warm_l2": True}, {"zeros": {PROBLEM: (True,)}}], ids=str)
def test_times_under_other_conditions_are_others(fake, change):
    one = tactics(1)
    fake()(PROBLEM, one)
    timer = fake()
    vars(timer).update(change)
    assert timer.known(PROBLEM, one) == {} and timer(PROBLEM, one) and len(Cache(fake.path)) == 2


def test_samples_at_a_low_clock_are_marked_and_told_once(fake):
    many = tactics(2)
    timer = fake({"slow": 1})
    with pytest.warns(RuntimeWarning, match="stayed below its median") as told:
        timer(PROBLEM, many)
    assert len(told) == 1 and timer.cache.get(timer.key(PROBLEM, many[0]))["slow"] >= 1


def test_another_driver_measures_again(fake):
    one = tactics(1)
    fake()(PROBLEM, one)
    timer = fake(driver="581")
    timer(PROBLEM, one)
    assert len(Cache(fake.path)) == 2 and "0 of 1 times used; 1 measured with another driver" in timer.cache_text()


def test_another_problem_measures_again(fake):
    one, timer = tactics(1), fake()
    timer(PROBLEM, one)
    timer(replace(PROBLEM, n=2), one)
    assert sum('"problem"' in line and '"op": "problem"' in line for line in fake.log()) == 2
    assert fake.log().count("started") == 1


@pytest.mark.parametrize(
    ("what", "text", "restarts"),
    [
        ("hang", "no answer in 0.5 s: the process hung", True),
        ("crash", "ended with code -6", True),
        ("leave", "out of luck", True),
        ("garbage", "Segmentation fault?", True),
        ("list", "not a JSON answer", True),
        ("other id", "answered another request", True),
        ("few", "without 1 times", True),
        ("negative", "without 1 times", True),
        ("error", "wrong: relative error 0.5", False),
        ("fatal", "misaligned address", True),
    ],
)
def test_a_tactic_that_fails_is_recorded_and_the_rest_goes_on(fake, what, text, restarts):
    many = tactics(4)
    timer = fake({many[1].name: what}, timeout_s=0.5 if what == "hang" else 20.0)
    times = timer(PROBLEM, many)
    assert set(times) == {many[0], many[2], many[3]}
    assert text in timer.failures[str(PROBLEM), many[1].name]
    assert fake.log().count("started") == 1 + 2 * restarts  # a tactic that ends the child is tried once more in a fresh one
    again = fake()  # the failure stays in the cache and is not tried again
    assert again(PROBLEM, many) == times and text in again.failures[str(PROBLEM), many[1].name]
    assert fake.log().count("started") == 1 + 2 * restarts


@pytest.mark.parametrize("what", ["crash", "fatal", "leave"])
def test_a_fault_that_does_not_come_again_is_not_kept(fake, what):
    many = tactics(3)
    timer = fake({many[1].name: [what, 10.0]})
    assert set(timer(PROBLEM, many)) == set(many) and not timer.failures and fake.log().count("started") == 2


def test_the_culprit_of_a_joint_fault_is_found_alone(fake):
    """It crashes beside others only: each is asked alone in a fresh child, and none is blamed."""
    many = tactics(4)
    timer = fake({many[2].name: "jointly"})
    assert set(timer(PROBLEM, many)) == set(many) and not timer.failures
    assert all("error" not in json.loads(line) for line in fake.path.read_text().splitlines())


@pytest.mark.parametrize(("what", "text"), [("busy", "too busy"), ("killed", "code -9, from outside")])
def test_a_failure_that_is_not_the_tactics_is_not_remembered(fake, what, text):
    many = tactics(2)
    timer = fake({many[0].name: what})
    assert set(timer(PROBLEM, many)) == {many[1]} and text in timer.failures[str(PROBLEM), many[0].name]
    assert set(fake()(PROBLEM, many)) == set(many)


def test_what_was_measured_before_a_problem_cannot_be_set_up_again_is_kept(fake):
    many = tactics(4)
    timer = fake({many[0].name: "fatal", "setups": 1})
    times = timer(PROBLEM, many)
    assert times and many[0] not in times and len(times) + len(timer.failures) == len(many)
    assert all("could not be set up" in text for text in timer.failures.values())
    assert set(fake()(PROBLEM, many)) == set(many), "the fault was not seen twice"


def test_a_tactic_that_does_not_compile_is_recorded(fake, monkeypatch):
    def compile_kernel(kernel, values, sm):
        if values["BM"] == 32:
            raise CompileError("conv_dense.cu(7): error: expected a ;")

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    many = tactics(3)
    timer = fake(compile_first=True)
    timer.prepare([(PROBLEM, many)])
    assert set(timer(PROBLEM, many)) == {many[0], many[2]}
    assert "expected a ;" in timer.failures[str(PROBLEM), many[1].name]


@pytest.mark.parametrize("what", ["error", "crash"])
def test_a_problem_that_cannot_be_set_up_fails_without_a_record(fake, what):
    many = tactics(2)
    timer = fake({"setup": what})
    assert timer(PROBLEM, many) == {}
    assert len(timer.failures) == 2 and "could not be set up" in timer.failures[str(PROBLEM), many[0].name]
    assert not fake.path.exists()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"start": "leave"}, "out of luck"),
        ({"start": "garbage"}, "Segmentation fault?"),
        ({"device": "RTX 4090|sm_89|128|1"}, "the current GPU is RTX 4090"),
    ],
)
def test_without_a_working_child_nothing_is_measured(fake, how, text):
    with pytest.raises(ValueError, match="nothing can be measured") as e:
        fake(how)(PROBLEM, tactics(1))
    assert text in str(e.value)


def test_a_child_that_died_between_two_calls_is_replaced(fake):
    timer = fake()
    first, second = tactics(2)
    timer(PROBLEM, [first])
    os.kill(timer.racing.worker._process.pid, signal.SIGKILL)
    timer.racing.worker._process.wait()
    assert set(timer(PROBLEM, [first, second])) == {first, second} and not timer.failures


# ---- predictions


def test_predictions_have_a_band_and_are_never_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Cache, "add", lambda *_, **__: pytest.fail("a prediction was written"))
    timer = timing.Predicted(H200)
    some = candidates(PROBLEM, H200)
    times = timer(PROBLEM, some)
    assert set(times) == set(some) and timer(PROBLEM, some) == times and not timer.failures
    assert all(0 < t.low_us < t.us < t.high_us for t in times.values())
    assert list(tmp_path.iterdir()) == []


# ---- the pieces of the child


def test_quantiles_are_ordered():
    assert quantiles([3.0]) == (3.0, 3.0, 3.0)
    assert quantiles(list(range(101, 112))) == (103, 106, 109)
