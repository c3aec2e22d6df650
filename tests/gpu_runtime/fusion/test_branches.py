"""Branches that are added are one convolution, exactly; what only looks like them stays apart."""

import warnings

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from cuda_kernels import sparse24
from gpu_runtime import build
from gpu_runtime.frontend import importer
from gpu_runtime.fusion import fuse
from tactics.planner.graph import holds
from tactics.problems.problem import ConvProblem
from tests.reference_run import check_against_ort, model, network, node

BOUND = 2e-3  # of the largest output: branches' weights are rounded to FP16 one by one, merged ones once


def _norm(rng, name: str, c: int) -> dict[str, np.ndarray]:
    """BatchNormalization's four constants under names that begin with `name`."""
    return {
        f"{name}g": rng.uniform(0.5, 2, c),
        f"{name}b": rng.standard_normal(c),
        f"{name}m": rng.standard_normal(c),
        f"{name}v": rng.uniform(0.5, 2, c),
    }


def _branches(rng, *, c=8, k=8, stride=1, groups=1, sizes=(3, 1), identity=True, before="", behind=("Relu",)):
    """A sum of convolutions of one tensor, each behind a BatchNormalization, and of the tensor itself behind one."""
    w, nodes, sums = {}, [], []
    x = "x"
    if before:
        nodes.append(node(before, "x", "x0"))
        x = "x0"
    for i, size in enumerate(sizes):
        name, pad = f"c{i}", size // 2
        w[f"{name}w"] = rng.standard_normal((k, c // groups, size, size)) / np.sqrt(size * size * c / groups)
        w |= _norm(rng, name, k)
        how = {"pads": (pad,) * 4, "strides": (stride, stride), "group": groups}
        nodes += [node("Conv", f"{x} {name}w", f"{name}y", **how)]
        nodes += [node("BatchNormalization", f"{name}y {name}g {name}b {name}m {name}v", f"{name}z")]
        sums.append(f"{name}z")
    if identity:
        w |= _norm(rng, "i", c)
        nodes.append(node("BatchNormalization", f"{x} ig ib im iv", "iz"))
        sums.append("iz")
    total = sums[0]
    for i, other in enumerate(sums[1:]):
        nodes.append(node("Add", f"{total} {other}", f"s{i}"))
        total = f"s{i}"
    for i, op in enumerate(behind):
        nodes.append(node(op, total, f"e{i}"))
        total = f"e{i}"
    arrays = {name: np.asarray(a, np.float32) for name, a in w.items()}
    return nodes, total, arrays


def _model(rng, *, shape=(1, 8, 7, 9), **how):
    nodes, y, w = _branches(rng, c=shape[1], **how)
    return model(nodes, {"x": shape}, y, w)


def merged(net):
    """The convolutions that are several of the model's, and the options under which they run."""
    return [op for op in net.ops if isinstance(op.problem, ConvProblem) and op.layers]


def left(net):
    """The ops of the plan in which all is merged."""
    choice = {group: options[-1] for group, options in net.groups}
    return [op for op in net.ops if holds(op.when, choice)]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"sizes": (1, 3)},
        {"sizes": (3, 3, 1, 1)},
        {"sizes": (5, 3, 1)},
        {"behind": ()},
        {"before": "Relu"},
        {"stride": 2, "identity": False},
        {"groups": 2},
        {"groups": 8},
        {"groups": 8, "stride": 2, "identity": False},
        {"behind": ("Sigmoid",)},
        {"sizes": (3,)},
        {"behind": ("Relu", "Abs")},
        {"shape": (2, 8, 6, 6), "stride": 2, "k": 24, "identity": False},
    ],
    ids=str,
)
def test_one_convolution_does_what_the_branches_did(how):
    rng = np.random.default_rng(3)
    net = check_against_ort(_model(rng, **how), BOUND)
    (one,) = merged(net)
    assert len(one.layers) == len(how.get("sizes", (3, 1)))
    assert [op for op in left(net) if isinstance(op.problem, ConvProblem)] == [one]
    assert one.problem.groups == how.get("groups", 1) and one.problem.r == max(how.get("sizes", (3, 1)))


@pytest.mark.parametrize("seed", range(30))
def test_random_blocks_of_branches(seed):
    """Blocks in a row, drawn: sizes, groups, strides, padding on one side, subtraction, scales behind the sum, residuals."""
    check_against_ort(_random(np.random.default_rng(seed)), BOUND)


def test_most_random_blocks_have_something_to_merge():
    assert sum(bool(merged(network(_random(np.random.default_rng(seed))))) for seed in range(30)) > 20


