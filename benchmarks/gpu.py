"""What `make gpu` runs: everything that needs a GPU, in under nine minutes, each part in a process of its own.

    python -m benchmarks.gpu [--out benchmarks/results] [--seconds 530] [--parts compile,tests,networks,conv,sanitizer]

compile    all kernels of the parts below, in parallel, and the emulator
tests      pytest -m gpu: every tactic against the FP32 reference and the emulator, large shapes against a naive kernel
networks   whole networks, built with measured times: outputs beside the emulator's and onnxruntime's, times, sparsity tables
conv       benchmarks/bench_conv.py
sanitizer  the same small tactics under compute-sanitizer

A part that hangs or dies loses only itself: each writes OUT/<part>.json as it goes, and the summary says what happened.
Networks: those of benchmarks/digits, and of the folder GPU_RUNTIME_MODELS where it is set.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from cuda_kernels import files
from cuda_kernels.device import current, why_no_gpu
from gpu_runtime.runtime.findings import Solution, SparsityRecord
from tactics import codec

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("compile", "tests", "networks", "conv", "sanitizer")
SHARE = {"compile": 90, "tests": 160, "networks": 110, "conv": 150, "sanitizer": 150}  # seconds at most
DIGITS = ROOT / "benchmarks" / "digits"
# file: {input: shape} for dynamic sizes. Order: what is looked at first.
MODELS = {
    "resnet20_cifar10": {"input": (32, 3, 32, 32)},
    "super_resolution_10": {"input": (1, 1, 224, 224)},
    "realesr_animevideov3": {"input": (1, 3, 64, 64)},
    "squeezenet11_fp16": {},
}


def write(path: Path, data: dict) -> None:
    files.write(path, json.dumps(data, indent=1, default=str).encode() + b"\n")


def run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """(exit status or None at the time limit, output); the whole process group is ended at the limit."""
    with tempfile.TemporaryFile() as log:
        path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(ROOT)) if p)  # the emulated driver's comes first
        env = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code = process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, log.read().decode(errors="replace")


# ---- the parts; each runs in a process of its own


def compile_part(out: Path) -> int:
    """Every kernel that the other parts load, on all cores. A kernel that does not compile is a line of the result."""
    from concurrent.futures import ThreadPoolExecutor
    from itertools import product

    from benchmarks import bench_conv
    from cuda_kernels.compile import CompileError, compile_kernel
    from tactics.launches import launches
    from tactics.problems.pointwise_ops import ACTIVATIONS
    from tactics.step import Launch
    from tests.problems import pairs

    begun, device = time.monotonic(), current()
    convs = [bench_conv.problem(name, 1) for name in bench_conv.SHAPES]
    work = [(p, t) for _, p, t in pairs(device)] + [(p, t) for p in convs for t in bench_conv.tactics(p, device)]
    wanted = dict.fromkeys((s.kernel, s.values) for p, t in work for s in launches(p, t) if isinstance(s, Launch))
    by_definition = product(range(len(ACTIVATIONS)), range(3))
    wanted |= dict.fromkeys([("flush_l2", ()), *(("reference_conv", (("ACT", i), ("RES", r))) for i, r in by_definition)])

    def one(item) -> str:
        try:
            compile_kernel(item[0], dict(item[1]), device.sm)
            return ""
        except CompileError as e:
            return str(e)[:1000]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failed = {str(item): text for item, text in zip(wanted, pool.map(one, wanted), strict=True) if text}
    kernels_s = time.monotonic() - begun
    from cuda_kernels.launch import Emulated

    emulator = "built"
    try:
        Emulated(device)
    except Exception as e:  # the other parts go on without it
        emulator = f"{type(e).__name__}: {e}"[:1000]
    data = {"kernels": len(wanted), "failed": failed, "seconds": kernels_s, "cores": os.cpu_count(), "emulator": emulator}
    write(out / "compile.json", data | {"emulator_seconds": time.monotonic() - begun - kernels_s})
    print(f"{len(wanted)} kernels in {kernels_s:.1f} s, {len(failed)} failed; emulator: {emulator}")
    return 1 if failed or emulator != "built" else 0


def networks_part(out: Path, seconds: float) -> int:
    """Build, run, compare, time; the result is written after each network."""
    end = time.monotonic() + seconds
    folder = os.environ.get("GPU_RUNTIME_MODELS")
    todo = [(DIGITS / f"digits_{kind}.onnx", {"x": (n, 1, 8, 8)}, "enable") for kind in ("dense", "sparse") for n in (360, 1)]
    for name, shapes in MODELS.items() if folder else ():
        todo += [(Path(folder) / f"{name}.onnx", shapes, sparsity) for sparsity in ("disable", "force")]
    data = {"device": str(current()), "networks": [], "left_out": [], "errors": {}}
    data["note"] = "" if folder else "GPU_RUNTIME_MODELS is not set: only the networks of benchmarks/digits"
    for path, shapes, sparsity in todo:
        label = f"{path.stem} {sparsity} {' '.join('x'.join(map(str, s)) for s in shapes.values())}".strip()
        if time.monotonic() > end - 10:
            data["left_out"].append(label)
            continue
        try:
            if not path.exists():
                raise FileNotFoundError(path.name)
            data["networks"].append({"network": label} | network(path, shapes, sparsity, out / "timings.jsonl"))
            print(f"{label}: {line(data['networks'][-1])}", flush=True)
        except Exception as e:  # one network's failure leaves the others
            data["errors"][label] = f"{type(e).__name__}: {e}"[:2000]
            print(f"{label}: {data['errors'][label]}"[:400], flush=True)
        write(out / "networks.json", data)
    write(out / "networks.json", data)
    return 1 if data["errors"] or not data["networks"] else 0


def network(path: Path, shapes: dict, sparsity: str, cache: Path) -> dict:
    """One network: build with measured times, run, compare with the emulator and onnxruntime, time."""
    import gpu_runtime as gr

    with tempfile.TemporaryDirectory() as temp:
        pruned = Path(temp) / "pruned.onnx"
        options = {"save_pruned": pruned} if sparsity == "force" else {}
        begun = time.monotonic()
        engine = gr.build(path, sparsity=sparsity, shapes=shapes or None, timing_cache=cache, **options)
        row = {"build_s": time.monotonic() - begun, "timing": asdict(engine.record.timing)}
        row["plan"] = codec.to_json(Solution, engine.plan.solution, defaults=True)
        row["sparsity"] = codec.to_json(SparsityRecord, engine.sparsity, defaults=True)
        feeds = feeds_for(engine, path)
        with engine.context() as ctx:
            outputs = ctx.run(feeds)
            row["network_us"] = replay_us(ctx)
            layers = engine.plan.layers
            per_layer = ctx.profile(feeds, 10)
        row["layers"] = [
            {"name": la.name, "tactic": la.tactic_name, "planned_us": la.time_us,
             "profiled_us": round(statistics.median(times[i] for times in per_layer), 2)}
            for i, la in enumerate(layers)
        ]  # fmt: skip
        row["finite"] = all(bool(np.isfinite(v).all()) for v in outputs.values())
        try:
            with engine.context(device="emulator") as ctx:
                row["error_to_emulator"] = worst_error(outputs, ctx.run(feeds))
        except Exception as e:  # a comparison that is not to be had does not undo the measurement
            row["error_to_emulator"] = f"{type(e).__name__}: {e}"[:500]
        try:
            row["error_to_onnxruntime"] = worst_error(outputs, onnxruntime_run(pruned if pruned.exists() else path, feeds))
        except Exception as e:  # as above
            row["error_to_onnxruntime"] = f"{type(e).__name__}: {e}"[:500]
    if path.parent == DIGITS and "x" in feeds and len(feeds["x"]) == 360:
        with np.load(DIGITS / "heldout.npz") as heldout:
            row["accuracy"] = float((outputs["logits"].argmax(1) == heldout["y"]).mean())
    return row


def feeds_for(engine, path: Path) -> dict[str, np.ndarray]:
    """Random values in 0..1 for every input; for the digits, the held-out images."""
    rng = np.random.default_rng(0)
    feeds = {}
    for info in engine.inputs:
        dtype = {"fp16": np.float16, "fp32": np.float32}[info.dtype]
        feeds[info.name] = rng.random(info.shape, np.float32).astype(dtype)
    if path.parent == DIGITS:
        with np.load(DIGITS / "heldout.npz") as heldout:
            feeds["x"] = heldout["x"][: len(feeds["x"])].astype(feeds["x"].dtype)
    return feeds


def replay_us(ctx, count: int = 50) -> dict:
    """Median and quantiles of one replay of the context's graph, inputs already in place."""
    from tactics.measure.timing import quantiles

    gpu = ctx.gpu
    start, stop, times = gpu.cupy.cuda.Event(), gpu.cupy.cuda.Event(), []
    for i in range(count + 5):
        start.record(gpu.stream)
        ctx.replay()
        stop.record(gpu.stream)
        stop.synchronize()
        if i >= 5:
            times.append(1e3 * gpu.cupy.cuda.get_elapsed_time(start, stop))
    low, median, high = (round(v, 2) for v in quantiles(times))
    return {"us": median, "low_us": low, "high_us": high, "what": "one graph replay between two events, launch included"}


