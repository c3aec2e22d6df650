"""How long tactics take: predicted for a named device, or measured on the GPU at hand.

A timer is called with (problem, tactics) and returns {tactic: Time}. Tactics that failed are left out; `failures` has
their texts. `measured` runs them in a child process (tactics/measure/worker.py), because a hung or faulting kernel poisons
its CUDA context: the child is killed, the tactic recorded as failed, the rest goes on in a new child.

Measurements race: every tactic gets ROUNDS[0] samples, and those far behind the best of their cell (same formats, same
sparseness: the planner needs the best of every cell) stop there; the others go on. A sample is the time per launch of a CUDA
graph of up to 10 launches, activations warm in L2, each launch with its own copy of the weights, none of them in L2.
"""

import contextlib
import json
import os
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from cuda_kernels.compile import OPTIONS, CompileError, Counter, compile_kernel, counted, is_kept, nvrtc_version, source_hash
from cuda_kernels.device import Device
from tactics.format import Format
from tactics.launches import binaries
from tactics.measure import faults
from tactics.measure.cache import MOST_US, POLICY, Cache, Key
from tactics.measure.child import Helper, command_of
from tactics.measure.faults import Fault
from tactics.predict import predict, regime, sigmas
from tactics.problems import array_functions, codec
from tactics.problems.problem import Problem
from tactics.tactic import Tactic

ROUNDS = (3, 12, 30)  # samples that a tactic has after each round, if it is still in the race
# Out of the race: a median this many times the best of the cell after the first round (the last where that is under 10 us),
# the 20 % quantile after a later one.
FAR, FAR_SHORT_US, FAR_SHORT, CLOSE = 1.5, 10.0, 2.0, 1.05
WORKER = command_of("tactics.measure.worker")


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds: the median and the 20 % and 80 % quantiles of the samples; or a prediction and its error band."""

    us: float
    low_us: float
    high_us: float


@lru_cache(maxsize=1)
def driver_version() -> str:
    """The NVIDIA driver's version as its management library reports it, or "unknown"."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no library, no driver, no permission: each with a class of its own
        return "unknown"


EMULATED = ".emulated"  # the end of the version of a driver that runs kernels in the emulator: its times are no GPU's


def names_emulated(version: str) -> bool:
    """Whether a driver of this version is no GPU's."""
    return version.endswith(EMULATED)


def is_emulated() -> bool:
    """Whether the driver at hand is no GPU's."""
    return names_emulated(driver_version())


def environment() -> dict[str, str]:
    """What measured times rest on beside the device, for the record in an engine: driver and policy."""
    return {"driver": driver_version(), "policy": POLICY}


@lru_cache(maxsize=64)
def source_key(kernel: str) -> str:
    """Names the kernel's binary up to its compile-time values: source, headers, options, compiler. Of library functions:
    their source and the library's version."""
    if kernel == "library":
        from importlib.metadata import version  # it brings half of package email

        return sha256(Path(array_functions.__file__).read_bytes() + version("cupy-cuda13x").encode()).hexdigest()[:24]
    return sha256(json.dumps([source_hash(kernel), OPTIONS, nvrtc_version()]).encode()).hexdigest()[:24]


Cell = tuple[tuple[Format, ...], Format, bool]  # tactics that only times tell apart: formats, and whether sparse


class Timer(Protocol):
    """What times tactics. `failures`: (problem, tactic's name) -> why it has no time."""

    failures: dict[tuple[str, str], str]

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> Mapping[Tactic, Time]:
        """The time of each tactic that could be timed."""
        ...

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Do in parallel what these problems' tactics need before they can be timed."""
        ...

    def close(self) -> None: ...


