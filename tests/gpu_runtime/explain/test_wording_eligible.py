"""Networks of which no layer, some layers and every layer fit 2:4: what the log and the line for the network say of each."""

import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from gpu_runtime.explain import figures, wording

NETWORKS = {  # name -> (channels of its input, (channels, pruned) of each layer)
    "none": (3, ((3, False), (6, False))),
    "some": (32, ((64, True), (64, False), (64, True))),
    "all": (32, ((64, True), (64, True))),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_in_a_line(name, tmp_path):
    channels, layers = NETWORKS[name]
    net, x = Net(name, (1, channels, 32, 32)), "x"
    for i, (k, pruned) in enumerate(layers):
        x = net.relu(net.conv(x, f"conv{i}", k, prune=pruned), f"relu{i}")
    onnx.save(net.finish(x), tmp_path / "n.onnx")
    plan = gr.build(tmp_path / "n.onnx", sparsity="enable", device="l4").record
    able = [f"conv{i}" for i, (_, pruned) in enumerate(layers) if pruned]
    log, lines = wording.sparsity_text(plan), " ".join(" ".join(figures.network_lines(plan)).split())
    assert f"{wording.ELIGIBLE_LINE} {', '.join(able)}".strip() in log
    if able:
        assert "2:4 gains " in lines
        assert lines.startswith("The weights of 1 of the 3 layers that can be 2:4 are not 2:4; pruned, ") == (name == "some")
        assert f". {len(able)} of {len(layers)} layers with weights are eligible, 1 runs sparse" in lines
        assert "; the plan takes ~" in lines and "if every eligible layer ran twice as fast" in lines
    else:
        assert f"None of {len(layers)} layers with weights is eligible for 2:4, so the plan is dense;" in lines
        assert lines.startswith("Weights are not 2:4; pruned, this network would take ~") == (channels == 32)
    for row in plan.sparsity.rows:
        eligible = row.verdict != "not_eligible"
        assert eligible == (row.layer in able), row
        assert eligible or row.reason == ("pattern_violation" if channels == 32 else "channels_not_multiple_of_4")
