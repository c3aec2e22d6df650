"""Operators that rounding ruins, such as the reciprocal of a difference that FP16 rounds to 0, and the FP32 tensors for them.

tactics.problems.pointwise_ops gives each operator's cliff; intervals gives the possible values of its base. If the base is not
known to avoid the cliff, it is computed in FP32 from its sources: the sums of a convolution or a matrix product, or the
network's input. The sources are written in FP32, which costs bytes but no accuracy and no tensor core; their other readers may
use an FP16 copy.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpu_runtime.network import FP16_MAX, WIDE, Network, Op
from gpu_runtime.precision import execution, intervals
from tactics import fp32
from tactics.problems import array_functions, reductions
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.intervals import Cliff, Interval
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.pointwise_ops import POINTWISE
from tactics.problems.problem import ConvProblem, ConvTransposeProblem, MatmulProblem, MoveProblem, PointwiseProblem
from tactics.problems.protocol import Feature
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

SUMS = (ConvProblem, ConvTransposeProblem, MatmulProblem)  # whose FP32 sums are as accurate as their inputs
SOURCES = (*SUMS, NormalizeProblem)  # which compute a row's statistics in FP32
NORMS = ("l1", "l2", "sum_square")
MOVES = (ViewProblem, MoveProblem, GatherProblem)
CLIFFS = array_functions.CLIFFS | reductions.CLIFFS
ANY_TYPE = (LibraryProblem, ViewProblem)  # which pass FP32 through


@dataclass(frozen=True, slots=True)
class Danger:
    """An operator `name` of op `op` whose base may reach its cliff; `tensors`: the tensors that the base is computed from."""

    op: Op
    name: str
    cliff: Cliff
    base: Interval
    tensors: frozenset[str]

    @property
    def sentence(self) -> str:
        ends = [f"{v:g}" for v in (self.base.low, self.base.high)]
        known = "of any size" if ends == ["-inf", "inf"] else f"known to be between {ends[0]} and {ends[1]}"
        edges = " and ".join(f"{e:g}" for e in self.cliff.edges[:2])
        return (
            f"{self.name} of {self.op.name} reads values {known}: near {edges}, rounding to FP16 could make it infinite or NaN"
        )


def keep(network: Network) -> tuple[Network, dict[str, str]]:
    """Returns (the network with the sources of operators near their cliffs in FP32, the reason for each tensor)."""
    found: dict[str, str] = {}
    known = intervals.known(network)
    for danger in list(dangers(network, known)):
        network, more = widen(network, (danger.op.output,), danger.sentence, only=danger.tensors)
        if _at_pole(danger, known):
            network, beyond = _beyond(network, danger.op.output, danger.sentence)
            more |= beyond
        found = more | found
    return network, found


def heed(network: Network, causes: Iterable[tuple[str, str]]) -> tuple[Network, dict[str, str]]:
    """Makes the ops that write these tensors read FP32; returns (the network, the reason for each new FP32 tensor).

    `causes`: (tensor, sentence). If such an op's inputs are FP32 already, the inputs of the convolutions before it become FP32
    too. An op that only moves elements is not the cause: if a plan has a move and its predecessor in one launch, the
    predecessor is.
    """
    found: dict[str, str] = {}
    for tensor, why in causes:
        while (ops := network.producers.get(tensor, ())) and all(isinstance(op.problem, MOVES) for op in ops):
            tensor = ops[0].inputs[0]
        for through in (False, True):
            grown, more = widen(network, (tensor,), why, through=through)
            if more or grown.exact_outputs != network.exact_outputs:
                network, found = grown, more | found
                break
    return network, found


def dangers(network: Network, known: intervals.Known) -> Iterator[Danger]:
    """Yields all operators whose computed bases are not known to avoid their cliffs."""
    for op in execution.plain(network):
        p = op.problem
        if isinstance(p, PointwiseProblem):
            for stage, v, operand, of in intervals.along(op, known):
                cliff, base = stage.cliff(operand), stage.base(v, operand)
                if cliff is None or cliff.clear(base) or (cliff.of_operand and not stage.operand.startswith("t")):
                    continue
                tensors = {op.inputs[int(stage.operand[1:])]} if cliff.of_operand else of
                yield Danger(op, stage.op, cliff, base, frozenset(tensors))
        elif isinstance(p, (LibraryProblem, ReduceProblem)) and op.inputs:
            name = p.function if isinstance(p, LibraryProblem) else p.kind
            cliff = CLIFFS.get(name)
            if cliff is not None and not cliff.clear(known[op.inputs[0]]):
                yield Danger(op, name, cliff, known[op.inputs[0]], frozenset(op.inputs))


def widen(
    network: Network, outputs: Iterable[str], why: str, *, only: frozenset[str] | None = None, through: bool = False
) -> tuple[Network, dict[str, str]]:
    """Makes the ops that write `outputs` read FP32; returns (the network, the reason for each new FP32 tensor).

    `only`: their relevant inputs; `through`: the inputs of convolutions and the like on the way become FP32 too.
    """
    types, exact, makers = dict(network.types), set[str](), network.producers
    todo: list[str] = []

    def read(op: Op) -> None:
        exact.add(op.output)
        todo.extend(t for t in op.inputs if not network.type(t).fixed)

    for t in outputs:
        for op in makers.get(t, ()):
            read(op)
    if only is not None:
        todo = [t for t in todo if t in only]
    seen = set()
    while todo:
        t = todo.pop()
        if t in seen or _unable(makers.get(t, ())):
            continue
        seen.add(t)
        types.setdefault(t, WIDE)
        for op in makers.get(t, ()):
            if through or not (isinstance(op.problem, SOURCES) or _norm_of_source(op, makers)):
                read(op)
            elif Feature.RESIDUAL in op.problem.needs:
                todo.append(op.inputs[1])
    new = {t: f"{t!r}: {why}" for t in types if t not in network.types}
    return replace(network, types=types).with_exact(exact), new


def _norm_of_source(op: Op, makers: Mapping[str, tuple[Op, ...]]) -> bool:
    """Whether the op is a norm of the output of a convolution or the like: then rounding its input to FP16 causes only a
    relative error, since no subtraction lies between.
    """
    if not isinstance(op.problem, ReduceProblem) or op.problem.kind not in NORMS:
        return False
    tensor = op.inputs[0]
    while (ops := makers.get(tensor, ())) and isinstance(ops[0].problem, MOVES):
        tensor = ops[0].inputs[0]
    return bool(ops) and all(isinstance(o.problem, SOURCES) for o in ops)


def _unable(ops: tuple[Op, ...]) -> bool:
    """Whether no kernel that writes FP32 can write the tensor that these ops give."""
    return bool(ops) and all(fp32.reason(op.problem) and not isinstance(op.problem, ANY_TYPE) for op in ops)


def _at_pole(danger: Danger, known: intervals.Known) -> bool:
    """Whether the op's output may leave FP16's range, because no later operand can bring it back after the pole."""
    p = danger.op.problem
    if not isinstance(p, PointwiseProblem) or danger.cliff.closed:
        return False
    at = max(i for i, s in enumerate(p.stages) if s.op == danger.name)
    end = [*intervals.along(danger.op, known)][-1].input
    bounded = end.low >= -FP16_MAX and end.high <= FP16_MAX
    return POINTWISE[danger.name].pole and not bounded and not any(s.operand.startswith("t") for s in p.stages[at:])


def _beyond(network: Network, tensor: str, why: str) -> tuple[Network, dict[str, str]]:
    """Makes the tensor FP32, also for all of its readers."""
    if tensor in network.types:
        return network, {}
    readers = {op.output for op in network.ops if tensor in op.inputs}
    return replace(network, types={**network.types, tensor: WIDE}).with_exact(readers), {tensor: f"{tensor!r}: {why}"}
