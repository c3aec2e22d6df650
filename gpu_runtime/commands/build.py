"""`build-engine MODEL -o ENGINE`: plan, explain, write."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpu_runtime.commands import options
from gpu_runtime.commands.console import columns, is_terminal, json_bytes, say
from gpu_runtime.commands.options import HELP, one_size, parse_pools, risk_option, version_option
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.targets import check_targets, read_arrays, write_all
from gpu_runtime.commands.trtexec_flags import TrtexecCommand
from gpu_runtime.progress import Progress

if TYPE_CHECKING:
    from cuda_kernels.device import Device
    from gpu_runtime.runtime.engine import Engine

@click.command("build", cls=TrtexecCommand, context_settings=HELP,
               short_help="Build an engine from an ONNX model and explain it.")  # fmt: skip
@click.argument("model", required=False, type=click.Path())
@click.option("--onnx", type=click.Path(), help="The model, as trtexec users give it (same as the argument).")
@click.option("-o", "--saveEngine", "engine_path", type=click.Path(), help="Write the engine to this file.")
@click.option("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="disable", show_default=True,
              help="enable: consider 2:4 kernels where the weights have the pattern; force: prune to it first.")  # fmt: skip
@click.option("--fp16", is_flag=True, help="Accepted; FP16 with FP32 accumulation is what all kernels compute.")
@click.option("--inputIOFormats", "input_formats", metavar="SPECS", help="Memory formats of the inputs, one for all or each: "
              "fp16:hwc8, chw16 (the model's type), uint8:hwc; + between alternatives. Default: chw.")  # fmt: skip
@click.option("--outputIOFormats", "output_formats", metavar="SPECS", help="Memory formats of the outputs, likewise.")
@click.option("--shapes", default="", metavar="SIZES", help="Sizes of dynamic inputs: input:1x3x224x224[,other:...].")
@click.option("--optShapes", "opt_shapes", default="", metavar="SIZES", hidden=True)
@click.option("--minShapes", "min_shapes", default="", metavar="SIZES", hidden=True)
@click.option("--maxShapes", "max_shapes", default="", metavar="SIZES", hidden=True)
@click.option("--device", metavar="NAME", help="Plan for this GPU with predicted times: a100, a100_pcie, a100_40gb, "
              "a10, a40, l4, l40s, h100, h200, b200, rtx3070, rtx3090, rtx4090, rtx5090, rtx_a6000, rtx_pro_6000. A number: "
              "that GPU here, measured. Default: the GPU at hand, measured; without one, h200.")  # fmt: skip
@click.option("--memPoolSize", "pools", default="", metavar="workspace:MIB", help="Scratch memory that a kernel may use, in "
              "MiB (or 64K, 1.5G); without it, any amount.")  # fmt: skip
@risk_option
@click.option("--calibration", type=click.Path(), metavar="FILE.npz", help="Inputs by name: on them the "
              "network's range and the plan's error are measured, instead of on random values.")  # fmt: skip
@click.option("--timingCacheFile", "timing_cache", type=click.Path(), help="Measured times to use and extend.")
@click.option("--savePruned", "save_pruned", type=click.Path(), help="With --sparsity=force: write the pruned model.")
@click.option("--embed-cubins", is_flag=True, help="Put machine code into the engine; running it then takes --allow-cubins.")
@click.option("--verbose", is_flag=True, help="Print all timings as TensorRT does, and the plan; progress to stderr.")
@click.option("--exhaustive", is_flag=True, help="Time also what is known to take the same time as something timed.")
@click.option("--profilingVerbosity", "verbosity", type=click.Choice(["layer_names_only", "detailed", "none"]),
              default="detailed", help="Detail of the exported layer information.")  # fmt: skip
@click.option("--dumpLayerInfo", "dump_layers", is_flag=True, help="Print the layers as a table.")
@click.option("--dumpProfile", "dump_profile", is_flag=True, help="Print the time of every layer.")
@click.option("--exportLayerInfo", "export_layers", type=click.Path(), help="Write layer information as TensorRT does.")
@click.option("--exportProfile", "export_profile", type=click.Path(), help="Write layer times (TensorRT's JSON).")
@options.export_options
@click.option("--iterations", type=click.IntRange(min=1), default=20, show_default=True, help="Runs of the profile, on a GPU.")
@version_option
def build_command(
    model: str | None, onnx: str | None, engine_path: str | None, sparsity: str, fp16: bool, input_formats: str | None,
    output_formats: str | None, shapes: str, opt_shapes: str, min_shapes: str,
    max_shapes: str, device: str | None, pools: str, risk: float, calibration: str | None, timing_cache: str | None,
    save_pruned: str | None, embed_cubins: bool, verbose: bool, exhaustive: bool, verbosity: str, dump_layers: bool,
    dump_profile: bool, export_layers: str | None, export_profile: str | None, export_trace: str | None,
    export_onnx: str | None, iterations: int,
) -> None:  # fmt: skip
    """Build an engine from an ONNX MODEL, print the plan and why each layer runs sparse or dense."""
    source = _source(model, onnx)
    if save_pruned and sparsity != "force":
        raise click.UsageError("--savePruned needs --sparsity=force: without it nothing is pruned")
    given = {"--shapes": shapes, "--optShapes": opt_shapes, "--minShapes": min_shapes, "--maxShapes": max_shapes}
    sizes, workspace = one_size(given), parse_pools(pools)
    targets = {"--savePruned": save_pruned, "--exportProfile": export_profile, "--exportLayerInfo": export_layers,
               options.TRACE: export_trace, options.ONNX: export_onnx}  # fmt: skip
    sources = [source] if calibration is None else [source, calibration]
    paths = check_targets(targets | {"--saveEngine": engine_path, "--timingCacheFile": timing_cache}, sources)
    inputs = read_arrays("--calibration", calibration)
    progress = listening(verbose)
    from gpu_runtime.explain import layer_info, log, report, wording
    from gpu_runtime.pipeline import build
    from gpu_runtime.runtime.engine import encode

    target = _target(device)
    told = _planning_for(target, device, timing_cache)
    say("\n".join(told))
    pruned = io.BytesIO()
    engine = build(
        source, sparsity=sparsity, device=target, shapes=sizes, timing_cache=timing_cache,
        save_pruned=pruned if save_pruned else None, embed_cubins=embed_cubins, input_formats=input_formats,
        output_formats=output_formats, exhaustive=exhaustive, workspace=workspace, risk=risk, calibration=inputs,
        log=say if verbose else None, progress=progress,
    )  # fmt: skip
    progress(Progress("write", ", ".join(path.name for path in paths.values())))
    times = _layer_times(engine, iterations) if dump_profile or export_profile or export_trace else None
    profile = layer_info.profile(engine.record, times)
    contents: dict[str, Callable[[], bytes]] = {
        "--savePruned": pruned.getvalue,
        "--exportProfile": lambda: json_bytes(profile),
        "--exportLayerInfo": lambda: json_bytes(_shown(engine.layer_info(), verbosity)),
        "--saveEngine": lambda: encode(engine),
        **options.exported(engine.record, source, times),
    }
    write_all({paths[option]: content() for option, content in contents.items() if option in paths})
    progress.end()
    if dump_layers or verbose:
        say(report.plan_text(engine.record))
    written = [line for option, name in targets.items() if name for line in _lines(f"Wrote {name} ({option})")]
    written += _written(engine, engine_path, paths)
    if verbose:
        say(wording.sparsity_text(engine.record))
    else:
        most = log.most_lines(engine.record) - len(told) - len(written) - 1  # an empty line
        say(log.log_text(engine.record, columns(), most, is_terminal()))
    if dump_profile:
        say(layer_info.trt_profile_text(profile))
    say("\n".join(written))


def _source(model: str | None, onnx: str | None) -> str:
    """The model's file, given in one of two ways."""
    if (model is None) == (onnx is None):
        raise click.UsageError("give the model once: as the argument, or with --onnx=FILE")
    return model or onnx or ""


