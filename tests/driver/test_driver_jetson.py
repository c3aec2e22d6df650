"""A Jetson Orin, played by the emulated driver: no management library, one title for all modules, a false DRAM rate."""

import json
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

from cuda_kernels.device import current, named
from cuda_kernels.files import cache_dir
from tactics.measure.timing import driver_version
from tests.conftest import ROOT
from tests.emulated_driver import settings
from tests.on_driver import passes
from tests.reference_run import model, node

pytestmark = pytest.mark.driver
FOLDER = "JETSON_TEST_FOLDER"  # environment: of the files of a child
ORINS = ("orin_agx64", "orin_nx16", "orin_nano8")


def every_orin():
    import cupy

    from cuda_kernels.device import NAMED, relative

    for i, name in enumerate(ORINS):
        with cupy.cuda.Device(i):
            found, known = current(), named(name)
            assert (found.title, found.sm, found.num_sms, found.clock_mhz) == ("Orin", "sm_87", known.num_sms, known.clock_mhz)
            assert found.dram_gbps == (102 if name == "orin_nano8" else known.dram_gbps), "68 without Super, which is unknown"
            assert relative(found) is NAMED["orin_agx64"] and str(found.clock_mhz) in found.key.split("|")
    assert driver_version() == "CUDA 13.0"
    print("all of them")


def test_each_module_has_its_memory_s_rate_and_its_power_mode_s_key():
    assert passes(every_orin, devices=ORINS, management=False) == "all of them\n"


def test_an_orin_builds_runs_benches_and_is_examined(tmp_path):
    rng = np.random.default_rng(0)
    w = rng.normal(0, 0.1, (16, 16, 3, 3)).astype(np.float32)
    w.reshape(-1, 4, 3, 3)[:, :2] = 0  # 2:4 along the input channels
    onnx.save(model([node("Conv", "x w", "y", pads=(1, 1, 1, 1))], {"x": (1, 16, 6, 6)}, "y", {"w": w}), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", rng.normal(0, 1, (1, 16, 6, 6)).astype(np.float32))
    env = os.environ | settings.environment(devices=("orin_nx16",), management=False)
    cache = tmp_path / "cache"  # its own, since its times are no Orin's; compiled files are shared
    cache.mkdir()
    for name in ("kernels", "emulator"):
        (cache / name).symlink_to(cache_dir() / name)
    env |= {"GPU_RUNTIME_CACHE": str(cache), "PYTHONPATH": os.pathsep.join((os.environ["PYTHONPATH"], str(ROOT)))}

    def command(*args: str) -> str:
        line = [sys.executable, "-m", "gpu_runtime", *args]
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode in (0, 5 if args[0] == "doctor" else 0), done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    out = command("build", "m.onnx", "--sparsity=enable", "--builderOptimizationLevel=1", "-o", "m.engine")
    assert "Orin" in out and "measured(Orin)" in out
    command("run", "m.engine", "--input", "x=x.npy", "--output", "y.npz")
    assert np.isfinite(np.load(tmp_path / "y.npz")["y"]).all()
    out = command("bench", "m.engine", "--warmUp=0", "--duration=0", "--iterations=3")
    assert "clock is unknown" in out and "Throughput" in out
    found = json.loads(command("doctor", "--kernels", "pointwise", "--time-limit", "10", "--json"))
    text = json.dumps(found)
    assert "sm_87" in text and "CUDA 13.0" in text and (cache / "timings.jsonl").exists()
