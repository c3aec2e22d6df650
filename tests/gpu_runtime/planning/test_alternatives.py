"""Every option that a rewrite adds computes the same, and what the builder of options makes of a network."""

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.network import Options
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.rewrites import (
    back_to_back,
    blocks,
    channels,
    shared_concats,
    siblings,
    squeeze_excite,
    upsampling,
)
from tactics.planner.graph import holds
from tactics.problems.problem import ConvProblem, MoveProblem
from tests.reference_run import check_against_ort, model, network, node

rng = np.random.default_rng(11)
PASSES = {
    "blocks": blocks.offer,
    "channels": channels.offer,
    "upsampling": upsampling.offer,
    "concats": shared_concats.share,
    "siblings": siblings.merge,
    "squeeze-excite": squeeze_excite.offer,
    "back to back": back_to_back.offer,
    "gates": squeeze_excite.gates,
}
BOUND, ROUNDED = 1e-5, 1e-3  # relative errors; ROUNDED if one launch of two layers rounds the tensor between them to FP16


def _w(*shape):
    return (rng.standard_normal(shape) / 4).astype(np.float16).astype(np.float32)


def _everything():
    """Space-to-depth, a Focus, shuffles before and behind convolutions, siblings in a Concat, a gate, an enlarged residual."""
    w = {
        "w0": _w(16, 12, 3, 3),
        "w1": _w(16, 16, 1, 1),
        "w2": _w(8, 16, 1, 1),
        "w3": _w(8, 16, 1, 1),
        "w4": _w(16, 24, 3, 3),
        "w5": _w(8, 16, 1, 1),
        "w6": _w(16, 8, 1, 1),
        "w8": _w(64, 16, 1, 1),
        "s": np.float32([1, 1, 2, 2]),
        "five": np.array([1, 2, 8, 4, 4]),
        "four": np.array([1, 16, 4, 4]),
        "wf": _w(16, 12, 1, 1),
    }
    nodes = [node("SpaceToDepth", "x", "d", blocksize=2), node("Conv", "d w0", "a", pads=(1, 1, 1, 1)), node("Relu", "a", "ar")]
    for t, (i, j) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):  # the corners in another order than SpaceToDepth's
        w |= {f"b{t}": np.array([i, j]), f"e{t}": np.array([8, 8])}
        nodes.append(node("Slice", f"x b{t} e{t} at two", f"f{t}"))
    w |= {"at": np.array([2, 3]), "two": np.array([2, 2])}
    nodes += [node("Concat", "f0 f1 f2 f3", "f", axis=1), node("Conv", "f wf", "fc"), node("Add", "ar fc", "ac")]
    nodes += [node("Reshape", "ac five", "h5"), node("Transpose", "h5", "ht", perm=(0, 2, 1, 3, 4))]
    nodes += [node("Reshape", "ht four", "h")]
    nodes += [node("Conv", "h w1", "b"), node("Relu", "b", "br")]  # siblings behind it, two of them in a Concat
    nodes += [node("Conv", "br w2", "c0"), node("Relu", "c0", "c"), node("Conv", "br w3", "e"), node("Tanh", "e", "et")]
    nodes += [node("Conv", "br w1", "g"), node("Concat", "c g", "k", axis=1), node("Conv", "k w4", "m", pads=(1, 1, 1, 1))]
    nodes += [node("GlobalAveragePool", "m", "p"), node("Conv", "p w5", "q"), node("Relu", "q", "qr")]
    nodes += [node("Conv", "qr w6", "r"), node("Sigmoid", "r", "rs"), node("Mul", "m rs", "gate")]
    nodes += [node("Conv", "gate w8", "u0"), node("DepthToSpace", "u0", "u", blocksize=2)]
    how = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    nodes += [node("Resize", "m _ s", "up", **how), node("Add", "u up", "y")]
    return model(nodes, {"x": (1, 3, 8, 8)}, "y et", w)


def test_all_options_of_all_rewrites_together_compute_the_same():
    net = check_against_ort(_everything(), ROUNDED, rewrite=alternatives)
    assert len(net.groups) >= 6


@pytest.mark.parametrize("name", PASSES)
def test_all_options_of_one_rewrite_compute_the_same(name):
    before = network(_everything())
    net = check_against_ort(_everything(), ROUNDED if name == "back to back" else BOUND, rewrite=PASSES[name])
    assert net.groups != before.groups or name == "concats"


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space_is_a_store_or_a_launch(mode):
    w = {"w": _w(18, 8, 3, 3), "b": _w(18), "s": np.abs(_w(2, 1, 1))}
    nodes = [node("Conv", "x w b", "c", pads=(1, 1, 1, 1)), node("DepthToSpace", "c", "d", blocksize=3, mode=mode)]
    nodes += [node("PRelu", "d s", "y")]
    net = check_against_ort(model(nodes, {"x": (2, 8, 5, 6)}, "y", w), BOUND, rewrite=blocks.offer)
    ((group, options),) = net.groups
    apart = [op.problem for op in net.ops if holds(op.when, {group: options[1]})]
    assert len(net.ops) == 3 and [type(p) for p in apart] == [ConvProblem, MoveProblem] and apart[0].epilogue.d2s == 1


def test_a_plan_takes_depth_to_space_apart_where_that_is_faster():
    """Nine channels at 224 x 224: a kernel that does not store blocks is faster by more than the launch on an RTX 4090. On an
    H200 moves took twice what is counted: there the blocks are stored."""
    w = {"w": _w(9, 32, 3, 3), "b": _w(9)}
    nodes = [node("Conv", "x w b", "c", pads=(1, 1, 1, 1)), node("DepthToSpace", "c", "y", blocksize=3)]
    for device, types in (("rtx4090", ["conv", "move"]), ("h200", ["conv"])):
        plan = gr.build(model(nodes, {"x": (1, 32, 224, 224)}, "y", w), device=device).plan
        assert [layer.type for layer in plan.layers if layer.type in ("conv", "move")] == types


def test_options_stand_where_they_are_said_to_and_nothing_unread_stays():
    nodes = [node("Conv", "x w", "a"), node("Relu", "a", "r"), node("Softsign", "r", "y")]
    net = network(model(nodes, {"x": (1, 4, 4, 4)}, "y", {"w": _w(4, 4, 1, 1)}))
    conv, tail = net.ops
    options = Options(net)
    assert options.network() is net
    options.group("g", "one", "other")
    options.limit(tail, "g", "one")
    twin = type(tail)("twin", tail.problem, tail.inputs, tail.output, when=(("g", "other"),))
    unread = type(tail)("unread", tail.problem, tail.inputs, "nobody")
    options.before(tail, unread)
    options.behind(tail, twin)
    more = options.network()
    assert [op.name for op in more.ops] == [conv.name, tail.name, "twin"] and more.groups == (("g", ("one", "other")),)
    assert [op.name for op in more.ops if holds(op.when, {"g": "other"})] == [conv.name, "twin"]
    assert set(more.tensors) == {"x", conv.output, "y"}
    assert more.readers[conv.output] == more.ops[1:] and more.producers["y"] == more.ops[1:]
