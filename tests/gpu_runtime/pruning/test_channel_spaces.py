"""Channels change places and nothing else: random orders of all that may move, judged by onnxruntime on the dense networks."""

import numpy as np
import onnx
import pytest

from gpu_runtime.frontend.files.check import check_graph
from gpu_runtime.frontend.files.load import load_whole
from gpu_runtime.pruning import channel_rules, permute
from gpu_runtime.pruning.channel_spaces import Recorder, Spaces
from gpu_runtime.pruning.prune import prune
from tests.channel_networks import network
from tests.conftest import MODELS
from tests.reference_run import given_model, model, node, ort_run

GROUP = 40  # networks in one test


def spaces_of(proto: onnx.ModelProto) -> Spaces:
    return channel_rules.channel_spaces(proto.graph, permute.tensor_shapes(proto, {}))


def shuffled(proto: onnx.ModelProto, seed: int = 0) -> tuple[onnx.ModelProto, Spaces]:
    """The model with all channels that may move in random places."""
    moved = onnx.ModelProto()
    moved.CopyFrom(proto)
    check_graph(moved.graph)
    spaces, rng = spaces_of(moved), np.random.default_rng(seed)
    permute.apply(moved.graph, spaces, [rng.permutation(s.size) for s in spaces.spaces])
    return moved, spaces


