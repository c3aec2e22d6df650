"""Einsum of one or two tensors is sums, moves and a product; drawn equations against onnxruntime."""

import random
import re

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.errors import ModelError
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.problem import ConvProblem, MatmulProblem
from tests.engines import check_engine
from tests.reference_run import check_against_ort, model, node


def drawn(seed: int):
    """A model of one Einsum: letters in any order, sizes of 1, ellipses, implicit results, constants on either side."""
    rng = random.Random(seed)
    sizes = {letter: rng.choice((1, 2, 3, 5, 8)) for letter in rng.sample("abcdefgh", rng.randint(2, 6))}
    terms = ["".join(rng.sample([*sizes], rng.randint(1, min(4, len(sizes))))) for _ in range(rng.choice((1, 2, 2, 2)))]
    used = sorted({*"".join(terms)})
    terms.append("".join(rng.sample(used, rng.randint(1, min(5, len(used))))))
    dots, shapes = rng.choice(((), (), (3,), (2, 3))), [[sizes[a] for a in term] for term in terms]
    for i, term in enumerate(terms):
        if dots and (i in (0, len(terms) - 1) or rng.random() < 0.6):
            at = rng.randint(0, len(term))
            terms[i], shapes[i][at:at] = f"{term[:at]}...{term[at:]}", dots
    equation = rng.choice((",", " , ")).join(terms[:-1]) + rng.choice(("", "->", "->", "->"))
    equation += terms[-1] if ">" in equation else ""
    first, *others = (f"t{i}" for i in rng.sample(range(len(terms) - 1), len(terms) - 1))
    weights = dict.fromkeys(others, ()) if rng.random() < 0.4 else {}
    draw = np.random.default_rng(seed).uniform
    weights = {name: draw(0.5, 1, shapes[int(name[1:])]).astype(np.float32) for name in weights}
    inputs = {name: tuple(shapes[int(name[1:])]) for name in (first, *others) if name not in weights}
    names = [f"t{i}" for i in range(len(terms) - 1)]
    nodes = [node("Sigmoid", name, f"{name}.s") for name in inputs]
    operands = " ".join(f"{name}.s" if name in inputs else name for name in names)
    return equation, model([*nodes, node("Einsum", operands, "y", equation=equation)], inputs, "y", weights)


@pytest.mark.parametrize("tens", range(6))
def test_drawn_equations(tmp_path, tens):
    for seed in range(10 * tens, 10 * tens + 10):
        equation, proto = drawn(seed)
        onnx.save(proto, tmp_path / "m.onnx")
        net = check_against_ort(tmp_path / "m.onnx")
        assert not any(isinstance(op.problem, LibraryProblem) for op in net.ops), equation


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_drawn_equations_in_the_emulator(tmp_path, seed):
    check_engine(tmp_path, drawn(seed)[1])


@pytest.mark.parametrize(
    "equation,x,w",
    [
        ("...ab,...bc->...ac", (1, 3, 4), (5, 4, 2)),
        ("ab,b->ab", (3, 4), (1,)),
        ("ab,bc->ac", (3, 1), (4, 2)),
        ("aBc,c->Ba", (2, 3, 4), (4,)),
        ("ab,->ba", (2, 3), ()),
    ],
)
def test_an_axis_of_one_element_repeats(tmp_path, equation, x, w):
    onnx.save(model([node("Einsum", "x w", "y", equation=equation)], {"x": x, "w": w}, "y"), tmp_path / "m.onnx")
    check_against_ort(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "equation,stored,kind", [("bhwc,hkc->bhwk", (5, 7, 8), ConvProblem), ("bhwc,bhkc->bkwh", None, MatmulProblem)]
)
def test_sums_over_both_are_matrix_products(tmp_path, equation, stored, kind):
    weights = {} if stored is None else {"w": np.ones(stored, np.float32)}
    inputs = {"x": (2, 5, 3, 8)} | ({} if stored else {"w": (2, 5, 7, 8)})
    onnx.save(model([node("Einsum", "x w", "y", equation=equation)], inputs, "y", weights), tmp_path / "m.onnx")
    (product,) = (op.problem for op in check_against_ort(tmp_path / "m.onnx").ops if isinstance(op.problem, kind))
    assert product.c == 5 * 8 if stored else product.k == 8


@pytest.mark.parametrize(
    "equation,shapes,why",
    [
        ("bii->bi", ["2x3x3"], "with a diagonal"),
        ("ab,bc,cd->ad", ["2x3", "3x4", "4x5"], "of more tensors"),
        ("...ii,i->...", ["2x3x3", "3"], "with a diagonal"),
        ("i->ii", ["3"], "with a diagonal"),
    ],
)
def test_others_are_refused_with_the_equation(tmp_path, equation, shapes, why):
    inputs = {f"x{i}": tuple(map(int, shape.split("x"))) for i, shape in enumerate(shapes)}
    onnx.save(model([node("Einsum", " ".join(inputs), "y", equation=equation, name="mix")], inputs, "y"), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=re.escape(f"Einsum {equation!r} {why} (mix)\nexport the model without them")):
        gr.build(tmp_path / "m.onnx")


def test_sizes_that_differ_are_refused(tmp_path):
    onnx.save(
        model([node("Einsum", "x w", "y", equation="ab,bc->ac", name="mix")], {"x": (2, 3), "w": (5, 4)}, "y"),
        tmp_path / "m.onnx",
    )
    with pytest.raises(ModelError, match=re.escape("m.onnx: Einsum mix: 'ab,bc->ac' does not fit [(2, 3), (5, 4)]")):
        gr.build(tmp_path / "m.onnx")


def test_what_is_no_equation_is_refused_before_onnx_reads_it(tmp_path):
    proto = model([node("Einsum", "x", "y", equation="ab->a")], {"x": (2, 3)}, "y")
    for equation in (b"ab-->a", b"a..b->ab", b"ab->a->a", b""):
        proto.graph.node[0].attribute[0].s = equation
        onnx.save(proto, tmp_path / "m.onnx")
        with pytest.raises(ModelError, match=re.escape(f"Einsum {equation.decode()!r} that is no equation of its inputs (y)")):
            gr.build(tmp_path / "m.onnx")
