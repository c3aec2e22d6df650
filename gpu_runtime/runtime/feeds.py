"""Arrays in and out of a context: check the caller's arrays, copy inputs to the plan's memory, and outputs back.

Arrays have ONNX's shape and the type of the plan's input or output, independent of the plan's format. On a GPU the kernel that
changes formats inside plans also converts inputs and outputs, and no call waits for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.launch import Array, Cuda, Emulated, Kernel, fill_params
from gpu_runtime.runtime import arrays
from gpu_runtime.runtime.plan_record import Bound, PlanRecord
from tactics.format import DTYPES, Format, from_memory, to_memory
from tactics.launches import launches
from tactics.problems.problem import ReformatProblem
from tactics.step import Launch
from tactics.tactic import Tactic

KERNEL_TYPES = ("fp16", "fp32")  # that move.cu writes
Key = tuple[str, tuple[tuple[str, int], ...]]


class Ready(NamedTuple):
    """The inputs are in the plan's memory. `fetch`: after the launch, the outputs by name as NumPy or CuPy arrays; `waits`:
    whether it waits for them; `on_host`: the inputs given on the host. Without waiting, `used` must live until the queued work
    has ended, and `landing` has the caller's host arrays."""

    fetch: Callable[[], dict[str, Any]]
    waits: bool
    on_host: Mapping[str, np.ndarray]
    used: Sequence[object] = ()
    landing: Mapping[str, np.ndarray] = {}


