"""Finds tensors that FP16 must not round, whatever their magnitude: integers, operands of decisions, and the tails of FP32
outputs.

Four rules, by operators alone, with and without a calibration input:

- An integer stays exact: a tensor that a Cast makes of integers is FP32, and so are all tensors computed with it, up to
  tensor cores.
- Operands of decisions are FP32: of Floor, comparisons, casts to integers, ArgMax, TopK, and a GridSample's grid, back to
  tensor cores, unless they are known to be whole numbers that FP16 holds.
- Differences are of FP32 values: of an FP32 input and another tensor or its mean, of a constant of hundreds to thousands,
  and of statistics, as in a variance that is the mean of squares less the squared mean. The squares themselves stay FP16.
- An FP32 output that is decoded has an FP32 tail: the ops between the last tensor cores and the output, if these only move,
  select or compute element by element, or are a softmax or a reduction, and make large numbers of small ones.

The sums of a convolution are stored in FP32 where only such operators read them. Example, a detector's boxes:
    conv -> c -> Exp -> Mul -> Add (grid) -> y, and c -> Conv: y is FP32 from `Exp` on, c stays FP16, since a Conv reads it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np

from gpu_runtime.errors import ModelError
from gpu_runtime.network import HALF, WIDE, Network, Op, unique
from gpu_runtime.precision import cliffs, intervals
from gpu_runtime.precision.cliffs import ANY_TYPE, MOVES
from tactics import fp32
from tactics.problems.attention import AttentionProblem
from tactics.problems.gather import ViewProblem
from tactics.problems.library_problem import EXACT, FLOAT, LibraryProblem
from tactics.problems.pointwise_ops import ROUNDING
from tactics.problems.problem import ConcatProblem, ConvProblem, PointwiseProblem
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

SUMS = (*cliffs.SUMS, AttentionProblem)
TAIL = (*MOVES, PointwiseProblem, ConcatProblem, ReduceProblem, LibraryProblem)
FLOATS = ("fp16", "fp32")
SOFTMAX = ("softmax", "log_softmax")
WHOLE = ("floor", "ceil", "round")
FP16_WHOLE, FP32_WHOLE = 2.0**11, 2.0**24  # FP16 and FP32 hold every whole number up to these
SUMS_OF_TWO = ("add", "sub", "rsub")
LARGE = (256.0, 8192.0)  # a constant that FP16's steps near it harm; beyond are the -1e4 and less of masks
AMPLIFIED = 8.0  # a constant of a tail from which on numbers are pixels
COMPARISONS = ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
# Function -> the arguments by which it decides; other functions have none.
DECIDING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*COMPARISONS, "Mod"), (0, 1)),
    **dict.fromkeys(("ArgMax", "ArgMin", "TopK", "Hardmax"), (0,)),
    "GridSample": (1,),
}


@dataclass(slots=True)
class _Found:
    """The tensors found so far. `wide`: FP32 tensor -> why; `reads`: outputs of the ops that read their inputs as FP32; `sums`:
    outputs of tensor cores that become FP32 if only ops of `reads` read them.
    """

    network: Network
    wide: dict[str, str] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    sums: dict[str, str] = field(default_factory=dict)

    def back(self, tensors: Iterable[str], why: str) -> None:
        """Makes these tensors, and all that they are computed from, back to tensor cores, FP32."""
        todo = list(tensors)
        while todo:
            t = todo.pop()
            makers = self.network.producers.get(t, ())
            if t in self.wide or t in self.sums or not _can_be_fp32(self.network, t):
                continue
            others = [op for op in makers if not _on_tensor_cores(self.network, op)]
            if makers and not others:
                self.sums[t] = why
                continue
            self.wide[t] = why
            for op in others:  # a convolution that took in an addition reads the other addend as FP32
                self.reads.add(op.output)
                todo += op.inputs

    def settled(self) -> tuple[Network, dict[str, str]]:
        """Returns the network, and the reason for each new FP32 tensor; the unchanged network object if there are none."""
        if not (self.wide or self.reads or self.sums):
            return self.network, {}
        readers, types = self.network.readers, dict(self.network.types)
        sums = {t: why for t, why in self.sums.items() if all(op.output in self.reads for op in readers[t])}
        new = {t: why for t, why in (self.wide | sums).items() if t not in types}
        types |= dict.fromkeys(new, WIDE)
        for op in self.network.ops:  # a view has the memory, so the type, of its input
            if isinstance(op.problem, ViewProblem) and op.output in new and types.get(op.inputs[0], HALF).dtype != "fp32":
                del types[op.output], new[op.output]
        return replace(self.network, types=types).with_exact(self.reads), new


def keep(network: Network, asked: Mapping[str, str] | None = None) -> tuple[Network, dict[str, str], tuple[str, ...]]:
    """Applies the rules: returns (the network, the reason for each FP32 tensor, sentences about integers that FP32 may not
    hold).

    `asked`: a user's own precisions, see `build`. Raises ValueError where no operator has such a name, ModelError where no
    kernel computes one in FP32.
    """
    found, known = _Found(network), intervals.known(network)
    for pattern, precision in (asked or {}).items():
        _as_asked(found, pattern, precision)
    beyond = _integers(found, known)
    _decisions(found, known)
    _differences(found, known)
    _tails(found)
    return (*found.settled(), beyond)


def _as_asked(found: _Found, pattern: str, precision: str) -> None:
    """Applies a user's precision to the operators whose name, node or output matches a pattern."""
    network, why, ops = found.network, f"{pattern}:{precision} was asked for", []
    for op in network.ops:  # a name may hold brackets, which stand for themselves
        names = (op.name, op.layer, op.output, *op.nodes, *(network.onnx_names.get(node, node) for node in op.nodes))
        if any(name == pattern or fnmatchcase(name, pattern) for name in names):
            ops.append(op)
    if not ops:
        near = ", ".join(get_close_matches(pattern, unique(name for op in network.ops for name in op.nodes), 3, 0))
        raise ValueError(f"precisions: no operator or output is named {pattern!r}; the nearest names are {near}")
    for op in ops if precision != "fp16" else ():
        if network.type(op.output).dtype not in FLOATS:
            continue
        if (reason := fp32.reason(op.problem)) and not isinstance(op.problem, ANY_TYPE):
            raise ModelError(f"{network.name}: {op.name} cannot be FP32, as {pattern!r} asks: {reason}")
        found.wide[op.output] = why
        if precision == "fp32" or isinstance(op.problem, ViewProblem):  # a view has the type of its input
            found.reads.add(op.output)
            found.wide |= {t: why for t in op.inputs if _can_be_fp32(network, t)}


