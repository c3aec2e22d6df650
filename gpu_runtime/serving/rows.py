"""Joins requests of some rows each into runs of one context, for every server.

It has no thread and no queue: the server decides when a batch begins and who waits. A wrong request fails alone, before
anything runs.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.driver import is_fatal
from gpu_runtime.engine import Engine, load
from gpu_runtime.errors import EngineError
from gpu_runtime.progress import warn
from gpu_runtime.runtime.arrays import check_names, kind
from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.fields import Batch, TensorSpec
from gpu_runtime.text import dims, printable

Arrays = Mapping[str, np.ndarray]


class Failure(NamedTuple):
    """A request's error, in words.

    `kind`: "request", the request is wrong or fills no batch; "run", its run failed; "fatal", its run failed and so will
    every later run, because this process has lost the GPU.
    """

    kind: str
    message: str


class Run(NamedTuple):
    """One run: its number of rows, and its time in seconds.

    `point`: the batch size to which the rows were padded; `nonfinite`: the layers that stored infinity or NaN.
    """

    rows: int
    point: int
    seconds: float
    nonfinite: tuple[str, ...]


class Joined(NamedTuple):
    """The answer to each request, in the requests' order: its outputs by name, or its failure; and the runs that took place."""

    answers: tuple[Arrays | Failure, ...]
    runs: tuple[Run, ...] = ()


def sizes(engine: Engine) -> Batch:
    """Returns the numbers of rows that a run of this engine takes.

    If they are `exact`, only these numbers run, and each request alone, since its rows may depend on each other. Raises
    EngineError unless each input and output has this batch.
    """
    specs = (*engine.inputs, *engine.outputs)
    if len({str(spec.shape[:1]) for spec in specs}) != 1 or not specs[0].shape:
        raise EngineError(
            "a server joins requests along the first dimension, which has to be the batch in every input and output, got "
            f"{', '.join(map(str, specs))}: export the model with its batch first"
        )
    return _batch(specs[0])


def _batch(spec: TensorSpec) -> Batch:
    rows = spec.shape[0]
    return rows if isinstance(rows, Batch) else Batch(rows, (rows, rows), (rows,))


def point(engine: Engine, rows: int) -> int | None:
    """Returns the batch size at which this many rows run; None if they cannot."""
    size = sizes(engine)
    if size.exact:
        return rows if rows in size.exact else None
    return next((p for p in engine.points if p >= rows >= size.min), None)


def opened(path: str | os.PathLike[str], device: str) -> tuple[Engine, Context]:
    """Opens the engine in a file, and a context on `device`. Raises EngineError if that fails.

    Warns if the engine's tactics were chosen on another GPU of the architecture.
    """
    engine = load(path)
    sizes(engine)
    context = engine.context(device=device)
    here, built = context.device, engine.record.device
    if here.model != built.model:
        text = f"{path}: its tactics were chosen for {built.title}, this is {here.title}: build it here to be faster"
        warn(text, UserWarning)
    return engine, context


def checked(inputs: Sequence[TensorSpec], request: Any) -> int:
    """Returns the number of rows of a request, a mapping of arrays.

    Raises TypeError or ValueError unless it has each input, all with the same number of rows, from 1 to as many as a run
    takes.
    """
    check_names(inputs, request)
    size = _batch(inputs[0])
    rows = str(size) if size.exact else f"1 to {size.max}"
    for spec in inputs:
        array, wanted = request[spec.name], f"{spec.name}: expected {rows} rows of {dims(spec.shape[1:])} {spec.dtype}"
        if not isinstance(array, np.ndarray):
            raise TypeError(printable(f"{wanted} in a NumPy array, got {kind(array)}"))
        if array.shape[1:] != spec.shape[1:] or array.dtype != spec.dtype or array.ndim == 0:
            if array.ndim and array.shape[1:] == spec.shape[1:]:
                raise ValueError(printable(f"{spec.name}: expected {spec.dtype}, got {array.dtype}"))
            raise ValueError(printable(f"{wanted}, got an array {dims(array.shape)} {array.dtype}"))
        if not 1 <= len(array) <= size.max:
            raise ValueError(printable(f"{wanted}, got {len(array)}"))
    counts = {spec.name: len(request[spec.name]) for spec in inputs}
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{name} {rows}" for name, rows in counts.items())
        raise ValueError(printable(f"expected the same number of rows in every input, got {got}"))
    return next(iter(counts.values()))


def answer(engine: Engine, context: Context, requests: Sequence[Any]) -> Joined:
    """Answers all requests in as few runs as possible, and returns the answers and the runs.

    If all requests together have fewer rows than a run takes, they fail. An engine of exact batches runs only requests of
    such a number of rows, each alone. If a run of several requests fails, each of them runs alone, so that only faulty ones
    fail.
    """
    size = sizes(engine)
    answers: dict[int, Arrays | Failure] = {}
    counts: dict[int, int] = {}
    for i, request in enumerate(requests):
        try:
            counts[i] = checked(engine.inputs, request)
        except (TypeError, ValueError) as e:
            answers[i] = Failure("request", str(e))
    runs: list[Run] = []
    groups: list[list[int]] = []
    for i, rows in counts.items():
        room = (g for g in groups if not size.exact and sum(counts[k] for k in g) + rows <= size.max)
        if (found := next(room, None)) is None:
            groups.append(found := [])
        found.append(i)
    while groups:
        group = groups.pop(0)
        rows = sum(counts[i] for i in group)
        if (batch := point(engine, rows)) is None:
            few, cure = f"expected {size} rows in a run, got {rows}", "send exactly so many in one request"
            if not size.exact:
                few += f" from {len(group)} requests that waited together"
                cure = "send as many in one request, let requests wait longer, or build an engine for smaller batches"
            answers |= dict.fromkeys(group, Failure("request", f"{few}: {cure}"))
            continue
        try:
            outputs, run = _run(context, [requests[i] for i in group], rows, batch)
        except Exception as e:  # it becomes the answer: an error of one run must not fail the server's other requests
            if len(group) > 1 and all(point(engine, counts[i]) for i in group) and not is_fatal(e):
                groups[:0] = [[i] for i in group]
            else:
                answers |= dict.fromkeys(group, Failure("fatal" if is_fatal(e) else "run", str(e) or type(e).__name__))
            continue
        runs.append(run)
        for i, (low, high) in zip(group, pairwise(accumulate((counts[i] for i in group), initial=0)), strict=True):
            answers[i] = {name: array[low:high] for name, array in outputs.items()}
    return Joined(tuple(answers[i] for i in range(len(requests))), tuple(runs))


def _run(context: Context, requests: Sequence[Arrays], rows: int, point: int) -> tuple[dict[str, Any], Run]:
    """Runs these requests once and returns (the outputs of all rows by name, the run's record).

    `rows`: their total; `point`: the batch size at which they run.
    """
    together = requests[0] if len(requests) == 1 else {n: np.concatenate([r[n] for r in requests]) for n in requests[0]}
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of infinite values and NaN: each run reports them
        outputs = context.run(together)
    seconds = time.perf_counter() - start
    return outputs, Run(rows, point, seconds, tuple(context.nonfinite()))
