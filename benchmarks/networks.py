"""Networks that people complained about, written by a script with seeded He-normal weights: name -> ONNX model.

`python -m benchmarks.networks FOLDER` writes them. Sources: TVM forum threads on grouped convolution 4x slower than dense, on
a quarter of a super-resolution network spent in depth-to-space, and on operators that ran half as fast inside a network; and a
forum thread on two convolutions with 2:4 weights that TensorRT ran dense (`forum`).
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cuda_kernels import sparse24


class Net:
    """A graph while it is written: each method adds a node and returns the name of its output."""

    def __init__(self, name: str, shape: tuple[int, ...], seed: int = 0):
        self.name, self.rng = name, np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.channels = {"x": shape[1]}
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]

    def feed(self, name: str, shape: tuple[int, ...]) -> str:
        """Adds an input to the network; returns its name."""
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        self.channels[name] = shape[1]
        return name

    def add(self, op: str, inputs: list[str], name: str, channels: int, **attributes) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_out"], name=name, **attributes))
        self.channels[f"{name}_out"] = channels
        return f"{name}_out"

    def weight(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def sizes(self, name: str, *numbers: int, scalar: bool = False) -> str:
        """Returns the name of a constant of whole numbers, stored once by name."""
        if name not in {t.name for t in self.initializers}:
            array = np.asarray(numbers[0] if scalar else numbers, np.int64)
            self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def conv(
        self, x: str, name: str, k: int, r: int = 3, stride: int = 1, groups: int = 1, bias: bool = True, prune: bool = False
    ) -> str:
        c = self.channels[x]
        w = self.rng.standard_normal((k, c // groups, r, r)) * np.sqrt(2 / (c // groups * r * r))
        w = sparse24.prune(w) if prune else w
        inputs = [x, self.weight(f"{name}.weight", w)]
        if bias:
            inputs.append(self.weight(f"{name}.bias", 0.1 * self.rng.standard_normal(k)))
        pads = [r // 2] * 4
        return self.add("Conv", inputs, name, k, kernel_shape=[r, r], pads=pads, strides=[stride] * 2, group=groups)

    def norm(self, x: str, name: str) -> str:
        c = self.channels[x]
        parts = (
            0.5 + self.rng.random(c),
            0.1 * self.rng.standard_normal(c),
            0.1 * self.rng.standard_normal(c),
            0.5 + self.rng.random(c),
        )
        names = [self.weight(f"{name}.{p}", v) for p, v in zip(("scale", "bias", "mean", "var"), parts, strict=True)]
        return self.add("BatchNormalization", [x, *names], name, c)

    def relu(self, x: str, name: str) -> str:
        return self.add("Relu", [x], name, self.channels[x])

    def finish(self, *ys: str, opset: int = 17) -> onnx.ModelProto:
        outs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, None) for y in ys]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, outs, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model)


def super_resolution(h: int = 720, w: int = 1280) -> onnx.ModelProto:
    """Returns a x4 upscaling network: 3 -> 64 channels, three residual convolutions of 64 channels with LeakyRelu, two pixel
    shuffles by 2.
    """
    n = Net("super_resolution", (1, 3, h, w))

    def leaky(x, name):
        return n.add("LeakyRelu", [x], name, n.channels[x], alpha=0.2)

    def shuffle(x, name):
        return n.add("DepthToSpace", [x], name, n.channels[x] // 4, blocksize=2, mode="CRD")

    x = leaky(n.conv("x", "head/conv", 64), "head/act")
    for i in range(3):
        y = leaky(n.conv(x, f"body{i}/conv", 64), f"body{i}/act")
        x = n.add("Add", [y, x], f"body{i}/add", 64)
    x = leaky(shuffle(n.conv(x, "up1/conv", 128), "up1/shuffle"), "up1/act")
    x = leaky(shuffle(n.conv(x, "up2/conv", 64), "up2/shuffle"), "up2/act")
    return n.finish(n.conv(x, "tail/conv", 3))


def resnet50(batch: int = 1, groups: int = 1, size: int = 224) -> onnx.ModelProto:
    """Returns ResNet-50 v1.5; `groups`: the number of groups of every 3x3 convolution."""
    n = Net(f"resnet50_g{groups}", (batch, 3, size, size))
    return _resnet(n, (3, 4, 6, 3), lambda width, stride: ((width, 1, 1, 1), (width, 3, stride, groups), (4 * width, 1, 1, 1)))


def resnet18(batch: int = 10, size: int = 224) -> onnx.ModelProto:
    """Returns ResNet-18."""
    return _resnet(
        Net("resnet18", (batch, 3, size, size)), (2,) * 4, lambda width, stride: ((width, 3, stride, 1), (width, 3, 1, 1))
    )


def _resnet(n: Net, blocks: Sequence[int], block: Callable[[int, int], Sequence[tuple[int, int, int, int]]]) -> onnx.ModelProto:
    """Returns a ResNet with this many blocks in each stage. `block`: (width of the stage, stride) -> (channels, kernel, stride,
    groups) of each convolution of a block.
    """
    x = n.relu(n.norm(n.conv("x", "stem/conv", 64, 7, 2, bias=False), "stem/bn"), "stem/relu")
    x = n.add("MaxPool", [x], "stem/pool", 64, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for stage, count in enumerate(blocks):
        for b in range(count):
            at, stride, y = f"s{stage + 1}b{b}", 2 if b == 0 and stage else 1, x
            convs = block(64 << stage, stride)
            for i, (k, r, step, groups) in enumerate(convs, 1):
                y = n.norm(n.conv(y, f"{at}/conv{i}", k, r, step, groups, bias=False), f"{at}/bn{i}")
                y = n.relu(y, f"{at}/relu{i}") if i < len(convs) else y
            if stride == 2 or n.channels[x] != k:
                x = n.norm(n.conv(x, f"{at}/proj", k, 1, stride, bias=False), f"{at}/proj_bn")
            x = n.relu(n.add("Add", [y, x], f"{at}/add", k), f"{at}/relu{len(convs)}")
    return n.finish(_classifier(n, x))


def conv512() -> onnx.ModelProto:
    """Returns the 512-channel 7 x 7 convolution + BatchNorm + ReLU by itself; inside its network it is resnet50's
    s4b1/conv2.
    """
    n = Net("conv512", (1, 512, 7, 7))
    return n.finish(n.relu(n.norm(n.conv("x", "conv", 512, 3, bias=False), "bn"), "relu"))


def forum() -> onnx.ModelProto:
    """Returns two 1x1 convolutions with bias + add + relu and 2:4 weights, with 160 channels on 2x160x16x30 and 288 on
    1x288x88x64; other ops read their inputs and outputs too. A user asked why TensorRT ran both dense, between "reformats".
    """
    n = Net("forum", (2, 160, 16, 30))
    ends = []
    for x, at, size in (("x", "conv160", (2, 160, 16, 30)), (n.feed("x288", (1, 288, 88, 64)), "conv288", (1, 288, 88, 64))):
        c = size[1]
        x = n.relu(n.conv(x, f"{at}/before", c, 3), f"{at}/before_relu")
        residual = n.relu(n.conv(x, f"{at}/beside", c, 3), f"{at}/beside_relu")
        y = n.add("Add", [n.conv(x, at, c, 1, prune=True), residual], f"{at}/add", c)
        y = n.relu(y, f"{at}/relu")
        for source, name in ((x, f"{at}/reads_input"), (y, f"{at}/reads_output"), (y, f"{at}/reads_output_too")):
            ends.append(n.relu(n.conv(source, name, 32, 3), f"{name}_relu"))
    return n.finish(*ends)


def vit_b16(batch: int = 1, depth: int = 12) -> onnx.ModelProto:
    """Returns ViT-B/16 at 224 x 224, node by node as torch.onnx.export(dynamo=True) writes torchvision's `vit_b_16`."""
    n = Net("vit_b16", (batch, 3, 224, 224))
    width, heads, tokens = 768, 12, 197
    w = n.rng.standard_normal((width, 3, 16, 16)) / np.sqrt(768)
    x = n.add("Conv", ["x", n.weight("conv_proj.weight", w)], "conv_proj", width, kernel_shape=[16, 16], strides=[16, 16])
    x = n.add("Reshape", [x, n.sizes("flat", batch, width, tokens - 1)], "view", width)
    x = n.add("Transpose", [x], "permute", width, perm=[0, 2, 1])
    token = n.weight("class_token", n.rng.standard_normal((batch, 1, width)))
    x = n.add("Concat", [token, x], "cat", width, axis=1)
    x = n.add("Add", [x, n.weight("pos_embedding", 0.02 * n.rng.standard_normal((1, tokens, width)))], "add", width)
    for i in range(depth):
        x = _encoder(n, x, f"layer_{i}", _Tokens(batch, tokens, width, heads))
    x = _layer_norm(n, x, "ln", width)
    x = n.add("Gather", [x, n.sizes("first", 0, scalar=True)], "select", width, axis=1)
    return n.finish(_linear(n, x, "head", width, 1000, "Gemm"), opset=20)


