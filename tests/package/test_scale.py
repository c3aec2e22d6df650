"""Building stays cheap as graphs grow: work is counted rather than timed, so that other programs cannot fail a test."""

import collections
import cProfile
import io
import sys
import time
from pathlib import Path

import onnx
import pytest

from benchmarks.bench_scale import KINDS, _Net, stage_seconds
from cuda_kernels.device import named
from gpu_runtime import ModelError, build
from gpu_runtime import load as load_engine
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files import check, load
from gpu_runtime.frontend.queries import constant
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from gpu_runtime.planning import tables
from gpu_runtime.planning.alternatives import alternatives
from tactics.format import Format
from tactics.measure import timing
from tests.conftest import ROOT

DEVICE = named("h200")
OURS = tuple(str(Path(__file__).parents[2] / folder) for folder in ("gpu_runtime", "tactics", "cuda_kernels"))


@pytest.fixture
def model(tmp_path):
    """(kind, nodes) -> path of that graph's file."""

    def saved(kind: str, nodes: int) -> Path:
        path = tmp_path / f"{kind}{nodes}.onnx"
        onnx.save(KINDS[kind](nodes), path)
        return path

    return saved


def lines_run(function, *args, **options) -> collections.Counter:
    """How often a line of ours runs, by the function that it is in; each turn of a loop or comprehension counts."""
    found = collections.Counter()

    def enter(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        name = f"{Path(code.co_filename).stem}.{code.co_qualname}"

        def line(frame, event, _):
            found[name] += event == "line"
            return line

        return line

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function(*args, **options)
    finally:
        sys.settrace(before)
    return found


def test_problems_alike_are_timed_once_and_share_their_entries(model):
    network = alternatives(fuse.fuse(lower.lower(importer.read(model("convs", 12)))))
    io = {t.name: Format(t.dtype, "chw") for t in (*network.inputs, *network.outputs)}
    asked, predicted = collections.Counter(), timing.Predicted(DEVICE)

    def timer(problem, tactics):
        asked[problem] += 1
        return predicted(problem, tactics)

    timer.prepare = predicted.prepare
    table = tables.tabulate(network, DEVICE, timer, io=io, how=tables.Considered(True))
    convs = [op for op in network.ops if op.layer]
    assert len(convs) == 12 and len({op.problem for op in convs}) == 1
    assert asked[convs[0].problem] == 3  # at the network's input, at its output, and all between
    assert max(asked.values()) == 3
    inner = [c.entries for c in table.graph.choices if c.name in {op.name for op in convs[1:-1]}]
    assert all(entries is inner[0] for entries in inner)


def test_each_stage_of_the_benchmark_is_a_part_of_a_build(model):
    with stage_seconds() as spent:
        build(model("branches", 10), device="h200", sparsity="force")
    assert all(spent.values()), spent


# Of 32 to 64 convolutions of one tensor the planner searches longer for an order of elimination: from 24 on, no trend is seen.
LONG = [("fan", 60), ("reshapes", 24), ("concats", 24), ("ladder", 18), ("conv_fan", 24)]
GROWING = [
    pytest.param("chain", 40, marks=pytest.mark.full),
    pytest.param("split", 60, marks=pytest.mark.long),
    pytest.param("convs", 6, marks=pytest.mark.full),
    *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
]


@pytest.mark.parametrize("kind, nodes", GROWING)
def test_work_grows_with_the_graph_and_no_faster(model, kind, nodes):
    """From n to 2n and from 2n to 4n nodes: the second step takes twice the lines of the first, not four times. All weights
    have the 2:4 pattern, so that every layer has a counterfactual."""
    paths = [model(kind, n) for n in (nodes, 2 * nodes, 4 * nodes)]
    build(paths[0], device="h200", sparsity="force")  # fills caches, so that work done once is not counted
    small, middle, large = (sum(lines_run(build, p, device="h200", sparsity="force").values()) for p in paths)
    assert large - middle < 2.4 * (middle - small), (small, middle, large)


def running_sums(n: int) -> onnx.ModelProto:
    """Of n convolutions of one tensor, each sum up to one of them is also read by something else."""
    net = _Net()
    total, others = net.conv("x"), []
    for _ in range(n - 1):
        total = net.add("Add", total, net.conv("x", size=1))
        others.append(net.add("Sigmoid", total))
    return net.model(net.joined([total, *others]))


@pytest.mark.parametrize(
    "graph", [KINDS["branches"], pytest.param(running_sums, marks=pytest.mark.full)], ids=["branches", "running_sums"]
)
def test_sums_of_branches_are_found_in_linear_work(graph, tmp_path):
    """As one convolution in the options of the plan, and in the patterns that pruning keeps."""
    found = []
    for nodes in (40, 80, 160):
        onnx.save(graph(nodes), tmp_path / "m.onnx")
        imported = importer.read(tmp_path / "m.onnx")
        lines = lines_run(lambda imported=imported: (fuse.fuse(lower.lower(imported)), fuse.sums(imported)))
        found.append(sum(n for name, n in lines.items() if name.startswith("branches.")))
    small, middle, large = found
    assert 0 < large - middle < 2.1 * (middle - small), found


@pytest.mark.full
def test_a_thousand_convolutions_are_planned_in_seconds(model):
    start = time.process_time()
    build(model("convs", 1000), device="h200", sparsity="enable")
    assert time.process_time() - start < 20  # 4 to 6 on a quiet machine


def test_graphs_beyond_the_limit_are_refused_before_they_are_looked_at(model, monkeypatch):
    page = (ROOT / "docs" / "planner.md").read_text()
    assert f"more than {load.LARGEST_GRAPH['nodes']:,} nodes are refused" in page
    monkeypatch.setitem(load.LARGEST_GRAPH, "nodes", 10)
    monkeypatch.setattr(check, "check_graph", None)
    with pytest.raises(ModelError, match="11 nodes, expected 10 at most"):
        importer.read(model("chain", 11))


@pytest.mark.parametrize("kind", [k for k in load.LARGEST_GRAPH if k != "nodes"])
def test_one_node_cannot_hide_a_graph_of_a_million_names(kind, monkeypatch, tmp_path):
    """What libraries read in quadratic time is counted first, in files that have hardly a node."""
    monkeypatch.setattr(check, "check_graph", None)
    proto = onnx.helper.make_model(onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [], []))
    graph, count = proto.graph, load.LARGEST_GRAPH[kind] + 1
    for i in range(count):
        if kind == "initializers":
            graph.initializer.add().name = f"w{i}"
        elif kind in ("inputs", "outputs"):
            (graph.input if kind == "inputs" else graph.output).add().name = f"v{i}"
        elif kind == "attributes of nodes":
            graph.node[0].attribute.add().name = f"a{i}"
        elif kind == "imported opsets":
            proto.opset_import.add().domain = f"d{i}"
        else:
            graph.node[0].input.append("x")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    start = time.process_time()
    with pytest.raises(ModelError, match=rf"its graph has \d+ {kind}, expected {load.LARGEST_GRAPH[kind]} at most"):
        build(tmp_path / "m.onnx")
    assert time.process_time() - start < 5


