"""`gpu-runtime prune`, and `inspect-sparsity` with a device: what they write, say and refuse."""

import json
import math

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels import sparse24
from gpu_runtime.accuracy import sessions
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.load import stored_tensors
from gpu_runtime.frontend.summaries import pattern
from gpu_runtime.pruning import benefit
from gpu_runtime.pruning.prune import prune
from tests.channel_networks import network
from tests.conftest import DIGITS, model_path
from tests.engines import SPARSE_DEVICE
from tests.mutations import MODEL_MUTATIONS
from tests.networks.test_drawn import budgets
from tests.reference_run import model, node, ort_run, relative_error
from tests.small_models import small_models

WEIGHTS = {"w": np.random.default_rng(0).standard_normal((8, 8, 1, 1)).astype(np.float32)}


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """The dense digits network and 40 held-out images, in the folder of the test."""
    (tmp_path / "dense.onnx").write_bytes((DIGITS / "digits_dense.onnx").read_bytes())
    np.savez(tmp_path / "inputs.npz", x=np.load(DIGITS / "heldout.npz")["x"][:40])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stored(path) -> dict[str, np.ndarray]:
    return {name: onnx.numpy_helper.to_array(t) for name, t in stored_tensors(onnx.load(path).graph)}


def test_pruned_is_what_a_forced_build_prunes_to(digits, cli):
    """The same file, byte for byte, but for what else the two leave alone."""
    code, out, err = cli("prune dense.onnx -o sparse.onnx --device none")
    assert (code, err) == (0, "") and out.endswith("\nWrote sparse.onnx: build it with --sparsity=enable\n")
    importer.load("dense.onnx", prune=True, save_pruned=digits / "forced.onnx")
    assert onnx.load("forced.onnx") == onnx.load("sparse.onnx")
    assert "Pruned 15 of the 15 weights that can be 2:4; they lost 18.86 % of their energy (the sum of their squares)\n" in out
    assert "which would lose 18.86 % of their energy" in cli("inspect-sparsity dense.onnx")[1]
    assert max(map(len, out.splitlines())) <= 120
    again = cli("prune sparse.onnx -o again.onnx --device none")[1]
    assert "Pruned 0 of the 15 weights that can be 2:4 (15 were already)\n" in again
    assert (digits / "again.onnx").read_bytes() == (digits / "sparse.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [1, 5, 8, 11, 17, 21, 23, 30])
def test_permuted_keeps_more_and_stays_right(seed, tmp_path):
    """Drawn networks: permuted and pruned, built, run in the emulator, judged by onnxruntime on the same weights."""
    proto = network(seed, (10, 20))
    onnx.save(proto, tmp_path / "m.onnx")
    try:
        result = prune(tmp_path / "m.onnx", permute=True)
    except gr.ModelError as e:
        assert "none of its weights" in str(e)
        return
    assert result.lost_energy <= result.unpermuted + 1e-9
    (tmp_path / "s.onnx").write_bytes(result.model)
    assert all(r["verdict"] == "2:4" for r in pattern.inspect(tmp_path / "s.onnx") if r["fit"] is not None)
    engine = gr.build(tmp_path / "s.onnx", device=SPARSE_DEVICE, sparsity="enable")
    rng = np.random.default_rng(1)
    feeds = {i.name: rng.uniform(-1, 1, i.shape).astype(np.float16).astype(np.float32) for i in engine.plan.inputs}
    with engine.context(device="emulator", poison=True) as context:
        got = context.run(feeds)
    for name, budget in budgets(onnx.load(tmp_path / "s.onnx"), feeds).items():
        budget.check(got[name], name)


@pytest.mark.parametrize("name", ["resnet20_cifar10", pytest.param("super_resolution_10", marks=pytest.mark.slow)])
def test_permutation_of_real_networks(name):
    result = prune(model_path(name), permute=True, device="none")
    assert result.lost_energy < {"resnet20_cifar10": 0.115, "super_resolution_10": 0.01}[name]
    assert result.unpermuted == pytest.approx(prune(model_path(name), device="none").lost_energy)


def test_an_order_that_keeps_more_is_found():
    """Four large channels in each half of the groups: two to a group, nothing is lost."""
    w = np.where(np.arange(16) < 8, 1.0, 1e-3) * np.ones((8, 16))
    nodes = [node("Conv", "x a", "h"), node("Conv", "h b", "y")]
    given = {
        "a": np.random.default_rng(0).standard_normal((16, 3, 1, 1)).astype(np.float32),
        "b": w.reshape(8, 16, 1, 1).astype(np.float32),
    }
    proto = model(nodes, {"x": (1, 3, 4, 4)}, "y", given)
    before = onnx.ModelProto.FromString(proto.SerializeToString())
    from gpu_runtime.frontend.files.weights import weights
    from gpu_runtime.pruning.permute import permute

    permute(proto, [v for v in weights(proto.graph) if v.name == "b"], {})
    moved = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    lost, total = sparse24.energy(moved["b"])
    assert lost / total < 1e-5 < 0.4 < sparse24.energy(given["b"])[0] / total
    x = {"x": np.random.default_rng(1).standard_normal((1, 3, 4, 4)).astype(np.float32)}
    assert relative_error(ort_run(proto, x)["y"], ort_run(before, x)["y"]) < 1e-6


def test_what_is_2_4_already_is_not_undone_by_an_order(tmp_path):
    """A weight that is skipped or kept may be 2:4: channels that it reads keep their places."""
    rng = np.random.default_rng(0)
    w = {
        "a": rng.standard_normal((16, 4, 1, 1)),
        "b": sparse24.prune(rng.standard_normal((8, 16, 1, 1))),
        "c": rng.standard_normal((8, 16, 1, 1)),
    }
    nodes = [node("Conv", "x a", "h"), node("Conv", "h b", "y", name="first"), node("Conv", "h c", "z", name="second")]
    onnx.save(model(nodes, {"x": (1, 4, 4, 4)}, "y z", {k: v.astype(np.float32) for k, v in w.items()}), tmp_path / "m.onnx")
    for skip in ((), "first"):
        result = prune(tmp_path / "m.onnx", skip=skip, permute=True)
        (tmp_path / "s.onnx").write_bytes(result.model)
        assert {r["verdict"] for r in pattern.inspect(tmp_path / "s.onnx")} == {"2:4"}
        assert np.array_equal(stored(tmp_path / "s.onnx")["b"], w["b"].astype(np.float32))


@pytest.mark.slow
def test_layers_by_name_and_by_the_plan(digits, cli):
    code, out, _ = cli("prune dense.onnx -o s.onnx --layers block[13]/*,head/gemm --skip *conv2 --json")
    found = json.loads(out)
    done = [r["layers"][0] for r in found["weights"] if r["verdict"] == "pruned"]
    assert code == 0 and done == ["block1/conv1", "block3/conv1", "head/gemm"]
    changed = {name for name, v in stored("s.onnx").items() if not np.array_equal(v, stored("dense.onnx")[name])}
    assert changed == {f"{name}.weight" for name in done}
    code, out, _ = cli(f"prune dense.onnx -o s.onnx --layers auto --device {SPARSE_DEVICE} --shapes x:32x1x8x8 --json")
    auto = [r["layers"][0] for r in json.loads(out)["weights"] if r["verdict"] == "pruned"]
    plan = gr.build("s.onnx", sparsity="enable", device=SPARSE_DEVICE, shapes={"x": (32, 1, 8, 8)}).sparsity
    picked = {layer for one in plan.picked for layer in one.split(" || ")}  # siblings may run as one layer
    assert code == 0 and auto and set(auto) == picked and "head/gemm" not in auto


@pytest.mark.slow
def test_calibration_measures_and_restores(digits, cli):
    code, out, err = cli("prune dense.onnx -o all.onnx --calibration inputs.npz --json")
    every = json.loads(out)
    assert (code, err) == (0, "") and every["accuracy"]["restored"] == [] and every["accuracy"]["samples"] == 40
    x = {"x": np.load("inputs.npz")["x"]}
    before, after = (ort_run(digits / name, x)["logits"].astype(np.float64) for name in ("dense.onnx", "all.onnx"))
    snr = 10 * np.log10((before**2).sum() / ((after - before) ** 2).sum())
    assert every["accuracy"]["kept"]["snr_db"] == pytest.approx(snr, abs=0.01)
    assert every["accuracy"]["kept"]["agreement"] == (before.argmax(1) == after.argmax(1)).mean() < 0.9
    code, out, _ = cli("prune dense.onnx -o some.onnx --permute --calibration inputs.npz --max-drop 2.5 --min-snr 12")
    y = ort_run(digits / "some.onnx", x)["logits"].astype(np.float64)
    assert code == 0 and (before.argmax(1) == y.argmax(1)).mean() >= 0.975
    assert 10 * np.log10((before**2).sum() / ((y - before) ** 2).sum()) >= 12
    rows = {r["layer"]: r["verdict"] for r in pattern.inspect("some.onnx")}
    assert 0 < sum(v == "2:4" for v in rows.values()) < 15
    assert (
        "restored: pruning it changes the outputs the most" in " ".join(out.split())
        and "\nLeft dense to meet the limit: " in out
    )


@pytest.mark.parametrize(
    "args, message",
    [
        ("--layers nothing", "no layer or weight is named 'nothing': "),
        ("--layers hed/gemm", "did you mean 'head/gemm', 'head/gemm.weight'?"),
        ("--calibration none.npz", "--calibration none.npz: no such file; expected a .npz file"),
        ("--calibration dense.onnx", "--calibration dense.onnx: not a readable .npz file: File is not a zip file"),
        ("--calibration other.npz", "inputs: expected the names ['x'], got ['z']"),
        ("--calibration shape.npz", "input 'x': expected shape ?x1x8x8 (or several along the first axis), got 2x3x8x8"),
        ("--calibration nan.npz", "input 'x' holds NaN or infinity"),
        ("--calibration pickled.npz", "not a readable .npz file: "),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_written(args, message, digits, cli):
    x = np.zeros((2, 1, 8, 8), np.float32)
    np.savez("other.npz", z=x)
    np.savez("shape.npz", x=np.zeros((2, 3, 8, 8), np.float32))
    np.savez("nan.npz", x=x + np.nan)
    np.savez("pickled.npz", x=np.array([{}], object))
    (digits / "s.onnx").write_bytes(mine := b"\x08\x08\x12mine")  # a model, which the command may overwrite
    code, out, err = cli(f"prune dense.onnx -o s.onnx {args}")
    assert (code, out) == (1, "") and message in err and (digits / "s.onnx").read_bytes() == mine


@pytest.mark.parametrize(
    "args, message",
    [
        ("--min-snr 3", "--labels, --min-snr and --max-drop need --calibration=FILE.npz"),
        ("--labels y", "--labels, --min-snr and --max-drop need --calibration=FILE.npz"),
        ("--layers auto,stem --device h200", "cannot be combined with names"),
        (
            "--layers auto --device none",
            "--layers=auto needs the plan for a GPU, which chooses the layers: leave --device=none out",
        ),
        ("--layers a,,b", "expected names with commas between them"),
        ("--layers auto --device h20", "--device: "),
    ],
)
def test_wrong_usage(args, message, digits, cli):
    code, out, err = cli(f"prune dense.onnx -o s.onnx {args}")
    assert (code, out) == (2, "") and message in " ".join(err.split()) and not (digits / "s.onnx").exists()


def test_the_model_is_not_overwritten_and_one_without_weights_is_refused(digits, cli):
    assert "is a file that this command reads" in cli("prune dense.onnx -o dense.onnx")[2]
    onnx.save(model([node("Relu", "x", "y")], {"x": (1, 4, 4, 4)}, "y"), "none.onnx")
    code, _, err = cli("prune none.onnx -o s.onnx")
    assert code == 1 and "error: none.onnx: no weight of the model can have the 2:4 pattern" in err


def test_labels_are_what_pruning_costs(digits, cli):
    """The accuracies of the table are onnxruntime's on the files, and the limit is one of accuracy."""
    every = {name: a[:30] for name, a in np.load(DIGITS / "heldout.npz").items()}
    np.savez("both.npz", **every)
    options = "prune dense.onnx -o s.onnx --device none --calibration both.npz --labels y"

    def accuracy(name):
        return float((ort_run(digits / name, {"x": every["x"]})["logits"].argmax(1) == every["y"]).mean())

    found = json.loads(cli(f"{options} --json")[1])["accuracy"]
    before, after = accuracy("dense.onnx"), accuracy("s.onnx")
    assert (found["metric"], found["score"], found["kept"]["score"]) == (
        "top-1 accuracy",
        before,
        after,
    ) and after < before - 0.05
    code, out, _ = cli(f"{options} --max-drop 5")
    assert code == 0 and f"The top-1 accuracy on them was {100 * before:.2f} %, and is " in " ".join(out.split())
    assert before - accuracy("s.onnx") <= 0.05
    x = {"x": every["x"]}
    mine = prune("dense.onnx", device="none", calibration=x, labels=every["y"], metric=lambda y, labels: -len(labels))
    assert mine.accuracy.score == mine.accuracy.kept.score == -30 and "The <lambda> on them was -30, and is -30" in str(mine)
    assert mine.to_dict()["accuracy"]["metric"] == "<lambda>"


def test_files_are_checked_before_channels_are_moved(digits, cli, monkeypatch):
    monkeypatch.setattr("gpu_runtime.pruning.prune.forecast", lambda *_: pytest.fail("a plan was made"))
    y = np.load(DIGITS / "heldout.npz")["y"][:40]
    wrong = {"few": y[:-1], "high": y + 1, "real": y / 2, "wide": y[:, None], "text": y.astype(str)}
    for name, labels in wrong.items():
        np.save(f"{name}.npy", labels)
    for name, message in {
        "few.npy": "labels: expected one for each of 40 samples, got 39",
        "high.npy": "labels: expected classes of output 'logits', from 0 to 9, got 1 to 10",
        "real.npy": "labels: expected each sample's class, whole numbers in an array of one axis, got float64 of shape 40",
        "wide.npy": "got int64 of shape 40x1",
        "text.npy": "got <U21 of shape 40",
        "y": "--labels: expected an array in the file of inputs, or a .npy file, got 'y'; it holds x",
        "dense.onnx": "--labels: dense.onnx: not a readable .npy file",
    }.items():
        code, out, err = cli(f"prune dense.onnx -o s.onnx --permute --calibration inputs.npz --labels {name}")
        assert (code, out) == (1, "") and message in " ".join(err.split()) and not (digits / "s.onnx").exists()
    x = {"x": np.load("inputs.npz")["x"]}
    for options, message in (
        ({"labels": y}, "need calibration"),
        ({"calibration": x, "metric": len}, "metric: it needs labels"),
        ({"calibration": x, "max_drop": 5}, "max_drop: expected a share from 0 to 1, got 5"),
        ({"calibration": x, "max_drop": math.nan}, "max_drop: expected a share from 0 to 1, got nan"),
        ({"calibration": x, "min_snr": math.nan}, "min_snr: expected a number of dB, got nan"),
        ({"calibration": {"x": x["x"][:0]}}, "expected shape .x1x8x8 .or several along the first axis., got 0x1x8x8"),
        ({"calibration": x | {"y": y}}, r"got \['x', 'y'\]; --labels NAME, labels= in Python, says which array holds"),
        ({"shapes": {"x": (9, 1, 9, 8)}}, "the model declares Nx1x8x8, the shape given is 9x1x9x8"),
        ({"shapes": {"z": (9, 1, 8, 8)}}, "a shape is given for 'z', but the inputs are 'x'"),
        ({"calibration": x, "labels": y, "metric": lambda *_: None}, "expected <lambda> to return a finite number, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            prune("dense.onnx", **options)


def test_what_pruning_gains_is_told_first(digits, cli):
    code, out, _ = cli("prune dense.onnx -o s.onnx --device rtx3090 --shapes x:120x1x8x8")
    assert code == 0 and out.startswith("With all its weights 2:4, on GeForce RTX 3090, predicted(rtx3090), x 120x1x8x8, the ")
    assert out.index("gains 1.") < out.index("dense kernels of a library") < out.index("Pruned 15 of the 15")
    assert json.loads(cli("prune dense.onnx -o s.onnx --json")[1])["forecast"]["device"] == "h200"
    words = " ".join(cli("prune dense.onnx -o s.onnx")[1].split())
    assert "H200 SXM 141GB is the default where no GPU is found (another with --device) The gain is predicted at ba" in words
    assert "; gpu-runtime plan MODEL --devices h200 --batches 1,8,32,128 compares batches" in words
    onnx.save(model([node("Conv", "x w", "c"), node("Unknown", "c", "y")], {"x": (1, 8, 5, 5)}, "y", WEIGHTS), "odd.onnx")
    code, out, _ = cli("prune odd.onnx -o s.onnx")
    assert (
        code == 0
        and out.startswith("No engine can be built of this model, so the gain of 2:4 is unknown: odd.onnx: 1 node has ")
        and "\nPruned 1 of the 1 " in out
        and out.endswith("\nWrote s.onnx: no engine can be built from it, either\n")
    )
    words = " ".join(out.split())
    assert "; export the model without them" in words and "\\n" not in words
    nodes = [node("Conv", "x w", "c"), node("Add", "c c", "d"), node("Unknown", "d", "y")]
    onnx.save(model(nodes, {"x": (1, 8, 5, 5)}, "y", WEIGHTS), "sum.onnx")
    words = " ".join(cli("inspect-sparsity sum.onnx")[1].split())
    assert words.startswith("weights are not 2:4; no engine can be built of this model: 1 node has an") and "\\n" not in words
    code, _, err = cli("prune odd.onnx -o t.onnx --layers auto")
    assert code == 1 and "odd.onnx" in err and not (digits / "t.onnx").exists()


def test_the_gain_of_a_forecast_is_a_number_and_a_sentence():
    found = benefit.forecast(DIGITS / "digits_dense.onnx", "l4", {"x": (64, 1, 8, 8)})
    assert found.gain_over_now == found.data()["gain_over_now"] > 1.1 and found.gain.startswith("gains ")
    assert benefit.Forecast().gain_over_now is None


def test_auto_says_the_batch_at_which_it_judges(digits, cli):
    code, out, _ = cli("prune dense.onnx -o s.onnx --layers auto --device l4")
    words = " ".join(out.split())
    assert code == 0 and "--layers auto judges the layers at batch 1: more layers gain at a larger one" in words
    assert words.endswith(
        "Wrote s.onnx, but nothing was pruned: no layer gains at this batch; give a larger one with --shapes, or --layers=all"
    )
    code, out, _ = cli("prune dense.onnx -o s.onnx --layers auto --device l4 --shapes x:64x1x8x8 --json")
    found = json.loads(out)["forecast"]
    assert (code, found["batch"]) == (0, 64)
    assert found["gain_over_now"] == pytest.approx(found["now_us"] / found["total_us"]) and found["gain_over_now"] > 1.1
    assert found["gain_over_library"] == pytest.approx(found["library_us"] / found["total_us"])
    code, out, _ = cli("prune dense.onnx -o s.onnx --layers auto --device l4 --shapes x:64x1x8x8")
    assert "--layers auto judges the layers at batch 64\n" in out


def test_inspect_sparsity_says_first_what_pruning_gains(digits, cli):
    command = "inspect-sparsity dense.onnx --device l4 --shapes x:64x1x8x8"
    code, out, _ = cli(command)
    words = " ".join(out.split())
    assert code == 0 and words.startswith(
        "weights are not 2:4; pruned, this network would take ~95.77 us instead of ~114.69 us ("
    )
    assert "; next: gpu-runtime prune dense.onnx -o dense_24.onnx --layers=auto --device=l4 --shapes=x:64x1x8x8 " in words
    assert json.loads(cli(f"{command} --json")[1])["if_pruned"]["now_us"] == 114.69
    assert cli("inspect-sparsity dense.onnx")[1].startswith("weights are not 2:4; --device NAME tells the gain of pruning them")


def test_without_onnxruntime_the_cure_is_said(digits, cli, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    code, _, err = cli("prune dense.onnx -o s.onnx --calibration inputs.npz")
    assert code == 1 and "onnxruntime is not installed, and this needs it: pip install onnxruntime" in err


def test_batches_cut_what_a_model_takes_at_once():
    wanted = [("x", (2, 3), np.dtype(np.float32)), ("i", (1,), np.dtype(np.int64))]
    cut = list(sessions.batches(wanted, {"x": np.ones((6, 3), np.float16), "i": np.arange(3)}))
    assert len(cut) == 3 and cut[1]["x"].shape == (2, 3) and cut[1]["x"].dtype == np.float32 and cut[2]["i"].tolist() == [2]
    with pytest.raises(ValueError, match="as many samples in each"):
        list(sessions.batches(wanted, {"x": np.ones((4, 3), np.float32), "i": np.arange(3)}))
    with pytest.raises(ValueError, match="expected dtype int64, got float32"):
        list(sessions.batches(wanted, {"x": np.ones((2, 3), np.float32), "i": np.ones(1, np.float32)}))


# ---- inspect-sparsity


@pytest.mark.slow
def test_layers_are_ranked_by_what_they_save_for_what_they_lose(digits, cli):
    args = f"inspect-sparsity dense.onnx --device {SPARSE_DEVICE} --shapes x:32x1x8x8"
    code, out, _ = cli(f"{args} --json")
    ranked = json.loads(out)["ranking"]
    rows, gain = {r["layer"]: r for r in json.loads(out)["layers"]}, json.loads(out)["gain"]
    able = {name for name, r in rows.items() if r["fit"] is not None}
    assert code == 0 and {layer for r in ranked for layer in r["layers"]} == able
    assert [r["us_per_percent"] for r in ranked] == sorted((r["us_per_percent"] for r in ranked), reverse=True)
    engine = gr.build("dense.onnx", sparsity="force", device=SPARSE_DEVICE, shapes={"x": (32, 1, 8, 8)})
    costs = {r.layer: r.other_cost_us for r in engine.sparsity.rows if r.verdict == "sparse"}
    assert {" || ".join(r["layers"]): r["saved_us"] for r in ranked if r["saved_us"]} == pytest.approx(costs)
    for r in ranked:
        assert bool(r["reason"]) != bool(r["saved_us"])
        assert len(r["layers"]) > 1 or r["lost_energy"] == rows[r["layers"][0]]["lost_energy"]
    text = cli(args)[1]
    assert "over the fastest dense plan known" in gain and f"All of it together {gain}" in " ".join(text.split())
    assert (
        "With all these weights pruned, on GeForce RTX 3090, predicted(rtx3090), x 32x1x8x8:\n" in text
        and "us per % lost" in text
    )
    assert all(f"~{r['saved_us']:.2f}" in text for r in ranked if r["saved_us"]) and "runs dense (plan: ~" in text
    assert "\nSaves nothing: " in text and max(map(len, text.splitlines())) <= 120


def test_require_tells_a_script(digits, cli):
    code, out, err = cli("inspect-sparsity dense.onnx --require")
    assert code == 5 and "dense (0.0 % zeros), not 2:4" in out
    assert err.startswith("--require: 15 weights that can be 2:4 are not: block1/conv1, ")
    assert cli("prune dense.onnx -o s.onnx --device none")[0] == 0 == cli("inspect-sparsity s.onnx --require --json")[0]
    assert cli("inspect-sparsity s.onnx --shapes x:1x1x8x8")[0] == 0
    assert "the shape given is 1x1x9x8" in cli("inspect-sparsity s.onnx --shapes x:1x1x9x8")[2]


def test_nothing_to_rank(tmp_path, cli):
    onnx.save(model([node("Conv", "x w", "y")], {"x": (1, 3, 4, 4)}, "y", {"w": np.ones((8, 3, 1, 1), np.float32)}), "m.onnx")
    code, out, _ = cli("inspect-sparsity m.onnx --device h200 --require")
    assert code == 0 and out.endswith("\nNo weights can be 2:4: there is nothing to rank\n")


@pytest.mark.full
def test_damaged_models_end_in_a_sentence(tmp_path):
    """Each mutation of tests/mutations.py, of small models: pruned with their channels ordered, or refused."""
    small, said = small_models(), 0
    for number in range(300):
        rng = np.random.default_rng(number)
        proto = onnx.ModelProto.FromString(small[number % len(small)].SerializeToString())
        MODEL_MUTATIONS[number % len(MODEL_MUTATIONS)](rng, proto, tmp_path)
        (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
        try:
            prune(tmp_path / "m.onnx", permute=True)
        except gr.ModelError as e:
            said += str(e).startswith(str(tmp_path))
    assert 50 < said < 300


def test_what_stays_in_its_order_says_why(tmp_path, cli):
    w = {"w": np.random.default_rng(0).standard_normal((8, 4, 1, 1)).astype(np.float32)}
    onnx.save(model([node("Conv", "x w", "y", name="conv")], {"x": (1, 4, 4, 4)}, "y", w), "m.onnx")
    code, out, _ = cli("prune m.onnx -o s.onnx --permute")
    told = "pruned, its channels were not permuted: Conv conv reads a tensor that has no channels that can be permuted"
    assert code == 0 and told in " ".join(out.split())
    assert f"--permute moved no channel; of conv: {told.partition(': ')[2]}" in " ".join(out.split())
    row = json.loads(cli("prune m.onnx -o s.onnx --permute --json")[1])["weights"][0]
    assert row["channels_in_place"] == told.partition(": ")[2]
