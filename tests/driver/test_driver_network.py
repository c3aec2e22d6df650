"""Plans as a whole on the emulated driver, where a kernel may last longer behind another one than behind itself."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

import gpu_runtime as gr
from benchmarks.gpu_networks import fewer_tactics
from gpu_runtime.engine import encode
from gpu_runtime.explain import log, report
from gpu_runtime.planning import batch_pieces, tables
from tactics.measure.timing import Time
from tests.emulated_driver.settings import Behind
from tests.gpu_runtime.planning.test_batch_pieces import forced
from tests.on_driver import passes, timed
from tests.reference_run import model, node, ort_run, relative_error

offer, of_pieces = batch_pieces.offer, tables._of_pieces

pytestmark = [pytest.mark.driver, timed]


def built(cache: Path) -> gr.Engine:
    rng = np.random.default_rng(0)
    weights = {"a": rng.standard_normal((32, 64, 3, 3)) * 0.1, "b": rng.standard_normal((32, 32, 3, 3)) * 0.1}
    pads = {"pads": [1, 1, 1, 1]}
    layers = [node("Conv", "x a", "c", **pads), node("Relu", "c", "r"), node("Conv", "r b", "y", **pads)]
    proto = model(layers, {"x": (1, 64, 8, 8)}, "y", {k: w.astype(np.float32) for k, w in weights.items()})
    with fewer_tactics():
        return gr.build(proto, sparsity="force", timing_cache=cache)


def undisturbed() -> None:
    """No layer is found to take another time in its place, and no tactic is replaced."""
    with tempfile.TemporaryDirectory() as folder:
        engine = built(Path(folder) / "times")
        solution = engine.plan.solution
        assert solution.measured_us and solution.total_us < solution.measured_us < 1.5 * solution.total_us
        assert not solution.apart and not solution.replaced
        assert f"{solution.measured_us:.2f} us measured end to end" in report.plan_text(engine.record)
        print(*[layer.tactic.kernel for layer in engine.plan.layers if layer.tactic])


def slowed() -> None:
    """The layer that takes longer in its place is named and gets another tactic; the whole is as fast as the log says; a
    second build measures nothing and gives the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "times"
        engine = built(cache)
        first = cache.read_bytes()
        solution = engine.plan.solution
        (apart,) = solution.apart
        assert apart.us > 1.4 * apart.alone_us and apart.behind
        assert [r.op for r in solution.replaced] and not solution.replaced[0].after.startswith("conv_sparse24")
        assert solution.measured_us < 0.95 * solution.replaced[0].before_us
        text = log.log_text(engine.record, 100, 200)
        assert f"{apart.layer} took {apart.us:.2f} us behind {apart.behind}" in " ".join(text.split())
        assert f"instead of {solution.replaced[0].before_us:.2f} us" in " ".join(text.split())
        again = built(cache)
        assert cache.read_bytes() == first and encode(again) == encode(engine)


def pieces() -> None:
    """A batch in pieces, measured, and then as a whole beside the plan without pieces, which is faster here."""
    rng = np.random.default_rng(1)
    weights = {"a": rng.standard_normal((16, 8, 3, 3)) * 0.1, "b": rng.standard_normal((16, 16, 1, 1)) * 0.1}
    layers = [node("Conv", "x a", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "r"), node("Conv", "r b", "y")]
    proto = model(layers, {"x": (5, 8, 6, 6)}, "y", {k: w.astype(np.float32) for k, w in weights.items()})
    engines = []
    for only in (True, False):
        with pytest.MonkeyPatch.context() as patch, fewer_tactics():
            forced(patch, lambda n: (3, 2))
            if not only:  # every block has the choice, and its pieces are thought to take no time
                patch.setattr(batch_pieces, "offer", offer)
                patch.setattr(tables, "_of_pieces", lambda *asked: {t: Time(0.001, 0.001, 0.001) for t in of_pieces(*asked)})
            engines.append(gr.build(proto, timing_cache=False))
    images = [sorted({layer.images for layer in engine.plan.layers if layer.images}) for engine in engines]
    assert images == [[(0, 3), (3, 2)], []]
    assert all(engine.record.device.measured and engine.plan.solution.measured_us for engine in engines)
    assert engines[1].plan.solution.replaced
    x = rng.uniform(-1, 1, (5, 8, 6, 6)).astype(np.float32)
    expected = ort_run(proto, {"x": x})["y"]
    for engine in engines:
        with engine.context() as context:
            assert relative_error(context.run({"x": x})["y"], expected) < 2e-3


