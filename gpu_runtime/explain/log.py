"""What a build prints, on one screen: TensorRT's two lines, the plan's time, and every layer with weights under its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from gpu_runtime.explain.figures import SURE, chance_text, counts_text, fp32_reasons, proven, sureness, times_are, us_text
from gpu_runtime.explain.names import fitting, grouped, packed
from gpu_runtime.explain.wording import ELIGIBLE_LINE, NO_GAIN, PICKED_LINE, range_text
from gpu_runtime.runtime.findings import SparsityRecord, SparsityRow
from gpu_runtime.runtime.plan_record import EngineRecord, Timing
from gpu_runtime.text import lost_text, printable, share_text, versus, wrap

MOST_LINES, MOST_LINES_LARGE, LARGE = 40, 60, 100  # lines of a log; of that of a network with more layers than LARGE
FACT = 10  # columns of a fact's key
INDENT = 6  # columns before a row's further lines


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers with one reason. `test`: which, `text`: what is said of all of them together."""

    verdict: str
    reason: str
    text: Callable[[Sequence[SparsityRow], EngineRecord], str]
    test: Callable[[SparsityRow], bool] = lambda row: True


def most_lines(record: EngineRecord) -> int:
    layers = max(len(record.plan.layers), sum(len(row.layers) for row in record.sparsity.rows))
    return MOST_LINES if layers <= LARGE else MOST_LINES_LARGE


def log_text(record: EngineRecord, width: int, most: int, wrapped: bool = True) -> str:
    """At most `most` lines of `width` columns. `wrapped`: TensorRT's lines too; else each stays one, for programs that read
    it, of no more characters than the lines that it would be."""
    sparsity = record.sparsity
    whose = f"{record.model.name} for {record.device.title} ({record.device.sm}), --sparsity={sparsity.mode}"
    head = _forced(sparsity, width) if sparsity.mode == "force" else []
    head += wrap(printable(f"{whose}; {times_are(record.timing)}"), width)[:2]
    lists = [_Row(ELIGIBLE_LINE, sparsity.eligible, 2, 2, list), _Row(PICKED_LINE, sparsity.picked, 2, 2, list)]
    rows = [_row(kind, found, record) for kind in KINDS if (found := [r for r in sparsity.rows if _is(r, kind)])]
    paragraphs, facts, left = [*lists, *rows], [], 0
    for room in (3, 2, 1):  # lines of a fact
        facts = [line for key, text in _facts(record) for line in wrap(f"{key:{FACT}}{text}", width, FACT)[:room]]
        left = most - len(head) - len(facts) - 2  # two empty lines
        if left >= 2 * len(paragraphs):
            break
    texts = [_listed(row, width, n) for row, n in zip(paragraphs, _allotted(paragraphs, width, left), strict=True)]
    shown = texts[:2] if wrapped else [[" ".join(line.strip() for line in lines)] for lines in texts[:2]]
    return "\n".join([*head, *chain(*shown), "", *facts, "", *chain(*texts[2:])]).rstrip() + "\n"


@dataclass(frozen=True, slots=True)
class _Row:
    """A head and names, as `write` writes them. `rank`: of two rows that need more room, the lower gets it."""

    head: str
    names: Sequence[str]
    rank: int
    indent: int
    write: Callable[[Sequence[str]], list[str]]

    def lines(self, width: int, texts: Sequence[str]) -> list[str]:
        return packed(self.head, texts, width, self.indent)


def _row(kind: _Kind, rows: Sequence[SparsityRow], record: EngineRecord) -> _Row:
    verdict = "not 2:4" if kind.verdict == "not_eligible" else kind.verdict
    names = [name for row in rows for name in row.layers]
    head = printable(f"{verdict:8} {len(names):4} {kind.text(rows, record)}:")
    return _Row(head, names, int(kind.verdict == "not_eligible"), INDENT, grouped)


def _allotted(rows: Sequence[_Row], width: int, total: int) -> list[int]:
    """Lines of each: one, and then what it needs by rank; of equal rank, rows that need little get it all, others the same."""
    needs = [len(row.lines(width, row.write(row.names))) for row in rows]
    given = [1] * len(rows)
    for i in sorted(range(len(rows)), key=lambda i: (rows[i].rank, needs[i])):
        rivals = [k for k, row in enumerate(rows) if row.rank == rows[i].rank and (needs[k], k) >= (needs[i], i)]
        given[i] += max(0, min(needs[i] - 1, (total - sum(given)) // len(rivals)))
    return given


def _listed(row: _Row, width: int, most: int) -> list[str]:
    """Its lines, at most `most`: as many names as fit, and how many more there are."""
    texts = fitting(row.names, lambda texts: len(row.lines(width, texts)) <= most, row.write)
    lines = row.lines(width, texts)
    return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][: width - 4]} ..."]


# ---- facts of the whole plan


