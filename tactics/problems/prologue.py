"""What a convolution's kernel does to its input before it multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.protocol import Feature

GATED_ACTS = ("none", "relu", "clip")  # what may stand between a gate and the convolution that reads the product


@dataclass(frozen=True, slots=True)
class Prologue:
    """What a convolution does to its input first, of 1 x 1 kernels without padding only.

    `scaled`: x is max(x * scale + shift, 0), with scale and shift [c] FP16 values, where there is one group. `gated`: x is
    act(x * gate), with the convolution's last input [n,c,1,1] as gate; `act`: one of GATED_ACTS.
    """

    scaled: bool = False
    gated: bool = False
    act: Activation = NONE

    def __post_init__(self) -> None:
        if (self.scaled and self.gated) or (self.act != NONE and not self.gated) or self.act.name not in GATED_ACTS:
            raise ValueError(f"conv: expected an input with scale and shift, or a gate and one of {GATED_ACTS}, got {self}")

    @property
    def needs(self) -> frozenset[Feature]:
        found = {Feature.SCALED_INPUT: self.scaled, Feature.GATED_INPUT: self.gated}
        return frozenset(feature for feature, needed in found.items() if needed)

    @property
    def values(self) -> dict[str, int]:
        """What the kernels are compiled with (include/conv.cuh): PRO, or GATE, 1 a product, 2 ReLU of it, 3 a clip of it."""
        gate = {"GATE": 1 + GATED_ACTS.index(self.act.name)} if self.gated else {}
        return {"PRO": 1} if self.scaled else gate

    @property
    def instructions(self) -> int:
        """Of two elements."""
        return 2 if self.scaled else sum(self.values.values())
