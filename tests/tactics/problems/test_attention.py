"""Attention in one launch: both kernels' values beside the problem's meaning, what is offered, and inside networks."""

import numpy as np
import pytest

from cuda_kernels.device import ARCHITECTURES, named
from cuda_kernels.launch import Emulated
from cuda_kernels.named_devices import SMEM_PER_BLOCK
from gpu_runtime.precision import cliffs
from gpu_runtime.rewrites import attention
from tactics.candidates import candidates, rejected
from tactics.launches import launches
from tactics.problems import codec
from tactics.problems.attention import AttentionProblem, Operand
from tactics.problems.gather import ViewProblem
from tactics.problems.problem import MatmulProblem
from tactics.sampling.data import random_data, reference
from tests.attention_models import cross_covariance, of_convolutions, own_products, pooled_keys, tokens, windows
from tests.compiled import takes
from tests.engines import check_engine
from tests.problems import assert_right, assert_written_once, execute
from tests.reference_run import check_against_ort, model, network, node

DEVICE = named("h200")


def of_channels(b, heads, d, n, dk=0, unit=True) -> AttentionProblem:
    """Channels that attend to each other, all operands parts of one product's output [b * n, 3 * heads * d]."""
    c = heads * d
    q, k, v = (Operand(0, i * c, (n * 3 * c, d, 1, 3 * c)) for i in range(3))
    y = Operand(1, 0, (n * c, d, 1, c))
    return AttentionProblem(
        b, heads, d, d, n, n, ((b * n, 3 * c, 1, 1),), (b * n, c, 1, 1), q, k, v, y, unit=unit, epsilon=1e-12 if unit else 0.0
    )


def apart(b, heads, i, j, c, e) -> AttentionProblem:
    """Each operand a tensor of its own, [b, heads, rows, inner]; more keys than queries."""
    shapes = (b, heads, i, c), (b, heads, j, c), (b, heads, j, e)
    q, k, v, y = (Operand(t, 0, (heads * r * w, r * w, w, 1)) for t, (r, w) in enumerate(((i, c), (j, c), (j, e), (i, e))))
    return AttentionProblem(b, heads, i, j, c, e, shapes, (b, heads, i, e), q, k, v, y)


CHANNELS = {
    "one_tile": of_channels(1, 1, 5, 3),
    "vectors": of_channels(2, 3, 8, 70),
    "sixteen": of_channels(1, 4, 16, 300),
    "odd": of_channels(1, 4, 25, 196),
    "wide": of_channels(1, 2, 48, 49, unit=False),
    "widest": of_channels(1, 1, 128, 66),
    "long": of_channels(1, 1, 8, 1100),
    "own_tensors": apart(2, 3, 7, 20, 33, 18),
    "eighty": of_channels(2, 1, 80, 17),
}


def test_padding_is_written_or_a_format_refused():
    """Heads of 25 channels end with the output's own; the channels of another order have no one to write their padding."""
    p = CHANNELS["odd"]
    assert {t.out.layout for t in candidates(p, DEVICE)} == {"chw", "hwc8"}
    y = Operand(1, 0, (900, 1, 4, 100))
    turned = AttentionProblem(1, 4, 25, 25, 9, 9, ((9, 300, 1, 1),), (9, 100, 1, 1), p.q, p.k, p.v, y)
    assert {t.out.layout for t in candidates(turned, DEVICE)} == {"chw"}
    assert any("padded channels" in str(reason) for _, reason in rejected(turned, DEVICE))


@pytest.mark.parametrize("wrong", ["start", "step", "output", "size", "unread", "repeated"])
def test_a_problem_that_leaves_its_tensors_is_refused(wrong):
    data = codec.to_json(CHANNELS["sixteen"])
    if wrong == "start":
        data["v"]["start"] = 10**6
    elif wrong == "step":
        data["k"]["step"][3] = 10**5
    elif wrong == "output":
        data["y"]["step"][2] = 2
    elif wrong == "unread":  # whose formats would all be tried
        data["tensors"] *= 40
    elif wrong == "repeated":
        data["columns"], data["k"]["step"][2], data["v"]["step"][2] = 2**31 - 1, 0, 0
    else:
        data["rows"] = 0
    with pytest.raises(ValueError, match="attention"):
        codec.from_json(data)


# ---- networks


@pytest.mark.parametrize("sizes", [(1, 50, 4, 12), (2, 9, 3, 25), (1, 7, 1, 8)], ids=str)
def test_cross_covariance_is_one_option_that_computes_the_same(sizes):
    net = check_against_ort(cross_covariance(*sizes), 1e-4, rewrite=attention.offer)
    ((_, options),) = net.groups
    (op,) = [op for op in net.ops if isinstance(op.problem, AttentionProblem)]
    assert options == ("apart", "one") and op.problem.unit and len(op.inputs) == 1
    kept = [o for o in net.ops if not o.when]
    assert not any("ReduceL2" in n or "Softmax" in n for o in kept for n in o.nodes)


