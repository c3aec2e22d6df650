"""Pointwise operators and their chains beside onnxruntime: what they mean, what becomes one launch, engines of them."""

import math
import random

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from gpu_runtime.errors import ModelError
from tactics.candidates import candidates
from tactics.problems import codec
from tactics.problems.gather import ViewProblem
from tactics.problems.pointwise_ops import ACTIVATIONS, FUNCTIONS, Stage
from tactics.problems.problem import ConvProblem, PointwiseProblem
from tactics.sampling.data import random_data, reference
from tests.engines import emulated
from tests.problems import POINTWISE, assert_right, execute
from tests.reference_run import check_against_ort, feeds_for, model, network, node, ort_run, relative_error, run

rng = np.random.default_rng(11)
SHAPE = (2, 6, 5, 4)
# fmt: off
OTHER = {
    "same": SHAPE, "channel": (6, 1, 1), "scalar": (), "one": (1,), "nc": (2, 6, 1, 1), "nhw": (2, 1, 5, 4), "row": (5, 1),
    "column": (4,), "image": (2, 1, 1, 1), "pixels": (1, 1, 5, 4), "chw": (6, 5, 4),
}
# fmt: on


def stages(op) -> list[str]:
    return [str(s) for s in op.problem.stages]


def chain(proto, bound=1e-5, low=-1.0):
    """The stages of a model that must become one pointwise problem (and views) and agree with onnxruntime."""
    (op,) = [op for op in check_against_ort(proto, bound, low).ops if not isinstance(op.problem, ViewProblem)]
    assert isinstance(op.problem, PointwiseProblem)
    return stages(op)


# ---- operators


@pytest.mark.sample(100)
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"])
@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("computed", [False, True])
def test_operations_broadcast(op, other, swap, computed):
    shape = OTHER[other]
    inputs: dict[str, tuple[int, ...]] = {"x": SHAPE}
    w = {}
    if computed:
        inputs["z"] = shape
    else:
        w["z"] = rng.uniform(0.5, 2, shape).astype(np.float32)
    nodes = [node(op, "z x" if swap else "x z", "y"), node("Tanh", "y", "v")]
    low = 0.2 if op in ("Pow", "Div") else -1
    chain(model(nodes, inputs, "v", w), low=low)


@pytest.mark.parametrize(
    "op, opset, attributes, low",
    [
        *(
            (op, 17, {}, -1)
            for op in (
                "Abs",
                "Ceil",
                "Elu",
                "Erf",
                "Exp",
                "Floor",
                "HardSwish",
                "Neg",
                "Round",
                "Sign",
                "Softplus",
                "Softsign",
                "Relu",
                "Sigmoid",
                "Tanh",
                "HardSigmoid",
                "LeakyRelu",
                "Selu",
                "Celu",
                "ThresholdedRelu",
            )
        ),
        *((op, 17, {}, 0.1) for op in ("Log", "Sqrt", "Reciprocal")),
        ("Elu", 7, {"alpha": 0.7}, -1),
        ("Celu", 17, {"alpha": 0.3}, -1),
        ("Selu", 17, {"alpha": 1.5, "gamma": 0.9}, -1),
        ("ThresholdedRelu", 17, {"alpha": 0.3}, -1),
        ("Mish", 18, {}, -1),
        ("Gelu", 20, {}, -1),
        ("Gelu", 20, {"approximate": "tanh"}, -1),
    ],
)
def test_functions(op, opset, attributes, low):
    x = node("Mul", "x k", "a")
    chain(model([x, node(op, "a", "y", **attributes)], {"x": SHAPE}, "y", {"k": np.float32(6)}, opset), low=low)


@pytest.mark.parametrize("exponent, meaning", [(2, "square"), (0.5, "sqrt"), (3, "pow(3)"), (-1.5, "pow(-1.5)")])
def test_powers(exponent, meaning):
    assert chain(model([node("Pow", "x p", "y")], {"x": SHAPE}, "y", {"p": np.float32(exponent)}), low=0.2) == [meaning]


