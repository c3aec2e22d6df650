"""Why a tactic cannot run a problem, or needs no time: a code, which is what code asks for, and the facts of its sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cuda_kernels.device import Device
from tactics.tactic import Tactic

UNSUPPORTED = "unsupported"  # what a kernel says of a tactic by itself: the sentence is all
SENTENCES = {
    UNSUPPORTED: "{why}",
    # why no sparse tactic may run a convolution's weights
    "grouped_conv": "a group has {channels} input channels, not a multiple of 4",
    "channels_not_multiple_of_4": "C = {channels}",
    "pattern_violation": "the weights are not 2:4 along the input channels",
    # why a device is denied a tactic
    "failed_here": "gpu-runtime doctor saw {tested} fail on this GPU: {why}",
    # why a tactic that could run is not timed
    "workspace": "needs {needed} bytes of workspace, --memPoolSize allows {allowed}",
    "sparsity_disabled": "sparse, but --sparsity=disable was given",
    "same_addresses": "every element has the same address as in {formats}, so the launch reads and writes the same bytes",
    "formats_at_the_edge": "the network's inputs or outputs were requested in other formats",
}


def no_room(smem: int, device: Device) -> str:
    """Why a block cannot have so many bytes of dynamic shared memory, or an empty string."""
    if smem <= device.smem_per_block:
        return ""
    return f"needs {smem} bytes of shared memory per block, {device.sm} gives {device.smem_per_block}"


@dataclass(frozen=True, slots=True)
class Reason:
    """`facts`: (name, value) for each name in the code's sentence."""

    code: str
    facts: tuple[tuple[str, str | int], ...] = ()

    @staticmethod
    def of(code: str, **facts: str | int) -> Reason:
        """The reason of that code. Raises KeyError where there is no such code, or its sentence needs another fact.

        >>> str(Reason.of("grouped_conv", channels=3))
        'grouped_conv: a group has 3 input channels, not a multiple of 4'
        """
        SENTENCES[code].format(**facts)
        return Reason(code, tuple(facts.items()))

    @property
    def sentence(self) -> str:
        return SENTENCES[self.code].format(**dict(self.facts))

    def __str__(self) -> str:
        return self.sentence if self.code == UNSUPPORTED else f"{self.code}: {self.sentence}"


Candidates = Iterator[tuple[Tactic | str, str | Reason]]  # (tactic, or a kernel or family; the reason against it or "")
