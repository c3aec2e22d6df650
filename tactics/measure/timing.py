"""Timers of tactics: a prediction for a named device (Predicted), or measurements on the GPU at hand (Measured).

A timer is called with (problem, tactics) and returns {tactic: Time}. Tactics that failed are left out; `failures` has their
texts. Measured tactics race (racing.py), one race at a time on a GPU (turns.py). Each answer is written to the cache's file
before the next request, so a build that was interrupted continues where it stopped.
"""

import contextlib
import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cuda_kernels import files
from cuda_kernels.compile import source_hash
from cuda_kernels.device import DRIVER, Device
from tactics.measure.cache import POLICY, Cache, Key, is_over, source_key
from tactics.measure.race import times_of
from tactics.measure.racing import Lines, RaceRequest, Racing
from tactics.measure.turns import gpu_id, turn
from tactics.predict import alike, like, predict_alike, regime, sigmas
from tactics.problems.problem import Problem
from tactics.tactic import Tactic, tactic_of

if TYPE_CHECKING:
    from tactics.measure.spread import Spread


@dataclass(frozen=True, slots=True)
class Time:
    """A tactic's time in microseconds. Measured: the mean of the middle half of the samples, with their 20 % and 80 % quantiles
    as low_us and high_us. Predicted: the prediction and its error band. With `timed` false: a lower bound
    (tactics.measure.lazy)."""

    us: float
    low_us: float
    high_us: float
    timed: bool = True


def _time_of(line: Mapping[str, Any]) -> Time:
    """Returns the Time on a line of the cache that has no error."""
    return Time(line["us"], line["low_us"], line["high_us"])


@lru_cache(maxsize=1)
def driver_version() -> str:
    """Returns the NVIDIA driver's version as NVML reports it; without NVML, as on a Jetson, Jetson Linux's release or the
    version of CUDA that the driver supports; else "unknown"."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no library, no driver, no permission: each with a class of its own
        return _unmanaged_version()


TEGRA_RELEASE = Path("/etc/nv_tegra_release")  # "# R36 (release), REVISION: 4.7, GCID: ..."


def _unmanaged_version() -> str:
    with contextlib.suppress(OSError):
        if found := re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", TEGRA_RELEASE.read_text()):
            return f"Jetson Linux {found[1]}.{found[2]}"
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):  # no driver, or one without this function
        if not ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version)):
            return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return "unknown"


EMULATED = ".emulated"  # ends the version of the driver that runs kernels in the emulator


def names_emulated(version: str) -> bool:
    """Returns whether this version is the emulated driver's, whose times say nothing about a GPU."""
    return version.endswith(EMULATED)


def is_emulated() -> bool:
    """Returns whether this machine's driver is the emulated one, whose times say nothing about a GPU."""
    return names_emulated(driver_version())


class Timer:
    """The base class of timers. `driver`: the driver's version if times are measured, else ""; `failures`: (problem's text,
    tactic's name) -> why the tactic has no time; `early`: whether timing stopped before all needed tactics were timed; `zeros`:
    problem -> for each input, whether it comes from a ReLU, so that half of its values are 0 (set it before the first call)."""

    driver: str = ""
    early: bool = False

    def __init__(self) -> None:
        self.failures: dict[tuple[str, str], str] = {}
        self.zeros: dict[Problem, tuple[bool, ...]] = {}

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> Mapping[Tactic, Time]:
        """Returns the time of each tactic that could be timed."""
        raise NotImplementedError

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> Mapping[Tactic, Time]:
        """Returns the times of the tactics that need no measuring."""
        return self(problem, tactics)

    def refine(self, pairs: Iterable[tuple[Problem, Tactic]]) -> bool:
        """Times the tactics in `pairs` for which the timer has returned a lower bound in place of a time
        (tactics.measure.lazy). Returns whether a time or a bound changed; False for timers that return no bounds.
        """
        return False

    def remembered(self, what: str, name: str, measure: Callable[[], Sequence[float]]) -> Time:
        """Returns the time of other work than a tactic, from the cache or else from the samples that `measure` returns. `what`,
        `name`: its key, in place of a problem and a tactic. Raises ValueError if nothing can be measured."""
        raise ValueError(f"{what}: nothing can be measured where times are predicted")

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Begins work that these tactics need before they can be timed, such as compiling; returns at once."""

    def close(self) -> None:
        """Ends the processes and threads of this timer."""


class Around(Timer):
    """The base class of timers that pass every call they do not override on to another timer, `timer`."""

    def __init__(self, timer: Timer):
        self.timer, self.driver, self.early = timer, timer.driver, timer.early
        self.failures, self.zeros = timer.failures, timer.zeros

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> Mapping[Tactic, Time]:
        return self.timer.known(problem, tactics)

    def refine(self, pairs: Iterable[tuple[Problem, Tactic]]) -> bool:
        return self.timer.refine(pairs)

    def remembered(self, what: str, name: str, measure: Callable[[], Sequence[float]]) -> Time:
        return self.timer.remembered(what, name, measure)

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        self.timer.prepare(work)

    def close(self) -> None:
        self.timer.close()


class Predicted(Timer):
    """A timer for a named device, without a GPU, that predicts times and their error bands (tactics.predict). Predictions are
    never written to a cache."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        times, errors = {}, sigmas(self.device)
        # kinds: tactic's kind -> (problem, tactic) with the same predicted time; known: (kind, tile) -> its time.
        kinds, known = dict[int, tuple[Problem, Tactic]](), dict[tuple, Time]()
        for tactic in tactics:
            if tactic.kind not in kinds:
                kinds[tactic.kind] = like(problem, tactic), alike(problem, tactic)
            of, same = kinds[tactic.kind]
            cell = same.kind, tactic.tile
            if (time := known.get(cell)) is None:
                parts = predict_alike(of, tactic_of(same.kernel, tactic.tile, same.ins, same.out), self.device)
                us, error = float(parts["total_us"]), errors[regime(str(parts["bound"]))]
                known[cell] = time = Time(us, us * (1 - error), us * (1 + error))
            times[tactic] = time
        return times


