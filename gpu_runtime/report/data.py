"""The content of a page as JSON: an engine's plan, with printable names and finished texts.

All data comes from the engine's record: nothing is planned or timed here. For each combination of formats of a layer the record
holds the fastest dense and the fastest sparse candidate.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpu_runtime.explain.facts import LayerFacts, facts_of
from gpu_runtime.explain.figures import network_lines, proof_text, pruned_costs, pruned_text, range_text, sureness_text
from gpu_runtime.explain.plan_facts import NOTED, ORIGIN, plan_facts
from gpu_runtime.explain.points import size_options
from gpu_runtime.explain.wording import layer_facts
from gpu_runtime.report.drawing import draw
from gpu_runtime.runtime.findings import ChoiceRow, Choices, SparsityRow
from gpu_runtime.runtime.plan_record import Bound, EngineRecord, Layer, PlanRecord, TensorPlace
from gpu_runtime.text import printable
from tactics.planner.graph import to_us
from tactics.planner.grouping import grouped
from tactics.tactic import Tactic

Keys = dict[str, Any]  # an object of the page's JSON
Named = tuple[str, str]
NO_KERNEL = {
    "reformat": "Its reader needs the tensor in another format: with this reformat, both layers together are fastest.",
    "noop": "Nothing is launched: the tensor is already there, under another name.",
}


def page(record: EngineRecord) -> Keys:
    """Returns the content of an engine's page as a JSON object; layers refer to "tactics" and "tensors" by number."""
    plan, device = record.plan, record.device
    placed: list[TensorPlace | Bound] = [*plan.inputs, *(t for layer in plan.layers for t in layer.tensors), *plan.outputs]
    tensors: dict[str, TensorPlace | Bound] = {}
    for t in placed:
        tensors.setdefault(t.name, t)
    numbers = {name: i for i, name in enumerate(tensors)}
    tactics: dict[Tactic, int] = {}
    forms = _Forms(plan.choices, tactics)
    costs = pruned_costs(record)
    layers = [_layer(record, found, numbers, forms, costs) for found in facts_of(record)]
    return {
        "verdict": _verdict(record),
        "layers": layers,
        "tactics": [_tactic(tactic) for tactic in tactics],
        "tensors": [
            {
                "name": printable(t.name),
                "shape": t.shape4,
                "format": str(t.format),
                "nbytes": t.nbytes,
                "offset": t.offset,
            }
            for t in tensors.values()
        ],
        "graph": _graph(plan, numbers),
        "memory": {
            "nbytes": plan.memory.activation_bytes,
            "most_alive": plan.memory.largest_live_bytes,
            "workspace": plan.memory.workspace,  # offset and bytes of scratch memory
            "blocks": [asdict(block) for block in blocks(plan)],
            "steps": [step.covers for step in plan.steps],  # the layers of each launch
        },
        "peaks": {  # at the boost clock: dense FP16 products with FP32 sums (2:4 kernels compute twice as many), bandwidths
            "dense_tflops": round(device.dense_tflops, 3),
            "dram_gbps": device.dram_gbps,
            "l2_gbps": device.l2_bytes_per_clk * device.clock_mhz / 1e3,
        },
        "environment": environment(record),
        "command": command(record),
    }


def joined(a: Sequence[Mapping], b: Sequence[Mapping]) -> list[tuple[int | None, int | None]]:
    """Returns pairs of layers of two pages, by number: layers of the same name, else layers that share an ONNX node.

    A layer that only one plan has is paired with None. Pairs are in the first plan's order, then the second's.

    >>> joined([{"name": "conv1"}, {"name": "fc"}], [{"name": "fc"}])
    [(0, None), (1, 0)]
    """
    left = {layer["name"]: i for i, layer in enumerate(b)}
    pairs: dict[int, int | None] = {i: left.pop(layer["name"], None) for i, layer in enumerate(a)}
    by_node = {node: i for i in left.values() for node in b[i].get("nodes", ())}
    taken: set[int] = set()
    for i, layer in enumerate(a):
        shared = [by_node[node] for node in layer.get("nodes", ()) if node in by_node and by_node[node] not in taken]
        if pairs[i] is None and shared:
            pairs[i] = shared[0]
            taken.add(shared[0])
    return [*pairs.items(), *((None, i) for i in left.values() if i not in taken)]


