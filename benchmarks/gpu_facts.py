"""Facts of a GPU that predictions rest on: clusters that run at a time, how their blocks meet, the wait of a load, how L2
serves a chain of kernels, how fast SMs write.

python -m benchmarks.gpu_facts --out FILE [--seconds 40] [--small]      on a GPU; benchmarks/results/h200/facts.json is one
"""

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiments.run import begun
from cuda_kernels.device import current
from cuda_kernels.tensor_maps import Map, encode_by_driver

MEGABYTES = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 34, 38, 44, 52, 64, 96, 160)
CLUSTERS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # blocks of a cluster
THREADS, SMEM = 384, (200, 100)  # threads of a block, and its KB of shared memory
WRITING = Path(__file__).parent / "experiments" / "writing.cu"
WRITTEN, BULK_BYTES = (8, 26, 52, 103, 206), 8192  # MB that a launch writes; bytes of a bulk copy
MEETINGS, LOADS = 64, 2048  # meetings, and loads, of a measurement
STRAIGHT = (128, 512, 1024, 2048, 4096)  # instructions
STREAMS = (0, 1, 2, 4, 8, 16)  # warps of each SM that read from L2 all the while
SOURCE = r"""
extern "C" __global__ void nothing(float* p) { extern __shared__ float s[]; if (p) p[0] = s[0]; }
extern "C" __global__ void add(const uint4* x, uint4* y, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
    uint4 v = x[i];
    v.x += 1;
    y[i] = v;
  }
}
// One thread's loads, each from where the last one says; the blocks behind the first read `busy` warps wide until it is done.
extern "C" __global__ void chase(const unsigned* next, int loads, long long* clocks, uint4* streamed, int mask, int busy,
                                 volatile int* done) {
  if (blockIdx.x == 0) {
    if (threadIdx.x) return;
    unsigned at = clocks[1];
    for (int i = 0; i < 64; i++) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(next + at) : "memory");
    long long begun = clock64();
    for (int i = 0; i < loads; i++) asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(at) : "l"(next + at) : "memory");
    clocks[0] = clock64() - begun;
    clocks[1] = at;  // where the next launch goes on
    *done = 1;
    return;
  }
  if (threadIdx.x >= 32 * busy) return;
  unsigned sum = 0, at = blockIdx.x * 977 * 32 + threadIdx.x;
  while (!*done) {
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      at = (at + 132 * 512) & mask;
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "l"(streamed + at) : "memory");
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum += v[i].x + v[i].y + v[i].z + v[i].w;
  }
  if (sum == 12345) clocks[2] = sum;
}
"""
# Blocks of a cluster meet: by its barrier, or by 8 bytes from each block for each other one, which an mbarrier counts.
MEETING = r"""
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) meet(long long* clocks, int times, int sent) {
  __shared__ unsigned long long full[2], data[2][BLOCKS];
  unsigned bar = (unsigned)__cvta_generic_to_shared(full), to = (unsigned)__cvta_generic_to_shared(data), rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  long long begun = clock64();
  for (int i = 0; i < times; i++) {
    if (!sent) {
      asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
      continue;
    }
    unsigned own = bar + 8 * (i & 1), done = 0;
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(own), "r"(8 * BLOCKS) : "memory");
    if (threadIdx.x < BLOCKS)
      asm volatile("{ .reg .b32 there, count; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 count, %1, %2;"
                   " st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], %3, [count]; }"
                   ::"r"(to + 8 * (BLOCKS * (i & 1) + rank)), "r"(own), "r"(threadIdx.x), "l"((long long)i) : "memory");
    while (!done)
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                   : "=r"(done) : "r"(own), "r"((i >> 1) & 1) : "memory");
    __syncthreads();
  }
  if (threadIdx.x == 0 && blockIdx.x == 0) clocks[0] = clock64() - begun;
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
"""


