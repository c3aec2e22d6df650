"""The experiments of `make gpu` on a GPU, by priority, each in a process of its own, in under nine minutes a call.

    python -m benchmarks.gpu [--out FOLDER] [--seconds 530] [--rows right,layers,...] [--small] [--list]

ROWS is the table. A row that hangs or dies loses only itself. summary.json says of each how it ended and with which kernels: a
row that is answered for the kernels of now is skipped, so a second call goes on where the first ended. `--list` prints the
table with the answered rows. Kernels that `make gpu-pack` compiled are taken; a row that compiles others says so.

Results go to benchmarks/results/GPU. `--small`: few tactics, layers and tests; always so on the emulated driver
(`python -m tests.emulated_driver python -m benchmarks.gpu`). Such results say that they are no hardware's, and are refused
where hardware's are read (benchmarks/hardware.py). Nothing is installed, and nothing but this machine is needed.
"""

import argparse
import importlib.util
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import hardware
from benchmarks.processes import ROOT, program, run
from cuda_kernels import files
from cuda_kernels.compile import compile_many, source_hash
from cuda_kernels.device import Device, current, why_no_gpu
from tactics.measure import timing

GRACE_S = 3.0  # the seconds of a row's time that its process keeps to write its file and end
LEAST = 0.5  # the share of a row's time that has to be left when it begins


class Row(NamedTuple):
    """An experiment. `seconds`: the most that it takes; `decides`: the question that it answers; `file`: its result; `needs`:
    names in NEEDS; `words`: the arguments of `python -m`, with {out} for the file, {folder} for its folder, {seconds} for the
    time; `small`: more arguments for --small.
    """

    number: str
    name: str
    seconds: int
    decides: str
    file: str
    needs: tuple[str, ...]
    words: str
    small: str = "--small"


IN_TIME = "--out {out} --seconds {seconds}"
BUILDS = "benchmarks.bench_networks --out {out} --seconds {seconds} --cache {folder}/timings.jsonl --plans predicted,measured"
# By priority. The rows of the first call come to 530 s where none needs all of its time.
ROWS = (
    Row("0", "right", 60, "are changed kernels right", "right.json", (), f"benchmarks.experiments.right {IN_TIME}"),
    Row("1", "layers", 110, "where 2:4 pays, by how much", "compute_bound.json", (),
        f"benchmarks.experiments.layers {IN_TIME}"),
    Row("3", "measured", 250, "the promise: a plan of measured times", "measured.json", (),
        f"{BUILDS} --tuning 85 resnet50:32:dense,sparse"),
    Row("6", "early", 40, "the time that no layer takes", "early.json", (), f"benchmarks.experiments.early {IN_TIME}"),
    Row("2", "peers", 120, "the honest ceiling", "peers.json", ("torch",), f"benchmarks.experiments.peers {IN_TIME}"),
    Row("1", "untimed", 70, "tactics that prices prefer untimed", "untimed.json", (),
        f"benchmarks.experiments.changed {IN_TIME} untimed"),
    Row("5", "batches", 60, "gains in networks", "batches.json", (),
        "benchmarks.bench_networks --out {out} --seconds {seconds} resnet50:128 vgg19:32 vae_decoder:1 resnet50:256 realesr:1 "
        "resnet50:8 vgg19:128 vae_decoder:4 resnet50:32 vgg19:1 resnet50:1"),
    Row("7", "facts", 40, "what the end of a tile can reach", "facts.json", (), f"benchmarks.gpu_facts {IN_TIME}"),
    Row("8", "counters", 40, "what warps wait for", "counters.json", ("ncu",), f"benchmarks.experiments.counters {IN_TIME}"),
    Row("4", "measured-1", 80, "plans at batch 1", "measured_1.json", (), f"{BUILDS} --tuning 50 resnet50:1:dense"),
    Row("4", "ends-1", 40, "ends at batch 1", "ends_1.json", (), f"benchmarks.experiments.changed {IN_TIME} ends-1"),
    Row("5", "int8", 40, "gains of INT8 in networks", "int8.json", (),
        "benchmarks.bench_networks --out {out} --seconds {seconds} --ours-only resnet50_int8:32 resnet50:32 resnet50_int8:1 "
        "resnet50:1"),
    Row("5", "known", 150, "gains over PyTorch; errors", "bench_networks.json", (),
        "benchmarks.bench_networks --out {out} --seconds {seconds} --judge --kinds dense tv_efficientnet_b0:32 "
        "tv_efficientnet_b0:1 tv_convnext_tiny:32 tv_convnext_tiny:1 tv_mobilenet_v3_large:32 tv_mobilenet_v3_large:1 "
        "timm_mixnet_s:32 tv_regnet_y_400mf:32 timm_poolformer_s12:32 timm_fastvit_t8:32 timm_nfnet_l0:32 tv_resnext50:32 "
        "timm_mobileone_s0:32 timm_repvgg_a0:32"),
    Row("9", "tests", 160, "right on hardware", "tests.json", (), f"benchmarks.experiments.hardware_tests {IN_TIME}"),
    Row("9", "changed", 90, "prices of changed kernels", "changed.json", (), f"benchmarks.experiments.changed {IN_TIME}"),
    Row("9", "sanitizer", 150, "no race, no stray access", "sanitizer.json", ("compute-sanitizer",),
        f"benchmarks.experiments.hardware_tests {IN_TIME} sanitizer"),
    Row("10", "compiled", 240, "torch.compile; other measured builds", "compiled.json", ("torch",),
        f"{BUILDS} --tuning 60 --kinds dense,compiled resnet50:32 tv_efficientnet_b0:32 tv_convnext_tiny:32"),
    Row("", "networks", 110, "small trained networks, measured", "networks.json", (), f"benchmarks.gpu_networks {IN_TIME}"),
    Row("", "conv", 150, "ResNet-50's layers beside cuDNN", "conv.json", ("torch",),
        f"benchmarks.bench_conv {IN_TIME} --cache {{folder}}/timings.jsonl", ""),
    Row("", "operators", 60, "operators beside PyTorch's", "operators.json", ("torch",),
        f"benchmarks.experiments.operators {IN_TIME}"),
)  # fmt: skip


