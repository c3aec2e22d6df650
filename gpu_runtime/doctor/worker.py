"""The child process that runs the doctor's cases, checks and rates: `python -m gpu_runtime.doctor.worker [DEVICE]`.

It uses the GPU at hand or, if a DEVICE is named, the emulator of this GPU. Each request is a line with a JSON object on
standard input, each answer a line on standard output, with the request's id:

    (start)                  {"device": device, "facts": {...}}, {"none": why there is no GPU} or {"error": text}
    {"op": "case", "problem": {...}, "tactic": name}     {"error_of": relative error}
    {"op": "check", "name": one of CHECKS}               {}
    {"op": "rate", "name": one of RATES}                 {"value": number or null}

A wrong result is answered by {"wrong": text}, an exception by {"error": text, "fatal": bool, "passing": bool}: "fatal" if the
process can serve no further request, "passing" if the machine was at fault.
"""

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from cuda_kernels.device import Device, current, named, why_no_gpu
from cuda_kernels.launch import Emulated, open_gpu
from gpu_runtime.doctor.measured_rates import RATES, SMALL
from tactics import codec as records
from tactics.candidates import candidates
from tactics.format import to_memory
from tactics.launches import launches
from tactics.measure.child import Answer, serve
from tactics.measure.worker import Bench
from tactics.problems import codec
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import PointwiseProblem
from tactics.sampling.trial import Addresses, Gpu, Wrong, in_a_graph, loaded, runner, scratch_for, trial
from tactics.tactic import Tactic

COUNTED = PointwiseProblem(1, 64, 64, 64, (Stage("add", params=(1.0,)),))
LINKS = 32  # launches of a chain; each adds 1, and FP16 holds this sum exactly


def graphs(gpu: Gpu) -> None:
    """Checks that a launch captured into a CUDA graph computes correct results. Raises Wrong if it does not."""
    trial(gpu, SMALL, candidates(SMALL, gpu.device)[0], in_a_graph)


def dependent_launches(gpu: Gpu) -> None:
    """Checks a chain of LINKS launches that are queued at once; each adds 1 to the output of the launch before it.

    From sm_90 on each launch begins before the previous launch has ended. Raises Wrong if an element of the last output is not
    LINKS.
    """
    tactic = candidates(COUNTED, gpu.device)[0]
    steps = launches(COUNTED, tactic)
    zeros = to_memory(np.zeros(COUNTED.out_shape, np.float16), tactic.ins[0])
    at, scratch = [gpu.allocate(zeros.nbytes) for _ in range(2)], scratch_for(gpu, steps)
    for address in at:
        gpu.write(address, zeros)
    kernels = loaded(gpu, steps)
    links = [runner(gpu, steps, kernels, Addresses([at[i % 2]], at[1 - i % 2], {}, scratch)) for i in range(LINKS)]
    for link in links:
        link()
    got = gpu.read(at[LINKS % 2], zeros.nbytes).view(np.float16)
    for address in (*at, *filter(None, scratch)):
        gpu.free(address)
    if missing := int((got != LINKS).sum()):
        raise Wrong(f"{missing} of {got.size} elements have not passed through all of {LINKS} launches")


CHECKS: dict[str, Callable[[Gpu], None]] = {"CUDA graphs": graphs, "dependent launches": dependent_launches}


class _Bed:
    """The GPU, or the emulator, on which the doctor's requests run."""

    def __init__(self, device: Device):
        self.gpu = open_gpu(device)

    def facts(self) -> dict[str, str]:
        """Returns the CUDA versions that only a process with a CUDA context can read; {} in the emulator."""
        if isinstance(self.gpu, Emulated):
            return {}
        runtime = self.gpu.cupy.cuda.runtime
        found = {"CUDA of the driver": runtime.driverGetVersion(), "CUDA of CuPy": runtime.runtimeGetVersion()}
        return {name: f"{number // 1000}.{number % 1000 // 10}" for name, number in found.items()}

    @cached_property
    def bench(self) -> Bench:
        """The bench that measures rates, made for the first of them."""
        return Bench(self.gpu.device)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request as the module describes it, without the id; errors but Wrong are raised."""
        try:
            if request["op"] == "case":
                problem, tactic = codec.from_json(request["problem"]), Tactic.parse(request["tactic"])
                return {"error_of": trial(self.gpu, problem, tactic)}
            if request["op"] == "check":
                CHECKS[request["name"]](self.gpu)
                return {}
            return {"value": RATES[request["name"]](self.bench)}
        except Wrong as e:
            return {"wrong": str(e)}


def begin() -> tuple[dict[str, Any], Answer | None]:
    """Returns (the first line of the worker as a JSON object, the function that answers requests).

    The object has "device" and "facts". Without a GPU it has "none", the reason, and the function is None.
    """
    device = named(sys.argv[1]) if len(sys.argv) > 1 else None
    if device is None and (reason := why_no_gpu()):
        return {"none": reason}, None
    bed = _Bed(device or current())
    return {"device": records.to_json(Device, bed.gpu.device), "facts": bed.facts()}, bed.answer


if __name__ == "__main__":
    serve(begin)
