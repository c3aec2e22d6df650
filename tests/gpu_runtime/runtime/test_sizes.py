"""Which plan of an engine of several sizes takes which inputs, and what a file with wrong ones is told."""

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.engine import encode
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import sizes
from tests.gpu_runtime.test_engine import decode, reheaded
from tests.reference_run import model, node

W = {"w": (np.random.default_rng(0).standard_normal((8, 8, 3, 3)) / 8).astype(np.float32)}


@pytest.fixture(scope="module")
def engine():
    """Images of 6x6, 1 to 256 of them, and two of 9x5."""
    proto = model([node("Conv", "x w", "y", pads=(1, 1, 1, 1))], {"x": ("n", 8, "h", "w")}, "y", W)
    wanted = [{"x": ((1, 8, 6, 6), (4, 8, 6, 6), (256, 8, 6, 6))}, {"x": (2, 8, 9, 5)}]
    return gr.build(proto, device="h200", shapes=wanted)


def test_each_batch_runs_by_the_next_larger_plan(engine):
    first, second = engine.record.profiles
    assert engine.points[0] == 4 and engine.points[-1] == 256 and second.plans == (len(engine.points),)
    for rows in range(1, 257):
        found = sizes.fit(engine.record, {"x": (rows, 8, 6, 6)})
        assert found.rows == rows <= found.batch == min(n for n in engine.points if n >= rows)
        assert engine.record.plans[found.plan].inputs[0].shape == (found.batch, 8, 6, 6)
    assert engine.record.plans[sizes.fit(engine.record, {"x": (2, 8, 9, 5)}).plan].inputs[0].shape == (2, 8, 9, 5)
    assert sizes.fit(engine.record, {}).batch == 4  # nothing is named: the optimal batch


def test_what_callers_see(engine):
    (x,), (y,) = engine.inputs, engine.outputs
    assert str(x) == "x 1..256x8x6x6 float32" and x.shape == (4, 8, 6, 6) and (x.shape[0].min, x.shape[0].max) == (1, 256)
    assert repr(x.shape) == "(1..256, 8, 6, 6)" and np.zeros(y.shape, y.dtype).shape == (4, 8, 6, 6)
    other = engine.at({"x": (2, 8, 9, 5)})
    assert other.inputs[0].shape == (2, 8, 9, 5) and other.plan is engine.record.plans[-1] and other.weights is engine.weights
    assert engine.at(9).plan.inputs[0].shape[0] == sizes.fit(engine.record, {"x": (9, 8, 6, 6)}).batch


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (257, "x: expected 1 to 256 rows of 8x6x6, got 257; more take an engine built with a larger --maxShapes"),
        (0, "x: expected 1 to 256 rows of 8x6x6, got 0"),
        ({"x": (2, 8, 9, 6)}, "expected one of the engine's sizes, x 1 to 256 x 8x6x6; x 2x8x9x5, got x 2x8x9x6"),
        ({"y": (1, 8, 6, 6)}, "shapes: there is no input 'y', expected x"),
    ],
)
def test_sizes_that_it_does_not_take(engine, shapes, sentence):
    with pytest.raises(ValueError) as told:
        engine.at(shapes)
    assert str(told.value) == sentence


def test_an_engine_of_one_size_has_no_other():
    proto = model([node("Conv", "x w", "y")], {"x": (1, 8, 6, 6)}, "y", W)
    one = gr.build(proto, device="h200")
    assert one.points == () and one.at(1).plan is one.plan and type(one.inputs[0].shape[0]) is int
    with pytest.raises(ValueError, match="x: expected 1x8x6x6, the engine's only size, got 2x8x6x6"):
        one.at(2)


def test_equal_weights_stand_once_in_the_file(engine):
    """Every plan's sections are found in the file, and no two of the file's are equal but within one plan."""
    held = {s.name: s.sha256 for s in engine.record.sections}
    assert len(held) < sum(len(p.layers) for p in engine.record.plans)
    again = decode(encode(engine))
    assert again.record == engine.record and again.checked
    assert len(encode(engine)) < 3 * len(encode(engine.at(4)))


def shrink(plans):
    """A quarter of a row for each image: as many at each batch, yet no whole number."""
    for plan in plans:
        n, c, h, w = plan["outputs"][0]["shape"]
        plan["outputs"][0].update(shape=[n // 4, c, 2 * h, 2 * w])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p["profiles"][0].update(plans=[0]), "profiles: expected each of"),
        (
            lambda p: p["profiles"][0].update(max=300),
            "profiles.0.: expected min <= opt <= max, and plans of rising batches",
        ),
        (lambda p: p["profiles"][0].update(min=5), "profiles.0.: expected min <= opt <= max"),
        (
            lambda p: p["profiles"][0].update(batched=["z"]),
            "profiles.0..batched: expected inputs and outputs that have",
        ),
        (lambda p: p["profiles"][0].update(batched=["x"]), "outputs 'y' has shape"),
        (lambda p: shrink(p["plans"][:-1]), "outputs 'y' has shape"),
        (lambda p: p["plans"][0].update(renamed={"a": "b"}), "plans.0.: renamed: there is no section 'b'"),
        (lambda p: p.update(shown=99), "shown: there is no plan 99"),
        (lambda p: p["plans"][1]["inputs"][0].update(name="u"), "plans of rising batches"),
        (lambda p: p["plans"][1]["outputs"][0].update(name="u"), "the outputs of its plans have different names or types"),
        (lambda p: p["plans"][0]["inputs"][0].update(shape=[]), "expected inputs and outputs that have a first size"),
        (lambda p: p["plans"][1]["inputs"][0].update(shape=[]), "plans of rising batches"),
        (lambda p: p["plans"].pop(), "profiles: expected each of"),
    ],
)
def test_a_file_with_wrong_profiles_is_refused(engine, change, sentence):
    with pytest.raises(EngineError, match=sentence):
        decode(reheaded(encode(engine), change))


def test_an_engine_of_other_kernels_is_shown_without_what_only_they_know(engine):
    """Which sections its layers read, and in what order they add."""
    from dataclasses import replace

    from gpu_runtime.explain import points

    plans = tuple(replace(p, steps=(), frees=()) for p in engine.record.plans)
    text = points.points_text(replace(engine.record, source_hash="0" * 64, plans=plans))
    assert "  -" in text and "same bits" not in text and "A context takes the largest arena" in text


def test_a_section_of_one_plan_that_is_missing_is_named(engine):
    """All hashes and offsets fit again: only the plan that reads the section notices."""
    import json
    import struct

    from gpu_runtime import engine_header

    data = encode(engine)
    (length,) = struct.unpack("<Q", data[:8])
    plan = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["plan"])
    gone = plan["sections"].pop()
    arena = data[8 + length :][: gone["offset"]]
    plan["plan_sha256"] = engine_header.plan_sha256(plan)
    header = engine_header.header_of(plan, len(arena))
    with pytest.raises(EngineError, match="expected a section .* bytes, got None|renamed: there is no section"):
        decode(struct.pack("<Q", len(header)) + header + arena)