def worst_error(got: dict, expected: dict) -> float:
    """Largest difference over the expected range, the worst of the outputs."""
    errors = []
    for name, y in expected.items():
        y = np.asarray(y, np.float32)
        span = float(y.max() - y.min()) or 1.0
        errors.append(float(np.abs(np.asarray(got[name], np.float32).reshape(y.shape) - y).max()) / span)
    return max(errors)


def onnxruntime_run(path: Path, feeds: dict) -> dict:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def line(row: dict) -> str:
    """A network in one line."""

    def error(key):
        return f"{row[key]:.1e}" if isinstance(row[key], float) else "none"

    us = row["network_us"]["us"] if row["network_us"] else float("nan")
    picked, eligible = len(row["sparsity"]["picked"]), len(row["sparsity"]["eligible"])
    accuracy = f", accuracy {row['accuracy']:.4f}" if "accuracy" in row else ""
    return (
        f"{us:.1f} us (sum of layers {row['plan']['total_us']:.1f}), sparse {picked} of {eligible} eligible, "
        f"error to emulator {error('error_to_emulator')}, to onnxruntime {error('error_to_onnxruntime')}{accuracy}, "
        f"built in {row['build_s']:.1f} s"
    )


def tests_part(out: Path, name: str, expression: str, seconds: float) -> int | None:
    """pytest over the gpu marker; its output's end goes into OUT/<name>.json."""
    command = [sys.executable, "-m", "pytest", "tests", "-m", "gpu", "-k", expression, "-rs", "--tb=short",
               "-p", "no:cacheprovider", "--continue-on-collection-errors", "--durations=8"]  # fmt: skip
    begun = time.monotonic()
    code, text = run(command, seconds)
    last = [row for row in text.splitlines() if row.strip()][-1:] or [""]
    data = {"returncode": code, "timed_out": code is None, "last_line": last[0], "output_tail": text[-20000:]}
    write(out / f"{name}.json", data | {"seconds": round(time.monotonic() - begun, 1)})
    print(text[-2500:] if code else last[0], flush=True)
    return code


