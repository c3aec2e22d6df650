"""Offers transposed convolutions with a square stride b as one convolution with depth-to-space: one launch, not one per phase.

Phase i of the output's rows takes the taps t with (i + pad - t) % b == 0, at the input's row (i + pad - t) / b further on. The
form's window spans the rows of all phases; where a phase has no tap, the weight is zero. So 2 x 2 taps at stride 2 are as many
products as before, 3 x 3 are 16 instead of 9 for each input pixel: that takes longer where images are large, less time where
launches are short. The choice is an option of a group. An output that is no multiple of b is cut from a larger one.

Along one axis, taps 0 1 2 at stride 2, pad 1: phase 0 takes tap 1 at pixel 0; phase 1 tap 2 at pixel 0 and tap 0 at pixel 1.
The form has the weights [t1 0] for channel 0 and [t2 t0] for channel 1, and no padding in front.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from gpu_runtime.network import ONE, Network, Op, Options, computes
from gpu_runtime.rewrites.drafts import has_own_type
from tactics.planner.grouping import grouped
from tactics.problems.epilogue import VECTORS
from tactics.problems.problem import ConvProblem, ConvTransposeProblem, MoveProblem

MOST_ZEROS = 4  # the most products, as a multiple of the model's: more would outweigh the saved launches


def offer(network: Network) -> Network:
    """Returns the network with the convolutions as options."""
    options = Options(network)
    layers = grouped((op.layer, op) for op in network.ops if computes(op, ConvTransposeProblem))
    for layer, forms in layers.items():  # the alternatives of one layer: alone, or with the Add behind it
        if all(_fits(op.problem) and not has_own_type(network, op) for op in forms):
            options.either(f"phases of {layer}", forms, [(op, new) for op in forms for new in _form(op)], ONE)
    return options.network()


def _fits(p: ConvTransposeProblem) -> bool:
    """Whether the form exists and has no more products than MOST_GROWTH allows."""
    b = p.stride[0]
    if p.groups > 1 or p.dilation != (1, 1) or p.stride != (b, b) or not 1 < b <= min(p.out):
        return False
    whole = p.out[0] % b == p.out[1] % b == 0  # a residual has the size of the stored output
    window = len(_taps(p, 0)[0]) * len(_taps(p, 1)[0])
    return (whole or not p.epilogue.residual) and window * b**2 <= MOST_ZEROS * p.r * p.s and min(_padding(p)) >= 0


def _taps(p: ConvTransposeProblem, axis: int) -> tuple[np.ndarray, int]:
    """Returns (taps, ahead) of one axis, on which the outputs of b = stride neighbours are b phases of one convolution.

    taps [places, b]: the tap that multiplies the input pixel at that place of the convolution's window, for each phase; -1
    for none. `ahead`: how many places of the window lie in front of the output's own pixel.
    """
    b, pad, taps = p.stride[axis], p.pad[axis], np.arange((p.r, p.s)[axis])
    phase = (taps - pad) % b
    pixel = (phase + pad - taps) // b
    found = np.full((pixel.max() - pixel.min() + 1, b), -1)
    found[pixel - pixel.min(), phase] = taps
    return found, int(-pixel.min())


def _padding(p: ConvTransposeProblem) -> tuple[int, int, int, int]:
    """Returns the padding of the form: top, left, bottom, right."""
    (rows, top), (columns, left) = _taps(p, 0), _taps(p, 1)
    high, wide = (-(-o // p.stride[0]) for o in p.out)
    return top, left, high - p.h - top + len(rows) - 1, wide - p.w - left + len(columns) - 1


def _form(op: Op[Any]) -> tuple[Op[Any], ...]:
    """Returns the convolution with depth-to-space and, if its output is larger than the model's, the op that cuts it."""
    p: ConvTransposeProblem = op.problem
    b = p.stride[0]
    rows, columns = _taps(p, 0)[0], _taps(p, 1)[0]
    padded = np.pad(op.weights["w"], ((0, 0), (0, 0), (0, 1), (0, 1)))  # index -1 selects the zeros behind the last tap
    w = padded[:, :, rows][..., columns]  # [k, c, places, b, places, b]
    w = np.ascontiguousarray(w.transpose(0, 3, 5, 1, 2, 4)).reshape(p.k * b * b, p.c, len(rows), len(columns))
    ends = replace(p.epilogue, d2s=b, d2s_mode="crd")
    sizes = p.n, p.c, p.h, p.w, p.k * b * b, len(rows), len(columns)
    problem = ConvProblem(*sizes, pad=_padding(p), sparse24=p.sparse24, epilogue=ends)
    vectors = {name: np.repeat(v, b * b) for name, v in op.weights.items() if name in VECTORS}
    conv = replace(op, name=f"{op.name} (one convolution)", problem=problem, weights={**op.weights, **vectors, "w": w})
    if problem.out_shape == p.out_shape:
        return (conv,)
    whole = f"{op.output} (whole)"
    cut = MoveProblem(*problem.out_shape, "window", (p.k, *p.out))
    return replace(conv, output=whole), Op(f"{op.name} (cut)", cut, (whole,), op.output)
