"""Tables of elementwise functions; a row has everything that the code outside the kernels knows about its function.

A convolution's epilogue applies an Activation. A pointwise chain applies Stages: activations, the further functions in
FUNCTIONS, and OPERATIONS, which also take an operand. To add a function, append a row to its table here, and an enumerator and
a case to cuda_kernels/include/activation.cuh (for FUNCTIONS and OPERATIONS: stages.cuh), at the end of the enum.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from tactics.problems import intervals
from tactics.problems.intervals import ANY, DIVISOR, INF, POSITIVE, ROOT, ZERO, Cliff, Image, Interval, dips_to, rising, within

MAX_STAGES, MAX_SOURCES = 8, 6  # stages, and tensors and constants, of one chain: the kernel's compile-time values hold no more
FLT_MAX = 3.4028235e38

Meaning = Callable[..., np.ndarray]


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An elementwise function of v and its parameters, or an operation of v and an operand.

    `meaning`: the function over FP32 arrays; `image`: its Image (intervals.py); `instructions`: per element in a kernel;
    `onnx`: the ONNX operator, "" if there is none; `parameters`: the operator's attributes, with ONNX's defaults. `spelled`:
    the parameters of the function where exporters write it as several nodes, which the importer joins; None: they do not.
    `cliff`: interval of the operand -> Cliff or None. `pole`: whether the result may leave FP16's range near one v, as a
    reciprocal does. `homogeneous`: whether f(s v) = s f(v) for s > 0.
    """

    meaning: Meaning
    image: Image
    instructions: int = 2
    onnx: str = ""
    parameters: Mapping[str, float] = field(default_factory=dict)
    spelled: tuple[float, ...] | None = None
    cliff: Callable[[Interval], Cliff | None] = lambda b: None
    pole: bool = False
    homogeneous: bool = False


def _prelu(v: np.ndarray, slope: np.ndarray) -> np.ndarray:
    return np.where(v >= 0, v, v * slope)


def _erf(v: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float32])(v)


def _softplus(v: np.ndarray) -> np.ndarray:
    return np.maximum(v, 0) + np.log1p(np.exp(-np.abs(v)))


def _gelu_tanh(v: np.ndarray) -> np.ndarray:
    return 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def _entry(v: np.ndarray, low: float, high: float, *entries: float) -> np.ndarray:
    at = np.fmin(np.fmax(np.rint(v), low), high) - low  # NaN is the least
    return np.array(entries, np.float32)[at.astype(np.intp)]


def _whole(f: Callable[[float], float]) -> Image:
    return rising(lambda x: f(x) if abs(x) < INF else x)


# In the order of the enum in include/activation.cuh. The slopes of `prelu`, one per channel, are a weight.
# fmt: off
ACTIVATIONS: dict[str, Pointwise] = {
    "none": Pointwise(lambda v: v, lambda v, *_: v, homogeneous=True),
    "relu": Pointwise(lambda v: np.maximum(v, 0), rising(lambda x: max(x, 0.0)), onnx="Relu", homogeneous=True),
    "leaky_relu": Pointwise(
        _prelu, lambda v, b, a: intervals.leaky(v, Interval(a, a)),
        onnx="LeakyRelu", parameters={"alpha": 0.01}, homogeneous=True,
    ),
    "prelu": Pointwise(_prelu, intervals.leaky, homogeneous=True),
    "clip": Pointwise(
        lambda v, low, high: np.minimum(np.maximum(v, low), high), rising(lambda x, low, high: min(max(x, low), high)),
        onnx="Clip", parameters={"min": -FLT_MAX, "max": FLT_MAX},
    ),
    "sigmoid": Pointwise(lambda v: 1 / (1 + np.exp(-v)), within(0.0, 1.0), 8, "Sigmoid", spelled=()),
    "silu": Pointwise(lambda v: v / (1 + np.exp(-v)), dips_to(-0.2785), 8, spelled=()),
    "hard_sigmoid": Pointwise(
        lambda v, a, b: np.clip(a * v + b, 0, 1), within(0.0, 1.0),
        onnx="HardSigmoid", parameters={"alpha": 0.2, "beta": 0.5}, spelled=(1 / 6, 0.5),
    ),
    "hard_swish": Pointwise(lambda v: v * np.clip(v / 6 + 0.5, 0, 1), dips_to(-0.375), 4, "HardSwish", spelled=()),
    "tanh": Pointwise(np.tanh, within(-1.0, 1.0), 20, "Tanh"),
    "elu": Pointwise(
        lambda v, a: np.where(v > 0, v, a * np.expm1(np.minimum(v, 0))),
        lambda v, b, a: Interval(min(v.low, 0.0, -abs(a)), max(v.high, abs(a))), 6, "Elu", {"alpha": 1.0},
    ),
    "gelu": Pointwise(lambda v: 0.5 * v * (1 + _erf(v * math.sqrt(0.5))), dips_to(-0.17), 11, "Gelu", spelled=()),
    "gelu_tanh": Pointwise(_gelu_tanh, dips_to(-0.1701), 12, spelled=()),
    "mish": Pointwise(lambda v: v * np.tanh(_softplus(v)), dips_to(-0.309), 12, "Mish", spelled=()),
    "softplus": Pointwise(
        _softplus, lambda v, *_: Interval(0.0, max(v.high, 0.0) + 0.6932), 10, "Softplus", spelled=()
    ),
    "quantize": Pointwise(  # whole numbers of 8 bits: halves to even, saturated; an FP16 tensor of them may be stored as bytes
        lambda v, low, high: np.clip(np.rint(v), low, high),
        rising(lambda x, low, high: min(max(round(x) if abs(x) < INF else x, low), high)), 3,
        parameters={"low": -128.0, "high": 127.0},
    ),
    "table": Pointwise(  # quantize, then of each whole number from low to high the entry: more parameters, whole numbers too
        _entry, lambda v, b, low, high, *entries: Interval(min(entries), max(entries)), 16,
        parameters={"low": -128.0, "high": 127.0},
    ),
}
# fmt: on

