"""Results of `make gpu` on a GPU, and the guard that nothing else is taken for one.

python -m benchmarks.hardware [FOLDER or, of benchmarks/results, GPU]      what was measured; refused where it was emulated
"""

import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cuda_kernels import files
from cuda_kernels.device import Device
from tactics.measure import timing

DEFAULT = Path(__file__).parent / "results"
NEWEST = "h200"  # the GPU whose results are shown where none is named
KNOWN = {"h200": "H200", "h100": "H100", "a100": "A100"}  # named devices, and the part of a GPU's title that tells them
JUDGED = "judged elsewhere: error to onnxruntime, equal top-1, images"  # bench_networks --judge-kept


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def named_like(title: str) -> str:
    """The named device that plans for a GPU of this title are predicted for."""
    return next((name for name, part in KNOWN.items() if part in title), "h100")


def folder_of(device: Device) -> Path:
    """Of the GPU's results: its name among the known ones, else its title."""
    known = named_like(device.title)
    return DEFAULT / (known if KNOWN[known] in device.title else re.sub(r"\W+", "_", device.title.lower()))


def header(device: Device) -> dict[str, Any]:
    """How each result begins: what it was measured on."""
    driver, emulated = timing.driver_version(), timing.is_emulated()
    note = "ON AN EMULATED DRIVER, no hardware: " if emulated else ""
    return {"device": f"{note}{device}", "driver": driver, "emulated": emulated, "date": now()}


def write(path: Path, data: dict[str, Any]) -> None:
    files.write(path, json.dumps(data, indent=1, default=str).encode() + b"\n")


def read(path: Path) -> dict[str, Any]:
    """A result that was measured on a GPU. ValueError for one of the emulated driver, and for one that does not say."""
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


def whole_networks(folder: Path) -> Iterator[str]:
    """The table of benchmarks.bench_networks: our engines, the prediction of the fastest, and the faster of PyTorch's two."""
    kinds = ("dense_predicted", "sparse_predicted", "whole_predicted", "torch", "torch_compiled")
    titles = ("dense", "2:4", "whole", "PyTorch", "compiled")
    yield f"{'network':24} {'batch':>5} {' '.join(f'{t:>8}' for t in titles)} {'predicted':>9} {'gain':>6} {'error':>8}"
    for row in read(folder / "bench_networks.json")["rows"]:
        times = " ".join(f"{row[kind]['us']:8.1f}" if kind in row else f"{'-':>8}" for kind in kinds)
        ours = [row[kind] for kind in kinds[:3] if kind in row]
        best = min(ours, key=lambda of: of["us"])
        theirs = [row[kind]["us"] for kind in kinds[3:] if kind in row]
        gain = f"{min(theirs) / best['us']:.2f}x" if theirs else "-"
        judged = [of[JUDGED][0] for of in ours if JUDGED in of]
        rest = f"{best['planned_us']:9.1f} {gain:>6} {f'{max(judged):.1e}' if judged else '-':>8}"
        yield f"{row['network']:24} {row['batch']:5} {times} {rest}"


def main(argv: list[str]) -> int:
    folder = Path(argv[0]) if argv else DEFAULT
    folder = folder if folder.exists() else Path(__file__).parent / "results" / folder
    try:
        if (folder / "bench_networks.json").exists():
            found = read(folder / "bench_networks.json")
            print(f"{found['device']}, driver {found['driver']}, {found['date']}; microseconds of a graph's replay")
            print("\n".join(whole_networks(folder)))
            if not (folder / "summary.json").exists():
                return 0
        summary = read(folder / "summary.json")
        networks = read(folder / "networks.json") if (folder / "networks.json").exists() else {"networks": []}
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{summary['device']}, driver {summary['driver']}, {summary['date']}")
    for name, part in summary["parts"].items():
        print(f"{name}: {part['status']}, {part['seconds']} s")
    from benchmarks.gpu_networks import line

    for row in networks["networks"]:
        print(f"{row['network']}: {line(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
