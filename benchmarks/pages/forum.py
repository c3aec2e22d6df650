"""The case that this project began with: two 1x1 convolutions with 2:4 weights, and why each runs sparse or dense.

    python -m benchmarks.pages.forum [--device a10]

Builds benchmarks.networks' `forum` and prints the complete reason for both, from the engine alone, and the cost of their
formats: at 288 channels hwc16 and hwc8 place every element at the same address, so a conversion between them is free.
"""

import tempfile
from pathlib import Path

import click
import onnx

import gpu_runtime as gr
from benchmarks.networks import forum
from gpu_runtime.explain import what_if, wording

LAYERS = ("conv160", "conv288")


def account(device: str) -> str:
    """Returns the printed text for a device."""
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(forum(), Path(folder) / "forum.onnx")
        gr.build(Path(folder) / "forum.onnx", sparsity="enable", device=device).save(Path(folder) / "forum.engine")
        record = gr.load(Path(folder) / "forum.engine").record
    text = wording.explain_text(record, wording.rows_of(record, LAYERS))
    found = what_if.what_if(record, {"conv288": "hwc16->hwc8"})
    return f"{text}\n{what_if.text(record, found)}"


@click.command()
@click.option("--device", default="a10", show_default=True)
def main(device) -> None:
    click.echo(account(device), nl=False)


if __name__ == "__main__":
    main()
