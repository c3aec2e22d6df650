"""Attention in one launch: both kernels' values beside the problem's meaning, what is offered, and inside networks."""

import numpy as np
import pytest

from cuda_kernels.device import ARCHITECTURES, SMEM_PER_BLOCK, named
from cuda_kernels.launch import Emulated
from gpu_runtime.rewrites import attention
from tactics.candidates import candidates, rejected
from tactics.launches import launches
from tactics.measure.data import random_data, reference
from tactics.problems import codec
from tactics.problems.attention import AttentionProblem, Operand
from tests.compiled import takes
from tests.engines import check_engine
from tests.problems import assert_right, assert_written_once, execute
from tests.reference_run import check_against_ort, model, network, node

DEVICE = named("h200")
rng = np.random.default_rng(5)


def of_channels(b, heads, d, n, dk=0, unit=True) -> AttentionProblem:
    """Channels that attend to each other, all operands parts of one product's output [b * n, 3 * heads * d]."""
    c = heads * d
    q, k, v = (Operand(0, i * c, (n * 3 * c, d, 1, 3 * c)) for i in range(3))
    y = Operand(1, 0, (n * c, d, 1, c))
    return AttentionProblem(b, heads, d, d, n, n, ((b * n, 3 * c, 1, 1),), (b * n, c, 1, 1), q, k, v, y, unit=unit,
                            epsilon=1e-12 if unit else 0.0)  # fmt: skip


def apart(b, heads, i, j, c, e) -> AttentionProblem:
    """Each operand a tensor of its own, [b, heads, rows, inner]; more keys than queries."""
    shapes = (b, heads, i, c), (b, heads, j, c), (b, heads, j, e)
    q, k, v, y = (Operand(t, 0, (heads * r * w, r * w, w, 1)) for t, (r, w) in enumerate(((i, c), (j, c), (j, e), (i, e))))
    return AttentionProblem(b, heads, i, j, c, e, shapes, (b, heads, i, e), q, k, v, y)


CHANNELS = {
    "one_tile": of_channels(1, 1, 5, 3), "vectors": of_channels(2, 3, 8, 70), "sixteen": of_channels(1, 4, 16, 300),
    "odd": of_channels(1, 4, 25, 196), "wide": of_channels(1, 2, 48, 49, unit=False), "widest": of_channels(1, 1, 128, 66),
    "long": of_channels(1, 1, 8, 1100), "own_tensors": apart(2, 3, 7, 20, 33, 18), "eighty": of_channels(2, 1, 80, 17),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANNELS)
def test_values_and_counters_of_cross_covariance(name):
    p = CHANNELS[name]
    inputs, weights = random_data(p)
    tactics = [t for t in candidates(p, DEVICE) if t.kernel == "cross_covariance"]
    assert tactics and codec.from_json(codec.to_json(p)) == p
    for tactic in tactics:
        gpu = Emulated(DEVICE)
        assert_right(p, tactic, execute(gpu, p, tactic, inputs, weights), reference(p, inputs, weights))
        if dict(launches(p, tactic)[0].values)["VECTOR"]:
            assert gpu.stats[0].excess_wavefronts == 0, gpu.stats[0].excess
    assert_written_once(p, tactics[0], DEVICE, inputs, weights)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("name", CHANNELS)
def test_cross_covariance_compiles_without_spills(name, sm):
    tactic = next(t for t in candidates(CHANNELS[name], DEVICE) if t.kernel == "cross_covariance")
    (launch,) = launches(CHANNELS[name], tactic)
    assert takes(launch.kernel, launch.values, sm).regs * launch.block[0] <= 65536
    assert launch.smem <= SMEM_PER_BLOCK[90]


def test_padding_is_written_or_a_format_refused():
    """Heads of 25 channels end with the output's own; the channels of another order have no one to write their padding."""
    p = CHANNELS["odd"]
    assert {t.out.layout for t in candidates(p, DEVICE)} == {"chw", "hwc8"}
    y = Operand(1, 0, (900, 1, 4, 100))
    turned = AttentionProblem(1, 4, 25, 25, 9, 9, ((9, 300, 1, 1),), (9, 100, 1, 1), p.q, p.k, p.v, y)
    assert {t.out.layout for t in candidates(turned, DEVICE)} == {"chw"}
    assert any("padding" in reason for _, reason in rejected(turned, DEVICE))


@pytest.mark.parametrize("wrong", ["start", "step", "output", "size"])
def test_a_problem_that_leaves_its_tensors_is_refused(wrong):
    data = codec.to_json(CHANNELS["sixteen"])
    if wrong == "start":
        data["v"]["start"] = 10**6
    elif wrong == "step":
        data["k"]["step"][3] = 10**5
    elif wrong == "output":
        data["y"]["step"][2] = 2
    else:
        data["rows"] = 0
    with pytest.raises(ValueError, match="attention"):
        codec.from_json(data)


