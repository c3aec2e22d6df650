"""2:4-sparse operators without an engine, on the caller's arrays and stream: SparseConv2d, SparseLinear, sparse_conv2d."""

from cuda_kernels import extras

with extras.named():
    from gpu_runtime.ops.conv import SparseConv2d, SparseLinear, sparse_conv2d

__all__ = ["SparseConv2d", "SparseLinear", "sparse_conv2d"]
