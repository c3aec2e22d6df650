"""Networks whose inputs and outputs have any format: both dialects, plans, runs against onnxruntime, the command line."""

import json
import random
from functools import lru_cache

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto

import gpu_runtime as gr
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from gpu_runtime.cli import program
from gpu_runtime.network import TensorInfo
from gpu_runtime.planning import io_formats
from tactics.candidates import at_edges, candidates
from tactics.format import LAYOUTS, Format
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem, MoveProblem, PoolProblem
from tactics.problems.reductions import NormalizeProblem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tests.conftest import DIGITS, model_path
from tests.engines import TYPES, emulated, judge
from tests.problems import CONVS, PROBLEMS, assert_right, conv_case, execute, transposed_case
from tests.reference_run import model as proto_of
from tests.reference_run import node, ort_run

pytestmark = pytest.mark.slow

EXACT = ("none", "relu", "leaky_relu", "prelu", "clip")  # activations without a function that is approximated
SIX = ("chw", "chw2", "hwc8", "hwc16", "chw16", "chw32")


def values(rng, *shape, scale):
    return (rng.standard_normal(shape) * scale).astype(np.float16).astype(np.float32)


def network(path, channels=(40, 36), size=(7, 9), two=False):
    """One convolution (and, with `two`, another beside it with an input and output of its own), saved to `path`."""
    rng, (c, k), sides = np.random.default_rng(0), channels, ("", "2") if two else ("",)
    nodes, weights = [], {}
    for i in sides:
        weights |= {f"w{i}": values(rng, k, c, 3, 3, scale=1 / np.sqrt(9 * c)), f"b{i}": np.linspace(-1, 1, k)}
        nodes += [
            node("Conv", f"x{i} w{i} b{i}", f"t{i}", name=f"conv{i}", pads=[1, 1, 1, 1]),
            node("Relu", f"t{i}", f"y{i}", name=f"relu{i}"),
        ]
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    onnx.save(proto_of(nodes, {f"x{i}": (1, c, *size) for i in sides}, " ".join(f"y{i}" for i in sides), weights), path)
    return path


def image(engine):
    """Whole numbers, the same in every type."""
    rng = np.random.default_rng(0)
    return {i.name: rng.integers(0, 9, i.shape).astype(np.float32) for i in engine.plan.inputs}


def check(path, engine, **options):
    got = judge(engine, path, image(engine), **options)
    for info in engine.plan.outputs:
        y = got[info.name]
        assert y.dtype == TYPES[info.dtype] and y.shape == tuple(info.shape)


def copies(engine):
    return [layer for layer in engine.plan.layers if layer.type == "reformat"]


@lru_cache
def model(folder, c, k):
    return network(folder / f"{c}_{k}.onnx", (c, k))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def test_two_stems_write_into_one_tensor(tmp_path):
    """Branches of an image joined by Concat: each convolution stores its channels where they belong."""
    rng, path = np.random.default_rng(0), tmp_path / "branches.onnx"
    weights = {f"w{i}": values(rng, 16, 3, r, r, scale=1 / (2 * r)) for i, r in enumerate((3, 5))}
    nodes = [node("Conv", f"x w{i}", f"t{i}", name=f"conv{i}", pads=[i + 1] * 4) for i in (0, 1)]
    onnx.save(proto_of([*nodes, node("Concat", "t0 t1", "y", axis=1)], {"x": (1, 3, 10, 12)}, "y", weights), path)
    engine = gr.build(path, device="h200", input_formats="uint8:hwc", output_formats="fp16:hwc8")
    assert [s.kernel for s in engine.plan.steps] == ["conv_stem", "conv_stem"]
    check(path, engine)