def _integers(found: _Found, known: intervals.Known) -> tuple[str, ...]:
    """Applies the first rule; returns sentences about the casts of integers that may exceed FP32_WHOLE."""
    network, whole, beyond = found.network, dict[str, str](), []
    held = {op.output for op in network.ops if _deciding(op)[0] == "Cast"}  # integers that FP32 values were
    for op in network.ops:
        if _casts_integers(op):
            whole[op.output] = why = f"the integers of {op.name} stay exact"
            found.wide[op.output] = why
            v = known.get(op.inputs[0], intervals.ANY)
            if op.inputs[0] not in held and max(-v.low, v.high) > FP32_WHOLE:
                beyond.append(f"{op.output!r} comes from integers ({op.name}): FP32 rounds those above 2^24 = {FP32_WHOLE:.0f}")
            continue
        given = [t for t in op.inputs if t in whole]
        if given and not _on_tensor_cores(network, op) and _can_be_fp32(network, op.output):
            found.wide[op.output] = whole[op.output] = why = whole[given[0]]
            found.reads.add(op.output)
            found.back(op.inputs, why)
    return tuple(beyond)


def _decisions(found: _Found, known: intervals.Known) -> None:
    """Applies the second rule."""
    held = {op.output for op in found.network.ops if _is_whole(op, known)}
    for op in found.network.ops:
        name, deciding = _deciding(op)
        if tensors := [t for t in deciding if t not in held]:
            found.reads.add(op.output)
            found.back(tensors, f"{name} of {op.name} decides by FP32 values")


def _differences(found: _Found, known: intervals.Known) -> None:
    """Applies the third rule."""
    given, statistics = {t.name for t in found.network.inputs}, _statistics(found.network)
    coarse = _coarse(found.network)
    for op in found.network.ops:
        if not known.keys() >= set(op.inputs):
            continue  # of another option, which gives the same
        p, tensors, name = op.problem, [t for t in op.inputs if t in given], "its input"
        if not coarse.isdisjoint((*op.inputs, op.output)):
            continue  # rounding to 8 bits hides FP16's
        if isinstance(p, PointwiseProblem):
            if any(_may_cancel(at) for at in intervals.along(op, known) if at.stage.op in SUMS_OF_TWO):
                tensors, name = list(op.inputs), "values near a large constant"
            elif not any(s.op in SUMS_OF_TWO[1:] and s.operand.startswith("t") for s in p.stages):
                continue
            elif statistics.issuperset(op.inputs):
                _keep_statistics(found, op, statistics)
                continue
        elif not isinstance(p, NormalizeProblem) or p.kind in SOFTMAX:
            continue
        if tensors:
            found.reads.add(op.output)
            found.back(tensors, f"{op.name} takes differences of {name}")


