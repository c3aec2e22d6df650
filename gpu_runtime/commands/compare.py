"""`gpu-runtime compare MODEL ENGINE`: whether the engine computes what its model does, by onnxruntime."""

import json
import warnings

import click

from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import labels_option, opened, quiet_option, shown_at
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.targets import read_arrays, split_labels
from gpu_runtime.text import several

NOT_PASSED = 5  # exit code


@click.command("compare", short_help="Compare an engine with its model, layer by layer.")
@click.argument("model", type=click.Path())
@click.argument("engine", type=click.Path())
@click.option(
    "--inputs",
    type=click.Path(),
    metavar="FILE.npz",
    help="Inputs by name, one sample or several along their first axes. Default: random values from 0 to 1 (pixels: 0 to 255).",
)
@labels_option("--inputs")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random values.")
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    help="Relative error allowed for each element. Default of --rtol and "
    "--atol: 8 times the error of storing tensors in FP16, by norms.",
)
@click.option("--atol", type=click.FloatRange(min=0), help="Absolute error allowed for each element.")
@shown_at
@click.option("--all-layers", is_flag=True, help="Print every layer, not only the worst.")
@click.option("--emulate", is_flag=True, help="Run in the emulator even where there is a GPU.")
@click.option("--allow-cubins", is_flag=True, help="Accept machine code inside the engine file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
@quiet_option
def compare_command(
    context: click.Context,
    model: str,
    engine: str,
    inputs: str | None,
    labels: str | None,
    seed: int,
    rtol: float | None,
    atol: float | None,
    shown: str,
    all_layers: bool,
    emulate: bool,
    allow_cubins: bool,
    as_json: bool,
) -> None:
    """Run ENGINE, and the ONNX MODEL that it was built from in onnxruntime; exit with 5 where outputs differ.

    The first layer that diverges is named. An engine built with --sparsity=force is compared with the pruned model, and that
    with the original.
    """
    if labels and not inputs:
        raise click.UsageError("--labels need --inputs=FILE.npz, the samples that they belong to")
    given, classes = split_labels(labels, read_arrays("--inputs", inputs))
    from gpu_runtime.accuracy import compare, wording
    from gpu_runtime.explain.points import at_text

    loaded = opened(engine, allow_cubins, shown)
    progress = listening()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of values that are not finite, which are counted here
        found = compare.compare(
            model,
            loaded,
            given,
            labels=classes,
            seed=seed,
            rtol=rtol,
            atol=atol,
            emulate=emulate,
            progress=progress,
        )
    progress.end()
    if as_json:
        say(json.dumps(found.to_dict(), indent=1))
    else:
        source = inputs or f"random values (--seed {seed})"
        where = "in the CPU emulator" if found.emulated else "on the GPU"
        count, plan = several(found.samples, "sample"), at_text(loaded.record)
        say(f"{engine}, run {where}, against {model}, run by onnxruntime in FP32, on {count} of {source}{plan}\n")
        say(wording.text(found, all_layers), nl=False)
    if not found.passed:
        context.exit(NOT_PASSED)
