"""What a build prints: it fits a screen, and names every layer with the reason why it runs sparse or dense.

Lines are counted as a terminal shows them. `UPDATE_GOLDEN=1` writes the golden file again, as in test_report.
"""

import math
import random
import re
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

import gpu_runtime as gr
from benchmarks.networks import Net
from cuda_kernels.device import DEFAULT_DEVICE
from gpu_runtime.explain.log import log_text, most_lines
from gpu_runtime.explain.wording import ELIGIBLE_LINE, PICKED_LINE
from tests.conftest import MODELS, model_path
from tests.engines import SPARSE_DEVICE
from tests.example_plan import best, example_plan, measured, record, verdict, without_estimates
from tests.gpu_runtime.explain.test_names import expanded
from tests.gpu_runtime.explain.test_report import golden

WIDTHS = (80, 100, 120)
VERDICTS = {
    "sparse": ("picked",),
    "dense": ("dense_faster", "reformat_outweighs", "one_launch", "uncertain", "within_noise", "no_sparse_tactic"),
    "not_eligible": ("pattern_violation", "channels_not_multiple_of_4", "grouped_conv"),
}


def shown_lines(text: str, width: int) -> int:
    """TensorRT's two, which are never cut, as one each."""
    return sum(1 if line.startswith("(Sparsity)") else max(1, math.ceil(len(line) / width)) for line in text.splitlines())


def names_in_rows(text: str) -> tuple[set[str], int]:
    """(the layers that the rows of reasons name, how many more they say that there are)."""
    rows = " ".join(" ".join(text.split("\n\n")[2:]).split())
    named, more = set(), 0
    for row in filter(None, re.split(r"(?:^| )(?=(?:sparse|dense|not 2:4) +\d+ \w+)", rows)):
        if row.endswith(" ..."):
            more += int(re.search(r"\d+ (?=\w+)", row.removeprefix("not 2:4"))[0])
            continue
        if found := re.search(r"^not 2:4 +(\d+) .*; pruned, (?:these (\d+)|none) would shorten the plan(:?)", row):
            more += int(found[1]) - int(found[2] or 0)  # layers whose pruning gains nothing are not named
            if not found[3]:
                continue
        for name in re.split(r", (?![^{]*})", row.rpartition(": ")[2]):
            left = re.fullmatch(r"(?:and )?(\d+) (?:more|layers)", name)
            more, named = (more + int(left[1]), named) if left else (more, named | {n.replace(" ", "") for n in expanded(name)})
    return named, more


def check(plan, whole: bool) -> str:
    """Every width: the lines are few, none is wider, and each layer is named, or counted where `whole` does not ask for all."""
    rows = {name.replace(" ", ""): row.verdict for row in plan.sparsity.rows for name in row.layers}
    for width in WIDTHS:
        text = log_text(plan, width, most_lines(plan) - 4)
        assert shown_lines(text, width) <= most_lines(plan) - 4, text
        assert max(len(line) for line in text.splitlines() if not line.startswith("(Sparsity)")) <= width
        named, more = names_in_rows(text)
        assert named <= set(rows) and len(named) + more == len(rows), text
        eligible = {name for name, verdict in rows.items() if verdict != "not_eligible"}
        assert not whole or eligible <= named, text
        assert text.count(ELIGIBLE_LINE.split(":")[0]) == 1 and not re.search(r"None|\b(inf|nan)\b", text)
    return text


# ---- plans made by hand


def many(count: int, names, seed: int = 0, kinds=VERDICTS):
    """The example plan with `count` layers that have weights, each with a random reason."""
    rng, plan = random.Random(seed), example_plan()
    rows = []
    for i in range(count):
        what = rng.choice(list(kinds))
        dense, sparse = (
            best(f"conv_{kind}__fp16.hwc8_fp16.hwc8", rng.uniform(2, 9))
            for kind in ("dense_hmma_16816_128x128x32_w2x4_s4", "sparse24_hmma_sp_16832_128x128x64_w2x4_s3")
        )
        row = verdict(names(i), what, rng.choice(kinds[what]), dense, sparse, rng.uniform(0, 3))
        rows.append(row | {"p_sparse_faster": rng.random(), "lost_energy": rng.random(), "pattern_share": rng.random()})
    plan["sparsity"] |= {
        "rows": rows,
        "eligible": [r["layer"] for r in rows if r["verdict"] != "not_eligible"],
        "picked": [r["layer"] for r in rows if r["verdict"] == "sparse"],
    }
    plan["layers"] *= 1 + count // len(plan["layers"])
    return plan