def _random(rng):
    c, h = int(rng.choice([4, 8, 12])), int(rng.integers(5, 10))
    t, nodes, w = "x", [], {}
    for block in range(int(rng.integers(1, 4))):
        stride, groups = int(rng.choice([1, 1, 2])), int(rng.choice([1, 2, c]))
        parts = []
        for i in range(int(rng.integers(1, 4))):
            r, s = (int(v) for v in rng.choice([1, 3, 5], 2))
            own = int(rng.choice([groups, c])) if rng.random() < 0.5 else groups
            name = f"k{block}_{i}"
            w[name] = rng.standard_normal((c, c // own, r, s)) / np.sqrt(r * s * c / own)
            pads = (r // 2, s // 2, r // 2, s // 2)
            nodes.append(node("Conv", f"{t} {name}", f"{name}y", pads=pads, strides=(stride, stride), group=own))
            parts.append(f"{name}y")
        if stride == 1 and rng.random() < 0.6:
            parts.append(t)
        total = parts[0]
        for i, other in enumerate(parts[1:]):
            op = str(rng.choice(["Add", "Add", "Sub"]))
            pair = f"{total} {other}" if rng.random() < 0.7 else f"{other} {total}"
            nodes.append(node(op, pair, f"t{block}_{i}"))
            total = f"t{block}_{i}"
        if rng.random() < 0.4:
            w[f"s{block}"] = rng.uniform(0.5, 2, (c, 1, 1))
            nodes.append(node("Mul", f"{total} s{block}", f"m{block}"))
            total = f"m{block}"
        if rng.random() < 0.3 and stride == 1:
            nodes.append(node("Add", f"{t} {total}", f"a{block}"))
            total = f"a{block}"
        ends = str(rng.choice(["Relu", "Sigmoid", "Abs", ""]))
        if ends:
            nodes.append(node(ends, total, f"e{block}"))
            total = f"e{block}"
        t = total
    return model(nodes, {"x": (1, c, h, h + 1)}, t, {name: np.asarray(a, np.float32) for name, a in w.items()})


def test_a_branch_that_something_else_reads_still_runs():
    rng = np.random.default_rng(5)
    nodes, y, w = _branches(rng)
    nodes.append(node("Sigmoid", "c0z", "other"))
    net = check_against_ort(model(nodes, {"x": (1, 8, 7, 9)}, f"{y} other", w), BOUND)
    assert len(merged(net)) == 1 and any("c0" in op.name and not op.layers for op in left(net))


def test_what_is_not_linear_in_one_tensor_is_left_alone():
    rng = np.random.default_rng(6)
    w = {"a": rng.standard_normal((8, 8, 3, 3)), "b": rng.standard_normal((8, 8, 1, 1))}
    arrays = {name: v.astype(np.float32) for name, v in w.items()}
    cases = (
        [node("Conv", "x a", "p", pads=(1, 1, 1, 1)), node("Conv", "z b", "q"), node("Add", "p q", "y")],  # two sources
        [
            node("Conv", "x a", "p", pads=(1, 1, 1, 1)),
            node("Relu", "p", "r"),
            node("Conv", "x b", "q"),
            node("Add", "r q", "y"),
            node("Add", "y z", "y2"),
        ],
        [node("Conv", "x a", "p", pads=(2, 2, 2, 2), dilations=(2, 2)), node("Conv", "x b", "q"), node("Add", "p q", "y")],
    )
    for nodes in cases:
        last = nodes[-1].output[0]
        inputs = {t: (1, 8, 6, 6) for t in ("x", "z") if any(t in n.input for n in nodes)}
        assert not merged(check_against_ort(model(nodes, inputs, last, arrays), BOUND))


def test_a_sum_that_would_multiply_the_weights_is_left_apart():
    """A dense 1x1 beside a depthwise 9x9: as one it would have 81 times the weights."""
    rng = np.random.default_rng(7)
    arrays = {"d": rng.standard_normal((16, 1, 9, 9)), "p": rng.standard_normal((16, 16, 1, 1))}
    nodes = [node("Conv", "x d", "a", pads=(4, 4, 4, 4), group=16), node("Conv", "x p", "b"), node("Add", "a b", "y")]
    net = network(model(nodes, {"x": (1, 16, 9, 9)}, "y", {k: v.astype(np.float32) for k, v in arrays.items()}))
    assert not merged(net)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("identity", [False, True])
def test_pruned_branches_share_one_pattern(tmp_path, identity, groups):
    """So the one convolution has it too; and the model that is saved computes what the network computes."""
    rng = np.random.default_rng(9)
    path, saved = tmp_path / "model.onnx", tmp_path / "pruned.onnx"
    onnx.save(_model(rng, shape=(1, 16, 7, 9), k=16, groups=groups, identity=identity), path)
    masks = fuse.common_masks(importer.read(path))
    importer.load(path, prune=True, masks=masks, save_pruned=saved)
    net = check_against_ort(saved, BOUND)
    (one,) = merged(net)
    assert one.problem.sparse24 and all(op.problem.sparse24 for op in net.ops if isinstance(op.problem, ConvProblem))
    (apart,) = merged(network(path, prune=True))
    assert not apart.problem.sparse24


def test_a_branch_with_the_pattern_keeps_its_weights(tmp_path):
    rng = np.random.default_rng(11)
    proto = _model(rng, shape=(1, 16, 7, 9), k=16)
    (one,) = [t for t in proto.graph.initializer if t.name == "c1w"]
    one.CopyFrom(onnx.numpy_helper.from_array(sparse24.prune(onnx.numpy_helper.to_array(one)), "c1w"))
    onnx.save(proto, tmp_path / "model.onnx")
    before = importer.read(tmp_path / "model.onnx")
    assert not fuse.common_masks(before)
    assert importer.load(tmp_path / "model.onnx", prune=True).pruned == ("c0w",)


def test_others_take_the_pattern_that_a_branch_has(tmp_path):
    """No input itself is added: the 1x1 keeps what the 3x3, whose weights stay, has in the middle."""
    rng, path = np.random.default_rng(14), tmp_path / "model.onnx"
    proto = _model(rng, shape=(1, 16, 7, 9), k=16, identity=False)
    (kept,) = [t for t in proto.graph.initializer if t.name == "c0w"]
    kept.CopyFrom(onnx.numpy_helper.from_array(sparse24.prune(onnx.numpy_helper.to_array(kept)), "c0w"))
    onnx.save(proto, path)
    imported = importer.load(path, prune=True, masks=fuse.common_masks(importer.read(path)), save_pruned=tmp_path / "s.onnx")
    assert imported.pruned == ("c1w",)
    (one,) = merged(check_against_ort(tmp_path / "s.onnx", BOUND))
    assert one.problem.sparse24


def test_a_depthwise_branch_is_in_the_pattern_as_the_input_is(tmp_path):
    rng, path = np.random.default_rng(15), tmp_path / "model.onnx"
    arrays = {"d": rng.standard_normal((16, 1, 3, 3)), "p": rng.standard_normal((16, 16, 3, 3))}
    nodes = [
        node("Conv", "x d", "a", pads=(1, 1, 1, 1), group=16),
        node("Conv", "x p", "b", pads=(1, 1, 1, 1)),
        node("Add", "a b", "y"),
    ]
    onnx.save(model(nodes, {"x": (1, 16, 9, 9)}, "y", {k: v.astype(np.float32) for k, v in arrays.items()}), path)
    importer.load(path, prune=True, masks=fuse.common_masks(importer.read(path)), save_pruned=tmp_path / "s.onnx")
    (one,) = merged(check_against_ort(tmp_path / "s.onnx", BOUND))
    assert one.problem.sparse24


def test_nodes_without_names_are_pruned_together_too(tmp_path):
    proto = _model(np.random.default_rng(16), shape=(1, 16, 7, 9), k=16)
    for n in proto.graph.node:
        n.name = ""
    onnx.save(proto, tmp_path / "model.onnx")
    masks = fuse.common_masks(importer.read(tmp_path / "model.onnx"))
    importer.load(tmp_path / "model.onnx", prune=True, masks=masks, save_pruned=tmp_path / "s.onnx")
    (one,) = merged(network(tmp_path / "s.onnx"))
    assert one.problem.sparse24


def test_a_residual_of_one_convolution_asks_for_no_pattern(tmp_path):
    """conv(x) + x is that convolution with a residual: no sum that would become another convolution."""
    w = {"w": np.random.default_rng(12).standard_normal((16, 16, 3, 3)).astype(np.float32)}
    nodes = [node("Conv", "x w", "a", pads=(1, 1, 1, 1)), node("Add", "a x", "y")]
    onnx.save(model(nodes, {"x": (1, 16, 7, 9)}, "y", w), tmp_path / "model.onnx")
    assert not fuse.common_masks(importer.read(tmp_path / "model.onnx"))


def test_an_open_batch_is_told_of_once(tmp_path):
    proto = _model(np.random.default_rng(13), shape=(1, 16, 7, 9), k=16)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(proto, tmp_path / "model.onnx")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        build(tmp_path / "model.onnx", device="h200", sparsity="force")
    assert sum("batch of input" in str(w.message) for w in told) == 1


def test_building_with_force_prunes_branches_together(tmp_path):
    onnx.save(_model(np.random.default_rng(10), shape=(1, 16, 7, 9), k=16), tmp_path / "model.onnx")
    engine = build(tmp_path / "model.onnx", device="h200", sparsity="force")
    assert any(layer.problem.sparse24 and " + " in layer.name for layer in engine.plan.layers if layer.type == "conv")
