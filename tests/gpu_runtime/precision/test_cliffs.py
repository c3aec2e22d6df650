"""Operators that FP16's rounding of their operands would ruin: reciprocals, logarithms and roots of small differences."""

import random
import warnings

import numpy as np
import pytest

from gpu_runtime.building import settle
from gpu_runtime.frontend.importer import read
from gpu_runtime.fusion.fuse import fuse
from gpu_runtime.lowering.lower import lower
from gpu_runtime.precision import cliffs, execution, intervals
from tactics.problems import array_functions, reductions
from tactics.problems.intervals import NEAR, Interval
from tactics.problems.pointwise_ops import OPERATIONS, POINTWISE, Stage
from tests.engines import build
from tests.ort_budget import FACTOR, relative_l2, run, with_casts
from tests.problems import PARAMS
from tests.reference_run import model, node, ort_run

SHAPE = (1, 8, 6, 6)


def close_pair(seed=0, shape=SHAPE):
    """Two tensors, 1.5e-5 to 6e-5 apart, which FP16 cannot tell from each other."""
    rng = np.random.default_rng(seed)
    a = rng.uniform(0.25, 1, shape).astype(np.float32)
    return {"a": a, "b": a - rng.uniform(1.5e-5, 6e-5, shape).astype(np.float32)}


SMALL = node("Sub", "a b", "d")
RATIO = (node("Div", "b a", "q"),)  # below 1, and above it once both are rounded
CONSTANTS = {
    "minus": np.float32(-1),
    "third": np.float32(0.3),
    "root": np.float32(-0.5),
    "k": np.float32(1e-3),
    "axes": np.int64([1]),
    "starts": np.int64([1]),
    "ends": np.int64([5]),
    "w": np.eye(8, dtype=np.float32)[..., None, None],
    "w2": (np.eye(8) + 2.0**-13 * np.roll(np.eye(8), 1, 0)).astype(np.float32)[..., None, None],
}
# Name -> d = Sub(a, b) and the nodes behind it, which bring y into FP16's range.
# fmt: off
NETWORKS = {
    "pow": [SMALL, node("Pow", "d minus", "r"), node("Mul", "r k", "y")],
    "reciprocal": [SMALL, node("Reciprocal", "d", "r"), node("Mul", "r k", "y")],
    "pole": [SMALL, node("Reciprocal", "d", "y")],
    "div": [SMALL, node("Mul", "a k", "s"), node("Div", "s d", "y")],
    "log": [SMALL, node("Log", "d", "y")],
    "sqrt": [SMALL, node("Sqrt", "d", "y")],
    "power": [SMALL, node("Pow", "d third", "y")],
    "root": [SMALL, node("Pow", "d root", "y")],
    "asin": [*RATIO, node("Asin", "q", "y")],
    "acos": [*RATIO, node("Acos", "q", "y")],
    "atanh": [*RATIO, node("Atanh", "q", "y")],
    "apart": [SMALL, node("Reciprocal", "d", "r"), node("Mul", "d d", "s"), node("Mul", "r k", "t"), node("Add", "t s", "y")],
    "moved": [node("Transpose", "a", "a2", perm=(0, 2, 3, 1)), node("Transpose", "b", "b2", perm=(0, 2, 3, 1)),
              node("Sub", "a2 b2", "d"), node("Slice", "d starts ends axes", "s"), node("Reciprocal", "s", "r"),
              node("Mul", "r k", "y")],
    "summed": [node("ReduceMean", "a", "a2", axes=(1,)), node("ReduceMean", "b", "b2", axes=(1,)), node("Sub", "a2 b2", "d"),
               node("Reciprocal", "d", "r"), node("Mul", "r k", "y")],
    "joined": [SMALL, node("Concat", "d a", "c", axis=1), node("Log", "c", "y")],
    "pooled": [SMALL, node("MaxPool", "d", "p", kernel_shape=(2, 2)), node("Log", "p", "y")],
    # The Relu, of positive values, keeps the two from being one exact convolution.
    "convolved": [node("Conv", "a w2", "p"), node("Conv", "a w", "q0"), node("Relu", "q0", "q"), node("Sub", "p q", "d"),
                  node("Reciprocal", "d", "r"), node("Mul", "r k", "s"), node("Conv", "s w", "y")],
    "rows": [SMALL, node("ReduceLogSum", "d", "y", axes=(1,), keepdims=1)],
}
# fmt: on