class _Tokens(NamedTuple):
    batch: int
    tokens: int
    width: int
    heads: int


def _encoder(n: Net, x: str, at: str, sizes: _Tokens) -> str:
    batch, tokens, width, heads = sizes
    d = width // heads
    y = n.add("Transpose", [_layer_norm(n, x, f"{at}/ln_1", width)], f"{at}/transpose", width, perm=[1, 0, 2])
    y = _linear(n, y, f"{at}/in_proj", width, 3 * width)
    y = n.add("Reshape", [y, n.sizes("qkv", tokens, batch, 3, width)], f"{at}/qkv", width)
    y = n.add("Unsqueeze", [y, n.sizes("zero", 0)], f"{at}/unsqueeze", width)
    y = n.add("Transpose", [y], f"{at}/apart", width, perm=[3, 1, 2, 0, 4])
    y = n.add("Squeeze", [y, n.sizes("minus_two", -2)], f"{at}/squeeze", width)
    parts = []
    for i, part in enumerate("qkv"):
        one = n.add("Gather", [y, n.sizes(f"at_{i}", i, scalar=True)], f"{at}/{part}", width, axis=0)
        one = n.add("Reshape", [one, n.sizes("heads", tokens, batch * heads, d)], f"{at}/{part}_heads", width)
        one = n.add("Transpose", [one], f"{at}/{part}_first", width, perm=[1, 0, 2])
        if part == "k":
            one = n.add("Transpose", [one], f"{at}/k_turned", width, perm=[0, 2, 1])
        shape = (batch, heads, d, tokens) if part == "k" else (batch, heads, tokens, d)
        parts.append(n.add("Reshape", [one, n.sizes("k4" if part == "k" else "q4", *shape)], f"{at}/{part}_batch", width))
    scale = n.weight(f"{at}/scale", np.asarray([d**-0.25]))
    q, k = (n.add("Mul", [part, scale], f"{at}/scaled_{name}", width) for part, name in zip(parts, "qk", strict=False))
    y = n.add("Softmax", [n.add("MatMul", [q, k], f"{at}/scores", width)], f"{at}/softmax", width, axis=-1)
    y = n.add("MatMul", [y, parts[2]], f"{at}/attended", width)
    y = n.add("Transpose", [y], f"{at}/together", width, perm=[2, 0, 1, 3])
    y = n.add("Reshape", [y, n.sizes("rows", tokens * batch, width)], f"{at}/rows", width)
    y = _linear(n, y, f"{at}/out_proj", width, width, "Gemm")
    y = n.add("Reshape", [y, n.sizes("tokens", tokens, batch, width)], f"{at}/tokens", width)
    x = n.add("Add", [n.add("Transpose", [y], f"{at}/back", width, perm=[1, 0, 2]), x], f"{at}/add_1", width)
    y = _linear(n, _layer_norm(n, x, f"{at}/ln_2", width), f"{at}/mlp_0", width, 4 * width)
    y = _linear(n, n.add("Gelu", [y], f"{at}/gelu", 4 * width), f"{at}/mlp_3", 4 * width, width)
    return n.add("Add", [x, y], f"{at}/add_2", width)


