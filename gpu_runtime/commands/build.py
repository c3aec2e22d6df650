"""`build-engine MODEL -o ENGINE`: plans, explains and writes an engine, and on a GPU times its inferences; with
`--loadEngine=ENGINE` it only times inferences of that engine.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from cuda_kernels import device as devices
from cuda_kernels.device import NAMED
from gpu_runtime.commands import options
from gpu_runtime.commands.console import columns, say
from gpu_runtime.commands.options import (
    HELP,
    argument,
    flag,
    gathered,
    given,
    parse_pools,
    part,
    quiet_option,
    risk_option,
    shapes_of,
    typed,
    version_option,
)
from gpu_runtime.commands.progress import Interrupts, ProgressLine, listening
from gpu_runtime.commands.targets import KEPT, check_targets, write_all
from gpu_runtime.commands.trtexec_flags import PROFILES, TrtexecCommand, Wanted, check_loaded, is_timed, unused
from gpu_runtime.progress import Progress
from gpu_runtime.text import printable, wrap

if TYPE_CHECKING:
    from cuda_kernels.device import Device
    from gpu_runtime.engine import Engine
    from gpu_runtime.runtime.plan_record import EngineRecord
    from tactics.measure.spread import Spread

WRITES = {"--saveEngine": "engine", "--savePruned": "onnx", options.ONNX: "onnx"}
# Options whose name and value pipeline.build takes as they are.
ALIKE = "sparsity batch_invariant only_cached_times embed_cubins input_formats output_formats exhaustive".split()
ALIKE += ["optimization_level", "risk", "precisions"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments and options of a build."""

    model: str | None = argument(required=False)
    onnx: str | None = flag("--onnx", type=click.Path(), help="The model, as trtexec users give it (same as the argument).")
    engine_path: str | None = flag("-o", "--saveEngine", type=click.Path(), help="Write the engine to this file.")
    sparsity: str = flag(
        "--sparsity",
        type=click.Choice(["disable", "enable", "force"]),
        default="disable",
        show_default=True,
        help="enable: consider 2:4 kernels where the weights have the pattern; force: prune the weights to the pattern first.",
    )
    fp16: bool = flag("--fp16", is_flag=True, help="Accepted; all kernels compute in FP16 with FP32 accumulation.")
    input_formats: str | None = flag(
        "--inputIOFormats",
        metavar="SPECS",
        help="Memory formats of the inputs, one for all or each: fp16:hwc8, chw16 (the model's type), uint8:hwc; + between "
        "alternatives. Default: chw.",
    )
    output_formats: str | None = flag(
        "--outputIOFormats", metavar="SPECS", help="Memory formats of the outputs, as for inputs."
    )
    shapes: str = flag("--shapes", default="", metavar="SIZES", help="Sizes of dynamic inputs: input:1x3x224x224[,other:...].")
    min_shapes: str = flag("--minShapes", default="", metavar="SIZES", help="The smallest batch of a range, as --shapes.")
    opt_shapes: str = flag(
        "--optShapes", default="", metavar="SIZES", help="The batch that is shown and gets a plan of its own."
    )
    max_shapes: str = flag("--maxShapes", default="", metavar="SIZES", help="The largest batch.")
    profile: str | None = flag(
        "--profile", metavar="N", help="The sizes behind it are one of several: one profile, 0, 1, ..., for each size of image."
    )
    batch_invariant: bool = flag(
        "--batchInvariant", is_flag=True, help="One tactic per layer for all batches: an image gets the same bits in each."
    )
    device: str | None = flag(
        "--device",
        metavar="NAME",
        help=f"Plan for this GPU with predicted times: {', '.join(NAMED)}. A number: this machine's GPU of that number, with "
        "measured times. Default: the current GPU, measured; without a GPU, h200.",
    )
    pools: tuple[str, ...] = flag(
        "--memPoolSize",
        multiple=True,
        metavar="POOL:MIB",
        help="Limits in MiB (or 64K, 1.5G): workspace:64, scratch of a kernel; activations:512, tensors, by pieces of a batch.",
    )
    risk: float = given(risk_option)
    calibration: str | None = flag(
        "--calibration",
        type=click.Path(),
        metavar="FILE.npz",
        help="Inputs by name, to measure the network's range and the plan's error on, instead of random values.",
    )
    layer_precisions: str | None = flag(
        "--layerPrecisions",
        "--layerPrecision",
        metavar="NAME:fp32,...",
        help="Nodes that compute in FP32, by name, * for any characters, or by the name of an output.",
    )
    layer_types: str | None = flag(
        "--layerOutputTypes", metavar="NAME:fp32,...", help="Nodes whose results are stored in FP32; named as above."
    )
    constraints: str = flag(
        "--precisionConstraints",
        type=click.Choice(["obey", "prefer", "none"]),
        default="obey",
        help="none: --layerPrecisions and --layerOutputTypes count for nothing. prefer does as obey does.",
    )
    timing_cache: str | None = flag(
        "--timingCacheFile", type=click.Path(), help="Timing cache: reuse its times, and add new ones."
    )
    no_cache: bool = flag("--noBuilderCache", is_flag=True, help="Neither read nor write a timing cache.")
    only_cached_times: bool = flag(
        "--errorOnTimingCacheMiss", is_flag=True, help="Measure nothing: fail where the timing cache lacks a time."
    )
    save_pruned: str | None = flag("--savePruned", type=click.Path(), help="With --sparsity=force: write the pruned model.")
    embed_cubins: bool = flag(
        "--embed-cubins", is_flag=True, help="Put machine code into the engine; running it then takes --allow-cubins."
    )
    verbose: bool = flag(
        "--verbose", is_flag=True, help="Print all timings as TensorRT does, and the plan; progress to stderr."
    )
    exhaustive: bool = flag(
        "--exhaustive", is_flag=True, help="Time every format of a tactic, even two formats with the same bytes."
    )
    optimization_level: int = flag(
        "--builderOptimizationLevel",
        type=click.IntRange(0, 5),
        default=3,
        show_default=True,
        help="On a GPU, how many tactics are timed: 0 none, all are estimated; 3 those that the plan and its explanation need, "
        "by bounds on the others; 5 all.",
    )
    tuning_time: float | None = flag(
        "--tuningTime", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Time tactics no longer than this."
    )
    ray: str | None = flag(
        "--ray",
        metavar="[=ADDRESS]",
        help="Time tactics on all GPUs of a Ray cluster, as head:6379; without an address of the one Ray finds, or starts.",
    )
    verbosity: str = flag(
        "--profilingVerbosity",
        type=click.Choice(["layer_names_only", "detailed", "none"]),
        default="detailed",
        help="Detail of the exported layer information.",
    )
    dump_layers: bool = flag("--dumpLayerInfo", is_flag=True, help="Print the layers as a table.")
    dump_profile: bool = flag(
        "--dumpProfile", is_flag=True, help="Print the time of every layer; on a GPU, from --iterations=N runs (default 20)."
    )
    export_layers: str | None = flag("--exportLayerInfo", type=click.Path(), help="Write layer information as TensorRT does.")
    export_profile: str | None = flag("--exportProfile", type=click.Path(), help="Write layer times (TensorRT's JSON).")
    export_trace: str | None = given(options.trace_option)
    export_onnx: str | None = given(options.onnx_option)
    engine_to_load: str | None = flag(
        "--loadEngine", type=click.Path(), help="Build nothing: time inferences of this engine, as gpu-runtime bench does."
    )
    skip_inference: bool = flag(
        "--skipInference",
        "--buildOnly",
        is_flag=True,
        help="Time no inferences after a build on a GPU. Otherwise the options of gpu-runtime bench apply to them.",
    )
    wanted: Wanted = part(Wanted, hidden=True)

    @property
    def sizes(self) -> Any:
        """The argument `shapes` of `build`, from --shapes, from --minShapes, --optShapes and --maxShapes, or from --profile.
        Raises UsageError.
        """
        if several := click.get_current_context().meta.get(PROFILES):
            return [shapes_of(texts) for texts in several]
        texts = {"--shapes": self.shapes, "--minShapes": self.min_shapes, "--optShapes": self.opt_shapes}
        return shapes_of(texts | {"--maxShapes": self.max_shapes})

    @property
    def cache(self) -> str | Literal[False] | None:
        """The argument `timing_cache` of `build`: a file, None for the default file, False for no file. Raises UsageError."""
        if self.no_cache and (self.timing_cache or self.only_cached_times):
            raise click.UsageError("--noBuilderCache reads and writes no timing cache: leave it out, or the options of one")
        return self.timing_cache if not self.no_cache else False

    @property
    def precisions(self) -> dict[str, str]:
        """The argument `precisions` of `build`, by node; {} with --precisionConstraints=none. Raises UsageError."""
        found = options.parse_precisions({"--layerPrecisions": self.layer_precisions, "--layerOutputTypes": self.layer_types})
        if found and self.constraints == "none":
            say("ignored: --layerPrecisions and --layerOutputTypes, as --precisionConstraints=none asks", err=True)
        return {} if self.constraints == "none" else found

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `build` that follow from the options alone, by name. Raises UsageError."""
        same = {name: getattr(self, name) for name in ALIKE}
        return same | parse_pools(self.pools) | {"shapes": self.sizes, "timing_cache": self.cache}

    @property
    def exports(self) -> dict[str, str | None]:
        """Option for information on the engine's layers -> the file to write, None where the option is not given."""
        layers = {"--exportProfile": self.export_profile, "--exportLayerInfo": self.export_layers}
        return layers | {options.TRACE: self.export_trace}

    @property
    def profiled(self) -> bool:
        """Whether an option asks for the time of each layer."""
        return self.dump_profile or bool(self.export_profile or self.export_trace)