class HostFeeds:
    """Feeds of an emulated plan: NumPy converts formats. `arena`: the activations' address."""

    def __init__(self, gpu: Emulated, plan: PlanRecord, arena: int) -> None:
        self._gpu, self._plan, self._arena = gpu, plan, arena

    @contextmanager
    def bound(
        self, inputs: Mapping[str, Any], out: Mapping[str, Any] | None = None, stream: object = None, to_host: bool = True
    ) -> Iterator[Ready]:
        """Copy the inputs to the plan's memory. Outputs go to `out`, else to new arrays."""
        given, outs = self._checked(inputs, out)
        for info in self._plan.inputs:
            self._gpu.write(self._arena + info.offset, to_memory(given[info.name].reshape(info.shape4), info.format))
        yield Ready(partial(self._filled, outs), True, given)

    def copied(self, inputs: Mapping[str, Any], out: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
        """Copies of the inputs for a later run; errors of inputs and `out` are raised now."""
        return {name: a.copy() for name, a in self._checked(inputs, out)[0].items()}

    def _checked(
        self, inputs: Mapping[str, Any], out: Mapping[str, Any] | None
    ) -> tuple[dict[str, np.ndarray], dict[str, arrays.Given]]:
        given = arrays.host_inputs(self._plan.inputs, inputs)
        outs = {i.name: arrays.Given(arrays.host_output(i, a), False) for i, a in arrays.named(self._plan.outputs, out)}
        arrays.check_no_overlap(outs)
        return given, outs

    def outputs(self) -> dict[str, Any]:
        """By name, as the last run left them."""
        return self._filled({})

    def _filled(self, outs: Mapping[str, arrays.Given]) -> dict[str, Any]:
        found = {info.name: self._fetch(info) for info in self._plan.outputs}
        for name, given in outs.items():
            given.array[...] = found[name]
        return found

    def _fetch(self, info: Bound) -> np.ndarray:
        flat = self._gpu.read(self._arena + info.offset, info.nbytes).view(DTYPES[info.dtype])
        return from_memory(flat, info.format, info.shape4).reshape(info.shape)


# ---- on a GPU


def reformats(plan: PlanRecord) -> dict[tuple[str, bool], Launch]:
    """(name, whether it is an input) -> the launch that converts that input or output from or to the linear format, if the plan
    has it in another format and a kernel supports its type."""
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


class DeviceFeeds:
    """Feeds of a plan on a GPU. `arena`: the activations' address; `kernels`: the kernels of `reformats`; `spare`: the address
    of a word for their flags of infinity and NaN, which the plan's own kernels report."""

    def __init__(self, gpu: Cuda, plan: PlanRecord, arena: int, kernels: Mapping[Key, Kernel], spare: int) -> None:
        self.gpu, self._plan, self._arena, self._spare = gpu, plan, arena, spare
        self._reformats = {edge: (kernels[s.kernel, s.values], s) for edge, s in reformats(plan).items()}

    @contextmanager
    def bound(
        self,
        inputs: Mapping[str, Any],
        out: Mapping[str, Any] | None = None,
        stream: object = None,
        to_host: bool = False,
        wait: bool = True,
    ) -> Iterator[Ready]:
        """Copy the inputs to the plan's memory, after their computation. Outputs go to `out`; others are CuPy's if all inputs
        are on the GPU, else (or with `to_host`) NumPy's. At the end the caller's streams wait for the queued work: `stream`,
        else CuPy's current stream, and the streams that arrays name. Without `wait`, `fetch` returns pinned arrays for outputs
        on the host, which are filled when the queued work has ended."""
        self.gpu.let_go()
        theirs = arrays.handle_of(self.gpu.cupy, stream)
        given, outs = self._checked(inputs, out)
        if not wait:
            given = {name: g if g.on_gpu else self._pinned(g.array) for name, g in given.items()}
        used = (*given.values(), *outs.values())
        on_host = _on_host(given)
        if not to_host and given and not on_host:
            outs |= self._new(outs, theirs)
        streams = {theirs, *(g.stream for g in used if g.stream is not None)} if any(g.on_gpu for g in used) else set()
        with ExitStack() as afterwards:
            if foreign := [g.array for g in used if g.foreign]:
                afterwards.callback(self.gpu.keep, foreign)
            for handle in streams:
                self.gpu.follow(handle)
                afterwards.callback(self.gpu.lead, handle)
            for info in self._plan.inputs:
                self._bind(info, given[info.name], wait)
            waits = any(i.name not in outs or not outs[i.name].on_gpu for i in self._plan.outputs)
            yield Ready(partial(self._filled, outs, wait), waits, on_host, [g.array for g in used], _on_host(outs))

    def _checked(
        self, inputs: Mapping[str, Any], out: Mapping[str, Any] | None
    ) -> tuple[dict[str, arrays.Given], dict[str, arrays.Given]]:
        """Inputs and outputs as given."""
        arrays.check_names(self._plan.inputs, inputs)
        given = {i.name: arrays.device_input(self.gpu, i, inputs[i.name]) for i in self._plan.inputs}
        outs = {i.name: arrays.device_output(self.gpu, i, a) for i, a in arrays.named(self._plan.outputs, out)}
        arrays.check_no_overlap(outs)
        return given, outs

    def _new(self, outs: Mapping[str, arrays.Given], stream: int | None) -> dict[str, arrays.Given]:
        """CuPy arrays for the outputs without an array, allocated for the caller's stream."""
        missing = [i for i in self._plan.outputs if i.name not in outs]
        with nullcontext() if stream is None else self.gpu.current(stream):
            return {i.name: arrays.Given(self.gpu.cupy.empty(i.shape, DTYPES[i.dtype]), True) for i in missing}

    def outputs(self) -> dict[str, Any]:
        """By name, as the last run left them, on the host; waits for it."""
        return self._filled({}, True)

    def _pinned(self, array: np.ndarray) -> arrays.Given:
        """A copy that the caller cannot change."""
        copy = self.gpu.pinned(array.shape, array.dtype)
        copy[...] = array
        return arrays.Given(copy, False)

    def _upload(self, to: int, array: np.ndarray, wait: bool) -> None:
        if wait:
            self.gpu.write(to, array)
        else:
            self.gpu.write_later(to, array)

    def _bind(self, info: Bound, given: arrays.Given, wait: bool) -> None:
        """Copy an input to the plan's memory."""
        gpu, to = self.gpu, self._arena + info.offset
        x: Any = given.array
        if not given.on_gpu and info.format.layout == "chw":
            return self._upload(to, x, wait)
        with gpu.current():
            if not given.on_gpu:
                x = gpu.cupy.empty(info.shape, DTYPES[info.dtype])
                self._upload(_address(x), given.array, wait)
            if info.format.layout == "chw":
                gpu.array(Array(to, DTYPES[info.dtype], info.shape))[...] = x
            elif (info.name, True) in self._reformats:
                x = gpu.cupy.ascontiguousarray(x)
                self._reformat(info, True, _address(x), to)
            else:
                flat = to_memory(x.reshape(info.shape4), info.format, gpu.cupy)
                gpu.copy(to, _address(flat), flat.nbytes)

    def _filled(self, outs: Mapping[str, arrays.Given], wait: bool) -> dict[str, Any]:
        """The outputs: into `outs`, the others on the host; GPU outputs first, without waiting. Without `wait`, host outputs go
        to pinned memory, later."""
        for info in self._plan.outputs:
            if info.name in outs and outs[info.name].on_gpu:
                self._store(info, arrays.address(outs[info.name]))
        return {i.name: self._found(i, outs.get(i.name), wait) for i in self._plan.outputs}

    def _found(self, info: Bound, out: arrays.Given | None, wait: bool) -> Any:
        """An output at its destination."""
        if out and out.on_gpu:
            return out.array
        gpu, at, dtype = self.gpu, self._arena + info.offset, DTYPES[info.dtype]
        with gpu.current():
            if info.format.layout != "chw":
                linear = gpu.cupy.empty(info.shape, dtype)
                at = _address(linear)
                self._store(info, at)
            if not wait:
                later = gpu.pinned(info.shape, dtype)
                gpu.read_later(later, at)
                return later
            found = out.array if out else np.empty(info.shape, dtype)
            gpu.read_into(found, at)
            return found

    def _store(self, info: Bound, to: int) -> None:
        """Copy an output to `to`, linear. (Outputs have types that the kernel supports, or are linear.)"""
        at = self._arena + info.offset
        if info.format.layout == "chw":
            self.gpu.copy(to, at, info.nbytes)
        else:
            self._reformat(info, False, at, to)

    def _reformat(self, info: Bound, inward: bool, source: int, to: int) -> None:
        kernel, step = self._reformats[info.name, inward]
        places = {"in": source, "out": to, "nonfinite": self._spare}
        params = fill_params(self.gpu, step.args, lambda arg: places[arg[0]])
        self.gpu.launch(kernel, step.grid, step.block, step.smem, params)


def _on_host(given: Mapping[str, arrays.Given]) -> dict[str, np.ndarray]:
    return {name: g.array for name, g in given.items() if not g.on_gpu}


def _address(array: Any) -> int:
    return int(array.data.ptr)
