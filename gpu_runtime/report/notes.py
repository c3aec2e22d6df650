"""A plan's layers for other viewers: a trace for Perfetto, and an ONNX model with notes at its nodes for Netron.

The trace follows the Trace Event Format of Chrome (complete events "X", counters "C", metadata "M", all in microseconds).
"""

import hashlib
import statistics
from collections.abc import Sequence
from pathlib import Path

from cuda_kernels import files
from gpu_runtime.explain.facts import KINDS, facts_of
from gpu_runtime.explain.figures import tactic_text, us_text
from gpu_runtime.explain.wording import sentence
from gpu_runtime.report import data
from gpu_runtime.runtime.plan_record import EngineRecord
from gpu_runtime.text import printable

PREFIX = "gpu_runtime."  # begins the keys of notes in an ONNX model
PROCESS, KERNELS = 1, 1  # numbers of the trace's one process and its one track


def notes(record: EngineRecord) -> list[dict[str, str]]:
    """Returns the notes on each layer as a dict of texts: "layer" (its name), "tactic", "formats", "time", "timing" and
    "verdict"; for a layer with weights also "reason" (its code) and "why".
    """
    found = []
    for facts in facts_of(record):
        layer, row = facts.layer, facts.row
        note = {
            "layer": printable(layer.name),
            "tactic": tactic_text(layer.tactic),
            "formats": facts.formats,
            "time": us_text(layer.time_us, record.timing),
            "timing": printable(record.timing.label),
            "verdict": KINDS[facts.kind],
        }
        if row:
            note |= {"reason": row.reason, "why": printable(sentence(row, record))}
        found.append(note)
    return found


# ---- Perfetto


def trace(record: EngineRecord, times_us: Sequence[Sequence[float]] | None = None) -> dict[str, object]:
    """Returns the plan as a Chrome trace, a JSON object: its launches one after the other on one track, and a counter of live
    activation bytes.

    `times_us[iteration][layer]`: measured times, whose medians are drawn; None: the plan's own times.
    """
    plan, label = record.plan, printable(record.timing.label)
    times = [layer.time_us for layer in plan.layers] if times_us is None else [statistics.median(t) for t in zip(*times_us)]  # noqa: B905
    head = printable(f"{record.model.name} on {record.device.title}, {label}")
    events: list[dict[str, object]] = [_named("process_name", head), _named("thread_name", "kernels")]
    starts, at = [], 0.0
    for layer, note, us in zip(plan.layers, notes(record), times, strict=True):
        starts.append(at)
        if layer.tactic:
            events.append(
                {
                    "ph": "X",
                    "name": note["layer"],
                    "cat": layer.type,
                    "ts": round(at, 3),
                    "dur": round(us, 3),
                    "pid": PROCESS,
                    "tid": KERNELS,
                    "args": note | {"time": us_text(us, record.timing)},
                }
            )
            at += us
    events += _alive(record, starts, at)
    about = {"device": printable(str(record.device)), "timing": label, "predicted": record.timing.is_predicted}
    about["batch"] = record.batch
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _named(what: str, name: str) -> dict[str, object]:
    """Returns the event that gives the process or the track a name. `what`: "process_name" or "thread_name"."""
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": KERNELS, "args": {"name": name}}


def _alive(record: EngineRecord, starts: Sequence[float], end: float) -> list[dict[str, object]]:
    """Returns the counter's events: the bytes of live activations at the start of each launch (`starts`, in us) and at
    `end`.
    """
    steps, blocks = record.plan.steps, data.blocks(record.plan)
    begin = [min((starts[i] for i in step.covers), default=0.0) for step in steps]
    counts = [sum(b.nbytes for b in blocks if b.first <= s <= b.last) for s in range(len(steps))]
    points = [*zip(begin, counts, strict=True), (end, counts[-1] if counts else 0)]
    return [
        {"ph": "C", "name": "activations alive", "ts": round(ts, 3), "pid": PROCESS, "args": {"bytes": n}} for ts, n in points
    ]


# ---- Netron


def annotated(record: EngineRecord, path: str | Path) -> bytes:
    """Returns the bytes of the ONNX model that the engine was built from, in which each node has the notes of the layer that
    computes it as metadata.

    The annotated model computes the same results. `path`: the model's file. Raises ModelError if it cannot be read, ValueError
    if the engine was built from another model.
    """
    from gpu_runtime.frontend.files import load, weights

    with files.open_regular(path) as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found != record.model.sha256:
        raise ValueError(
            f"{path}: its sha256 is {found[:16]}..., expected {record.model.sha256[:16]}...: the engine was built from another "
            "model; give that one"
        )
    with load.named(Path(path)):
        proto = load.load_whole(Path(path))
    own = {
        node: note | {"nodes": ", ".join(map(printable, layer.nodes))}
        for layer, note in zip(record.plan.layers, notes(record), strict=True)
        for node in layer.nodes
    }
    weights.name_nodes(proto.graph.node)
    for node in proto.graph.node:
        note = own.get(node.name, {"verdict": "no layer", "why": "It was folded into constants or into other nodes."})
        _put(node.metadata_props, {PREFIX + key: value for key, value in note.items()})
        head = f"{note['layer']}: {note['time']}, {note['tactic']}, {note['formats']}, " if "layer" in note else ""
        text = f"{head}{note['verdict']}. {note.get('why', '')}".strip()
        node.doc_string = f"{node.doc_string}\n{text}" if node.doc_string else text
    total = us_text(record.plan.solution.total_us, record.timing)
    about = {"device": str(record.device), "timing": record.timing.label, "total": total, "sparsity": record.flags.sparsity}
    about["batch"] = str(record.batch)
    _put(proto.metadata_props, {PREFIX + key: printable(value) for key, value in about.items()})
    return proto.SerializeToString(deterministic=True)


def _put(entries: object, values: dict[str, str]) -> None:
    """Sets keys of a repeated StringStringEntryProto in place; existing entries with these keys are replaced."""
    kept = [(e.key, e.value) for e in entries if e.key not in values]  # type: ignore[attr-defined]
    del entries[:]  # type: ignore[attr-defined]
    for key, value in (*kept, *values.items()):
        entries.add(key=key, value=value)  # type: ignore[attr-defined]
