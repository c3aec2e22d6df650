"""Whole networks on a GPU: our engines beside PyTorch with cuDNN, times in one run, outputs beside onnxruntime's.

    python -m benchmarks.bench_networks [--plans predicted,measured] [--out FILE] [--tuning 20] [--compiled] resnet50:32 ...

Ours: one engine without 2:4 weights (`dense`) and one with all weights pruned to 2:4 (`sparse`, sparsity="force"), planned by
predicted or by measured times. PyTorch's: the network of torchvision or timm in FP16, channels_last, BatchNormalization folded
into convolutions where torch.fx can, cudnn.benchmark, random normal images; `--compiled` adds torch.compile. All are CUDA graphs
whose inputs are in place. Samples alternate, medians of ROUNDS.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import gpu_runtime as gr
from benchmarks import hardware, light, topologies
from benchmarks.gpu_networks import compared, onnxruntime_run
from benchmarks.networks import resnet50
from cuda_kernels.device import current, why_no_gpu
from gpu_runtime.runtime.context import Context
from tactics.measure.timing import quantiles

ROUNDS = 25
KINDS = {"dense": "disable", "sparse": "force"}
TORCHVISION = {"resnet50": "resnet50", "tv_resnext50": "resnext50_32x4d"}  # others are their name without tv_


def model(name: str, batch: int) -> onnx.ModelProto:
    if name == "resnet50":
        return resnet50(batch)
    return light.open_batch(topologies.filled(name))


def build(name: str, batch: int, kind: str, device: str | None, folder: Path, tuning: float | None) -> tuple[Path, float]:
    """(an engine's file, the seconds of its build): times are predicted for a named device, measured without a name."""
    begun, path = time.monotonic(), folder / f"{name}_{batch}_{kind}.onnx"
    to = path.with_suffix(".predicted.engine" if device else ".measured.engine")
    if to.exists():
        return to, 0.0
    made = model(name, batch)
    onnx.save(made, path)
    shapes = None if name == "resnet50" else {light.first_input(made): (batch, 3, *size_of(made))}
    pruned = folder / f"{name}_{batch}_pruned.onnx" if kind == "sparse" else None
    cache = None if device else os.environ.get("BENCH_TIMINGS")
    engine = gr.build(
        path, sparsity=KINDS[kind], device=device, shapes=shapes, save_pruned=pruned, tuning_time=tuning, timing_cache=cache
    )
    engine.save(to)
    return to, time.monotonic() - begun


def size_of(made: onnx.ModelProto) -> list[int]:
    first = light.first_input(made)
    dims = next(v for v in made.graph.input if v.name == first).type.tensor_type.shape.dim
    return [d.dim_value for d in list(dims)[2:]]


class Theirs:
    """PyTorch's network as a graph. ImportError and RuntimeError: it is not to be had."""

    def __init__(self, name: str, batch: int, compiled: bool) -> None:
        import torch

        torch.backends.cudnn.benchmark = True
        if name.startswith("timm_"):
            import timm

            net = timm.create_model(name.removeprefix("timm_")).eval()
        else:
            import torchvision

            net = getattr(torchvision.models, TORCHVISION.get(name, name.removeprefix("tv_")))().eval()
        self.folded = True
        try:
            from torch.fx.experimental.optimization import fuse

            net = fuse(net)
        except Exception:  # not every network can be traced
            self.folded = False
        net = net.cuda().half().to(memory_format=torch.channels_last)
        size = 224
        self.x = torch.randn(batch, 3, size, size, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        net = torch.compile(net) if compiled else net
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                net(self.x)
            stream.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.y = net(self.x)
        self.torch, self.stream = torch, stream

    def sample(self) -> float:
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self.torch.cuda.stream(self.stream):
            start.record()
            self.graph.replay()
            stop.record()
        stop.synchronize()
        return 1e3 * float(start.elapsed_time(stop))


class Ours:
    """An engine's graph, its images in place."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.cupy = ctx, ctx.gpu.cupy  # type: ignore[union-attr]
        self.start, self.stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()

    def sample(self) -> float:
        self.start.record(self.ctx.gpu.stream)  # type: ignore[union-attr]
        self.ctx.replay()
        self.stop.record(self.ctx.gpu.stream)  # type: ignore[union-attr]
        self.stop.synchronize()
        return 1e3 * float(self.cupy.cuda.get_elapsed_time(self.start, self.stop))


def measure(name: str, batch: int, engines: dict[str, tuple[Path, float]], compiled: bool, judge: bool, kept: dict) -> dict[str, Any]:
    """One network and batch: the times of all contestants, and our errors."""
    row: dict[str, Any] = {"network": name, "batch": batch, "failed": {}}
    open_, contestants = [], {}
    try:
        for kind, (path, seconds) in engines.items():
            try:
                engine = gr.load(path)
                ctx = engine.context()
                open_.append(ctx)
                rng = np.random.default_rng(0)
                feeds = {i.name: rng.standard_normal(i.shape).astype(i.dtype) for i in engine.inputs}
                outputs = ctx.run(feeds)
                plan, onnx_path = engine.plan, Path(str(path).rsplit(".", 2)[0] + ".onnx")
                row[kind] = {
                    "planned_us": plan.solution.total_us,
                    "launches": len(plan.steps),
                    "build_s": round(seconds, 1),
                    "sparse": [len(engine.sparsity.picked), len(engine.sparsity.eligible)],
                    "finite": all(bool(np.isfinite(v).all()) for v in outputs.values()),
                    "layers": profile(ctx, feeds, plan.layers),
                }
                kept |= {f"{name}:{batch} {kind} {k}": np.asarray(v, np.float16) for k, v in outputs.items()}
                if judge:
                    pruned = onnx_path.with_name(f"{name}_{batch}_pruned.onnx")
                    judged = pruned if "sparse" in kind else onnx_path
                    row[kind]["error_to_onnxruntime"] = compared(outputs, lambda j=judged, f=feeds: onnxruntime_run(j, f))
                contestants[kind] = Ours(ctx).sample
            except Exception as e:
                row["failed"][kind] = f"{type(e).__name__}: {e}"[:1500]
        for kind in ("torch", *(["torch_compiled"] if compiled else [])):
            try:
                theirs = Theirs(name, batch, kind != "torch")
                contestants[kind] = theirs.sample
                row[kind] = {"folded": theirs.folded}
            except Exception as e:
                row["failed"][kind] = f"{type(e).__name__}: {e}"[:1500]
        samples: dict[str, list[float]] = {kind: [] for kind in contestants}
        for i in range(ROUNDS + 3):
            for kind in random.sample(list(contestants), len(contestants)):
                us = contestants[kind]()
                if i >= 3:
                    samples[kind].append(us)
        for kind, us in samples.items():
            low, median, high = quantiles(us)
            row[kind] |= {"us": round(median, 2), "low_us": round(low, 2), "high_us": round(high, 2)}
    finally:
        for ctx in open_:
            ctx.close()
    return row


def profile(ctx: Context, feeds: dict[str, np.ndarray], layers) -> list[list[Any]]:
    """[layer, tactic, planned us, us between two events], of each layer."""
    per_layer = ctx.profile(feeds, 7)
    at = [statistics.median(times[i] for times in per_layer) for i in range(len(layers))]
    return [[la.name, la.tactic_name, la.time_us, round(us, 2)] for la, us in zip(layers, at, strict=True)]


def line(row: dict[str, Any]) -> str:
    kinds = [k for k in row if isinstance(row[k], dict) and "us" in row[k]]
    cells = [f"{k} {row[k]['us']:.1f}" + (f" (planned {row[k]['planned_us']:.1f})" if "planned_us" in row[k] else "") for k in kinds]
    errors = [f"{row[k]['error_to_onnxruntime']}" for k in kinds if "error_to_onnxruntime" in row[k]]
    failed = "".join(f"; FAILED {k}: {text[:160]}" for k, text in row["failed"].items())
    return f"{row['network']}:{row['batch']} us: {', '.join(cells)}; errors {' '.join(e[:40] for e in errors)}{failed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="+", help="NAME:BATCH")
    parser.add_argument("--plans", default="predicted", help="predicted, measured, or both with a comma")
    parser.add_argument("--kinds", default="dense,sparse")
    parser.add_argument("--tuning", type=float, help="seconds of a measured build's timing")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no network after so many")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--judge", action="store_true", help="compare outputs with onnxruntime's")
    parser.add_argument("--out", type=Path, default=hardware.DEFAULT / "bench_networks.json")
    parser.add_argument("--folder", type=Path, help="keep models and engines here; engines found here are not built")
    parser.add_argument("--outputs", type=Path, help="keep the outputs in this .npz, whose inputs are seeded")
    parser.add_argument("--build-only", help="build for this named device, and stop")
    args = parser.parse_args()
    begun = time.monotonic()
    todo = [(name, int(batch)) for name, _, batch in (item.partition(":") for item in args.networks)]
    if not args.build_only and (why := why_no_gpu()):
        print(f"bench_networks needs a GPU: {why}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temp:
        folder, engines, kept = args.folder or Path(temp), {}, {}
        folder.mkdir(parents=True, exist_ok=True)
        title = args.build_only or next((n for n in ("h200", "h100", "a100") if n.upper() in current().title), "h100")
        kinds = args.kinds.split(",")
        if "predicted" in args.plans or args.build_only:
            with ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("spawn")) as pool:
                futures = {
                    (name, batch, kind): pool.submit(build, name, batch, kind, title, folder, None)
                    for name, batch in todo
                    for kind in kinds
                }
                for key, future in futures.items():
                    try:
                        engines[key] = future.result()
                    except Exception as e:
                        print(f"{key}: {type(e).__name__}: {e}"[:600], flush=True)
            print(f"{len(engines)} of {len(futures)} engines built in {time.monotonic() - begun:.0f} s", flush=True)
        if args.build_only:
            return 0
        data: dict[str, Any] = hardware.header(current()) | {"what": __doc__, "rows": []}
        for name, batch in todo:
            if time.monotonic() - begun > args.seconds:
                print(f"{name}:{batch}: no time", flush=True)
                continue
            mine = {f"{kind}_predicted": engines[name, batch, kind] for kind in kinds if (name, batch, kind) in engines}
            for kind in kinds if "measured" in args.plans else ():
                try:
                    mine[f"{kind}_measured"] = build(name, batch, kind, None, folder, args.tuning)
                except Exception as e:
                    print(f"{name}:{batch} {kind}: {type(e).__name__}: {e}"[:600], flush=True)
            data["rows"].append(measure(name, batch, mine, args.compiled, args.judge, kept))
            print(line(data["rows"][-1]), flush=True)
            hardware.write(args.out, data)
            if args.outputs:
                np.savez(args.outputs, **kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
