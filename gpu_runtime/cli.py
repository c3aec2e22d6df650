"""The command line: `build-engine model.onnx -o model.engine`, and `gpu-runtime build | run | inspect | inspect-sparsity`.

Results go to stdout, errors and progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A
command writes all its files or none: targets are checked before anything is built, every file is first written beside
its target, and only then are they renamed, the engine last. Heavy imports happen inside the commands, so that --help is
immediate.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuda_kernels import files
from cuda_kernels.compile import CompileError
from gpu_runtime.errors import InternalError

if TYPE_CHECKING:
    import numpy as np

    from cuda_kernels.device import Device
    from gpu_runtime.runtime.engine import Engine

# trtexec options that ask for what always happens here, or for what only its own inference loop knows.
ACCEPTED_FLAGS = ("--separateProfileRun", "--useCudaGraph", "--noDataTransfers", "--useSpinWait", "--skipInference")


WRITTEN: list[str] = []  # files that this process has put in place


def _say(text: str, err: bool = False, nl: bool = True) -> None:
    """Print a text that may hold names out of files: no character of it commands the terminal."""
    from gpu_runtime.text import printable

    click.echo(printable(text, keep="\n"), err=err, nl=nl)


def parse_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """`x:1x3x224x224,y:1x10` -> {"x": (1, 3, 224, 224), "y": (1, 10)}. Raises UsageError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for item in text.split(",") if text else ():
        name, _, dims = item.rpartition(":")
        name = name.strip("'\" ")
        if not name or not re.fullmatch(r"[1-9][0-9]{0,18}(x[1-9][0-9]{0,18})*", dims.strip().lower()):
            raise click.UsageError(f"--shapes: expected name:1x3x224x224 (several with commas), got {item!r}")
        shape = tuple(map(int, dims.lower().split("x")))
        if shapes.setdefault(name, shape) != shape:
            raise click.UsageError(f"--shapes: two sizes for input {name!r}: give one, since sizes are fixed in an engine")
    return shapes


