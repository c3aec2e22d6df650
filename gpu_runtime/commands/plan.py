"""`gpu-runtime plan MODEL --devices`: one model on several GPUs."""

from __future__ import annotations

import json

import click

from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import parse_shapes, risk_option
from gpu_runtime.commands.progress import listening


@click.command("plan", short_help="Plan a model for several GPUs, side by side.")
@click.argument("model", type=click.Path())
@click.option("--devices", required=True, metavar="NAMES", help="Names with commas: a100,l4,h100,h200,rtx4090.")
@click.option("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="enable", show_default=True)
@click.option("--shapes", default="", metavar="SIZES", help="Sizes of dynamic inputs: input:1x3x224x224[,other:...].")
@risk_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan_command(model: str, devices: str, sparsity: str, shapes: str, risk: float, as_json: bool) -> None:
    """Plan MODEL for several GPUs with predicted times: which layers go sparse where, and why they differ."""
    sizes = parse_shapes(shapes)
    progress = listening()
    from cuda_kernels import device
    from gpu_runtime.explain import side_by_side
    from gpu_runtime.pipeline import compare
    from gpu_runtime.runtime.plan_record import Outlook
    from tactics import codec

    names = [name.strip() for name in devices.split(",")]
    try:
        names = [device.named(name).name for name in names]
    except ValueError as e:
        raise click.UsageError(f"--devices: {e}") from None
    plans = compare(model, names, sparsity=sparsity, shapes=sizes, risk=risk, progress=progress)
    progress.end()
    data = [codec.to_json(Outlook, p, defaults=True) for p in plans]
    say(json.dumps(data, indent=1) if as_json else side_by_side.text(plans), nl=as_json)
