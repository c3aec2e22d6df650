"""Run an engine: device memory, kernels, and one call from arrays to arrays. Needs neither onnx nor the planner."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from itertools import groupby
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from cuda_kernels import device as devices
from cuda_kernels.compile import Compiled, Counter, compile_many, source_hash
from cuda_kernels.launch import Array, Cuda, open_gpu, pack_params
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime.engine import Engine, check, check_device, check_source
from gpu_runtime.runtime.plan_record import Bound, CallStep, LaunchStep, Step, TensorPlace
from gpu_runtime.runtime.verify import planned_device
from gpu_runtime.text import not_finite, printable
from tactics.format import DTYPES, from_memory, to_memory
from tactics.problems.array_functions import bound

NAN_HALF = np.uint16(0x7FFF)  # two of them are a NaN of FP32


def _ranges() -> Callable[[str], AbstractContextManager[Any]]:
    """A context manager for a name: its NVTX range."""
    try:
        import nvtx
    except ImportError:
        warnings.warn("no NVTX ranges: package nvtx is not installed (pip install nvtx)", RuntimeWarning, stacklevel=4)
        return nullcontext
    return partial(nvtx.annotate, domain="gpu_runtime")


P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[Context, P], R]) -> Callable[Concatenate[Context, P], R]:
    """One thread at a time, and only while the context is open."""

    @wraps(method)
    def locked(self: Context, *args: P.args, **options: P.kwargs) -> R:
        with self._lock:
            if self._closed:
                raise ValueError("this context is closed: make a new one with engine.context()")
            return method(self, *args, **options)

    return locked


class Context:
    """Owns the activation and weight memory, the kernels and, on a GPU, a stream and CUDA graphs.

    Threads may share one: its calls run one after the other, since all of them use the same memory. What ran last is what
    `nonfinite` and `tensor` speak of, so threads that ask take a context each; so do threads that are to run at once.

    `device`: None runs on the GPU where there is one and else in the emulator; "emulator" always emulates. `graph=False`
    launches one by one (debugging). `nvtx=True` does too, each layer inside an NVTX range of its name, which Nsight Systems
    shows; without package nvtx it does nothing but warn. `poison=True` fills memory with NaN wherever the plan says that it is
    free, so that a read of a dead tensor shows. `progress(done, total)` is told of kernels that are compiled
    now. Further options go to the emulator. Raises EngineError if the engine is for another device.
    """

    def __init__(
        self, engine: Engine, *, device: str | None = None, graph: bool = True, nvtx: bool = False, poison: bool = False,
        progress: Counter | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.engine, self.plan = engine, engine.plan
        emulate = device == "emulator" or (device is None and not devices.has_gpu())
        if device not in (None, "emulator", "cuda"):
            raise ValueError(f"device: expected None, 'cuda' or 'emulator', got {device!r}")
        if emulate:
            self.device = planned_device(engine.record.device)
        else:
            self.device = devices.current()
            check_device(engine.record.device, self.device.sm)
        check_source(engine.record, source_hash())
        if not engine.checked:
            check(engine.record, engine.weights)
        self.gpu = open_gpu(self.device, **options)
        self._closed, self._lock = False, threading.RLock()
        self._poison = poison
        self._nonfinite: list[str] = []
        steps = self.plan.steps
        self._kernels = self._load(steps, progress)
        self._arena_bytes = self.plan.memory.activation_bytes
        try:
            self._weights = self.gpu.allocate(engine.weights.nbytes, constant=True)
            self.gpu.write(self._weights, engine.weights)
            self._arena = self.gpu.allocate(self._arena_bytes)
            self._fill(0, self._arena_bytes)
            self._flags = self.gpu.allocate(4 * len(steps))  # one word per step: whether it stored infinity or NaN
            self.gpu.write(self._flags, np.zeros(len(steps), np.uint32))
        except (MemoryError, OverflowError, ValueError):
            raise EngineError(
                f"the engine takes {engine.weights.nbytes} bytes for weights and {self._arena_bytes} for activations, more "
                "than there are: free memory, or build it for smaller inputs"
            ) from None
        for offset, nbytes in self.plan.memory.zeros:
            self.gpu.write(self._arena + offset, np.zeros(nbytes, np.uint8))
        bases = [{"arena": self._arena, "weights": self._weights, "nonfinite": self._flags + 4 * i} for i in range(len(steps))]
        self._params = {i: _struct(s, bases[i]) for i, s in enumerate(steps) if isinstance(s, LaunchStep)}
        self._arrays = {i: _arrays(s, bases[i]) for i, s in enumerate(steps) if isinstance(s, CallStep)}
        self._frees = dict(self.plan.memory.frees) if poison else {}
        # Run the whole plan on what the inputs hold: CUDA graphs where there is a GPU.
        self._range = _ranges() if nvtx else nullcontext
        self._titles = [" || ".join(self.plan.layers[k].name for k in step.covers) for step in steps]
        self.replay = self._launch_all if not graph or nvtx or poison else self._recorded()

    @property
    def emulated(self) -> bool:
        return not isinstance(self.gpu, Cuda)

    @_alone
    def run(self, inputs: Mapping[str, object]) -> dict[str, Any]:
        """Arrays by input name -> arrays by output name, in the engine's order.

        Arrays have ONNX's shape and the dtype of the engine's input (`engine.inputs`); the memory format is the engine's
        business. NumPy in gives NumPy out; if every input is a CuPy array the outputs are CuPy arrays, ready on
        `self.gpu.stream`. Warns of layers that stored infinity or NaN, also where a later Clip or Sigmoid hides it; with CuPy
        arrays, for which nothing waits, ask `nonfinite`. Raises ValueError for a missing or unknown name, a wrong shape or a
        wrong dtype.
        """
        self._check(inputs)
        if not isinstance(self.gpu, Cuda):
            self.gpu.stats.clear()  # counters of the last run only: a server's would grow without end
        on_gpu = all(hasattr(a, "__cuda_array_interface__") for a in inputs.values())
        cuda = self.gpu if on_gpu and isinstance(self.gpu, Cuda) else None
        for info in self.plan.inputs:
            self._bind(info, inputs[info.name], cuda)
        self._nonfinite = []
        self.replay()
        outputs = {info.name: self._fetch(info, cuda) for info in self.plan.outputs}
        if cuda is None and (layers := self.nonfinite()):
            given = [f"input {name!r} holds {told}" for name, a in inputs.items() if not on_gpu and (told := not_finite(a))]
            if given:
                warnings.warn(printable("; ".join(given)), RuntimeWarning, stacklevel=3)
                return outputs
            whole = all(np.isfinite(y).all() for y in outputs.values())
            told = f"{'layers' if whole else 'outputs'} hold infinite values or NaN, first written by {', '.join(layers[:3])}"
            text = f"{told}: FP16 ends at 65504; build with a calibration input"
            warnings.warn(printable(text), RuntimeWarning, stacklevel=3)
        return outputs

    @_alone
    def nonfinite(self) -> list[str]:
        """The layers that stored infinite values or NaN in the last run, in order; of runs with CuPy arrays, in all since this
        was last asked. Every kernel tells it by itself, so nothing runs again."""
        told = self.gpu.read(self._flags, 4 * len(self._kernels)).view(np.uint32)
        if told.any():
            self.gpu.write(self._flags, np.zeros_like(told))
            covered = (self.plan.layers[k].name for i in np.flatnonzero(told) for k in self.plan.steps[i].covers)
            self._nonfinite = list(dict.fromkeys((*self._nonfinite, *covered)))
        return list(self._nonfinite)

    @_alone
    def profile(self, inputs: Mapping[str, object], iterations: int = 20) -> list[list[float]]:
        """Microseconds per layer of the plan, one list per iteration, each layer between two events. GPU only."""
        if not isinstance(self.gpu, Cuda):
            raise ValueError("profile: layer times are measured on a GPU only; here they are predicted, see the plan")
        self.run(inputs)
        cupy, layers = self.gpu.cupy, len(self.plan.layers)
        rows = []
        for _ in range(iterations):
            events = [cupy.cuda.Event() for _ in range(len(self.plan.steps) + 1)]
            events[0].record(self.gpu.stream)
            for i in range(len(self.plan.steps)):
                self._launch(i)
                events[i + 1].record(self.gpu.stream)
            self.gpu.synchronize()
            row = [0.0] * layers
            for i, step in enumerate(self.plan.steps):
                us = 1e3 * cupy.cuda.get_elapsed_time(events[i], events[i + 1])
                for layer in step.covers:
                    row[layer] += us / len(step.covers)
            rows.append(row)
        return rows

    @_alone
    def trace(self, inputs: Mapping[str, object]) -> dict[str, np.ndarray]:
        """Layer -> what it writes, as NCHW: launched one by one, and read before memory is given to a later layer."""
        self._check(inputs)
        for info in self.plan.inputs:
            self._bind(info, inputs[info.name], None)
        steps, layers = self.plan.steps, self.plan.layers
        found: dict[str, np.ndarray] = {}
        last = {layer: i for i, step in enumerate(steps) for layer in step.covers}
        for i, step in enumerate(steps):
            self._launch(i)
            found |= {layers[k].name: self._values(layers[k].outputs[0]) for k in step.covers if last[k] == i}
        self.nonfinite()
        self._nonfinite = []
        return found

    @_alone
    def outputs(self) -> dict[str, np.ndarray]:
        """The network's outputs as `run` or `trace` left them, on the host."""
        return {info.name: self._fetch(info, None) for info in self.plan.outputs}

    @_alone
    def tensor(self, name: str) -> np.ndarray:
        """A layer's output after `run`, as NCHW, where the plan has not given its memory to a later layer."""
        for layer in reversed(self.plan.layers):
            for out in layer.outputs:
                if out.name == name:
                    return self._values(out)
        raise ValueError(f"no layer writes a tensor {name!r}")

    def _values(self, out: TensorPlace) -> np.ndarray:
        """What lies now where the plan keeps a layer's output, as NCHW."""
        whole, first = out.whole, out.inside.channel if out.inside else 0
        flat = self.gpu.read(self._arena + whole.offset, whole.nbytes)
        values = from_memory(flat.view(DTYPES[whole.format.dtype]), whole.format, whole.shape4)
        return values[:, first : first + out.shape4[1]]

    def close(self) -> None:
        """Give the memory back; using the context afterwards is an error."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.gpu.synchronize()
                for address in (self._arena, self._weights, self._flags):
                    self.gpu.free(address)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, steps: Sequence[Step], progress: Counter | None) -> list[Any]:
        """Each step's kernel, ready to launch; None of a library function."""
        keys = [s.key if isinstance(s, LaunchStep) else None for s in steps]
        distinct = [k for k in dict.fromkeys(keys) if k]
        missing = [k for k in distinct if kernel_key(*k) not in self.engine.cubins or self.emulated]
        made = compile_many(((kernel, dict(values), self.gpu.arch) for kernel, values in missing), progress=progress)
        compiled = dict(zip(missing, made, strict=True))
        for k in distinct:
            if k not in compiled:
                compiled[k] = Compiled(*k, self.device.sm, "", self.engine.cubins[kernel_key(*k)], 0, 0, 0, 0, "")
        loaded = {k: self.gpu.load(c) for k, c in compiled.items()}
        return [k and loaded[k] for k in keys]

    def _launch(self, i: int) -> None:
        step = self.plan.steps[i]
        with self._range(self._titles[i]):
            if isinstance(step, CallStep):
                return self._call(i, step)
            self.gpu.launch(self._kernels[i], step.grid, step.block, step.smem, self._params[i])

    def _call(self, i: int, step: CallStep) -> None:
        """A library function. What its arrays hold may be wrong for it: indices outside, a division by zero."""
        ins, out = self._arrays[i]
        function = bound(step.function, step.attributes, step.part)
        try:
            self.gpu.call(function, ins, out, self._flags + 4 * i)
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as e:
            names = ", ".join(self.plan.layers[k].name for k in step.covers)
            why = f"{names}: {step.function} cannot run on what it is given: {e}"
            raise EngineError(f"{why}. Check the inputs, or build the engine again") from None

    def _recorded(self) -> Callable[[], None]:
        """A graph of all steps; around library functions, which allocate as no graph can, one for each run of kernels."""
        parts: list[Callable[[], object]] = []
        for library, run in groupby(range(len(self._kernels)), key=lambda i: self._kernels[i] is None):
            launch = partial(self._launch_some, tuple(run))
            parts.append(launch if library else self.gpu.record(launch))

        def replay() -> None:
            for part in parts:
                part()

        return replay

    def _launch_some(self, steps: tuple[int, ...]) -> None:
        for i in steps:
            self._launch(i)

    def _launch_all(self) -> None:
        for i in range(len(self._kernels)):
            self._launch(i)
            for offset, nbytes in self._frees.get(i, ()):
                self._fill(offset, nbytes)

    def _fill(self, offset: int, nbytes: int) -> None:
        self.gpu.write(self._arena + offset, np.full(-(-nbytes // 2), NAN_HALF).view(np.uint8)[:nbytes])

    def _check(self, inputs: Mapping[str, object]) -> None:
        expected = {i.name: i for i in self.plan.inputs}
        if set(inputs) != set(expected):
            raise ValueError(f"inputs: expected the names {sorted(expected)}, got {sorted(map(str, inputs))}")
        for name, info in expected.items():
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

    def _bind(self, info: Bound, array: Any, cuda: Cuda | None) -> None:
        """An input goes to where the plan reads it. `cuda`: where the array lies, None for the host."""
        to = self._arena + info.offset
        if cuda and info.format.layout == "chw":
            array = cuda.cupy.ascontiguousarray(array)
            cuda.cupy.cuda.get_current_stream().synchronize()
            cuda.copy(to, array.data.ptr, array.nbytes)
            return
        host = cuda.cupy.asnumpy(array) if cuda else np.asarray(array)
        self.gpu.write(to, to_memory(host.reshape(info.shape4), info.format))

    def _fetch(self, info: Bound, cuda: Cuda | None) -> Any:
        """An output as an array, on the GPU or on the host."""
        at, dtype = self._arena + info.offset, DTYPES[info.dtype]
        if cuda and info.format.layout == "chw":
            with cuda.stream:
                out = cuda.cupy.empty(info.shape, dtype)
                cuda.copy(out.data.ptr, at, out.nbytes)
            return out
        values = from_memory(self.gpu.read(at, info.nbytes).view(dtype), info.format, info.shape4).reshape(info.shape)
        return cuda.cupy.asarray(values) if cuda else values


def _struct(step: LaunchStep, bases: Mapping[str, int]) -> bytes:
    """A kernel's parameters with addresses in their places."""
    return pack_params(("ptr", bases[kind] + int(v)) if kind in bases else (kind, v) for kind, v in step.args)


def _arrays(step: CallStep, bases: Mapping[str, int]) -> tuple[list[Array | None], Array]:
    """A function's inputs, and its output."""
    *ins, out = (a and Array(bases[a[0]] + a[1], DTYPES[a[2]], a[3]) for a in step.args)
    if out is None:
        raise EngineError(f"the engine's plan is wrong: {step.function} has no output. Build the engine again")
    return ins, out


def kernel_key(kernel: str, values: tuple[tuple[str, int], ...]) -> str:
    """The name under which an engine's file holds a kernel's machine code."""
    return f"{kernel}({','.join(f'{n}={v}' for n, v in values)})"


def _dims(shape: Sequence[int]) -> str:
    return "x".join(str(d) for d in shape) or "()"
