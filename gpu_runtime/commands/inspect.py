"""Four commands that show an engine or a model: `gpu-runtime inspect FILE`, the contents of an engine or of an ONNX model;
`inspect-sparsity MODEL`, which weights are 2:4, and the time that 2:4 saves; `explain ENGINE`, the reasons for each layer's
tactic, and the plan with other tactics; `report ENGINE`, plan and reasons as a page."""

from dataclasses import asdict, dataclass
from typing import Any

import click

from gpu_runtime import file_kinds
from gpu_runtime.commands import options
from gpu_runtime.commands.console import answer, not_passed, say
from gpu_runtime.commands.options import (
    argument,
    checked_device,
    flag,
    gathered,
    given,
    json_option,
    named,
    parse_shapes,
    quiet_option,
)
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.reading import opened
from gpu_runtime.commands.targets import check_targets, write_all
from gpu_runtime.errors import ModelError
from gpu_runtime.explain import gaps, report
from gpu_runtime.explain.points import at_text
from gpu_runtime.report import page


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


@click.command("inspect")
@gathered(Asked)
def inspect_command(asked: Asked) -> None:
    """Show the contents of FILE: of an engine the plan, layers, memory and the sparsity of each layer; of an ONNX model its
    opset, inputs, operators and weights, and whether and how an engine can be built of it."""
    file = asked.file
    try:
        head = file_kinds.head_of(file)
    except (OSError, ValueError):
        head = None  # the reader for its suffix raises an error with the reason
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
    """Shows the contents of an engine and writes the requested files. Raises UsageError for --onnx without --exportOnnx, or the
    reverse.
    """
    wanted, model = {options.TRACE: asked.export_trace, options.ONNX: asked.export_onnx}, asked.onnx
    if bool(model) != bool(asked.export_onnx):
        raise click.UsageError(f"{options.ONNX} and --onnx go together: an engine does not hold the model it was built from")
    paths = check_targets(wanted, [asked.file, *([model] if model else [])], {options.ONNX: "onnx"})
    loaded = opened(asked.file, True, asked.shown)  # only read, never run
    record, contents = loaded.record, options.exported(loaded, model)
    write_all({path: contents[option]() for option, path in paths.items()})
    if asked.gap:
        answer(asked.as_json, lambda: gaps.data(record), lambda: gaps.text(record))
    else:
        answer(asked.as_json, loaded.layer_info, lambda: report.inspect_text(record, loaded.checked))
    for option in paths:
        say(f"Wrote {wanted[option]} ({option})", err=asked.as_json)


@click.command("inspect-sparsity")
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
    from gpu_runtime.frontend.summaries import pattern
    from gpu_runtime.pruning import benefit, merged_branches

    rows, merged, unknown = merged_branches.inspect_file(model, sizes)
    progress = listening()
    forecast = benefit.forecast(model, checked_device(device) or benefit.NO_DEVICE, sizes, progress)
    plan = forecast.outlook
    progress.end()
    ranked = benefit.ranking(rows, plan) if plan else []
    found: dict[str, Any] = {"summary": pattern.summary(rows), "pruning": pattern.pruning(rows), "layers": rows}
    found |= {"merged": merged_branches.data(merged), "merged_unknown": unknown or None}
    found |= {"device": plan.device.name, "gain": forecast.gain, "ranking": benefit.data(ranked)} if plan else {}
    found |= {"if_pruned": forecast.data()} if plan else {}
    first = benefit.verdict(forecast, pattern.not_24(rows), unknown)
    text = first + pattern.text(rows) + merged_branches.text(merged, unknown) + (benefit.text(ranked, plan) if plan else "")
    answer(as_json, lambda: found, lambda: text)
    if require and (missing := pattern.not_24(rows)):
        say(f"--require: {len(missing)} weights that can be 2:4 are not: {', '.join(missing)}", err=True)
        not_passed()


@click.command("explain")
@click.argument("engine", type=click.Path())
@click.argument("layers", nargs=-1, metavar="[LAYER]...")
@click.option(
    "--what-if",
    "wishes",
    multiple=True,
    metavar="LAYER=WISH",
    help="Plan again with a layer forced to sparse, dense, a format (hwc8) or two ('chw->hwc8'), and show the changes; may be "
    "repeated.",
)
@options.shown_at
@json_option
def explain_command(engine: str, layers: tuple[str, ...], wishes: tuple[str, ...], shown: str, as_json: bool) -> None:
    """Say why each layer of ENGINE, or each LAYER named, runs sparse or dense, with the numbers behind it.

    LAYER may be a pattern: 'layer3.*', or 'layer{1..3}/conv' as the log of a build has it.
    """
    wanted = named("--what-if", wishes, "LAYER=sparse, LAYER=dense or LAYER=hwc8", str.rpartition)
    loaded = opened(engine, True, shown)  # only read, never run
    found = loaded.what_if(wanted) if wanted else None
    account = loaded.explain(layers or None) if layers or not wanted else None
    changed = found.to_dict() if found else None
    document = account.to_dict() | ({"what_if": changed} if changed else {}) if account else changed
    plan = at_text(loaded.record)
    head = [f"{engine}: {loaded.record.model.name}{plan}\n"] if plan else []
    answer(as_json, lambda: document, lambda: "\n".join([*head, *(str(part) for part in (account, found) if part)]))


@click.command("report")
@click.argument("engine", type=click.Path())
@click.option("-o", "--output", "output", type=click.Path(), required=True, help="Write the page to this file.")
@click.option("--compare", "other", metavar="ENGINE", type=click.Path(), help="Compare it with this engine, layer by layer.")
@options.shown_at
@quiet_option
def report_command(engine: str, output: str, other: str | None, shown: str) -> None:
    """Write the plan of ENGINE and its reasons as one HTML file: layers, candidates, graph, roofline, memory. The page needs no
    network."""
    paths = check_targets({"--output": output}, [engine, *([other] if other else [])])
    files = [name for name in (engine, other) if name is not None]
    records = [opened(name, True, shown).record for name in files]  # only read, never run
    data = page.report(*records)
    write_all({paths["--output"]: data})
    say(f"Wrote {output}: {len(data)} bytes; open it in a browser, it needs no network")
