"""`python -m benchmarks.int8 [--batch N] [DEVICE...]`: predicted times of ResNet-50's convolutions in INT8 beside FP16.

The 52 convolutions behind the stem, each between vectors of channels of one type, alone, launch included; in INT8 with a Q
behind each, and whole numbers as its residual. Then TensorRT's own ratio for layers of ResNet-18 on an A100 at batch 32,
beside ours.
Times are predictions: loops of bytes are priced by analogy with those of FP16 (tactics/families/conv_bytes.py).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuda_kernels.device import Device, named
from tactics.candidates import candidates
from tactics.format import WHOLE
from tactics.predict import predict_us
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.step import linear

DEVICES = ("l4", "rtx4090", "orin_agx64", "a100")
RELU, QUANTIZE = Activation("relu"), Activation("quantize", (0.0, 127.0))
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels, blocks, stride of the first block
# NVIDIA's trt-engine-explorer, examples/pytorch/resnet/A100 (v8.6), profiles less 6.2 us a layer: channels, size, residual, us
# in FP16 and in INT8.
TENSORRT = ((64, 56, False, 47.0, 25.5), (64, 56, True, 47.0, 28.6), (128, 28, False, 34.8, 21.4), (256, 14, False, 33.7, 18.4),
            (512, 7, False, 43.0, 22.5))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """A convolution with 2:4 weights in FP16, and on whole numbers."""

    half: ConvProblem
    whole: ConvProblem


def pair(n: int, c: int, size: int, k: int, r: int, stride: int = 1, residual: bool = False) -> Pair:
    half = Epilogue(bias=True, residual=residual, act=RELU)
    whole = replace(half, act=QUANTIZE, multiplied=True, residual_multiplied=residual)
    p = ConvProblem(n, c, size, size, k, r, r, stride=(stride, stride), pad=(r // 2,) * 4, sparse24=True, epilogue=half)
    return Pair(p, replace(p, epilogue=whole))


def resnet50(n: int) -> Iterator[Pair]:
    size, c = 56, 64
    for width, blocks, first in STAGES:
        for block in range(blocks):
            stride = first if block == 0 else 1
            yield pair(n, c, size, width, 1)
            yield pair(n, width, size, width, 3, stride)
            if block == 0:
                yield pair(n, c, size, 4 * width, 1, stride)
            size //= stride
            yield pair(n, width, size, 4 * width, 1, residual=True)
            c = 4 * width


def fastest_us(p: ConvProblem, device: Device, sparse: bool) -> float:
    """The fastest tactic's time with all tensors in vectors, of bytes where the problem is of whole numbers."""
    whole = p.epilogue.multiplied
    found = candidates(p, device, ("int8",) * len(p.all_shapes) if whole else ())
    ends = ((t, (*t.ins, t.out)) for t in found if sparse or not t.sparse)
    able = (t for t, fmts in ends if not any(map(linear, fmts)) and all((f.dtype in WHOLE) == whole for f in fmts))
    return min(predict_us(p, t, device) for t in able)


def totals(pairs: list[Pair], device: Device) -> tuple[float, float, float, float]:
    """Microseconds in FP16 dense, FP16 with 2:4, INT8 dense, INT8 with 2:4."""
    ways = [(whole, sparse) for whole in (False, True) for sparse in (False, True)]
    known = {(p, way): fastest_us(p.whole if way[0] else p.half, device, way[1]) for p in set(pairs) for way in ways}
    a, b, c, d = (sum(known[p, way] for p in pairs) for way in ways)
    return a, b, c, d


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("devices", nargs="*", default=DEVICES, metavar="DEVICE")
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    print(f"52 convolutions of ResNet-50 at batch {args.batch}, predicted us")
    print(f"{'device':12} {'FP16':>8} {'2:4':>8} {'INT8':>8} {'2:4':>8}  INT8/FP16  2:4 gains FP16, INT8")
    for name in args.devices:
        half, half24, whole, whole24 = totals(list(resnet50(args.batch)), named(name))
        gains = f"{half / half24:.2f}x, {whole / whole24:.2f}x"
        print(f"{name:12} {half:8.0f} {half24:8.0f} {whole:8.0f} {whole24:8.0f}  {whole / half:9.3f}  {gains}")
    print("A100, 3x3 at batch 32: FP16 over INT8, TensorRT's times and ours")
    for c, size, residual, half, whole in TENSORRT:
        ours = totals([pair(32, c, size, c, 3, residual=residual)], named("a100"))
        layer = f"{c} channels, {size} x {size}{', residual' if residual else ''}"
        print(f"{layer:32} {half / whole:.2f}x  {ours[0] / ours[2]:.2f}x ({ours[0]:.1f} us to {ours[2]:.1f} us)")


if __name__ == "__main__":
    main()
