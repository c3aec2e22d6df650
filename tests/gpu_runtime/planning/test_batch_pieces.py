"""Batches in pieces: the answers of a whole batch, from layers that run piece by piece, in less memory."""

import random
from dataclasses import replace

import numpy as np
import pytest

import gpu_runtime as gr
from benchmarks.networks import resnet50
from gpu_runtime.explain.facts import layer_rows, pieces_text
from gpu_runtime.planning import batch_pieces
from gpu_runtime.planning.batch_pieces import PIECES, WHOLE, Pieces, blocks, offer
from gpu_runtime.runtime.dataflow import Fault
from gpu_runtime.runtime.verify import derived
from tactics.problems.batches import at_batch, sizes_of
from tactics.sampling.data import reference
from tests import drawn
from tests.engines import judge
from tests.reference_run import model, network, node

RNG = np.random.default_rng(3)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / 4).astype(np.float32)


def residual(batch: int, size: int = 8):
    """Three convolutions and a sum, a pool, and a fully connected end; the second convolution is an output, too."""
    w = {"a": weights(16, 3, 3, 3), "b": weights(16, 16, 3, 3), "c": weights(16, 16, 1, 1), "d": weights(16, 5)}
    nodes = [
        node("Conv", "x a", "p", pads=(1, 1, 1, 1)),
        node("Relu", "p", "q"),
        node("Conv", "q b", "r", pads=(1, 1, 1, 1)),
        node("Conv", "r c", "s"),
        node("Add", "s q", "t"),
        node("GlobalAveragePool", "t", "u"),
        node("Flatten", "u", "v"),
        node("MatMul", "v d", "y"),
    ]
    return model(nodes, {"x": (batch, 3, size, size)}, "y r", w)


def forced(monkeypatch, images_of, pick=lambda group: PIECES) -> None:
    """Let each plan run in pieces of these sizes, block by block as `pick` says."""

    def worthwhile(table, chosen):
        images = table.network.inputs[0].shape4[0]
        sizes = images_of(images)
        able = {i for i, b in enumerate(blocks(table.network)) if batch_pieces._able(table.network, b, images)}
        return Pieces(sizes, frozenset(able)) if len(sizes) > 1 and able else None

    def offered(net, pieces, device, chosen):
        both = offer(net, pieces, device, chosen)
        mine = {g: pick(g) for g, options in both.groups if options == (WHOLE, PIECES)}
        ops = tuple(op for op in both.ops if all(mine.get(g, o) == o for g, o in op.when))
        groups = tuple((g, (mine[g],) if g in mine else options) for g, options in both.groups)
        return replace(both, ops=ops, groups=groups).pruned()

    monkeypatch.setattr(batch_pieces, "worthwhile", worthwhile)
    monkeypatch.setattr(batch_pieces, "offer", offered)
    monkeypatch.setattr(batch_pieces, "LEAST_GAIN", -1e6)


@pytest.mark.parametrize("batch, pieces", [(4, 2), (5, 2), (7, 3), (3, 3)])
def test_pieces_give_the_answers_of_the_whole_batch(monkeypatch, batch, pieces):
    proto = residual(batch)
    whole = gr.build(proto, device="l4")
    forced(monkeypatch, lambda n: sizes_of(n, pieces))
    engine = gr.build(proto, device="l4")
    names = [layer.name for layer in engine.plan.layers]
    assert sum(name.endswith(f"[0:{-(-batch // pieces)}]") for name in names) >= 3
    feeds = {"x": np.random.default_rng(0).uniform(-1, 1, (batch, 3, 8, 8)).astype(np.float32)}
    judge(engine, proto, feeds)
    assert engine.plan.memory.activation_bytes <= whole.plan.memory.activation_bytes
    assert engine.record.weight_bytes <= whole.record.weight_bytes  # pieces share them


def test_the_same_tactics_give_the_same_bits(monkeypatch):
    """Of each layer that has its tactic of the whole batch, and reads what is the same."""
    proto = residual(6, 12)
    feeds = {"x": np.random.default_rng(1).uniform(-1, 1, (6, 3, 12, 12)).astype(np.float32)}
    engines = [gr.build(proto, device="a100")]
    forced(monkeypatch, lambda n: sizes_of(n, 2))
    engines.append(gr.build(proto, device="a100"))
    tactics = [{x.op_name: x.tactic for x in e.plan.layers if x.tactic} for e in engines]
    traces = []
    for engine in engines:
        with engine.context(device="emulator") as context:
            traces.append(context.trace(feeds))
    alike = [name for name in tactics[0] if tactics[1].get(name) == tactics[0][name]]
    assert len(alike) > 3 and all(traces[0][name].tobytes() == traces[1][name].tobytes() for name in alike)


def test_compare_puts_pieces_together(monkeypatch):
    proto = residual(5)
    forced(monkeypatch, lambda n: sizes_of(n, 2))
    calibration = {"x": np.random.default_rng(2).uniform(-1, 1, (5, 3, 8, 8)).astype(np.float32)}
    engine = gr.build(proto, device="l4", calibration=calibration)
    assert any(layer.images == (3, 2) for layer in engine.plan.layers)
    found = gr.compare(proto, engine, emulate=True)
    assert found.passed and {"r", "t"} <= {row.tensor for row in found.layers}


def test_a_trace_has_no_rows_that_fill_a_batch_in_pieces(monkeypatch):
    forced(monkeypatch, lambda n: sizes_of(n, min(n, 2)))
    engine = gr.build(residual("N"), device="l4", shapes={"x": ((3, 3, 8, 8), (8, 3, 8, 8), (8, 3, 8, 8))})
    assert engine.points == (8,) and any(layer.images == (4, 4) for layer in engine.plan.layers)
    with engine.context(device="emulator") as context:
        found = context.trace({"x": np.ones((3, 3, 8, 8), np.float32)})
    assert {len(value) for value in found.values()} == {3}


