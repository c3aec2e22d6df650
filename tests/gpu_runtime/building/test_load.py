"""Builds run without the collector of cycles (errors.bounded): planning makes none that would wait for it."""

import gc

import onnx
import pytest

from benchmarks.networks import resnet50
from cuda_kernels.device import named
from gpu_runtime.building.fit import fit
from gpu_runtime.building.load import lowered
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.building.planner import Planner
from gpu_runtime.building.target import make_timer
from gpu_runtime.frontend import importer
from gpu_runtime.planning import io_formats
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.progress import ignore


@pytest.mark.filterwarnings("ignore:.*range is not checked:RuntimeWarning")
def test_plans_leave_nothing_to_collect(tmp_path):
    path = tmp_path / "resnet50.onnx"
    onnx.save(resnet50(batch=32), path)
    loaded = importer.load(path)
    network, _ = fit(loaded, lowered(loaded, None), None, ignore)
    ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
    planner = Planner(named("l4"), make_timer(named("l4")), BuildOptions(sparsity="enable"), ends)
    network = alternatives(network)
    gc.collect()
    gc.disable()
    try:
        plan = planner.in_pieces(*planner(network))
        found = gc.collect()
    finally:
        gc.enable()
    assert found == 0 and plan[1].us > 0