def _facts(record: EngineRecord) -> list[tuple[str, str]]:
    """(key, text), in the order in which they are shown."""
    timing, found, sparsity = record.timing, record.plan.solution, record.sparsity
    total, dense = found.total_us, found.rivals.all_dense_us
    facts = [("sparsity", counts_text(sparsity))]
    time = f"{us_text(total, timing)}, {_verdict(record)}"
    if sparsity.eligible and dense is not None and sparsity.mode != "disable":
        time += f"; without sparse kernels {us_text(dense, timing)} ({versus(dense, total)})"
        if ranged := range_text(record):
            time += f"; they save {us_text(dense - total, timing)}, {ranged}"
    facts.append(("time", time))
    ceiling = sparsity.summary.ceiling_us if sparsity.summary else None
    if sparsity.eligible and ceiling is not None and dense:
        text = f"{us_text(ceiling, timing)} ({versus(ceiling, dense)}), with all eligible layers at twice their dense speed"
        facts.append(("ceiling", f"{text}, where launch and memory allow it"))
    if gone := record.device.left_out:
        facts.append(("left out", printable("; ".join(f"{what}, seen to fail on this GPU: {why}" for what, why in gone))))
    if merged := [row for row in sparsity.rows if row.branches]:
        text = f"{_layers(merged)} convolutions run as {len(merged)}, each the sum of parallel branches of one input; 2:4 is a "
        facts.append(("merged", f"{text}pattern of what they are together"))
    return facts + _range_facts(record)


def _verdict(record: EngineRecord) -> str:
    found = record.plan.solution
    if found.status == "proven":
        return f"{proven(record.plan, record.timing)}, for serial execution and these times"
    return "not proven minimal" + ("" if found.gap is None else f": up to {100 * found.gap:.2f} % less may be possible")


def _layers(rows: Sequence[SparsityRow]) -> int:
    return sum(len(row.layers) for row in rows)


def _range_facts(record: EngineRecord) -> list[tuple[str, str]]:
    """What FP16 cannot hold, and what was done about it."""
    found, facts = record.plan.range, []
    if found is None:
        return []
    wide = {layer.layer or layer.name: why for layer in record.plan.layers if (why := fp32_reasons(record.plan, layer))}
    if wide:
        names = ", ".join(fitting(list(wide), lambda texts: len(texts) <= 6))
        facts.append(("FP32", f"{len(wide)} layers: {names}; {printable(next(iter(wide.values()))[0])}"))
    scaled = {t: e for t, e in found.exponents.items() if dict(found.high).get(t)}
    if scaled:
        high = {t: v for t, v in found.high if v is not None and t in scaled}
        top = max(high, key=lambda t: high[t])
        text = f"{len(scaled)} tensors are stored times 2^{min(scaled.values())} or more, since FP16 ends at 65504: "
        facts.append(("scaled", printable(f"{text}{top!r} reaches {high[top]:g} on {found.source}")))
    if found.stuck:
        told = "; ".join(f"{t!r}: {why}" for t, why in found.stuck[:2])
        facts.append(("overflow", printable(f"{len(found.stuck)} tensors may leave FP16: {told}")))
    if found.compared and (found.compared.skipped or found.compared.far):
        far = found.compared.far
        told = found.compared.skipped or f"{len(far)} tensors are far from FP32: {', '.join(far[:4])}"
        facts.append(("compared", printable(f"on the calibration input: {told}")))
    return facts


def _forced(sparsity: SparsityRecord, width: int) -> list[str]:
    """What --sparsity=force did to the model."""
    if not sparsity.pruned:
        lines = wrap("--sparsity=force changed nothing: all weights that can have the 2:4 pattern have it", width)
    else:
        energy = sparsity.pruned_energy
        taken = "" if energy is None else f", {lost_text(energy)} of their energy (the sum of their squares)"
        text = f"--sparsity=force set the two smallest of each four weights to zero in {len(sparsity.pruned)} initializers"
        lines = wrap(f"{text}{taken}: the outputs are not those of the model as it was given", width)
    if sparsity.not_pruned:
        name, why = sparsity.not_pruned[0]
        text = f"{len(sparsity.not_pruned)} initializers could not be pruned, such as {name}: {why}"
        lines += wrap(printable(text), width)[:2]
    return lines


# ---- a row for each reason


def _is(row: SparsityRow, kind: _Kind) -> bool:
    return (row.verdict, row.reason) == (kind.verdict, kind.reason) and kind.test(row)


def _picks(word: str) -> _Kind:
    """Picks that are so sure; those of a measured plan, where the word is empty."""

    def text(rows: Sequence[SparsityRow], record: EngineRecord) -> str:
        chance = f", P(faster) = {_chance(rows)}" if word else ""
        head = f"picked, {word}" if word else "picked"
        return f"{head}: sparse kernels are {_speed(rows)} as fast as dense ones{chance}{_costs(rows, record.timing)}"

    return _Kind("sparse", "picked", text, lambda row: sureness(row) == word)


