"""gpu_runtime as a runner of Polygraphy: `polygraphy run model.onnx --onnxrt --gpu-runtime` compares it with onnxruntime.

Polygraphy finds `arg_groups` through the entry point polygraphy.run.plugins. It is optional: nothing else imports this module.
"""

import argparse
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.common.struct import BoundedShape
from polygraphy.tools.args import ModelArgs
from polygraphy.tools.args import util as args_util
from polygraphy.tools.args.base import BaseRunnerArgs
from polygraphy.tools.script import Script, make_invocable

import gpu_runtime
from gpu_runtime.building.options import SPARSITY
from gpu_runtime.runtime import sizes
from gpu_runtime.runtime.context import Context
from gpu_runtime.runtime.fields import Batch


class GpuRuntimeRunner(BaseRunner):
    """Runs a model, or an engine that was built from one, on the GPU at hand, else in the emulator.

    `path`: of an ONNX model, which is built with `options` (gpu_runtime.build's) when the runner is activated; or, ending with
    .engine, of an engine.
    """

    def __init__(self, path: str, name: str | None = None, **options: Any) -> None:
        super().__init__(name=name, prefix="gpu-runtime-runner")
        self._path, self._options = path, options

    def activate_impl(self) -> None:
        is_engine = self._path.endswith(".engine")
        engine = gpu_runtime.load(self._path) if is_engine else gpu_runtime.build(self._path, **self._options)
        # Named, a device is planned for with predicted times, so that there may be none of it here.
        self.context: Context = engine.context(device="emulator" if self._options.get("device") else None)

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for info in sizes.specs(self.context.engine.record, self.context.plan.inputs):
            b, *rest = info.shape or (0,)
            shape = BoundedShape([-1, *rest], min=(b.min, *rest), max=(b.max, *rest)) if isinstance(b, Batch) else info.shape
            metadata.add(info.name, dtype=info.dtype, shape=shape)
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        begun = time.perf_counter()
        outputs = self.context.run(dict(feed_dict))
        self.inference_time = time.perf_counter() - begun
        return outputs

    def deactivate_impl(self) -> None:
        self.context.close()
        del self.context


class GpuRuntimeRunnerArgs(BaseRunnerArgs):
    """
    gpu_runtime: building and running engines with gpu_runtime.

    Depends on:

        - ModelArgs
    """

    def get_name_opt_impl(self) -> tuple[str, str]:
        return "gpu_runtime", "gpu-runtime"

    def add_parser_args_impl(self) -> None:
        self.group.add_argument("--gpu-runtime-engine", help="Run this engine instead of one that is built of the model.")
        self.group.add_argument("--gpu-runtime-sparsity", choices=SPARSITY, help="As --sparsity of build-engine.")
        self.group.add_argument("--gpu-runtime-device", help="As --device of build-engine; the engine runs in the emulator.")

    def parse_impl(self, args: argparse.Namespace) -> None:
        given = {name: args_util.get(args, f"gpu_runtime_{name}") for name in ("engine", "sparsity", "device")}
        self.engine = given.pop("engine")
        self.options = {name: value for name, value in given.items() if value is not None}

    def add_to_script_impl(self, script: Script) -> None:
        model = self.arg_groups[ModelArgs]
        shapes = {name: tuple(shape) for name, (_, shape) in model.input_shapes.items()}
        options = self.options | ({"shapes": shapes} if shapes else {})
        script.add_import(imports=["GpuRuntimeRunner"], frm="gpu_runtime.polygraphy_runner")
        script.add_runner(make_invocable("GpuRuntimeRunner", self.engine or model.path, **options))


def arg_groups() -> list[BaseRunnerArgs]:
    """Returns the argument groups that this module adds to `polygraphy run`."""
    return [GpuRuntimeRunnerArgs()]
