"""Constants that a file stores as sparse tensors, against onnxruntime; those that contradict themselves are refused."""

import math

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import gpu_runtime as gr
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.summaries import describe
from tests.gpu_runtime.frontend.test_importer import refused, save
from tests.reference_run import check_against_ort, model, node


def coordinates(dense: np.ndarray, linear: bool, kind=np.int64, seed: int | None = None) -> onnx.SparseTensorProto:
    """The numbers of "w" that are not zero; in a drawn order with a seed."""
    at = np.flatnonzero(dense) if linear else np.argwhere(dense)
    order = np.arange(len(at)) if seed is None else np.random.default_rng(seed).permutation(len(at))
    values = numpy_helper.from_array(dense[dense != 0][order], "w")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(at[order].astype(kind), "w_indices"), dense.shape)


def stored(t: onnx.SparseTensorProto, nodes, shapes, where: str = "initializer", dtype=np.float32) -> onnx.ModelProto:
    """The model of these nodes, which read "w"; `where`: an initializer, a Constant, or either inside of an If."""
    nodes = [node("Constant", "", "w", sparse_value=t), *nodes] if "Constant" in where else nodes
    proto = model(nodes, shapes, "y", dtype=dtype)
    if "If" in where:
        inner = onnx.GraphProto()
        inner.CopyFrom(proto.graph)
        del inner.input[:]
        del proto.graph.node[:]
        proto.graph.node.append(node("If", "always", "y", then_branch=inner, else_branch=inner))
        proto.graph.initializer.append(numpy_helper.from_array(np.True_, "always"))
    if "initializer" in where:
        graph = proto.graph
        if "If" in where:
            for a in graph.node[0].attribute:
                a.g.sparse_initializer.append(t)
        else:
            graph.sparse_initializer.append(t)
    return proto


def halved(shape, dtype=np.float32) -> np.ndarray:
    """2:4 along axis 1."""
    w = np.random.default_rng(3).uniform(0.5, 1, shape).astype(dtype)
    return np.where(np.arange(shape[1]).reshape(-1, *(1,) * (len(shape) - 2)) % 4 < 2, w, 0).astype(dtype)


@pytest.mark.parametrize("where", ["initializer", "Constant", "If Constant", "If initializer"])
@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sparse_weights_are_weights(where, linear, dtype, tmp_path):
    w, shapes = halved((16, 8, 3, 3), dtype), {"x": (1, 8, 6, 6)}
    nodes = [node("Conv", "x w", "y", pads=(1, 1, 1, 1))]
    proto = stored(coordinates(w, linear), nodes, shapes, where, dtype)
    path = save(tmp_path, proto)
    check_against_ort(path)
    imported = importer.read(path)
    assert imported.loaded.stored[next(n.name for n in imported.model.graph if n.op_type == "Conv")].fits


