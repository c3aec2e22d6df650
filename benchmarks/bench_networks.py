"""Whole networks on a GPU: our engines beside PyTorch with cuDNN, times in one run, outputs beside onnxruntime's.

    python -m benchmarks.bench_networks [--plans predicted,measured] [--out FILE] [--tuning 20] resnet50:32 ...
    python -m benchmarks.bench_networks --warm resnet50:32:compiled ...      fills Inductor's cache with compiled networks
    python -m benchmarks.bench_networks --small                              two layers, few tactics, few samples

Ours: an engine without 2:4 weights (dense), one with all weights pruned to 2:4 (sparse, sparsity="force"), and one without 2:4
weights whose batch runs as a whole (whole), planned by predicted or by measured times. PyTorch's: the network of torchvision or
timm, or of benchmarks.heavy by benchmarks.torch_twin, in FP16, channels_last, BatchNormalization folded into convolutions where
torch.fx can, cudnn.benchmark, random normal images; compiled: the same behind torch.compile. NAME:BATCH:KINDS asks for others
than --kinds. All are CUDA graphs whose inputs are in place. Samples alternate, medians of ROUNDS. `--outputs` keeps outputs:
inputs are seeded, so another machine can judge them. A plan that `make gpu-pack` wrote (benchmarks/experiments/stored.py) is
taken where there is one, with drawn weights, instead of a predicted one being made.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

import gpu_runtime as gr
from benchmarks import gpu_networks, hardware, heavy, light, processes, topologies
from benchmarks.experiments import stored
from benchmarks.experiments.run import PARTLY, interleaved
from benchmarks.gpu_networks import compared, onnxruntime_run, worst_error
from benchmarks.networks import resnet50
from benchmarks.torch_twin import event_us, prepared, torch_module
from cuda_kernels.device import current, why_no_gpu
from gpu_runtime.building.in_network import replay_us
from gpu_runtime.runtime.context import Context
from tactics.measure.race import times_of

ROUNDS, WARM = 25, 3
SMALL = "two_layers"  # the network of --small
KINDS: dict[str, dict[str, Any]] = {  # arguments of a build
    "dense": {"sparsity": "disable"},
    "sparse": {"sparsity": "force"},
    "whole": {"sparsity": "disable", "batch_invariant": True},
}
COMPILED = "compiled"  # as a kind: PyTorch's, by torch.compile
TORCHVISION = {"tv_resnext50": "resnext50_32x4d"}  # other networks have their name without tv_


class Wanted(NamedTuple):
    """An engine to build. `device`: the device of predicted times, None to measure times; `judged`: its outputs are compared,
    so it has the model's weights.
    """

    name: str
    batch: int
    kind: str
    device: str | None
    judged: bool = False

    @property
    def label(self) -> str:
        return f"{self.kind}_{'predicted' if self.device else 'measured'}"

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}_{self.batch}_{self.label}.engine"

    @property
    def plan(self) -> bytes | None:
        """Returns its plan without weights, if `make gpu-pack` packed it."""
        return stored.packed(self.device, self.name, self.batch, self.kind) if self.device and not self.judged else None

    def model(self, folder: Path) -> Path:
        """Returns the file of the model that the engine computes, in `folder`."""
        return folder / f"{self.name}_{self.batch}_{self.kind}.onnx"


class Row(NamedTuple):
    """A network and batch, and the kinds of engines and of PyTorch that are measured side by side."""

    name: str
    batch: int
    kinds: tuple[str, ...]  # of our engines
    compiled: bool


def row_of(item: str, kinds: str) -> Row:
    """Parses NAME:BATCH or NAME:BATCH:KINDS; `kinds`: the default. ValueError for anything else."""
    if item.count(":") not in (1, 2) or not item.split(":")[1].isdigit():
        raise ValueError(f"{item!r}: expected NAME:BATCH or NAME:BATCH:KINDS, as resnet50:32:dense,compiled")
    name, batch, *own = item.split(":")
    wanted = (own or [kinds])[0].split(",")
    if unknown := set(wanted) - {*KINDS, COMPILED}:
        raise ValueError(f"{item}: unknown kind {min(unknown)!r}: expected some of {', '.join((*KINDS, COMPILED))}")
    return Row(name, int(batch), tuple(k for k in wanted if k != COMPILED), COMPILED in wanted)


def model_of(name: str, batch: int) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]] | None]:
    """Returns (the network, the shapes of its inputs if they are open, else None)."""
    if name == "resnet50":
        return resnet50(batch), None
    if name == "resnet50_int8":  # quantised as ModelOpt does it; needs onnxruntime, as the tests do
        from tests.quantized_models import quantised_resnet50

        return quantised_resnet50(), {"x": (batch, 3, 224, 224)}
    if name == SMALL:
        with tempfile.TemporaryDirectory() as folder:
            return onnx.load(gpu_networks.two_layers(Path(folder) / "two_layers.onnx")), None
    if name in heavy.NETWORKS:
        return heavy.NETWORKS[name](batch), None
    return light.at_batch(topologies.filled(name), batch)


def build(wanted: Wanted, folder: Path, tuning: float | None, cache: Path | None) -> float:
    """Builds and saves an engine that `folder` does not have; returns the seconds that it took. `cache`: file of measured
    times.
    """
    begun = time.monotonic()
    if wanted.file(folder).exists():
        return 0.0
    if plan := wanted.plan:
        stored.engine_of(plan).save(wanted.file(folder))
        return time.monotonic() - begun
    made, shapes = model_of(wanted.name, wanted.batch)
    path = folder / f"{wanted.name}_{wanted.batch}_{wanted.kind}_{os.getpid()}.onnx"
    onnx.save(made, path)
    if wanted.kind != "sparse":
        onnx.save(made, wanted.model(folder))
    engine = gr.build(
        path,
        **KINDS[wanted.kind],
        device=wanted.device,
        shapes=shapes,
        save_pruned=wanted.model(folder) if wanted.kind == "sparse" else None,
        tuning_time=tuning,
        timing_cache=cache,
    )
    engine.save(wanted.file(folder))
    return time.monotonic() - begun


class Theirs:
    """PyTorch's network as a CUDA graph. ImportError or RuntimeError if it cannot be made."""

    def __init__(self, name: str, batch: int, compiled: bool, size: int = 224) -> None:
        torch, _ = prepared()
        shape: Sequence[int] = (batch, 3, size, size)
        if name in heavy.NETWORKS:
            model, _ = model_of(name, batch)
            net = torch_module(model)
            shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
        elif name.startswith("timm_"):
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
        x = torch.randn(*shape, device="cuda", dtype=torch.float16)
        self.x = x.contiguous(memory_format=torch.channels_last)
        net = torch.compile(net) if compiled else net
        self.torch, self.stream = torch, torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(self.stream):
            for _ in range(3):
                net(self.x)
            self.stream.synchronize()
            self.net = net  # its weights, which the graph reads: another capture would free memory that nobody holds
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.y = net(self.x)

    def sample(self) -> float:
        """Returns the microseconds of a replay."""
        with self.torch.cuda.stream(self.stream):
            return event_us(self.torch, self.graph.replay)