@click.command("build", cls=TrtexecCommand, context_settings=HELP)
@gathered(Asked)
@version_option
@quiet_option
def build_command(asked: Asked) -> None:
    """Build an engine from an ONNX MODEL, print the plan and why each layer runs sparse or dense."""
    if asked.engine_to_load is not None:
        return _loaded(asked, asked.engine_to_load)
    source, wanted = _source(asked.model, asked.onnx), asked.wanted
    if asked.tuning_time is not None and not asked.tuning_time < math.inf:  # click lets nan pass
        raise click.UsageError(f"--tuningTime: expected seconds, more than 0, got {asked.tuning_time}")
    if asked.save_pruned and asked.sparsity != "force":
        raise click.UsageError("--savePruned needs --sparsity=force: without it nothing is pruned")
    targets = {"--savePruned": asked.save_pruned, **asked.exports, options.ONNX: asked.export_onnx}
    own = {"--saveEngine": asked.engine_path, "--timingCacheFile": asked.timing_cache}
    sources = [source, *([asked.calibration] if asked.calibration else []), *wanted.sources]
    paths = check_targets(targets | own | wanted.targets, sources, WRITES)
    progress = listening(asked.verbose)
    import gpu_runtime.building.build  # noqa: F401  # without the extra `build` this raises before any other message
    from gpu_runtime import engine as engines
    from gpu_runtime.building import target as targeted
    from gpu_runtime.commands import bench, reading
    from gpu_runtime.explain import log

    target, spread = _target(asked.device, asked.ray)
    if target.measured and asked.cache is not False:
        KEPT.append("times measured so far stay in the timing cache")
    away = spread is not None and not targeted.is_here(target)
    timed = is_timed(target, asked.skip_inference, wanted, away)
    if away and asked.profiled:
        say(f"this machine has no {target.title}: layer times are of each tactic alone", err=True)
    planned = target if asked.optimization_level else replace(target, measured=False)
    count, is_default = spread.count if spread else None, planned is target and not asked.device
    on = {"calibration": reading.read_arrays("--calibration", asked.calibration), "device": None if spread else target}
    arguments = asked.arguments | on
    head = log.planning_lines(planned, columns(), count, is_default)
    if not planned.measured and (unread := typed("timing_cache", "only_cached_times", "tuning_time")):
        say(f"ignored: {', '.join(unread.values())}: times are predicted, so none is measured or cached", err=True)
    say("\n".join(head))
    pruned = io.BytesIO()
    engine = _built(asked, source, {**arguments, "ray": spread}, progress, pruned)
    progress(Progress("write", ", ".join(path.name for path in paths.values())))
    times = bench.layer_times(engine, wanted) if asked.profiled and not away else None
    contents: dict[str, Callable[[], bytes]] = {
        "--savePruned": pruned.getvalue,
        "--saveEngine": lambda: engines.encode(engine),
        **options.exported(engine, source, times, asked.verbosity),
    }
    write_all({paths[option]: content() for option, content in contents.items() if option in paths})
    progress.end()
    files = [printable(f"Wrote {name} ({option})") for option, name in targets.items() if name]
    written = [line for text in files for line in wrap(text, columns())]
    nbytes = paths["--saveEngine"].stat().st_size if asked.engine_path else 0
    written += log.written_lines(engine.record, columns(), asked.engine_path, nbytes)
    _tell(engine.record, asked, times, len(head) + len(written))
    say("\n".join(written))
    if timed:
        say("")
        bench.time_engine(engine, asked.engine_path or source, wanted, paths, progress, asked.verbose)