@pytest.mark.parametrize("formats", [None, "hwc", "uint8:hwc", "fp32:chw"])
def test_a_model_whose_input_is_uint8(tmp_path, formats):
    """As preprocessing exported with a network has it: the first convolution reads the pixels as they are."""
    rng, path = np.random.default_rng(0), tmp_path / "pixels.onnx"
    nodes = [node("Cast", "x", "f", to=TensorProto.FLOAT), node("Conv", "f w", "y")]
    proto = proto_of(nodes, {"x": (1, 3, 9, 12)}, "y", {"w": values(rng, 16, 3, 3, 3, scale=1e-3)})
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    onnx.save(proto, path)
    engine = gr.build(path, device="h200", input_formats=formats)
    assert str(engine.plan.inputs[0].format) == {None: "uint8:chw", "hwc": "uint8:hwc"}.get(formats, formats)
    assert engine.plan.range.source == "random values from 0 to 1, of pixels 0 to 255"
    assert engine.plan.steps[0].kernel == "conv_stem"
    x = rng.integers(0, 256, (1, 3, 9, 12)).astype(np.uint8)
    expected = ort_run(path, {"x": x})["y"]
    y = emulated(engine, {"x": x.astype(TYPES[engine.plan.inputs[0].dtype])})["y"]
    assert np.abs(y - expected).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.sample(12)
@pytest.mark.parametrize("y", SIX)
@pytest.mark.parametrize("x", SIX)
def test_convolutions_take_and_give_every_format(folder, x, y):
    """40 and 36 channels: padded differently by every vector width."""
    path = model(folder, 40, 36)
    engine = gr.build(path, device="h200", input_formats=f"fp16:{x}", output_formats=f"fp16:{y}")
    assert str(engine.plan.inputs[0].format) == f"fp16:{x}" and str(engine.plan.outputs[0].format) == f"fp16:{y}"
    check(path, engine)


KINDS = {
    "conv": conv_case(2, 37, 5, 6, 35, 3, 3, pad=(1, 1, 1, 1), bias=True, act=Activation("sigmoid")),
    "sparse": conv_case(1, 40, 5, 6, 35, 3, 3, pad=(1, 1, 1, 1), bias=True, sparse24=True),
    "stem": conv_case(1, 3, 9, 12, 35, 3, 3, pad=(1, 1, 1, 1), bias=True, act=Activation("sigmoid")),
    "transpose": transposed_case(1, 37, 5, 6, 35, 3, 3, (9, 11), stride=(2, 2), pad=(1, 1), bias=True),
    "pool": PoolProblem(1, 37, 9, 9, "max", 3, 3, (4, 4), stride=(2, 2)),
    "move": MoveProblem(1, 37, 6, 5, "window", (37, 5, 4), start=(0, 1, 1)),
    "rows": NormalizeProblem(2, 37, 5, 4, "softmax", "c"),
}


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_binary_takes_and_gives_every_layout(kind):
    """Every (in, out) pair, executed directly: padding zero, no conflicts in convolutions."""
    problem, device = KINDS[kind], named("h200")
    formats = [Format("fp16", layout) for layout in (*SIX, "hwc")]
    ins = [f for f in formats if kind != "stem" or f.layout in ("chw", "hwc")]
    found = {}
    for t in candidates(problem, device):
        small = t.tile is None or t.tile.n == 64
        if small and t.sparse == (kind == "sparse") and (kind != "stem" or t.kernel == "conv_stem"):
            for v in at_edges(t, [formats], formats):
                found.setdefault((v.ins[0], v.out), v)
    pairs = {(x, y) for x in ins for y in formats if kind != "pool" or linear(x) == linear(y)}
    assert pairs <= set(found)
    inputs, weights = random_data(problem)
    expected = reference(problem, inputs, weights)
    for pair in sorted(pairs):
        gpu = Emulated(device)
        assert_right(problem, found[pair], execute(gpu, problem, found[pair], inputs, weights), expected)
        assert not isinstance(problem, ConvProblem) or gpu.stats[-1].excess_wavefronts == 0


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [*CONVS, "conv", "conv_residual"])
def test_convolutions_write_fp32(name):
    """Of each problem, two tactics of each kernel: right to FP32's last bits, which no rounding to FP16 would leave."""
    problem, device = PROBLEMS[name], named("h200")
    inputs, weights = random_data(problem)
    expected = reference(problem, inputs, weights)
    edges = [()] * len(problem.in_shapes), (Format("fp32", "chw"), Format("fp32", "hwc"))
    able = [v for t in candidates(problem, device) for v in at_edges(t, *edges) if v.out.dtype == "fp32"]
    kernels = {t.kernel for t in able}
    assert kernels and ("conv_sparse24" in kernels) == problem.sparse24
    for kernel in sorted(kernels):
        for t in random.Random(name).sample([t for t in able if t.kernel == kernel], 2):
            got = execute(Emulated(device), problem, t, inputs, weights)
            assert assert_right(problem, t, got, expected) < (2e-6 if problem.epilogue.act.name in EXACT else 2e-5)


