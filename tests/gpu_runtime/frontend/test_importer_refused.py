"""Files that are no model, or not one that can be built: refused with a sentence."""

import itertools
import re

import numpy as np
import onnx
import pytest

from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from tests.gpu_runtime.frontend.test_importer import brute_force, refused, save, small, weights
from tests.reference_run import model, network, node

# ---- bad files


def test_missing_file_folder_and_not_onnx(tmp_path):
    with pytest.raises(ModelError, match="nothing.onnx: no such file; give the path of an ONNX model"):
        importer.read(tmp_path / "nothing.onnx")
    with pytest.raises(ModelError, match="cannot be read: expected a file, got a folder"):
        importer.read(tmp_path)
    for content in (b"", b"\x89PNG\r\n\x1a\n" + bytes(100), b"# a text file\n" * 20, bytes(range(256)) * 4):
        (tmp_path / "other.onnx").write_bytes(content)
        with pytest.raises(ModelError, match=f"other.onnx: expected an ONNX model .*got {len(content)} bytes"):
            importer.read(tmp_path / "other.onnx")


def test_truncated_anywhere(tmp_path):
    whole = small().SerializeToString()
    path = tmp_path / "torn.onnx"
    for size in itertools.chain(range(0, len(whole), 41), range(len(whole) - 20, len(whole))):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match="truncated"):
            importer.read(path)


def test_flipped_bytes_never_crash(tmp_path):
    """A damaged model is either still readable or refused by ModelError."""
    whole = bytearray(small().SerializeToString())
    path = tmp_path / "flipped.onnx"
    kinds = np.random.default_rng(0)
    refusals = 0
    for i in kinds.choice(len(whole), 60, replace=False):
        damaged = bytearray(whole)
        damaged[i] ^= 1 << int(kinds.integers(8))
        path.write_bytes(damaged)
        try:
            network(path, prune=True)
        except ModelError as e:
            refusals += 1
            assert str(e).startswith((str(path), "flipped: "))
    assert refusals > 5


def test_unsupported_operators_are_all_listed(tmp_path):
    nodes = [
        node("Conv", "x w", "a"),
        node("Det", "a", "b"),
        node("Einsum", "b", "c", equation="ncii->nc", name="mix"),
        node("Magic", "c", "d", domain="com.example"),
        node("Nothing", "d", "y"),
        node("Exp", "w", "folds"),
    ]
    proto = model(nodes, {"x": (1, 4, 3, 3)}, "y", {"w": weights(4, 4, 1, 1)})
    proto.opset_import.append(onnx.helper.make_opsetid("com.example", 2))
    message = refused(tmp_path, proto, "4 nodes have an operator that is not supported: ")
    first, second, third = message.splitlines()
    assert first.endswith(": Det (b), Einsum 'ncii->nc' with a diagonal (mix), com.example.Magic (d), Nothing (y)")
    assert second.startswith("export the model without them, or compute them outside it; ") and "['x'], ['a'])" in third
    with pytest.raises(ModelError) as caught:  # of a model in memory, such as a module's, there is no file to cut
        importer.of_proto(proto, "Net", {})
    (second,) = str(caught.value).splitlines()[1:]
    assert second == "export the model without them, or compute them outside it; docs/operators.md lists the supported ones"


