"""The verbose log: every timing, TensorRT's lines, and nothing left out without a proof."""

import re
from functools import lru_cache

import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels.device import named
from gpu_runtime.explain import autotuning
from gpu_runtime.explain.figures import tactic_value
from gpu_runtime.frontend import importer
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from gpu_runtime.planning import tables
from gpu_runtime.rewrites import shared_concats
from tactics.candidates import candidates
from tactics.format import Format
from tactics.measure import timing
from tactics.planner import plan
from tests.conftest import DIGITS
from tests.problems import conv_case

DEVICE = named("h200")
SHAPES = {"x": (64, 1, 8, 8)}


@lru_cache(maxsize=4)
def table(sparse=True, exhaustive=False):
    network = shared_concats.share(fuse.fuse(lower.lower(importer.read(DIGITS / "digits_sparse.onnx", shapes=SHAPES))))
    io = {t.name: Format(t.dtype, "chw") for t in (*network.inputs, *network.outputs)}
    return tables.tabulate(
        network, DEVICE, timing.Predicted(DEVICE), io=io, how=tables.Considered(sparse, exhaustive=exhaustive)
    )


def text(t, exhaustive=False, failures=()):
    return "\n".join(autotuning.log(t, plan.solve(t.graph), dict(failures), exhaustive=exhaustive))


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [True, False])
def test_every_candidate_is_timed_or_its_proof_is_there(sparse):
    t = table(sparse)
    for op, times in zip(t.network.ops, t.times, strict=True):
        proofs = tables.untimed(t, op)
        able = set(candidates(op.problem, DEVICE))
        assert able <= set(times) | set(proofs), op.name
        assert not set(times) & set(proofs)
        assert all(proof.sentence for proof in proofs.values())


def test_what_has_the_same_addresses_has_the_same_bytes():
    """The proof itself: both formats' rules give one address to every element."""
    t, checked = table(), 0
    for op in t.network.ops:
        for tactic, proof in tables.untimed(t, op).items():
            if proof.code == "same_addresses":
                other = re.search(r"as in (\S+) -> (\S+), so", proof.sentence)
                names = (*other[1].split(","), other[2])
                shapes = (*op.problem.in_shapes, op.problem.out_shape)
                for mine, name, shape in zip((*tactic.ins, tactic.out), names, shapes, strict=True):
                    assert addresses(mine, shape) == addresses(Format.parse(name), shape), (op.name, tactic)
                    checked += 1
    assert checked > 100


@lru_cache(maxsize=256)
def addresses(fmt, shape):
    from tactics.format import strides

    s = strides(fmt, shape)
    v = 1 << s.log2v
    _, c, h, w = shape
    pixels = range(0, h * w, max(1, h * w - 1))
    return tuple(s.n + (i // v) * s.block + p * s.pixel + i % v for i in range(c) for p in pixels)


def test_the_lines_are_tensorrt_s():
    t = table()
    out = text(t)
    assert re.search(r"^\*{15} Autotuning format combination: Float\(64,64,8,1\) -> Half\(512,1:8,64,8\) \*{15}$", out, re.M)
    assert re.search(r"^-{15} Timing Runner: block1/conv1 \+ block1/relu1 \(conv_sparse24\)$", out, re.M)
    assert re.search(r"^Tactic Name: conv_sparse24_hmma\S+ Tactic: 0x[0-9a-f]{16} Time: ~0\.\d+$", out, re.M)
    assert "Computing reformatting costs" in out and "Autotuning Reformat: " in out
    assert out.count("Tactic Name: ") == sum(map(len, t.times)) + sum(map(len, t.reformats.values()))
    chosen = plan.solve(t.graph)
    for entry in chosen.entries.values():
        assert f"Chose Runner Type: {entry.name.partition('__')[0]} Tactic: {tactic_value(entry.name)}" in out
    fastest = re.findall(r"Fastest Tactic: (\S+) Time: ~(\S+)", out)
    assert fastest and text(t) == out


@pytest.mark.slow
def test_failures_and_what_cannot_run_are_named():
    t = table(False)
    op = t.network.ops[1]
    out = text(t, failures={(str(op.problem), "conv_dense_x"): "launch failed\nmore"})
    assert "Skipping conv_dense_x: failed: launch failed\n" in out
    assert "sparse, but --sparsity=disable was given" in out and "cannot run: channels_not_multiple_of_4: C = 1" in out


def split_network(tmp_path):
    """A layer whose products are few tiles and many channels: K is split over blocks, with partial sums in scratch memory."""
    n = Net("n", (1, 512, 7, 7))
    onnx.save(n.finish(n.conv("x", "conv", 64)), tmp_path / "n.onnx")
    return tmp_path / "n.onnx"


def scratch_of(plan_record):
    from tactics.launches import launches
    from tactics.tactic import Tactic

    p = conv_case(1, 512, 7, 7, 64, 3, 3, pad=(1, 1, 1, 1), bias=True)
    layer = next(x for x in plan_record.layers if x.type == "conv")
    return max(s.workspace for s in launches(p, Tactic.parse(layer.tactic_name)))


def test_workspace_limits_each_tactic(tmp_path):
    path = split_network(tmp_path)
    free = gr.build(path, device="a100")  # an H200 sums a split K in clusters
    assert scratch_of(free.plan) > 0, "without a limit, K is split"
    log = []
    none = gr.build(path, device="a100", workspace=0, log=log.append)
    assert scratch_of(none.plan) == 0 and none.plan.solution.total_us > free.plan.solution.total_us
    assert re.search(
        r"Not timed: \d+ tactics of conv in .*: needs \d+ bytes of workspace, --memPoolSize allows 0", "\n".join(log)
    )
    assert none.record.flags.workspace == 0
    enough = gr.build(path, device="a100", workspace=scratch_of(free.plan))
    assert enough.plan.solution.total_us == free.plan.solution.total_us


@pytest.mark.slow
def test_exhaustive_chooses_the_same_plan(tmp_path):
    files = []
    for exhaustive in (False, True):
        files.append(tmp_path / f"{exhaustive}.engine")
        gr.build(DIGITS / "digits_sparse.onnx", sparsity="enable", device="h200", shapes=SHAPES, exhaustive=exhaustive).save(
            files[-1]
        )
    assert files[0].read_bytes() == files[1].read_bytes()
    out = text(table(exhaustive=True), exhaustive=True)
    assert "every element has the same address" not in out


@pytest.mark.slow
def test_exhaustive_asks_for_every_namesake():
    asked = []

    def timer(problem, tactics):
        tactics = list(tactics)
        asked.extend((problem, t) for t in tactics)
        return timing.Predicted(DEVICE)(problem, tactics)

    timer.prepare = lambda work: None
    t = table()
    io = t.io
    tables.tabulate(t.network, DEVICE, timer, io=io, how=tables.Considered(True, exhaustive=True))
    for op in t.network.ops:
        same = {x for x, proof in tables.untimed(t, op).items() if proof.code == "same_addresses"}
        assert same <= {x for problem, x in asked if problem == op.problem}
