"""Small models, each one block with attention as a family of networks has it: ViT, PVT, MobileViT, YOLO, Swin, EdgeNeXt."""

import numpy as np
import onnx

from tests.reference_run import model, node

THIRDS = (("q", "zero"), ("k", "one"), ("v", "two"))
INDICES = {name: np.array(i) for i, name in enumerate(("zero", "one", "two"))}


class Drawn:
    """A source of random weights: Drawn()(2, 3) is an array of that shape. Each new Drawn gives the same sequence."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __call__(self, *shape: int) -> np.ndarray:
        return (self.rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float16).astype(np.float32)


def cross_covariance(b: int = 1, n: int = 50, heads: int = 4, d: int = 12) -> onnx.ModelProto:
    """Returns a block of EdgeNeXt, whose channels attend to each other (cross-covariance attention): one product for q, k and
    v, rows of q and k scaled to length 1, a temperature per head. `b` images of `n` tokens with `heads` * `d` channels.
    """
    drawn = Drawn()
    c = heads * d
    w = {
        "wq": drawn(c, 3 * c),
        "wp": drawn(c, c),
        "five": np.array([b, n, 3, heads, d]),
        "three": np.array([b, n, c]),
        "like": np.array([b, heads, d, n]),
        "t": drawn.rng.uniform(0.5, 2, (heads, 1, 1)).astype(np.float32),
        "eps": np.float32(1e-12),
        **INDICES,
    }
    nodes = [node("MatMul", "x wq", "qkv"), node("Reshape", "qkv five", "r"), node("Transpose", "r", "p", perm=(2, 0, 3, 4, 1))]
    nodes += [node("Gather", f"p {i}", name, axis=0) for name, i in THIRDS]
    for name in "qk":
        nodes += [
            node("ReduceL2", name, f"{name}l", axes=[3], keepdims=1),
            node("Clip", f"{name}l eps", f"{name}c"),
            node("Expand", f"{name}c like", f"{name}e"),
            node("Div", f"{name} {name}e", f"{name}n"),
        ]
    nodes += [
        node("Transpose", "kn", "kt", perm=(0, 1, 3, 2)),
        node("MatMul", "qn kt", "s"),
        node("Mul", "s t", "st"),
        node("Softmax", "st", "a", axis=-1),
        node("MatMul", "a v", "o"),
        node("Transpose", "o", "ot", perm=(0, 3, 1, 2)),
        node("Reshape", "ot three", "or"),
        node("MatMul", "or wp", "y"),
    ]
    return model(nodes, {"x": (b, n, c)}, "y", w)


def tokens(
    b: int = 1,
    n: int = 50,
    heads: int = 2,
    d: int = 16,
    bias: np.ndarray | None = None,
    root: bool = False,
    masked: bool = False,
) -> onnx.ModelProto:
    """Returns a vision transformer's block: one product gives q, k and v, a Transpose makes the heads.

    q is scaled, or with `root` both q and k by the square root of the scale, as PyTorch's scaled_dot_product_attention does.
    `bias`: a constant that is added to the scores; `masked`: whether a mask, an input of the network, is added too.
    """
    drawn = Drawn()
    c = heads * d
    w = {
        "wq": drawn(c, 3 * c),
        "wp": drawn(c, c),
        "five": np.array([b, n, 3, heads, d]),
        "three": np.array([b, n, c]),
        "scale": np.float32(d**-0.5),
        "root": np.float32(d**-0.25),
        **INDICES,
    }
    nodes = [node("MatMul", "x wq", "qkv"), node("Reshape", "qkv five", "r"), node("Transpose", "r", "p", perm=(2, 0, 3, 1, 4))]
    nodes += [node("Gather", f"p {i}", name, axis=0) for name, i in THIRDS]
    nodes += [node("Transpose", "k", "kt0", perm=(0, 1, 3, 2)), node("Mul", "q root" if root else "q scale", "qs")]
    nodes += [node("Mul", "kt0 root", "kt")] if root else []
    nodes += [node("MatMul", "qs kt" if root else "qs kt0", "s")]
    last = "s"
    if bias is not None:
        w["bias"] = bias
        nodes, last = [*nodes, node("Add", "s bias", "sb")], "sb"
    if masked:
        nodes, last = [*nodes, node("Add", f"mask {last}", "sm")], "sm"
    nodes += [
        node("Softmax", last, "a", axis=-1),
        node("MatMul", "a v", "o"),
        node("Transpose", "o", "ot", perm=(0, 2, 1, 3)),
        node("Reshape", "ot three", "or"),
        node("MatMul", "or wp", "y"),
    ]
    return model(nodes, {"x": (b, n, c)} | ({"mask": (b, 1, n, n)} if masked else {}), "y", w)


def pooled_keys(b: int = 1, side: int = 8, heads: int = 2, d: int = 16, ratio: int = 2) -> onnx.ModelProto:
    """Returns a block of PVT: keys and values come from fewer tokens, which a convolution with stride `ratio` makes."""
    drawn = Drawn()
    c, n, few = heads * d, side * side, (side // ratio) ** 2
    w = {
        "wq": drawn(c, c),
        "wkv": drawn(c, 2 * c),
        "wp": drawn(c, c),
        "wr": drawn(c, c, ratio, ratio),
        "scale": np.float32(d**-0.5),
        "image": np.array([b, c, side, side]),
        "flat": np.array([b, c, few]),
        "five": np.array([b, few, 2, heads, d]),
        "four": np.array([b, n, heads, d]),
        "three": np.array([b, n, c]),
        **INDICES,
    }
    nodes = [
        node("MatMul", "x wq", "q0"),
        node("Reshape", "q0 four", "q1"),
        node("Transpose", "q1", "q", perm=(0, 2, 1, 3)),
        node("Transpose", "x", "xt", perm=(0, 2, 1)),
        node("Reshape", "xt image", "xi"),
        node("Conv", "xi wr", "small", strides=(ratio, ratio)),
        node("Reshape", "small flat", "sf"),
        node("Transpose", "sf", "st", perm=(0, 2, 1)),
        node("MatMul", "st wkv", "kv"),
        node("Reshape", "kv five", "kv5"),
        node("Transpose", "kv5", "kvt", perm=(2, 0, 3, 1, 4)),
        node("Gather", "kvt zero", "k", axis=0),
        node("Gather", "kvt one", "v", axis=0),
        node("Transpose", "k", "kt", perm=(0, 1, 3, 2)),
        node("MatMul", "q kt", "s"),
        node("Mul", "s scale", "ss"),
        node("Softmax", "ss", "a", axis=-1),
        node("MatMul", "a v", "o"),
        node("Transpose", "o", "ot", perm=(0, 2, 1, 3)),
        node("Reshape", "ot three", "or"),
        node("MatMul", "or wp", "y"),
    ]
    return model(nodes, {"x": (b, n, c)}, "y", w)


def own_products(b: int = 1, n: int = 20, heads: int = 2, d: int = 16) -> onnx.ModelProto:
    """Returns a block of BERT, or of MobileViT as torch.nn.MultiheadAttention is exported: a product each for q, k and v; heads
    and images in one batch dimension.
    """
    drawn = Drawn()
    c = heads * d
    w = {f"w{name}": drawn(c, c) for name in "qkvp"} | {f"b{name}": drawn(1, c).reshape(-1) for name in "qkv"}
    w |= {"heads": np.array([n, b * heads, d]), "three": np.array([n, b, c]), "scale": np.float32(d**-0.5)}
    nodes = [node("Transpose", "x", "xt", perm=(1, 0, 2))]
    for name in "qkv":
        nodes += [
            node("MatMul", f"xt w{name}", f"{name}0"),
            node("Add", f"{name}0 b{name}", f"{name}1"),
            node("Reshape", f"{name}1 heads", f"{name}2"),
            node("Transpose", f"{name}2", name, perm=(1, 0, 2)),
        ]
    nodes += [
        node("Mul", "q scale", "qs"),
        node("Transpose", "k", "kt", perm=(0, 2, 1)),
        node("MatMul", "qs kt", "s"),
        node("Softmax", "s", "a", axis=-1),
        node("MatMul", "a v", "o"),
        node("Transpose", "o", "ot", perm=(1, 0, 2)),
        node("Reshape", "ot three", "or"),
        node("MatMul", "or wp", "yp"),
        node("Transpose", "yp", "y", perm=(1, 0, 2)),
    ]
    return model(nodes, {"x": (b, n, c)}, "y", w)


def of_convolutions(b: int = 1, side: int = 6, heads: int = 2, key: int = 16, d: int = 32) -> onnx.ModelProto:
    """Returns a block of a detector (YOLO): a 1x1 convolution gives each head's q, k and v; the values are the left operand."""
    drawn = Drawn()
    n, c = side * side, heads * d
    w = {
        "wq": drawn(heads * (2 * key + d), c, 1, 1),
        "wp": drawn(c, c, 1, 1),
        "scale": np.float32(key**-0.5),
        "four": np.array([b, heads, 2 * key + d, n]),
        "image": np.array([b, c, side, side]),
        "sizes": np.array([key, key, d]),
    }
    nodes = [
        node("Conv", "x wq", "qkv"),
        node("Reshape", "qkv four", "r"),
        node("Split", "r sizes", "q k v", axis=2),
        node("Transpose", "q", "qt", perm=(0, 1, 3, 2)),
        node("MatMul", "qt k", "s"),
        node("Mul", "s scale", "ss"),
        node("Softmax", "ss", "a", axis=-1),
        node("Transpose", "a", "at", perm=(0, 1, 3, 2)),
        node("MatMul", "v at", "o"),
        node("Reshape", "o image", "oi"),
        node("Conv", "oi wp", "y"),
    ]
    return model(nodes, {"x": (b, c, side, side)}, "y", w)


