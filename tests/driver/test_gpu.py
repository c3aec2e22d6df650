"""Every tactic on hardware: against the FP32 reference, against the emulator, against a naive kernel at real sizes.

On the emulated driver (`make test-driver`), which runs the same code between here and the GPU: one tactic of each problem, and
small sizes, since its launches take as long as the emulator's.
All of it is skipped, with the reason, where there is no GPU. compute-sanitizer's tests are skipped where the tool is not
installed or refuses the device.
"""

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import processes
from cuda_kernels.compile import compile_many
from cuda_kernels.device import current, why_no_gpu
from cuda_kernels.driver import why_fatal
from cuda_kernels.launch import Cuda, Emulated
from tactics.candidates import candidates
from tactics.launches import launches
from tactics.measure.worker import Bench
from tactics.sampling import references
from tactics.sampling.data import random_data, reference
from tactics.sampling.references import reference_conv
from tactics.sampling.trial import TOLERANCE, relative_error
from tests.on_driver import ON_DRIVER, timed
from tests.problems import CONVS, PROBLEMS, RELU, assert_right, conv_case, execute, pairs, sanitize_cases

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]
EMULATED_PER_CASE = 6
PER_LARGE = 4 if ON_DRIVER else 40
LARGE = {
    "stem": conv_case(8, 3, 224, 224, 64, 7, 7, stride=(2, 2), pad=(3, 3, 3, 3), bias=True, act=RELU),
    "1x1": conv_case(32, 256, 56, 56, 64, 1, 1, bias=True, act=RELU, sparse24=True),
    "3x3": conv_case(32, 256, 14, 14, 256, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU, sparse24=True),
    "3x3 strided": conv_case(32, 128, 56, 56, 128, 3, 3, stride=(2, 2), pad=(1, 1, 1, 1), bias=True, act=RELU, sparse24=True),
    "expand, residual": conv_case(32, 512, 7, 7, 2048, 1, 1, bias=True, residual=True, act=RELU, sparse24=True),
}


@pytest.fixture(scope="module")
def device():
    return current()


@pytest.fixture(scope="module")
def gpu(device):
    return Cuda(device)


@pytest.fixture(scope="module")
def cases(device):
    """Case -> [(problem, tactic)], with everything they launch compiled in parallel."""
    result = {}
    for name, problem, tactic in pairs(device):
        result.setdefault(name, []).append((problem, tactic))
    if ON_DRIVER:
        return {name: [random.Random(name).choice(rows)] for name, rows in result.items()}
    steps = [s for rows in result.values() for problem, tactic in rows for s in launches(problem, tactic)]
    compile_many(dict.fromkeys((s.kernel, s.values, device.sm) for s in steps))
    return result


def on_gpu(gpu, problem, tactic, inputs, weights):
    """execute(); a CUDA error ends the whole run, because nothing in this process can be tested after it."""
    try:
        return execute(gpu, problem, tactic, inputs, weights)
    except Exception as e:
        if why := why_fatal(e):
            pytest.exit(f"{problem}: {tactic.name}: {e}: the CUDA context is lost: {why}", returncode=3)
        raise


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", PROBLEMS)
def test_hardware_agrees_with_the_reference(name, gpu, cases):
    problem = PROBLEMS[name]
    inputs, weights = random_data(problem)
    expected = reference(problem, inputs, weights)
    wrong = []
    for _, tactic in cases[name]:
        try:
            assert_right(problem, tactic, on_gpu(gpu, problem, tactic, inputs, weights), expected)
        except AssertionError as e:
            wrong.append(f"{tactic.name}: {e}")
    assert not wrong, f"{len(wrong)} of {len(cases[name])} tactics:\n" + "\n".join(wrong[:20])


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", PROBLEMS)
def test_hardware_agrees_with_the_emulator(name, device, gpu, cases):
    """Not bit for bit: tensor cores sum in another order and truncate."""
    problem = PROBLEMS[name]
    inputs, weights = random_data(problem)
    sample = random.Random(name).sample(cases[name], min(EMULATED_PER_CASE, len(cases[name])))
    for _, tactic in sample:
        emulated = execute(Emulated(device), problem, tactic, inputs, weights).astype(np.float32)
        got = on_gpu(gpu, problem, tactic, inputs, weights)
        assert relative_error(got, emulated) < TOLERANCE, tactic.name


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CONVS)
def test_naive_kernel_agrees_with_the_reference(name, gpu):
    problem = CONVS[name]
    inputs, weights = random_data(problem)
    got = reference_conv(gpu, problem, [gpu.cupy.asarray(x) for x in inputs], weights)
    assert relative_error(gpu.cupy.asnumpy(got), reference(problem, inputs, weights)) < 1e-4


