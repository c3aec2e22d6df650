"""Finds tensors beyond FP16's range by running the network in FP32, and stores them times a power of two or, failing that, in
FP32.

A sequence of convolutions, ReLUs, adds and max pools is homogeneous: scaled inputs give scaled outputs. So a tensor may be
stored as 2^e times its value, e < 0, if its writer multiplies its weights by 2^e and its readers by 2^-e: this is exact and
adds no operation. Pointwise chains compute in FP32, so their inputs, operands and output may have any e; pools, views, concats
and residuals have one e on all sides; other ops, and network inputs and outputs, have e = 0.

Scaling costs nothing, so it comes first. A tensor that is still too large becomes FP32; only the ops that read or write it use
FP32 kernels (tactics.fp32).
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.errors import ModelError
from gpu_runtime.network import FP16_MAX, FP16_NORMAL, FP16_OVERFLOW, SINGLE, Network, Op
from gpu_runtime.precision import constants, execution
from gpu_runtime.precision.constants import HIGH
from gpu_runtime.precision.execution import too_large
from gpu_runtime.progress import warn
from gpu_runtime.runtime.findings import RangeRecord
from gpu_runtime.text import not_finite
from tactics import fp32
from tactics.planner.graph import holds
from tactics.planner.grouping import Together
from tactics.problems.convolution import with_epilogue
from tactics.problems.gather import GatherProblem, ResizeProblem, ViewProblem
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.pointwise_ops import MAX_STAGES, POINTWISE, Activation, Stage
from tactics.problems.problem import (
    ConcatProblem,
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
)
from tactics.problems.protocol import Feature
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

ROOM = FP16_MAX / 4  # limit of a tensor on the sample after scaling
FP32_ROUNDS = 2.0**128 * (1 - 2.0**-12)  # rounds to 2^128 with FP16's 11 bits, as do masks of FP32's minimum
LOST = 2.0**-12  # of the largest weight: the loss allowed for weights that scaling makes subnormal
ONE_SCALE = (PoolProblem, MoveProblem, ConcatProblem, GatherProblem, ResizeProblem, ViewProblem)


Smaller = Callable[[bool], Network | None]
# Image sizes -> the magnitudes of a run on random values (None: none possible), and the description of these values.
Known = dict[tuple[tuple[int, ...], ...], tuple[dict[str, float] | None, str]]


def fit(
    network: Network,
    calibration: Mapping[str, np.ndarray] | None = None,
    smaller: Smaller = lambda images: None,
    maskable: Container[str] = (),
    earlier: Known | None = None,
) -> tuple[Network, RangeRecord]:
    """Returns the network with tensors in FP16's range as far as possible, and the findings.

    `calibration`: inputs by name in ONNX's shapes; without, random values 0 to 1. Beyond execution's budgets it runs fewer
    images, or random values for smaller inputs with the network from `smaller`. `maskable`: inputs that may contain -infinity.
    `earlier`: runs on random values, also of other sizes of its inputs; this one is added. Raises ValueError for inputs that do
    not fit, ModelError for weights that no kernel can hold; warns if no run took place.
    """
    run, source = _reached(network, calibration, smaller, maskable, {} if earlier is None else earlier)
    if run is None:
        warn(f"{network.name}: FP16's range is {source}; --calibration FILE.npz checks it, else a run shows overflow")
    known = constants.reach(network, maskable)
    masked = tuple(t for t, r in known.items() if r.infinite)
    given = {t: r.finite for t, r in known.items() if r.finite > HIGH and network.type(t).dtype == "fp16"}
    reached = {t: max(v, given.get(t, 0.0)) for t, v in (given | (run or {})).items()}
    high = tuple((t, float(f"{v:.4g}")) for t, v in sorted(reached.items(), key=lambda r: -r[1]) if not v <= HIGH)
    heavy, caps = _heavy(network, reached)
    if not high and not heavy:
        return network, RangeRecord(source, masked=masked)
    finite = {t: v for t, v in reached.items() if math.isfinite(v)}
    caps |= {t: min(caps.get(t, 0), math.floor(math.log2(ROOM / v))) for t, v in finite.items() if v > ROOM}
    scaled, exponents, fixed = _stored(network, caps, finite)
    large = _sentences([(t, v) for t, v in high if t in finite], given, heavy, source)
    large = {t: f"{what}: {fixed[t]}" for t, what in large.items() if t not in exponents}
    wide, stuck = _single(scaled, large)
    if bad := [t for t in heavy if t in stuck]:
        raise ModelError(f"{network.name}: {large[bad[0]]}; FP32 cannot be used either ({stuck[bad[0]]})")
    stuck |= {t: "FP32 cannot hold it either" for t, _ in high if t not in finite}
    types = {**network.types, **dict.fromkeys(wide, SINGLE)}
    found = RangeRecord(source, high, exponents, tuple(wide.items()), tuple(stuck.items()), masked=masked)
    return replace(scaled, types=types), found


def _sentences(
    high: Iterable[tuple[str, float]], given: Container[str], heavy: Mapping[str, tuple[float, str]], source: str
) -> dict[str, str]:
    """Returns why these tensors exceed FP16: their magnitudes on `source`, constants (for tensors in `given`), or the weights
    of their writers.
    """
    ends = f"FP16's maximum is {FP16_MAX:g}, and no power of two can scale"
    large = {t: f"{t!r} reaches {v:g} {'from constants' if t in given else f'on {source}'}; {ends} it to fit" for t, v in high}
    by_weights = {t: f"is computed with weights of {op} that reach {v:.4g}; {ends} them to fit" for t, (v, op) in heavy.items()}
    return large | {t: f"{t!r} {what}" for t, what in by_weights.items()}


def _heavy(network: Network, seen: Container[str]) -> tuple[dict[str, tuple[float, str]], dict[str, int]]:
    """Returns (output -> the largest weight of its writer, if beyond FP16, and the writer; output -> the largest possible
    exponent).

    `seen`: the outputs with known magnitudes.
    """
    heavy: dict[str, tuple[float, str]] = {}
    caps: dict[str, int] = {}
    for op in network.ops:
        size = np.abs(op.weights["w"]) if isinstance(op.problem, (ConvProblem, ConvTransposeProblem)) else np.zeros((1, 1))
        if (most := float(size.max())) >= FP16_OVERFLOW:
            heavy[op.output] = max(heavy.get(op.output, (0.0, "")), (most, op.name))
            # If the output's magnitude is unknown: its magnitude on inputs of 1.
            fits = FP16_MAX / most if op.output in seen else ROOM / float(size.reshape(len(size), -1).sum(1).max())
            caps[op.output] = min(caps.get(op.output, 0), math.floor(math.log2(fits)))
    return heavy, caps


def _stored(
    network: Network, caps: Mapping[str, int], reached: Mapping[str, float]
) -> tuple[Network, dict[str, int], dict[str, str]]:
    """Returns (the network with tensors stored times powers of two, their exponents, why others are not scaled).

    `caps`: tensor -> the largest exponent that fits FP16.
    """
    fixed = {t: "rounded to FP16, it may leave FP32" for t, v in reached.items() if v > FP32_ROUNDS}
    fixed |= {t.name: "it is an input of the network" for t in network.inputs}
    fixed |= {t.name: "it is an output of the network" for t in network.outputs}
    while True:
        exponents, why = _exponents(network, caps, fixed)
        try:
            return replace(network, ops=tuple(_scaled(op, exponents) for op in network.ops)), exponents, why
        except _Stuck as e:
            fixed = dict.fromkeys(e.tensors, str(e)) | fixed


def _reached(
    network: Network,
    calibration: Mapping[str, np.ndarray] | None,
    smaller: Smaller,
    maskable: Container[str],
    earlier: Known,
) -> tuple[dict[str, float] | None, str]:
    """Returns (tensor -> its largest magnitude, the inputs used); (None, why) if no run is possible."""
    if calibration is not None:
        _check_calibration(network, calibration, maskable)
        return _calibrated(network, calibration, smaller)
    sizes = tuple(t.shape[1:] for t in network.inputs)
    if sizes not in earlier:  # other batches are stored in the same types
        found = _on_random_values(network, smaller)
        if found[0] is None:
            return found
        earlier[sizes] = found
    reached, source = earlier[sizes]
    return {t: v for t, v in (reached or {}).items() if t in network.tensors}, source


def _on_random_values(network: Network, smaller: Smaller) -> tuple[dict[str, float] | None, str]:
    """`_reached` on random values, for the network or its version for smaller inputs."""
    run = network
    if too_large(network, execution.QUICK):
        run = smaller(False) or network
        if run is network and (why := too_large(network, execution.MOST)):
            return None, f"not checked: {why}; give a calibration input"
    largest_of = {t.name: 255 if t.dtype == "uint8" else 1 for t in run.inputs}
    source = "random values from 0 to 1" + (", of pixels 0 to 255" if 255 in largest_of.values() else "")
    if run is not network:
        source += f", for inputs of {', '.join('x'.join(map(str, t.shape)) for t in run.inputs)}"
    rng = np.random.default_rng(0)
    return largest(run, {t.name: largest_of[t.name] * rng.random(t.shape, np.float32) for t in run.inputs}), source


def _calibrated(
    network: Network, calibration: Mapping[str, np.ndarray], smaller: Smaller
) -> tuple[dict[str, float] | None, str]:
    """`_reached` on a calibration input, or on its first images if all are too many."""
    if too_large(network, execution.MOST) and (run := smaller(True)) is not None:
        found = largest(run, {t.name: np.asarray(calibration[t.name])[: t.shape[0]] for t in run.inputs})
        return {t: v for t, v in found.items() if t in network.tensors}, "the calibration input's first image"
    if why := too_large(network, execution.CALIBRATION):
        return None, f"not checked: {why}, too much for a calibration input"
    return largest(network, calibration), "calibration input"


def _check_calibration(network: Network, calibration: Mapping[str, np.ndarray], maskable: Container[str]) -> None:
    """Raises ValueError unless each input, and no other name, has an array of finite numbers of its shape.

    `maskable` inputs may contain -infinity.
    """
    names = [t.name for t in network.inputs]
    if not isinstance(calibration, Mapping):
        raise ValueError(f"calibration: expected a mapping of input names to arrays, got {type(calibration).__name__}")
    if set(names) != set(calibration):
        got = ", ".join(map(repr, calibration)) or "none"
        cure = "; leave the others out" if set(names) < set(calibration) else ""
        raise ValueError(f"calibration: expected an array for each input, {', '.join(map(repr, names))}, got {got}{cure}")
    for t in network.inputs:
        try:
            array = np.asarray(calibration[t.name])
        except (TypeError, ValueError, RuntimeError) as e:  # ragged lists, or arrays that other libraries refuse to convert
            raise ValueError(f"calibration: NumPy cannot make an array of the values for input {t.name!r}: {e}") from e
        if array.shape != t.shape:
            raise ValueError(f"calibration: expected input {t.name!r} of shape {t.shape}, got {array.shape}")
        if array.dtype.kind not in "fiub":
            raise ValueError(f"calibration: expected numbers for input {t.name!r}, got {array.dtype}")
        array = np.where(np.isneginf(array), 0, array) if t.name in maskable else array
        if text := not_finite(array):
            raise ValueError(f"calibration: expected finite numbers, input {t.name!r} holds {text}")


def _single(network: Network, large: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns (the tensors of `large` that can be FP32, with their views; the others with the reason)."""
    choice = {group: options[0] for group, options in network.groups}
    same = {t: {t} for t in network.tensors}  # tensor -> all tensors that share its memory
    against: dict[str, str] = {}
    for op in network.ops:
        tensors = [t for t in (*op.inputs, op.output) if network.type(t).dtype == "fp16"]
        if isinstance(op.problem, ViewProblem) and len(tensors) == 2:
            both = same[tensors[0]] | same[tensors[1]]
            same.update(dict.fromkeys(both, both))
        elif not isinstance(op.problem, LibraryProblem) and holds(op.when, choice) and (why := fp32.reason(op.problem)):
            against |= dict.fromkeys(tensors, f"{op.name}: {why}")
    wide: dict[str, str] = {}
    stuck: dict[str, str] = {}
    for t in large:
        if bad := [x for x in against if x in same[t]]:
            stuck[t] = against[bad[0]]
        else:
            wide |= {x: large.get(x, f"{x!r} shares the memory of {t!r}") for x in sorted(same[t])}
    return wide, stuck


