"""Where images of a batch meet: known cases, and drawn networks beside onnxruntime's answers to other images in the batch."""

import numpy as np
import pytest

from gpu_runtime.planning.independent_images import meeting
from tests import attention_models, drawn
from tests.reference_run import model, node, ort_run
from tests.reference_run import network as lowered

INTS = {f"i{v}": np.array([v]) for v in (0, 1, 2, 3)}


def one(op: str, inputs: str = "x", shape=(3, 4, 2, 2), weights=None, **attributes):
    return meeting(lowered(model([node(op, inputs, "y", **attributes)], {"x": shape}, "y", INTS | (weights or {}))))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda: one("ReduceMean", axes=[0]), "'y' (Reduce) reduces over the batch"),
        (lambda: one("Softmax", axis=0), "'y' (Normalize) reduces over the batch"),
        (lambda: one("Transpose", shape=(3, 3), perm=(1, 0)), "output 'y' [3, 3] does not have image after image"),
        (lambda: one("Transpose", shape=(3, 4), perm=(1, 0)), "output 'y' [4, 3] does not have image"),
        (lambda: one("Concat", "x x", axis=0), "output 'y' [6, 4, 2, 2] does not have image"),
        (lambda: one("Add", "x w", weights={"w": np.arange(3, dtype=np.float32).reshape(3, 1, 1, 1)}), "a constant with other"),
        (lambda: one("Gather", "x at", weights={"at": np.array([2, 1, 0])}, axis=0), "output 'y'"),
        (lambda: one("CumSum", "x zero", weights={"zero": np.array(0)}), "'y' (CumSum) reduces over the batch"),
        (lambda: one("MatMul", "x x", shape=(3, 3)), "'y' (Matmul) reduces over the batch, or over an axis that holds it"),
        (lambda: one("LpNormalization", axis=0), "'y' (LpNormalization) reduces over the batch"),
    ],
)
def test_an_op_in_which_images_meet_is_named(found, words):
    assert words in found()


@pytest.mark.parametrize(
    "found",
    [
        lambda: one("ReduceMean", axes=[1]),
        lambda: one("Softmax", axis=1),
        lambda: one("Add", "x w", weights={"w": np.ones((3, 1, 1, 1), np.float32)}),
        lambda: one("Gather", "x at", weights={"at": np.array([2, 1, 0])}, axis=1),
        lambda: one("CumSum", "x one", weights={"one": np.array(1)}),
        lambda: one("Reshape", "x s", weights={"s": np.array([3, 16])}),
        lambda: one("DepthToSpace", blocksize=2),
        lambda: one("LRN", size=3),
    ],
)
def test_what_keeps_images_apart_is_accepted(found):
    assert found() is None


BLOCKS = [
    attention_models.cross_covariance,
    attention_models.tokens,
    attention_models.pooled_keys,
    attention_models.own_products,
    attention_models.of_convolutions,
    attention_models.windows,
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda f: f.__name__)
def test_transformers_keep_images_apart(block):
    """Also where tokens come before images, windows are images, or heads and images are one axis."""
    assert meeting(lowered(block(b=2)), lowered(block(b=3))) is None