def parse_pools(text: str) -> int | None:
    """`workspace:64` (MiB), `workspace:1.5G`, `workspace:512K` -> bytes; None for an empty text. Raises UsageError."""
    if not text:
        return None
    found = re.fullmatch(r"workspace:([0-9]+(?:\.[0-9]+)?)(B|K|M|G)?(?:i?B)?", text, re.I)
    if not found:
        raise click.UsageError(f"--memPoolSize: expected workspace:MIB, as workspace:64 or workspace:512K, got {text!r}; other "
                               "pools do not exist here")  # fmt: skip
    return int(float(found[1]) * {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[(found[2] or "M").upper()])


def check_targets(targets: Mapping[str, str | None], sources: Iterable[str]) -> dict[str, Path]:
    """Option -> real path of each file to write. ValueError where one cannot be written, before any work is done."""
    found: dict[str, Path] = {}
    for option, name in targets.items():
        if name is None:
            continue
        path = Path(os.path.realpath(name))
        twin = next((o for o, other in found.items() if other == path), None)
        if name.startswith("="):  # -o=FILE
            problem: str | None = "expected the name of a file: write it after a space, or as --option=FILE"
        elif problem := files.fault(name):
            pass
        elif any(os.path.exists(s) and os.path.samefile(s, name) for s in sources if path.exists()):
            problem = "is a file that this command reads: give another name"
        elif twin:
            problem = f"is also the file of {twin}: give two names"
        else:
            found[option] = path
            continue
        raise ValueError(f"{option} {name}: {problem}" if name else f"{option}: {problem}")
    return found


def write_all(contents: Mapping[str | os.PathLike[str], bytes]) -> None:
    """Write every file or none. Raises ValueError that says what went wrong and what was written."""
    try:
        files.write_all(contents, WRITTEN)
    except OSError as e:
        raise ValueError(
            f"{e.filename}: could not be written: {e.strerror}; {_written()}. Check that its folder is writable and has space"
        ) from None


def _written() -> str:
    return f"already written: {', '.join(WRITTEN)}" if WRITTEN else "nothing was written or overwritten"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def program() -> None:
    """Build, run and inspect engines: the fastest plan for a convolutional network, and why each layer runs as it does."""


def _flag_options(command: Callable[..., None]) -> Callable[..., None]:
    for flag in ACCEPTED_FLAGS:
        command = click.option(flag, flag.strip("-"), is_flag=True, hidden=True)(command)
    return command


@program.command("build", short_help="Build an engine from an ONNX model and explain it.")
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
@click.option("--device", metavar="NAME", help="Plan for this GPU with predicted times: a100, a100_pcie, a100_40gb, "
              "a10, a40, l4, l40s, h100, h200, b200, rtx3070, rtx3090, rtx4090, rtx5090, rtx_pro_6000. Default: the GPU at "
              "hand, measured; without one, h200.")  # fmt: skip
@click.option("--memPoolSize", "pools", default="", metavar="workspace:MIB", help="Scratch memory that a kernel may use, in "
              "MiB (or 64K, 1.5G); without it, any amount.")  # fmt: skip
@click.option("--risk", type=click.FloatRange(0.5, 1, max_open=True), default=0.6, show_default=True, help="With predicted "
              "times: how likely a sparse kernel must be the faster one to be taken.")  # fmt: skip
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
@click.option("--iterations", type=click.IntRange(min=1), default=20, show_default=True, help="Runs of the profile, on a GPU.")
@_flag_options
def build_command(
    model: str | None, onnx: str | None, engine_path: str | None, sparsity: str, fp16: bool, input_formats: str | None,
    output_formats: str | None, shapes: str, device: str | None, pools: str, risk: float, timing_cache: str | None,
    save_pruned: str | None, embed_cubins: bool, verbose: bool, exhaustive: bool, verbosity: str, dump_layers: bool,
    dump_profile: bool, export_layers: str | None, export_profile: str | None, iterations: int, **accepted: bool,
) -> None:  # fmt: skip
    """Build an engine from an ONNX MODEL, print the plan and why each layer runs sparse or dense."""
    source = model or onnx
    if source is None or (model and onnx):
        raise click.UsageError("give the model once: as the argument, or with --onnx=FILE")
    if save_pruned and sparsity != "force":
        raise click.UsageError("--savePruned needs --sparsity=force: without it nothing is pruned")
    sizes, workspace = parse_shapes(shapes), parse_pools(pools)
    targets = {"--savePruned": save_pruned, "--exportProfile": export_profile, "--exportLayerInfo": export_layers}
    paths = check_targets(targets | {"--saveEngine": engine_path, "--timingCacheFile": timing_cache}, [source])
    from gpu_runtime.explain import layer_info, report, wording
    from gpu_runtime.pipeline import build
    from gpu_runtime.runtime.engine import encode

    target = _target(device, timing_cache)
    pruned = io.BytesIO()
    engine = build(
        source, sparsity=sparsity, device=target, shapes=sizes, timing_cache=timing_cache,
        save_pruned=pruned if save_pruned else None, embed_cubins=embed_cubins, input_formats=input_formats,
        output_formats=output_formats, exhaustive=exhaustive, workspace=workspace, risk=risk, log=_say if verbose else None,
        progress=lambda stage, detail: _say(f"[{stage}] {detail}", err=True) if verbose else None,
    )  # fmt: skip
    times = _layer_times(engine, iterations) if dump_profile or export_profile else None
    profile = layer_info.profile(engine.record, times)
    contents: dict[str, Callable[[], bytes]] = {
        "--savePruned": pruned.getvalue,
        "--exportProfile": lambda: _json(profile),
        "--exportLayerInfo": lambda: _json(_shown(engine.layer_info(), verbosity)),
        "--saveEngine": lambda: encode(engine),
    }
    write_all({paths[option]: content() for option, content in contents.items() if option in paths})
    if dump_layers or verbose:
        _say(report.plan_text(engine.record))
    _say(wording.sparsity_text(engine.record))
    if dump_profile:
        _say(layer_info.trt_profile_text(profile))
    for option, name in targets.items():
        if name:
            _say(f"Wrote {name} ({option})")
    _say_engine(engine, engine_path, paths)


def _target(device: str | None, timing_cache: str | None) -> Device:
    """The device that is planned for, which is said."""
    from gpu_runtime.pipeline import pick_device

    try:
        target = pick_device(device)
    except ValueError as e:
        raise click.UsageError(f"--device: {e}") from None
    _say(_planning_for(target, device))
    if timing_cache and not target.measured:
        _say("--timingCacheFile is neither read nor written: it holds measured times only")
    return target


def _shown(info: dict[str, Any], verbosity: str) -> dict[str, Any]:
    """Layer information as --profilingVerbosity asks for it."""
    if verbosity == "detailed":
        return info
    names = [layer["Name"] for layer in info["Layers"]]
    return {"Layers": names if verbosity == "layer_names_only" else [], "Bindings": info["Bindings"]}


def _say_engine(engine: Engine, name: str | None, paths: Mapping[str, Path]) -> None:
    """The last line of a build: what was written where."""
    if name is None:
        return _say("No engine was written: -o FILE does that")
    timing, size = engine.record.timing, paths["--saveEngine"].stat().st_size
    total = f"{'~' if timing.is_predicted else ''}{engine.plan.solution.total_us:.1f} us, {timing.label}"
    _say(f"Wrote {name}: {size} bytes, {len(engine.plan.steps)} kernel launches, {total}")


def _planning_for(target: Device, name: str | None) -> str:
    """The first line of a build: which device, and where its times come from."""
    if target.measured:
        return f"Planning for {target.title} ({target.sm}), timing on it"
    default = "" if name else ", the default where no GPU is found (another with --device)"
    return f"Planning for {target.title} ({target.sm}){default}; times are predicted({target.name}), nothing is measured"


def _json(data: object) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()


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


def _named(
    option: str, items: Iterable[str], expected: str, split: Callable[[str, str], tuple[str, str, str]]
) -> dict[str, str]:
    """NAME=VALUE, ... -> {NAME: VALUE}; `split`: str.partition where values may hold an equals sign, str.rpartition names."""
    found: dict[str, str] = {}
    for item in items:
        name, _, value = split(item, "=")
        if not name or not value:
            raise click.UsageError(f"{option}: expected {expected}, got {item!r}")
        if name in found:
            raise click.UsageError(f"{option}: {name!r} is given twice, as {found[name]} and as {value}")
        found[name] = value
    return found


@program.command("run", short_help="Run an engine on .npy files.")
@click.argument("engine", type=click.Path())
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="An input; once for each.")
@click.option("--output", "output", type=click.Path(), required=True, help="Write all outputs to this .npz file.")
@click.option("--emulate", is_flag=True, help="Run in the emulator even where there is a GPU.")
@click.option("--allow-cubins", is_flag=True, help="Accept machine code inside the engine file.")
def run_command(engine: str, inputs: tuple[str, ...], output: str, emulate: bool, allow_cubins: bool) -> None:
    """Run ENGINE on arrays from .npy files and write the outputs to an .npz file.

    Layers that stored infinite values or NaN are named, also where the outputs hide it.
    """
    given = _named("--input", inputs, "NAME=FILE.npy", str.partition)
    paths = check_targets({"--output": output}, [engine, *given.values()])
    from gpu_runtime import EngineError, load

    try:
        loaded = load(engine, allow_cubins=allow_cubins)
    except EngineError as e:
        raise ValueError(str(e).replace("allow_cubins=True", "--allow-cubins")) from None
    most = max((8 * math.prod(i.shape) for i in loaded.inputs), default=0)
    arrays = {name: _read_array(name, path, most) for name, path in given.items()}
    try:
        context = loaded.context(device="emulator" if emulate else None)
    except EngineError as e:
        raise ValueError(f"{engine}: {e}") from None
    with context as ctx, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # said below
        results, wrong = ctx.run(arrays), ctx.nonfinite()
        where = "the CPU emulator" if ctx.emulated else ctx.device.title
    write_all({paths["--output"]: _npz(results)})
    _say(f"Ran {engine} on {where}; wrote {output}")
    if wrong:
        _say(f"Infinite values or NaN, since FP16 ends at 65504, were written by {len(wrong)} layers: {', '.join(wrong)}",
                   err=True)  # fmt: skip
    for name, a in results.items():
        _say(f"  {name}: {a.dtype} {'x'.join(map(str, a.shape))}, {float(a.min()):.6g} to {float(a.max()):.6g}")


