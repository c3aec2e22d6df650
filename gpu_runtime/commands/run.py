"""`gpu-runtime run ENGINE`: runs an engine on arrays from files and writes its outputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import click
import numpy as np

from cuda_kernels import device as devices
from cuda_kernels.extras import CUDA
from gpu_runtime.benchmark.inputs import random_inputs
from gpu_runtime.commands.console import nonfinite_text, say
from gpu_runtime.commands.options import (
    argument,
    cubins_option,
    emulate_option,
    flag,
    gathered,
    given,
    named,
    quiet_option,
    sizes_of,
)
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.reading import npy, npz, opened, read_array
from gpu_runtime.commands.targets import check_targets, write_all
from gpu_runtime.engine import Engine
from gpu_runtime.errors import EngineError
from gpu_runtime.progress import Progress, compiling
from gpu_runtime.runtime.arrays import check_names, host_inputs
from gpu_runtime.runtime.sizes import filled
from gpu_runtime.text import not_finite, printable, shapes_text


@dataclass(frozen=True, slots=True)
class Asked:
    """The argument and options of run."""

    engine: str = argument()
    inputs: tuple[str, ...] = flag(
        "--input", multiple=True, metavar="NAME=FILE.npy", help="An input; may be repeated. Default: random."
    )
    output: str | None = flag(
        "--output", type=click.Path(), metavar="FILE.npz", help="Write the outputs to this file, or one to FILE.npy."
    )
    shapes: str = flag(
        "--shapes",
        default="",
        metavar="SIZES|BATCH",
        help="Without --input, run random values of these sizes, x:8x3x224x224, or of this batch.",
    )
    emulate: bool = given(emulate_option)
    nvtx: bool = flag(
        "--nvtx", is_flag=True, help="Mark each layer with an NVTX range, for Nsight Systems (needs package nvtx)."
    )
    allow_cubins: bool = given(cubins_option)


@click.command("run")
@gathered(Asked)
@quiet_option
def run_command(asked: Asked) -> None:
    """Run ENGINE on arrays from .npy files, or on random ones, and write the outputs to an .npz file.

    Layers that stored infinite values or NaN are named, also where the outputs hide it.
    """
    engine, output, files = asked.engine, asked.output, named("--input", asked.inputs, "NAME=FILE.npy", str.partition)
    kind = "npy" if (output or "").endswith(".npy") else "npz"
    paths = check_targets({"--output": output}, [engine, *files.values()], {"--output": kind})
    if output and not output.endswith(f".{kind}"):
        raise click.UsageError(f"--output {output}: expected a name that ends in .npz, or for one output in .npy")
    progress = listening()
    progress(Progress("load", engine))
    loaded = opened(engine, asked.allow_cubins)
    if kind == "npy" and len(loaded.outputs) > 1:
        count = len(loaded.outputs)
        raise ValueError(f"--output {output}: a .npy file holds one array, the engine has {count} outputs: give an .npz file")
    loaded, arrays = _inputs(loaded, files, asked.shapes)
    try:
        context = loaded.context(device="emulator" if asked.emulate else None, nvtx=asked.nvtx, progress=compiling(progress))
    except EngineError as e:
        raise ValueError(f"{engine}: {e}") from None
    with context as ctx, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # on values that are not finite, reported below
        where = "the CPU emulator" if ctx.emulated else ctx.device.title
        progress(Progress("run", f"{engine} on {where}"))
        results, wrong = ctx.run(arrays), ctx.nonfinite()
    write_all({path: npz(results) if kind == "npz" else npy(*results.values()) for path in paths.values()})
    progress.end()
    sizes = shapes_text({name: a.shape for name, a in arrays.items()})
    drawn = "" if files or not arrays else printable(f", random inputs: {sizes}")
    say(f"Ran {engine} on {where}{_at(loaded)}{drawn}{f'; wrote {output}' if output else ''}")
    if not asked.emulate and not devices.has_cupy():
        say(f"No GPU was looked for, since CuPy is not installed: {CUDA}", err=True)
    given_wrong = [f"input {name!r} holds {text}" for name, a in arrays.items() if (text := not_finite(a))]
    if given_wrong:
        say("; ".join(given_wrong), err=True)
    elif wrong:
        say(nonfinite_text(wrong), err=True)
    for name, a in results.items():
        say(f"  {name}: {a.dtype} {'x'.join(map(str, a.shape))}, {float(a.min()):.6g} to {float(a.max()):.6g}")


def _at(engine: Engine) -> str:
    """Returns the words that name the plan that ran, of several; "" for an engine of one size."""
    return f", by the plan for batch {engine.record.batch}" if engine.record.profiles else ""


def _inputs(engine: Engine, given: Mapping[str, str], shapes: str) -> tuple[Engine, dict[str, np.ndarray]]:
    """Returns (the engine with the plan that runs as the shown one, its inputs by name).

    `given`: input -> its .npy file; without files inputs are random, of the sizes in `shapes`, the value of --shapes. Raises
    ValueError for wrong inputs, before a kernel is compiled or loaded.
    """
    asked = sizes_of(shapes) if shapes else {}
    wanted = filled(engine.at(asked).record, asked)
    if not given:
        engine = engine.at(wanted)
        return engine, random_inputs([replace(i, shape=wanted[i.name]) for i in engine.inputs])
    largest = {b.name: b for plan in engine.record.plans for b in plan.inputs}  # plans of a profile are in rising order
    most = max((8 * math.prod(i.shape) for i in largest.values()), default=0)
    arrays = {name: read_array(f"--input {name}", path, most) for name, path in given.items()}
    try:
        check_names(engine.plan.inputs, arrays)
    except ValueError as e:
        raise ValueError(f"{e}: give {' '.join(f'--input {b.name}=FILE.npy' for b in engine.plan.inputs)}") from None
    got = {name: a.shape for name, a in arrays.items()}
    if shapes and got != wanted:
        texts = f"expected {shapes_text(wanted)}, but --input gives {shapes_text(got)}"
        raise ValueError(f"--shapes={shapes}: {texts}: leave one of them out")
    return (engine.at(got), arrays) if engine.record.profiles else (engine, host_inputs(engine.plan.inputs, arrays))