def network_of(name):
    """(model, inputs); of convolutions such inputs as FP16 holds: it is their sums that are close."""
    feeds = close_pair()
    if name == "convolved":
        feeds = {t: x.astype(np.float16).astype(np.float32) for t, x in feeds.items()}
    return model(NETWORKS[name], dict.fromkeys("ab" if name != "convolved" else "a", SHAPE), "y", CONSTANTS), (
        feeds if name != "convolved" else {"a": feeds["a"]}
    )


def right(engine, proto, feeds, bound=2e-3):
    with warnings.catch_warnings(), engine.context(device="emulator", poison=True) as ctx:
        warnings.simplefilter("error")
        got = ctx.run(feeds)
        assert not ctx.nonfinite()
    for name, expected in ort_run(proto, feeds).items():
        assert np.isfinite(expected).all() and np.isfinite(got[name]).all()
        assert np.linalg.norm(got[name] - expected) <= bound * np.linalg.norm(expected), name


@pytest.mark.sample(18)
@pytest.mark.parametrize("calibrated", [False, True], ids=["unseen", "calibrated"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_operator_falls_off_its_cliff(tmp_path, name, calibrated):
    proto, feeds = network_of(name)
    engine = build(tmp_path, proto, calibration=feeds if calibrated else None)
    right(engine, proto, feeds)
    assert engine.plan.range.single


def test_why_is_told(tmp_path):
    """In the engine's record; calibrated with numbers: what was compared, in how many rounds, what was moved."""
    proto, feeds = network_of("convolved")
    found = build(tmp_path, proto).plan.range
    assert not found.compared and dict(found.single).keys() == {"p", "q", "s"}
    assert dict(found.single)["p"] == (
        "'p': rdiv of d + r + s reads values of any size: near 0, rounding to FP16 could make it infinite or NaN"
    )
    found = build(tmp_path, proto, calibration=feeds).plan.range
    assert found.compared.rounds == 1 and found.compared.moved == ("p", "q") and not found.compared.far
    ((tensor, error, own),) = found.compared.outputs
    assert tensor == "y" and error <= own < 1e-3
    why = dict(found.single)["p"]
    assert why.startswith("'p': on the calibration input, the output of d + r + s is infinite or NaN, unlike in FP32, ")


def test_a_calibration_input_without_a_cliff_moves_nothing(tmp_path):
    proto = model([node("Reciprocal", "x", "y")], {"x": SHAPE}, "y")
    x = {"x": np.random.default_rng(0).uniform(0.5, 1, SHAPE).astype(np.float32)}
    found = build(tmp_path, proto, calibration=x).plan.range
    assert not found.single and found.compared.rounds == 0 and found.compared.layers == 1


def test_a_large_plan_is_not_run(tmp_path, monkeypatch):
    """But what its operators are known to need is in FP32 as without a calibration input."""
    monkeypatch.setattr(execution, "PLAN", execution.Budget(-1, 0))
    proto, feeds = network_of("log")
    engine = build(tmp_path, proto, calibration=feeds)
    assert engine.plan.range.compared.skipped.startswith("0.0 G multiplications: ")
    right(engine, proto, feeds)


def test_what_fp32_does_not_mend_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(settle, "ROUNDS", 0)
    proto, feeds = network_of("convolved")
    with pytest.warns(RuntimeWarning, match="on the calibration input, 's' is infinite or NaN where FP32 is not"):
        assert build(tmp_path, proto, calibration=feeds).plan.range.compared.far == ("s", "y")


def test_only_sums_are_fp32(tmp_path):
    """A convolution's sums are stored as they are: on tensor cores, in one launch; another reader takes them in FP16."""
    proto = model(
        [
            node("Conv", "x w", "p", pads=(1, 1, 1, 1)),
            node("Conv", "p v", "q"),
            node("Sigmoid", "q", "s"),
            node("ReduceMean", "p", "m", axes=(2, 3)),
            node("Sub", "p m", "d"),
            node("Div", "s d", "y"),
        ],
        {"x": (1, 16, 8, 8)},
        "y",
        {"w": np.ones((16, 16, 3, 3), np.float32), "v": np.ones((16, 16, 1, 1), np.float32)},
    )
    layers = {layer.name: layer for layer in build(tmp_path, proto).plan.layers}
    assert layers["p"].tactic_name.startswith("conv_dense") and str(layers["p"].outputs[0].format) == "fp32:chw"
    assert layers["q + s"].tactic_name.startswith("conv_dense_hmma")
    assert str(layers["q + s"].inputs[0].format).startswith("fp16")
    assert str(layers["m"].inputs[0].format) == str(layers["d + y"].inputs[1].format) == "fp32:chw"


def test_rows_of_zeros_have_a_norm(tmp_path):
    """x / max(|x|, 1e-12), of which FP16 makes 0 / 0."""
    proto = model(
        [
            node("ReduceL2", "x", "n", axes=(3,)),
            node("Clip", "n e", "m"),
            node("Expand", "m shape", "o"),
            node("Div", "x o", "y"),
        ],
        {"x": SHAPE},
        "y",
        {"e": np.float32(1e-12), "shape": np.int64(SHAPE)},
    )
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    x[:, :, 2] = 0
    right(build(tmp_path, proto), proto, {"x": x})


# fmt: off
AWAY = {  # name -> nodes that keep away from the cliff, since the range of the base is known
    "clip": [node("Sub", "a b", "d"), node("Clip", "d k one", "c"), node("Div", "a c", "y")],
    "one and more": [node("Sub", "a b", "d"), node("Exp", "d", "e"), node("Add", "e one", "f"), node("Reciprocal", "f", "y")],
    "variance": [node("Mul", "a a", "s"), node("ReduceMean", "s", "v", axes=(1,)), node("Add", "v k", "u"),
                 node("Sqrt", "u", "r"), node("Div", "a r", "y")],
    "softmax": [node("ReduceMax", "a", "m", axes=(1,)), node("Sub", "a m", "d"), node("Exp", "d", "e"),
                node("ReduceSum", "e axes", "s"), node("Div", "e s", "y")],
    "constant": [node("Div", "a k", "y")],
    "root": [node("Relu", "a", "p"), node("Sqrt", "p", "y")],
    "sigmoid": [node("Sigmoid", "a", "s"), node("Add", "s one", "t"), node("Log", "t", "y")],
    "angle": [node("Tanh", "a", "t"), node("Asin", "t", "y")],
    "whole power": [node("Sub", "a b", "d"), node("Pow", "d three", "y")],
}
# fmt: on


@pytest.mark.parametrize("name", AWAY)
def test_what_keeps_away_stays_fp16(tmp_path, name):
    proto = model(AWAY[name], {"a": SHAPE, "b": SHAPE}, "y", CONSTANTS | {"one": np.float32(1), "three": np.float32(3)})
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    network = fuse(lower(read(tmp_path / "m.onnx")))
    assert not list(cliffs.dangers(network, intervals.known(network)))


# ---- the table of facts


def drawn_interval(rng: random.Random) -> Interval:
    ends = sorted(rng.choice((-np.inf, -30.0, -3.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 1.0, 2.0, 40.0, np.inf)) for _ in range(2))
    return Interval(*ends) if ends[0] < ends[1] or np.isfinite(ends[0]) else Interval(-1.0, 1.0)


def values_in(interval: Interval, rng: np.random.Generator) -> np.ndarray:
    low, high = max(interval.low, -80.0), min(interval.high, 80.0)
    return np.concatenate([rng.uniform(low, high, 200), [low, high]]).astype(np.float64)


def test_cliffs_are_of_functions_and_reductions_that_there_are():
    assert array_functions.CLIFFS.keys() <= array_functions.FUNCTIONS.keys()
    assert reductions.CLIFFS.keys() <= reductions.REDUCTIONS.keys()


@pytest.mark.parametrize("op", [op for op in POINTWISE if op != "none"])
def test_facts_are_true(op):
    """Values lie in the interval that is said; away from the cliffs that are said, rounding makes no infinity and no NaN."""
    draws, seeded = random.Random(op), np.random.default_rng(len(op))
    for _ in range(60):
        stage = Stage(op, "t1") if op in OPERATIONS else Stage(op, "", PARAMS[op])
        v, b = drawn_interval(draws), drawn_interval(draws)
        if op in ("pow", "rpow") and draws.random() < 0.7:  # by one exponent
            e = draws.choice((-2.0, -1.0, -0.5, 0.3, 0.5, 2.0, 3.0))
            v, b = (v, Interval(e, e)) if op == "pow" else (Interval(e, e), b)
        x, o = values_in(v, seeded), values_in(b, seeded)
        with np.errstate(all="ignore"):
            y = np.asarray(Stage.apply(stage, x, o) if op != "prelu" else np.where(x >= 0, x, x * o), np.float64)
        said = stage.interval(v, b)
        finite = y[np.isfinite(y)]
        slack = 1e-5 * np.abs(finite) + 1e-6
        assert ((finite >= said.low - slack) & (finite <= said.high + slack)).all(), (stage, v, b, said)
        cliff = stage.cliff(b)
        base, values = stage.base(v, b), (o if cliff is not None and cliff.of_operand else x)
        if cliff is None or cliff.clear(base):
            moved = np.clip(values + NEAR / 2 * seeded.choice((-1, 1), values.shape), base.low, base.high)
            with np.errstate(all="ignore"):
                again = stage.apply(*((x, moved) if values is o else (moved, o)))
            assert np.isfinite(np.asarray(again)[np.isfinite(y)]).all(), (stage, v, b)


# ---- drawn chains


def drawn_model(seed: int):
    """Elementwise operators, reductions and moves over two close tensors, some with a cliff, in any order: (model, feeds)."""
    rng = random.Random(seed)
    nodes, tensors, consts = [], ["a", "b"], dict(CONSTANTS) | {"one": np.float32(1), "e": np.float32(1e-4)}

    def add(op: str, *inputs: str, **attributes) -> str:
        tensors.append(f"t{len(nodes)}")
        nodes.append(node(op, " ".join(inputs), tensors[-1], **attributes))
        return tensors[-1]

    d = add("Sub", "a", "b") if rng.random() < 0.8 else add("Add", add("Sub", "a", "b"), "e")
    for _ in range(rng.randint(0, 3)):
        kind = rng.choice(("Mul", "Add", "Max", "Abs", "Relu", "MaxPool", "Transpose", "Sigmoid", "Mean", "Slice"))
        if kind in ("Mul", "Add", "Max"):
            d = add(kind, d, rng.choice(("k", "e", d)))
        elif kind == "MaxPool":
            d = add(kind, d, kernel_shape=(3, 3), pads=(1, 1, 1, 1))
        elif kind == "Transpose":
            d = add(kind, d, perm=(0, 1, 3, 2))
        elif kind == "Mean":
            d = add("ReduceMean", d, axes=(1,))
        elif kind == "Slice":
            d = add(kind, d, "zero", "two", "axes")
        else:
            d = add(kind, d)
    steep = rng.choice(("Reciprocal", "Div", "Log", "Sqrt", "minus", "third", "root", "Atanh"))
    if steep in ("minus", "third", "root"):
        d = add("Pow", d, steep)
    else:
        d = add(steep, "one", d) if steep == "Div" else add(steep, d)
    if rng.random() < 0.5:
        d = add("Mul", d, "k")
    consts |= {"zero": np.int64([0]), "two": np.int64([2])}
    return model(nodes, {"a": SHAPE, "b": SHAPE}, d, consts), close_pair(seed)


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(i, marks=pytest.mark.long) for i in range(16, 300))])
def test_drawn_chains_are_finite_where_fp32_is(tmp_path, seed):
    """Beside onnxruntime; half of them with a calibration input. Within 1 % where anything was put into FP32 or a plan was
    compared; else the base is known to keep away from its cliff, as that of 1 / (|d| + 1e-4), and stays FP16: finite, and at
    most as wrong as storing everything in FP16, inputs included, makes it. What is below FP16's numbers is 0."""
    proto, feeds = drawn_model(seed)
    ((name, expected),) = ort_run(proto, feeds).items()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values drawn for the range need not be in a logarithm's domain
        engine = build(tmp_path, proto, calibration=feeds if seed % 2 else None)
        with engine.context(device="emulator", poison=True) as ctx:
            got = ctx.run(feeds)[name]
    finite = np.isfinite(expected)
    assert finite.any() and np.isfinite(got[finite]).all()
    allowed = 1e-2
    if not seed % 2 and not engine.plan.range.single:
        (rounded,) = run(with_casts(proto), {t: x.astype(np.float16).astype(np.float32) for t, x in feeds.items()}).values()
        allowed = max(allowed, FACTOR * relative_l2(rounded[finite], expected[finite]))
    assert np.linalg.norm((got - expected)[finite]) <= allowed * np.linalg.norm(expected[finite]) + 2.0**-24 * finite.sum()
