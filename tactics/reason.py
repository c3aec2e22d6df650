"""Reasons: why a tactic cannot run a problem or needs no time, and why a layer runs sparse or dense, as code and sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from cuda_kernels.device import Device
from tactics.codec import Text, one_of
from tactics.tactic import Tactic

UNSUPPORTED = "unsupported"  # a kernel's own sentence about a tactic, without a code
OF_LAYERS: dict[str, str | None] = {  # the codes of a layer; those without a sentence need none, or one of their own
    **dict.fromkeys(
        "picked forced dense_faster reformat_outweighs one_launch uncertain within_noise in_network not_timed".split()
    ),
    "no_sparse_tactic": None,
    "other_batches": None,
    # why no sparse tactic may run a convolution's weights
    "pattern_violation": "the weights are not 2:4 along the input channels",
    "channels_not_multiple_of_4": "C = {channels}",
    "grouped_conv": "a group has {channels} input channels, not a multiple of 4",
}
SENTENCES = OF_LAYERS | {
    UNSUPPORTED: "{why}",
    # why a device is denied a tactic
    "failed_here": "gpu-runtime doctor saw {tested} fail on this GPU: {why}",
    # why a tactic that could run is not timed
    "workspace": "needs {needed} bytes of workspace, --memPoolSize allows {allowed}",
    "sparsity_disabled": "sparse, but --sparsity=disable was given",
    "same_addresses": "every element has the same address as in {formats}, so the launch reads and writes the same bytes",
    "formats_at_the_edge": "the network's inputs or outputs were requested in other formats",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A `code`, by which programs decide (in a file a layer's code), and its sentence."""

    code: Annotated[str, one_of(tuple(OF_LAYERS))]
    sentence: Text | None = None

    @staticmethod
    def of(code: str, **facts: str | int) -> Reason:
        """Makes the reason of a code, with the facts of its sentence. Raises KeyError for an unknown code or a missing fact.

        >>> str(Reason.of("grouped_conv", channels=3))
        'grouped_conv: a group has 3 input channels, not a multiple of 4'
        """
        sentence = SENTENCES[code]
        return Reason(code, sentence and sentence.format(**facts))

    def __str__(self) -> str:
        return ": ".join(filter(None, ("" if self.code == UNSUPPORTED else self.code, self.sentence)))


@lru_cache(maxsize=4096)
def unsupported(why: str) -> Reason | None:
    """The reason of a kernel that cannot run a problem because of `why`; None where `why` is empty."""
    return Reason(UNSUPPORTED, why) if why else None


def no_room(smem: int, device: Device) -> str:
    """Why a block cannot have `smem` bytes of dynamic shared memory, or ""."""
    if smem <= device.smem_per_block:
        return ""
    return f"needs {smem} bytes of shared memory per block, {device.sm} gives {device.smem_per_block}"


Candidates = Iterator[tuple[Tactic | str, Reason | None]]  # (tactic, or a kernel or family; the reason against it)
