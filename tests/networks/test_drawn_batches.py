"""Drawn networks at drawn ranges of batches: each image as alone in the same plan, and within FP16's error of onnxruntime."""

import warnings
from collections import Counter

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import DEFAULT_DEVICE
from gpu_runtime.errors import ModelError
from gpu_runtime.runtime import sizes
from tests import drawn
from tests.gpu_runtime.planning.test_independent_images import RULES
from tests.networks.test_drawn import budgets
from tests.ort_budget import relative_l2
from tests.reference_run import model

GROUP = 10  # networks in one test


def network(seed: int) -> onnx.ModelProto:
    """A drawn network with an open batch, ops over it and moves of it among the others."""
    d = drawn.Drawn(f"batches {seed}")
    d.input(3, d.pick.choice((2, 3, 4, 8)), *(d.pick.choice((1, 2, 4)) for _ in "hw"))
    rules = [rule for rule in drawn.ALL if rule is not drawn.resize] if seed % 2 else RULES
    for _ in range(40):
        if len(d.nodes) < d.pick.randint(3, 8):
            d.pick.choice(rules)(d)
    shapes = {n.input[1] for n in d.nodes if n.op_type == "Reshape"}
    weights = {name: np.array([-1, *w[1:]]) if name in shapes else w for name, w in d.weights.items()}
    y = [t for t, shape in d.shapes.items() if t not in d.inputs and shape[:1] == (3,)] or [d.nodes[-1].output[0]]
    needed, nodes = {y[-1]}, []
    for n in reversed(d.nodes):
        if needed.intersection(n.output):
            nodes.insert(0, n)
            needed.update(n.input)
    proto = model(nodes, d.inputs, y[-1], {name: w for name, w in weights.items() if name in needed}, opset=19)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    del proto.graph.value_info[:]
    return proto


def of(proto: onnx.ModelProto, rows: int) -> onnx.ModelProto:
    """The network at that batch, for onnxruntime."""
    sized = onnx.ModelProto()
    sized.CopyFrom(proto)
    for value in sized.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = rows
    return sized


def judged(seed: int) -> str:
    """What became of the network: not imported, of exact batches only, or padded."""
    proto, rng = network(seed), np.random.default_rng(seed)
    (x,) = proto.graph.input
    image = [d.dim_value for d in x.type.tensor_type.shape.dim][1:]
    low, opt, high = sorted(int(n) for n in rng.integers(1, 10, 3))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = gr.build(proto, device=DEFAULT_DEVICE, shapes={x.name: [(n, *image) for n in (low, opt, high)]})
    except ModelError:
        return "not imported"
    profile = engine.record.profile
    with warnings.catch_warnings(), engine.context(device="emulator", poison=True) as ctx:
        warnings.simplefilter("ignore", RuntimeWarning)
        for rows in {low, high, *(int(n) for n in rng.integers(low, high + 1, 3))}:
            if profile and profile.exact and rows not in engine.points:
                with pytest.raises(ValueError, match="expected .* rows of"):
                    ctx.run({x.name: np.zeros((rows, *image), np.float32)})
                continue
            feeds = {x.name: rng.uniform(-1, 1, (rows, *image)).astype(np.float16).astype(np.float32)}
            answers = ctx.run(feeds)
            for name, budget in budgets(of(proto, rows), feeds).items():
                assert answers[name].shape == budget.reference.shape, (seed, rows, name)
                if np.isfinite(budget.reference).all():
                    assert relative_l2(answers[name], budget.reference) <= budget.allowed, (seed, rows, name)
            if profile and profile.batched and not profile.exact:
                batch = sizes.fit(engine.record, {x.name: feeds[x.name].shape}).batch
                for i in range(rows):  # a batch of this image alone, as many as the same plan has
                    alone = ctx.run({x.name: np.repeat(feeds[x.name][i : i + 1], batch, 0)})
                    for name, y in answers.items():
                        each, whole = len(y) // rows, alone[name]
                        own = y[i * each : (i + 1) * each]
                        assert all(np.array_equal(own, whole[k : k + each], equal_nan=True) for k in range(0, len(whole), each))
    return "exact" if profile and profile.exact else "padded"


def judge(seeds: range) -> Counter[str]:
    return Counter(judged(seed) for seed in seeds)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 60, GROUP))
def test_drawn_batches(first):
    found = judge(range(first, first + GROUP))
    assert found["padded"] + found["exact"] >= GROUP // 2, found


@pytest.mark.long
@pytest.mark.parametrize("first", range(60, 660, GROUP))
def test_many_drawn_batches(first):
    judge(range(first, first + GROUP))
