"""The nine light topologies with seeded weights: each builds, its plan is proven and copies nothing it need not, and what the
kernels compute in the emulator is as near to FP32 as FP16 allows."""

import numpy as np
import onnx
import pytest
from onnx import helper
from ort_budget import budgets

import gpu_runtime as gr
from benchmarks.light import NAMES, light
from gpu_runtime.pipeline import DEFAULT_DEVICE

pytestmark = pytest.mark.slow

LARGE = ("light_bvlc_alexnet", "light_vgg19", "light_zfnet512")  # hundreds of megabytes of weights: one at a time
MARKS = {n: [pytest.mark.xdist_group("large"), *[pytest.mark.long] * (n != "light_bvlc_alexnet")] for n in LARGE}
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
        layer["name"] for layer in plan["layers"]
        if layer["type"] in ("concat", "move", "gather")
        or (layer["type"] == "reformat" and layer["inputs"][0]["format"] == layer["outputs"][0]["format"])
    ]  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in NAMES])
def test_light(name, tmp_path):
    path = tmp_path / f"{name}.onnx"
    onnx.save(with_scores(light(name)), path)
    engine = gr.build(path, device=DEFAULT_DEVICE)
    assert engine.plan["plan"]["status"] == "proven"
    x = engine.inputs[0]
    values = np.random.default_rng(5).standard_normal(x["shape"], np.float32) * np.float32(INPUT_SCALE.get(name, 1))
    with engine.context(device="emulator") as ctx:
        got = ctx.run({x["name"]: values})
    for output, budget in budgets(path, {x["name"]: values}).items():
        budget.check(got[output], f"{name}, output {output}")
    library = [layer["params"]["function"] for layer in engine.plan["layers"] if layer["type"] == "library"]
    assert library == ["LRN"] * 2 * (name in (*LARGE, "light_inception_v1") and name != "light_vgg19")
    assert not copies(engine.plan)
    written = [out for layer in engine.plan["layers"] if layer["type"] == "conv" for out in layer["outputs"]]
    pieces = {out["inside"]["format"] for out in written if "inside" in out}  # of Concats, written where they are joined
    assert pieces <= {"fp16:hwc8", "fp16:hwc16"} and bool(pieces) == (name in JOINING)