def _dense_faster(rows: Sequence[SparsityRow], record: EngineRecord) -> str:
    return f"dense_faster: sparse kernels are {_speed(rows)} as fast as dense ones"


def _uncertain(rows: Sequence[SparsityRow], record: EngineRecord) -> str:
    risk = "" if record.flags.risk is None else f", --risk asks for {100 * record.flags.risk:.0f} %"
    return f"uncertain: sparse is predicted to be {_speed(rows)} as fast, but P(faster) = {_chance(rows)}{risk}"


def _one_launch(rows: Sequence[SparsityRow], record: EngineRecord) -> str:
    alone = sum(len(row.able) for row in rows)
    return f"one_launch: launched together, they run dense; apart, {alone} of them could run sparse"


def _no_tactic(rows: Sequence[SparsityRow], record: EngineRecord) -> str:
    if record.sparsity.mode == "disable":
        text = "no_sparse_tactic: the weights are 2:4, but --sparsity=disable allows dense kernels only"
        faster = _faster(rows)
        return text + (f"; with enable, {len(faster)} would be faster, up to {max(faster):.2f}x" if faster else "")
    return f"no_sparse_tactic: no sparse kernel runs them{f' ({rows[0].detail})' if rows[0].detail else ''}"


def _not_2_4(rows: Sequence[SparsityRow], record: EngineRecord) -> str:
    """With what pruning would take and give."""
    whose = "weights of merged branches" if rows[0].branches else "weights"
    text = f"pattern_violation: {_to(*_ends([r.pattern_share for r in rows], share_text))} of the groups of 4 {whose} fit 2:4"
    if lost := [r.lost_energy for r in rows if r.lost_energy is not None]:
        text += f"; pruning takes {_to(*_ends(lost, lost_text))} of their energy"
    if faster := _faster(rows):
        return f"{text}; pruned, {len(faster)} would be faster, up to {max(faster):.2f}x"
    return text + ("; pruned, none would be faster" if any(r.if_sparse for r in rows) else "")


def _faster(rows: Sequence[SparsityRow]) -> list[float]:
    """What sparse kernels would gain layers that have none, where it is worth a word."""
    gains = (r.if_sparse.dense_us / r.if_sparse.us for r in rows if r.if_sparse and r.if_sparse.us for _ in r.layers)
    return [gain for gain in gains if gain >= NO_GAIN]


# fmt: off
KINDS = (
    *map(_picks, ("", *dict(SURE))),
    _Kind("dense", "dense_faster", _dense_faster),
    _Kind("dense", "reformat_outweighs", lambda rows, record: "reformat_outweighs: sparse kernels alone are "
          f"{_speed(rows)} as fast, but their formats cost the plan more"),
    _Kind("dense", "one_launch", _one_launch),
    _Kind("dense", "uncertain", _uncertain),
    _Kind("sparse", "within_noise", lambda rows, record: "within_noise: sparse and dense are closer than their spread"),
    _Kind("dense", "within_noise", lambda rows, record: "within_noise: sparse and dense are closer than their spread"),
    _Kind("dense", "no_sparse_tactic", _no_tactic),
    _Kind("not_eligible", "pattern_violation", _not_2_4, lambda row: not row.branches),
    _Kind("not_eligible", "pattern_violation", _not_2_4, lambda row: row.branches),
    _Kind("not_eligible", "channels_not_multiple_of_4", lambda rows, record: "channels_not_multiple_of_4: 2:4 is a pattern "
          "of four input channels"),
    _Kind("not_eligible", "grouped_conv", lambda rows, record: "grouped_conv: no sparse kernel runs these groups of channels"),
    _Kind("not_eligible", "no_sparse_tactic", lambda rows, record: "FP32: layers on CUDA cores gain nothing from zeros"),
)
# fmt: on


def _speed(rows: Sequence[SparsityRow]) -> str:
    ratios = [r.best_dense.us / r.best_sparse.us for r in rows if r.best_dense and r.best_sparse and r.best_sparse.us]
    return _to(*_ends(ratios, "{:.2f}x"))


def _costs(rows: Sequence[SparsityRow], timing: Timing) -> str:
    costs = [r.other_cost_us for r in rows if r.other_cost_us is not None]
    return f", dense would cost {_to(*_ends(costs, lambda us: us_text(us, timing)))} each" if costs else ""


def _chance(rows: Sequence[SparsityRow]) -> str:
    """P(sparse kernel faster)."""
    return _to(*_ends([r.p_sparse_faster for r in rows], chance_text))


def _ends(values: Sequence[float | None], text: str | Callable[[float], str]) -> tuple[str, str]:
    known = [v for v in values if v is not None]
    write = text.format if isinstance(text, str) else text
    return (write(min(known)), write(max(known))) if known else ("?", "?")


def _to(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"
