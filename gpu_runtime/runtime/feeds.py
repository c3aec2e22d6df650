"""Arrays in and out of a context: what a caller gives is checked and brought to where the plan reads it, and outputs back.

Host arrays are NumPy's; arrays on the GPU are CuPy's, or another library's, by DLPack or __cuda_array_interface__. They have
ONNX's shape and the type of the plan's input; in which format the plan keeps them is not the caller's business. On a GPU
formats are changed there, by the kernel that changes them inside plans, and no call waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.launch import Array, Cuda, Emulated, Kernel, pack_params
from gpu_runtime.runtime.plan_record import Bound, PlanRecord
from tactics.format import DTYPES, Format, from_memory, to_memory
from tactics.launches import launches
from tactics.problems.problem import ReformatProblem
from tactics.step import Launch
from tactics.tactic import Tactic

DLPACK_CUDA = (2, 13)  # DLDeviceType: CUDA's device memory, and managed memory
KERNEL_TYPES = ("fp16", "fp32")  # of tensors that move.cu writes
Key = tuple[str, tuple[tuple[str, int], ...]]


def check(expected: Iterable[Bound], inputs: Mapping[str, Any]) -> None:
    """ValueError for a missing or unknown name, a wrong shape or a wrong dtype."""
    bounds = {i.name: i for i in expected}
    if set(inputs) != set(bounds):
        raise ValueError(f"inputs: expected the names {sorted(bounds)}, got {sorted(map(str, inputs))}")
    for name, info in bounds.items():
        a = inputs[name]
        shape, dtype = tuple(getattr(a, "shape", ())), getattr(a, "dtype", type(a).__name__)
        if shape != info.shape:
            raise ValueError(
                f"input {name!r}: expected shape {_dims(info.shape)}, got {_dims(shape)}. "
                "Sizes are fixed when an engine is built: build one with --shapes for this size"
            )
        want = DTYPES[info.dtype]
        if dtype != want:
            raise ValueError(f"input {name!r}: expected dtype {want}, got {dtype}; convert it with .astype(np.{want})")


def _dims(shape: Sequence[int]) -> str:
    return "x".join(str(d) for d in shape) or "()"


class Ready(NamedTuple):
    """Inputs are where the plan reads them. `fetch`: outputs by name, when the plan has been launched, `to_gpu` or on the host;
    `on_host`: the inputs that were given there."""

    fetch: Callable[[], dict[str, Any]]
    to_gpu: bool
    on_host: Mapping[str, Any]


class HostFeeds:
    """Of a plan that is emulated: formats are changed by NumPy. `arena`: the activations' address."""

    def __init__(self, gpu: Emulated, plan: PlanRecord, arena: int) -> None:
        self._gpu, self._plan, self._arena = gpu, plan, arena

    @contextmanager
    def bound(self, inputs: Mapping[str, Any], to_host: bool = True) -> Iterator[Ready]:
        """Bring the inputs to where the plan reads them."""
        check(self._plan.inputs, inputs)
        for info in self._plan.inputs:
            x = np.asarray(inputs[info.name]).reshape(info.shape4)
            self._gpu.write(self._arena + info.offset, to_memory(x, info.format))
        yield Ready(self.outputs, False, inputs)

    def outputs(self) -> dict[str, Any]:
        """By name, as the last run left them."""
        return {info.name: self._fetch(info) for info in self._plan.outputs}

    def _fetch(self, info: Bound) -> np.ndarray:
        flat = self._gpu.read(self._arena + info.offset, info.nbytes).view(DTYPES[info.dtype])
        return from_memory(flat, info.format, info.shape4).reshape(info.shape)


# ---- on a GPU


def reformats(plan: PlanRecord) -> dict[tuple[str, bool], Launch]:
    """(name, whether it is an input) -> the launch that brings that input or output from or to the linear format, where the
    plan has it in another one and there is a kernel for its type."""
    found = {}
    for inward, bounds in ((True, plan.inputs), (False, plan.outputs)):
        for info in bounds:
            if info.format.layout != "chw" and info.dtype in KERNEL_TYPES:
                ends = (Format(info.dtype, "chw"), info.format)
                source, to = ends if inward else ends[::-1]
                problem = ReformatProblem(*info.shape4, str(source), str(to))
                (step,) = launches(problem, Tactic("move", None, (source,), to))
                assert isinstance(step, Launch)
                found[info.name, inward] = step
    return found


class Given(NamedTuple):
    """An input as it was given: an array of the host's, or a CuPy array; `stream`: the handle of what computes it, where that
    need not be CuPy's current stream."""

    array: Any
    on_gpu: bool
    stream: int | None = None


