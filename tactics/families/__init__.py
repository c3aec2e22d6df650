"""Kernel families: the methods by which problems are computed, a file each. Read table.py first, then conv_gemm.py.

Enters: a problem and a device, or a problem and a tactic.

Leaves: candidates with a reason for each rejection; launches; packed weights; counts of bytes and clocks.

conv_gemm: implicit GEMM, dense and 2:4; strips, a folder: pixels in shared memory once for all taps; conv_grouped, conv_stem,
conv_depthwise, conv_fp32; conv_transpose: one convolution per phase; back_to_back, squeeze_excite, conv_scaled; bandwidth, a
folder: movement, gather, pointwise, reduce; matmul, array_function; attention, a folder; table lists them.
"""
