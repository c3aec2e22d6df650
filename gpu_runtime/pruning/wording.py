"""The output of `gpu-runtime prune`: a row for each weight, and the overall result."""

import math

from gpu_runtime.accuracy.errors import Accuracy
from gpu_runtime.explain.figures import DEFAULT, library_text, span_text
from gpu_runtime.explain.names import grouped
from gpu_runtime.frontend.summaries.pattern import astray
from gpu_runtime.pruning.benefit import Forecast
from gpu_runtime.pruning.calibrate import Calibrated
from gpu_runtime.pruning.merged_branches import not_looked_for
from gpu_runtime.pruning.result import Pruned, Result
from gpu_runtime.runtime.plan_record import Outlook
from gpu_runtime.stored_pattern import together
from gpu_runtime.text import lost_text, one_line, printable, several, shapes_text, table, wrap

LEGEND = "energy lost: share of the squared weights that pruning removes, or would remove"
ALONE = "output SNR, top-1 kept: of the outputs with only this layer pruned, against the original model"


def forecast(found: Forecast, judging: bool = False) -> str:
    """Returns the text on the gain of 2:4, to be read before pruning; "" if no forecast was requested.

    `judging`: the plan selects the layers to prune (--layers=auto).
    """
    if found.unknown:
        line = f"No engine can be built of this model, so the gain of 2:4 is unknown: {one_line(found.unknown)}"
        return "\n".join([*wrap(line), "", ""])
    if (outlook := found.outlook) is None:
        return ""
    where = f"on {outlook.device.title}, {outlook.timing.label}, {shapes_text(outlook.shapes)}"
    line = f"With all its weights 2:4, {where}, the network {found.gain}"
    default = [f"{outlook.device.title} is {DEFAULT}"] if found.default else []
    notes = [line, library_text(outlook), *default, *_judged(outlook, judging)]
    return "\n".join([*(part for note in notes for part in wrap(note)), "", ""])


def _judged(outlook: Outlook, judging: bool) -> list[str]:
    """Returns lines on the batch at which a plan selects layers; at batch 1 they warn that tensor cores have little to do."""
    batch = f"{'--layers auto judges the layers' if judging else 'The gain is predicted'} at batch {outlook.batch}"
    if outlook.batch > 1:
        return [batch] if judging else []
    cure = f"gpu-runtime plan MODEL --devices {outlook.device.name} --batches 1,8,32,128 compares batches"
    return [f"{batch}: more layers gain at a larger one, which --shapes gives where the model leaves it open; {cure}"]


def written(name: str, result: Result, auto: bool) -> str:
    """Returns the last line: the file that was written, and whether it is of use. `auto`: a plan selected the layers."""
    if result.forecast.unknown:
        return f"Wrote {name}: no engine can be built from it, either"
    if any(r.verdict in ("pruned", "2:4") for r in result.rows):
        return f"Wrote {name}: build it with --sparsity=enable"
    cure = ": no layer gains at this batch; give a larger one with --shapes, or --layers=all" if auto else ""
    return f"Wrote {name}, but nothing was pruned{cure}"


def text(result: Result) -> str:
    """Returns the table of weights and the verdict, in lines as wide as the terminal."""
    a = result.accuracy
    header = [
        "layer",
        "weights",
        "energy lost",
        *(["in file's order"] if result.permuted else []),
        *(["output SNR", "top-1 kept"] if a else []),
        *([a.judge.name.removeprefix("top-1 ")] if a and a.judge else []),
        "verdict",
    ]
    rows = [_cells(r, result.permuted, a) for r in result.rows]
    lines = [*table(header, rows, range(2, len(header) - 1)), "", LEGEND, *([ALONE] if a else []), ""]
    return "\n".join([*lines, *summary(result)]) + "\n"


