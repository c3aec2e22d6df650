"""SparseConv2d and SparseLinear in the emulator, beside onnxruntime; wrong arguments."""

import random

import numpy as np
import onnxruntime
import pytest

from cuda_kernels import sparse24
from gpu_runtime.ops import SparseConv2d, SparseLinear, sparse_conv2d
from gpu_runtime.ops.graph import ACTIVATIONS, graph

rng = np.random.default_rng(4)
LIMIT = 2e-3  # of the range: FP16 rounding of the output, sums in another order


def image(n, c, h, w):
    return rng.standard_normal((n, h, w, c)).astype(np.float16).transpose(0, 3, 1, 2)


def weights(k, c, r=3, s=3):
    return (rng.standard_normal((k, c, r, s)) / np.sqrt(c * r * s)).astype(np.float32)


def reference(conv: SparseConv2d, *given: np.ndarray) -> np.ndarray:
    arrays = {"weight": conv.weight} if conv.bias is None else {"weight": conv.weight, "bias": conv.bias}
    model = graph(arrays, conv.geometry, conv.activation, given[0].shape, *(a.shape for a in given[1:]))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = dict(zip(("x", "residual"), (np.ascontiguousarray(a).astype(np.float32) for a in given), strict=False))
    return session.run(None, feeds)[0]


def check(conv: SparseConv2d, *given: np.ndarray) -> np.ndarray:
    y, expected = conv(*given), reference(conv, *given)
    assert y.dtype == np.float16 and y.shape == expected.shape and y.transpose(0, 2, 3, 1).flags.c_contiguous
    assert np.abs(y - expected).max() <= LIMIT * max(np.ptp(expected), np.abs(expected).max() / 3)
    return y