@pytest.mark.parametrize("seed", range(12))
def test_drawn_sparse_tensors(seed):
    """Shapes of up to four axes, any number of values in any order, integers of any width as indices, both forms."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 5, rng.integers(1, 5)).tolist())
    w = np.where(rng.random(shape) < rng.random(), rng.uniform(0.5, 1, shape), 0).astype(np.float32)
    kind = rng.choice([np.int8, np.int16, np.int32, np.int64]) if math.prod(shape) < 128 else np.int64
    t = coordinates(w, bool(seed % 2), kind, seed)
    check_against_ort(stored(t, [node("Add", "x w", "y")], {"x": shape}, ("initializer", "Constant")[seed // 2 % 2]))


def test_external_data_of_sparse_tensors(tmp_path):
    w = halved((4, 8, 1, 1))
    proto = stored(coordinates(w, True), [node("Conv", "x w", "y")], {"x": (1, 8, 3, 3)})
    values = proto.graph.sparse_initializer[0].values
    (tmp_path / "w.bin").write_bytes(values.raw_data)
    values.ClearField("raw_data")
    values.data_location = onnx.TensorProto.EXTERNAL
    values.external_data.add(key="location", value="w.bin")
    read = importer.read(save(tmp_path, proto)).model.graph.initializers["w"].const_value.numpy()
    assert np.array_equal(read, w)
    values.external_data[0].value = "../w.bin"
    refused(tmp_path, proto, "initializer 'w' keeps its data in '../w.bin', outside the model's folder")


def test_a_build_runs_them_on_sparse_tensor_cores(tmp_path):
    """Also as they are inspected, and pruned: the saved model has them dense."""
    w = halved((64, 64, 3, 3))
    nodes = [node("Conv", "x w", "y", pads=(1, 1, 1, 1))]
    path = save(tmp_path, stored(coordinates(w, True), nodes, {"x": (8, 64, 56, 56)}))
    (row,) = gr.build(path, device="a100", sparsity="enable").sparsity.rows
    assert row.verdict == "sparse", row
    assert describe.describe(path).sparsity.startswith("2:4: all 1 layers")
    w[0, 2] = 1
    out = tmp_path / "pruned.onnx"
    dense = save(tmp_path, stored(coordinates(w, False), nodes, {"x": (8, 64, 56, 56)}))
    assert importer.load(dense, prune=True, save_pruned=out).pruned == ("w",)
    assert np.count_nonzero(numpy_helper.to_array(onnx.load(out).graph.initializer[0])) == 64 * 32 * 9


HOSTILE = {  # name -> (values, indices, shape, the message)
    "outside": ([1, 2], [1, 6], (2, 3), r"its indices \[6\] lie outside of its shape \[2, 3\]"),
    "negative": ([1, 2], [-1, 4], (2, 3), r"its indices \[-1\] lie outside"),
    "outside_of_an_axis": ([1], [[0, 3]], (2, 3), r"its indices \[3\] lie outside of its shape \[2, 3\]"),
    "fewer_indices": ([1, 2], [1], (2, 3), r"integers of the shape \[n\] or \[n, 2\], got \[2\] .* and \[1\]"),
    "other_rank": ([1, 2], [[1, 1, 1], [0, 0, 0]], (2, 3), r"or \[n, 2\], got"),
    "values_of_two_axes": ([[1, 2]], [1, 4], (2, 3), "expected as its values and indices n numbers"),
    "scalar_by_axes": ([1, 2], [[], []], (), "expected as its values and indices n numbers"),
    "floating_indices": ([1, 2], [1.5, 2], (2, 3), "integers of the shape .* of type float"),
    "texts": (["a", "b"], [1, 2], (2, 3), "expected as its values and indices n numbers"),
    "huge": ([1], [0], (1 << 40, 1 << 40), "its shape is .* 134217728 elements of all sparse tensors, at most"),
    "large": ([1], [0], (1 << 14, 1 << 14), "its shape is .* 134217728 elements of all sparse tensors, at most"),
    "negative_size": ([1], [0], (-1, 3), r"its shape is \[-1, 3\]"),
    "many_axes": ([1], [0], (1,) * 40, "expected 32 dimensions"),
}


@pytest.mark.parametrize("where", ["initializer", "Constant"])
@pytest.mark.parametrize("name", HOSTILE)
def test_sparse_tensors_that_contradict_themselves(name, where, tmp_path):
    values, indices, shape, match = HOSTILE[name]
    kinds = (object if name == "texts" else np.float32, np.float32 if name == "floating_indices" else np.int64)
    parts = [numpy_helper.from_array(np.array(a, kind), "w") for a, kind in zip((values, indices), kinds, strict=True)]
    t = onnx.SparseTensorProto(values=parts[0], indices=parts[1], dims=shape)
    message = refused(tmp_path, stored(t, [node("Add", "x w", "y")], {"x": (2, 3)}, where), match)
    assert "sparse tensor 'w': " in message


def test_sparse_tensors_without_data(tmp_path):
    proto = model([node("Add", "x w", "y")], {"x": (2, 3)}, "y")
    proto.graph.sparse_initializer.add().values.name = "w"
    with pytest.raises(ModelError, match="'w'"):
        importer.read(save(tmp_path, proto))
