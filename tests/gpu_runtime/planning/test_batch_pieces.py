"""Batches in pieces: the answers of a whole batch, from layers that run piece by piece, in less memory."""

import random
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import gpu_runtime as gr
from benchmarks.networks import resnet50
from cuda_kernels.device import named
from gpu_runtime.assembly import assemble
from gpu_runtime.errors import ModelError
from gpu_runtime.explain import log, report
from gpu_runtime.explain.facts import layer_rows, pieces_text
from gpu_runtime.planning import batch_pieces, tables
from gpu_runtime.planning.batch_pieces import PIECES, WHOLE, BatchPieces, blocks, offer, smaller
from gpu_runtime.runtime.dataflow import Fault
from gpu_runtime.runtime.verify import derived
from gpu_runtime.text import size_text
from tactics.problems.batches import at_batch, sizes_of
from tactics.sampling.data import reference
from tests import drawn
from tests.engines import judge
from tests.reference_run import model, network, node

RNG = np.random.default_rng(3)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / 4).astype(np.float32)


def residual(batch: int, size: int = 8, outputs: str = "y r"):
    """Three convolutions and a sum, a pool, and a fully connected end; the second convolution may be an output, too."""
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
    return model(nodes, {"x": (batch, 3, size, size)}, outputs, w)


def forced(monkeypatch, images_of, pick=lambda group: PIECES) -> None:
    """Let each plan run in pieces of these sizes, block by block as `pick` says."""

    def worthwhile(table, chosen):
        images = table.network.inputs[0].shape4[0]
        sizes = images_of(images)
        able = {i for i, b in enumerate(blocks(table.network)) if batch_pieces._able(table.network, b, images)}
        return BatchPieces(sizes, frozenset(able)) if len(sizes) > 1 and able else None

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


@pytest.mark.full
def test_an_l4_runs_a_resnet_in_pieces_and_an_h200_does_not():
    proto = resnet50(32)
    whole, engine = gr.build(proto, device="h200"), gr.build(proto, device="l4")
    assert not any(layer.images for layer in whole.plan.layers) and whole.plan.solution.rivals.whole_us is None
    assert engine.plan.solution.status == "proven"
    assert engine.plan.solution.rivals.whole_us > 1.15 * engine.plan.solution.total_us
    assert engine.plan.memory.activation_bytes < 0.7 * whole.plan.memory.activation_bytes
    assert "pieces of 8 images" in pieces_text(engine.record)
    assert len(layer_rows(engine.plan.layers)) < 60 < len(engine.plan.layers)


@pytest.mark.full
def test_a_library_is_as_fast_beside_a_plan_in_pieces(monkeypatch):
    """It runs the whole batch, with the fusions that serve it best then."""
    pieces = gr.build(resnet50(64), device="rtx4090")
    monkeypatch.setattr(batch_pieces, "worthwhile", lambda table, chosen: None)
    whole = gr.build(resnet50(64), device="rtx4090")
    assert any(layer.images for layer in pieces.plan.layers) and not any(layer.images for layer in whole.plan.layers)
    library, alone = (engine.plan.solution.rivals.library for engine in (pieces, whole))
    assert library.us <= alone.us * 1.001 and library.us == pytest.approx(alone.us, rel=0.03)
    assert library.own_us >= 0 and library.layers <= alone.layers  # a layer in pieces counts once


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


# ---- a limit of memory


def arena_of(engine) -> int:
    return max(plan.memory.activation_bytes for plan in engine.record.plans)


def in_pieces(engine) -> bool:
    return any(layer.images for plan in engine.record.plans for layer in plan.layers)


@pytest.fixture(scope="module")
def proto():
    return residual(8, 16, "y")


@pytest.fixture(scope="module")
def free(proto):
    engine = gr.build(proto, device="h200")
    assert not in_pieces(engine)
    return engine


@pytest.fixture(scope="module")
def needed(proto) -> int:
    """The least number of bytes that the message of a limit which nothing meets names."""
    with pytest.raises(
        ModelError, match=r"activations need .* in pieces of the batch, but 0.0 KiB \(0 bytes\) are allowed"
    ) as e:
        gr.build(proto, device="h200", activations=0)
    return int(re.search(r"--memPoolSize=activations:(\d+)B", str(e.value))[1])