def long_name(i: int) -> str:
    return f"model.backbone.encoder.stages.{i // 100}.layers.{i // 3 % 34}.residual_branch.conv{i % 3}/Conv"


def test_the_log_is_as_committed():
    golden("log_text.txt", log_text(record(example_plan()), 100, 36))
    text = without_estimates(log_text(record(measured(example_plan())), 100, 36))
    assert "~" not in text.replace("predicted to take ~", "")


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 12, 80, 300, 700])
@pytest.mark.parametrize("mode", ["disable", "enable", "force"])
def test_any_network_fits_a_screen(count, mode):
    """Reasons at random are the worst for names: no two neighbours have the same."""
    plan = many(count, long_name)
    plan["sparsity"] |= {"mode": mode, "pruned": ["w"] * count, "not_pruned": [[long_name(i), "C = 3"] for i in range(count)]}
    plan["range"] = {
        "source": "random values",
        "high": [[f"t{i}", 70000.0 + i] for i in range(count)],
        "exponents": {f"t{i}": -1 for i in range(count)},
        "single": [["prob", "'prob' reaches 1e9"]],
        "stuck": [[f"t{i}", "its scale is fixed"] for i in range(count)],
    }
    check(record(plan), whole=count <= 12)


@pytest.mark.parametrize("count", [40, 300, 700])
def test_runs_of_layers_with_one_reason_are_all_named(count):
    plan = many(count, long_name, kinds={"dense": ("dense_faster",)})
    check(record(plan), whole=True)