def _coarse(network: Network) -> set[str]:
    """Returns the tensors that hold few values: rounded to 8 bits, such numbers times a scale, or moves of either."""
    found: set[str] = set()
    for op in network.ops:
        p, end = op.problem, getattr(op.problem, "epilogue", None)
        names = [s.op for s in p.stages] if isinstance(p, PointwiseProblem) else [end.act.name, end.last.name] if end else []
        scaled = isinstance(p, PointwiseProblem) and [*{*names}] == ["mul"] and found.issuperset(op.inputs)
        if not {*ROUNDING}.isdisjoint(names) or scaled or (isinstance(p, MOVES) and found.issuperset(op.inputs)):
            found.add(op.output)
    return found


def _statistics(network: Network) -> set[str]:
    """Returns outputs of reductions, and tensors that are computed element by element from such outputs only."""
    found: set[str] = set()
    for op in network.ops:
        computed = isinstance(op.problem, (PointwiseProblem, ViewProblem)) and found.issuperset(op.inputs)
        if computed or (isinstance(op.problem, ReduceProblem) and _can_be_fp32(network, op.output)):
            found.add(op.output)
    return found


def _keep_statistics(found: _Found, difference: Op, statistics: set[str]) -> None:
    """Makes a difference of statistics, and the statistics themselves back to the reductions, FP32."""
    todo, why = [difference], f"{difference.name} takes differences of statistics"
    while todo:
        op = todo.pop()
        if statistics.issuperset(op.inputs):
            found.reads.add(op.output)
            found.wide |= dict.fromkeys(op.inputs, why)
            todo += [maker for t in op.inputs for maker in found.network.producers[t]]


def _may_cancel(at: intervals.Reached) -> bool:
    """Whether the sum of a stage's input and a constant that is large, but no mask, may be small."""
    v, params = at.input, at.stage.params
    b = at.operand or (intervals.Interval(*2 * params) if params else intervals.ANY)
    low, high = (-b.high, -b.low) if at.stage.op == "add" else (b.low, b.high)
    return LARGE[0] <= max(-low, high) <= LARGE[1] and v.low <= high and low <= v.high


def _tails(found: _Found) -> None:
    """Applies the fourth rule."""
    network, tail = found.network, dict[str, str]()
    ends = {t.name for t in network.outputs if t.dtype == "fp32"}
    others = network.output_names - ends
    for op in reversed(network.ops):  # each behind its readers
        readers, out = network.readers[op.output], op.output
        leads = out in ends or (readers and out not in others)
        if leads and _is_tail(network, op) and all(r.output in tail for r in readers):
            tail[out] = out if out in ends else tail[readers[0].output]
    ops = [op for op in network.ops if op.output in tail and _is_tail(network, op)]
    decoded = {op.output for op in ops if _amplifies(op)}
    for op in reversed(ops):  # the ops whose results are amplified later
        if any(r.output in decoded for r in network.readers[op.output]):
            decoded.add(op.output)
    for op in ops:  # all that is computed from that
        if decoded.intersection(op.inputs):
            decoded.add(op.output)
    decoded |= _only_moved(network, ops)
    for op in ops:
        if op.output not in decoded or network.type(op.output).fixed:
            continue
        why = f"output {tail[op.output]!r} is FP32 back to the last tensor cores"
        found.reads.add(op.output)
        for t in (*op.inputs, op.output):
            makers = network.producers.get(t, ())
            if not _can_be_fp32(network, t):
                continue
            if t in decoded or not makers:
                found.wide.setdefault(t, why)
            elif all(_on_tensor_cores(network, m) for m in makers):
                found.sums.setdefault(t, why)


