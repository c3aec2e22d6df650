"""Siblings as one convolution: what is offered, what it computes, that no cycle closes, what the plan and its reasons say."""

import itertools

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels.device import named
from gpu_runtime.explain import what_if, wording
from gpu_runtime.planning import tables
from gpu_runtime.rewrites import siblings
from tactics.format import Format
from tactics.measure.timing import Time
from tactics.planner import plan
from tactics.problems.protocol import Feature
from tests.engines import build, judge
from tests.reference_run import network as lowered
from tests.reference_run import run as reference


def heads() -> onnx.ModelProto:
    """Three of the same kind and one of another, as in an inception block."""
    n = Net("heads", (1, 32, 10, 10))
    ys = [n.relu(n.conv("x", f"b{i}", k, 1), f"r{i}") for i, k in enumerate((24, 16, 20))]
    ys.append(n.relu(n.conv("x", "wide", 8, 3), "wide_relu"))
    return n.finish(*(n.conv(y, f"after{i}", 16) for i, y in enumerate(ys)))


def first_block() -> onnx.ModelProto:
    """ResNet-50's first block: conv1 and the projection read the same tensor in the same way, one of them with an activation;
    the Add may go into conv3 or into the projection, whose residual then depends on conv1."""
    n = Net("block", (1, 32, 10, 10))
    y = n.relu(n.conv("x", "conv1", 16, 1), "relu1")
    y = n.conv(n.relu(n.conv(y, "conv2", 16, 3), "relu2"), "conv3", 64, 1)
    return n.finish(n.relu(n.add("Add", [y, n.conv("x", "proj", 64, 1)], "add", 64), "relu3"))


