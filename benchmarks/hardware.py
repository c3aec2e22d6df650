"""Results of `make gpu` on a GPU, and the guard that nothing else is taken for one.

python -m benchmarks.hardware [FOLDER or, of benchmarks/results, GPU]      the measurements; refused if they were emulated
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from cuda_kernels import files
from cuda_kernels.device import Device
from tactics.measure import timing

DEFAULT = Path(__file__).parent / "results"
NEWEST = "h200"  # the GPU whose results are shown where none is named
KNOWN = {"h200": "H200", "h100": "H100", "a100": "A100"}  # named devices, and the part of a GPU's title that tells them
JUDGED = "judged elsewhere: error to onnxruntime, equal top-1, images"  # bench_networks --judge-kept


def now(timespec: str = "seconds") -> str:
    return datetime.now(UTC).isoformat(timespec=timespec)


def named_like(title: str) -> str:
    """Returns the named device by which plans for a GPU with this title are predicted."""
    return next((name for name, part in KNOWN.items() if part in title), "h100")


def folder_of(device: Device) -> Path:
    """Returns the folder of the GPU's results: its name among the known ones, else its title."""
    known = named_like(device.title)
    return DEFAULT / (known if KNOWN[known] in device.title else re.sub(r"\W+", "_", device.title.lower()))


def header(device: Device) -> dict[str, Any]:
    """Returns the first entries of each result: the GPU, the driver and the date."""
    driver, emulated = timing.driver_version(), timing.is_emulated()
    note = "ON AN EMULATED DRIVER, no hardware: " if emulated else ""
    return {"device": f"{note}{device}", "driver": driver, "emulated": emulated, "date": now()}


def write(path: Path, data: dict[str, Any]) -> None:
    files.write(path, json.dumps(data, indent=1, default=str).encode() + b"\n")


def read(path: Path) -> dict[str, Any]:
    """Reads a result that was measured on a GPU. ValueError for one of the emulated driver, or one that does not say."""
    try:
        data = json.loads(path.read_bytes())
    except ValueError as e:
        raise ValueError(f"{path}: expected a result of `make gpu`, got no JSON: {e}") from None
    if not isinstance(data, dict) or not isinstance(data.get("driver"), str) or type(data.get("emulated")) is not bool:
        raise ValueError(f"{path}: expected a result of `make gpu`, which says its driver; run `make gpu` again")
    if data["emulated"] or timing.names_emulated(data["driver"]):
        cure = "run `make gpu` on a machine with a GPU"
        raise ValueError(f"{path}: measured on the emulated driver {data['driver']}: its times are no hardware's; {cure}")
    return data


OURS = ("dense_predicted", "dense_measured", "sparse_predicted", "sparse_measured", "whole_predicted")
THEIRS = ("torch", "torch_compiled")
TITLES = ("dense", "dense m", "2:4", "2:4 m", "whole", "PyTorch", "compiled", "plan", "d/2:4", "gain", "error")


def networks(data: dict[str, Any]) -> Iterator[str]:
    """Yields the table of a result of benchmarks.bench_networks: our engines planned by predicted and by measured (m) times,
    beside PyTorch's two. `plan`: the sum of the fastest plan's layers; `d/2:4`: dense over 2:4, the best of each; `gain`: the
    faster of PyTorch's over ours; `error`: the largest beside onnxruntime, where outputs were judged. Columns without a number
    are left out.
    """
    rows = [numbers(row) for row in data["rows"]]
    wanted = [i for i in range(len(TITLES)) if any(of[i].strip() != "nan" for of in rows)]
    yield f"{'network':22} {'batch':>5} " + " ".join(f"{TITLES[i]:>8}" for i in wanted)
    for row, cells in zip(data["rows"], rows, strict=True):
        yield f"{row['network']:22} {row['batch']:5} " + " ".join(cells[i].replace("nan", "  -") for i in wanted)
        yield from (f"  FAILED {kind}: {why[:160]}" for kind, why in row.get("failed", {}).items())
        timed = f"{row.get('tactics timed', 0)} tactics of {row.get('problems', 0)} problems timed until then"
        for kind in (k for k in OURS if k.endswith("_measured") and "us" in row.get(k, ())):
            sums = f"plan {row[kind]['planned_us']:.1f} us, graph {row[kind]['us']:.1f}"
            yield f"  {kind}: built in {row[kind]['build_s']:.0f} s, {timed}; {sums}"
            for op, before, after in row[kind].get("replaced", ()):
                yield f"    {op}: another tactic than alone, the whole took {before:.1f}, then {after:.1f} us"