@pytest.mark.parametrize("sizes", [(1, 50, 4, 12), (2, 9, 3, 25)], ids=str)
def test_cross_covariance_is_one_launch(sizes, tmp_path):
    engine = check_engine(tmp_path, cross_covariance(*sizes))
    assert [layer.type for layer in engine.plan.layers if layer.tactic_name].count("attention") == 1
    assert not [layer for layer in engine.plan.layers if layer.type in ("gather", "normalize", "matmul") and layer.tactic_name]


def test_a_factor_before_the_rows_are_made_unit_is_not_the_scores():
    """x / |x| is the same for 3 x: what stands before the division does not scale what follows it."""
    nodes = [
        node("Mul", "x three", "q"),
        node("ReduceL2", "q", "l", axes=[3], keepdims=1),
        node("Clip", "l eps", "c"),
        node("Div", "q c", "n"),
        node("Transpose", "n", "t", perm=(0, 1, 3, 2)),
        node("MatMul", "n t", "s"),
        node("Softmax", "s", "a", axis=-1),
        node("MatMul", "a q", "y"),
    ]
    weights = {"three": np.float32(3), "eps": np.float32(1e-6)}
    net = check_against_ort(model(nodes, {"x": (1, 2, 9, 16)}, "y", weights), 1e-5, rewrite=attention.offer)
    assert any(isinstance(op.problem, AttentionProblem) for op in net.ops)


def test_it_is_not_offered_for_another_axis_or_without_a_second_product():
    def of(*nodes):
        return attention.offer(network(model([*nodes], {"x": (1, 2, 9, 9)}, "y")))

    first = node("MatMul", "x x", "s")
    assert not of(first, node("Softmax", "s", "y", axis=-1)).groups
    assert not of(first, node("Softmax", "s", "a", axis=2), node("MatMul", "a x", "y")).groups
    assert not of(first, node("Softmax", "s", "a", axis=-1), node("MatMul", "a s", "y")).groups
    assert of(first, node("Softmax", "s", "a", axis=-1), node("MatMul", "a x", "y")).groups


# ---- tokens


def of_tokens(b, heads, n, d, **more) -> AttentionProblem:
    """Tokens that attend to each other, all operands parts of one product's output [b * n, 3 * heads * d]."""
    c = heads * d
    q, k, v = (Operand(0, i * c, (n * 3 * c, d, 3 * c, 1)) for i in range(3))
    y = Operand(1, 0, (n * c, d, c, 1))
    return AttentionProblem(b, heads, n, n, d, d, ((b * n, 3 * c, 1, 1),), (b * n, c, 1, 1), q, k, v, y, **more)


def with_mask(b, heads, n, d) -> AttentionProblem:
    """A tensor [b, 1, n, n] is added beside a constant of each head and column."""
    p = of_tokens(b, heads, n, d)
    y = Operand(2, 0, p.y.step)
    mask = Operand(1, 0, (n * n, 0, n, 1))
    return AttentionProblem(b, heads, n, n, d, d, (*p.tensors, (b, 1, n, n)), p.out, p.q, p.k, p.v, y, mask, "cw")


TOKENS = {
    "one": of_tokens(1, 1, 1, 8),
    "few": of_tokens(2, 1, 5, 8),
    "window": of_tokens(3, 2, 49, 32, bias="chw"),
    "vit": of_tokens(1, 2, 197, 64),
    "odd": of_tokens(1, 2, 70, 20, bias="w", unit=True, epsilon=1e-6),
    "widest": of_tokens(1, 1, 100, 128),
    "masked": with_mask(2, 2, 40, 16),
    "own_tensors": apart(2, 3, 7, 90, 33, 18),
    "one_row": apart(1, 2, 1, 40, 16, 24),
    "windows": of_tokens(4, 1, 16, 16, bias="nhw"),
    "unit": of_tokens(1, 2, 65, 32, unit=True),
}


KERNELS = {"cross_covariance": CHANNELS, "attention": TOKENS}
SMEM = {"cross_covariance": SMEM_PER_BLOCK[90], "attention": min(SMEM_PER_BLOCK.values())}  # bytes that a block may take
CASES = [(kernel, name) for kernel, cases in KERNELS.items() for name in cases]


@pytest.mark.parametrize("kernel, name", CASES)
def test_values_and_counters(kernel, name):
    p = KERNELS[kernel][name]
    inputs, weights = random_data(p)
    tactics = [t for t in candidates(p, DEVICE) if t.kernel == kernel]
    assert tactics and codec.from_json(codec.to_json(p)) == p
    for tactic in tactics:
        gpu = Emulated(DEVICE)
        assert_right(p, tactic, execute(gpu, p, tactic, inputs, weights), reference(p, inputs, weights))
        if dict(launches(p, tactic)[0].values)["VECTOR"]:
            assert gpu.stats[0].excess_wavefronts == 0, gpu.stats[0].excess
    assert_written_once(p, tactics[0], DEVICE, inputs, weights)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("kernel, name", CASES)
