"""One tactic on a small problem, run on a GPU or in the emulator, and judged by the problem's reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from cuda_kernels.compile import compile_kernel
from cuda_kernels.launch import Cuda, Emulated
from tactics.format import DTYPES, from_memory, num_bytes, to_memory
from tactics.launches import launches, pack_weights
from tactics.measure.data import random_data, reference
from tactics.measure.worker import TOLERANCE, bind, relative_error, run_call, scratch_for
from tactics.problems.problem import Problem
from tactics.step import Call
from tactics.tactic import Tactic

Gpu = Cuda | Emulated
Run = Callable[[], None]
Around = Callable[[Gpu, Run, Run], None]  # does, once or otherwise, the launches of a tactic; poisons the output with NaN


class Wrong(Exception):
    """The kernel ran, and what it left is not what it should be; the message says what."""


def at_once(gpu: Gpu, run: Run, poison: Run) -> None:
    run()


def in_a_graph(gpu: Gpu, run: Run, poison: Run) -> None:
    """Captured, and replayed twice: where the graph did nothing, the poison would stay."""
    replay = gpu.record(run)
    for _ in range(2):
        gpu.synchronize()
        poison()
        replay()


def trial(gpu: Gpu, problem: Problem, tactic: Tactic, around: Around = at_once) -> float:
    """The relative error of a tactic's output on random data. Raises Wrong."""
    inputs, weights = random_data(problem)
    got = execute(gpu, problem, tactic, inputs, weights, around)
    return judge(problem, got, np.asarray(reference(problem, inputs, weights), np.float32))


def execute(
    gpu: Gpu, problem: Problem, tactic: Tactic, inputs: Sequence[np.ndarray], weights: Mapping[str, np.ndarray],
    around: Around = at_once,
) -> np.ndarray:  # fmt: skip
    """What a tactic makes of the inputs, NCHW with its padded channels; its output is poisoned with NaN before. Raises Wrong
    where counters are not left zero, or the launch tells something else of infinity and NaN than the output holds."""
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
        kernels = [None if isinstance(s, Call) else gpu.load(compile_kernel(s.kernel, dict(s.values), gpu.arch)) for s in steps]

        def run() -> None:
            for step, kernel in zip(steps, kernels, strict=True):
                if isinstance(step, Call):
                    run_call(gpu, step, ins, out, places, scratch[2])
                elif kernel is not None:
                    params = bind(step.args, ins, out, places, scratch)
                    gpu.launch(kernel, step.grid, step.block, step.smem, params)

        around(gpu, run, poison)
        flat = gpu.read(out, nbytes).view(DTYPES[tactic.out.dtype])
        if scratch[1] and gpu.read(scratch[1], max(s.counters for s in steps)).any():
            raise Wrong("counters are not zero after the launch")
        told, odd = bool(gpu.read(scratch[2], 4).any()), int((~np.isfinite(flat)).sum())
        if odd and not told:
            raise Wrong(f"{odd} of {flat.size} elements were never written, or are not finite and the launch does not tell")
        if told and not odd:
            raise Wrong("the launch tells of infinity or NaN, of which its output has none")
    finally:
        for address in (*ins, *places.values(), *filter(None, scratch), out):
            gpu.free(address)
    return from_memory(flat, tactic.out, problem.out_shape, padding=True)


def judge(problem: Problem, got: np.ndarray, expected: np.ndarray) -> float:
    """The relative error of an output as `execute` gives it. Raises Wrong for an element that is NaN or was never written, for
    padding that is not zero, and above TOLERANCE."""
    c = problem.out_shape[1]
    if missing := int(np.isnan(got.astype(np.float32)).sum()):
        raise Wrong(f"{missing} of {got.size} elements are NaN or were never written")
    if got[:, c:].any():
        raise Wrong("padded channels are not zero")
    error = relative_error(got[:, :c], expected)
    if not error < TOLERANCE:
        raise Wrong(f"relative error {error:.2e} of the output's range, at most {TOLERANCE:.0e} is allowed")
    return error
