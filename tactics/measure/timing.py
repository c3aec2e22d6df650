"""How long tactics take: predicted for a named device, or measured on the GPU at hand.

A timer is called with (problem, tactics) and returns {tactic: Time}. Tactics that failed are left out; `failures` has
their texts. `measured` runs them in a child process (tactics/measure/worker.py), because a hung or faulting kernel poisons
its CUDA context: the child is killed, the tactic recorded as failed, the rest goes on in a new child.

Measurements race (tactics/measure/race.py), one race at a time on a GPU (turns.py). What the child answers is in the cache's
file before it is asked again, so a build that ended anywhere goes on from there.
"""

import collections
import contextlib
import json
import random
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from cuda_kernels.compile import Counter, source_hash
from cuda_kernels.device import Device
from tactics.format import Format
from tactics.launches import binaries
from tactics.measure import faults
from tactics.measure.cache import POLICY, Cache, Key, are_times, is_over, source_key
from tactics.measure.child import Helper, command_of
from tactics.measure.compiling import Compiling
from tactics.measure.faults import Fault
from tactics.measure.race import Race, quantiles
from tactics.measure.turns import gpu_id, turn
from tactics.predict import alike, predict, regime, sigmas
from tactics.problems import codec
from tactics.problems.problem import Problem
from tactics.tactic import Tactic

