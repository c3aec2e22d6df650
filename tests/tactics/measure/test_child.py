"""The child process and its parent: it is killed with it, from its first moment on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tactics.measure.child import Child, command_of

# Imports take long, as those of a worker do; one that its parent's end does not kill is there for a minute.
SLOW = "import time\nopen({path!r}, 'w').close()\ntime.sleep(60)\n"
PARENT = """
import sys, threading, time
from tactics.measure.child import Child, command_of
child = Child(command_of("slow_worker"))
threading.Thread(target=child.start, args=(60,)).start()
while not child.running:
    time.sleep(0.01)
print(child._process.pid, flush=True)
"""
ECHO = """
import sys
from tactics.measure.child import serve
serve(lambda: ({"device": sys.argv[1:], "name": __name__}, lambda request: {"got": request["op"]}))
"""


def alive(pid: int) -> bool:
    """Whether it runs; who has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end of standard input has to do")
@pytest.mark.parametrize("importing", [False, True], ids=["at once", "while it imports"])
def test_a_child_dies_with_its_parent_before_it_has_imported_anything(tmp_path, importing):
    begun = tmp_path / "begun"
    (tmp_path / "slow_worker.py").write_text(SLOW.format(path=str(begun)))
    paths = os.pathsep.join([str(Path(__file__).parents[3]), str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}, text=True
    )
    with parent:
        pid = int(parent.stdout.readline())
        end = time.monotonic() + 20
        while importing and not begun.exists() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    end = time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    survived = alive(pid)
    if survived:
        os.kill(pid, signal.SIGKILL)
    assert not survived and begun.exists() == importing


def test_a_module_runs_as_it_does_by_itself(tmp_path, monkeypatch):
    (tmp_path / "echo_worker.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child((*command_of("echo_worker"), "h200"))
    try:
        assert child.start(20) == {"device": ["h200"], "name": "__main__"}
        assert child.ask({"op": "sing"}, 20)["got"] == "sing"
    finally:
        child.close()
