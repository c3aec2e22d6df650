"""The begin and end of each kernel of a network's graph, by CUPTI through PyTorch: benchmarks/results/GPU/timeline.json.

    python -m benchmarks.timeline FILE ENGINE ...     on a GPU: REPLAYS replays of each engine's graph
    python -m benchmarks.timeline [h200]              of each kernel, microseconds from the end of the one before to its own end

Launches begin early and wait for the one ahead, so a kernel's own duration says little: `spacing` is the time that it adds to
the graph.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import hardware

REPLAYS, WARM = 6, 10


def taken(engine: Path) -> list[list[Any]]:
    """Returns [kernel, begin, duration, grid, block] of all kernels of all replays, in the order of begin, in microseconds."""
    import torch

    import gpu_runtime as gr
    from benchmarks.bench_networks import images

    torch.cuda.init()  # CUPTI before our context
    loaded = gr.load(engine)
    with loaded.context() as ctx, tempfile.TemporaryDirectory() as temp:
        ctx.run({i.name: images(i.shape).astype(i.dtype) for i in loaded.inputs})
        for _ in range(WARM):
            ctx.replay()
        ctx.gpu.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            for _ in range(REPLAYS):
                ctx.replay()
            ctx.gpu.synchronize()
        path = Path(temp) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_bytes())["traceEvents"] if e.get("cat") == "kernel"]
    rows = [[e["name"], e["ts"], e["dur"], e["args"]["grid"], e["args"]["block"]] for e in events]
    return sorted(rows, key=lambda row: row[1])


def spacing(rows: list[list[Any]]) -> list[tuple[str, list[int], float]]:
    """Returns (kernel, grid, microseconds from the end of the kernel before to its own end): medians over all replays but the
    first.
    """
    count = len(rows) // REPLAYS
    ends = [begin + us for _, begin, us, *_ in rows]
    return [
        (rows[i][0], rows[i][3], statistics.median(ends[k + i] - ends[k + i - 1] for k in range(count, REPLAYS * count, count)))
        for i in range(count)
    ]


def shown(gpu: str) -> Iterator[str]:
    found = hardware.read(Path(__file__).parent / "results" / gpu / "timeline.json")
    yield f"{found['device']}, driver {found['driver']}, {found['date']}"
    for engine, rows in found["engines"].items():
        each = spacing(rows)
        yield f"{engine}: {len(each)} kernels, {sum(us for *_, us in each[1:]):.0f} us behind the first"
        by_kernel = {name: [us for n, _, us in each if n == name] for name, *_ in each}
        for name, times in sorted(by_kernel.items(), key=lambda item: -sum(item[1])):
            yield f"  {name:20} {len(times):3} x {statistics.median(times):6.2f} us = {sum(times):7.1f} us"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        from cuda_kernels.device import current

        engines = {Path(engine).stem: taken(Path(engine)) for engine in argv[1:]}
        hardware.write(Path(argv[0]), hardware.header(current()) | {"engines": engines})
    else:
        print("\n".join(shown(argv[0] if argv else "h200")))


if __name__ == "__main__":
    main(sys.argv[1:])