@pytest.mark.parametrize("slope", [(6, 1, 1), (1,), (1, 1, 1), (5, 1), (2, 6, 5, 4)])
@pytest.mark.parametrize("computed", [False, True])
def test_prelu(slope, computed):
    inputs = {"x": SHAPE} | ({"s": slope} if computed else {})
    w = {} if computed else {"s": rng.standard_normal(slope).astype(np.float32)}
    chain(model([node("PRelu", "x s", "y")], inputs, "y", w))


@pytest.mark.parametrize("shape", [(2, 3, 5, 3), (2, 3, 3), (2, 3)])
def test_slopes_before_opset_7_are_per_channel(shape):
    slope = np.float32([0.5, -1, 2])
    net = network(model([node("PRelu", "x s", "y")], {"x": shape}, "y", {"s": slope}, opset=6))
    x = rng.standard_normal(shape).astype(np.float32)
    by_channel = slope.reshape(-1, *(1,) * (len(shape) - 2))
    assert np.allclose(run(net, {"x": x})["y"], np.where(x < 0, x * by_channel, x))


@pytest.mark.parametrize("axis, shape", [(1, (3,)), (1, (3, 5)), (2, (5, 4)), (0, (2, 3))])
def test_operations_before_opset_7_broadcast_along_an_axis(axis, shape):
    z = rng.standard_normal(shape).astype(np.float32)
    net = network(model([node("Mul", "x z", "y", broadcast=1, axis=axis)], {"x": (2, 3, 5, 4)}, "y", {"z": z}, opset=6))
    x = rng.standard_normal((2, 3, 5, 4)).astype(np.float32)
    aligned = z.reshape((1,) * axis + shape + (1,) * (4 - axis - len(shape)))
    assert np.allclose(run(net, {"x": x})["y"], x * aligned)


@pytest.mark.parametrize("opset", [6, 9, 11, 13])
def test_clip_has_its_bounds_as_attributes_or_inputs(opset):
    w = {"lo": np.float32(-0.25), "hi": np.float32(0.5)}
    if opset < 11:
        clip, w = node("Clip", "x", "y", min=-0.25, max=0.5), {}
    else:
        clip = node("Clip", "x lo hi", "y")
    proto = model([clip], {"x": SHAPE}, "y", w, opset)
    assert chain(proto) == ["clip(-0.25,0.5)"]


def test_clip_by_computed_bounds():
    nodes = [node("Clip", "x lo hi", "y")]
    net = network(model(nodes, {"x": SHAPE, "lo": (), "hi": ()}, "y"))
    assert stages(net.ops[0]) == ["max(t1)", "min(t2)"]
    x = rng.standard_normal(SHAPE).astype(np.float32)
    y = run(net, {"x": x, "lo": np.float32(-0.5), "hi": np.float32(0.25)})["y"]
    assert np.array_equal(y, np.clip(x, -0.5, 0.25))


