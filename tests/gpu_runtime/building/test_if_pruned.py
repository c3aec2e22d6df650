"""The verdict on pruning: the second plan is the plan of the pruned model, it rests on predictions alone, and texts say it."""

import json
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels.device import named
from gpu_runtime.building import if_pruned, load, settle
from gpu_runtime.building.fit import fit
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.building.planner import Planner
from gpu_runtime.building.target import make_timer
from gpu_runtime.explain.figures import pruned_costs, pruning_text
from gpu_runtime.report import data
from tests.conftest import DIGITS
from tests.reference_run import model, node

DENSE = DIGITS / "digits_dense.onnx"


def drawn(name):
    """Networks whose rewrites see the pattern: a Gemm over a flattened image, windows, channels in another order."""
    rng = np.random.default_rng(0)

    def weights(*shape):
        return rng.normal(size=shape).astype(np.float32)

    if name == "flattened":
        nodes = [node("Conv", "x w", "a"), node("Flatten", "a", "f"), node("Gemm", "f g", "y")]
        return model(nodes, {"x": (64, 16, 8, 8)}, "y", {"w": weights(64, 16, 1, 1), "g": weights(4096, 256)})
    if name == "windows":
        nodes = [node("Conv", "x w", "a", kernel_shape=[4, 4], strides=[4, 4]), node("Conv", "a v", "y")]
        return model(nodes, {"x": (8, 32, 56, 56)}, "y", {"w": weights(128, 32, 4, 4), "v": weights(256, 128, 1, 1)})
    nodes = [  # a shuffle of 2 x 10 channels: of each four of the result, two are from each half
        node("Conv", "x w", "a"),
        node("Reshape", "a s1", "b"),
        node("Transpose", "b", "c", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "c s2", "d"),
        node("Conv", "d v", "y"),
    ]
    sizes = {"s1": np.array([16, 2, 20, 28, 28]), "s2": np.array([16, 40, 28, 28])}
    return model(nodes, {"x": (16, 32, 28, 28)}, "y", {"w": weights(40, 32, 1, 1), "v": weights(256, 40, 1, 1), **sizes})


@pytest.mark.parametrize("name", ["flattened", "windows", "shuffled"])
def test_it_is_the_plan_of_the_pruned_model(name, tmp_path):
    onnx.save(drawn(name), tmp_path / "m.onnx")
    (now,), (pruned,) = (gr.plan(tmp_path / "m.onnx", "a100", sparsity=mode) for mode in ("enable", "force"))
    found = now.if_pruned
    assert found.now_us == now.solution.total_us and found.solution.total_us == pruned.solution.total_us
    assert found.sparsity.picked == pruned.sparsity.picked and found.sparsity.eligible == pruned.sparsity.eligible
    assert found.layers and pruned.if_pruned is None


@pytest.mark.slow
def test_digits_and_its_pruned_twin():
    plans = [gr.plan(DENSE, ["l4", "rtx4090"], [64, 1024], sparsity=mode) for mode in ("enable", "force")]
    for now, pruned in zip(*plans, strict=True):
        assert now.if_pruned.now_us == now.solution.total_us > now.if_pruned.solution.total_us == pruned.solution.total_us
    best = plans[0][-1].if_pruned
    assert best.solution.rivals.library.us / best.solution.total_us > 1.3
    rows = [line.split() for line in str(plans[0]).splitlines() if re.match(r"(l4|rtx4090) ", line)]
    assert [row[-3:] for row in rows][-1] == ["15", "1.49x", "1.33x"] and rows[-1][-5:-3] == ["14", "of"]
    text = " ".join(str(plans[0]).split())
    assert (
        "rtx4090, batch 1024: weights are not 2:4; pruned, this network would take ~213.11 us instead of ~318.24 us (1.49x; "
        in text
    )
    assert (
        "next: gpu-runtime prune digits_dense.onnx -o digits_dense_24.onnx --layers=auto --device=l4 --shapes=x:1024x1x8x8"
        in text
    )


def planned(proto, tmp_path, sparsity="enable", **changes):
    """(loaded model, its planned network, planner) for an A100; `changes` of its record."""
    onnx.save(proto, tmp_path / "m.onnx")
    loaded, (shapes,) = load.load(tmp_path / "m.onnx", lambda m: [None], prune=False)
    target = named("a100")
    planner = Planner(target, make_timer(target), BuildOptions(sparsity=sparsity).checked())
    network, reached = fit(loaded, load.lowered(loaded, shapes), None, lambda _: None)
    ends = {t.name: network.formats(t.name)[:1] for t in (*network.inputs, *network.outputs)}
    planner = replace(planner, ends=ends)
    found = replace(settle.settle(network, reached, None, planner), fitted=network)
    return loaded, found, replace(planner, target=replace(target, **changes))


