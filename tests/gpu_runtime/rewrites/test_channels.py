"""Channel shuffles and Focus, however they are written: no kernel of their own where convolutions read them."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import DEFAULT_DEVICE
from gpu_runtime.network import APART
from gpu_runtime.rewrites import blocks, channels
from gpu_runtime.rewrites.channels import DEPTHWISE_TOO, IN_WEIGHTS
from tactics.planner.graph import holds
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import ConcatProblem, ConvProblem, MoveProblem
from tests.ort_budget import engine_within_budget
from tests.reference_run import choices, feeds_for, given_model, model, node, ort_run, relative_error, run
from tests.reference_run import network as lowered

SHUFFLENET = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_shufflenet.onnx"
rng = np.random.default_rng(3)


class Net:
    """Nodes and weights of a model while it is written down; methods return the name of their output."""

    def __init__(self):
        self.nodes, self.weights = [], {}

    def op(self, kind: str, inputs: str, name: str, constants: dict | None = None, **attributes) -> str:
        for key, value in (constants or {}).items():
            self.weights[f"{name}.{key}"] = np.array(value)
            inputs += f" {name}.{key}"
        self.nodes.append(node(kind, inputs, name, **attributes))
        return name.split()[0]

    def conv(self, x: str, name: str, c: int, k: int, size: int = 1, groups: int = 1, **more) -> str:
        w = rng.standard_normal((k, c // groups, size, size)) * (2 / (c // groups * size * size)) ** 0.5
        self.weights[f"{name}.w"] = w.astype(np.float16).astype(np.float32)
        self.weights[f"{name}.b"] = rng.uniform(-0.3, 0.3, k).astype(np.float32)
        y = self.op("Conv", f"{x} {name}.w {name}.b", f"{name}.c", pads=[size // 2] * 4, group=groups, **more)
        return self.op("Relu", y, name)

    def model(self, shape, outputs="y", opset: int = 18) -> onnx.ModelProto:
        return model(self.nodes, {"x": shape}, outputs, self.weights, opset=opset)


# ---- the even and the odd channels of a tensor, in four spellings


def _shuffled(net: Net, x: str, name: str, shape) -> str:
    n, c, h, w = shape
    y = net.op("Reshape", x, f"{name}.five", {"shape": [n, c // 2, 2, h, w]})
    y = net.op("Transpose", y, f"{name}.turned", perm=(0, 2, 1, 3, 4))
    return net.op("Reshape", y, f"{name}.four", {"shape": [n, c, h, w]})


def by_split(net, x, name, shape):
    net.nodes.append(node("Split", _shuffled(net, x, name, shape), f"{name}.even {name}.odd", axis=1, num_outputs=2))
    return f"{name}.even", f"{name}.odd"


def by_slice(net, x, name, shape):
    c = shape[1]
    y = _shuffled(net, x, name, shape)
    cut = ({"start": [a], "end": [b], "axes": [1]} for a, b in ((0, c // 2), (c // 2, c)))
    return tuple(net.op("Slice", y, f"{name}.{half}", c) for half, c in zip(("even", "odd"), cut, strict=True))


def by_step(net, x, name, shape):
    cut = ({"start": [a], "end": [shape[1]], "axes": [1], "step": [2]} for a in (0, 1))
    return tuple(net.op("Slice", x, f"{name}.{half}", c) for half, c in zip(("even", "odd"), cut, strict=True))


def by_gather(net, x, name, shape):
    """Images and channels become one axis, so the halves come out as the two of an axis of their own."""
    n, c, h, w = shape
    y = net.op("Reshape", x, f"{name}.three", {"shape": [n * c // 2, 2, h * w]})
    y = net.op("Transpose", y, f"{name}.turned", perm=(1, 0, 2))
    y = net.op("Reshape", y, f"{name}.five", {"shape": [2, -1, c // 2, h, w]})
    return tuple(net.op("Gather", y, f"{name}.{half}", {"at": i}, axis=0) for half, i in (("even", 0), ("odd", 1)))


SPELLINGS = {f.__name__: f for f in (by_split, by_slice, by_step, by_gather)}


def units(spelling, count: int = 3, c: int = 32, image=(6, 5), n: int = 2) -> onnx.ModelProto:
    """ShuffleNet v2: half of the channels go through a branch, and what comes out joins the other half; then all are read."""
    net = Net()
    x = net.op("MaxPool", net.conv("x", "stem", 3, c, 3), "pool", kernel_shape=(3, 3), pads=(1, 1, 1, 1))
    for i in range(count):
        kept, read = spelling(net, x, f"u{i}", (n, c, *image))
        y = net.conv(net.conv(read, f"u{i}a", c // 2, c // 2), f"u{i}b", c // 2, c // 2, 3, c // 2)
        x = net.op("Concat", f"{kept} {net.conv(y, f'u{i}c', c // 2, c // 2)}", f"u{i}.cat", axis=1)
    a = net.conv(net.conv(x, "d", c, c, 3, c, strides=(2, 2)), "e", c, 16)
    b = net.conv(net.conv(x, "f", c, c), "g", c, 16, 3, strides=(2, 2))
    net.op("Concat", f"{a} {b}", "y", axis=1)
    return net.model((n, 3, *image))


def grouped(c: int = 48, groups: int = 3) -> onnx.ModelProto:
    """ShuffleNet v1: a grouped convolution, a shuffle, a depthwise one with two channels for each, and a grouped one."""
    net = Net()
    x = net.conv("x", "stem", 3, c, 3)
    x = net.conv(x, "a", c, c, groups=groups)
    x = net.op("Reshape", x, "five", {"shape": [1, groups, c // groups, 6, 5]})
    x = net.op("Transpose", x, "turned", perm=(0, 2, 1, 3, 4))
    x = net.op("Reshape", x, "four", {"shape": [1, c, 6, 5]})
    x = net.conv(x, "d", c, 2 * c, 3, c)
    net.op("Identity", net.conv(x, "e", 2 * c, c, groups=groups), "y")
    return net.model((1, 3, 6, 5))


def focus(order=((0, 0), (1, 0), (0, 1), (1, 1)), c: int = 3, size: int = 3, b: int = 2, n: int = 2) -> onnx.ModelProto:
    net, parts = Net(), []
    for i, j in order:
        rows = net.op("Slice", "x", f"r{i}{j}", {"start": [i], "end": [2**31 - 1], "axes": [2], "step": [b]})
        parts.append(net.op("Slice", rows, f"p{i}{j}", {"start": [j], "end": [2**31 - 1], "axes": [3], "step": [b]}))
    x = net.op("Concat", " ".join(parts), "blocks", axis=1)
    net.conv(net.conv(x, "a", c * b * b, 16, size), "y", 16, 8)
    return net.model((n, c, 6 * b, 5 * b))


def pyramid(c: int = 32, n: int = 2) -> onnx.ModelProto:
    """Two shuffled maps, one of them at half size: joined after an average pool and a resize, then read by a convolution."""
    net, joined = Net(), []
    for name, size, stride in (("large", 8, 1), ("small", 4, 2)):
        x = net.conv("x", f"{name}.stem", 3, c, 3, strides=(stride, stride))
        kept, read = by_gather(net, x, name, (n, c, size, size))
        x = net.op("Concat", f"{net.conv(read, f'{name}.a', c // 2, c // 2)} {kept}", f"{name}.cat", axis=1)
        joined.append(_shuffled(net, x, f"{name}.out", (n, c, size, size)))
    padding = {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "fill": np.float32(0)}
    large = net.op("AveragePool", net.op("Pad", joined[0], "padded", padding), "pooled", kernel_shape=(3, 3))
    small = net.op("Resize", f"{joined[1]} _", "resized", {"scales": np.float32([1, 1, 2, 2])}, mode="nearest")
    net.conv(net.op("Concat", f"{large} {small}", "joined", axis=1), "y", 2 * c, 16)
    return net.model((n, 3, 8, 8))


def offered(proto):
    return channels.offer(blocks.offer(lowered(proto)))


def agrees(proto, bound: float = 1e-5):
    """The network with its alternatives, each of which gives what onnxruntime gives."""
    net = offered(proto)
    feeds = feeds_for(net)
    expected = ort_run(proto, feeds)
    for choice in choices(net):
        for name, y in run(net, feeds, choice).items():
            assert relative_error(y, expected[name]) < bound, (name, choice)
    return net


def kinds(net, option: str) -> list[str]:
    """Problems that move elements, with every group that has this option set to it."""
    choice = {group: option if option in options else IN_WEIGHTS for group, options in net.groups}
    alive = [op for op in net.ops if holds(op.when, choice)]
    return [type(op.problem).__name__ for op in alive if isinstance(op.problem, (GatherProblem, MoveProblem, ViewProblem))]


# ---- alternatives


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_alternative_is_what_onnxruntime_computes(name):
    net = agrees(units(SPELLINGS[name]))
    halves = 6  # two of each unit, each one op, whatever it was
    assert kinds(net, APART) == ["GatherProblem"] * halves or name == "by_step"
    assert len(kinds(net, APART)) == halves
    assert kinds(net, IN_WEIGHTS) == ["GatherProblem"]  # the input of the depthwise convolution
    assert kinds(net, DEPTHWISE_TOO) == []


def test_a_shuffle_between_grouped_convolutions_is_columns_of_the_second():
    net = agrees(grouped())
    assert kinds(net, IN_WEIGHTS) == [] and len(kinds(net, APART)) == 1
    (dense,) = (op for op in net.ops if op.layer == "e.c" and (op.problem.groups == 1))
    assert np.count_nonzero(dense.weights["w"]) <= dense.weights["w"].size // 3


def test_pools_and_resizes_compute_in_any_order():
    """The pad is the pool's own, and the join of both is read as it is stored."""
    net = agrees(pyramid())
    assert net.groups[0] == ("channels of large.even", (APART, DEPTHWISE_TOO))
    assert len(kinds(net, APART)) == 7 and kinds(net, DEPTHWISE_TOO) == ["MoveProblem"]  # the resize