class DeviceFeeds:
    """Of a plan on a GPU. `arena`: the activations' address; `kernels`: what `reformats` launches; `spare`: the address of a
    word that those may set, as all kernels do for infinity and NaN; the plan's own kernels tell of them."""

    def __init__(self, gpu: Cuda, plan: PlanRecord, arena: int, kernels: Mapping[Key, Kernel], spare: int) -> None:
        self._gpu, self._plan, self._arena, self._spare = gpu, plan, arena, spare
        self._reformats = {edge: (kernels[s.kernel, s.values], s) for edge, s in reformats(plan).items()}

    @contextmanager
    def bound(self, inputs: Mapping[str, Any], to_host: bool = False) -> Iterator[Ready]:
        """Bring the inputs to where the plan reads them, after what computes them. Outputs are CuPy's where all inputs are on
        the GPU, else (or with `to_host`) NumPy's. At the end, the caller's streams wait for what is queued by then."""
        given = {name: self._given(name, a) for name, a in inputs.items()}
        check(self._plan.inputs, {name: g.array for name, g in given.items()})
        streams = {g.stream for g in given.values() if g.stream is not None}
        on_host = {name: g.array for name, g in given.items() if not g.on_gpu}
        on_gpu = len(on_host) < len(given)
        to_gpu = on_gpu and not on_host and not to_host
        outs = {i.name: self._gpu.cupy.empty(i.shape, DTYPES[i.dtype]) for i in self._plan.outputs} if to_gpu else {}
        with ExitStack() as afterwards:
            for stream in (None, *streams) if on_gpu else ():
                self._gpu.follow(stream)
                afterwards.callback(self._gpu.lead, stream)
            for info in self._plan.inputs:
                self._bind(info, given[info.name])
            yield Ready(partial(self._filled, outs) if to_gpu else self.outputs, to_gpu, on_host)

    def outputs(self) -> dict[str, Any]:
        """By name, as the last run left them; waits for it."""
        return {info.name: self._fetch(info) for info in self._plan.outputs}

    def _given(self, name: str, a: Any) -> Given:
        """An input as an array of NumPy's or CuPy's, no copy of it."""
        gpu = self._gpu
        if isinstance(a, gpu.cupy.ndarray):
            found = Given(a, True)
        elif isinstance(a, np.ndarray):
            return Given(a, False)
        elif hasattr(a, "__dlpack_device__"):
            if a.__dlpack_device__()[0] not in DLPACK_CUDA:
                return Given(a, False)
            with gpu.current():  # the producer makes this stream wait for what computes it
                found = Given(gpu.cupy.from_dlpack(a), True)
        elif hasattr(a, "__cuda_array_interface__"):
            found = _interface(gpu, name, a)
        else:
            return Given(a, False)
        if found.array.device.id != gpu.number:
            raise ValueError(
                f"input {name!r}: it lies on GPU {found.array.device.id}, this context runs on GPU {gpu.number}: copy it "
                "there, or make the context inside `with cupy.cuda.Device(number)`"
            )
        return found

    def _bind(self, info: Bound, given: Given) -> None:
        """An input goes to where the plan reads it."""
        gpu, to = self._gpu, self._arena + info.offset
        x: Any = given.array
        if not given.on_gpu and info.format.layout == "chw":
            return gpu.write(to, np.asarray(x))
        with gpu.current():
            if not given.on_gpu:
                x = gpu.cupy.empty(info.shape, DTYPES[info.dtype])
                gpu.write(_address(x), np.asarray(given.array))
            if info.format.layout == "chw":
                gpu.array(Array(to, DTYPES[info.dtype], info.shape))[...] = x
            elif (info.name, True) in self._reformats:
                x = gpu.cupy.ascontiguousarray(x)
                self._reformat(info, True, _address(x), to)
            else:
                flat = to_memory(x.reshape(info.shape4), info.format, gpu.cupy)
                gpu.copy(to, _address(flat), flat.nbytes)

    def _filled(self, outs: dict[str, Any]) -> dict[str, Any]:
        for info in self._plan.outputs:
            self._store(info, _address(outs[info.name]))
        return outs

    def _fetch(self, info: Bound) -> np.ndarray:
        """An output on the host."""
        at, dtype = self._arena + info.offset, DTYPES[info.dtype]
        if info.format.layout == "chw":
            return self._gpu.read(at, info.nbytes).view(dtype).reshape(info.shape)
        with self._gpu.current():
            linear = self._gpu.cupy.empty(info.shape, dtype)
            self._store(info, _address(linear))
            return self._gpu.read(_address(linear), linear.nbytes).view(dtype).reshape(info.shape)

    def _store(self, info: Bound, to: int) -> None:
        """An output goes to `to`, linear. (Outputs are of types that the kernel takes, or linear.)"""
        at = self._arena + info.offset
        if info.format.layout == "chw":
            self._gpu.copy(to, at, info.nbytes)
        else:
            self._reformat(info, False, at, to)

    def _reformat(self, info: Bound, inward: bool, source: int, to: int) -> None:
        kernel, step = self._reformats[info.name, inward]
        places = {"in": source, "out": to, "nonfinite": self._spare}
        params = pack_params(("ptr", places[kind]) if kind in places else (kind, v) for kind, v in step.args)
        self._gpu.launch(kernel, step.grid, step.block, step.smem, params)


def _address(array: Any) -> int:
    return int(array.data.ptr)


def _interface(gpu: Cuda, name: str, a: Any) -> Given:
    """By __cuda_array_interface__ (Numba's documentation, version 3): its `stream` is what computes it, None if nothing does
    any more; 1 and 2 are CUDA's default streams, and 0 says nothing."""
    told = a.__cuda_array_interface__
    if told.get("mask") is not None:
        raise ValueError(f"input {name!r}: its __cuda_array_interface__ has a mask; give the array that holds the values alone")
    if told.get("stream") == 0:
        raise ValueError(
            f"input {name!r}: its __cuda_array_interface__ names stream 0, which may be either default stream: expected 1, 2, "
            "a stream's handle, or None"
        )
    cupy, dtype, shape = gpu.cupy, np.dtype(told["typestr"]), tuple(told["shape"])
    strides = told.get("strides")
    reach = sum((n - 1) * abs(s) for n, s in zip(shape, strides or (), strict=bool(strides))) + dtype.itemsize
    nbytes = 0 if 0 in shape else reach if strides else int(np.prod(shape)) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(told["data"][0], nbytes, a, gpu.number if not nbytes else -1)
    array = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
    return Given(array, True, told.get("stream"))
