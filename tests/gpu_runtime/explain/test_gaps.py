"""How far launches are above their floors: floors are below every prediction, sums are of all launches, JSON says the same."""

import json
import re

import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from gpu_runtime.commands.inspect import inspect_command
from gpu_runtime.explain import gaps
from tests.conftest import DIGITS


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return gr.build(DIGITS / "digits_sparse.onnx", sparsity="enable", device="rtx3090", shapes={"x": (120, 1, 8, 8)})


def test_no_launch_is_below_its_floor(engine):
    found = gaps.gaps(engine.record)
    launched = [layer for layer in engine.plan.layers if layer.problem is not None and layer.tactic is not None]
    assert [g.layer for g in found] == [layer.name for layer in launched]
    assert all(0 < g.floor_us <= g.us for g in found)
    assert sum(g.us for g in found) == pytest.approx(engine.plan.solution.total_us)
    assert {g.layer for of in gaps.by_kind(found).values() for g in of} == {g.layer for g in found}
    assert sum(len(of) for of in gaps.alike(found)) == len(found)


def test_a_launch_far_above_its_floor_is_counted():
    near = gaps.Gap("a", "conv", "p", "t", us=49.0, floor_us=10.0, bound="dram")
    far = gaps.Gap("b", "conv", "p", "t", us=51.0, floor_us=10.0, bound="dram")
    short = gaps.Gap("c", "pool", "p", "t", us=9.9, floor_us=1.0, bound="launch")
    assert [g.is_far for g in (near, far, short)] == [False, True, False]
    assert list(gaps.by_kind([short, near, far])) == ["conv", "pool"]


def test_the_command_prints_tables_and_json(engine, tmp_path, capsys):
    path = str(tmp_path / "digits.engine")
    engine.save(path)
    inspect_command.main([path, "--gap"], standalone_mode=False)
    text = capsys.readouterr().out
    assert f"predicted(rtx3090): the launches take ~{engine.plan.solution.total_us:.2f} us" in text.replace("\n  ", " ")
    assert (
        "farthest above the floor" in text
        and f"of {len(engine.plan.steps)} launches take more than 5 times their floor" in text
    )
    cells = [
        cell for line in text.splitlines() if " conv " in line for cell in line.split() if re.fullmatch(r"~?\d+\.\d\d", cell)
    ]
    assert cells and all(cell.startswith("~") for cell in cells) and "Lower bound: ~" in text and " mma " not in text
    inspect_command.main([path, "--gap", "--json"], standalone_mode=False)
    data = json.loads(capsys.readouterr().out)
    assert data["timing"] == "predicted(rtx3090)" and len(data["launches"]) == len(gaps.gaps(engine.record))


def test_a_model_has_no_gaps(tmp_path):
    import click

    net = Net("one", (1, 8, 4, 4))
    onnx.save(net.finish(net.conv("x", "a", 8)), tmp_path / "m.onnx")
    with pytest.raises(click.UsageError, match="--gap.*need an engine"):
        inspect_command.main([str(tmp_path / "m.onnx"), "--gap"], standalone_mode=False)


def test_a_file_of_another_kind_is_named(tmp_path):
    (tmp_path / "random.bin").write_bytes(bytes(range(100, 200)))
    with pytest.raises(ValueError, match="neither an engine nor an ONNX model"):
        inspect_command.main([str(tmp_path / "random.bin"), "--gap"], standalone_mode=False)