def _layer_norm(n: Net, x: str, name: str, width: int) -> str:
    scale, bias = 0.5 + n.rng.random(width), 0.1 * n.rng.standard_normal(width)
    inputs = [x, n.weight(f"{name}.weight", scale), n.weight(f"{name}.bias", bias)]
    return n.add("LayerNormalization", inputs, name, width, axis=-1, epsilon=1e-6)


def _linear(n: Net, x: str, name: str, c: int, k: int, op: str = "MatMul") -> str:
    w, b = n.rng.standard_normal((c, k)) / np.sqrt(c), n.weight(f"{name}.bias", 0.1 * n.rng.standard_normal(k))
    if op == "Gemm":
        return n.add("Gemm", [x, n.weight(f"{name}.weight", np.ascontiguousarray(w.T)), b], name, k, transB=1)
    return n.add("Add", [n.add("MatMul", [x, n.weight(f"{name}.weight", w)], f"{name}_product", k), b], name, k)


def _classifier(n: Net, x: str) -> str:
    x = n.add("GlobalAveragePool", [x], "head/pool", n.channels[x])
    c = n.channels[x]
    x = n.add("Flatten", [x], "head/flatten", c)
    w = n.weight("head/fc.weight", n.rng.standard_normal((1000, c)) / np.sqrt(c))
    return n.add("Gemm", [x, w, n.weight("head/fc.bias", np.zeros(1000))], "head/fc", 1000, transB=1)


NETWORKS: dict[str, Callable[..., onnx.ModelProto]] = {
    "super_resolution": super_resolution,
    "resnet50_g1": resnet50,
    "resnet50_g2": lambda: resnet50(groups=2),
    "resnet18_n10": resnet18,
    "conv512": conv512,
    "forum": forum,
    "vit_b16": vit_b16,
}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in NETWORKS.items():
        onnx.save(make(), folder / f"{name}.onnx")
        print(folder / f"{name}.onnx")


if __name__ == "__main__":
    main()
