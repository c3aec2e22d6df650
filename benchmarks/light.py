"""The light_* topologies of the onnx package with seeded weights: as published all of them are 0.02, outputs are uniform and
several overflow FP16.

`light("light_resnet50")` is the model. Convolutions and fully connected layers get He-normal weights (He et al. 2015), scales
of BatchNormalization half of the usual ones and variances about 1; the Caffe Scale layers behind it are Mul and Add.
"""

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gpu_runtime.frontend.files.check import readers_of
from gpu_runtime.frontend.files.load import inputs_of

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("light_*.onnx")))


def _centred(scale: float):
    return lambda rng, shape: scale * rng.standard_normal(shape)


def _around(centre: float):
    return lambda rng, shape: centre * (0.5 + rng.random(shape))


# (operator, number of the input) -> a function that draws a weight of a shape
VALUES = {
    ("Conv", 1): lambda rng, shape: math.sqrt(2 / math.prod(shape[1:])) * rng.standard_normal(shape),  # He-normal
    ("Conv", 2): _centred(0.1),
    ("Gemm", 1): lambda rng, shape: rng.standard_normal(shape) / math.sqrt(shape[1]),
    ("Gemm", 2): _centred(0.1),
    ("BatchNormalization", 1): _around(0.5),
    ("BatchNormalization", 2): _centred(0.1),
    ("BatchNormalization", 3): _centred(0.1),
    ("BatchNormalization", 4): _around(1.0),
    ("Mul", 1): _around(1.0),
    ("Add", 1): _centred(0.1),
}


def light(name: str, seed: int = 0) -> onnx.ModelProto:
    """Returns the topology of that name with weights drawn from `seed`. KeyError if an op reads a constant in a way that VALUES
    does not know.
    """
    model = onnx.load(FOLDER / f"{name}.onnx")
    graph, rng = model.graph, np.random.default_rng(seed)
    stored = {t.name: t for t in graph.initializer}
    shapes = {t.name: tuple(t.dims) for t in stored.values() if t.data_type == onnx.TensorProto.FLOAT}
    fills = [node for node in graph.node if node.op_type == "ConstantOfShape"]
    shapes |= {node.output[0]: tuple(numpy_helper.to_array(stored[node.input[0]]).tolist()) for node in fills}
    uses = readers_of(graph)

    def drawn(tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        node, slot = uses[tensor][0]
        while node.op_type in ("Reshape", "Unsqueeze"):
            node, slot = uses[node.output[0]][0]
        return VALUES[node.op_type, slot](rng, shape).astype(np.float32)

    gone = {node.input[0] for node in fills} | set(shapes)
    kept = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    weights = [numpy_helper.from_array(drawn(tensor, shape), tensor) for tensor, shape in shapes.items() if tensor in uses]
    weights += [t for t in graph.initializer if t.name not in gone]
    made = helper.make_graph(kept, name, inputs_of(graph), graph.output, weights)
    return helper.make_model(made, opset_imports=model.opset_import, ir_version=8)


def first_input(model: onnx.ModelProto) -> str:
    return inputs_of(model.graph)[0].name


def at_batch(model: onnx.ModelProto, batch: int) -> tuple[onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """Returns (the model with a dynamic batch, the name and shape of its first input with this many images)."""
    made = open_batch(model)
    first = inputs_of(made.graph)[0]
    return made, {first.name: (batch, *(d.dim_value for d in list(first.type.tensor_type.shape.dim)[1:]))}


def open_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with a dynamic batch, of its first input and of each Reshape to one row."""
    stored = {t.name: t for t in model.graph.initializer}
    for value in (*inputs_of(model.graph), *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "N"
    del model.graph.value_info[:]
    for node in model.graph.node:
        if node.op_type == "Reshape" and (shape := stored.get(node.input[1])):
            _, *rest = numpy_helper.to_array(shape).tolist()
            shape.CopyFrom(numpy_helper.from_array(np.array([-1, *rest]), shape.name))
    return model
