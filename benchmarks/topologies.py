"""Networks of torchvision and timm whose weights are drawn: topologies as exported, with each weight's mean and deviation.

`filled("tv_convnext_tiny")` is the model. The folder (GPU_RUNTIME_TOPOLOGIES) has NAME.onnx, without the data of its large
float weights, and NAME.json: {weight: [mean, deviation, least value]}. No network's activations exceed FP16's range.
"""

import json
import os
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

FOLDER = Path(os.environ.get("GPU_RUNTIME_TOPOLOGIES", Path(__file__).parents[2] / "shared" / "topologies"))
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.onnx")))

# Factors on the weights of convolutions. MobileOne adds up to six branches, each with the variance of one: its 43 sums grow 2.2
# times each, to 1e15. By quarters, which keep mantissas, they reach 35 at most.
SCALES = {"timm_mobileone_s0": 0.25}


def filled(name: str, seed: int = 0) -> onnx.ModelProto:
    """Returns the network with normal weights of their own means and deviations; weights that were positive, such as variances,
    stay positive.
    """
    model = onnx.load(FOLDER / f"{name}.onnx")
    drawn = json.loads((FOLDER / f"{name}.json").read_text())
    for k, t in enumerate(model.graph.initializer):
        if t.name in drawn:
            mean, deviation, least = drawn[t.name]
            a = np.random.default_rng(seed + k).normal(mean, deviation, tuple(t.dims))
            a = np.abs(a) + 1e-3 if least > 0 else a
            t.CopyFrom(numpy_helper.from_array(a.astype(np.float32), t.name))
    if name in SCALES:
        scaled = {node.input[1] for node in model.graph.node if node.op_type == "Conv"}
        for t in model.graph.initializer:
            if t.name in scaled:
                t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t) * np.float32(SCALES[name]), t.name))
    return model
