"""The result of `compare`: an engine's outputs, and its layers' tensors, compared with its model's."""

from dataclasses import asdict, dataclass
from typing import Any

from gpu_runtime.accuracy.errors import Accuracy, finite
from gpu_runtime.accuracy.metrics import Judge
from gpu_runtime.runtime.fields import Told


@dataclass(frozen=True, slots=True)
class Row:
    """The comparison of one tensor that the engine and the model both have.

    `layer`: the engine's layer that writes the tensor, "" for an output. `error`: L2 norm of the difference / L2 norm of the
    model's tensor; `alone`: the same quotient for the model with tensors rounded to FP16; `allowed`: the largest `error` that
    passes, None with --rtol or --atol; `beyond`: the number of elements outside of --rtol and --atol. `largest`: the largest
    difference of an element, `share`: the same as a share of the tensor's range. `changed`: the number of integers that differ.
    `ruined`: an output fails, and would fail by rounding tensors to FP16 alone.
    """

    layer: str
    tensor: str
    error: float
    alone: float
    allowed: float | None
    largest: float
    beyond: int
    passed: bool
    changed: int = 0
    share: float = 0.0
    ruined: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores by the metric of `judge`: of the engine, of the model with the engine's weights in FP32, and of the original
    model (None if the build did not prune).
    """

    judge: Judge
    engine: float
    model: float
    original: float | None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Told):
    """An engine compared with its model; `print` shows it as `gpu-runtime compare` does.

    `samples`: the number of samples, along the inputs' first axis; `outputs`, `layers`: in the engine's order; `unnamed`:
    layers whose tensors the ONNX graph does not have; `emulated`: the engine ran in the emulator; `same_file`: the model is the
    file that the engine was built from; `scores`: None without labels. `pruning`: the accuracy of the pruned model compared
    with the original, and `pruning_error`, the relative difference of their outputs; None unless the build pruned.
    """

    samples: int
    outputs: tuple[Row, ...]
    layers: tuple[Row, ...]
    unnamed: tuple[str, ...]
    emulated: bool
    same_file: bool
    pruning: Accuracy | None = None
    pruning_error: float | None = None
    scores: Scores | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `gpu-runtime compare --json` prints; null stands for infinity and NaN."""

        def row(r: Row) -> dict[str, Any]:
            found = {key: finite(value) for key, value in asdict(r).items()}
            return found | {"layer": r.layer or None, "fp16_alone": found.pop("alone")}

        s, p = self.scores, self.pruning
        pruning = {"error": self.pruning_error, "snr_db": finite(p.snr_db), "agreement": p.agreement} if p else None
        return {
            "schema_version": 1,
            "passed": self.passed,
            "samples": self.samples,
            "emulated": self.emulated,
            "same_file": self.same_file,
            "first_divergence": self.first.layer if self.first else None,
            "outputs": [*map(row, self.outputs)],
            "layers": [*map(row, self.layers)],
            "not_compared": self.unnamed,
            "scores": {"metric": s.judge.name, "engine": s.engine, "model": s.model, "original": s.original} if s else None,
            "pruning": pruning,
        }

    @property
    def passed(self) -> bool:
        """Whether all outputs are within tolerance; layers do not count."""
        return all(r.passed for r in self.outputs)

    @property
    def first(self) -> Row | None:
        """The row of the first layer, in execution order, whose tensor is not within tolerance; None if all tensors are."""
        return next((r for r in self.layers if not r.passed), None)
