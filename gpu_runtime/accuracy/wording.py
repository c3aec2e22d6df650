"""A comparison as the text that `gpu-runtime compare` prints."""

import math
from collections.abc import Sequence

from gpu_runtime.accuracy.comparison import Comparison, Row, Scores
from gpu_runtime.text import several, table, wrap

MOST_ROWS = 12  # layers that are shown without --all-layers


def text(c: Comparison, all_layers: bool = False) -> str:
    """Returns the comparison as text: outputs, layers and the verdict, in lines of at most 120 columns.

    `all_layers`: every layer is shown, else only the first failing one and the worst.
    """
    lines = [*_table("output", c.outputs, [r.tensor for r in c.outputs]), ""]
    rows = _chosen(c.layers, all_layers)
    if rows:
        names = [r.layer if r.layer == r.tensor else f"{r.layer} -> {r.tensor}" for r in rows]
        head = "layer" if len(rows) == len(c.layers) else f"layer ({len(rows)} of {len(c.layers)}: the worst)"
        lines += [*_table(head, rows, names), ""]
    return "\n".join([*lines, *verdict(c)]) + "\n"


def _chosen(rows: Sequence[Row], all_layers: bool) -> list[Row]:
    """Returns the layers to show, in the order of execution: all, or MOST_ROWS, the first failing layer and the worst ones."""
    if all_layers or len(rows) <= MOST_ROWS:
        return list(rows)
    first = [i for i, r in enumerate(rows) if not r.passed][:1]
    excess = [r.error / (r.allowed or r.alone or 1e-30) for r in rows]
    worst = sorted(range(len(rows)), key=lambda i: (rows[i].passed, -excess[i]))[:MOST_ROWS]
    return [rows[i] for i in sorted({*first, *worst[: MOST_ROWS - len(first)]})]


def _table(title: str, rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Returns the lines of a table of the rows. `title`: the head of its first column, `names`: the first cell of each row."""
    by_element = any(r.allowed is None for r in rows)
    header = [title, "error", "FP16 alone", "elements beyond" if by_element else "allowed", "largest diff", "verdict"]
    cells = [
        [
            name,
            number(r.error),
            number(r.alone),
            str(r.beyond) if r.allowed is None else number(r.allowed),
            number(r.largest),
            "ok" if r.passed else "DIFFERS",
        ]
        for name, r in zip(names, rows, strict=True)
    ]
    return table(header, cells, range(1, 5))


def verdict(c: Comparison) -> list[str]:
    """Returns the lines below the tables: whether the outputs agree, the first layer that diverges, the layers that could not
    be compared, the scores, and the difference that pruning causes.
    """
    lines = []
    wrong, late = [r for r in c.outputs if not r.passed], [r for r in c.layers if not r.passed]
    of = "the pruned model" if c.pruning else "the model"
    if not c.same_file:
        lines += wrap(
            "The model is not the file that the engine was built from (their sha256 differ), which may explain a difference"
        )
    if wrong:
        lines += wrap(f"The engine differs from {of}: {len(wrong)} of {len(c.outputs)} outputs are outside the tolerance")
    else:
        line = f"The engine agrees with {of}: {len(c.outputs)} of {len(c.outputs)} outputs are within tolerance"
        lines += wrap(f"{line}, but {len(late)} inner layers are not" if late else line)
    for r in wrong:
        if r.changed or r.ruined:
            lines += wrap(_ruined(r))
    if (first := c.first) is not None:
        limit = f"{first.beyond} elements are beyond" if first.allowed is None else f"{number(first.allowed)} is allowed"
        lines += wrap(f"First layer that diverges: {first.layer}, in {first.tensor}: error {number(first.error)}, {limit}")
    elif wrong:
        lines += wrap("No compared layer diverges before the outputs: the error comes from a layer that could not be compared")
    if c.unnamed:
        lines += wrap(
            f"{several(len(c.unnamed), 'layer')} write{'s' * (len(c.unnamed) == 1)} tensors that the ONNX graph does not have: "
            "look at the layers that read them"
        )
    if c.scores:
        lines += wrap(_scores_text(c.scores, c.samples))
    if c.pruning is not None:
        share = c.pruning.agreement
        same = "" if share is None else f", top-1 is the same for {100 * share:.2f} % of {several(c.samples, 'sample')}"
        changed = "" if c.pruning_error is None else f" by {100 * c.pruning_error:.1f} %"
        line = f"Pruning (--sparsity=force), not the engine, changes the original model's outputs{changed}: output SNR "
        lines += wrap(f"{line}{c.pruning.snr_db:.1f} dB{same}. Fine-tuning brings that back (docs/pruning.md)")
    return lines


def _ruined(r: Row) -> str:
    """Returns a sentence on a failed output: its error, and whether FP16 storage alone causes it; if so, also the cure."""
    by = (
        f"{several(r.changed, 'integer')} differ{'s' * (r.changed == 1)}"
        if r.changed
        else f"its largest error is {100 * r.share:.2g} % of its range"
    )
    if not r.ruined:
        return f"Output {r.tensor}: {by}, although storing tensors in FP16 does not explain it"
    cure = f"build with --layerPrecisions={r.tensor}:fp32, or with --calibration=FILE.npz"
    return f"FP16 ruins output {r.tensor}: {by}, in onnxruntime too once tensors are rounded to FP16; {cure}"


def _scores_text(s: Scores, samples: int) -> str:
    """Returns a sentence with the scores of the engine and its models over this number of samples."""
    was = "" if s.original is None else f", of the model before pruning {s.judge.text(s.original)}"
    of = "its model in FP32" if s.original is None else "the pruned model in FP32"
    engine, model = s.judge.text(s.engine), s.judge.text(s.model)
    return f"On {several(samples, 'sample')}, the {s.judge.name} of the engine is {engine}, of {of} {model}{was}"


def number(value: float) -> str:
    """Returns a number from 0 on with two digits, as 1.2e-03, or "inf"."""
    return "inf" if math.isinf(value) else f"{value:.1e}"
