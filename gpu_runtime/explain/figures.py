"""The words that all texts on a plan share: times, predicted ones with a `~`, ratios, probabilities, the sureness of picks, the
proof of a plan, counts of layers, and the network in a few sentences.

`record` is the plan to describe: an engine's, or an Outlook, a plan without an engine.
"""

import hashlib
import math
import shlex
from collections.abc import Callable, Sequence

from cuda_kernels.device import Device
from cuda_kernels.rates import rates
from gpu_runtime.runtime.findings import IfPruned, SparsityRecord, SparsityRow
from gpu_runtime.runtime.plan_record import EngineRecord, Explained, Outlook, PlanRecord, Timing
from gpu_runtime.text import first_of, lost_text, printable, several, sizes_option, versus, wrap
from tactics.predict import RANGE
from tactics.tactic import Tactic

PREDICTED = Timing("predicted", "predicted")  # for predictions in the account of a measured plan
SURE = (("certain", 0.95), ("likely", 0.75), ("toss-up", 0.0))  # (word for a sparse pick, the least P(sparse faster) for it)
# fmt: off
RESOURCES = {"mma": "tensor cores", "math": "tensor cores", "dram": "DRAM", "l2": "L2", "smem": "shared memory",
             "launch": "launch", "latency": "memory latency", "issue": "instruction issue", "alu": "arithmetic"}
# fmt: on
NO_GAIN = 1.05  # speed-up; texts call a smaller one not worth retraining for
MOST_NAMED = 3  # layers that a text names for the gain of pruning
SHOWN_US = 0.005  # microseconds; a smaller time is written as 0.00 us
DEFAULT = "the default where no GPU is found (another with --device)"


# ---- times, ratios, probabilities


def us_text(us: float, timing: Timing, sign: str = "", unit: str = " us") -> str:
    """Returns microseconds as text, with "~" before predicted ones.

    >>> us_text(9.6, PREDICTED), us_text(1.5, PREDICTED, sign="+", unit="")
    ('~9.60 us', '~+1.50')
    """
    return f"{'~' if timing.is_predicted else ''}{us:{sign}.2f}{unit}"


def ms_of(us: float) -> float:
    """Returns microseconds as milliseconds, the unit of TensorRT's files, rounded to picoseconds."""
    return round(us * 1e-3, 9)


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}x"


def chance_text(p: float) -> str:
    """Returns a probability as text in percent, rounded down so that it fits the word for it (`sure`).

    >>> chance_text(0.949), sure(0.949)
    ('94 %', 'likely')
    """
    return f"{math.floor(round(100 * p, 2))} %"


