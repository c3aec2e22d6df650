"""Layers are counted in one unit, the model's nodes, by everything that counts them, whatever the plan launches them with."""

import re

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels import sparse24
from gpu_runtime import pipeline
from gpu_runtime.explain import layer_info, report, wording
from gpu_runtime.explain.log import log_text
from gpu_runtime.frontend.files.weights import stored_weights
from gpu_runtime.report import data, outlooks
from tests.conftest import MODELS, model_path
from tests.gpu_runtime.explain.test_log import sizes
from tests.reference_run import model, node

RNG = np.random.default_rng(4)


def weights(k: int, c: int, r: int = 1, pruned: bool = True) -> np.ndarray:
    w = (RNG.standard_normal((k, c, r, r)) / c).astype(np.float16).astype(np.float32)
    return sparse24.prune(w) if pruned else w


def siblings(*pruned: bool) -> onnx.ModelProto:
    """1x1 convolutions of one tensor, a launch all of them, and a 3x3 behind each."""
    n = Net("siblings", (1, 32, 10, 10))
    ys = [n.relu(n.conv("x", f"head{i}", 24, 1, prune=p), f"relu{i}") for i, p in enumerate(pruned)]
    return n.finish(*(n.conv(y, f"after{i}", 16) for i, y in enumerate(ys)))


def squeeze_excite(hidden: int, *pruned: bool) -> onnx.ModelProto:
    n = Net("squeeze_excite", (1, 64, 14, 14))
    x = n.relu(n.conv("x", "before", 96, 1, prune=True), "before_relu")
    s = n.add("GlobalAveragePool", [x], "squeeze", 96)
    s = n.relu(n.conv(s, "reduce", hidden, 1, prune=pruned[0]), "reduce_relu")
    s = n.add("Sigmoid", [n.conv(s, "expand", 96, 1, prune=pruned[1])], "gate", 96)
    return n.finish(n.conv(n.add("Mul", [x, s], "excite", 96), "after", 16, 1))


def back_to_back() -> onnx.ModelProto:
    """A bottleneck whose 3x3 and 1x1 are one launch."""
    n = Net("back_to_back", (1, 64, 56, 56))
    x = n.relu(n.conv("x", "before", 256, 1, prune=True), "before_relu")
    y = n.relu(n.conv(n.relu(n.conv(x, "narrow", 64, 1), "narrow_relu"), "mid", 64, 3), "mid_relu")
    z = n.relu(n.add("Add", [n.conv(y, "out", 256, 1), x], "add", 256), "relu")
    return n.finish(n.conv(z, "after", 16, 1))


def pieces(*pruned: bool) -> onnx.ModelProto:
    """Convolutions of the pieces of a tensor, whose results are joined."""
    parts = [f"p{i}" for i in range(len(pruned))]
    nodes = [node("Split", "x s", " ".join(parts), axis=1)]
    nodes += [node("Conv", f"{p} w{i}", f"z{i}") for i, p in enumerate(parts)]
    nodes += [node("Concat", " ".join(f"z{i}" for i in range(len(parts))), "y", axis=1)]
    given = {f"w{i}": weights(16, 16, pruned=p) for i, p in enumerate(pruned)} | {"s": np.array([16] * len(parts))}
    return model(nodes, {"x": (1, 16 * len(parts), 9, 7)}, "y", given)


def branches(*pruned: bool) -> onnx.ModelProto:
    """A 3x3, a 1x1 and the input itself, added."""
    nodes = [node("Conv", "x w0", "a", pads=(1, 1, 1, 1)), node("Conv", "x w1", "b"), node("Add", "a b", "c")]
    nodes += [node("Add", "c x", "d"), node("Relu", "d", "y")]
    return model(nodes, {"x": (1, 32, 9, 9)}, "y", {"w0": weights(32, 32, 3, pruned[0]), "w1": weights(32, 32, 1, pruned[1])})


def others() -> onnx.ModelProto:
    """A transposed convolution, a grouped, a depthwise, a Gemm and a MatMul."""
    nodes = [node("ConvTranspose", "x t", "a", strides=(2, 2)), node("Conv", "a g", "b", group=2)]
    nodes += [node("Conv", "b d", "c", group=16), node("GlobalAveragePool", "c", "e"), node("Flatten", "e", "f")]
    nodes += [node("Gemm", "f m", "h"), node("MatMul", "h n", "y")]
    given = {"t": weights(8, 16, 2).transpose(1, 0, 2, 3), "g": weights(16, 4), "d": weights(16, 1, 3, False)}
    given |= {"m": weights(12, 16)[..., 0, 0].T, "n": weights(8, 12)[..., 0, 0].T}
    return model(nodes, {"x": (1, 16, 6, 6)}, "y", {k: np.ascontiguousarray(v) for k, v in given.items()})