def numbers(row: dict[str, Any]) -> list[str]:
    """Returns a network's cells, in the order of TITLES."""
    us = {kind: row[kind]["us"] for kind in (*OURS, *THEIRS) if kind in row and "us" in row[kind]}
    ours = {kind: us[kind] for kind in OURS if kind in us}
    best = min(ours, key=ours.__getitem__, default="")
    dense, sparse, theirs = (min([us[k] for k in of if k in us], default=math.nan) for of in (OURS[:2], OURS[2:4], THEIRS))
    times = [us.get(kind, math.nan) for kind in (*OURS, *THEIRS)] + [row[best]["planned_us"] if best else math.nan]
    ratios = dense / sparse, theirs / us.get(best, math.nan)
    worst = max([e for e in (error(row[kind]) for kind in ours) if e == e], default=math.nan)
    return [f"{n:8.1f}" for n in times] + [f"{n:8.2f}" for n in ratios] + [f"{worst:8.1e}"]


def error(of: dict[str, Any]) -> float:
    """Returns the largest error of an engine's outputs beside onnxruntime's, relative to their range; NaN if not judged."""
    found = of.get(JUDGED, [of.get("error_to_onnxruntime")])[0]
    return found if isinstance(found, float) else math.nan


def right(data: dict[str, Any]) -> Iterator[str]:
    yield "right: " + ", ".join(f"{kernel} ({count} tactics)" for kernel, count in data.get("right", {}).items())


# The tables of rows whose module has none of its own for a result of theirs.
TABLES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "benchmarks.bench_networks": networks,
    "benchmarks.experiments.hardware_tests": lambda data: iter([data["last_line"]]),
    "benchmarks.experiments.right": right,
}


def tables() -> dict[str, Callable[[dict[str, Any]], Iterator[str]]]:
    """Returns a row's file -> the function that makes lines of it."""
    from benchmarks.gpu import ROWS

    modules = {row.file: row.words.split()[0] for row in ROWS if row.name != "operators"}  # printed as it runs
    return {file: TABLES.get(name) or import_module(name).table for file, name in modules.items()}


def shown(folder: Path) -> Iterator[str]:
    """Yields all results of a folder as lines. ValueError for a result that was not measured on hardware."""
    if (folder / "summary.json").exists():
        found = read(folder / "summary.json")
        yield f"{found['device']}, driver {found['driver']}, last call {found['date'][:16]}"
        yield from (f"{name}: {row['status']}, {row['seconds']} s" for name, row in found.get("rows", {}).items())
    for name, table in tables().items():
        if not (folder / name).exists():
            continue
        found = read(folder / name)
        if lines := list(table(found)):
            device = found["device"].partition(" (")[0]
            yield from ("", f"{name}: {device}, driver {found['driver']}, {found['date'][:16]}", *lines)
        if found.get("left_out"):
            yield f"left out: {', '.join(found['left_out'])}"


def main(argv: list[str]) -> int:
    folder = Path(argv[0] if argv else NEWEST)
    folder = folder if folder.exists() else DEFAULT / folder
    try:
        lines = list(shown(folder))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    if not lines:
        print(f"error: {folder}: expected results of `make gpu`, summary.json among them, found none", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
