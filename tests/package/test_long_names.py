"""Names as long as no exporter writes them: refused early where a model gives them, cut where fusions make them of many."""

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.text import MOST_NAME, shortened
from tests.engines import check_engine
from tests.reference_run import model, node


def branches(count: int, length: int):
    """Convolutions of one input, which may be one launch, with names of that length, and their Concat."""
    names = [f"b{i}_" + "n" * (length - 5) for i in range(count)]
    nodes = [node("Conv", f"x w{i}", name) for i, name in enumerate(names)]
    nodes.append(node("Concat", " ".join(names), "y", axis=1))
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((8, 8, 1, 1)).astype(np.float32) for i in range(count)}
    return model(nodes, {"x": (1, 8, 4, 4)}, "y", weights)


@pytest.mark.parametrize("length", [MOST_NAME + 1, 16_385, 100_000])
def test_a_name_that_is_too_long_is_the_model_s_fault(length):
    with pytest.raises(gr.ModelError, match=r"the name 'b0_n.*'\.\.\. takes \d+ characters .* expected 4096") as e:
        gr.build(branches(2, length), device="h200")
    assert "could not be loaded again" not in str(e.value) and len(str(e.value)) < 300


@pytest.mark.parametrize(("count", "length"), [(3, 4000), (6, 3000), (12, 1500)])
def test_names_that_fusions_make_are_cut(tmp_path, count, length):
    """Of siblings in one launch, whose names together are longer than an engine's file takes."""
    engine = check_engine(tmp_path, branches(count, length))
    assert all(len(layer.name) < 3 * MOST_NAME for layer in engine.plan.layers)
    assert gr.load(tmp_path_saved(engine, tmp_path)).plan == engine.plan


def tmp_path_saved(engine, folder):
    engine.save(folder / "long.engine")
    return folder / "long.engine"


def test_names_that_differ_stay_apart():
    a, b = "n" * 9000 + "a", "n" * 9000 + "b"
    assert shortened(a) != shortened(b) and len(shortened(a)) < MOST_NAME and shortened("short") == "short"
