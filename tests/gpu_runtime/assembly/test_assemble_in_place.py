"""Concat and Split in place: no kernel copies, no neighbour is overwritten, and the outputs are onnxruntime's."""

import functools
import time

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import named
from gpu_runtime.planning import tables
from gpu_runtime.rewrites import shared_concats
from gpu_runtime.runtime.plan_record import TensorPlace
from tactics.format import DTYPES, CanonicalFormat, Format, num_bytes, padded_channels, part_format, strides
from tactics.measure import timing
from tactics.planner import plan
from tactics.problems.problem import (
    ConcatProblem,
    MoveProblem,
)
from tactics.tactic import Tile
from tests.conftest import model_path
from tests.engines import emulated
from tests.ort_budget import budgets
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


MODELS = {f.__name__: f for f in (densenet, inception, split_block, residuals, grouped_residuals, slices, contended, chained)}
FREE = ("densenet", "inception", "split_block", "residuals", "grouped_residuals", "slices", "chained")  # need no copy
# An exception: a copy and a convolution are faster than a convolution that reads planes, whose loops are simulated at 2.6 times
# the time and more.
REFORMATTED = {"slices": ["Reformatting CopyNode for Input Tensor 0 to r.conv + r + y"]}


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
    return {i.name: draw.uniform(-1, 1, i.shape).astype(DTYPES[i.dtype]) for i in engine.plan.inputs}


def copies(engine) -> list[dict]:
    """Layers that only move data, other than between the caller's tensors and the network."""
    edges = {t.name for t in (*engine.plan.inputs, *engine.plan.outputs)}
    moved = [layer for layer in engine.plan.layers if layer.type in ("move", "concat", "reformat")]
    return [m for m in moved if not {t.name for t in (*m.inputs, *m.outputs)} & edges]


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
    assert [m.name for m in copies(engine)] == REFORMATTED.get(name, [])
    assert engine.plan.solution.status == "proven" and engine.plan.solution.method == "elimination"
    free = [layer for layer in engine.plan.layers if layer.type == "noop" and layer.nodes]
    assert free and all(layer.time_us == 0 for layer in free)
    covered = {i for step in engine.plan.steps for i in step.covers}
    assert not covered & {i for i, layer in enumerate(engine.plan.layers) if layer.type == "noop"}


@pytest.mark.parametrize("name", FREE)
def test_the_plan_is_faster_than_with_copies(built, name):
    path, engine = built(name)
    copied = solve(path, in_place=False)[0]
    print(f"{name}: {engine.plan.solution.total_us:.2f} us in place, {copied.total_ps / 1e6:.2f} us with copies")
    assert engine.plan.solution.total_us < copied.total_ps / 1e6 - 1


def solve(path, in_place=True, **options) -> tuple[plan.Plan, float]:
    """(the plan, seconds that solving took), with or without entries in place."""
    net = shared_concats.share(lowered(path, **options)) if in_place else lowered(path, **options)
    io = {t.name: Format(t.dtype, "chw") for t in (*net.inputs, *net.outputs)}
    graph = tables.tabulate(net, named(DEVICE), timing.Predicted(named(DEVICE)), io=io, how=tables.Considered(False)).graph
    force = {} if in_place else {c.name: (lambda e: e.tactic is not None) for c in graph.choices}
    start = time.perf_counter()
    return plan.solve(graph, force=force, milp_seconds=20), time.perf_counter() - start


def test_squeezenet_joins_for_nothing():
    path = model_path("squeezenet11_fp16")
    best, seconds = solve(path)
    copied, _ = solve(path, in_place=False)
    joins = [name for name, e in best.entries.items() if e.tactic is None]
    print(f"squeezenet: {best.total_ps / 1e6:.2f} us, with copies {copied.total_ps / 1e6:.2f} us; solved in {seconds:.3f} s")
    assert len(joins) == 8 and not best.reformats and best.status == "proven" and seconds < 1
    assert best.total_ps < copied.total_ps - 16_000_000, "16 launches fewer"


