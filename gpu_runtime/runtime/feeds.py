"""Moves arrays in and out of a context: checks the caller's arrays, copies inputs to the plan's memory, and outputs back.

Arrays have ONNX's shape and the type of the plan's input or output, independent of the plan's format. On a GPU the kernel that
changes formats inside plans also converts inputs and outputs, and no call waits for it.

Of a plan's batch a call may use the first rows: copies of its last row fill the others, as real data, so that no layer meets a
zero divisor that the caller did not give; the outputs of these rows are not read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.launch import Array, Cuda, Emulated, Kernel, fill_params
from gpu_runtime.runtime import arrays
from gpu_runtime.runtime.plan_record import Bound, PlanRecord
from tactics.format import DTYPES, Format, from_memory, to_memory
from tactics.launches import launches
from tactics.problems.problem import ReformatProblem
from tactics.step import Launch, own_strides
from tactics.tactic import Tactic

KERNEL_TYPES = ("fp16", "fp32")  # that move.cu writes
Key = tuple[str, tuple[tuple[str, int], ...]]


class Ready(NamedTuple):
    """A call whose inputs are in the plan's memory.

    `fetch`: called after the launch, returns the outputs by name as NumPy or CuPy arrays; `waits`: whether it waits for
    their end; `on_host`: the inputs given on the host. If it does not wait: `used` must be kept alive until the queued work
    has ended, and `landing` are the caller's host arrays, by output, to be filled then.
    """

    fetch: Callable[[], dict[str, Any]]
    waits: bool
    on_host: Mapping[str, np.ndarray]
    used: Sequence[object] = ()
    landing: Mapping[str, np.ndarray] = {}


class Rows(NamedTuple):
    """The batch of a plan, and the inputs and outputs whose first size is this batch or a multiple of it."""

    batch: int = 1
    names: Sequence[str] = ()

    def cut(self, ends: Sequence[Bound], rows: int) -> list[Bound]:
        """Returns the inputs or outputs with the shapes of a caller's arrays of this many rows."""
        return [self._cut(b, rows) if b.name in self.names and rows < self.batch else b for b in ends]

    def _cut(self, end: Bound, rows: int) -> Bound:
        return replace(end, shape=(end.shape[0] // self.batch * rows, *end.shape[1:]))


class Checked(NamedTuple):
    """A call's arrays by name, of the right shapes and types, and its number of rows. `outs`: the caller's arrays for
    outputs.
    """

    given: dict[str, arrays.Given]
    outs: dict[str, arrays.Given]
    rows: int


class HostFeeds:
    """Moves arrays in and out of an emulated plan; NumPy converts formats. `arena`: the activations' address."""

    def __init__(self, gpu: Emulated, plan: PlanRecord, arena: int, rows: Rows) -> None:
        self._gpu, self._plan, self._arena, self._rows = gpu, plan, arena, rows

    @contextmanager
    def bound(self, call: Checked, stream: object = None, to_host: bool = True) -> Iterator[Ready]:
        """Copies a call's inputs to the plan's memory and yields the call ready. Its outputs go to its arrays, else to new
        ones.

        `stream`, `to_host`: without effect in the emulator.
        """
        given = {name: g.array for name, g in call.given.items()}
        for info in self._plan.inputs:
            x = given[info.name]
            if x.shape != info.shape:
                each = info.shape[0] // self._rows.batch
                x = np.concatenate([x, *[x[-each:]] * (self._rows.batch - call.rows)])
            self._gpu.write(self._arena + info.offset, to_memory(x.reshape(info.shape4), info.format))
        yield Ready(partial(self._filled, call.outs, call.rows), True, given)

    def checked(self, inputs: Mapping[str, Any], out: Mapping[str, Any] | None, rows: int) -> Checked:
        """Returns a call's arrays, checked. `rows`: the images in each; `out`: output -> the caller's array, None: new ones.

        Raises ValueError or TypeError that names the wrong argument.
        """
        given = arrays.host_inputs(self._rows.cut(self._plan.inputs, rows), inputs)
        ends = arrays.named(self._rows.cut(self._plan.outputs, rows), out)
        outs = {i.name: arrays.Given(arrays.host_output(i, a), False) for i, a in ends}
        arrays.check_no_overlap(outs)
        return Checked({name: arrays.Given(a, False) for name, a in given.items()}, outs, rows)

    def outputs(self, rows: int) -> dict[str, Any]:
        """Returns the outputs by name, as the last run of this many rows left them."""
        return self._filled({}, rows)

    def _filled(self, outs: Mapping[str, arrays.Given], rows: int) -> dict[str, Any]:
        ends = zip(self._plan.outputs, self._rows.cut(self._plan.outputs, rows), strict=True)
        found = {info.name: self._fetch(info, end.shape) for info, end in ends}
        for name, given in outs.items():
            given.array[...] = found[name]
        return found

    def _fetch(self, info: Bound, shape: tuple[int, ...]) -> np.ndarray:
        flat = self._gpu.read(self._arena + info.offset, info.nbytes).view(DTYPES[info.dtype])
        whole = from_memory(flat, info.format, info.shape4).reshape(info.shape)
        return whole if shape == info.shape else whole[: shape[0]].copy()


# ---- on a GPU


def reformats(plan: PlanRecord) -> dict[tuple[str, bool], Launch]:
    """Returns (name, whether it is an input) -> the launch that converts this input or output from or to the linear format
    (chw).

    Only inputs and outputs are included that the plan has in another format, and whose types a kernel supports.
    """
    found = {}
    for inward, bounds in ((True, plan.inputs), (False, plan.outputs)):
        for info in bounds:
            if info.format.layout != "chw" and info.dtype in KERNEL_TYPES:
                ends = (Format(info.dtype, "chw"), info.format)
                source, to = ends if inward else ends[::-1]
                problem = ReformatProblem(*info.shape4, str(source), str(to))
                tactic = Tactic("move", None, (source,), to)
                (step,) = launches(problem, tactic, own_strides(problem, tactic))  # a caller's array begins anywhere
                assert isinstance(step, Launch)
                found[info.name, inward] = step
    return found


class DeviceFeeds:
    """Moves arrays in and out of a plan on a GPU. `arena`: the activations' address; `kernels`: the kernels of `reformats`.

    `spare`: the address of a word that these kernels set for infinity and NaN and nothing reads: the plan's own kernels
    report them.
    """

    def __init__(self, gpu: Cuda, plan: PlanRecord, arena: int, rows: Rows, kernels: Mapping[Key, Kernel], spare: int) -> None:
        self.gpu, self._plan, self._arena, self._rows, self._spare = gpu, plan, arena, rows, spare
        self._reformats = {edge: (kernels[s.kernel, s.values], s) for edge, s in reformats(plan).items()}

    @contextmanager
    def bound(self, call: Checked, stream: object = None, to_host: bool = False, wait: bool = True) -> Iterator[Ready]:
        """Copies a call's inputs to the plan's memory, in the order of the streams that compute them, and yields the call
        ready.

        Outputs go to the call's arrays. The others are CuPy arrays if all inputs are on the GPU, else, or with `to_host`,
        NumPy arrays. At the end the caller's streams wait for the queued work: `stream` (None: CuPy's current stream) and
        the streams that arrays name. Without `wait`, `fetch` returns pinned arrays for outputs on the host, which are filled
        when the queued work has ended.
        """
        self.gpu.let_go()
        theirs = arrays.handle_of(self.gpu.cupy, stream)
        given, outs, rows = call
        if not wait:
            given = {name: g if g.on_gpu else self._pinned(g.array) for name, g in given.items()}
        used = (*given.values(), *outs.values())
        on_host = _on_host(given)
        if not to_host and given and not on_host:
            outs = outs | self._new(outs, rows, theirs)
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
            yield Ready(partial(self._filled, outs, rows, wait), waits, on_host, [g.array for g in used], _on_host(outs))

    def checked(self, inputs: Mapping[str, Any], out: Mapping[str, Any] | None, rows: int) -> Checked:
        """Checks a call's arrays, `rows` images of each input, and returns them as given. `out`: output -> the caller's array,
        None: new ones. Raises ValueError or TypeError that names the wrong one."""
        arrays.check_names(self._plan.inputs, inputs)
        ends = self._rows.cut(self._plan.inputs, rows)
        given = {i.name: arrays.device_input(self.gpu, i, inputs[i.name]) for i in ends}
        named = arrays.named(self._rows.cut(self._plan.outputs, rows), out)
        outs = {i.name: arrays.device_output(self.gpu, i, a) for i, a in named}
        arrays.check_no_overlap(outs)
        return Checked(given, outs, rows)

    def _new(self, outs: Mapping[str, arrays.Given], rows: int, stream: int | None) -> dict[str, arrays.Given]:
        """Allocates and returns CuPy arrays for the outputs that `outs` lacks, in the order of `stream` (None: CuPy's current
        one).
        """
        missing = [i for i in self._rows.cut(self._plan.outputs, rows) if i.name not in outs]
        with nullcontext() if stream is None else self.gpu.current(stream):
            return {i.name: arrays.Given(self.gpu.cupy.empty(i.shape, DTYPES[i.dtype]), True) for i in missing}

    def outputs(self, rows: int) -> dict[str, Any]:
        """Returns the outputs by name on the host, as the last run of this many rows left them; waits for it."""
        return self._filled({}, rows, True)

    def _pinned(self, array: np.ndarray) -> arrays.Given:
        """Returns a copy in pinned memory, which the caller cannot change."""
        copy = self.gpu.pinned(array.shape, array.dtype)
        copy[...] = array
        return arrays.Given(copy, False)

    def _upload(self, to: int, array: np.ndarray, wait: bool) -> None:
        if wait:
            self.gpu.write(to, array)
        else:
            self.gpu.write_later(to, array)

    def _bind(self, info: Bound, given: arrays.Given, wait: bool) -> None:
        """Copies an input to the plan's memory, in the plan's format. `wait`: the caller's host array is read before this
        returns.
        """
        gpu, to = self.gpu, self._arena + info.offset
        x: Any = given.array
        with gpu.current():
            if info.format.layout == "chw":
                return self._place(info, given, to, wait)
            if not given.on_gpu or x.shape != info.shape:
                x = gpu.cupy.empty(info.shape, DTYPES[info.dtype])
                self._place(info, given, _address(x), wait)
            if (info.name, True) in self._reformats:
                x = gpu.cupy.ascontiguousarray(x)
                self._reformat(info, True, _address(x), to)
            else:
                flat = to_memory(x.reshape(info.shape4), info.format, gpu.cupy)
                gpu.copy(to, _address(flat), flat.nbytes)

    def _place(self, info: Bound, given: arrays.Given, to: int, wait: bool) -> None:
        """Copies an input to linear memory at `to`, for the whole batch: its own rows travel, the last one is then repeated
        there.
        """
        x: Any = given.array
        if given.on_gpu:
            self.gpu.array(Array(to, x.dtype, x.shape))[...] = x
        else:
            self._upload(to, x, wait)
        whole = math.prod(info.shape) * x.dtype.itemsize
        done = row = whole // self._rows.batch
        last = to + x.nbytes - row
        while last + done < to + whole:
            more = min(done, to + whole - last - done)
            self.gpu.copy(last + done, last, more)
            done += more

    def _filled(self, outs: Mapping[str, arrays.Given], rows: int, wait: bool) -> dict[str, Any]:
        """Returns the outputs by name: in the arrays of `outs`, the others on the host.

        GPU outputs are queued first, without waiting. Without `wait`, host outputs are in pinned memory that is filled
        later.
        """
        ends = list(zip(self._plan.outputs, self._rows.cut(self._plan.outputs, rows), strict=True))
        for info, _ in ends:
            if info.name in outs and outs[info.name].on_gpu:
                to: Any = outs[info.name].array
                self._store(info, arrays.address(outs[info.name]), to.nbytes)
        return {info.name: self._found(info, end.shape, outs.get(info.name), wait) for info, end in ends}

    def _found(self, info: Bound, shape: tuple[int, ...], out: arrays.Given | None, wait: bool) -> Any:
        """Returns an output at its destination: `out` if given, else a new host array of this shape."""
        if out and out.on_gpu:
            return out.array
        gpu, dtype = self.gpu, DTYPES[info.dtype]
        with gpu.current():
            at, _held = self._linear(info)
            if not wait:
                later = gpu.pinned(shape, dtype)
                gpu.read_later(later, at)
                return later
            found = out.array if out else np.empty(shape, dtype)
            gpu.read_into(found, at)
            return found

    def _store(self, info: Bound, to: int, nbytes: int) -> None:
        """Copies an output's first `nbytes` bytes to address `to` in the linear format.

        Outputs are linear, or have types that the kernel which converts formats supports.
        """
        if info.format.layout != "chw" and nbytes == math.prod(info.shape) * DTYPES[info.dtype].itemsize:
            return self._reformat(info, False, self._arena + info.offset, to)
        with self.gpu.current():
            at, _held = self._linear(info)
            self.gpu.copy(to, at, nbytes)

    def _linear(self, info: Bound) -> tuple[int, Any]:
        """Returns (the address of an output in linear memory, the array that owns this memory; None if it is the plan's)."""
        if info.format.layout == "chw":
            return self._arena + info.offset, None
        linear = self.gpu.cupy.empty(info.shape, DTYPES[info.dtype])
        self._reformat(info, False, self._arena + info.offset, _address(linear))
        return _address(linear), linear

    def _reformat(self, info: Bound, inward: bool, source: int, to: int) -> None:
        kernel, step = self._reformats[info.name, inward]
        places = {"in": source, "out": to, "nonfinite": self._spare}
        params = fill_params(self.gpu, step.args, lambda arg: places[arg[0]])
        self.gpu.launch(kernel, step.grid, step.block, step.smem, params)


def _on_host(given: Mapping[str, arrays.Given]) -> dict[str, np.ndarray]:
    return {name: g.array for name, g in given.items() if not g.on_gpu}


def _address(array: Any) -> int:
    return int(array.data.ptr)
