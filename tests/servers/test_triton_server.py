"""NVIDIA Triton, with its python backend, on models that `gpu-runtime triton-repo` writes; in the emulator."""

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpu_runtime.cli import main
from tests.servers.client import Reply, Server, ask, flood, free_ports, metrics, until
from tests.servers.environment import environment
from tests.servers.networks import COUNT, MOST, Case, case
from tests.test_wheel import clean, done

pytestmark = pytest.mark.servers
TYPES = {"float32": "FP32", "float64": "FP64"}


@pytest.fixture(scope="module")
def python() -> Path:
    return environment("triton")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Case:
    return case(tmp_path_factory.mktemp("triton"))


def write(digits: Case, engine: str, repo: Path, *more: str) -> Path:
    main(["triton-repo", str(digits.folder / engine), "-o", str(repo), "--name", "net", "--kind", "cpu", *more])
    return repo / "net"


class Triton(Server):
    def __init__(self, python: Path, repo: Path, folder: Path):
        site = next(python.glob("lib/python*/site-packages"))
        binary = site / "pytriton" / "tritonserver"
        backend = folder / "backends" / "python"
        shutil.copytree(binary / "backends" / "python", backend, dirs_exist_ok=True)
        shutil.copy(binary / "python_backend_stubs" / "3.11" / "triton_python_backend_stub", backend)
        self.http, self.counted = free_ports(2)
        env = clean(PATH=f"{python / 'bin'}:{os.environ['PATH']}", LD_LIBRARY_PATH=str(site / "nvidia_pytriton.libs"))
        words = [binary / "bin" / "tritonserver", f"--model-repository={repo}", f"--backend-directory={folder / 'backends'}"]
        words += [
            "--http-address=127.0.0.1",
            f"--http-port={self.http}",
            "--allow-grpc=false",
            f"--metrics-port={self.counted}",
        ]
        words += ["--model-control-mode=poll", "--repository-poll-secs=1", "--exit-timeout-secs=10", "--http-thread-count=16"]
        super().__init__(words, env, folder / "triton.log")

    def stubs(self) -> list[int]:
        return self.named("triton_python_backend_stub")

    def settled(self) -> list[int]:
        """The stubs of two instances, once they are all: bytecode in its folder makes Triton load a version a second time."""

        def same() -> list[int]:
            before = self.stubs()
            time.sleep(4)
            return before if len(before) == 2 and before == self.stubs() else []

        return until(same, 60, "two stubs alone")

    def infer(self, arrays: dict[str, np.ndarray], **more: str) -> Reply:
        """By the binary extension of the protocol: JSON, then the bytes of the tensors."""
        inputs = [
            {"name": n, "shape": a.shape, "datatype": TYPES[a.dtype.name], "parameters": {"binary_data_size": a.nbytes}}
            for n, a in arrays.items()
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = head + b"".join(a.tobytes() for a in arrays.values())
        return ask(self.http, "/v2/models/net/infer", body, {"Inference-Header-Content-Length": str(len(head)), **more})

    def metrics(self) -> dict:
        return metrics(ask(self.counted, "/metrics").body.decode(), "")


def values(reply: Reply) -> bytes:
    """The bytes of the only output."""
    return reply.body[int(reply.headers["Inference-Header-Content-Length"]) :]


@contextmanager
def running(server: Triton, fails: bool = False):
    """The server, once its model is ready, or once it has ended where it `fails`; afterwards no process is left."""
    try:
        if fails:
            server.process.wait(60)
        else:
            server.ready(lambda: ask(server.http, "/v2/models/net/ready").status == 200, 60)
        yield server
    finally:
        left = server.stop()
    assert not left


# Name -> a function that makes a request bad. Triton compares them with config.pbtxt before the adapter sees them.
BAD = {
    "shape": lambda x: {"x": x[:, :, :7].copy()},
    "dtype": lambda x: {"x": x.astype(np.float64)},
    "name": lambda x: {"y": x},
    "rows": lambda x: {"x": np.resize(x, (MOST + 1, *x.shape[1:]))},
    "none": lambda x: {"x": x[:0]},
}


def judge(replies: list[Reply], *wanted: list[bytes]) -> int:
    """How many answers there are; each has the right bytes of one version."""
    for i, reply in enumerate(replies):
        assert reply.status != 200 or values(reply) in [w[i] for w in wanted], i
    return sum(reply.status == 200 for reply in replies)


def test_every_answer_is_its_requests_own(python, digits, tmp_path):
    model = write(digits, "first.engine", tmp_path / "repo")
    names, bad = list(BAD), set(range(7, COUNT, 10))
    feeds = [BAD[names[i % len(BAD)]](x) if i in bad else {"x": x} for i, x in enumerate(digits.requests)]
    with running(Triton(python, tmp_path / "repo", tmp_path)) as triton:
        replies = flood(triton.infer, feeds)
        assert judge(replies, digits.expected) == COUNT - len(bad)
        assert {replies[i].status for i in bad} == {400}
        rows = sum(len(x) for i, x in enumerate(digits.requests) if i not in bad)
        found = until(lambda: m if (m := triton.metrics())["gpu_runtime_rows", ""] == rows else None, 10, "the metrics")
        assert found["gpu_runtime_requests", ""] == COUNT - len(bad)
        runs = found["gpu_runtime_runs", str(MOST)]
        assert rows + found["gpu_runtime_padded_rows", ""] == MOST * runs and runs < COUNT - len(bad)
        assert found["gpu_runtime_run_seconds", ""] > 0 and not [key for key in found if key[0] == "gpu_runtime_errors"]
        nan = triton.infer({"x": np.full((1, 1, 8, 8), np.nan, np.float32)})
        assert nan.status == 200 and triton.metrics()["gpu_runtime_nonfinite", digits.last] == 1

        later = {COUNT // 4: lambda: write(digits, "second.engine", tmp_path / "repo")}
        replies = flood(lambda x: triton.infer({"x": x}), digits.requests, at=later)
        answered = judge(replies, digits.expected, digits.later)
        assert answered == COUNT, Counter((r.status, r.body[:99]) for r in replies if r.status != 200)
        until(lambda: ask(triton.http, "/v2/models/net/versions/2/ready").status == 200, 30, "version 2")
        until(lambda: judge([triton.infer({"x": digits.requests[0]})], digits.later), 30, "an answer of version 2")

        victim = triton.settled()[0]
        kill = {COUNT // 4: lambda: os.kill(victim, signal.SIGKILL)}
        for when, at in (("while", kill), ("after", {})):
            replies = flood(lambda x: triton.infer({"x": x}), digits.requests, at=at)
            lost = Counter(r.status for r in replies if r.status != 200)
            print(f"{when} one of 2 stubs was killed, {COUNT} requests had these errors: {dict(lost)}")
            assert COUNT - lost.total() == judge(replies, digits.later) > COUNT // 2
            assert lost or not at, "the stub that was killed served nothing"
    assert (model / "2").is_dir()


def test_what_the_queue_does_not_hold_is_refused_at_once(python, digits, tmp_path):
    config = write(digits, "first.engine", tmp_path / "repo", "--instances", "1") / "config.pbtxt"
    config.write_text(config.read_text().replace("max_queue_size: 1024", "max_queue_size: 8"))
    with running(Triton(python, tmp_path / "repo", tmp_path)) as triton:
        replies = flood(lambda x: triton.infer({"x": x}), digits.requests)
        answered = judge(replies, digits.expected)
        assert 0 < answered < COUNT and {r.status for r in replies} == {200, 503}
        assert triton.metrics()["gpu_runtime_requests", ""] == answered


def test_an_exact_batch_refuses_the_requests_that_do_not_fill_it(python, digits, tmp_path):
    write(digits, "exact.engine", tmp_path / "repo")
    with running(Triton(python, tmp_path / "repo", tmp_path)) as triton:
        whole = np.concatenate(digits.requests[:8])[:MOST]
        assert triton.infer({"x": whole}).status == 200
        few = triton.infer({"x": whole[:3]})
        assert few.status == 400 and b"expected 8 rows in a run, got 3: send exactly so many in one request" in few.body
        assert triton.metrics()["gpu_runtime_errors", "request"] == 1


def test_without_a_gpu_a_model_does_not_start_unless_it_emulates(python, digits, tmp_path):
    config = write(digits, "first.engine", tmp_path / "repo") / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "true"', 'string_value: "false"'))
    with running(Triton(python, tmp_path / "repo", tmp_path), fails=True) as triton:
        assert "CuPy is not installed" in triton.text()


def test_numpy_2_is_refused_with_the_cure(python, digits, tmp_path):
    pip = [sys.executable, "-m", "pip", "--python", python / "bin" / "python", "install", "--quiet", "--no-deps"]
    done(*pip, "--target", tmp_path / "two", "numpy>=2", cwd=tmp_path, env=clean())
    code = write(digits, "first.engine", tmp_path / "repo") / "1" / "model.py"
    code.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path / 'two')!r})\n{code.read_text()}")
    with running(Triton(python, tmp_path / "repo", tmp_path), fails=True) as triton:
        assert "lost a tensor's values under NumPy 2" in triton.text() and "pip install 'numpy<2'" in triton.text()


def test_an_engine_that_was_tuned_on_another_gpu_of_the_architecture_warns(python, digits, tmp_path):
    """The GPU's name is scripted: CuPy for the emulated driver needs NumPy 2."""
    code = write(digits, "first.engine", tmp_path / "repo", "--instances", "1") / "1" / "model.py"
    scripted = (
        "from dataclasses import replace",
        "from gpu_runtime.runtime import steps",
        "device_for = steps.device_for",
        "steps.device_for = lambda *asked: replace(device_for(*asked), name='other', title='NVIDIA H100 80GB HBM3')",
    )
    code.write_text("\n".join((*scripted, code.read_text())))
    with running(Triton(python, tmp_path / "repo", tmp_path)) as triton:
        assert judge([triton.infer({"x": digits.requests[0]})], digits.expected) == 1
        assert "its tactics were chosen for H200 SXM 141GB, this is NVIDIA H100 80GB HBM3: build it here" in triton.text()
