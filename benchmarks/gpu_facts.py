"""Facts of a GPU that predictions rest on: clusters that run at a time, and how L2 serves a chain of kernels.

python -m benchmarks.gpu_facts FILE        on a GPU; benchmarks/results/h200/facts.json is one
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import hardware
from cuda_kernels.device import current

MEGABYTES = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 34, 38, 44, 52, 64, 96, 160)
CLUSTERS, THREADS, SMEM = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16), 384, (200, 100)  # blocks; of a block; KB of shared memory
SOURCE = r"""
extern "C" __global__ void nothing(float* p) { extern __shared__ float s[]; if (p) p[0] = s[0]; }
extern "C" __global__ void add(const uint4* x, uint4* y, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
    uint4 v = x[i];
    v.x += 1;
    y[i] = v;
  }
}
"""


def clusters(module) -> dict[str, int | str]:
    """cuOccupancyMaxActiveClusters of blocks that fill an SM by their shared memory, or half of one."""
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


def chain(module) -> list[tuple[int, float, float]]:
    """(MB read and written, us, GB/s) of kernels of which each reads what the one before wrote, in a graph of 20."""
    import cupy

    add, stream, rows = module.get_function("add"), cupy.cuda.Stream(non_blocking=True), []
    grid = (4 * current().num_sms,)
    with stream:
        for mb in MEGABYTES:
            size = mb << 20
            x, y = cupy.random.randint(0, 255, size, dtype=cupy.uint8), cupy.zeros(size, cupy.uint8)
            stream.begin_capture()
            for _ in range(10):
                add(grid, (512,), (x, y, size // 16))
                add(grid, (512,), (y, x, size // 16))
            graph = stream.end_capture()
            graph.launch(stream)
            start, stop, times = cupy.cuda.Event(), cupy.cuda.Event(), []
            for _ in range(7):
                start.record(stream)
                graph.launch(stream)
                stop.record(stream)
                stop.synchronize()
                times.append(1e3 * cupy.cuda.get_elapsed_time(start, stop) / 20)
            us = statistics.median(times)
            rows.append((mb, us, 2 * size / us / 1e3))
    return rows


def main(argv: list[str]) -> None:
    import cupy

    module = cupy.RawModule(code=SOURCE)
    found: dict[str, Any] = {"max_active_clusters": clusters(module), "chain: MB read and written, us, GB/s": chain(module)}
    hardware.write(Path(argv[0]), hardware.header(current()) | found)


if __name__ == "__main__":
    main(sys.argv[1:])