def test_weights_keep_their_pattern():
    """Even and odd columns of a 2:4 layer among zeros are 2:4 too."""
    proto = units(by_split)
    for tensor in proto.graph.initializer:
        if tensor.name.endswith("a.w"):
            w = onnx.numpy_helper.to_array(tensor).copy()
            w[:, 2::4] = w[:, 3::4] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(w, tensor.name))
    read = [op for op in offered(proto).ops if op.layer in ("u0a.c", "u1a.c", "u2a.c")]
    assert len(read) == 6 and all(op.problem.sparse24 for op in read)
    assert not any(op.problem.sparse24 for op in offered(units(by_split)).ops if isinstance(op.problem, ConvProblem))


def other_readers() -> onnx.ModelProto:
    """A shuffled tensor that is an output, pooled and added: it is made, once, and nothing else changes."""
    net = Net()
    x = net.conv("x", "stem", 3, 32, 3)
    kept, read = by_gather(net, x, "u", (2, 32, 6, 5))
    net.op("MaxPool", kept, "p", kernel_shape=(2, 2))
    net.op("Add", f"{read} {net.conv(read, 'a', 16, 16)}", "y")
    return net.model((2, 3, 6, 5), "y p")


def repeated() -> onnx.ModelProto:
    """One channel twice: columns would have to be added up."""
    net = Net()
    x = net.op("Gather", net.conv("x", "stem", 3, 8, 3), "g", {"at": [0, 2, 2, 5]}, axis=1)
    net.conv(x, "y", 4, 8)
    return net.model((1, 3, 6, 5))


