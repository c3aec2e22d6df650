"""Predicted gains of INT8: what they must be at least, and how far they may lie from TensorRT's measured ones."""

import pytest

from benchmarks.int8_gains import TENSORRT, best_us, main, resnet50, sums
from cuda_kernels.device import named
from tests.quantized_models import counted, pruned_resnet50


def test_the_layers_are_resnet_50s():
    layers = list(resnet50())
    assert len(layers) == 52
    products = sum((size // stride) ** 2 * c * k * r * r for c, size, k, r, stride, _ in layers)
    assert products == pytest.approx(3.97e9, rel=0.02)  # 4.09 G of the network, less the stem's 118 M


@pytest.mark.slow
@pytest.mark.parametrize("name, most", [("l4", 0.5), ("rtx4090", 0.45), ("orin_agx64", 0.6), ("a100", 0.65)])
def test_int8_pays(name, most):
    """GeForce cards multiply bytes at four times the rate of FP16 with FP32 sums, others at twice."""
    half, half_sparse, whole, whole_sparse = sums(named(name), 32)
    assert whole / half <= most and whole_sparse <= whole and whole_sparse < half_sparse


@pytest.mark.slow
@pytest.mark.parametrize("layer", TENSORRT, ids=str)
def test_a_gain_is_like_tensorrts(layer):
    half, whole = TENSORRT[layer]
    device = named("a100_pcie")
    ours = best_us(layer, 32, device, False, False) / best_us(layer, 32, device, True, False)
    assert 0.8 < ours / (half / whole) < 1.2


@pytest.mark.slow
def test_it_prints_both_tables(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["int8_gains", "--devices", "l4", "--batch", "1"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("l4") and len(lines) == 5 + len(TENSORRT)


@pytest.mark.full
@pytest.mark.parametrize("outputs", [pytest.param(False, marks=pytest.mark.long), True], ids=["FP16 outputs", "INT8 outputs"])
@pytest.mark.parametrize("batch", [1, pytest.param(32, marks=pytest.mark.long)])
def test_most_convolutions_of_a_pruned_resnet_50_run_in_int8_and_as_sparse(batch, outputs, tmp_path):
    """Without a QuantizeLinear behind a convolution, too, where TensorRT loses its sparse kernels. The stem has 3 channels."""
    found = counted(pruned_resnet50(tmp_path), "l4", batch, outputs, tmp_path)
    assert found.all == 53 and found.whole >= 50 and found.sparse >= (45 if batch == 32 else 30), found
