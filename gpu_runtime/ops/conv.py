"""2:4-sparse convolutions and linear layers as operators. Each size of input gets a plan at its first call, as a layer of an
engine would: the fastest tactic, sparse or dense, by predictions until `tune` has timed them, and the reason for it.

Arrays are FP16, [N, C, H, W] channels-last, so that a pixel's channels lie together: PyTorch's torch.channels_last, in CuPy and
NumPy `nhwc.transpose(0, 3, 1, 2)`. On a GPU they are read and written in place, on the caller's stream, in CUDA graphs too.
Without a GPU the emulator runs the same kernels on NumPy arrays.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np

from cuda_kernels import device as devices
from cuda_kernels import files, sparse24
from cuda_kernels.device import Device
from cuda_kernels.launch import Cuda
from gpu_runtime.building.build import build
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.engine import Engine
from gpu_runtime.errors import bounded
from gpu_runtime.ops.direct import Direct
from gpu_runtime.ops.graph import ACTIVATIONS, Geometry, graph
from gpu_runtime.runtime import arrays
from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.findings import SparsityRow
from gpu_runtime.text import dims, suggest
from tactics.measure.timing import NotTimed

Shape4 = tuple[int, int, int, int]
HALF = np.dtype(np.float16)
FORMAT = "fp16:hwc8"
CHANNELS, ALIGN = 8, 16  # of a pixel: kernels load 8 channels, 16 bytes, at once
SIZES = (("stride", (1, 2), 1), ("padding", (1, 2, 4), 0), ("dilation", (1, 2), 1))  # how many numbers, the least and default
HERE = "use an operator for the first time inside cupy.cuda.Device({})"
CURE = "make it so with .to(memory_format=torch.channels_last), in CuPy or NumPy from [N, H, W, C] with .transpose(0, 3, 1, 2)"


class Options(TypedDict, total=False):
    """The options of `from_dense`.

    `padding`: one number, (rows, columns), or (top, left, bottom, right); `activation`: a name of ACTIVATIONS, "" for none;
    `prune`: "refuse" raises an error for weights that are not 2:4, "magnitude" sets the smaller two of each four input
    channels to zero; `force`: "sparse" takes a 2:4 kernel even if a dense one is faster, "" the fastest; `device`: None: the
    GPU at hand, else an emulated H200; a name: that GPU, emulated.
    """

    stride: int | tuple[int, int]
    padding: int | tuple[int, ...]
    dilation: int | tuple[int, int]
    groups: int
    activation: str
    prune: str
    force: str
    device: str | Device | None


class SizePlan(NamedTuple):
    """The plan of one size of input: an engine of one layer, and the way it runs.

    `direct`: on the caller's arrays on a GPU, `context`: in the emulator; the other one is None. `whole`: the plan for more
    images from which this one was made, None if it has its own.
    """

    engine: Engine
    out_shape: Shape4
    direct: Direct | None
    context: Context | None
    whole: SizePlan | None = None


class SparseConv2d:
    """y = activation(conv(x, weight) + bias + residual), made by `from_dense`. Threads may share it. It belongs to the GPU that
    is the current one when it first runs or plans.

    >>> conv = SparseConv2d.from_dense(weight, bias, padding=1, activation="relu", prune="magnitude")
    >>> y = conv(x)
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, geometry: Geometry, options: Options) -> None:
        self.weight, self.bias, self.geometry, self.activation = weight, bias, geometry, options.get("activation", "")
        self._device, self._forced = options.get("device"), bool(options.get("force"))
        self._plans: dict[tuple[tuple[int, ...], bool], SizePlan] = {}
        self._prepared: set[tuple[tuple[int, ...], bool]] = set()  # sizes to whose plans fewer images round up
        self._planning, self._running = threading.RLock(), threading.Lock()  # calls of known sizes do not wait for a build
        self._gpu: Cuda | None = None

    @classmethod
    def from_dense(cls, weight: Any, bias: Any = None, **options: Unpack[Options]) -> SparseConv2d:
        """Makes the operator from weights [K, C / groups, R, S] and a bias [K] or None. `options`: stride, padding, dilation,
        groups, activation, prune, force, device (see Options). Raises ValueError for weights that are not 2:4 along the input
        channels (unless prune="magnitude"), or an option's value."""
        if unknown := [name for name in options if name not in Options.__annotations__]:
            known = [*Options.__annotations__]
            raise TypeError(f"unknown option {unknown[0]!r}, expected some of {', '.join(known)}{suggest(unknown, known)}")
        w, b = _host(weight), None if bias is None else _host(bias)
        groups, act = options.get("groups", 1), options.get("activation", "")
        if w.ndim != 4 or not isinstance(groups, int) or groups < 1 or w.shape[0] % groups:
            raise ValueError(
                f"weight: expected [K, C / groups, R, S] with K a multiple of groups={groups}, got {list(w.shape)}"
            )
        if b is not None and b.shape != w.shape[:1]:
            raise ValueError(f"bias: expected [{w.shape[0]}], got {list(b.shape)}")
        if act not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(map(repr, ACTIVATIONS))}, got {act!r}")
        if (force := options.get("force", "")) not in ("", "sparse"):
            raise ValueError(f"force: expected '' or 'sparse', got {force!r}")
        if isinstance(device := options.get("device"), str):
            devices.named(device)
        if unaligned := [n for n in (w.shape[1] * groups, w.shape[0]) if n % CHANNELS]:
            raise ValueError(f"weight: expected C and K in multiples of {CHANNELS}, got {unaligned[0]}: add channels of zeros")
        stride, padding, dilation = (_numbers(name, dict(options).get(name, least), n, least) for name, n, least in SIZES)
        geometry = Geometry(stride, padding, dilation, groups)
        return cls(_pruned(w, options.get("prune", "refuse")), b, geometry, options)

    def __repr__(self) -> str:
        return f"SparseConv2d(weight={list(self.weight.shape)}, {self.geometry}, activation={self.activation!r})"

    def __call__(self, x: Any, residual: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Computes y [N, K, P, Q]. On a GPU `x`, `residual` and `out` are CuPy arrays, or objects with DLPack or
        __cuda_array_interface__; it queues the launches on `stream` (CuPy's current one by default) and waits for nothing.

        The first call of a size plans and compiles; of a size on a stream it allocates scratch memory. Later calls allocate y
        alone, or nothing where `out` is given, which must not share memory with x or residual.
        """
        if (gpu := self._opened()) is None:
            return self._emulated(x, residual, out)
        with _current(gpu):
            ends = (("x", x), ("residual", residual), ("out", out))
            views = [self._view(gpu, name, a) for name, a in ends if a is not None]
            theirs = next((v.stream for v in views if v.stream is not None), None)  # PyTorch's current one, for its tensors
            handle = _handle(gpu, theirs if stream is None else stream)
            if any(v.foreign for v in views):
                gpu.lead(handle)  # DLPack's producers made the GPU's own stream wait
            *given, y = [v.array for v in views] + ([None] if out is None else [])
            plan = self._ready(given[0].shape, residual is not None, handle)
            y = self._new(gpu, plan.out_shape, handle) if out is None else y
            addresses = [a.data.ptr for a in (*given, y)]
            _check(given, y, plan.out_shape, addresses)
            assert plan.direct is not None
            with self._running:  # threads share the structs of a stream
                plan.direct.run(addresses, handle)
            return y

    # ---- plans

    def prepare(self, shape: Sequence[int], residual: bool = False, stream: Any = None) -> None:
        """Plans and compiles for x of this shape, and allocates for the stream: calls inside a CUDA graph need it. From then on
        fewer images of this size, or fewer rows of a linear layer, run with its kernel and in its scratch memory."""
        key, gpu = (tuple(shape), residual), self._opened()
        with self._planning:
            plan = self._plans.get(key)
            if plan is None or plan.whole is not None:
                self._make(*key)
            self._prepared.add(key)
        with _current(gpu):
            self._ready(*key, 0 if gpu is None else _handle(gpu, stream))

    def tune(self, shape: Sequence[int], residual: bool = False) -> None:
        """Times the tactics for x of this shape on the GPU, as a build does, and takes the fastest from then on; so do other
        operators and engines, by the timing cache. Without a GPU times stay predicted, and a warning says so."""
        if self._opened() is None:
            files.warn("tune: no GPU here to time tactics on, or the operator is for a named one: times stay predicted")
        self._make(tuple(shape), residual, measure=True)
        self._prepared.add((tuple(shape), residual))

    def tactic(self, shape: Sequence[int], residual: bool = False) -> str:
        """Returns the name of the tactic that computes x of this shape; `residual`: with a residual. Plans the size if it is
        new.
        """
        layers = self._plan(tuple(shape), residual).engine.plan.layers
        return next(str(layer.tactic.name) for layer in layers if layer.tactic)

    def why(self, shape: Sequence[int], residual: bool = False) -> SparsityRow:
        """Returns whether x of this shape runs sparse, the reason, and the times of both kinds, as for an engine's layer."""
        return self._plan(tuple(shape), residual).engine.sparsity.rows[0]

    def out_shape(self, shape: Sequence[int]) -> Shape4:
        """Returns y's shape [N, K, P, Q] for x of this shape. Raises ValueError if the operator does not take it."""
        return self.geometry.out_shape(self.weight.shape, shape)

    def _plan(self, shape: tuple[int, ...], residual: bool) -> SizePlan:
        return self._plans.get((shape, residual)) or self._rounded(shape, residual) or self._make(shape, residual)

    def _rounded(self, shape: tuple[int, ...], residual: bool) -> SizePlan | None:
        """Returns a plan for this size made from the prepared plan of the next larger one; None if there is none, or its
        kernel cannot.
        """
        out = self.out_shape(shape)
        n, _, h, w = shape
        of_row = n == h == 1  # as pixels, the rows of a linear layer
        able = [s for s, r in self._prepared if r == residual and (s[1:] == shape[1:] or of_row and s[:3] == shape[:3])]
        if not (larger := [s for s in able if s[0] * s[3] > n * w]):
            return None
        with self._planning:
            whole = self._plans[min(larger), residual]
            if (direct := whole.direct and whole.direct.for_fewer(n, w)) is None:
                return None
            self._plans[shape, residual] = plan = whole._replace(out_shape=out, direct=direct, whole=whole)
        return plan

    def _ready(self, shape: tuple[int, ...], residual: bool, stream: int) -> SizePlan:
        """Returns the plan of a size, ready on the stream: planned, compiled, with scratch memory allocated.

        Raises RuntimeError if it is not ready while the stream is captured into a CUDA graph.
        """
        plan = self._plans.get((shape, residual)) or self._rounded(shape, residual)
        if plan is not None and (plan.direct is None or plan.direct.is_ready(stream)):
            return plan
        if self._gpu is not None and self._gpu.cupy.cuda.runtime.streamIsCapturing(stream):
            raise RuntimeError(
                f"x of {dims(shape)} is new on this stream, which is captured: call prepare({list(shape)}) before"
            )
        with self._planning:
            plan = self._plan(shape, residual)
            if plan.direct is not None and not plan.direct.is_ready(stream):
                plan.direct.ready(stream)
        return plan

    def _make(self, shape: tuple[int, ...], residual: bool, measure: bool = False) -> SizePlan:
        out = self.out_shape(shape)
        stored = {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        model = graph(stored, self.geometry, self.activation, shape, out if residual else ())
        options = BuildOptions(device=self._device, sparsity="enable", input_formats=FORMAT, output_formats=FORMAT)
        with self._planning, _current(gpu := self._opened()):
            engine = _built(model, replace(options, forced=self._forced), measure)
            direct = None if gpu is None else Direct(gpu, engine)
            plan = SizePlan(engine, out, direct, engine.context(device="emulator") if gpu is None else None)
            own = {key: other for key, other in self._plans.items() if other.whole is None}  # the others may be of an old plan
            self._plans = own | {(shape, residual): plan}
        return plan

    def _view(self, gpu: Cuda, name: str, a: Any) -> arrays.Given:
        """Returns a GPU array as CuPy's, in place. Raises ValueError for other arrays. `name`: the argument, for messages."""
        if isinstance(a, gpu.cupy.ndarray) and a.device.id == gpu.number:
            return arrays.Given(a, True)
        if (found := arrays.on_gpu(gpu, name, a, writes=name == "out", cure=HERE)) is None:
            raise ValueError(f"{name}: expected an array on the GPU, got {arrays.kind(a)}: copy it there with cupy.asarray")
        return found

    def _new(self, gpu: Cuda, shape: Shape4, stream: int) -> Any:
        with gpu.current(stream):
            return gpu.cupy.empty(_nhwc(shape), HALF).transpose(0, 3, 1, 2)

    def _opened(self) -> Cuda | None:
        """Returns the GPU at hand; None if the emulator runs the operator, without a GPU or for a named device."""
        if self._gpu is None and self._device is None and devices.has_gpu():
            self._gpu = Cuda(devices.current())
        return self._gpu

    # ---- arrays

    def _emulated(self, x: Any, residual: Any, out: Any) -> np.ndarray:
        given = {name: np.asarray(a) for name, a in (("x", x), ("residual", residual)) if a is not None}
        plan = self._ready(given["x"].shape, "residual" in given, 0)
        y = np.empty(_nhwc(plan.out_shape), HALF).transpose(0, 3, 1, 2) if out is None else out
        _check([*given.values()], y, plan.out_shape, [a.ctypes.data for a in (*given.values(), y)])
        assert plan.context is not None
        with self._running:
            y[...] = plan.context.run(given)["y"]
        return y


class SparseLinear:
    """y = activation(x @ weight.T + bias + residual), for x [..., C] and weight [K, C]; made by `from_dense`.

    It is a 1x1 SparseConv2d, with its options except stride, padding, dilation and groups.
    """

    def __init__(self, conv: SparseConv2d) -> None:
        self.conv = conv

    @classmethod
    def from_dense(cls, weight: Any, bias: Any = None, **options: Unpack[Options]) -> SparseLinear:
        w = _host(weight)
        if w.ndim != 2:
            raise ValueError(f"weight: expected [K, C], got {list(w.shape)}")
        if spatial := [name for name in options if name in ("stride", "padding", "dilation", "groups")]:
            raise TypeError(f"a linear layer has no {spatial[0]}")
        return cls(SparseConv2d.from_dense(w[:, :, None, None], bias, **options))

    def __call__(self, x: Any, residual: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Computes and returns y [..., K] for x [..., C], FP16 arrays with any number of leading axes, as SparseConv2d does.

        `residual` and `out`: arrays of y's shape, or None: no residual, and y in a new array. `stream`: as for SparseConv2d.
        All arrays must be C-contiguous: the channels of one row (one index of the leading axes) lie next to each other, and
        rows one after the other. Raises ValueError for another shape, type or order in memory.
        """
        k, c = self.conv.weight.shape[:2]
        y = self.conv(_image("x", x, c), _image("residual", residual, k), _image("out", out, k), stream)
        return y.transpose(0, 2, 3, 1).reshape(*x.shape[:-1], y.shape[1]) if out is None else out


def sparse_conv2d(x: Any, weight: Any, bias: Any = None, **options: Unpack[Options]) -> Any:
    """Computes one convolution and returns y. Arguments as for SparseConv2d.from_dense; weights are packed at each call, so
    keep a SparseConv2d for more than one.
    """
    return SparseConv2d.from_dense(weight, bias, **options)(x)


def _built(model: Any, options: BuildOptions, measure: bool) -> Engine:
    """Builds the engine by measured times if `measure`; else by those of the timing cache, or by predictions if one is
    missing there.
    """
    make = bounded(build)
    try:
        return make(model, replace(options, only_cached_times=not measure))
    except NotTimed:
        return make(model, replace(options, optimization_level=0))


# ---- arguments


def _current(gpu: Cuda | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that makes the GPU the thread's current one; it does nothing if it is, or for None (the
    emulator).
    """
    if gpu is None or gpu.cupy.cuda.runtime.getDevice() == gpu.number:
        return contextlib.nullcontext()
    return gpu.here()


def _handle(gpu: Cuda, stream: Any) -> int:
    """Returns the CUDA handle of the caller's stream; of CuPy's current stream if `stream` is None."""
    named = None if stream is None else arrays.handle_of(gpu.cupy, stream)
    return int(gpu.cupy.cuda.get_current_stream().ptr) if named is None else named


def _host(a: Any) -> np.ndarray:
    """Returns weights (NumPy's, CuPy's or PyTorch's) as an FP32 array on the host."""
    for copy in ("detach", "cpu", "get"):
        a = getattr(a, copy)() if hasattr(a, copy) else a
    return np.asarray(a, np.float32)


def _numbers(name: str, given: Any, counts: tuple[int, ...], least: int) -> Any:
    """Returns an option as a tuple of whole numbers, as many as the last of `counts`; fewer given ones are repeated.

    `counts`: how many may be given; `least`: the smallest value. Raises ValueError.
    """
    found = (given,) if isinstance(given, int) else tuple(given)
    if len(found) not in counts or any(type(v) is not int or v < least for v in found):
        words = " or ".join(map(str, counts))
        raise ValueError(f"{name}: expected {words} whole numbers, {least} or more, got {given!r}")
    return found * (counts[-1] // len(found))


def _pruned(weight: np.ndarray, how: str) -> np.ndarray:
    if how not in ("refuse", "magnitude"):
        raise ValueError(f"prune: expected 'refuse' or 'magnitude', got {how!r}")
    if weight.shape[1] % 4:
        raise ValueError(f"weight: 2:4 needs input channels in fours in each group, got {weight.shape[1]}")
    if how == "magnitude":
        return sparse24.prune(weight)
    if not sparse24.is_sparse(weight):
        share = float(sparse24.fits(weight).mean())
        raise ValueError(
            f"weight: {100 * share:.1f} % of its groups of 4 input channels have two zeros, expected all: prune and fine-tune "
            "the model (docs/pruning.md), or give prune='magnitude'"
        )
    return weight


def _nhwc(shape: Shape4) -> Shape4:
    n, c, h, w = shape
    return n, h, w, c


def _image(name: str, a: Any, channels: int) -> Any:
    """Views an array [..., channels] as an image [1, channels, 1, rows], each index of the leading axes a pixel; None stays
    None.

    Raises ValueError for another last axis, or an array that is not C-contiguous.
    """
    if a is None:
        return None
    if not a.shape or a.shape[-1] != channels:
        raise ValueError(f"{name}: expected [..., {channels}], got {list(a.shape)}")
    if not a.flags.c_contiguous:
        raise ValueError(f"{name}: expected rows of C channels, one after the other: make it contiguous")
    return a.reshape(1, 1, -1, a.shape[-1]).transpose(0, 3, 1, 2)


def _check(given: Sequence[Any], y: Any, out_shape: Shape4, addresses: Sequence[int]) -> None:
    """Raises ValueError unless arrays are FP16, channels-last, aligned, of the right shapes, and y overlaps no other.

    `given`: x, and the residual if there is one; `out_shape`: of the residual and y; `addresses`: of `given`, then of y.
    """
    shapes = (given[0].shape, *(out_shape for _ in given[1:]), out_shape)
    for name, a, shape, address in zip(("x", "residual")[: len(given)] + ("out",), (*given, y), shapes, addresses, strict=True):
        n, c, h, w = shape
        if a.dtype != HALF or a.shape != shape:
            raise ValueError(f"{name}: expected float16 {dims(shape)}, got {a.dtype} {dims(tuple(a.shape))}")
        if a.strides != (2 * h * w * c, 2, 2 * w * c, 2 * c) and not a.transpose(0, 2, 3, 1).flags.c_contiguous:
            raise ValueError(f"{name}: expected channels-last memory, got strides {list(a.strides)}: {CURE}")
        if address % ALIGN:
            raise ValueError(f"{name}: expected an address that is a multiple of {ALIGN}, got {address:#x}")
    for name, a, address in zip(("x", "residual"), given, addresses, strict=False):
        if address < addresses[-1] + y.nbytes and addresses[-1] < address + a.nbytes:
            raise ValueError(f"out: it shares memory with {name}, which is still read while y is written: give another array")