@pytest.mark.parametrize("seed", range(12))
def test_a_problem_for_fewer_images_computes_those(seed):
    net = network(drawn_batch(seed))
    for op in net.ops:
        of, images = at_batch(op.problem, 1), op.problem.out_shape[0]
        if of is None:
            continue
        assert of.all_shapes == tuple((1, *shape[1:]) for shape in op.problem.all_shapes)
        assert at_batch(of, images) == op.problem
        xs = [np.random.default_rng(i).uniform(-1, 1, shape).astype(np.float32) for i, shape in enumerate(op.problem.in_shapes)]
        y = reference(op.problem, xs, op.weights)
        for i in range(images):
            assert np.allclose(reference(of, [x[i : i + 1] for x in xs], op.weights), y[i : i + 1], 1e-4, 1e-5, equal_nan=True)


def test_an_l4_runs_a_resnet_in_pieces_and_an_h200_does_not():
    proto = resnet50(32)
    whole, engine = gr.build(proto, device="h200"), gr.build(proto, device="l4")
    assert not any(layer.images for layer in whole.plan.layers) and whole.plan.solution.rivals.whole_us is None
    assert engine.plan.solution.status == "proven"
    assert engine.plan.solution.rivals.whole_us > 1.15 * engine.plan.solution.total_us
    assert engine.plan.memory.activation_bytes < 0.7 * whole.plan.memory.activation_bytes
    assert "pieces of 8 images" in pieces_text(engine.record)
    assert len(layer_rows(engine.plan.layers)) < 60 < len(engine.plan.layers)


def test_a_library_is_as_fast_beside_a_plan_in_pieces(monkeypatch):
    """It runs the whole batch, with the fusions that serve it best then."""
    pieces = gr.build(resnet50(64), device="rtx4090")
    monkeypatch.setattr(batch_pieces, "worthwhile", lambda table, chosen: None)
    whole = gr.build(resnet50(64), device="rtx4090")
    assert any(layer.images for layer in pieces.plan.layers) and not any(layer.images for layer in whole.plan.layers)
    assert pieces.plan.solution.rivals.library.us <= whole.plan.solution.rivals.library.us * 1.001


@pytest.mark.parametrize("name", ["x in pieces", "t [0:8]", "images of t", "é" * 1500])
def test_names_that_pieces_could_get_keep_the_batch_whole(name):
    proto = resnet50(32)
    for other in proto.graph.node:
        for names in (other.input, other.output):
            names[:] = [name if t == "s1b1/relu3_out" else t for t in names]
    engine = gr.build(proto, device="l4")
    assert any(layer.images for layer in engine.plan.layers) == (len(name) > 1000)


def test_one_image_and_batch_invariant_plans_have_no_pieces(monkeypatch):
    forced(monkeypatch, lambda n: sizes_of(n, min(n, 2)))
    shapes = {"x": ((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))}
    ranged = gr.build(residual("N"), device="l4", shapes=shapes, batch_invariant=True)
    assert not any(layer.images for plan in ranged.record.plans for layer in plan.layers)
    assert not any(layer.images for layer in gr.build(residual(1), device="l4").plan.layers)


def test_a_file_with_other_images_than_its_tensors_is_refused(monkeypatch):
    forced(monkeypatch, lambda n: sizes_of(n, 2))
    record = gr.build(residual(4), device="l4").record
    (plan,) = record.plans
    i = next(i for i, layer in enumerate(plan.layers) if layer.images)
    wrong = replace(plan.layers[i], images=(0, 3))
    bad = replace(record, plans=(replace(plan, layers=(*plan.layers[:i], wrong, *plan.layers[i + 1 :])),))
    with pytest.raises(Fault, match="expected an output of the 3 images of its piece, got 2"):
        derived(bad)


def drawn_batch(seed: int):
    """A drawn network of several images."""
    d = drawn.Drawn(f"pieces {seed}")
    n, c, h, w = (d.pick.choice(of) for of in ((2, 3, 4, 5), (3, 4, 8, 16), (2, 4, 5), (2, 4, 5)))
    for _ in range(d.pick.choice((1, 1, 2))):
        d.input(n, c, h, w)
    for _ in range(60):
        if len(d.nodes) < 10:
            d.pick.choice((drawn.conv, drawn.conv, *drawn.ALL))(d)
    return d.model()


def check_drawn(monkeypatch, seed: int) -> int:
    """Judge a drawn network in drawn pieces -> how many of its layers run in pieces."""
    pick, proto = random.Random(seed), drawn_batch(seed)
    forced(monkeypatch, lambda n: sizes_of(n, pick.randint(2, max(2, n))), lambda group: pick.choice((PIECES, PIECES, WHOLE)))
    engine = gr.build(proto, device=pick.choice(("l4", "a100", "h200")), sparsity=pick.choice(("disable", "enable")))
    feeds = {i.name: np.random.default_rng(seed).uniform(-1, 1, i.shape).astype(np.float32) for i in engine.plan.inputs}
    judge(engine, proto, feeds)
    return sum(bool(layer.tactic) and layer.name.endswith("]") for layer in engine.plan.layers)


def test_drawn_networks_in_pieces_of_drawn_sizes(monkeypatch):
    counts = [check_drawn(monkeypatch, seed) for seed in (*range(40), 61, 184)]
    assert sum(map(bool, counts)) > 20 and sum(counts) > 200
