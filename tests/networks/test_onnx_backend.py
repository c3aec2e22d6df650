"""onnx's own backend tests through the adapter, executed by the emulator, and the adapter's promises.

Selected are the node, pytorch-converted and pytorch-operator cases with an input of FP32 or FP16, no type that an engine does
not know at its edges, and operators of the lists below only (so the function bodies among the node cases count as well).
"""

import functools
import unittest
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from tests import onnx_backend
from tests.reference_run import model, node, ort_run

ROOT = Path(__file__).parents[2]
ONNX = "1.23.2"  # whose cases EXCLUDED and the page's numbers are about
TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}
SHARE = 0.95  # of the selected cases pass, at least

KERNELS = """
    Abs Add AveragePool BatchNormalization Cast Clip Concat Conv ConvTranspose DepthToSpace Div Dropout Elu Erf Exp Expand
    Flatten Gather Gelu Gemm GlobalAveragePool GlobalMaxPool GroupNormalization HardSigmoid HardSwish Identity
    InstanceNormalization LayerNormalization LeakyRelu Log LogSoftmax MatMul Max MaxPool Min Mish Mul Neg PRelu Pad Pow
    ReduceMax ReduceMean ReduceSum Relu Reshape Resize Sigmoid Slice Softmax Softplus SpaceToDepth Split Sqrt Squeeze Sub
    Sum Swish Tanh Transpose Unsqueeze Upsample
""".split()
# Equal has integer cases only.
LIBRARY = """
    ArgMax ArgMin Ceil Celu Floor Greater GreaterOrEqual GridSample LRN Less LessOrEqual LpPool Mean Reciprocal Round Selu
    Softsign Tile TopK Where
""".split()
OPERATORS = sorted(KERNELS + LIBRARY)
FOLDED = ("Constant", "ConstantOfShape", "Shape", "Size")  # operators whose results only constants decide
DATA = (TensorProto.FLOAT, TensorProto.FLOAT16)
EDGES = (*DATA, TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)

# Reason -> the selected cases that do not pass for it.
EXCLUDED = {
    "training": """
        test_batchnorm_epsilon_training_mode test_batchnorm_example_training_mode test_training_dropout
        test_training_dropout_mask test_training_dropout_default test_training_dropout_default_mask""",
    "tensors without elements": """
        test_castlike_FLOAT16_to_FLOAT_expanded test_castlike_FLOAT_to_FLOAT16_expanded
        test_reduce_l1_empty_set_expanded test_reduce_log_sum_empty_set_expanded test_reduce_max_empty_set
        test_reduce_sum_empty_set test_reduce_sum_empty_set_non_reduced_axis_zero
        test_reduce_sum_square_empty_set_expanded test_reshape_allowzero_reordered test_slice_start_out_of_bounds
        test_split_zero_size_splits_opset13 test_split_zero_size_splits_opset18""",
    "differences of 1 at 10,000, where neighbours in FP16 are 8 apart": """
        test_logsoftmax_large_number test_softmax_large_number""",
    "an output that no input decides": """
        test_dropout_default_mask test_dropout_default_mask_ratio test_training_dropout_zero_ratio_mask""",
    "corners aligned with a fraction of a pixel; here, as in PyTorch and onnxruntime, with the last whole one": """
        test_resize_downsample_scales_cubic_align_corners test_resize_downsample_scales_linear_align_corners""",
    "a transposed convolution of volumes": "test_convtranspose_3d",
}
REASON = {name: reason for reason, names in EXCLUDED.items() for name in names.split()}


@functools.cache
def selected() -> dict[str, list[str]]:
    """Case -> the operators of its graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx divides by zero while it makes its data
        from onnx.backend.test.loader import load_model_tests

        cases = [c for kind in ("node", "pytorch-converted", "pytorch-operator") for c in load_model_tests(kind=kind)]
    found = {}
    for case in cases:
        graph = (case.model or onnx.load(Path(case.model_dir) / "model.onnx")).graph
        ops = [n.op_type for n in graph.node if n.op_type not in FOLDED]
        inputs, outputs = ([v.type.tensor_type.elem_type for v in values] for values in (graph.input, graph.output))
        if ops and set(ops) <= set(OPERATORS) and set(inputs) & set(DATA) and set(inputs + outputs) <= set(EDGES):
            found[case.name] = ops
    return found


@functools.cache
def runner():
    """onnx's test functions, by name with _cpu behind, on this adapter."""
    from onnx.backend.test import BackendTest

    def prepare(model, device, **tolerance):  # the runner hands its own options on
        return onnx_backend.prepare(model, device)

    return BackendTest(SimpleNamespace(supports_device=lambda device: device == "CPU", prepare=prepare), __name__).tests


