"""Races on the GPU at hand: a problem's tactics are timed in a child process (tactics/measure/worker.py).

A kernel that hangs or faults makes its CUDA context unusable; then the child is killed, its tactic gets an error, and the race
continues in a new child. A RaceRequest goes in; lines of the timing cache come out one by one, through a callback `keep`.
"""

import collections
import json
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_kernels.compile import Counter
from cuda_kernels.device import Device
from tactics.format import Format
from tactics.launches import binaries
from tactics.measure.cache import are_times, is_over
from tactics.measure.child import Child, command_of
from tactics.measure.compiling import Compiling
from tactics.measure.race import Race, quantiles, times_of
from tactics.problems import codec
from tactics.problems.problem import Problem
from tactics.sampling import faults
from tactics.sampling.faults import Fault
from tactics.tactic import Tactic

WORKER = command_of("tactics.measure.worker")
SAMPLE_S = 0.02  # seconds: more than a sample takes with its repetitions, without the kernel's own time
FACTS = "clock_mhz", "rel_error", "slow"  # the fields of a cache line that are not computed from its samples

Facts = Mapping[str, dict[str, Any]]  # tactic -> its FACTS
Lines = Mapping[str, dict[str, Any]]  # tactic -> its line in the cache, without the key
Cell = tuple[tuple[Format, ...], Format, bool]  # (formats of inputs, of the output, is sparse): equal for tactics that compete


@dataclass(frozen=True, slots=True)
class RaceRequest:
    """A request to time tactics of a problem. `names`: the tactics to time; `tactics`: name -> tactic, for these and for others
    timed before; `lines`: name -> its line in the timing cache. `warm_l2`: whether the network stays in L2 between its layers;
    `zeros`: for each input, whether it comes from a ReLU, so that half of its values are 0."""

    problem: Problem
    names: tuple[str, ...]
    tactics: Mapping[str, Tactic]
    lines: Lines
    warm_l2: bool = False
    zeros: tuple[bool, ...] = ()


class _NoProblem(Exception):
    """Raised when the child cannot set up the problem, so that no tactic is at fault."""