def images(shape: Sequence[int]) -> np.ndarray:
    """Returns the seeded input images: the same on each machine."""
    return np.random.default_rng(0).standard_normal(tuple(shape))


def judge_kept(path: Path, out: Path, folder: Path) -> None:
    """Adds to the results at `out` the errors of the outputs kept at `path`: the largest relative to the range of onnxruntime's
    outputs, the share of equal top-1 answers, the number of images. The models are those that --build-only left in `folder`.
    """
    data = json.loads(out.read_bytes())
    rows = {(row["network"], row["batch"]): row for row in data["rows"]}
    with np.load(path) as kept:
        for key in kept.files:
            name, batch, label, output = key.split(" ")
            got, model = kept[key], Wanted(name, int(batch), label.partition("_")[0], None).model(folder)
            first = onnx.load(model, load_external_data=False).graph.input[0]
            x = images((int(batch), *(d.dim_value for d in list(first.type.tensor_type.shape.dim)[1:]))).astype(np.float32)
            want = onnxruntime_run(model, {first.name: x})[output]
            top1 = float((got.reshape(len(x), -1).argmax(1) == want.reshape(len(x), -1).argmax(1)).mean())
            rows[name, int(batch)][label][hardware.JUDGED] = [worst_error({output: got}, {output: want}), top1, len(x)]
            print(key, rows[name, int(batch)][label][hardware.JUDGED], flush=True)
    hardware.write(out, data)


