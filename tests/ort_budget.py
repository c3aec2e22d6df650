"""The error that a correct FP16 engine may have, relative to the error that FP16 storage between ops causes in onnxruntime.

The reference is onnxruntime's FP32 output. The yardstick is its output for the same model with a Cast to FP16 and back after
every op. An engine's error may be 3 times the yardstick's, plus a root mean square of 1e-4 of the output's range.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper, shape_inference

import gpu_runtime as gr
from cuda_kernels.device import DEFAULT_DEVICE
from gpu_runtime.accuracy.rounding import in_fp32

FACTOR, RANGE_SHARE = 3, 1e-4
TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Budget:
    """The allowed error of one output: the FP32 `reference`, the relative L2 error of the yardstick, and the allowed one."""

    reference: np.ndarray
    fp16_error: float
    allowed: float

    def check(self, y: np.ndarray, what: str) -> float:
        """Returns the relative L2 error of output `y`. Raises AssertionError with the numbers if it is larger than allowed."""
        assert y.shape == self.reference.shape, f"{what}: {y.shape} is not {self.reference.shape}"
        assert np.isfinite(y).all(), f"{what}: {np.count_nonzero(~np.isfinite(y))} values are not finite"
        error = relative_l2(y, self.reference)
        text = f"{what}: error {error:.3e}, FP16 storage alone makes {self.fp16_error:.3e}, allowed {self.allowed:.3e}"
        assert error <= self.allowed, text
        return error


def budgets(path: str | os.PathLike, feeds: Mapping[str, np.ndarray]) -> dict[str, Budget]:
    """Returns output -> Budget for the model at `path` and these inputs."""
    model = in_fp32(onnx.load(path))
    feeds = {name: np.asarray(x, np.float32) for name, x in feeds.items()}
    reference, rounded = run(model, feeds), run(with_casts(model), feeds)
    if not all(np.isfinite(y).all() for y in rounded.values()):  # beyond FP16's range: its precision, 16 times further
        rounded = run(with_casts(model, 1 / 16), feeds)
    found = {}
    for name, y in reference.items():
        fp16_error = relative_l2(rounded[name], y)
        last_only = y.astype(np.float16).astype(np.float32)
        assert (rounded[name] != last_only).any(), f"output {name!r}: the Casts inside changed nothing: were they removed?"
        slack = RANGE_SHARE * float(np.ptp(y)) * np.sqrt(y.size) / max(np.linalg.norm(y), TINY)
        found[name] = Budget(y, fp16_error, FACTOR * fp16_error + slack)
    return found


def engine_within_budget(proto: onnx.ModelProto, path: Path, **options) -> gr.Engine:
    """Saves a model with FP32 inputs at `path` and returns its engine. Raises AssertionError if an output on random inputs
    exceeds its budget.
    """
    onnx.save(proto, path)
    engine = gr.build(path, device=DEFAULT_DEVICE, **options)
    feeds = {i.name: np.random.default_rng(1).uniform(-1, 1, i.shape).astype(np.float32) for i in engine.plan.inputs}
    with engine.context(device="emulator", poison=True) as ctx:
        got = ctx.run(feeds)
    for name, budget in budgets(path, feeds).items():
        budget.check(got[name], name)
    return engine


def relative_l2(y: np.ndarray, reference: np.ndarray) -> float:
    reference = reference.astype(np.float64)
    return float(np.linalg.norm(y - reference) / max(np.linalg.norm(reference), TINY))


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a model's outputs by onnxruntime on the CPU, without its graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def with_casts(model: onnx.ModelProto, scale: float = 1.0) -> onnx.ModelProto:
    """Returns the FP32 model with a Cast of each float tensor to FP16 and back after each op; constants are not changed.

    `scale`, a power of 2, multiplies tensors before the cast and divides them after it, for tensors outside FP16's range.
    """
    kinds = {v.name: v.type.tensor_type.elem_type for v in shape_inference.infer_shapes(model).graph.value_info}
    kinds |= {v.name: v.type.tensor_type.elem_type for v in model.graph.output}
    cast = onnx.ModelProto()
    cast.CopyFrom(model)
    nodes = list(cast.graph.node)
    del cast.graph.node[:]
    for name, value in (("down", scale), ("up", 1 / scale)):
        cast.graph.initializer.append(numpy_helper.from_array(np.float32(value), f"{name} to fp16's range"))
    for node in nodes:
        outputs = [] if node.op_type == "Constant" else [n for n in node.output if kinds.get(n) == TensorProto.FLOAT]
        for i, name in enumerate(node.output):
            if name in outputs:
                node.output[i] = f"{name} exact"
        cast.graph.node.append(node)
        for name in outputs:
            cast.graph.node.extend(
                (
                    helper.make_node("Mul", [f"{name} exact", "down to fp16's range"], [f"{name} scaled"]),
                    helper.make_node("Cast", [f"{name} scaled"], [f"{name} fp16"], to=TensorProto.FLOAT16),
                    helper.make_node("Cast", [f"{name} fp16"], [f"{name} back"], to=TensorProto.FLOAT),
                    helper.make_node("Mul", [f"{name} back", "up to fp16's range"], [name]),
                )
            )
    return cast
