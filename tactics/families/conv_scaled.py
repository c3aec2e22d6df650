"""A depthwise or grouped convolution whose output is scaled by squeeze-excite, as two launches: tiles, packing, time.

Separately these would be a convolution, one or two launches of squeeze-excite, and a multiplication, or a gate in the next
convolution. Here the first launch is the convolution, whose blocks also sum the values that they store and multiply the sums by
the weights of squeeze-excite's first layer (include/hidden_share.cuh). Each block of the second launch computes the scale of
some channels and multiplies the convolution's output by it in place (include/squeeze_excite_scaled.cuh).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import numpy as np

from cuda_kernels.device import Device
from cuda_kernels.named_devices import MAX_GRID
from tactics.families import conv_depthwise, conv_grouped, squeeze_excite
from tactics.problems.epilogue import RELU, Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem, PoolProblem, ScaledConvProblem, SqueezeExciteProblem
from tactics.problems.prologue import GATED_ACTS
from tactics.problems.protocol import Feature
from tactics.reason import Candidates, no_room, unsupported
from tactics.roofline import Counts, Extra
from tactics.step import Launch, Share, floats, ints, linear
from tactics.tactic import Only, Tactic, Tile, on_kernel

# Kernel -> the family of its convolution.
AHEAD: Mapping[str, ModuleType] = {"depthwise_scaled": conv_depthwise, "grouped_scaled": conv_grouped}
LINE, WIDEST = 64, 128  # channels to which a row of the first layer's weights is padded; the most channels of a block
MOST_PIXELS = 64 * MAX_GRID[2]  # pixels of the output: a block of the second launch has 64 or more
ROWS_AT_ONCE = 4  # rows of weights that a thread has in flight in one turn, as in hidden_share.cuh
# Instructions that the share adds to a warp, in sm_90a's machine code.
EARLY, ONCE = 65, 235  # before the outputs (hidden if launches begin early); after them, with a first turn of ROWS_AT_ONCE rows
OF_STEP, OF_TURN = 28, 225  # for each row that the first turn lacks (fewer); for each further turn
WAIT_CLK, TURN_CLK = 250, 300  # clocks of two barriers, shared memory and shuffles; clocks of each further turn
_EXCITE = SqueezeExciteProblem(
    PoolProblem(2, 40, 9, 11, "avg", 9, 11, (1, 1)),
    ConvProblem(2, 40, 1, 1, 12, 1, 1, epilogue=RELU),
    ConvProblem(2, 12, 1, 1, 40, 1, 1, epilogue=Epilogue(bias=True, act=Activation("sigmoid"))),
)
_CONV = ConvProblem(2, 40, 18, 21, 40, 3, 3, (2, 2), (1, 1, 1, 1), groups=40)
CASES = {
    "depthwise_scaled": (ScaledConvProblem(_CONV, _EXCITE),),
    "grouped_scaled": (ScaledConvProblem(replace(_CONV, groups=5), _EXCITE),),
}


def reason_against(conv: ConvProblem, excite: SqueezeExciteProblem, act: Activation) -> str:
    """Returns why act(conv(x) * excite(conv(x))) cannot be one tactic, or ""."""
    if conv.groups == 1 or (conv.groups == conv.c != conv.k):
        return "no grouped convolution, or several outputs of each input channel"
    if conv.needs - {Feature.LAST_ACTIVATION}:
        return "the convolution has a residual, a scale behind its activation, or a pool"
    if act.name not in GATED_ACTS:
        return f"{act} behind the multiplication"
    if conv.p * conv.q > MOST_PIXELS:
        return f"more than {MOST_PIXELS} pixels of an image"
    return squeeze_excite.reason_against(excite.average, excite.first, excite.second)


def candidates(p: ScaledConvProblem, device: Device, only: Only = None) -> Candidates:
    """Yields (tactic or kernel, reason against it or None), for each tactic of the convolution by itself. `only`: restricts the
    tiles.
    """
    kernel = "depthwise_scaled" if p.first.groups == p.first.c else "grouped_scaled"
    if why := reason_against(p.first, p.second, p.act):
        yield kernel, unsupported(why)
        return
    for tactic, reason in AHEAD[kernel].candidates(p.first, device, *filter(None, [only])):
        if isinstance(tactic, Tactic):
            tactic = on_kernel(kernel, tactic)
            if linear(tactic.ins[0]) or linear(tactic.out):
                reason = unsupported("only whole vectors of 8 channels are read and written")
            elif not reason:
                own = AHEAD[kernel].shared_bytes(p.first, _conv(tactic))
                reason = unsupported(no_room(own + _more_bytes(p, tactic), device))
        yield tactic, reason


def _conv(tactic: Tactic) -> Tactic:
    """Returns the tactic of the convolution by itself."""
    return on_kernel(AHEAD[tactic.kernel].__name__.rpartition(".")[2], tactic)


def launches(p: ScaledConvProblem, tactic: Tactic) -> tuple[Launch, ...]:
    family, (_, k, h, w) = AHEAD[tactic.kernel], p.first.out_shape
    blocks = family.blocks_of(p.first, _conv(tactic))
    excite = squeeze_excite.scale_launch(p.second, tactic.out, blocks, p.act)
    args = ints(hidden=p.second.first.k, pitch=_pitch(k)) | floats(per_pixel=1 / (h * w))
    args |= {"w": ("weights", "w2"), "partial": ("workspace", 0)}
    share = Share(tuple(args.items()), _held_bytes(p, tactic), excite.workspace)
    return (*family.launches(p.first, _conv(tactic), share=share), excite)


def _block(tactic: Tactic) -> tuple[int, int, int]:
    """Returns, for the first launch, (threads of a block, channels of a block, channels of a thread)."""
    if isinstance(tactic.tile, Tile):
        return tactic.tile.threads, tactic.tile.m, 8
    conv = _conv(tactic)
    return conv_depthwise.threads(conv), conv.patch.channels, conv_depthwise.vector(conv)


def _held_bytes(p: ScaledConvProblem, tactic: Tactic) -> int:
    """Returns the bytes of the first layer's weights that a block copies to shared memory before it needs them.

    They are the first vectors of 16 bytes that its threads multiply, at most ROWS_AT_ONCE for each thread.
    """
    threads, channels, _ = _block(tactic)
    return min(p.second.first.k * channels // 8, ROWS_AT_ONCE * threads) * 16


def _more_bytes(p: ScaledConvProblem, tactic: Tactic) -> int:
    """Returns the bytes of shared memory that a block needs in addition to the convolution's: _held_bytes, and all threads'
    sums.
    """
    threads, _, vector = _block(tactic)
    return 4 * threads * vector + _held_bytes(p, tactic)


def _pitch(channels: int) -> int:
    return -(-channels // LINE) * LINE


def pack(p: ScaledConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the convolution's weights, packed as for its own kernel, and squeeze-excite's, their names with a 2 appended.

    "w2", of the first layer, is FP16 [hidden][channels padded to 64] and WIDEST zeros, which a block of more channels may read;
    the others are packed as for squeeze_excite.
    """
    names = {"w": "w2", "b": "b2", "w2": "w22", "b2": "b22"}
    excite = squeeze_excite.pack(p.second, _excite(tactic), {n: weights[two] for n, two in names.items() if two in weights})
    mid, k = p.second.first.k, p.first.k
    first = np.zeros(mid * _pitch(k) + WIDEST, np.float16)
    first[:-WIDEST].reshape(mid, _pitch(k))[:, :k] = weights["w2"].reshape(mid, k)
    packed = AHEAD[tactic.kernel].pack(p.first, _conv(tactic), weights)
    return packed | {names[name]: array for name, array in excite.items()} | {"w2": first}


