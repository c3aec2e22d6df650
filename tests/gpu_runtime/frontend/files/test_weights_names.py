"""Layers have their modules' names, whichever exporter wrote the file; ONNX's names and weights' names find them too."""

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.explain.layer_info import SEPARATOR, layer_info
from gpu_runtime.frontend.files.weights import name_layers
from tests.reference_run import model, node

RNG = np.random.default_rng(0)
LAYERS = ("stem", "layer1.0.conv1", "layer1.0.conv2", "shared", "shared_2")
# Of each exporter: the names of the nodes, the weights of two layers, and the metadata of the third.
OLD = (
    ("/stem/Conv", "/layer1/layer1.0/conv1/Conv", "/layer1/layer1.0/conv2/Conv", "/shared/Conv", "/shared_1/Conv"),
    ("stem.weight", "onnx::Conv_61", "onnx::Conv_64", "shared.weight", "shared.weight"),
)
NEW = (
    ("node_conv2d", "node_Conv_68", "node_conv2d_2", "node_conv2d_3", "node_conv2d_4"),
    ("stem.weight", "layer1.0.conv1.weight", "val_7", "shared.weight", "shared.weight"),
)
BARE = (("", "Conv_1", "", "", ""), ("stem.weight", "layer1.0.conv1.weight", "layer1.0.conv2.weight", *["shared.weight"] * 2))
NAMESPACES = {
    1: ": net.Net/layer1: Sequential/layer1.0: net.Block/layer1.0.bn1: torch.nn.BatchNorm2d/batch_norm: aten.batch_norm",
    2: ": net.Net/layer1: Sequential/layer1.0: net.Block/layer1.0.conv2: torch.nn.Conv2d/conv2d: aten.conv2d.default",
}


def exported(style: tuple[tuple[str, ...], tuple[str, ...]]) -> onnx.ModelProto:
    nodes, tensors = [], {}
    for i, (name, weight) in enumerate(zip(*style, strict=True)):
        nodes.append(node("Conv", f"t{i} {weight}", f"t{i + 1}"))
        nodes[-1].name = name
        if style is NEW and i in NAMESPACES:
            nodes[-1].metadata_props.add(key="namespace", value=NAMESPACES[i])
        tensors.setdefault(weight, RNG.standard_normal((256, 256, 1, 1)).astype(np.float32))
    # of so many channels that no two layers are one launch
    return model(nodes, {"t0": (4, 256, 14, 14)}, "t5", tensors)


@pytest.mark.parametrize("style", [OLD, NEW, BARE], ids=["torchscript", "dynamo", "bare"])
def test_every_exporter_gives_the_modules_names(style):
    engine = gr.build(exported(style), device="a100", sparsity="force")
    assert [row.layer for row in engine.explain().layers] == [*LAYERS]
    assert [layer.name for layer in engine.plan.layers if layer.layer] == [*LAYERS]
    assert all(name in engine.explain().text for name in LAYERS)
    own = [name or f"Conv_{i}" for i, name in enumerate(style[0])]  # layer information has the file's names
    shown = [row["Metadata"].split(SEPARATOR) for row in layer_info(engine.record)["Layers"] if row["Metadata"]]
    assert shown == [[f"[ONNX Layer: {name}]"] for name in own]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("layer1.0.conv1", ["layer1.0.conv1"]),
        ("layer1.0.*", ["layer1.0.conv1", "layer1.0.conv2"]),
        ("/layer1/layer1.0/conv1/Conv", ["layer1.0.conv1"]),
        ("/layer1/*", ["layer1.0.conv1", "layer1.0.conv2"]),
        ("layer1.0.conv2.weight", ["layer1.0.conv2"]),
        ("/shared_1/Conv", ["shared_2"]),
        ("shared", ["shared"]),
    ],
)
def test_module_node_and_weight_find_a_layer(wanted, found):
    engine = gr.build(exported(OLD), device="a100", sparsity="force")
    assert [row.layer for row in engine.explain(wanted).layers] == found
    assert engine.what_if({wanted: "dense"}).text


def test_pruning_knows_layers_by_module():
    result = gr.prune(exported(NEW), layers="layer1.0.*", device="none")
    assert [r.layers for r in result.rows if r.verdict == "pruned"] == [("layer1.0.conv1",), ("layer1.0.conv2",)]


def test_a_users_precision_finds_a_layer_by_module_or_node():
    for name in ("layer1.0.conv1", "node_Conv_68"):
        engine = gr.build(exported(NEW), device="a100", precisions={name: "fp32"})
        assert [x.name for x in engine.plan.layers if x.tactic and "fp32" in x.tactic.kernel] == ["layer1.0.conv1"]


def test_names_stay_when_they_are_given_again_and_others_keep_theirs():
    proto = exported(OLD)
    taken = proto.graph.node.add()
    taken.CopyFrom(node("Relu", "t5", "u"))
    taken.name = "shared_2"  # an operator without weights keeps its name
    assert name_layers(proto.graph)["shared_3"] == "/shared_1/Conv"
    names = [n.name for n in proto.graph.node]
    assert not name_layers(proto.graph) and [n.name for n in proto.graph.node] == names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("weight", ["a\nb.weight", "x" * 300 + ".weight", ".weight", "W5"])
def test_what_is_no_modules_name_changes_nothing(weight):
    proto = model([node("Conv", f"x {weight}" if " " not in weight else "x w", "y")], {"x": (1, 8, 4, 4)}, "y")
    proto.graph.node[0].input[1], proto.graph.node[0].name = weight, "mine"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((8, 8, 1, 1), np.float32), weight))
    proto.graph.node[0].metadata_props.add(key="namespace", value="/////")
    assert not name_layers(proto.graph) and proto.graph.node[0].name == "mine"
