"""What benchmarks.bench_networks is asked for."""

import subprocess
import sys

import pytest

from benchmarks.bench_networks import Row, Wanted, row_of
from benchmarks.experiments import stored
from tests.conftest import ROOT


def test_rows_name_a_network_a_batch_and_kinds():
    assert row_of("resnet50:32", "dense,whole") == Row("resnet50", 32, ("dense", "whole"), False)
    assert row_of("resnet50:1:dense,compiled", "whole") == Row("resnet50", 1, ("dense",), True)


@pytest.mark.parametrize("item", ["resnet50", "resnet50:x", "resnet50:1:dense:2", "resnet50:1:sparser"])
def test_a_row_that_is_none_is_named(item):
    with pytest.raises(ValueError, match=item.split(":")[-1]):
        row_of(item, "dense")


def test_the_command_ends_with_2():
    command = [sys.executable, "-m", "benchmarks.bench_networks", "resnet50"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.startswith("error: 'resnet50': expected NAME:BATCH")


def test_a_judged_engine_has_the_models_weights(monkeypatch):
    """A packed plan has none; outputs of drawn weights are nobody's."""
    monkeypatch.setattr(stored, "packed", lambda *of: b"packed")
    assert Wanted("resnet50", 1, "dense", "h200").plan == b"packed"
    assert Wanted("resnet50", 1, "dense", "h200", judged=True).plan is Wanted("resnet50", 1, "dense", None).plan is None
