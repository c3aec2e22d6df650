"""Which samples count, on a simulated clock of the GPU: it rises, falls for 30 of every 100 ms, falls for good."""

import random
import statistics
from collections.abc import Callable

import pytest

from tactics.sampling.samples import LASTING, LONGEST_MS, PAUSE_MS, RISING, TRIES, Sample, Steady

USUAL = 1980.0
SAMPLE_MS = 0.2  # the duration of a sample, with its flush


class Gpu:
    """A clock that is `factor(ms)` of the usual one, read with 0.3 % of noise."""

    def __init__(self, factor: Callable[[float], float], seed: int = 0) -> None:
        self.factor, self.rng = factor, random.Random(seed)
        self.now_ms, self.paused_ms, self.tries = 0.0, [], 0

    def sample(self) -> tuple[float, float]:
        self.now_ms += SAMPLE_MS
        self.tries += 1
        factor = self.factor(self.now_ms)
        return 10 / factor, USUAL * factor * self.rng.gauss(1, 0.003)

    def pause(self, ms: float) -> None:
        self.now_ms += ms
        self.paused_ms.append(ms)


def run(gpu: Gpu, count: int, steady: Steady | None = None) -> list[Sample]:
    steady = steady or Steady()
    return [steady.take(gpu.sample, gpu.pause) for _ in range(count)]


def throttled(ms: float) -> float:
    return 0.8 if ms % 100 >= 70 else 1.0


@pytest.mark.parametrize("seed", range(5))
def test_samples_of_a_clock_that_falls_now_and_then_are_those_of_one_that_does_not(seed):
    gpu = Gpu(throttled, seed)
    found = run(gpu, 5000)
    assert not any(s.slow for s in found) and {s.us for s in found} == {10}
    fell = gpu.now_ms / 100
    assert fell > 9 and gpu.tries < 5000 + 6 * fell, "a few tries each time, with pauses between"
    assert gpu.now_ms < 5000 * SAMPLE_MS / 0.7 * 1.15


def test_a_clock_that_starts_low_takes_no_sample_as_usual():
    """A child that starts while the clock is low is told the build's."""
    first = run(Gpu(lambda ms: throttled(ms + 70)), 20, Steady(USUAL))
    assert {s.us for s in first} == {10}


def test_pauses_are_short_and_grow():
    gpu = Gpu(lambda _: 0.5)
    (slow,) = run(gpu, 1, Steady(USUAL))
    assert slow.slow and gpu.tries == TRIES and len(gpu.paused_ms) == TRIES - 1
    assert gpu.paused_ms == sorted(gpu.paused_ms) and (gpu.paused_ms[0], gpu.paused_ms[-1]) == (PAUSE_MS, LONGEST_MS)
    assert sum(gpu.paused_ms) < 800


def test_a_clock_that_rises_is_followed_at_once():
    """From half the clock to all of it in 50 ms."""
    steady, gpu = Steady(), Gpu(lambda ms: min(1.0, 0.5 + ms / 100))
    for _ in range(int(50 / SAMPLE_MS) + RISING):
        us, mhz, slow = steady.take(gpu.sample, gpu.pause)
        assert not slow
        assert steady.mhz > 0.97 * mhz
    assert not gpu.paused_ms
    assert steady.mhz == pytest.approx(USUAL, rel=0.005)


@pytest.mark.parametrize("fall_ms", [1, 5, 20, 40])
def test_a_clock_that_falls_step_by_step_is_no_usual_one(fall_ms):
    """To 0.8 over some milliseconds, and back after 30: no median that follows samples one by one goes with it."""
    gpu = Gpu(lambda ms: 1 - 0.2 * min(1.0, max(0.0, ms - 60) / fall_ms) if ms < 90 + fall_ms else 1.0)
    found = run(gpu, 1000)
    assert not any(s.slow for s in found) and max(s.us for s in found) < 10 / 0.955
    assert gpu.now_ms < 1000 * SAMPLE_MS + 30 + fall_ms + LONGEST_MS


def test_a_clock_that_stays_low_is_the_usual_one_after_a_few_samples():
    steady, gpu = Steady(), Gpu(lambda ms: 1.0 if ms < 40 else 0.8)
    found = run(gpu, 1000, steady)
    assert sum(s.slow for s in found) == LASTING
    assert gpu.tries == 1000 + LASTING * (TRIES - 1) and gpu.now_ms < 40 + 1000 * SAMPLE_MS + 2400
    assert steady.mhz == pytest.approx(0.8 * USUAL, rel=0.005)
    back = Gpu(lambda _: 1.0)
    found = run(back, 2 * RISING, steady)
    assert not back.paused_ms and steady.mhz == pytest.approx(USUAL, rel=0.005)


def test_a_clock_that_drifts_slowly_is_followed():
    steady, gpu = Steady(), Gpu(lambda ms: 1 - 0.1 * ms / 2000)  # 5 % in a second
    run(gpu, 8000, steady)
    assert not gpu.paused_ms and steady.mhz == pytest.approx(USUAL * 0.92, rel=0.01)


def test_samples_that_disturb_each_other_are_repeated():
    """One in ten beside another process, which makes the spin last twice as long."""
    rng = random.Random(1)
    gpu = Gpu(lambda _: 0.5 if rng.random() < 0.1 else 1.0)
    assert {s.us for s in run(gpu, 500, Steady(USUAL))} == {10}


def test_only_slow_samples_in_a_row_tell_of_another_clock():
    steady = Steady(USUAL)
    for factor in (0.5, 0.5, 1.0) * 10:
        assert run(Gpu(lambda _, factor=factor: factor), 1, steady)[0].slow == (factor < 1)
    assert steady.mhz == pytest.approx(USUAL, rel=0.005)


def test_without_a_clock_each_sample_counts():
    steady = Steady(USUAL)
    assert steady.take(lambda: (3.0, None), pytest.fail) == Sample(3.0, None) and steady.mhz == USUAL
    assert Steady().take(lambda: (3.0, None), pytest.fail) == Sample(3.0, None) and Steady().mhz is None


def test_patience_bounds_the_pauses():
    steady, gpu = Steady(USUAL), Gpu(lambda _: 0.5)
    steady.patience_ms = 20
    assert run(gpu, 1, steady)[0].slow and 0 < sum(gpu.paused_ms) <= 20
    tries = gpu.tries
    steady.patience_ms = 0
    assert run(gpu, 1, steady)[0].slow and gpu.tries == tries + 1


def test_the_median_forgets_no_usual_clock_over_slow_samples_that_pass():
    """A second at half the clock, then back: the first sample behind it is told from the slow ones."""
    steady, gpu = Steady(), Gpu(lambda ms: 0.5 if 40 < ms < 1040 else 1.0)
    found = run(gpu, 400, steady)
    assert sum(s.slow for s in found) <= 1 and steady.mhz == pytest.approx(USUAL, rel=0.005)
    assert statistics.median(s.us for s in found) == 10
