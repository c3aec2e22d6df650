"""Adds every way to run a network that a plan may choose: all rewrites, in their order."""

from gpu_runtime.network import Network, named_shortly
from gpu_runtime.padded_channels import padding
from gpu_runtime.rewrites import (
    attention,
    back_to_back,
    blocks,
    chained,
    channels,
    integers,
    norms,
    pieces,
    shared_concats,
    siblings,
    squeeze_excite,
    transposed,
    upsampling,
    windows,
)


def alternatives(network: Network) -> Network:
    """Returns the network with the options of all rewrites."""
    for offer in (
        integers.summed,
        attention.offer,
        blocks.offer,
        windows.offer,
        transposed.offer,
        channels.offer,
        upsampling.offer,
        shared_concats.share,
        siblings.merge,
        pieces.offer,
        squeeze_excite.offer,
        padding.offer,
        back_to_back.offer,
        integers.offer,
        squeeze_excite.gates,
        squeeze_excite.scaled,
        chained.offer,
        norms.offer,
        integers.mark,
    ):
        network = offer(network)
    return named_shortly(network)
