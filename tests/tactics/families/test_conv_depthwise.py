"""Depthwise convolution: every case against the reference with all checks on, its counters, binaries, and whole networks."""

import random
from collections import Counter
from functools import lru_cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import gpu_runtime as gr
from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import ARCHITECTURES, NAMED, named
from cuda_kernels.launch import Emulated
from cuda_kernels.rates import rates
from tactics.candidates import at_edges, candidates, rejected
from tactics.families import conv_depthwise
from tactics.families.conv_depthwise import HWC_PATCHES, LINEAR_PATCHES, STAGED_PATCHES, VECTOR_PATCHES
from tactics.format import Format, num_bytes
from tactics.launches import launches, pack_weights
from tactics.predict import predict, predict_us
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.sampling.data import random_data, reference
from tactics.step import linear
from tactics.tactic import Patch, Tactic
from tests.compiled import fits, measured, takes
from tests.conftest import model_path
from tests.engines import emulated
from tests.ort_budget import budgets
from tests.problems import DEPTHWISE, assert_right, assert_written_once, depthwise, execute

pytestmark = pytest.mark.slow

DEVICE = named("h200")
halo, threads, weight_bytes = conv_depthwise.halo, conv_depthwise.threads, conv_depthwise.weight_bytes
LIMITS = {3: 1.15, 5: 1.20, 7: 1.25}


def tactic(problem, patch, x="hwc16", y="hwc16"):
    x, y = Format("fp16", x), Format("fp16", y)
    return Tactic("conv_depthwise", patch, (x, y) if problem.epilogue.residual else (x,), y)


@lru_cache
def data(problem):
    """(inputs, weights, expected), drawn and computed once."""
    inputs, weights = random_data(problem)
    return inputs, weights, reference(problem, inputs, weights)


def run(problem, t, **options):
    """(output with padding, record of the launch) in the emulator, after comparing with the reference."""
    inputs, weights, expected = data(problem)
    gpu = Emulated(DEVICE, **options)
    got = execute(gpu, problem, t, inputs, weights)
    assert_right(problem, t, got, expected)
    (stats,) = gpu.stats
    return got, stats


def drawn(problem):
    """One linear tactic, one on tensor cores, one whose patch is staged, and two of unlike layouts on vectors, with one shape
    of patches per side (one binary each)."""
    found = sorted(candidates(problem, DEVICE))
    assert found and all(t.kernel == "conv_depthwise" for t in found)
    rows = random.Random(str(problem)).sample(found, len(found))
    vectors = [t for t in rows if t.tile in VECTOR_PATCHES]
    one = [t for t in vectors if t.tile == vectors[0].tile]
    tensor = [t for t in rows if t.tile.mma][:1]
    staged = [t for t in rows if t.tile in STAGED_PATCHES][:1]
    return [next(t for t in rows if linear(t.out)), *tensor, *staged, *{(t.ins[0], t.out): t for t in one}.values()][:5]


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", DEPTHWISE)
def test_against_the_reference(name):
    problem = DEPTHWISE[name]
    for t in drawn(problem):
        _, stats = run(problem, t)
        loads = {kind: n for kind, n in stats.excess.items() if not (t.tile.mma and kind == "store")}
        assert not any(loads.values()), f"bank conflicts: {loads}"
        assert bool(stats.mma) == t.tile.mma and not stats.mma_sp
        if problem.c % 16 == 0 and problem.k % 16 == 0 and not linear(t.out) and not t.tile.mma:
            assert stats.sectors == stats.ideal_sectors


@pytest.mark.parametrize("x,y", [("chw16", "hwc8"), ("hwc8", "chw16"), ("chw2", "chw"), ("chw", "hwc"), ("hwc", "chw2")])
@pytest.mark.parametrize("name", ["depthwise_asymmetric", "depthwise_x3"])
def test_formats_of_the_networks_edge(name, x, y):
    """The same binaries on the formats that only a network's inputs and outputs have."""
    problem, around = DEPTHWISE[name], [Format("fp16", layout) for layout in (x, y)]
    compiled = {t.tile for t in drawn(problem)}
    near = [v for t in candidates(problem, DEVICE) if t.tile in compiled for v in at_edges(t, [around], around)]
    run(problem, next(v for v in near if [*v.ins, v.out] == around))


