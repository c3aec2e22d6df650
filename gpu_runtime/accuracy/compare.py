"""Compare an engine with its model: each output, and each layer's tensor that is in the ONNX graph too.

onnxruntime computes the model in FP32. The error of FP16 storage alone (rounding.py) sets the scale: the tolerance is FACTOR
times that error plus SLACK of the range; or --rtol and --atol for each element. Where FP16 storage alone ruins an output its
error is no scale, so an output also fails if an element errs by more than MOST of the output's range, or if an integer differs.
A build with --sparsity=force prunes first: its engine is compared with the pruned model. The difference of the pruned model
from the original is caused by pruning, and is reported separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gpu_runtime.accuracy import rounding, sessions, wording
from gpu_runtime.accuracy.comparison import Comparison, Row, Scores
from gpu_runtime.accuracy.errors import Difference
from gpu_runtime.accuracy.metrics import Judge, Metric, judge
from gpu_runtime.benchmark.inputs import random_inputs
from gpu_runtime.engine import Engine
from gpu_runtime.errors import bounded
from gpu_runtime.frontend.files import quantized
from gpu_runtime.frontend.files.check import check_graph, check_values
from gpu_runtime.frontend.files.load import load_whole, named
from gpu_runtime.frontend.files.source import ModelLike, Source, sha256_of, source_of
from gpu_runtime.frontend.files.weights import prune_weights
from gpu_runtime.network import FP16_NORMAL
from gpu_runtime.progress import Listener, Progress, ignore, logged, report
from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.plan_record import inner_name

FACTOR, SLACK, MOST = 8.0, 1e-4, 1e-2  # see above; random and real networks stay within 4 and 1e-4
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The tolerance of an output's elements: |engine - model| <= atol + rtol * |model|, where None counts as 0.

    If both are None, the norm of the output's error is compared with the error of FP16 storage alone instead.
    """

    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}: expected a number from 0 on, got {value!r}")

    @property
    def is_given(self) -> bool:
        return self.rtol is not None or self.atol is not None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A comparison to run. `samples`: the inputs of each batch by name; `drawn`: they are random values, not the caller's;
    `judged`: None without labels.
    """

    models: _Models
    engine: Engine
    samples: Sequence[Arrays]
    drawn: bool
    tolerance: Tolerance
    judged: Judge | None


@dataclass(slots=True)
class _Sums:
    """Sums for one tensor over all samples; elements that are not finite in the model are left out.

    `signal`, `noise`, `alone`: the sums of the squares of the model's values, of the engine's difference and of FP16 storage's
    difference; `count`: the number of elements; `low` to `high`: the model's range; `largest`, `rough`: the largest difference
    of the engine and of FP16 storage; `changed`: integers that differ (8-bit ones by more than 1); `beyond`: elements outside
    of --rtol and --atol; `least`: a difference up to it ruins no output.
    """

    signal: float = 0.0
    noise: float = 0.0
    alone: float = 0.0
    count: int = 0
    low: float = math.inf
    high: float = -math.inf
    largest: float = 0.0
    rough: float = 0.0
    changed: int = 0
    beyond: int = 0
    least: float = FP16_NORMAL

    def add(self, got: np.ndarray, y: np.ndarray, half: np.ndarray, tolerance: Tolerance) -> None:
        """Adds one batch: the engine's values `got`, the model's `y`, and `half`, the model's with rounding to FP16."""
        if y.dtype in (np.uint8, np.int8):
            self.least = 1.0  # an 8-bit value is no class number: values that differ by 1 are alike
            self.changed += int((np.abs(got.reshape(-1) - y.reshape(-1).astype(np.int16)) > 1).sum())
        elif y.dtype.kind != "f":
            self.changed += int((got.reshape(-1) != y.reshape(-1)).sum())
        got, y, half = (a.astype(np.float64).reshape(-1) for a in (got, y, half))
        finite = np.isfinite(y)  # elements that are infinite in FP32 too cannot be compared
        got, y, half = got[finite], y[finite], half[finite]
        if not y.size:
            return
        difference = np.where(np.isfinite(got), np.abs(got - y), np.inf)
        self.signal += float(np.square(y).sum())
        self.noise += float(np.square(difference).sum())
        alone = np.where(np.isfinite(half), half - y, 0.0)
        self.alone += float(np.square(alone).sum())
        self.rough = max(self.rough, float(np.abs(alone).max()))
        self.count += y.size
        self.low, self.high = min(self.low, float(y.min())), max(self.high, float(y.max()))
        self.largest = max(self.largest, float(difference.max()))
        self.beyond += int((difference > (tolerance.atol or 0.0) + (tolerance.rtol or 0.0) * np.abs(y)).sum())


