"""The text that a build prints, one screen long: TensorRT's two lines, the plan's time, every layer with weights under its
reason.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from cuda_kernels.device import Device
from gpu_runtime.explain.figures import (
    DEFAULT,
    SHOWN_US,
    SURE,
    held_text,
    pruned_costs,
    pruned_text,
    pruning_text,
    sureness,
    us_text,
    whose_text,
)
from gpu_runtime.explain.names import fitting, grouped, packed
from gpu_runtime.explain.plan_facts import NOTED, plan_facts
from gpu_runtime.explain.reason_texts import REASONS
from gpu_runtime.explain.wording import tensorrt_lines
from gpu_runtime.runtime.findings import SparsityRow
from gpu_runtime.runtime.plan_record import EngineRecord
from gpu_runtime.text import listed, printable, several, wrap

MOST_LINES, MOST_LINES_LARGE, LARGE = 40, 60, 100  # lines of a log, and of the log of a network of more than LARGE layers
FACT = 10  # columns of a fact's key
VERDICT = 4  # lines on the gain by pruning
MOST_NAMES = 6  # names in a fact
FACTS = ("pruning", "sparsity", "time", "batches", "library", "ceiling", *NOTED)
INDENT = 6  # columns before a row's further lines


def most_lines(record: EngineRecord) -> int:
    """Returns the largest number of lines that the log of a build may have."""
    layers = max(len(record.plan.layers), sum(len(row.layers) for row in record.sparsity.rows))
    return MOST_LINES if layers <= LARGE else MOST_LINES_LARGE


def log_text(record: EngineRecord, width: int, most: int) -> str:
    """Returns the log of a build: at most `most` lines of at most `width` columns.

    TensorRT's two lines may be longer, since programs read them whole. Facts are shortened where the names of eligible layers
    need their room.
    """
    sparsity = record.sparsity
    head = wrap(pruned_text(sparsity), width) if sparsity.mode == "force" else wrap(pruning_text(record), width)[:VERDICT]
    head = list(filter(None, head))
    if sparsity.mode == "force" and sparsity.not_pruned:
        name, why = sparsity.not_pruned[0]
        text = f"{several(len(sparsity.not_pruned), 'initializer')} could not be pruned, such as {name}: {why}"
        head += wrap(printable(text), width)[:2]
    head += wrap(printable(whose_text(record)), width)[:2]
    head += tensorrt_lines(sparsity)
    paragraphs, facts, rooms = _grouped(record), plan_facts(record, FACTS, MOST_NAMES), []
    for room in (3, 2, 1):  # largest number of lines of a fact
        lines = listed(facts, FACT, width, room)
        rooms.append((lines, most - len(head) - len(lines) - 2))  # two empty lines
    some = 2 * len(paragraphs)
    whole = max(some, sum(1 if row.rank else row.need(width) for row in paragraphs))  # each eligible layer by name
    facts_shown, left = next((r for least in (whole, some) for r in rooms if r[1] >= least), rooms[-1])
    texts = [_listed(row, width, n) for row, n in zip(paragraphs, _allotted(paragraphs, width, left), strict=True)]
    return "\n".join([*head, "", *facts_shown, "", *chain(*texts)]).rstrip() + "\n"


def planning_lines(device: Device, width: int, count: int | None, is_default: bool) -> list[str]:
    """Returns the first lines of a build: the device that is planned for, and the source of its times.

    `count`: the number of GPUs of a Ray cluster that time tactics, None without a cluster; `is_default`: the user named no
    device.
    """
    where = f"Planning for {device.title} ({device.sm})"
    if device.measured:
        return wrap(f"{where}, timing on {'it' if count is None else f'{count} of them in a Ray cluster'}", width)
    default = f", {DEFAULT}" if is_default else ""
    held = wrap(f"{device.title}: {held_text(device)}", width) if held_text(device) else []
    return [*wrap(f"{where}{default}; times are predicted({device.name}), nothing is measured", width), *held]


def written_lines(record: EngineRecord, width: int, name: str | None, nbytes: int) -> list[str]:
    """Returns the last lines of a build: the engine's file and size, and the command that explains it.

    `name`: the file, None if no engine was written; `nbytes`: its size.
    """
    if name is None:
        return ["No engine was written: give -o FILE to write one"]
    total = f"{us_text(record.solution.total_us, record.timing)}, {record.timing.label}"
    text = f"Wrote {name}: {nbytes} bytes, {len(record.plan.steps)} kernel launches, {total}"
    more = f"gpu-runtime explain {shlex.quote(name)} [LAYER] explains each layer"
    return [line for each in (text, more) for line in wrap(printable(each), width)]


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the log: a head and the names of layers, which `write` turns into shorter texts.

    `rank`: if several rows need more lines than there are, the row with the lowest rank gets them; `indent`: columns before
    the second and later lines.
    """

    head: str
    names: Sequence[str]
    rank: int
    indent: int
    write: Callable[[Sequence[str]], list[str]]

    def lines(self, width: int, texts: Sequence[str]) -> list[str]:
        """Returns the row's lines of at most `width` columns, with `texts` in place of all names."""
        return packed(self.head, texts, width, self.indent)

    def need(self, width: int) -> int:
        """Returns the number of lines of at most `width` columns that show all names."""
        return len(self.lines(width, self.write(self.names)))


