"""Networks that compute much for each byte, with seeded He-normal weights: name -> ONNX model of a batch.

VGG-19; the decoder of Stable Diffusion's autoencoder and the encoding half of its UNet, both without attention and time;
Real-ESRGAN's for videos. Group norms and SiLUs are the nodes that torch.onnx.export writes at opset 17.
"""

from collections.abc import Callable

import numpy as np
import onnx

from benchmarks.networks import Net

GROUPS = 32  # of a group norm


def vgg19(batch: int = 1, size: int = 224, width: int = 64, hidden: int = 4096) -> onnx.ModelProto:
    """Returns torchvision's vgg19: 16 convolutions and 3 fully connected layers, without BatchNormalization."""
    n = Net("vgg19", (batch, 3, size, size))
    x = "x"
    for stage, (times, convs) in enumerate(((1, 2), (2, 2), (4, 4), (8, 4), (8, 4)), 1):
        for i in range(convs):
            x = n.relu(n.conv(x, f"s{stage}/conv{i}", times * width), f"s{stage}/relu{i}")
        x = n.add("MaxPool", [x], f"s{stage}/pool", times * width, kernel_shape=[2, 2], strides=[2, 2])
    x, c = n.add("Flatten", [x], "flatten", n.channels[x]), n.channels[x] * (size // 32) ** 2
    for i, k in enumerate((hidden, hidden, 1000)):
        w = n.rng.standard_normal((k, c), np.float32) * np.sqrt((2 if i < 2 else 1) / c)
        inputs = [x, n.weight(f"fc{i}.weight", w), n.weight(f"fc{i}.bias", 0.1 * n.rng.standard_normal(k))]
        x, c = n.add("Gemm", inputs, f"fc{i}", k, transB=1), k
        x = n.relu(x, f"fc{i}/relu") if i < 2 else x
    return n.finish(x)


def vae_decoder(batch: int = 1, size: int = 64, width: int = 128, depth: int = 3) -> onnx.ModelProto:
    """Returns Stable Diffusion's decoder: `depth` blocks at each of four sizes, and one more in front; its images are 8 x
    `size` high.
    """
    n = Net("vae_decoder", (batch, 4, size, size))
    x = n.conv("x", "conv_in", 4 * width)
    for i in range(2):
        x = _block(n, x, f"mid{i}", (batch, 4 * width, size), 4 * width, 1e-6)
    for stage, times in enumerate((4, 4, 2, 1)):
        for i in range(depth):
            x = _block(n, x, f"up{stage}/block{i}", (batch, n.channels[x], size), times * width, 1e-6)
        if stage < 3:
            x, size = n.conv(_larger(n, x, f"up{stage}/resize", 2), f"up{stage}/conv", times * width), 2 * size
    x = _silu(n, _group_norm(n, x, "norm_out", (batch, width, size), 1e-6), "silu_out")
    return n.finish(n.conv(x, "conv_out", 3))


def unet_block(batch: int = 2, size: int = 64, width: int = 320, depth: int = 2) -> onnx.ModelProto:
    """Returns the residual blocks of Stable Diffusion's UNet on its way down: 320 channels at 64 x 64, 640 at 32, 1280 at
    16.
    """
    n = Net("unet_block", (batch, 4, size, size))
    x = n.conv("x", "conv_in", width)
    for stage, times in enumerate((1, 2, 4)):
        if stage:
            x, size = n.conv(x, f"down{stage}/half", n.channels[x], stride=2), size // 2
        for i in range(depth):
            x = _block(n, x, f"down{stage}/block{i}", (batch, n.channels[x], size), times * width, 1e-5)
    return n.finish(x)


def realesr(batch: int = 1, height: int = 1080, width: int = 1920, channels: int = 64, depth: int = 16) -> onnx.ModelProto:
    """Returns Real-ESRGAN's network for videos: convolutions of 64 channels and PReLU at the image's size; the output is four
    times as large, and each pixel of the image is added to 4 x 4 of its pixels.
    """
    n = Net("realesr", (batch, 3, height, width))
    x = "x"
    for i in range(depth + 1):
        x = n.conv(x, f"body{i}/conv", channels)
        slope = n.weight(f"body{i}/slope", 0.1 + 0.2 * n.rng.random((channels, 1, 1)))
        x = n.add("PRelu", [x, slope], f"body{i}/prelu", channels)
    x = n.add("DepthToSpace", [n.conv(x, "tail/conv", 48)], "tail/shuffle", 3, blocksize=4, mode="CRD")
    return n.finish(n.add("Add", [x, _larger(n, "x", "base", 4)], "tail/add", 3))


def _block(n: Net, x: str, at: str, shape: tuple[int, int, int], k: int, epsilon: float) -> str:
    """Adds twice group norm, SiLU and a 3x3 convolution to `k` channels, then adds the block's input, through a 1x1 convolution
    if it has another number of channels; returns the output's name.
    """
    batch, c, size = shape
    y = n.conv(_silu(n, _group_norm(n, x, f"{at}/norm1", (batch, c, size), epsilon), f"{at}/silu1"), f"{at}/conv1", k)
    y = n.conv(_silu(n, _group_norm(n, y, f"{at}/norm2", (batch, k, size), epsilon), f"{at}/silu2"), f"{at}/conv2", k)
    skip = x if c == k else n.conv(x, f"{at}/skip", k, 1)
    return n.add("Add", [skip, y], f"{at}/add", k)


def _group_norm(n: Net, x: str, at: str, shape: tuple[int, int, int], epsilon: float) -> str:
    batch, c, size = shape
    parts = {"ones": np.ones(GROUPS), "zeros": np.zeros(GROUPS)}
    ones, zeros = (n.weight(f"{at}/{name}", a) for name, a in parts.items())
    y = n.add("Reshape", [x, n.sizes("groups", 0, GROUPS, -1)], f"{at}/apart", c)
    y = n.add("InstanceNormalization", [y, ones, zeros], f"{at}/norm", c, epsilon=epsilon)
    y = n.add("Reshape", [y, n.sizes(f"image{c}x{size}", batch, c, size, size)], f"{at}/together", c)
    y = n.add("Mul", [y, n.weight(f"{at}.weight", 0.5 + n.rng.random((c, 1, 1)))], f"{at}/scale", c)
    return n.add("Add", [y, n.weight(f"{at}.bias", 0.1 * n.rng.standard_normal((c, 1, 1)))], f"{at}/shift", c)


def _silu(n: Net, x: str, at: str) -> str:
    return n.add("Mul", [x, n.add("Sigmoid", [x], f"{at}/sigmoid", n.channels[x])], at, n.channels[x])


def _larger(n: Net, x: str, at: str, times: int) -> str:
    """Adds nodes that repeat each pixel times x times; returns the output's name."""
    scales = n.weight(f"{at}/scales", np.array([1, 1, times, times]))
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return n.add("Resize", [x, "", scales], at, n.channels[x], **how)


NETWORKS: dict[str, Callable[..., onnx.ModelProto]] = {
    "vgg19": vgg19,
    "vae_decoder": vae_decoder,
    "unet_block": unet_block,
    "realesr": realesr,
}