# ---- the driver


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seconds", type=float, default=530.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part", choices=("compile", "networks"), help=argparse.SUPPRESS)  # the child processes
    args = parser.parse_args(argv)
    why = why_no_gpu()
    if why:
        print(f"`make gpu` needs a CUDA GPU of compute capability 8.0 or newer and its driver. Here: {why}", file=sys.stderr)
        return 1
    wanted = args.parts.split(",")
    unknown = set(wanted) - set(PARTS)
    if unknown:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.part == "compile":
        return compile_part(out)
    if args.part == "networks":
        return networks_part(out, args.seconds)

    begun = time.monotonic()
    summary = {"device": str(current()), "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "parts": {}}
    print(f"{summary['device']}; results go to {args.out}", flush=True)
    for name in wanted:
        left = args.seconds - (time.monotonic() - begun)
        if left < 15:
            summary["parts"][name] = {"status": "left out: no time", "seconds": 0}
            continue
        part_begun, seconds = time.monotonic(), min(SHARE[name], left)
        print(f"==== {name} (at most {seconds:.0f} s)", flush=True)
        if name == "tests":
            code = tests_part(out, name, "not sanitizer", seconds)
        elif name == "sanitizer":
            code = tests_part(out, name, "sanitizer", seconds)
        else:
            own = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--part", name, "--seconds", str(seconds - 5)]
            bench = [sys.executable, "-m", "benchmarks.bench_conv", "--seconds", str(seconds - 15),
                     "--out", str(out / "conv.json"), "--cache", str(out / "timings.jsonl")]  # fmt: skip
            code, text = run(bench if name == "conv" else own, seconds)
            print(text[-7000:], flush=True)
        status = "time limit" if code is None else "ok" if code == 0 else f"failed ({code})"
        summary["parts"][name] = {"status": status, "seconds": round(time.monotonic() - part_begun, 1)}
        write(out / "summary.json", summary)
    write(out / "summary.json", summary)
    print("==== " + "; ".join(f"{name}: {p['status']}, {p['seconds']} s" for name, p in summary["parts"].items()))
    return 0 if all(p["status"] == "ok" for p in summary["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
