"""`gpu-runtime explain ENGINE`: why each layer runs as it does, and what if it did not; `report`: that as a page."""

import click

from gpu_runtime.commands.console import answer, say
from gpu_runtime.commands.options import json_option, named, opened, quiet_option, shown_at
from gpu_runtime.commands.targets import check_targets, write_all


@click.command("explain", short_help="Say why each layer of an engine runs sparse or dense.")
@click.argument("engine", type=click.Path())
@click.argument("layers", nargs=-1, metavar="[LAYER]...")
@click.option(
    "--what-if",
    "wishes",
    multiple=True,
    metavar="LAYER=WISH",
    help="Plan again with a layer forced to sparse, dense, a format (hwc8) or two ('chw->hwc8'), and show the changes; may be "
    "repeated.",
)
@shown_at
@json_option
def explain_command(engine: str, layers: tuple[str, ...], wishes: tuple[str, ...], shown: str, as_json: bool) -> None:
    """Say why each layer of ENGINE, or each LAYER named, runs sparse or dense, with the numbers behind it.

    LAYER may be a pattern: 'layer3.*', or 'layer{1..3}/conv' as the log of a build has it.
    """
    wanted = named("--what-if", wishes, "LAYER=sparse, LAYER=dense or LAYER=hwc8", str.rpartition)
    from gpu_runtime.explain.points import at_text

    loaded = opened(engine, True, shown)  # only read, never run
    found = loaded.what_if(wanted) if wanted else None
    account = loaded.explain(layers or None) if layers or not wanted else None
    changed = found.to_dict() if found else None
    document = account.to_dict() | ({"what_if": changed} if changed else {}) if account else changed
    plan = at_text(loaded.record)
    head = [f"{engine}: {loaded.record.model.name}{plan}\n"] if plan else []
    answer(as_json, lambda: document, lambda: "\n".join([*head, *(str(part) for part in (account, found) if part)]))


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
    from gpu_runtime.report import page

    files = [name for name in (engine, other) if name is not None]
    records = [opened(name, True, shown).record for name in files]  # only read, never run
    data = page.report(*records)
    write_all({paths["--output"]: data})
    say(f"Wrote {output}: {len(data)} bytes; open it in a browser, it needs no network")
