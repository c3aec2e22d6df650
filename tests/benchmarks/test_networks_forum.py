"""The case that this project began with: both layers are explained completely, and a format that changes nothing is free."""

import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from benchmarks.pages.forum import account
from gpu_runtime.explain import what_if


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a10", "h200"])
def test_both_layers_have_a_complete_reason(device):
    text = account(device)
    assert f"predicted({device})" in text and max(map(len, text.splitlines())) <= 120
    for layer in ("conv160", "conv288"):
        at = text.index(f"\n{layer}   ")
        part = text[at : text.index("\n\n", at)]
        for fact in ("why", "weights", "dense", "sparse", "as ", "to flip", "bound"):
            assert f"\n  {fact}" in part, (layer, fact)
        assert "100.00 % of" in part and "no kernel" not in part
    assert text.rstrip().endswith("Nothing changes: this is already the plan.")


def test_hwc16_is_hwc8_at_288_channels_and_not_at_152(tmp_path):
    """288 is a multiple of 16, so both names mean the same bytes; 152 is not, and a reformat would be paid for."""
    found = {}
    for c in (288, 152):
        net = Net("n", (1, 64, 44, 32))
        x = net.relu(net.conv("x", "first", c), "first_relu")
        onnx.save(net.finish(net.conv(net.relu(net.conv(x, "mid", c, 1), "mid_relu"), "last", 32, 1)), tmp_path / "n.onnx")
        record = gr.build(tmp_path / "n.onnx", device="h200").record
        found[c] = what_if.what_if(record, {"mid": "hwc16->hwc8"})
    assert found[288].after_us == found[288].before_us and not found[288].reformats_new
    assert found[152].layers, "another plan, since hwc16 pads 152 channels to 160"
