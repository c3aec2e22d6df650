"""Drawn networks of quantised tensors: whatever formats and places a plan gives them, values are NumPy's, to the last bit."""

import io
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels.device import named
from gpu_runtime.assembly import assemble
from gpu_runtime.building.record import Built, engine_record, plan_record, solution_of
from gpu_runtime.engine import Engine
from gpu_runtime.network import Network, Op, TensorInfo
from gpu_runtime.planning import tables
from gpu_runtime.rewrites import integers
from gpu_runtime.runtime.findings import SparsityRecord
from gpu_runtime.runtime.plan_record import Flags, Model
from tactics.format import Format, is_bytes
from tactics.measure import timing
from tactics.planner import plan
from tactics.problems.gather import ViewProblem
from tactics.problems.pointwise_ops import Stage
from tactics.problems.problem import ConcatProblem, MoveProblem, PointwiseProblem, PoolProblem
from tactics.problems.protocol import Problem

DEVICE = named("h200")
ENDS = {"int8": (-128.0, 127.0), "uint8": (0.0, 255.0)}
Shape = tuple[int, int, int, int]


class Drawn:
    """A network while it is drawn; all scales are powers of two, so that FP32 and FP16 are exact."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.type = self.r.choice(("int8", "uint8"))
        self.ops: list[Op] = []
        self.shapes: dict[str, Shape] = {}

    def add(self, problem: Problem, *inputs: str) -> str:
        name = f"t{len(self.ops)}"
        self.ops.append(Op(f"op{len(self.ops)}", problem, inputs, name))
        self.shapes[name] = problem.out_shape
        return name

    def quantized(self, *inputs: str) -> str:
        """A sum of tensors, or one, times a scale, then rounded; of images, negative numbers, and halves."""
        shape = self.shapes[inputs[0]]
        stages = (*([Stage("add", "t1")] if inputs[1:] else []), Stage("mul", params=(self.r.choice((0.5, 1.0, 2.0)),)))
        end = Stage("quantize", params=ENDS[self.type])
        return self.add(PointwiseProblem(*shape, (*stages, end), ("nchw",) * len(inputs)), *inputs)

    def more(self, x: str) -> str:
        """Another tensor of whole numbers."""
        n, c, h, w = self.shapes[x]
        same = [t for t, shape in self.shapes.items() if shape == (n, c, h, w)]
        joined = [t for t, (m, k, *hw) in self.shapes.items() if m == n and hw == [h, w] and k <= 64 and t != "x"]
        kind = self.r.choice(("pool", "joined", "joined", "part", "sum", "rows", "upsample"))
        if kind == "pool" and h > 1 < w:
            return self.add(PoolProblem(n, c, h, w, "max", 3, 3, (-(-h // 2), -(-w // 2)), stride=(2, 2), pad=(1, 1, 1, 1)), x)
        if kind == "joined" and c <= 64:
            parts = [x, self.r.choice(joined)]
            return self.add(ConcatProblem(tuple(self.shapes[t][1] for t in parts), (n, h, w)), *parts)
        if kind == "part" and c > 8:
            first = self.r.choice([f for f in (0, 8, 16, 32) if f < c])
            size = self.r.choice([k for k in (1, 8, 16, 32, c - first) if first + k <= c])
            return self.add(MoveProblem(n, c, h, w, "window", (size, h, w), start=(first, 0, 0)), x)
        if kind == "rows":
            return self.add(ViewProblem((n, c, h, w), (n, c, h * w, 1)), x)
        if kind == "upsample" and h * w <= 16:
            return self.add(MoveProblem(n, c, h, w, "upsample", (c, 2 * h, 2 * w), step=(1, 2, 2)), x)
        return self.quantized(x, self.r.choice(same)) if same[1:] else self.quantized(x)

    def network(self) -> Network:
        shape = self.r.choice(((1, 3, 8, 6), (2, 16, 4, 4), (1, 40, 3, 5), (2, 24, 1, 1)))
        self.shapes["x"] = shape
        x = self.quantized("x")
        for _ in range(self.r.randint(3, 8)):
            x = self.more(self.r.choice([t for t in self.shapes if t != "x"][-3:]))
        y = self.add(PointwiseProblem(*self.shapes[x], (Stage("mul", params=(0.25,)),)), x)
        ends = [TensorInfo(t, self.shapes[t], "fp32", self.shapes[t]) for t in ("x", y)]
        return integers.mark(Network("drawn", (ends[0],), (ends[1],), self.shapes, tuple(self.ops)))


class Times:
    """Predicted times, each times a drawn factor; those of tactics with bytes a tenth of that."""

    def __init__(self, seed: int) -> None:
        self.failures: dict = {}
        self.seed, self.times = seed, timing.Predicted(DEVICE)

    def __call__(self, problem, tactics):
        def factor(t) -> float:
            return random.Random(f"{self.seed} {t}").choice((0.3, 1, 3)) * (0.1 if any(map(is_bytes, (*t.ins, t.out))) else 1)

        rows = self.times(problem, tactics)
        return {
            t: replace(time, us=time.us * f, low_us=time.us * f, high_us=time.us * f)
            for t, time in rows.items()
            for f in [factor(t)]
        }

    def __getattr__(self, name):
        return getattr(self.times, name)


def values(network: Network, x: np.ndarray) -> dict[str, np.ndarray]:
    found = {"x": x}
    for op in network.ops:
        ins = [found[t] for t in op.inputs]
        found[op.output] = (
            ins[0].reshape(op.problem.out_shape) if isinstance(op.problem, ViewProblem) else op.problem.reference(*ins)
        )
    return found


def engine_of(network: Network, seed: int) -> Engine:
    ends = {t.name: Format("fp32", "chw") for t in (*network.inputs, *network.outputs)}
    t = tables.tabulate(network, DEVICE, Times(seed), io=ends, how=tables.Considered(False))
    chosen = plan.solve(t.graph)
    data, arena = assemble.assemble(t, chosen)
    record = plan_record(data, (SparsityRecord("disable", (), (), ()), solution_of(chosen)))
    return Engine(engine_record(Model("m"), t.device, Built(Flags("disable"), data.sections, (record,))), arena)


def loaded(engine: Engine) -> Engine:
    """The engine as its file gives it back, after every check of what it launches."""
    file = io.BytesIO()
    engine.save(file)
    return gr.load(file.getvalue())


def stored(engine: Engine) -> Iterator[tuple]:
    for layer in engine.plan.layers:
        for t in layer.tensors:
            yield layer.type, t.format, t.inside is not None


def judged(seed: int) -> list[tuple]:
    network = Drawn(seed).network()
    engine = loaded(engine_of(network, seed))
    x = np.random.default_rng(seed).integers(-300, 600, network.inputs[0].shape4).astype(np.float32) / 2
    expected = values(network, x)
    with engine.context(device="emulator", poison=True) as ctx:
        y = ctx.run({"x": x})[network.outputs[0].name]
        traced = ctx.trace({"x": x})
    assert np.array_equal(y, expected[network.outputs[0].name])
    made = {op.name: op.output for op in network.ops}
    for name, array in traced.items():
        if name in made:
            assert np.array_equal(array.reshape(-1), expected[made[name]].reshape(-1)), name
    return [s for s in stored(engine) if is_bytes(s[1])]


@pytest.mark.parametrize("seed", range(16))
def test_drawn_networks(seed):
    assert judged(seed)


def test_drawn_networks_reach_every_way():
    """Reformats, parts inside others, ops that move nothing, and both layouts."""
    found = [s for seed in range(16) for s in stored(engine_of(Drawn(seed).network(), seed)) if is_bytes(s[1])]
    assert {kind for kind, _, _ in found} >= {"reformat", "pointwise", "pool", "move", "concat", "noop"}
    assert {str(fmt) for _, fmt, _ in found} == {f"{t}:{layout}" for t in ENDS for layout in ("hwc16", "chw32")}
    assert any(inside for _, _, inside in found)
