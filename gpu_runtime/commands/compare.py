"""`gpu-runtime compare MODEL ENGINE`: an engine's outputs compared with its model's in onnxruntime."""

import warnings
from dataclasses import dataclass

import click

from gpu_runtime.commands.console import answer, not_passed
from gpu_runtime.commands.options import (
    argument,
    cubins_option,
    emulate_option,
    flag,
    gathered,
    given,
    json_option,
    labels_option,
    quiet_option,
    shown_at,
)
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.reading import opened, read_arrays, split_labels
from gpu_runtime.explain.points import at_text
from gpu_runtime.text import several


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments and options of a comparison."""

    model: str = argument()
    engine: str = argument()
    inputs: str | None = flag(
        "--inputs",
        type=click.Path(),
        metavar="FILE.npz",
        help="Inputs by name, one sample or several along their first axes. Default: random values from 0 to 1 (pixels: 0 to "
        "255).",
    )
    labels: str | None = given(labels_option("--inputs"))
    seed: int = flag("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random values.")
    rtol: float | None = flag(
        "--rtol",
        type=click.FloatRange(min=0),
        help="Relative error allowed for each element. Default of --rtol and "
        "--atol: 8 times the error of storing tensors in FP16, by norms.",
    )
    atol: float | None = flag("--atol", type=click.FloatRange(min=0), help="Absolute error allowed for each element.")
    shown: str = given(shown_at)
    all_layers: bool = flag("--all-layers", is_flag=True, help="Print every layer, not only the worst.")
    emulate: bool = given(emulate_option)
    allow_cubins: bool = given(cubins_option)
    as_json: bool = given(json_option)


@click.command("compare")
@gathered(Asked)
@quiet_option
def compare_command(asked: Asked) -> None:
    """Run ENGINE, and the ONNX MODEL that it was built from in onnxruntime; exit with 5 where outputs differ.

    The first layer that diverges is named. An engine built with --sparsity=force is compared with the pruned model, and that
    with the original.
    """
    if asked.labels and not asked.inputs:
        raise click.UsageError("--labels needs --inputs=FILE.npz, the samples that they belong to")
    samples, classes = split_labels(asked.labels, read_arrays("--inputs", asked.inputs))
    from gpu_runtime.accuracy import compare, wording

    loaded = opened(asked.engine, asked.allow_cubins, asked.shown)
    progress = listening()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # on values that are not finite, which the comparison shows
        found = compare.compare(
            asked.model,
            loaded,
            samples,
            labels=classes,
            seed=asked.seed,
            rtol=asked.rtol,
            atol=asked.atol,
            emulate=asked.emulate,
            progress=progress,
        )
    progress.end()
    source = asked.inputs or f"random values (--seed {asked.seed})"
    where = "in the CPU emulator" if found.emulated else "on the GPU"
    count, plan = several(found.samples, "sample"), at_text(loaded.record)
    head = f"{asked.engine}, run {where}, against {asked.model}, run by onnxruntime in FP32, on {count} of {source}{plan}"
    answer(asked.as_json, found.to_dict, lambda: f"{head}\n\n{wording.text(found, asked.all_layers)}")
    if not found.passed:
        not_passed()