@pytest.mark.slow
def test_engines_are_checked_in_time_that_grows_with_their_layers(model):
    """Instructions, not seconds: calls of Python's functions while an engine is read, by its number of layers."""
    found = []
    for n in (50, 100, 200):
        data = io.BytesIO()
        build(model("convs", n), device="h200").save(data)
        counted = cProfile.Profile()
        counted.runcall(load_engine, data.getvalue())
        found.append(sum(row.callcount for row in counted.getstats()))
    small, middle, large = found
    assert 0 < large - middle < 2.1 * (middle - small), found


def test_what_onnx_checks_and_converts_holds_no_large_weights(model, monkeypatch):
    path, seen = model("shapes", 40), []
    checks = check.check_schema
    monkeypatch.setattr(check, "check_schema", lambda proto: [seen.append(proto.ByteSize()), checks(proto)])
    imported = importer.read(path)
    assert path.stat().st_size > 2_000_000 and seen[0] < 1_000_000
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    assert [v.name for v in imported.model.graph.inputs] == ["x"]
    for node in imported.model.graph:
        if node.op_type == "Conv":
            assert (constant(node.inputs[1]) == stored[node.inputs[1].name]).all()


def test_a_thousand_functions_between_a_convolution_and_its_add(tmp_path):
    """What ends a convolution, an activation behind another, is looked for back through all of them, and not by recursion."""
    net = _Net()
    x = net.conv("x")
    for i in range(1100):
        x = net.add(("Sigmoid", "Tanh")[i % 2], x)
    onnx.save(net.model(net.add("Add", x, "x")), tmp_path / "deep.onnx")
    ops = fuse.fuse(lower.lower(importer.read(tmp_path / "deep.onnx"))).ops
    assert ops[0].nodes == ("n0", "n1", "n2")
    assert "n1101" not in ops[-2].nodes  # the Add is no part of the chain


def test_no_more_siblings_are_merged_than_their_names_can_bear(model):
    network = alternatives(fuse.fuse(lower.lower(importer.read(model("conv_fan", 80)))))
    merged = [op.layers for op in network.ops if len(op.layers) > 1]
    assert [*map(len, merged)] == [32, 8]
