"""Masks of transformers: what is added to scores in front of a softmax, from numbers that FP16 cannot hold to -infinity."""

import warnings

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from tests.engines import build, emulated
from tests.reference_run import model, node, ort_run

N, HEADS, D = 12, 2, 16
LEAST = np.finfo(np.float32).min


def attends(spelling: str, *, constant: np.ndarray | None = None) -> onnx.ModelProto:
    """A transformer's block. `spelling`: how the mask is made and joins the scores; `constant`: it, where it is stored."""
    rng, c = np.random.default_rng(5), HEADS * D
    w = {name: (rng.standard_normal((c, c)) / np.sqrt(c)).astype(np.float32) for name in ("wq", "wk", "wv", "wp")}
    w |= {"four": np.array([1, N, HEADS, D]), "three": np.array([1, N, c]), "root": np.float32(D**-0.5)}
    nodes: list[onnx.NodeProto] = []
    inputs: dict[str, tuple[int, ...]] = {"x": (1, N, c)}
    for name, perm in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))):
        nodes += [
            node("MatMul", f"x w{name}", f"{name}0"),
            node("Reshape", f"{name}0 four", f"{name}1"),
            node("Transpose", f"{name}1", name, perm=perm),
        ]
    nodes += [node("MatMul", "q k", "s0"), node("Mul", "s0 root", "s")]
    if constant is not None:
        w["mask"] = constant.astype(np.float32)
    else:
        inputs["m"] = (1, 1, 1, N) if spelling == "keys" else (1, 1, N, N)
    if spelling in ("times", "keys"):  # Hugging Face: (1 - m) * finfo.min
        w |= {"one": np.float32(1), "least": np.float32(LEAST)}
        nodes += [node("Sub", "one m", "gone"), node("Mul", "gone least", "mask"), node("Add", "s mask", "sm")]
    elif spelling == "where":  # masked_fill(m == 0, finfo.min)
        w |= {"zero": np.float32(0), "least": np.float32(LEAST)}
        nodes += [node("Equal", "m zero", "gone"), node("Where", "gone least s", "sm")]
    elif spelling == "where_inf":
        w |= {"zero": np.float32(0), "least": np.full((1, 1, N, N), -np.inf, np.float32)}
        nodes += [node("Equal", "m zero", "gone"), node("Where", "gone least s", "sm")]
    elif spelling == "given":
        nodes += [node("Add", "s m", "sm")]
    else:
        nodes += [node("Add", "s mask", "sm")]
    nodes += [
        node("Softmax", "sm", "a", axis=-1),
        node("MatMul", "a v", "o"),
        node("Transpose", "o", "ot", perm=(0, 2, 1, 3)),
        node("Reshape", "ot three", "or"),
        node("MatMul", "or wp", "y"),
    ]
    return model(nodes, inputs, "y", w)


def masks(rng: np.random.Generator, shape: tuple[int, ...], *, whole: bool) -> np.ndarray:
    """Ones and zeros; of each row some ones, unless `whole`: then one row is masked whole."""
    m = (rng.random(shape) < 0.6).astype(np.float32)
    m[..., 0] = 1
    if whole:
        m[..., -1, :] = 0
    return m


