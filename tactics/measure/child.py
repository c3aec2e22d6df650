"""A child process that answers requests and may hang or die: each request gets an answer or, after a time limit, a fault."""

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tactics.sampling import faults
from tactics.sampling.faults import Fault

Answer = Callable[[dict[str, Any]], Mapping[str, Any]]


class _Lost(Exception):
    """Raised when the process hung, died or wrote an invalid answer; the process must then be killed. `fault`: the reason."""

    def __init__(self, fault: Fault | str) -> None:
        self.fault = Fault(fault, fatal=True) if isinstance(fault, str) else fault
        super().__init__(self.fault.text)


class Child:
    """A child process, started by `start`, that reads requests and writes answers over pipes, one JSON object per line.

    It runs in a session of its own, so Ctrl-C in the terminal does not reach it. After a fatal fault the process is killed, and
    `start` makes a new one.
    """

    def __init__(self, command: Sequence[str]):
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float) -> dict[str, Any]:
        """Starts a new process and returns its first line; {"error": text} if none came in `timeout_s` seconds. A process whose
        line has no "device" is ended.
        """
        self.close()
        self._id, self._buffer = 0, b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        root = str(Path(__file__).resolve().parents[2])
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)}
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            env=env,
            start_new_session=True,
        )
        try:
            hello = self._receive(self._process, timeout_s)
        except _Lost as e:
            hello = {"error": str(e)}
        if "device" not in hello:
            self.close()
        return hello

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a request to the running process and returns its answer, {"error": text, "fatal": bool, "passing": bool} for a
        fault. A fatal fault ends the process.
        """
        assert self._process is not None  # the caller has looked
        try:
            reply = self._ask(self._process, request, timeout_s)
        except _Lost as e:
            reply = e.fault.answer()
        if reply.get("fatal"):
            self.close()
        return reply

    def close(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            for f in (process.stdin, process.stdout, self._stderr):
                f.close()  # type: ignore[union-attr]  # both are pipes

    def _ask(self, process: subprocess.Popen[bytes], request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._id += 1
        try:
            process.stdin.write(json.dumps({"id": self._id, **request}).encode() + b"\n")  # type: ignore[union-attr]
        except OSError:
            raise _Lost(self._death(process)) from None
        reply = self._receive(process, timeout_s)
        if reply.get("id") != self._id:
            raise _Lost(f"the child process answered another request: {json.dumps(reply)[:200]}")
        return reply

    def _receive(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
        """Returns the next line. Raises _Lost after `timeout_s`, at the process's end, and for a line that is no JSON
        object.
        """
        answers, end = process.stdout.fileno(), time.monotonic() + timeout_s  # type: ignore[union-attr]
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise _Lost(f"no answer in {timeout_s:g} s: the process hung and was killed")
            data = os.read(answers, 65536)
            if not data:
                raise _Lost(self._death(process))
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise _Lost(f"the child process wrote a line that is not a JSON answer: {line[:200]!r}")
        return reply

    def _death(self, process: subprocess.Popen[bytes]) -> Fault:
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            return Fault("the child process closed its pipe", fatal=True)
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 1500))
        return faults.of_end(code, self._stderr.read().decode(errors="replace").strip())


def serve(begin: Callable[[], tuple[dict[str, Any], Answer | None]]) -> None:
    """Runs the child's side of the pipe: writes a first line, then answers each request until standard input ends.

    `begin` returns (the first line, the function that answers a request, or None if no request can be answered).
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    answer: Answer | None = None
    try:
        hello, answer = begin()
    except Exception as e:  # whatever the reason, the parent is to read it
        hello = {"error": f"{type(e).__name__}: {e}"}
    answers.write(json.dumps(hello) + "\n")
    if answer is None:
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = answer(request)
        except Exception as e:  # a tactic may fail in any way; the parent writes down how
            reply = faults.of_error(e).answer()
        answers.write(json.dumps({"id": request["id"], **reply}) + "\n")


def command_of(module: str) -> tuple[str, ...]:
    """Returns the command of a child that runs a module as `python -m` does, and that is killed when its parent ends.

    This file sets that up before it runs the module, whose imports take seconds in which the parent may end.
    """
    return sys.executable, "-m", "tactics.measure.child", module


def _die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, even while a kernel hangs; ends now if the parent is gone already.

    A parent that is gone shows by the closed other end of standard input (POLLHUP).
    """
    with contextlib.suppress(OSError, AttributeError):  # elsewhere the end of standard input has to do
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        gone = select.poll()
        gone.register(0, select.POLLHUP)
        if gone.poll(0):
            os._exit(1)


if __name__ == "__main__":
    _die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
