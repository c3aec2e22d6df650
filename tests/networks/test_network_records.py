"""What lowering and the rewrites make of six networks is as recorded; `python -m benchmarks.network_records` asks all 47."""

import json
from dataclasses import replace

import pytest

from benchmarks import network_records, plan_records
from gpu_runtime.network import SINGLE, WIDE, Type
from tests.conftest import MODELS

RECORDS = json.loads(network_records.RECORDS.read_text())
# Without products of weights, whose last bits depend on NumPy's BLAS.
SIX = ("fastestdet", "resnet20_cifar10", "mnist8", "squeezenet11_fp16", "timm_ghostnet_100", "ultraface_rfb320")


@pytest.mark.parametrize("name", SIX)
def test_a_networks_digests_are_those_of_the_record(name):
    """Where they differ, `--lines` of both versions tells the ops."""
    if not MODELS.exists():
        pytest.skip(f"{MODELS} not found: set GPU_RUNTIME_MODELS to the folder of real networks")
    ((row, now),) = network_records.found(name).items()
    assert not plan_records.differences(row, RECORDS.get(name), now)


def test_every_fact_of_an_op_is_in_its_line():
    """A change of any field, of a bit of a weight or of a tensor's type changes the lines."""
    network = network_records.networks("conv512")["alternatives"]
    (op,) = network.ops
    lines = list(network_records.lines(network))
    weights = {name: array.copy() for name, array in op.weights.items()}
    weights["w"].reshape(-1)[0] += 1
    changes = {
        "name": "other",
        "inputs": ("y",),
        "output": "z",
        "nodes": ("n",),
        "when": (("g", "o"),),
        "layer": "l",
        "layers": ("m",),
        "exact": True,
    }
    others = [replace(network, ops=(replace(op, **{field: value}),)) for field, value in changes.items()]
    others += [replace(network, ops=(replace(op, weights=weights),)), replace(network, groups=(("g", ("a", "b")),))]
    others += [replace(network, types={op.output: of}) for of in (SINGLE, WIDE, Type("int64"), Type(layout="hwc8"))]
    assert all(list(network_records.lines(other)) != lines for other in others)


def test_all_networks_have_a_record():
    if MODELS.exists():
        assert set(RECORDS) == set(plan_records.everything())