def test_a_plan_that_fits_is_the_plan_without_a_limit(proto, free):
    engine = gr.build(proto, device="h200", activations=arena_of(free))
    assert engine.record.plans == free.record.plans and engine.record.sections == free.record.sections
    assert engine.record.flags == replace(free.record.flags, activations=arena_of(free))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_activations_take_no_more_than_they_may(proto, free, needed, share):
    allowed = round(needed + share * (arena_of(free) - needed))
    engine = gr.build(proto, device="h200", activations=allowed)
    assert arena_of(engine) <= allowed and in_pieces(engine) and engine.plan.solution.status == "proven"
    rivals, text = engine.plan.solution.rivals, pieces_text(engine.record)
    assert (rivals.whole_bytes, rivals.whole_us) == (arena_of(free), free.plan.solution.total_us)
    assert engine.plan.solution.total_us > rivals.whole_us
    for nbytes in (arena_of(engine), arena_of(free), allowed):
        assert size_text(nbytes) in text
    shown = " ".join(report.inspect_text(engine.record).split())
    assert text in shown and f"--memPoolSize=activations:{allowed}B" in shown and "serial execution, these pieces and" in shown
    assert "so that activations take" in " ".join(log.log_text(engine.record, 120, 40).split())
    feeds = {"x": np.random.default_rng(0).uniform(-1, 1, (8, 3, 16, 16)).astype(np.float32)}
    judge(engine, proto, feeds)
    outputs = [e.context(device="emulator").run(feeds) for e in (free, engine)]
    tactics = [{x.op_name: x.tactic for x in e.plan.layers if x.tactic} for e in (free, engine)]
    for name in outputs[0]:
        if tactics[0].items() <= tactics[1].items():
            assert outputs[0][name].tobytes() == outputs[1][name].tobytes()
        np.testing.assert_allclose(outputs[1][name], outputs[0][name], rtol=2e-2, atol=2e-2)


def test_the_plan_is_the_fastest_that_fits(monkeypatch, proto, free, needed):
    """Of all sets of blocks with the largest tensors, and of all sizes, each built on its own."""
    allowed = (needed + arena_of(free)) // 2
    engine = gr.build(proto, device="h200", activations=allowed)
    tried = [pieces for rising in smaller(network(proto)) for pieces in rising]
    assert {len(p.sizes) for p in tried} == {2, 4, 8} and all(p.forced <= p.blocks for p in tried)
    fitting = []
    monkeypatch.setattr(batch_pieces, "LEAST_GAIN", -1e6)
    for pieces in tried:
        monkeypatch.setattr(batch_pieces, "worthwhile", lambda table, chosen, pieces=pieces: pieces)
        other = gr.build(proto, device="h200")
        assert all(any(layer.images for layer in other.plan.layers) for _ in pieces.forced)
        fitting += [other.plan.solution.total_us] if arena_of(other) <= allowed else []
    assert fitting and engine.plan.solution.total_us == pytest.approx(min(fitting))


def test_blocks_beside_those_that_gain_are_offered_where_that_may_save_a_whole_tensor(monkeypatch):
    """Of 2, 4 and 8 pieces of 16 images, 4 gain most and 8 less than half of that, so 16 are not looked at. Beside the second
    block, which gains, the third may save a whole tensor, and behind it the fourth."""
    table = SimpleNamespace(network=network(residual(16)), device=named("l4"))
    gains, asked = {2: (-4.0, 30.0, -6.0, -9.0), 4: (-4.0, 50.0, -6.0, -9.0), 8: (0.0, 8.0, 8.0, 8.0), 16: (0.0,) * 4}, []
    listed = blocks(table.network)
    assert len(listed) == 4

    def gain(device, kernels, sizes):
        asked.append(len(sizes))
        return gains[len(sizes)][kernels[0][0]]

    launch = 0.0
    monkeypatch.setattr(batch_pieces, "_kernels", lambda block, chosen: ((listed.index(block), None),))
    monkeypatch.setattr(batch_pieces, "predict", lambda *a: {"total_us": 100.0, "launch_us": launch})
    monkeypatch.setattr(batch_pieces, "_gain", gain)
    for saved, expected in ((0.0, {1}), (5.0, {0, 1}), (7.0, {0, 1, 2}), (10.0, {0, 1, 2, 3})):
        monkeypatch.setattr(batch_pieces, "_whole_us", lambda network, device, tensor, us=saved: us)
        found = batch_pieces.worthwhile(table, SimpleNamespace(us=100.0))
        assert found == BatchPieces(sizes_of(16, 4), frozenset(expected))
    assert max(asked) == 8
    assert batch_pieces.worthwhile(table, SimpleNamespace(us=10_000.0)) is None
    launch, asked[:] = 20.0, []  # of a block's 100 us, 8 launches take all; 4 leave 20 of each, less than the 50 that are known
    assert batch_pieces.worthwhile(table, SimpleNamespace(us=100.0)).sizes == sizes_of(16, 4) and max(asked) == 4


