"""The execution of a lowered network in NumPy, problem by problem, with which every other execution must agree."""

import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from gpu_runtime.frontend import importer
from gpu_runtime.fusion.fuse import fuse
from gpu_runtime.lowering.lower import lower
from gpu_runtime.network import Network
from gpu_runtime.rewrites.squeeze_excite import SCALED
from tactics.planner.graph import holds
from tactics.sampling.data import reference


def run(network: Network, feeds: dict, choice: dict | None = None, fp16: bool = False) -> dict[str, np.ndarray]:
    """Returns output -> FP32 array of its ONNX shape. `feeds`: input -> array of its ONNX shape.

    `choice`: fusion group -> option, by default its first, "apart"; `fp16`: whether every tensor is rounded to FP16.
    """
    choice = {group: options[0] for group, options in network.groups} | (choice or {})
    rounded = (lambda a: a.astype(np.float16).astype(np.float32)) if fp16 else (lambda a: a)
    tensors = {t.name: rounded(np.asarray(feeds[t.name], np.float32).reshape(t.shape4)) for t in network.inputs}
    for op in network.ops:
        if not holds(op.when, choice):
            continue
        assert op.output not in tensors, f"{op.name} writes {op.output} again"
        xs = [tensors[name] for name in op.inputs]
        for x, shape in zip(xs, op.problem.in_shapes, strict=True):
            assert x.shape == tuple(shape), f"{op.name}: {x.shape} is not {shape}"
        y = reference(op.problem, xs, op.weights)
        assert y.shape == op.problem.out_shape == network.tensors[op.output], op.name
        tensors[op.output] = rounded(y.astype(np.float32))
    return {t.name: tensors[t.name].reshape(t.shape) for t in network.outputs}


def choices(network: Network, limit: int = 8) -> list[dict[str, str]]:
    """Returns every combination of fusion options (group -> option); if there are more than `limit`, some of them, with each
    option of each group at least once. Combinations in which no op makes a tensor that is read are left out, as in plans.
    """
    names = [group for group, _ in network.groups]
    options = [o for _, o in network.groups]
    if np.prod([len(o) for o in options], dtype=float) <= limit:
        found = [dict(zip(names, pick, strict=True)) for pick in itertools.product(*options)]
    else:
        most = max(len(o) for o in options)
        found = [{n: o[(k + i) % len(o)] for i, (n, o) in enumerate(zip(names, options, strict=True))} for k in range(most)]
    possible = [choice for choice in found if _possible(network, choice)]
    base = {group: of[0] for group, of in network.groups}
    for group, option in ((g, o) for g, of in network.groups for o in of):
        if not any(choice[group] == option for choice in possible):
            others = ({**base, group: option, other: o} for other, of in network.groups for o in of if other != group)
            possible.append(next(choice for choice in others if _possible(network, choice)))
    return possible


def _possible(network: Network, choice: dict[str, str]) -> bool:
    """Returns whether some op makes each tensor that is read. Raises AssertionError if not, unless an option is of one of the
    two kinds that may leave out a tensor which another group's option reads.
    """
    ops = [op for op in network.ops if holds(op.when, choice)]
    made = {t.name for t in network.inputs} | {op.output for op in ops}
    missing = {t for op in ops for t in op.inputs} - made
    assert not missing or any(o == SCALED or o.startswith("into ") for o in choice.values()), (missing, choice)
    return not missing


# ---- small models, files and onnxruntime, for the tests of import, fusion and lowering

MODELS = Path(os.environ.get("GPU_RUNTIME_MODELS", Path(__file__).parents[2] / "shared" / "models"))


def given_model(name: str) -> Path:
    """Returns the path of a published network; skips the test if the folder is absent."""
    path = MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {MODELS}: set GPU_RUNTIME_MODELS to the folder of published networks")
    return path


def node(op: str, inputs: str, outputs: str, **attributes) -> onnx.NodeProto:
    """Returns a node, named after its first output. `inputs`, `outputs`: tensor names with spaces between; "_": an absent
    input."""
    names = ["" if n == "_" else n for n in inputs.split()]
    name = attributes.pop("name", outputs.split()[0])
    return onnx.helper.make_node(op, names, outputs.split(), name=name, **attributes)


def model(nodes, inputs: dict, outputs: str, weights: dict | None = None, opset: int = 17, dtype=np.float32):
    """Returns a ModelProto. `inputs`: name -> shape; `outputs`: names with spaces between; `weights`: name -> array."""
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [info(n, kind, s) for n, s in inputs.items()],
        [info(n, kind, None) for n in outputs.split()],
        [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (weights or {}).items()],
    )
    inferred = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    try:
        return onnx.shape_inference.infer_shapes(inferred)
    except Exception:
        return inferred


def network(path, shapes=None, **options) -> Network:
    """Returns the lowered network of a file or a ModelProto; `options`: of importer.load."""
    if isinstance(path, onnx.ModelProto):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            file.write_bytes(path.SerializeToString())
            return network(file, shapes, **options)
    return fuse(lower(importer.sized(importer.load(path, **options), shapes)))


def feeds_for(net: Network, low: float = -1, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns input -> seeded uniform values in [low, 1), of its declared dtype."""
    rng = np.random.default_rng(seed)
    kinds = {"fp32": np.float32, "fp16": np.float16}
    return {t.name: rng.uniform(low, 1, t.shape).astype(kinds[t.dtype]) for t in net.inputs}


def ort_run(path, feeds: dict, optimized: bool = True) -> dict[str, np.ndarray]:
    """Returns output -> array by onnxruntime. `optimized`: with its optimizer, which moves a Transpose through a cubic
    Resize that onnxruntime then refuses to run."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    source = path.SerializeToString() if isinstance(path, onnx.ModelProto) else str(path)
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def largest_values(model: onnx.ModelProto, feeds: dict) -> dict[str, float]:
    """Returns output of a node -> its largest magnitude in a run by onnxruntime."""
    every = onnx.ModelProto()
    every.CopyFrom(model)
    del every.graph.output[:]
    written = (name for n in model.graph.node if n.op_type != "Constant" for name in n.output if name)
    every.graph.output.extend(onnx.ValueInfoProto(name=name) for name in written)
    return {name: float(np.abs(y).max()) for name, y in ort_run(every, feeds, optimized=False).items() if y.size}


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Returns the L2 norm of the difference divided by the norm of `expected`. Raises AssertionError if shapes differ."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30))


def check_against_ort(path, bound: float = 1e-3, low: float = -1, rewrite=lambda network: network, **options) -> Network:
    """Lowers a model, applies `rewrite` and returns the network. Raises AssertionError if for one of its `choices` the relative
    L2 error against onnxruntime is above `bound`.
    """
    net = rewrite(network(path, **options))
    feeds = feeds_for(net, low)
    expected = ort_run(path, feeds)
    assert [t.name for t in net.outputs] == list(expected)
    for choice in choices(net):
        got = run(net, feeds, choice)
        for name, y in expected.items():
            assert relative_error(got[name], y) < bound, (name, choice)
    return net
