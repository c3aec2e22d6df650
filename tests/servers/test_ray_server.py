"""Ray Serve on the application of gpu_runtime.serving.ray; in the emulator, and on emulated GPUs with CuPy."""

import io
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.emulated_driver import build as driver
from tests.emulated_driver.settings import ROOT_VARIABLE, VARIABLE, Settings
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

    def __init__(self, python: Path, folder: Path, *more: str, **variables: str):
        self.http, self.counted, gcs, client = free_ports(4)
        self.bin, self.folder, self.short = python / "bin", folder, tempfile.mkdtemp(prefix="ray", dir="/tmp")  # its sockets
        self.env = clean(
            PATH=f"{self.bin}:{os.environ['PATH']}",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_AUTH_MODE="disabled",  # else a token that another program of Ray left is asked for
            RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="0",
            RAY_ADDRESS=f"127.0.0.1:{gcs}",
            **variables,
        )
        words: list[str | Path] = [
            self.bin / "ray",
            "start",
            "--head",
            "--block",
            f"--port={gcs}",
            f"--metrics-export-port={self.counted}",
        ]
        words += [
            f"--ray-client-server-port={client}",
            "--num-cpus=4",
            "--include-dashboard=false",
            f"--temp-dir={self.short}",
            "--object-store-memory=200000000",
        ]
        super().__init__([*words, *more], self.env, folder / "ray.log")

    def run(self, *arguments: str) -> None:
        words = ["run", "--non-blocking", "gpu_runtime.serving.ray:app", "replicas=2", *arguments]
        done(self.bin / "serve", *words, cwd=self.folder, env=self.env)

    def fails(self, *arguments: str) -> str:
        """What `serve run` says where it fails."""
        words = [self.bin / "serve", "run", "--non-blocking", "gpu_runtime.serving.ray:app", *arguments]
        found = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=120)
        return found.stdout + found.stderr

    def infer(self, body: bytes) -> Reply:
        return ask(self.http, "/", body)

    def metrics(self) -> dict:
        return metrics(ask(self.counted, "/metrics").body.decode(), "ray_")


def values(reply: Reply) -> bytes:
    with np.load(io.BytesIO(reply.body)) as arrays:
        return arrays["logits"].tobytes()


@contextmanager
def running(python: Path, folder: Path, *more: str, **variables: str):
    server = Ray(python, folder, *more, **variables)
    try:
        server.ready(lambda: "Ray runtime started" in server.text(), 60)
        done(server.bin / "serve", "start", "--http-host=127.0.0.1", f"--http-port={server.http}", cwd=folder, env=server.env)
        yield server
    finally:
        left = server.stop()
        shutil.rmtree(server.short, ignore_errors=True)
    assert not left


