"""What a page shows, as records: an engine's plan told by itself, all names printable, all texts ready.

Everything comes from the engine's record: nothing is planned or timed here. Of a layer's candidates the record holds, of those
with the same formats, the fastest dense and the fastest sparse one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpu_runtime.explain.figures import SURE, fp32_reasons, proven, sureness, sureness_text, us_text
from gpu_runtime.explain.wording import layer_facts, network_lines, range_text
from gpu_runtime.report import arena
from gpu_runtime.report.drawing import Drawing, draw
from gpu_runtime.runtime.findings import ChoiceRow, Choices, SparsityRow
from gpu_runtime.runtime.plan_record import Bound, EngineRecord, Layer, PlanRecord, TensorPlace
from gpu_runtime.text import printable, size_text
from tactics.planner.graph import to_us
from tactics.tactic import Tactic

Kind = Literal["sparse", "certain", "likely", "toss_up", "dense", "not_eligible", "other", "reformat", "noop"]
SURE_KINDS: dict[str, Kind] = dict(zip(dict(SURE), ("certain", "likely", "toss_up"), strict=True))
KINDS: dict[Kind, str] = {  # how the page names them, in the order of its filters; without a word, of a measured plan
    "sparse": "sparse",
    **{kind: f"sparse, {word}" for word, kind in SURE_KINDS.items()},
    "dense": "dense",
    "not_eligible": "not eligible",
    "other": "without weights",
    "reformat": "reformat",
    "noop": "no launch",
}
Named = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TacticFacts:
    """A kernel with its tile, the formats that it reads and writes, and whether it skips zeros."""

    name: str
    formats: str
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor of the plan: where it lies, and in which format."""

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Form:
    """Candidates of one way to fuse a layer: [number of the tactic, microseconds, the premium for doubt beside them] each."""

    op: str
    candidates: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer of the plan. `kind`: its verdict, or what it is where there is none; `tactic`, `inputs`, `outputs`: by number;
    `nbytes`: what it must read and write, each byte once, weights included; `cost_us`: what the plan would take more with
    the other choice; `saved_us`: what 2:4 saves here, or would; `facts`: (what, in words); `layers`: the model's nodes whose
    weights it has, how many."""

    name: str
    type: str
    kind: Kind
    us: float
    low_us: float | None = None
    high_us: float | None = None
    reason: str = ""
    tactic: int | None = None
    formats: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    facts: tuple[Named, ...] = ()
    macs: int = 0
    nbytes: int = 0
    cost_us: float | None = None
    saved_us: float | None = None
    lost_energy: float | None = None
    p_sparse_faster: float | None = None
    forms: tuple[Form, ...] = ()
    layers: int = 0


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """`drawing`: of the layers, then of the network's inputs and `outputs` as further nodes; `edges`: [node, node, tensor]."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    edges: tuple[tuple[int, int, int], ...]
    drawing: Drawing


@dataclass(frozen=True, slots=True)
class Memory:
    """The arena of activations; `workspace`: [offset, bytes] of scratch memory; `steps`: the layers of each launch."""

    nbytes: int
    most_alive: int
    workspace: tuple[int, int] | None
    blocks: tuple[arena.Block, ...]
    steps: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of the device, at its boost clock: dense FP16 products with FP32 sums (2:4 kernels do twice those), and bandwidths."""

    dense_tflops: float
    dram_gbps: float
    l2_gbps: float
    launch_us: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The plan in short. `saved_range`, in words: where what sparse kernels save lies; `sure`: how many picks are how sure;
    `sentence`: of the network; `proof`: what is proven; `warning`: why outputs are not the model's."""

    model: str
    device: str
    sparsity: str
    timing: str
    predicted: bool
    total_us: float
    dense_us: float | None
    ceiling_us: float | None
    saved_range: str
    eligible: int
    picked: int
    sure: str
    proof: str
    sentence: str
    warning: str


@dataclass(frozen=True, slots=True)
class Page:
    """One engine."""

    verdict: Verdict
    layers: tuple[LayerFacts, ...]
    tactics: tuple[TacticFacts, ...]
    tensors: tuple[TensorFacts, ...]
    graph: GraphFacts
    memory: Memory
    peaks: Peaks
    environment: tuple[Named, ...]
    command: str


