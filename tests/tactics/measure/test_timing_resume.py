"""Builds that end anywhere and go on from there, and builds that share a GPU and a cache."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tactics.measure import timing
from tactics.measure.cache import Cache, is_over, key_of
from tactics.measure.child import Child
from tactics.problems import codec
from tactics.tactic import Tactic
from tests.tactics.measure.scripted import H200, PROBLEM, ROOT, requests, tactics


class Ended(BaseException):
    """The process ends here, and nothing behind this runs."""


class Scripted(Child):
    """A child in this process. It gives `answers` answers and ends the parent while that waits for one more."""

    def __init__(self, answered: Counter, answers: float):
        super().__init__(())
        self.answered, self.answers, self.problem = answered, answers, ""

    @property
    def running(self):
        return bool(self.problem)

    def start(self, timeout_s):
        return {"device": H200.key}

    def ask(self, request, timeout_s):
        if request["op"] == "problem":
            self.problem = json.dumps(request["problem"])
            return {}
        if not self.answers:
            raise Ended
        self.answers -= 1
        return {"us": {name: [self.sample(name) for _ in range(request["samples"])] for name in request["tactics"]}}

    def sample(self, name):
        """Of each tactic one sample after the other, from wherever they are asked for."""
        at = self.answered[self.problem, name]
        self.answered[self.problem, name] += 1
        return (10 + Tactic.parse(name).gemm.m / 160) * random.Random(f"{self.problem} {name} {at}").gauss(1, 0.05)


def built(path, answered, answers=math.inf):
    """All times of four problems, from a process that ends behind so many answers; None where it does."""
    timer = timing.Measured(H200, Cache(path), driver="580", compile_first=False)
    timer.racing.worker = Scripted(answered, answers)
    try:
        return [timer(replace(PROBLEM, n=n), tactics(30)) for n in range(1, 5)]
    except Ended:
        return None


def test_a_hundred_ends_cost_what_was_in_flight_alone(tmp_path):
    """Each process ends behind one new answer: the next goes on from there, and no sample is answered twice."""
    whole, cut = Counter(), Counter()
    expected = built(tmp_path / "whole", whole)
    for ends in range(100):
        assert built(tmp_path / "cut", cut, 1) is None
        assert len(Cache(tmp_path / "cut")) == min(ends + 1, 30) or ends >= 30
    assert built(tmp_path / "cut", cut) == expected
    assert cut == whole and max(whole.values()) > 20
    one, other = (Cache(tmp_path / name)._records for name in ("whole", "cut"))
    assert {k: r | {"when": 0} for k, r in one.items()} == {k: r | {"when": 0} for k, r in other.items()}


SHARED = """
import sys; sys.path.insert(0, {root!r})
from tests.tactics.measure.test_timing_resume import *
waits = []
def wait(): waits.append(1)
timer = timing.Measured(H200, Cache({path!r}), driver="580", command={command!r}, compile_first=False, waits=wait)
for n in range(1, 7):
    assert len(timer(replace(PROBLEM, n=n), tactics(4))) == 4
print(len(waits))
"""


def test_two_builds_share_one_gpu_and_one_cache(tmp_path, fake, monkeypatch):
    """Each time is measured once, by whoever comes first, and never do two children time at a moment."""
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path / "cache"))
    command = fake({"lock": str(tmp_path / "busy")}).racing.worker._command
    code = SHARED.format(root=str(ROOT), path=str(fake.path), command=command)
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    told = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0] and all(text in ("0\n", "1\n") for text in told)
    assert "two races at a time" not in fake.log()
    over = [key_of(r) for r in map(json.loads, fake.path.read_text().splitlines()) if r["over"]]
    assert len(over) == len(set(over)) == 24
    first = Counter(name for r in requests(fake) if r["op"] == "time" and r["samples"] == 1 for name in r["tactics"])
    assert sum(first.values()) == 24 * 2, "one sample alone and one beside the others"


def test_without_a_folder_for_locks_nobody_waits(fake, monkeypatch):
    monkeypatch.setenv("GPU_RUNTIME_CACHE", "/proc/nowhere")
    assert len(fake(waits=lambda: pytest.fail("waited"))(PROBLEM, tactics(2))) == 2


BUILD = """
import sys; sys.path.insert(0, {root!r})
from tests.tactics.measure.test_timing_resume import *
timer = timing.Measured(H200, Cache({path!r}), driver="580", command={command!r}, compile_first=False)
try:
    for n in range(1, 30):
        timer(replace(PROBLEM, n=n), tactics(3))
except KeyboardInterrupt:
    print("interrupted")
    timer.close()
"""


def build(tmp_path, fake):
    """A process of its own that measures 29 problems of 3 slow tactics each; returned once some are in its cache."""
    command = fake({t.name: "slow" for t in tactics(3)}).racing.worker._command
    code = BUILD.format(root=str(ROOT), path=str(fake.path), command=command)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (fake.path.exists() and fake.path.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_resumes_where_it_stopped(tmp_path, fake, sign):
    """Killed in the middle of a batch of three: what was measured is kept, and only the rest is measured after."""
    process = build(tmp_path, fake)
    process.send_signal(sign)
    out, _ = process.communicate(timeout=30)
    assert out == ("interrupted\n" if sign == signal.SIGINT else "")
    kept = Cache(fake.path)
    assert len(kept) >= 2 and kept.malformed == 0
    before = len(fake.log())
    timer = fake()
    problems = [replace(PROBLEM, n=n) for n in (1, 2)]
    for problem in problems:
        assert set(timer(problem, tactics(3))) == set(tactics(3))
    asked = [json.loads(line) for line in fake.log()[before:] if line.startswith("{")]
    current = None
    for request in asked:
        if request["op"] == "problem":
            current = codec.from_json(request["problem"])
        else:
            for name in request["tactics"]:
                assert not is_over(kept.get(timer.key(current, Tactic.parse(name)))), "measured twice"


@pytest.mark.slow
def test_the_child_ends_when_its_parent_is_killed(tmp_path, fake):
    """The end of standard input is enough for a child that is not hung."""
    process = build(tmp_path, fake)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate(timeout=10)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{c}").exists() for c in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert children and not any(Path(f"/proc/{c}").exists() for c in children)
