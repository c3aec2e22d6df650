"""An engine of one batch in the place of one of a range: its context pads and cuts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

import gpu_runtime as gr
from gpu_runtime.engine import seal
from gpu_runtime.runtime.plan_record import Batch, Profile


class Ranged:
    def __init__(self, engine: gr.Engine, low: int = 1, takes: tuple[int, ...] = ()):
        self.engine, self.record = engine, engine.record
        most = engine.inputs[0].shape[0]
        self.points, batch = takes or (most,), Batch(low, (low, most), takes)
        self.inputs, self.outputs = (
            tuple(replace(spec, shape=(batch, *spec.shape[1:])) for spec in specs) for specs in (engine.inputs, engine.outputs)
        )

    def context(self, **options):
        context, most = self.engine.context(**options), self.points[-1]

        def run(inputs):
            rows = len(next(iter(inputs.values())))
            padded = {n: np.concatenate([a, np.zeros((most - rows, *a.shape[1:]), a.dtype)]) for n, a in inputs.items()}
            return {name: y[:rows] for name, y in context.run(padded).items()}

        return SimpleNamespace(run=run, nonfinite=context.nonfinite, device=context.device, close=context.close)


def of_range(engine: gr.Engine) -> gr.Engine:
    """An engine of one batch as an engine of the range from 1 to it, which pads to its one plan."""
    batch, plan = engine.inputs[0].shape[0], engine.plan
    names = tuple(b.name for b in (*plan.inputs, *plan.outputs))
    profile = Profile(min=1, opt=batch, max=batch, plans=(0,), batched=names)
    record = seal(replace(engine.record, profiles=(profile,)), engine.weights)
    return replace(engine, record=record)
