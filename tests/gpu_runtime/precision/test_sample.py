"""Networks that are too large to be run as they are: what FP16 cannot hold is found on smaller inputs, by itself."""

import time

import numpy as np
import onnx
import pytest

from gpu_runtime.frontend.importer import load, sized
from gpu_runtime.fusion.fuse import fuse
from gpu_runtime.lowering.lower import lower
from gpu_runtime.precision import execution, ranges, sample
from tests.gpu_runtime.precision.test_ranges import lowered
from tests.reference_run import model, node


def overflowing(x: tuple[int | str, ...], *more: onnx.NodeProto) -> onnx.ModelProto:
    """64 channels to 64 by 3 x 3, twice: 'b' reaches some 150000 on values from 0 to 1, whatever the image's size."""
    w = {
        "w": np.full((64, 3, 3, 3), 1, np.float32),
        "v": np.full((64, 64, 3, 3), 20, np.float32),
        "u": np.full((4, 64, 1, 1), 1e-5),
    }
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "r"),
        node("Conv", "r v", "b", pads=[1, 1, 1, 1]),
        node("Relu", "b", "s"),
        node("Conv", "s u", "y"),
        *more,
    ]
    return model(nodes, {"x": x}, "y", {k: a.astype(np.float32) for k, a in w.items()})


@pytest.mark.parametrize(
    ("declared", "asked", "run"),
    [
        (("N", 3, "H", "W"), (4, 3, 1080, 1920), "1x3x136x256"),
        (("N", 3, 96, 96), (64, 3, 96, 96), "1x3x96x96"),
        ((1, 3, "H", 64), (1, 3, 16384, 64), "1x3x512x64"),
    ],
)
def test_a_large_network_is_run_on_smaller_inputs(declared, asked, run, tmp_path):
    """By itself, where the model leaves sizes open: what overflows FP16 is stored smaller, as if it had been run as it is."""
    (tmp_path / "m.onnx").write_bytes(overflowing(declared).SerializeToString())
    loaded = load(tmp_path / "m.onnx")
    network = fuse(lower(sized(loaded, {"x": asked})))
    assert execution.multiplications(network) > execution.QUICK.macs
    begun = time.process_time()
    _, found = ranges.fit(network, None, lambda images: sample.smaller(loaded, network, images))
    assert time.process_time() - begun < 20
    assert found.source == f"random values from 0 to 1, for inputs of {run}"
    assert set(found.exponents) == {"s"} and found.exponents["s"] < 0 and not found.stuck


def test_a_large_network_of_fixed_size_is_run_as_it_is(tmp_path):
    network = lowered(tmp_path, overflowing((1, 3, 256, 256)))
    assert execution.multiplications(network) > execution.QUICK.macs
    _, found = ranges.fit(network)
    assert found.source == "random values from 0 to 1" and found.exponents["s"] < 0


def test_one_image_is_run_where_a_batch_is_beyond_all_budgets(tmp_path):
    """Also of a calibration input, whose first image it is: no smaller sample is quick, since the image's size is given."""
    (tmp_path / "m.onnx").write_bytes(overflowing(("N", 3, 256, 256)).SerializeToString())
    loaded = load(tmp_path / "m.onnx")
    network = fuse(lower(sized(loaded, {"x": (48, 3, 256, 256)})))
    assert execution.too_large(network, execution.MOST) == "122.2 G multiplications"

    def smaller(images):
        return sample.smaller(loaded, network, images)

    _, found = ranges.fit(network, None, smaller)
    assert found.source == "random values from 0 to 1, for inputs of 1x3x256x256" and found.exponents["s"] < 0
    x = np.full((48, 3, 256, 256), 0.1, np.float32)
    x[0] = 1
    _, found = ranges.fit(network, {"x": x}, smaller)
    assert found.source == "the calibration input's first image" and found.exponents["s"] < 0


@pytest.mark.parametrize(
    ("nodes", "w", "why"),
    [
        (
            [node("Expand", "x to", "e"), node("ReduceMean", "e", "y", axes=[2, 3])],
            {"to": np.int64([1, 8, 8192, 8192])},
            "537 M",
        ),
        ([node("LpPool", "x", "y", kernel_shape=[2000, 2000], pads=[1999] * 4)], {}, "544.8 G mult"),
    ],
)
def test_what_takes_long_without_many_products_is_beyond_the_budget(nodes, w, why, tmp_path):
    network = lowered(tmp_path, model(nodes, {"x": (1, 8, 64, 64) if not w else (1, 8, 1, 1)}, "y", w))
    begun = time.process_time()
    with pytest.warns(RuntimeWarning, match=f"FP16's range is not checked: {why}"):
        assert ranges.fit(network)[1].source.startswith(f"not checked: {why}")
    assert time.process_time() - begun < 2


def test_sizes_that_are_tried():
    sizes = {"x": (8, 3, 1080, 1920), "z": (8, 7)}
    tried = list(sample.smaller_sizes(sizes, {"x": (0, 2, 3), "z": (0,)}))
    assert tried[0] == {"x": (1, 3, 1080, 1920), "z": (1, 7)} and tried[1]["x"] == (1, 3, 544, 960)
    assert tried[-1] == {"x": (1, 3, 32, 32), "z": (1, 7)} and all(d["x"][2] % 8 == 0 for d in tried)
    assert list(sample.smaller_sizes(sizes, {})) == [] == list(sample.smaller_sizes({"x": ()}, {"x": ()}))


def test_a_model_that_refuses_smaller_sizes_is_run_as_it_is(tmp_path, monkeypatch):
    """Its Reshape knows the image's size."""
    monkeypatch.setattr(execution, "QUICK", execution.Budget(10, 10))
    proto = overflowing((1, 3, "H", "W"), node("Reshape", "y shape", "out"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.int64([1, 4 * 64 * 64]), "shape"))
    proto.graph.output[0].name = "out"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    loaded = load(tmp_path / "m.onnx")
    network = fuse(lower(sized(loaded, {"x": (1, 3, 64, 64)})))
    assert sample.smaller(loaded, network, False) is None
