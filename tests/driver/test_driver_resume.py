"""Builds that are killed on the emulated driver, at any moment, and go on from what their timing cache holds."""

import json
import os
import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import gpu_runtime as gr
from tactics.measure.child import Child
from tactics.problems import codec
from tests.on_driver import passes, started, timed
from tests.reference_run import model, node

pytestmark = [pytest.mark.driver, timed]
FOLDER = "RESUME_FOLDER"  # environment variable: the folder of the cache and of the log of answers
KILLS = 10


def build() -> None:
    """Two convolutions; each answered request becomes a line of a log."""
    folder, ask, problem = Path(os.environ[FOLDER]), Child.ask, [""]

    def asking(self, request, timeout_s):
        reply = ask(self, request, timeout_s)
        if request["op"] == "problem":
            problem[0] = str(codec.from_json(request["problem"]))
        with open(folder / "log", "a") as log:
            log.write(json.dumps([os.getpid(), problem[0], request.get("tactics", []), request.get("samples", 0)]) + "\n")
        return reply

    Child.ask = asking  # type: ignore[method-assign]
    weights = {"a": (32, 16, 3, 3), "b": (32, 32, 3, 3)}
    rng = np.random.default_rng(0)
    stored = {k: (rng.standard_normal(shape) * 0.1).astype(np.float32) for k, shape in weights.items()}
    layers = [node("Conv", "x a", "c", pads=[1] * 4), node("Conv", "c b", "y", pads=[1] * 4)]
    proto = model(layers, {"x": (1, 16, 8, 8)}, "y", stored)
    # Level 3 times tactics within two standard deviations; with a tactic beyond, timed by chance, a plan is 2 % faster.
    engine = gr.build(proto, sparsity="force", timing_cache=folder / "times", optimization_level=4)
    print(engine.plan.solution.total_us)


def answers(folder: Path) -> list[list]:
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def workers(parent: int) -> list[str]:
    command = ["pgrep", "-P", str(parent), "-f", "tactics.measure.worker"]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def runs(pid: str) -> bool:
    """Whether a process is there, and no mere zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(process: subprocess.Popen, folder: Path, seconds: float, at_first: bool) -> None:
    """So long after its child began, or after its third answer; no child is left."""
    known = len(answers(folder))
    while not (workers(process.pid) if at_first else len(answers(folder)) > known + 2):
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    time.sleep(seconds)
    children = workers(process.pid)
    process.kill()
    process.communicate()
    time.sleep(0.2)
    assert children and not any(map(runs, children))


def test_ten_killed_builds_lose_what_was_in_flight_alone(tmp_path, monkeypatch):
    """Each is killed at a random moment, some within the first second of their child. What was answered before is in the cache
    and not asked for again; the plan is as fast as an undisturbed one."""
    rng, whole, cut = random.Random(0), tmp_path / "whole", tmp_path / "cut"
    totals = []
    for folder, kills in ((whole, 0), (cut, KILLS)):
        folder.mkdir()
        monkeypatch.setenv(FOLDER, str(folder))
        for number in range(kills):
            with started(build, checks=False) as process:
                kill(process, folder, rng.uniform(0, 0.6), number % 3 == 0)
        totals.append(float(passes(build, seconds=300, checks=False)))
    assert totals[1] == pytest.approx(totals[0], rel=0.005)
    rows = answers(cut)
    in_flight = {i for i, row in enumerate(rows[:-1]) if rows[i + 1][0] != row[0]}  # perhaps answered, but not kept
    asked: Counter[tuple[str, str]] = Counter()
    for i, (_, problem, tactics, samples) in enumerate(rows):
        asked.update({(problem, tactic): samples for tactic in tactics if i not in in_flight})
    lost = {(rows[i][1], tactic) for i in in_flight for tactic in rows[i][2]}
    lines = [json.loads(line) for line in (cut / "times").read_text().splitlines()]
    kept = {(line["problem"], line["tactic"]): line.get("n", 0) for line in lines}
    assert len(in_flight) >= KILLS // 2 and len(kept) > 20
    assert [pair for pair, count in asked.items() if not count <= kept[pair]] == []
    assert [pair for pair, count in asked.items() if count != kept[pair] and pair not in lost] == []
