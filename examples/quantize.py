"""From FP32 to an INT8 engine with 2:4 weights, by onnxruntime's quantiser; accuracy on digits in FP16, INT8 and INT8 with 2:4.

It needs a clone of gpu_runtime, whose trained networks of digits it takes, onnxruntime, and the extras `build` and one that
runs engines (`cuda13`, or `emulator` without a GPU, where times are predicted):

    python -m examples.quantize [DEVICE]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

import gpu_runtime as gr

DIGITS = Path(__file__).parents[1] / "benchmarks" / "digits"
CALIBRATION, BATCH = 120, 120  # images that the quantiser sees; of an inference


class Reader(CalibrationDataReader):
    """The calibration images, one after the other."""

    def __init__(self, images: np.ndarray) -> None:
        self._left = iter(images[:, None])

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self._left, None)
        return None if image is None else {"x": image}


def quantize(source: Path, target: Path, images: np.ndarray) -> None:
    """Writes a model with QuantizeLinear and DequantizeLinear around every Conv and Gemm: int8, zero points 0, so that zeros of
    2:4 weights stay zeros."""
    options = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
    model = onnx.version_converter.convert_version(onnx.load(source), 19)  # FP16 scales, as of FP16 weights, came with opset 19
    quantize_static(
        model,
        target,
        Reader(images),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        op_types_to_quantize=["Conv", "Gemm", "Add"],
        extra_options=options,
    )


def accuracy(engine: gr.Engine, x: np.ndarray, y: np.ndarray) -> float:
    with engine.context() as context:
        found = [next(iter(context.run({"x": x[i : i + BATCH]}).values())).argmax(axis=1) for i in range(0, len(x), BATCH)]
    return float((np.concatenate(found) == y).mean())


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else None
    held_out = np.load(DIGITS / "heldout.npz")
    x, y = held_out["x"].astype(np.float32), held_out["y"]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("digits_dense", "digits_sparse"):
            quantized = Path(folder) / f"{name}_int8.onnx"
            quantize(DIGITS / f"{name}.onnx", quantized, x[:CALIBRATION])
            for kind, path in (("FP16", DIGITS / f"{name}.onnx"), ("INT8", quantized)):
                engine = gr.build(path, device=device, sparsity="enable", shapes={"x": (BATCH, 1, 8, 8)})
                plan = engine.record.plan
                whole, sparse = list(plan.int8.values()).count(""), len(plan.sparsity.picked)
                counts = f"{whole} layers in INT8, {sparse} sparse, {len(plan.steps)} launches"
                print(
                    f"{name} {kind}: {accuracy(engine, x, y):.2%} of {len(x)} images, {counts}, {plan.solution.total_us:.1f} us"
                )


if __name__ == "__main__":
    main()
