"""Building stays cheap as graphs grow: work is counted rather than timed, so that other programs cannot fail a test."""

import collections
from pathlib import Path

import onnx
import pytest

from benchmarks.bench_scale import KINDS
from cuda_kernels.device import named
from gpu_runtime import fuse, lower, onnx_import, pipeline, planning
from tactics import timing
from tactics.format import Format

DEVICE = named("h200")


@pytest.fixture
def model(tmp_path):
    """(kind, nodes) -> path of that graph's file."""

    def saved(kind: str, nodes: int) -> Path:
        path = tmp_path / f"{kind}{nodes}.onnx"
        onnx.save(KINDS[kind](nodes), path)
        return path

    return saved


def test_problems_alike_are_timed_once_and_share_their_entries(model):
    network = pipeline.alternatives(lower.lower(fuse.fuse(onnx_import.read(model("convs", 12)))))
    io = {t.name: Format(t.dtype, "chw") for t in (*network.inputs, *network.outputs)}
    asked, predicted = collections.Counter(), timing.predicted(DEVICE)

    def timer(problem, tactics):
        asked[problem] += 1
        return predicted(problem, tactics)

    table = planning.tabulate(network, DEVICE, timer, sparse=True, io=io)
    convs = [op for op in network.ops if op.layer]
    assert len(convs) == 12 and len({op.problem for op in convs}) == 1
    assert asked[convs[0].problem] == 3  # at the network's input, at its output, and all between
    assert max(asked.values()) == 3
    inner = [c.entries for c in table.graph.choices if c.name in {op.name for op in convs[1:-1]}]
    assert all(entries is inner[0] for entries in inner)
