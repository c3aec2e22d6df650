"""Tensor maps in an engine's launches: made for each context's memory, and refused where they describe other memory.

No plan has a kernel that takes a map: a copy by a map stands for the launch of a ReLU, whose inputs are positive.
"""

import io
import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.tensor_maps import Map
from gpu_runtime import engine as engines
from gpu_runtime.engine import Engine
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime import dataflow, verify
from gpu_runtime.runtime.plan_record import Container, TensorPlace
from tactics.families.hopper.maps import convolution_map, pixels_map
from tactics.format import DTYPES, Format, padded_channels, part_format, strides
from tactics.problems.problem import ConvProblem
from tactics.step import own_strides
from tests import crafted
from tests.copied_boxes import MAPPED, launch, relu


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return relu(tmp_path_factory.mktemp("relu"))


def mapped(plain, monkeypatch, m: Map = MAPPED, **scratch: int) -> Engine:
    """The engine with a copy by a map as its launch."""
    monkeypatch.setattr(verify, "_launches", lambda *_: (launch(m, (0, 0, 0, 0), (0, 0), 1024, **scratch),))
    return Engine(plain.record, plain.weights)


def test_a_map_is_made_for_each_contexts_memory(plain, monkeypatch):
    x = np.random.default_rng(0).uniform(1, 2, plain.inputs[0].shape).astype(np.float16)
    made = mapped(plain, monkeypatch)
    with made.context(device="emulator") as one, made.context(device="emulator") as other:
        for context in (one, other):
            assert np.array_equal(context.run({"x": x})["y"], x)
        (step,) = one.plan.steps
        assert ("map", replace(MAPPED, of=("arena", one.plan.layers[0].inputs[0].offset))) in step.args
        assert one._point._params[0] != other._point._params[0]


def test_no_file_has_a_map(plain, monkeypatch):
    data = engines.encode(plain)
    read = engines.decode(io.BytesIO(engines.encode(mapped(plain, monkeypatch))), len(data), "x.engine")
    assert engines.encode(plain) == data and "map" in dict(read.plan.steps[0].args)