@pytest.mark.parametrize("x,y", [("chw2", "chw2"), ("hwc", "chw16"), ("chw16", "hwc"), ("chw", "chw2")])
def test_odd_channels(folder, x, y):
    path = model(folder, 37, 35)
    check(path, gr.build(path, device="h200", input_formats=f"fp16:{x}", output_formats=f"fp16:{y}"))


@pytest.mark.parametrize("x", ["uint8:hwc", "uint8:chw", "fp32:hwc", "fp16:hwc", "fp32:chw", "fp32:chw32"])
@pytest.mark.parametrize("c", [3, 20])
def test_images(folder, c, x):
    """Few channels: no copy before the convolution, whatever the image is. More: one copy, whose result is the same."""
    path = model(folder, c, 16)
    engine = gr.build(path, device="h200", input_formats=x, output_formats="fp16:hwc8")
    assert engine.plan.inputs[0].dtype == x.partition(":")[0]
    reads = [str(layer.inputs[0].format) for layer in engine.plan.layers if layer.type == "conv"]
    if c == 3 and x != "fp32:chw32":
        assert reads == [x] and not copies(engine)
    check(path, engine)


def test_alternatives_and_several_tensors(tmp_path):
    path = network(tmp_path / "two.onnx", two=True)
    engine = gr.build(path, device="h200", input_formats=["fp16:chw+hwc8", "fp32:chw"], output_formats={"y2": "fp16:chw2"})
    assert [str(i.format) for i in engine.plan.inputs] == ["fp16:hwc8", "fp32:chw"]
    assert [str(o.format) for o in engine.plan.outputs] == ["fp32:chw", "fp16:chw2"]
    each = [
        gr.build(path, device="h200", input_formats=[f, "fp32:chw"], output_formats={"y2": "fp16:chw2"})
        for f in ("fp16:chw", "fp16:hwc8")
    ]
    assert engine.plan.solution.total_us == min(e.plan.solution.total_us for e in each)
    check(path, engine)


INFOS = (TensorInfo("a", (1, 3, 4, 4), "fp32", (1, 3, 4, 4)), TensorInfo("b", (1, 8, 4, 4), "fp16", (1, 8, 4, 4)))


@pytest.mark.parametrize(
    "spec,expected",
    [
        (None, ["fp32:chw", "fp16:chw"]),
        ("chw16", ["fp32:chw16", "fp16:chw16"]),
        ("fp16:hwc8", ["fp16:hwc8"] * 2),
        ("uint8:hwc,chw", ["uint8:hwc", "fp16:chw"]),
        ("fp16:chw16+hwc8,chw2", ["fp16:chw16 fp16:hwc8", "fp16:chw2"]),
        ({"b": "fp32:hwc"}, ["fp32:chw", "fp32:hwc"]),
    ],
    ids=str,
)
def test_both_dialects(spec, expected):
    found = io_formats.resolve(spec, INFOS, "input")
    assert [" ".join(map(str, found[t.name])) for t in INFOS] == expected


