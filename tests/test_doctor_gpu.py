"""gpu-runtime doctor on a GPU, or on the emulated driver, faults included."""

import json
import os
import subprocess
import sys

import pytest

from cuda_kernels.device import current, why_no_gpu
from cuda_kernels.files import cache_dir
from cuda_kernels.launch import Cuda
from tactics.doctor.cases import cases
from tactics.doctor.rates import SMALL
from tactics.doctor.trial import in_a_graph, trial
from tactics.doctor.worker import CHECKS
from tactics.tactic import KERNELS
from tests.conftest import ROOT
from tests.emulated_driver.settings import VARIABLE, Fault, environment

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]
ON_DRIVER = VARIABLE in os.environ
on_driver = pytest.mark.skipif(not ON_DRIVER, reason="the emulated driver alone fails on request")


@pytest.fixture(scope="module")
def gpu():
    return Cuda(current())


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_family_is_right(kernel, gpu):
    """On the emulated driver, whose launches take as long as the emulator's, a few cases."""
    for case in cases(gpu.device, few=ON_DRIVER):
        if case.kernel == kernel:
            assert trial(gpu, case.problem, case.tactic) < 2e-3


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass(name, gpu):
    CHECKS[name](gpu)


def test_a_graph_computes_what_a_launch_does(gpu):
    tactic = next(c.tactic for c in cases(gpu.device) if c.kernel == "pointwise")
    assert trial(gpu, SMALL, tactic.__class__(tactic.kernel, None, tactic.ins[:1], tactic.out), in_a_graph) < 1e-3


def doctor(tmp_path, *faults, kernels="pool,pointwise,move"):
    """(exit code, the JSON document, findings) of the command on a driver with these faults."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for entry in cache_dir().iterdir():  # compiled kernels stay where they are
        if entry.name != "doctor":
            (cache / entry.name).symlink_to(entry)
    env = os.environ | environment(devices=("a100",), faults=faults) | {"GPU_RUNTIME_CACHE": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(
        [sys.executable, "-m", "gpu_runtime", "doctor", "--kernels", kernels, "--json", "--time-limit", "60"], env=env,
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout, done.stderr
    written = [json.loads(path.read_text()) for path in (cache / "doctor").glob("*.json")]
    return done.returncode, json.loads(done.stdout), written


@on_driver
@pytest.mark.slow
@pytest.mark.parametrize("error, words", [("wrong", "computes something else"), ("illegal_address", "illegaladdress")])
def test_a_fault_of_the_gpu_is_a_verdict_that_builds_read(tmp_path, error, words):
    code, data, written = doctor(tmp_path, Fault("pool", error=error))
    verdicts = {f["kernel"]: f["verdict"] for f in data["families"]}
    assert code == 5 and verdicts == {"pool": "failed", "pointwise": "passed", "move": "passed"}
    (row,) = [f for f in data["families"] if f["kernel"] == "pool"]
    assert any(words in f["why"].lower().replace("_", "") for f in row["failed"]), row
    assert [f["what"] for f in written[0]["records"][0]["failed"]] == ["pool"]