@pytest.mark.slow
def test_squeezenet_runs():
    path = model_path("squeezenet11_fp16")
    engine = gr.build(path, device=DEVICE)
    assert not copies(engine) and not any(s.kernel == "move" for s in engine.plan.steps)
    feeds = {"data_0": np.random.default_rng(2).uniform(0, 255, (1, 3, 224, 224)).astype(np.float16)}
    got = emulated(engine, feeds)
    for output, budget in budgets(path, feeds).items():
        budget.check(got[output], output)


@pytest.mark.full
def test_densenet121_needs_no_milp(tmp_path):
    path = tmp_path / "densenet121.onnx"
    path.write_bytes(densenet((6, 12, 24, 16), 32, 64, 56).SerializeToString())
    best, seconds = solve(path)
    joins = [e for e in best.entries.values() if e.tactic is None]
    print(f"densenet121-like: {best.total_ps / 1e6:.1f} us, {len(best.entries)} ops, {best.method}, solved in {seconds:.2f} s")
    assert best.method == "elimination" and best.status == "proven" and len(joins) == 58


# ---- who may hold whom


def test_contended_tensors_lie_in_one_place_and_are_copied_into_the_others(built):
    _, engine = built("contended")
    placed = {}
    for layer in engine.plan.layers:
        for t in (*layer.inputs, *layer.outputs):
            where = t.inside or t
            here = t.offset, where.offset, str(where.format)
            assert placed.setdefault(t.name, here) == here, "a name stands for one place"
    names = [t.name for layer in engine.plan.layers for t in layer.outputs]
    assert len(set(names)) == len(names)
    assert engine.plan.solution.status == "proven"


def test_flat_blocks_become_prefixes_of_one_memory(built):
    _, engine = built("densenet")
    joins = [layer for layer in engine.plan.layers if layer.type == "noop" and layer.nodes]
    assert [len(j.inputs) for j in joins] == [2] * 4
    assert len({j.outputs[0].offset for j in joins}) == 1
    last = joins[-1].outputs[0]
    assert all(t.inside.shape4 == last.shape4 for j in joins for t in j.inputs)
    assert [j.inputs[1].inside.channel for j in joins] == [32, 48, 64, 80]


def test_parts_that_make_up_the_whole_are_the_whole():
    net = shared_concats.share(lowered(split_block()))
    (join,) = [op for op in net.ops if isinstance(op.problem, ConcatProblem)]
    assert join.inputs == ("stem", "r", "s", "t") and join.problem.sizes == (32, 16, 8, 16)
    assert [op.output for op in net.ops if isinstance(op.problem, MoveProblem)] == ["p", "q"], "both are still read"


def test_share_keeps_what_it_must():
    nodes = [
        node("Concat", "a b", "ab", axis=1),
        node("Concat", "a b", "again", axis=1),
        node("Concat", "b a b", "bab", axis=1),
        node("Concat", "a ab b", "mixed", axis=1),
        node("Split", "a", "p q", axis=1, num_outputs=2),
        node("Concat", "q p", "swapped", axis=1),
        node("Concat", "p q p", "more", axis=1),
    ]
    net = model(nodes, {"a": (1, 16, 2, 2), "b": (1, 8, 2, 2)}, "ab again bab mixed swapped more", opset=18)
    inputs = {op.output: op.inputs for op in shared_concats.share(lowered(net)).ops}
    assert inputs["ab"] == ("a", "b") and inputs["again"] == ("ab",) and inputs["bab"] == ("b", "ab")
    assert inputs["mixed"] == ("a", "ab", "b") and inputs["swapped"] == ("q", "p") and inputs["more"] == ("a", "p")