def limited() -> None:
    """A batch in pieces since its activations may take no more: measured, alone and as a whole, and run."""
    rng = np.random.default_rng(2)
    weights = {"a": rng.standard_normal((32, 8, 3, 3)) * 0.1, "b": rng.standard_normal((8, 32, 3, 3)) * 0.1}
    layers = [node("Conv", "x a", "c", pads=[1] * 4), node("Relu", "c", "r"), node("Conv", "r b", "y", pads=[1] * 4)]
    proto = model(layers, {"x": (4, 8, 6, 6)}, "y", {k: w.astype(np.float32) for k, w in weights.items()})
    with fewer_tactics():
        whole = gr.build(proto, timing_cache=False)
        allowed = whole.plan.memory.activation_bytes - 1
        engine = gr.build(proto, timing_cache=False, activations=allowed)
    assert not any(layer.images for layer in whole.plan.layers) and any(layer.images for layer in engine.plan.layers)
    assert engine.record.device.measured and engine.plan.solution.measured_us and engine.plan.solution.status == "proven"
    assert engine.plan.memory.activation_bytes <= allowed < engine.plan.solution.rivals.whole_bytes
    x = rng.uniform(-1, 1, (4, 8, 6, 6)).astype(np.float32)
    with engine.context() as context:
        assert relative_error(context.run({"x": x})["y"], ort_run(proto, {"x": x})["y"]) < 2e-3


def test_a_batch_in_pieces_for_want_of_memory_is_measured():
    passes(limited, checks=False)


def test_a_batch_in_pieces_is_measured_beside_the_whole_batch():
    passes(pieces, checks=False)


def test_an_undisturbed_network_keeps_its_plan():
    kernels = passes(undisturbed, checks=False).split()
    assert kernels[0] == "move" and kernels[1].startswith("conv_sparse24"), "the other test slows one behind the other"


def test_a_tactic_that_is_slow_in_its_place_is_found_and_replaced():
    passes(slowed, checks=False, behind=(Behind("conv_sparse24*", "move*", 1.8),))


def whole_of_composites() -> None:
    """A transposed convolution, and a squeeze-excite behind a depthwise convolution: kernels that launch others' sources."""
    rng = np.random.default_rng(0)
    shapes = {"d": (16, 1, 3, 3), "s": (8, 16, 1, 1), "e": (16, 8, 1, 1), "t": (16, 16, 3, 3)}
    layers = [
        node("Conv", "x d", "a", pads=[1, 1, 1, 1], group=16),
        node("Relu", "a", "b"),
        node("GlobalAveragePool", "b", "p"),
        node("Conv", "p s", "f"),
        node("Relu", "f", "g"),
        node("Conv", "g e", "h"),
        node("Sigmoid", "h", "i"),
        node("Mul", "b i", "j"),
        node("ConvTranspose", "j t", "y", strides=[2, 2]),
    ]
    weights = {name: (0.2 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    proto = model(layers, {"x": (1, 16, 8, 8)}, "y", weights)
    with tempfile.TemporaryDirectory() as folder, fewer_tactics():
        engine = gr.build(proto, timing_cache=Path(folder) / "times")
        x = rng.standard_normal((1, 16, 8, 8)).astype(np.float32)
        assert relative_error(engine.context().run({"x": x})["y"], ort_run(proto, {"x": x})["y"]) < 5e-3
        timed = [json.loads(line) for line in (Path(folder) / "times").read_text().splitlines()]
        names = {row["tactic"].split("_hmma")[0].split("__")[0] for row in timed if "us" in row}
        print(engine.record.timing.kind, *sorted(names))


def test_kernels_that_launch_other_kernels_sources_are_timed():
    kind, *kernels = passes(whole_of_composites, seconds=300).split()
    assert kind == "measured" and any(k.startswith("transpose_") for k in kernels), kernels
    assert any(k.startswith("depthwise_scaled") for k in kernels), kernels
