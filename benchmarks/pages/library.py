"""ResNet-50, pruned to 2:4 and planned with predicted times: the gain of 2:4 beside the estimate of a library's kernels.

python -m benchmarks.pages.library [--batches 64] [--devices a100,rtx4090,...]
"""

import tempfile
from pathlib import Path

import click
import onnx

from benchmarks.light import light, open_batch
from gpu_runtime import pipeline


@click.command()
@click.option("--batches", default="64", show_default=True)
@click.option("--devices", default="a100,rtx4090,l4,h200,b200", show_default=True)
def main(batches: str, devices: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(open_batch(light("light_resnet50")), Path(folder) / "resnet50.onnx")
        counts = [int(n) for n in batches.split(",")]
        plans = pipeline.plan(Path(folder) / "resnet50.onnx", devices.split(","), batches=counts, sparsity="force")
    click.echo(str(plans), nl=False)


if __name__ == "__main__":
    main()
