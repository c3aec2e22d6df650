"""Races spread over the GPUs of a Ray cluster: an actor holds a GPU, and races one problem after the other.

The process that builds hands out requests and keeps what comes back: it alone writes the timing cache. Ray starts an actor
that died again. The race that it was at is done by whoever is free next, and nothing else is lost: not by Ray's own retries,
which would wait for that very actor, even where its node is gone for good.
"""

import contextlib
import logging
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuda_kernels import extras, files
from cuda_kernels.compile import source_hash
from cuda_kernels.device import Device
from tactics.measure.racing import Lines, RaceRequest, Racing
from tactics.measure.turns import gpu_id, turn
from tactics.problems.problem import Problem

ANSWER_S = 30.0  # until an address that does not answer is given up
Find = Callable[[], tuple[Device, str]]  # the GPU of a machine, as builds there see it, and its driver's version
Taken = Callable[[Lines, Mapping[str, str]], None]  # lines of the cache, and failures that are none


@dataclass(frozen=True, slots=True)
class Found:
    """An actor's GPU. Times of two may stand in one plan where all of this is equal; `source`: the kernels' sources."""

    device: Device
    driver: str
    source: str


class Racer:
    """The actor: it holds a GPU, on which it races."""

    def __init__(self, find: Find):
        self._find = find
        self._racing: Racing | None = None

    def hello(self) -> Found:
        device, driver = self._find()
        self._racing = Racing(device)
        return Found(device, driver, source_hash())

    def race(self, asked: RaceRequest, ahead: RaceRequest | None) -> tuple[Lines, Mapping[str, str]] | None:
        """Race; meanwhile compile for the request that is probably next. None where it has not said hello: Ray started it again
        while it was idle, perhaps on another GPU."""
        if self._racing is None:
            return None
        lines: dict[str, dict[str, Any]] = {}
        able = self._racing.able(asked, lines.update)
        if ahead:
            self._racing.begin(ahead.problem, [ahead.tactics[name] for name in ahead.names])
        with turn(gpu_id(), lambda: None):
            return lines, self._racing.race(replace(asked, names=able), lines.update)


class Spread:
    """The GPUs of a cluster that this process is connected to by the module `ray`; close() gives them back, and closes the
    connection where it is its `own`. ValueError: there are none, or several kinds. `device`, `driver`: what all of them are,
    without the kernels that `gpu-runtime doctor` saw fail on any."""

    def __init__(self, ray: Any, find: Find, own: bool = False):
        self._ray, self._own, self._actors = ray, own, list[Any]()
        self._waiting: deque[tuple[RaceRequest, Taken]] = deque()
        self._running: dict[Any, tuple[Any, tuple[RaceRequest, Taken] | None]] = {}  # answer -> actor, and what it races
        self._idle: list[Any] = []
        self._lost = ""  # why the last actor that is gone is gone
        count = int(ray.cluster_resources().get("GPU", 0))
        if not count:
            raise ValueError("ray: no node of this Ray cluster has a GPU: add one, or build without --ray")
        actor = ray.remote(num_gpus=1, num_cpus=0, max_restarts=-1)(Racer)
        self._actors = [actor.remote(find) for _ in range(count)]
        first = self._first([self._hello(actor) for actor in self._actors])
        self.device, self.driver, self._source, self.count = first.device, first.driver, first.source, len(self._idle)

    def begin(self, asked: RaceRequest, taken: Taken) -> None:
        """Have it raced by the next GPU that is free. `taken` gets the result, when `finish` meets it."""
        self._waiting.append((asked, taken))
        self._submit()

    def finish(self, problem: Problem) -> None:
        """Return once all races of the problem are over. ValueError where a GPU cannot be measured on."""
        while any(race and race[0].problem == problem for race in (*self._waiting, *(r for _, r in self._running.values()))):
            if not self._running:
                raise ValueError(f"ray: no GPU of the cluster is left: {self._lost}")
            done, _ = self._ray.wait([*self._running], num_returns=1)
            for answer in done:
                self._collect(answer)
            self._submit()

    def close(self) -> None:
        actors, self._actors = self._actors, []
        if not self._ray.is_initialized():
            return
        for actor in actors:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()
            self._own = False

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _submit(self) -> None:
        while self._idle and self._waiting:
            actor, race = self._idle.pop(), self._waiting.popleft()
            ahead = self._waiting[len(self._idle)][0] if len(self._waiting) > len(self._idle) else None
            self._running[actor.race.remote(race[0], ahead)] = actor, race

    def _collect(self, answer: Any) -> None:
        """Pass on a result. Where an actor died, its race waits again, and it says hello once Ray has started it again."""
        actor, race = self._running.pop(answer)
        try:
            found = self._ray.get(answer)
        except self._ray.exceptions.RayError as e:
            self._lost = _said(e)
            if race is not None and isinstance(e, self._ray.exceptions.RayActorError):
                self._again(actor, race)
            elif race is not None:
                raise ValueError(f"ray: nothing can be measured: {self._lost}") from None
            return
        if race is not None and found is None:
            self._lost = "it ended while it was idle"
            self._again(actor, race)
            return
        if race is not None:
            race[1](*found)
        elif (found.device.key, found.driver, found.source) != (self.device.key, self.driver, self._source):
            self._lost = f"{found.device.title} took the place of {self.device.title}"  # its times are none of this plan's
            return
        self._idle.append(actor)

    def _again(self, actor: Any, race: tuple[RaceRequest, Taken]) -> None:
        files.warn(f"ray: a process that measured was lost, its race begins again: {self._lost}")
        self._waiting.appendleft(race)
        self._hello(actor)

    def _hello(self, actor: Any) -> Any:
        answer = actor.hello.options(max_task_retries=-1).remote()
        self._running[answer] = actor, None
        return answer

    def _first(self, answers: Sequence[Any]) -> Found:
        """What all GPUs are that answer soon; those that others hold now may join later."""
        ready, _ = self._ray.wait(answers, num_returns=len(answers), timeout=ANSWER_S)
        if not ready:
            raise ValueError(
                f"ray: none of the cluster's {len(answers)} GPUs was free within {ANSWER_S:.0f} s: other applications hold "
                "them (ray status)"
            )
        try:
            every = [self._ray.get(answer) for answer in ready]
        except self._ray.exceptions.RayError as e:
            raise ValueError(f"ray: a node of the cluster cannot measure: {_said(e)}") from None
        for answer in ready:
            self._idle.append(self._running.pop(answer)[0])
        return agreed(every)


