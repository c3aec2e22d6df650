"""Measures the effect of pruning on a network's outputs, for each weight alone and for all together, and chooses weights to
leave dense.

onnxruntime runs the model with its prunable weights as inputs, so one session serves every trial. A weight's harm is the output
noise of pruning it alone. If the outputs must improve, the most harmful weights stay dense. Their number is minimal, assuming
that one more dense weight never makes the outputs worse. Branches that share a pattern count as one weight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gpu_runtime.accuracy import sessions
from gpu_runtime.accuracy.errors import Accuracy, Difference
from gpu_runtime.accuracy.metrics import Arrays, Judge
from gpu_runtime.frontend.files.load import copied, stored_tensors
from gpu_runtime.frontend.files.weights import Weight, put
from gpu_runtime.progress import Listener, Progress
from tactics.planner.grouping import grouped


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The accuracies of a calibration.

    `samples`: their number; `alone`: weight -> quality with only it pruned; `all`: with all requested weights pruned; `kept`:
    with the `restored` weights dense again; `dense`: with no weight pruned, but channels possibly reordered; `judge`, `score`:
    the metric, and the original model's.
    """

    samples: int
    alone: Mapping[str, Accuracy]
    all: Accuracy
    kept: Accuracy
    dense: Accuracy
    restored: tuple[str, ...] = ()
    reached: bool = True
    judge: Judge | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """The answers of the original model to the `feeds`, batch by batch, and the limits for a pruned model (None: no limit).

    `score`: the model's score by `judge`, None without labels. `min_snr`: the least signal-to-noise ratio in dB; `max_drop`:
    the largest drop of the score, or without labels the largest share of samples whose top-1 class changes.
    """

    feeds: Sequence[Arrays]
    expected: Sequence[Arrays]
    samples: int
    judge: Judge | None
    score: float | None
    min_snr: float | None
    max_drop: float | None

    def allows(self, found: Accuracy) -> bool:
        if self.score is not None and found.score is not None:
            drop = self.score - found.score
        else:
            drop = 0.0 if found.agreement is None else 1 - found.agreement
        enough = self.min_snr is None or found.snr_db >= self.min_snr
        return enough and (self.max_drop is None or drop <= self.max_drop)

    @classmethod
    def of(
        cls,
        model: onnx.ModelProto,
        given: Arrays,
        judge: Judge | None,
        min_snr: float | None,
        max_drop: float | None,
    ) -> Reference:
        """Runs the original model on the given inputs and returns its answers. Raises ValueError for inputs and labels that do
        not fit.
        """
        session = sessions.session(model)
        feeds = list(sessions.batches(sessions.inputs_of(session), given))
        expected = [sessions.run(session, f) for f in feeds]
        samples = max((len(next(iter(f.values()), ())) for f in feeds), default=0) * len(feeds)
        score = judge.score(expected) if judge else None
        return cls(feeds, expected, samples, judge, score, min_snr, max_drop)


def calibrate(
    reference: Reference,
    changed: onnx.ModelProto,
    pruned: Sequence[Weight],
    dense: Mapping[str, np.ndarray],
    units: Mapping[str, str],
    progress: Listener,
) -> Calibrated:
    """Compares the pruned model with the original, restores weights until the reference's limits hold, and returns the
    accuracies.

    `changed`: the pruned model; weights that must stay dense get their `dense` values back in it. `units`: weight -> name of
    a group; weights of one group are pruned or dense together, because a dense one breaks their sum's pattern.
    """
    trial = _Trial.of(reference, changed, pruned, dense)
    everything = frozenset(w.name for w in pruned)
    # Weights of a unit together, others alone.
    parts = grouped(((units.get(w.name, ""), "" if w.name in units else w.name), w.name) for w in pruned)
    found = {}
    for i, names in enumerate(parts.values()):
        progress(Progress("trial", names[0], i, len(parts)))
        found[tuple(names)] = trial.accuracy(names)
    alone = {name: accuracy for names, accuracy in found.items() for name in names}
    worst = sorted(found, key=lambda names: found[names].snr_db)

    def but(number: int) -> frozenset[str]:
        """Returns all weights without those of the `number` most harmful parts (a part: a weight, or a unit's weights)."""
        return everything - {name for names in worst[:number] for name in names}

    tried = {0: trial.accuracy(everything)}

    def is_enough(number: int) -> bool:
        progress(Progress("trial", f"all but {number}"))
        tried[number] = tried.get(number) or trial.accuracy(but(number))
        return reference.allows(tried[number])

    number = 0 if reference.allows(tried[0]) else bisect_left(range(len(worst)), True, key=is_enough)
    nothing = trial.accuracy(())
    kept = tried.get(number) or (nothing if number == len(worst) else trial.accuracy(but(number)))
    restored = tuple(w.name for w in pruned if w.name not in but(number))
    for w in pruned:
        if w.name in restored and w.tensor is not None:
            put(w.name, w.tensor, w.views, dense[w.name])
    score, samples = reference.score, reference.samples
    return Calibrated(samples, alone, tried[0], kept, nothing, restored, reference.allows(kept), reference.judge, score)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A session whose prunable weights are inputs; `weights`: name -> (dense, pruned) values."""

    session: object
    weights: Mapping[str, tuple[np.ndarray, np.ndarray]]
    reference: Reference

    @classmethod
    def of(
        cls, reference: Reference, changed: onnx.ModelProto, pruned: Sequence[Weight], dense: Mapping[str, np.ndarray]
    ) -> _Trial:
        stored = {name: t for name, t in stored_tensors(changed.graph) if name in {w.name for w in pruned}}
        after = {name: numpy_helper.to_array(t) for name, t in stored.items()}
        before = {}
        for w in pruned:
            t = onnx.TensorProto()
            t.CopyFrom(stored[w.name])
            put(w.name, t, w.views, dense[w.name])
            before[w.name] = numpy_helper.to_array(t)
        both = {name: (before[name], after[name]) for name in after}
        return cls(sessions.session(_with_inputs(changed, stored)), both, reference)

    def accuracy(self, pruned: Collection[str]) -> Accuracy:
        """Returns the accuracy with these weights pruned and the others dense."""
        found, judge = Difference(), self.reference.judge
        chosen = {name: after if name in pruned else before for name, (before, after) in self.weights.items()}
        got = [sessions.run(self.session, {**feeds, **chosen}) for feeds in self.reference.feeds]
        for outputs, expected in zip(got, self.reference.expected, strict=True):
            found.add(outputs, expected)
        return replace(found.accuracy(), score=judge.score(got) if judge else None)


def _with_inputs(proto: onnx.ModelProto, names: Mapping[str, onnx.TensorProto]) -> onnx.ModelProto:
    """Returns the model with these constants as inputs instead."""
    made = copied(proto)
    graph = made.graph
    for i in reversed(range(len(graph.initializer))):
        if graph.initializer[i].name in names:
            del graph.initializer[i]
    for i in reversed(range(len(graph.node))):
        if graph.node[i].op_type == "Constant" and graph.node[i].output[0] in names:
            del graph.node[i]
    graph.input.extend(helper.make_tensor_value_info(name, t.data_type, t.dims) for name, t in names.items())
    return made