def sized(op: str, dtype=np.float32):
    """x op the size of the batch."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Cast", "n", "f", to=1),
        node(op, "x f", "y"),
    ]
    return model(nodes, {"x": ("n", 4)}, "y", {"zero": np.array(0)})


def test_what_a_model_computes_from_the_size_of_its_batch_shows_at_another_one():
    two, three = (lowered(sized("Mul"), {"x": (n, 4)}) for n in (2, 3))
    assert meeting(two) is None
    assert "op 'y' computes with the size of the batch" in meeting(two, three)


def masked(op: str):
    return model([node(op, "x m", "y")], {"x": ("n", 2), "m": (2, 2)}, "y")


def test_an_input_of_one_size_belongs_to_all_images():
    """Though it be as large as a batch: then images are told apart at the other batch."""
    two, three = (lowered(masked("MatMul"), {"x": (n, 2)}) for n in (2, 3))
    assert meeting(two, three) is None and meeting(three, two) is None
    assert "'y' (Matmul) reduces over the batch" in meeting(two)


# ---- drawn


def softmax(d: drawn.Drawn):
    x = d.any()
    return d.add("Softmax", x, d.shapes[x], axis=d.pick.randrange(len(d.shapes[x])))


def centred(d: drawn.Drawn):
    """Less its mean along an axis."""
    x = d.any()
    axis, shape = d.pick.randrange(len(d.shapes[x])), d.shapes[x]
    mean = d.add("ReduceMean", f"{x} {d.given([axis])}", (*shape[:axis], 1, *shape[axis + 1 :]))
    return d.add("Sub", f"{x} {mean}", shape)


def back(d: drawn.Drawn):
    """The batch first again, by a view or by a transposition."""
    x, n = d.any(), d.shapes["x0"][0]
    shape = d.shapes[x]
    if d.pick.random() < 0.5 and n in shape:
        first = shape.index(n)
        perm = (first, *(i for i in range(len(shape)) if i != first))
        return d.add("Transpose", x, tuple(shape[i] for i in perm), perm=perm)
    size = int(np.prod(shape))
    return d.add("Reshape", f"{x} {d.given([n, size // n])}", (n, size // n)) if size % n == 0 else None


RULES = (
    *(rule for rule in drawn.ALL if rule is not drawn.resize),
    *drawn.MOVES,
    softmax,
    softmax,
    centred,
    centred,
    centred,
    back,
    back,
    back,
)


def network(seed: int):
    """A drawn network with a batch of 2 or 3, of which one tensor with as many images is the output."""
    d = drawn.Drawn(f"rows {seed}")
    n, c = d.pick.choice((2, 3)), d.pick.choice((2, 3, 4, 6))
    d.input(n, c, *(d.pick.choice((1, 2, 3, 4)) for _ in "hw"))
    for _ in range(60):
        if len(d.nodes) < d.pick.randint(4, 12):
            d.pick.choice(RULES)(d)
    y = [t for t, shape in d.shapes.items() if t != "x0" and shape[0] == n]
    if not y:
        return None
    return model(d.nodes, d.inputs, y[-1], d.weights, opset=19), y[-1]


def depends(proto, seed: int) -> str:
    """How onnxruntime's output depends on more than the image of its number, or an empty string."""
    (x,) = proto.graph.input
    shape, rng = [dim.dim_value for dim in x.type.tensor_type.shape.dim], np.random.default_rng(seed)

    def run(images):
        with np.errstate(all="ignore"):
            return next(iter(ort_run(proto, {x.name: images}, optimized=False).values()))

    def far(a, b):
        return not np.allclose(
            a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0))), equal_nan=True
        )

    for _ in range(3):
        images = rng.uniform(-2, 2, shape).astype(np.float32)
        y, order = run(images), np.roll(np.arange(shape[0]), 1)
        if far(run(images[order]), y[order]):
            return "order"
        for i in range(shape[0]):
            other = images.copy()
            other[i] = rng.uniform(-2, 2, shape[1:])
            rest = np.arange(shape[0]) != i
            if far(run(other)[rest], y[rest]):
                return "values"
    return ""


def tally(seeds) -> dict[tuple[bool, bool], list[int]]:
    """(refused, onnxruntime finds a dependence) -> the seeds."""
    found: dict[tuple[bool, bool], list[int]] = {}
    for seed in seeds:
        drawing = network(seed)
        if drawing is not None:
            proto, _ = drawing
            why = meeting(lowered(proto))
            found.setdefault((why is not None, depends(proto, seed) != ""), []).append(seed)
    return found


def check(seeds) -> None:
    """No dependence where `meeting` finds none; and it refuses few networks that have none: those whose values onnxruntime
    finds constant, or in which images meet and what they make is thrown away."""
    found = tally(seeds)
    assert not found.get((False, True)), f"accepted, though images meet: {found[False, True]}"
    sizes = {key: len(rows) for key, rows in found.items()}
    assert sizes.get((False, False), 0) > len(seeds) / 5 and sizes.get((True, True), 0) > len(seeds) / 5, sizes
    assert sizes.get((True, False), 0) <= len(seeds) / 10, (sizes, found[True, False])


def test_drawn_networks_are_accepted_and_refused_as_onnxruntime_answers():
    check(range(60))


@pytest.mark.long
def test_more_drawn_networks():
    check(range(60, 660))
