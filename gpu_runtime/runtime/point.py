"""A point: one plan of an engine, ready to launch in the memory of a context."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.launch import Cuda, Emulated, Kernel
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import steps as launched
from gpu_runtime.runtime.feeds import DeviceFeeds, HostFeeds, Key, Rows, reformats
from gpu_runtime.runtime.plan_record import CallStep, LaunchStep, PlanRecord, TensorPlace
from tactics.format import DTYPES, from_memory, is_bytes
from tactics.problems.array_functions import bound

NAN_HALF = np.uint16(0x7FFF)  # two of them are a NaN of FP32


class Shared(NamedTuple):
    """The data that the points of a context share.

    `weights`, `arena`: addresses; the arena has room for the activations of the largest plan; `graph`: whether CUDA graphs are
    replayed; `poison`: whether free memory is filled with NaN; `ranges`: makes the NVTX range of a name.
    """

    gpu: Cuda | Emulated
    weights: int
    arena: int
    kernels: Mapping[Key, Kernel]
    graph: bool
    poison: bool
    ranges: Callable[[str], AbstractContextManager[Any]]


def kernel_keys(plan: PlanRecord, on_gpu: bool) -> list[Key]:
    """Returns the compile keys (kernel, values) of a plan: its steps' kernels and, `on_gpu`, those that convert inputs and
    outputs.
    """
    keys = [s.key for s in plan.steps if isinstance(s, LaunchStep)]
    return keys + [(s.kernel, s.values) for s in reformats(plan).values()] if on_gpu else keys


class Point:
    """Launches one plan. `flags`: the address of a word for each of its steps, which kernels set when they store infinity or
    NaN; `spare`: the address of a word that nothing reads; `rows`: the rows of its batch in the last run.

    `enter` prepares the arena as the plan expects it; this state is lost as soon as another point runs.
    """

    def __init__(self, shared: Shared, plan: PlanRecord, rows: Rows, flags: int, spare: int) -> None:
        self._shared, self.plan, self.flags = shared, plan, flags
        self._batch = self.rows = rows.batch
        gpu, arena, steps = shared.gpu, shared.arena, plan.steps
        bases = [{"arena": arena, "weights": shared.weights, "nonfinite": flags + 4 * i} for i in range(len(steps))]
        self._params = {i: launched.struct(gpu, s, bases[i]) for i, s in enumerate(steps) if isinstance(s, LaunchStep)}
        self._arrays = {i: launched.arrays(s, bases[i]) for i, s in enumerate(steps) if isinstance(s, CallStep)}
        self._frees = dict(plan.frees) if shared.poison else {}
        self._titles = [" || ".join(plan.layers[k].name for k in step.covers) for step in steps]
        self._parts: list[Callable[[], object]] | None = None  # of the recorded graph
        self.feeds: HostFeeds | DeviceFeeds = (
            DeviceFeeds(gpu, plan, arena, rows, shared.kernels, spare)
            if isinstance(gpu, Cuda)
            else HostFeeds(gpu, plan, arena, rows)
        )

    def enter(self) -> None:
        """Makes the arena this point's: clears the spans that are zero before its first run, and poisons the rest."""
        if self._shared.poison:
            self._fill(0, self.plan.memory.activation_bytes)
        for offset, nbytes in self.plan.memory.zeros:
            self._shared.gpu.zero(self._shared.arena + offset, nbytes)

    def replay(self) -> None:
        """Runs the plan on the present inputs; on a GPU as a CUDA graph, which the first run records."""
        if not self._shared.graph:
            self._launch_some(range(len(self.plan.steps)))
        elif self._parts is None:
            self.record()
        else:
            for part in self._parts:
                part()

    def record(self, calls: bool = True) -> None:
        """Runs the plan and records its graph; with library functions, whose allocations graphs exclude, one graph per sequence
        of kernels.

        Without `calls` the functions do not run: they may refuse memory that holds no inputs.
        """
        parts: list[Callable[[], object]] = []
        for library, run in groupby(range(len(self.plan.steps)), key=lambda i: i in self._arrays):
            launch = partial(self._launch_some, tuple(run))
            if library and calls:
                launch()
            parts.append(launch if library else self._shared.gpu.record(launch))
        self._parts = parts

    def times(self, iterations: int, ahead: Callable[[float], None] = lambda us: None) -> list[list[float]]:
        """Measures microseconds per layer, one list per iteration, each layer between two events on the GPU.

        `ahead` gets the microseconds that the host needs to queue an iteration, and may keep the GPU busy meanwhile: else the
        GPU waits for the host between short kernels.
        """
        gpu, steps, rows, queued_us = self._shared.gpu, self.plan.steps, [], 0.0
        assert isinstance(gpu, Cuda)
        for _ in range(iterations):
            ahead(queued_us)
            begun = time.perf_counter()
            events = [gpu.cupy.cuda.Event() for _ in range(len(steps) + 1)]
            events[0].record(gpu.stream)
            for i in range(len(steps)):
                self._launch(i)
                events[i + 1].record(gpu.stream)
            queued_us = 1e6 * (time.perf_counter() - begun)
            gpu.synchronize()
            row = [0.0] * len(self.plan.layers)
            for i, step in enumerate(steps):
                us = 1e3 * gpu.cupy.cuda.get_elapsed_time(events[i], events[i + 1])
                for layer in step.covers:
                    row[layer] += us / len(step.covers)
            rows.append(row)
        return rows

    def trace(self) -> dict[str, np.ndarray]:
        """Returns layer -> its output as NCHW, of pieces of a batch together.

        Launches one by one, and reads each output before a later layer reuses its memory.
        """
        steps, layers = self.plan.steps, self.plan.layers
        found: dict[str, list[np.ndarray]] = {}
        last = {layer: i for i, step in enumerate(steps) for layer in step.covers}
        for i, step in enumerate(steps):
            self._launch(i)
            for k in step.covers:
                if last[k] == i:
                    found.setdefault(layers[k].op_name, []).append(self._values(layers[k].outputs[0]))
        return {name: self._asked(np.concatenate(pieces)) if pieces[1:] else pieces[0] for name, pieces in found.items()}

    def tensor(self, name: str) -> np.ndarray:
        """Returns the present content of the output `name` of a layer as NCHW. Raises ValueError if no layer has such an
        output.
        """
        for layer in reversed(self.plan.layers):
            for out in layer.outputs:
                if out.name == name:
                    return self._values(out)
        raise ValueError(f"no layer writes a tensor {name!r}")

    def _values(self, out: TensorPlace) -> np.ndarray:
        """Returns the present content of a layer's output memory as NCHW, without the rows that only fill the batch."""
        whole, first = out.whole, out.inside.channel if out.inside else 0
        flat = self._shared.gpu.read(self._shared.arena + whole.offset, whole.nbytes)
        values = from_memory(flat.view(DTYPES[whole.format.dtype]), whole.format, whole.shape4)
        if is_bytes(whole.format):  # as if stored in FP16: differences do not wrap
            values = values.astype(np.float16)
        return self._asked(values[:, first : first + out.shape4[1]])

    def _asked(self, values: np.ndarray) -> np.ndarray:
        """Returns values without the rows that only fill a batch; unchanged if their first axis is no multiple of the batch."""
        return values if len(values) % self._batch else values[: len(values) // self._batch * self.rows]

    def _launch(self, i: int) -> None:
        step = self.plan.steps[i]
        with self._shared.ranges(self._titles[i]):
            if isinstance(step, CallStep):
                return self._call(i, step)
            self._shared.gpu.launch(self._shared.kernels[step.key], step.grid, step.block, step.smem, self._params[i])

    def _call(self, i: int, step: CallStep) -> None:
        """Calls the library function of step number i.

        Its arrays may hold invalid values, such as indices out of range or a zero divisor, for which it fails or warns.
        """
        ins, out = self._arrays[i]
        function = bound(step.function, step.attributes, step.part)
        try:
            self._shared.gpu.call(function, ins, out, self.flags + 4 * i)
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as e:
            names = ", ".join(self.plan.layers[k].name for k in step.covers)
            why = f"{names}: {step.function} cannot run on its inputs: {e}"
            raise EngineError(f"{why}. Check the inputs, or build the engine again") from None

    def _launch_some(self, steps: Sequence[int]) -> None:
        """Launches these steps; if asked for, fills the memory with NaN that is free behind each."""
        for i in steps:
            self._launch(i)
            for offset, nbytes in self._frees.get(i, ()):
                self._fill(offset, nbytes)

    def _fill(self, offset: int, nbytes: int) -> None:
        """Fills `nbytes` of the arena from `offset` on with NaN."""
        values = np.full(-(-nbytes // 2), NAN_HALF).view(np.uint8)[:nbytes]
        self._shared.gpu.write(self._shared.arena + offset, values)