# ---- tactics, candidates


def _tactic(tactic: Tactic) -> Keys:
    """Returns a tactic as a JSON object: "name", "formats", and "sparse" for a sparse one."""
    formats = f"{', '.join(dict.fromkeys(map(str, tactic.ins)))} -> {tactic.out}"
    return {"name": tactic.runner, "formats": formats} | ({"sparse": True} if tactic.sparse else {})


class _Forms:
    """The candidates (tactics with times) in a record, for each form of a layer, by the name of the layer or op.

    `numbers`: tactic -> its number on the page, in the order of first use; calls add tactics to it.
    """

    def __init__(self, choices: Choices | None, numbers: dict[Tactic, int]):
        self.tactics, self.numbers = choices.tactics if choices else (), numbers
        rows = choices.choices if choices else ()
        self.by_name = grouped((name, row) for row in rows for name in dict.fromkeys((row.op, row.layer, *row.layers)))

    def number(self, tactic: Tactic) -> int:
        """Returns the tactic's number on the page, a new one at its first use."""
        return self.numbers.setdefault(tactic, len(self.numbers))

    def of(self, layer: Layer) -> list[Keys]:
        """Returns a layer's forms as JSON objects with "op" and "candidates", the form that the plan runs first; forms without
        a launch are left out.
        """
        rows = self.by_name.get(layer.op_name, []) + (self.by_name.get(layer.layer, []) if layer.layer else [])
        forms = [(row.op, self._candidates(row)) for row in {row.op: row for row in rows}.values()]
        known = [{"op": printable(op), "candidates": candidates} for op, candidates in forms if candidates]
        return sorted(known, key=lambda f: f["op"] != printable(layer.op_name))

    def _candidates(self, row: ChoiceRow) -> list[tuple[int, float, float]]:
        """Returns (number of the tactic, microseconds, microseconds of premium for doubt) for each candidate, the fastest
        first.

        A tactic that occurs several times, for different places of its tensors, has its least time.
        """
        best: dict[int, tuple[int, float, float]] = {}
        for number, *_, ps, premium_ps in (e for i, e in enumerate(row.entries) if i not in row.pruned):
            if tactic := self.tactics[number]:
                mine = self.number(tactic)
                found = (mine, to_us(ps - premium_ps), to_us(premium_ps))
                best[mine] = min(best.get(mine, found), found, key=lambda c: c[1])
        return sorted(best.values(), key=lambda c: c[1])


# ---- layers


def _layer(
    record: EngineRecord, found: LayerFacts, numbers: Mapping[str, int], forms: _Forms, costs: Mapping[str, float]
) -> Keys:
    """Returns a layer as a JSON object; keys whose value is unknown or empty are left out.

    "nbytes": bytes that it must read and write, each once, weights included; "cost_us": time that the plan would take more with
    the other choice, which comes from `costs` for weights that are not 2:4; "saved_us": time that 2:4 saves here, or would
    save; "facts": (topic, text); "layers": the number of the model's nodes that have the weights. `numbers`: tensor -> its
    number on the page; `costs`: layer -> microseconds, as pruned_costs returns them.
    """
    layer, row = found.layer, found.row
    low, high = found.range_us(record.timing.sigma) or (None, None)
    other = next((costs[name] for name in row.layers if name in costs), row.other_cost_us) if row else None
    keys = {
        "name": printable(layer.name),
        "type": layer.type,
        "kind": found.kind,
        "us": layer.time_us,
        "low_us": _rounded(low),
        "high_us": _rounded(high),
        "reason": row.reason if row else None,
        "tactic": forms.number(layer.tactic) if layer.tactic else None,
        "formats": found.formats,
        "inputs": [numbers[t.name] for t in layer.inputs],
        "outputs": [numbers[t.name] for t in layer.outputs],
        "nodes": [*map(printable, layer.nodes)],
        "facts": _facts(record, found),
        "macs": layer.problem.macs or None if layer.problem and layer.tactic else None,
        "nbytes": _nbytes(layer) or None,
        "cost_us": _rounded(other),
        "saved_us": _rounded(_saved_us(row, other)) if row else None,
        "lost_energy": row.lost_energy if row else None,
        "forms": forms.of(layer) if layer.tactic else [],
        "layers": len(row.layers) if row else None,
    }
    return {key: value for key, value in keys.items() if value not in (None, "", [])}


