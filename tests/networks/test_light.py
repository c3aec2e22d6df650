"""The nine light topologies with seeded weights: each builds, its plan is proven and copies nothing it need not, and what the
kernels compute in the emulator is as near to FP32 as FP16 allows."""

import time

import numpy as np
import onnx
import pytest
from onnx import helper

import gpu_runtime as gr
from benchmarks.light import NAMES, light
from cuda_kernels import device
from cuda_kernels.device import DEFAULT_DEVICE
from gpu_runtime.frontend import importer
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from gpu_runtime.planning import io_formats, tables
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.planning.counterfactuals import ops_by_layer
from tactics.measure import timing
from tactics.planner import plan
from tactics.planner.forced_plans import forced
from tests.engines import emulated
from tests.ort_budget import budgets

pytestmark = pytest.mark.slow

LARGE = ("light_bvlc_alexnet", "light_vgg19", "light_zfnet512")  # hundreds of megabytes of weights: one at a time
FULL = ("light_bvlc_alexnet", "light_densenet121", "light_inception_v1", "light_inception_v2", "light_resnet50")
MARKS = {n: [pytest.mark.full] if n in FULL else [pytest.mark.long] * (n in LARGE) for n in NAMES}
MARKS = {n: [*marks, *[pytest.mark.xdist_group("large")] * (n in LARGE)] for n, marks in MARKS.items()}
JOINING = ("light_densenet121", "light_inception_v1", "light_inception_v2", "light_shufflenet", "light_squeezenet")
# Without BatchNormalization each of its 13 max pools makes activations larger: of a usual input the softmax would be 0 or 1.
INPUT_SCALE = {"light_inception_v1": 1 / 16}


def with_scores(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with what its Softmax reads, if it has one, as an output too."""
    for node in model.graph.node:
        if node.op_type == "Softmax":
            model.graph.output.append(helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, None))
    return model


def copies(plan: dict) -> list[str]:
    """Layers that only bring elements elsewhere: joins, parts, shuffles, and reformats from a format to itself."""
    return [
        layer.name
        for layer in plan.layers
        if layer.type in ("concat", "move", "gather")
        or (layer.type == "reformat" and str(layer.inputs[0].format) == str(layer.outputs[0].format))
    ]


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks) for n, marks in MARKS.items()])
def test_light(name, tmp_path):
    path = tmp_path / f"{name}.onnx"
    onnx.save(with_scores(light(name)), path)
    engine = gr.build(path, device=DEFAULT_DEVICE)
    assert engine.plan.solution.status == "proven"
    x = engine.plan.inputs[0]
    values = np.random.default_rng(5).standard_normal(x.shape, np.float32) * np.float32(INPUT_SCALE.get(name, 1))
    got = emulated(engine, {x.name: values})
    for output, budget in budgets(path, {x.name: values}).items():
        budget.check(got[output], f"{name}, output {output}")
    library = [layer.problem.function for layer in engine.plan.layers if layer.type == "library"]
    assert library == ["LRN"] * 2 * (name in (*LARGE, "light_inception_v1") and name != "light_vgg19")
    assert not copies(engine.plan)
    written = [out for layer in engine.plan.layers if layer.type == "conv" for out in layer.outputs]
    pieces = {str(out.inside.format) for out in written if out.inside}  # of Concats, written where they are joined
    assert pieces <= {"fp16:hwc8", "fp16:hwc16", "fp16:chw32"} and bool(pieces) == (name in JOINING)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in LARGE)) for n in FULL])
def test_every_layer_with_weights_is_lowered(name, tmp_path):
    model = light(name)
    onnx.save(model, tmp_path / "m.onnx")
    network = fuse.fuse(lower.lower(importer.read(tmp_path / "m.onnx")))
    assert len({op.layer for op in network.ops if op.layer}) == sum(n.op_type in ("Conv", "Gemm") for n in model.graph.node)


@pytest.mark.full
def test_inception_is_planned_and_every_counterfactual_equals_a_solve(tmp_path, monkeypatch):
    """Merged siblings' too, of which several ops exist at once where they are apart: no layer is solved by itself."""
    onnx.save(light("light_inception_v1"), tmp_path / "inception.onnx")
    network = alternatives(fuse.fuse(lower.lower(importer.sized(importer.load(tmp_path / "inception.onnx", prune=True)))))
    target = device.named(DEFAULT_DEVICE)
    ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
    table = tables.tabulate(network, target, timing.Predicted(target), io=ends, how=tables.Considered(True))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        best = plan.solve(table.graph)
        seconds.append(time.process_time() - start)
    assert best.status == "proven" and min(seconds) < 0.3  # 0.1 on a quiet machine
    ops = [op for op in network.ops if op.layer and plan.holds(op.when, best.options)]
    wanted = {op.layer: not best.entries[op.name].sparse for op in ops}
    names = {layer: tuple(op.name for op in same) for layer, same in ops_by_layer(network, wanted).items()}
    with monkeypatch.context() as patch:
        patch.setattr(plan, "solve", None)
        found = dict(zip(wanted, forced(table.graph, best, [(names[x], wanted[x]) for x in wanted]), strict=True))
    merged = [layer for layer in wanted if " || " in layer and found[layer]]
    assert len(merged) > 5 and len(list(filter(None, found.values()))) > 30
    for layer in [*merged, *list(wanted)[::4]]:
        force = dict.fromkeys(names[layer], lambda e, sparse=wanted[layer]: e.sparse == sparse)
        if found[layer] is None:
            with pytest.raises(ValueError, match="no plan exists"):
                plan.solve(table.graph, force=force)
        else:
            assert plan.solve(table.graph, force=force).total_ps == found[layer].total_ps, layer
            assert {e.sparse for e in found[layer].after} == {wanted[layer]}