def _said(error: Exception) -> str:
    """In a line: what a task raised, or how its process ended."""
    return str(getattr(error, "cause", None) or error).strip().partition("\n")[0]


def agreed(every: Sequence[Found]) -> Found:
    """What they all are, without the kernels that are left out on any. ValueError where they differ."""
    kinds = Counter((found.device.key, found.device.title, found.driver) for found in every)
    if len(kinds) > 1:
        named = ", ".join(f"{count} {title} (driver {driver})" for (_, title, driver), count in sorted(kinds.items()))
        raise ValueError(f"ray: {named}: one build for each, their caches merge (gpu-runtime cache merge)")
    if any(found.source != source_hash() for found in every):
        raise ValueError("ray: a node has other kernels than this machine: install the same gpu_runtime on all nodes")
    left_out = dict(pair for found in every for pair in found.device.left_out)
    return replace(every[0], device=replace(every[0].device, left_out=tuple(sorted(left_out.items()))))


def connected(address: str, find: Find) -> Spread:
    """The GPUs of the cluster at an address, as host:port or ray://host:port; empty: of the one that this process is connected
    to, RAY_ADDRESS names, or runs on this machine, else of one that is started here until close(). ValueError where none
    answers within ANSWER_S."""
    with extras.named():
        import ray

    own = not ray.is_initialized()
    if own:
        address = address or os.environ.get("RAY_ADDRESS", "")
        _knock(address)
        try:
            ray.init(address=address or None, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as e:
            cure = "if it asks for a token, set RAY_AUTH_MODE=token" if isinstance(e, ConnectionError) else "see ray status"
            raise ValueError(f"ray: no Ray cluster answers at {address or 'this machine'}: {_said(e)} ({cure})") from None
    try:
        return Spread(ray, find, own)
    except BaseException:
        if own:
            ray.shutdown()
        raise


def _knock(address: str) -> None:
    """ValueError where nobody accepts a connection, or an address names no port: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address in ("", "auto", "local"):
        return
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"ray: expected the address of a Ray cluster, as head:6379 or ray://head:10001, got {address!r}")
    ends, tries, why = time.monotonic() + ANSWER_S, 0, ""
    while (left := ends - time.monotonic()) > 0:
        tries += 1
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=left).close()
            return
        except OSError as e:
            why = str(e)
        time.sleep(min(1.0, max(0.0, ends - time.monotonic())))
    raise ValueError(
        f"ray: no Ray cluster answers at {address}: {tries} connections failed within {ANSWER_S:.0f} s, the last: {why}. Is "
        "the head node running (ray status), and the port open?"
    )