def judged(proto, feeds, calibration=None):
    """Builds, runs and compares with onnxruntime, infinities and NaN included: of NaN a run warns, of a mask it does not."""
    y = ort_run(proto, feeds)["y"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        engine = gr.build(proto, device="h200", calibration=calibration)
        with engine.context(device="emulator", poison=True) as ctx:
            got, told = ctx.run(feeds)["y"], ctx.nonfinite()
    texts = [str(w.message) for w in warned if w.category is RuntimeWarning]  # an object of another test may be collected here
    assert np.array_equal(np.isnan(got), np.isnan(y)) and bool(told) == bool(texts) == np.isnan(y).any(), (told, texts)
    y, got = np.nan_to_num(y), np.nan_to_num(got)
    assert np.linalg.norm(got - y) < 2e-3 * np.linalg.norm(y)
    return engine


def feeds_of(spelling, rng, whole):
    x = rng.uniform(-1, 1, (1, N, HEADS * D)).astype(np.float32)
    m = masks(rng, (1, 1, 1, N) if spelling == "keys" else (1, 1, N, N), whole=whole)
    if spelling == "given":
        m = np.where(m == 0, np.float32(-np.inf if not whole else -1e4), np.float32(0))
    return {"x": x, "m": m}


@pytest.mark.parametrize("calibrated", ["no", "its own", "of ones"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("spelling", ["times", "keys", "where", "where_inf", "given"])
def test_computed_masks(spelling, whole, calibrated):
    rng = np.random.default_rng(7)
    feeds = feeds_of(spelling, rng, whole)
    ones = {**feeds, "m": np.zeros_like(feeds["m"]) if spelling == "given" else np.ones_like(feeds["m"])}
    calibration = {"no": None, "its own": feeds, "of ones": ones}[calibrated]
    judged(attends(spelling), feeds, calibration)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("least", [-np.inf, LEAST, -65504.0, -1e9, -1e4])
def test_constant_masks(least, whole, calibrated):
    rng = np.random.default_rng(11)
    constant = np.where(masks(rng, (1, 1, N, N), whole=whole) == 0, np.float32(least), np.float32(0))
    feeds = {"x": rng.uniform(-1, 1, (1, N, HEADS * D)).astype(np.float32)}
    judged(attends("stored", constant=constant), feeds, feeds if calibrated else None)


def test_what_minus_infinity_must_not_reach():
    """A weight that is multiplied, and a mask behind a Mul, whose zeros would make NaN."""
    w = np.ones((4, 4, 1, 1), np.float32)
    w[1, 2] = -np.inf
    weights = model([node("Conv", "x w", "y")], {"x": (1, 4, 2, 2)}, "y", {"w": w})
    with pytest.raises(gr.ModelError, match=r"'w' holds 1 values .* first at \[1, 2, 0, 0\].* but Conv y"):
        gr.build(weights, device="h200")
    mask, x = np.full((4, 4), -np.inf, np.float32), {"x": (4, 4)}
    scaled = [node("Add", "x mask", "s"), node("Mul", "s x", "p"), node("Softmax", "p", "y")]
    with pytest.raises(gr.ModelError, match="'mask' holds 16 values .* Softmax, comparisons, Where, Max and Min .* but Mul p"):
        gr.build(model(scaled, x, "y", {"mask": mask}), device="h200")
    for bad in (np.inf, np.nan):
        proto = model([node("Add", "x bad", "s"), node("Softmax", "s", "y")], x, "y", {"bad": np.float32([bad, 0, 0, 0])})
        with pytest.raises(gr.ModelError, match="expected finite weights; .infinity and NaN are not valid weights"):
            gr.build(proto, device="h200")


def test_an_input_that_is_no_mask_has_to_be_finite(tmp_path):
    proto = model([node("Conv", "x w", "y")], {"x": (1, 4, 2, 2)}, "y", {"w": np.ones((4, 4, 1, 1), np.float32)})
    x = np.zeros((1, 4, 2, 2), np.float32)
    x[0, 1] = -np.inf
    with pytest.raises(ValueError, match="expected finite numbers, input 'x' holds infinity at"):
        gr.build(proto, device="h200", calibration={"x": x})
    engine = gr.build(proto, device="h200")
    with engine.context(device="emulator") as ctx, pytest.warns(RuntimeWarning, match="input 'x' holds infinity at"):
        ctx.run({"x": x})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_drawn_masks(seed):
    """Any spelling, any number that masks, any calibration, rows that are masked whole or not; seen or unseen."""
    rng = np.random.default_rng(seed)
    whole = bool(rng.integers(2))
    least = rng.choice([-np.inf, LEAST, -1e30, -1e9, -65504.0, -3e4, -100.0])
    spelling = rng.choice(["times", "keys", "where", "where_inf", "given", "stored"])
    feeds = feeds_of(spelling, rng, whole)
    constant = np.where(masks(rng, (1, 1, N, N), whole=whole) == 0, np.float32(least), np.float32(0))
    if spelling == "stored":
        del feeds["m"]
    drawn = feeds_of(spelling, rng, bool(rng.integers(2)))
    other = {name: drawn[name] for name in feeds}
    calibration = (None, feeds, other)[rng.integers(3)]
    judged(attends(str(spelling), constant=constant if spelling == "stored" else None), feeds, calibration)


@pytest.mark.parametrize("operator, limit", [("Max", "-inf"), ("Min", "inf")])
@pytest.mark.parametrize("names", ["a x", "x a", "x a z"])
def test_a_limit_that_no_value_reaches_goes(names, operator, limit, tmp_path):
    """As JAX writes the maximum of logits (Magika's model)."""
    inputs = {name: (2, 8) for name in names.split() if name != "a"}
    proto = model([node(operator, names, "m"), node("Relu", "m", "y")], inputs, "y", {"a": np.float32(limit)})
    feeds = {name: np.random.default_rng(i).normal(size=(2, 8)).astype(np.float32) for i, name in enumerate(inputs)}
    np.testing.assert_allclose(emulated(build(tmp_path, proto), feeds)["y"], ort_run(proto, feeds)["y"], rtol=1e-3)
