"""Files for viewers of other formats, which `build` and `inspect` write: options, and what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpu_runtime.commands.console import json_bytes

if TYPE_CHECKING:
    from gpu_runtime.runtime.plan_record import EngineRecord

TRACE, ONNX = "--exportTrace", "--exportOnnx"


def export_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--exportTrace and --exportOnnx, as export_trace and export_onnx."""
    command = click.option(ONNX, "export_onnx", type=click.Path(), help="Write the model with each layer's tactic, formats, "
                           "time and verdict at its nodes (for Netron).")(command)  # fmt: skip
    return click.option(TRACE, "export_trace", type=click.Path(), help="Write the launches on a timeline (Chrome's trace "
                        "format, for ui.perfetto.dev).")(command)  # fmt: skip


def exported(
    record: EngineRecord, model: str | None, times: Sequence[Sequence[float]] | None = None
) -> dict[str, Callable[[], bytes]]:
    """Option -> what makes its file. `model`: the ONNX file that the engine was built from; `times`: measured ones."""
    from gpu_runtime.report import notes

    return {
        TRACE: lambda: json_bytes(notes.trace(record, times)),
        ONNX: lambda: notes.annotated(record, model or ""),
    }