@pytest.mark.parametrize("op", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_inputs(op, count):
    inputs = {f"x{i}": SHAPE if i % 2 == 0 else (1, 6, 1, 1) for i in range(count)}
    net = check_against_ort(model([node(op, " ".join(inputs), "y")], inputs, "y"), 1e-5)
    assert len(net.ops) == 1


RANKS = [((4, 7), (7,)), ((4, 7), (4, 1)), ((2, 3, 9), (2, 3, 1)), ((2, 3, 9), (1, 3, 1)), ((5,), (1,))]


@pytest.mark.parametrize("shape, other", [*RANKS, ((2, 3, 4, 2, 5), (1, 3, 1, 1, 1)), ((2, 3, 4, 2, 5), (4, 2, 1))])
def test_other_ranks(shape, other):
    chain(model([node("Mul", "x z", "y")], {"x": shape, "z": other}, "y"))
    chain(model([node("Add", "x c", "y")], {"x": shape}, "y", {"c": rng.standard_normal(other).astype(np.float32)}))


@pytest.mark.parametrize("other", [(3, 4, 1, 1), (2, 1, 4, 5, 1), (3, 1, 5, 6), (1, 1, 4, 1, 1), (2, 3, 1, 5, 1)], ids=str)
def test_any_axes_of_rank_5_may_be_repeated(other):
    """As a mask for each window of an attention; constants too."""
    nodes = [node("Mul", "x o", "p"), node("Add", "p c", "y")]
    c = rng.uniform(-1, 1, other).astype(np.float32)
    assert chain(model(nodes, {"x": (2, 3, 4, 5, 6), "o": other}, "y", {"c": c})) == ["mul(t1)", "add(c0)"]


def test_five_runs_of_axes_are_refused():
    shapes = {"x": (2, 3, 4, 5, 6), "a": (2, 1, 4, 1, 6), "b": (2, 3, 1, 1, 1)}
    with pytest.raises(ModelError, match=r"2, 1, 4, 1, 6.* broadcast to \[2, 3, 4, 5, 6\] along 5 runs of axes; expected 4"):
        network(model([node("Mul", "x a", "p"), node("Add", "p b", "y")], shapes, "y"))


def test_both_sides_may_be_repeated():
    net = check_against_ort(model([node("Add", "a b", "y")], {"a": (2, 6, 1, 1), "b": (1, 1, 5, 4)}, "y"), 1e-5)
    assert net.ops[0].problem.tensors == ("nc", "hw") and net.ops[0].problem.out_shape == SHAPE


# ---- functions that exporters write in several nodes

# fmt: off
NUMBERS = {
    "half": 0.5, "one": 1, "root2": math.sqrt(2), "three": 3, "six": 6, "zero": 0, "sixth": 1 / 6, "c": 0.044715,
    "k": math.sqrt(2 / math.pi), "cube": 3,
}
# fmt: on
SCALARS = {name: np.float32(value) for name, value in NUMBERS.items()}
# fmt: off
SPELLINGS = {
    "silu": [["Sigmoid x a", "Mul x a y"], ["Sigmoid x a", "Mul a x y"], ["Neg x n", "Exp n e", "Add e one d", "Div x d y"]],
    "mish": [["Softplus x s", "Tanh s t", "Mul x t y"], ["Exp x e", "Add one e f", "Log f s", "Tanh s t", "Mul t x y"]],
    "gelu": [
        ["Div x root2 d", "Erf d e", "Add e one f", "Mul x f g", "Mul g half y"],
        ["Mul x half h", "Div x root2 d", "Erf d e", "Add one e f", "Mul h f y"],
    ],
    "gelu_tanh": [
        ["Pow x cube p", "Mul p c q", "Add x q r", "Mul r k s", "Tanh s t", "Add t one u", "Mul x half v", "Mul v u y"],
        ["Mul x x o", "Mul o x p", "Mul c p q", "Add x q r", "Mul k r s", "Tanh s t", "Add t one u", "Mul x u v",
         "Mul half v y"],
    ],
    "hard_swish": [
        ["HardSigmoid x s", "Mul x s y"],
        ["Add x three a", "Clip a zero six b", "Mul x b c1", "Div c1 six y"],
        ["Add x three a", "Clip a zero six b", "Div b six d", "Mul d x y"],
        ["Add x three a", "Clip a zero six b", "Mul b sixth d", "Mul x d y"],
    ],
    "hard_sigmoid(0.166667,0.5)": [["Add x three a", "Clip a zero six b", "Div b six y"]],
    "softplus": [["Exp x e", "Add e one f", "Log f y"]],
    "softsign": [["Abs x a", "Add a one b", "Div x b y"]],
    "sigmoid": [["Neg x n", "Exp n e", "Add e one d", "Reciprocal d y"]],
}
# fmt: on


def spelled(lines, x="x", y="y"):
    attributes = {"HardSigmoid": {"alpha": 1 / 6, "beta": 0.5}}
    for line in lines:
        op, *names = [{"x": x, "y": y}.get(n, n) for n in line.split()]
        yield node(op, " ".join(names[:-1]), names[-1], **attributes.get(op, {}))


@pytest.mark.parametrize("meaning, lines", [(m, lines) for m, ways in SPELLINGS.items() for lines in ways])
def test_spelled_functions_are_recognised(meaning, lines):
    nodes = [node("MaxPool", "z", "x", kernel_shape=(1, 1)), *spelled(lines)]
    net = check_against_ort(model(nodes, {"z": SHAPE}, "y", SCALARS, 17), 1e-4)
    assert stages(net.ops[-1]) == [meaning] and len(net.ops) == 2
    # Another reader of the input prevents no fusion; a reader of an inner value does.
    net = check_against_ort(model([*nodes, node("Neg", "x", "more")], {"z": SHAPE}, "y more", SCALARS, 17), 1e-4)
    assert [meaning] in [stages(op) for op in net.ops[1:]]
    inner = nodes[1].output[0]
    net = check_against_ort(model([*nodes, node("Neg", inner, "more")], {"z": SHAPE}, "y more", SCALARS, 17), 1e-4)
    assert [meaning] not in [stages(op) for op in net.ops[1:]]


def test_epilogues_take_what_is_spelled_and_they_know():
    w = SCALARS | {"w": rng.standard_normal((6, 6, 1, 1)).astype(np.float32)}
    wanted = {"hard_swish": 1, "silu": 0, "gelu": 0, "gelu_tanh": 0, "mish": 1}
    for meaning, lines in ((meaning, SPELLINGS[meaning][i]) for meaning, i in wanted.items()):
        net = check_against_ort(model([node("Conv", "z w", "x"), *spelled(lines)], {"z": SHAPE}, "y", w, 17), 1e-3)
        assert [str(op.problem.epilogue.act) for op in net.ops] == [meaning]
    net = check_against_ort(model([node("Conv", "z w", "x"), node("Softsign", "x", "y")], {"z": SHAPE}, "y", w, 17), 1e-3)
    assert [type(op.problem) for op in net.ops] == [ConvProblem, PointwiseProblem]


def test_almost_a_function_is_not_that_function():
    w = SCALARS | {"three": np.float32(2.9)}
    assert len(chain(model(list(spelled(SPELLINGS["hard_swish"][1])), {"x": SHAPE}, "y", w, 17))) == 4


# ---- chains


def test_a_chain_is_one_launch():
    w = {"c": rng.standard_normal((6, 1, 1)).astype(np.float32), "three": np.float32(3)}
    nodes = [
        node("Mul", "x c", "a"),
        node("Add", "z a", "b"),
        node("Relu", "b", "d"),
        node("Sub", "three d", "e"),
        node("Mul", "e s", "f"),
        node("Clip", "f _ three", "g"),
        node("Max", "x g", "y"),
    ]
    proto = model(nodes, {"x": SHAPE, "z": SHAPE, "s": (2, 6, 1, 1)}, "y", w)
    net = check_against_ort(proto, 1e-5)
    (op,) = net.ops
    assert stages(op) == ["mul(c0)", "add(t1)", "relu", "rsub(3)", "mul(t2)", "clip(-3.40282e+38,3)", "max(t0)"]
    assert op.inputs == ("x", "z", "s") and op.nodes == tuple("abdefgy")
    assert op.problem.tensors == ("nchw", "nchw", "nc") and op.problem.constants == ("c",)


def test_a_chain_ends_where_another_reads():
    nodes = [node("Relu", "x", "a"), node("Exp", "a", "b"), node("Neg", "b", "y"), node("Abs", "b", "z")]
    net = check_against_ort(model(nodes, {"x": SHAPE}, "y z"), 1e-5)
    assert [op.name for op in net.ops] == ["a + b", "y", "z"]
    net = check_against_ort(model(nodes[:3], {"x": SHAPE}, "b y"), 1e-5)
    assert [op.name for op in net.ops] == ["a + b", "y"]


def test_long_chains_are_cut():
    nodes = [node(("Tanh", "Abs", "Neg")[i % 3], f"v{i}", f"v{i + 1}") for i in range(20)]
    net = check_against_ort(model(nodes, {"v0": SHAPE}, "v20"), 1e-5)
    assert [len(op.problem.stages) for op in net.ops] == [8, 8, 4]
    inputs = {f"x{i}": SHAPE for i in range(9)}
    net = check_against_ort(model([node("Max", " ".join(inputs), "y")], inputs, "y"), 1e-5)
    assert [len(op.inputs) for op in net.ops] == [6, 4]


def test_a_residual_add_stays_with_its_convolution():
    """The Add could end the chain before it; in the convolution's epilogue it costs less, so that choice stays open."""
    w = {"w": rng.standard_normal((6, 6, 1, 1)).astype(np.float32), "c": rng.standard_normal((6, 1, 1)).astype(np.float32)}
    chain = [node("Exp", "x", "e"), node("Mul", "e c", "u")]
    conv = [node("Conv", "x w", "v"), node("Sigmoid", "v", "s"), node("Mul", "s v", "t")]
    for nodes in ([*chain, *conv], [*conv, *chain]):
        nodes = [*nodes, node("Add", "u t", "y")]
        net = check_against_ort(model(nodes, {"x": SHAPE}, "y", w), 1e-3)
        assert net.groups == (("y", ("apart", "into v")),)


def test_problems_survive_json():
    three = Stage("clip", params=(0.0, 6.0)), Stage("mul", "t1"), Stage("add", "c0")
    p = PointwiseProblem(2, 6, 5, 4, three, ("nchw", "nc"), ("c",))
    assert codec.from_json(codec.to_json(p)) == p
    assert str(p) == "pointwise n2 c6 h5 w4 stagesclip(0,6),mul(t1),add(c0) tensorsnchw,nc constantsc"


def test_wrong_chains_are_refused():
    with pytest.raises(ValueError, match="unknown pointwise op 'cube'"):
        Stage("cube")
    with pytest.raises(ValueError, match="clip: 2 parameters expected"):
        Stage("clip", params=(1.0,))
    with pytest.raises(ValueError, match=r"add\(t1\) reads an unknown tensor, expected one of t0"):
        PointwiseProblem(1, 1, 1, 1, (Stage("add", "t1"),))
    with pytest.raises(ValueError, match="axes are written in the order nchw"):
        PointwiseProblem(1, 1, 1, 1, (), ("cn",))


# ---- engines


def engine_error(proto, tmp_path, **options) -> tuple:
    """(largest relative error of the outputs beside onnxruntime, the engine), run by the kernels in the emulator."""
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    engine = gr.build(path, device="h200", **options)
    feeds = feeds_for(network(path))
    feeds = {name: x.astype(np.float16).astype(np.float32) for name, x in feeds.items()}
    expected = ort_run(path, feeds)
    got = emulated(engine, feeds)
    return max(relative_error(got[name], y) for name, y in expected.items()), engine


def squeeze_excite():
    w = {"w1": (8, 24, 1, 1), "b1": (8,), "w2": (24, 8, 1, 1), "b2": (24,), "w": (24, 24, 3, 3), "p": (16, 24, 1, 1)}
    w = {name: rng.standard_normal(s) / np.sqrt(np.prod(s[1:])) for name, s in w.items()}
    w = {name: a.astype(np.float16).astype(np.float32) for name, a in w.items()}
    nodes = [
        node("Conv", "x w", "c", pads=(1, 1, 1, 1)),
        node("HardSwish", "c", "h"),
        node("GlobalAveragePool", "h", "g"),
        node("Conv", "g w1 b1", "s1"),
        node("Relu", "s1", "s2"),
        node("Conv", "s2 w2 b2", "s3"),
        node("HardSigmoid", "s3", "s4", alpha=1 / 6),
        node("Mul", "h s4", "m"),
        node("Conv", "m p", "y"),
    ]
    return model(nodes, {"x": (2, 24, 7, 9)}, "y", w)


def test_squeeze_excite_runs(tmp_path):
    error, engine = engine_error(squeeze_excite(), tmp_path)
    kinds = [layer.type for layer in engine.plan.layers if layer.nodes]
    assert error < 2e-3 and kinds == ["conv", "squeeze_excite", "conv"]
    assert engine.plan.layers[-1].problem.prologue.gated


def test_chains_of_all_kinds_run(tmp_path):
    w = {"by": rng.standard_normal((5, 1, 1)).astype(np.float32), "map": rng.standard_normal((1, 1, 6, 7)).astype(np.float32)}
    nodes = [
        *spelled(SPELLINGS["gelu"][1], "x", "a"),
        node("Mul", "a by", "b"),
        node("Add", "b map", "s"),
        node("Max", "s z", "t"),
        node("Exp", "t", "y"),
        node("Mish", "z", "m"),
        node("Sub", "m x", "v"),
    ]
    proto = model(nodes, {"x": (1, 5, 6, 7), "z": (1, 5, 1, 1)}, "y v", SCALARS | w, opset=18)
    error, engine = engine_error(proto, tmp_path)
    assert error < 2e-3 and sum(layer.type == "pointwise" for layer in engine.plan.layers) == 2
    info = engine.layer_info()["Layers"]
    operations = [line for layer in info for line in layer.get("Operations", ())]
    assert "const auto var3 = max(var2, arg1);" in operations


def test_random_data_suits_the_functions():
    """Timing verifies every tactic on random data: a reference of NaN or infinity would let nothing pass."""
    for name, problem in POINTWISE.items():
        assert np.isfinite(reference(problem, *random_data(problem))).all(), name


# ---- drawn problems


def drawn(seed: int) -> PointwiseProblem:
    """A chain of up to 8 stages over up to 4 tensors and 2 constants, each spanning some of the axes."""
    pick = random.Random(seed)
    dims = [pick.choice(sizes) for sizes in ((1, 2, 3), (1, 3, 8, 20, 40, 65), (1, 2, 5), (1, 3, 4, 7))]
    axes = [("nchw" if pick.random() < 0.5 else "".join(a for a in "nchw" if pick.random() < 0.5)) for _ in range(4)]
    tensors, constants = tuple(axes[: pick.randint(1, 4)]), tuple(a for a in axes[2 : 2 + pick.randint(0, 2)] if a)
    operands = ["", *(f"t{i}" for i in range(len(tensors))), *(f"c{i}" for i in range(len(constants)))]
    wild = ("none", "prelu", "table", "exp", "log", "sqrt", "square", "erf")
    tame = [op for op in (*ACTIVATIONS, *FUNCTIONS) if op not in wild]
    chosen = []
    for _ in range(pick.randint(0, 8)):
        if pick.random() < 0.5:
            op, operand = pick.choice(("add", "sub", "rsub", "mul", "max", "min", "prelu")), pick.choice(operands)
            chosen.append(Stage(op, operand, () if operand else (round(pick.uniform(-1, 1), 2),)))
        else:
            op = pick.choice(tame)
            count = len((ACTIVATIONS | FUNCTIONS)[op].parameters)
            chosen.append(Stage(op, "", tuple(sorted(round(pick.uniform(-1, 1), 2) for _ in range(count)))))
    smooth = [s for s in chosen if s.op not in ("ceil", "floor", "round", "sign", "thresholded_relu")]  # no jumps
    return PointwiseProblem(*dims, tuple(smooth), tensors, constants)


def check_drawn(seed: int, count: int | None = None) -> None:
    """`count` of its tactics, or each."""
    problem = drawn(seed)
    device = named("h200")
    inputs, weights = random_data(problem)
    expected = reference(problem, inputs, weights)
    tactics = candidates(problem, device)
    for tactic in random.Random(seed).sample(tactics, count or len(tactics)):
        assert_right(problem, tactic, execute(Emulated(device), problem, tactic, inputs, weights), expected)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_chains(seed):
    check_drawn(seed, 2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_drawn_chains(seed):
    check_drawn(seed)