# ---- the requirements of rows


def _no_torch() -> str:
    if timing.is_emulated():
        return "cuDNN is machine code, which the emulated driver cannot run"
    return "" if importlib.util.find_spec("torch") else "it needs PyTorch with CUDA and cuDNN: pip install torch"


def _no_program(name: str) -> str:
    if timing.is_emulated():
        return f"{name} needs NVIDIA's driver"
    return "" if program(name) else f"{name} is neither on PATH nor in /usr/local/cuda*/bin"


NEEDS: dict[str, Callable[[], str]] = {  # need -> a function that says why it is not there, or ""
    "torch": _no_torch,
    "ncu": lambda: _no_program("ncu"),
    "compute-sanitizer": lambda: _no_program("compute-sanitizer"),
}


def why_left_out(row: Row) -> str:
    """Says why a row cannot run here; "" if it can."""
    return next(filter(None, (NEEDS[need]() for need in row.needs)), "")


# ---- the results of rows


def summary_of(folder: Path) -> dict[str, Any]:
    """Returns the summary of all calls so far; {} before the first."""
    path = folder / "summary.json"
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return found if isinstance(found.get("rows"), dict) else {}


def is_answered(row: Row, summary: dict[str, Any], folder: Path, small: bool) -> bool:
    """Whether the row ended well with the present kernels, at this size."""
    entry = summary.get("rows", {}).get(row.name, {})
    same = entry.get("status") == "ok" and entry["kernels"] == source_hash() and entry["small"] == small
    return same and (folder / row.file).exists()


def listed(folder: Path, small: bool) -> Iterator[str]:
    """Yields the table of rows, each with its entry in the folder's summary."""
    summary = summary_of(folder)
    yield f"{'#':>3} {'row':11} {'s':>4}  {'decides':37} {'file':19} {'needs':18} state"
    for row in ROWS:
        entry = summary.get("rows", {}).get(row.name)
        state = "open" if entry is None else f"{entry['status']}, {entry['date'][:16]}"
        if entry is not None and entry["status"] == "ok" and not is_answered(row, summary, folder, small):
            state += ", of other kernels" if entry["small"] == small else ", at another size"
        yield f"{row.number:>3} {row.name:11} {row.seconds:4}  {row.decides:37} {row.file:19} {' '.join(row.needs):18} {state}"


# ---- all of them


def command(row: Row, folder: Path, seconds: float, small: bool) -> list[str]:
    given = {"out": folder / row.file, "folder": folder, "seconds": f"{max(1.0, seconds - GRACE_S):.0f}"}
    return [sys.executable, "-m", *(word.format(**given) for word in row.words.split()), *(row.small.split() if small else [])]


def kept() -> set[str]:
    """Returns the names of the cache's entries."""
    return {path.name for path in (files.cache_dir() / "kernels").glob("*/*.json")}


def names_of(entries: set[str]) -> str:
    """Returns a text with the number of cache entries of each kernel."""
    counts: Counter[str] = Counter()
    for name in entries:
        path = files.cache_dir() / "kernels" / name[:2] / name
        found = re.search(r"\.entry (\w+)", path.read_text()) if path.exists() else None
        counts[found[1] if found else "?"] += 1
    return ", ".join(f"{kernel} {count}" for kernel, count in sorted(counts.items()))


