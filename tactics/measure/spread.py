"""Races on the GPUs of a Ray cluster: each actor holds a GPU, and races one problem after the other.

The building process sends requests to actors, and is the only one that writes the timing cache. Ray restarts an actor that
died; its race is given to the next free actor. Ray's own retries are not used: a retry waits for the same actor, for ever if
its node is gone.
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

ANSWER_S = 30.0  # seconds to wait for an address or a GPU of the cluster
Find = Callable[[], tuple[Device, str]]  # () -> (a machine's GPU, as builds there see it, its driver's version)
Taken = Callable[[Lines, Mapping[str, str]], None]  # takes lines for the timing cache, and failures that must not be cached


@dataclass(frozen=True, slots=True)
class Found:
    """An actor's GPU. Only times of GPUs with equal fields may be compared in one plan; `source`: hash of the kernels'
    sources."""

    device: Device
    driver: str
    source: str


class Racer:
    """The actor, which holds a GPU and races on it. `find`: see Find."""

    def __init__(self, find: Find):
        self._find = find
        self._racing: Racing | None = None

    def hello(self) -> Found:
        device, driver = self._find()
        self._racing = Racing(device)
        return Found(device, driver, source_hash())

    def race(self, asked: RaceRequest, ahead: RaceRequest | None) -> tuple[Lines, Mapping[str, str]] | None:
        """Returns (lines, failures), as Racing.race gives them, for the request `asked`; meanwhile kernels of `ahead`, the
        probable next request, are compiled. Returns None if Ray restarted this actor, perhaps on another GPU, and `hello` was
        not called since."""
        if self._racing is None:
            return None
        lines: dict[str, dict[str, Any]] = {}
        able = self._racing.able(asked, lines.update)
        if ahead:
            self._racing.begin(ahead.problem, [ahead.tactics[name] for name in ahead.names])
        with turn(gpu_id(), lambda: None):
            return lines, self._racing.race(replace(asked, names=able), lines.update)


class Spread:
    """The GPUs of the Ray cluster that this process is connected to; `ray`: the module. Raises ValueError if the cluster has no
    GPU, or GPUs of several kinds.

    close() gives the GPUs back, and ends the connection if it is `own`. `device`, `driver`: the same for all GPUs; `device`
    leaves out each kernel that `gpu-runtime doctor` saw fail on any of them.
    """

    def __init__(self, ray: Any, find: Find, own: bool = False):
        self._ray, self._own, self._actors = ray, own, list[Any]()
        self._waiting: deque[tuple[RaceRequest, Taken]] = deque()
        self._running: dict[Any, tuple[Any, tuple[RaceRequest, Taken] | None]] = {}  # answer -> actor, its race (None: a hello)
        self._idle: list[Any] = []
        self._lost = ""  # why the last lost actor was lost
        count = int(ray.cluster_resources().get("GPU", 0))
        if not count:
            raise ValueError("ray: no node of this Ray cluster has a GPU: add one, or build without --ray")
        actor = ray.remote(num_gpus=1, num_cpus=0, max_restarts=-1)(Racer)
        self._actors = [actor.remote(find) for _ in range(count)]
        first = self._first([self._hello(actor) for actor in self._actors])
        self.device, self.driver, self._source, self.count = first.device, first.driver, first.source, len(self._idle)

    def begin(self, asked: RaceRequest, taken: Taken) -> None:
        """Queues a request for the next free GPU. `taken` gets its result during a later call of `finish`."""
        self._waiting.append((asked, taken))
        self._submit()

    def finish(self, problem: Problem) -> None:
        """Waits until all races of the problem are over. Raises ValueError if a GPU cannot be measured on, or none is left."""
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
        """Passes a result on to its `taken`. If the actor died, its race is queued again, and the actor is free again once Ray
        has restarted it and its `hello` has returned."""
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
        """Returns the common Found of the GPUs that answer within ANSWER_S; GPUs that other applications hold may join later.
        Raises ValueError if none answers, or they differ."""
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
    """Returns the first line of the exception that a task raised, or of Ray's text on how its process ended."""
    return str(getattr(error, "cause", None) or error).strip().partition("\n")[0]


def agreed(every: Sequence[Found]) -> Found:
    """Returns the common Found of these GPUs; a kernel left out on one is left out. Raises ValueError if they differ."""
    kinds = Counter((found.device.key, found.device.title, found.driver) for found in every)
    if len(kinds) > 1:
        named = ", ".join(f"{count} {title} (driver {driver})" for (_, title, driver), count in sorted(kinds.items()))
        raise ValueError(f"ray: {named}: one build for each, their caches merge (gpu-runtime cache merge)")
    if any(found.source != source_hash() for found in every):
        raise ValueError("ray: a node has other kernels than this machine: install the same gpu_runtime on all nodes")
    left_out = dict(pair for found in every for pair in found.device.left_out)
    return replace(every[0], device=replace(every[0].device, left_out=tuple(sorted(left_out.items()))))


def connected(address: str, find: Find) -> Spread:
    """Returns the GPUs of the Ray cluster at an address, host:port or ray://host:port. Raises ValueError if no cluster answers.

    With the address "" it is the first that exists of: the cluster that this process is connected to, the one at RAY_ADDRESS,
    one that runs on this machine, and else a cluster started here, which close() ends.
    """
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
    """Raises ValueError if the address names no port, or accepts no connection within ANSWER_S: Ray would try for minutes."""
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
