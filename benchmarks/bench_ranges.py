"""One engine for a range of batches beside an engine for each: time of the build, weights, memory, and the plans that stay.

    python -m benchmarks.bench_ranges [--range 1,8,32] [--device h200,rtx4090] [--json FILE] [NAME ...]

NAME is digits, a light network (benchmarks.light) or a topology (benchmarks.topologies), opened to any batch. Each build has a
process of its own, as a command has, so that none profits from another's caches; its CPU seconds are the whole process's.
Times of plans are predicted.
"""

import io
import json
import time
from pathlib import Path
from typing import Any

import click
import onnx

from benchmarks import light, processes, topologies

NAMES = ("digits", "light_resnet50", "tv_mobilenet_v3_large", "tv_efficientnet_b0", "tv_convnext_tiny", "timm_repvgg_a0")
DIGITS = Path(__file__).parent / "digits" / "digits_sparse.onnx"
MIB = 1 << 20


def built(name: str, device: str, batches: tuple[int, ...], alike: bool = False) -> dict[str, Any]:
    """Builds an engine for one batch, or for a range of three; returns the seconds and bytes that the build took, and the bytes
    and plans that the engine holds.
    """
    import gpu_runtime as gr
    from gpu_runtime.building import chosen_sizes as choice
    from gpu_runtime.explain import points

    made = onnx.load(DIGITS) if name == "digits" else light.light(name) if name in light.NAMES else topologies.filled(name)
    proto, shapes = light.at_batch(made, 1)
    asked = {x: tuple((n, *image) for n in batches) if batches[1:] else (*batches, *image) for x, (_, *image) in shapes.items()}
    engine = gr.build(proto, device=device, sparsity="enable", shapes=asked, batch_invariant=alike)
    stream = io.BytesIO()
    engine.save(stream)
    found = points.points(engine.record)
    return {
        "seconds": time.process_time(),
        "file_bytes": len(stream.getvalue()),
        "weight_bytes": engine.record.weight_bytes,
        "arena_bytes": max(p.arena_bytes for p in found),
        "us": {p.batch: p.us for p in found},
        "tried": [c.batch for c in choice.cells(choice.asked(asked))],
    }


def compared(name: str, device: str, batches: tuple[int, ...]) -> dict[str, Any]:
    """Returns the results (`built`) of one engine for the range, of the same with one tactic per layer for all batches, and of
    an engine for each batch that the range planned.
    """
    with processes.pool(1, 1) as pool:
        whole = pool.submit(built, name, device, batches).result()
        alike = pool.submit(built, name, device, batches, True).result()
        singles = {n: pool.submit(built, name, device, (n,)).result() for n in whole["tried"]}
    return {"network": name, "device": device, "range": whole, "alike": alike, "singles": singles}


def row(found: dict[str, Any]) -> list[str]:
    whole, alike, singles = found["range"], found["alike"], found["singles"]
    kept = {n: singles[n] for n in whole["us"]}
    separate = sum(s["weight_bytes"] for s in kept.values())
    cost = sum(alike["us"].values()) / sum(us for n, us in whole["us"].items() if n in alike["us"]) - 1
    return [
        found["network"],
        found["device"],
        f"{', '.join(map(str, whole['us']))} of {len(singles)}",
        f"{whole['seconds']:.0f} s",
        f"{sum(s['seconds'] for s in singles.values()):.0f} s",
        f"{whole['weight_bytes'] / max(s['weight_bytes'] for s in kept.values()):.2f}",
        f"{separate / max(s['weight_bytes'] for s in kept.values()):.2f}",
        f"{whole['arena_bytes'] / MIB:.1f}",
        f"{sum(s['arena_bytes'] for s in kept.values()) / MIB:.1f}",
        f"{100 * cost:.1f} %" if alike["us"].keys() == whole["us"].keys() else "other plans",
    ]


HEADER = ["network", "GPU", "plans", "build", "separate", "weights", "separate", "arena", "separate", "batch-\ninvariant"]
LEGEND = (
    "Plans: the batches that stay, of how many tried. Build: CPU time of the range, and of an engine for each batch tried. "
    "Weights: of the range, and of an engine for each plan that stays, by the largest of these. Arena: MiB of a context of the "
    "range, and of one for each plan. Batch-invariant: what one tactic per layer adds to the sum of the plans' times."
)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--range", "wanted", default="1,8,32", show_default=True, help="The smallest, optimal and largest batch.")
@click.option("--device", "devices", default="h200,rtx4090", show_default=True)
@click.option("--json", "target", type=click.Path(), help="Write all numbers to this file.")
def main(names: tuple[str, ...], wanted: str, devices: str, target: str | None) -> None:
    from gpu_runtime.text import table, wrap

    batches = tuple(map(int, wanted.split(",")))
    found = []
    for name in names or NAMES:
        for device in devices.split(","):
            found.append(compared(name, device, batches))
            click.echo(" ".join(row(found[-1])).replace("\n", ""), err=True)
    if target:
        Path(target).write_text(json.dumps(found, indent=1) + "\n")
    lines = table(HEADER, [row(f) for f in found], right=range(3, len(HEADER)))
    click.echo("\n".join([*lines, "", *wrap(f"Batches {wanted.replace(',', ', ')}; times are predicted. {LEGEND}")]))


if __name__ == "__main__":
    main()