def pixels() -> onnx.ModelProto:
    """Rows and columns trade places with channels: no order of channels."""
    net = Net()
    x = net.op("Transpose", net.conv("x", "stem", 3, 6, 3), "t", perm=(0, 2, 1, 3))
    net.conv(x, "y", 6, 8)
    return net.model((1, 3, 6, 5))


@pytest.mark.parametrize("case", [other_readers, repeated, pixels])
def test_what_cannot_be_in_the_weights_stays(case):
    net = agrees(case())
    assert not [group for group, _ in net.groups if group.startswith("channels of")]


@pytest.mark.parametrize("seed", range(12))
def test_any_order_before_any_convolution(seed):
    """Some channels of a tensor, in any order, before a convolution with any groups, through a Concat or not."""
    draw, net = np.random.default_rng(seed), Net()
    x, c = net.conv("x", "stem", 3, 24, 3), int(draw.choice([8, 12, 24]))
    x = net.op("Gather", x, "g", {"at": draw.permutation(24)[:c].tolist()}, axis=1)
    if seed % 3 == 1:
        x, c = net.op("Concat", f"{net.conv('x', 's', 3, 12)} {x} {net.conv('x', 't', 3, 24)}", "cat", axis=1), c + 36
    groups = int(draw.choice([1, 2, 4, c]))
    x = net.conv(x, "a", c, c, 3, groups)
    net.conv(x, "y", c, 8)
    assert any(group.startswith("channels of") for group, _ in agrees(net.model((2, 3, 6, 5))).groups)


