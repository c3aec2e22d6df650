"""Branches that may run as one convolution: what `inspect-sparsity` says of them, and what `prune` makes of them."""

import json

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels import sparse24
from gpu_runtime.frontend.files.load import stored_tensors
from gpu_runtime.pruning.prune import prune
from tests.gpu_runtime.fusion.test_branches import BOUND, _branches, _model, check_against_ort, merged
from tests.reference_run import model, node, ort_run


@pytest.fixture
def branches(tmp_path, monkeypatch):
    """model.onnx: a 3x3, a 1x1 and their input, each behind a BatchNormalization, added."""
    monkeypatch.chdir(tmp_path)
    onnx.save(_model(np.random.default_rng(20), shape=(1, 16, 7, 9), k=16), "model.onnx")
    return tmp_path


def stored(path) -> dict[str, np.ndarray]:
    return {name: onnx.numpy_helper.to_array(t) for name, t in stored_tensors(onnx.load(path).graph)}


def test_pruned_branches_are_what_a_forced_build_prunes_to(branches, cli):
    code, out, err = cli("prune model.onnx -o sparse.onnx")
    gr.build("model.onnx", device="h200", sparsity="force", save_pruned="forced.onnx")
    assert (code, err) == (0, "") and onnx.load("sparse.onnx") == onnx.load("forced.onnx")
    (one,) = merged(check_against_ort(branches / "sparse.onnx", BOUND))
    assert one.problem.sparse24
    text = " ".join(out.split())
    assert (
        "pruned with the pattern of its sum" in text
        and "2 of these layers are parallel branches of 1 sum that can run as one convolution" in text
    )
    assert max(map(len, out.splitlines())) <= 120
    engine = gr.build("sparse.onnx", device="h200", sparsity="enable")
    assert any(layer.problem.sparse24 for layer in engine.plan.layers if layer.type == "conv" and " + " in layer.name)


def test_separate_branches_keep_more_and_are_no_pattern_as_one(branches, cli):
    ways = ("common", "separate")
    found = {how: json.loads(cli(f"prune model.onnx -o {how}.onnx --branches {how} --json")[1]) for how in ways}
    common, separate = ({r["weight"]: r for r in f["weights"]} for f in found.values())
    for name, row in common.items():
        assert row["lost_energy_by_itself"] == separate[name]["lost_energy"] < row["lost_energy"]
        assert row["sum"] and separate[name]["sum"] is None
    (total,) = found["common"]["sums"]
    assert total["layers"] == ["c0y", "c1y"] and 0 < total["lost_energy"] < 0.2 and not found["separate"]["sums"]
    (one,) = merged(check_against_ort(branches / "separate.onnx", BOUND))
    assert not one.problem.sparse24


def test_what_branches_hold_as_one_is_said(branches, cli):
    """Dense, pruned each by itself, and together: what the merged kernel holds is recomputed from the network."""
    cli("prune model.onnx -o separate.onnx --branches separate")
    cli("prune model.onnx -o common.onnx")
    rows = {}
    for name in ("model", "separate", "common"):
        found = json.loads(cli(f"inspect-sparsity {name}.onnx --json")[1])
        assert found["merged_unknown"] is None
        (rows[name],) = found["merged"]
        (one,) = merged(check_against_ort(branches / f"{name}.onnx", BOUND))
        assert rows[name]["fit"] == pytest.approx(sparse24.fits(one.weights["w"]).mean()) and rows[name]["adds_input"]
    assert [rows[n]["verdict"] for n in rows] == ["not 2:4", "not 2:4", "2:4"]
    dense, separate = rows["model"], rows["separate"]
    assert [p["fit"] for p in separate["branches"]] == [1, 1] and separate[
        "reason"
    ] == "the branches' patterns differ at tap [1, 1]"
    assert [p["at"] for p in separate["branches"]] == [[0, 0], [1, 1]]
    (tap,) = separate["taps"]
    assert (tap["r"], tap["s"]) == (1, 1) and tap["broken"] == pytest.approx(1 - separate["fit"])
    assert dense["common_lost_energy"] >= dense["lost_energy"] > 0 and separate["common_lost_energy"] is None
    said = {name: " ".join(cli(f"inspect-sparsity {name}.onnx")[1].split()) for name in rows}
    assert "gpu-runtime prune or --sparsity=force: the branches get one pattern" in said["model"]
    assert "No common pattern: its branches are 2:4 already" in said["separate"] and "the input itself" in said["separate"]
    assert "1 of the 1 that can be 2:4 are" in said["common"] and "No common" not in said["common"]


def test_the_log_of_a_build_says_what_is_merged(branches, cli):
    out = " ".join(cli("build model.onnx -o m.engine --device h200 --sparsity=enable")[1].split())
    assert "merged 2 convolutions run as 1, each the sum of parallel branches of one input" in out
    assert "of the groups of 4 weights of merged branches fit 2:4" in out


