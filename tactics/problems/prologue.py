"""The steps that a convolution's kernel applies to its input before it multiplies."""

from dataclasses import dataclass

import numpy as np

from cuda_kernels.hashed import Hashed
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.protocol import Feature

GATED_ACTS = ("none", "relu", "clip")  # activations between a gate's product and the convolution


@dataclass(frozen=True, slots=True)
class Prologue(Hashed):
    """The step before the products of a convolution; at most one of four, the first three with a 1 x 1 kernel and no padding.

    `scaled`: x becomes max(x * scale + shift, 0), with scale and shift [c] in FP16 (one group only). `gated`: x becomes
    act(x * gate), where the gate [n,c,1,1] is the convolution's last input, and `act` is in GATED_ACTS. `normalized`: x becomes
    (x - mean) / sqrt(variance + epsilon), with mean and variance of each pixel's channels (one group only). `border`: the value
    of the padding (one group only).
    """

    scaled: bool = False
    gated: bool = False
    act: Activation = NONE
    normalized: bool = False
    epsilon: float = 0.0
    border: float = 0.0

    def __post_init__(self) -> None:
        several = len(self.needs) > 1
        if several or (self.act != NONE and not self.gated) or self.act.name not in GATED_ACTS:
            raise ValueError(f"conv: expected an input with scale and shift, or a gate and one of {GATED_ACTS}, got {self}")
        if not self.epsilon + abs(self.border) < float("inf") or self.epsilon < 0 or (self.epsilon and not self.normalized):
            raise ValueError(f"conv: expected a finite border, and a norm's epsilon, finite and not negative, got {self}")

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """Returns x [n,c,h,w] with each pixel's channels normalized to mean 0 and variance 1, as FP32."""
        x = np.asarray(x, np.float64)
        y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + self.epsilon)
        return np.asarray(y, np.float32)

    @property
    def needs(self) -> frozenset[Feature]:
        found = {
            Feature.SCALED_INPUT: self.scaled,
            Feature.GATED_INPUT: self.gated,
            Feature.NORMALIZED_INPUT: self.normalized,
            Feature.BORDER: bool(self.border),
        }
        return frozenset(feature for feature, needed in found.items() if needed)

    @property
    def values(self) -> dict[str, int]:
        """The kernels' compile-time values (include/conv.cuh) for this step: PRO, NORM, BORDER, or GATE (1: product, 2: its
        ReLU, 3: its clip)."""
        gate = 1 + GATED_ACTS.index(self.act.name) if self.gated else 0
        found = {"PRO": self.scaled, "NORM": self.normalized, "BORDER": bool(self.border), "GATE": gate}
        return {name: int(value) for name, value in found.items() if value}
