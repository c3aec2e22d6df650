"""Elementwise functions: their names, their numbers in the kernels, and their meaning over FP32 arrays.

A convolution's epilogue applies one Activation. A pointwise chain applies stages: activations, the further functions of
FUNCTIONS, and OPERATIONS, which take an operand too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

MAX_STAGES, MAX_SOURCES = 8, 6  # of one chain: the digits that the kernel's compile-time values have room for

Meaning = Callable[..., np.ndarray]


def _prelu(v: np.ndarray, slope: np.ndarray | float = 0.25) -> np.ndarray:
    """ONNX PRelu; Activation.apply gives it the slope of each channel."""
    return np.where(v >= 0, v, v * slope)


def _erf(v: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float32])(v)


def _softplus(v: np.ndarray) -> np.ndarray:
    return np.maximum(v, 0) + np.log1p(np.exp(-np.abs(v)))


# name -> (number of parameters, meaning). `prelu` has its slope per channel as a weight. Order: include/activation.cuh.
ACTIVATIONS: dict[str, tuple[int, Meaning]] = {
    "none": (0, lambda v: v),
    "relu": (0, lambda v: np.maximum(v, 0)),
    "leaky_relu": (1, lambda v, a: np.where(v >= 0, v, a * v)),
    "prelu": (0, _prelu),
    "clip": (2, lambda v, lo, hi: np.minimum(np.maximum(v, lo), hi)),
    "sigmoid": (0, lambda v: 1 / (1 + np.exp(-v))),
    "silu": (0, lambda v: v / (1 + np.exp(-v))),
    "hard_sigmoid": (2, lambda v, a, b: np.clip(a * v + b, 0, 1)),
    "hard_swish": (0, lambda v: v * np.clip(v / 6 + 0.5, 0, 1)),
    "tanh": (0, np.tanh),
    "elu": (1, lambda v, a: np.where(v > 0, v, a * np.expm1(np.minimum(v, 0)))),
    "gelu": (0, lambda v: 0.5 * v * (1 + _erf(v * math.sqrt(0.5)))),
    "gelu_tanh": (0, lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))),
    "mish": (0, lambda v: v * np.tanh(_softplus(v))),
    "softplus": (0, _softplus),
}

# name -> (number of parameters, meaning). Order: pointwise.cu.
FUNCTIONS: dict[str, tuple[int, Meaning]] = {
    "abs": (0, np.abs),
    "ceil": (0, np.ceil),
    "erf": (0, _erf),
    "exp": (0, np.exp),
    "floor": (0, np.floor),
    "log": (0, np.log),
    "round": (0, np.round),  # halves to even
    "sign": (0, np.sign),
    "softsign": (0, lambda v: v / (1 + np.abs(v))),
    "sqrt": (0, np.sqrt),
    "square": (0, np.square),
    "thresholded_relu": (1, lambda v, a: np.where(v > a, v, 0)),
}

# name -> meaning of v with its operand; rsub, rdiv and rpow have them the other way round. Order: pointwise.cu.
OPERATIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "rsub": lambda v, b: b - v,
    "mul": np.multiply,
    "div": np.divide,
    "rdiv": lambda v, b: b / v,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "rpow": lambda v, b: np.power(b, v),
    "prelu": lambda v, b: np.where(v >= 0, v, v * b),
}
FIRST_OPERATION, FIRST_FUNCTION = 20, 40  # numbers below are ACTIVATIONS
CODES = {
    **{name: i for i, name in enumerate(ACTIVATIONS)},
    **{name: FIRST_OPERATION + i for i, name in enumerate(OPERATIONS)},
    **{name: FIRST_FUNCTION + i for i, name in enumerate(FUNCTIONS)},
}
# Instructions of one element; for what is not here, about 2.
INSTRUCTIONS = {
    "sigmoid": 8, "silu": 8, "tanh": 20, "div": 8, "rdiv": 8, "pow": 60, "rpow": 60, "erf": 25, "exp": 3, "gelu": 20,
    "gelu_tanh": 12, "log": 12, "mish": 12, "softplus": 10, "softsign": 10, "sqrt": 8, "elu": 6, "hard_swish": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Activation:
    """A pointwise function and its scalar parameters; prints as `relu` or `clip(0,6)`."""

    name: str = "none"
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.name!r}: expected one of {', '.join(ACTIVATIONS)}")
        if len(self.params) != ACTIVATIONS[self.name][0]:
            raise ValueError(f"activation {self.name} takes {ACTIVATIONS[self.name][0]} parameters, got {self.params}")

    def __str__(self) -> str:
        return self.name + (f"({','.join(f'{p:g}' for p in self.params)})" if self.params else "")

    def apply(self, v: np.ndarray, slope: np.ndarray | None = None) -> np.ndarray:
        """FP32 NCHW in, FP32 out; `slope` is [C], for prelu."""
        if self.name == "prelu":
            return _prelu(v, np.asarray(slope, np.float32).reshape(1, -1, 1, 1))
        with np.errstate(over="ignore"):
            return ACTIVATIONS[self.name][1](v, *(np.float32(p) for p in self.params)).astype(np.float32)


NONE = Activation()


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a pointwise chain; prints as `relu`, `clip(0,6)`, `add(t1)` or `mul(0.5)`.

    `op`: a name in ACTIVATIONS, FUNCTIONS or OPERATIONS. An operation's `operand` is tensor "t<i>" or constant "c<i>" of
    its problem, or "" for the scalar that is its one parameter.
    """

    op: str
    operand: str = ""
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.op not in CODES or self.op == "none":
            raise ValueError(f"unknown pointwise op {self.op!r}: expected one of {', '.join(list(CODES)[1:])}")
        count = (not self.operand) if self.op in OPERATIONS else (ACTIVATIONS | FUNCTIONS)[self.op][0]
        if len(self.params) != count or (self.operand and self.op not in OPERATIONS):
            raise ValueError(f"pointwise {self.op}: {count} parameters expected, got {self.params} and {self.operand!r}")

    def __str__(self) -> str:
        inside = [self.operand] if self.operand else [f"{p:g}" for p in self.params]
        return self.op + (f"({','.join(inside)})" if inside else "")

    def apply(self, v: np.ndarray, operand: np.ndarray | None = None) -> np.ndarray:
        """FP32 arrays that broadcast against each other."""
        if self.op in OPERATIONS:
            return OPERATIONS[self.op](v, operand if self.operand else np.float32(self.params[0]))
        return (ACTIVATIONS | FUNCTIONS)[self.op][1](v, *(np.float32(p) for p in self.params))


def stage_of(act: Activation, slope: str = "") -> tuple[Stage, ...]:
    """An activation as a stage (prelu: with the name of its slope); nothing for none."""
    return () if act == NONE else (Stage(act.name, slope if act.name == "prelu" else "", act.params),)
