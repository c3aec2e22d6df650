"""Helpers of a context: the device for an engine, a plan's steps for launching, the names of their kernels, and their
warnings.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cuda_kernels import device as devices
from cuda_kernels.device import Device
from cuda_kernels.launch import EMULATOR_OPTIONS, Array, Cuda, Emulated, fill_params
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime.compatibility import check_device, planned_device
from gpu_runtime.runtime.plan_record import CallStep, EngineData, LaunchStep, PlanRecord
from gpu_runtime.text import not_finite, printable, suggest
from tactics.format import DTYPES


def check_arguments(engine: object, options: Mapping[str, object]) -> None:
    """Raises TypeError if a context is made from an object that is no engine, or with an unknown option."""
    if not isinstance(engine, EngineData):
        raise TypeError(f"engine: expected an Engine, as gpu_runtime.load and build return, got {type(engine).__name__}")
    if unknown := next((n for n in options if n not in EMULATOR_OPTIONS), None):
        known = ("device", "graph", "warm", "nvtx", "poison", "max_queued", "progress", *EMULATOR_OPTIONS)
        raise TypeError(f"context: unknown option {unknown!r}, expected one of {', '.join(known)}{suggest([unknown], known)}")


@contextmanager
def chosen(device: object) -> Iterator[str | None]:
    """Yields the `device` option without its number ("cuda:1" gives "cuda"); meanwhile the GPU of that number is the current
    one.

    Raises ValueError for another text, EngineError for a number that no GPU has.
    """
    kind, colon, number = device.partition(":") if isinstance(device, str) else (device, "", "")
    if kind not in (None, "emulator", "cuda") or (colon and not (kind == "cuda" and number.isdecimal())):
        raise ValueError(f"device: expected None, 'cuda', 'cuda:N' with the number of a GPU, or 'emulator', got {device!r}")
    count = devices.num_gpus() if colon else 0
    if not count:  # device_for says why there is none
        yield kind
        return
    if int(number) >= count:
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        cure = "nvidia-smi lists this machine's GPUs, CUDA_VISIBLE_DEVICES leaves some"
        raise EngineError(f"device: expected {there}, because CUDA shows {count} here, got {device!r}; {cure}")
    import cupy

    with cupy.cuda.Device(int(number)):
        yield kind


def device_for(engine: EngineData, device: str | None) -> Device:
    """Returns the device that the engine runs on: the current GPU for "cuda", the engine's own device for "emulator".

    None: the GPU if there is one, else the emulator. Raises EngineError without a GPU or with one that differs from the
    engine's; ModuleNotFoundError without CuPy.
    """
    if device == "emulator" or (device is None and not devices.has_gpu()):
        return planned_device(engine.record.device)
    if device is not None and devices.has_cupy() and (why := devices.why_no_gpu()):
        raise EngineError(f"device: no GPU can be used here: {why}; device='emulator' runs the same kernels on the CPU")
    current = devices.current()
    check_device(engine.record.device, current.sm)
    return current


def plans_of(engine: EngineData) -> tuple[PlanRecord, ...]:
    """Returns the engine's plans with their steps. Raises EngineError if a plan contradicts its layers; plans from a file are
    checked when it is read.
    """
    if engine.checked:
        return engine.record.plans
    from gpu_runtime.runtime import verify  # imports every family of kernels

    return verify.checked(engine.record, engine.weights).plans


def struct(gpu: Cuda | Emulated, step: LaunchStep, bases: Mapping[str, int]) -> bytes:
    """Returns the bytes of a kernel's parameter struct with addresses filled in. `bases`: kind of memory -> its address."""
    return fill_params(gpu, step.args, lambda arg: bases[arg[0]] + int(arg[1]))


def arrays(step: CallStep, bases: Mapping[str, int]) -> tuple[list[Array | None], Array]:
    """Returns (a library function's inputs, None for an absent one; its output) as arrays. `bases`: kind of memory -> its
    address.
    """
    *ins, out = (a and Array(bases[a.at[0]] + a.at[1], DTYPES[a.dtype], a.shape) for a in step.args)
    if out is None:
        raise EngineError(f"the engine's plan is wrong: {step.function} has no output. Build the engine again")
    return ins, out


def kernel_key(kernel: str, values: tuple[tuple[str, int], ...]) -> str:
    """Returns the name of a kernel's machine code in an engine's file."""
    return f"{kernel}({','.join(f'{n}={v}' for n, v in values)})"


def flagged(plan: PlanRecord, flags: np.ndarray) -> list[str]:
    """Returns the layers of steps whose flag is set: they stored infinity or NaN. Layers that only pass on a mask are left out.

    `flags`: a word per step of the plan.
    """
    masked = _masked(plan)
    found: dict[str, None] = {}
    for layer in (plan.layers[k] for i in np.flatnonzero(flags) for k in plan.steps[i].covers):
        tensors = layer.inputs if layer.type == "reformat" else layer.outputs
        if not masked.issuperset(t.name for t in tensors):
            found[layer.name] = None
    return list(found)


def _masked(plan: PlanRecord) -> frozenset[str]:
    return frozenset(plan.range.masked if plan.range else ())


def warning(plan: PlanRecord, layers: Sequence[str], inputs: Mapping[str, np.ndarray], outputs: Mapping[str, Any]) -> str:
    """Returns the warning for layers that stored infinity or NaN; "" if `layers` is empty.

    If inputs already contain infinity or NaN, the warning names only these; else the first three layers, and whether outputs
    hold such values.
    """
    if not layers:
        return ""
    masked = _masked(plan)
    arrays = ((name, np.where(np.isneginf(a), 0, a) if name in masked else a) for name, a in inputs.items())
    if given := [f"input {name!r} holds {text}" for name, a in arrays if (text := not_finite(a))]:
        return printable("; ".join(given))
    whole = all(np.isfinite(y).all() for y in outputs.values())
    text = f"{'layers' if whole else 'outputs'} hold infinite values or NaN, first written by {', '.join(layers[:3])}"
    return printable(f"{text}: FP16's maximum is 65504; build with a calibration input")