def span_text(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """Returns the smallest and the largest of the known values as text, "?" if no value is known. None: an unknown value.

    >>> span_text([3.0, None, 2.0], ratio_text), span_text([2.0, 2.001], ratio_text)
    ('2.00x to 3.00x', '2.00x')
    """
    known = [v for v in values if v is not None]
    ends = dict.fromkeys((write(min(known)), write(max(known)))) if known else ("?",)
    return " to ".join(ends)


def times_are(timing: Timing) -> str:
    """Returns the clause on the origin of times, as "times are predicted(h200), marked ~"."""
    return f"times are {timing.label}{', marked ~' if timing.is_predicted else ''}"


def summing(total: float, parts: Sequence[float]) -> list[float]:
    """Returns the parts, each rounded down or up to hundredths, so that they add up to the rounded total.

    If the parts do not add up to the total before, each is rounded to the nearest hundredth.

    >>> summing(1.0, (1 / 3, 1 / 3, 1 / 3))
    [0.34, 0.33, 0.33]
    """
    below = [math.floor(100 * part) for part in parts]
    missing = round(100 * round(total, 2)) - sum(below)
    if not 0 <= missing <= len(parts):
        return [round(part, 2) for part in parts]
    upper = sorted(range(len(parts)), key=lambda i: below[i] - 100 * parts[i])[:missing]
    return [(n + (i in upper)) / 100 for i, n in enumerate(below)]


def tactic_text(tactic: Tactic | None) -> str:
    """Returns a tactic's name without the formats at its end, because tables have a column for these; "-" for None."""
    return tactic.runner if tactic else "-"


def tactic_value(name: str) -> str:
    """Returns a hexadecimal number derived from a tactic's name: TensorRT identifies tactics by numbers."""
    return "0x" + hashlib.sha256(name.encode()).hexdigest()[:16]


# ---- the sureness of picks, the proof of a plan


def sure(p: float) -> str:
    """Returns the word of SURE ("likely", for example) for a kernel that is the faster one with probability `p`."""
    return next((word for word, least in SURE if p >= least), SURE[-1][0])


def sureness(row: SparsityRow) -> str:
    """Returns the word of SURE for a sparse layer's choice; "" for a layer that is not sparse, and for measured times."""
    return sure(row.p_sparse_faster) if row.verdict == "sparse" and row.p_sparse_faster is not None else ""


def surenesses(sparsity: SparsityRecord) -> dict[str, int]:
    """Returns word of SURE -> the number of layers that run sparse and have this word; {} if times are measured or no layer
    runs sparse.
    """
    words = [sureness(row) for row in sparsity.rows for _ in row.layers if row.verdict == "sparse"]
    return {word: words.count(word) for word, _ in SURE} if any(words) else {}


def sureness_text(sparsity: SparsityRecord) -> str:
    """Returns the numbers of sparse layers by sureness as text, as "certain 12, likely 3"; "" if `surenesses` is empty."""
    return ", ".join(f"{word} {count}" for word, count in surenesses(sparsity).items())


def proof_text(plan: PlanRecord, timing: Timing, status: str | None = None) -> str:
    """Returns the sentence on the proof of a plan: that no other plan has a smaller sum of times, by how much another may be
    smaller, or that nothing is proven.

    `status`: the planner's status of another plan of the same engine (what_if); None: the engine's own plan. For predicted
    times the sum includes a premium for each sparse kernel, the price of its doubt.
    """
    if status is None and plan.solution.rivals.own_us is not None:
        return f"one tactic per layer for all batches, {plan.solution.status} the least sum of their times"
    tuned = plan.solution.tuned
    if tuned and tuned.early:
        without = f", without {first_of(tuned.missing, 3)}" if tuned.missing else ""
        return f"not proven minimal: timing ended early{without}; the same build goes on from there"
    if status is None and any(r.swap for r in plan.solution.replaced):
        return "not the least sum of times: the whole is faster with other tactics"
    if (status or plan.solution.status) == "proven":
        serial = "serial execution" + ("" if plan.solution.rivals.whole_bytes is None else ", these pieces")
        if tuned:
            bounds = f"{tuned.untimed:,} not timed, bounds at {tuned.sigmas:g} sigma"
            return f"proven minimal for {serial} and {tuned.timed:,} times; {bounds}"
        doubt = timing.is_predicted and plan.sparsity.mode != "disable" and bool(plan.sparsity.eligible)
        priced = ", with --risk's surcharge on doubtful sparse kernels" if doubt else ""
        return f"proven minimal for {serial} and these times{priced}"
    gap = plan.solution.gap if status is None else None
    return "not proven minimal" + ("" if gap is None else f": a plan that takes up to {100 * gap:.2f} % less may exist")


def held_text(device: Device) -> str:
    """Returns the sentence on the clock that predictions of tensor work assume on a card with a tight power limit; "" for other
    cards.
    """
    low, high = rates(device).sustained
    share = f"{100 * low:.0f} to {100 * high:.0f} % of the boost clock"
    return "" if low == high else f"tensor work is predicted at {share}, because of the power limit"


# ---- the network


def whose_text(record: Explained) -> str:
    """Returns the words that identify a plan: model, batch, device, --sparsity mode and the origin of its times."""
    device, mode = record.device, record.sparsity.mode
    where = f"{record.model.name} at batch {record.batch} for {device.title} ({device.sm})"
    return f"{where}, --sparsity={mode}; {times_are(record.timing)}"


def counts_text(sparsity: SparsityRecord) -> str:
    """Returns the sentence with the numbers of layers with weights, of eligible and of sparse ones, the latter also by
    sureness.

    A layer is a node of the model, even if one launch computes several nodes.
    """
    every, able, picked = len(sparsity.layers), len(sparsity.eligible), len(sparsity.picked)
    if not able:
        return f"none of {every} layers with weights is eligible for 2:4, so the plan is dense"
    text = f"{able} of {every} layers with weights are eligible, {picked or 'none'} run{'s' * (picked < 2)} sparse"
    words = sureness_text(sparsity)
    return f"{text} ({words})" if words else text


def dense_text(record: Explained) -> str:
    """Returns the sentence on the plan's time without sparse kernels and on the time that sparse kernels save; "" if no layer
    could run sparse.
    """
    total, dense = record.solution.total_us, record.solution.rivals.all_dense_us
    if not record.sparsity.eligible or dense is None or record.sparsity.mode == "disable":
        return ""
    text = f"without sparse kernels {us_text(dense, record.timing)} ({versus(dense, total)})"
    ranged = range_text(record)
    return f"{text}; they save {us_text(dense - total, record.timing)}, {ranged}" if ranged else text


def dense_us(record: Explained) -> float:
    """Returns the microseconds of the fastest plan without sparse kernels; the plan's own time if no such plan was made."""
    dense = record.solution.rivals.all_dense_us
    return record.solution.total_us if dense is None else dense


def fastest_dense_us(record: Explained, own_us: float) -> float:
    """Returns the microseconds of the fastest dense plan: our plan, `own_us`, or the estimate with a library's kernels if it is
    less.
    """
    library = record.solution.rivals.library
    return min(own_us, library.us) if library else own_us


def library_text(record: Explained) -> str:
    """Returns the sentence on the estimated plans, dense and 2:4, with a library's kernels; "" without such an estimate."""
    found = record.solution.rivals.library
    if found is None:
        return ""
    us, low, high = (us_text(us, PREDICTED) for us in (found.us, found.low_us, found.high_us))
    text = (
        f"dense kernels of a library (cuBLAS, CUTLASS) would take an estimated {us}, {100 * RANGE:.0f} % likely {low} to {high}"
    )
    if found.sparse_us is not None:
        faster = found.us - found.sparse_us >= SHOWN_US
        text += f", its 2:4 kernels {us_text(found.sparse_us, PREDICTED) if faster else 'no less'}"
    text += f"; library times are estimated for {found.layers} of {found.layers + found.own} launches; the rest use our times"
    return text if found.timed else f"{text}; the library was not timed on this GPU; its rates are taken from similar GPUs"


def rates_text(plans: Sequence[Explained]) -> str:
    """Returns the sentence on the error of a library's estimated times, and on their source; "" if no plan has such times.

    `plans`: of one device.
    """
    found = [library for p in plans if (library := p.solution.rivals.library)]
    if not found:
        return ""
    each = [(round(100 * (x.high_us / x.us - 1)), x.own) for x in found]
    error, own = (f"{min(of)} to {max(of)}" if min(of) < max(of) else str(of[0]) for of in zip(*each, strict=True))
    times = f"estimates of a library's dense times are {100 * RANGE:.0f} % likely right within {error} %"
    known = "" if found[0].timed else "taken from similar GPUs, "
    return f"{times}; launches that use our times: {own}; rates: {known}{found[0].source}"


def _gains(ratio: float) -> str:
    return "gains nothing measurable" if ratio < 1.005 else f"gains {ratio_text(ratio)}"


def gain_text(record: Explained) -> str:
    """Returns the sentence on the gain by 2:4 over the fastest known dense plan, ours or a library's; "" if no layer could be
    sparse, or if no dense plan was made.
    """
    total, rivals = record.solution.total_us, record.solution.rivals
    dense, library = rivals.all_dense_us, rivals.library
    if not record.sparsity.eligible or record.sparsity.mode == "disable" or not dense or not total:
        return ""
    own = dense / total
    if library is None or dense <= library.us:
        gain = _gains(own) if dense - total >= SHOWN_US else "gains nothing"
        others = "is not known" if library is None else f"is estimated to be {versus(library.us, dense)}"
        return f"{gain} over our dense plan, the fastest known. A dense plan with a library's kernels {others}"
    if library.us <= total:
        doubt = ", within the error of the estimate" if library.high_us > total else ""
        speeds = f"{ratio_text(library.us / total)} the estimated speed of a library's dense kernels{doubt}"
        return f"gains nothing: this plan runs at {speeds}, and at {ratio_text(own)} the speed of our dense plan"
    doubt = " (less than the error of the estimate)" if library.low_us <= total else ""
    text = f"{_gains(library.us / total)} over the fastest dense plan known, an estimate of a library's{doubt}"
    return f"{text}, and {ratio_text(own)} over our dense plan"


def range_text(record: Explained) -> str:
    """Returns the words for the range of the time that all sparse kernels save together, given the errors of predictions; ""
    for measured times.
    """
    span = record.sparsity.summary.saved_range_us if record.sparsity.summary else None
    if not span:
        return ""
    low, high = (us_text(us, record.timing) for us in span)
    return f"given the errors of predictions, {100 * RANGE:.0f} % likely between {low} and {high}"


def ceiling_text(record: Explained) -> str:
    """Returns the words for the upper limit of the gain by 2:4: the least time of any 2:4 plan; "" if it is not known."""
    dense = record.solution.rivals.all_dense_us
    ceiling = record.sparsity.summary.ceiling_us if record.sparsity.summary else None
    if not record.sparsity.eligible or ceiling is None or not dense:
        return ""
    text = f"{us_text(ceiling, record.timing)} ({versus(ceiling, dense)}), if every eligible layer ran twice as fast"
    return f"{text}, as far as launch time and memory permit"


def pruned_text(sparsity: SparsityRecord) -> str:
    """Returns the sentence on the weights that --sparsity=force changed."""
    if not sparsity.pruned:
        return "--sparsity=force changed nothing: all weights that can have the 2:4 pattern have it"
    energy = sparsity.pruned_energy
    taken = "" if energy is None else f", {lost_text(energy)} of their energy (the sum of their squares)"
    where = several(len(sparsity.pruned), "initializer")
    text = f"--sparsity=force set the two smallest of each four weights to zero in {where}"
    return f"{text}{taken}: the outputs differ from the original model's"


def network_lines(record: Explained) -> list[str]:
    """Returns the network's summary, wrapped into lines: the gain by pruning, the gain by 2:4, eligible and picked layers, the
    times of the plan and of the dense plan, the upper limit of 2:4, and a library's times.
    """
    gain, library = gain_text(record), library_text(record)
    text = f"{counts_text(record.sparsity)}; the plan takes {us_text(record.solution.total_us, record.timing)}"
    own = record.solution.rivals.own_us
    alone = (
        "" if own is None else f"one tactic runs all batches, the plan of this batch alone takes {us_text(own, record.timing)}"
    )
    text = "; ".join(filter(None, (text[0].upper() + text[1:], alone, dense_text(record))))
    ceiling = ceiling_text(record)
    limit = f"Upper limit of 2:4: {ceiling}" if ceiling else ""
    parts = (pruning_text(record), f"2:4 {gain}" if gain else "", text, limit, library)
    return wrap(". ".join(part[:1].upper() + part[1:] for part in parts if part))


# ---- whether pruning pays: the plan as if weights were 2:4


def pruned_outlook(record: Explained) -> Outlook | None:
    """Returns the predicted plan of the network with all weights pruned to 2:4; None if no such plan was made."""
    found = record.if_pruned
    if found is None:
        return None
    if isinstance(record, Outlook):
        risk, shapes = record.risk, record.shapes
    else:
        risk, shapes = record.flags.risk or 0.0, {b.name: b.shape for b in record.plan.inputs}
    timing = Timing("predicted", f"predicted({record.device.name})")
    return Outlook(record.model, record.device, timing, found.sparsity, found.solution, risk, shapes)


def pruned_savings(found: IfPruned) -> list[tuple[SparsityRow, float]]:
    """Returns (row, microseconds) for each layer that the pruned plan (`found`) runs sparse, the largest time first.

    The microseconds are the time that the pruned plan would lose with this layer dense.
    """
    rows = [(row, max(row.other_cost_us or 0.0, 0.0)) for row in found.sparsity.rows if row.verdict == "sparse"]
    return sorted(rows, key=lambda pair: -pair[1])


def pruned_costs(record: Explained) -> dict[str, float]:
    """Returns layer -> microseconds, for layers whose weights are not 2:4: the pruned plan's time with a sparse kernel in this
    layer minus its time with a dense one.

    It is negative where the pruned plan runs the layer sparse.
    """
    found = record.if_pruned
    rows = found.sparsity.rows if found else ()
    costs = ((row, row.other_cost_us * (-1 if row.verdict == "sparse" else 1)) for row in rows if row.other_cost_us is not None)
    return {name: cost for row, cost in costs for name in row.layers if found and name in found.layers}


def pruned_gains(found: IfPruned) -> tuple[float, float | None]:
    """Returns (time of the plan with present weights / time of the pruned plan, a library's dense time / time of the pruned
    plan).

    The second is None if the library's time is not known. If the pruned plan takes no time, as a record from an untrusted file
    may say, the result is (1.0, None).
    """
    total, library = found.solution.total_us, found.solution.rivals.library
    if not total:
        return 1.0, None
    return found.now_us / total, library.us / total if library else None


def pruning_text(record: Explained) -> str:
    """Returns the sentence on the gain by pruning, with the layers that gain most and the command that prunes; "" if no weights
    could become 2:4.
    """
    found = record.if_pruned
    if found is None:
        return ""
    times = [us_text(us, PREDICTED) for us in (found.solution.total_us, found.now_us)]
    able = len(found.sparsity.eligible)
    which = (
        f"the weights of {len(found.layers)} of the {able} layers that can be 2:4" if len(found.layers) < able else "weights"
    )
    would = "would take" if record.timing.is_predicted else "is predicted to take"
    text = f"{which} are not 2:4; pruned, this network {would} {times[0]} instead of {times[1]} ("
    own, library = pruned_gains(found)
    if own < 1 - SHOWN_US:
        text = f"{which} are not 2:4; pruned, this network gains nothing: it {would} {times[0]} instead of {times[1]} ("
    if own < NO_GAIN:
        return f"{text}{ratio_text(own)}): not worth retraining at this size; a larger batch or image may gain more"
    text += ratio_text(own) + (f"; over a library's dense {ratio_text(library)})" if library else ")")
    return printable(f"{text}, {_where(found)}; next: {_prune_command(record)}")


def _where(found: IfPruned) -> str:
    """Returns the words that name the layers with most of the pruned plan's gain, MOST_NAMED at most."""
    rows = pruned_savings(found)
    names = ", ".join(" + ".join(row.layers) for row, _ in rows[:MOST_NAMED])
    first, whole = (sum(us for _, us in of) for of in (rows[:MOST_NAMED], rows))
    return f"most of it in {names}" if 2 * first > whole else f"in {len(rows)} layers, first {names}"


def _prune_command(record: Explained) -> str:
    """Returns the shell command that prunes the layers that would run sparse."""
    name = printable(record.model.name)
    words = ["gpu-runtime", "prune", f"{name}.onnx", "-o", f"{name}_24.onnx", "--layers=auto"]
    if not record.device.measured:
        words.append(f"--device={record.device.name}")
    shapes = record.flags.shapes if isinstance(record, EngineRecord) else record.shapes
    if shapes:
        words.append(f"--shapes={sizes_option(shapes)}")
    return shlex.join(words)