def compile_row(name: str, small: bool, out: Path, device: Device) -> int:
    """Compiles the kernels of a row that the cache does not have, on all cores (the row would compile one after the other);
    returns their number.
    """
    from benchmarks.experiments import pack

    todo = pack.missing(name, device, small, out)
    compile_many([(kernel, dict(values), device.sm) for kernel, values in todo])
    return 0


def one_row(row: Row, folder: Path, seconds: float, small: bool, packed: bool) -> dict[str, Any]:
    """Runs a row within its time; returns its entry of the summary."""
    begun, before = time.monotonic(), kept()
    own = [sys.executable, "-m", "benchmarks.gpu", "--compile", row.name, "--out", str(folder), *(["--small"] if small else [])]
    if not packed:
        code, text = run(own, seconds / 2)
        if code:
            print(text[-1500:], flush=True)
    code, text = run(command(row, folder, seconds - (time.monotonic() - begun), small), seconds - (time.monotonic() - begun))
    print(text[-6000:], flush=True)
    new = kept() - before
    if new:
        print(f"{row.name} compiled {len(new)} kernels: {names_of(new)}", flush=True)
    status = {None: "time limit", 0: "ok", 3: "partly: its time ended"}.get(code, f"failed ({code})")
    return ended(status, time.monotonic() - begun, small, len(new))


def ended(status: str, seconds: float, small: bool, compiled: int) -> dict[str, Any]:
    """Returns a row's entry of the summary."""
    facts = {"kernels": source_hash(), "small": small, "date": hardware.now()}
    return {"status": status, "seconds": round(seconds, 1), "compiled": compiled, **facts}


def all_rows(args: argparse.Namespace, folder: Path, small: bool) -> int:
    from benchmarks.experiments import pack

    begun, device = time.monotonic(), current()
    summary = hardware.header(device) | {"rows": summary_of(folder).get("rows", {})}
    try:
        unpacked, manifest = pack.unpack()
    except ValueError as e:  # without packed kernels rows compile theirs
        unpacked, manifest = 0, {}
        print(f"out/gpu is not used: {e}", flush=True)
    print(f"{summary['device']}; results go to {folder}", flush=True)
    print(f"{unpacked} kernels unpacked in {time.monotonic() - begun:.0f} s", flush=True)
    failed = []
    for row in ROWS:
        left = args.seconds - (time.monotonic() - begun)
        if row.name not in args.rows.split(","):
            continue
        if is_answered(row, summary, folder, small):
            print(f"==== {row.name} is answered: {row.file}", flush=True)
            continue
        why = why_left_out(row) or ("no time" if left < (15 if small else LEAST * row.seconds + GRACE_S) else "")
        if why:
            entry = ended(f"left out: {why}", 0.0, small, 0)
            print(f"==== {row.name} is left out: {why}", flush=True)
        else:
            seconds = left if small else min(row.seconds, left)
            print(f"==== {row.name}: {row.decides} (at most {seconds:.0f} s)", flush=True)
            entry = one_row(row, folder, seconds, small, row.name in manifest.get("rows", {}))
            failed += [row.name] if entry["status"].startswith("failed") else []
        summary["rows"][row.name] = entry
        hardware.write(folder / "summary.json", summary)
    print(f"==== {time.monotonic() - begun:.0f} s")
    print("\n".join(listed(folder, small)))
    return 1 if failed else 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/GPU)")
    parser.add_argument("--seconds", type=float, default=530.0, help="end before so much time is over (default: %(default)g)")
    parser.add_argument("--rows", default=",".join(row.name for row in ROWS), help="some of %(default)s")
    parser.add_argument("--small", action="store_true", help="few layers, tactics and tests; so on the emulated driver")
    parser.add_argument("--list", action="store_true", help="print the table with what is answered, and stop")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # the child processes
    args = parser.parse_args(argv)
    unknown = set(args.rows.split(",")) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"--rows: unknown {', '.join(sorted(unknown))}: expected some of {', '.join(row.name for row in ROWS)}")
    if not args.seconds > 0:
        parser.error(f"--seconds: expected a positive number, got {args.seconds:g}")
    return args


def main(argv: list[str] | None = None) -> int:
    args, why = arguments(argv), why_no_gpu()
    if args.list and (why or args.out):
        print("\n".join(listed(args.out or hardware.DEFAULT / hardware.NEWEST, args.small)))
        return 0
    if why:
        print(f"`make gpu` needs a CUDA GPU of compute capability 8.0 or newer and its driver. Here: {why}", file=sys.stderr)
        return 1
    small = args.small or timing.is_emulated()
    folder = (args.out or (ROOT / "out" / "emulated" if timing.is_emulated() else hardware.folder_of(current()))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.list:
        print("\n".join(listed(folder, small)))
        return 0
    return compile_row(args.compile, small, folder, current()) if args.compile else all_rows(args, folder, small)


if __name__ == "__main__":
    sys.exit(main())