def why_not(case: str) -> str:
    """Empty if the case passes, else in one line why it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of values that are not finite, as some cases want them
        try:
            getattr(runner(), f"{case}_cpu")(None, **TOLERANCE)
        except unittest.SkipTest as e:
            return f"skipped: {' '.join(str(e).split())}"
        except AssertionError as e:
            return f"differs: {' '.join(str(e).split())[:300]}"
    return ""


def begun_by(operator: str) -> list[str]:
    """The selected cases whose graph begins with the operator."""
    return [case for case, ops in selected().items() if ops[0] == operator]


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_case_of_each_operator(operator):
    case = next((case for case in begun_by(operator) if case not in REASON), None)
    assert case is None or not why_not(case)


@pytest.mark.full
@pytest.mark.parametrize("operator", OPERATORS)
def test_cases(operator):
    """All but the excluded ones pass, and those do not."""
    found = {case: why_not(case) for case in begun_by(operator)}
    failed = [f"{case}: {why}" for case, why in found.items() if why and case not in REASON]
    passed = [case for case, why in found.items() if not why and case in REASON]
    assert not failed, "\n".join(failed)
    assert not passed, f"excluded, and yet they pass: {' '.join(passed)}"


@pytest.mark.slow
@pytest.mark.skipif(onnx.__version__ != ONNX, reason=f"the numbers are those of onnx {ONNX}, this is {onnx.__version__}")
def test_share_that_passes():
    cases = selected()
    unknown = [case for case in REASON if case not in cases]
    assert not unknown, f"excluded, but not among the selected: {' '.join(unknown)}"
    assert sum(len(names.split()) for names in EXCLUDED.values()) == len(REASON), "a case is excluded twice"
    passed = len(cases) - len(REASON)
    assert passed >= SHARE * len(cases), f"{passed} of {len(cases)}"
    text = f"{passed} of {len(cases)} selected cases of `onnx.backend.test`"
    assert text in " ".join((ROOT / "docs" / "operators.md").read_text().split()), f"docs/operators.md: expected {text!r}"


@pytest.mark.slow
def test_every_operator_is_tried():
    assert set().union(*selected().values()) == set(OPERATORS)


# ---- the adapter


def test_run_model_takes_a_list_or_names():
    proto = model([node("Relu", "x", "y"), node("Sigmoid", "x", "z")], {"x": (1, 3, 4, 5)}, "y z")
    x = np.random.default_rng(0).normal(size=(1, 3, 4, 5)).astype(np.float32)
    expected = ort_run(proto, {"x": x})
    prepared = onnx_backend.prepare(proto, "CPU")
    for given in ([x], (x,), {"x": x}, x):
        y, z = prepared.run(given)
        np.testing.assert_allclose(y, expected["y"], **TOLERANCE)
        np.testing.assert_allclose(z, expected["z"], **TOLERANCE)
    assert prepared.run([x])["z"].dtype == np.float32
    np.testing.assert_allclose(onnx_backend.run_model(proto, [x]).y, expected["y"], **TOLERANCE)


def test_weights_that_are_inputs_are_constants_of_each_engine():
    rng = np.random.default_rng(0)
    proto = model([node("Conv", "x w b", "y", pads=(1, 1, 1, 1))], {"x": (1, 4, 5, 5), "w": (8, 4, 3, 3), "b": (8,)}, "y")
    prepared = onnx_backend.prepare(proto)
    x, w, b = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((1, 4, 5, 5), (8, 4, 3, 3), (8,)))
    for weights in (w, 2 * w, w):
        np.testing.assert_allclose(
            prepared.run([x, weights, b]).y, ort_run(proto, {"x": x, "w": weights, "b": b})["y"], rtol=5e-3, atol=5e-3
        )
    assert len(prepared._contexts) == 2


def test_run_node():
    x = np.float32([[1, -2, 3]])
    np.testing.assert_array_equal(onnx_backend.run_node(node("Relu", "x", "y"), [x])[0], [[1, 0, 3]])
    add, half = node("Add", "x x", "y"), x.astype(np.float16)
    assert onnx_backend.run_node(add, [half, half], opset_version=14).y.dtype == np.float16
    assert onnx_backend.run_node(add, [half, half], outputs_info=[(np.float16, (1, 3))])[0].tolist() == [[2, -4, 6]]
    with pytest.raises(ValueError, match=r"inputs: expected 2 \(x, w\), got 1"):
        onnx_backend.run_node(node("MatMul", "x w", "y"), [x])


def test_sizes_may_be_known_at_the_first_run():
    proto = model([node("Abs", "x", "y")], {"x": ("n", 3)}, "y")
    prepared = onnx_backend.prepare(proto)
    for n in (2, 5):
        assert prepared.run([-np.ones((n, 3), np.float32)]).y.tolist() == [[1, 1, 1]] * n


def test_what_cannot_be_built_is_skipped_with_the_reason():
    proto = model([node("NonZero", "x", "y")], {"x": (2, 3)}, "y")
    with pytest.raises(unittest.SkipTest, match="(?s)^g: 1 node has an operator that is not supported: NonZero .y"):
        onnx_backend.prepare(proto)


def test_wrong_inputs():
    prepared = onnx_backend.prepare(model([node("Abs", "x", "y")], {"x": (2, 3)}, "y"))
    for given, message in (
        ([np.zeros((2, 3), np.float32)] * 2, r"expected 1 \(x\), got 2"),
        ({"z": np.zeros((2, 3), np.float32)}, r"expected the names \['x'\], got \['z'\]"),
        ([np.zeros((2, 3))], "expected dtype float32, got float64"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared.run(given)


def test_devices():
    assert onnx_backend.supports_device("CPU") and not onnx_backend.supports_device("CUDA:7")
    with pytest.raises(ValueError, match="expected CPU or, where there is a GPU, CUDA, got 'TPU'"):
        onnx_backend.prepare(model([node("Abs", "x", "y")], {"x": (2, 3)}, "y"), "TPU")
