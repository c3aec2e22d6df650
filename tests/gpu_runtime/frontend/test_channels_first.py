"""Products over the last axis between transpositions are convolutions of the image that was transposed."""

import numpy as np
import pytest

from tactics.problems.problem import ConvProblem
from tests.reference_run import check_against_ort, model, node

rng = np.random.default_rng(8)
TO, FROM = (0, 2, 3, 1), (0, 3, 1, 2)


def _w(*shape):
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def _block(gelu: list, to=TO, back=FROM, residual=True):
    """ConvNeXt's: depthwise, LayerNorm over channels, two products with an activation between, scale, residual."""
    w = {"d": _w(8, 1, 3, 3), "g": _w(8), "b": _w(8), "p": _w(8, 32), "pb": _w(32), "q": _w(32, 8), "qb": _w(8)}
    w["s"] = _w(8, 1, 1)
    nodes = [node("Conv", "x d", "c", pads=(1, 1, 1, 1), group=8), node("Transpose", "c", "t", perm=to)]
    nodes += [node("LayerNormalization", "t g b", "n", axis=-1), node("MatMul", "n p", "m0"), node("Add", "pb m0", "a")]
    nodes += [*gelu, node("MatMul", "e q", "m1"), node("Add", "m1 qb", "f"), node("Transpose", "f", "h", perm=back)]
    nodes += [node("Mul", "h s", "y" if not residual else "i")] + ([node("Add", "i x", "y")] if residual else [])
    return nodes, w


SPELLINGS = {
    "gelu": [node("Gelu", "a", "e")],
    "sigmoid": [node("Sigmoid", "a", "e")],
    "silu in two nodes": [node("Sigmoid", "a", "z"), node("Mul", "z a", "e")],
    "by a scalar": [node("Mul", "a half", "z"), node("Relu", "z", "e")],
    "slopes": [node("PRelu", "a row", "e")],
    "by a vector": [node("Mul", "a row", "z"), node("Tanh", "z", "e")],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_block_is_convolutions_from_end_to_end(spelling):
    nodes, w = _block(SPELLINGS[spelling])
    w |= {"half": np.float32(0.5), "row": _w(32)}
    net = check_against_ort(model(nodes, {"x": (2, 8, 5, 6)}, "y", w, opset=21), 2e-3)
    products = [op for op in net.ops if isinstance(op.problem, ConvProblem) and op.layer in ("m0", "m1")]
    assert {(op.problem.n, op.problem.h, op.problem.w) for op in products} == {(2, 5, 6)}
    assert any(op.problem.epilogue.residual for op in products if op.layer == "m1")


def test_rows_of_pixels_alike():
    w = {"p": _w(8, 16), "q": _w(16, 8)}
    nodes = [node("Transpose", "x", "t", perm=(0, 2, 1)), node("MatMul", "t p", "a"), node("Relu", "a", "r")]
    nodes += [node("MatMul", "r q", "m"), node("Transpose", "m", "y", perm=(0, 2, 1))]
    net = check_against_ort(model(nodes, {"x": (2, 8, 7)}, "y", w), 2e-3)
    assert [op.problem.c for op in net.ops] == [8, 16] and all(isinstance(op.problem, ConvProblem) for op in net.ops)


OTHERS = {
    "something else reads the product": ([node("Relu", "e", "z")], "y z"),
    "it is an output": ([], "y e"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_product_that_others_read_stays(other):
    more, outputs = OTHERS[other]
    nodes = [node("MatMul", "x p", "e"), node("Transpose", "e", "y", perm=FROM), *more]
    net = check_against_ort(model(nodes, {"x": (1, 5, 6, 8)}, outputs, {"p": _w(8, 8)}), 2e-3)
    assert [op.problem.n for op in net.ops if op.layer == "e"] == [30]


def test_an_addend_per_pixel_and_other_transpositions_stay():
    w = {"p": _w(8, 8), "row": _w(6, 1)}
    spread = [node("MatMul", "x p", "m"), node("Add", "m row", "e"), node("Transpose", "e", "y", perm=FROM)]
    check_against_ort(model(spread, {"x": (1, 5, 6, 8)}, "y", w), 2e-3)
    swapped = [node("MatMul", "x p", "m"), node("Transpose", "m", "y", perm=(0, 3, 2, 1))]
    check_against_ort(model(swapped, {"x": (1, 5, 6, 8)}, "y", w), 2e-3)


@pytest.mark.parametrize("seed", range(25))
def test_random_regions(seed):
    """Products, elementwise nodes with constants and with each other, in any order, some also read elsewhere."""
    r = np.random.default_rng(seed)
    c, nodes, w, known, extra = 8, [], {}, ["t"], []
    nodes.append(node("Transpose", "x", "t", perm=TO))
    for i in range(int(r.integers(2, 8))):
        x, name = str(r.choice(known)), f"v{i}"
        match r.integers(5):
            case 0 | 1:
                w[f"w{i}"] = (r.standard_normal((c, c)) / 3).astype(np.float32)
                nodes.append(node("MatMul", f"{x} w{i}", name))
            case 2:
                nodes.append(node(str(r.choice(["Relu", "Sigmoid", "Tanh", "Softplus"])), x, name))
            case 3:
                shape = [(c,), (1, 1, 1, c), (), (1,), (6, 1)][int(r.integers(5))]
                w[f"c{i}"] = np.asarray(r.standard_normal(shape), np.float32)
                pair = f"{x} c{i}" if r.random() < 0.5 else f"c{i} {x}"
                nodes.append(node(str(r.choice(["Add", "Mul", "Sub"])), pair, name))
            case _:
                nodes.append(node("Add", f"{x} {r.choice(known)}", name))
        known.append(name)
        if r.random() < 0.15:
            extra.append(name)
    nodes.append(node("Transpose", known[-1], "y", perm=FROM))
    outputs = " ".join(["y", *dict.fromkeys(extra)])
    used = {t for n in nodes for t in n.input}
    check_against_ort(model(nodes, {"x": (1, c, 5, 6)}, outputs, {k: v for k, v in w.items() if k in used}), 3e-3)