def test_a_model_is_cut_in_front_of_what_values_size(tmp_path, monkeypatch):
    nodes = [
        node("Conv", "x w", "a"),
        node("Relu", "a", "beside"),
        node("Flatten", "a", "rows", axis=2),
        node("NonZero", "rows", "found", name="nz"),
        node("Cast", "found", "as_float", to=onnx.TensorProto.FLOAT),
        node("Gemm", "as_float rows", "y"),
    ]
    proto = model(nodes, {"x": (1, 4, 3, 3)}, "beside y", {"w": weights(4, 4, 1, 1)})
    _, _, why, cure = refused(tmp_path, proto, r"not supported: NonZero \(nz\)").splitlines()
    assert why == "values decide how much NonZero gives, and a plan's tensors have fixed sizes"
    onnx.save(proto, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(re.search('python -c "(.*)"$', cure)[1])
    assert [o.name for o in network(tmp_path / "cut.onnx").outputs] == ["beside", "rows"]


def test_opsets_out_of_range(tmp_path):
    old, new, ir, none = small(), small(), small(), small()
    old.opset_import[0].version = 5
    new.opset_import[0].version = 99
    ir.ir_version = 99
    none.opset_import[0].domain = "com.example"
    refused(tmp_path, old, "expected opset 6 or newer, got 5")
    refused(tmp_path, new, "opset 99 .* is newer than the installed onnx .*pip install -U onnx")
    refused(tmp_path, ir, "IR version 99 is newer")
    refused(tmp_path, none, "expected an import of the standard ONNX opset")


CONVERSIONS = {  # name -> (node, its opset, the message of onnx's converter)
    "BatchNormalization n": (node("BatchNormalization", "r s s s s", "n", spatial=0), 7, "Attribute spatial must have value 1"),
    "Greater n": (node("Greater", "r x", "n", broadcast=1), 6, "No Adapter From Version .6 for Greater"),
    "Dropout n": (node("Dropout", "r", "n", is_test=0), 6, "Attribute is_test must not have value 0"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_node_that_cannot_be_converted_is_named(name, tmp_path):
    """Among others of its kind that can; each that cannot, with the reason of the first. An output may declare a wrong size."""
    bad, opset, why = CONVERSIONS[name]
    other = onnx.NodeProto()
    other.CopyFrom(bad)
    other.output[0] = other.name = "m"
    nodes = [node("Relu", "x", "r"), node("BatchNormalization", "r s s s s", "fine", is_test=1), bad, other]
    del nodes[1].attribute[opset < 7 :]
    proto = model(nodes, {"x": (1, 4, 5, 5)}, "fine n m", {"s": np.ones(4, np.float32)}, opset)
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("fine", 1, (7,)))
    cure = "; export the model again, with opset 21 or newer"
    refused(tmp_path, proto, f"{name}, {bad.op_type} m: cannot be converted from opset {opset} to 21: {why}.*{cure}")


def test_cyclic_graph(tmp_path):
    nodes = [node("Add", "x c", "a"), node("Relu", "a", "b"), node("Relu", "b", "c"), node("Relu", "c", "y")]
    message = refused(tmp_path, model(nodes, {"x": (1, 4, 3, 3)}, "y"), "the graph has a cycle: ")
    assert all(f" {n}" in message for n in "abc")
    loop = [node("Add", "x y", "y")]
    refused(tmp_path, model(loop, {"x": (1, 4, 3, 3)}, "y"), "the graph has a cycle: Add y -> Add y")


def test_names_defined_twice_or_never(tmp_path):
    x = {"x": (1, 4, 3, 3)}
    twice = [node("Relu", "x", "a", name="one"), node("Tanh", "x", "a", name="two"), node("Relu", "a", "y")]
    refused(tmp_path, model(twice, x, "y"), "tensor 'a' is defined twice: by Relu one and by Tanh two")
    refused(tmp_path, model([node("Relu", "x", "x")], x, "x"), "'x' is defined twice: as an input or initializer and by")
    missing = model([node("Conv", "x w", "y")], x, "y")
    damaged = model([node("Relu", "x", "y", name="nnnn")], x, "y").SerializeToString().replace(b"nnnn", b"n\xffnn")
    (tmp_path / "damaged.onnx").write_bytes(damaged)
    with pytest.raises(ModelError, match="UTF-8|truncated"):
        importer.read(tmp_path / "damaged.onnx")
    refused(
        tmp_path, missing, "tensor 'w', read by Conv y, is not an input, initializer or node output: an initializer is missing"
    )
    refused(tmp_path, model([node("Relu", "x", "y")], x, "z"), "output 'z' is not computed by any node")
    refused(tmp_path, model([node("Relu", "x", "y")], x, "y y"), "output names must be unique, got twice: 'y'")
    refused(tmp_path, model([node("Relu", "w", "y")], {}, "y", {"w": weights(4)}), "the graph has no input")


def test_weights_that_do_not_fit_or_are_not_finite(tmp_path):
    proto = small()
    proto.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data[:-4]
    refused(tmp_path, proto, r"tensor 'w': its data do not match its type and shape \[8, 4, 3, 3\].*; export the model")
    for value in (np.nan, np.inf):
        proto = small()
        w = weights(8, 4, 3, 3)
        w[2, 1, 0, 2] = value
        proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(w, "w"))
        refused(tmp_path, proto, r"tensor 'w' holds 1 values that are NaN or infinite, first at \[2, 1, 0, 2\]")


def test_schema_violations_and_foreign_types(tmp_path):
    attribute = small()
    attribute.graph.node[0].attribute.append(onnx.helper.make_attribute("colour", "red"))
    refused(tmp_path, attribute, "it breaks the ONNX specification: Unrecognized attribute: colour")
    types = r"float32, float16 or int32, int64, bool, int8, uint8 \(of inputs where only Cast or DequantizeLinear reads it\)"
    for nodes in (["Transpose"], ["Cast", "Transpose"]):  # pixels are whole numbers only where each reader makes them others
        chain = [node(op, "x", "yz"[i], **({"to": 1} if op == "Cast" else {})) for i, op in enumerate(nodes)]
        pixels = model(chain, {"x": (1, 4, 3, 3)}, "y")
        pixels.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
        refused(tmp_path, pixels, f"input 'x': expected {types}, got uint8: cast it outside")
    ranks = model([node("Conv", "x w", "y")], {"x": (1, 4, 3, 3)}, "y", {"w": weights(8, 5, 1, 1)})
    with pytest.raises(ModelError, match=r"Conv y: weights \[8, 5, 1, 1\] in 1 group\(s\) do not fit its input \[1, 4, 3, 3\]"):
        network(ranks)


def external(tmp_path, location, **extra):
    proto = small()
    t = proto.graph.initializer[0]
    data = t.raw_data
    t.ClearField("raw_data")
    t.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **extra}.items():
        t.external_data.add(key=key, value=str(value))
    return proto, data


