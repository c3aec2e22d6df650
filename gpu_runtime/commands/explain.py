"""`gpu-runtime explain ENGINE`: why each layer runs as it does, and what if it did not."""

from __future__ import annotations

import json

import click

from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import named


@click.command("explain", short_help="Say why each layer of an engine runs sparse or dense.")
@click.argument("engine", type=click.Path())
@click.argument("layers", nargs=-1, metavar="[LAYER]...")
@click.option(
    "--what-if",
    "wishes",
    multiple=True,
    metavar="LAYER=WISH",
    help="Plan again with a layer held to sparse, "
    "dense, a format (hwc8) or two ('chw->hwc8'), and show the changes; once for each layer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain_command(engine: str, layers: tuple[str, ...], wishes: tuple[str, ...], as_json: bool) -> None:
    """Say why each layer of ENGINE, or each LAYER named, runs sparse or dense, with the numbers behind it.

    LAYER may be a pattern: 'layer3.*', or 'layer{1..3}/conv' as the log of a build has it.
    """
    wanted = named("--what-if", wishes, "LAYER=sparse, LAYER=dense or LAYER=hwc8", str.rpartition)
    from dataclasses import replace

    from gpu_runtime import load
    from gpu_runtime.explain import what_if, wording
    from gpu_runtime.runtime.findings import SparsityRow, Summary
    from tactics import codec

    record = load(engine, allow_cubins=True).record  # only read, never run
    found = what_if.what_if(record, wanted) if wanted else None
    rows = wording.rows_of(record, layers) if layers or not wanted else []
    if as_json:
        answer = codec.to_json(what_if.Answer, found, defaults=True) if found else None
        worded = [replace(row, sentence=wording.sentence(row, record)) for row in rows]
        summary = codec.to_json(Summary | None, record.plan.sparsity.summary, defaults=True)
        shown = [codec.to_json(SparsityRow, row, defaults=True) for row in worded]
        account = {"timing": record.timing.label, "summary": summary, "layers": shown}
        say(json.dumps(answer if not rows else account | ({"what_if": answer} if answer else {}), indent=1))
        return
    texts = [wording.explain_text(record, rows)] if rows or not wanted else []
    texts += [what_if.text(record, found)] if found else []
    say("\n".join(texts), nl=False)
