"""The timings behind a plan as text in TensorRT's form, for --verbose: every format combination, every tactic, every omission.

The log names all tactics without a time, with the proof that they need none: tactics that cannot run, with the reason; formats
that the network's tensors cannot have; tactics whose lower bounds exclude them from the best plan; and, without --exhaustive,
formats with the same addresses as a timed format.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from gpu_runtime.explain.figures import ms_of, tactic_value
from gpu_runtime.network import Op
from gpu_runtime.planning.tables import Table, Times, untimed
from gpu_runtime.text import printable
from tactics.candidates import rejected
from tactics.format import LAYOUTS, TRT_TYPES, Format, strides
from tactics.planner import plan
from tactics.planner.grouping import grouped

STARS, DASHES, ARROWS = "*" * 15, "-" * 15, ">" * 15


def log(table: Table, chosen: plan.Plan, failures: Mapping[tuple[str, str], str], *, exhaustive: bool) -> Iterator[str]:
    """Yields a block of lines for each op, then one for the reformats (copies of a tensor into another format).

    `failures`: (problem's text, tactic's name) -> the reason why this tactic has no time; `exhaustive`: the build had
    --exhaustive, and timed every format.
    """
    mark = "" if table.device.measured else "~"
    for op, times in zip(table.network.ops, table.times, strict=True):
        parts = (_timings(op, times, mark), _skipped(table, op, failures), _untimed(table, op, exhaustive), _choice(op, chosen))
        yield "\n".join(chain(*parts))
    yield "\n".join(_reformats(table, chosen, mark))


def _skipped(table: Table, op: Op, failures: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yields a line for each tactic that failed, and one for each reason why tactics cannot run."""
    for (problem, tactic), why in failures.items():
        if problem == str(op.problem):
            yield f"Skipping {tactic}: failed: {printable(why.splitlines()[0] if why else '')}"
    for reason, count in Counter(reason for _, reason in rejected(op.problem, table.device, table.network.dtypes(op))).items():
        yield f"Skipping {count} tactics of {printable(op.name)}: cannot run: {printable(str(reason))}"


def _choice(op: Op, chosen: plan.Plan) -> Iterator[str]:
    """Yields the line with the tactic that the plan runs for an op, or that the plan does without the op."""
    if entry := chosen.entry_of(op.name, op.when):
        runner = entry.tactic.runner if entry.tactic else entry.name
        yield f"{ARROWS} Chose Runner Type: {runner} Tactic: {tactic_value(entry.name)}"
    else:
        yield f"{ARROWS} {printable(op.name)} is not part of the plan: another way to fuse it is faster"


def _timings(op: Op, times: Times, mark: str) -> Iterator[str]:
    """Yields the lines with every tactic's time, grouped by the formats of its tensors and then by kernel. `mark`: the text
    before each time, "~" for predictions.
    """
    name = printable(op.name)
    for formats, tactics in grouped(((*t.ins, t.out), t) for t in times).items():
        *ins, out = (_described(f, s) for f, s in zip(formats, op.problem.all_shapes, strict=True))
        yield f"{STARS} Autotuning format combination: {', '.join(ins)} -> {out} {STARS}"
        for kernel in dict.fromkeys(t.kernel for t in tactics):
            every = sorted((t for t in tactics if t.kernel == kernel), key=lambda t: (times[t].us, t.name))
            mine, bounded = [t for t in every if times[t].timed], [t for t in every if not times[t].timed]
            yield f"{DASHES} Timing Runner: {name} ({kernel})"
            for t in mine:
                yield f"Tactic Name: {t.name} Tactic: {tactic_value(t.name)} Time: {_ms(times[t].us, mark)}"
            if bounded:
                yield f"Not timed: {len(bounded)} tactics of {name} ({kernel}): at least {_ms(times[bounded[0]].us, mark)} each"
            if mine:
                yield f"{name} ({kernel}) Fastest Tactic: {tactic_value(mine[0].name)} Time: {_ms(times[mine[0]].us, mark)}"


def _untimed(table: Table, op: Op, exhaustive: bool) -> Iterator[str]:
    """Yields a line for each group of tactics that need no time, with the proof. `exhaustive`: formats with the same addresses
    were timed, too.
    """
    timed = ("same_addresses",) if exhaustive else ()
    left = Counter(
        (f"{', '.join(map(str, t.ins))} -> {t.out}", reason.sentence)
        for t, reason in untimed(table, op).items()
        if reason.code not in timed
    )
    for (formats, sentence), count in left.items():
        yield f"Not timed: {count} tactics of {printable(op.name)} in {formats}: {sentence}"


def _reformats(table: Table, chosen: plan.Plan, mark: str) -> Iterator[str]:
    """Yields the lines with the times of all reformats, then one for each reformat of the plan. `mark`: as for _timings."""
    yield "=============== Computing reformatting costs"
    for problem, times in table.reformats.items():
        src, dst = Format.parse(problem.src), Format.parse(problem.dst)
        shape = problem.in_shapes[0]
        yield f"{STARS} Autotuning Reformat: {_described(src, shape)} -> {_described(dst, shape)} {STARS}"
        for t, time in sorted(times.items(), key=lambda item: (item[1].us, item[0].name)):
            least = "" if time.timed else "at least "
            yield f"Tactic Name: {t.name} Tactic: {tactic_value(t.name)} Time: {least}{_ms(time.us, mark)}"
    for tensor, before, after in chosen.reformats:
        if table.graph.reformat_us(tensor, before, after):
            yield f"{ARROWS} Adding reformat layer: {printable(tensor)} from {before} to {after}"


def _described(fmt: Format, shape: tuple[int, int, int, int]) -> str:
    """Returns a format as TensorRT writes it: the strides of N, C, H, W in vectors, with the width of the vectorized axis
    behind a colon.

    For example Half(24200,1:8,440,8). `shape`: the tensor's N, C, H, W.
    """
    s, v = strides(fmt, shape), LAYOUTS[fmt.layout].vector
    c = s.block // v if LAYOUTS[fmt.layout].blocked else 1
    row = s.pixel * shape[3]
    return f"{TRT_TYPES[fmt.dtype]}({s.n // v},{c}{f':{v}' if v > 1 else ''},{row // v},{s.pixel // v})"


def _ms(us: float, mark: str) -> str:
    """Returns microseconds as text in milliseconds, after `mark`."""
    return f"{mark}{ms_of(us):.6g}"