OTHERS = {
    "a row more": replace(MAPPED, dims=(8, 65)),
    "channels more": replace(MAPPED, dims=(16, 64)),
    "wider pixels": replace(MAPPED, strides=(32,)),
    "larger elements": replace(MAPPED, dims=(8, 64), element="float32", box=(8, 32)),
    "another dimension": replace(MAPPED, dims=(8, 64, 2), strides=(16, 1024), box=(8, 64, 1)),
    "the output's": replace(MAPPED, of=("out", 0), dims=(8, 65)),
    "weights": replace(MAPPED, of=("weights", "w")),
    "workspace": replace(MAPPED, of=("workspace", 0)),
    "counters": replace(MAPPED, of=("counters", 0)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_map_of_other_memory_is_refused(plain, monkeypatch, case):
    m = OTHERS[case]
    made = mapped(plain, monkeypatch, m)
    section = verify.Section("y.w", "weights", 0, 1008)
    record = replace(plain.record, sections=(*plain.record.sections, section))
    with pytest.raises(
        EngineError, match=rf"layers\[0\].*: a tensor map describes memory outside of its argument, {m.of[0]} {m.of[1]}: "
    ):
        Engine(record, plain.weights).context(device="emulator")
    assert made.record == plain.record


def test_a_map_of_weights_and_of_scratch_memory_is_taken(plain, monkeypatch):
    sections = {"y.w": verify.Section("y.w", "weights", 256, 1024)}
    layer = plain.plan.layers[0]
    for of, scratch in ((("weights", "w"), {}), (("workspace", 0), {"workspace": 1024}), (("counters", 0), {"counters": 1024})):
        work = (launch(replace(MAPPED, of=of), (0, 0, 0, 0), (0, 0), 1024, **scratch),)
        verify._check_maps(layer, work, sections)
    with pytest.raises(verify.Fault, match="at byte 264"):
        work = (launch(replace(MAPPED, of=("weights", "w")), (0, 0, 0, 0), (0, 0), 1024),)
        verify._check_maps(layer, work, {"y.w": replace(sections["y.w"], offset=264)})


def by_family(problem, tactic, strided=None):
    """The copy as a family makes it, from what an engine says."""
    n, c, h, w = problem.in_shapes[0]
    if c != 8 or tactic.ins[0].layout != "hwc8" or n * h * w > 256:
        raise ValueError("one box of 8 channels and up to 256 pixels alone")
    x = (strided or own_strides(problem, tactic))[0]
    m = Map(("in", 0), (8, n * h * w), (2 * x.pixel,), box=(8, n * h * w))
    return (launch(m, (0, 0, 0, 0), (0, 0), 16 * n * h * w),)


def test_crafted_places_shapes_and_tactics(plain, monkeypatch, tmp_path):
    """Whatever an engine's file says, a copy by a map touches no other memory: the emulator would say so."""
    monkeypatch.setattr(verify, "_launches", by_family)
    data, came = engines.encode(plain), Counter()
    for number in range(300):
        rng = np.random.default_rng(number)
        plan, arena = crafted.opened(data)
        crafted.change(rng, plan, ("layers", "layers", "memory", "inputs", "outputs"))
        if number % 2:
            with suppress(ValueError, TypeError, KeyError, IndexError, ArithmeticError, AttributeError):
                crafted.agree(plan)
        came[crafted.attempt(crafted.sealed(plan, arena), tmp_path / "x.engine").partition("\t")[0]] += 1
    assert came["refused"] > 200 and came["fine"] > 0, came


# ---- which bytes are a tensor's


def places(pick: random.Random) -> TensorPlace:
    """A tensor on its own or inside another one, as verify._check_place lets it."""
    while True:
        n, c, h, w = pick.randint(1, 3), pick.choice((8, 16, 24, 32, 40, 64)), pick.randint(1, 4), pick.randint(1, 4)
        whole = Format("fp16", pick.choice(("hwc8", "hwc16", "chw32", "chw")))
        if pick.random() < 0.4:
            return TensorPlace("t", (n, c, h, w), whole, 256)
        first, behind = (8 * pick.randrange(9) for _ in range(2))
        shape = (n, first + c + behind, h, w)
        fmt = next(
            (
                f
                for f in map(Format, ["fp16"] * 4, ("hwc8", "hwc16", "chw32", "chw"))
                if part_format(whole, shape, first, c) == verify.canonical(f, (n, c, h, w))
            ),
            None,
        )
        if fmt:
            inside = Container(shape, whole, 256, first)
            return TensorPlace("t", (n, c, h, w), fmt, inside.first_byte, inside)


def tensor_bytes(t: TensorPlace) -> set[int]:
    """By the address rule, element by element."""
    s, item, (n, c, h, w) = strides(t.whole.format, t.whole.shape4), DTYPES[t.format.dtype].itemsize, t.shape4
    log2v, found = s.log2v, set()
    for i in range(n):
        for k in range(padded_channels(t.format.layout, c)):
            for j in range(h * w):
                at = t.offset + (i * s.n + (k >> log2v) * s.block + (k & ((1 << log2v) - 1)) + j * s.pixel) * item
                found |= {*range(at, at + item)}
    return found


def map_bytes(m: Map, offset: int) -> set[int]:
    places = np.array([offset])
    for d, step in zip(m.dims, (2, *m.strides), strict=True):
        places = np.add.outer(places, np.arange(d) * step).reshape(-1)
    return {*(int(p) + i for p in places for i in range(2))}


def test_what_holds_is_inside():
    """Maps of the tensor itself, and such with other sizes and strides."""
    pick, seen = random.Random(0), {True: 0, False: 0}
    for _ in range(3000):
        t = places(pick)
        n, c, h, w = t.shape4
        s = strides(t.whole.format, t.whole.shape4)
        dims, steps = [padded_channels("hwc8", c), w, h, n], [2 * s.pixel, 2 * s.pixel * w, 2 * s.n]
        for _ in range(pick.randrange(3)):
            if pick.random() < 0.5:
                dims[pick.randrange(4)] = pick.choice((1, 2, 3, 5, 8, 16, 48))
            else:
                steps[pick.randrange(3)] = pick.choice((16, 32, 64, 80, 512))
        if any(step % 16 for step in steps):
            continue
        m = Map(("in", 0), tuple(dims), tuple(steps), box=(8, 1, 1, 1))
        held = dataflow.holds(t, m)
        assert not held or map_bytes(m, t.offset) <= tensor_bytes(t), (t, m)
        seen[held] += 1
    assert min(seen.values()) > 300, seen


def test_maps_of_convolutions_hold():
    pick, planes = random.Random(1), 0
    for _ in range(600):
        t = places(pick)
        n, c, h, w = t.shape4
        s = strides(t.whole.format, t.whole.shape4)
        for p in (ConvProblem(n, c, h, w, 8, 3, 3, pad=(1, 1, 1, 1)), ConvProblem(n, c, h, w, 8, 1, 1)):
            try:
                m = (convolution_map if p.r == 3 else pixels_map)(p, s, 64, 64)
            except ValueError:
                planes += 1
                continue
            assert dataflow.holds(t, m) and map_bytes(m, t.offset) <= tensor_bytes(t), (t, m)
    assert 100 < planes < 900
