"""The emulated CUDA driver's devices, faults on request and threads."""

import json
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cuda_kernels.device import NAMED, current, named
from tests.driver.test_emulated_streams import N, launch, setup
from tests.emulated_driver.settings import Fault
from tests.on_driver import Refused, passes, started

pytestmark = pytest.mark.driver
BY_SM = ("a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090")  # sm_80, 86, 89, 90, 100, 120


# ---- devices


def every_device():
    """What the driver reports of each device in our table is what the table says, but for the driver's name."""
    import cupy

    facts = "sm num_sms clock_mhz dram_gbps l2_bytes smem_per_block smem_per_sm max_threads_per_sm max_blocks_per_sm"
    for i, name in enumerate(NAMED):
        with cupy.cuda.Device(i):
            found, expected = current(), named(name)
            assert found.measured
            known = {"dram_gbps"} if expected.sm == "sm_87" else set()  # an Orin's is told in test_driver_jetson.py
            for fact in {*facts.split(), "regs_per_sm", "mma_fma_per_clk", "mma_sync_share", "launch_us"} - known:
                assert getattr(found, fact) == getattr(expected, fact), (name, fact)
    print(cupy.cuda.runtime.getDeviceCount())


def test_all_devices_of_the_table_are_reported_as_it_has_them():
    assert passes(every_device, devices=tuple(NAMED)) == f"{len(NAMED)}\n"


def own_kernel():
    """A kernel of ours, compiled for the device, gives what the emulator itself gives; machine code for another is refused."""
    from cuda_kernels.compile import compile_kernel, cubin_path
    from cuda_kernels.launch import Cuda, Emulated
    from tests.problems import PROBLEMS, candidates, execute, random_data

    device = current()
    problem = PROBLEMS["conv_1x1"]
    inputs, weights = random_data(problem)
    tactic = candidates(problem, device)[0]
    gpu = Cuda(device)
    got = execute(gpu, problem, tactic, inputs, weights)
    expected = execute(Emulated(device), problem, tactic, inputs, weights)
    assert np.isfinite(expected).all() and (got == expected).all()
    other = "sm_90a" if device.cc < 90 else "sm_80"  # code for sm_80 runs on sm_86 and sm_89
    with Refused(209):
        gpu.cupy.RawModule(path=str(cubin_path(compile_kernel("flush_l2", {}, other)))).get_function("flush_l2")
    print(device.sm)


@pytest.mark.parametrize("name", BY_SM)
def test_each_generation_runs_its_own_machine_code(name):
    assert passes(own_kernel, devices=(name,)) == f"{named(name).sm}\n"


MANY_REGISTERS = """
extern "C" __global__ void many(float* y) {
  float v[150];
  y += threadIdx.x;
  #pragma unroll
  for (int i = 0; i < 150; i++) v[i] = y[i * 1024];
  for (int k = 0; k < 2; k++) {
    #pragma unroll
    for (int i = 0; i < 150; i++) v[i] = v[i] * 0.5f + v[(i + 1) % 150] * 0.5f;
  }
  #pragma unroll
  for (int i = 0; i < 150; i++) y[i * 1024] = v[i] + 1;
}
"""


def too_many_registers():
    """A block whose threads need more registers than an SM has is refused with 701, and the context survives."""
    import cupy

    from cuda_kernels.compile import compile_kernel, cubin_path
    from cuda_kernels.driver import code_of, is_fatal
    from cuda_kernels.launch import Cuda, pack_params

    gpu = Cuda(current())
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "many.cu")
        source.write_text(MANY_REGISTERS)
        compiled = compile_kernel(str(source), {}, gpu.device.sm)
        most = cupy.RawModule(path=str(cubin_path(compiled))).get_function("many").max_threads_per_block
    assert compiled.regs > 128 and not compiled.spill_bytes
    warps = gpu.device.regs_per_sm // (-(-compiled.regs // 8) * 8 * 32)
    assert most == 32 * warps < 1024
    kernel = gpu.load(compiled)
    y = gpu.allocate(150 * 1024 * 4)
    gpu.write(y, np.ones(150 * 1024, np.float32))
    for threads in (most, most + 1, 1024):
        try:
            gpu.launch(kernel, (1, 1, 1), (threads, 1, 1), 0, pack_params([("ptr", y)]))
            gpu.synchronize()
            print("ran", end=" ")
        except RuntimeError as e:
            assert not is_fatal(e)
            print(code_of(e), end=" ")
    got = gpu.read(y, 150 * 1024 * 4).view(np.float32).reshape(150, 1024)
    assert (got[:, :most] == 2).all() and (got[:, most:] == 1).all()


