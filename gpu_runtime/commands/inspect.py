"""`gpu-runtime inspect FILE`: the contents of an engine, or of an ONNX model. `gpu-runtime inspect-sparsity MODEL`: whether
weights are 2:4, and where that would pay."""

from dataclasses import asdict, dataclass
from typing import Any

import click

from gpu_runtime.commands import options
from gpu_runtime.commands.console import answer, not_passed, say
from gpu_runtime.commands.options import argument, checked_device, flag, gathered, given, json_option, parse_shapes
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.targets import check_targets, write_all
from gpu_runtime.errors import ModelError


@dataclass(frozen=True, slots=True)
class Asked:
    """The argument and options of inspect."""

    file: str = argument()
    as_json: bool = flag("--json", is_flag=True, help="Print one JSON document: of an engine, its layer information.")
    gap: bool = flag(
        "--gap", is_flag=True, help="For an engine: the times of its launches and their lower bounds at the GPU's peak rates."
    )
    shown: str = given(options.shown_at)
    export_trace: str | None = given(options.trace_option)
    export_onnx: str | None = given(options.onnx_option)
    onnx: str | None = flag("--onnx", type=click.Path(), help="With --exportOnnx: the model that the engine was built from.")


@click.command("inspect", short_help="Show the plan, layers and sparsity of an engine; or describe an ONNX model.")
@gathered(Asked)
def inspect_command(asked: Asked) -> None:
    """Show the contents of FILE: of an engine the plan, layers, memory and the sparsity of each layer; of an ONNX model its
    opset, inputs, operators and weights, and whether and how an engine can be built of it."""
    from gpu_runtime import file_kinds

    file = asked.file
    try:
        head = file_kinds.head_of(file)
    except (OSError, ValueError):
        head = None  # reading it as what it is called says why
    if file_kinds.is_engine(head) or file_kinds.recognized(head) if head else not file.endswith(".onnx"):
        return _engine(asked)
    from gpu_runtime.explain import model_info

    try:
        info = model_info.model_info(file)
    except ModelError:
        if not head or file_kinds.is_onnx(head):
            raise
        began = head[:8].hex(" ")
        text = f"{file}: neither an engine nor an ONNX model: it begins with the bytes {began}; give one of them"
        raise ValueError(text) from None
    if asked.export_trace or asked.export_onnx or asked.gap or asked.shown:
        raise click.UsageError(
            f"--gap, --shapes, {options.TRACE} and {options.ONNX} need an engine, but {file} is a model: build one first"
        )
    answer(asked.as_json, lambda: asdict(info) | {"command": info.command}, lambda: model_info.text(info))


def _engine(asked: Asked) -> None:
    wanted, model = {options.TRACE: asked.export_trace, options.ONNX: asked.export_onnx}, asked.onnx
    if bool(model) != bool(asked.export_onnx):
        raise click.UsageError(f"{options.ONNX} and --onnx go together: an engine does not hold the model it was built from")
    paths = check_targets(wanted, [asked.file, *([model] if model else [])], {options.ONNX: "onnx"})
    from gpu_runtime.explain import gaps, report

    loaded = options.opened(asked.file, True, asked.shown)  # only read, never run
    record, contents = loaded.record, options.exported(loaded.record, model)
    write_all({path: contents[option]() for option, path in paths.items()})
    if asked.gap:
        answer(asked.as_json, lambda: gaps.data(record), lambda: gaps.text(record))
    else:
        answer(asked.as_json, loaded.layer_info, lambda: report.inspect_text(record, loaded.checked))
    for option in paths:
        say(f"Wrote {wanted[option]} ({option})", err=asked.as_json)


@click.command("inspect-sparsity", short_help="Show whether the weights of an ONNX model are 2:4, and where that pays.")
@click.argument("model", type=click.Path())
@click.option(
    "--device",
    metavar="NAME",
    help="Rank the layers by the microseconds that 2:4 saves on this GPU, as the plan of "
    "the pruned network predicts, for each percent of weight energy lost.",
)
@click.option("--shapes", default="", metavar="SIZES", help="Sizes of dynamic inputs.")
@click.option("--require", is_flag=True, help="Exit with code 5 unless all weights that can be 2:4 are 2:4.")
@json_option
def inspect_sparsity_command(model: str, device: str | None, shapes: str, require: bool, as_json: bool) -> None:
    """Show how sparse the weights of an ONNX MODEL are, and whether they are 2:4.

    For branches that may run as one convolution, since their results are only added, also show the merged weights.
    """
    sizes = parse_shapes(shapes)
    from gpu_runtime.frontend import pattern
    from gpu_runtime.pruning import benefit, sums

    rows, merged, unknown = sums.inspect_file(model, sizes)
    progress = listening()
    forecast = benefit.forecast(model, checked_device(device) or benefit.NO_DEVICE, sizes, progress)
    plan = forecast.outlook
    progress.end()
    ranked = benefit.ranking(rows, plan) if plan else []
    found: dict[str, Any] = {"summary": pattern.summary(rows), "pruning": pattern.pruning(rows), "layers": rows}
    found |= {"merged": sums.data(merged), "merged_unknown": unknown or None}
    found |= {"device": plan.device.name, "gain": forecast.gain, "ranking": benefit.data(ranked)} if plan else {}
    found |= {"if_pruned": forecast.data()} if plan else {}
    first = benefit.verdict(forecast, pattern.not_24(rows))
    text = first + pattern.text(rows) + sums.text(merged, unknown) + (benefit.text(ranked, plan) if plan else "")
    answer(as_json, lambda: found, lambda: text)
    if require and (missing := pattern.not_24(rows)):
        say(f"--require: {len(missing)} weights that can be 2:4 are not: {', '.join(missing)}", err=True)
        not_passed()
