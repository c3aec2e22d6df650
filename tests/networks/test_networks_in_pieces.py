"""Every network at hand in pieces of a batch: the answers of the whole batch, bit by bit where all tactics are the same."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks import light, topologies
from benchmarks.plan_records import MODELS
from gpu_runtime.errors import ModelError
from tactics.problems.batches import sizes_of
from tests.engines import resized
from tests.gpu_runtime.planning.test_batch_pieces import forced
from tests.reference_run import relative_error

BATCH, SIZE = 3, 64
NAMES = (*sorted(path.stem for path in MODELS.glob("*.onnx")), *light.NAMES, *topologies.NAMES)
SLOW = ("super_resolution_10", "squeezenet11_fp16", "tv_mobilenet_v3_large", "timm_ghostnet_100")
MARKS = dict.fromkeys(SLOW, pytest.mark.full) | {"resnet20_cifar10": ()}  # all others are long


def at_batch(name: str) -> onnx.ModelProto:
    """The network for some images, small ones where it takes them."""
    if name in topologies.NAMES:
        return resized(light.open_batch(topologies.filled(name)), SIZE)
    return light.open_batch(light.light(name) if name in light.NAMES else onnx.load(MODELS / f"{name}.onnx"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, pytest.mark.long)) for n in NAMES])
def test_answers_in_pieces_are_those_of_the_whole_batch(monkeypatch, name):
    model = at_batch(name)
    first = light.first_input(model)
    declared = next(v for v in model.graph.input if v.name == first).type.tensor_type.shape.dim
    image = tuple(d.dim_value or SIZE for d in list(declared)[1:])
    shapes = {first: (BATCH, *image)}
    try:
        whole = gr.build(model, device="l4", shapes=shapes)
    except ModelError as e:
        pytest.skip(f"fixed to another batch: {e}")
    forced(monkeypatch, lambda n: sizes_of(n, 2) if n == BATCH else (n,))
    engine = gr.build(model, device="l4", shapes=shapes)
    if not any(layer.images for layer in engine.plan.layers):
        pytest.skip("no block of this network computes images apart")
    (spec,) = engine.inputs
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, spec.shape) if spec.dtype.kind in "ui" else rng.uniform(0, 1, spec.shape)
    found = []
    for each in (whole, engine):
        with each.context(device="emulator", checks=False) as context:
            found.append(context.run({first: x.astype(spec.dtype)}))
    tactics = [{layer.op_name: layer.tactic for layer in e.plan.layers if layer.tactic} for e in (whole, engine)]
    for output, y in found[0].items():
        if tactics[0] == tactics[1]:
            assert found[1][output].tobytes() == y.tobytes(), output
        assert relative_error(found[1][output].astype(np.float64), y) < 5e-3, output
