"""Row `operators`: gpu_runtime.ops beside F.conv2d (channels last), F.linear and cuSPARSELt, called as a user calls them.

    python -m benchmarks.experiments.operators --out FILE [--seconds 60] [LAYER ...]

A sample is CALLS calls, one after the other on one stream, between two events: microseconds of the GPU, or of the host where
that is slower; beside it the time in which a call returned. Samples alternate, medians of ROUNDS, random data. "2:4" has a
sparse kernel forced, "ours" the one that is predicted to be fastest. cuSPARSELt has a process of its own, as in row peers.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.experiments.peers import of_sparselt
from benchmarks.experiments.run import Experiment, begun, interleaved
from benchmarks.torch_twin import prepared
from cuda_kernels.device import Device
from gpu_runtime.ops import SparseConv2d
from gpu_runtime.runtime.point import kernel_keys
from tactics.launches import Binary

ROUNDS, CALLS = 11, 20
# name -> (N, C, H, W) of x, K and the kernel's width; a linear layer has its rows as the columns of one image
LAYERS = {
    "conv 64, 56x56": ((32, 64, 56, 56), 64, 3),
    "conv 256, 14x14": ((32, 256, 14, 14), 256, 3),
    "conv 512, 28x28": ((32, 512, 28, 28), 512, 3),
    "linear 1024 -> 4096": ((1, 1024, 1, 4096), 4096, 1),
    "linear 4096 -> 1024": ((1, 4096, 1, 4096), 1024, 1),
}
SMALL = {"conv small": ((1, 64, 8, 8), 64, 3), "linear small": ((1, 64, 1, 64), 64, 1)}


def layers(small: bool) -> dict[str, tuple[tuple[int, int, int, int], int, int]]:
    return SMALL if small else LAYERS


def operators(c: int, k: int, width: int, device: Device | None = None) -> dict[str, SparseConv2d]:
    weight = np.random.default_rng(0).standard_normal((k, c, width, width)) / (c**0.5 * width)
    forces = {"2:4": "sparse", "ours": ""}
    options: Any = {"padding": width // 2, "prune": "magnitude", "device": device}
    return {label: SparseConv2d.from_dense(weight, force=force, **options) for label, force in forces.items()}


def kernels(device: Device, small: bool) -> Iterator[Binary]:
    for shape, k, width in layers(small).values():
        for operator in operators(shape[1], k, width, device).values():
            yield from kernel_keys(operator._plan(shape, False).engine.plan, on_gpu=False)


def measured(name: str, x: Experiment, torch: Any, cp: Any) -> None:
    (n, c, h, w), k, width = shape, *_ = layers(x.small)[name]
    ours = operators(c, k, width)
    given = cp.asarray(np.random.default_rng(1).standard_normal((n, h, w, c), np.float32), cp.float16)
    weight = torch.from_dlpack(cp.asarray(ours["ours"].weight, cp.float16))
    run: dict[str, Callable[[], Any]] = {o: partial(operator, given.transpose(0, 3, 1, 2)) for o, operator in ours.items()}
    if width > 1:
        weight, image = weight.contiguous(memory_format=torch.channels_last), torch.from_dlpack(given.transpose(0, 3, 1, 2))
        run["torch"] = partial(torch.nn.functional.conv2d, image, weight, None, (1, 1), (width // 2,) * 2, (1, 1), 1)
    else:
        run["torch"] = partial(torch.nn.functional.linear, torch.from_dlpack(given.reshape(-1, c)), weight.view(k, c))
    row: dict[str, Any] = {"layer": name, "failed": {}, "tactics": {label: o.tactic(shape) for label, o in ours.items()}}
    peer = None if width > 1 else of_sparselt(k, c, w, row["failed"])
    contestants: dict[str, Callable[[], tuple[float, float]]] = {label: partial(_sample, one, cp) for label, one in run.items()}
    if peer:
        contestants["cusparselt"] = lambda: (peer[1].sample(), 0.0)
    samples = interleaved(contestants, ROUNDS)
    if peer:
        peer[0].close()
    for label, taken in samples.items():
        us, host_us = (round(statistics.median(found), 3) for found in zip(*taken, strict=True))
        row[label] = {"us": us, "host_us": host_us}
    x.data.setdefault("layers", []).append(row)
    print(name, {label: row[label]["us"] for label in samples}, flush=True)


def _sample(run: Callable[[], Any], cp: Any) -> tuple[float, float]:
    """Microseconds of a call: between events, and until it returns."""
    begin, end = cp.cuda.Event(), cp.cuda.Event()
    begin.record()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    host = time.perf_counter() - start
    end.record()
    end.synchronize()
    return 1e3 * cp.cuda.get_elapsed_time(begin, end) / CALLS, 1e6 * host / CALLS


def main(argv: list[str] | None = None) -> int:
    x = begun(__doc__ or "", argv)
    import cupy

    torch, x.data["torch"] = prepared()
    for name in x.words or layers(x.small):
        x.step(name, partial(measured, name, x, torch, cupy), 6.0)
    return x.done()


if __name__ == "__main__":
    sys.exit(main())