def test_external_data(tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    proto, data = external(tmp_path, "weights.bin", offset=16, length=8 * 4 * 9 * 4)
    (folder / "weights.bin").write_bytes(bytes(16) + data)
    path = save(folder, proto)
    pruned = tmp_path / "pruned.onnx"
    importer.load(path, prune=True, save_pruned=pruned)
    stored = onnx.load(pruned).graph.initializer[0]
    assert np.array_equal(onnx.numpy_helper.to_array(stored), brute_force(np.frombuffer(data, "<f4").reshape(8, 4, 3, 3), 1))
    (folder / "weights.bin").write_bytes(data[:100])
    refused(folder, proto, "initializer 'w': expected 1152 bytes at offset 16 of 'weights.bin', which has 100")
    (folder / "weights.bin").unlink()
    cure = "this file holds the model's weights: copy it to the model's folder, under this name"
    refused(folder, proto, f"initializer 'w': external data 'weights.bin' cannot be read: No such file or directory; {cure}")


def test_external_data_in_functions_and_subgraphs(tmp_path):
    """Tensors anywhere in the file obey the same rule."""
    text = """
        <ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        g (float[1, 4, 3, 3] x) => (float[1, 4, 3, 3] y) { y = local.shift(x) }
        <domain: "local", opset_import: ["" : 17]>
        shift (a) => (b) {
            k = Constant<value = float[1] {2}>()
            b = Add(a, k)
        }
    """
    proto = onnx.parser.parse_model(text)
    assert network(proto).ops[0].problem.stages[0].params == (2,)
    t = proto.functions[0].node[0].attribute[0].t
    t.Clear()
    t.CopyFrom(external(tmp_path, "../secret.bin")[0].graph.initializer[0])
    refused(tmp_path, proto, "outside the model's folder")
    for nodes, stored in (
        ([node("Conv", "x w", "r")], [t]),
        ([node("Constant", "", "k", value=t), node("Conv", "x k", "r")], []),
    ):
        result = [onnx.helper.make_tensor_value_info("r", 1, None)]
        branch = onnx.helper.make_graph(nodes, "b", [], result, stored)
        choose = node("If", "always", "r", then_branch=branch, else_branch=branch)
        inner = onnx.helper.make_graph([choose], "c", [], result)
        proto = model([node("If", "always", "y", then_branch=inner, else_branch=inner)], {"x": (1, 4, 3, 3)}, "y")
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "always"))
        refused(tmp_path, proto, "outside the model's folder")


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "", "link.bin", "a/../../secret.bin"])
def test_external_data_outside_the_folder(tmp_path, location):
    folder = tmp_path / "inner"
    folder.mkdir()
    proto, data = external(tmp_path, location)
    (tmp_path / "secret.bin").write_bytes(data)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    refused(folder, proto, "outside the model's folder; expected a file in the model's folder")
