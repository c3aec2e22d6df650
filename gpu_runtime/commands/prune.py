"""`gpu-runtime prune MODEL -o SPARSE`: writes the model with its weights pruned to 2:4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpu_runtime.commands.console import answer, say
from gpu_runtime.commands.options import (
    argument,
    checked_device,
    flag,
    gathered,
    given,
    json_option,
    labels_option,
    parse_shapes,
    quiet_option,
    sizes_option,
)
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.reading import read_arrays, split_labels
from gpu_runtime.commands.targets import check_targets, write_all
from gpu_runtime.text import wrap

if TYPE_CHECKING:
    from gpu_runtime.pruning.benefit import Forecast


@dataclass(frozen=True, slots=True)
class Asked:
    """The argument and options of pruning."""

    model: str = argument()
    output: str = flag("-o", "--output", required=True, type=click.Path(), help="Write the pruned model to this file.")
    layers: tuple[str, ...] = flag(
        "--layers",
        multiple=True,
        metavar="NAMES",
        help="Prune these only: names of layers or weights, with commas, and "
        "* and ? as in a shell; auto: the layers that the plan for --device runs sparse. Default: all.",
    )
    skip: tuple[str, ...] = flag(
        "--skip", multiple=True, metavar="NAMES", help="Leave these layers or weights dense; names as for --layers."
    )
    branches: str = flag(
        "--branches",
        type=click.Choice(["common", "separate"]),
        default="common",
        show_default=True,
        help="Branches that may run as one convolution: common gives them one pattern, so that the merged convolution is 2:4; "
        "separate prunes each by itself, which keeps more of its weights.",
    )
    permute: bool = flag(
        "--permute",
        is_flag=True,
        help="Reorder channels so that pruning loses less; the new order alone does not change the outputs.",
    )
    calibration: str | None = flag(
        "--calibration",
        type=click.Path(),
        metavar="FILE.npz",
        help="Inputs by name, several samples along their first axes, on which onnxruntime measures the effect of pruning.",
    )
    min_snr: float | None = flag(
        "--min-snr",
        type=float,
        metavar="DB",
        help="With --calibration: leave the worst layers dense until the outputs have this signal-to-noise ratio.",
    )
    max_drop: float | None = flag(
        "--max-drop",
        type=click.FloatRange(0, 100),
        metavar="PERCENT",
        help="With --calibration: leave the worst layers dense until top-1 changes for at most this share of samples; with "
        "--labels, until accuracy falls by at most this many points.",
    )
    labels: str | None = given(labels_option("--calibration"))
    device: str | None = flag(
        "--device",
        metavar="NAME",
        help="GPU to plan for. Its plan predicts the gain and selects the layers for --layers=auto. Default: the current GPU; "
        "without one, h200. none: do not plan.",
    )
    shapes: str = given(sizes_option)
    as_json: bool = given(json_option)


@click.command("prune")
@gathered(Asked)
@quiet_option
def prune_command(asked: Asked) -> None:
    """Set to zero, of each 4 consecutive input channels of MODEL's weights, the two smallest, and write the model.

    Nothing else of it changes. Build the result with --sparsity=enable. docs/pruning.md has a recipe for fine-tuning.
    """
    if asked.calibration is None and (asked.labels, asked.min_snr, asked.max_drop) != (None, None, None):
        raise click.UsageError("--labels, --min-snr and --max-drop need --calibration=FILE.npz: without it nothing is measured")
    only, device = _names("--layers", asked.layers), checked_device(asked.device, "none")
    if only == ("auto",) and device == "none":
        raise click.UsageError("--layers=auto needs the plan for a GPU, which chooses the layers: leave --device=none out")
    sizes = parse_shapes(asked.shapes)
    sources = [asked.model, *filter(None, [asked.calibration])]
    paths = check_targets({"--output": asked.output}, sources, {"--output": "onnx"})
    from gpu_runtime.pruning import prune, wording

    inputs, classes = split_labels(asked.labels, read_arrays("--calibration", asked.calibration))
    skipped = _names("--skip", asked.skip)
    progress = listening()

    def tell(forecast: Forecast) -> None:
        progress.end()
        if not asked.as_json:
            say(wording.forecast(forecast, only == ("auto",)), nl=False)

    result = prune.prune(
        asked.model,
        layers=() if only == ("all",) else only,
        skip=skipped,
        device=device,
        permute=asked.permute,
        separate=asked.branches == "separate",
        shapes=sizes,
        calibration=inputs,
        labels=classes,
        min_snr=asked.min_snr,
        max_drop=None if asked.max_drop is None else asked.max_drop / 100,
        tell=tell,
        progress=progress,
    )
    progress.end()
    write_all({paths["--output"]: result.model})
    written = wording.written(asked.output, result, only == ("auto",))
    answer(asked.as_json, result.to_dict, lambda: wording.text(result) + "\n".join([*wrap(written), ""]))


def _names(option: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names in the texts that an option was `given`, split at commas. Raises UsageError for an empty name, or
    "auto" where it is not allowed.
    """
    names = tuple(name.strip() for text in given for name in text.split(","))
    if not all(names):
        raise click.UsageError(f"{option}: expected names with commas between them, got {','.join(given)!r}")
    if "auto" in names and (len(names) > 1 or option == "--skip"):
        raise click.UsageError(f"{option}: auto is for --layers only, and cannot be combined with names")
    return names
