"""The cost of a limit of the memory for activations: plans whose batch runs in pieces that fit, beside plans without a limit.

    python -m benchmarks.bench_memory [--device h200,l4] [--batch 32] [--share 0.5,0.25] [--table] [NAME ...]

NAME: as benchmarks.bench_plan has it; without, four known networks. `--share`: the allowed bytes as shares of the plan's bytes
without a limit. Rows are added to benchmarks/results/memory.jsonl, and none is made again. `--table` prints the file. Weights
are not pruned, and no plan is sparse.
"""

import tempfile
import time
import warnings
from functools import partial
from itertools import product
from pathlib import Path

import click

import gpu_runtime as gr
from benchmarks.bench_pieces import EIGHT, MIB, Row, key, opened, shown
from gpu_runtime.errors import ModelError
from gpu_runtime.text import table

RESULTS = Path(__file__).parent / "results" / "memory.jsonl"


def rows(name: str, batch: int, device: str, shares: list[float]) -> list[Row]:
    """Returns a row without a limit, then one for each share: microseconds, bytes of the arena, images of a piece, seconds of
    the build.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, shapes = opened(name, batch, Path(folder))
        found: list[Row] = []
        for share in (None, *shares):
            begun, allowed = time.process_time(), None if share is None else round(share * found[0]["arena"])
            row: Row = {"network": name, "batch": batch, "device": device, "share": share}
            try:
                engine = gr.build(model, device=device, shapes=shapes, activations=allowed)
            except ModelError as e:
                found.append(row | {"error": str(e)})
                continue
            images = [layer.images[1] for layer in engine.plan.layers if layer.images]
            row |= {
                "us": engine.plan.solution.total_us,
                "arena": engine.plan.memory.activation_bytes,
                "images": max([0, *images]),
            }
            found.append(row | {"s": time.process_time() - begun})
    return found


def text(found: list[Row]) -> list[str]:
    header = ["network", "batch", "GPU", "MiB allowed", "MiB", "us", "cost", "images"]
    free, made = dict[tuple[str, int, str], Row](), []
    for row in found:
        whole = free.setdefault(key(row), row)  # the row without a limit is the first
        allowed = "any" if row["share"] is None else f"{row['share'] * whole['arena'] / MIB:.1f}"
        numbers = ["none fits", "-", "-", "-"]
        if "error" not in row:
            cost = f"{100 * (row['us'] / whole['us'] - 1):.1f} %"
            numbers = [f"{row['arena'] / MIB:.1f}", f"{row['us']:.0f}", cost, str(row["images"] or "-")]
        made.append([*map(str, key(row)), allowed, *numbers])
    return table(header, made, right=(1, *range(3, len(header))))


@click.command()
@click.argument("names", nargs=-1)
@click.option("--device", "devices", default="h200,l4", show_default=True)
@click.option("--batch", "batches", default="32", show_default=True)
@click.option("--share", "shares", default="0.75,0.5,0.25", show_default=True)
@click.option("--table", "only_table", is_flag=True, help="Print the file's rows; make none.")
def main(names: tuple[str, ...], devices: str, batches: str, shares: str, only_table: bool) -> None:
    cases = list(product(names or EIGHT[:4], map(int, batches.split(",")), devices.split(",")))
    make = partial(rows, shares=[float(share) for share in shares.split(",")])
    click.echo("\n".join(text(shown(RESULTS, cases, make, only_table))))


if __name__ == "__main__":
    main()
