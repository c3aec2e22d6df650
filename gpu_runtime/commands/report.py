"""`gpu-runtime report ENGINE -o report.html`: the plan as a page to look at."""

import click

from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import at, quiet_option, shown_at
from gpu_runtime.commands.targets import check_targets, write_all


@click.command("report", short_help="Write an engine's plan as one HTML page.")
@click.argument("engine", type=click.Path())
@click.option("-o", "--output", "output", type=click.Path(), required=True, help="Write the page to this file.")
@click.option("--compare", "other", metavar="ENGINE", type=click.Path(), help="Compare it with this engine, layer by layer.")
@shown_at
@quiet_option
def report_command(engine: str, output: str, other: str | None, shown: str) -> None:
    """Write the plan of ENGINE and its reasons as one HTML file: layers, candidates, graph, roofline, memory. The page needs no
    network."""
    paths = check_targets({"--output": output}, [engine, *([other] if other else [])])
    from gpu_runtime import load
    from gpu_runtime.report import page

    files = [name for name in (engine, other) if name is not None]
    records = [at(load(name, allow_cubins=True), shown).record for name in files]  # only read, never run
    data = page.report(*records)
    write_all({paths["--output"]: data})
    say(f"Wrote {output}: {len(data)} bytes; open it in a browser, it needs no network")
