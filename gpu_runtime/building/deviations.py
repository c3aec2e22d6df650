"""A plan as it was built, run on a calibration input and compared with the same network in FP32, layer by layer.

FP16 storage alone errs by some 3e-4 of a tensor, and a network's layers add such errors up. Where a result is infinite or NaN
that in FP32 is not, or an output errs by more than FAR times what rounding it once would, the layers that made it so are found:
those whose error is at least JUMP times that of all that they read. What they read is to be FP32 then
(gpu_runtime.precision.cliffs).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpu_runtime.network import FP16_MAX, FP16_NORMAL, Network, Op
from gpu_runtime.planning.tables import Table
from gpu_runtime.precision import execution
from gpu_runtime.runtime.findings import Compared
from tactics.planner import plan

FAR = 32.0  # an output's error over that of rounding it once to FP16: 0.7 % of a usual tensor; networks of 100 layers make 17
JUMP = 16.0  # a layer's error over the largest of its inputs'


@dataclass(frozen=True, slots=True)
class Error:
    """Of one tensor: `relative`, the L2 norm of the difference from FP32 over FP32's, infinite if it has an infinity or a NaN
    that FP32 has not; `own`, the same for FP32's values rounded once to FP16."""

    relative: float
    own: float

    @property
    def is_far(self) -> bool:
        return self.relative > FAR * self.own


@dataclass(frozen=True, slots=True)
class Deviations:
    """`errors`: of each tensor that the plan writes, in order; `far`: those that leave the network or are not finite, and are
    far off; `causes`: (tensor, sentence) of the layers that made them so; `ends`: what leaves the network."""

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
        """As JSON takes it: an infinite error, of what is infinite or NaN, is null."""
        rows = [(t, e.relative if math.isfinite(e.relative) else None, e.own) for t, e in self.errors.items()]
        worst = max(rows, key=lambda r: math.inf if r[1] is None else r[1] / r[2], default=None)
        return Compared(None, len(rows), worst, tuple(r for r in rows if r[0] in self.ends), self.far)


def compare(table: Table, chosen: plan.Plan, feeds: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]) -> Deviations:
    """`feeds`: inputs of the network by name; `got`: by layer, what the plan wrote on them, NCHW."""
    network = table.network
    ops = _in_order(network, chosen)
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


def _in_order(network: Network, chosen: plan.Plan) -> list[Op]:
    """The ops of the plan, each behind those whose outputs it reads."""
    todo = [op for op in network.ops if op.name in chosen.entries and plan.holds(op.when, chosen.options)]
    ready, ordered = {t.name for t in network.inputs}, []
    while todo:
        wait = []
        for op in todo:
            if ready.issuperset(op.inputs):
                ordered.append(op)
                ready.add(op.output)
            else:
                wait.append(op)
        if len(wait) == len(todo):
            raise ValueError(f"the plan has a cycle among {', '.join(op.name for op in wait[:4])}")
        todo = wait
    return ordered


def _sentence(op: Op, e: Error, before: float) -> str:
    differs = (
        "is infinite or NaN, unlike in FP32" if math.isinf(e.relative) else f"differs from FP32 by {e.relative:.1e} (relative)"
    )
    return f"on the calibration input, the output of {op.name} {differs}, its inputs only by {before:.1e}"


def _error(errors: Mapping[str, Error], tensor: str) -> float:
    """What a reader gets: a network input's is that of rounding it."""
    return max(errors[tensor].relative, 2.0**-12) if tensor in errors else 2.0**-12


def _behind(ops: list[Op], tensors: tuple[str, ...]) -> set[str]:
    """These tensors and all that they were computed from."""
    found = set(tensors)
    for op in reversed(ops):
        if op.output in found:
            found.update(op.inputs)
    return found


def _errors(
    network: Network, ops: list[Op], feeds: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]
) -> dict[str, Error]:
    errors: dict[str, Error] = {}
    with np.errstate(all="ignore"):
        for op, y in execution.run(ops, execution.inputs(network, feeds)):
            if op.name in got and y.dtype == np.float32:
                errors[op.output] = _compared(got[op.name].astype(np.float32), y)
            elif y.dtype == np.float32:  # a place in another tensor: as good as what lies there
                errors[op.output] = Error(max((_error(errors, t) for t in op.inputs), default=0.0), _compared(y, y).own)
    return errors


def _compared(got: np.ndarray, y: np.ndarray) -> Error:
    """In doubles: FP32's largest number is a mask's. Where FP32 is infinite, so has to be what was got; NaN says nothing."""
    finite, infinite = np.isfinite(y), np.isinf(y)
    wrong = not np.isfinite(got[finite]).all() or not np.array_equal(got[infinite], y[infinite])
    got, y = (a[finite].astype(np.float64) for a in (got, y))
    # Of what FP16 cannot hold, the precision and not the range.
    rounded = np.where(np.abs(y) < FP16_MAX, y.astype(np.float16).astype(np.float64), y * (1 + 2.0**-12))
    own = max(_norm(rounded - y, y), 2.0**-13)
    return Error(math.inf if wrong else _norm(got - y, y), own)


def _norm(difference: np.ndarray, y: np.ndarray) -> float:
    scale = max(float(np.linalg.norm(y)), FP16_NORMAL * math.sqrt(y.size))  # of tensors near 0
    return float(np.linalg.norm(difference)) / scale if y.size else 0.0