def ran(wanted: Wanted, folder: Path, judge: bool, kept: dict[str, np.ndarray]) -> tuple[Context, dict[str, Any]]:
    """Runs an engine; returns (its context with the images in place, its facts as a row). The outputs are added to `kept`;
    `judge`: they are also compared with onnxruntime's.
    """
    engine = gr.load(wanted.file(folder))
    ctx = engine.context()
    feeds = {i.name: images(i.shape).astype(i.dtype) for i in engine.inputs}
    outputs, plan = ctx.run(feeds), engine.plan
    kept |= {f"{wanted.name} {wanted.batch} {wanted.label} {k}": np.asarray(v, np.float32) for k, v in outputs.items()}
    per_layer = ctx.profile(feeds, 7)
    layers = [
        [la.name, la.tactic_name, la.time_us, round(statistics.median(times[i] for times in per_layer), 2)]
        for i, la in enumerate(plan.layers)
    ]
    row: dict[str, Any] = {
        "planned_us": plan.solution.total_us,
        "whole_us": plan.solution.measured_us,  # of the build's own replays of the plan
        "replaced": [[r.op, r.before_us, r.after_us] for r in plan.solution.replaced],  # by the build's runs of whole plans
        "launches": len(plan.steps),
        "weights": "drawn" if wanted.plan else "the model's",
        "sparse": [len(engine.sparsity.picked), len(engine.sparsity.eligible)],
        "finite": all(bool(np.isfinite(v).all()) for v in outputs.values()),
        "layers: name, tactic, planned us, us between two events": layers,
    }
    if judge:
        row["error_to_onnxruntime"] = compared(outputs, partial(onnxruntime_run, wanted.model(folder), feeds))
    return ctx, row


def measure(asked: Row, engines: Sequence[tuple[Wanted, float]], folder: Path, args, kept, stack: ExitStack) -> dict[str, Any]:
    """Measures one network and batch: the times of all contestants, and the errors of our outputs. `stack` closes the
    contexts.
    """
    row: dict[str, Any] = {"network": asked.name, "batch": asked.batch, "failed": {}}
    contestants: dict[str, Callable[[], float]] = {}
    for wanted, seconds in engines:
        label = wanted.label
        try:
            ctx, found = ran(wanted, folder, args.judge, kept)
            stack.enter_context(ctx)
            row[label] = found | {"build_s": round(seconds, 1)}
            contestants[label] = partial(replay_us, ctx)
        except Exception as e:  # one engine's failure is a line of the result
            row["failed"][label] = f"{type(e).__name__}: {e}"[:1500]
    for compiled in [] if args.ours_only else [False, True] if asked.compiled else [False]:
        label = "torch_compiled" if compiled else "torch"
        try:
            theirs = Theirs(asked.name, asked.batch, compiled)
            contestants[label], row[label] = theirs.sample, {"folded": theirs.folded}
        except Exception as e:
            row["failed"][label] = f"{type(e).__name__}: {e}"[:1500]
    for label, taken in interleaved(contestants, (3 if args.small else ROUNDS) + WARM).items():
        row[label] |= times_of(taken[WARM:], 2)
    return row


def timed(cache: Path) -> dict[str, int]:
    """Returns how many problems, and how many of their tactics, measured builds have timed so far."""
    if not cache.exists():
        return {}
    rows = [row for row in map(json.loads, cache.read_text().splitlines()) if "us" in row]
    return {"tactics timed": len({(r["problem"], r["tactic"]) for r in rows}), "problems": len({r["problem"] for r in rows})}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", help="NAME:BATCH or NAME:BATCH:KINDS")
    parser.add_argument("--warm", action="store_true", help="compile what torch.compile compiles, and stop")
    parser.add_argument("--plans", default="predicted", help="predicted, measured, or both with a comma")
    parser.add_argument("--kinds", default="dense,sparse")
    parser.add_argument("--tuning", type=float, help="seconds of a measured build's timing")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no network after so many")
    parser.add_argument("--judge", action="store_true", help="compare outputs with onnxruntime's")
    parser.add_argument("--small", action="store_true", help="two layers and few tactics, whatever networks are named")
    parser.add_argument("--ours-only", action="store_true", help="without PyTorch")
    parser.add_argument("--out", type=Path, default=hardware.DEFAULT / "bench_networks.json")
    parser.add_argument("--folder", type=Path, help="keep models and engines here; engines found here are not built")
    parser.add_argument("--cache", type=Path, help="measured times to use and extend (default: a new file)")
    parser.add_argument("--outputs", type=Path, help="keep the outputs in this .npz")
    parser.add_argument(
        "--judge-kept", type=Path, help="of outputs kept on another machine, by the models in --folder, into --out"
    )
    parser.add_argument("--build-only", metavar="DEVICE", help="build predicted engines for this named device, and stop")
    return parser.parse_args()