# ---- networks


def _w(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float16).astype(np.float32)


def cross_covariance(b=1, n=50, heads=4, d=12):
    """A block of EdgeNeXt: one product, heads of channels that attend to each other, rows of length 1, a temperature each."""
    c = heads * d
    w = {"wq": _w(c, 3 * c), "wp": _w(c, c), "five": np.array([b, n, 3, heads, d]), "three": np.array([b, n, c]),
         "zero": np.array(0), "one": np.array(1), "two": np.array(2), "like": np.array([b, heads, d, n]),
         "t": rng.uniform(0.5, 2, (heads, 1, 1)).astype(np.float32), "eps": np.float32(1e-12)}  # fmt: skip
    nodes = [node("MatMul", "x wq", "qkv"), node("Reshape", "qkv five", "r"), node("Transpose", "r", "p", perm=(2, 0, 3, 4, 1))]
    for name, i in (("q", "zero"), ("k", "one"), ("v", "two")):
        nodes.append(node("Gather", f"p {i}", name, axis=0))
    for name in "qk":
        nodes += [node("ReduceL2", name, f"{name}l", axes=[3], keepdims=1), node("Clip", f"{name}l eps", f"{name}c"),
                  node("Expand", f"{name}c like", f"{name}e"), node("Div", f"{name} {name}e", f"{name}n")]  # fmt: skip
    nodes += [node("Transpose", "kn", "kt", perm=(0, 1, 3, 2)), node("MatMul", "qn kt", "s"), node("Mul", "s t", "st"),
              node("Softmax", "st", "a", axis=-1), node("MatMul", "a v", "o"), node("Transpose", "o", "ot", perm=(0, 3, 1, 2)),
              node("Reshape", "ot three", "or"), node("MatMul", "or wp", "y")]  # fmt: skip
    return model(nodes, {"x": (b, n, c)}, "y", w)


@pytest.mark.parametrize("sizes", [(1, 50, 4, 12), (2, 9, 3, 25), (1, 7, 1, 8)], ids=str)
def test_cross_covariance_is_one_option_that_computes_the_same(sizes):
    net = check_against_ort(cross_covariance(*sizes), 1e-4, rewrite=attention.offer)
    ((_, options),) = net.groups
    (op,) = [op for op in net.ops if isinstance(op.problem, AttentionProblem)]
    assert options == ("apart", "one") and op.problem.unit and len(op.inputs) == 1
    kept = [o for o in net.ops if not o.when]
    assert not any("ReduceL2" in n or "Softmax" in n for o in kept for n in o.nodes)


@pytest.mark.parametrize("sizes", [(1, 50, 4, 12), (2, 9, 3, 25)], ids=str)
def test_cross_covariance_is_one_launch(sizes, tmp_path):
    engine = check_engine(tmp_path, cross_covariance(*sizes))
    assert [layer.type for layer in engine.plan.layers if layer.tactic_name].count("attention") == 1
    assert not [layer for layer in engine.plan.layers if layer.type in ("gather", "normalize", "matmul") and layer.tactic_name]


def test_a_factor_before_the_rows_are_made_unit_is_not_the_scores():
    """x / |x| is the same for 3 x: what stands before the division does not scale what follows it."""
    nodes = [node("Mul", "x three", "q"), node("ReduceL2", "q", "l", axes=[3], keepdims=1), node("Clip", "l eps", "c"),
             node("Div", "q c", "n"), node("Transpose", "n", "t", perm=(0, 1, 3, 2)), node("MatMul", "n t", "s"),
             node("Softmax", "s", "a", axis=-1), node("MatMul", "a q", "y")]  # fmt: skip
    weights = {"three": np.float32(3), "eps": np.float32(1e-6)}
    net = check_against_ort(model(nodes, {"x": (1, 2, 9, 16)}, "y", weights), 1e-5, rewrite=attention.offer)
    assert any(isinstance(op.problem, AttentionProblem) for op in net.ops)


def test_it_is_not_offered_for_another_axis_or_without_a_second_product():
    def of(*nodes):
        return attention.offer(network(model([*nodes], {"x": (1, 2, 9, 9)}, "y")))

    first = node("MatMul", "x x", "s")
    assert not of(first, node("Softmax", "s", "y", axis=-1)).groups
    assert not of(first, node("Softmax", "s", "a", axis=2), node("MatMul", "a x", "y")).groups
    assert not of(first, node("Softmax", "s", "a", axis=-1), node("MatMul", "a s", "y")).groups
    assert of(first, node("Softmax", "s", "a", axis=-1), node("MatMul", "a x", "y")).groups
