"""NVTX ranges for Nsight Systems: one for each step that a context launches, by the layer's name."""

import sys
import types
from contextlib import contextmanager

import numpy as np
import pytest

import gpu_runtime as gr


@pytest.fixture
def recorded(monkeypatch):
    """What a stand-in for package nvtx is told: ("begin" or "end", domain, name), in order."""
    events = []

    @contextmanager
    def annotate(message, domain):
        events.append(("begin", domain, message))
        yield
        events.append(("end", domain, message))

    fake = types.ModuleType("nvtx")
    fake.annotate = annotate
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    return events


def test_every_layer_has_a_range_of_its_name(files, recorded):
    engine, x = gr.load(files / "tiny.engine"), np.load(files / "x.npy")
    names = [" || ".join(engine.plan.layers[k].name for k in step.covers) for step in engine.plan.steps]
    with engine.context(device="emulator") as ctx:
        plain = ctx.run({"x": x})["y"]
        assert recorded == []
    with engine.context(device="emulator", nvtx=True) as ctx:
        assert np.array_equal(ctx.run({"x": x})["y"], plain)
    assert recorded == [(edge, "gpu_runtime", name) for name in names for edge in ("begin", "end")]
    assert len(names) >= 2 and any(name.startswith("first + act") for name in names)


def test_the_range_ends_where_a_launch_fails(files, recorded, monkeypatch):
    with gr.load(files / "tiny.engine").context(device="emulator", nvtx=True) as ctx:
        monkeypatch.setattr(ctx.gpu, "launch", lambda *_: (_ for _ in ()).throw(ValueError("no")))
        with pytest.raises(ValueError, match="no"):
            ctx.run({"x": np.load(files / "x.npy")})
    assert recorded[0][0] == "begin"


def test_without_the_package_nothing_is_marked_which_is_said(files, cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)  # as if it were not installed
    with (
        pytest.warns(RuntimeWarning, match=r"no NVTX ranges: package nvtx is not installed \(pip install nvtx\)"),
        gr.load(files / "tiny.engine").context(device="emulator", nvtx=True) as ctx,
    ):
        ctx.run({"x": np.load(files / "x.npy")})
    code, out, err = cli("run tiny.engine --emulate --nvtx --input x=x.npy --output y.npz")
    assert code == 0 and "no NVTX ranges: package nvtx is not installed" in err


def test_on_the_command_line(files, cli, recorded):
    assert cli("run tiny.engine --emulate --nvtx --input x=x.npy --output y.npz")[0] == 0
    assert any(name.startswith("first + act") for _, _, name in recorded)