def small(problem):
    """As much of a large problem as the emulated driver can be asked for."""
    channels = {field: min(getattr(problem, field), 64) for field in ("c", "k")}
    return replace(problem, n=1, **channels, **{field: min(getattr(problem, field), 14) for field in ("h", "w")})


@timed
@pytest.mark.parametrize("name", LARGE)
def test_large_shapes_agree_with_the_naive_kernel(name, device, monkeypatch):
    """Bench.time raises where an output is wrong. All channels-last tactics, and some of each other pair of formats."""
    problem = small(LARGE[name]) if ON_DRIVER else LARGE[name]
    monkeypatch.setattr(references, "SMALL_MACS", 0)  # the naive kernel is the reference for all problems
    tactics = list(candidates(problem, device))
    picked = [] if ON_DRIVER else [t for t in tactics if t.ins[0].layout == t.out.layout == "hwc8"]
    picked += random.Random(name).sample(tactics, PER_LARGE)
    compile_many(dict.fromkeys((s.kernel, s.values, device.sm) for t in picked for s in launches(problem, t)))
    bench = Bench(device)
    bench.set_problem(problem)
    wrong = []
    for tactic in dict.fromkeys(picked):
        try:
            assert bench.time([tactic], 1)["us"][tactic.name][0] > 0
        except RuntimeError as e:
            wrong.append(f"{tactic.name}: {e}")
    assert not wrong, f"{len(wrong)} of {len(picked)} tactics:\n" + "\n".join(wrong[:20])


@timed
def test_measured_times_come_from_the_child_and_then_from_the_cache(device, tmp_path):
    from tactics.measure import timing

    problem = CONVS["conv_one_output" if ON_DRIVER else "conv_deep"]
    tactics = candidates(problem, device)[:: 40 if ON_DRIVER else 7]
    timer = timing.Measured(device, timing.Cache(tmp_path / "times.jsonl"))
    times = timer(problem, tactics)
    timer.close()
    assert not timer.failures and set(times) == set(tactics)
    assert all(0.3 < t.low_us <= t.us <= t.high_us < 1000 for t in times.values()), times
    again = timing.Measured(device, timing.Cache(tmp_path / "times.jsonl"), command=("/nonexistent",))
    assert again(problem, tactics) == times


def test_a_recorded_graph_replays_the_same(device):
    """What one launch writes, the replay of its graph writes too, with other data in the same buffers."""
    gpu = Cuda(device)
    a, b = gpu.allocate(1 << 16), gpu.allocate(1 << 16)
    replay = gpu.record(lambda: gpu.copy(b, a, 1 << 16))
    data = np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint8)
    gpu.write(a, data)
    replay()
    assert (gpu.read(b, 1 << 16) == data).all()


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool, device):
    program = processes.program("compute-sanitizer")
    if not program:
        pytest.skip("compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin")
    root = Path(__file__).resolve().parents[2]
    steps = [s for _, problem, tactic in sanitize_cases(device) for s in launches(problem, tactic)]
    compile_many(dict.fromkeys((s.kernel, s.values, device.sm) for s in steps))
    done = subprocess.run(
        [program, "--tool", tool, "--print-limit", "1000", sys.executable, "-m", "tests.problems"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    text = done.stdout + done.stderr
    if "not supported" in text or "Unable to" in text:
        pytest.skip(f"compute-sanitizer refuses: {text.strip()[:300]}")
    errors = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    looked_up = re.findall(r"on CUDA API call to cuGetProcAddress", text)  # by cuda-bindings, for calls that old drivers lack
    assert done.returncode == 0 and "tactics ran" in text and errors and int(errors[1]) == len(looked_up), text[-4000:]
