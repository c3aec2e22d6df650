"""The emulated CUDA driver's virtual clock: noise, tails, drift and throttling, and what a kernel spins."""

import json

import numpy as np
import pytest

from cuda_kernels.device import current, named
from tests.driver.test_emulated_streams import N, setup
from tests.on_driver import kernel, passes

pytestmark = pytest.mark.driver


def times_of_launches():
    """20 times of one kernel in microseconds, and the clock in MHz that is reported after each."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    cupy, a, _, x = setup()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    rows = []
    for _ in range(20):
        begin.record(a)
        kernel("spin")((1,), (N,), (x, np.int32(200)), stream=a)
        end.record(a)
        end.synchronize()
        rows.append((1e3 * cupy.cuda.get_elapsed_time(begin, end), pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)))
    print(json.dumps(rows))


def times(**changes) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array(json.loads(passes(times_of_launches, **changes))).T)


def test_times_of_the_virtual_clock():
    quiet, _ = times(noise=0.0)
    assert np.ptp(quiet) < 0.02 and quiet[0] > 2  # events are told in single precision
    noisy, clock = times(noise=0.05, seed=1)
    assert (times(noise=0.05, seed=1)[0] == noisy).all() and (times(noise=0.05, seed=2)[0] != noisy).any()
    assert 0.02 < noisy.std() / noisy.mean() < 0.1 and abs(noisy.mean() / quiet[0] - 1) < 0.05
    assert (clock == named("h200").clock_mhz).all()


def test_slow_tails_drift_and_throttling():
    quiet = times(noise=0.0)[0][0]
    slow = times(noise=0.0, tail_share=0.3, tail_factor=10.0)[0] / quiet
    assert 1 <= (slow > 9).sum() < 15 and (slow < 1.1).sum() >= 5
    drifting = times(noise=0.0, drift_per_s=1e4)[0]
    assert (np.diff(drifting) > 0).all() and drifting[-1] > 1.3 * drifting[0]
    throttled, clock = times(noise=0.0, throttle_from_us=5 * quiet, throttle_to_us=30 * quiet, throttle_factor=0.5)
    slow = throttled > 1.5 * quiet
    assert slow.any() and not slow[0] and not slow[-1]
    assert (clock[5:9] == named("h200").clock_mhz // 2).all() and clock[0] == clock[-1] == named("h200").clock_mhz


def times_of_spins():
    """20 times in microseconds of a launch that spins 100,000 clocks and of one that spins none."""
    from cuda_kernels.compile import compile_kernel
    from cuda_kernels.launch import Cuda

    gpu = Cuda(current())
    flush, (begin, end) = (
        gpu.load(compile_kernel("flush_l2", {}, gpu.device.sm)),
        (gpu.cupy.cuda.Event(), gpu.cupy.cuda.Event()),
    )
    rows = []
    for _ in range(20):
        for clocks in (100_000, 0):
            begin.record(gpu.stream)
            gpu.launch(flush, (1, 1, 1), (256, 1, 1), 0, np.array([0, 0, 0, clocks], np.int64).tobytes())
            end.record(gpu.stream)
            end.synchronize()
            rows.append(1e3 * gpu.cupy.cuda.get_elapsed_time(begin, end))
    print(json.dumps(rows))


def test_spun_clocks_tell_the_clock():
    """They last as long as they do at the clock of that moment: no noise, no tail. The rest of the launch has both."""
    mhz, every = named("h200").clock_mhz, 5e5 / named("h200").clock_mhz
    fall = {"throttle_from_us": 0.0, "throttle_to_us": every, "throttle_every_us": 2.5 * every, "throttle_factor": 0.8}
    spun, idle = (
        np.array(json.loads(passes(times_of_spins, noise=0.05, tail_share=0.2, tail_factor=2.0, **fall))).reshape(-1, 2).T
    )
    found = 100_000 / (spun - np.median(idle)) / mhz
    slow = found < 0.9
    assert found[slow] == pytest.approx(0.8, rel=0.1) and found[~slow] == pytest.approx(1.0, rel=0.1)
    assert (np.diff(slow.astype(int)) != 0).sum() >= 3, "the clock falls again and again"
    assert idle.std() / idle.mean() > 0.02
