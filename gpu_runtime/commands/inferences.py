"""Which inferences follow a build, and which of its options say something without one (`--loadEngine`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from gpu_runtime.commands.bench import Wanted
from gpu_runtime.commands.console import say

if TYPE_CHECKING:
    from cuda_kernels.device import Device


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
    context = click.get_current_context()
    typed = {
        p.name: p.human_readable_name if isinstance(p, click.Argument) else p.opts[0]
        for p in context.command.params
        if p.name and p.expose_value and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    }
    if refused := [o for name, o in typed.items() if name in NOT_LOADED or (name == "pools" and limited)]:
        raise click.UsageError(f"--loadEngine reads an engine and builds none: leave out {', '.join(refused)}")
    if ignored := [option for name, option in typed.items() if name not in OF_LOADED and option not in wanted.typed]:
        say(f"ignored: {', '.join(ignored)}: --loadEngine builds nothing", err=True)