@pytest.mark.long
@pytest.mark.parametrize("name", DEPTHWISE)
def test_every_tactic_against_the_reference(name):
    for t in candidates(DEPTHWISE[name], DEVICE):
        run(DEPTHWISE[name], t)


@pytest.mark.parametrize("options", [{"async_mode": "late"}, {"seed": 1}, {"seed": 3, "threads": 1}], ids=str)
@pytest.mark.parametrize("name", ["depthwise_stride", "depthwise_asymmetric", "depthwise_x5"])
def test_modes_and_orders_agree_bit_for_bit(name, options):
    for t in drawn(DEPTHWISE[name]):
        assert np.array_equal(run(DEPTHWISE[name], t)[0], run(DEPTHWISE[name], t, **options)[0])


@pytest.mark.parametrize("name", ["depthwise_stride", "depthwise_asymmetric", "depthwise_larger_dilation", "depthwise_x3"])
def test_each_output_byte_is_written_once(name):
    problem = DEPTHWISE[name]
    for t in drawn(problem):
        assert_written_once(problem, t, DEVICE, *data(problem)[:2])


# ---- bytes


def tensors(problem, t):
    """Bytes of the input and the output."""
    return num_bytes(t.ins[0], problem.in_shapes[0]) + num_bytes(t.out, problem.out_shape)


def covered(problem, t, stats):
    """Block-unique bytes of input and output over the tensors': what blocks read of weights and bias taken off."""
    blocks = launches(problem, t)[0].grid[0]
    weights = blocks * min(t.tile.channels, problem.k) * (problem.r * problem.s * 2 + 4)
    return (stats.block_unique_bytes - weights) / tensors(problem, t)


@pytest.mark.parametrize("layouts", [("hwc8", "hwc8"), ("hwc16", "chw32"), ("chw32", "hwc8")], ids="-".join)
@pytest.mark.parametrize("reach", LIMITS)
def test_bytes_and_sectors(reach, layouts):
    """Of the tactic that is predicted to be fastest, at 56 x 56: sectors are whole, halos small, DRAM moves everything once."""
    pad = reach // 2
    problem = depthwise(1, 64, 56, 56, reach, reach, pad=(pad,) * 4, bias=True, act=Activation("relu"))
    tactics = [t for t in candidates(problem, DEVICE) if (t.ins[0].layout, t.out.layout) == layouts]
    t = min(tactics, key=lambda t: (predict_us(problem, t, DEVICE), t.name))
    _, stats = run(problem, t)
    assert stats.sectors == stats.ideal_sectors or t.tile.mma
    assert covered(problem, t, stats) <= (4 * LIMITS[reach] - 3 if t.tile in STAGED_PATCHES else LIMITS[reach])
    assert stats.launch_unique_bytes <= 1.02 * (tensors(problem, t) + weight_bytes(problem))


@pytest.mark.parametrize("patch", HWC_PATCHES, ids=str)
def test_halo_is_what_the_emulator_counts(patch):
    problem = depthwise(1, 64, 41, 33, 3, 3, pad=(1, 1, 1, 1), bias=True)
    t = tactic(problem, patch)
    _, stats = run(problem, t)
    assert patch.mma or stats.sectors == stats.ideal_sectors and stats.excess_wavefronts == 0
    assert covered(problem, t, stats) == pytest.approx(halo(problem, patch), abs=1e-9)


@pytest.mark.parametrize("dilation", [2, 3])
def test_a_dilated_window_reads_no_more_than_a_dense_one(dilation):
    """Interleaved convolutions share no pixel, so their blocks' halos are those of smaller images."""
    problem = depthwise(1, 16, 48, 48, 3, 3, pad=(dilation,) * 4, dilation=(dilation,) * 2)
    t = tactic(problem, Patch(16, 16, 16, 2, 4))
    _, stats = run(problem, t)
    assert stats.sectors == stats.ideal_sectors
    assert covered(problem, t, stats) <= LIMITS[3]
    assert stats.launch_unique_bytes <= 1.02 * (tensors(problem, t) + weight_bytes(problem))