@pytest.mark.parametrize("name", ["h200", "rtx4090"])
def test_the_register_file_limits_a_block(name):
    assert passes(too_many_registers, devices=(name,)) == "ran 701 701 "


def code_of_others():
    """What is returned for machine code and for PTX of each architecture: 0, 209 or 218."""
    import cupy

    from cuda_kernels.compile import compile_kernel, cubin_path, virtual

    for sm in json.loads(os.environ["ARCHITECTURES"]):
        real, text = compile_kernel("flush_l2", {}, sm), compile_kernel("flush_l2", {}, virtual(sm)).ptx
        for image in (cubin_path(real).read_bytes(), text.encode()):
            try:
                cupy.cuda.function.Module().load(image)
                print(0, end=" ")
            except cupy.cuda.driver.CUDADriverError as e:
                print(e.status, end=" ")


ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120")


@pytest.mark.parametrize(
    "name, printed",
    [
        ("a100", "0 0 209 218 209 218 209 218 209 218 "),
        ("rtx4090", "0 0 0 0 0 0 209 218 209 218 "),  # machine code runs on later devices of its major version, PTX on all
        ("h200", "209 0 209 0 209 0 0 0 209 218 "),
        ("rtx5090", "209 0 209 0 209 0 209 218 0 0 "),  # sm_90a: on 9.0 alone
    ],
)
def test_code_for_another_architecture_is_refused(name, printed, monkeypatch):
    monkeypatch.setenv("ARCHITECTURES", json.dumps(ARCHITECTURES))
    assert passes(code_of_others, devices=(name,)) == printed


def repeated_launches():
    """How many launches of five run: one that would write what is there already does not."""
    from cuda_kernels.launch import Cuda
    from gpu_runtime.doctor.measured_rates import SMALL
    from tactics.candidates import candidates
    from tactics.sampling.data import random_data, reference
    from tactics.sampling.trial import execute, judge
    from tests.emulated_driver import kernels

    gpu = Cuda(current())
    launched, run_it = [], kernels.emulator.launch

    def counting(program, *how, **options):
        launched.append(program.name)
        return run_it(program, *how, **options)

    def around(gpu, run, poison):
        for _ in range(3):
            run()
        poison()
        for _ in range(2):
            run()
        gpu.synchronize()

    kernels.emulator.launch = counting
    (x, *rest), weights = random_data(SMALL)
    for factor in (1, 0.5):  # other values, perhaps at the same addresses
        launched.clear()
        ins = [(x * factor).astype(x.dtype), *rest]
        tactic = candidates(SMALL, gpu.device)[0]
        got = execute(gpu, SMALL, tactic, ins, weights, around)
        judge(got, np.float32(reference(SMALL, ins, weights)), SMALL.out_shape[1])
        print(len(launched), end=" ")


@pytest.mark.parametrize("repeats, printed", [(False, "3 3 "), (True, "5 5 ")])
def test_a_launch_that_would_write_what_is_there_is_not_run_again(repeats, printed):
    assert passes(repeated_launches, repeats=repeats) == printed


def dependent_launch():
    from cuda_kernels.driver import dependent
    from cuda_kernels.params import pack_params

    cupy, a, *_ = setup()
    function = cupy.RawKernel('extern "C" __global__ void nothing(long long x) {}', "nothing")
    try:
        dependent(function.kernel.ptr, (1, 1, 1), (32, 1, 1), 0, bytearray(pack_params([("i64", 1)])))(a.ptr)
        a.synchronize()
        print("launched")
    except RuntimeError as e:
        print("refused" if "801" in str(e) or "NOT_SUPPORTED" in str(e) else e)


