"""Builds that time their tactics on the GPUs of a Ray cluster, here two emulated ones with CuPy."""

import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from tactics.measure.cache import key_of
from tests.emulated_driver import build as driver
from tests.emulated_driver.settings import ROOT_VARIABLE, VARIABLE, Settings
from tests.reference_run import model, node
from tests.servers.environment import environment
from tests.servers.test_ray_server import running
from tests.test_wheel import clean

pytestmark = pytest.mark.servers
# Builds, spread over a cluster that it starts where `ray`, of which an actor is killed behind 60 timed tactics. Prints the
# plan's time, the warnings, and how many processes had a child that measured at a moment. At level 2 a plan depends on
# which tactics are timed first: its time differed by 0.8 %.
SCRIPT = """
import os, signal, subprocess, sys, warnings
import gpu_runtime as gr

def pids(pattern):
    return [int(p) for p in subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout.split()]

most, killed = 0, []

def listen(progress):
    global most
    if progress.stage == "tune":
        children = pids("tactics.measure.child tactics.measure.worker")
        found = subprocess.run(["ps", "-o", "ppid=", *map(str, children)], capture_output=True, text=True).stdout.split()
        most = max(most, len({int(p) for p in found} - set(children)))
        if progress.done > 60 and ray and not killed:
            killed.extend(pids("^ray::Racer")[:1])
            os.kill(killed[0], signal.SIGKILL)

ray = sys.argv[3] == "ray" or None
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    engine = gr.build(sys.argv[1], sparsity="force", timing_cache=sys.argv[2], optimization_level=3, ray=ray, progress=listen)
print(engine.plan.solution.total_us, most, len(killed), [str(w.message) for w in told if "its race" in str(w.message)])
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return environment("ray") / "bin" / "python"


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Path:
    w = [(np.random.default_rng(i).standard_normal((8, 8, 3, 3)) / 8).astype(np.float32) for i in range(4)]
    nodes = [node("Conv", f"x{i} w{i}", f"x{i + 1}", pads=[1] * 4, strides=[1 + i % 2] * 2) for i in range(4)]
    path = tmp_path_factory.mktemp("ray") / "net.onnx"
    onnx.save(model(nodes, {"x0": (1, 8, 16, 16)}, "x4", {f"w{i}": w[i] for i in range(4)}), path)
    return path


def emulated(*devices: str) -> dict[str, str]:
    """The variables by which a process finds the emulated driver with these GPUs."""
    found = driver.environment(Settings(devices=devices))
    names = ("LD_LIBRARY_PATH", "PYTHONPATH", VARIABLE, ROOT_VARIABLE, *(name for name in found if name.startswith("CUPY_")))
    return {name: found[name] for name in names}


def variables(*devices: str) -> dict[str, str]:
    """Of a process on a machine with these GPUs, where no cluster runs."""
    more = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "COLUMNS": "200"}
    return clean(**more, **(emulated(*devices) if devices else {}))


def built(python, network, cache, ray, env):
    words = [python, "-c", SCRIPT, network, cache, ray]
    found = subprocess.run(words, env=env, cwd=network.parent, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stdout + found.stderr
    total, most, killed, told = found.stdout.strip().splitlines()[-1].split(" ", 3)
    return float(total), int(most), int(killed), told


def left() -> set[str]:
    """The processes of Ray."""
    return set(subprocess.run(["pgrep", "-f", "ray::|raylet|gcs_server"], capture_output=True, text=True).stdout.split())


@pytest.mark.long
def test_two_gpus_share_a_build_and_one_may_be_lost(python, network, tmp_path):
    """The same plan as on one GPU; a killed actor loses its race alone; nothing is timed twice, and no process is left."""
    env, before = variables("h200", "h200"), left()
    alone = built(python, network, tmp_path / "alone.jsonl", "", env)
    spread = built(python, network, tmp_path / "spread.jsonl", "ray", env)
    assert alone[1:] == (1, 0, "[]")
    assert spread[1] >= 2 and spread[2] == 1 and spread[3].count("its race begins again") == 1
    assert spread[0] == pytest.approx(alone[0], rel=0.005)
    lines = [json.loads(line) for line in (tmp_path / "spread.jsonl").read_text().splitlines()]
    assert len(lines) > 200 and max(Counter(map(key_of, lines)).values()) == 1
    for _ in range(20):
        if left() <= before:
            break
        time.sleep(0.5)
    assert left() <= before
    again = built(python, network, tmp_path / "spread.jsonl", "", env)
    assert again[0] == spread[0] and len((tmp_path / "spread.jsonl").read_text().splitlines()) == len(lines)


def refused(python, network, env, *words) -> tuple[str, float]:
    """What `build-engine` says where it ends with 1, and after how many seconds."""
    begin = time.monotonic()
    command = [python.parent / "build-engine", network, "-o", network.parent / "net.engine", *words]
    found = subprocess.run(command, env=env, cwd=network.parent, capture_output=True, text=True, timeout=200)
    assert found.returncode == 1 and "Traceback" not in found.stderr, found.stdout + found.stderr
    assert not (network.parent / "net.engine").exists()
    return found.stderr, time.monotonic() - begin


def test_clusters_that_cannot_time_a_build_are_refused(python, network):
    text, _ = refused(python, network, variables("h200", "l4"), "--ray")
    assert "1 NVIDIA H200 (driver 580.00.emulated), 1 NVIDIA L4 (driver 580.00.emulated): one build for each" in text
    text, _ = refused(python, network, variables(), "--ray")
    assert "no node of this Ray cluster has a GPU" in text
    text, seconds = refused(python, network, variables(), "--ray=127.0.0.1:9")
    assert "no Ray cluster answers at 127.0.0.1:9: 30 connections failed within 30 s" in text and 29 < seconds < 45


def test_a_machine_without_a_gpu_builds_on_a_cluster_that_runs(python, network, tmp_path):
    """The plan has the cluster's GPU and driver; what only a GPU here could time is left out, and said."""
    words = [
        python.parent / "build-engine",
        network,
        "--ray",
        "-o",
        tmp_path / "net.engine",
        f"--timingCacheFile={tmp_path}/times",
    ]
    with running(python.parent.parent, tmp_path, "--num-gpus=2", **emulated("h200", "h200")) as ray:
        env = variables() | {"RAY_ADDRESS": ray.env["RAY_ADDRESS"]}
        found = subprocess.run([*words, "--dumpProfile"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert found.returncode == 0, found.stdout + found.stderr
        assert ray.named("ServeController"), "the cluster is as it was"
    assert "timing on 2 of them in a Ray cluster" in found.stdout and (tmp_path / "net.engine").exists()
    assert "measured(NVIDIA H200, emulated driver)" in found.stdout and "end to end" not in found.stdout
    assert "this machine has no NVIDIA H200: layer times are of each tactic alone" in found.stderr
    lines = [json.loads(line) for line in (tmp_path / "times").read_text().splitlines()]
    assert lines and {line["device"].rpartition("|")[2] for line in lines} == {"580.00.emulated"}
