"""The records of an engine's file as Markdown, from their definitions: a part of docs/engine.md.

python -m benchmarks.pages.engine
"""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, is_dataclass
from typing import get_args

from benchmarks.bench_plan import markdown
from cuda_kernels.device import Device
from gpu_runtime.runtime import findings, plan_record
from gpu_runtime.runtime.plan_record import EngineRecord
from tactics import codec

PROBLEM = "a problem: an object with the `type` of a record in tactics.problems, and its fields"


def records(kind: type) -> Iterator[type]:
    """Yields this record and all records that are parts of it, each once, in the order in which they are met."""
    todo, seen = [kind], set()
    while todo:
        one = todo.pop(0)
        if one not in seen:
            seen.add(one)
            yield one
            todo[:0] = [part for _, _, hint in codec.json_fields(one).values() for part in parts(hint)]


def parts(hint: object) -> Iterator[type]:
    if is_dataclass(hint) and isinstance(hint, type):
        if hint.__module__ in (plan_record.__name__, findings.__name__, Device.__module__):
            yield hint
        return
    for inner in get_args(hint):
        yield from parts(inner)


def table(kind: type) -> str:
    """Returns a heading, a sentence on the record, and a row for each field."""
    rows = []
    for name, (_, field, hint) in codec.json_fields(kind).items():
        told = PROBLEM + " or null" if field.name == "problem" else codec.words(hint)
        needed = field.default is MISSING and field.default_factory is MISSING
        rows.append((f"`{name}`", f"{told}{'' if needed else '; may be left out'}".replace(" or null; may", "; may")))
    about = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    return "\n".join([f"### {kind.__name__}", "", about, "", markdown(("field", "value"), rows), ""])


if __name__ == "__main__":
    print("\n".join(map(table, records(EngineRecord))), end="")