@bounded
def compare(
    model: ModelLike,
    engine: Engine,
    inputs: Arrays | None = None,
    *,
    labels: object = None,
    metric: Metric | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    emulate: bool = False,
    progress: Listener = ignore,
) -> Comparison:
    """Run an engine and its model on the same inputs and compare each output and each layer's tensor.

    `inputs`: arrays by name, with one or several batches along their first axes; None: random values from `seed`. `labels`,
    `metric`: as for `prune`. `rtol`, `atol`: an element of an output may differ by atol + rtol * |model|; if both are None,
    an output's difference may be 8 times the error of FP16 storage alone, by norms. `emulate`: the engine runs in the
    emulator. Raises TypeError if `engine` is no Engine, ModelError for a model that cannot be used, ValueError for other wrong
    arguments.
    """
    sessions.require()
    judged, tolerance, progress = judge(labels, metric), Tolerance(rtol, atol), logged(progress)
    if not isinstance(engine, Engine):
        raise TypeError(f"engine: expected an Engine, as gpu_runtime.load gives it, got {type(engine).__name__}")
    if judged and inputs is None:
        raise ValueError("labels: they need inputs, the samples that they belong to")
    models = _Models.of(source_of(model), engine)
    samples = list(_samples(engine, inputs, seed))
    if judged:
        judged.check({o.name: ((o.shape[0] * len(samples), *o.shape[1:]), o.dtype) for o in engine.outputs if o.shape})
    with engine.context(device="emulator" if emulate else None, graph=False) as context:
        found = _run(_Asked(models, engine, samples, inputs is None, tolerance, judged), context, progress)
    found = replace(found, text=wording.text(found))
    report(found.__str__)
    return found


def _run(asked: _Asked, context: Context, progress: Listener) -> Comparison:
    """Runs the engine (`context`) and its models on all samples and returns the comparison. Raises ValueError if an output has
    another shape in the model.
    """
    models, engine, samples, judged = asked.models, asked.engine, asked.samples, asked.judged
    written, shared, scales = _tensors(models, engine)
    oracle = _Oracle(models, sorted(set(shared.values())), judged)
    answers: list[Arrays] = []
    outputs = {o.name: _Sums() for o in engine.plan.outputs}
    layers = {layer: _Sums() for layer in shared}
    with np.errstate(all="ignore"):
        for i, feeds in enumerate(samples):
            progress(Progress("onnxruntime", f"sample {i + 1}"))
            y, rough = oracle.answers(feeds)
            progress(Progress("run", f"sample {i + 1} {'in the CPU emulator' if context.emulated else 'on the GPU'}"))
            traced = context.trace(feeds)
            answers.append(context.outputs() if judged else {})
            for name, got in context.outputs().items():
                if got.shape != y[name].shape:
                    raise ValueError(
                        f"output {name!r} is {got.shape} in the engine and {y[name].shape} in the model: give the "
                        "model that the engine was built from"
                    )
                outputs[name].add(got, y[name], rough[name], asked.tolerance)
            for layer, tensor in shared.items():
                if layer in traced and y[tensor].size == traced[layer].size:
                    value = traced[layer].astype(np.float64) * scales[layer]
                    layers[layer].add(value, y[tensor], rough[tensor], asked.tolerance)
    rows = tuple(_row(layer, shared[layer], sums, asked.tolerance) for layer, sums in layers.items() if sums.count)
    unnamed = tuple(layer for layer in written if layer not in layers or not layers[layer].count)
    noise = [math.sqrt(s.noise / s.signal) for s in oracle.pruning.outputs.values() if s.signal]
    pruning = oracle.pruning.accuracy() if models.is_pruned else None
    return Comparison(
        len(samples) * max((len(a) for a in samples[0].values() if a.ndim), default=1),
        tuple(_row("", name, sums, asked.tolerance) for name, sums in outputs.items()),
        rows,
        unnamed,
        context.emulated,
        models.same_file,
        replace(pruning, agreement=None) if pruning and asked.drawn else pruning,  # random values have no classes
        max(noise, default=None),
        oracle.scores(judged, answers) if judged else None,
    )


def _tensors(models: _Models, engine: Engine) -> tuple[dict[str, str], dict[str, str], dict[str, float]]:
    """Returns, for the engine's layers with outputs but reformats, (layer -> the tensor that it writes; layer -> this tensor's
    ONNX name, if the model has it too; layer -> the factor from stored values to the model's).
    """
    outer = {inner_name(o.name): o.name for o in engine.plan.outputs}
    written = {x.op_name: x.op_output for x in engine.plan.layers if x.outputs and x.type != "reformat"}
    shared = {layer: outer.get(t, t) for layer, t in written.items() if outer.get(t, t) in models.tensors}
    exponents = engine.plan.range.exponents if engine.plan.range else {}
    return written, shared, {layer: 2.0 ** -exponents.get(t, 0) for layer, t in written.items()}


