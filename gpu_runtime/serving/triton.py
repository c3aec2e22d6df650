"""NVIDIA Triton's python backend: the class for a model's model.py, which `gpu-runtime triton-repo` writes. It imports a module
that exists only in Triton's own process.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from gpu_runtime.errors import EngineError
from gpu_runtime.serving.metrics import COUNTERS, counts
from gpu_runtime.serving.rows import Arrays, Failure, answer, opened


class TritonPythonModel:
    """One instance of a model: an engine with a context of its own, on the GPU that Triton chose."""

    def initialize(self, args: dict[str, str]) -> None:
        _check_tensors()
        emulate = json.loads(args["model_config"])["parameters"].get("emulate", {}).get("string_value") == "true"
        path = Path(args["model_repository"], args["model_version"], "model.engine")
        self.engine, self.context = opened(path, "emulator" if emulate else f"cuda:{args['model_instance_device_id']}")
        self.labels = {"model": args["model_name"], "version": args["model_version"]}
        make, kind = pb_utils.MetricFamily, pb_utils.MetricFamily.COUNTER
        self.families = {name: make(name=name, description=text, kind=kind) for name, (_, text) in COUNTERS.items()}
        self.counters: dict[tuple[str, str], Any] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        joined = answer(self.engine, self.context, [{t.name(): t.as_numpy() for t in r.inputs()} for r in requests])
        for name, amount, value in counts(joined):
            if (counter := self.counters.get((name, value))) is None:
                labels = self.labels | ({COUNTERS[name][0]: value} if value else {})
                counter = self.counters[name, value] = self.families[name].Metric(labels=labels)
            counter.increment(amount)
        return [_response(a) for a in joined.answers]

    def finalize(self) -> None:
        self.context.close()


def _response(answer: Arrays | Failure) -> Any:
    if not isinstance(answer, Failure):
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in answer.items()])
    codes = pb_utils.TritonError
    code = {"request": codes.INVALID_ARG, "run": codes.INTERNAL, "fatal": codes.UNAVAILABLE}[answer.kind]
    return pb_utils.InferenceResponse(error=codes(answer.message, code))


def _check_tensors() -> None:
    """Raises EngineError if Triton's tensors lose their values on the way, as stubs made for NumPy 1 do under NumPy 2.

    See python_backend#384.
    """
    sent = np.arange(6, dtype=np.float32).reshape(2, 3)
    got = pb_utils.Tensor.from_dlpack("x", pb_utils.Tensor("x", sent).to_dlpack()).as_numpy()
    if not np.array_equal(sent, got):
        raise EngineError(
            f"Triton's python backend lost a tensor's values under NumPy {np.__version__}: expected {sent.tolist()}, got "
            f"{got.tolist()}. Install NumPy 1 in its Python environment: pip install 'numpy<2'"
        )
