"""Races on the GPU at hand: a problem's tactics run in a child process (tactics/measure/worker.py), because a hung or faulting
kernel poisons its CUDA context: the child is killed, the tactic has an error, the rest goes on in a new child.

A request comes in, lines of a timing cache go out, as they are found; whoever asks keeps them.
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
SAMPLE_S = 0.02  # more than a sample takes with all its repetitions, but for the kernel itself
FACTS = "clock_mhz", "rel_error", "slow"  # of a line in the cache, beside the samples

Facts = Mapping[str, dict[str, Any]]  # tactic -> its FACTS
Lines = Mapping[str, dict[str, Any]]  # tactic -> its line in the cache, without the key
Cell = tuple[tuple[Format, ...], Format, bool]  # tactics that only times tell apart: formats, and whether sparse


@dataclass(frozen=True, slots=True)
class RaceRequest:
    """`names`: who is to be timed; `tactics`: them and the others that were timed before, by name; `lines`: what is known of
    each. `warm_l2`: whether the network stays in the L2; `zeros`: which inputs are half zeros, as behind a ReLU."""

    problem: Problem
    names: tuple[str, ...]
    tactics: Mapping[str, Tactic]
    lines: Lines
    warm_l2: bool = False
    zeros: tuple[bool, ...] = ()


class _NoProblem(Exception):
    """The problem could not be set up: no tactic's fault."""


class Racing:
    """`timeout_s` bounds one request to the child; `progress` is told of kernels that are compiled. Use it for one process and
    thread; close() ends the child."""

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
        self._set_up: Problem | None = None  # what the worker is set up for
        self._clocks: collections.deque[float] = collections.deque(maxlen=1000)

    def begin(self, problem: Problem, tactics: Iterable[Tactic]) -> None:
        """Compile in threads what these need; returns at once."""
        if self._compiling:
            self._compiling.begin(item for tactic in tactics for item in binaries(problem, tactic))

    def able(self, asked: RaceRequest, keep: Callable[[Lines], None]) -> tuple[str, ...]:
        """Those whose kernels compile; `keep` is told why the others do not."""
        if self._compiling is None:
            return asked.names
        self.begin(asked.problem, [asked.tactics[name] for name in asked.names])
        logs = {name: self._compiling.log(binaries(asked.problem, asked.tactics[name])) for name in asked.names}
        keep({name: {"error": f"does not compile: {log[:2000]}"} for name, log in logs.items() if log})
        return tuple(name for name, log in logs.items() if not log)

    def race(self, asked: RaceRequest, keep: Callable[[Lines], None]) -> dict[str, str]:
        """Race them. `keep` gets all that is answered, at once. -> the failures that are not to be kept, by tactic."""
        known = {n: (line["us"], line.get("n", 1)) for n, line in asked.lines.items() if is_over(line) and "error" not in line}
        begun = {name: line["samples"] for name, line in asked.lines.items() if not is_over(line)}
        # In an order that no tile is favoured by, where the clock drifts, and that is the same where a build goes on.
        names = sorted(asked.names, key=lambda name: random.Random(f"{asked.problem} {name}").random())
        race = Race({name: cell_of(asked.tactics[name]) for name in (*names, *known)}, begun, known)
        run = _Run(race, {name: {f: asked.lines.get(name, {}).get(f) for f in FACTS} for name in names}, keep, {})
        run.settle(())
        while True:
            some, count = race.request()
            if not count:
                return run.failed
            alone = not race.samples[some[0]]  # its first run verifies a tactic, and shows whose fault there is
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
        """Ask for `count` samples of each. A fault of several is looked for in each alone."""
        reply = self._ask(asked, names, count, run.race)
        if "error" in reply and len(names) > 1:
            self.worker.close()
            for name in names:
                self._sample(asked, run, [name], count)
            return
        fault = faults.of_answer(reply) if "error" in reply else None
        if fault and fault.fatal and not fault.passing:  # a driver's fault may be anyone's: once more, in a fresh child
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
        """Start the child. ValueError where it cannot run, or runs on another GPU than the timer's device."""
        self._set_up = None
        hello, mine = self.worker.start(self._setup_timeout_s), self.device.key
        if "error" in hello:
            raise ValueError(f"nothing can be measured: {hello['error']}")
        if hello.get("device") != mine:
            self.worker.close()
            raise ValueError(f"nothing can be measured: the plan is for {mine}, the current GPU is {hello.get('device')}")


@dataclass(frozen=True, slots=True)
class _Run:
    """A race and what it has found so far. `failed`: tactic -> a failure that is not to be kept."""

    race: Race
    facts: Facts
    keep: Callable[[Lines], None]
    failed: dict[str, str]

    def add(self, name: str, reply: Mapping[str, Any]) -> list[float]:
        """The samples of an answer -> the clocks of their runs, in MHz."""
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
