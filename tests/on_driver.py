"""Helpers for tests on the emulated CUDA driver: small kernels, and test functions run in a child process."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulated_driver import settings

ROOT = Path(__file__).parents[1]
ON_DRIVER = settings.VARIABLE in os.environ  # whether this process was started by `python -m tests.emulated_driver`
ORDER = settings.from_environment().order
timed = pytest.mark.skipif(  # of tests in which something is timed
    ON_DRIVER and ORDER == "eager", reason="in the eager order a launch runs while it is queued: nothing can be timed"
)
KERNELS = r"""
extern "C" __global__ void set_all(float* y, float value, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = value;
}
extern "C" __global__ void add_one(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1;
}
extern "C" __global__ void spin(float* y, int rounds) {
  float v = y[threadIdx.x];
  for (int i = 0; i < rounds; i++) v = v * 0.5f + 1;
  y[threadIdx.x] = v;
}
extern "C" __global__ void shared(float* y) {
  extern __shared__ float s[];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(64) small_block(float* y) { y[threadIdx.x] = 1; }
"""


def kernel(name: str):
    import cupy

    return cupy.RawKernel(KERNELS, name)


def started(function: Callable[[], None], **changes: object) -> subprocess.Popen:
    """Starts a function of a test module in a new process; `changes`: settings of its driver that differ."""
    module = ".".join(Path(inspect.getfile(function)).relative_to(ROOT).with_suffix("").parts)
    code = f"from {module} import {function.__name__}; {function.__name__}()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | settings.environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen, seconds: float) -> tuple[int, str, str]:
    """Waits for a process and returns (exit status, stdout, stderr); after `seconds` it is killed, and stderr says so."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nit had not ended in {seconds:g} s, and was killed"
    return process.returncode, out, err


def passes(function: Callable[[], None], *, seconds: float = 120, **changes: object) -> str:
    """Runs a function in a new process, as `started`, and returns its stdout; fails the test if the function raises, or does
    not end in `seconds`.
    """
    with started(function, **changes) as process:
        code, out, err = finished(process, seconds)
    if code:
        pytest.fail(f"{inspect.getdoc(function) or function.__name__}\n{out[-1000:]}{err[-3000:]}", pytrace=False)
    return out


class Refused:
    """A context that expects a CUDA error: `with Refused(700): call()` fails unless the call raises the error with code 700."""

    def __init__(self, code: int):
        self.code = code

    def __enter__(self) -> Refused:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        status = getattr(error, "status", None) if error is not None else 0
        if error is not None and status is None:
            return False
        assert status == self.code, f"expected error {self.code}, got {status}: {error}"
        return True
