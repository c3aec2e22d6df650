"""Weights that a layer reads through Reshape, Transpose, Squeeze and their like: pruned where they are stored."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels import sparse24
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.weights import weights
from gpu_runtime.frontend.summaries import pattern
from tests.reference_run import model, node, ort_run

RNG = np.random.default_rng(4)
# name -> (the nodes that make w [8, 16, 3, 3] of the stored weights, the stored shape, further constants of these nodes)
CHAINS = {
    "reshape": (["Reshape stored sizes w"], (8, 144), {"sizes": [8, -1, 3, 3]}),
    "zero_keeps": (["Reshape stored sizes w"], (8, 16, 9), {"sizes": [0, 0, 3, 3]}),
    "rows_first": (["Reshape stored sizes t", "Transpose t w"], (8, 3, 3, 16), {"sizes": [8, 3, 3, 16]}),
    "axes": (["Unsqueeze stored one t", "Squeeze t one u", "Identity u i", "Cast i w"], (8, 16, 3, 3), {"one": [1]}),
    "cast_after": (["Cast stored t", "Reshape t sizes w"], (1152,), {"sizes": [8, 16, 3, 3]}),
}


def made(lines: list[str]) -> list[onnx.NodeProto]:
    nodes = []
    for line in lines:
        op, *inputs, out = line.split()
        attributes = {"Transpose": {"perm": (0, 3, 1, 2)}, "Cast": {"to": 1}}.get(op, {})
        nodes.append(node(op, " ".join(inputs), out, **attributes))
    return nodes


def network(chain: str) -> onnx.ModelProto:
    lines, shape, given = CHAINS[chain]
    constants = {name: np.array(v, np.int64) for name, v in given.items()}
    stored = RNG.standard_normal(shape).astype(np.float32)
    return model([*made(lines), node("Conv", "x w", "y")], {"x": (1, 16, 5, 5)}, "y", {"stored": stored, **constants}, opset=17)


@pytest.mark.parametrize("chain", CHAINS)
def test_weights_behind_views_are_pruned_where_they_are_stored(chain, tmp_path):
    proto, path, out = network(chain), tmp_path / "m.onnx", tmp_path / "pruned.onnx"
    onnx.save(proto, path)
    row = pattern.inspect(path)[0]
    assert (row["weight"], row["shape"], row["verdict"]) == ("stored", [8, 16, 3, 3], "dense")
    assert importer.load(path, prune=True, save_pruned=out).pruned == ("stored",)
    shown = model([*made(CHAINS[chain][0]), node("Conv", "x w", "y")], {"x": (1, 16, 5, 5)}, "y w")
    for m, given in ((shown, proto), (after := onnx.ModelProto.FromString(shown.SerializeToString()), onnx.load(out))):
        m.graph.initializer.extend(given.graph.initializer)
    x = {"x": RNG.standard_normal((1, 16, 5, 5)).astype(np.float32)}
    before, pruned = ort_run(shown, x)["w"], ort_run(after, x)["w"]
    assert np.array_equal(pruned, sparse24.prune(before)) and pattern.inspect(out)[0]["verdict"] == "2:4"
    if chain == "rows_first":
        plan = gr.plan(path, ["rtx3090"], sparsity="force")[0]
        assert plan.sparsity.pruned == ("stored",) and plan.sparsity.rows[0].stored_share == 1.0


def test_what_stands_behind_a_view_and_cannot_be_pruned(tmp_path):
    """Two layers that see it differently; a view that leaves the network; one whose sizes are computed."""
    nodes = [
        node("Transpose", "a", "at", perm=(1, 0)),
        node("MatMul", "x a", "p"),
        node("MatMul", "p at", "q"),
        node("Identity", "b", "out"),
        node("MatMul", "q out", "r"),
        node("Add", "zero sizes", "s"),
        node("Reshape", "c s", "t"),
        node("MatMul", "r t", "y"),
    ]
    w = {name: RNG.standard_normal((8, 8)).astype(np.float32) for name in "abc"}
    w |= {"zero": np.int64([0]), "sizes": np.int64([8, 8])}
    found = {v.name: v.reason for v in weights(model(nodes, {"x": (8, 8)}, "y out", w).graph)}
    assert found == {
        "a": "shared by layers that read it along different axes",
        "b": "also read by the network's outputs",
        "t": "computed by Reshape t, not stored",
    }
    alone = weights(model([nodes[0], node("MatMul", "x at", "y")], {"x": (8, 8)}, "y", w).graph)
    assert [(v.name, v.axis, v.reason) for v in alone] == [("a", 0, "")]


@pytest.mark.parametrize(
    "op, second", [("Reshape", [7, 7]), ("Reshape", [-1, -1]), ("Squeeze", [1]), ("Unsqueeze", [9]), ("Reshape", [2**62, 4])]
)
def test_a_view_that_makes_no_sense_is_none(op, second, tmp_path):
    nodes = [node(op, "a sizes", "w"), node("MatMul", "x w", "y")]
    w = {"a": np.ones((8, 8), np.float32), "sizes": np.array(second, np.int64)}
    found = weights(model(nodes, {"x": (8, 8)}, "y", w).graph)
    assert found[0].tensor is None and found[0].reason.endswith("not stored")