def page(record: EngineRecord) -> Page:
    """Everything that a page shows of an engine."""
    plan, device = record.plan, record.device
    tensors, tactics = _tensors(plan), _Tactics()
    numbers = {name: i for i, name in enumerate(tensors)}
    rows = {row.layer: row for row in plan.sparsity.rows}
    forms = _Forms(plan.choices, tactics)
    layers = tuple(_layer(record, layer, rows.get(layer.layer or layer.name), numbers, tactics, forms) for layer in plan.layers)
    return Page(
        _verdict(record),
        layers,
        tuple(tactics.facts),
        tuple(tensors.values()),
        _graph(plan, numbers),
        _memory(plan),
        Peaks(
            round(device.dense_tflops, 3), device.dram_gbps, device.l2_bytes_per_clk * device.clock_mhz / 1e3, device.launch_us
        ),
        tuple(environment(record)),
        command(record),
    )


def joined(a: Page, b: Page) -> list[tuple[int | None, int | None]]:
    """The layers of two plans side by side, by number: those of the same name, else those that share an ONNX node; what only
    one plan has stands beside None. In the first plan's order, then the second's."""
    left = {layer.name: i for i, layer in enumerate(b.layers)}
    pairs: dict[int, int | None] = {i: left.pop(layer.name, None) for i, layer in enumerate(a.layers)}
    by_node = {node: i for i in left.values() for node in b.layers[i].nodes}
    taken: set[int] = set()
    for i, layer in enumerate(a.layers):
        shared = [by_node[node] for node in layer.nodes if node in by_node and by_node[node] not in taken]
        if pairs[i] is None and shared:
            pairs[i] = shared[0]
            taken.add(shared[0])
    return [*pairs.items(), *((None, i) for i in left.values() if i not in taken)]


# ---- tensors, tactics, candidates


def _tensors(plan: PlanRecord) -> dict[str, TensorFacts]:
    """The plan's tensors by name, in the order in which they come about."""
    found: dict[str, TensorFacts] = {}
    placed: list[TensorPlace | Bound] = [*plan.inputs]
    for layer in plan.layers:
        placed += layer.tensors
    for t in (*placed, *plan.outputs):
        if t.name not in found:
            found[t.name] = TensorFacts(printable(t.name), tuple(t.shape4), str(t.format), t.nbytes, t.offset)
    return found


class _Tactics:
    """Each tactic once, by number."""

    def __init__(self) -> None:
        self.facts: list[TacticFacts] = []
        self.numbers: dict[Tactic, int] = {}

    def number(self, tactic: Tactic) -> int:
        if tactic not in self.numbers:
            self.numbers[tactic] = len(self.facts)
            formats = f"{', '.join(dict.fromkeys(map(str, tactic.ins)))} -> {tactic.out}"
            self.facts.append(TacticFacts(tactic.runner, formats, tactic.sparse))
        return self.numbers[tactic]


class _Forms:
    """What the record holds of each layer's candidates, by the layer's name or the op's."""

    def __init__(self, choices: Choices | None, tactics: _Tactics):
        self.choices, self.tactics = choices, tactics
        self.by_name: dict[str, list[ChoiceRow]] = {}
        for row in choices.choices if choices else ():
            for name in dict.fromkeys((row.op, row.layer, *row.layers)):
                self.by_name.setdefault(name, []).append(row)

    def of(self, layer: Layer) -> tuple[Form, ...]:
        """The layer's own form first; without those in which nothing is launched."""
        rows = self.by_name.get(layer.name, []) + (self.by_name.get(layer.layer, []) if layer.layer else [])
        forms = [self._form(row) for row in {row.op: row for row in rows}.values()]
        return tuple(sorted((f for f in forms if f.candidates), key=lambda f: f.op != printable(layer.name)))

    def _form(self, row: ChoiceRow) -> Form:
        """A tactic that stands several times, for places in other tensors, with its least time."""
        best: dict[int, tuple[int, float, float]] = {}
        for number, *_, ps, premium_ps in row.entries:
            tactic = self.choices.tactics[number] if self.choices else None
            if tactic:
                mine = self.tactics.number(tactic)
                found = (mine, to_us(ps - premium_ps), to_us(premium_ps))
                best[mine] = min(best.get(mine, found), found, key=lambda c: c[1])
        return Form(printable(row.op), tuple(sorted(best.values(), key=lambda c: c[1])))