def _allotted(rows: Sequence[_Row], width: int, total: int) -> list[int]:
    """Returns the number of lines for each row, `total` in all: one line each, then more by rank.

    Among rows of one rank, rows that need few lines get all of these, and the others share the remaining lines equally.
    """
    needs = [row.need(width) for row in rows]
    given = [1] * len(rows)
    for i in sorted(range(len(rows)), key=lambda i: (rows[i].rank, needs[i])):
        rivals = [k for k, row in enumerate(rows) if row.rank == rows[i].rank and (needs[k], k) >= (needs[i], i)]
        given[i] += max(0, min(needs[i] - 1, (total - sum(given)) // len(rivals)))
    return given


def _listed(row: _Row, width: int, most: int) -> list[str]:
    """Returns a row's lines, at most `most`: as many names as fit, then the count of further names."""
    texts = fitting(row.names, lambda texts: len(row.lines(width, texts)) <= most, row.write)
    lines = row.lines(width, texts)
    return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][: width - 4]} ..."]


# ---- a row for each reason


def _grouped(record: EngineRecord) -> list[_Row]:
    """Returns the log's rows, one for each verdict and reason. A reason has several rows where picks are sure to different
    degrees, and one of its own for merged branches.
    """
    verdicts, reasons, words = ("sparse", "dense", "not_eligible"), [*REASONS], ["", *dict(SURE)]
    groups: dict[tuple[int, int, int, bool], list[SparsityRow]] = {}
    for row in record.sparsity.rows:
        apart = row.branches and row.reason == "pattern_violation"
        key = verdicts.index(row.verdict), reasons.index(row.reason), words.index(sureness(row)), apart
        groups.setdefault(key, []).append(row)
    return [_row(groups[key], record) for key in sorted(groups)]


def _row(rows: Sequence[SparsityRow], record: EngineRecord) -> _Row:
    """Returns the log's row for sparsity rows with the same verdict and reason."""
    first, names = rows[0], [name for row in rows for name in row.layers]
    count, costs = len(names), pruned_costs(record)
    if first.reason == "pattern_violation" and costs:
        names = [name for name in names if costs.get(name, 0.0) < -SHOWN_US]
    verdict = "not 2:4" if first.verdict == "not_eligible" else first.verdict
    what = ", ".join(filter(None, (first.reason, sureness(first))))
    head = f"{verdict:8} {count:4} {what}: {REASONS[first.reason].group(rows, record)}{':' if names else ''}"
    return _Row(printable(head), names, int(first.verdict == "not_eligible"), INDENT, grouped)