class NotTimed(ValueError):
    """Raised when the cache lacks a time and measuring is not allowed."""


class Measured(Timer):
    """A timer for the GPU at hand that measures the tactics whose times the cache lacks; for one process and one thread.

    `waits` is called once if another process holds the GPU; `gpu`: the name of its lock, by default gpu_id(); `told`: called by
    close() with a line on how many times the cache had. `only_known`: measure nothing, and raise NotTimed for a time that the
    cache lacks. `spread`: GPUs of a cluster to race on in place of this one; `racing`: options of Racing.

    Two attributes are part of the cache's key and must be set before the first call: `warm_l2`, whether the network stays in L2
    between its layers, and Timer's `zeros`. Failures are cached too, and not tried again. Ctrl-C keeps all finished
    measurements in the cache. close() ends the child process.
    """

    def __init__(
        self,
        device: Device,
        cache: Cache,
        *,
        driver: str | None = None,
        waits: Callable[[], None] = lambda: None,
        told: Callable[[str], None] = lambda text: None,
        gpu: str | None = None,
        only_known: bool = False,
        spread: "Spread | None" = None,
        **racing: Any,
    ):
        super().__init__()
        self.device, self.cache = device, cache
        self.driver = driver if driver is not None else spread.driver if spread is not None else driver_version()
        late = "" if device.launches_early == device.dependent_launch else "|no early launches"
        self._key = f"{device.key}|{self.driver}{late}"
        self._only_known, self._waits, self._told, self._gpu = only_known, lru_cache(waits), told, gpu
        self.warm_l2 = False
        self.racing, self._spread = Racing(device, **racing), spread
        self._slow = False  # whether the warning on samples at a low clock was given
        self._seen: dict[Problem, dict[str, Tactic]] = {}  # every tactic asked for, by name
        self._verdicts: dict[Key, str] = {}  # for each tactic asked for: "" if the cache had its time, else why not

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        tactics = tuple(tactics)
        if todo := self._missing(problem, tactics):
            if self._only_known:
                raise NotTimed(self._lacks(todo[0].name, str(problem)))
            (self._measure if self._spread is None else self._finish)(problem, todo)
        return self._found(problem, tactics)

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        """Returns the times that the cache has; the others do not count as missing in `cache_text`."""
        over = [t for t in tactics if is_over(self.cache.get(self.key(problem, t)))]
        self._missing(problem, over)
        return self._found(problem, over)

    def remembered(self, what: str, name: str, measure: Callable[[], Sequence[float]]) -> Time:
        key = Key(self._key, source_hash()[:24], what, name)
        if self.cache.get(key) is None:
            if self._only_known:
                raise NotTimed(self._lacks(name, what))
            with self._turn():
                if self.cache.get(key) is None:
                    samples = measure()
                    self.cache.add(key, **times_of(samples), n=len(samples), over=True)
        return _time_of(self.cache.get(key) or {})

    def key(self, problem: Problem, tactic: Tactic) -> Key:
        zeros = "".join(str(int(zero)) for zero in self.zeros.get(problem, ()))
        policy = POLICY + (", warm" if self.warm_l2 else ", weights cold") + (f", zeros {zeros}" if "1" in zeros else "")
        return Key(self._key, source_key(tactic.kernel), str(problem), tactic.name, policy)

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Begins to compile the kernels of those of these tactics that have no time in the cache, or with a cluster to race the
        tactics; returns at once."""
        joined: dict[Problem, dict[Tactic, None]] = {}
        for problem, tactics in work:
            joined.setdefault(problem, {}).update(dict.fromkeys(tactics))
        for problem, every in joined.items():
            if (todo := self._missing(problem, every)) and not self._only_known:
                if self._spread is None:
                    self.racing.begin(problem, todo)
                else:
                    self._spread.begin(self._request(problem, todo), partial(self._keep, problem))

    def cache_text(self) -> str:
        """Returns a line on how many of the wanted times the cache had, and why it lacked the others."""
        return self.cache.used_text(self._verdicts.values())

    def close(self) -> None:
        if self._verdicts:
            self._told(self.cache_text())
        self._end()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()

    def _end(self) -> None:
        self.racing.close()
        if self._spread is not None:
            self._spread.close()

    def _found(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        """Returns the times that the cache has; adds its errors to `failures`."""
        times = {}
        for tactic in tactics:
            record = self.cache.get(self.key(problem, tactic))
            if record and "error" in record:
                self.failures[str(problem), tactic.name] = record["error"]
            elif record:
                times[tactic] = _time_of(record)
        return times

    def _missing(self, problem: Problem, tactics: Iterable[Tactic]) -> list[Tactic]:
        """Returns the tactics whose time, or some of whose samples, the cache lacks."""
        found = []
        for tactic in tactics:
            self._seen.setdefault(problem, {})[tactic.name] = tactic
            key = self.key(problem, tactic)
            missing = not is_over(self.cache.get(key))
            if key not in self._verdicts:
                self._verdicts[key] = self.cache.why_missing(key) if missing else ""
            if missing:
                found.append(tactic)
        return found

    def _lacks(self, name: str, problem: str) -> str:
        return (
            f"the timing cache lacks times that the build needs, as for {name}, {problem} ({self.cache_text()}): build "
            "without --errorOnTimingCacheMiss (only_cached_times=True) to measure them"
        )

    def _measure(self, problem: Problem, todo: list[Tactic]) -> None:
        """Races the tactics `todo`, except those that another process has timed meanwhile. Each answer goes into the cache at
        once."""
        keep = partial(self._keep, problem)
        try:
            able = self.racing.able(self._request(problem, todo), keep)
            with self._turn():
                if left := [t for t in todo if t.name in able and not is_over(self.cache.get(self.key(problem, t)))]:
                    keep({}, self.racing.race(self._request(problem, left), keep))
        except BaseException:  # Ctrl-C too: the child may be in the middle of an answer
            self._end()
            raise
        finally:
            self.cache.sync()

    def _finish(self, problem: Problem, todo: list[Tactic]) -> None:
        """Waits for the races of the problem that `prepare` began on the cluster, then races the remaining tactics of
        `todo`."""
        assert self._spread is not None
        try:
            self._spread.finish(problem)
            if left := [t for t in self._missing(problem, todo) if (str(problem), t.name) not in self.failures]:
                self._spread.begin(self._request(problem, left), partial(self._keep, problem))
                self._spread.finish(problem)
        except BaseException:
            self._end()
            raise
        finally:
            self.cache.sync()

    def _request(self, problem: Problem, todo: Iterable[Tactic]) -> RaceRequest:
        seen = self._seen[problem]
        found = {name: self.cache.get(self.key(problem, tactic)) for name, tactic in seen.items()}
        lines = {name: line for name, line in found.items() if line is not None}
        return RaceRequest(problem, tuple(t.name for t in todo), seen, lines, self.warm_l2, self.zeros.get(problem, ()))

    def _keep(self, problem: Problem, lines: Lines, failed: Mapping[str, str] = MappingProxyType({})) -> None:
        """Adds lines to the cache, and to `failures` the failures that must not be cached; both by the names of tactics."""
        self.cache.add_all({self.key(problem, self._seen[problem][name]): line for name, line in lines.items()})
        self.failures.update({(str(problem), name): text for name, text in failed.items()})
        if not self._slow and any(line.get("slow") for line in lines.values()):
            self._warn_slow()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the GPU for the `with` block, and first reads the cache lines that other processes wrote."""
        with turn(self._gpu or gpu_id(), self._waits):
            self.cache.refresh()
            yield

    def _warn_slow(self) -> None:
        self._slow = True
        files.warn(
            f"the clock of {self.device.title} stayed below its median for some samples, which count nevertheless (`slow` in "
            "the timing cache): is it hot, at its power limit, or in use by others? Build again with another --timingCacheFile"
        )