@pytest.mark.parametrize("name, outcome", [("rtx4090", "refused"), ("h200", "launched")])
def test_dependent_launches_begin_with_sm_90(name, outcome):
    assert passes(dependent_launch, devices=(name,)) == f"{outcome}\n"


def ways_to_launch():
    """A kernel of ours on this GPU, and whether it was launched by cuLaunchKernelEx; an unknown way is refused."""
    from cuda_kernels import launch
    from cuda_kernels.device import current
    from tactics.sampling.stopwatch import Spin

    by_driver = []
    dependent = launch.dependent
    launch.dependent = lambda *args: (by_driver.append(args), dependent(*args))[1]
    try:
        gpu = launch.Cuda(current())
        Spin(gpu).launch(0, 10)
        gpu.synchronize()
        print(len(by_driver))
    except ValueError as e:
        print(e)


REFUSED = "GPU_RUNTIME_LAUNCH: expected rawkernel, or no such variable, got 'raw'"


@pytest.mark.parametrize(("way", "printed"), [("", "1"), ("rawkernel", "0"), ("raw", REFUSED)])
def test_early_launches_can_be_turned_off(monkeypatch, way, printed):
    monkeypatch.setenv("GPU_RUNTIME_LAUNCH", way)
    assert passes(ways_to_launch, devices=("h200",)) == f"{printed}\n"


def two_devices():
    """Each has its streams, memory, functions and faults; one cannot touch the other's memory but by a copy."""
    import cupy

    cupy.cuda.set_allocator(None)
    arrays, streams = [], []
    for i in range(2):
        with cupy.cuda.Device(i):
            arrays.append(cupy.full(N, i + 1, np.float32))
            streams.append(cupy.cuda.Stream(non_blocking=True))
            cupy.cuda.runtime.deviceSynchronize()
            assert cupy.cuda.runtime.pointerGetAttributes(arrays[i].data.ptr).device == i
    with cupy.cuda.Device(0):
        assert not cupy.cuda.runtime.deviceCanAccessPeer(0, 1)
        with Refused(217):
            cupy.cuda.runtime.deviceEnablePeerAccess(1)
        with Refused(400):
            launch("add_one", streams[1], arrays[0], arrays[0], np.int32(N))
        copied = cupy.empty(N, np.float32)
        cupy.cuda.runtime.memcpyPeer(copied.data.ptr, 0, arrays[1].data.ptr, 1, copied.nbytes)
        assert (copied.get() == 2).all()
        launch("add_one", streams[0], np.uint64(arrays[1].data.ptr), arrays[0], np.int32(N))
        with Refused(700):
            streams[0].synchronize()
        with Refused(700):
            cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Device(1):
        launch("add_one", streams[1], arrays[1], arrays[1], np.int32(N))
        streams[1].synchronize()
        with streams[1]:
            assert (arrays[1].get() == 3).all()
        with Refused(700):
            streams[0].synchronize()


def test_two_devices():
    passes(two_devices, devices=("h200", "a100"))


def names_and_buses():
    """(CUDA's devices, the management library's), and that both find each other by the bus."""
    import cupy
    import pynvml

    pynvml.nvmlInit()
    runtime = cupy.cuda.runtime
    seen = [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]
    for i, name in enumerate(seen):
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(runtime.deviceGetPCIBusId(i).encode())
        assert pynvml.nvmlDeviceGetName(handle) == name
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    print(json.dumps([seen, [pynvml.nvmlDeviceGetName(h) for h in handles]]))


@pytest.mark.parametrize("shown, expected", [(None, "HA"), ("1", "A"), ("1,0", "AH"), ("0,7,1", "H")])
def test_cuda_visible_devices(shown, expected, monkeypatch):
    names = {"H": "NVIDIA H200", "A": "NVIDIA A100-SXM4-80GB"}
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    seen, managed = json.loads(passes(names_and_buses, devices=("h200", "a100")))
    assert seen == [names[c] for c in expected] and managed == list(names.values())


