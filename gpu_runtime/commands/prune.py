"""`gpu-runtime prune MODEL -o SPARSE`: the same model with 2:4 weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import checked_device, labels_option, parse_shapes, quiet_option
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.targets import check_targets, read_arrays, split_labels, write_all

if TYPE_CHECKING:
    from gpu_runtime.pruning.benefit import Forecast


@click.command("prune", short_help="Prune the weights of an ONNX model to 2:4.")
@click.argument("model", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Write the pruned model to this file.")
@click.option(
    "--layers",
    multiple=True,
    metavar="NAMES",
    help="Prune these only: names of layers or weights, with commas, and "
    "* and ? as in a shell; auto: the layers that the plan for --device runs sparse. Default: all.",
)
@click.option("--skip", multiple=True, metavar="NAMES", help="Leave these layers or weights dense; names as for --layers.")
@click.option(
    "--branches",
    type=click.Choice(["common", "separate"]),
    default="common",
    show_default=True,
    help="Branches that may run as one convolution: common gives them one pattern, so that the merged convolution is 2:4; "
    "separate prunes each by itself, which keeps more of its weights.",
)
@click.option(
    "--permute",
    is_flag=True,
    help="Reorder channels so that pruning loses less; the new order alone does not change the outputs.",
)
@click.option(
    "--calibration",
    type=click.Path(),
    metavar="FILE.npz",
    help="Inputs by name, several samples along their first axes, on which onnxruntime measures the effect of pruning.",
)
@click.option(
    "--min-snr",
    type=float,
    metavar="DB",
    help="With --calibration: leave the worst layers dense until the outputs have this signal-to-noise ratio.",
)
@click.option(
    "--max-drop",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="With --calibration: leave the worst layers dense until top-1 changes for at most this share of samples; with "
    "--labels, until accuracy falls by at most this many points.",
)
@labels_option("--calibration")
@click.option(
    "--device",
    metavar="NAME",
    help="GPU to plan for. Its plan predicts the gain and selects the layers for --layers=auto. Default: the current GPU; "
    "without one, h200. none: do not plan.",
)
@click.option("--shapes", default="", metavar="SIZES", help="Sizes of dynamic inputs: input:1x3x224x224[,other:...].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@quiet_option
def prune_command(
    model: str,
    output: str,
    layers: tuple[str, ...],
    skip: tuple[str, ...],
    branches: str,
    permute: bool,
    calibration: str | None,
    min_snr: float | None,
    max_drop: float | None,
    labels: str | None,
    device: str | None,
    shapes: str,
    as_json: bool,
) -> None:
    """Set to zero, of each 4 consecutive input channels of MODEL's weights, the two smallest, and write the model.

    Nothing else of it changes. Build the result with --sparsity=enable. docs/pruning.md has a recipe for fine-tuning.
    """
    if calibration is None and (labels, min_snr, max_drop) != (None, None, None):
        raise click.UsageError("--labels, --min-snr and --max-drop need --calibration=FILE.npz: without it nothing is measured")
    only, device = _names("--layers", layers), checked_device(device, "none")
    sizes = parse_shapes(shapes)
    paths = check_targets({"--output": output}, [model, *filter(None, [calibration])], {"--output": "onnx"})
    from gpu_runtime.pruning import prune, wording

    inputs, classes = split_labels(labels, read_arrays("--calibration", calibration))
    skipped = _names("--skip", skip)
    progress = listening()

    def tell(forecast: Forecast) -> None:
        progress.end()
        if not as_json:
            say(wording.forecast(forecast), nl=False)

    result = prune.prune(
        model,
        layers=() if only == ("all",) else only,
        skip=skipped,
        device=device,
        permute=permute,
        separate=branches == "separate",
        shapes=sizes,
        calibration=inputs,
        labels=classes,
        min_snr=min_snr,
        max_drop=None if max_drop is None else max_drop / 100,
        tell=tell,
        progress=progress,
    )
    progress.end()
    write_all({paths["--output"]: result.model})
    if as_json:
        return say(json.dumps(result.to_dict(), indent=1))
    say(wording.text(result), nl=False)
    say(f"Wrote {output}: build it with --sparsity=enable")


def _names(option: str, given: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for text in given for name in text.split(","))
    if not all(names):
        raise click.UsageError(f"{option}: expected names with commas between them, got {','.join(given)!r}")
    if "auto" in names and (len(names) > 1 or option == "--skip"):
        raise click.UsageError(f"{option}: auto is for --layers only, and cannot be combined with names")
    return names
