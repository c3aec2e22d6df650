"""`gpu-runtime bench ENGINE`: the times of an engine's inferences, with trtexec's options and in trtexec's words; `build` times
inferences with the same options.
"""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from cuda_kernels import device as devices
from gpu_runtime.benchmark import inputs, summary, wording
from gpu_runtime.benchmark.attend import Stuck
from gpu_runtime.benchmark.measure import Measured, measure
from gpu_runtime.benchmark.records import Summary
from gpu_runtime.commands.console import INTERRUPTED, end_now, json_bytes, nonfinite_text, say
from gpu_runtime.commands.options import argument, cubins_option, flag, gathered, given, part, shown_at
from gpu_runtime.commands.progress import ProgressLine, listening
from gpu_runtime.commands.reading import opened
from gpu_runtime.commands.targets import check_targets, write_all, written
from gpu_runtime.commands.trtexec_flags import OfEngine, Wanted
from gpu_runtime.engine import Engine
from gpu_runtime.errors import EngineError
from gpu_runtime.explain.points import at_text
from gpu_runtime.progress import Progress, compiling
from tactics.measure.timing import is_emulated

PROFILE_RUNS = 20  # iterations of --dumpProfile without --iterations


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


@click.command("bench", cls=OfEngine)
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
    progress.end()
    say(f"{name}: {engine.record.model.name} for {engine.record.device.title}{at_text(engine.record)}")
    say(wording.predicted_text(engine.record))


def load_engine(name: str, device: str | None, progress: ProgressLine, shown: str, allow_cubins: bool = False) -> Engine:
    """Returns the engine in the file `name`.

    `device`: the number of the only GPU that this process sees from now on; None: it sees all. `shown`: the value of --shapes,
    the sizes whose plan is shown; `allow_cubins`: machine code in the file may run. Raises UsageError for a device that is no
    number of a GPU of this machine, ValueError for a file that is no engine.
    """
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
    """Times inferences of the engine, prints the results and writes the files.

    `name`: the engine's name for messages; `paths`: option -> the file to write for it; `verbose`: explains each line. After
    Ctrl-C it ends the command with exit code INTERRUPTED, unless the duration is unlimited. Raises ValueError without a GPU.
    """
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


def layer_times(engine: Engine, wanted: Wanted) -> list[list[float]] | None:
    """Runs the engine and returns times[iteration][layer], in microseconds; None for an engine with predicted times.

    The number of iterations is --iterations or else PROFILE_RUNS; inputs are as --loadInputs says.
    """
    if engine.record.timing.is_predicted:
        return None
    iterations = wanted.settings.iterations if "--iterations" in wanted.typed else PROFILE_RUNS
    with engine.context() as ctx:
        return ctx.profile(inputs.load_inputs(wanted.inputs, engine.plan.inputs), iterations)


def _measured(
    engine: Engine, arrays: Mapping[str, Any], wanted: Wanted, progress: ProgressLine, begins: Callable[[], None]
) -> Measured:
    """Times inferences as `measure` does; ends the process if the GPU is stuck, or at Ctrl-C before the first query."""
    try:
        return measure(engine, arrays, wanted.settings, progress=compiling(progress), begins=begins)
    except Stuck as e:
        code, text = 1, f"error: {e}"
    except KeyboardInterrupt:
        code, text = INTERRUPTED, f"interrupted: {written()}; no inference was measured"
    progress.end()
    end_now(code, text)  # the orderly end of the process would wait for the GPU, which may hang


def _say(measured: Measured, found: Summary, wanted: Wanted, verbose: bool) -> None:
    say(wording.text(measured.trace, found, wanted.settings, runs=wanted.runs, verbose=verbose, emulated=is_emulated()))
    if measured.nonfinite:
        say(nonfinite_text(measured.nonfinite), err=True)
    if wanted.dump:
        say(wording.outputs_text(measured.outputs))
