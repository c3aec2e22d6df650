"""Row `early`: graphs of whole networks with launches that begin early and without, their layers, and when each kernel ends.

    python -m benchmarks.experiments.early --out FILE [--seconds 40] [--small] [NAME:BATCH:KIND ...]

Each network runs in a process of its own for each of WAYS: as always; without early launches (GPU_RUNTIME_LAUNCH=rawkernel);
and early, but with each block of launches of no more blocks than SMs alone on its SM, as it asks for most of the shared memory.
Of each: the median of the graph's replays, the layers between two events (Context.profile), and, where PyTorch is installed,
the timeline by CUPTI (benchmarks/timeline.py). If a graph takes longer than its layers since blocks that begin early are packed
on few SMs (benchmarks/NOTES.md), it takes its layers' time in the other two ways.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import hardware, timeline
from benchmarks.bench_networks import Wanted, build, images, row_of
from benchmarks.experiments.run import Experiment, begun
from benchmarks.gpu_networks import replay_times
from benchmarks.processes import checked
from cuda_kernels.device import current
from cuda_kernels.launch import Cuda, Kernel, Triple

NETWORKS, SMALL = ("timm_poolformer_s12:32:dense", "resnet50:32:dense"), ("two_layers:1:dense",)
WAYS = {"early": "", "rawkernel": "rawkernel", "apart": ""}  # and the value of GPU_RUNTIME_LAUNCH
ALONE_BYTES = 116 << 10  # of shared memory: two such blocks do not fit on an SM of 228 KB
EVENTS_US = 4.1  # the time of two events around a layer


def wanted(small: bool, device: str) -> list[Wanted]:
    """Returns the engines of this row."""
    rows = [row_of(item, "dense") for item in (SMALL if small else NETWORKS)]
    return [Wanted(row.name, row.batch, kind, device) for row in rows for kind in row.kinds]


def keep_apart() -> None:
    """From now on, a launch of no more blocks than SMs asks for so much shared memory that each block is alone on its SM."""
    launch = Cuda.launch

    def alone(gpu: Cuda, kernel: Kernel, grid: Triple, block: Triple, smem: int, params: bytes) -> None:
        launch(gpu, kernel, grid, block, max(smem, ALONE_BYTES) if math.prod(grid) <= gpu.device.num_sms else smem, params)

    Cuda.launch = alone  # type: ignore[method-assign, assignment]


def child(file: Path, way: str, small: bool) -> dict[str, Any]:
    """Measures an engine with a way of launching; the process's environment already has its GPU_RUNTIME_LAUNCH."""
    import gpu_runtime as gr

    if way == "apart":
        keep_apart()
    engine = gr.load(file)
    feeds = {i.name: images(i.shape).astype(i.dtype) for i in engine.inputs}
    with engine.context() as ctx:
        ctx.run(feeds)
        found: dict[str, Any] = {"graph": replay_times(ctx, 5 if small else 50)}
        taken = ctx.profile(feeds, 2 if small else 10)
    found["layers_us"] = [round(statistics.median(of), 2) for of in zip(*taken, strict=True)]
    found["launches"] = len(engine.plan.steps)
    try:
        found["timeline"] = timeline.taken(file)
    except (ImportError, RuntimeError) as e:
        found["no timeline"] = f"{type(e).__name__}: {e}"[:300]
    return found


def make(one: Wanted, folder: Path) -> None:
    build(one, folder, None, None)


def ran(file: Path, way: str, x: Experiment) -> None:
    """Runs a process for one engine and way. RuntimeError if it did not end with 0 in time."""
    out = file.with_suffix(f".{way}.json")
    command = [sys.executable, "-m", "benchmarks.experiments.early", "--child", str(file), way, str(out)]
    checked([*command, *(["--small"] if x.small else [])], max(5.0, x.left), {"GPU_RUNTIME_LAUNCH": WAYS[way]})
    found = json.loads(out.read_bytes())
    x.data.setdefault("engines", {}).setdefault(file.stem, {})[way] = found
    print(f"{file.stem} {way}: graph {found['graph']['us']} us, {found['launches']} launches", flush=True)


def table(data: dict[str, Any]) -> Iterator[str]:
    """Yields a line of the result for each network and way; `layers`: their sum less the time of the events."""
    yield f"{'network':40} {'way':10} {'launches':>8} {'graph us':>9} {'layers':>9} {'graph over layers':>17}"
    for name, ways in data.get("engines", {}).items():
        for way, found in ways.items():
            layers, graph = sum(max(0.0, us - EVENTS_US) for us in found["layers_us"]), found["graph"]["us"]
            more = f"{graph / layers:17.2f}" if layers else f"{'-':>17}"
            yield f"{name:40} {way:10} {found['launches']:8} {graph:9.1f} {layers:9.1f} {more}"
            if "timeline" in found:
                each = timeline.spacing(found["timeline"])
                slowest = sorted(each[1:], key=lambda row: -row[2])[:5]
                yield "  longest: " + ", ".join(f"{kernel} {grid} {us:.1f}" for kernel, grid, us in slowest)


def main(argv: list[str]) -> int:
    if argv[:1] == ["--child"]:
        Path(argv[3]).write_text(json.dumps(child(Path(argv[1]), argv[2], "--small" in argv)))
        return 0
    x = begun(__doc__ or "", argv)
    with tempfile.TemporaryDirectory() as folder:
        for one in wanted(x.small, hardware.named_like(current().title)):
            file = one.file(Path(folder))
            x.step(f"{one.name} engine", partial(make, one, Path(folder)), 10.0)
            for way in WAYS if file.exists() else ():
                x.step(f"{one.name} {way}", partial(ran, file, way, x), 5.0)
    return x.done()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