# ---- space-to-depth in front of a convolution


@pytest.mark.parametrize("order", list(itertools.permutations([(0, 0), (1, 0), (0, 1), (1, 1)]))[::5])
@pytest.mark.parametrize("n", [1, 2])
def test_focus_is_one_move_or_a_larger_kernel(order, n):
    net = agrees(focus(order, n=n))
    (group,) = net.groups
    assert group == ("space to depth blocks", (APART, IN_WEIGHTS))
    moves = [op for op in net.ops if isinstance(op.problem, (MoveProblem, GatherProblem, ConcatProblem))]
    assert all(op.when == ((group[0], APART),) for op in moves)
    by_columns = sorted(order, key=lambda corner: corner[::-1]) == list(order)
    assert len(moves) == (1 if sorted(order) == list(order) or (n == 1 and by_columns) else 5)
    direct = next(op.problem for op in net.ops if op.when == (("space to depth blocks", IN_WEIGHTS),))
    assert (direct.c, direct.r, direct.s, direct.stride, direct.pad) == (3, 6, 6, (2, 2), (2, 2, 2, 2))


@pytest.mark.parametrize("corners", [((0, 0), (1, 0), (0, 1), (0, 1)), ((0, 0), (1, 1))])
def test_what_only_looks_like_focus_stays(corners):
    net, parts = Net(), []
    for t, corner in enumerate(corners):
        cut = {"start": list(corner), "end": [99, 99], "axes": [2, 3], "step": [2, 2]}
        parts.append(net.op("Slice", "x", f"p{t}", cut))
    net.conv(net.op("Concat", " ".join(parts), "blocks", axis=1), "y", 3 * len(corners), 8)
    assert not agrees(net.model((1, 3, 6, 8))).groups


# ---- engines


def moved(engine) -> list[str]:
    """Layers that only move data, between the network's edges."""
    edges = {t.name for t in (*engine.plan.inputs, *engine.plan.outputs)}
    around = {x.name: {t.name for t in (*x.inputs, *x.outputs)} for x in engine.plan.layers}
    found = [x for x in engine.plan.layers if x.type in ("move", "gather", "concat", "reformat")]
    return [x.name for x in found if x.type != "reformat" or not around[x.name] & edges]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SPELLINGS, "grouped"])
def test_no_shuffle_has_a_kernel(tmp_path, case):
    proto = grouped() if case == "grouped" else units(SPELLINGS[case])
    engine = engine_within_budget(proto, tmp_path / f"{case}.onnx")
    assert moved(engine) == [] or moved(engine) == ["u2.cat (in order)"]  # the input of the depthwise convolution
    inside = [t for x in engine.plan.layers if x.type == "conv" for t in x.outputs if t.name != "y"]
    assert inside and all(str(t.format) in ("fp16:hwc8", "fp16:hwc16", "fp16:chw32") for t in inside)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 1])
def test_focus_has_no_kernel(tmp_path, size):
    """The image is read as it lies, by the convolution itself."""
    engine = engine_within_budget(focus(size=size), tmp_path / "focus.onnx")
    first = engine.plan.layers[0]
    assert moved(engine) == [] and first.type == "conv" and (first.problem.r, first.problem.s) == (2 * size,) * 2


@pytest.mark.full
def test_published_networks():
    """FastestDet keeps no shuffle, YOLOX no Focus: FastestDet is left with its Resize."""
    engine = gr.build(given_model("fastestdet"), device=DEFAULT_DEVICE)
    assert moved(engine) == ["Concat_224 + Resize_226"] and len(engine.plan.steps) < 78
    engine = gr.build(given_model("yolox_nano"), device=DEFAULT_DEVICE)
    assert engine.plan.layers[0].type == "conv" and not any("Slice_" in name for name in moved(engine))


@pytest.mark.slow
def test_shufflenet_keeps_no_shuffle():
    assert moved(gr.build(SHUFFLENET, device=DEFAULT_DEVICE)) == []