def zipped(data: bytes, name: str = "x.npy", method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(name, data)
    return file.getvalue()


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


ROW = np.zeros((1, 1, 8, 8), np.float32)
# Name -> a bad body, the status and words of its answer.
BAD = {
    "empty": (b"", 400, "not a zip file"),
    "torn": (npz(x=ROW)[:-30], 400, "not a zip file"),
    "damaged": (npz(x=ROW + 1).replace(b"\0\0\x80?", b"\0\0\x81?", 1), 400, "CRC"),
    "objects": (npz(x=np.array([{}], object)), 400, "allow_pickle=False"),
    "no array": (zipped(b"text"), 400, "expected 1 to 8 rows"),
    "promises": (zipped(header((1 << 40, 1, 8, 8))), 400, ""),
    "another method": (zipped(header((1, 1, 8, 8)), method=zipfile.ZIP_LZMA), 400, "numpy.savez_compressed"),
    "names": (npz(x=ROW, y=ROW), 400, "expected the names ['x'], got ['x', 'y']"),
    "shape": (npz(x=ROW[:, :, :7]), 400, "x: expected 1 to 8 rows of 1x8x8 float32, got an array 1x1x7x8 float32"),
    "dtype": (npz(x=ROW.astype(np.float64)), 400, "float64"),
    "no rows": (npz(x=ROW[:0]), 400, "got 0"),
    "rows": (npz(x=np.resize(ROW, (MOST + 1, 1, 8, 8))), 400, "got 9"),
    "size": (npz(x=np.zeros((1000, 1, 8, 8), np.float32)), 413, "bytes at most"),
    "bomb": (zipped(bytes(1 << 20)), 413, "it holds 1048576 bytes"),
}


def judge(replies: list[Reply], *wanted: list[bytes]) -> int:
    """How many answers there are; each has the right bytes of one version."""
    for i, reply in enumerate(replies):
        assert reply.status != 200 or values(reply) in [w[i] for w in wanted], i
    return sum(reply.status == 200 for reply in replies)


def test_every_answer_is_its_requests_own(python, digits, tmp_path):
    names, bad = list(BAD), set(range(7, COUNT, 10))
    good = [npz(x=x) for x in digits.requests]
    bodies = [BAD[names[i % len(BAD)]][0] if i in bad else body for i, body in enumerate(good)]
    first, second = (f"engine={digits.folder / name}.engine" for name in ("first", "second"))
    with running(python, tmp_path) as ray:
        ray.run("emulate=true", first)
        replies = flood(ray.infer, bodies)
        assert judge(replies, digits.expected) == COUNT - len(bad)
        for i in bad:
            _, status, words = BAD[names[i % len(BAD)]]
            assert replies[i].status == status and words in replies[i].body.decode(), (names[i % len(BAD)], replies[i])
        rows = sum(len(x) for i, x in enumerate(digits.requests) if i not in bad)
        large = sum(replies[i].status == 413 for i in bad)
        sent = {("requests", ""): COUNT, ("rows", ""): rows, ("errors", "size"): large, ("errors", "request"): len(bad) - large}
        wanted = {(f"gpu_runtime_{name}", value): float(count) for (name, value), count in sent.items()}
        found = until(lambda: m if wanted.items() <= (m := ray.metrics()).items() else None, 40, f"the metrics {wanted}")
        assert found["gpu_runtime_run_seconds", ""] > 0
        assert rows + found["gpu_runtime_padded_rows", ""] == MOST * found["gpu_runtime_runs", str(MOST)]
        assert ray.infer(npz(x=ROW * np.nan)).status == 200
        until(lambda: ray.metrics().get(("gpu_runtime_nonfinite", digits.last)) == 1, 40, "the layer that stored NaN")

        replicas = ray.named("ServeReplica:default:EngineServer")
        assert len(replicas) == 2
        kill = {COUNT // 4: lambda: os.kill(replicas[0], signal.SIGKILL)}
        assert judge(flood(ray.infer, good, at=kill), digits.expected) == COUNT, "a killed replica lost requests"
        assert replicas[0] not in ray.named("ServeReplica:default:EngineServer")

        change = threading.Thread(target=ray.run, args=["emulate=true", second])
        assert judge(flood(ray.infer, good, at={COUNT // 4: change.start}), digits.expected, digits.later) == COUNT
        change.join()
        assert judge(flood(ray.infer, good[:200]), digits.later[:200]) == 200

        ray.run("emulate=true", first, "queue=4")
        replies = flood(ray.infer, good)
        assert 0 < judge(replies, digits.expected) < COUNT and {r.status for r in replies} == {200, 503}
        assert any(r.body == b"too many requests wait: try again later" for r in replies)

        ray.run("emulate=true", first, "timeout_s=0.0001")
        assert {r.status for r in flood(ray.infer, good[:10])} == {504}


def test_without_a_gpu_nothing_is_served_unless_it_emulates(python, digits, tmp_path):
    engine = f"engine={digits.folder / 'first.engine'}"
    with running(python, tmp_path) as ray:
        assert "no node of this Ray cluster has a GPU: add one" in ray.fails(engine, "emulate=false")
        assert "pydantic" in ray.fails(engine, "emulated=true") and "no such file" in ray.fails("engine=other.engine")
    with running(python, tmp_path, "--num-gpus=2") as ray:
        assert "no CUDA driver is found (libcuda.so.1)" in ray.fails(engine, "emulate=false")


def test_two_replicas_run_on_a_gpu_each(python, digits, tmp_path):
    """With CuPy, on two emulated GPUs of one architecture; the engine's tactics were chosen for the first one."""
    found = driver.environment(Settings(devices=("h200", "h100")))
    names = ("LD_LIBRARY_PATH", "PYTHONPATH", VARIABLE, ROOT_VARIABLE, *(name for name in found if name.startswith("CUPY_")))
    count, engine = COUNT // 5, f"engine={digits.folder / 'first.engine'}"
    with running(python, tmp_path, "--num-gpus=2", **{name: found[name] for name in names}) as ray:
        ray.run(engine)
        replicas = ray.named("ServeReplica:default:EngineServer")
        assert len(replicas) == 2 and all("libcuda.so.1" in Path(f"/proc/{pid}/maps").read_text() for pid in replicas)
        assert judge(flood(ray.infer, [npz(x=x) for x in digits.requests[:count]]), digits.expected[:count]) == count

        def each() -> list[float]:
            text = ask(ray.counted, "/metrics").body.decode()
            rows = [float(n) for n in re.findall(r'^ray_gpu_runtime_rows_total\{.*replica="\w+".*\} (\S+)$', text, re.M)]
            return rows if sum(rows) == sum(map(len, digits.requests[:count])) else []

        rows = until(each, 40, "the rows of all replicas")
        assert len(rows) == 2 and min(rows) > 0, "one replica ran nothing"
        logs = [path.read_text(errors="replace") for path in Path(ray.short).glob("session_2*/logs/worker-*.err")]
    told = re.findall("its tactics were chosen for .*", "".join(logs))
    assert told == ["its tactics were chosen for H200 SXM 141GB, this is NVIDIA H100 80GB HBM3: build it here to be faster"]


def test_the_example_answers(python):
    """examples/serve_ray.py, as its head says."""
    env = clean(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", PATH=f"{python / 'bin'}:{os.environ['PATH']}")
    (port,) = free_ports(1)
    said = done(python / "bin" / "python", "-m", "examples.serve_ray", "--emulate", "--port", str(port), cwd=ROOT, env=env)
    assert said.splitlines()[-1] == "answered [7, 6, 3, 7, 7, 3, 2, 8], 8 of 8 right"
