"""A trial of one tactic: its launches run on a GPU or in the emulator, its output is judged by the problem's reference."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.compile import compile_kernel
from cuda_kernels.launch import Array, Cuda, Emulated, Kernel, fill_params
from tactics.format import DTYPES, from_memory, num_bytes, to_memory
from tactics.launches import launches, pack_weights
from tactics.problems.array_functions import bound
from tactics.problems.problem import Problem
from tactics.sampling.data import random_data, reference
from tactics.step import Arg, Call, CallArray, Launch
from tactics.tactic import Tactic

TOLERANCE = 2e-3  # the largest allowed relative_error: the output is rounded to FP16, FP32 sums have another order
Gpu = Cuda | Emulated
Run = Callable[[], None]
Around = Callable[[Gpu, Run, Run], None]  # takes (gpu, a run of the launches, a fill of their output with NaN) and runs them


class Scratch(NamedTuple):
    """Device addresses; `nonfinite`: of a word that becomes nonzero if a result has an infinity or NaN. 0: none is needed."""

    workspace: int = 0
    counters: int = 0
    nonfinite: int = 0


class Addresses(NamedTuple):
    """The device addresses of a tactic's inputs, output, sections of weights, and scratch memory."""

    ins: Sequence[int]
    out: int
    weights: Mapping[str, int]
    scratch: Scratch

    def of(self, arg: Arg) -> int:
        """Returns the address that an argument names."""
        kind, value = arg
        if kind == "in":
            return self.ins[value]
        if kind == "weights":
            return self.weights[value]
        return self.out if kind == "out" else int(getattr(self.scratch, kind))


class Wrong(Exception):
    """Raised when a kernel ran and its result is wrong; the message says in which way."""


