"""The sums of a 2-D convolution in NumPy: windows gathered as the columns of a matrix (im2col), then products of matrices."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

MOST_GATHERED = 1 << 21  # elements of the columns at a time: 8 MB

Pair = tuple[int, int]


def window_sums(x: np.ndarray, w: np.ndarray, out: Pair, stride: Pair, dilation: Pair) -> np.ndarray:
    """FP32 arrays: x [n,c,h,w] with its padding and w [k,c/groups,r,s] in, [n,k,*out] out; pixel i reads from i*stride on."""
    (n, c), (k, cg, r, s), (p, q) = x.shape[:2], w.shape, out
    groups = c // cg
    reach = (p - 1) * stride[0] + (r - 1) * dilation[0] + 1, (q - 1) * stride[1] + (s - 1) * dilation[1] + 1
    if reach[0] > x.shape[2] or reach[1] > x.shape[3]:
        raise ValueError(f"window_sums: the windows reach {reach}, the padded input has {x.shape[2:]}")
    along_n, along_c, along_h, along_w = x.strides
    taps = (along_h * dilation[0], along_w * dilation[1], along_h * stride[0], along_w * stride[1])
    windows = as_strided(x, (n, groups, cg, r, s, p, q), (along_n, along_c * cg, along_c, *taps), writeable=False)
    y = np.zeros((n, groups, k // groups, p, q), np.float32)
    if cg == 1:  # one product for each tap, of whole images: nothing to gather
        by_tap = w.reshape(1, groups, k // groups, r, s, 1, 1)
        for i, j in np.ndindex(r, s):
            y += by_tap[:, :, :, i, j] * windows[:, :, :, i, j]
        return y.reshape(n, k, p, q)
    matrix = w.reshape(groups, k // groups, cg * r * s)
    rows = max(1, MOST_GATHERED // (groups * cg * r * s * q))
    for image in range(n):
        for top in range(0, p, rows):
            columns = windows[image, ..., top : top + rows, :].reshape(groups, cg * r * s, -1)
            y[image, :, :, top : top + rows] = (matrix @ columns).reshape(groups, k // groups, -1, q)
    return y.reshape(n, k, p, q)