def test_nothing_more_is_measured(tmp_path):
    """Beside a measured plan the second one is of predictions, and says so."""
    loaded, found, planner = planned(drawn("windows"), tmp_path, measured=True)
    expected = if_pruned.with_pruned(loaded, found, replace(planner, target=named("a100"))).if_pruned

    class Refusing:
        def __getattr__(self, name):
            raise AssertionError(f"the timer was asked for {name}")

    made = if_pruned.with_pruned(loaded, found, replace(planner, timer=Refusing()))
    assert made.if_pruned == expected and made.pruned_table is None
    (plan,) = gr.plan(tmp_path / "m.onnx", "a100")
    measured = replace(plan, timing=replace(plan.timing, kind="measured"))
    assert "pruned, this network is predicted to take ~" in pruning_text(measured)
    none = replace(expected, solution=replace(expected.solution, total_us=0.0))
    assert "(1.00x): not worth retraining" in pruning_text(replace(plan, if_pruned=none))


@pytest.mark.parametrize("sparsity", ["disable", "force", "enable"])
def test_no_second_plan_without_a_question(sparsity, tmp_path):
    net = Net("n", (1, 32, 8, 8))
    loaded, found, planner = planned(net.finish(net.conv("x", "c", 64, prune=True)), tmp_path, sparsity)
    assert if_pruned.with_pruned(loaded, found, planner) is found  # its weights are 2:4
    loaded, found, planner = planned(drawn("flattened"), tmp_path, sparsity)
    assert (if_pruned.with_pruned(loaded, found, planner) is found) == (sparsity != "enable")


def test_an_engine_keeps_it_and_the_log_says_it_first(files, cli, tmp_path):
    command = f"build {DENSE} -o d.engine --sparsity=enable --device l4 --shapes=x:1024x1x8x8"
    code, out, _ = cli(command)
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if "weights are not 2:4; pruned, this network would take" in line)
    assert code == 0 and at < next(i for i, line in enumerate(lines) if "(Sparsity)" in line)
    read, built = gr.load(files / "d.engine"), gr.plan(DENSE, "l4", 1024)[0]
    assert read.record.if_pruned == built.if_pruned
    assert pruning_text(read.record) == pruning_text(built)


def test_the_batch_stands_in_every_file(files, cli):
    """Also what each layer's other choice would be if its weights were pruned."""
    command = f"build {DENSE} -o d.engine --sparsity=enable --device l4 --shapes=x:1024x1x8x8"
    code, out, _ = cli(f"{command} --exportLayerInfo=i.json --exportProfile=p.json --exportTrace=t.json --exportOnnx=n.onnx")
    assert code == 0 and "\ndigits_dense at batch 1024 for L4 (sm_89)" in out
    assert re.search(r"not 2:4    15 pattern_violation: .*pruned, these 14\s+would shorten the plan: block", out, re.S)
    info, profile, trace = (json.loads((files / name).read_text()) for name in ("i.json", "p.json", "t.json"))
    assert info["Batch"] == profile[0]["batch"] == trace["otherData"]["batch"] == 1024
    assert info["IfPrunedUs"] < info["IfPrunedNowUs"] == info["TotalUs"] and info["IfPrunedPickedLayers"] == 14
    assert "1024" in [p.value for p in onnx.load(files / "n.onnx").metadata_props if p.key.endswith("batch")]
    record = gr.load(files / "d.engine").record
    shown, costs = data.page(record), pruned_costs(record)
    assert shown["verdict"]["batch"] == 1024 and shown["verdict"]["pruned_us"] == info["IfPrunedUs"]
    assert shown["verdict"]["ceiling_us"] < shown["verdict"]["pruned_us"] < shown["verdict"]["now_us"]
    layer = next(layer for layer in shown["layers"] if "block1/conv1" in layer.get("nodes", ()))
    assert layer["cost_us"] == round(costs["block1/conv1"], 4) == -layer["saved_us"] < 0
    rows = [row for row in record.sparsity.rows if {*row.layers} & {*costs}]
    assert cli("inspect d.engine")[1].count("if pruned") == len(rows) > 10


def test_what_if_a_layer_were_pruned(tmp_path):
    """One layer alone, by the engine's own tables: as a model in which only this layer is pruned."""
    shapes = {"x": (1024, 1, 8, 8)}
    engine = gr.build(DENSE, device="l4", sparsity="enable", shapes=shapes)
    answer = engine.what_if({"block1/conv1": "sparse"})
    gr.prune(DENSE, layers=("block1/conv1",), device="none").save(tmp_path / "one.onnx")
    one = gr.build(tmp_path / "one.onnx", device="l4", sparsity="enable", shapes=shapes).plan.solution
    assert (answer.before_us, answer.after_us) == (engine.plan.solution.total_us, one.total_us)
    assert answer.after_us < answer.before_us and answer.pruned == ("block1/conv1",)
    assert "These weights are not 2:4, and sparse only once pruned: block1/conv1\n" in str(answer)
    assert engine.what_if({"block1/conv1": "dense"}).after_us == answer.before_us
    engine.save(tmp_path / "d.engine")
    assert gr.load(tmp_path / "d.engine").what_if({"block1/conv1": "sparse"}) == answer