def _saved_us(row: SparsityRow, other: float | None) -> float | None:
    """Returns the microseconds that 2:4 saves at a sparse layer, or would save at a dense one; None where they are not known.

    `other`: the cost of the other choice in the whole plan; None: the result is the predicted gain of the layer's kernels
    alone.
    """
    if other is not None:
        return other if row.verdict == "sparse" else -other
    return row.if_sparse.dense_us - row.if_sparse.us if row.if_sparse else None


def _facts(record: EngineRecord, found: LayerFacts) -> list[Named]:
    """Returns (topic, text) for each fact on a layer."""
    facts = [(key, printable(text)) for key, text in layer_facts(found.row, record)] if found.row else []
    why = facts[0][1] if facts else ""
    facts += [("fp32", text) for text in map(printable, found.wide) if text not in why]
    if found.kind in NO_KERNEL:
        facts.append(("why", NO_KERNEL[found.kind]))
    return facts


def _nbytes(layer: Layer) -> int:
    """Returns the bytes of the layer's tensors, each once, and two bytes for each weight; 0 for a layer without a launch."""
    if not layer.tactic:
        return 0
    distinct: dict[str, TensorPlace] = {t.name: t for t in layer.tensors}
    return sum(t.nbytes for t in distinct.values()) + 2 * layer.weights_count


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 4)


# ---- the plan


def _graph(plan: PlanRecord, numbers: Mapping[str, int]) -> Keys:
    """Returns the plan's graph as a JSON object. Its nodes are the layers, then the inputs, then the outputs; an edge (writer,
    reader, number of the tensor) leads from a tensor's writer to each of its readers. `numbers`: tensor -> its number.
    """
    count = len(plan.layers)
    source = {t.name: count + i for i, t in enumerate(plan.inputs)}
    edges: dict[tuple[int, int, int], None] = {}
    for i, layer in enumerate(plan.layers):
        for t in layer.inputs:
            if t.name in source:
                edges[source[t.name], i, numbers[t.name]] = None
        source |= {t.name: i for t in layer.outputs}
    first = count + len(plan.inputs)
    for i, out in enumerate(plan.outputs):
        if out.name in source:
            edges[source[out.name], first + i, numbers[out.name]] = None
    drawing = draw(first + len(plan.outputs), [(a, b) for a, b, _ in edges])
    inputs, outputs = ([printable(t.name) for t in ts] for ts in (plan.inputs, plan.outputs))
    return {"inputs": inputs, "outputs": outputs, "edges": [*edges], "drawing": asdict(drawing)}


