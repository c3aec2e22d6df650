"""What a convolution's kernel does to its input before it multiplies."""

from dataclasses import dataclass

import numpy as np

from cuda_kernels.hashed import Hashed
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.protocol import Feature

GATED_ACTS = ("none", "relu", "clip")  # what may stand between a gate and the convolution that reads the product


@dataclass(frozen=True, slots=True)
class Prologue(Hashed):
    """What a convolution does to its input first, of 1 x 1 kernels without padding only.

    `scaled`: x is max(x * scale + shift, 0), with scale and shift [c] FP16 values, where there is one group. `gated`: x is
    act(x * gate), with the convolution's last input [n,c,1,1] as gate; `act`: one of GATED_ACTS. `normalized`: x is
    (x - mean) / sqrt(variance + epsilon), mean and variance of a pixel's channels, where there is one group.
    """

    scaled: bool = False
    gated: bool = False
    act: Activation = NONE
    normalized: bool = False
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        several = self.scaled + self.gated + self.normalized > 1
        if several or (self.act != NONE and not self.gated) or self.act.name not in GATED_ACTS:
            raise ValueError(f"conv: expected an input with scale and shift, or a gate and one of {GATED_ACTS}, got {self}")
        if not 0 <= self.epsilon < float("inf") or (self.epsilon and not self.normalized):
            raise ValueError(f"conv: expected a norm's epsilon, finite and not negative, got {self}")

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """[n,c,h,w], each pixel less its mean and over its standard deviation, FP32."""
        x = np.asarray(x, np.float64)
        y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + self.epsilon)
        return np.asarray(y, np.float32)

    @property
    def needs(self) -> frozenset[Feature]:
        found = {
            Feature.SCALED_INPUT: self.scaled,
            Feature.GATED_INPUT: self.gated,
            Feature.NORMALIZED_INPUT: self.normalized,
        }
        return frozenset(feature for feature, needed in found.items() if needed)

    @property
    def values(self) -> dict[str, int]:
        """What the kernels are compiled with (include/conv.cuh): PRO, or GATE, 1 a product, 2 ReLU of it, 3 a clip of it,
        or NORM."""
        gate = {"GATE": 1 + GATED_ACTS.index(self.act.name)} if self.gated else {}
        return {"PRO": 1} if self.scaled else {"NORM": 1} if self.normalized else gate