def clusters(module) -> dict[str, int | str]:
    """Returns the number of clusters that run at a time (cuOccupancyMaxActiveClusters), with blocks whose shared memory fills
    an SM, or half of one.
    """
    from cuda.bindings import driver

    kernel, found = driver.CUfunction(module.get_function("nothing").kernel.ptr), {}
    attribute = driver.CUfunction_attribute
    driver.cuFuncSetAttribute(kernel, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 227 << 10)
    driver.cuFuncSetAttribute(kernel, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    for kilobytes in SMEM:
        for blocks in CLUSTERS:
            config, wanted, value = driver.CUlaunchConfig(), driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            config.gridDimX, config.gridDimY, config.gridDimZ = 200 * blocks, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
            config.sharedMemBytes = kilobytes << 10
            wanted.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = blocks, 1, 1
            wanted.value, config.attrs, config.numAttrs = value, [wanted], 1
            status, *number = driver.cuOccupancyMaxActiveClusters(kernel, config)
            found[f"{kilobytes}K c{blocks}"] = int(number[0]) if int(status) == 0 else status.name
    return found


def chain(module, megabytes: Sequence[int] = MEGABYTES) -> list[tuple[int, float, float]]:
    """Returns (MB read and written, us, GB/s) of kernels in a graph of 20, each of which reads the array that the one before
    wrote.
    """
    import cupy

    add, stream, rows = module.get_function("add"), cupy.cuda.Stream(non_blocking=True), []
    grid = (4 * current().num_sms,)
    with stream:
        for mb in megabytes:
            size = mb << 20
            x, y = cupy.asarray(np.random.default_rng(0).integers(0, 255, size, np.uint8)), cupy.zeros(size, cupy.uint8)

            def pair(x=x, y=y, words=size // 16) -> None:
                add(grid, (512,), (x, y, words))
                add(grid, (512,), (y, x, words))

            us = graph_us(pair, 10) / 2
            rows.append((mb, us, 2 * size / us / 1e3))
    return rows


def meetings() -> dict[str, float]:
    """Clocks from one meeting of a cluster's blocks, of 256 threads, to the next: medians of 9 launches of one."""
    import cupy

    found, clocks = {}, cupy.zeros(2, cupy.int64)
    for blocks in (2, 4, 8):
        options = (f"-DBLOCKS={blocks}", f"--gpu-architecture={current().sm}")
        meet = cupy.RawModule(code=MEETING, options=options, backend="nvrtc").get_function("meet")
        for sent, name in enumerate(("barrier", "sent")):
            taken = []
            for _ in range(9):
                meet((blocks,), (256,), (clocks, MEETINGS, sent))
                taken.append(int(clocks[0]) / MEETINGS)
            found[f"{name} of {blocks}"] = statistics.median(taken)
    return found


def instructions(counts: Sequence[int] = STRAIGHT) -> dict[str, list[float]]:
    """Returns, for each number of instructions of straight-line code, the microseconds of a launch of one block of 64 threads
    on each SM, in a graph of 32: behind a launch of the same code, and behind 15 others of the same size.
    """
    import cupy

    found: dict[str, list[float]] = {}
    stream = cupy.cuda.Stream(non_blocking=True)
    y = cupy.zeros(64 * 132, cupy.float32)
    for count in counts:
        body = "".join(f"v[{i % 8}] = v[{i % 8}] * a + {i + 1}.f;" for i in range(count))
        kernels = [
            cupy.RawModule(
                code=f'extern "C" __global__ void line(float* y, float a) {{ float v[8] = {{a + {k}.f}}; {body} float s = 0.f;'
                " for (int i = 0; i < 8; i++) s += v[i]; y[blockIdx.x * 64 + threadIdx.x] = s; }"
            ).get_function("line")
            for k in range(16)
        ]
        found[str(count)] = []
        for different in (1, 16):
            order = itertools.cycle(kernels[:different])

            def launch(order: Iterator[Any] = order) -> None:
                next(order)((132,), (64,), (y, cupy.float32(0.5)))

            with stream:
                us = graph_us(launch, 32, 9)
            found[str(count)].append(us)
    return found


def waits(module) -> dict[str, float]:
    """Returns the clocks of one thread's load behind another load: from L2 (1 MB), alone and while other SMs read 16 MB of it;
    from DRAM.
    """
    import cupy

    chase, rng, found = module.get_function("chase"), cupy.random.default_rng(0), {}
    streamed, clocks, done = cupy.zeros(16 << 20, cupy.uint8), cupy.zeros(3, cupy.int64), cupy.zeros(1, cupy.int32)
    for size, name, streams in ((1 << 20, "L2", STREAMS), (1 << 30, "DRAM", (0,))):
        order = cupy.asnumpy(cupy.argsort(rng.random(size // 128)))
        line = cupy.zeros(size // 4, cupy.uint32)
        line[cupy.asarray(32 * order)] = cupy.asarray(32 * cupy.asnumpy(cupy.roll(cupy.asarray(order), -1)), cupy.uint32)
        clocks[1] = 0
        for busy in streams:
            taken = []
            for _ in range(7):
                done[:] = 0
                grid = (current().num_sms if busy else 1,)
                chase(grid, (512,), (line, LOADS, clocks, streamed, (1 << 20) - 1, busy, done))
                taken.append(int(clocks[0]) / LOADS)
            found[f"{name}, {busy} warps of each SM read"] = statistics.median(taken)
    return found


def graph_us(launch: Callable[[], None], count: int, samples: int = 7) -> float:
    """Returns the microseconds of one of `count` launches in a graph, the median over its replays. CuPy's current stream is
    captured.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    for _ in range(count):
        launch()
    graph = stream.end_capture()
    graph.launch(stream)
    taken = []
    for _ in range(samples):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        graph.launch(stream)
        stop.record(stream)
        stop.synchronize()
        taken.append(1e3 * cupy.cuda.get_elapsed_time(start, stop) / count)
    return statistics.median(taken)


def writing(megabytes: Sequence[int] = WRITTEN, blocks: Sequence[int] = (1, 2, 4)) -> list[list[Any]]:
    """Returns [way, MB, blocks of an SM, us, GB/s] of launches that only write (experiments/writing.cu): by stores of 16 bytes
    by each thread, by bulk copies of 8 KB from shared memory, and by boxes of 64 pixels and 64 of 256 channels.
    """
    import cupy

    device, rows = current(), list[list[Any]]()
    module = cupy.RawModule(code=WRITING.read_text(), options=(f"--gpu-architecture={device.sm}",), backend="nvrtc")
    by_threads, in_bulk, by_boxes = (module.get_function(name) for name in ("by_threads", "in_bulk", "by_boxes"))
    with cupy.cuda.Stream(non_blocking=True):
        for mb in megabytes:
            y = cupy.zeros(mb << 20, cupy.uint8)
            bulk_copies, across = cupy.int32(y.nbytes // BULK_BYTES), cupy.int32(4)
            shape = Map(("out", 0), (256, y.nbytes // 512), (512,), (64, 64))
            box = np.frombuffer(encode_by_driver(shape, y.data.ptr), "V128")
            for per_sm in blocks:
                grid = (per_sm * device.num_sms,)
                ways: dict[str, Callable[[], None]] = {
                    "16 bytes of a thread": partial(by_threads, grid, (512,), (y, np.int64(y.nbytes // 16))),
                    "bulk copies": partial(in_bulk, grid, (128,), (y, bulk_copies)),
                    "boxes of a tensor": partial(by_boxes, grid, (128,), (box, bulk_copies, across)),
                }
                for way, launch in ways.items():
                    us = graph_us(launch, 10)
                    rows.append([way, mb, per_sm, round(us, 3), round(y.nbytes / us / 1e3, 1)])
    return rows


def table(data: dict[str, Any]) -> Iterator[str]:
    """Yields the rates of writing in a result: the best over the blocks of an SM."""
    best: dict[tuple[str, int], float] = {}
    for way, mb, _, _, rate in data.get("writing: way, MB, blocks of an SM, us, GB/s", ()):
        best[way, mb] = max(best.get((way, mb), 0.0), rate)
    sizes = sorted({mb for _, mb in best})
    if best:
        yield f"{'GB/s of writing only, MB':24} " + " ".join(f"{mb:>7}" for mb in sizes)
    for way in dict.fromkeys(way for way, _ in best):
        yield f"{way:24} " + " ".join(f"{best[way, mb]:7.0f}" for mb in sizes)


def main(argv: list[str] | None = None) -> int:
    import cupy

    x, module = begun(__doc__ or "", argv), cupy.RawModule(code=SOURCE)
    parts: dict[str, Callable[[], Any]] = {
        "writing: way, MB, blocks of an SM, us, GB/s": partial(writing, (1,), (1,)) if x.small else writing,
        "straight-line code: us behind itself, behind 15 others": partial(instructions, STRAIGHT[: 1 if x.small else None]),
        "chain: MB read and written, us, GB/s": partial(chain, module, MEGABYTES[: 1 if x.small else None]),
    }
    if not x.small:  # the emulator lacks these: st.async of one word, the driver's count of clusters, timed loads
        parts["clocks of a cluster's meeting"] = meetings
        parts["max_active_clusters"] = partial(clusters, module)
        parts["clocks of a load behind a load"] = partial(waits, module)
    for name, part in parts.items():
        x.step(name, partial(kept, x.data, name, part))
    print("\n".join(table(x.data)), flush=True)
    return x.done()


def kept(data: dict[str, Any], name: str, part: Callable[[], Any]) -> None:
    data[name] = part()


if __name__ == "__main__":
    sys.exit(main())