def test_attention_compiles_without_spills(kernel, name, sm):
    tactic = next(t for t in candidates(KERNELS[kernel][name], DEVICE) if t.kernel == kernel)
    (launch,) = launches(KERNELS[kernel][name], tactic)
    assert takes(launch.kernel, launch.values, sm).regs * launch.block[0] <= 65536
    assert launch.smem <= SMEM[kernel]


def test_whole_turns_may_be_out_of_reach():
    """A maximum of minus infinity, as long as nothing can be attended to, makes no NaN of what follows."""
    p = TOKENS["odd"]
    inputs, weights = random_data(p)
    weights["bias"] = np.where(np.arange(70) < 40, -np.inf, np.linspace(-1, 1, 70)).astype(np.float32)
    for tactic in candidates(p, DEVICE):
        assert_right(p, tactic, execute(Emulated(DEVICE), p, tactic, inputs, weights), reference(p, inputs, weights))


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(12))
def test_drawn_cases(seed):
    """Heads, widths off the grid, tokens from 1 to 200, batches: every kernel and format that takes them."""
    draw = np.random.default_rng(seed)
    b, heads, n = (int(draw.integers(1, most)) for most in (3, 4, 201))
    d, unit = int(draw.integers(1, 129 if n < 80 else 40)), bool(draw.integers(2))
    make = of_channels if draw.integers(2) and d <= 48 else of_tokens
    p = make(b, heads, d, n, unit=unit) if make is of_channels else make(b, heads, n, d, unit=unit, bias=("", "hw")[n % 2])
    inputs, weights = random_data(p)
    for tactic in candidates(p, DEVICE):
        assert_right(p, tactic, execute(Emulated(DEVICE), p, tactic, inputs, weights), reference(p, inputs, weights))


# fmt: off
NETWORKS = {
    "vit": lambda: tokens(), "vit_batch": lambda: tokens(b=2, n=70, heads=3, d=10), "roots": lambda: tokens(root=True),
    "bias": lambda: tokens(bias=np.random.default_rng(1).standard_normal((1, 2, 50, 50)).astype(np.float32)),
    "one_bias": lambda: tokens(bias=np.full((1, 1, 1, 1), 0.5, np.float32)), "mask": lambda: tokens(b=2, masked=True),
    "pvt": lambda: pooled_keys(), "pvt_batch": lambda: pooled_keys(b=2), "mobilevit": lambda: own_products(),
    "mobilevit_batch": lambda: own_products(b=2), "yolo": lambda: of_convolutions(), "yolo_batch": lambda: of_convolutions(b=2),
    "swin": lambda: windows(shifted=False), "swin_shifted": lambda: windows(),
    "swin_batch": lambda: windows(b=2, shifted=False),
}
# fmt: on


@pytest.mark.parametrize("name", NETWORKS)
def test_attention_is_one_launch_and_moves_nothing(name, tmp_path):
    """Both options compute the same; in the plan no product, softmax or scale is left, and no move but of windows, or of images
    to the second axis, where other products read them."""
    proto = NETWORKS[name]()
    assert len(check_against_ort(proto, 1e-4, rewrite=attention.offer).groups) == 1
    layers = [layer for layer in check_engine(tmp_path, proto).plan.layers if layer.tactic_name]
    kinds = [layer.type for layer in layers if layer.type != "reformat"]
    assert kinds.count("conv") == (4 if name.startswith("pvt") else 2)  # three products of one tensor are one
    assert kinds.count("attention") == 1 and not {"matmul", "normalize", "pointwise", "move"} & set(kinds)
    assert kinds.count("gather") == (2 if "swin" in name or name == "mobilevit_batch" else 0)


def test_what_others_read_stays_and_other_functions_are_no_attention():
    """A function of the scores that is none of these; what others read as well stays beside the one launch."""
    first, a = node("MatMul", "x x", "s"), node("Softmax", "s", "a", axis=-1)
    both = attention.offer(network(model([first, a, node("MatMul", "a x", "y")], {"x": (1, 2, 9, 9)}, "y a")))
    kept = [op.name for op in both.ops if not op.when]
    assert kept == ["s", "a"] and both.groups  # the softmax is an output: it stays beside the one launch
    tripled = [first, node("Tanh", "s", "t"), node("Softmax", "t", "a", axis=-1), node("MatMul", "a x", "y")]
    assert not attention.offer(network(model(tripled, {"x": (1, 2, 9, 9)}, "y"))).groups


def test_what_rounding_ruins_is_apart():
    """The one launch gives what a view behind the second product does: it is that product which is to read FP32 then, and it
    does so by itself."""
    net = network(own_products())
    ((op,),) = [[op for op in attention.offer(net).ops if isinstance(op.problem, AttentionProblem)]]
    (view,) = net.producers[op.output]
    grown, _ = cliffs.heed(net, [(op.output, "far off")])
    assert isinstance(view.problem, ViewProblem) and view.output not in grown.exact_outputs
    assert [o.name for o in grown.ops if isinstance(o.problem, MatmulProblem) and o.exact] == ["o"]
    assert not attention.offer(grown).groups