def drawn(seed: int) -> tuple[SparseConv2d, list[np.ndarray]]:
    draw = random.Random(seed)
    groups, r, s = draw.choice((1, 1, 1, 2, 4)), draw.choice((1, 3, 3, 5)), draw.choice((1, 3, 3))
    c, k = groups * 8 * draw.randint(1, 6), groups * 8 * draw.randint(1, 6)
    options = {
        "stride": (draw.choice((1, 1, 2)), draw.choice((1, 1, 2))),
        "dilation": draw.choice((1, 1, 2)),
        "padding": draw.choice((0, 1, (2, 1), (0, 1, 2, 1))),
        "groups": groups,
        "activation": draw.choice([*ACTIVATIONS]),
    }
    bias = draw.choice((None, rng.standard_normal(k).astype(np.float32)))
    device = draw.choice(("a100", "h200", "l4"))
    conv = SparseConv2d.from_dense(weights(k, c // groups, r, s), bias, prune="magnitude", device=device, **options)
    x = image(draw.randint(1, 3), c, draw.randint(9, 17), draw.randint(9, 17))
    return conv, [x, image(*conv.out_shape(x.shape))] if draw.random() < 0.4 else [x]


@pytest.mark.parametrize("tens", range(4))
def test_drawn_convolutions(tens):
    for seed in range(5 * tens, 5 * tens + 5):
        conv, given = drawn(seed)
        check(conv, *given)


@pytest.mark.full
@pytest.mark.parametrize("tens", range(2, 20))
def test_two_hundred_drawn_convolutions(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        conv, given = drawn(seed)
        check(conv, *given)


@pytest.mark.long
@pytest.mark.parametrize("hundred", range(2, 30))
def test_three_thousand_drawn_convolutions(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        conv, given = drawn(seed)
        check(conv, *given)


def test_the_answer_of_a_layer():
    """Tactic, reason and times are those of an engine's layer, sparse or dense."""
    conv = SparseConv2d.from_dense(weights(128, 128), padding=1, prune="magnitude", device="h200")
    row = conv.why((8, 128, 28, 28))
    assert (row.verdict == "sparse") == ("sparse24" in conv.tactic((8, 128, 28, 28)))
    assert row.best_dense and row.best_sparse and row.reason in ("picked", "dense_faster", "uncertain")


def test_a_sparse_kernel_is_forced_where_dense_ones_are_faster():
    w, shape = weights(64, 512), (2, 512, 6, 6)
    free, forced = (
        SparseConv2d.from_dense(w, padding=1, prune="magnitude", device="h200", force=force) for force in ("", "sparse")
    )
    row, other = forced.why(shape), free.why(shape)
    assert (other.verdict, other.reason, "dense" in free.tactic(shape)) == ("dense", "dense_faster", True)
    assert (row.verdict, row.reason, "sparse24" in forced.tactic(shape)) == ("sparse", "forced", True)
    assert (row.best_dense, row.best_sparse) == (other.best_dense, other.best_sparse) and row.us > row.best_dense.us
    says = " ".join(str(forced._plan(shape, False).engine.explain()).split())
    assert "Runs sparse because it is forced to, in " in says and "; the best dense kernel takes " in says
    wins = SparseConv2d.from_dense(weights(128, 512), padding=1, prune="magnitude", device="a100", force="sparse")
    assert wins.why((8, 512, 14, 14)).reason == "picked"
    check(forced, image(*shape))


def test_out_is_filled_and_returned():
    conv, given = drawn(3)
    out = np.zeros_like(conv(*given))
    assert conv(*given, out=out) is out and np.array_equal(out, conv(*given))


def test_a_linear_layer_takes_rows():
    w, b, x = weights(64, 96, 1, 1)[:, :, 0, 0], rng.standard_normal(64), rng.standard_normal((2, 7, 96)).astype(np.float16)
    layer = SparseLinear.from_dense(w, b, prune="magnitude", activation="relu", device="a100")
    expected = np.maximum(x.astype(np.float32) @ sparse24.prune(w).T + b, 0)
    y = layer(x)
    assert y.shape == (2, 7, 64) and np.abs(y - expected).max() <= LIMIT * np.ptp(expected)
    with pytest.raises(ValueError, match=r"x: expected rows of C channels, one after the other"):
        layer(x.transpose(1, 0, 2))


def test_once():
    w, x = sparse24.prune(weights(8, 16)), image(1, 16, 6, 6)
    assert np.array_equal(sparse_conv2d(x, w, padding=1), SparseConv2d.from_dense(w, padding=1)(x))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"prune": "refuse"}, r"groups of 4 input channels have two zeros, expected all: prune and fine-tune"),
        ({"prune": "randomly"}, "prune: expected 'refuse' or 'magnitude', got 'randomly'"),
        ({"stride": 0}, "stride: expected 1 or 2 whole numbers, 1 or more, got 0"),
        ({"padding": (1, 2, 3)}, r"padding: expected 1 or 2 or 4 whole numbers, 0 or more, got \(1, 2, 3\)"),
        ({"force": "dense"}, "force: expected '' or 'sparse', got 'dense'"),
        ({"activation": "relu6"}, "activation: expected one of '', 'relu'.*, got 'relu6'"),
        ({"groups": 3}, r"weight: expected \[K, C / groups, R, S\] with K a multiple of groups=3, got \[8, 16, 3, 3\]"),
        ({"strides": 1}, "unknown option 'strides', expected some of stride.*did you mean 'stride'"),
    ],
)
def test_wrong_options(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        SparseConv2d.from_dense(weights(8, 16), **{"prune": "magnitude"} | options)


@pytest.mark.parametrize("k, c, odd", [(8, 12, 12), (10, 16, 10), (8, 4, 4)])
def test_channels_that_kernels_cannot_load_at_once(k, c, odd):
    """The memory of 12 channels has no padding to 16, which kernels would read."""
    with pytest.raises(ValueError, match=f"weight: expected C and K in multiples of 8, got {odd}: add channels of zeros"):
        SparseConv2d.from_dense(weights(k, c), prune="magnitude")


@pytest.mark.parametrize(
    "x, says",
    [
        (np.zeros((1, 16, 6, 6), np.float16), r"x: expected channels-last memory, got strides .*torch.channels_last"),
        (image(1, 16, 6, 6).astype(np.float32), "x: expected float16 1x16x6x6, got float32"),
        (image(1, 8, 6, 6), r"x: expected \[N, 16, H, W\], got 1x8x6x6"),
        (image(1, 16, 2, 2), r"x: 1x16x2x2 is smaller than the kernel \[3, 3\]"),
    ],
)
def test_wrong_inputs(x, says):
    with pytest.raises(ValueError, match=says):
        SparseConv2d.from_dense(weights(8, 16), prune="magnitude")(x)


def test_an_output_that_is_still_read():
    conv = SparseConv2d.from_dense(weights(16, 16), padding=1, prune="magnitude")
    x = image(1, 16, 6, 6)
    with pytest.raises(ValueError, match="out: it shares memory with x, which is still read while y is written"):
        conv(x, out=x)


def test_what_a_new_user_gets_wrong_is_told_at_once():
    w = np.zeros((16, 64), np.float32)
    with pytest.raises(ValueError, match="unknown device 'l44': did you mean l4"):
        SparseLinear.from_dense(w, device="l44")
    linear = SparseLinear.from_dense(w, device="h200")
    with pytest.raises(ValueError, match=r"x: expected \[\.\.\., 64\], got \[2, 5, 63\]"):
        linear(np.zeros((2, 5, 63), np.float16))
    with pytest.warns(RuntimeWarning, match="no GPU here to time tactics on"):
        linear.conv.tune((1, 64, 1, 8))
    assert "weight=[16, 64, 1, 1]" in repr(linear.conv)
