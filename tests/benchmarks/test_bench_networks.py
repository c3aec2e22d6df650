"""What benchmarks.bench_networks is asked for."""

import subprocess
import sys

import pytest

from benchmarks.bench_networks import Row, row_of
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
