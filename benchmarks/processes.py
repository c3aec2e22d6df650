"""Processes that benchmarks start: a command whose process group ends as a whole at a time limit, and pools of fresh processes.

A process that answers requests is a `tactics.measure.child`."""

import os
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from glob import glob
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(command: list[str], seconds: float, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Runs a command; returns (its exit status, or None at the time limit; its output). `env`: more variables. At the limit the
    process group is ended.
    """
    with tempfile.TemporaryFile() as log:
        path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(ROOT)) if p)  # the emulated driver's comes first
        given = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | (env or {})
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=given, start_new_session=True)
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")


def checked(command: list[str], seconds: float, env: dict[str, str] | None = None) -> str:
    """Returns the output of `run`. RuntimeError if the command did not end with status 0 in time."""
    code, text = run(command, seconds, env)
    if code:
        raise RuntimeError(f"{command[2]} ended with {code}: {text[-800:].strip()}")
    if code is None:
        raise RuntimeError(f"{command[2]} did not end within {seconds:.0f} s: {text[-800:].strip()}")
    return text


def program(name: str) -> str:
    """Returns the path of a program of the CUDA toolkit; "" if it is neither on PATH nor in /usr/local/cuda*/bin."""
    return shutil.which(name) or next(iter(sorted(glob(f"/usr/local/cuda*/bin/{name}"))), "")


def pool(jobs: int, tasks_of_each: int | None = None) -> ProcessPoolExecutor:
    """Returns a pool of processes that inherit no threads and no CUDA context; each is replaced after `tasks_of_each` tasks."""
    return ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=tasks_of_each)