class Predicted:
    """A timer that computes; see tactics.predict. Its times are never written anywhere."""

    def __init__(self, device: Device):
        self.device = device
        self.failures: dict[tuple[str, str], str] = {}

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        times, errors = {}, sigmas(self.device)
        for tactic in tactics:
            parts = predict(problem, tactic, self.device)
            us, error = float(parts["total_us"]), errors[regime(str(parts["bound"]))]
            times[tactic] = Time(us, us * (1 - error), us * (1 + error))
        return times

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Nothing to compile."""

    def close(self) -> None:
        pass


class Measured:
    """A timer that measures what the cache does not hold. `timeout_s` bounds one request to the child process; `progress`
    is told of kernels that are compiled.

    `failures`: (problem, tactic's name) -> text, for what was left out; failures stay in the cache too and are not tried
    again. Ctrl-C leaves in the cache all that was measured. Use it for one process and thread; close() ends the child.
    """

    def __init__(
        self,
        device: Device,
        cache: Cache,
        *,
        driver: str | None = None,
        command: Sequence[str] = WORKER,
        timeout_s: float = 30.0,
        setup_timeout_s: float = 180.0,
        compile_first: bool = True,
        progress: Counter | None = None,
    ):
        self.device, self.cache = device, cache
        self.failures: dict[tuple[str, str], str] = {}
        self._key = f"{device.key}|{driver_version() if driver is None else driver}"
        self._compile_first, self._progress = compile_first, progress
        self._timeout_s, self._setup_timeout_s = timeout_s, setup_timeout_s
        self._worker = Helper(command)
        self._asked: Problem | None = None  # what the worker is set up for
        self._compiled: set[tuple] = set()

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        tactics = tuple(tactics)
        todo = [t for t in tactics if self.cache.get(self.key(problem, t)) is None]
        if todo:
            try:
                self._race(problem, todo, [t for t in tactics if t not in set(todo)])
            except BaseException:  # Ctrl-C too: the child may be in the middle of an answer
                self.close()
                raise
            finally:
                self.cache.sync()
        times = {}
        for tactic in tactics:
            record = self.cache.get(self.key(problem, tactic))
            if record and "error" not in record:
                times[tactic] = Time(record["us"], record["low_us"], record["high_us"])
            elif record:
                self.failures[str(problem), tactic.name] = record["error"]
        return times

    def key(self, problem: Problem, tactic: Tactic) -> Key:
        return Key(self._key, source_key(tactic.kernel), str(problem), tactic.name)

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Compile in parallel whatever these problems' tactics need and the cache has no time for. Never raises for one."""
        self._compile([(p, t) for p, tactics in work for t in tactics if self.cache.get(self.key(p, t)) is None])

    def close(self) -> None:
        self._worker.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _compile(self, work: list[tuple[Problem, Tactic]]) -> dict[tuple, str]:
        """Compile the distinct kernels of `work`; returns (kernel, values) -> the log of each that does not compile."""
        wanted = list(dict.fromkeys(item for p, t in work for item in binaries(p, t)))
        wanted = [item for item in wanted if item not in self._compiled]

        def log(item: tuple[str, tuple[tuple[str, int], ...]]) -> str:
            try:
                compile_kernel(item[0], dict(item[1]), self.device.sm)
                return ""
            except CompileError as e:
                return str(e)

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            new = [self._progress is not None and not is_kept(name, dict(values), self.device.sm) for name, values in wanted]
            logs = counted(pool.map(log, wanted), new, self._progress)
            broken = {item: text for item, text in zip(wanted, logs, strict=True) if text}
        self._compiled |= set(wanted) - set(broken)
        return broken

    def _race(self, problem: Problem, todo: list[Tactic], known: list[Tactic]) -> None:
        """Measure `todo`; each result goes into the cache when it is final. `known`: the others of the same problem."""
        best: dict[Cell, float] = {}
        for tactic in known:
            record = self.cache.get(self.key(problem, tactic))
            if record is not None and "error" not in record:
                best[_cell(tactic)] = min(record["us"], best.get(_cell(tactic), record["us"]))
        facts: dict[Tactic, dict[str, Any]] = {}
        alive = self._compiling(problem, todo)
        random.Random(str(problem)).shuffle(alive)  # so that a drifting clock favours no tile
        samples: dict[Tactic, list[float]] = {t: [] for t in alive}
        for goal in ROUNDS:
            for tactic in list(alive):
                reply = self._ask(problem, {"op": "time", "tactics": [tactic.name], "samples": goal - len(samples[tactic])})
                if "setup" in reply:  # no tactic's fault: nothing to remember but what was measured before
                    for other in alive:
                        if samples[other]:
                            self._finish(problem, other, samples[other], facts[other])
                        else:
                            self.failures[str(problem), other.name] = reply["setup"]
                    return
                if "error" in reply:
                    self._failed(problem, tactic, faults.of_answer(reply))
                    alive.remove(tactic)
                    continue
                samples[tactic] += reply["us"][tactic.name]
                mhz = statistics.median(reply["mhz"][tactic.name])
                facts[tactic] = {"clock_mhz": mhz, "rel_error": reply["rel_error"][tactic.name]}
                median = statistics.median(samples[tactic])
                best[_cell(tactic)] = min(median, best.get(_cell(tactic), median))
                if goal == ROUNDS[-1]:
                    self._finish(problem, tactic, samples[tactic], facts[tactic])
            for tactic in list(alive) if goal < ROUNDS[-1] else ():
                if _is_far(samples[tactic], best[_cell(tactic)], first=goal == ROUNDS[0]):
                    self._finish(problem, tactic, samples[tactic], facts[tactic])
                    alive.remove(tactic)

    def _compiling(self, problem: Problem, todo: list[Tactic]) -> list[Tactic]:
        """Those of `todo` whose kernels compile; why the others do not goes into the cache."""
        if not self._compile_first:
            return list(todo)
        broken, able = self._compile([(problem, t) for t in todo]), []
        for tactic in todo:
            texts = [broken[item] for item in binaries(problem, tactic) if item in broken]
            if texts:
                self.cache.add(self.key(problem, tactic), error=f"does not compile: {texts[0][:2000]}")
            else:
                able.append(tactic)
        return able

    def _failed(self, problem: Problem, tactic: Tactic, fault: Fault) -> None:
        if fault.passing:
            self.failures[str(problem), tactic.name] = fault.text
        else:
            self.cache.add(self.key(problem, tactic), error=fault.text)

    def _finish(self, problem: Problem, tactic: Tactic, samples: list[float], facts: dict) -> None:
        low, median, high = (round(v, 4) for v in quantiles(samples))
        self.cache.add(self.key(problem, tactic), us=median, low_us=low, high_us=high, n=len(samples), **facts)

    def _ask(self, problem: Problem, request: dict) -> dict:
        """The child's answer, or {"error": text} for a tactic, or {"setup": text} where the problem could not be set up."""
        if not self._worker.running:
            self._start()
        if self._asked != problem:
            setup = {"op": "problem", "problem": codec.to_json(problem), "warm_l2": False, "mhz": None}
            reply = self._worker.ask(setup, self._setup_timeout_s)
            if "error" in reply:
                self.close()
                return {"setup": f"the problem could not be set up: {reply['error']}"}
            self._asked = problem
        reply = self._worker.ask(request, self._timeout_s)
        if "error" not in reply and not _good_samples(reply.get("us", {}).get(request["tactics"][0]), request["samples"]):
            self.close()
            text = f"the timing process answered without {request['samples']} times: {json.dumps(reply)[:200]}"
            return Fault(text, fatal=True).answer()
        return reply

    def _start(self) -> None:
        """Start the child. ValueError where it cannot run, or runs on another GPU than the timer's device."""
        self._asked = None
        hello, mine = self._worker.start(self._setup_timeout_s), self.device.key
        if "error" in hello:
            raise ValueError(f"nothing can be measured: {hello['error']}")
        if hello.get("device") != mine:
            self.close()
            raise ValueError(f"nothing can be measured: the plan is for {mine}, the current GPU is {hello.get('device')}")


def _good_samples(us: object, count: int) -> bool:
    return isinstance(us, list) and len(us) == count and all(isinstance(v, int | float) and 0 < v < MOST_US for v in us)


def _cell(tactic: Tactic) -> Cell:
    return tactic.ins, tactic.out, tactic.sparse


def _is_far(samples: Sequence[float], best: float, *, first: bool) -> bool:
    """Whether a tactic is too slow to come first among those of its formats, after the first round or a later one."""
    far = (FAR_SHORT if best < FAR_SHORT_US else FAR) if first else CLOSE
    return quantiles(samples)[first] > best * far


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The 20 % quantile, the median and the 80 % quantile."""
    s = sorted(samples)
    return s[int(0.2 * (len(s) - 1))], statistics.median(s), s[-1 - int(0.2 * (len(s) - 1))]


def predicted(device: Device) -> Predicted:
    """A timer for a named device, without a GPU: the analytical model, with its error band."""
    return Predicted(device)


def measured(device: Device, cache: Cache, **options: Any) -> Measured:
    """A timer for the GPU at hand (cuda_kernels.device.current()); see Measured for the options."""
    return Measured(device, cache, **options)