def _built(asked: Asked, source: str, arguments: Mapping[str, Any], progress: ProgressLine, pruned: io.BytesIO) -> Engine:
    """Builds the engine and returns it; the first Ctrl-C only ends the timing of tactics.

    `source`: the model's file; `arguments`: of pipeline.build, by name; `pruned`: the pruned model is written to it if
    --savePruned is given.
    """
    from gpu_runtime import pipeline
    from gpu_runtime.building.options import deadline

    with Interrupts(progress, deadline(asked.tuning_time)) as told:
        return pipeline.build(
            source,
            **arguments,
            save_pruned=pruned if asked.save_pruned else None,
            tuning_time=told.ended,
            log=say if asked.verbose else None,
            progress=told,
        )


def _tell(record: EngineRecord, asked: Asked, times: list[list[float]] | None, others: int | None = None) -> None:
    """Prints the log of a build and the information on layers that options ask for.

    `times[iteration][layer]`: measured times in microseconds, None for the plan's own times; `others`: the number of the log's
    lines that other code prints, None for an engine that was built before.
    """
    from gpu_runtime.explain import layer_info, log, report, wording

    if asked.dump_layers or (asked.verbose and others is not None):
        say(report.plan_text(record))
    if others is not None:  # the log's lines, these others and an empty line fit on one screen
        short = partial(log.log_text, record, columns(), log.most_lines(record) - others - 1)
        say(wording.sparsity_text(record) if asked.verbose else short())
    if asked.dump_profile:
        say(layer_info.trt_profile_text(layer_info.profile(record, times)))