def test_depthwise_sums_and_those_that_cannot_be_looked_for(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(21)
    onnx.save(_model(rng, groups=8), "depthwise.onnx")
    assert "c0y cannot be 2:4: depthwise: each output has one input channel" in cli("inspect-sparsity depthwise.onnx")[1]
    nodes, y, w = _branches(rng, c=16, k=16)
    onnx.save(model([*nodes, node("Bernoulli", y, "y")], {"x": (1, 16, 7, 9)}, "y", w), "unknown.onnx")
    code, out, _ = cli("inspect-sparsity unknown.onnx")
    assert code == 0 and "\nThe search for branches that may run as one convolution failed: " in out and "Bernoulli" in out
    assert "Bernoulli" in json.loads(cli("prune unknown.onnx -o s.onnx --json")[1])["branches_unknown"]
    assert sparse24.fits(stored("s.onnx")["c0w"]).all()


def test_open_sizes_are_guessed_or_given(branches, cli):
    proto = onnx.load("model.onnx")
    for i, name in ((0, "N"), (2, "H"), (3, "W")):
        proto.graph.input[0].type.tensor_type.shape.dim[i].dim_param = name
    onnx.save(proto, "open.onnx")
    cli("prune model.onnx -o s.onnx")
    code, out, err = cli("prune open.onnx -o t.onnx")
    assert (code, err) == (0, "") and all((v == stored("t.onnx")[name]).all() for name, v in stored("s.onnx").items())
    code, _, err = cli("inspect-sparsity open.onnx --shapes z:1x16x7x9")
    assert code != 0 and "a shape is given for 'z', but the inputs are 'x'" in err


def test_a_branch_that_is_skipped_leaves_the_others_their_own_pattern(branches):
    result = prune("model.onnx", skip=["c1y"])
    (total,) = result.sums
    assert total.lost_energy is None and total.reason == "c1y is not 2:4 and is not pruned"
    (row,) = [r for r in result.rows if r.verdict == "pruned"]
    assert row.sum == "" and row.by_itself is None
    (branches / "s.onnx").write_bytes(result.model)
    assert np.array_equal(stored("s.onnx")["c0w"], sparse24.prune(stored("model.onnx")["c0w"]))


def test_a_weight_of_two_layers_has_no_common_pattern(tmp_path):
    w = np.random.default_rng(22).standard_normal((16, 16, 1, 1)).astype(np.float32)
    k = np.random.default_rng(23).standard_normal((16, 16, 3, 3)).astype(np.float32)
    how = {"pads": (1, 1, 1, 1)}
    nodes = [
        node("Conv", "x k", "a", **how),
        node("Conv", "x w", "b"),
        node("Add", "a b", "c"),
        node("Relu", "c", "d"),
        node("Conv", "d w", "y"),
    ]
    onnx.save(model(nodes, {"x": (1, 16, 6, 6)}, "y", {"k": k, "w": w}), tmp_path / "m.onnx")
    result = prune(tmp_path / "m.onnx")
    assert [s.reason for s in result.sums] == ["b is not 2:4 and is not pruned"] and {r.verdict for r in result.rows} == {
        "pruned"
    }


@pytest.mark.parametrize("permute", [False, True])
def test_branches_are_restored_together(branches, permute):
    rng = np.random.default_rng(24)
    nodes, y, w = _branches(rng, c=16, k=16)
    w["head"] = (rng.standard_normal((16, 16, 1, 1)) / 4).astype(np.float32)
    onnx.save(model([*nodes, node("Conv", f"{y} head", "y")], {"x": (1, 16, 7, 9)}, "y", w), "m.onnx")
    x = {"x": rng.standard_normal((4, 16, 7, 9)).astype(np.float32)}
    every = prune("m.onnx", permute=permute, calibration=x)
    alone = {r.weight: r.snr_db for r in every.rows}
    assert alone["c0w"] == alone["c1w"] != alone["head"] and every.accuracy.restored == ()
    some = prune("m.onnx", permute=permute, calibration=x, min_snr=every.accuracy.kept.snr_db + 0.5)
    assert set(some.accuracy.restored) in ({"c0w", "c1w"}, {"head"}, {"c0w", "c1w", "head"}) and some.accuracy.reached
    (branches / "s.onnx").write_bytes(every.model)
    (branches / "t.onnx").write_bytes(prune("m.onnx", permute=permute).model)
    assert all((v == stored("t.onnx")[name]).all() for name, v in stored("s.onnx").items())
    net = check_against_ort(branches / "s.onnx", BOUND)
    assert all(one.problem.sparse24 for one in merged(net))
    outputs = {name: ort_run(branches / name, {"x": x["x"][:1]})["y"].astype(np.float64) for name in ("m.onnx", "s.onnx")}
    assert np.square(outputs["m.onnx"] - outputs["s.onnx"]).sum() < 0.3 * np.square(outputs["m.onnx"]).sum()