def _read_array(name: str, path: str, most: int) -> np.ndarray:
    """The array in a file whose elements take up to `most` bytes, whatever their type: it is checked later."""
    import numpy as np

    try:
        with files.open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > most + (1 << 16):
                raise ValueError(f"it has {size} bytes, an input of this engine {most} at most")
            return np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"--input {name}: {path}: no such file; expected a .npy file, as numpy.save writes it") from None
    except Exception as e:  # whatever a damaged header makes NumPy raise
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ValueError(f"--input {name}: {path}: not a readable .npy file, as numpy.save writes it: {reason}") from None


def _npz(arrays: Mapping[str, Any]) -> bytes:
    """The bytes of an .npz file; unlike numpy.savez this takes any name."""
    import numpy as np

    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, a in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(a), allow_pickle=False)
    return data.getvalue()


@program.command("inspect", short_help="Show the plan, layers and sparsity of an engine.")
@click.argument("engine", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the layer information as JSON.")
def inspect_command(engine: str, as_json: bool) -> None:
    """Show what is in ENGINE: plan, layers, memory and the sparsity of each layer."""
    from gpu_runtime import load
    from gpu_runtime.explain import report

    loaded = load(engine, allow_cubins=True)  # only read, never run
    if as_json:
        _say(json.dumps(loaded.layer_info(), indent=1))
    else:
        _say(report.inspect_text(loaded.record, loaded.checked), nl=False)


@program.command("explain", short_help="Say why each layer of an engine runs sparse or dense.")
@click.argument("engine", type=click.Path())
@click.argument("layers", nargs=-1, metavar="[LAYER]...")
@click.option("--what-if", "wishes", multiple=True, metavar="LAYER=WISH", help="Plan again with a layer held to sparse, "
              "dense, a format (hwc8) or two ('chw->hwc8'), and show what moves; once for each layer.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain_command(engine: str, layers: tuple[str, ...], wishes: tuple[str, ...], as_json: bool) -> None:
    """Say why each layer of ENGINE, or each LAYER named, runs sparse or dense, with the numbers behind it."""
    wanted = _named("--what-if", wishes, "LAYER=sparse, LAYER=dense or LAYER=hwc8", str.rpartition)
    if wanted and layers:
        raise click.UsageError("--what-if names its layers itself: leave out the other layer names")
    from dataclasses import replace

    from gpu_runtime import load
    from gpu_runtime.explain import what_if, wording
    from gpu_runtime.runtime.findings import SparsityRow, Summary
    from tactics import codec

    record = load(engine, allow_cubins=True).record  # only read, never run
    if wanted:
        found = what_if.what_if(record, wanted)
        answer = codec.to_json(what_if.Answer, found, defaults=True)
        _say(json.dumps(answer, indent=1) if as_json else what_if.text(record, found), nl=as_json)
        return
    rows = wording.rows_of(record, layers)
    if as_json:
        told = [replace(row, sentence=wording.sentence(row, record)) for row in rows]
        summary = codec.to_json(Summary | None, record.plan.sparsity.summary, defaults=True)
        shown = [codec.to_json(SparsityRow, row, defaults=True) for row in told]
        _say(json.dumps({"timing": record.timing.label, "summary": summary, "layers": shown}, indent=1))
    else:
        _say(wording.explain_text(record, rows), nl=False)


@program.command("plan", short_help="Plan a model for several GPUs, side by side.")
@click.argument("model", type=click.Path())
@click.option("--devices", required=True, metavar="NAMES", help="Names with commas: a100,l4,h100,h200,rtx4090.")
@click.option("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="enable", show_default=True)
@click.option("--shapes", default="", metavar="SIZES", help="Sizes of dynamic inputs: input:1x3x224x224[,other:...].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan_command(model: str, devices: str, sparsity: str, shapes: str, as_json: bool) -> None:
    """Plan MODEL for several GPUs with predicted times: which layers go sparse where, and why they differ."""
    sizes = parse_shapes(shapes)
    from cuda_kernels import device
    from gpu_runtime.explain import side_by_side
    from gpu_runtime.pipeline import compare
    from gpu_runtime.runtime.plan_record import Outlook
    from tactics import codec

    names = [name.strip() for name in devices.split(",")]
    try:
        names = [device.named(name).name for name in names]
    except ValueError as e:
        raise click.UsageError(f"--devices: {e}") from None
    plans = compare(model, names, sparsity=sparsity, shapes=sizes)
    data = [codec.to_json(Outlook, p, defaults=True) for p in plans]
    _say(json.dumps(data, indent=1) if as_json else side_by_side.text(plans), nl=as_json)


@program.command("inspect-sparsity", short_help="Show whether the weights of an ONNX model are 2:4.")
@click.argument("model", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect_sparsity_command(model: str, as_json: bool) -> None:
    """Show how sparse the weights of an ONNX MODEL are, and whether they are 2:4."""
    from gpu_runtime.frontend import pattern

    rows = pattern.inspect(model)
    if as_json:
        found = {"summary": pattern.summary(rows), "pruning": pattern.pruning(rows), "layers": rows}
        _say(json.dumps(found, indent=1))
    else:
        _say(pattern.text(rows), nl=False)


def main(args: list[str] | None = None) -> None:
    """Run the program; every expected failure is one message on stderr and a non-zero exit."""
    WRITTEN.clear()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: click.echo(f"warning: {message}", err=True)
            program.main(args, prog_name="gpu-runtime", standalone_mode=False)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _say(f"interrupted: {_written()} (times measured so far stay in the timing cache)", err=True)
        sys.exit(130)
    except (ValueError, CompileError, InternalError, OSError) as e:
        _say(f"error: {e}", err=True)
        sys.exit(1)


def build_engine() -> None:
    """`build-engine ...` is `gpu-runtime build ...`."""
    main(["build", *sys.argv[1:]])
