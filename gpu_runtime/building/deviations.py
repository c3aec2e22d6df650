"""Runs a plan as it was built on a calibration input and compares it with the same network in FP32, layer by layer.

FP16 storage alone causes an error of some 3e-4 of a tensor, and a network's layers add such errors up. Where a result is
infinite or NaN but finite in FP32, or an output's error is more than FAR times the error of rounding it once, the responsible
layers are found: those whose error is at least JUMP times the error of all their inputs. Their inputs then become FP32
(gpu_runtime.precision.cliffs).

Whole numbers, of a quantised network, are off by one where a sum in FP16 rounds otherwise, which FP32 elsewhere would not help.
Their error of rounding is that of `quantize` itself, half a step at most, and so is that of all that is computed with them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpu_runtime.assembly.assemble import runnable
from gpu_runtime.network import FP16_MAX, FP16_NORMAL, Network, Op
from gpu_runtime.planning.tables import Table
from gpu_runtime.precision import execution
from gpu_runtime.rewrites import integers
from gpu_runtime.runtime.findings import Compared
from tactics.planner import plan
from tactics.problems.pointwise_ops import ROUNDING

FAR = 32.0  # an output's error over that of rounding it once: 0.7 % of a usual tensor; networks of 100 layers reach 17
JUMP = 16.0  # a layer's error over the largest of its inputs'
STEP = 1 / math.sqrt(12)  # the root mean square of the error of rounding to whole numbers


@dataclass(frozen=True, slots=True)
class Error:
    """The errors of one tensor: `relative`, the L2 norm of the difference from FP32 over FP32's norm, infinite if it has an
    infinity or a NaN where FP32 has none; `own`, the same for FP32's values rounded once to FP16.
    """

    relative: float
    own: float

    @property
    def is_far(self) -> bool:
        return self.relative > FAR * self.own


@dataclass(frozen=True, slots=True)
class Deviations:
    """The errors of a plan. `errors`: of each tensor that it writes, in order; `far`: network outputs and non-finite tensors
    with large errors; `causes`: (tensor, sentence) of the responsible layers; `ends`: the network's outputs.
    """

    errors: Mapping[str, Error]
    far: tuple[str, ...] = ()
    causes: tuple[tuple[str, str], ...] = ()
    ends: tuple[str, ...] = ()

    def text(self, tensor: str) -> str:
        e = self.errors[tensor]
        made = (
            "is infinite or NaN where FP32 is not"
            if math.isinf(e.relative)
            else f"differs from FP32 by {e.relative:.2g} (relative)"
        )
        return f"{tensor!r} {made}; rounding alone gives {e.own:.2g}"

    def record(self) -> Compared:
        """The record for JSON: an infinite error, of an infinite or NaN result, is null."""
        rows = [(t, e.relative if math.isfinite(e.relative) else None, e.own) for t, e in self.errors.items()]
        worst = max(rows, key=lambda r: math.inf if r[1] is None else r[1] / r[2], default=None)
        return Compared(None, len(rows), worst, tuple(r for r in rows if r[0] in self.ends), self.far)


def compare(table: Table, chosen: plan.Plan, feeds: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]) -> Deviations:
    """Compares a plan's results with FP32. `feeds`: inputs of the network by name; `got`: the plan's outputs by layer, NCHW."""
    network = table.network
    taken = [op for op in network.ops if chosen.entry_of(op.name, op.when)]
    ops = [*runnable(taken, {t.name for t in network.inputs})]
    errors = _errors(network, ops, feeds, got)
    ends = tuple(t.name for t in network.outputs)
    far = tuple(t for t, e in errors.items() if e.is_far and (t in ends or math.isinf(e.relative)))
    behind = _behind(ops, far)
    causes = []
    for op in ops:
        e = errors.get(op.output)
        if e is None or op.output not in behind or not e.is_far:
            continue
        before = max([_error(errors, t) for t in op.inputs], default=0.0)
        if math.isfinite(before) and e.relative > JUMP * max(before, e.own):
            causes.append((op.output, _sentence(op, e, before)))
    return Deviations(errors, far, tuple(causes), ends)


def _sentence(op: Op, e: Error, before: float) -> str:
    differs = (
        "is infinite or NaN, unlike in FP32" if math.isinf(e.relative) else f"differs from FP32 by {e.relative:.1e} (relative)"
    )
    return f"on the calibration input, the output of {op.name} {differs}, its inputs only by {before:.1e}"


def _error(errors: Mapping[str, Error], tensor: str) -> float:
    """The relative error of a tensor that an op reads; of a network input the error of rounding it."""
    return max(errors[tensor].relative, 2.0**-12) if tensor in errors else 2.0**-12


def _behind(ops: list[Op], tensors: tuple[str, ...]) -> set[str]:
    """Returns these tensors and all that they were computed from."""
    found = set(tensors)
    for op in reversed(ops):
        if op.output in found:
            found.update(op.inputs)
    return found


def _errors(
    network: Network, ops: list[Op], feeds: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]
) -> dict[str, Error]:
    errors: dict[str, Error] = {}
    steps: dict[str, float] = {}  # tensor -> the error that `quantize` left in it
    with np.errstate(all="ignore"):
        for op, y in execution.run(ops, execution.inputs(network, feeds)):
            if y.dtype != np.float32:
                continue
            step = steps[op.output] = max([_step(op, y), *(steps.get(t, 0.0) for t in op.inputs)])
            if op.name in got:
                errors[op.output] = _compared(got[op.name].astype(np.float32), y, step)
            else:  # a place in another tensor: its error is that tensor's
                errors[op.output] = Error(max((_error(errors, t) for t in op.inputs), default=0.0), _compared(y, y, step).own)
    return errors


def _step(op: Op, y: np.ndarray) -> float:
    """Returns the error of rounding to whole numbers, for an op whose results y they are; else 0."""
    return _norm(np.full(y.shape, STEP), y) if integers.ending(op.problem).name in ROUNDING else 0.0


def _compared(got: np.ndarray, y: np.ndarray, step: float) -> Error:
    """Computes an error in doubles, as FP32's largest number may be a mask. Infinite values must be equal; NaN in FP32 is
    ignored. `step`: the error that `quantize` left in y.
    """
    finite, infinite = np.isfinite(y), np.isinf(y)
    wrong = not np.isfinite(got[finite]).all() or not np.array_equal(got[infinite], y[infinite])
    got, y = (a[finite].astype(np.float64) for a in (got, y))
    # Beyond FP16's range only the precision of rounding counts.
    rounded = np.where(np.abs(y) < FP16_MAX, y.astype(np.float16).astype(np.float64), y * (1 + 2.0**-12))
    own = max(_norm(rounded - y, y), 2.0**-13, step)
    return Error(math.inf if wrong else _norm(got - y, y), own)


def _norm(difference: np.ndarray, y: np.ndarray) -> float:
    scale = max(float(np.linalg.norm(y)), FP16_NORMAL * math.sqrt(y.size))  # of tensors near 0
    return float(np.linalg.norm(difference)) / scale if y.size else 0.0
