"""`gpu-runtime bench ENGINE`: how long inferences take, with trtexec's options and in its words; `build` has them too."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuda_kernels import device as devices
from gpu_runtime.benchmark.records import Settings
from gpu_runtime.commands.console import INTERRUPTED, end_now, json_bytes, nonfinite_text, say
from gpu_runtime.commands.options import argument, cubins_option, flag, gathered, given, opened, part, shown_at, typed
from gpu_runtime.commands.progress import ProgressLine, listening
from gpu_runtime.commands.targets import check_targets, write_all, written
from gpu_runtime.errors import EngineError
from gpu_runtime.progress import Progress, compiling

if TYPE_CHECKING:
    from cuda_kernels.device import Device
    from gpu_runtime.benchmark.measure import Measured
    from gpu_runtime.benchmark.records import Settings, Summary
    from gpu_runtime.engine import Engine

PERCENTILES = "90,95,99"


# ---- values of options


def _time(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not 0 <= value < math.inf:
        raise click.UsageError(f"{parameter.opts[0]}: expected a time from 0 on, got {value:g}", context)
    return value


def _duration(context: click.Context, parameter: click.Parameter, value: float) -> float:
    return math.inf if value == -1 else _time(context, parameter, value)


def _patience(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not 0 < value < math.inf:
        raise click.UsageError(f"{parameter.opts[0]}: expected a time above 0, got {value:g}", context)
    return value


def _percents(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        found = tuple(map(float, value.split(",")))
    except ValueError:
        found = (math.nan,)
    if all(0 <= p <= 100 for p in found):
        return found
    raise click.UsageError(f"{parameter.opts[0]}: expected numbers from 0 to 100, as {PERCENTILES}, got {value!r}", context)


MS: dict[str, Any] = {"type": float, "metavar": "MS", "callback": _time}


# fmt: off
@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of timed inferences."""

    warm_up: float = flag("--warmUp", default=200, show_default=True, **MS, help="Run for this long before the measurement.")
    iterations: int = flag("--iterations", type=click.IntRange(min=1), default=10, show_default=True,
                           help="Measure at least this many inferences of each stream.")
    duration: float = flag("--duration", type=float, default=3, show_default=True, metavar="SECONDS", callback=_duration,
                           help="Measure for at least this long; -1: until Ctrl-C.")
    streams: int = flag("--streams", "--infStreams", type=click.IntRange(1, 64), default=1, show_default=True,
                        help="Contexts that run at once, each on a stream of its own.")
    threads: bool = flag("--threads", is_flag=True, help="Each stream in a host thread of its own.")
    no_graph: bool = flag("--noCudaGraph", is_flag=True, help="Launch kernels one by one. Default: as one CUDA graph.")
    no_transfers: bool = flag("--noDataTransfers", is_flag=True, help="Copy the inputs once, before the first inference. "
                              "Default: each inference copies inputs and outputs from and to pinned memory.")
    no_spin: bool = flag("--noSpinWait", is_flag=True, help="Let the host sleep while it waits. Default: it spins.")
    sleep: float = flag("--sleepTime", default=0, **MS, help="Sleep before the first inference.")
    idle: float = flag("--idleTime", default=0, **MS, help="Sleep after each inference.")
    runs: int | None = flag("--avgRuns", type=click.IntRange(min=1), metavar="N", help="Also print the mean times of every N "
                            "inferences.")
    percents: tuple[float, ...] = flag("--percentile", default=PERCENTILES, show_default=True, metavar="P,...",
                                       callback=_percents, help="Percentiles to print (nearest rank).")
    inputs: str = flag("--loadInputs", default="", metavar="NAME:FILE,...", help="Inputs from raw files, as numpy's tofile() "
                       "writes them, or .npy files. Other inputs are random, with a fixed seed.")
    dump: bool = flag("--dumpOutput", is_flag=True, help="Print the outputs, every value.")
    output: str | None = flag("--exportOutput", type=click.Path(), metavar="FILE", help="Write the outputs (trtexec's JSON).")
    times: str | None = flag("--exportTimes", type=click.Path(), metavar="FILE", help="Write the times of every inference "
                             "(trtexec's JSON).")
    patience: float = flag("--timeout", type=float, default=60, show_default=True, metavar="SECONDS", callback=_patience,
                           help="Give up if no inference ends for this long.")
    # fmt: on

    @property
    def settings(self) -> Settings:
        counted = self.warm_up, self.iterations, self.duration, self.streams, self.threads
        how = not self.no_graph, not self.no_transfers, not self.no_spin
        return Settings(*counted, *how, self.sleep, self.idle, self.patience)

    @property
    def typed(self) -> list[str]:
        """The options that were given."""
        return [*typed(*(f.name for f in fields(self))).values()]

    @property
    def targets(self) -> dict[str, str | None]:
        """Option -> the file that it asks for."""
        return {"--exportTimes": self.times, "--exportOutput": self.output}

    @property
    def sources(self) -> list[str]:
        """The files that --loadInputs reads."""
        return [item.rpartition(":")[2] for item in self.inputs.split(",") if item]

    @property
    def results(self) -> list[str]:
        """The given options that ask for what only a run gives."""
        return [name for name in self.typed if name in ("--exportTimes", "--exportOutput", "--dumpOutput", "--loadInputs")]


