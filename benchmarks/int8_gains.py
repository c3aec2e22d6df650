"""Predicted gains of INT8: of ResNet-50's convolutions on some GPUs, and of five layers that TensorRT has timed.

    python -m benchmarks.int8_gains [--devices l4,rtx4090,orin_agx64,a100] [--batch 32]

Times are sums over the 52 convolutions behind the stem, each by its fastest tactic with vectors in and out. INT8 reads and
writes bytes, and the residual is bytes too; 2:4 may be dense where that is faster. No GPU has timed our products of bytes:
the shares of the peak that their main loops reach are simulated from machine code (docs/cycles.md), as FP16's are.
"""

import argparse
from functools import lru_cache

from benchmarks.published_rows import resnet
from cuda_kernels.device import Device, named
from tactics.candidates import candidates
from tactics.predict import predict_us
from tactics.problems.epilogue import RELU, Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.step import linear

Layer = tuple[int, int, int, int, int, bool]  # channels, height and width, output channels, taps' rows, stride, residual
# TensorRT 8.6 on an A100 PCIe, batch 32, microseconds of a 3x3 in FP16 and in INT8 that writes INT8: NVIDIA/TensorRT,
# tools/experimental/trt-engine-explorer/examples/pytorch/resnet/A100, fp16 and qat-residual, less 6.2 us of profiling a layer.
TENSORRT: dict[Layer, tuple[float, float]] = {
    (64, 56, 64, 3, 1, False): (47.0, 25.5),
    (64, 56, 64, 3, 1, True): (47.0, 28.6),
    (128, 28, 128, 3, 1, False): (34.8, 21.4),
    (256, 14, 256, 3, 1, False): (33.7, 18.4),
    (512, 7, 512, 3, 1, False): (43.0, 22.5),
}


def resnet50() -> list[Layer]:
    """Returns the convolutions behind the stem; the stride is the 3x3's."""
    _, *convolutions, _ = resnet("resnet50", 1)
    return [(p.c, p.h, p.k, p.r, p.stride[0], p.epilogue.residual) for p in convolutions]


@lru_cache(maxsize=1024)
def best_us(layer: Layer, batch: int, device: Device, int8: bool, sparse: bool) -> float:
    """Returns the predicted microseconds of the fastest dense tactic, or with `sparse` of the fastest of all."""
    c, size, k, r, stride, residual = layer
    act = Activation("quantize", (0.0, 127.0)) if int8 else RELU.act
    end = Epilogue(True, residual, act, multiplied=int8, residual_multiplied=int8 and residual)
    p = ConvProblem(batch, c, size, size, k, r, r, (stride, stride), (r // 2,) * 4, sparse24=sparse, epilogue=end)
    wanted = "int8" if int8 else "fp16"
    offered = candidates(p, device, ("int8",) * (2 + residual) if int8 else ())
    able = [t for t in offered if t.ins[0].dtype == t.out.dtype == wanted and not (linear(t.ins[0]) or linear(t.out))]
    return min(predict_us(p, t, device) for t in able if sparse or not t.sparse)


def sums(device: Device, batch: int) -> list[float]:
    """Returns microseconds of all layers: FP16, FP16 2:4, INT8, INT8 2:4."""
    ways = [(int8, sparse) for int8 in (False, True) for sparse in (False, True)]
    return [sum(best_us(layer, batch, device, *way) for layer in resnet50()) for way in ways]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="l4,rtx4090,orin_agx64,a100", help="names, separated by commas")
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    print(
        f"ResNet-50, batch {args.batch}, microseconds, predicted\n{'':12}    FP16     2:4    INT8     2:4  INT8/FP16  both/FP16"
    )
    for name in args.devices.split(","):
        us = sums(named(name), args.batch)
        print(f"{name:12}", *(f"{t:7.0f}" for t in us), f"{us[2] / us[0]:10.2f} {us[3] / us[0]:10.2f}")
    print("\n3x3 on an A100 PCIe, batch 32: gain of INT8 by TensorRT, measured, and ours, predicted")
    for layer, (half, whole) in TENSORRT.items():
        ours = best_us(layer, 32, named("a100_pcie"), False, False) / best_us(layer, 32, named("a100_pcie"), True, False)
        print(f"{layer[0]:4} channels{' + residual' if layer[5] else '':11} {half / whole:.2f}  ~{ours:.2f}")


if __name__ == "__main__":
    main()
