"""Launches an engine's plan on the caller's own arrays and stream: nothing is copied, allocated or waited for.

An engine's launches name their tensors as offsets in an arena. Here an offset inside an input or output is the address of the
caller's array instead; the rest of the arena, such as the sums of a split K and their counters, exists once for each stream.
Fewer images take launches of their own, made from the same tactic in microseconds, on the same kernels and scratch memory.

    args of a launch    ("arena", 0)    ("arena", 4096)     ("weights", 0)     ("arena", 8192)
                        input x         output y            packed weights     counters
    a call's struct     x.data.ptr      out.data.ptr        shared copy        scratch of the stream
"""

from __future__ import annotations

import contextlib
import copy
import struct
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cuda_kernels.compile import compile_kernel
from cuda_kernels.launch import Cuda, Starter, fill_params
from cuda_kernels.params import offsets
from cuda_kernels.tensor_maps import Map
from gpu_runtime.engine import Engine
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import derive
from gpu_runtime.runtime.plan_record import Bound, LaunchStep
from tactics.candidates import accepts
from tactics.launches import launches
from tactics.problems.problem import ConvProblem

MOST_MAPS = 256  # tensor maps kept by address: encoding one takes longer than a launch


class Patch(NamedTuple):
    """A place in a launch's parameter struct where a call writes the address of a caller's array.

    `at`: its first byte in the struct; `array`: the number of the array; `delta`: bytes from the array's beginning; `given`:
    the tensor map of this address that the struct holds there, None for the address itself.
    """

    at: int
    array: int
    delta: int
    given: Map | None


class Prepared(NamedTuple):
    """A launch on a stream. `params`: its struct, whose patches each call fills in; `start`: starts it."""

    params: bytearray
    patches: tuple[Patch, ...]
    start: Starter


def _release(gpu: Cuda, held: list[int]) -> None:
    """Frees memory on which launches on any stream may still work."""
    with contextlib.suppress(RuntimeError), gpu.here():  # after a fatal error, or in a forked process, nothing runs
        gpu.cupy.cuda.runtime.deviceSynchronize()
    for address in held:
        gpu.free(address)


class Direct:
    """The launches of an engine of one plan on a GPU, whose memory lives as long as this object.

    Raises EngineError if the plan calls a library function.
    """

    def __init__(self, gpu: Cuda, engine: Engine) -> None:
        plan = engine.record.plan
        steps = [s for s in plan.steps if isinstance(s, LaunchStep)]
        if len(steps) < len(plan.steps):
            raise EngineError("an operator that runs as a library function cannot run on the caller's arrays")
        self._gpu, self._engine, self._memory, self._steps = gpu, engine, plan.memory, steps
        self._whole: Direct | None = None  # the owner of the memory, where that is another
        self._ends: Sequence[Bound] = (*plan.inputs, *plan.outputs)
        self._on: dict[int, list[Prepared]] = {}
        self._maps: dict[tuple[Map, int], bytes] = {}
        self._bases: dict[int, dict[str, int]] = {}  # stream -> where its arena, weights and flag begin
        self._kernels = [gpu.load(compile_kernel(s.kernel, dict(s.values), gpu.arch)) for s in self._steps]
        self._weights = gpu.share(engine.weights)
        self._held = [self._weights]
        weakref.finalize(self, _release, gpu, self._held).atexit = False

    def for_fewer(self, images: int, columns: int) -> Direct | None:
        """Returns the launches for fewer images or columns, by the same kernel in the same memory; None if it cannot compute
        these.
        """
        (layer, *more), none = self._engine.plan.layers, (0, 0)
        of, tactic = layer.problem, layer.tactic
        if more or tactic is None or not isinstance(of, ConvProblem):
            return None
        if not accepts(of := replace(of, n=images, w=columns), tactic, self._gpu.device):
            return None
        work = launches(of, tactic, derive.layer_strides(layer))
        spans = {derive.WORKSPACE: self._memory.workspace or none, derive.COUNTERS: (*self._memory.zeros, none)[0]}
        if any(getattr(launch, name) > nbytes for launch in work for name, (_, nbytes) in spans.items()):
            return None
        at = {name: section.offset for name, section in self._engine.record.weight_sections.items()}
        made = derive.steps(work, layer, 0, at, {name: offset for name, (offset, _) in spans.items()})
        steps = [s for s in made if isinstance(s, LaunchStep)]
        if [s.key for s in steps] != [s.key for s in self._steps]:
            return None
        found = copy.copy(self)
        found._steps, found._whole, found._on = steps, self, {}
        return found

    def is_ready(self, stream: int) -> bool:
        """Returns whether a run on this stream (a CUDA handle) allocates nothing."""
        return stream in self._bases

    def ready(self, stream: int) -> None:
        """Allocates scratch memory of the launches for this stream."""
        lowest, zeros = self._scratch()
        arena = self._gpu.allocate(max(self._memory.activation_bytes - lowest, 16)) - lowest
        flag = self._gpu.allocate(4)
        for offset, nbytes in (*zeros, (flag - arena, 4)):
            self._gpu.zero(arena + offset, nbytes)
        self._gpu.synchronize()  # the memory was cleared on another stream
        self._held += [arena + lowest, flag]
        self._bases[stream] = {"arena": arena, "weights": self._weights, "nonfinite": flag}

    def _prepared(self, stream: int) -> list[Prepared]:
        bases, prepared = self._bases[stream], []
        for step, kernel in zip(self._steps, self._kernels, strict=True):
            params = bytearray(fill_params(self._gpu, step.args, lambda arg: bases[arg[0]] + int(arg[1])))
            start = self._gpu.prepare(kernel, step.grid, step.block, step.smem, params)
            prepared.append(Prepared(params, tuple(self._patches(step)), start))
        self._on[stream] = prepared
        return prepared

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Queues the plan on the stream. `addresses`: of the inputs, then of the output."""
        for params, patches, start in self._on.get(stream) or self._prepared(stream):
            for at, array, delta, given in patches:
                address = addresses[array] + delta
                if given is None:
                    struct.pack_into("<Q", params, at, address)
                else:
                    params[at : at + 128] = self._maps.get((given, address)) or self._encoded(given, address)
            start(stream)

    def _encoded(self, given: Map, address: int) -> bytes:
        if len(self._maps) == MOST_MAPS:
            self._maps.clear()
        return self._maps.setdefault((given, address), self._gpu.encode(given, address))

    def _patches(self, step: LaunchStep) -> list[Patch]:
        found = []
        for at, (kind, value) in zip(offsets(step.args), step.args, strict=True):
            base, offset = value.of if kind == "map" else (kind, value)
            if base == "arena" and (place := self._end(int(offset))) is not None:
                found.append(Patch(at, *place, value if kind == "map" else None))
        return found

    def _end(self, offset: int) -> tuple[int, int] | None:
        """Returns (number of the input or output that holds an offset of the arena, bytes from its beginning)."""
        inside = ((i, offset - e.offset) for i, e in enumerate(self._ends) if e.offset <= offset < e.offset + e.nbytes)
        return next(inside, None)

    def _scratch(self) -> tuple[int, list[Any]]:
        """Returns (the lowest offset of the arena that belongs to no caller's array, the spans to clear there)."""
        used = [a[1].of if a[0] == "map" else a for s in self._steps for a in s.args]
        own = [int(v) for kind, v in used if kind == "arena" and self._end(int(v)) is None]
        zeros = [span for span in self._memory.zeros if self._end(span[0]) is None]
        return min([*own, *(offset for offset, _ in zeros)], default=self._memory.activation_bytes), zeros
