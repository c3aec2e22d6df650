"""The command line: `build-engine model.onnx -o model.engine`, and `gpu-runtime build | run | inspect | inspect-sparsity`.

Results go to stdout, errors to stderr. Exit codes: 0 done, 1 failed (nothing written or overwritten), 2 wrong usage,
130 interrupted. Heavy imports happen inside the commands, so that --help is immediate.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

# trtexec options that ask for what always happens here, or for what only its own inference loop knows.
ACCEPTED_FLAGS = ("--separateProfileRun", "--useCudaGraph", "--noDataTransfers", "--useSpinWait", "--skipInference")


def parse_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """`x:1x3x224x224,y:1x10` -> {"x": (1, 3, 224, 224), "y": (1, 10)}. Raises ValueError."""
    shapes = {}
    for item in text.split(","):
        name, _, dims = item.rpartition(":")
        name = name.strip("'\" ")
        try:
            shape = tuple(int(d) for d in dims.lower().split("x"))
        except ValueError:
            shape = ()
        if not name or not shape or min(shape) < 1:
            raise ValueError(f"--shapes: expected name:1x3x224x224 (several with commas), got {item!r}")
        shapes[name] = shape
    return shapes


def write_text(path: str, text: str) -> None:
    """Write a report file by rename; OSError tells the path and the reason."""
    from cuda_kernels.compile import write_atomic

    write_atomic(Path(path), text.encode())


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def program() -> None:
    """Build, run and inspect engines: fastest plan for a convolutional network, with the reason for every layer."""


def _flag_options(command):
    for flag in ACCEPTED_FLAGS:
        command = click.option(flag, flag.strip("-"), is_flag=True, hidden=True)(command)
    return command


@program.command("build")
@click.argument("model", required=False, type=click.Path())
@click.option("--onnx", type=click.Path(), help="The model, as trtexec users give it (same as the argument).")
@click.option("-o", "--saveEngine", "engine_path", type=click.Path(), help="Write the engine to this file.")
@click.option("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="disable", show_default=True,
              help="enable: consider 2:4 kernels where the weights have the pattern; force: prune to it first.")  # fmt: skip
@click.option("--fp16", is_flag=True, help="Accepted: FP16 with FP32 accumulation is what all kernels compute.")
@click.option("--shapes", default="", help="Sizes of dynamic inputs: input:1x3x224x224[,other:...].")
@click.option("--device", default=None, help="Plan for a named GPU with predicted times: a100, rtx4090, h200. "
              "Default: the GPU at hand, measured; without one, h200.")  # fmt: skip
@click.option("--timingCacheFile", "timing_cache", type=click.Path(), help="Measured times to use and extend.")
@click.option("--savePruned", "save_pruned", type=click.Path(), help="With --sparsity=force: write the pruned model.")
@click.option("--embed-cubins", is_flag=True, help="Put machine code into the engine; loading it takes allow_cubins.")
@click.option("--verbose", is_flag=True, help="Also name every layer while it is timed, and what was not pruned.")
@click.option("--profilingVerbosity", "verbosity", type=click.Choice(["layer_names_only", "detailed", "none"]),
              default="detailed", help="Detail of the exported layer information.")  # fmt: skip
@click.option("--dumpLayerInfo", "dump_layers", is_flag=True, help="Print the layers as a table.")
@click.option("--dumpProfile", "dump_profile", is_flag=True, help="Print the time of every layer.")
@click.option("--exportLayerInfo", "export_layers", type=click.Path(), help="Write layer information as TensorRT does.")
@click.option("--exportProfile", "export_profile", type=click.Path(), help="Write layer times (TensorRT's JSON).")
@click.option("--iterations", default=20, show_default=True, help="Runs of the profile, on a GPU.")
@_flag_options
def build_command(model, onnx, engine_path, sparsity, fp16, shapes, device, timing_cache, save_pruned, embed_cubins,
                  verbose, verbosity, dump_layers, dump_profile, export_layers, export_profile, iterations,
                  **accepted) -> None:  # fmt: skip
    """Build an engine from an ONNX MODEL, print the plan and why each layer runs sparse or dense."""
    if bool(model) == bool(onnx):
        raise click.UsageError("give the model once: as the argument, or with --onnx=FILE")
    if save_pruned and sparsity != "force":
        raise click.UsageError("--savePruned needs --sparsity=force: without it nothing is pruned")
    from gpu_runtime import report
    from gpu_runtime.pipeline import build, pick_device

    target = pick_device(device)
    if target.measured:
        click.echo(f"Planning for {target}, measured on it")
    else:
        why = "" if device else " (no CUDA GPU here; another with --device)"
        click.echo(f"Planning for {target}{why}: times are predicted({target.name}), nothing is measured")

    def progress(stage: str, detail: str) -> None:
        if verbose:
            click.echo(f"[{stage}] {detail}", err=True)

    engine = build(
        model or onnx, sparsity=sparsity, device=target, shapes=parse_shapes(shapes) if shapes else None,
        timing_cache=timing_cache, save_pruned=save_pruned, embed_cubins=embed_cubins, progress=progress,
    )  # fmt: skip
    plan = engine.plan
    if sparsity == "force":
        pruned, kept = plan["sparsity"]["pruned"], plan["sparsity"]["not_pruned"]
        click.echo(
            f"--sparsity=force pruned {len(pruned)} weights to 2:4 by magnitude: outputs change"
            + (f"; the pruned model is {save_pruned}" if save_pruned else " (--savePruned=FILE keeps that model)")
        )
        for name, reason in kept:
            click.echo(f"  not pruned: {name}: {reason}")
    if dump_layers or verbose:
        click.echo(report.plan_text(plan), nl=False)
    click.echo(report.sparsity_text(plan), nl=False)

    records = report.profile(plan, _layer_times(engine, iterations) if dump_profile or export_profile else None)
    if dump_profile:
        click.echo(report.trt_profile_text(records), nl=False)
    if export_profile:
        write_text(export_profile, json.dumps(records, indent=1) + "\n")
    if export_layers:
        info = report.layer_info(plan)
        if verbosity != "detailed":
            names = [layer["Name"] for layer in info["Layers"]]
            info = {"Layers": names if verbosity == "layer_names_only" else [], "Bindings": info["Bindings"]}
        write_text(export_layers, json.dumps(info, indent=1) + "\n")
    if engine_path:
        engine.save(engine_path)
        total = f"{plan['plan']['total_us']:.1f} us {plan['timing']['label']}"
        click.echo(f"Wrote {engine_path}: {os.path.getsize(engine_path)} bytes, {len(plan['steps'])} kernels, {total}")


def _layer_times(engine, iterations: int):
    """Measured layer times on a GPU; None, which means the plan's predicted ones, without."""
    if engine.plan["timing"]["kind"] != "measured":
        return None
    import numpy as np

    rng = np.random.default_rng(0)
    types = {"fp32": np.float32, "fp16": np.float16}
    inputs = {i["name"]: rng.standard_normal(i["shape"]).astype(types[i["dtype"]]) for i in engine.inputs}
    with engine.context() as ctx:
        return ctx.profile(inputs, iterations)


