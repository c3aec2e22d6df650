"""Building and running as a user does from Python: determinism, sparsity record, context behaviour, engine options."""

import gc
import hashlib
import os
import subprocess
import sys
from functools import lru_cache

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels import sparse24
from cuda_kernels.device import NAMED, named
from gpu_runtime.explain import report
from gpu_runtime.planning import tables
from gpu_runtime.runtime.plan_record import Timing
from tactics.predict import sigmas
from tests.conftest import DIGITS, ROOT
from tests.reference_run import model, node

BATCH = 4
MANY = 32  # images with which sparse kernels are surely faster on an RTX 3090, as predicted
SHAPES = {"x": (BATCH, 1, 8, 8)}


@lru_cache
def engine(name="sparse", sparsity="enable", device=None, batch=BATCH):
    return gr.build(DIGITS / f"digits_{name}.onnx", sparsity=sparsity, device=device, shapes={"x": (batch, 1, 8, 8)})


def digits(n=BATCH):
    data = np.load(DIGITS / "heldout.npz")
    return data["x"][:n], data["y"][:n]


def logits(e, x, **options):
    with e.context(device="emulator", **options) as ctx:
        return ctx.run({"x": x})["logits"], ctx.gpu.stats


@pytest.mark.slow
def test_the_six_lines_of_the_readme(tmp_path):
    e = engine(device="rtx3090", batch=MANY)
    path = tmp_path / "model.engine"
    e.save(path)
    x, y = digits(MANY)
    with gr.load(path).context(device="emulator") as ctx:
        out = ctx.run({"x": x})
    assert list(out) == ["logits"] and out["logits"].shape == (MANY, 10) and out["logits"].dtype == np.float32
    assert (out["logits"].argmax(1) == y).all()
    assert e.layer_info()["Layers"] and e.sparsity.picked


@pytest.mark.slow
def test_sparse_layers_really_run_sparse():
    x, _ = digits(MANY)
    for name, sparsity in (("sparse", "enable"), ("sparse", "disable"), ("dense", "enable")):
        e = engine(name, sparsity, "rtx3090", MANY)
        _, stats = logits(e, x)
        sparse_steps = {i for i, s in enumerate(e.plan.steps) if any(e.plan.layers[c].is_sparse for c in s.covers)}
        assert {i for i, s in enumerate(stats) if s.mma_sp} == sparse_steps
        assert bool(sparse_steps) == (name == "sparse" and sparsity == "enable")
        assert len(e.sparsity.picked) == len(sparse_steps)


@pytest.mark.slow
def test_dense_and_sparse_tactics_of_one_network_agree():
    x, _ = digits()
    a, b = logits(engine("sparse", "enable"), x)[0], logits(engine("sparse", "disable"), x)[0]
    assert np.abs(a - b).max() < 5e-3 * np.abs(b).max()


@pytest.mark.slow
def test_modes_agree_and_no_dead_tensor_is_read():
    x, _ = digits()
    plain = logits(engine(), x)[0]
    for options in ({"poison": True}, {"async_mode": "late", "seed": 5}, {"checks": False}, {"poison": True, "seed": 1}):
        assert np.array_equal(plain, logits(engine(), x, **options)[0]), options
    with engine().context(device="emulator", poison=True) as ctx:  # a second run finds no leftovers of the first
        assert np.array_equal(ctx.run({"x": x})["logits"], ctx.run({"x": x})["logits"])


@pytest.mark.slow
def test_same_input_gives_a_byte_identical_engine(tmp_path):
    code = (
        "import gpu_runtime as gr, sys; "
        f"gr.build({str(DIGITS / 'digits_sparse.onnx')!r}, sparsity='enable', shapes={SHAPES!r}).save(sys.argv[1])"
    )
    digests = set()
    for seed in ("0", "1", "17"):
        path = tmp_path / f"{seed}.engine"
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code, path], check=True, env=env)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


