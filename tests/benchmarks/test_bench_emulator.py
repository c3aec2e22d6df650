"""The emulator's benchmark runs: every check of the emulator holds for the launches it times."""

import sys

import pytest

from benchmarks import bench_emulator


@pytest.mark.slow
def test_every_line_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_emulator", "--repeats", "1"])
    assert bench_emulator.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("GFLOP/s per core") == 8 and "conv_dense" in printed and "conv_sparse24" in printed
