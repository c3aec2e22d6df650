"""What tensors are written as, and which ops read them so: formats of each type, and that rewrites keep both."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cuda_kernels.device import named
from gpu_runtime.network import HALF, SINGLE, WIDE, Network, Options, Type
from gpu_runtime.planning import batch_pieces
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.precision import cliffs
from tactics.planner.graph import holds
from tactics.problems.batches import BatchPiecesProblem
from tactics.problems.problem import ConcatProblem
from tests.reference_run import model, network, node

FP16 = ["fp16:hwc8", "fp16:hwc16", "fp16:chw32", "fp16:chw"]  # of 8 channels
FORMATS = {
    HALF: FP16,
    SINGLE: ["fp32:chw"],
    WIDE: ["fp32:chw", *FP16],
    Type("bool"): ["bool:chw"],
    Type(layout="hwc8"): ["fp16:hwc8"],
}


def residual(batch: int = 2) -> Network:
    """A sum of two convolutions, a layer behind it; the sum may be in either's launch."""
    weights = {name: np.ones((8, 8, 1, 1), np.float32) for name in ("v", "w", "u")}
    nodes = [node("Conv", "x v", "a"), node("Conv", "x w", "b"), node("Add", "a b", "c"), node("Conv", "c u", "d")]
    return network(model([*nodes, node("Sigmoid", "d", "y")], {"x": (batch, 8, 4, 4)}, "y", weights))


def block() -> Network:
    """Four convolutions of one tensor, of which a Concat joins two, with another: so they may be one beside that."""
    weights = {name: np.ones((8, 16, 1, 1), np.float32) for name in ("a", "b", "c", "d")}
    nodes = [node("Conv", f"x {name}", f"{name}1") for name in weights]
    nodes += [node("MaxPool", "x", "p", kernel_shape=(1, 1)), node("Concat", "a1 b1 p", "y", axis=1)]
    return network(model(nodes, {"x": (1, 16, 4, 4)}, "y c1 d1", weights))


@pytest.mark.parametrize("of", FORMATS, ids=str)
def test_formats_of_a_type(of):
    net = replace(residual(), types={"x": of})
    assert [str(f) for f in net.formats("x")] == FORMATS[of] and of.fixed == (len(FORMATS[of]) == 1)
    assert net.is_fp32("x") == (of.dtype == "fp32")


def test_an_exact_op_reads_what_is_written_and_others_a_copy():
    net = replace(residual(), types={"x": WIDE})
    net = net.with_exact({"b"})
    assert {op.output for op in net.ops if op.exact} == net.exact_outputs == {"b"}
    for op in net.ops:
        if "x" in op.inputs:
            assert [str(f) for f in net.formats_in(op)[0]] == (["fp32:chw"] if op.exact else ["fp32:chw", *FP16])


def test_all_ops_that_give_one_tensor_are_exact_together():
    """Those of later rewrites, too."""
    net, more = cliffs.heed(residual(), [("c", "far off")])
    assert {"a", "b"} & more.keys() and all(op.exact for op in net.producers["c"]) and len(net.producers["c"]) > 1
    options = Options(net)
    (op, *_) = net.producers["c"]
    options.behind(op, type(op)("twin", op.problem, op.inputs, op.output))
    assert [o.exact for o in options.network().producers["c"] if o.name == "twin"] == [True]


@pytest.mark.parametrize("of", [residual, block], ids=["residual", "block"])
def test_rewrites_and_pieces_keep_types_and_readers(of):
    plain = of()
    net, _ = cliffs.heed(plain, [(op.output, "far off") for op in plain.ops])
    found = alternatives(net)
    assert found.types.items() >= net.types.items() and net.exact_outputs and found.exact_outputs == net.exact_outputs
    assert all(op.exact == (op.output in net.exact_outputs) for op in found.ops)
    options = {g: o[0] for g, o in found.groups}
    chosen = SimpleNamespace(entry_of=lambda name, when: holds(when, options))
    able = frozenset(batch_pieces.able_blocks(found))
    split = batch_pieces.offer(found, batch_pieces.BatchPieces((1, 1), able), named("a10"), chosen)
    assert bool(able) == (plain.images > 1) == (len(split.ops) > len(found.ops))
    for op in split.ops:
        whole = op.output.partition(batch_pieces.SUFFIX)[0]
        shares = isinstance(op.problem, BatchPiecesProblem) and net.type(whole).copies  # memory, so the type, with its source
        assert op.exact == (whole in net.exact_outputs or shares) and split.type(op.output) == net.type(whole)


def test_a_concat_around_siblings_is_in_fp16():
    """Its one layout is FP16's, so that it reads copies, though the Concat in its place is exact."""
    net = replace(block(), types={"p": WIDE}).with_exact({"y"})
    found = alternatives(net)
    (around,) = [op for op in found.ops if isinstance(op.problem, ConcatProblem) and op.output != "y"]
    assert found.type(around.output) == Type(layout="hwc8") and not around.exact
    assert all(op.exact for op in found.producers["y"]) and len(found.producers["y"]) > 1


def test_what_fp16_cannot_hold_stays_without_copies():
    """Where a sum is to be exact, what is added to it is written in FP32; one that is so anyway keeps its type."""
    net = residual()
    for added in {op.inputs[1] for op in net.producers["c"] if len(op.inputs) > 1}:
        grown, more = cliffs.heed(replace(net, types={added: SINGLE}), [("y", "far off")])
        assert grown.type("c") == WIDE and grown.type(added) == SINGLE and added not in more
