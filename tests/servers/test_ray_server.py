"""Ray Serve on the application of gpu_runtime.serving.ray; in the emulator."""

import io
import os
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.servers.client import Reply, Server, ask, flood, free_ports, metrics, until
from tests.servers.environment import environment
from tests.servers.networks import COUNT, MOST, Case, case
from tests.test_wheel import clean, done

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def python() -> Path:
    return environment("ray")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Case:
    return case(tmp_path_factory.mktemp("ray"))


def npz(**arrays: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.savez(data, **arrays)
    return data.getvalue()


class Ray(Server):
    """A cluster of one node, on which `serve run` runs applications."""

    def __init__(self, python: Path, folder: Path, *more: str):
        self.http, self.counted, gcs = free_ports(3)
        self.bin, self.folder, self.short = python / "bin", folder, tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its sockets
        self.env = clean(PATH=f"{self.bin}:{os.environ['PATH']}", RAY_USAGE_STATS_ENABLED="0", RAY_ADDRESS=f"127.0.0.1:{gcs}")
        words = [self.bin / "ray", "start", "--head", "--block", f"--port={gcs}", f"--metrics-export-port={self.counted}"]
        words += ["--num-cpus=4", "--include-dashboard=false", f"--temp-dir={self.short}", "--object-store-memory=200000000"]
        super().__init__([*words, *more], self.env, folder / "ray.log")

    def run(self, *arguments: str) -> None:
        words = ["run", "--non-blocking", "gpu_runtime.serving.ray:app", "emulate=true", "replicas=2", *arguments]
        print(done(self.bin / "serve", *words, cwd=self.folder, env=self.env)[-500:])

    def infer(self, body: bytes) -> Reply:
        return ask(self.http, "/", body)

    def metrics(self) -> dict:
        return metrics(ask(self.counted, "/metrics").body.decode(), "ray_")


def values(reply: Reply) -> bytes:
    with np.load(io.BytesIO(reply.body)) as arrays:
        return arrays["logits"].tobytes()


@contextmanager
def running(python: Path, folder: Path):
    server = Ray(python, folder)
    try:
        server.ready(lambda: "Ray runtime started" in server.text(), 60)
        done(server.bin / "serve", "start", "--http-host=127.0.0.1", f"--http-port={server.http}", cwd=folder, env=server.env)
        yield server
    finally:
        left = server.stop()
        shutil.rmtree(server.short, ignore_errors=True)
    assert not left


def test_explore(python, digits, tmp_path):
    with running(python, tmp_path) as ray:
        start = time.time()
        ray.run(f"engine={digits.folder / 'first.engine'}")
        print("up", time.time() - start, ray.text()[-300:])
        r = ray.infer(npz(x=digits.requests[0]))
        print(r.status, r.headers, r.body[:300])
        bodies = [npz(x=x) for x in digits.requests]
        start = time.time()
        rs = flood(ray.infer, bodies)
        print(time.time() - start, "s", [sum(r.status == s for r in rs) for s in (200, 400, 500, 503, 0)])
        print("wrong", sum(values(r) != digits.expected[i] for i, r in enumerate(rs) if r.status == 200))
        print(next((r.body for r in rs if r.status != 200), ""))
        time.sleep(12)
        print(ray.metrics())
        print([l for l in ask(ray.counted, "/metrics").body.decode().splitlines() if "gpu_runtime" in l][:40])
        from tests.servers.client import processes_with

        print(processes_with(ray.mark))