@pytest.mark.parametrize(
    "layout, first, c, key",
    [
        ("hwc8", 0, 24, "fp16:last24"),
        ("hwc8", 8, 16, "fp16:last16"),
        ("hwc8", 40, 20, "fp16:last24"),
        ("hwc8", 12, 24, None),
        ("hwc8", 16, 12, None),
        ("hwc16", 48, 12, "fp16:last16"),
        ("hwc16", 8, 8, "fp16:last8"),
        ("chw", 5, 3, "fp16:planes1"),
        ("chw", 59, 1, "fp16:last1"),
        ("chw32", 32, 28, "fp16:last32"),
        ("chw32", 0, 32, "fp16:last32"),
        ("chw32", 8, 8, None),
        ("chw32", 0, 8, None),
    ],
)
def test_parts_fit_the_formats_vector(layout, first, c, key):
    assert part_format(Format("fp16", layout), (2, 60, 5, 4), first, c) == (key and CanonicalFormat.parse(key))


# ---- kernels on tensors that lie inside others


H8, CHW, CHW32 = (Format("fp16", layout) for layout in ("hwc8", "chw", "chw32"))


DENSE, SPARSE = Tile(64, 64, 64, 2, 2, 4), Tile(64, 64, 64, 2, 2, 4)


def sector_bytes(t: TensorPlace) -> int:
    """Bytes of the 32-byte sectors that hold a tensor of the plan, whole or inside another."""
    whole = t.inside or t
    fmt, inside, own = whole.format, strides(whole.format, whole.shape4), t.shape4
    n, pixels = np.arange(own[0]), np.arange(own[2] * own[3])
    c = np.arange(padded_channels(t.format.layout, own[1]))
    at = n[:, None, None] * inside.n + (c >> inside.log2v)[:, None] * inside.block + (c & ((1 << inside.log2v) - 1))[:, None]
    return 32 * len(np.unique((t.offset + (at + pixels * inside.pixel) * DTYPES[fmt.dtype].itemsize) // 32))


def scratch_bytes(step: dict, layer: dict) -> int:
    """Partial sums and counters, in whole sectors."""
    if not step.values.get("SPLIT"):
        return 0
    blocks, split = step.grid[0] * step.grid[1], layer.tactic.tile.split
    return blocks * step.values["BM"] * step.values["BN"] * 4 + -(-blocks // split * 4 // 32) * 32


@pytest.mark.parametrize("name", FREE)
def test_each_tensor_is_stored_once_and_loaded_by_its_readers(built, name):
    """In whole sectors: a piece that begins or ends half-way through one (8 channels) touches it all."""
    _, engine = built(name)
    with engine.context(device="emulator") as ctx:
        ctx.run(feeds_of(engine))
        stats = ctx.gpu.stats
    weights = {s.name: -(-s.nbytes // 32) * 32 for s in engine.record.sections}
    loaded = stored = expected_load = expected_store = tensors = 0
    for step, counted in zip(engine.plan.steps, stats, strict=True):
        (layer,) = (engine.plan.layers[i] for i in step.covers)
        own = [n for section, n in weights.items() if section.rpartition(".")[0] == layer.name]
        reads = sum(map(sector_bytes, layer.inputs)) + sum(own)
        (write,) = map(sector_bytes, layer.outputs)
        partial = scratch_bytes(step, layer)  # of split-K: stored by every block, loaded by a tile's last
        reads, write = reads + partial, write + partial
        assert counted.launch_unique_store_bytes == write, layer.name
        assert counted.launch_unique_load_bytes <= reads, layer.name
        loaded, stored = loaded + counted.launch_unique_load_bytes, stored + counted.launch_unique_store_bytes
        expected_load, expected_store = expected_load + reads, expected_store + write
        tensors += sum(num_bytes(t.format, t.shape4) for t in layer.outputs)
    print(f"{name}: stored {stored} bytes, the tensors are {tensors}; loaded {loaded} of {expected_load}, weights included")


def test_a_dense_block_normalises_in_front_of_its_products(built):
    """No kernel stands for a normalisation, a ReLU or a Concat of the block: 1x1 convolutions read the shared buffer."""
    _, engine = built("densenet")
    tactics = [layer.tactic_name for layer in engine.plan.layers if layer.tactic_name]
    assert not any(t.startswith(("pointwise", "gather")) for t in tactics)
    assert sum("PRO" in step.values for step in engine.plan.steps) == 5  # one per layer, and the last