def _verdict(record: EngineRecord) -> Keys:
    """Returns the plan's headline figures as a JSON object.

    "library_us": the time of the estimated dense plan with a library's kernels; "saved_range": the words for the range of the
    time that sparse kernels save; "sure": the words for the number of picks by sureness; "warning": why outputs differ from the
    model's. For weights that are not 2:4: "pruned_us", "pruned_picked" and "ceiling_us" describe the plan with pruned weights,
    and "now_us" is the predicted time with the present weights.
    """
    plan, timing, solution = record.plan, record.timing, record.plan.solution
    pruned, library = plan.if_pruned, solution.rivals.library
    summary = pruned.sparsity.summary if pruned else plan.sparsity.summary
    return {
        "model": printable(record.model.name),
        "device": printable(f"{record.device.title} ({record.device.sm})"),
        "batch": record.batch,
        "sparsity": plan.sparsity.mode,
        "timing": printable(timing.label),
        "predicted": timing.is_predicted,
        "total_us": solution.total_us,
        "dense_us": solution.rivals.all_dense_us,
        "ceiling_us": summary.ceiling_us if summary else None,
        "library_us": library.us if library else None,
        "pruned_us": pruned.solution.total_us if pruned else None,
        "now_us": pruned.now_us if pruned else None,
        "pruned_picked": f"{len(pruned.sparsity.picked)} of {len(pruned.sparsity.eligible)}" if pruned else None,
        "saved_range": range_text(record),
        "eligible": len(plan.sparsity.eligible),
        "picked": len(plan.sparsity.picked),
        "sure": sureness_text(plan.sparsity),
        "proof": proof_text(plan, timing),
        "sentence": printable(" ".join(s.strip() for s in network_lines(record))),
        "warning": pruned_text(plan.sparsity) if plan.sparsity.pruned else "",
    }


def environment(record: EngineRecord) -> list[Named]:
    """Returns (key, text) on the engine's origin: its model, options, producer and device, and the sizes of its plan."""
    return plan_facts(record, (*ORIGIN, "sources", "assumed", "total", "memory", "launches", "batches", *NOTED))


def command(record: EngineRecord) -> str:
    """Returns the shell command that builds this engine again."""
    flags, model = record.flags, printable(record.model.name)
    words = ["build-engine", f"{model}.onnx", "-o", f"{model}.engine", f"--sparsity={flags.sparsity}"]
    if not record.device.measured:
        words.append(f"--device={printable(record.device.name)}")
    words += size_options(record)
    if flags.batch_invariant:
        words.append("--batchInvariant")
    if flags.pools:
        words.append(f"--memPoolSize={flags.pools}")
    if flags.risk is not None and record.timing.is_predicted:
        words.append(f"--risk={flags.risk:g}")
    for option, bounds in (("--inputIOFormats", record.plan.inputs), ("--outputIOFormats", record.plan.outputs)):
        if any(t.format.layout != "chw" for t in bounds):
            words.append(f"{option}={','.join(str(t.format) for t in bounds)}")
    return shlex.join(words)


# ---- the arena of activations: the places of tensors, and the launches from which and to which they live


@dataclass(frozen=True, slots=True)
class Block:
    """A block of activation memory that holds `tensors`, one after the other, from step `first` through step `last`.

    `offset`, `nbytes`: its place in the arena; `layer`: the number of the layer that writes it first, None for an input.
    """

    offset: int
    nbytes: int
    first: int
    last: int
    layer: int | None
    tensors: tuple[str, ...]


def blocks(plan: PlanRecord) -> tuple[Block, ...]:
    """Returns every block of the arena, ordered by first step, then by offset; inputs live from the start, outputs until the
    end.
    """
    # (offset, bytes) of a live block -> (first step, first layer, names of its tensors)
    alive: dict[tuple[int, int], tuple[int, int | None, dict[str, None]]] = {}
    alive |= {(t.offset, t.nbytes): (0, None, {t.name: None}) for t in plan.inputs}
    frees, found = dict(plan.frees), list[Block]()

    def close(span: tuple[int, int], last: int) -> None:
        first, layer, names = alive.pop(span)
        found.append(Block(*span, first, last, layer, tuple(map(printable, names))))

    for number, step in enumerate(plan.steps):
        for i in step.covers:
            for t in plan.layers[i].outputs:
                alive.setdefault((t.whole.offset, t.whole.nbytes), (number, i, {}))[2][t.name] = None
        for offset, nbytes in frees.get(number, ()):
            for span in [s for s in alive if offset <= s[0] and s[0] + s[1] <= offset + nbytes]:
                close(span, number)
    for span in [*alive]:
        close(span, max(0, len(plan.steps) - 1))
    return tuple(sorted(found, key=lambda b: (b.first, b.offset)))