# ---- layers


def _layer(
    record: EngineRecord, layer: Layer, row: SparsityRow | None, numbers: Mapping[str, int], tactics: _Tactics, forms: _Forms
) -> LayerFacts:
    low, high = _range(record, layer, row)
    return LayerFacts(
        printable(layer.name),
        layer.type,
        kind_of(layer, row),
        layer.time_us,
        low,
        high,
        reason=printable(row.reason) if row else "",
        tactic=tactics.number(layer.tactic) if layer.tactic else None,
        formats=formats_of(layer),
        inputs=tuple(numbers[t.name] for t in layer.inputs),
        outputs=tuple(numbers[t.name] for t in layer.outputs),
        nodes=tuple(map(printable, layer.nodes)),
        facts=tuple(_facts(record, layer, row)),
        macs=layer.problem.macs if layer.problem and layer.tactic else 0,
        nbytes=_nbytes(layer),
        cost_us=_rounded(row.other_cost_us) if row else None,
        saved_us=_rounded(_saved_us(row)) if row else None,
        lost_energy=row.lost_energy if row else None,
        p_sparse_faster=row.p_sparse_faster if row else None,
        forms=forms.of(layer) if layer.tactic else (),
        layers=len(row.layers) if row else 0,
    )


def kind_of(layer: Layer, row: SparsityRow | None) -> Kind:
    if layer.type == "reformat":
        return "reformat"
    if layer.type == "noop":
        return "noop"
    if row is None:
        return "other"
    return SURE_KINDS.get(sureness(row), row.verdict)


def _range(record: EngineRecord, layer: Layer, row: SparsityRow | None) -> tuple[float | None, float | None]:
    """The error of the layer's time: of its kernel where the record has it, else that of all predictions."""
    best = (row.best_sparse if layer.is_sparse else row.best_dense) if row else None
    if not layer.tactic:
        return None, None
    if best and best.us > 0:
        return _rounded(layer.time_us * best.low_us / best.us), _rounded(layer.time_us * best.high_us / best.us)
    if record.timing.sigma is None:
        return None, None
    return _rounded(max(0.0, layer.time_us * (1 - record.timing.sigma))), _rounded(layer.time_us * (1 + record.timing.sigma))


def _saved_us(row: SparsityRow) -> float | None:
    """What 2:4 takes off the plan at this layer; of a dense one what it would, by its kernels where nothing was planned."""
    if row.other_cost_us is not None:
        return row.other_cost_us if row.verdict == "sparse" else -row.other_cost_us
    return row.if_sparse.dense_us - row.if_sparse.us if row.if_sparse else None


def _facts(record: EngineRecord, layer: Layer, row: SparsityRow | None) -> list[Named]:
    facts = [(key, printable(text)) for key, text in layer_facts(row, record)] if row else []
    told = facts[0][1] if facts else ""
    facts += [("fp32", printable(why)) for why in fp32_reasons(record.plan, layer) if printable(why) not in told]
    if layer.type == "reformat":
        facts.append(("why", "Its reader takes the tensor in another format: together the two are the cheapest pair."))
    if layer.type == "noop":
        facts.append(("why", "Nothing is launched: the tensor is already there, under another name."))
    return facts


def formats_of(layer: Layer) -> str:
    ins, outs = (", ".join(dict.fromkeys(str(t.format) for t in ts)) for ts in (layer.inputs, layer.outputs))
    return ins if ins == outs else f"{ins} -> {outs}"


def _nbytes(layer: Layer) -> int:
    """Each tensor once, and two bytes for each weight."""
    if not layer.tactic:
        return 0
    distinct: dict[str, TensorPlace] = {t.name: t for t in layer.tensors}
    return sum(t.nbytes for t in distinct.values()) + 2 * layer.weights_count


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 4)


# ---- the plan


