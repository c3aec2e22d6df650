"""The collector of cycles while plans are made: it would find nothing, and stands as it stood afterwards."""

import gc
from dataclasses import replace

import onnx
import pytest

from benchmarks.networks import resnet50
from cuda_kernels.device import named
from gpu_runtime.frontend import importer
from gpu_runtime.planning import io_formats, stages
from gpu_runtime.progress import ignore
from gpu_runtime.rewrites.alternatives import alternatives
from gpu_runtime.target import make_timer


@pytest.mark.filterwarnings("ignore:.*range is not checked:RuntimeWarning")
def test_plans_leave_nothing_to_collect(tmp_path):
    """Otherwise a planner that runs without the collector would keep memory until it is done."""
    path = tmp_path / "resnet50.onnx"
    onnx.save(resnet50(batch=32), path)
    loaded = importer.load(path)
    network, _ = stages.fit(loaded, stages.lowered(loaded, None), None, ignore)
    ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
    planner = stages.Planner(named("l4"), "enable", make_timer(named("l4"), None), ends, ignore)
    seen: list[bool] = []
    planner = replace(planner, progress=lambda _: seen.append(gc.isenabled()))
    network = alternatives(network)
    gc.collect()
    gc.disable()
    try:
        plan = planner.in_pieces(*planner(network))
        found = gc.collect()
    finally:
        gc.enable()
    assert found == 0 and plan[1].us > 0
    planner(network)
    assert seen and not any(seen) and gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), stages.uncollected(), stages.uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