WORKER = command_of("tactics.measure.worker")
SAMPLE_S = 0.02  # more than a sample takes with all its repetitions, but for the kernel itself
FACTS = "clock_mhz", "rel_error", "slow"  # of a line in the cache, beside the samples


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds: the mean of the middle half of the samples and their 20 % and 80 % quantiles; or a prediction and its error
    band. Not `timed`: no less than that (tactics.measure.lazy)."""

    us: float
    low_us: float
    high_us: float
    timed: bool = True


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


Facts = Mapping[str, dict[str, Any]]  # tactic -> its FACTS
Cell = tuple[tuple[Format, ...], Format, bool]  # tactics that only times tell apart: formats, and whether sparse


class Timer(Protocol):
    """What times tactics. `failures`: (problem, tactic's name) -> why it has no time; `early`: timing was to end early;
    `zeros`: problem -> which of its inputs are half zeros, as behind a ReLU, to be set before it is asked for."""

    failures: dict[tuple[str, str], str]
    early: bool
    zeros: dict[Problem, tuple[bool, ...]]

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> Mapping[Tactic, Time]:
        """The time of each tactic that could be timed."""
        ...

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> Mapping[Tactic, Time]:
        """The times of those that need no measuring."""
        ...

    def refine(self, pairs: Iterable[tuple[Problem, Tactic]]) -> bool:
        """Time what has only a bound so far, if any has; whether that changed a time."""
        ...

    def remembered(self, what: str, name: str, measure: Callable[[], Sequence[float]]) -> Time:
        """The time of something else than a tactic, whose samples `measure` returns where it is not known."""
        ...

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Begin what these problems' tactics need before they can be timed; returns at once."""
        ...

    def close(self) -> None: ...


class Predicted:
    """A timer that computes; see tactics.predict. Its times are never written anywhere."""

    early = False

    def __init__(self, device: Device):
        self.device = device
        self.failures: dict[tuple[str, str], str] = {}
        self.zeros: dict[Problem, tuple[bool, ...]] = {}

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        times, errors = {}, sigmas(self.device)
        formats, known = dict[tuple, int](), dict[tuple, Time]()  # alike ones have one number, and of a tile one time
        for tactic in tactics:
            named = tactic.kernel, tactic.ins, tactic.out
            if named not in formats:
                same = alike(problem, tactic)
                formats[named] = formats.setdefault((same.kernel, same.ins, same.out), len(formats))
            cell = formats[named], tactic.tile
            if cell not in known:
                parts = predict(problem, tactic, self.device)
                us, error = float(parts["total_us"]), errors[regime(str(parts["bound"]))]
                known[cell] = Time(us, us * (1 - error), us * (1 + error))
            times[tactic] = known[cell]
        return times

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        return self(problem, tactics)

    def refine(self, pairs: Iterable[tuple[Problem, Tactic]]) -> bool:
        return False

    def remembered(self, what: str, name: str, measure: Callable[[], Sequence[float]]) -> Time:
        raise ValueError(f"{what}: nothing can be measured where times are predicted")

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Nothing to compile."""

    def close(self) -> None:
        pass


class _NoProblem(Exception):
    """The problem could not be set up: no tactic's fault."""


class Measured:
    """A timer that measures what the cache does not hold. `timeout_s` bounds one request to the child process; `progress`
    is told of kernels that are compiled, `waits` once, when another process holds the GPU (`gpu` names it), `told` by close()
    what the cache was good for. `only_known`: measure nothing, raise ValueError for what the cache lacks.

    To be set before a problem is asked for, and part of the cache's key: `warm_l2`, whether the network stays in the L2;
    `zeros`, problem -> which of its inputs are half zeros, as behind a ReLU.

    `failures`: (problem, tactic's name) -> text, for what was left out; failures stay in the cache too and are not tried
    again. Ctrl-C leaves in the cache all that was measured. Use it for one process and thread; close() ends the child.
    """

    early = False

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
        waits: Callable[[], None] = lambda: None,
        told: Callable[[str], None] = lambda text: None,
        gpu: str | None = None,
        only_known: bool = False,
    ):
        self.device, self.cache = device, cache
        self.failures: dict[tuple[str, str], str] = {}
        self._key = f"{device.key}|{driver_version() if driver is None else driver}"
        self._compiling = Compiling(device.sm, progress) if compile_first else None
        self._timeout_s, self._setup_timeout_s = timeout_s, setup_timeout_s
        self._only_known, self._waits, self._told, self._gpu = only_known, lru_cache(waits), told, gpu
        self.warm_l2, self.zeros = False, dict[Problem, tuple[bool, ...]]()
        self._worker = Helper(command)
        self._set_up: Problem | None = None  # what the worker is set up for
        self._clocks: collections.deque[float] = collections.deque(maxlen=1000)
        self._slow = False  # whether it was told that samples count though their clock stayed low
        self._seen: dict[Problem, dict[str, Tactic]] = {}  # whatever was asked for
        self._verdicts: dict[Key, str] = {}  # of what was asked for: empty where the cache had it, else why not

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        tactics = tuple(tactics)
        if todo := self._missing(problem, tactics):
            if self._only_known:
                raise ValueError(self._lacks(todo[0].name, str(problem)))
            if able := self._able(problem, todo):
                self._measure(problem, able)
        return self._found(problem, tactics)

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        """The times, of these tactics, that need no measuring; nothing is missing yet where the cache has none."""
        over = [t for t in tactics if is_over(self.cache.get(self.key(problem, t)))]
        self._missing(problem, over)
        return self._found(problem, over)

    def refine(self, pairs: Iterable[tuple[Problem, Tactic]]) -> bool:
        return False

    def remembered(self, what: str, name: str, measure: Callable[[], Sequence[float]]) -> Time:
        key = Key(self._key, source_hash()[:24], what, name)
        if self.cache.get(key) is None:
            if self._only_known:
                raise ValueError(self._lacks(name, what))
            with self._turn():
                if self.cache.get(key) is None:
                    samples = measure()
                    low, us, high = (round(v, 4) for v in quantiles(samples))
                    self.cache.add(key, us=us, low_us=low, high_us=high, n=len(samples), over=True)
        record = self.cache.get(key) or {}
        return Time(record["us"], record["low_us"], record["high_us"])

    def key(self, problem: Problem, tactic: Tactic) -> Key:
        zeros = "".join(str(int(zero)) for zero in self.zeros.get(problem, ()))
        policy = POLICY + (", warm" if self.warm_l2 else ", weights cold") + (f", zeros {zeros}" if "1" in zeros else "")
        return Key(self._key, source_key(tactic.kernel), str(problem), tactic.name, policy)

    def prepare(self, work: Iterable[tuple[Problem, Sequence[Tactic]]]) -> None:
        """Compile in threads whatever these problems' tactics need and the cache has no time for; returns at once."""
        for problem, tactics in work:
            for tactic in self._missing(problem, tactics):
                if self._compiling and not self._only_known:
                    self._compiling.begin(binaries(problem, tactic))

    def cache_text(self) -> str:
        """How much the cache was of use, in a line."""
        return self.cache.used_text(self._verdicts.values())

    def close(self) -> None:
        if self._verdicts:
            self._told(self.cache_text())
        self._end()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end()

    def _end(self) -> None:
        self._worker.close()
        if self._compiling:
            self._compiling.close()

    def _found(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        """What the cache has: times, and failures."""
        times = {}
        for tactic in tactics:
            record = self.cache.get(self.key(problem, tactic))
            if record and "error" in record:
                self.failures[str(problem), tactic.name] = record["error"]
            elif record:
                times[tactic] = Time(record["us"], record["low_us"], record["high_us"])
        return times

    def _missing(self, problem: Problem, tactics: Iterable[Tactic]) -> list[Tactic]:
        """The tactics of which the cache lacks the time, or some samples."""
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

    def _able(self, problem: Problem, todo: list[Tactic]) -> list[Tactic]:
        """Those of `todo` whose kernels compile; why the others do not goes into the cache."""
        if self._compiling is None:
            return todo
        self._compiling.begin(item for tactic in todo for item in binaries(problem, tactic))
        logs = {tactic: self._compiling.log(binaries(problem, tactic)) for tactic in todo}
        broken = {self.key(problem, t): {"error": f"does not compile: {log[:2000]}"} for t, log in logs.items() if log}
        self.cache.add_all(broken)
        return [tactic for tactic, log in logs.items() if not log]

    def _measure(self, problem: Problem, todo: list[Tactic]) -> None:
        """Race them, unless another process has meanwhile. All that is answered goes into the cache at once."""
        with self._turn():
            try:
                if todo := [t for t in todo if not is_over(self.cache.get(self.key(problem, t)))]:
                    self._race(problem, todo)
            except _NoProblem as e:
                for tactic in todo:
                    if self.cache.get(self.key(problem, tactic)) is None:
                        self.failures[str(problem), tactic.name] = str(e)
            except BaseException:  # Ctrl-C too: the child may be in the middle of an answer
                self._end()
                raise
            finally:
                self.cache.sync()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone on the GPU, with what others have written before that."""
        with turn(self._gpu or gpu_id(), self._waits):
            self.cache.refresh()
            yield

    def _race(self, problem: Problem, todo: list[Tactic]) -> None:
        seen = self._seen[problem]
        records = {name: self.cache.get(self.key(problem, tactic)) for name, tactic in seen.items()}
        known = {name: (r["us"], r.get("n", 1)) for name, r in records.items() if r and is_over(r) and "error" not in r}
        begun = {name: r["samples"] for name, r in records.items() if r and not is_over(r)}
        # In an order that no tile is favoured by, where the clock drifts, and that is the same where a build goes on.
        names = sorted((t.name for t in todo), key=lambda name: random.Random(f"{problem} {name}").random())
        race = Race({name: cell_of(seen[name]) for name in (*names, *known)}, begun, known)
        facts = {name: {f: (records[name] or {}).get(f) for f in FACTS} for name in names}
        self._keep(problem, race, facts, ())
        while True:
            asked, count = race.request()
            if not count:
                return
            alone = not race.samples[asked[0]]  # its first run verifies a tactic, and shows whose fault there is
            for some in [[name] for name in asked] if alone else [asked]:
                self._sample(problem, race, facts, some, count)

    def _sample(self, problem: Problem, race: Race, facts: Facts, names: list[str], count: int) -> None:
        """Ask for `count` samples of each. A fault of several is looked for in each alone."""
        reply = self._ask(problem, names, count, race)
        if "error" in reply and len(names) > 1:
            self._worker.close()
            for name in names:
                self._sample(problem, race, facts, [name], count)
            return
        fault = faults.of_answer(reply) if "error" in reply else None
        if fault and fault.fatal and not fault.passing:  # a driver's fault may be anyone's: once more, in a fresh child
            reply = self._ask(problem, names, count, race)
            fault = faults.of_answer(reply) if "error" in reply else None
        if fault:
            if fault.passing:
                self.failures[str(problem), names[0]] = fault.text
            else:
                self.cache.add(self.key(problem, self._seen[problem][names[0]]), error=fault.text)
            race.drop(names[0])
            return
        if (slow := reply.get("slow") or 0) and not self._slow:
            self._warn_slow()
        for name in names:
            race.add(name, reply["us"][name])
            known = facts[name]
            if clocks := [mhz for mhz in reply.get("mhz", {}).get(name) or () if mhz]:
                self._clocks.extend(clocks)
                known["clock_mhz"] = round(statistics.median(clocks))
            known["rel_error"] = reply.get("rel_error", {}).get(name, known["rel_error"])
            known["slow"] = (known["slow"] or 0) + slow or None
        self._keep(problem, race, facts, names)

    def _keep(self, problem: Problem, race: Race, facts: Facts, names: Iterable[str]) -> None:
        """Write a line for these, which have new samples, and for those that are to have no more."""
        lines, over = {}, dict.fromkeys(race.settle())
        for name in dict.fromkeys((*names, *over)):
            samples = race.samples[name]
            low, us, high = (round(v, 4) for v in quantiles(samples))
            values = {"us": us, "low_us": low, "high_us": high, "n": len(samples), "over": name in over, **facts[name]}
            lines[self.key(problem, self._seen[problem][name])] = values | ({} if name in over else {"samples": samples})
        self.cache.add_all(lines)

    def _warn_slow(self) -> None:
        self._slow = True
        warnings.warn(
            f"the clock of {self.device.title} stayed below its median for some samples, which count nevertheless (`slow` in "
            "the timing cache): is it hot, at its power limit, or in use by others? Build again with another --timingCacheFile",
            RuntimeWarning,
            stacklevel=6,
        )

    def _ask(self, problem: Problem, names: list[str], count: int, race: Race) -> dict:
        """The child's answer, or {"error": text} for the tactics. Raises _NoProblem."""
        if not self._worker.running:
            self._start()
        if self._set_up != problem:
            mhz = statistics.median(self._clocks) if self._clocks else None
            how = {"warm_l2": self.warm_l2, "mhz": mhz, "zeros": self.zeros.get(problem, ())}
            reply = self._worker.ask({"op": "problem", "problem": codec.to_json(problem), **how}, self._setup_timeout_s)
            if "error" in reply:
                self._worker.close()
                raise _NoProblem(f"the problem could not be set up: {reply['error']}")
            self._set_up = problem
        known = [quantiles(race.samples[name])[1] for name in names if race.samples[name]]
        wait_s = self._timeout_s + count * sum(SAMPLE_S + 50e-6 * us for us in known)
        reply = self._worker.ask({"op": "time", "tactics": names, "samples": count}, wait_s)
        if "error" not in reply and not _are_samples(reply.get("us"), names, count):
            self._worker.close()
            text = f"the timing process answered without {count} times: {json.dumps(reply)[:200]}"
            return Fault(text, fatal=True).answer()
        return reply

    def _start(self) -> None:
        """Start the child. ValueError where it cannot run, or runs on another GPU than the timer's device."""
        self._set_up = None
        hello, mine = self._worker.start(self._setup_timeout_s), self.device.key
        if "error" in hello:
            raise ValueError(f"nothing can be measured: {hello['error']}")
        if hello.get("device") != mine:
            self._worker.close()
            raise ValueError(f"nothing can be measured: the plan is for {mine}, the current GPU is {hello.get('device')}")


def _are_samples(found: object, names: Sequence[str], count: int) -> bool:
    return isinstance(found, dict) and all(are_times(found.get(name)) and len(found[name]) == count for name in names)


def cell_of(tactic: Tactic) -> Cell:
    return tactic.ins, tactic.out, tactic.sparse


def predicted(device: Device) -> Predicted:
    """A timer for a named device, without a GPU: the analytical model, with its error band."""
    return Predicted(device)


def measured(device: Device, cache: Cache, **options: Any) -> Measured:
    """A timer for the GPU at hand (cuda_kernels.device.current()); see Measured for the options."""
    return Measured(device, cache, **options)
