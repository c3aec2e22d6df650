"""Facts of a plan as every text has them: times, a predicted one with a `~`, how sure it is, counts of layers, tactics, and why
a layer is FP32."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cuda_kernels.device import Device
from cuda_kernels.rates import rates
from gpu_runtime.runtime.findings import SparsityRecord, SparsityRow
from gpu_runtime.runtime.plan_record import Layer, PlanRecord, Timing, inner_name
from tactics.tactic import Tactic

SURE = (("certain", 0.95), ("likely", 0.75), ("toss-up", 0.0))  # what a pick is called, from which P(sparse faster) on


def sure(p: float) -> str:
    """The word for a kernel that is the faster one with this probability."""
    return next((word for word, least in SURE if p >= least), SURE[-1][0])


def sureness(row: SparsityRow) -> str:
    """How sure a sparse pick is: of predictions only, else empty."""
    return sure(row.p_sparse_faster) if row.verdict == "sparse" and row.p_sparse_faster is not None else ""


def surenesses(sparsity: SparsityRecord) -> dict[str, int]:
    """Word -> the layers that run sparse so surely; nothing where times are measured, or no layer runs sparse."""
    words = [sureness(row) for row in sparsity.rows for _ in row.layers if row.verdict == "sparse"]
    return {word: words.count(word) for word, _ in SURE} if any(words) else {}


def chance_text(p: float) -> str:
    """A probability, rounded down: none that falls short of a word's least looks as if it did not."""
    return f"{math.floor(round(100 * p, 2))} %"


def counts_text(sparsity: SparsityRecord) -> str:
    """How many layers could and do run sparse, and how sure that is. A layer is a node of the model, whatever it is launched
    with."""
    every, able, picked = len(sparsity.layers), len(sparsity.eligible), len(sparsity.picked)
    if not able:
        return f"none of {every} layers with weights is eligible for 2:4, so the plan is dense"
    text = f"{able} of {every} layers with weights are eligible, {picked or 'none'} run{'s' * (picked < 2)} sparse"
    words = sureness_text(sparsity)
    return f"{text} ({words})" if words else text


def sureness_text(sparsity: SparsityRecord) -> str:
    return ", ".join(f"{word} {count}" for word, count in surenesses(sparsity).items())


def held_text(device: Device) -> str:
    """Of a card with a tight power limit, which clock predicted times of tensor work rest on; else an empty text."""
    low, high = rates(device).sustained
    share = f"{100 * low:.0f} to {100 * high:.0f} % of the boost clock"
    return "" if low == high else f"tensor work is predicted at {share}, for the power limit"


def tactic_text(tactic: Tactic | None) -> str:
    """A tactic's name without the formats at its end: tables have a column for them."""
    return tactic.runner if tactic else "-"


def times_are(timing: Timing) -> str:
    return f"times are {timing.label}{', marked ~' if timing.is_predicted else ''}"


def us_text(us: float, timing: Timing, sign: str = "", unit: str = " us") -> str:
    return f"{'~' if timing.is_predicted else ''}{us:{sign}.2f}{unit}"


def summing(total: float, parts: Sequence[float]) -> list[float]:
    """The parts in hundredths, each the one below it or above, so that as shown they add up to the total as it is shown; where
    they do not add up to it at all, each for itself."""
    below = [math.floor(100 * part) for part in parts]
    missing = round(100 * round(total, 2)) - sum(below)
    if not 0 <= missing <= len(parts):
        return [round(part, 2) for part in parts]
    upper = sorted(range(len(parts)), key=lambda i: below[i] - 100 * parts[i])[:missing]
    return [(n + (i in upper)) / 100 for i, n in enumerate(below)]


def proven(plan: PlanRecord, timing: Timing) -> str:
    """What a proof is about: where times are predicted, a sparse kernel costs more than its time by what its doubt is worth."""
    doubt = timing.is_predicted and plan.sparsity.mode != "disable" and bool(plan.sparsity.eligible)
    return "proven minimal" + (", doubt about sparse kernels priced in (--risk)" if doubt else "")


def fp32_reasons(plan: PlanRecord, layer: Layer) -> list[str]:
    """A sentence for each tensor of a layer that is FP32 since FP16 cannot hold it."""
    known = {name: why for t, why in (plan.range.single if plan.range else ()) for name in (t, inner_name(t))}
    names = [t.name for t in (*layer.outputs, *layer.inputs) if t.format.dtype == "fp32"]
    return [*dict.fromkeys(known[name] for name in names if name in known)]