class Racing:
    """Races on this process's GPU, in a child process that close() ends; for one process and one thread.

    `timeout_s`, `setup_timeout_s`: limits in seconds for a request that times tactics, and for the start of the child or a new
    problem; `progress`: see Compiling; `compile_first`: whether kernels are compiled here, in threads, before the child needs
    them.
    """

    def __init__(
        self,
        device: Device,
        *,
        command: Sequence[str] = WORKER,
        timeout_s: float = 30.0,
        setup_timeout_s: float = 180.0,
        compile_first: bool = True,
        progress: Counter | None = None,
    ):
        self.device = device
        self._compiling = Compiling(device.sm, progress) if compile_first else None
        self._timeout_s, self._setup_timeout_s = timeout_s, setup_timeout_s
        self.worker = Child(command)
        self._set_up: Problem | None = None  # the problem whose data the worker has on the GPU
        self._clocks: collections.deque[float] = collections.deque(maxlen=1000)

    def begin(self, problem: Problem, tactics: Iterable[Tactic]) -> None:
        """Begins to compile the kernels of these tactics in threads; returns at once."""
        if self._compiling:
            self._compiling.begin(item for tactic in tactics for item in binaries(problem, tactic))

    def able(self, asked: RaceRequest, keep: Callable[[Lines], None]) -> tuple[str, ...]:
        """Returns the requested tactics whose kernels compile; `keep` gets an error line for each of the others."""
        if self._compiling is None:
            return asked.names
        self.begin(asked.problem, [asked.tactics[name] for name in asked.names])
        logs = {name: self._compiling.log(binaries(asked.problem, asked.tactics[name])) for name in asked.names}
        keep({name: {"error": f"does not compile: {log[:2000]}"} for name, log in logs.items() if log})
        return tuple(name for name, log in logs.items() if not log)

    def race(self, asked: RaceRequest, keep: Callable[[Lines], None]) -> dict[str, str]:
        """Times the tactics `asked.names`. Each line goes to `keep` as soon as it is known; returns tactic -> text for failures
        that must not be cached, since the tactic is not to blame."""
        known = {n: (line["us"], line.get("n", 1)) for n, line in asked.lines.items() if is_over(line) and "error" not in line}
        begun = {name: line["samples"] for name, line in asked.lines.items() if not is_over(line)}
        # A random order, so that a drifting clock favours no tile; drawn from the names, so that a later build has the same.
        names = sorted(asked.names, key=lambda name: random.Random(f"{asked.problem} {name}").random())
        race = Race({name: cell_of(asked.tactics[name]) for name in (*names, *known)}, begun, known)
        run = _Run(race, {name: {f: asked.lines.get(name, {}).get(f) for f in FACTS} for name in names}, keep, {})
        run.settle(())
        while True:
            some, count = race.request()
            if not count:
                return run.failed
            alone = not race.samples[some[0]]  # a request for one tactic shows which tactic fails its first run
            try:
                for group in [[name] for name in some] if alone else [some]:
                    self._sample(asked, run, group, count)
            except _NoProblem as e:
                return {name: str(e) for name in names if not race.samples[name]} | run.failed

    def close(self) -> None:
        self.worker.close()
        if self._compiling:
            self._compiling.close()

    def _sample(self, asked: RaceRequest, run: "_Run", names: list[str], count: int) -> None:
        """Takes `count` samples of each tactic in `names`. If the request fails, each tactic is asked for by itself."""
        reply = self._ask(asked, names, count, run.race)
        if "error" in reply and len(names) > 1:
            self.worker.close()
            for name in names:
                self._sample(asked, run, [name], count)
            return
        fault = faults.of_answer(reply) if "error" in reply else None
        if fault and fault.fatal and not fault.passing:  # an earlier tactic may have caused it: once more, in a new child
            reply = self._ask(asked, names, count, run.race)
            fault = faults.of_answer(reply) if "error" in reply else None
        if fault:
            run.drop(names[0], fault)
            return
        for name in names:
            self._clocks.extend(run.add(name, reply))
        run.settle(names)

    def _ask(self, asked: RaceRequest, names: list[str], count: int, race: Race) -> dict[str, Any]:
        """Lets the child take `count` samples of each tactic in `names`; returns its reply, {"us": ...} or one {"error": text}
        for all of them. Raises _NoProblem where the child cannot set up the problem."""
        if not self.worker.running:
            self._start()
        if self._set_up != asked.problem:
            mhz = statistics.median(self._clocks) if self._clocks else None
            how = {"warm_l2": asked.warm_l2, "mhz": mhz, "zeros": asked.zeros}
            reply = self.worker.ask({"op": "problem", "problem": codec.to_json(asked.problem), **how}, self._setup_timeout_s)
            if "error" in reply:
                self.worker.close()
                raise _NoProblem(f"the problem could not be set up: {reply['error']}")
            self._set_up = asked.problem
        known = [quantiles(race.samples[name])[1] for name in names if race.samples[name]]
        wait_s = self._timeout_s + count * sum(SAMPLE_S + 50e-6 * us for us in known)
        reply = self.worker.ask({"op": "time", "tactics": names, "samples": count}, wait_s)
        if "error" not in reply and not _are_samples(reply.get("us"), names, count):
            self.worker.close()
            text = f"the timing process answered without {count} times: {json.dumps(reply)[:200]}"
            return Fault(text, fatal=True).answer()
        return reply

    def _start(self) -> None:
        """Starts the child. Raises ValueError if it cannot run, or runs on another GPU than `self.device`."""
        self._set_up = None
        hello, mine = self.worker.start(self._setup_timeout_s), self.device.key
        if "error" in hello:
            raise ValueError(f"nothing can be measured: {hello['error']}")
        if hello.get("device") != mine:
            self.worker.close()
            raise ValueError(f"nothing can be measured: the plan is for {mine}, the current GPU is {hello.get('device')}")


@dataclass(frozen=True, slots=True)
class _Run:
    """A race in progress. `facts`: tactic -> its FACTS so far; `keep`: takes lines for the timing cache; `failed`: tactic ->
    the text of a failure that must not be cached."""

    race: Race
    facts: Facts
    keep: Callable[[Lines], None]
    failed: dict[str, str]

    def add(self, name: str, reply: Mapping[str, Any]) -> list[float]:
        """Adds a tactic's samples from the child's reply to the race; returns the SM clocks of its samples, in MHz."""
        self.race.add(name, reply["us"][name])
        known, clocks = self.facts[name], [mhz for mhz in reply.get("mhz", {}).get(name) or () if mhz]
        if clocks:
            known["clock_mhz"] = round(statistics.median(clocks))
        known["rel_error"] = reply.get("rel_error", {}).get(name, known["rel_error"])
        known["slow"] = (known["slow"] or 0) + (reply.get("slow") or 0) or None
        return clocks

    def drop(self, name: str, fault: Fault) -> None:
        if fault.passing:
            self.failed[name] = fault.text
        else:
            self.keep({name: {"error": fault.text}})
        self.race.drop(name)

    def settle(self, names: Iterable[str]) -> None:
        """Keeps in the timing cache a line for each of these tactics, which have new samples, and for each tactic whose samples
        are complete."""
        lines, over = {}, dict.fromkeys(self.race.settle())
        for name in dict.fromkeys((*names, *over)):
            samples = self.race.samples[name]
            values = times_of(samples) | {"n": len(samples), "over": name in over} | self.facts[name]
            lines[name] = values | ({} if name in over else {"samples": samples})
        self.keep(lines)


def _are_samples(found: object, names: Sequence[str], count: int) -> bool:
    return isinstance(found, dict) and all(are_times(found.get(name)) and len(found[name]) == count for name in names)


def cell_of(tactic: Tactic) -> Cell:
    return tactic.ins, tactic.out, tactic.sparse