@pytest.mark.parametrize("size", [7, 14, 28, 56, 112, 113, 200])
@pytest.mark.parametrize("reach", LIMITS)
def test_every_candidate_keeps_its_halo_small(reach, size):
    pad = reach // 2
    problem = depthwise(1, 96, size, size, reach, reach, pad=(pad,) * 4)
    for t in candidates(problem, DEVICE):
        limit = 4 * LIMITS[reach] - 3 if t.tile in STAGED_PATCHES else LIMITS[reach]
        assert linear(t.out) or halo(problem, t.tile) <= limit


# ---- times


# Times over those of DRAM alone by the same model, batch 32, 112 x 112. 5x5 and 7x7 take tensor cores (FP32: 2.10 and 3.22).
TIMES = {(3, 1): 1.29, (3, 2): 1.05, (5, 1): 1.63, (5, 2): 1.29, (7, 1): 1.81, (7, 2): 1.78}


def times_over_memory(reach, stride, layout):
    problem = depthwise(32, 96, 112, 112, reach, reach, stride=(stride,) * 2, pad=(reach // 2,) * 4, bias=True)
    tactics = [t for t in candidates(problem, DEVICE) if t.ins[0].layout == t.out.layout == layout]
    parts = [predict(problem, t, DEVICE) for t in tactics]
    return min(part["total_us"] for part in parts) / min(part["launch_us"] + part["dram_us"] for part in parts)


@pytest.mark.parametrize("layout", ["hwc8", "hwc16"])
@pytest.mark.parametrize("window", TIMES, ids=lambda w: "{}s{}".format(*w))
def test_times_of_large_images_are_those_of_the_record(window, layout):
    assert times_over_memory(*window, layout) == pytest.approx(TIMES[window], abs=0.03)


@pytest.mark.parametrize("layout", ["hwc8", "hwc16"])
@pytest.mark.parametrize("window", TIMES, ids=lambda w: "{}s{}".format(*w))
def test_large_images_take_less_than_twice_the_time_of_memory(window, layout):
    assert times_over_memory(*window, layout) < 2


# ---- candidates, launches, packing, predictions


@pytest.mark.sample(23)
@pytest.mark.parametrize("device", NAMED)
@pytest.mark.parametrize("name", DEPTHWISE)
def test_every_problem_has_tactics_and_reasons(name, device):
    problem, d = DEPTHWISE[name], named(device)
    found = candidates(problem, d)
    assert {f.layout for t in found for f in (t.ins[0], t.out)} >= {"chw", "hwc8", "hwc16", "chw32"}
    for t in found:
        assert Tactic.parse(t.name) == t
        (launch,) = launches(problem, t)
        assert launch.block[0] == threads(t) <= 1024
        assert launch.smem == conv_depthwise.patch_bytes(problem, t) < d.smem_per_block
        assert predict(problem, t, d)["bound"] in ("issue", "tensor", "l1", "l2", "dram", "launch")
    assert all(reason for _, reason in rejected(problem, d))
    assert any("different vector widths" in str(reason) for _, reason in rejected(problem, d))


def test_what_is_not_depthwise_is_refused_with_its_reason():
    for c, groups in ((16, 1), (16, 4), (1, 1)):
        problem = ConvProblem(1, c, 8, 8, 16, 3, 3, groups=groups)
        assert not any(t.kernel == "conv_depthwise" for t in candidates(problem, DEVICE))
        assert any(name == "conv_depthwise" and "not depthwise" in str(reason) for name, reason in rejected(problem, DEVICE))
    wide = depthwise(1, 8, 40, 40, 3, 31, pad=(0, 15, 0, 15))
    assert candidates(wide, DEVICE), "a linear tactic's window is as wide as the filter"
    assert any("at most 32" in str(r) for _, r in rejected(wide, DEVICE))
    large = depthwise(1, 8, 40, 40, 15, 15, pad=(7, 7, 7, 7))
    assert any("would spill" in str(r) for _, r in rejected(large, DEVICE))


def test_packed_weights():
    problem = depthwise(1, 10, 5, 5, 3, 2, 2, bias=True, act=Activation("prelu"))
    w = np.arange(20 * 6, dtype=np.float32).reshape(20, 1, 3, 2)
    t = tactic(problem, VECTOR_PATCHES[0])
    sections = pack_weights(problem, t, {"w": w, "b": np.ones(20), "slope": np.full(20, 2)})
    packed = sections["w"].reshape(6, 32)
    assert packed.dtype == np.float16 and not packed[:, 20:].any()
    assert (packed[:, :20] == w.reshape(20, 6).T).all()
    assert sections["b"].tolist() == [1] * 20 + [0] * 12 and sections["slope"].sum() == 40
    assert sum(s.nbytes for n, s in sections.items() if n != "slope") == weight_bytes(problem)


@pytest.mark.parametrize("device", NAMED)
def test_predictions(device):
    """They grow with the work and never beat memory; a large 3x3 layer comes close to it."""
    d = named(device)
    best = {}
    for n in (1, 8, 64):
        problem = depthwise(n, 256, 56, 56, 3, 3, pad=(1, 1, 1, 1))
        best[n] = min(predict_us(problem, t, d) for t in candidates(problem, d))
    assert best[1] < best[8] < best[64]
    memory = 2 * 64 * 256 * 56 * 56 * 2 / (d.dram_gbps * 1e3)
    seen = memory / rates(d).dram_share  # the time of a copy by measured rates
    near = 1.5 if d.dram_gbps < 5000 else 2.5  # beyond that, the arithmetic of two products per byte is the limit
    assert memory < best[64] < near * seen + d.launch_us


# ---- binaries


def worst(patch, linear_format):
    """The widest window that this patch accepts, with everything else that needs registers."""
    layout = "chw" if linear_format else "hwc8"
    for reach, stride in ((7, 2), (7, 1), (5, 2), (5, 1), (3, 2), (3, 1)):
        pad, act = (reach // 2,) * 4, Activation("prelu")
        many = 1 if patch.mma or patch in STAGED_PATCHES else 2
        problem = depthwise(1, 64, 30, 30, reach, reach, many, stride=(stride,) * 2, pad=pad, bias=True, residual=True, act=act)
        t = tactic(problem, patch, layout, layout)
        if not conv_depthwise.reason(problem, t, DEVICE, limit=9.0):
            return problem, t
    raise AssertionError(f"{patch} accepts no window")


PATCHES = [*((p, False) for p in HWC_PATCHES), *((p, True) for p in LINEAR_PATCHES)]
# One of each thread's tile; of equal ones the block with most threads, which leaves each the fewest registers.
BY_THREADS = sorted(PATCHES, key=lambda row: threads(worst(*row)[1]))
SHAPES = {(p.th, p.tw, "s" * (p in STAGED_PATCHES)): (p, lin) for p, lin in BY_THREADS}


def compiles(problem, t, sm, take):
    (launch,) = launches(problem, t)
    taken = take(launch.kernel, launch.values, sm)
    assert taken.regs * threads(t) <= 65536
    assert abs(taken.smem - conv_depthwise._smem(problem, t)) <= 1024  # sm_90 reserves 1 KiB


def compiled_now(kernel, values, sm):
    """As `takes`, of what the record does not hold."""
    c = compile_kernel(kernel, dict(values), sm)
    fits(c)
    return measured(c)


@pytest.mark.slow
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "{}x{}{}".format(*s))
def test_widest_windows_compile_without_spills(shape, sm):
    compiles(*worst(*SHAPES[shape]), sm, takes)


@pytest.mark.long
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize("reach,stride", [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2)])
@pytest.mark.parametrize("row", PATCHES, ids=lambda row: f"{row[0]}-{'chw' if row[1] else 'hwc8'}")
def test_every_patch_and_window_compiles_without_spills(row, reach, stride, sm):
    pad, act = (reach // 2,) * 4, Activation("silu")
    problem = depthwise(1, 64, 30, 30, reach, reach, stride=(stride,) * 2, pad=pad, residual=True, act=act)
    t = tactic(problem, row[0], *(("chw", "chw") if row[1] else ()))
    if not conv_depthwise.reason(problem, t, DEVICE, limit=9.0):
        compiles(problem, t, sm, compiled_now)


# ---- networks


def mobilenet(path):
    """Inverted residuals as in MobileNet v2 and v3: expand, depthwise (stride, 5x5, dilated, multiplied), project, add."""
    rng = np.random.default_rng(5)
    nodes, weights = [], []

    def conv(x, y, k, c, r, group=1, stride=1, dilation=1, act=None):
        w = (rng.standard_normal((k, c // group, r, r)) * np.sqrt(2 / (c // group * r * r))).astype(np.float32)
        weights.extend(
            [numpy_helper.from_array(w, y + ".w"), numpy_helper.from_array(rng.normal(0, 0.1, k).astype(np.float32), y + ".b")]
        )
        window = {"strides": [stride] * 2, "dilations": [dilation] * 2, "pads": [dilation * (r // 2)] * 4, "group": group}
        nodes.append(helper.make_node("Conv", [x, y + ".w", y + ".b"], [y + ".sum" if act else y], name=y, **window))
        if act:
            nodes.append(helper.make_node(act, [y + ".sum"], [y], name=y + "." + act))

    conv("x", "stem", 16, 3, 3, stride=2, act="HardSwish")
    conv("stem", "a.expand", 48, 16, 1, act="Relu")
    conv("a.expand", "a.depthwise", 48, 48, 3, group=48, act="Relu")
    conv("a.depthwise", "a.project", 16, 48, 1)
    nodes.append(helper.make_node("Add", ["a.project", "stem"], ["a"], name="a.add"))
    conv("a", "b.expand", 72, 16, 1, act="HardSwish")
    conv("b.expand", "b.depthwise", 72, 72, 5, group=72, stride=2, act="HardSwish")
    conv("b.depthwise", "b.project", 24, 72, 1)
    conv("b.project", "c.dilated", 24, 24, 3, group=24, dilation=2)
    nodes.append(helper.make_node("Add", ["b.project", "c.dilated"], ["c"], name="c.add"))
    conv("c", "d.multiplied", 72, 24, 3, group=24, act="Relu")
    conv("d.multiplied", "d.project", 32, 72, 1)
    nodes.append(helper.make_node("GlobalAveragePool", ["d.project"], ["pooled"], name="pool"))
    conv("pooled", "y", 10, 32, 1)
    graph = helper.make_graph(
        nodes,
        "mobilenet_like",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 40, 36])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 10, 1, 1])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def check_network(path, x, depthwise_layers):
    engine = gr.build(path, sparsity="enable")
    got = emulated(engine, {"x": x})
    for name, budget in budgets(path, {"x": x}).items():
        budget.check(got[name], name)
    used = [layer for layer in engine.plan.layers if layer.tactic_name.startswith("conv_depthwise")]
    assert len(used) == depthwise_layers
    return engine, used


@pytest.mark.slow
def test_a_mobilenet(tmp_path):
    x = np.random.default_rng(1).standard_normal((2, 3, 40, 36), np.float32)
    engine, used = check_network(mobilenet(tmp_path / "m.onnx"), x, 4)
    assert any(layer.problem.epilogue.residual for layer in used), "the add behind the dilated convolution is part of it"
    reasons = {row.layer: row.reason for row in engine.sparsity.rows}
    assert Counter(reasons.values())["grouped_conv"] == 4


@pytest.mark.full
def test_the_backbone_of_a_published_network(tmp_path):
    """DeepLab v3's MobileNet v2 with its dilated depthwise convolutions, from its first convolution to its last."""
    model = onnx.load(model_path("deeplabv3_mnv2_257"))
    convs = [n for n in model.graph.node if n.op_type == "Conv"]
    grouped = [n for n in convs if any(a.name == "group" and a.i > 1 for a in n.attribute)]
    last = grouped[-1].output[0]
    path = tmp_path / "backbone.onnx"
    cut(model, convs[0].input[0], last, (1, 3, 65, 65), path)
    x = np.random.default_rng(2).uniform(-1, 1, (1, 3, 65, 65)).astype(np.float32)
    _, used = check_network(path, x, len(grouped))
    assert {layer.problem.dilation for layer in used} >= {(1, 1), (2, 2)}


def cut(model, first, last, shape, path):
    """The nodes between the tensors `first` and `last` as a model of input x, of the given shape, and output y."""
    wanted, nodes = {last}, []
    for node in reversed(model.graph.node):
        if set(node.output) & wanted and first not in node.output:
            nodes.append(node)
            wanted |= set(node.input)
    nodes.reverse()
    for node in nodes:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = {first: "x", last: "y"}.get(name, name)
    graph = helper.make_graph(
        nodes,
        "cut",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [i for i in model.graph.initializer if i.name in wanted],
    )
    inferred = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    )
    onnx.save(inferred, path)
