"""A 2:4-sparse convolution without an engine: pruned by magnitude, run on CuPy arrays where there is a GPU, else emulated.

    python examples/sparse_conv.py

It needs CuPy and a GPU, or a C++17 compiler for the emulator's first run.
"""

import numpy as np

from cuda_kernels.device import has_gpu
from gpu_runtime.ops import SparseConv2d

rng = np.random.default_rng(0)
weight = rng.standard_normal((128, 128, 3, 3)).astype(np.float32) / 34
conv = SparseConv2d.from_dense(weight, padding=1, activation="relu", prune="magnitude")

x = rng.standard_normal((8, 28, 28, 128)).astype(np.float16)  # [N, H, W, C]
if has_gpu():
    import cupy

    x = cupy.asarray(x)
y = conv(x.transpose(0, 3, 1, 2))  # channels-last [N, C, H, W]

row = conv.why(x.transpose(0, 3, 1, 2).shape)
print(f"y: {y.shape}, {type(y).__module__}; the layer runs {row.verdict} ({row.reason}): {conv.tactic((8, 128, 28, 28))}")
if row.best_dense and row.best_sparse:
    print(f"best dense kernel {row.best_dense.us:.2f} us, best 2:4 kernel {row.best_sparse.us:.2f} us")