def exact(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same network with weights from -2 to 2: of small integers FP32 sums are exact in any order, on any BLAS."""
    rng = np.random.default_rng(5)
    for tensor in proto.graph.initializer:
        array = rng.integers(-2, 3, tuple(tensor.dims)).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return proto


def whole_numbers(*shape: int) -> dict[str, np.ndarray]:
    """The input "x" for `exact` networks: integers from -4 to 4."""
    return {"x": np.random.default_rng(6).integers(-4, 5, shape).astype(np.float32)}


def test_what_is_offered():
    net = siblings.merge(lowered(heads()))
    (name, options) = net.groups[-1]
    assert name == "siblings b0 || b1 || b2" and options == ("apart", "merged")
    merged = next(op for op in net.ops if op.layers)
    assert merged.layer == "b0 || b1 || b2" and merged.problem.k == 60 and merged.weights["w"].shape == (60, 32, 1, 1)
    parts = [op.problem.start[0] for op in net.ops if " out of " in op.name]
    assert parts == [0, 24, 40] and not any("wide" in op.name for op in net.ops if op.layers)


def test_nothing_is_offered_where_they_differ():
    for change in ({"stride": 2}, {"r": 3}, {"groups": 2}):
        n = Net("n", (1, 32, 8, 8))
        a, b = n.conv("x", "a", 16, 1), n.conv("x", "b", 16, **({"r": 1} | change))
        net = lowered(n.finish(a, b))
        assert siblings.merge(net) is net
    n = Net("n", (1, 32, 8, 8))
    net = lowered(n.finish(n.conv("x", "a", 12, 1), n.conv("x", "b", 16, 1)))
    assert siblings.merge(net) is net, "b would begin inside a vector"
    n = Net("n", (1, 32, 8, 8))
    net = lowered(n.finish(n.add("Sigmoid", [n.conv("x", "a", 16, 1)], "s", 16), n.conv("x", "b", 16, 1)))
    assert siblings.merge(net) is net, "a sigmoid is no slope"


@pytest.mark.parametrize("make", [heads, first_block])
def test_merged_computes_what_they_compute_apart(make):
    net = siblings.merge(lowered(exact(make())))
    x = whole_numbers(1, 32, 10, 10)
    group = net.groups[-1][0]
    apart, merged = (reference(net, x, {group: option}) for option in ("apart", "merged"))
    assert all(np.abs(y).max() > 100 for y in apart.values())
    assert all(np.array_equal(apart[name], merged[name]) for name in apart)


def pretend(merged_us: float, into_proj_us: float):
    """All kernels take 10 us, the merged one and the one that takes the Add in what is said."""

    def time(problem, tactics):
        tactics = list(tactics)
        us = 10.0
        if Feature.RESIDUAL in problem.needs and problem.r == 1 and problem.c == 32:
            us = into_proj_us
        elif getattr(problem, "k", 0) == 80:
            us = merged_us
        return {t: Time(us, us, us) for t in tactics}

    time.prepare = lambda work: None
    return time


def test_the_first_block_of_a_resnet_never_closes_a_cycle():
    """Merging conv1 with the projection and the Add's going into the projection are each legal, together they would close a
    cycle: the merged kernel would read what depends on it. The plan has one or the other, whichever is faster."""
    net = siblings.merge(lowered(first_block()))
    assert len(net.groups) == 2 and net.groups[-1][0] == "siblings conv1 || proj"
    io = {t.name: Format(t.dtype, "chw") for t in (*net.inputs, *net.outputs)}
    seen = set()
    for merged_us, into_us in ((1, 9), (19, 1), (1, 1), (19.5, 20)):
        table = tables.tabulate(net, named("h200"), pretend(merged_us, into_us), io=io, how=tables.Considered(False))
        chosen = plan.solve(table.graph)
        assert chosen.status == "proven"
        order(net, chosen)
        seen.add((chosen.options["siblings conv1 || proj"], chosen.options["add"]))
        totals = {}
        for options in itertools.product(*(o for _, o in net.groups)):  # the cost of each combination of options that is a plan
            pick = dict(zip((g for g, _ in net.groups), options, strict=True))
            live = [op for op in net.ops if plan.holds(op.when, pick)]
            made = {"x", *(op.output for op in live)}
            if all(t in made for op in live for t in op.inputs) and net.outputs[0].name in made:
                totals[options] = len(live)
        assert all(o != ("into proj", "merged") for o in totals)
    assert ("merged", "into conv3") in seen or ("merged", "apart") in seen
    assert ("apart", "into proj") in seen


def order(net, chosen) -> list[str]:
    """The plan's ops in an order in which every input comes first; fails on a cycle."""
    todo = [op for op in net.ops if op.name in chosen.entries and plan.holds(op.when, chosen.options)]
    made, found = {t.name for t in net.inputs}, []
    while todo:
        op = next((o for o in todo if set(o.inputs) <= made), None)
        assert op is not None, f"a cycle among {[o.name for o in todo]}"
        todo.remove(op)
        made.add(op.output)
        found.append(op.name)
    return found


@pytest.mark.parametrize("make", [heads, first_block])
def test_an_engine_with_merged_siblings_is_right_and_explained(make, tmp_path):
    onnx.save(make(), tmp_path / "m.onnx")
    engine = gr.build(tmp_path / "m.onnx", sparsity="force", device="h200", save_pruned=tmp_path / "p.onnx")
    names = [layer.name for layer in engine.plan.layers if " || " in layer.name and layer.tactic_name]
    assert names, "at batch 1 a launch less is faster"
    x = np.random.default_rng(1).standard_normal((1, 32, 10, 10)).astype(np.float32)
    judge(engine, tmp_path / "p.onnx", {"x": x})
    rows = {r.layer: r for r in engine.sparsity.rows}
    merged = next(name for name in rows if " || " in name)
    assert rows[merged].other and rows[merged].other_cost_us >= 0
    assert wording.rows_of(engine.record, [merged.split(" || ")[0]]) == [rows[merged]]
    wish = "dense" if rows[merged].verdict == "sparse" else "sparse"
    one = merged.split(" || ")[0]
    cost = what_if.what_if(engine.record, {one: wish})
    assert cost.after_us <= cost.before_us + rows[merged].other_cost_us + 1e-6, "one alone costs no more than all"


def inception(direct: str) -> onnx.ModelProto:
    """An inception block whose 1x1 branch is the first piece of its Concat, or the last, or between the others."""
    n = Net("inception", (1, 32, 9, 9))
    branches = {"direct": n.relu(n.conv("x", "direct", 24, 1), "direct_relu")}
    for name, k, r in (("b3", 16, 3), ("b5", 8, 5)):
        less = n.relu(n.conv("x", f"{name}_less", k, 1), f"{name}_less_relu")
        branches[name] = n.relu(n.conv(less, name, 2 * k, r), f"{name}_relu")
    order = {"first": ("direct", "b3", "b5"), "last": ("b3", "b5", "direct"), "middle": ("b3", "direct", "b5")}[direct]
    y = n.add("Concat", [branches[b] for b in order], "joined", 24 + 32 + 16, axis=1)
    return n.finish(n.conv(y, "after", 16, 1))


@pytest.mark.parametrize("direct", ["first", "last"])
def test_siblings_of_a_piece_lie_in_its_concats_memory(direct, tmp_path):
    net = siblings.merge(lowered(exact(inception(direct))))
    group, options = net.groups[-1]
    assert options == ("apart", "merged", "around joined")
    x = whole_numbers(1, 32, 9, 9)
    apart, *others = (reference(net, x, {group: option}) for option in options)
    assert all(np.array_equal(apart[name], other[name]) for other in others for name in apart)

    engine = build(tmp_path, inception(direct))
    types = [layer.type for layer in engine.plan.layers]
    assert types.count("conv") == 4 and "move" not in types and "concat" not in types
    assert types.count("reformat") == 1, "the network's input"
    judge(engine, tmp_path / "m.onnx", x)
    rows = {r.layer: r for r in engine.sparsity.rows}
    assert "direct || b3_less || b5_less" in rows


def test_a_piece_between_others_or_joined_twice_offers_nothing_more():
    assert siblings.merge(lowered(inception("middle"))).groups[-1][1] == ("apart", "merged")
    n = Net("twice", (1, 32, 9, 9))
    a, b = n.relu(n.conv("x", "a", 16, 1), "ra"), n.relu(n.conv("x", "b", 16, 1), "rb")
    net = siblings.merge(lowered(n.finish(n.add("Concat", [a, a, n.relu(n.conv(b, "c", 16, 3), "rc")], "joined", 48, axis=1))))
    assert net.groups[-1][1] == ("apart", "merged")