@program.command("run")
@click.argument("engine", type=click.Path())
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="An input; once for each.")
@click.option("--output", "output", type=click.Path(), required=True, help="Write all outputs to this .npz file.")
@click.option("--emulate", is_flag=True, help="Run in the emulator even where there is a GPU.")
@click.option("--allow-cubins", is_flag=True, help="Accept machine code inside the engine file.")
def run_command(engine, inputs, output, emulate, allow_cubins) -> None:
    """Run ENGINE on arrays from .npy files and write the outputs to an .npz file."""
    import io

    import numpy as np

    from cuda_kernels.compile import write_atomic
    from gpu_runtime import load

    arrays = {}
    for item in inputs:
        name, _, path = item.partition("=")
        if not path:
            raise click.UsageError(f"--input: expected NAME=FILE.npy, got {item!r}")
        try:
            arrays[name] = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as e:
            raise ValueError(f"--input {name}: {path} is not a readable .npy file: {e}") from None
    with load(engine, allow_cubins=allow_cubins).context(device="emulator" if emulate else None) as ctx:
        results = ctx.run(arrays)
        where = "the CPU emulator" if ctx.emulated else ctx.device.title
    data = io.BytesIO()
    np.savez(data, **results)
    write_atomic(Path(output), data.getvalue())
    click.echo(f"Ran on {where}; wrote {output}")
    for name, a in results.items():
        click.echo(f"  {name}: {a.dtype} {'x'.join(map(str, a.shape))}, {float(a.min()):.6g} to {float(a.max()):.6g}")


@program.command("inspect")
@click.argument("engine", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the layer information as JSON.")
def inspect_command(engine, as_json) -> None:
    """Show what is in ENGINE: plan, layers, memory and the sparsity of each layer."""
    from gpu_runtime import load, report

    plan = load(engine, allow_cubins=True).plan  # only read, never run
    if as_json:
        click.echo(json.dumps(report.layer_info(plan), indent=1))
    else:
        click.echo(report.inspect_text(plan), nl=False)


@program.command("inspect-sparsity")
@click.argument("model", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect_sparsity_command(model, as_json) -> None:
    """Per layer of an ONNX MODEL: zeros, share of 4-groups that fit 2:4, weight energy the nearest pattern would lose."""
    from gpu_runtime import onnx_sparsity

    rows = onnx_sparsity.inspect(model)
    click.echo(json.dumps(rows, indent=1) if as_json else onnx_sparsity.text(rows).rstrip("\n"))


def main(args: list[str] | None = None) -> None:
    """Run the program; every expected failure is one message on stderr and a non-zero exit."""
    from cuda_kernels.compile import CompileError

    try:
        program.main(args, prog_name="gpu-runtime", standalone_mode=False)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted: nothing was written; what was measured so far stays in the timing cache", err=True)
        sys.exit(130)
    except (ValueError, CompileError, OSError) as e:
        click.echo(f"error: {e}", err=True)
        sys.exit(1)


def build_engine() -> None:
    """`build-engine ...` is `gpu-runtime build ...`."""
    main(["build", *sys.argv[1:]])
