"""Tensor maps that the driver encodes: copies by them on a GPU, and on the emulated driver the bytes of our encoder."""

from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.device import current, why_no_gpu
from cuda_kernels.driver import DriverError
from cuda_kernels.launch import Cuda
from cuda_kernels.tensor_maps import SIZES, Map, encode, encode_by_driver
from gpu_runtime.engine import Engine
from gpu_runtime.runtime import verify
from tactics.sampling.trial import Addresses, loaded, runner, scratch_for
from tests.copied_boxes import CASES, MAPPED, PIXELS, check, launch, relu
from tests.on_driver import passes

WHY = why_no_gpu() or ("tensor maps need sm_90 or newer" if current().cc < 90 else "")
ADDRESS = 1 << 20
COLUMNS = CASES["strides of 2"].map


@pytest.mark.gpu
@pytest.mark.skipif(bool(WHY), reason=WHY)
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_copies_a_box_of_a_tensor(case):
    check(Cuda(current()), case)


@pytest.mark.gpu
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_contexts_and_timing_make_maps_for_their_memory(tmp_path, monkeypatch):
    """A context, whose launches are a recorded graph, and the worker's way from arguments to launches."""
    plain = relu(tmp_path)
    if plain.record.device.sm != current().sm:
        pytest.skip(f"the engine is for {plain.record.device.sm}")
    step = launch(MAPPED, (0, 0, 0, 0), (0, 0), 1024)
    monkeypatch.setattr(verify, "_launches", lambda *_: (step,))
    x = np.random.default_rng(0).uniform(1, 2, plain.inputs[0].shape).astype(np.float16)
    with Engine(plain.record, plain.weights).context() as one, Engine(plain.record, plain.weights).context() as other:
        for context in (one, other, one):
            assert np.array_equal(context.run({"x": x})["y"], x)
        assert one._point._params[0] != other._point._params[0]
    gpu, tensors = Cuda(current()), [np.full(512, i, np.float16) for i in range(3)]
    kernels, scratch = loaded(gpu, (step,)), scratch_for(gpu, (step,))
    sources, to = [gpu.allocate(1024) for _ in tensors], gpu.allocate(1024)
    runs = [runner(gpu, (step,), kernels, Addresses([source], to, {}, scratch)) for source in sources]
    for source, tensor in zip(sources, tensors, strict=True):
        gpu.write(source, tensor)
    for run, tensor in zip(runs, tensors, strict=True):
        run()
        assert np.array_equal(gpu.read(to, 1024).view(np.float16), tensor)


@pytest.mark.gpu
@pytest.mark.skipif(bool(WHY), reason=WHY)
@pytest.mark.parametrize("given", [PIXELS, COLUMNS])
def test_the_driver_refuses_an_address_between_its_multiples(given):
    name = "Tiled" if given.box else "Im2col"
    with pytest.raises(DriverError, match=f"^cuTensorMapEncode{name}: CUDA_ERROR_INVALID_VALUE for Map.* at address 0x100008"):
        encode_by_driver(given, ADDRESS + 8)


def both_paths():
    """The driver's arguments, each told from all others, are those of our encoder: on the emulated driver one map."""
    maps = [case.map for case in CASES.values()]
    maps += [replace(PIXELS, element=e, strides=(16 * SIZES[e] * 3,), box=(16, 24)) for e in SIZES]
    maps += [replace(PIXELS, swizzle=s, box=(8, 24)) for s in (0, 32, 64, 128)] + [replace(PIXELS, element_strides=(1, 3))]
    maps += [
        Map(("in", 0), (8, 7, 6, 5, 4)[:rank], (32, 256, 2048, 16384)[: rank - 1], (8, 5, 4, 3, 2)[:rank])
        for rank in range(1, 6)
    ]
    maps += [
        replace(COLUMNS, lower=(-3, -2), upper=(1, -1), channels=8, pixels=77, element_strides=(1, 3, 2, 1)),
        Map(("in", 0), (16, 9, 5), (32, 288), (), (-300,), (2,), 16, 64),
        Map(("in", 0), (16, 9, 5, 4, 3), (32, 288, 1440, 5760), (), (-3, -2, -1), (2, 1, 0), 16, 64, (1, 2, 3, 4, 5)),
    ]
    made = [encode_by_driver(m, ADDRESS + 16 * i) for i, m in enumerate(maps)]
    assert made == [encode(m, ADDRESS + 16 * i) for i, m in enumerate(maps)]
    print("same" * (len({m[16:] for m in made}) > 25))


@pytest.mark.driver
def test_the_drivers_arguments_are_our_encoders():
    assert passes(both_paths) == "same\n"


def older():
    try:
        encode_by_driver(PIXELS, ADDRESS)
    except DriverError as e:
        print(e.name)


@pytest.mark.driver
def test_older_devices_have_no_maps():
    assert passes(older, devices=("a100",)) == "CUDA_ERROR_NOT_SUPPORTED\n"


def badly_placed():
    """The room for a map of cuda-bindings' own function, which is why `encode_by_driver` does without it."""
    from cuda.bindings import driver

    maps = [driver.CUtensorMap() for _ in range(64)]  # all alive: one that was freed gives its place to the next
    print([m.getPtr() % 64 for m in maps].count(0) == 64)


@pytest.mark.driver
def test_room_that_cuda_bindings_gives():
    assert passes(badly_placed) == "False\n"
