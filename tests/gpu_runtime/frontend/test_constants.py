"""What constants decide is stored when a model is imported, whatever computes it."""

import numpy as np

from tests.reference_run import check_against_ort, model, network, node

rng = np.random.default_rng(2)


def test_weights_that_a_training_mode_normalization_standardizes():
    """NFNet's: the weights as one row of channels, normalized by their own statistics, scaled, and given their shape again."""
    w = {"w": rng.standard_normal((16, 8, 3, 3)), "g": rng.uniform(0.5, 2, 16)}
    w |= {"b": np.zeros(16), "m": np.zeros(16), "v": np.ones(16)}
    arrays = {name: a.astype(np.float32) for name, a in w.items()}
    arrays |= {"flat": np.array([1, 16, -1]), "back": np.array([16, 8, 3, 3])}
    nodes = [
        node("Reshape", "w flat", "r"),
        node("BatchNormalization", "r g b m v", "n _m _v", training_mode=1),
        node("Reshape", "n back", "k"),
        node("Conv", "x k", "y", pads=(1, 1, 1, 1)),
    ]
    net = check_against_ort(model(nodes, {"x": (1, 8, 6, 6)}, "y", arrays), 2e-3)
    (conv,) = net.ops
    rows = conv.weights["w"].reshape(16, -1)
    assert np.allclose(rows.mean(1), 0, atol=1e-3) and np.allclose(rows.std(1), arrays["g"], rtol=2e-3)


def test_what_constants_decide_and_the_caller_wants_stays():
    """An output of the network keeps its node: a copy of what is stored."""
    arrays = {"w": rng.standard_normal((4, 4, 1, 1)).astype(np.float32), "two": np.float32(2)}
    nodes = [node("Mul", "w two", "k"), node("Conv", "x k", "y")]
    assert [op.name for op in network(model(nodes, {"x": (1, 4, 3, 3)}, "y", arrays)).ops] == ["y"]