def _excite(tactic: Tactic) -> Tactic:
    return replace(tactic, kernel="squeeze_excite", ins=(tactic.out,))


def section_bytes(p: ScaledConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns section name -> bytes of the sections that `pack` makes, computed from sizes alone."""
    excite = squeeze_excite.section_bytes(p.second, _excite(tactic))
    own = AHEAD[tactic.kernel].section_bytes(p.first, _conv(tactic))
    first = 2 * (p.second.first.k * _pitch(p.first.k) + WIDEST)
    return own | {"w2": first} | {f"{name}2": excite[name] for name in ("b", "w2", "b2")}


def counts(p: ScaledConvProblem, tactic: Tactic, device: Device) -> list[Counts]:
    """Returns counts of both launches, which run one after the other; neither finds its code in the instruction cache."""
    conv, family = _conv(tactic), AHEAD[tactic.kernel]
    threads, channels, _ = _block(tactic)
    outputs = channels * (tactic.tile.n if isinstance(tactic.tile, Tile) else tactic.patch.h * tactic.patch.w)
    steps = -(-p.second.first.k // (threads // (channels // 8)))
    turns = -(-steps // ROWS_AT_ONCE)
    once = ONCE - OF_STEP * max(0, ROWS_AT_ONCE - steps) + (0 if device.dependent_launch else EARLY)
    clk = WAIT_CLK + TURN_CLK * (turns - 1) + squeeze_excite.COLD_CLK.get(device.sm, 0)
    more = Extra(2 * outputs / threads + once + OF_TURN * (turns - 1), clk, _more_bytes(p, tactic))
    first = replace(family.counts(p.first, conv, device, more), kernel=conv.kernel)
    return [first, squeeze_excite.scaled_counts(p.second, tactic.out, family.blocks_of(p.first, conv), device)]