# ---- inferences


def _loaded(asked: Asked, name: str) -> None:
    """Handles --loadEngine: prints the layers of the engine in the file `name`, and times its inferences. Raises UsageError for
    options that need a build.
    """
    from gpu_runtime.commands import bench

    wanted = asked.wanted
    check_loaded(wanted, limited="activations" in parse_pools(asked.pools))
    if asked.skip_inference:
        unused(wanted, "--skipInference runs none", "leave it out")
    paths = check_targets(asked.exports | wanted.targets, [name, *wanted.sources])
    progress = listening(asked.verbose)
    engine = bench.load_engine(name, asked.device, progress, asked.shapes)
    times = bench.layer_times(engine, wanted) if asked.profiled else None
    contents = options.exported(engine, None, times, asked.verbosity)
    write_all({paths[option]: content() for option, content in contents.items() if option in paths})
    progress.end()
    _tell(engine.record, asked, times)
    for option, file in asked.exports.items():
        if file:
            say(f"Wrote {file} ({option})")
    if not asked.skip_inference:
        bench.time_engine(engine, name, wanted, paths, progress, asked.verbose)


def _source(model: str | None, onnx: str | None) -> str:
    """Returns the model's file, given as the argument (`model`) or with --onnx. Raises UsageError unless it is given once."""
    if (model is None) == (onnx is None):
        raise click.UsageError("give the model once: as the argument, or with --onnx=FILE")
    return model or onnx or ""


def _target(device: str | None, ray: str | None) -> tuple[Device, Spread | None]:
    """Returns (the GPU that is planned for, the Ray cluster of such GPUs that times tactics, or None).

    `device`, `ray`: the values of --device and --ray, None where they are not given. Raises UsageError for an unknown device,
    or if both are given.
    """
    from gpu_runtime.building import options, target

    if ray is not None:
        if device is not None:
            raise click.UsageError("--ray measures on the GPUs of a cluster: leave --device out")
        found, on = target.placed(options.BuildOptions(ray=ray))
        return found, on.spread
    try:
        if device is not None and device.isdecimal():
            devices.only(int(device))
            device = None
        return target.pick_device(device), None
    except ValueError as e:
        alike = [name for name in NAMED if device and len(device) > 2 and name.endswith(device)]
        hint = f"; did you mean --device={alike[0]}?" if alike else ""
        raise click.UsageError(f"--device: {e}{hint}") from None
