"""Tables of the ONNX operators that a network may have: the stages of elementwise ones, and groups by how channels pass.

Each operator is a row of pointwise_ops, a function of array_functions, or a name here.
"""

from collections.abc import Mapping

from tactics.problems import array_functions
from tactics.problems.pointwise_ops import ACTIVATIONS, FUNCTIONS, OPERATIONS
from tactics.problems.reductions import REDUCTIONS

# Operator -> its stages: (name in pointwise_ops, {attribute that is a parameter: its default}); attribute "": a fixed
# parameter.
UNARY: dict[str, tuple[tuple[str, Mapping[str, float]], ...]] = {
    **{row.onnx: ((name, row.parameters),) for name, row in (ACTIVATIONS | FUNCTIONS).items() if row.onnx},
    "Identity": (),
    "Neg": (("mul", {"": -1.0}),),
    "Reciprocal": (("rdiv", {"": 1.0}),),
    "Selu": (("elu", {"alpha": 1.6732632423543772}), ("mul", {"gamma": 1.0507009873554805})),
}
BINARY = {row.onnx: name for name, row in OPERATIONS.items() if row.onnx}
REDUCE = {"Reduce" + kind.title().replace("_", ""): kind for kind in REDUCTIONS if kind != "inv_std"}

RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
VIEWS = (*RESHAPES, "Transpose")  # the same values in another shape or order

# Groups by the elements that an output element depends on. ALIKE: the element at its place; JOINED: the elements at its place
# in inputs that broadcast; WINDOWS: a window of its channel; REDUCE: a row of elements. Operators in REST have rules of their
# own (gpu_runtime/pruning/channel_rules.py), or none.
ALIKE = (*UNARY, *array_functions.ALIKE, "Celu", "Swish")
JOINED = (*BINARY, *array_functions.JOINED, "Mean", "Sum")
WINDOWS = (*array_functions.WINDOWS, "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool")
REST = """
    BatchNormalization Constant Conv ConvTranspose DepthToSpace DequantizeLinear Dropout Einsum Gemm GroupNormalization
    InstanceNormalization LayerNormalization LogSoftmax MatMul Pad QuantizeLinear Resize Softmax SpaceToDepth Upsample
""".split()
OPERATORS = {*ALIKE, *JOINED, *WINDOWS, *REDUCE, *VIEWS, *array_functions.FUNCTIONS, *REST}
