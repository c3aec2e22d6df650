"""Sums of two groups weighted by a softmax of two are a gate of one; what only looks like them stays."""

import numpy as np
import pytest

from tactics.problems.problem import PointwiseProblem
from tactics.problems.reductions import NormalizeProblem, ReduceProblem
from tests.reference_run import check_against_ort, model, node

C, PIXELS = 8, (5, 7)


def block(rng, n=2, *, views=((1, 1, 2, C), (0, 2, 1, 3), 1), stacked=False, bias=True, groups=2, sums="fc1", keep=0):
    """A split-attention block. `views`: the shape of the logits (its first axis is the batch), how they are transposed, and the
    softmax's axis; `stacked`: two tensors along a new axis (SKNet), not one with twice the channels."""
    shape, perm, axis = views
    w = {
        "w1": rng.standard_normal((4, C, 1, 1)),
        "w2": rng.standard_normal((groups * C, 4, 1, 1)),
        "w3": rng.standard_normal((6, C, 1, 1)),
        "b2": rng.standard_normal(groups * C),
    }
    w = {name: a.astype(np.float32) for name, a in w.items()}
    w |= {"five": np.array([n, groups, C, *PIXELS]), "weights": np.array([n, groups, C, 1, 1]), "one": np.array([1])}
    w |= {"logits": np.array((n, *shape[1:])), "flat": np.array([n, groups * C]), "pixels": np.array([2, 3])}
    if stacked:
        nodes = [node("Relu", "x", "x0"), node("Tanh", "x", "x1")]
        nodes += [node("Unsqueeze", f"x{i} one", f"u{i}") for i in range(2)] + [node("Concat", "u0 u1", "g", axis=1)]
    else:
        nodes = [node("Relu", "x", "x0"), node("Reshape", "x0 five", "g")]
    nodes += [node("ReduceSum", "g one", "s", keepdims=keep)]
    nodes += [node("ReduceMean", "s pixels", "m"), node("Conv", "m w1", "h"), node("Relu", "h", "r")]
    nodes += [node("Conv", "r w2 b2" if bias else "r w2", "a"), node("Reshape", "a logits", "l")]
    nodes += [node("Transpose", "l", "t", perm=perm), node("Softmax", "t", "p", axis=axis), node("Reshape", "p flat", "f")]
    nodes += [node("Reshape", "f weights", "q"), node("Mul", "g q" if bias else "q g", "v")]
    nodes += [node("ReduceSum", "v one", "z", keepdims=0), node("Conv", "z w3", "y")]
    return nodes, w, {"x": (n, C if stacked else groups * C, *PIXELS)}


def kinds(net, *types):
    return [op for op in net.ops if isinstance(op.problem, types)]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_weighted_by_a_softmax_of_two(n, bias, stacked):
    nodes, w, x = block(np.random.default_rng(n), n, bias=bias, stacked=stacked)
    net = check_against_ort(model(nodes, x, "y", w, 18), 2e-3)
    assert not kinds(net, NormalizeProblem, ReduceProblem)
    assert [str(s) for op in kinds(net, PointwiseProblem)[-1:] for s in op.problem.stages] == ["sub(t1)", "mul(t2)", "add(t1)"]


def test_logits_that_need_no_transposition():
    nodes, w, x = block(np.random.default_rng(3), views=((1, 2, C, 1), (0, 1, 3, 2), 1))
    net = check_against_ort(model(nodes, x, "y", w, 18), 2e-3)
    assert not kinds(net, NormalizeProblem)


@pytest.mark.parametrize(
    "how",
    [
        {"groups": 3, "views": ((1, 1, 3, C), (0, 2, 1, 3), 1)},  # three groups
        {"views": ((1, 2, C, 1), (0, 1, 3, 2), 3)},  # a softmax over channels
        {"views": ((1, C, 2, 1), (0, 1, 3, 2), 3)},  # pairs of neighbouring channels, weights of other groups
    ],
)
def test_other_weights_stay(how):
    nodes, w, x = block(np.random.default_rng(4), **how)
    net = check_against_ort(model(nodes, x, "y", w, 18), 2e-3)
    assert len(kinds(net, NormalizeProblem)) == 1


@pytest.mark.parametrize("what", ["p", "l", "a", "q"])
def test_what_is_read_elsewhere_stays(what):
    nodes, w, x = block(np.random.default_rng(5))
    net = check_against_ort(model([*nodes, node("Neg", what, "more")], x, "y more", w, 18), 2e-3)
    assert len(kinds(net, NormalizeProblem)) == 1


def test_more_groups_than_weights_may_grow_by():
    nodes, w, x = block(np.random.default_rng(7), groups=5, views=((1, 1, 5, C), (0, 2, 1, 3), 1))
    net = check_against_ort(model(nodes, x, "y", w, 18), 2e-3)
    assert len(kinds(net, ReduceProblem)) == 2


def test_a_factor_of_lower_rank():
    """A Reshape of two dimensions that broadcasts over the groups is neither these nor their weights."""
    w = {"five": np.array([1, 2, C, *PIXELS]), "two": np.array(PIXELS), "one": np.array([1])}
    nodes = [node("Reshape", "x five", "g"), node("Reshape", "z two", "f"), node("Mul", "g f", "v")]
    nodes += [node("ReduceSum", "v one", "y", keepdims=0)]
    check_against_ort(model(nodes, {"x": (1, 2 * C, *PIXELS), "z": (PIXELS[0] * PIXELS[1],)}, "y", w, 18), 2e-3)


@pytest.mark.parametrize("what", ["m", "s"])
def test_an_average_that_is_read_elsewhere_is_right(what):
    nodes, w, x = block(np.random.default_rng(6))
    check_against_ort(model([*nodes, node("Neg", what, "more")], x, "y more", w, 18), 2e-3)