def _target(device: str | None) -> Device:
    from cuda_kernels import device as devices
    from gpu_runtime.pipeline import pick_device

    try:
        if device is not None and device.isdecimal():
            devices.only(int(device))
            device = None
        return pick_device(device)
    except ValueError as e:
        raise click.UsageError(f"--device: {e}") from None


def _shown(info: dict[str, Any], verbosity: str) -> dict[str, Any]:
    """Layer information as --profilingVerbosity asks for it."""
    if verbosity == "detailed":
        return info
    names = [layer["Name"] for layer in info["Layers"]]
    return {"Layers": names if verbosity == "layer_names_only" else [], "Bindings": info["Bindings"]}


def _lines(text: str) -> list[str]:
    from gpu_runtime.text import printable, wrap

    return wrap(printable(text), columns())


def _written(engine: Engine, name: str | None, paths: Mapping[str, Path]) -> list[str]:
    """The last lines of a build: what was written where, and what says more."""
    if name is None:
        return ["No engine was written: -o FILE does that"]
    timing, size = engine.record.timing, paths["--saveEngine"].stat().st_size
    total = f"{'~' if timing.is_predicted else ''}{engine.plan.solution.total_us:.1f} us, {timing.label}"
    text = f"Wrote {name}: {size} bytes, {len(engine.plan.steps)} kernel launches, {total}"
    return [*_lines(text), *_lines(f"gpu-runtime explain {shlex.quote(name)} [LAYER] says more of each layer")]


def _planning_for(target: Device, name: str | None, timing_cache: str | None) -> list[str]:
    """The first lines of a build: which device, and where its times come from."""
    from gpu_runtime.explain.figures import held_text

    if target.measured:
        return _lines(f"Planning for {target.title} ({target.sm}), timing on it")
    default = "" if name else ", the default where no GPU is found (another with --device)"
    head = f"Planning for {target.title} ({target.sm}){default}; times are predicted({target.name}), nothing is measured"
    held = _lines(f"{target.title}: {held_text(target)}") if held_text(target) else []
    ignored = ["--timingCacheFile is neither read nor written: it holds measured times only"] if timing_cache else []
    return [*_lines(head), *held, *ignored]


def _layer_times(engine: Engine, iterations: int) -> list[list[float]] | None:
    """Measured layer times on a GPU; None, which means the plan's predicted ones, without."""
    if engine.record.timing.is_predicted:
        return None
    import numpy as np

    from tactics.format import DTYPES

    rng = np.random.default_rng(0)
    inputs = {i.name: np.abs(rng.standard_normal(i.shape)).astype(DTYPES[i.dtype]) for i in engine.inputs}
    with engine.context() as ctx:
        return ctx.profile(inputs, iterations)
