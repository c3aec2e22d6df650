"""`gpu-runtime inspect-sparsity MODEL`: whether weights are 2:4."""

from __future__ import annotations

import json

import click

from gpu_runtime.commands.console import say


@click.command("inspect-sparsity", short_help="Show whether the weights of an ONNX model are 2:4.")
@click.argument("model", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect_sparsity_command(model: str, as_json: bool) -> None:
    """Show how sparse the weights of an ONNX MODEL are, and whether they are 2:4."""
    from gpu_runtime.frontend import pattern

    rows = pattern.inspect(model)
    if as_json:
        found = {"summary": pattern.summary(rows), "pruning": pattern.pruning(rows), "layers": rows}
        say(json.dumps(found, indent=1))
    else:
        say(pattern.text(rows), nl=False)