def largest(network: Network, feeds: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns tensor -> its largest magnitude in an FP32 run of the unfused network.

    Tensors with infinities, from an input or a constant, count by their finite values.
    """
    tensors = execution.inputs(network, feeds)
    halves = {t for t in network.tensors if network.type(t).dtype == "fp16"}
    found = {t: _magnitude(x, True) for t, x in tensors.items() if t in halves}
    given = {t for t, x in tensors.items() if not np.isfinite(x).all()}
    for op, y in execution.run(execution.plain(network), tensors):
        if given.intersection(op.inputs) or not all(np.isfinite(w).all() for w in op.weights.values()):
            given.add(op.output)
        if op.output in halves:
            found[op.output] = _magnitude(y, op.output in given)
    return found


def _magnitude(values: np.ndarray, finite: bool) -> float:
    """Returns the largest magnitude; with `finite`, of the finite values only."""
    most = float(np.abs(values).max())
    return most if math.isfinite(most) or not finite else float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


class _Stuck(Exception):
    """Raised where an op cannot use its tensors at these scales, with the reason; `tensors` must stay unscaled."""

    def __init__(self, why: str, *tensors: str):
        super().__init__(why)
        self.tensors = tensors


def _exponents(network: Network, caps: Mapping[str, int], fixed: Mapping[str, str]) -> tuple[dict[str, int], dict[str, str]]:
    """Returns (tensor -> e < 0, the smallest that any tensor of its class needs; tensor -> why its e is 0).

    e is 0 if a tensor of its class is in `fixed`, or an op reads one unscaled.
    """
    together, fixed = Together[str](), dict(fixed)
    for op in network.ops:
        p, tensors = op.problem, (*op.inputs, op.output)
        if isinstance(p, (ConvProblem, ConvTransposeProblem)):
            for act in (p.epilogue.act, p.epilogue.last):
                if act.name != "clip" and not POINTWISE[act.name].homogeneous:
                    fixed |= dict.fromkeys(tensors[1:], f"{op.name} computes {act.name}") | fixed
            same = tensors[1:]
        elif isinstance(p, PointwiseProblem):
            same = ()
        elif isinstance(p, ONE_SCALE) or (isinstance(p, ReduceProblem) and p.kind in ("sum", "mean", "max", "min", "l1", "l2")):
            same = tensors
        else:
            name = type(p).__name__.removesuffix("Problem").lower()
            what = p.kind if isinstance(p, (NormalizeProblem, ReduceProblem)) else name
            fixed |= dict.fromkeys(tensors, f"{op.name} ({what}) needs it unscaled") | fixed
            same = ()
        for t in same[1:]:
            together.unite(same[0], t)
    root = {t: together.root(t) for t in network.tensors}
    pinned: dict[str, tuple[str, str]] = {}
    for t, why in fixed.items():
        pinned.setdefault(root[t], (t, why))
    need: dict[str, int] = {}
    for t, e in caps.items():
        if root[t] not in pinned:
            need[root[t]] = min(need.get(root[t], 0), e)
    whys = {t: "it shares the scale of {!r}: {}".format(*pinned[r]) for t, r in root.items() if r in pinned} | fixed
    return {t: need[r] for t, r in root.items() if need.get(r, 0)}, whys


def _scaled(op: Op, exponents: Mapping[str, int]) -> Op:
    """Returns the op that computes the same from scaled inputs to a scaled output."""
    ins, out = [exponents.get(t, 0) for t in op.inputs], exponents.get(op.output, 0)
    p = op.problem
    if not any((*ins, out)):
        return op
    if isinstance(p, (ConvProblem, ConvTransposeProblem)):
        return _conv(op, ins[0], out)
    if isinstance(p, PointwiseProblem):
        return _chain(op, ins, out)
    if isinstance(p, (MoveProblem, GatherProblem)) and p.fill:
        return replace(op, problem=replace(p, fill=p.fill * 2.0**out))
    if isinstance(p, ResizeProblem) and p.extrapolation:
        return replace(op, problem=replace(p, extrapolation=p.extrapolation * 2.0**out))
    return op


def _conv(op: Op, x: int, y: int) -> Op:
    p, weights = op.problem, dict(op.weights)
    if Feature.SCALED_INPUT in p.needs:  # its first step's scale restores the input's value
        weights["scale"], x = weights["scale"] * np.float32(2.0**-x), 0
        if np.abs(weights["scale"]).max() > FP16_MAX:
            raise _Stuck(f"the scales of {op.name} would leave FP16's range", op.inputs[0])
    with np.errstate(over="ignore"):  # the next lines report it
        exact = weights["w"] * np.float32(2.0 ** (y - x))
    w = sparse24.stored(exact).astype(np.float32)
    lost = np.abs(w - exact)[np.abs(exact) < FP16_NORMAL] if y < x else np.zeros(0)  # other weights round as usual
    if not np.isfinite(w).all() or lost.max(initial=0.0) > LOST * np.abs(exact).max():
        raise _Stuck(f"the weights of {op.name} would leave FP16's range", op.inputs[0], op.output)
    weights["w"] = exact
    for name in {"b", "shifts"} & weights.keys():
        weights[name] = weights[name] * np.float32(2.0**y)
    end = with_epilogue(p, act=_times(p.epilogue.act, 2.0**y), last=_times(p.epilogue.last, 2.0**y))
    return replace(op, problem=end, weights=weights)


def _times(act: Activation, scale: float) -> Activation:
    """Scales the parameters of a homogeneous activation or clip for values, and results, times `scale`."""
    return replace(act, params=tuple(v * scale for v in act.params)) if act.name == "clip" else act


def _chain(op: Op, ins: list[int], out: int) -> Op:
    p, weights, stages, e = op.problem, dict(op.weights), [], ins[0]
    uses = [s.operand for s in p.stages]

    def turn(to: int) -> None:
        nonlocal e
        if e != to:
            stages.append(Stage("mul", params=(2.0 ** (to - e),)))
            e = to

    for s in p.stages:
        of = ins[int(s.operand[1:])] if s.operand.startswith("t") else None
        if s.op in ("add", "sub", "rsub", "max", "min"):
            if of is not None:
                turn(of)
            elif not s.operand:
                s = replace(s, params=(s.params[0] * 2.0**e,))
            elif uses.count(s.operand) == 1:
                weights[s.operand] = weights[s.operand] * np.float32(2.0**e)
            else:
                turn(0)
        elif s.op == "clip":
            s = replace(s, params=tuple(v * 2.0**e for v in s.params))
        elif s.op in ("mul", "div") or (POINTWISE[s.op].homogeneous and not of):
            e += (of or 0) * {"mul": 1, "div": -1}.get(s.op, 0)
        else:
            turn(0)
            if of:
                raise _Stuck(f"{op.name} needs it unscaled", op.inputs[int(s.operand[1:])])
        stages.append(s)
    turn(out)
    if len(stages) > MAX_STAGES:
        raise _Stuck(f"{op.name} has too many fused stages to scale it", *op.inputs, op.output)
    return replace(op, problem=replace(p, stages=tuple(stages)), weights=weights)
