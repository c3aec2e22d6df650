"""Helpers for tests of whole engines: build a model, run it in the emulator, compare the outputs with onnxruntime's."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

import gpu_runtime as gr
from cuda_kernels.device import DEFAULT_DEVICE
from gpu_runtime.engine import Engine
from tests.reference_run import ort_run, relative_error

TYPES = {"fp32": np.float32, "fp16": np.float16, "uint8": np.uint8}
BOUND = 2e-3
SPARSE_DEVICE = "rtx3090"  # predicted plans pick sparse kernels there for smaller networks than on an H200
Arrays = Mapping[str, np.ndarray]


def build(folder: Path, proto: onnx.ModelProto, **options) -> Engine:
    """Saves a model as m.onnx in the folder and returns its engine; `options`: of gpu_runtime.build."""
    onnx.save(proto, folder / "m.onnx")
    return gr.build(folder / "m.onnx", device=DEFAULT_DEVICE, **options)


def emulated(engine: Engine, feeds: Arrays, **options) -> dict[str, np.ndarray]:
    """Returns the outputs of one run in the emulator, in which memory that the plan says is free holds NaN."""
    with engine.context(device="emulator", poison=True, **options) as ctx:
        return ctx.run(feeds)


def judge(engine: Engine, model: onnx.ModelProto | Path, feeds: Arrays, **options) -> dict[str, np.ndarray]:
    """Runs an engine and returns its outputs. Raises AssertionError unless each is within BOUND of onnxruntime's for `model`:
    in relative L2 norm, and in every element relative to the largest. `feeds`: FP32 arrays, converted to the inputs' types.
    """
    types = {i.name: TYPES[i.dtype] for i in engine.plan.inputs}
    got = emulated(engine, {name: x.astype(types[name]) for name, x in feeds.items()}, **options)
    for name, y in ort_run(model, dict(feeds)).items():
        assert relative_error(got[name], y) < BOUND, name
        assert np.abs(got[name] - y).max() <= BOUND * np.abs(y).max(), name
    return got


def check_engine(folder: Path, proto: onnx.ModelProto, **options) -> Engine:
    """Builds and runs a model; returns the engine if its outputs on random inputs agree with onnxruntime's."""
    engine = build(folder, proto, **options)
    rng = np.random.default_rng
    judge(engine, proto, {i.name: rng(0).uniform(-1, 1, i.shape).astype(np.float32) for i in engine.plan.inputs})
    return engine


def resized(model: onnx.ModelProto, size: int) -> onnx.ModelProto:
    """Returns the network for images of size x size, if nothing in it is fixed to another size."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for v in other.graph.input:
        for d in list(v.type.tensor_type.shape.dim)[2:]:
            d.dim_value = size
    del other.graph.value_info[:]
    for v in other.graph.output:
        v.type.tensor_type.ClearField("shape")
    return other