def windows(b: int = 1, side: int = 8, window: int = 4, heads: int = 2, d: int = 16, shifted: bool = True) -> onnx.ModelProto:
    """Returns a block of Swin: attention within each window of an image, which is in channels-last order, with a bias for each
    head and pair of pixels and, if windows are `shifted`, a mask for each window.
    """
    drawn = Drawn()
    c, per, n = heads * d, side // window, window * window
    many = per * per
    mask = np.where(drawn.rng.random((many, 1, n, n)) < 0.3, np.float32(-100), np.float32(0))
    w = {
        "wq": drawn(c, 3 * c),
        "wp": drawn(c, c),
        "six": np.array([b, per, window, per, window, c]),
        "rows": np.array([b * many, n, c]),
        "five": np.array([b * many, n, 3, heads, d]),
        "image": np.array([b, side, side, c]),
        "scale": np.float32(d**-0.5),
        "back": np.array([b, per, per, window, window, c]),
        "bias": drawn(1, heads, n, n),
        "mask": mask[None],
        "apart": np.array([b, many, heads, n, n]),
        "joined": np.array([b * many, heads, n, n]),
        **INDICES,
    }
    nodes = [
        node("Reshape", "x six", "x6"),
        node("Transpose", "x6", "xw", perm=(0, 1, 3, 2, 4, 5)),
        node("Reshape", "xw rows", "xr"),
        node("MatMul", "xr wq", "qkv"),
        node("Reshape", "qkv five", "r"),
        node("Transpose", "r", "p", perm=(2, 0, 3, 1, 4)),
    ]
    nodes += [node("Gather", f"p {i}", name, axis=0) for name, i in THIRDS]
    nodes += [
        node("Mul", "q scale", "qs"),
        node("Transpose", "k", "kt", perm=(0, 1, 3, 2)),
        node("MatMul", "qs kt", "s"),
        node("Add", "s bias", "sb"),
    ]
    if shifted:
        nodes += [node("Reshape", "sb apart", "s5"), node("Add", "s5 mask", "sm"), node("Reshape", "sm joined", "sj")]
    nodes += [
        node("Softmax", "sj" if shifted else "sb", "a", axis=-1),
        node("MatMul", "a v", "o"),
        node("Transpose", "o", "ot", perm=(0, 2, 1, 3)),
        node("Reshape", "ot rows", "or"),
        node("MatMul", "or wp", "yp"),
        node("Reshape", "yp back", "yb"),
        node("Transpose", "yb", "yt", perm=(0, 1, 3, 2, 4, 5)),
        node("Reshape", "yt image", "y"),
    ]
    return model(nodes, {"x": (b, side, side, c)}, "y", w)
