"""Batches in pieces: the answers of a whole batch, from layers that run piece by piece, in less memory."""

import random
from dataclasses import replace

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels.device import named
from gpu_runtime.planning import batch_pieces
from gpu_runtime.planning.batch_pieces import PIECES, WHOLE, Pieces, blocks, offer
from tactics.problems.batches import at_batch, sizes_of
from tests import drawn
from tests.engines import judge
from tests.reference_run import choices, feeds_for, model, network, node, relative_error, run

L4 = named("l4")
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

    def offered(net, pieces, device):
        both = offer(net, pieces, device)
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
    counts = [check_drawn(monkeypatch, seed) for seed in range(40)]
    print(counts)
    assert sum(map(bool, counts)) > 20 and sum(counts) > 200