WRONG = [
    ("nhwc", "unknown layout 'nhwc', expected one of chw, chw2, hwc"),
    ("fp16:", "unknown layout ''"),
    ("int8:chw32", "may have the type fp32, fp16, uint8, not 'int8'"),
    ("uint8:chw32", "uint8 comes as chw or hwc"),
    ("chw,chw,chw", r"3 for 2 inputs \(a, b\): give one for all, or one for each"),
    ({"c": "chw"}, "no input c; it has a, b"),
    ([1, 2], "expected text such as fp16:hwc8"),
]


@pytest.mark.parametrize("spec,message", WRONG, ids=str)
def test_what_is_wrong_is_said(spec, message):
    with pytest.raises(ValueError, match=message):
        io_formats.resolve(spec, INFOS, "input")


def test_outputs_are_not_uint8_and_alternatives_are_limited(tmp_path):
    with pytest.raises(ValueError, match="an output may have the type fp32, fp16, not 'uint8'"):
        io_formats.resolve("uint8:hwc", INFOS, "output")
    with pytest.raises(ValueError, match="more than 64 combinations"):
        path = network(tmp_path / "two.onnx", two=True)
        gr.build(path, device="h200", input_formats="+".join(LAYOUTS), output_formats="chw+hwc")


def test_wrong_dtype_of_an_array_names_the_right_one(folder):
    engine = gr.build(model(folder, 3, 16), device="h200", input_formats="uint8:hwc")
    with engine.context(device="emulator") as ctx, pytest.raises(ValueError, match=r"expected dtype uint8.*astype\(np.uint8\)"):
        ctx.run({"x": np.zeros((1, 3, 7, 9), np.float32)})


def test_command_line(tmp_path):
    path = network(tmp_path / "n.onnx", (3, 16))
    engine, layers = tmp_path / "n.engine", tmp_path / "layers.json"
    args = ["build", str(path), "-o", str(engine), "--device=h200", f"--exportLayerInfo={layers}"]
    done = CliRunner().invoke(program, [*args, "--inputIOFormats=uint8:hwc", "--outputIOFormats=fp16:chw16+hwc8"])
    assert done.exit_code == 0, done.output
    assert json.loads(layers.read_text())["Layers"][0]["Inputs"][0]["Format/Datatype"] == "Channel major UInt8 format"
    loaded = gr.load(engine)
    ends = str(loaded.plan.inputs[0].format), str(loaded.plan.outputs[0].format)
    assert ends[0] == "uint8:hwc" and ends[1] in ("fp16:chw16", "fp16:hwc8")
    check(path, loaded)
    np.save(tmp_path / "x.npy", image(loaded)["x"].astype(np.uint8))
    run = ["run", str(engine), f"--input=x={tmp_path / 'x.npy'}", f"--output={tmp_path / 'y.npz'}", "--emulate"]
    assert CliRunner().invoke(program, run).exit_code == 0
    assert np.load(tmp_path / "y.npz")["y"].dtype == np.float16
    bad = CliRunner().invoke(program, ["build", str(path), "--device=h200", "--inputIOFormats=nchw"])
    assert bad.exit_code != 0 and "unknown layout 'nchw'" in str(bad.exception)


REAL = {"squeezenet11_fp16": {}, "resnet20_cifar10": {"input": (1, 3, 32, 32)}}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_no_copy_before_published_networks(name):
    engine = gr.build(model_path(name), device="h200", shapes=REAL[name])
    assert not network_copies(engine)
    assert engine.plan.layers[0].tactic_name.startswith("conv_stem")


def network_copies(engine):
    """Copies of a network input."""
    names = {i.name for i in engine.plan.inputs}
    return [layer.name for layer in copies(engine) if layer.inputs[0].name in names]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2048])
def test_no_copy_before_the_digits_networks(batch):
    for name in ("dense", "sparse"):
        engine = gr.build(DIGITS / f"digits_{name}.onnx", sparsity="enable", device="h200", shapes={"x": (batch, 1, 8, 8)})
        assert not network_copies(engine)
        assert engine.plan.layers[0].tactic_name.startswith("conv_stem")
