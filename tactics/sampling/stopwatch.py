"""A stopwatch for work on a GPU: the microseconds that it takes, and the SM clock just before it."""

import statistics
import time
from functools import partial

import numpy as np

from cuda_kernels.compile import compile_kernel
from cuda_kernels.launch import Cuda
from cuda_kernels.params import arrange, pack_params
from tactics.sampling.faults import Overloaded
from tactics.sampling.trial import Run
from tactics.step import Args

FLUSH_US, SPIN_US = 40.0, 80.0  # least times in microseconds of the launch that flushes L2, and of the one that only spins
MOST_SLACK = 40.0  # the largest factor by which both are lengthened if the host queues work slowly
TRIES = 20  # of one sample


class Spin:
    """The kernel flush_l2, which reads words of 16 bytes and then waits for a number of SM clocks. `words`: the most it may
    read."""

    def __init__(self, gpu: Cuda, words: int = 0):
        self.gpu, self.words = gpu, words
        self._kernel = gpu.load(compile_kernel("flush_l2", {}, gpu.device.sm))
        with gpu.current():
            self._data = gpu.cupy.zeros(words * 16 + 16, np.uint8)

    def delay(self, us: float) -> None:
        """Queues a launch of `us` microseconds, so that the host can queue further work before that starts."""
        self.launch(0, int(us * self.gpu.device.clock_mhz))

    def launch(self, words: int, clocks: int) -> None:
        at = self._data.data.ptr
        args: Args = {"data": ("ptr", at), "sink": ("ptr", at + self.words * 16), "words": ("i64", words)}
        params = pack_params(arrange("flush_l2", (), args | {"clocks": ("i64", clocks)}))
        self.gpu.launch(self._kernel, (8 * self.gpu.device.num_sms if words else 1, 1, 1), (256, 1, 1), 0, params)


class Stopwatch:
    """A stopwatch for work queued on the stream of `gpu`.

    One sample queues: flush of L2 -> event -> spin -> event -> before() -> event -> timed() -> event. The spin is a launch that
    reads nothing and lasts a number of SM clocks, which it counts itself (clock64). The SM clock is that number over the time
    between the spin's events, less the time of a launch that does not spin. Events resolve 0.5 us (CUDA Runtime API,
    cudaEventElapsedTime), 0.6 % of SPIN_US. Flush and spin must last until the host has queued all that follows; if they did
    not, the sample is discarded and both are lengthened. `overhead_us`, the time of a CUDA graph less the time of its kernels,
    is measured once at the start and subtracted.
    """

    def __init__(self, gpu: Cuda):
        self.gpu, cupy = gpu, gpu.cupy
        self._events = [cupy.cuda.Event() for _ in range(4)]
        self._spin = Spin(gpu, max(2 * gpu.device.l2_bytes, 32 << 20) // 16)
        self._slack = 1.0
        self.discarded = 0
        self.overhead_us = self._launch_us = 0.0
        nothing = partial(self._empty, 0)
        self._launch_us = statistics.median(self._sample(nothing, nothing, spin_us=0.0)[1] for _ in range(9))
        one, many = (gpu.record(partial(self._empty, n)) for n in (1, 17))
        t1, t17 = (statistics.median(self.samples(nothing, timed, 9)) for timed in (one, many))
        self.overhead_us = max(0.0, t1 - max(0.0, (t17 - t1) / 16))

    def samples(self, before: Run, timed: Run, count: int, launches: int = 1) -> list[float]:
        """Returns `count` times in microseconds of `timed`, which holds `launches` launches: the time of each one."""
        return [self.sample(before, timed, launches)[0] for _ in range(count)]

    def sample(self, before: Run, timed: Run, launches: int = 1, *, flush: bool = True) -> tuple[float, float]:
        """Returns (microseconds of `timed` divided by its number of `launches`, SM clock in MHz). Without `flush` L2 is not
        flushed. Raises Overloaded."""
        us, spun_us = self._sample(before, timed, flush=flush)
        return us / launches, self._clocks(SPIN_US) / spun_us

    def pause(self, ms: float) -> None:
        """Lets the GPU rest for `ms` milliseconds, except for one block that spins: an idle GPU may lower its clock."""
        self._spin.delay(1e3 * ms)
        self.gpu.synchronize()

    def _clocks(self, us: float) -> int:
        return int(self._slack * us * self.gpu.device.clock_mhz)

    def _sample(self, before: Run, timed: Run, *, spin_us: float = SPIN_US, flush: bool = True) -> tuple[float, float]:
        """Returns (microseconds of `timed`, of the spin). Raises Overloaded if the GPU waited for the host in each of TRIES."""
        begin, spun, start, stop = self._events
        elapsed_ms = self.gpu.cupy.cuda.get_elapsed_time
        for _ in range(TRIES):
            begun = time.perf_counter()
            self._spin.launch(self._spin.words if flush else 0, self._clocks(FLUSH_US))
            begin.record(self.gpu.stream)
            self._spin.launch(0, self._clocks(spin_us))
            spun.record(self.gpu.stream)
            spin_queued_us = 1e6 * (time.perf_counter() - begun)
            before()
            start.record(self.gpu.stream)
            timed()
            stop.record(self.gpu.stream)
            queued_us = 1e6 * (time.perf_counter() - begun)
            stop.synchronize()
            in_time = spin_queued_us < 0.85 * self._slack * FLUSH_US
            if in_time and (not spin_us or queued_us < 0.85 * self._slack * (FLUSH_US + spin_us)):
                us = 1e3 * elapsed_ms(start, stop) - self.overhead_us
                return max(us, 0.05), 1e3 * elapsed_ms(begin, spun) - self._launch_us
            self.discarded += 1  # the GPU may have waited for the host
            self._slack = min(1.25 * self._slack, MOST_SLACK)
        raise Overloaded("the host cannot queue work fast enough to time it: is the machine overloaded?")

    def _empty(self, count: int) -> None:
        for _ in range(count):
            self._spin.launch(0, 0)
