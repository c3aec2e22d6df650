"""gpu-runtime doctor on a GPU, or on the emulated driver, faults included."""

import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.gpu_networks import fewer_tactics
from cuda_kernels.device import current, why_no_gpu
from cuda_kernels.files import cache_dir
from cuda_kernels.launch import Cuda
from gpu_runtime.doctor.cases import cases
from gpu_runtime.doctor.measured_rates import SMALL
from gpu_runtime.doctor.worker import CHECKS
from tactics.kernels import KERNELS
from tactics.measure import race
from tactics.sampling.trial import Wrong, in_a_graph, relative_error, trial
from tests.conftest import ROOT
from tests.emulated_driver.settings import VARIABLE, Fault, environment
from tests.on_driver import finished, timed
from tests.reference_run import model, node

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


@on_driver
@pytest.mark.long
def test_every_case_is_right_on_the_driver(gpu):
    """All that doctor examines on hardware, every tile among it."""
    wrong = {}
    for case in cases(gpu.device):
        try:
            trial(gpu, case.problem, case.tactic)
        except Wrong as e:
            wrong[case.tactic.name] = str(e)
    assert not wrong and len(cases(gpu.device)) > 240


# ---- the command, and the builds behind it


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, for this process and its children; compiled kernels stay where they are."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for entry in cache_dir().iterdir():
        if entry.name != "doctor":
            (folder / entry.name).symlink_to(entry)
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(folder))
    return folder


def doctor(cache, *faults, kernels):
    """(exit code, the JSON document, findings) of the command on a driver with these faults."""
    env = os.environ | environment(faults=faults)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    command = [sys.executable, "-m", "gpu_runtime", "doctor", "--kernels", kernels, "--json", "--time-limit", "600"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, cwd=cache.parent, stdout=pipe, stderr=pipe, text=True) as process:
        code, out, err = finished(process, 600)
    assert out, err
    written = [json.loads(path.read_text()) for path in (cache / "doctor").glob("*.json")]
    return code, json.loads(out), written


@on_driver
@pytest.mark.parametrize("error, words", [("wrong", "computes wrong results"), ("illegal_address", "illegaladdress")])
def test_a_fault_of_the_gpu_is_a_verdict(cache, error, words):
    code, data, written = doctor(cache, Fault("pool", error=error), kernels="pool,pointwise,move")
    verdicts = {f["kernel"]: f["verdict"] for f in data["families"]}
    assert code == 5 and verdicts == {"pool": "failed", "pointwise": "passed", "move": "passed"}
    (row,) = [f for f in data["families"] if f["kernel"] == "pool"]
    assert any(words in f["why"].lower().replace("_", "") for f in row["failed"]), row
    assert [f["what"] for f in written[0]["records"][0]["failed"]] == ["pool"]
    assert {rate["why"] for rate in data["rates"]} == {"the driver is emulated: its times are no GPU's"}


@on_driver
@timed
def test_a_measured_build_leaves_out_what_doctor_saw_fail(cache, tmp_path, monkeypatch):
    """Two processes are lost to each sparse family, so that both are denied as a whole; a build afterwards, on a driver without
    faults, does not even time them, and says why."""
    monkeypatch.setenv(VARIABLE, environment(checks=False)[VARIABLE])
    sparse = ["conv_sparse24", "conv_sparse24_sm90"]
    code, data, written = doctor(cache, Fault("conv_sparse24*", error="launch_failed"), kernels=",".join(sparse))
    assert code == 5 and [f["kernel"] for f in data["families"]] == sparse
    for family in data["families"]:
        assert family["verdict"] == "failed" and sum(f["process_lost"] for f in family["failed"]) == 2
        assert "this kernel already crashed 2 processes" in family["untested"][0]["why"]
    assert [f["what"] for f in data["left_out_of_plans"]] == sparse and data["written_down"]

    weights = {"w": (np.random.default_rng(0).standard_normal((32, 64, 1, 1)) / 8).astype(np.float32)}
    onnx.save(model([node("Conv", "x w", "y")], {"x": (1, 64, 4, 4)}, "y", weights), tmp_path / "net.onnx")
    times, log = tmp_path / "times.jsonl", []
    monkeypatch.setattr(race, "STEPS", (1, 2, 3))
    with fewer_tactics(), pytest.warns(RuntimeWarning, match="plans exclude these kernels because they failed.*conv_sparse24"):
        engine = gr.build(tmp_path / "net.onnx", sparsity="force", timing_cache=times, log=log.append)
    assert engine.record.timing.kind == "measured"
    convolutions = {la.tactic.kernel for la in engine.plan.layers if la.tactic and "conv" in la.tactic.kernel}
    assert convolutions and convolutions <= {"conv_dense", "conv_dense_sm90"}
    assert times.read_text().count("conv_dense") and not times.read_text().count("conv_sparse24")
    assert "conv_sparse24" in engine.layer_info()["LeftOut"] and "failed_here" in "\n".join(log)
    details = [la["SparsityDetail"] for la in engine.layer_info()["Layers"] if la.get("SparsityEligible")]
    assert details and all("saw conv_sparse24 fail on this GPU: CUDARuntimeError: cudaErrorLaunchFailure" in d for d in details)
    x = {"x": np.random.default_rng(1).standard_normal((1, 64, 4, 4)).astype(np.float32)}
    with engine.context() as context, engine.context(device="emulator") as other:
        assert relative_error(context.run(x)["y"], other.run(x)["y"]) < 2e-3