def _only_moved(network: Network, ops: Iterable[Op]) -> set[str]:
    """Returns the FP32 outputs of these ops that are reached from FP32 inputs by moves alone, and the tensors between."""
    moved = {t.name for t in network.inputs if t.dtype == "fp32"}
    moves = []
    for op in ops:
        p = op.problem
        moves_alone = isinstance(p, (*MOVES, ConcatProblem)) or (isinstance(p, PointwiseProblem) and not p.stages)
        if moves_alone and moved.issuperset(op.inputs):
            moved.add(op.output)
            moves.append(op)
    kept: set[str] = set()
    for op in reversed(moves):
        if op.output in network.output_names or kept.issuperset(r.output for r in network.readers[op.output]):
            kept.add(op.output)
    return kept


def _amplifies(op: Op) -> bool:
    """Whether an op of a tail makes pixels, whose steps in FP16 matter, from numbers around 1.

    It does so by constants or an exponential, or by an expectation, as DFL does.
    """
    if not isinstance(op.problem, PointwiseProblem):
        return isinstance(op.problem, ConvProblem)
    for stage in op.problem.stages:
        if stage.op == "exp":
            return True
        if stage.op in (*SUMS_OF_TWO, "mul", "div") and not stage.operand.startswith("t"):
            most = float(np.abs(op.weights[stage.operand] if stage.operand else stage.params).max())
            if AMPLIFIED <= (1 / most if stage.op == "div" and most else most) <= LARGE[1]:
                return True
    return False


def _can_be_fp32(network: Network, tensor: str) -> bool:
    """Whether a tensor is floating-point and kernels can write it in FP32."""
    if network.type(tensor).fixed:
        return False
    makers = network.producers.get(tensor, ())
    if not makers:
        return any(t.name == tensor and t.dtype == "fp32" for t in network.inputs)
    return all(isinstance(op.problem, ANY_TYPE) or not fp32.reason(op.problem) for op in makers)


def _on_tensor_cores(network: Network, op: Op) -> bool:
    """Whether an op reads FP16 and sums on tensor cores.

    The 1x1 convolution of a softmax to one channel does not: it is the expectation with which a detector decodes a distribution
    (DFL), cheap and as exact as its input.
    """
    p = op.problem
    if isinstance(p, ConvProblem) and (p.k, p.r, p.s) == (1, 1, 1):
        tensor = op.inputs[0]
        while (maker := network.producer(tensor)) is not None and isinstance(maker.problem, MOVES):
            tensor = maker.inputs[0]
        return not (maker is not None and isinstance(maker.problem, NormalizeProblem) and maker.problem.kind in SOFTMAX)
    return isinstance(p, SUMS)


def _is_tail(network: Network, op: Op) -> bool:
    p = op.problem
    if isinstance(p, NormalizeProblem):
        return p.kind in SOFTMAX and not fp32.reason(p)
    if isinstance(p, ConvProblem):
        return not _on_tensor_cores(network, op)
    return isinstance(p, TAIL) and (network.type(op.output).fixed or _can_be_fp32(network, op.output))


def _casts_integers(op: Op) -> bool:
    p = op.problem
    return isinstance(p, LibraryProblem) and p.function == "Cast" and p.dtypes[0] not in ("bool", FLOAT) and p.dtype == FLOAT


def _deciding(op: Op) -> tuple[str, tuple[str, ...]]:
    """Returns (operator, the op's inputs that decide); ("", ()) where none does."""
    p = op.problem
    if isinstance(p, PointwiseProblem):
        at = [i for i, s in enumerate(p.stages) if s.op in WHOLE]
        return (p.stages[at[0]].op, op.inputs) if at else ("", ())
    if not isinstance(p, LibraryProblem):
        return "", ()
    if p.function == "Cast":
        return ("Cast", op.inputs) if p.dtypes[0] == FLOAT and p.dtype in EXACT else ("", ())
    chosen = [p.arguments[i] for i in DECIDING.get(p.function, ()) if i < len(p.arguments)]
    return p.function, tuple(op.inputs[int(a[1:])] for a in chosen if a.startswith("t"))


def _is_whole(op: Op, known: intervals.Known) -> bool:
    """Whether an op makes whole numbers that FP16 holds."""
    p, v = op.problem, known.get(op.output, intervals.ANY)
    if isinstance(p, PointwiseProblem):
        whole = bool(p.stages) and p.stages[-1].op in WHOLE
    else:
        whole = isinstance(p, LibraryProblem) and p.function == "Cast" and p.dtypes[0] in EXACT
    return whole and v.low >= -FP16_WHOLE and v.high <= FP16_WHOLE
