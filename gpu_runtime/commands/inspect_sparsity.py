"""`gpu-runtime inspect-sparsity MODEL`: whether weights are 2:4, and where that would pay."""

from __future__ import annotations

import json
from typing import Any

import click

from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import forced_plan, parse_shapes
from gpu_runtime.commands.progress import listening

NOT_PASSED = 5  # exit code


@click.command("inspect-sparsity", short_help="Show whether the weights of an ONNX model are 2:4, and where that pays.")
@click.argument("model", type=click.Path())
@click.option("--device", metavar="NAME", help="Rank the layers by the microseconds that 2:4 saves on this GPU, as the plan of "
              "the pruned network predicts, for each percent of weight energy lost.")  # fmt: skip
@click.option("--shapes", default="", metavar="SIZES", help="Sizes of dynamic inputs.")
@click.option("--require", is_flag=True, help="Exit with 5 unless all weights are 2:4 that can be.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def inspect_sparsity_command(
    context: click.Context, model: str, device: str | None, shapes: str, require: bool, as_json: bool
) -> None:
    """Show how sparse the weights of an ONNX MODEL are, and whether they are 2:4.

    Of branches that may run as one convolution, whose results are only added, also what they are together.
    """
    sizes = parse_shapes(shapes)
    from gpu_runtime.frontend import pattern
    from gpu_runtime.pruning import benefit, sums

    rows, merged, unknown = sums.inspect_file(model, sizes)
    progress = listening()
    plan = forced_plan(model, device, sizes, progress) if device else None
    progress.end()
    ranked = benefit.ranking(rows, plan) if plan else []
    if as_json:
        found: dict[str, Any] = {"summary": pattern.summary(rows), "pruning": pattern.pruning(rows), "layers": rows}
        found |= {"merged": sums.data(merged), "merged_unknown": unknown or None}
        found |= {"device": plan.device.name, "ranking": benefit.data(ranked)} if plan else {}
        say(json.dumps(found, indent=1))
    else:
        say(pattern.text(rows) + sums.text(merged, unknown) + (benefit.text(ranked, plan) if plan else ""), nl=False)
    if require and (missing := pattern.not_24(rows)):
        say(f"--require: {len(missing)} weights that can be 2:4 are not: {', '.join(missing)}", err=True)
        context.exit(NOT_PASSED)
