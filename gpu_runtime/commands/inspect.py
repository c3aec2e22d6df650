"""`gpu-runtime inspect ENGINE`: what is in it."""

from __future__ import annotations

import json

import click

from gpu_runtime.commands.console import say


@click.command("inspect", short_help="Show the plan, layers and sparsity of an engine.")
@click.argument("engine", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the layer information as JSON.")
def inspect_command(engine: str, as_json: bool) -> None:
    """Show what is in ENGINE: plan, layers, memory and the sparsity of each layer."""
    from gpu_runtime import load
    from gpu_runtime.explain import report

    loaded = load(engine, allow_cubins=True)  # only read, never run
    if as_json:
        say(json.dumps(loaded.layer_info(), indent=1))
    else:
        say(report.inspect_text(loaded.record, loaded.checked), nl=False)
