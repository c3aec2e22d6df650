"""As much of PyTorch's interface as rows `peers` and `operators` of `make gpu` call, on NumPy arrays: a rehearsal without
PyTorch and a GPU.

Nothing here takes time on a GPU, so its times mean nothing. Functions have PyTorch's parameters and no others, so a call that
PyTorch would refuse fails here too.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

__version__ = "0.0 (rehearsal)"
version = SimpleNamespace(cuda="13.0")
backends = SimpleNamespace(cudnn=SimpleNamespace(benchmark=False, version=lambda: 0))
float16, bfloat16, channels_last = np.float16, np.float32, "channels_last"
int8, int32 = np.int8, np.int32


class Tensor:
    def __init__(self, a):
        self.a = np.asarray(a)

    def cuda(self):
        return self

    def contiguous(self, memory_format=None):
        return self

    def clone(self):
        return Tensor(self.a.copy())

    def copy_(self, other):
        self.a[...] = other.a
        return self

    def float(self):
        return Tensor(self.a.astype(np.float32))

    def numel(self):
        return self.a.size

    def t(self):
        return Tensor(self.a.T)

    def view(self, *shape):
        return Tensor(self.a.reshape(shape))

    def abs(self):
        return Tensor(np.abs(self.a))

    def max(self):
        return Tensor(self.a.max())

    def min(self):
        return Tensor(self.a.min())

    def topk(self, k, dim):
        return SimpleNamespace(indices=Tensor(np.argsort(-self.a, axis=dim).take(range(k), dim)))

    def gather(self, dim, index):
        return Tensor(np.take_along_axis(self.a, index.a, dim))

    def scatter_(self, dim, index, src):
        np.put_along_axis(self.a, index.a, src.a, dim)
        return self

    def __getitem__(self, key):
        return Tensor(self.a[key])

    def __sub__(self, other):
        return Tensor(self.a - other.a)

    def __truediv__(self, other):
        return Tensor(self.a / other.a)

    def __matmul__(self, other):
        return Tensor(self.a @ other.a)

    def __float__(self):
        return float(self.a)


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 0.01


class CUDAGraph:
    def replay(self):
        pass


def from_numpy(a):
    return Tensor(a)


def from_dlpack(array):
    return Tensor(array.get())


def manual_seed(seed):
    np.random.seed(seed)


def randn(*shape, device=None, dtype=None):
    return Tensor(np.random.standard_normal(shape).astype(dtype))


def randint(low, high, size, *, device=None, dtype=None):
    return Tensor(np.random.randint(low, high, size, dtype))


def empty(*shape, device=None, dtype=None):
    return Tensor(np.empty(shape, dtype))


def zeros_like(x):
    return Tensor(np.zeros_like(x.a))


def relu(x):
    return Tensor(np.maximum(x.a, 0))


def matmul(input, other, *, out):
    """Returns `out` unchanged: products of FP16 on a CPU would keep the stopwatch waiting."""
    assert input.a.shape[1] == other.a.shape[0] and out.a.shape == (input.a.shape[0], other.a.shape[1])
    return out


def _int_mm(self, mat2, *, out):
    assert (self.a.dtype, mat2.a.dtype, out.a.dtype) == (int8, int8, int32) and mat2.a.flags.f_contiguous
    return matmul(self, mat2, out=out)


def mm(x, y):
    return Tensor(x.a @ y.a)


def _conv(x, w, bias, stride, padding, dilation, groups):
    rows, columns = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.a.shape[2:], w.a.shape[2:], stride, padding, dilation, strict=True)
    )
    return Tensor(np.zeros((x.a.shape[0], w.a.shape[0], rows, columns), np.float32))


def cudnn_convolution_relu(self, weight, bias, stride, padding, dilation, groups):
    return _conv(self, weight, bias, stride, padding, dilation, groups)


nn = SimpleNamespace(
    functional=SimpleNamespace(
        conv2d=lambda x, w, bias, stride, padding, dilation, groups: _conv(x, w, bias, stride, padding, dilation, groups),
        linear=lambda x, w: Tensor(np.zeros((len(x.a), len(w.a)), np.float32)),
    )
)
sparse = SimpleNamespace(to_sparse_semi_structured=lambda x: x)
cuda = SimpleNamespace(
    ExternalStream=lambda pointer: pointer,
    stream=lambda stream: nullcontext(),
    synchronize=lambda: None,
    graph=lambda graph, stream=None: nullcontext(),
    CUDAGraph=CUDAGraph,
    Event=Event,
    _sleep=lambda clocks: None,
)