def test_names_of_eligible_layers_come_before_the_ends_of_facts():
    """Names of five forms under each of four reasons: facts of three lines each would leave too few."""
    kinds = ("sparse", "picked"), ("dense", "dense_faster"), ("dense", "reformat_outweighs"), ("dense", "uncertain")
    forms = "expand/Relu6", "project/BatchNorm/FusedBatchNorm", "shortcut/Add", "squeeze/Mean", "gate/Mul"
    plan = many(60, lambda i: f"backbone/expanded_unit_{i}/{forms[i % len(forms)]}")
    for i, row in enumerate(plan["sparsity"]["rows"]):
        row["verdict"], row["reason"] = kinds[i // 15]
        row["p_sparse_faster"] = 0.99
    check(record(plan), whole=True)


HOSTILE = "x" * 5000, "a/" * 900, "a, b", "{", "{1..3}", " ", "\x1b[31m\n", ",,,,", "é中文", "and 3 more"


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names(name):
    plan = many(30, lambda i: name + str(i))
    plan["model"]["name"] = name
    for width in (40, *WIDTHS):
        text = log_text(record(plan), width, 36)
        assert shown_lines(text, width) <= 36 and text.isprintable() is False and "\x1b" not in text
        assert max(len(line) for line in text.splitlines() if not line.startswith("(Sparsity)")) <= width


def test_certain_picks_and_toss_ups_are_told_apart():
    plan = many(7, lambda i: f"c{i}", kinds={"sparse": ("picked",)})
    for row, chance in zip(plan["sparsity"]["rows"], (0.99, 0.95, 0.9499, 0.8, 0.75, 0.7499, 0.6), strict=True):
        row["p_sparse_faster"] = chance
    text = log_text(record(plan), 120, 36)
    assert "7 of 7 layers with weights are eligible, 7 run sparse (certain 2, likely 3, toss-up 2)" in text
    for word, first, last, low, high in (("certain", 0, 1, 95, 99), ("likely", 2, 4, 75, 94), ("toss-up", 5, 6, 60, 74)):
        found = rf"^sparse +{last - first + 1} picked, {word}: [^:]*P\(faster\) = {low} % to {high} %"
        assert re.search(rf"{found}[^:]*:\s+c\{{{first}[.,]+{last}\}}$", text, re.M), word


def test_programs_find_tensorrt_s_lines_whole():
    plan = record(many(300, lambda i: f"conv{i}", kinds={"sparse": ("picked",)}))
    lines = log_text(plan, 80, 36).splitlines()
    for label in (ELIGIBLE_LINE, PICKED_LINE):
        assert f"{label} {', '.join(f'conv{i}' for i in range(300))}" in lines, "each name, as TensorRT prints them"


# ---- plans of networks


def residual(blocks: int) -> onnx.ModelProto:
    """A residual network of three stages with `blocks` blocks of three convolutions each; its sums stay within FP16."""
    n = Net("residual", (1, 16, 8, 8))
    x = "x"
    for stage in range(3):
        for b in range(blocks):
            at = f"model.backbone.stages.{stage}.blocks.{b}"
            y = n.relu(n.conv(x, f"{at}/conv1", 16, 1), f"{at}/relu1")
            y = n.relu(n.conv(y, f"{at}/conv2", 16, 3), f"{at}/relu2")
            x = n.add("Add", [n.conv(y, f"{at}/conv3", 16, 1), x], f"{at}/add", 16)
    for t in n.initializers:
        if "conv3" in t.name:
            t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t) / 16, t.name))
    return n.finish(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "mode"),
    [
        (14, "disable"),
        (14, "enable"),
        (14, "force"),
        *(pytest.param(90, mode, marks=pytest.mark.full) for mode in ("force", "disable", "enable")),
    ],
)
def test_a_deep_network_fits_a_screen(tmp_path, blocks, mode):
    onnx.save(residual(blocks), tmp_path / "deep.onnx")
    plan = gr.build(tmp_path / "deep.onnx", device=SPARSE_DEVICE, sparsity=mode).record
    assert sum(len(row.layers) for row in plan.sparsity.rows) == 9 * blocks and most_lines(plan) == 60
    text = check(plan, whole=True)
    assert len(plan.sparsity.eligible) == (9 * blocks if mode == "force" else 0)
    named = "model.backbone.stages.{0..2}" in text  # pruning these gains nothing, so the log names none
    assert named == (mode != "enable") and text.count("\n") < 40


CASES = [(path.stem, mode) for path in sorted(MODELS.glob("*.onnx")) for mode in ("disable", "enable", "force")]


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "mode"), CASES or [("mnist8", "force")])
def test_real_networks_fit_a_screen(name, mode):
    path = model_path(name)
    plan = gr.build(path, device=DEFAULT_DEVICE, sparsity=mode, shapes=sizes(path)).record
    assert bool(plan.sparsity.eligible) == (mode == "force" and name != "sci_180x320")
    check(plan, whole=True)


def sizes(path: Path) -> dict[str, tuple[int, ...]]:
    """Small ones for what the file leaves open."""
    graph = onnx.load(path).graph
    weights = {t.name for t in graph.initializer}
    dims = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input if v.name not in weights}
    return {name: tuple(d or (64 if i else 1) for i, d in enumerate(ds)) for name, ds in dims.items() if not all(ds)}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [None, 80, 100])
def test_all_that_a_build_prints_fits_a_screen(files, cli, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = cli(
        f"build sparse.onnx -o s.engine --sparsity=force --device {SPARSE_DEVICE} --shapes=x:64x1x8x8 "
        "--exportLayerInfo=i.json --exportProfile=p.json --savePruned=p.onnx"
    )
    assert code == 0 and shown_lines(out, columns or 120) <= 40
    cut = [line for line in out.splitlines() if not line.startswith("(Sparsity)")]  # TensorRT's lines stay whole
    assert max(map(len, cut)) <= (columns or 120)
    assert out.startswith("Planning for GeForce RTX 3090 (sm_86); times are predicted(rtx3090), nothing is")
    assert out.endswith("gpu-runtime explain s.engine [LAYER] explains each layer\n")
