"""A plan's steps as a context launches them: addresses in their arguments, names of their kernels, what they warn of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuda_kernels.launch import Array, pack_params
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime.plan_record import CallStep, LaunchStep
from gpu_runtime.text import not_finite, printable
from tactics.format import DTYPES


def struct(step: LaunchStep, bases: Mapping[str, int]) -> bytes:
    """A kernel's parameters with addresses in their places."""
    return pack_params(("ptr", bases[kind] + int(v)) if kind in bases else (kind, v) for kind, v in step.args)


def arrays(step: CallStep, bases: Mapping[str, int]) -> tuple[list[Array | None], Array]:
    """A function's inputs, and its output."""
    *ins, out = (a and Array(bases[a[0]] + a[1], DTYPES[a[2]], a[3]) for a in step.args)
    if out is None:
        raise EngineError(f"the engine's plan is wrong: {step.function} has no output. Build the engine again")
    return ins, out


def kernel_key(kernel: str, values: tuple[tuple[str, int], ...]) -> str:
    """The name under which an engine's file holds a kernel's machine code."""
    return f"{kernel}({','.join(f'{n}={v}' for n, v in values)})"


def warning(layers: Sequence[str], inputs: Mapping[str, np.ndarray], outputs: Mapping[str, Any]) -> str:
    """What to warn of where layers stored infinity or NaN: of the inputs, where those hold it already; empty without any."""
    if not layers:
        return ""
    if given := [f"input {name!r} holds {told}" for name, a in inputs.items() if (told := not_finite(a))]:
        return printable("; ".join(given))
    whole = all(np.isfinite(y).all() for y in outputs.values())
    told = f"{'layers' if whole else 'outputs'} hold infinite values or NaN, first written by {', '.join(layers[:3])}"
    return printable(f"{told}: FP16 ends at 65504; build with a calibration input")
