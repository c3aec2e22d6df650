"""What each rewrite gains: the committed table names rewrites of today, and leaving one out leaves out nothing else."""

import importlib
import json

import onnx
import pytest

from benchmarks.networks import NETWORKS
from benchmarks.rewrite_gains import IMPORTS, RESULTS, WITHOUT, gains, table


@pytest.mark.parametrize("name", [*WITHOUT, *IMPORTS])
def test_each_rewrite_of_the_table_exists(name):
    module, function, _ = (WITHOUT | IMPORTS)[name]
    assert callable(getattr(importlib.import_module(module), function))


def test_the_committed_table_names_rewrites_of_today():
    networks = json.loads(RESULTS.read_text())["networks"]
    assert {name for row in networks.values() for name in row["rewrites"]} <= {*WITHOUT, *IMPORTS}
    assert len(list(table(networks))) == len(WITHOUT) + len(IMPORTS)


def test_one_convolution_has_nothing_to_rewrite(tmp_path):
    path = tmp_path / "conv512.onnx"
    onnx.save(NETWORKS["conv512"](), path)
    assert gains(path, None, "h200", "enable", fires=True) == {"rewrites": {}}