# ---- the command


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments and options of bench."""

    engine: str = argument()
    wanted: Wanted = part(Wanted)
    device: str | None = flag("--device", metavar="N", help="Number of the GPU. Default: the current GPU.")
    predict: bool = flag("--predict", is_flag=True, help="Print the predicted time instead; this takes no GPU.")
    verbose: bool = flag("--verbose", is_flag=True, help="Explain each line.")
    allow_cubins: bool = given(cubins_option)
    shown: str = given(shown_at)


@click.command("bench", short_help="Time inferences of an engine, as trtexec does.")
@gathered(Asked)
def bench_command(asked: Asked) -> None:
    """Time inferences of ENGINE on a GPU: throughput, latency, and the shares of the host, the copies and the kernels in it.

    Inferences are measured, after a warm-up, until there are --iterations of them and --duration has passed. Ctrl-C ends it
    early and prints the results so far.
    """
    name, wanted = asked.engine, asked.wanted
    if asked.predict and wanted.results:
        raise click.UsageError(f"--predict runs nothing: leave out {', '.join(wanted.results)}")
    if asked.predict and wanted.typed:
        say(f"ignored: {', '.join(wanted.typed)}: --predict runs nothing", err=True)
    paths = check_targets(wanted.targets, [name, *wanted.sources])
    progress = listening()
    engine = load_engine(name, asked.device, progress, asked.shown, asked.allow_cubins)
    if not asked.predict:
        return time_engine(engine, name, wanted, paths, progress, asked.verbose)
    from gpu_runtime.benchmark import summary, wording
    from gpu_runtime.explain.points import at_text

    progress.end()
    say(f"{name}: {engine.record.model.name} for {engine.record.device.title}{at_text(engine.record)}")
    say(wording.predicted_text(summary.predicted(engine.record)))


def load_engine(name: str, device: str | None, progress: ProgressLine, shown: str, allow_cubins: bool = False) -> Engine:
    """The engine of a file; this process sees the GPU of the number `device` alone. UsageError for any other device."""
    try:
        if device is not None and not device.isdecimal():
            raise ValueError(f"expected the number of a GPU here, got {device!r}: an engine is for the GPU it was built for")
        if device is not None:
            devices.only(int(device))
    except ValueError as e:
        raise click.UsageError(f"--device: {e}") from None
    progress(Progress("load", name))
    return opened(name, allow_cubins, shown, "gpu-runtime bench --allow-cubins")


def time_engine(
    engine: Engine, name: str, wanted: Wanted, paths: Mapping[str, Path], progress: ProgressLine, verbose: bool
) -> None:
    """Measure and print; `name`: of the engine, in messages; `paths`: option -> the file that it asks for."""
    from gpu_runtime.benchmark import inputs, summary, wording
    from gpu_runtime.explain.points import at_text

    if why := devices.why_no_gpu():
        cure = f"gpu-runtime bench {shlex.quote(name)} --predict prints the predicted time"
        raise ValueError(f"no GPU can be used here to time inferences: {why}. {cure}")
    arrays = inputs.load_inputs(wanted.inputs, engine.plan.inputs)
    where = devices.current()
    begins = partial(progress, Progress("run", f"{name} on {where.title}"))
    try:
        measured = _measured(engine, arrays, wanted, progress, begins)
    except EngineError as e:
        raise ValueError(f"{name}: {e}") from None
    found = summary.summarize(measured.trace, wanted.percents)
    contents = {
        "--exportTimes": lambda: json_bytes(wording.times_json(measured.trace)),
        "--exportOutput": lambda: json_bytes(wording.outputs_json(measured.outputs)),
    }
    write_all({paths[option]: content() for option, content in contents.items() if option in paths})
    progress.end()
    say(f"Timing {name} on {where.title} ({where.sm}){at_text(engine.record)}: {wording.title(wanted.settings)}")
    _say(measured, found, wanted, verbose)
    for option in contents:
        if option in paths:
            say(f"Wrote {wanted.targets[option]} ({option})")
    if measured.trace.interrupted and wanted.settings.duration_s < math.inf:
        say("interrupted: only the inferences before the interrupt are counted", err=True)
        click.get_current_context().exit(INTERRUPTED)


def _measured(
    engine: Engine, arrays: Mapping[str, Any], wanted: Wanted, progress: ProgressLine, begins: Callable[[], None]
) -> Measured:
    from gpu_runtime.benchmark.attend import Stuck
    from gpu_runtime.benchmark.measure import measure

    try:
        return measure(engine, arrays, wanted.settings, progress=compiling(progress), begins=begins)
    except Stuck as e:
        code, text = 1, f"error: {e}"
    except KeyboardInterrupt:
        code, text = INTERRUPTED, f"interrupted: {written()}; no inference was measured"
    progress.end()
    end_now(code, text)  # the orderly end of the process would wait for the GPU, which may hang


def _say(measured: Measured, found: Summary, wanted: Wanted, verbose: bool) -> None:
    from gpu_runtime.benchmark import wording
    from tactics.measure.timing import is_emulated

    say(wording.text(measured.trace, found, wanted.settings, runs=wanted.runs, verbose=verbose, emulated=is_emulated()))
    if measured.nonfinite:
        say(nonfinite_text(measured.nonfinite), err=True)
    if wanted.dump:
        say(wording.outputs_text(measured.outputs))


# ---- inferences beside a build


def is_timed(target: Device, skip: bool, wanted: Wanted, away: bool) -> bool:
    """Whether inferences are timed after the build, as trtexec does: on the GPU that it was measured on, if not away."""
    if away:
        unused(wanted, f"this machine has no {target.title}", "gpu-runtime bench ENGINE times inferences on one")
    elif skip:
        unused(wanted, "--skipInference runs none", "leave it out")
    elif not target.measured:
        cure = "gpu-runtime bench ENGINE times inferences on a GPU, and with --predict predicts the time without one"
        unused(wanted, "none is run when times are predicted", cure)
    return target.measured and not skip and not away


def unused(wanted: Wanted, why: str, cure: str) -> None:
    """Tell which options of inferences are of no use; UsageError for those that ask for what only an inference gives."""
    if wanted.results:
        raise click.UsageError(f"{', '.join(wanted.results)} apply to timed inferences, but {why}: {cure}")
    if ignored := [name for name in wanted.typed if name != "--iterations"]:  # it is the profile's, too
        say(f"ignored: {', '.join(ignored)} apply to timed inferences, but {why}: {cure}", err=True)


NOT_LOADED = ("engine_path", "save_pruned", "export_onnx", "model", "onnx")  # parameters that a build needs
# fmt: off
OF_LOADED = ("engine_to_load", "skip_inference", "device", "verbosity", "dump_layers", "dump_profile", "export_layers",
             "export_profile", "export_trace", "verbose", "fp16", "shapes")
# fmt: on


def check_loaded(wanted: Wanted, limited: bool) -> None:
    """UsageError for options of a build that name a file of its own or are to limit memory; others are told to be of no use."""
    given_options = typed()
    if refused := [o for name, o in given_options.items() if name in NOT_LOADED or (name == "pools" and limited)]:
        raise click.UsageError(f"--loadEngine reads an engine and builds none: leave out {', '.join(refused)}")
    if ignored := [option for name, option in given_options.items() if name not in OF_LOADED and option not in wanted.typed]:
        say(f"ignored: {', '.join(ignored)}: --loadEngine builds nothing", err=True)