def test_a_block_that_no_tactic_runs_in_pieces_stays_whole(monkeypatch):
    """The second one by its tensors: all sets of blocks but that of the first are impossible."""
    w = {"a": weights(8, 3, 3, 3), "b": weights(32, 8, 3, 3), "c": weights(8, 32, 3, 3), "d": weights(12, 8, 3, 3)}
    convs = [node("Conv", text, y, pads=(1, 1, 1, 1)) for text, y in (("x a", "p"), ("p b", "q"), ("q c", "r"), ("s d", "t"))]
    nodes = [*convs[:3], node("Add", "r p", "s"), convs[3], node("GlobalAveragePool", "t", "y")]
    proto = model(nodes, {"x": (8, 3, 16, 16)}, "y", w)
    whole, of_pieces = gr.build(proto, device="h200"), tables._of_pieces

    def without_one(asked, *others):
        return {} if asked.problem.out_shape[1:] == (12, 16, 16) else of_pieces(asked, *others)

    monkeypatch.setattr(tables, "_of_pieces", without_one)
    engine = gr.build(proto, device="h200", activations=arena_of(whole) - 1)
    launched = {layer.op_name for layer in engine.plan.layers if layer.images and layer.tactic}
    assert "q" in launched and "t" not in launched
    with pytest.raises(ModelError, match="at least, in pieces"):
        gr.build(proto, device="h200", activations=1)


def test_the_whole_batch_is_taken_where_it_fits_and_the_fastest_pieces_do_not(monkeypatch, proto, free):
    arena_bytes, first = assemble.arena_bytes, [1 << 40]
    monkeypatch.setattr(assemble, "arena_bytes", lambda *plan: first.pop() if first else arena_bytes(*plan))
    engine = gr.build(proto, device="h200", activations=arena_of(free))
    assert not first and engine.record.plans == free.record.plans


def test_blocks_with_larger_tensors_are_forced_first(proto):
    for rising in smaller(network(proto)):
        assert [sorted(p.forced) for p in rising] == [[], [1], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_a_large_batch_has_some_pieces_at_most():
    sizes = [len(p.sizes) for rising in smaller(network(residual(1000, 4, "y"))) for p in rising[:1]]
    assert sizes == [2, 4, 8, 16, 32, 64, 128] and [len(r[0].sizes) for r in smaller(network(residual(6)))] == [2, 4, 6]


def test_each_plan_of_a_range_fits(free, needed):
    shapes = {"x": ((1, 3, 16, 16), (4, 3, 16, 16), (8, 3, 16, 16))}
    allowed = (needed + arena_of(free)) // 2
    engine = gr.build(residual("N", 16, "y"), device="h200", shapes=shapes, activations=allowed)
    assert arena_of(engine) <= allowed and engine.points[-1] == 8 and in_pieces(engine)
    with pytest.raises(ModelError, match="g at batch 8: activations need .* in pieces"):
        gr.build(residual("N", 16, "y"), device="h200", shapes=shapes, activations=needed - 1)


def test_what_cannot_run_in_pieces_needs_all_of_its_memory(proto, free):
    one = gr.build(residual(1, 16, "y"), device="h200")
    odd = residual(8, 16, "y")
    odd.graph.node[0].name = "conv [0:8]"
    alike = gr.build(proto, device="h200", batch_invariant=True)
    cases = [
        (residual(1, 16, "y"), arena_of(one), {}, "g at batch 1: .* and no layer can run in pieces of the batch"),
        (odd, arena_of(free), {}, "g at batch 8: .* and no layer can run in pieces of the batch"),
        (proto, arena_of(alike), {"batch_invariant": True}, "g at batch 8: .* and --batchInvariant allows no pieces"),
    ]
    for case, most, options, text in cases:
        assert arena_of(gr.build(case, device="h200", activations=most, **options)) == most
        with pytest.raises(ModelError, match=text) as e:
            gr.build(case, device="h200", activations=most - 1, **options)
        assert f"activations:{most}B" in str(e.value) and "smaller batch" in str(e.value)


@pytest.mark.parametrize("name", ["x in pieces", "t [0:8]", "images of t", "é" * 1500])
def test_names_that_pieces_could_get_keep_the_batch_whole(free, name):
    proto = residual(8, 16, "y")
    for other in proto.graph.node:
        for names in (other.input, other.output):
            names[:] = [name if t == "r" else t for t in names]
    if len(name) > 1000:
        assert in_pieces(gr.build(proto, device="h200", activations=arena_of(free) - 1))
        return
    with pytest.raises(ModelError, match="and no layer can run in pieces of the batch"):
        gr.build(proto, device="h200", activations=arena_of(free) - 1)


@pytest.mark.full
def test_a_plan_in_pieces_that_takes_too_much_gets_other_pieces():
    """On an L4 the fastest plan has pieces already."""
    fastest = gr.build(resnet50(32), device="l4")
    engine = gr.build(resnet50(32), device="l4", activations=60 << 20)
    assert in_pieces(fastest) and arena_of(fastest) > 80 << 20 and arena_of(engine) <= 60 << 20
    assert engine.plan.solution.rivals.whole_us == pytest.approx(fastest.plan.solution.rivals.whole_us)
    assert engine.plan.solution.rivals.whole_bytes > 128 << 20


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


@pytest.mark.full
def test_drawn_networks_in_pieces_of_drawn_sizes(monkeypatch):
    counts = [check_drawn(monkeypatch, seed) for seed in (*range(40), 61, 184)]
    assert sum(map(bool, counts)) > 20 and sum(counts) > 200