def inputs(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, kinds = np.random.default_rng(1), {1: np.float32, 10: np.float16}
    stored = {t.name for t in proto.graph.initializer}
    given = {v.name: v.type.tensor_type for v in proto.graph.input if v.name not in stored}
    shapes = {name: [d.dim_value or (64 if i > 1 else 1) for i, d in enumerate(t.shape.dim)] for name, t in given.items()}
    return {name: rng.uniform(-1, 1, shapes[name]).astype(kinds[t.elem_type]) for name, t in given.items()}


def same(proto: onnx.ModelProto, moved: onnx.ModelProto, bound: float) -> bool:
    """Whether both compute the same, up to the rounding of sums in another order."""
    feeds = inputs(proto)
    results = (ort_run(p, feeds, optimized=False).values() for p in (proto, moved))
    for y, got in zip(*results, strict=True):
        if y.dtype.kind != "f" or not np.isfinite(y).all():
            if not np.array_equal(y, got, equal_nan=y.dtype.kind == "f"):
                return False
        elif np.abs(got - y).max(initial=0) > bound * max(np.abs(y).max(initial=0), 1e-3):
            return False
    return True


def check(seeds: range) -> None:
    channels = 0
    for seed in seeds:
        proto = network(seed)
        moved, spaces = shuffled(proto, seed)
        channels += sum(s.size for s in spaces.spaces)
        assert same(proto, moved, 1e-3), f"seed {seed}"
    assert channels > 5 * len(seeds)


@pytest.mark.sample(2)
@pytest.mark.parametrize("group", range(6))
def test_drawn_networks_compute_the_same(group):
    check(range(GROUP * group, GROUP * group + GROUP))


@pytest.mark.long
@pytest.mark.parametrize("group", range(40))
def test_many_drawn_networks_compute_the_same(group):
    check(range(1000 + 100 * group, 1100 + 100 * group))


@pytest.mark.sample(5)
@pytest.mark.parametrize("path", sorted(MODELS.glob("*.onnx")), ids=lambda path: path.stem)
def test_real_networks_compute_the_same(path):
    proto = load_whole(path)
    moved, spaces = shuffled(proto)
    assert same(proto, moved, 1e-3 if "fp16" not in path.stem else 2e-2)
    if path.stem != "sci_180x320":  # three channels everywhere
        assert sum(s.size for s in spaces.spaces) >= 8


W = np.random.default_rng(0).standard_normal


def weights_of(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {f"w{i}": W(shape).astype(np.float32) for i, shape in enumerate(shapes)}


def sizes(nodes: list[onnx.NodeProto], shapes: list[tuple[int, ...]], output: str = "y", **constants) -> list[int]:
    proto = model(nodes, {"x": (1, 3, 6, 6)}, output, {**weights_of(*shapes), **constants}, opset=17)
    moved, spaces = shuffled(proto)
    assert same(proto, moved, 1e-4)
    return sorted(s.size for s in spaces.spaces)


STEM = node("Conv", "x w0", "a")


def test_what_moves_together():
    """A sum makes two convolutions' channels one space; a Concat keeps them apart, a grouped convolution within groups."""
    last = node("Conv", "s w2", "y")
    first = [STEM, node("Conv", "x w1", "b")]
    two = [(8, 3, 1, 1), (8, 3, 1, 1)]
    assert sizes([*first, node("Add", "a b", "s"), last], [*two, (4, 8, 1, 1)]) == [8]
    assert sizes([*first, node("Concat", "a b", "s", axis=1), last], [*two, (4, 16, 1, 1)]) == [8, 8]
    assert sizes([STEM, node("Conv", "a w1", "s", group=2), last], [(8, 3, 1, 1), (8, 4, 1, 1), (4, 8, 1, 1)]) == [4, 4, 4, 4]
    assert sizes([STEM, node("Conv", "a w1", "s", group=8), last], [(8, 3, 1, 1), (8, 1, 1, 1), (4, 8, 1, 1)]) == [8]


def test_a_tensor_beside_itself_moves_as_one():
    """x and relu(x) in one Concat: each copy of a channel keeps to its own piece; under one tag it could not move."""
    nodes = [STEM, node("Relu", "a", "r"), node("Concat", "a r", "s", axis=1), node("Conv", "s w1", "y")]
    assert sizes(nodes, [(8, 3, 1, 1), (4, 16, 1, 1)]) == [8]
    nodes[2:3] = [node("Concat", "a r", "p", axis=1), node("Concat", "r a", "q", axis=1), node("Add", "p q", "s")]
    assert sizes(nodes, [(8, 3, 1, 1), (4, 16, 1, 1)]) == [8]
    halves = [node("Split", "a", "f g", axis=1), node("Concat", "g f", "t", axis=1), node("Add", "a t", "s")]
    assert sizes([STEM, *halves, node("Conv", "s w1", "y")], [(8, 3, 1, 1), (4, 8, 1, 1)]) == []


@pytest.mark.parametrize("between", ["LRN", "CumSum", "DepthToSpace", "Softmax over parts"])
def test_what_is_not_alike_stays(between):
    inner = {
        "LRN": [node("LRN", "a", "s", size=3)],
        "CumSum": [node("CumSum", "a one", "s")],
        "DepthToSpace": [node("DepthToSpace", "a", "d", blocksize=2), node("SpaceToDepth", "d", "s", blocksize=2)],
        "Softmax over parts": [
            node("Reshape", "a parts", "p"),
            node("Softmax", "p", "q", axis=2),
            node("Reshape", "q whole", "s"),
        ],
    }[between]
    constants = {"one": np.int64(1), "parts": np.int64([1, 2, 4, 6, 6]), "whole": np.int64([1, 8, 6, 6])}
    used = {name for n in inner for name in n.input}
    kept = {name: v for name, v in constants.items() if name in used}
    assert sizes([STEM, *inner, node("Conv", "s w1", "y")], [(8, 3, 1, 1), (4, 8, 1, 1)], **kept) == []


def test_outputs_and_constants_that_are_read_in_two_ways_stay():
    shapes = [(8, 3, 1, 1), (8, 8, 1, 1)]
    nodes = [STEM, node("Conv", "a w1", "y")]
    assert sizes(nodes, shapes) == [8] and sizes(nodes, shapes, "y a") == []
    assert sizes([*nodes, node("Identity", "w1", "v")], shapes, "y v") == []
    twice = [node("Transpose", "w1", "t", perm=(1, 0, 2, 3)), node("Conv", "a w1", "b"), node("Conv", "b t", "y")]
    assert sizes([STEM, *twice], shapes) == []


def without_bias(i: int, x: str, y: str, zero: str) -> list[onnx.NodeProto]:
    """A convolution without a bias as torch.onnx.export(dynamo=True, optimize=False) writes it: its bias is one number,
    expanded to the number of rows of the weights, of the type of the convolution's input."""
    return [
        node("Shape", f"w{i}", f"rows{i}", start=0, end=1),
        onnx.helper.make_node("Constant", [], [f"ones{i}"], f"ones{i}", value_ints=[1]),
        node("Expand", f"rows{i} ones{i}", f"size{i}"),
        node("CastLike", f"{zero} {x}", f"zero{i}"),
        node("Expand", f"zero{i} size{i}", f"bias{i}"),
        node("Conv", f"{x} w{i} bias{i}", f"c{i}", pads=[1] * 4),
        node("BatchNormalization", f"c{i} scale{i} shift{i} mean{i} var{i}", y),
    ]


def exported(zero: float | list[float] = 0.0) -> onnx.ModelProto:
    """A residual block of convolutions without biases and normalizations, then a global mean, as the exporter writes it."""
    nodes = [
        *without_bias(0, "x", "n0", "zero"),
        node("Relu", "n0", "a"),
        *without_bias(1, "a", "n1", "zero"),
        node("Relu", "n1", "b"),
        *without_bias(2, "b", "n2", "zero"),
        node("Add", "n2 a", "s"),
        node("Relu", "s", "r"),
        onnx.helper.make_node("Constant", [], ["flat"], "flat", value_ints=[-1]),
        node("Reshape", "image flat", "axes"),
        node("ReduceMean", "r axes", "m", keepdims=1),
        *(onnx.helper.make_node("Constant", [], [name], name, value_ints=[n]) for name, n in (("one", 1), ("eight", 8))),
        node("Concat", "one eight", "matrix", axis=0),
        node("Reshape", "m matrix", "v", allowzero=1),
        node("Gemm", "v fc", "y", transB=1),
    ]
    rng = np.random.default_rng(3)
    stored = weights_of((8, 3, 3, 3), (8, 8, 3, 3), (8, 8, 3, 3)) | {"zero": np.float32(zero), "image": np.int64([-1, -2])}
    for i in range(3):
        stored |= {f"{name}{i}": rng.uniform(0.5, 1, 8).astype(np.float32) for name in ("scale", "shift", "mean", "var")}
    return model(nodes, {"x": (1, 3, 6, 6)}, "y", stored | {"fc": W((4, 8)).astype(np.float32)}, opset=20)


@pytest.mark.parametrize("zero", [0.0, 0.5])
def test_a_bias_of_one_number_moves_with_any_channels(zero):
    proto = exported(zero)
    moved, spaces = shuffled(proto)
    assert same(proto, moved, 1e-4)
    assert sorted(s.size for s in spaces.spaces) == [8, 8]  # within the block, and along its sum
    pruned = prune(proto, permute=True, device="none")
    rows = [r for r in pruned.rows if r.verdict == "pruned"]
    assert [r.unmoved for r in rows] == [""] * 3 and sum(r.lost_energy for r in rows) < sum(r.unpermuted for r in rows)


@pytest.mark.parametrize("form", ["u8s8", "modelopt", "qop"])
def test_channels_of_a_quantised_model_stay_and_the_reason_says_what_to_do(form):
    pruned = prune(given_model(f"quantized/resnet20_cifar10.{form}"), permute=True, device="none")
    why = [r.unmoved for r in pruned.rows if r.verdict == "pruned" and "Conv" in r.layers[0]]
    assert len(why) >= 18 and all(text.endswith("prune the model before it is quantized") for text in why), why


def test_a_computed_bias_of_several_numbers_stays():
    proto = exported(list(range(8)))
    moved, spaces = shuffled(proto)
    assert same(proto, moved, 1e-4) and not spaces.spaces


def test_a_graph_inside_a_node_is_refused():
    inner = onnx.helper.make_graph([node("Identity", "a", "z")], "g", [], [onnx.helper.make_tensor_value_info("z", 1, None)])
    branch = onnx.helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    proto = model([STEM, branch], {"x": (1, 3, 6, 6)}, "y", {**weights_of((8, 3, 1, 1)), "c": np.array(True)}, opset=17)
    with pytest.raises(ValueError, match="contains a subgraph"):
        spaces_of(proto)


def test_a_wrong_rule_would_be_seen(monkeypatch):
    """CumSum let through as if it treated channels alike; copies of channels that lie crosswise, which are not."""
    given = weights_of((8, 3, 1, 1), (4, 8, 1, 1)) | {"one": np.int64(1)}
    cumsum = model([STEM, node("CumSum", "a one", "s"), node("Conv", "s w1", "y")], {"x": (1, 3, 6, 6)}, "y", given, opset=17)
    monkeypatch.setitem(channel_rules.RULES, "CumSum", channel_rules.RULES["Relu"])
    moved, _ = shuffled(cumsum)
    assert not same(cumsum, moved, 1e-3)
    crossed = [
        STEM,
        node("Relu", "a", "r"),
        node("Split", "a", "a0 a1", axis=1),
        node("Split", "r", "r0 r1", axis=1),
        node("Concat", "a0 r1 r0 a1", "s", axis=1),
        node("Conv", "s w1", "y"),
    ]
    proto = model(crossed, {"x": (1, 3, 6, 6)}, "y", weights_of((8, 3, 1, 1), (4, 16, 1, 1)))
    moved, spaces = shuffled(proto)
    assert same(proto, moved, 1e-4) and sorted(s.size for s in spaces.spaces) == [4, 4]


def test_classes_that_occur_twice_under_one_tag_are_pinned():
    r = Recorder()
    a = r.fresh(4)
    r.edges.append((a.ids[:1], a.ids[1:2]))
    r.use("w", (4,), {0: [a]}, "")
    assert [(s.size, [p.positions.tolist() for p in s.ports]) for s in r.spaces().spaces] == [(2, [[2, 3]])]