@pytest.mark.slow
def test_every_layer_with_weights_has_a_row_and_a_reason():
    e = engine(batch=2048)
    convs = {layer.layer or layer.name for layer in e.plan.layers if layer.type == "conv"}
    rows = {r.layer: r for r in e.sparsity.rows}
    assert set(rows) == convs
    known = {
        "picked",
        "dense_faster",
        "reformat_outweighs",
        "one_launch",
        "uncertain",
        "no_sparse_tactic",
        "pattern_violation",
        "channels_not_multiple_of_4",
        "grouped_conv",
    }
    assert {r.reason for r in rows.values()} <= known
    assert rows["stem/conv"].verdict == "not_eligible"
    verdicts = {r.verdict for r in rows.values() if r.layer in e.sparsity.eligible}
    assert verdicts == {"sparse", "dense"}, "at this batch some eligible layers go sparse and some do not"
    for r in rows.values():
        if r.verdict in ("sparse", "dense"):
            assert r.other_cost_us >= 0 or r.reason == "uncertain", "only doubt keeps what is faster out of a plan"
            assert 0 <= r.p_sparse_faster <= 1


def test_forcing_a_layer_costs_what_the_row_says():
    from gpu_runtime.frontend import importer
    from gpu_runtime.fusion import fuse
    from gpu_runtime.lowering import lower
    from gpu_runtime.rewrites import siblings
    from tactics.format import Format
    from tactics.measure import timing
    from tactics.planner import plan
    from tactics.predict import RISK

    device = named("h200")
    network = fuse.fuse(lower.lower(importer.read(DIGITS / "digits_sparse.onnx", shapes={"x": (2048, 1, 8, 8)})))
    network = siblings.merge(network)
    io = {t.name: Format(t.dtype, "chw") for t in (*network.inputs, *network.outputs)}
    table = tables.tabulate(network, device, timing.Predicted(device), io=io, how=tables.Considered(True, risk=RISK))
    best = plan.solve(table.graph)
    e = engine(batch=2048)
    assert e.plan.solution.total_us == pytest.approx(best.us)
    row = next(r for r in e.sparsity.rows if r.reason == "picked")
    names = [op.name for op in network.ops if op.layer == row.layer]
    forced = plan.solve(table.graph, force={n: lambda entry: not entry.sparse for n in names})
    assert row.other_cost_us == pytest.approx(forced.us - best.us)
    assert all(not forced.entries[n].sparse for n in names if n in forced.entries)


def test_pattern_violation_names_the_first_offender():
    rows = {r.layer: r for r in engine("dense").sparsity.rows}
    row = rows["block1/conv1"]
    assert row.reason == "pattern_violation" and row.first_violation == (0, 0, 0, 0) and row.pattern_share < 0.05


@pytest.mark.sample(1)
@pytest.mark.parametrize("device", ["a100", "rtx4090", "h200"])
def test_named_devices_plan_run_and_say_so(device):
    e = engine(device=device)
    assert e.record.timing == Timing("predicted", f"predicted({device})", max(sigmas(named(device)).values()))
    x, y = digits()
    assert (logits(e, x)[0].argmax(1) == y).all()
    assert f"predicted({device})" in report.inspect_text(e.record)


@pytest.mark.slow
def test_predictions_never_enter_the_timing_cache(tmp_path):
    cache = tmp_path / "timings.jsonl"
    gr.build(DIGITS / "digits_dense.onnx", device="a100", shapes=SHAPES, timing_cache=cache)
    assert not cache.exists()


@pytest.mark.slow
def test_embedded_cubins_need_consent(tmp_path):
    e = gr.build(DIGITS / "digits_dense.onnx", shapes=SHAPES, embed_cubins=True)
    path = tmp_path / "m.engine"
    e.save(path)
    with pytest.raises(gr.EngineError, match="allow_cubins"):
        gr.load(path)
    loaded = gr.load(path, allow_cubins=True)
    assert loaded.cubins == e.cubins and all(c[:4] == b"\x7fELF" for c in loaded.cubins.values())
    x, y = digits()
    assert (logits(loaded, x)[0].argmax(1) == y).all()


