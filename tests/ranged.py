"""An engine of one batch in the place of one of a range: its context pads and cuts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

import gpu_runtime as gr


class Batch(int):
    """The first dimension of an engine of a range."""

    def __new__(cls, low: int, high: int):
        made = super().__new__(cls, high)
        made.min, made.max = low, high
        return made

    def __repr__(self) -> str:
        return f"{self.min}..{self.max}"

    __str__ = __repr__


class Ranged:
    def __init__(self, engine: gr.Engine, low: int = 1):
        self.engine, self.record = engine, engine.record
        self.points = (engine.inputs[0].shape[0],)
        batch = Batch(low, *self.points)
        self.inputs, self.outputs = (
            tuple(replace(spec, shape=(batch, *spec.shape[1:])) for spec in specs) for specs in (engine.inputs, engine.outputs)
        )

    def context(self, **options):
        context, most = self.engine.context(**options), self.points[0]

        def run(inputs):
            rows = len(next(iter(inputs.values())))
            padded = {n: np.concatenate([a, np.zeros((most - rows, *a.shape[1:]), a.dtype)]) for n, a in inputs.items()}
            return {name: y[:rows] for name, y in context.run(padded).items()}

        return SimpleNamespace(run=run, nonfinite=context.nonfinite, device=context.device, close=context.close)
