"""The command line: `build-engine model.onnx -o model.engine`, and `gpu-runtime COMMAND`, a file each in commands/.

Exit codes: 0 done, 1 failed, 2 wrong usage, 5 a requested check did not pass, 130 interrupted. Every expected failure is one
message on stderr.
"""

import io
import sys
import warnings

import click

from cuda_kernels.compile import CompileError
from cuda_kernels.driver import code_of
from cuda_kernels.extras import why_missing
from gpu_runtime.commands.bench import bench_command
from gpu_runtime.commands.build import build_command
from gpu_runtime.commands.cache import cache_command
from gpu_runtime.commands.compare import compare_command
from gpu_runtime.commands.console import QUIET, columns, say
from gpu_runtime.commands.doctor import doctor_command
from gpu_runtime.commands.explain import explain_command, report_command
from gpu_runtime.commands.inspect import inspect_command, inspect_sparsity_command
from gpu_runtime.commands.options import HELP, version_option
from gpu_runtime.commands.plan import plan_command
from gpu_runtime.commands.prune import prune_command
from gpu_runtime.commands.run import run_command
from gpu_runtime.commands.targets import KEPT, WRITTEN, written
from gpu_runtime.errors import InternalError
from gpu_runtime.serving.triton_repo import triton_repo_command
from gpu_runtime.text import WIDTH

# fmt: off
COMMANDS = (
    build_command, run_command, inspect_command, explain_command, plan_command, inspect_sparsity_command, report_command,
    prune_command, compare_command, bench_command, doctor_command, triton_repo_command, cache_command,
)
# fmt: on


@click.group(context_settings=HELP)
@version_option
def program() -> None:
    """Build, run and inspect engines: the fastest plan for a convolutional network, and why each layer runs as it does."""


for command in COMMANDS:
    program.add_command(command)


def main(args: list[str] | None = None) -> None:
    """Runs `gpu-runtime ...`; every expected failure is one message on stderr and a non-zero exit."""
    _run(program, "gpu-runtime", args)


def build_engine() -> None:
    """Runs `build-engine ...`, which is `gpu-runtime build ...`."""
    _run(build_command, "build-engine", None)


def _run(command: click.Command, name: str, args: list[str] | None) -> None:
    WRITTEN.clear()
    KEPT.clear()
    QUIET.clear()
    width = WIDTH.set(columns())
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: say(f"warning: {message}", err=True)
            code = command.main(args, prog_name=name, standalone_mode=False)
        if code:  # a command's Context.exit comes back as a number
            sys.exit(code)
    except click.ClickException as e:
        text = io.StringIO()
        e.show(text)
        say(text.getvalue(), err=True, nl=False)
        sys.exit(e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        say("; ".join([f"interrupted: {written()}", *KEPT]), err=True)
        sys.exit(130)
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