def _cells(r: Pruned, permuted: bool, a: Calibrated | None) -> list[str]:
    shape = "-" if r.shape is None else "x".join(map(str, r.shape))
    cells = [", ".join(r.layers), shape, "-" if r.lost_energy is None else lost_text(r.lost_energy)]
    if permuted:
        cells.append("-" if r.unpermuted is None else lost_text(r.unpermuted))
    if a:
        cells += ["-" if r.snr_db is None else snr_text(r.snr_db), share(r.agreement)]
    if a and a.judge:
        cells.append("-" if r.score is None else a.judge.text(r.score))
    reason = r.reason.removeprefix(f"shape {list(r.shape or ())}: ")
    line = f"{r.verdict} with the pattern of its sum" if r.sum and r.verdict == "pruned" else r.verdict
    line = f"{line}: {reason}" if reason else line
    return [*cells, f"{line}, its channels were not permuted: {r.unmoved}" if r.unmoved and r.verdict == "pruned" else line]


def summary(result: Result) -> list[str]:
    able = [r for r in result.rows if r.verdict != "kept"]
    done, already = ([r for r in able if r.verdict == verdict] for verdict in ("pruned", "2:4"))
    line = f"Pruned {len(done)} of the {several(len(able), 'weight')} that can be 2:4"
    line += f" ({len(already)} were already)" if already else ""
    if done:
        line += f"; they lost {lost_text(result.lost_energy)} of their energy (the sum of their squares)"
        line += f", instead of {lost_text(result.unpermuted)} without --permute" if result.permuted else ""
    if done and result.permuted and all(r.unmoved for r in done):
        line += f". --permute moved no channel; of {done[0].layers[0]}: {done[0].unmoved}"
    wrong = astray((r.stored.elsewhere for r in done if r.stored), "were")
    lines = [*wrap(line), *(wrap(f"Before, {wrong}") if wrong else []), *_sums(result)]
    a = result.accuracy
    if a is None:
        return [*lines, "The effect on the outputs was not measured: --calibration=inputs.npz measures it"] if done else lines
    lines += wrap(f"On {several(a.samples, 'sample')}, against the original model: {_both(a.kept)}")
    if a.judge and a.score is not None and a.kept.score is not None:
        before, after = a.judge.text(a.score), a.judge.text(a.kept.score)
        lines += wrap(f"The {a.judge.name} on them was {before}, and is {after} with this pruning")
    if a.restored:
        restored = ", ".join(layer for r in result.rows if r.verdict == "restored" for layer in r.layers)
        lines += wrap(f"Left dense to meet the limit: {restored}; with all pruned: {_both(a.all)}")
    if not a.reached:
        lines += wrap(f"The limit is not met even with every weight dense: {_both(a.dense)}")
    return lines


def _sums(result: Result) -> list[str]:
    """Returns lines on the common pattern of branches that may run as one convolution, or on the reason why there is none."""
    if result.unknown:
        return wrap(not_looked_for(f"{result.unknown}. Each branch is pruned by itself"))
    left = {r.sum for r in result.rows if r.verdict == "restored"}
    done = [s for s in result.sums if s.lost_energy is not None and s.node not in left]
    lines = []
    if done:
        rows = [r for r in result.rows if r.sum and r.verdict == "pruned" and r.stored]
        whole = together(r.stored for r in rows if r.stored)
        alone = sum((r.by_itself or 0.0) * r.stored.energy for r in rows if r.stored) / (whole.energy or 1.0)
        span = span_text([s.lost_energy for s in done], lost_text)
        line = (
            f"{len(rows)} of these layers are parallel branches of {several(len(done), 'sum')} that can run as one "
            f"convolution. They share one pattern, so the merged convolution is 2:4 and loses {span} of its "
            f"energy. The branches lose {lost_text(whole.lost_energy)} of theirs, with --branches=separate {lost_text(alone)}"
        )
        lines += wrap(line)
    for reason in dict.fromkeys(s.reason for s in result.sums if s.lost_energy is None):
        first = grouped(s.layers[0] for s in result.sums if s.reason == reason)
        lines += wrap(
            printable(
                f"{', '.join(first)} and the branches added to them are pruned separately, not 2:4 as one convolution: {reason}"
            )
        )
    return lines


def _both(a: Accuracy) -> str:
    top = "" if a.agreement is None else f", top-1 is the same for {share(a.agreement)}"
    return f"output SNR {snr_text(a.snr_db)}{top}"


def snr_text(db: float) -> str:
    return "no signal" if db == -math.inf else "exact" if math.isinf(db) else f"{db:.1f} dB"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
