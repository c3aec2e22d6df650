"""What NVML is asked about clocks, by its present and former names, and what is known without it."""

import sys
from types import SimpleNamespace

import pytest

from gpu_runtime.benchmark.clocks import ClockWatch


class NVMLError(Exception):
    pass


def library(**functions):
    """A stand-in for pynvml with one GPU at 1,200 of 1,500 MHz."""
    known = {"nvmlInit": lambda: None, "nvmlDeviceGetCount": lambda: 1, "nvmlDeviceGetHandleByIndex": lambda i: i}
    known |= {"nvmlDeviceGetMaxClockInfo": lambda h, kind: 1500, "nvmlDeviceGetClockInfo": lambda h, kind: 1200}
    return SimpleNamespace(NVML_CLOCK_SM=1, NVMLError=NVMLError, **known | functions)


def refuses(*_):
    raise NVMLError("Function Not Found")


EVENTS, THROTTLES = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"


@pytest.mark.parametrize(
    "functions",
    [
        {EVENTS: lambda h: 4, THROTTLES: refuses},
        {EVENTS: refuses, THROTTLES: lambda h: 4},  # a driver before 535
        {THROTTLES: lambda h: 4},  # a pynvml before 12.535
    ],
)
def test_reasons_by_the_present_and_the_former_name(functions, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library(**functions))
    watch = ClockWatch("0000:01:00.0")
    watch.look()
    seen = watch.seen()
    assert (seen.samples, seen.low_mhz, seen.most_mhz, seen.held) == (1, 1200, 1500, (("power cap", 1),))


@pytest.mark.parametrize("functions", [{"nvmlInit": refuses}, {EVENTS: refuses, THROTTLES: refuses}])
def test_without_the_library_nothing_is_known(functions, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library(**functions))
    watch = ClockWatch("0000:01:00.0")
    watch.look()
    assert watch.seen() is None