BAD = [
    ({}, "expected the names \\['x'\\], got \\[\\]"),
    ({"y": np.zeros((BATCH, 1, 8, 8), np.float32)}, "expected the names"),
    ({"x": np.zeros((BATCH, 1, 8, 9), np.float32)}, "expected shape 4x1x8x8, got 4x1x8x9.*--shapes"),
    ({"x": np.zeros((BATCH, 1, 8, 8), np.float64)}, "expected dtype float32, got float64"),
    ({"x": [1, 2]}, "expected shape 4x1x8x8"),
]


@pytest.mark.parametrize("inputs,message", BAD, ids=range(len(BAD)))
def test_wrong_inputs_are_refused(inputs, message):
    with engine().context(device="emulator") as ctx, pytest.raises(ValueError, match=message):
        ctx.run(inputs)


def test_a_closed_context_says_so():
    with engine().context(device="emulator") as ctx:
        pass
    with pytest.raises(ValueError, match="closed"):
        ctx.run({"x": digits()[0]})


def test_bad_arguments():
    with pytest.raises(ValueError, match="expected one of disable, enable, force, got 'maybe'"):
        gr.build(DIGITS / "digits_dense.onnx", sparsity="maybe")
    with pytest.raises(ValueError, match="unknown device 'h9000'"):
        gr.build(DIGITS / "digits_dense.onnx", device="h9000")
    with pytest.raises(ValueError, match="expected None, 'cuda', 'cuda:N' with the number of a GPU, or 'emulator'"):
        engine().context(device="tpu")


def test_another_kernel_source_is_refused(monkeypatch):
    monkeypatch.setattr("gpu_runtime.runtime.context.source_hash", lambda: "0" * 64)
    with pytest.raises(gr.EngineError, match="other kernel sources"):
        engine().context(device="emulator")


def test_layers_steps_and_memory_are_consistent():
    plan = engine().plan
    assert sum(layer.time_us for layer in plan.layers) == pytest.approx(plan.solution.total_us, abs=1e-3)
    assert plan.solution.status == "proven" and plan.solution.gap == 0
    produced = {i.name for i in plan.inputs}
    for layer in plan.layers:
        assert {t.name for t in layer.inputs} <= produced, layer.name
        new = {t.name for t in layer.outputs}
        assert not new & produced, f"{new} produced twice"
        produced |= new
    assert {o.name for o in plan.outputs} <= produced
    covered = [c for s in plan.steps for c in s.covers]
    assert covered == sorted(covered)
    assert plan.memory.activation_bytes <= 1.05 * plan.memory.largest_live_bytes


@pytest.mark.parametrize("change", [gc.disable, gc.enable])
def test_the_collector_of_cycles_is_as_it_was_before(change):
    change()
    before, seen = gc.isenabled(), list[bool]()
    shapes = {"x": (1, 1, 8, 8)}
    gr.build(DIGITS / "digits_sparse.onnx", device="a100", shapes=shapes, progress=lambda _: seen.append(gc.isenabled()))
    with pytest.raises(gr.ModelError):
        gr.build("no such model.onnx")
    after = gc.isenabled()
    gc.enable()
    assert after == before and seen and not any(seen)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMED)
def test_each_named_device_plans_a_residual_block(name):
    """No faster than its tensor cores' peak in 2:4, and with 2:4 kernels where these pay: nearly all of the work is there."""
    rng = np.random.default_rng(0)
    weights = {key: sparse24.prune(rng.normal(0, 0.1, (64, 64, 3, 3)).astype(np.float32)) for key in ("u", "v")}
    first = [node("Conv", "x u", "a", pads=(1, 1, 1, 1)), node("Relu", "a", "b"), node("Conv", "b v", "c", pads=(1, 1, 1, 1))]
    block = model([*first, node("Add", "c x", "d"), node("Relu", "d", "y")], {"x": (32, 64, 28, 28)}, "y", weights)
    e = gr.build(block, device=name, sparsity="enable")
    gflop = 2 * 2 * 32 * 28 * 28 * 64 * 64 * 9 * 1e-9
    assert e.plan.solution.total_us > gflop / (2 * named(name).dense_tflops) * 1e3
    assert e.record.timing.label == f"predicted({name})" and len(e.plan.layers) >= 2
    assert any(layer.is_sparse for layer in e.plan.layers)