# ---- faults on request


def every_launch():
    """What each of four launches of two kernels gives: a value, or the error of the call or of the wait."""
    cupy, a, _, x = setup()
    for name in ("add_one", "set_all", "add_one", "add_one"):
        try:
            with a:
                y = cupy.zeros(N, np.float32)
            launch(name, a, *((x, y) if name == "add_one" else (y, np.float32(2))), np.int32(N))
            a.synchronize()
            with a:
                values = set(y.get().tolist())
            print(*(values if len(values) == 1 else ["several"]), end=" ")
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as e:
            print(e.status, end=" ")


@pytest.mark.parametrize(
    "fault, printed",
    [
        (Fault("nothing*", error="wrong"), "4.0 2.0 4.0 4.0 "),
        (Fault("add_*", 2, "out_of_resources", call=True), "4.0 2.0 701 4.0 "),
        (Fault("add_*", 2, "launch_failed"), "4.0 2.0 719 719 "),
        (Fault("set_all", 0, "illegal_address"), "4.0 700 700 700 "),
        (Fault("add_one", 3, "wrong"), "4.0 2.0 4.0 several "),
    ],
    ids=lambda v: v.error if isinstance(v, Fault) else "",
)
def test_faults_on_request(fault, printed):
    assert passes(every_launch, faults=(fault,)) == printed


def test_a_hang_on_request():
    with started(every_launch, faults=(Fault("set_all", 1, "hang"),)) as process:
        try:
            assert any("set_all hangs" in line for line in process.stderr), "it ended"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
        finally:
            process.kill()


def hang_beside_others():
    """A stream whose kernel hangs is never done; other streams, in other threads, go on."""
    cupy, a, b, x = setup()
    y = cupy.zeros(N, np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    launch("set_all", a, y, np.float32(1), np.int32(N))
    threading.Thread(target=a.synchronize, daemon=True).start()
    for _ in range(20):
        launch("add_one", b, x, y, np.int32(N))
        b.synchronize()
        assert cupy.cuda.runtime.streamQuery(a.ptr) in (0, 600)
        time.sleep(0.05)
    assert cupy.cuda.runtime.streamQuery(a.ptr) == 600
    print("went on", flush=True)
    os._exit(0)


def test_a_hang_does_not_stop_other_streams():
    assert passes(hang_beside_others, faults=(Fault("set_all", 1, "hang"),)) == "went on\n"


# ---- threads


def many_threads():
    """Threads with streams of their own, one that only polls with Python's lock held, and garbage collected meanwhile."""
    import gc

    cupy, *_ = setup()
    results, stop, polled = {}, threading.Event(), [0]
    gc.set_threshold(50)

    def work(i):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            y = cupy.full(N, i, np.float32)
            for _ in range(15):
                launch("add_one", stream, y, y, np.int32(N))
                cycle = [cupy.empty(1000, np.float32)]
                cycle.append(cycle)
                stream.synchronize()
            results[i] = set(y.get().tolist())

    def poll():
        while not stop.is_set():
            cupy.cuda.runtime.getDevice()
            cupy.cuda.runtime.memGetInfo()
            polled[0] += 1

    poller = threading.Thread(target=poll)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in (poller, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    poller.join()
    assert results == {i: {i + 15.0} for i in range(6)} and polled[0] > 10, (results, polled)


@pytest.mark.parametrize("order", ["late", "eager"])
def test_threads_do_not_wait_for_each_other_for_ever(order):
    passes(many_threads, order=order, seconds=100)


def host_functions():
    """A host function runs when its turn comes, in Python, and work queued behind it sees what it did."""
    cupy, a, _, x = setup()
    found = []
    y = cupy.zeros(N, np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    launch("add_one", a, x, y, np.int32(N))
    a.launch_host_func(lambda arg: found.append(arg), "called")
    assert found == []
    a.synchronize()
    assert found == ["called"]


def test_host_functions_wait_for_their_turn():
    passes(host_functions, order="late")