# In the order of the enum in include/stages.cuh.
FUNCTIONS: dict[str, Pointwise] = {
    "abs": Pointwise(np.abs, intervals.size, onnx="Abs", homogeneous=True),
    "ceil": Pointwise(np.ceil, _whole(math.ceil), onnx="Ceil"),
    "erf": Pointwise(_erf, rising(math.erf), 25, "Erf"),
    "exp": Pointwise(np.exp, rising(intervals.bounded(math.exp)), 3, "Exp"),
    "floor": Pointwise(np.floor, _whole(math.floor), onnx="Floor"),
    "log": Pointwise(np.log, intervals.logarithm, 12, "Log", cliff=lambda b: ZERO),
    "round": Pointwise(np.round, _whole(round), onnx="Round"),  # halves to even
    "sign": Pointwise(np.sign, within(-1.0, 1.0), onnx="Sign"),
    "softsign": Pointwise(lambda v: v / (1 + np.abs(v)), within(-1.0, 1.0), 10, "Softsign", spelled=()),
    "sqrt": Pointwise(np.sqrt, intervals.root, 8, "Sqrt", cliff=lambda b: ROOT),
    "square": Pointwise(np.square, intervals.square),
    "thresholded_relu": Pointwise(
        lambda v, a: np.where(v > a, v, 0),
        lambda v, b, a: Interval(min(0.0, max(v.low, a)), max(v.high, 0.0)),
        onnx="ThresholdedRelu",
        parameters={"alpha": 1.0},
    ),
}

# Functions of v and an operand; rsub, rdiv and rpow swap the two. In the order of the enum in include/stages.cuh.
OPERATIONS: dict[str, Pointwise] = {
    "add": Pointwise(np.add, intervals.plus, onnx="Add"),
    "sub": Pointwise(np.subtract, intervals.minus, onnx="Sub"),
    "rsub": Pointwise(lambda v, b: b - v, lambda v, b, *_: intervals.minus(b, v)),
    "mul": Pointwise(np.multiply, intervals.times, onnx="Mul"),
    "div": Pointwise(np.divide, intervals.over, 8, "Div", cliff=lambda b: DIVISOR),
    "rdiv": Pointwise(lambda v, b: b / v, lambda v, b, *_: intervals.over(b, v), 8, cliff=lambda b: ZERO, pole=True),
    "max": Pointwise(np.maximum, intervals.corners(max), onnx="Max"),
    "min": Pointwise(np.minimum, intervals.corners(min), onnx="Min"),
    "pow": Pointwise(np.power, intervals.power, 60, "Pow", cliff=intervals.at_power, pole=True),
    "rpow": Pointwise(
        lambda v, b: np.power(b, v), lambda v, b, *_: POSITIVE if b.low >= 0 else ANY, 60, cliff=lambda b: DIVISOR
    ),
    "prelu": Pointwise(_prelu, intervals.leaky, onnx="PRelu", homogeneous=True),
}
POINTWISE = ACTIVATIONS | FUNCTIONS | OPERATIONS
# The kernels' number of each function; the numbers of ACTIVATIONS are below the others.
FIRST_OPERATION, FIRST_FUNCTION = 20, 40
ACTIVATION_CODES = {name: i for i, name in enumerate(ACTIVATIONS)}
CODES = {
    **ACTIVATION_CODES,
    **{name: FIRST_OPERATION + i for i, name in enumerate(OPERATIONS)},
    **{name: FIRST_FUNCTION + i for i, name in enumerate(FUNCTIONS)},
}
ROUNDING = ("quantize", "table")  # the results are whole numbers of 8 bits
STORED = ("prelu", "table")  # the kernel reads a section of weights


