"""Networks of torchvision and timm whose weights are drawn: topologies as exported, with each weight's mean and deviation.

`filled("tv_convnext_tiny")` is the model. The folder (GPU_RUNTIME_TOPOLOGIES) has NAME.onnx, without the data of its large
float weights, and NAME.json: {weight: [mean, deviation, least value]}.
"""

import json
import os
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

FOLDER = Path(os.environ.get("GPU_RUNTIME_TOPOLOGIES", Path(__file__).parents[2] / "shared" / "topologies"))
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.onnx")))


def filled(name: str, seed: int = 0) -> onnx.ModelProto:
    """The network with normal weights of their own means and deviations; those that were positive, as variances, stay so."""
    model = onnx.load(FOLDER / f"{name}.onnx")
    drawn = json.loads((FOLDER / f"{name}.json").read_text())
    for k, t in enumerate(model.graph.initializer):
        if t.name in drawn:
            mean, deviation, least = drawn[t.name]
            a = np.random.default_rng(seed + k).normal(mean, deviation, tuple(t.dims))
            a = np.abs(a) + 1e-3 if least > 0 else a
            t.CopyFrom(numpy_helper.from_array(a.astype(np.float32), t.name))
    return model


def resized(model: onnx.ModelProto, size: int) -> onnx.ModelProto:
    """The network for images of size x size, where nothing in it is fixed to another."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for v in other.graph.input:
        for d in list(v.type.tensor_type.shape.dim)[2:]:
            d.dim_value = size
    del other.graph.value_info[:]
    for v in other.graph.output:
        v.type.tensor_type.ClearField("shape")
    return other