def relative_error(y: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference divided by the range of `expected`; NaN if either array has a NaN. NumPy or CuPy arrays.

    The divisor is at least a third of the largest magnitude: FP16 rounds even an array of equal values by up to 2^-11.
    """
    span = float(expected.max() - expected.min())
    return float(abs(y.astype(np.float32) - expected).max()) / max(span, float(abs(expected).max()) / 3, 1e-6)


def scratch_for(gpu: Cuda | Emulated, steps: Sequence[Launch | Call]) -> Scratch:
    """Returns a new workspace (uninitialised), counters and the nonfinite word (both zero), for launches that run one after the
    other. The caller frees them.
    """
    workspace, counters = max((s.workspace for s in steps), default=0), max((s.counters for s in steps), default=0)
    made = Scratch(gpu.allocate(workspace) if workspace else 0, gpu.allocate(counters) if counters else 0, gpu.allocate(4))
    for address, nbytes in ((made.counters, counters), (made.nonfinite, 4)):
        if nbytes:
            gpu.write(address, np.zeros(nbytes, np.uint8))
    return made


def bind(gpu: Gpu, args: Sequence[Arg], at: Addresses) -> bytes:
    """Returns the bytes of a launch's parameter struct, in which arguments that name tensors become device addresses."""
    return fill_params(gpu, args, at.of)


def run_call(gpu: Gpu, call: Call, at: Addresses) -> None:
    """Runs a library function on the arrays at these device addresses."""

    def array(given: CallArray) -> Array:
        return Array(at.of(given.at), DTYPES[given.dtype], given.shape)

    function = bound(call.function, dict(call.attributes), call.part)
    gpu.call(function, [a and array(a) for a in call.ins], array(call.out), at.scratch.nonfinite)


def loaded(gpu: Gpu, steps: Sequence[Launch | Call]) -> list[Kernel | None]:
    """Returns the compiled and loaded kernel of each launch; None in place of a library function's."""
    return [None if isinstance(s, Call) else gpu.load(compile_kernel(s.kernel, dict(s.values), gpu.arch)) for s in steps]


def runner(gpu: Gpu, steps: Sequence[Launch | Call], kernels: Sequence[Kernel | None], at: Addresses) -> Run:
    """Returns a function that runs the steps, with their kernels, on the arrays at these addresses."""

    def one(step: Launch | Call, kernel: Any) -> Run:
        if isinstance(step, Call):
            return partial(run_call, gpu, step, at)
        return partial(gpu.launch, kernel, step.grid, step.block, step.smem, bind(gpu, step.args, at))

    runs = [one(step, kernel) for step, kernel in zip(steps, kernels, strict=True)]

    def run() -> None:
        for each in runs:
            each()

    return run


def at_once(gpu: Gpu, run: Run, poison: Run) -> None:
    run()


def in_a_graph(gpu: Gpu, run: Run, poison: Run) -> None:
    """Captures the run in a CUDA graph, then twice fills the output with NaN and replays the graph: NaN remains in elements
    that a replay does not write.
    """
    replay = gpu.record(run)
    for _ in range(2):
        gpu.synchronize()
        poison()
        replay()


def trial(gpu: Gpu, problem: Problem, tactic: Tactic, around: Around = at_once) -> float:
    """Returns the relative error of a tactic's output on random data. `around`: how the launches run (see Around). Raises
    Wrong."""
    inputs, weights = random_data(problem, formats=tactic.ins)
    got = execute(gpu, problem, tactic, inputs, weights, around)
    return judge(got, np.asarray(reference(problem, inputs, weights), np.float32), problem.out_shape[1])


def execute(
    gpu: Gpu,
    problem: Problem,
    tactic: Tactic,
    inputs: Sequence[np.ndarray],
    weights: Mapping[str, np.ndarray],
    around: Around = at_once,
) -> np.ndarray:
    """Runs a tactic and returns its output, NCHW with the format's padded channels. The output's memory holds NaN before the
    run.

    `inputs`, `weights`: random_data's. Raises Wrong if a launch leaves counters that are not zero, or if its report on infinity
    and NaN disagrees with the output.
    """
    sections = pack_weights(problem, tactic, weights)
    images = [to_memory(x, fmt) for x, fmt in zip(inputs, tactic.ins, strict=True)]
    nbytes, steps = num_bytes(tactic.out, problem.out_shape), launches(problem, tactic)
    ins = [gpu.allocate(image.nbytes) for image in images]
    places = {name: gpu.allocate(array.nbytes, constant=True) for name, array in sections.items()}
    scratch, out = scratch_for(gpu, steps), gpu.allocate(nbytes)
    try:
        for address, array in zip([*ins, *places.values()], [*images, *sections.values()], strict=True):
            gpu.write(address, array)
        poison = partial(gpu.write, out, np.full(nbytes, 0xFF, np.uint8))
        poison()
        around(gpu, runner(gpu, steps, loaded(gpu, steps), Addresses(ins, out, places, scratch)), poison)
        flat = gpu.read(out, nbytes).view(DTYPES[tactic.out.dtype])
        if scratch.counters and gpu.read(scratch.counters, max(s.counters for s in steps)).any():
            raise Wrong("counters are not zero after the launch")
        reported, odd = bool(gpu.read(scratch.nonfinite, 4).any()), int((~np.isfinite(flat)).sum())
        if odd and not reported:
            raise Wrong(f"{odd} of {flat.size} elements were never written, or are not finite without a report by the launch")
        if reported and not odd:
            raise Wrong("the launch reports infinity or NaN, but its output is finite")
    finally:
        for address in (*ins, *places.values(), *filter(None, scratch), out):
            gpu.free(address)
    return from_memory(flat, tactic.out, problem.out_shape, padding=True)


def judge(got: Any, expected: Any, channels: int, images: Any = None) -> float:
    """Returns the relative error of an output [n, padded channels, h, w] whose first `channels` count; NumPy or CuPy arrays.

    `images`: the indices in `got` of the images that `expected` holds; None: all. Raises Wrong for a NaN or an element that was
    never written, for padding that is not zero, and for an error above TOLERANCE.
    """
    if missing := int((got != got).sum()):
        raise Wrong(f"{missing} of {got.size} elements are NaN or were never written")
    if bool((got[:, channels:] != 0).any()):
        raise Wrong("padded channels are not zero")
    error = relative_error((got if images is None else got[images])[:, :channels], expected)
    if not error < TOLERANCE:
        raise Wrong(f"relative error {error:.2e} of the output's range, at most {TOLERANCE:.0e} is allowed")
    return error
