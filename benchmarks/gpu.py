"""What `make gpu` runs: everything that needs a GPU, in under nine minutes, each part in a process of its own.

    python -m benchmarks.gpu [--out benchmarks/results] [--seconds 530] [--small] [--parts compile,tests,networks,...]

compile    all kernels of the parts below, those of every tactic that the networks' builds time among them, and the emulator
tests      pytest -m gpu: every tactic against the FP32 reference and the emulator, large shapes against a naive kernel
networks   whole networks, built with measured times: outputs beside the emulator's and onnxruntime's, times, sparsity tables
conv       benchmarks/bench_conv.py
sanitizer  the same small tactics under compute-sanitizer

A part that hangs or dies loses only itself: each writes OUT/<part>.json as it goes, and the summary says what happened.
Networks: those of benchmarks/digits, and of the folder GPU_RUNTIME_MODELS where it is set. `--small`: one network, few tactics
and tests; always so on the emulated driver (`python -m tests.emulated_driver python -m benchmarks.gpu`). Its results say that
they are no hardware's, and are refused where hardware's are read (benchmarks/hardware.py).
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import hardware
from cuda_kernels.compile import CompileError, compile_kernel
from cuda_kernels.device import Device, current, why_no_gpu
from tactics.launches import binaries
from tactics.measure import timing
from tactics.problems.convolution import ConvProblem
from tactics.problems.pointwise_ops import ACTIVATIONS
from tactics.problems.problem import Problem
from tactics.step import epilogue_values
from tactics.tactic import Tactic

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("compile", "tests", "networks", "conv", "sanitizer")
SHARE = {"compile": 90, "tests": 160, "networks": 110, "conv": 150, "sanitizer": 150}  # seconds at most, but for small runs
ALONE = "tests/driver/test_driver_sharing.py"  # asks how much of the GPU's memory is in use, whoever holds it
SMALL_TESTS = "naive_kernel and (residual_after or tail) or recorded_graph"
Variant = tuple[str, tuple[tuple[str, int], ...]]  # a kernel and its compile-time values


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


def variants(device: Device, small: bool, out: Path) -> list[Variant]:
    """Every kernel that the other parts load."""
    from benchmarks import bench_conv, gpu_networks
    from tests.problems import CONVS, pairs

    work: list[tuple[Problem, Sequence[Tactic]]] = gpu_networks.work(device, small, out)
    judged = [p for p in (*CONVS.values(), *(p for p, _ in work)) if isinstance(p, ConvProblem)]
    if not small:
        convs = [bench_conv.problem(name, 1) for name in bench_conv.SHAPES]
        work += [(p, [t]) for _, p, t in pairs(device)] + [(p, bench_conv.tactics(p, device)) for p in convs]
    wanted = [item for p, tactics in work for t in tactics for item in binaries(p, t)]
    plain = [{"ACT": act, "RES": residual} for act, residual in product(range(len(ACTIVATIONS)), range(3))]
    by_definition = [tuple(values.items()) for values in (*plain, *map(epilogue_values, judged))]
    return list(dict.fromkeys([("flush_l2", ()), *(("reference_conv", values) for values in by_definition), *wanted]))


def compile_part(out: Path, small: bool) -> int:
    """Every kernel that the other parts load, on all cores. A kernel that does not compile is a line of the result."""
    begun, device = time.monotonic(), current()
    wanted = variants(device, small, out)

    def one(item: Variant) -> str:
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
    data = {
        "kernels": len(wanted),
        "failed": failed,
        "seconds": kernels_s,
        "cores": os.cpu_count(),
        "emulator": emulator,
        "emulator_seconds": time.monotonic() - begun - kernels_s,
    }
    hardware.write(out / "compile.json", hardware.header(device) | data)
    print(f"{len(wanted)} kernels in {kernels_s:.1f} s, {len(failed)} failed; emulator: {emulator}")
    return 1 if failed or emulator != "built" else 0


def tests_part(out: Path, name: str, files: str, expression: str, seconds: float) -> int | None:
    """pytest over the gpu marker, by several processes where pytest-xdist is installed; its output's end goes into
    OUT/<name>.json."""
    options = ["-m", "gpu", "-k", expression, "-rs", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, "--durations=8"]
    begun, parallel = time.monotonic(), importlib.util.find_spec("xdist") is not None and files == "tests"
    runs = [[files, "-n", str(min(12, os.cpu_count() or 1)), f"--ignore={ALONE}"], [ALONE]] if parallel else [[files]]
    done = []
    for arguments in runs:
        done.append(run([*command, *arguments], max(1.0, seconds - (time.monotonic() - begun))))
    text = "".join(text for _, text in done)
    code = next((code for code, _ in done if code != 0), 0)
    lines = [[row for row in text.splitlines() if row.strip()][-1:] or [""] for _, text in done]
    data: dict[str, Any] = {"returncode": code, "timed_out": code is None, "output_tail": text[-20000:]}
    data |= {"last_line": "; ".join(line[0] for line in lines), "seconds": round(time.monotonic() - begun, 1)}
    hardware.write(out / f"{name}.json", hardware.header(current()) | data)
    print(text[-2500:] if code else data["last_line"], flush=True)
    return code


def why_left_out(name: str) -> str:
    """Why a part cannot run here, in words; an empty string where it can."""
    if name == "conv" and timing.is_emulated():
        return "cuDNN is machine code, which the emulated driver cannot run"
    if name == "conv" and importlib.util.find_spec("torch") is None:
        return "it needs PyTorch with CUDA and cuDNN: pip install torch"
    if name == "sanitizer" and timing.is_emulated():
        return "compute-sanitizer needs NVIDIA's driver"
    return ""


# ---- all of them


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=hardware.DEFAULT, help="folder of the results (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=530.0, help="stop before so much time is over (default: %(default)g)")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--small", action="store_true", help="one network, few tactics and tests; so on the emulated driver")
    parser.add_argument("--part", choices=("compile", "networks"), help=argparse.SUPPRESS)  # the child processes
    args = parser.parse_args(argv)
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    if not args.seconds > 0:
        parser.error(f"--seconds: expected a positive number, got {args.seconds:g}")
    return args


def one_part(name: str, out: Path, seconds: float, small: bool) -> tuple[int | None, str]:
    """(exit status or None at the time limit, what it printed)."""
    if name in ("tests", "sanitizer"):
        expression = "sanitizer" if name == "sanitizer" else SMALL_TESTS if small else "not sanitizer"
        return tests_part(
            out, name, "tests/driver/test_gpu.py" if small or name == "sanitizer" else "tests", expression, seconds
        ), ""
    if name == "conv":
        return run(
            [
                sys.executable,
                "-m",
                "benchmarks.bench_conv",
                "--seconds",
                str(seconds - 15),
                "--out",
                str(out / "conv.json"),
                "--cache",
                str(out / "timings.jsonl"),
            ],
            seconds,
        )
    own = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--part", name, "--seconds", str(max(1.0, seconds - 5))]
    return run([*own, *(["--small"] if small else [])], seconds)


def all_parts(args: argparse.Namespace, out: Path, small: bool) -> int:
    begun = time.monotonic()
    summary: dict[str, Any] = hardware.header(current()) | {"small": small, "parts": {}}
    print(f"{summary['device']}; results go to {args.out}", flush=True)
    parts = summary["parts"]
    for name in args.parts.split(","):
        left = args.seconds - (time.monotonic() - begun)
        why = why_left_out(name) or ("no time" if left < 15 else "")
        if why:
            parts[name] = {"status": f"left out: {why}", "seconds": 0}
            print(f"==== {name} is left out: {why}", flush=True)
            continue
        part_begun, seconds = time.monotonic(), left if small else min(SHARE[name], left)
        print(f"==== {name} (at most {seconds:.0f} s)", flush=True)
        code, text = one_part(name, out, seconds, small)
        if text:
            print(text[-7000:], flush=True)
        status = "time limit" if code is None else "ok" if code == 0 else f"failed ({code})"
        parts[name] = {"status": status, "seconds": round(time.monotonic() - part_begun, 1)}
        hardware.write(out / "summary.json", summary)
    hardware.write(out / "summary.json", summary)
    print("==== " + "; ".join(f"{name}: {p['status']}, {p['seconds']} s" for name, p in parts.items()))
    cannot = [name for name in parts if why_left_out(name)]
    return 0 if all(p["status"] == "ok" for name, p in parts.items() if name not in cannot) else 1


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    why = why_no_gpu()
    if why:
        print(f"`make gpu` needs a CUDA GPU of compute capability 8.0 or newer and its driver. Here: {why}", file=sys.stderr)
        return 1
    small = args.small or timing.is_emulated()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.part == "compile":
        return compile_part(out, small)
    if args.part == "networks":
        from benchmarks.gpu_networks import networks_part

        return networks_part(out, args.seconds, small)
    return all_parts(args, out, small)


if __name__ == "__main__":
    sys.exit(main())
