"""Concat and Split in place: no kernel copies, no neighbour is overwritten, and the outputs are onnxruntime's."""

import functools
import time

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from gpu_runtime.planning import tables
from gpu_runtime.planning.places import IN_PLACE
from gpu_runtime.rewrites import shared_concats
from tactics.candidates import candidates
from tactics.families import table
from tactics.format import DTYPES, Format, from_memory, num_bytes, padded_channels, part_key, strides, to_memory
from tactics.launches import launches, pack_weights
from tactics.measure import timing
from tactics.measure.data import random_data, reference
from tactics.measure.worker import TOLERANCE, bind, relative_error, scratch_for
from tactics.planner import plan
from tactics.problems.gather import GatherProblem, ResizeProblem
from tactics.problems.pointwise_ops import Activation, Stage
from tactics.problems.problem import (
    ConcatProblem,
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
)
from tactics.problems.rows import NormalizeProblem
from tactics.tactic import Patch, Tactic, Tile
from tests.conftest import model_path
from tests.ort_budget import budgets
from tests.problems import conv_case, transposed_case
from tests.reference_run import model, node
from tests.reference_run import network as lowered

pytestmark = pytest.mark.slow

DEVICE = "h200"
rng = np.random.default_rng(11)


# ---- networks, made here


class Net:
    """Nodes and weights of a model while it is written down; every method returns the name of its output."""

    def __init__(self):
        self.nodes, self.weights = [], {}

    def op(self, kind: str, inputs: str, name: str, **attributes) -> str:
        self.nodes.append(node(kind, inputs, name, **attributes))
        return name.split()[0]

    def constant(self, name: str, *shape, near: float = 0.0, spread: float = 1.0) -> str:
        self.weights[name] = (near + spread * rng.uniform(-1, 1, shape)).astype(np.float32)
        return name

    def conv(self, x: str, name: str, c: int, k: int, size: int = 1, relu: bool = True, groups: int = 1) -> str:
        w = self.constant(f"{name}.w", k, c // groups, size, size, spread=(c // groups * size * size) ** -0.5)
        b = self.constant(f"{name}.b", k, spread=0.3)
        y = self.op("Conv", f"{x} {w} {b}", f"{name}.conv" if relu else name, pads=[size // 2] * 4, group=groups)
        return self.op("Relu", y, name) if relu else y

    def norm(self, x: str, name: str, c: int) -> str:
        stats = [self.constant(f"{name}.{s}", c, near=n, spread=0.3) for s, n in zip("gbmv", (1, 0, 0, 1), strict=True)]
        return self.op("Relu", self.op("BatchNormalization", " ".join([x, *stats]), f"{name}.norm"), name)

    def cat(self, name: str, *xs: str) -> str:
        return self.op("Concat", " ".join(xs), name, axis=1)

    def model(self, inputs: dict, outputs: str) -> onnx.ModelProto:
        return model(self.nodes, inputs, outputs, self.weights)


def densenet(layers=(4,), growth=16, first=32, image=10) -> onnx.ModelProto:
    """Dense blocks as torchvision exports them: every layer joins all maps before it anew."""
    net = Net()
    x, c = net.conv("x", "stem", 3, first, 3), first
    for b, depth in enumerate(layers):
        maps = [x]
        for i in range(depth):
            name = f"b{b}l{i}"
            joined = net.cat(f"{name}.cat", *maps) if i else x
            y = net.norm(joined, f"{name}.n1", c + i * growth)
            y = net.norm(net.conv(y, f"{name}.c1", c + i * growth, 4 * growth, relu=False), f"{name}.n2", 4 * growth)
            maps.append(net.conv(y, f"{name}.c2", 4 * growth, growth, 3, relu=False))
        c += depth * growth
        x = net.norm(net.cat(f"b{b}.cat", *maps), f"b{b}.n", c)
        if b + 1 < len(layers):
            c //= 2
            x = net.conv(x, f"t{b}", 2 * c, c, relu=False)
            x = net.op("AveragePool", x, f"t{b}.p", kernel_shape=[2, 2], strides=[2, 2])
    net.conv(x, "y", c, 8)
    return net.model({"x": (1, 3, image, image)}, "y")


def inception() -> onnx.ModelProto:
    net = Net()
    x = net.conv("x", "stem", 3, 32, 3)
    a = net.conv(x, "a", 32, 16, 3)  # of another kind than b0 and c0, which may be one: its piece stays in place
    b = net.conv(net.conv(x, "b0", 32, 24), "b", 24, 32, 3)
    c = net.conv(net.conv(x, "c0", 32, 8), "c", 8, 24, 5)
    pooled = net.op("MaxPool", x, "pool", kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    d = net.conv(pooled, "d", 32, 20)  # the last piece may end with padding
    net.conv(net.cat("cat", a, b, c, d), "y", 92, 16, 3)
    return net.model({"x": (2, 3, 9, 7)}, "y")


def split_block() -> onnx.ModelProto:
    """Two parts of one convolution: one goes through a bottleneck, and all are joined (the parts are the whole again)."""
    net = Net()
    net.conv("x", "stem", 3, 32, 3)
    net.nodes.append(node("Split", "stem", "p q", axis=1, num_outputs=2))
    r = net.conv("q", "r", 16, 16, 3)
    s = net.conv(net.op("MaxPool", "p", "pool", kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4), "s", 16, 8)
    t = net.op("Sigmoid", "q", "t")
    net.conv(net.cat("cat", "p", "q", r, s, t), "y", 72, 16)
    return model(net.nodes, {"x": (2, 3, 6, 8)}, "y", net.weights, opset=18)


def residuals() -> onnx.ModelProto:
    """A bottleneck whose sum is joined with what it started from."""
    net = Net()
    net.conv("x", "stem", 3, 32, 3)
    net.nodes.append(node("Split", "stem", "p q", axis=1, num_outputs=2))
    inner = net.conv(net.conv("q", "r0", 16, 16, 3), "r", 16, 16, 3, relu=False)
    net.conv(net.cat("cat", "p", "q", net.op("Relu", net.op("Add", f"q {inner}", "sum"), "s")), "y", 48, 16)
    return model(net.nodes, {"x": (1, 3, 6, 8)}, "y", net.weights, opset=18)


def grouped_residuals() -> onnx.ModelProto:
    """A part of a tensor is added to what a grouped and a depthwise convolution make of another, and the sums are joined."""
    net = Net()
    net.conv("x", "stem", 3, 64, 3)
    net.nodes.append(node("Split", "stem", "p q", axis=1, num_outputs=2))
    g = net.op("Relu", net.op("Add", f"q {net.conv('p', 'g', 32, 32, 3, relu=False, groups=4)}", "g.sum"), "g.act")
    d = net.op("Relu", net.op("Add", f"q {net.conv('p', 'd', 32, 32, 3, relu=False, groups=32)}", "d.sum"), "d.act")
    net.conv(net.cat("cat", "p", "q", g, d), "y", 128, 16)
    return model(net.nodes, {"x": (1, 3, 6, 8)}, "y", net.weights, opset=18)


def slices() -> onnx.ModelProto:
    """Channel shuffle's halves by Slice: read in place by a convolution and by an Add."""
    net = Net()
    net.conv("x", "stem", 3, 48, 3)
    for name, at in (("p", (0, 24)), ("q", (24, 48))):
        for k, v in zip(("start", "end", "axes"), (*at, 1), strict=True):
            net.weights[f"{name}.{k}"] = np.array([v])
        net.op("Slice", f"stem {name}.start {name}.end {name}.axes", name)
    net.op("Add", f"p {net.conv('q', 'r', 24, 24, 3)}", "y")
    net.op("Mul", "p q", "z")
    return net.model({"x": (1, 3, 7, 5)}, "y z")


def contended() -> onnx.ModelProto:
    """What cannot all be in place: the caller's input, an output, one tensor twice, one tensor in two Concats, odd offsets."""
    net = Net()
    x = net.conv("x", "stem", 8, 8)
    a, b = net.conv(x, "a", 8, 16), net.conv(x, "b", 8, 8, 3)
    net.cat("first", "x", a, a)
    net.cat("second", b, a)
    net.cat("odd", net.conv("second", "o1", 24, 12), net.conv("first", "o2", 40, 20, 3), b)
    net.conv("odd", "y", 40, 8)
    return net.model({"x": (1, 8, 6, 5)}, "y o1 second")


def chained() -> onnx.ModelProto:
    """A Concat of Concats, the inner one in the middle; kernels of three sizes, which no one launch can be."""
    net = Net()
    a, b, c = (net.conv("x", n, 8, k, r) for n, k, r in (("a", 8, 1), ("b", 16, 3), ("c", 32, 5)))
    inner = net.cat("inner", b, c)
    d = net.conv(inner, "d", 48, 16)
    net.conv(net.cat("outer", a, inner, d), "y", 72, 8)
    return net.model({"x": (2, 8, 5, 4)}, "y")


MODELS = {
    f.__name__: f for f in (densenet, inception, split_block, residuals, grouped_residuals, slices, contended, chained)
}
FREE = ("densenet", "inception", "split_block", "residuals", "grouped_residuals", "slices", "chained")  # need no copy


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    @functools.cache
    def build(name: str):
        path = tmp_path_factory.mktemp("models") / f"{name}.onnx"
        path.write_bytes(MODELS[name]().SerializeToString())
        return path, gr.build(path, device=DEVICE)

    return build


def feeds_of(engine) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(5)
    return {i["name"]: draw.uniform(-1, 1, i["shape"]).astype(DTYPES[i["dtype"]]) for i in engine.plan["inputs"]}


def copies(engine) -> list[dict]:
    """Layers that only move data, other than between the caller's tensors and the network."""
    edges = {t["name"] for t in (*engine.plan["inputs"], *engine.plan["outputs"])}
    moved = [layer for layer in engine.plan["layers"] if layer["type"] in ("move", "concat", "reformat")]
    return [m for m in moved if not {t["name"] for t in (*m["inputs"], *m["outputs"])} & edges]


# ---- whole networks


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_onnxruntimes(built, name):
    path, engine = built(name)
    feeds, plain = feeds_of(engine), None
    for options in ({}, {"poison": True}, {"poison": True, "async_mode": "late", "seed": 3}):
        with engine.context(device="emulator", **options) as ctx:
            got = ctx.run(feeds)
        for output, budget in budgets(path, feeds).items():
            budget.check(got[output], f"{name} {options} {output}")
        assert plain is None or all(np.array_equal(got[o], plain[o]) for o in got)
        plain = got


@pytest.mark.parametrize("name", FREE)
def test_nothing_is_copied(built, name):
    _, engine = built(name)
    assert not copies(engine), [m["name"] for m in copies(engine)]
    assert engine.plan["plan"]["status"] == "proven" and engine.plan["plan"]["method"] == "elimination"
    free = [layer for layer in engine.plan["layers"] if layer["type"] == "noop" and layer["nodes"]]
    assert free and all(layer["time_us"] == 0 for layer in free)
    covered = {i for step in engine.plan["steps"] for i in step["covers"]}
    assert not covered & {i for i, layer in enumerate(engine.plan["layers"]) if layer["type"] == "noop"}


@pytest.mark.parametrize("name", FREE)
def test_the_plan_is_faster_than_with_copies(built, name):
    path, engine = built(name)
    copied = solve(path, in_place=False)[0]
    print(f"{name}: {engine.plan['plan']['total_us']:.2f} us in place, {copied.total_ps / 1e6:.2f} us with copies")
    assert engine.plan["plan"]["total_us"] < copied.total_ps / 1e6 - 1


def solve(path, in_place=True, **options) -> tuple[plan.Plan, float]:
    """(the plan, seconds that solving took), with or without entries in place."""
    net = shared_concats.share(lowered(path, **options)) if in_place else lowered(path, **options)
    io = {t.name: Format(t.dtype, "chw") for t in (*net.inputs, *net.outputs)}
    graph = tables.tabulate(net, named(DEVICE), timing.predicted(named(DEVICE)), sparse=False, io=io).graph
    force = {} if in_place else {c.name: (lambda e: e.tactic != IN_PLACE) for c in graph.choices}
    start = time.perf_counter()
    return plan.solve(graph, force=force, milp_seconds=20), time.perf_counter() - start


def test_squeezenet_joins_for_nothing():
    path = model_path("squeezenet11_fp16")
    best, seconds = solve(path)
    copied, _ = solve(path, in_place=False)
    joins = [name for name, e in best.entries.items() if e.tactic == IN_PLACE]
    print(f"squeezenet: {best.total_ps / 1e6:.2f} us, with copies {copied.total_ps / 1e6:.2f} us; solved in {seconds:.3f} s")
    assert len(joins) == 8 and not best.reformats and best.status == "proven" and seconds < 1
    assert best.total_ps < copied.total_ps - 16_000_000, "16 launches fewer"


@pytest.mark.slow
def test_squeezenet_runs():
    path = model_path("squeezenet11_fp16")
    engine = gr.build(path, device=DEVICE)
    assert not copies(engine) and not any(s["kernel"] == "move" for s in engine.plan["steps"])
    feeds = {"data_0": np.random.default_rng(2).uniform(0, 255, (1, 3, 224, 224)).astype(np.float16)}
    with engine.context(device="emulator", poison=True) as ctx:
        got = ctx.run(feeds)
    for output, budget in budgets(path, feeds).items():
        budget.check(got[output], output)


@pytest.mark.full
def test_densenet121_needs_no_milp(tmp_path):
    path = tmp_path / "densenet121.onnx"
    path.write_bytes(densenet((6, 12, 24, 16), 32, 64, 56).SerializeToString())
    best, seconds = solve(path)
    joins = [e for e in best.entries.values() if e.tactic == IN_PLACE]
    print(f"densenet121-like: {best.total_ps / 1e6:.1f} us, {len(best.entries)} ops, {best.method}, solved in {seconds:.2f} s")
    assert best.method == "elimination" and best.status == "proven" and len(joins) == 58


# ---- who may hold whom


def test_contended_tensors_lie_in_one_place_and_are_copied_into_the_others(built):
    _, engine = built("contended")
    placed = {}
    for layer in engine.plan["layers"]:
        for t in (*layer["inputs"], *layer["outputs"]):
            where = t.get("inside", t)
            here = t["offset"], where["offset"], where["format"]
            assert placed.setdefault(t["name"], here) == here, "a name stands for one place"
    names = [t["name"] for layer in engine.plan["layers"] for t in layer["outputs"]]
    assert len(set(names)) == len(names)
    assert engine.plan["plan"]["status"] == "proven"


def test_flat_blocks_become_prefixes_of_one_memory(built):
    _, engine = built("densenet")
    joins = [layer for layer in engine.plan["layers"] if layer["type"] == "noop" and layer["nodes"]]
    assert [len(j["inputs"]) for j in joins] == [2] * 4
    assert len({j["outputs"][0]["offset"] for j in joins}) == 1
    last = joins[-1]["outputs"][0]
    assert all(t["inside"]["shape4"] == last["shape4"] for j in joins for t in j["inputs"])
    assert [j["inputs"][1]["inside"]["channel"] for j in joins] == [32, 48, 64, 80]


def test_parts_that_make_up_the_whole_are_the_whole():
    net = shared_concats.share(lowered(split_block()))
    (join,) = [op for op in net.ops if isinstance(op.problem, ConcatProblem)]
    assert join.inputs == ("stem", "r", "s", "t") and join.problem.sizes == (32, 16, 8, 16)
    assert [op.output for op in net.ops if isinstance(op.problem, MoveProblem)] == ["p", "q"], "both are still read"


def test_share_keeps_what_it_must():
    nodes = [
        node("Concat", "a b", "ab", axis=1), node("Concat", "a b", "again", axis=1), node("Concat", "b a b", "bab", axis=1),
        node("Concat", "a ab b", "mixed", axis=1), node("Split", "a", "p q", axis=1, num_outputs=2),
        node("Concat", "q p", "swapped", axis=1), node("Concat", "p q p", "more", axis=1),
    ]  # fmt: skip
    net = model(nodes, {"a": (1, 16, 2, 2), "b": (1, 8, 2, 2)}, "ab again bab mixed swapped more", opset=18)
    inputs = {op.output: op.inputs for op in shared_concats.share(lowered(net)).ops}
    assert inputs["ab"] == ("a", "b") and inputs["again"] == ("ab",) and inputs["bab"] == ("b", "ab")
    assert inputs["mixed"] == ("a", "ab", "b") and inputs["swapped"] == ("q", "p") and inputs["more"] == ("a", "p")


@pytest.mark.parametrize("layout, first, c, key", [
    ("hwc8", 0, 24, "fp16:last24"), ("hwc8", 8, 16, "fp16:last16"), ("hwc8", 40, 20, "fp16:last24"),
    ("hwc8", 12, 24, None), ("hwc8", 16, 12, None),
    ("hwc16", 48, 12, "fp16:last16"), ("hwc16", 8, 8, "fp16:last8"),
    ("chw", 5, 3, "fp16:planes1"), ("chw", 59, 1, "fp16:last1"),
    ("chw32", 32, 28, "fp16:last32"), ("chw32", 0, 32, "fp16:last32"), ("chw32", 8, 8, None), ("chw32", 0, 8, None),
])  # fmt: skip
def test_parts_fit_the_formats_vector(layout, first, c, key):
    assert part_key(Format("fp16", layout), (2, 60, 5, 4), first, c) == key


# ---- kernels on tensors that lie inside others


H8, CHW, CHW32 = (Format("fp16", layout) for layout in ("hwc8", "chw", "chw32"))
DENSE, SPARSE = Tile(64, 64, 64, 2, 2, 4), Tile(64, 64, 64, 2, 2, 4)
PATCH = Patch(64, 8, 8, 2, 4)
LEAKY = Activation("leaky_relu", (0.1,))
LEAKY_STAGE = Stage("leaky_relu", params=(0.1,))
# (problem, kernel, tile, formats, per tensor (first channel, channels of the tensor around it, its format) or None)
AROUND = {
    "conv": (
        conv_case(2, 24, 6, 5, 40, 3, 3, pad=(1, 1, 1, 1), bias=True), "conv_dense", DENSE, (H8, H8),
        ((8, 56, H8), (16, 72, H8)),
    ),
    "conv_groups": (
        conv_case(1, 32, 6, 5, 32, 3, 3, groups=2, bias=True), "conv_dense", Tile(16, 128, 64, 1, 4, 4), (H8, H8),
        ((8, 56, H8), (16, 72, H8)),
    ),
    "conv_grouped": (
        conv_case(2, 32, 6, 5, 24, 3, 3, pad=(1, 1, 1, 1), groups=4, act=LEAKY), "conv_grouped", Tile(64, 64, 64, 2, 2, 1),
        (CHW32, H8), ((32, 96, CHW32), (8, 40, H8)),
    ),
    "conv_sparse": (
        ConvProblem(1, 32, 6, 5, 36, 1, 1, sparse24=True), "conv_sparse24", SPARSE, (H8, H8),
        ((32, 96, CHW32), (24, 60, H8)),
    ),
    "conv_residual": (
        conv_case(2, 16, 6, 5, 24, 1, 1, residual=True), "conv_dense", DENSE, (H8, H8, H8), (None, (8, 48, H8), (16, 56, H8)),
    ),
    "conv_residual_inside": (
        conv_case(2, 16, 6, 5, 40, 1, 1, residual=True), "conv_dense", DENSE, (H8, CHW32, CHW32),
        (None, (32, 72, CHW32), None),
    ),
    "conv_residual_linear": (
        conv_case(2, 16, 6, 5, 24, 1, 1, residual=True), "conv_dense", DENSE, (H8, CHW, CHW), (None, None, (3, 32, CHW)),
    ),
    "transpose_residual": (
        transposed_case(2, 16, 4, 5, 8, 2, 2, (8, 10), (2, 2), residual=True), "transpose_dense", DENSE, (H8, H8, H8),
        (None, (8, 32, H8), (16, 32, H8)),
    ),
    "conv_stem": (
        conv_case(1, 3, 9, 8, 24, 3, 3, pad=(1, 1, 1, 1), residual=True), "conv_stem", None, (CHW, H8, H8),
        ((5, 9, CHW), (8, 40, H8), (16, 48, H8)),
    ),
    "conv_depthwise": (
        conv_case(2, 24, 6, 5, 48, 3, 3, groups=24, pad=(1, 1, 1, 1), bias=True), "conv_depthwise", PATCH, (H8, CHW32),
        ((8, 56, H8), (32, 80, CHW32)),
    ),
    "conv_groups_residual": (
        conv_case(2, 32, 6, 5, 32, 3, 3, groups=2, residual=True), "conv_dense", Tile(16, 128, 64, 1, 4, 4), (H8, H8, H8),
        (None, (8, 56, H8), (16, 72, H8)),
    ),
    "conv_grouped_residual": (
        conv_case(2, 32, 6, 5, 24, 3, 3, groups=4, residual=True, act=LEAKY), "conv_grouped", Tile(64, 64, 64, 2, 2, 1),
        (CHW32, H8, H8), (None, (16, 48, H8), (8, 40, H8)),
    ),
    "conv_grouped_residual_linear": (
        conv_case(2, 32, 6, 5, 24, 3, 3, groups=4, residual=True), "conv_grouped", Tile(64, 64, 64, 2, 2, 1),
        (H8, CHW, CHW), (None, (3, 32, CHW), None),
    ),
    "conv_depthwise_residual": (
        conv_case(2, 24, 6, 5, 24, 3, 3, groups=24, pad=(1, 1, 1, 1), residual=True), "conv_depthwise", PATCH, (H8, H8, H8),
        ((8, 56, H8), (16, 48, H8), (8, 32, H8)),
    ),
    "transpose_grouped": (
        transposed_case(2, 32, 4, 5, 24, 3, 3, (9, 11), (2, 2), groups=4, residual=True), "transpose_grouped",
        Tile(64, 64, 64, 2, 2, 1), (CHW32, H8, H8), ((32, 96, CHW32), (8, 40, H8), (16, 56, H8)),
    ),
    "transpose_depthwise": (
        transposed_case(2, 24, 4, 5, 24, 4, 4, (8, 10), (2, 2), (1, 1), groups=24, residual=True), "transpose_depthwise",
        PATCH, (H8, H8, H8), ((8, 56, H8), (16, 48, H8), (8, 32, H8)),
    ),
    "conv_shuffled_residual": (
        conv_case(2, 16, 4, 5, 32, 3, 3, d2s=2, residual=True), "conv_dense", DENSE, (H8, H8, H8),
        (None, (8, 32, H8), (8, 24, H8)),
    ),
    "conv_shuffled_residual_linear": (
        conv_case(2, 16, 4, 5, 12, 3, 3, d2s=2, residual=True), "conv_dense", DENSE, (H8, CHW, CHW),
        (None, (3, 8, CHW), (1, 5, CHW)),
    ),
    "conv_upsampled_residual": (
        conv_case(2, 16, 6, 9, 24, 1, 1, residual=True, up=3), "conv_dense", DENSE, (H8, H8, H8),
        (None, (8, 48, H8), (16, 56, H8)),
    ),
    "conv_shuffled": (conv_case(1, 16, 4, 5, 32, 3, 3, d2s=2), "conv_dense", DENSE, (H8, H8), ((8, 32, H8), (8, 24, H8))),
    "transpose": (
        transposed_case(1, 16, 4, 5, 8, 2, 2, (8, 10), (2, 2), bias=True), "transpose_dense", DENSE, (H8, H8),
        ((8, 32, H8), (16, 32, H8)),
    ),
    "transpose_sparse": (
        ConvTransposeProblem(1, 32, 4, 5, 8, 2, 2, (8, 10), (2, 2), sparse24=True), "transpose_sparse24", SPARSE, (H8, H8),
        ((8, 48, H8), (16, 32, H8)),
    ),
    "conv_fp32": (
        conv_case(2, 24, 6, 5, 40, 3, 3, pad=(1, 1, 1, 1), bias=True, residual=True), "conv_fp32", None, (H8, CHW32, H8),
        ((8, 56, H8), (32, 80, CHW32), (16, 72, H8)),
    ),
    "conv_fp32_in": (
        ConvProblem(1, 7, 6, 5, 13, 3, 3), "conv_fp32", None, (Format("fp32", "chw"), CHW), (None, (5, 20, CHW)),
    ),
    "conv_fp32_out": (
        ConvProblem(1, 24, 6, 5, 13, 3, 3), "conv_fp32", None, (H8, Format("fp32", "chw")), ((8, 56, H8), None),
    ),
    "transpose_fp32": (
        transposed_case(1, 16, 4, 5, 8, 2, 2, (8, 10), (2, 2), bias=True), "transpose_fp32", None, (H8, H8),
        ((8, 32, H8), (16, 32, H8)),
    ),
    "conv_linear": (ConvProblem(2, 7, 6, 5, 13, 3, 3), "conv_dense", DENSE, (CHW, CHW), ((3, 11, CHW), (5, 20, CHW))),
    "pool": (PoolProblem(2, 16, 9, 8, "max", 3, 3, (4, 4), (2, 2)), "pool", None, (H8, H8), ((8, 32, H8), (8, 40, H8))),
    "pool_global": (PoolProblem(2, 24, 5, 4, "avg", 5, 4, (1, 1)), "pool_global", None, (H8, H8), ((8, 40, H8), (16, 48, H8))),
    "pool_linear": (PoolProblem(1, 5, 6, 6, "avg", 2, 2, (5, 5)), "pool", None, (CHW, CHW), ((2, 9, CHW), (1, 7, CHW))),
    "pointwise": (
        PointwiseProblem(2, 24, 5, 3, (Stage("add", "t1"), LEAKY_STAGE), ("nchw", "nchw")), "pointwise", None, (H8, H8, H8),
        ((8, 40, H8), None, (16, 48, H8)),
    ),
    "pointwise_broadcast": (
        PointwiseProblem(2, 24, 5, 3, (Stage("mul", "t1"),), ("nchw", "nc")), "pointwise", None, (H8, H8, H8),
        ((8, 40, H8), (8, 48, H8), None),
    ),
    "pointwise_channel": (
        PointwiseProblem(2, 32, 5, 3, (Stage("mul", "c0"),), constants=("c",)), "pointwise", None, (H8, H8),
        ((32, 64, CHW32), (8, 48, H8)),
    ),
    "pointwise_planes": (
        PointwiseProblem(2, 40, 5, 3, (LEAKY_STAGE,)), "pointwise", None, (CHW32, CHW32), ((32, 72, CHW32), (64, 104, CHW32)),
    ),
    "pointwise_linear": (
        PointwiseProblem(2, 5, 5, 3, (LEAKY_STAGE,)), "pointwise", None, (CHW, CHW), ((2, 8, CHW), (1, 9, CHW)),
    ),
    "rows": (NormalizeProblem(2, 24, 5, 3, "softmax", "c"), "rows", None, (H8, H8), ((8, 40, H8), (8, 32, H8))),
    "move": (
        MoveProblem(2, 24, 5, 4, "upsample", (24, 10, 8), step=(1, 2, 2)), "move", None, (H8, H8), ((8, 40, H8), (16, 48, H8)),
    ),
    "move_part": (
        MoveProblem(1, 40, 5, 4, "window", (16, 5, 4), (8, 0, 0)), "move", None, (H8, CHW), ((16, 64, H8), (3, 20, CHW)),
    ),
    "gather": (
        GatherProblem((2, 24, 5, 4), (0, 1, 3, 2), ((), (), (3, -1, 0), ())), "gather", None, (H8, CHW),
        ((8, 40, H8), (3, 29, CHW)),
    ),
    "gather_channels": (
        GatherProblem((1, 24, 5, 4), index=((), tuple(range(23, 7, -1)), (), ())), "gather", None, (H8, H8),
        ((8, 40, H8), (16, 40, H8)),
    ),
    "resize": (
        ResizeProblem(2, 16, 5, 4, (7, 9), "linear", "half_pixel", (1.4, 2.25)), "resize", None, (H8, H8),
        ((8, 40, H8), (16, 48, H8)),
    ),
    "concat": (ConcatProblem((16, 12), (1, 4, 3)), "move", None, (H8, H8, CHW), ((8, 32, H8), None, (2, 31, CHW))),
}  # fmt: skip


def run_inside(problem, tactic, inputs, weights, places, **options):
    """Run one tactic with tensors inside others -> (its output NCHW, padding kept; whether all around it is untouched)."""
    gpu = Emulated(named("a100"), **options)
    shapes = (*problem.in_shapes, problem.out_shape)
    lie, addresses, images = [], [], []
    for x, fmt, shape, place in zip((*inputs, None), (*tactic.ins, tactic.out), shapes, places, strict=True):
        first, channels, whole_fmt = place or (0, shape[1], fmt)
        whole = (shape[0], channels, *shape[2:])
        s = strides(whole_fmt, whole)
        around = np.full(num_bytes(whole_fmt, whole), 0xFF, np.uint8).view(DTYPES[whole_fmt.dtype])
        image = from_memory(around, whole_fmt, whole, padding=True)
        if x is not None:
            image[:, first : first + shape[1]] = x
            if first + shape[1] == channels:  # the last part owns the padding
                image[:, channels:] = 0
        padded = whole[0], image.shape[1], *whole[2:]
        address = gpu.allocate(around.nbytes)
        gpu.write(address, to_memory(image, whole_fmt))
        lie.append(s)
        images.append((address, whole_fmt, padded))
        elements = (first >> s.log2v) * s.block + (first & ((1 << s.log2v) - 1))
        addresses.append(address + elements * DTYPES[whole_fmt.dtype].itemsize)
    sections = pack_weights(problem, tactic, weights)
    held = {name: gpu.allocate(array.nbytes) for name, array in sections.items()}
    for name, array in sections.items():
        gpu.write(held[name], array)
    steps = launches(problem, tactic, tuple(lie))
    scratch = scratch_for(gpu, steps)
    for step in steps:
        kernel = gpu.load(compile_kernel(step.kernel, dict(step.values), gpu.arch))
        gpu.launch(kernel, step.grid, step.block, step.smem, bind(step.args, addresses[:-1], addresses[-1], held, scratch))
    address, whole_fmt, padded = images[-1]
    flat = gpu.read(address, num_bytes(whole_fmt, padded)).view(DTYPES[whole_fmt.dtype])
    whole = from_memory(flat, whole_fmt, padded)
    first, c = (places[-1] or (0,))[0], problem.out_shape[1]
    end = first + (padded_channels(tactic.out.layout, c) if first + c == (places[-1] or (0, c))[1] else c)
    untouched = np.isnan(whole[:, :first]).all() and np.isnan(whole[:, end:]).all()
    return whole[:, first:end], untouched, gpu.stats


@pytest.mark.sample(42)
@pytest.mark.parametrize("mode", [{}, {"async_mode": "late", "seed": 1}], ids=["", "late"])
@pytest.mark.parametrize("name", AROUND)
def test_kernels_keep_to_their_part(name, mode):
    problem, kernel, tile, (*ins, out), places = AROUND[name]
    tactic = Tactic(kernel, tile, tuple(ins), out)
    if kernel == "conv_stem":
        tactic = next(t for t in candidates(problem, named("a100")) if (t.kernel, t.ins, t.out) == (kernel, tuple(ins), out))
    inputs, weights = random_data(problem)
    got, untouched, stats = run_inside(problem, tactic, inputs, weights, places, **mode)
    c = problem.out_shape[1]
    assert untouched, "something around the part was written"
    assert not np.isnan(got).any() and not got[:, c:].any()
    assert relative_error(got[:, :c], np.asarray(reference(problem, inputs, weights), np.float32)) < TOLERANCE


def test_every_strided_kernel_is_tested():
    assert {kernel for _, kernel, *_ in AROUND.values()} == set(table.STRIDED)


def sector_bytes(t: dict) -> int:
    """Bytes of the 32-byte sectors that hold a tensor of the plan, whole or inside another."""
    whole = t.get("inside", t)
    fmt, inside, own = Format.parse(whole["format"]), strides(Format.parse(whole["format"]), whole["shape4"]), t["shape4"]
    n, pixels = np.arange(own[0]), np.arange(own[2] * own[3])
    c = np.arange(padded_channels(Format.parse(t["format"]).layout, own[1]))
    at = n[:, None, None] * inside.n + (c >> inside.log2v)[:, None] * inside.block + (c & ((1 << inside.log2v) - 1))[:, None]
    return 32 * len(np.unique((t["offset"] + (at + pixels * inside.pixel) * DTYPES[fmt.dtype].itemsize) // 32))


def scratch_bytes(step: dict, layer: dict) -> int:
    """Partial sums and counters, in whole sectors."""
    if not step["values"].get("SPLIT"):
        return 0
    blocks, split = step["grid"][0] * step["grid"][1], Tactic.parse(layer["tactic"]).tile.split
    return blocks * step["values"]["BM"] * step["values"]["BN"] * 4 + -(-blocks // split * 4 // 32) * 32


@pytest.mark.parametrize("name", FREE)
def test_each_tensor_is_stored_once_and_loaded_by_its_readers(built, name):
    """In whole sectors: a piece that begins or ends half-way through one (8 channels) touches it all."""
    _, engine = built(name)
    with engine.context(device="emulator") as ctx:
        ctx.run(feeds_of(engine))
        stats = ctx.gpu.stats
    weights = {s["name"]: -(-s["nbytes"] // 32) * 32 for s in engine.plan["sections"]}
    loaded = stored = expected_load = expected_store = tensors = 0
    for step, counted in zip(engine.plan["steps"], stats, strict=True):
        (layer,) = (engine.plan["layers"][i] for i in step["covers"])
        own = [n for section, n in weights.items() if section.rpartition(".")[0] == layer["name"]]
        reads = sum(map(sector_bytes, layer["inputs"])) + sum(own)
        (write,) = map(sector_bytes, layer["outputs"])
        partial = scratch_bytes(step, layer)  # of split-K: stored by every block, loaded by a tile's last
        reads, write = reads + partial, write + partial
        assert counted.launch_unique_store_bytes == write, layer["name"]
        assert counted.launch_unique_load_bytes <= reads, layer["name"]
        loaded, stored = loaded + counted.launch_unique_load_bytes, stored + counted.launch_unique_store_bytes
        expected_load, expected_store = expected_load + reads, expected_store + write
        tensors += sum(num_bytes(Format.parse(t["format"]), t["shape4"]) for t in layer["outputs"])
    print(f"{name}: stored {stored} bytes, the tensors are {tensors}; loaded {loaded} of {expected_load}, weights included")


def test_a_dense_block_normalises_in_front_of_its_products(built):
    """No kernel stands for a normalisation, a ReLU or a Concat of the block: 1x1 convolutions read the shared buffer."""
    _, engine = built("densenet")
    tactics = [layer["tactic"] for layer in engine.plan["layers"] if layer["tactic"]]
    assert not any(t.startswith(("pointwise", "gather")) for t in tactics)
    assert sum("PRO" in step["values"] for step in engine.plan["steps"]) == 5  # one per layer, and the last