class _Oracle:
    """onnxruntime's three sessions: the model with the engine's weights, exact and rounded to FP16, and the original model."""

    def __init__(self, models: _Models, names: Sequence[str], judged: Judge | None):
        self._models, self._names, self._judged = models, names, judged
        self._outputs = [v.name for v in models.original.graph.output]
        self._answers: list[Arrays] = []  # outputs of the exact model, then (_before) of the original, for the judge
        self._before: list[Arrays] = []
        self._exact = sessions.session(rounding.shown(models.pruned, names), optimize=False)
        self._types = {name: dtype for name, _, dtype in sessions.inputs_of(self._exact)}
        self._original = sessions.session(models.original) if models.is_pruned else None
        self._half: Any = None  # the session of the rounded model, made with the first sample's magnitudes
        self.pruning = Difference()

    def answers(self, feeds: Arrays) -> tuple[Arrays, Arrays]:
        """Returns (tensors of the exact model, tensors of the rounded model), each by name, for one batch of inputs by name.

        Adds the batch to `pruning`, the difference of the outputs from the original model's.
        """
        fed = {name: a.astype(self._types[name]) for name, a in feeds.items()}
        y = sessions.run(self._exact, fed)
        if self._half is None:
            high = {name: float(np.abs(a[np.isfinite(a)]).max(initial=0)) for name, a in y.items() if a.dtype.kind == "f"}
            rounded = rounding.rounded(self._models.pruned, high)
            self._half = sessions.session(rounding.shown(rounded, self._names), optimize=False)
        answers = {name: y[name] for name in self._outputs}
        if self._judged:
            self._answers.append(answers)
        if self._original is not None:
            before = sessions.run(self._original, fed)
            self.pruning.add(answers, before)
            if self._judged:
                self._before.append(before)
        return y, sessions.run(self._half, fed)

    def scores(self, judged: Judge, engine: Sequence[Arrays]) -> Scores:
        """Returns the scores of the engine's outputs, batch by batch, and of both models' outputs for the same samples."""
        before = judged.score(self._before) if self._before else None
        return Scores(judged, judged.score(engine), judged.score(self._answers), before)


def _row(layer: str, tensor: str, s: _Sums, tolerance: Tolerance) -> Row:
    """Returns the row of a tensor with these sums. `layer`: the engine's layer that writes it, "" for an output."""
    scale = math.sqrt(s.signal) or 1e-30
    error, alone = math.sqrt(s.noise) / scale, math.sqrt(s.alone) / scale
    if tolerance.is_given:
        return Row(layer, tensor, error, alone, None, s.largest, s.beyond, not s.beyond)
    reach = max(s.high - s.low, 0.0)
    allowed = FACTOR * alone + SLACK * reach * math.sqrt(s.count) / scale
    share = s.largest / reach if reach else 0.0
    ruined = not layer and (s.changed > 0 or (share > MOST and s.largest > s.least))  # FP16 has fewer bits below `least`
    passed = (error <= allowed or not s.noise) and not ruined
    by_fp16 = ruined and (s.rough > MOST * reach if not s.changed else s.rough > 0)
    return Row(layer, tensor, error, alone, allowed, s.largest, s.beyond, passed, s.changed, share, by_fp16)


@dataclass(frozen=True, slots=True)
class _Models:
    """The FP32 model with the engine's weights (`pruned`), and the original model; they differ if the build pruned
    (`is_pruned`).

    `same_file`: the model is the file that the engine was built from; `tensors`: the names of all outputs of the model's nodes.
    """

    pruned: onnx.ModelProto
    original: onnx.ModelProto
    is_pruned: bool
    same_file: bool
    tensors: frozenset[str]

    @classmethod
    def of(cls, path: Path | Source, engine: Engine) -> _Models:
        """Reads and checks the model of an engine. Raises ModelError if it cannot be used, ValueError if it has other inputs or
        outputs than the engine.
        """
        with named(path):
            proto = load_whole(path)
            check_graph(proto.graph)
            quantized.spell(proto)
            check_values(proto.graph)
            original = rounding.in_fp32(proto)
            changed = prune_weights(proto.graph)[0] if engine.record.flags.sparsity == "force" else {}
            pruned = rounding.in_fp32(proto) if changed else original
        tensors = frozenset(name for node in proto.graph.node for name in node.output if name)
        ends = [sorted(v.name for v in vs) for vs in (engine.inputs, engine.outputs, proto.graph.input, proto.graph.output)]
        if ends[:2] != ends[2:]:
            ours, theirs, got, back = (", ".join(names) for names in ends)
            raise ValueError(
                f"{path}: expected the engine's inputs {ours} and outputs {theirs}, got {got} and {back}: give the model "
                "that it was built from"
            )
        return cls(pruned, original, bool(changed), sha256_of(path) == engine.record.model.sha256, tensors)


def _samples(engine: Engine, given: Arrays | None, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the `given` arrays by name batch by batch, in the engine's types and shapes; one random batch if they are None."""
    wanted = [i.spec for i in engine.plan.inputs]
    if given is None:
        yield random_inputs(wanted, seed, low=0)
    else:
        yield from sessions.batches([(i.name, i.shape, i.dtype) for i in wanted], given)
