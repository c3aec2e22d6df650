"""Windows of every size, over images of every size: each model is computed as onnxruntime does, or refused with its node."""

import numpy as np
import onnx
import pytest

from gpu_runtime.errors import ModelError
from tests.reference_run import feeds_for, model, network, node, ort_run, relative_error, run

POOLS = ("MaxPool", "AveragePool", "LpPool")
NONE = onnx.AttributeProto()
OPS = ("Conv", *POOLS, "ConvTranspose")


def drawn(op: str, rng: np.random.Generator):
    """A model of one node whose window may be larger than its image, with its padding or without."""
    rank = int(rng.choice([1, 2, 2, 2, 3])) if op not in ("LpPool", "ConvTranspose") else int(rng.choice([1, 2]))
    image, size = rng.integers(1, 6, rank).tolist(), rng.integers(1, 7, rank).tolist()
    attributes: dict = {"kernel_shape": size, "strides": rng.integers(1, 8, rank).tolist()}
    if rng.random() < 0.4:
        attributes["dilations"] = rng.integers(1, 4, rank).tolist()
    auto = str(rng.choice(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto != "NOTSET":
        attributes["auto_pad"] = auto
    elif rng.random() < 0.5:
        most = min(size) - (op in POOLS)  # onnxruntime refuses a pool's window that lies in the padding
        attributes["pads"] = rng.integers(0, most + 1, 2 * rank).tolist()
    if op in POOLS:
        attributes["ceil_mode"] = int(rng.integers(2))
    channels, weights = 4, {}
    if "Conv" in op:
        groups = int(rng.choice([1, 2, 4]))
        attributes["group"] = groups
        weights["w"] = rng.standard_normal((channels, channels // groups, *size)).astype(np.float32)
    opset = 22 if op in POOLS else 17
    made = node(op, "x w" if weights else "x", "y", name="it", **attributes)
    return model([made], {"x": (1, channels, *image)}, "y", weights, opset=opset)


def theirs(proto, feeds):
    try:
        return ort_run(proto, feeds)["y"]
    except Exception:  # onnxruntime's own are direct children of Exception
        return None


@pytest.mark.parametrize("op", OPS)
def test_what_onnxruntime_computes_is_computed_and_the_rest_is_refused_with_its_node(op):
    """Compared where ONNX and onnxruntime mean the same: not where SAME pads by less than nothing, or all is padding."""
    rng, refused, compared = np.random.default_rng(OPS.index(op)), 0, 0
    for _ in range(60):
        proto = drawn(op, rng)
        try:
            net = network(proto)
        except ModelError as e:
            refused += 1
            assert f"{op} it: its output 'y' would have the size [1, 4, " in str(e), e
            continue
        attributes = {a.name: a for a in proto.graph.node[0].attribute}
        if attributes.get("ceil_mode", NONE).i or attributes.get("auto_pad", NONE).s.startswith(b"SAME"):
            continue
        feeds = feeds_for(net)
        if (want := theirs(proto, feeds)) is not None:
            compared += 1
            assert relative_error(run(net, feeds)["y"], want) < 1e-3, proto.graph.node[0]
    assert refused >= 3 and compared >= 9


def test_a_window_that_constants_alone_make_too_large(tmp_path):
    """Sizes that only folding finds, and an image that becomes too small on the way."""
    nodes = [
        node("Shape", "x", "s"),
        node("Slice", "s b e", "n"),
        node("Concat", "n d", "t", axis=0),
        node("Reshape", "x t", "r"),
        node("Conv", "r w", "y", name="it", strides=(9, 9)),
    ]
    weights = {"b": np.int64([0]), "e": np.int64([1]), "d": np.int64([4, 4, 4]), "w": np.ones((4, 4, 5, 5), np.float32)}
    with pytest.raises(ModelError, match=r"Conv it: its output 'y' would have the size \[1, 4, 0, 0\] .*: give another input"):
        network(model(nodes, {"x": (1, 64)}, "y", weights))