def begin(todo: Sequence[Row], device: str, folder: Path, pool: Executor, judged: bool = False) -> dict[Wanted, Future[float]]:
    """Starts the builds of engines with predicted times in several processes, in the order of the rows; returns the future
    seconds of each.
    """
    wanted = [Wanted(row.name, row.batch, kind, device, judged) for row in todo for kind in row.kinds]
    return {w: pool.submit(build, w, folder, None, None) for w in wanted}


def built(wanted: Wanted, run: Callable[[], float], failed: dict[str, str]) -> list[tuple[Wanted, float]]:
    """Returns [(engine, the seconds that it took)]; [] if the build failed, whose reason is added to `failed`."""
    try:
        return [(wanted, run())]
    except Exception as e:
        failed[wanted.label] = f"{type(e).__name__}: {e}"[:1500]
        return []


def engines_of(
    row: Row, waiting: Mapping[Wanted, Future[float]], folder: Path, args, left: Callable[[], float]
) -> tuple[list[tuple[Wanted, float]], dict[str, str]]:
    """Returns (the row's engines with the seconds that each took, the reasons why others could not be built). `left`: the
    remaining seconds; a build that would take longer is not begun.
    """
    failed: dict[str, str] = {}
    found = [e for w, f in waiting.items() if (w.name, w.batch) == (row.name, row.batch) for e in built(w, f.result, failed)]
    cache = args.cache or folder / "timings.jsonl"
    with gpu_networks.fewer_tactics(args.small):
        for w in [Wanted(row.name, row.batch, kind, None) for kind in row.kinds if "measured" in args.plans]:
            if left() < (args.tuning or 0):
                failed[w.label] = f"no time: {left():.0f} s are left, its timing takes {args.tuning:.0f}"
                continue
            found += built(w, partial(build, w, folder, args.tuning, cache), failed)
            print(f"{w.name}:{w.batch} {w.label} built, {timed(cache)}; {left():.0f} s left", flush=True)
    return found, failed


def all_rows(todo: Sequence[Row], args, folder: Path, device: str) -> int:
    """Measures all rows; returns the exit status: PARTLY if the time ended before the last row, 1 if an engine of ours
    failed.
    """
    begun, kept = time.monotonic(), dict[str, np.ndarray]()
    data: dict[str, Any] = hardware.header(current()) | {"what": __doc__, "small": args.small, "rows": [], "left_out": []}
    with processes.pool(min(12, os.cpu_count() or 1)) as pool:
        waiting = begin(todo if "predicted" in args.plans else [], device, folder, pool, args.judge)
        for row in todo:
            if time.monotonic() - begun > args.seconds:
                data["left_out"].append(f"{row.name}:{row.batch}")
                continue
            engines, failed = engines_of(row, waiting, folder, args, lambda: args.seconds - (time.monotonic() - begun))
            with ExitStack() as stack:
                found = measure(row, engines, folder, args, kept, stack)
            data["rows"].append(found | {"failed": failed | found["failed"]} | timed(args.cache or folder / "timings.jsonl"))
            print(*hardware.networks({"rows": data["rows"][-1:]}), sep="\n", flush=True)
            hardware.write(args.out, data)
            if args.outputs:
                np.savez(args.outputs, **kept)  # type: ignore[arg-type]
        pool.shutdown(cancel_futures=True)
    hardware.write(args.out, data)
    ours_failed = any(label.endswith(("_predicted", "_measured")) for row in data["rows"] for label in row["failed"])
    return 1 if ours_failed else PARTLY if data["left_out"] else 0


def main() -> int:
    args, begun = arguments(), time.monotonic()
    try:
        todo = [row_of(item, args.kinds) for item in ([f"{SMALL}:1"] if args.small else args.networks)]
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.judge_kept:
        judge_kept(args.judge_kept, args.out, args.folder)
        return 0
    if not args.build_only and (why := why_no_gpu()):
        print(f"bench_networks needs a GPU: {why}", file=sys.stderr)
        return 1
    if args.warm:
        for row in todo:
            Theirs(row.name, row.batch, row.compiled)
        return 0
    with tempfile.TemporaryDirectory() as temp:
        folder = args.folder or Path(temp)
        folder.mkdir(parents=True, exist_ok=True)
        if not args.build_only:
            return all_rows(todo, args, folder, hardware.named_like(current().title))
        with processes.pool(os.cpu_count() or 1) as pool:
            failed: dict[str, str] = {}
            done = [e for w, f in begin(todo, args.build_only, folder, pool).items() for e in built(w, f.result, failed)]
        print(f"{len(done)} engines built in {time.monotonic() - begun:.0f} s", *failed.values(), sep="\n", flush=True)
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