SMALL = {
    "siblings": siblings(True, True, True),
    "siblings, one not 2:4": siblings(True, False, True),
    "siblings, none 2:4": siblings(False, False),
    "squeeze-excite": squeeze_excite(24, True, True),
    "squeeze-excite, one 2:4": squeeze_excite(24, True, False),
    "squeeze-excite of 6": squeeze_excite(6, True, False),
    "back to back": back_to_back(),
    "pieces": pieces(True, True, True),
    "pieces, one not 2:4": pieces(True, False, True),
    "branches": branches(True, True),
    "branches, one not 2:4": branches(True, False),
    "others": others(),
}


def of_the_file(path) -> tuple[set[str], int]:
    """(the nodes whose weights have the pattern, how many have weights), from the ONNX file alone."""
    found = {w.node.name: w for w in stored_weights(path)}
    return {name for name, w in found.items() if not w.reason and sparse24.fits(w.values, w.axis).all()}, len(found)


def check(path, mode: str, device: str, shapes=None) -> gr.Engine:
    """Every surface says the same counts, which are the file's. `mode`: not force, which changes the weights."""
    engine = gr.build(path, sparsity=mode, device=device, shapes=shapes)
    (outlook,) = pipeline.plan(path, [device], sparsity=mode, shapes=shapes)
    record, (fit, every) = engine.record, of_the_file(path)
    able, picked = len(engine.sparsity.eligible), len(engine.sparsity.picked)
    assert len(engine.sparsity.layers) == len(set(engine.sparsity.layers)) == every and set(engine.sparsity.eligible) <= fit
    for layer in fit - set(engine.sparsity.eligible):  # a product behind a Flatten is a convolution, over other fours
        (row,) = (row for row in engine.sparsity.rows if layer in row.layers)
        assert row.layers == (layer,) and row.pattern_share < row.stored_share == 1, row
    summary = engine.sparsity.summary
    assert (summary.eligible, summary.layers, summary.picked) == (able, every, picked)
    texts = {
        "log": log_text(record, 120, 400),
        "explain": wording.explain_text(record, engine.sparsity.rows),
        "inspect": report.inspect_text(record),
        "page": data.page(record)["verdict"]["sentence"],
        "plan": wording.sparsity_text(outlook),
    }
    counts = f"{able} of {every} layers with weights are eligible, {picked or 'none'} run{'s' * (picked < 2)} sparse"
    for what, text in texts.items():
        told = counts if able else f"one of {every} layers with weights is eligible for 2:4, so the plan is dense"
        assert told in " ".join(text.split()), what
    for label, count in ((wording.ELIGIBLE_LINE, able), (wording.PICKED_LINE, picked)):
        line = next(line for line in texts["inspect"].splitlines() if line.startswith(label))
        assert len(list(filter(None, line.removeprefix(label).strip().split(", ")))) == count
    sparse, dense, no = (
        sum(map(int, re.findall(rf"^{kind} +(\d+) ", texts["log"], re.M))) for kind in ("sparse", "dense", "not 2:4")
    )
    assert sparse + dense + no == every and sparse == picked and dense + picked >= able
    sparsity = outlook.if_pruned.sparsity if outlook.if_pruned else engine.sparsity  # pruned weights, if not all are 2:4
    assert f"{len(sparsity.picked)} of {len(sparsity.eligible)}" in outlooks.text([outlook])
    assert (outlook.sparsity.eligible, outlook.sparsity.picked) == (engine.sparsity.eligible, engine.sparsity.picked)
    info = layer_info.layer_info(record)
    assert [info[f"Sparsity{what}Layers"] for what in ("Eligible", "", "Picked")] == [able, every, picked]
    assert [sum(x.get(f"Sparsity{what}Layers", 0) for x in info["Layers"]) for what in ("Eligible", "")] == [able, every]
    shown = data.page(record)
    assert (shown["verdict"]["eligible"], shown["verdict"]["picked"]) == (able, picked)
    assert sum(layer.get("layers", 0) for layer in shown["layers"]) == every
    return engine


@pytest.mark.parametrize("device, mode", [("a100", "enable"), ("l4", "disable")])
@pytest.mark.parametrize("name", SMALL)
def test_small_networks(name, device, mode, tmp_path):
    onnx.save(SMALL[name], tmp_path / "m.onnx")
    engine = check(tmp_path / "m.onnx", mode, device)
    together = [row for row in engine.sparsity.rows if len(row.layers) > 1]
    assert together or device == "l4", "several layers are one launch"
    assert all(row.able != () or row.reason == "pattern_violation" for row in together)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [path.stem for path in sorted(MODELS.glob("*.onnx"))] or ["mnist8"])
def test_real_networks(name, tmp_path):
    path, pruned = model_path(name), tmp_path / "pruned.onnx"
    gr.build(path, sparsity="force", device="a10", shapes=sizes(path), save_pruned=pruned)
    check(pruned, "enable", "rtx3090", sizes(path))
