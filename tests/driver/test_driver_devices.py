"""Contexts beside another device, in forked processes and after faults: right, or an error that says what to do.

Each script is a process of its own: on the emulated driver with the devices and faults that it needs, on hardware where it can
show what it is to show.
"""

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import NAMED, current, why_no_gpu
from tests.emulated_driver.settings import VARIABLE, Fault, environment
from tests.on_driver import finished
from tests.reference_run import model, node

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]
only_emulated = pytest.mark.skipif(VARIABLE not in os.environ, reason="needs the emulated driver")
ROOT = Path(__file__).resolve().parents[2]
START = """
import os, sys, warnings
import cupy, numpy as np
import gpu_runtime as gr
from cuda_kernels.driver import DriverError, is_fatal
engine = gr.load(sys.argv[1])
x = np.random.default_rng(0).standard_normal((1, 8, 4, 4)).astype(np.float32)
with engine.context(device="emulator") as context:
    want = context.run({"x": x})["y"]

def close(y):
    return y.shape == want.shape and abs(y - want).max() < 0.02
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    import numpy as np

    w = (np.random.default_rng(1).standard_normal((8, 8, 3, 3)) / 8).astype(np.float32)
    proto = model([node("Conv", "x w", "y", pads=[1, 1, 1, 1])], {"x": (1, 8, 4, 4)}, "y", {"w": w})
    path = tmp_path_factory.mktemp("engines") / "net.onnx"
    onnx.save(proto, path)
    gr.build(path, device=next(d.name for d in NAMED.values() if d.sm == current().sm)).save(path.with_suffix(".engine"))
    return path.with_suffix(".engine")


def says(engine, script, **changes):
    """What the script prints, in a process with other settings of the emulated driver."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(ROOT)])}
    env |= environment(**changes) if changes else {}
    command = [sys.executable, "-c", START + script, str(engine)]
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        code, out, err = finished(process, 300)
    assert code == 0, out + err
    return out


# ---- two devices

TWO = """
a = engine.context()
with cupy.cuda.Device(1):
    b = engine.context()
assert (a.gpu.number, b.gpu.number) == (0, 1)
for current in (0, 1):  # whatever the thread's current device is
    with cupy.cuda.Device(current):
        for context in (a, b):
            assert close(context.run({"x": x})["y"])
            context.replay()
            assert close(context.outputs()["y"]) and context.nonfinite() == []
            with cupy.cuda.Device(context.gpu.number):
                given = cupy.asarray(x)
            y = context.run({"x": given})["y"]
            with cupy.cuda.Device(context.gpu.number):
                assert y.device.id == context.gpu.number and close(y.get())
        assert cupy.cuda.runtime.getDevice() == current
try:
    a.run({"x": given})
except ValueError as e:
    print(e)
import threading
wrong = []
def work(context):  # a thread begins on device 0
    for _ in range(3):
        if not close(context.run({"x": x})["y"]): wrong.append(context)
threads = [threading.Thread(target=work, args=(c,)) for c in (a, b, a, b)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not wrong
b.close(); a.close()
"""


@only_emulated
def test_contexts_on_two_devices(engine):
    name = next(d.name for d in NAMED.values() if d.sm == current().sm)
    told = says(engine, TWO, devices=(name, name))
    assert told.startswith(
        "input 'x': it lies on GPU 1, expected GPU 0: copy it there, or make the context with device='cuda:1'"
    )


# ---- processes

FORK = """
context = engine.context()
assert close(context.run({"x": x})["y"])
pid = os.fork()
if not pid:
    status = 1
    try:
        with context:
            context.run({"x": x})
    except RuntimeError as e:
        print(e, flush=True)
        context.close()
        status = 0
    os._exit(status)
assert os.waitpid(pid, 0)[1] == 0
assert close(context.run({"x": x})["y"])
context.close()
"""


def test_a_forked_process_is_told(engine):
    told = says(engine, FORK)
    assert "before this process was forked" in told and "'spawn'" in told


DROP = """
warnings.simplefilter("error")
context = engine.context()
y = context.run({"x": cupy.asarray(x)})
"""


def test_a_process_may_end_with_work_queued(engine):
    """The interpreter drops the context; nothing is freed before, and nothing fails."""
    assert says(engine, DROP) == ""


# ---- faults

FAULT = """
context = engine.context(graph=GRAPH)
try:
    for _ in range(3):
        context.run({"x": x})
except RuntimeError as e:
    print(type(e).__name__, is_fatal(e))
    print(e)
    print(*e.__notes__)
context.close()  # gives up what is lost; in a `with` it would not hide the error
try:
    engine.context(graph=GRAPH)
except RuntimeError as e:
    print(is_fatal(e))
"""


@only_emulated
@pytest.mark.parametrize("graph", (True, False))
def test_a_fault_says_that_the_process_is_lost(engine, graph):
    told = says(engine, FAULT.replace("GRAPH", str(graph)), faults=(Fault("conv*", 3 if graph else 2, "illegal_address"),))
    assert "True\n" in told and "an illegal memory access" in told and "start a new process" in told
    assert told.endswith("True\n")


@only_emulated
def test_a_refused_launch_leaves_the_context_usable(engine):
    script = """
context = engine.context(graph=False)
try:
    context.run({"x": x})
except DriverError as e:
    print(e.call, e.code, is_fatal(e))
assert close(context.run({"x": x})["y"])
context.close()
"""
    told = says(engine, script, faults=(Fault("conv*", 1, "out_of_resources", call=True),))
    assert told == "cuLaunchKernelEx 701 False\n"


@only_emulated
def test_the_command_line_says_so_too(engine):
    script = """
import subprocess
np.save(sys.argv[1] + ".npy", x)
command = [sys.executable, "-m", "gpu_runtime", "run", sys.argv[1], "--input", f"x={sys.argv[1]}.npy"]
done = subprocess.run([*command, "--output", sys.argv[1] + ".npz"], capture_output=True, text=True)
print(done.returncode, done.stderr)
"""
    told = says(engine, script, faults=(Fault("conv*", 1, "misaligned_address"),))
    assert told.startswith("1 ") and "error: the CUDA driver: cudaErrorMisalignedAddress" in told, told
    assert "This process can no longer use the GPU (a misaligned address)" in told and "Traceback" not in told
