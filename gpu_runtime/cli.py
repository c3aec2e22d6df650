"""The command line: `build-engine model.onnx -o model.engine`, and `gpu-runtime COMMAND`, a file each in commands/.

Exit codes: 0 done, 1 failed, 2 wrong usage, 5 a requested check did not pass, 130 interrupted. Every expected failure is one
message on stderr. Files are written whatever becomes of stdout: a reader who leaves changes nothing, a full disk is a failure.
"""

import atexit
import io
import os
import sys
import warnings
from importlib import import_module

import click

from cuda_kernels.compile import CompileError
from cuda_kernels.driver import code_of
from cuda_kernels.extras import why_missing
from gpu_runtime.commands.console import INTERRUPTED, QUIET, UNWRITTEN, columns, say, stdout_problem
from gpu_runtime.commands.options import HELP, version_option
from gpu_runtime.commands.targets import KEPT, WRITTEN, written
from gpu_runtime.errors import InternalError
from gpu_runtime.text import WIDTH, suggest

# fmt: off
COMMANDS = {  # name -> the module, imported when the command is asked for, and the line of `gpu-runtime --help`
    "bench": ("gpu_runtime.commands.bench", "Time inferences of an engine, as trtexec does."),
    "build": ("gpu_runtime.commands.build", "Build an engine from an ONNX model and explain it."),
    "cache": ("gpu_runtime.commands.cache", "List, merge or prune files of measured times."),
    "compare": ("gpu_runtime.commands.compare", "Compare an engine with its model, layer by layer."),
    "doctor": ("gpu_runtime.commands.doctor", "Examine this machine's GPU: every family of kernels, versions, rates."),
    "explain": ("gpu_runtime.commands.inspect", "Say why each layer of an engine runs sparse or dense."),
    "inspect": ("gpu_runtime.commands.inspect", "Show the plan, layers and sparsity of an engine; or describe an ONNX model."),
    "inspect-sparsity": ("gpu_runtime.commands.inspect",
                         "Show whether the weights of an ONNX model are 2:4, and where that pays."),
    "plan": ("gpu_runtime.commands.plan", "Plan a model for several GPUs, side by side."),
    "prune": ("gpu_runtime.commands.prune", "Prune the weights of an ONNX model to 2:4."),
    "report": ("gpu_runtime.commands.inspect", "Write an engine's plan as one HTML page."),
    "run": ("gpu_runtime.commands.run", "Run an engine on .npy files."),
    "triton-repo": ("gpu_runtime.serving.triton_repo", "Write a model of NVIDIA Triton that runs an engine."),
}
# fmt: on
# Commands that users of other programs look for, and the cure.
ELSEWHERE = {
    "help": "gpu-runtime --help lists the commands, gpu-runtime COMMAND --help the options of one",
    "serve": "docs/serving.md has the servers: Triton by gpu-runtime triton-repo, Ray by serve run gpu_runtime.serving.ray:app",
}


class Commands(click.Group):
    """The commands by name. A process imports the module of its own command only: others may import heavy packages."""

    def list_commands(self, _: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        return command_of(name) if name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            cure = f"; {ELSEWHERE[args[0]]}" if args[0] in ELSEWHERE else suggest(args[:1], COMMANDS)
            raise click.UsageError(f"No such command {args[0]!r}{cure}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def command_of(name: str) -> click.Command:
    command: click.Command = getattr(import_module(COMMANDS[name][0]), f"{name.replace('-', '_')}_command")
    return command


@click.group(cls=Commands, context_settings=HELP)
@version_option
def program() -> None:
    """Build, run and inspect engines: the fastest plan for a convolutional network, and why each layer runs as it does."""


def main(args: list[str] | None = None) -> None:
    """Runs `gpu-runtime ...`; every expected failure is one message on stderr and a non-zero exit."""
    _run(program, "gpu-runtime", args)


def build_engine() -> None:
    """Runs `build-engine ...`, which is `gpu-runtime build ...`."""
    _run(command_of("build"), "build-engine", None)


def _run(command: click.Command, name: str, args: list[str] | None) -> None:
    WRITTEN.clear()
    KEPT.clear()
    QUIET.clear()
    UNWRITTEN.clear()
    width = WIDTH.set(columns())
    interrupted: list[int] = []
    if args is None:  # a process of its own, which would die by SIGINT if Ctrl-C falls into an import: this ends it last
        atexit.register(lambda: os._exit(*interrupted) if interrupted else None)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say(f"warning: {message}", err=True)
            code = command.main(args, prog_name=name, standalone_mode=False)
        if problem := stdout_problem():
            say(f"error: {problem}; {written()}", err=True)
        if code or problem:  # a command's Context.exit comes back as a number
            sys.exit(code or 1)
    except click.ClickException as e:
        text = io.StringIO()
        e.show(text)
        say(text.getvalue(), err=True, nl=False)
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        say("; ".join([f"interrupted: {written()}", *KEPT]), err=True)
        interrupted.append(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except (ValueError, CompileError, InternalError, OSError) as e:
        say(f"error: {e}", err=True)
        sys.exit(1)
    except ModuleNotFoundError as e:
        if (why := why_missing(e.name)) is None:
            raise
        say(f"error: {why}", err=True)
        sys.exit(1)
    except RuntimeError as e:
        if code_of(e) is None:
            raise
        notes = e.__notes__ if hasattr(e, "__notes__") else []
        say("\n".join([f"error: the CUDA driver: {e}", *notes]), err=True)
        sys.exit(1)
    finally:
        WIDTH.reset(width)
