"""The facts of each layer of an engine's plan, in one record for tables, trace, annotated model and page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpu_runtime.explain.figures import SURE, sureness, us_text
from gpu_runtime.runtime.findings import SparsityRow
from gpu_runtime.runtime.plan_record import EngineRecord, Layer, inner_name
from gpu_runtime.text import size_text

Kind = Literal["sparse", "certain", "likely", "toss_up", "dense", "not_eligible", "other", "reformat", "noop"]
SURE_KINDS: dict[str, Kind] = dict(zip(dict(SURE), ("certain", "likely", "toss_up"), strict=True))
KINDS: dict[Kind, str] = {  # kind -> its name in texts, in the order of the page's filters; "sparse" only in measured plans
    "sparse": "sparse",
    **{kind: f"sparse, {word}" for word, kind in SURE_KINDS.items()},
    "dense": "dense",
    "not_eligible": "not eligible",
    "other": "without weights",
    "reformat": "reformat",
    "noop": "no launch",
}


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer of the plan with its sparsity row (`row`), None for a layer without weights.

    `wide`: for each of the layer's FP32 tensors the sentence on why FP16 cannot hold it.
    """

    layer: Layer
    row: SparsityRow | None
    wide: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        """The layer's kind by its verdict, and by how sure a sparse pick is: a key of KINDS."""
        if self.layer.type in ("reformat", "noop"):
            return "reformat" if self.layer.type == "reformat" else "noop"
        return SURE_KINDS.get(sureness(self.row), self.row.verdict) if self.row else "other"

    @property
    def formats(self) -> str:
        """The formats of the layer's inputs and outputs: `fp16:chw -> fp16:hwc8`, or one format if they are the same."""
        ins, outs = ends_of(self.layer)
        return ins if ins == outs else f"{ins} -> {outs}"

    def range_us(self, sigma: float | None) -> tuple[float, float] | None:
        """Returns the error band (low, high) of the layer's time in microseconds; None if it is not known, or if the layer
        launches nothing.

        It is the band of the layer's best kernel if the record has this kernel, else the time plus and minus `sigma`, the
        relative error of all predictions; None: the error is not known.
        """
        us = self.layer.time_us
        best = (self.row.best_sparse if self.layer.is_sparse else self.row.best_dense) if self.row else None
        if not self.layer.tactic:
            return None
        if best and best.us > 0:
            return us * best.low_us / best.us, us * best.high_us / best.us
        return None if sigma is None else (max(0.0, us * (1 - sigma)), us * (1 + sigma))


def ends_of(layer: Layer) -> tuple[str, str]:
    """Returns (the formats of the inputs, the formats of the outputs), each as one text with commas and without repetitions."""
    ins, outs = (", ".join(dict.fromkeys(str(t.format) for t in ts)) for ts in (layer.inputs, layer.outputs))
    return ins, outs


def layer_rows(layers: Sequence[Layer]) -> list[list[int]]:
    """Returns, for each row of a table of layers, the indices of the layers in it: one layer, or all pieces of a batch that one
    op computes.
    """
    rows: list[list[int]] = []
    run: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        if layer.images is None:
            run = {}
            rows.append([i])
        elif layer.op_name in run:
            run[layer.op_name].append(i)
        else:
            run[layer.op_name] = [i]
            rows.append(run[layer.op_name])
    return rows


def pieces_text(record: EngineRecord) -> str:
    """Returns the sentence on the layers that run the batch in pieces, and the time without pieces; "" without such layers."""
    layers, p = record.plan.layers, record.plan.solution
    parts = [row for row in layer_rows(layers) if layers[row[0]].images]
    if not parts:
        return ""
    launched = sum(layers[row[0]].tactic is not None for row in parts)
    sizes = Counter(layers[i].outputs[0].shape4[0] for i in parts[0])
    each = " and ".join(f"{count} pieces of {size} images" for size, count in sizes.items())
    whole_us, share_us = p.rivals.whole_us, sum(layers[i].time_us for row in parts for i in row)
    whole = "" if whole_us is None else f"; with the whole batch in each the plan would take {us_text(whole_us, record.timing)}"
    text, why = f"{launched} layers, {us_text(share_us, record.timing)}, run in {each}", "so that L2 keeps their tensors"
    allowed, needed = record.flags.activations, p.rivals.whole_bytes
    if allowed is None or needed is None:
        return f"{text}, {why}{whole}; other sizes were estimated"
    taken = size_text(record.plan.memory.activation_bytes)
    why = f"so that activations take {taken}: {size_text(allowed)} are allowed, the whole batch takes {size_text(needed)}"
    return f"{text}, {why}{whole}; of the other pieces that were tried, none that fits is faster"


def facts_of(record: EngineRecord) -> list[LayerFacts]:
    """Returns the facts of every layer, in execution order."""
    plan = record.plan
    rows = {row.layer: row for row in plan.sparsity.rows}
    known = {name: why for t, why in (plan.range.single if plan.range else ()) for name in (t, inner_name(t))}
    found = []
    for layer in plan.layers:
        names = [t.name for t in (*layer.outputs, *layer.inputs) if t.format.dtype == "fp32"]
        wide = tuple(dict.fromkeys(known[name] for name in names if name in known))
        found.append(LayerFacts(layer, rows.get(layer.layer or layer.name), wide))
    return found
