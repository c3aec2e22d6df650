"""Requests to a server over HTTP, 64 in flight, and a server's process with all that it starts."""

import http.client
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

IN_FLIGHT = 64
LOCAL = threading.local()


class Reply(NamedTuple):
    """A server's reply; status 0: the connection broke."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def ask(
    port: int, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout: float = 60
) -> Reply:
    """Sends one request; a thread of `flood` keeps its connection."""
    known = getattr(LOCAL, "connections", {})
    try:
        if port not in known:
            known[port] = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        known[port].request("GET" if body is None else "POST", path, body, dict(headers or {}))
        got = known[port].getresponse()
        return Reply(got.status, dict(got.headers), got.read())
    except (OSError, http.client.HTTPException) as e:
        known.pop(port).close()
        return Reply(0, {}, str(e).encode())


def flood(send: Callable[[Any], Any], requests: Sequence[Any], in_flight: int = IN_FLIGHT, at: Mapping[int, Any] | None = None):
    """Sends all requests, `in_flight` at a time; returns the result of `send` for each. `at`: number of answers -> a function
    to call when there are as many.
    """
    lock, done = threading.Lock(), 0

    def one(request):
        nonlocal done
        got = send(request)
        with lock:
            done += 1
            action = (at or {}).get(done)
        if action:
            action()
        return got

    with ThreadPoolExecutor(in_flight, initializer=lambda: setattr(LOCAL, "connections", {})) as pool:
        return list(pool.map(one, requests))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Returns the first true value of a condition. AssertionError if there is none in time."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return found


def processes_with(variable: str) -> dict[int, str]:
    """Returns process -> command line of the live processes that have this NAME=value in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0") and (folder / "cmdline").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended, or is another user's
            continue
    return {pid: words for pid, words in found.items() if pid != os.getpid()}


class Server:
    """A server's process. All processes that it starts have MARK in their environment, and must be gone when it ends."""

    def __init__(self, words: Sequence[str | Path], env: Mapping[str, str], log: Path):
        self.mark, self.log = f"SERVED_BY_TEST={log}", log
        name, _, value = self.mark.partition("=")
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                list(map(str, words)), env={**env, name: value}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ready(self, check: Callable[[], bool], seconds: float) -> None:
        until(lambda: check() or self.process.poll() is not None, seconds, f"the server's start: {self.text()[-3000:]}")
        assert self.process.poll() is None, self.text()[-5000:]

    def named(self, words: str) -> list[int]:
        """Returns the server's processes whose command line contains these words."""
        return sorted(pid for pid, line in processes_with(self.mark).items() if re.search(words, line))

    def stop(self, seconds: float = 40) -> dict[int, str]:
        """Ends the server as its owner does; returns the processes that it left behind, which are killed then."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        end = time.monotonic() + 10
        while (left := processes_with(self.mark)) and time.monotonic() < end:
            time.sleep(0.2)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return left


def metrics(text: str, prefix: str) -> dict[tuple[str, str], float]:
    """Parses Prometheus's text: returns (name without prefix, value of our own label or "") -> the sum over all other
    labels.
    """
    own, found = ("point", "kind", "layer"), {}
    for name, labels, value in re.findall(rf"^{prefix}(gpu_runtime_\w+?)(?:_total)?\{{(.*)\}} (\S+)$", text, re.M):
        values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        key = (name, next((values[label] for label in own if values.get(label)), ""))
        found[key] = found.get(key, 0) + float(value)
    return found
