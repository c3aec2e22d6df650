"""How long tactics take: predicted for a named device, or measured on the GPU at hand.

A timer is called with (problem, tactics) and returns {tactic: Time}. Tactics that failed are left out; `failures` has
their texts. Measurements race (racing.py), one race at a time on a GPU (turns.py). What is answered is in the cache's file
before more is asked for, so a build that ended anywhere goes on from there.
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
    """Microseconds: the mean of the middle half of the samples and their 20 % and 80 % quantiles; or a prediction and its error
    band. Not `timed`: no less than that (tactics.measure.lazy)."""

    us: float
    low_us: float
    high_us: float
    timed: bool = True


def _time_of(line: Mapping[str, Any]) -> Time:
    """The time on a line of the cache."""
    return Time(line["us"], line["low_us"], line["high_us"])


@lru_cache(maxsize=1)
def driver_version() -> str:
    """The NVIDIA driver's version as its management library reports it; without one, as on a Jetson, Jetson Linux's release or
    the version of CUDA that the driver supports; or "unknown"."""
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


EMULATED = ".emulated"  # the end of the version of a driver that runs kernels in the emulator: its times are no GPU's


def names_emulated(version: str) -> bool:
    """Returns whether a driver of this version is the emulated one, whose times are no GPU's."""
    return version.endswith(EMULATED)


def is_emulated() -> bool:
    """Returns whether the driver at hand is the emulated one, whose times are no GPU's."""
    return names_emulated(driver_version())


class Timer:
    """The base of the timers of tactics. `driver`: its version, if times are measured; `failures`: (problem, tactic's name) ->
    why it has no time; `early`: timing was to end early; `zeros`: problem -> which of its inputs are half zeros, as behind a
    ReLU, to be set before it is asked for."""

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
        """Times the pairs that have only a bound so far. Returns whether a time changed."""
        return False

    def remembered(self, what: str, name: str, measure: Callable[[], Sequence[float]]) -> Time:
        """The time of something else than a tactic, whose samples `measure` returns where it is not known."""
        raise ValueError(f"{what}: nothing can be measured where times are predicted")

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Begin what these problems' tactics need before they can be timed, if anything; returns at once."""

    def close(self) -> None:
        """Ends the processes and threads that timing needs."""


class Around(Timer):
    """A timer that has another one, `timer`, do what it does not do itself."""

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
    """A timer for a named device, without a GPU, that computes times and their error bands; see tactics.predict. Its times are
    never written anywhere."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        times, errors = {}, sigmas(self.device)
        # Of a kind a tactic that is alike, with its problem; of these and a tile one time.
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
    """Raised when the cache lacks a time, and nothing is to be measured."""


class Measured(Timer):
    """A timer for the GPU at hand that measures what the cache does not hold. `waits` is called once, when another process
    holds the GPU (`gpu` names it), `told` by close() with what the cache was good for. `only_known`: measure nothing, raise
    NotTimed for what the cache lacks. `spread`: GPUs of a cluster, to race on instead of the one at hand; `racing`:
    options of Racing.

    To be set before a problem is asked for, and part of the cache's key: `warm_l2`, whether the network stays in the L2;
    `zeros`, problem -> which of its inputs are half zeros, as behind a ReLU.

    `failures`: (problem, tactic's name) -> text, for what was left out; failures stay in the cache too and are not tried
    again. Ctrl-C leaves in the cache all that was measured. Use it for one process and thread; close() ends the child.
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
        self._slow = False  # whether it was told that samples count though their clock stayed low
        self._seen: dict[Problem, dict[str, Tactic]] = {}  # whatever was asked for
        self._verdicts: dict[Key, str] = {}  # of what was asked for: empty where the cache had it, else why not

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        tactics = tuple(tactics)
        if todo := self._missing(problem, tactics):
            if self._only_known:
                raise NotTimed(self._lacks(todo[0].name, str(problem)))
            (self._measure if self._spread is None else self._finish)(problem, todo)
        return self._found(problem, tactics)

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        """The times, of these tactics, that need no measuring; nothing is missing yet where the cache has none."""
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
        """Begin to compile whatever these problems' tactics need and the cache has no time for, or with a cluster to race them;
        returns at once."""
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
        """Returns a line on how many times the cache could give."""
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
        """Returns the times that the cache has; failures are recorded in `failures`."""
        times = {}
        for tactic in tactics:
            record = self.cache.get(self.key(problem, tactic))
            if record and "error" in record:
                self.failures[str(problem), tactic.name] = record["error"]
            elif record:
                times[tactic] = _time_of(record)
        return times

    def _missing(self, problem: Problem, tactics: Iterable[Tactic]) -> list[Tactic]:
        """Returns the tactics of which the cache lacks the time, or some samples."""
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
        """Race them, unless another process has meanwhile. All that is answered goes into the cache at once."""
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
        """Wait for what `prepare` has begun of the problem, and have the rest raced as well."""
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
        """Lines of the cache, and failures that are none, by the names of tactics."""
        self.cache.add_all({self.key(problem, self._seen[problem][name]): line for name, line in lines.items()})
        self.failures.update({(str(problem), name): text for name, text in failed.items()})
        if not self._slow and any(line.get("slow") for line in lines.values()):
            self._warn_slow()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone on the GPU, with what others have written before that."""
        with turn(self._gpu or gpu_id(), self._waits):
            self.cache.refresh()
            yield

    def _warn_slow(self) -> None:
        self._slow = True
        files.warn(
            f"the clock of {self.device.title} stayed below its median for some samples, which count nevertheless (`slow` in "
            "the timing cache): is it hot, at its power limit, or in use by others? Build again with another --timingCacheFile"
        )