def _num_params(name: str, params: tuple[float, ...]) -> int:
    """The number of parameters that a function takes, of which the first ones are given."""
    entries = int(params[1] - params[0]) + 1 if name == "table" and len(params) > 1 else 0
    return len(POINTWISE[name].parameters) + entries


@dataclass(frozen=True, slots=True)
class Activation:
    """A pointwise function and its scalar parameters; prints as `relu` or `clip(0,6)`, without a table's entries."""

    name: str = "none"
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.name!r}: expected one of {', '.join(ACTIVATIONS)}")
        count = _num_params(self.name, self.params)
        if len(self.params) != count:
            raise ValueError(f"activation {self.name} takes {count} parameters, got {self.params}")

    def __str__(self) -> str:
        return self.name + (f"({','.join(f'{p:g}' for p in self.params[:2])})" if self.params else "")

    def apply(self, v: np.ndarray, slope: np.ndarray | None = None) -> np.ndarray:
        """Returns the activation of v, FP32 NCHW; `slope`: [C], for prelu only."""
        if self.name == "prelu":
            return _prelu(v, np.asarray(slope, np.float32).reshape(1, -1, 1, 1))
        with np.errstate(over="ignore"):
            return ACTIVATIONS[self.name].meaning(v, *map(np.float32, self.params)).astype(np.float32)


NONE = Activation()


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a pointwise chain; prints as `relu`, `clip(0,6)`, `add(t1)` or `mul(0.5)`.

    `op`: a name in POINTWISE. `operand`: of an operation, tensor "t<i>" or constant "c<i>" of the problem; "": the operand is
    the scalar params[0]. `params`: else the function's parameters.
    """

    op: str
    operand: str = ""
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.op not in CODES or self.op == "none":
            raise ValueError(f"unknown pointwise op {self.op!r}: expected one of {', '.join(list(CODES)[1:])}")
        count = (not self.operand) if self.op in OPERATIONS else _num_params(self.op, self.params)
        if len(self.params) != count or (self.operand and self.op not in OPERATIONS):
            raise ValueError(f"pointwise {self.op}: {count} parameters expected, got {self.params} and {self.operand!r}")

    def __str__(self) -> str:
        inside = [self.operand] if self.operand else [f"{p:g}" for p in self.params[:2]]
        return self.op + (f"({','.join(inside)})" if inside else "")

    def apply(self, v: np.ndarray, operand: np.ndarray | None = None) -> np.ndarray:
        """Returns the stage's result for v and the operand, FP32 arrays that broadcast against each other."""
        return POINTWISE[self.op].meaning(v, *([operand] if self.operand else map(np.float32, self.params)))

    def interval(self, v: Interval, operand: Interval | None = None) -> Interval:
        """Returns the interval of the result; `operand`: the interval of a tensor or constant operand, None if it is
        unknown."""
        return POINTWISE[self.op].image(v, self._known(operand), *(() if self.operand else self.params))

    def cliff(self, operand: Interval | None = None) -> Cliff | None:
        """Returns the stage's cliff, None if it has none. `operand`: as for `interval`."""
        return POINTWISE[self.op].cliff(self._known(operand))

    def base(self, v: Interval, operand: Interval | None = None) -> Interval:
        """Returns the interval of the base of the stage's cliff: the operand's interval or v's."""
        cliff = self.cliff(operand)
        return self._known(operand) if cliff is not None and cliff.of_operand else v

    def _known(self, operand: Interval | None) -> Interval:
        return operand or (Interval(self.params[0], self.params[0]) if self.params else ANY)


def stage_of(act: Activation, slope: str = "") -> tuple[Stage, ...]:
    """Returns an activation as a chain of one stage, () for no activation. `slope`: the name of the constant with prelu's
    slopes."""
    return () if act == NONE else (Stage(act.name, slope if act.name == "prelu" else "", act.params),)
