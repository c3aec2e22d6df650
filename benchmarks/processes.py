"""A command in a process group of its own, which is ended as a whole at a time limit."""

import os
import signal
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(command: list[str], seconds: float, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """(exit status or None at the time limit, output); `env`: more variables. The process group is ended at the limit."""
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