def _graph(plan: PlanRecord, numbers: Mapping[str, int]) -> GraphFacts:
    """Layers, then inputs, then outputs; an edge from what writes a tensor to each that reads it."""
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
    inputs, outputs = (tuple(printable(t.name) for t in ts) for ts in (plan.inputs, plan.outputs))
    return GraphFacts(inputs, outputs, tuple(edges), drawing)


def _memory(plan: PlanRecord) -> Memory:
    m = plan.memory
    return Memory(
        m.activation_bytes, m.largest_live_bytes, m.workspace, arena.blocks(plan), tuple(step.covers for step in plan.steps)
    )


def _verdict(record: EngineRecord) -> Verdict:
    plan, timing = record.plan, record.timing
    solution, summary = plan.solution, plan.sparsity.summary
    proof = f"{proven(plan, timing)}, for serial execution and these times"
    if solution.status != "proven":
        most = "" if solution.gap is None else f": a plan that takes up to {100 * solution.gap:.2f} % less may exist"
        proof = f"not proven minimal{most}"
    warning = ""
    if plan.sparsity.pruned:
        warning = (
            f"--sparsity=force pruned {len(plan.sparsity.pruned)} initializers: the outputs are not those of the model as it "
            "was given"
        )
    return Verdict(
        printable(record.model.name),
        printable(f"{record.device.title} ({record.device.sm})"),
        plan.sparsity.mode,
        printable(timing.label),
        timing.is_predicted,
        solution.total_us,
        solution.rivals.all_dense_us,
        summary.ceiling_us if summary else None,
        range_text(record),
        len(plan.sparsity.eligible),
        len(plan.sparsity.picked),
        sureness_text(plan.sparsity),
        proof,
        printable(" ".join(s.strip() for s in network_lines(record))),
        warning,
    )


def environment(record: EngineRecord) -> list[Named]:
    """What the engine was built from, by what, and for which device."""
    device, timing, plan = record.device, record.timing, record.plan
    library = sum(layer.type == "library" for layer in plan.layers)
    found = [
        ("model", f"{record.model.name}, sha256 {record.model.sha256}"),
        ("built by", f"gpu_runtime {record.producer.version}, NVRTC {record.producer.nvrtc}"),
        ("kernel sources", record.source_hash),
        ("device", str(device)),
        ("facts from", device.sources),
        ("assumed", device.assumed),
        ("times", timing.label),
        ("driver", timing.driver or ""),
        ("policy", timing.policy or ""),
        ("planner", ", ".join(filter(None, (plan.solution.method, plan.solution.status)))),
        ("weights", size_text(record.weight_bytes)),
        ("activations", size_text(plan.memory.activation_bytes)),
        ("launches", f"{len(plan.steps)}" + (f", of them {library} of a library" if library else "")),
        ("machine code", f"of {record.num_cubins} kernels embedded" if record.num_cubins else "compiled on loading"),
    ]
    if plan.solution.measured_us is not None:
        found.append(("end to end", us_text(plan.solution.measured_us, timing)))
    return [(key, printable(value)) for key, value in found if value]


def command(record: EngineRecord) -> str:
    """What builds this engine again, as a shell takes it."""
    flags, model = record.flags, printable(record.model.name)
    words = ["build-engine", f"{model}.onnx", "-o", f"{model}.engine", f"--sparsity={flags.sparsity}"]
    if not record.device.measured:
        words.append(f"--device={printable(record.device.name)}")
    if flags.shapes:
        sizes = (f"{printable(name)}:{'x'.join(map(str, dims))}" for name, dims in flags.shapes.items())
        words.append(f"--shapes={','.join(sizes)}")
    if flags.workspace is not None:
        words.append(f"--memPoolSize=workspace:{flags.workspace}B")
    if flags.risk is not None and record.timing.is_predicted:
        words.append(f"--risk={flags.risk:g}")
    for option, bounds in (("--inputIOFormats", record.plan.inputs), ("--outputIOFormats", record.plan.outputs)):
        if any(t.format.layout != "chw" for t in bounds):
            words.append(f"{option}={','.join(str(t.format) for t in bounds)}")
    return shlex.join(words)
