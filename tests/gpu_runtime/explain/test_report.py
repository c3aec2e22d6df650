"""Layer information as trex and TensorRT's tools need it, profiles, and the texts (golden files in tests/golden).

`UPDATE_GOLDEN=1 pytest FILE`, of this file, writes the golden files again; read the diff before committing it.
"""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_runtime.explain import layer_info, reason_texts, report, wording
from gpu_runtime.explain.log import log_text
from gpu_runtime.report import data
from gpu_runtime.runtime.findings import SparsityRow
from gpu_runtime.text import WIDTH
from tactics import codec
from tactics.reason import OF_LAYERS, Reason
from tests.example_plan import REASONS, example_plan, measured, record, verdict, without_estimates

GOLDEN = Path(__file__).parents[2] / "golden"


def width(text):
    return max(len(line) for line in text.splitlines() if not line.startswith("(Sparsity)"))


def golden(name, text):
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs: UPDATE_GOLDEN=1 writes it again"


# ------------------------------------------------------------------------------------------------------ golden texts


@pytest.mark.parametrize("name", ["sparsity_text", "plan_text", "inspect_text"])
def test_text_is_as_committed(name):
    text = getattr(wording if name == "sparsity_text" else report, name)(record(example_plan()))
    golden(f"{name}.txt", text)
    assert text.isascii() and width(text) <= 120
    assert all(line == line.rstrip() for line in text.splitlines()) and text.endswith("\n")


def test_the_full_account_is_as_committed():
    plan = record(example_plan())
    text = wording.explain_text(plan, plan.sparsity.rows)
    golden("explain_text.txt", text)
    assert text.isascii() and width(text) <= 120 and "None" not in text
    assert all(t.startswith(("~", "+")) for t in re.findall(r"([^\s(]*\d) us\b", text))
    rows = [replace(row, if_sparse=None) for row in plan.sparsity.rows]  # the gain by pruning is always predicted
    assert "~" not in without_estimates(wording.explain_text(record(measured(example_plan())), rows))


def test_json_is_as_committed():
    plan = record(example_plan())
    golden("layer_info.json", json.dumps(layer_info.layer_info(plan), indent=1) + "\n")
    golden("profile.json", json.dumps(layer_info.profile(plan), indent=1) + "\n")
    golden("dump_profile.txt", layer_info.trt_profile_text(layer_info.profile(plan)))


# --------------------------------------------------------------------------------------------------- the sparsity log


def test_the_two_lines_are_literal():
    lines = wording.sparsity_text(record(example_plan())).splitlines()
    wide = "/layer1/layer1.0/conv_with_a_rather_long_name/Conv"
    eligible = f"{wide}, /layer1/conv2, /layer2/conv, /branch/tie, /branch/odd"
    assert lines[1] == f"(Sparsity) Layers eligible for sparse math: {eligible}"
    assert lines[2] == f"(Sparsity) TRT inference plan picked sparse implementation for layers: {wide}"
    assert "predicted(h200)" in lines[0]


def test_the_two_lines_without_layers():
    plan = example_plan()
    plan["sparsity"] |= {"eligible": [], "picked": [], "rows": []}
    lines = wording.sparsity_text(record(plan)).splitlines()
    assert lines[1:3] == [wording.ELIGIBLE_LINE, wording.PICKED_LINE]
    plan["sparsity"]["mode"] = "disable"
    assert "--sparsity=disable; times" in wording.sparsity_text(record(plan)).splitlines()[0]
    plan["sparsity"]["rows"] = [verdict("a", "dense", "no_sparse_tactic", detail="--sparsity=disable was given")]
    disabled = record(plan)
    text = wording.sentence(disabled.sparsity.rows[0], disabled)
    assert text.endswith("pattern, but --sparsity=disable allows dense tactics only.")


def test_force_says_what_it_did():
    plan = example_plan()
    plan["sparsity"] |= {"mode": "force", "pruned": ["w1", "w2"], "not_pruned": [["stem.w", "C = 3"]]}
    text = wording.sparsity_text(record(plan))
    assert "in 2 initializers: the outputs differ from the" in text and "not pruned: stem.w: C = 3\n" in text
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(wording.ELIGIBLE_LINE))
    assert "--sparsity=force; times are predicted(h200)" in lines[at - 1]


def test_every_reason_has_its_sentence():
    plan = record(example_plan())
    rows = plan.sparsity.rows
    assert sorted(row.reason for row in rows) == sorted(REASONS)
    sentences = [wording.sentence(row, plan) for row in rows]
    assert len(set(sentences)) == len(rows)
    for row, text in zip(rows, sentences, strict=True):
        assert row.reason not in text and text[0].isupper() and text.rstrip().endswith(".") and "None" not in text
        bare = codec.from_json(SparsityRow, verdict(row.layer, row.verdict, row.reason))
        assert "None" not in wording.sentence(bare, plan)


def test_every_code_of_a_reason_is_worded_once():
    assert {*OF_LAYERS} == {*reason_texts.REASONS} > {*REASONS}


def test_a_reason_is_two_keys_of_its_row_s_json_and_only_a_layer_s_code_is_read():
    row = verdict("a", "not_eligible", "channels_not_multiple_of_4", detail="C = 6")
    read = codec.from_json(SparsityRow, row)
    assert read.why == Reason.of("channels_not_multiple_of_4", channels=6)
    assert row.items() <= codec.to_json(SparsityRow, read, defaults=True).items()
    for changed, place in (
        ({"reason": "workspace"}, "reason: expected one of picked"),
        ({"detail": 1}, "detail: expected a text"),
    ):
        with pytest.raises(codec.Misfit, match=f"^{place}"):
            codec.from_json(SparsityRow, row | changed)


def test_a_sentence_in_the_plan_wins():
    plan = example_plan()
    plan["sparsity"]["rows"][0]["sentence"] = "Because I say so."
    assert "/stem/Conv: Because I say so." in wording.sparsity_text(record(plan))
    assert layer_info.layer_info_list(record(plan))[1]["SparsitySentence"] == "Because I say so."


@pytest.mark.parametrize("name", ["sparsity_text", "plan_text", "inspect_text"])
def test_predicted_times_are_always_marked(name):
    text = getattr(wording if name == "sparsity_text" else report, name)(record(example_plan()))
    times = re.findall(r"([^\s(]*\d) us\b", text)
    assert times and all(t.startswith("~") for t in times)
    plan = measured(example_plan())
    if name != "plan_text":  # the gain by pruning is always predicted
        text = without_estimates(getattr(wording if name == "sparsity_text" else report, name)(record(plan)))
        assert "predicted to take ~2.20 us instead of ~2.50 us" in text and text.count("~") == 2
    for row in plan["sparsity"]["rows"]:
        row["if_sparse"] = None
    unmarked = without_estimates(getattr(wording if name == "sparsity_text" else report, name)(record(plan)))
    assert "~" not in unmarked and "predicted" not in unmarked and "measured(NVIDIA H200)" in unmarked


def test_long_and_odd_names_stay_in_the_table():
    plan = example_plan()
    name = "/a" * 90 + "\n\x1b[31m"
    plan["layers"][1]["name"] = plan["sparsity"]["rows"][0]["layer"] = name
    for text in (wording.sparsity_text(record(plan)), report.plan_text(record(plan)), report.inspect_text(record(plan))):
        assert "\x1b" not in text
        assert width(text) <= 120


# ------------------------------------------------------------------------------------------------------- plan's text


def test_plan_text_shows_all_layers_and_what_is_proven():
    plan = example_plan()
    text = report.plan_text(record(plan))
    assert "proven minimal" in text and "not proven" not in text
    assert text.count("Reformatting") == 2 and "noop" in text
    plan["solution"] |= {"status": "time_limit", "gap": 0.0125}
    assert "not proven minimal: a plan that takes up to 1.25 % less may exist" in report.plan_text(record(plan))
    plan["solution"] |= {"gap": None, "rivals": {}, "measured_us": 150.0}
    text = report.plan_text(record(plan))
    assert "not proven minimal" in text and "rivals" not in text and "150.00 us measured end to end" in text


@pytest.mark.parametrize(
    "view",
    [
        lambda plan: log_text(plan, 120, 60),
        report.inspect_text,
        lambda plan: "\n".join(f"{key} {text}" for key, text in data.environment(plan)),
    ],
    ids=["log", "inspect", "page"],
)
def test_facts_of_the_whole_plan_are_in_every_view(view):
    plan = example_plan()
    plan["range"] = {
        "source": "random values",
        "high": [["a", 70000.0], ["b\nc", 140000.0]],
        "exponents": {"a": -1, "b\nc": -2},
        "stuck": [["p", "its scale is fixed"], ["q", "so is its"], ["r", "its too"]],
        "compared": {"skipped": "it is too large"},
    }
    swap = {"op": "/fc/Gemm", "before": "conv_dense__a", "after": "conv_sparse24__b", "before_us": 120.0, "after_us": 118.0}
    apart = {"layer": "/layer1/conv2", "alone_us": 9.0, "us": 12.0, "behind": "/stem/Conv"}
    plan["solution"] |= {"measured_us": 150.0, "apart": [apart], "replaced": [swap, swap | {"op": "/cat/Concat"}]}
    found = record(plan)
    found = replace(found, device=replace(found.device, left_out=(("pool", "it hangs"),)))
    text = " ".join(view(found).split())
    assert "3 tensors may exceed FP16's range: 'p': its scale is fixed; 'q': so is its; " in text
    assert "2 tensors exceed FP16's maximum of 65504 on random values: 'b\\nc' reaches 140000, stored times 2^-2; " in text
    assert "with FP32 on the calibration input: not run: it is too large" in text
    assert "150.00 us measured end to end" in text and "/layer1/conv2 took " in text and " behind /stem/Conv, " in text
    assert "/fc/Gemm: conv_sparse24 for conv_dense, as the whole took " in text and "/cat/Concat: conv_sparse24" in text
    assert "pool, which failed on this GPU: it hangs" in text


def test_an_empty_plan_has_a_text():
    plan = example_plan() | {"layers": []}
    plan["solution"] = {"total_us": 0, "status": "proven", "method": ""}
    assert "proven" in report.plan_text(record(plan)) and report.inspect_text(record(plan))


def test_convolution_keys_stand_in_tensorrt_s_order():
    expected = [
        "Name",
        "LayerType",
        "Inputs",
        "Outputs",
        "ParameterType",
        "Kernel",
        "PaddingMode",
        "PrePadding",
        "PostPadding",
        "Stride",
        "Dilation",
        "OutMaps",
        "Groups",
        "Weights",
        "Bias",
        "HasBias",
        "HasReLU",
        "HasSparseWeights",
        "HasDynamicFilter",
        "HasDynamicBias",
        "HasResidual",
        "ConvXAsActInputIdx",
        "BiasAsActInputIdx",
        "ResAsActInputIdx",
        "Activation",
        "TacticName",
        "TacticValue",
        "StreamId",
        "Metadata",
    ]
    info = layer_info.layer_info_list(record(example_plan()))[1]
    assert [k for k in info if k in expected] == expected
    assert info["HasReLU"] == 1 and info["Activation"] == "RELU" and info["PrePadding"] == [1, 1]
    assert info["Metadata"] == "[ONNX Layer: /stem/Conv]\u001e[ONNX Layer: /stem/Relu]"
    assert re.fullmatch(r"0x[0-9a-f]{16}", info["TacticValue"])


def test_layer_info_values():
    info = layer_info.layer_info(record(example_plan()))
    picked, refused = info["Layers"][2], info["Layers"][3]
    assert (picked["SparsityEligible"], picked["SparsityChosen"], picked["SparsityReason"]) == (1, 1, "picked")
    assert picked["SparseBestMs"] == 0.03125 and picked["DenseBestMs"] == 0.0405 and picked["HasSparseWeights"] == 1
    assert (refused["SparsityEligible"], refused["SparsityChosen"]) == (1, 0) and refused["Activation"] == "GENERIC"
    assert refused["HasResidual"] == 1 and len(refused["Inputs"]) == 2
    assert info["Layers"][1]["SparsityEligible"] == 0 and "SparseBestMs" not in info["Layers"][1]
    assert all(entry["Timing"] == "predicted(h200)" for entry in info["Layers"])
    assert [e["LayerType"] for e in info["Layers"]] == [
        "Reformat",
        "Convolution",
        "Convolution",
        "Convolution",
        "Pooling",
        "NoOp",
        "Convolution",
        "PointWiseV2",
        "Pooling",
        "Concatenation",
        "Resize",
        "Slice",
        "Convolution",
        "SoftMax",
    ]
    assert info["Layers"][4]["PoolingType"] == "MAX" and info["Layers"][4]["PostPadding"] == [0, 0]
    t = info["Layers"][6]["Outputs"][0]
    assert t["Format"] == t["Format/Datatype"] == "Thirty-two wide channel vectorized row major FP16 format"
    assert t["Datatype"] == "Half" and t["Strides"] == [128 * 784, 784 * 32, 28 * 32, 32] and t["VectorSize"] == 32
    assert info["Bindings"] == ["image", "prob"]
    image, prob = info["I/O Tensors"]
    assert image["IOMode"] == "Input" and image["DataType"] == "Float" and image["Dimensions"] == [8, 3, 112, 112]
    assert image["ProfileInfo"][0]["Format"] == "Row major linear FP32 format (kLINEAR)"
    assert prob["IOMode"] == "Output" and prob["Dimensions"] == [8, 10]


def test_sparsity_rows_are_found_by_the_layer_key():
    plan = example_plan()
    plan["layers"][2] |= {"name": "/conv + /relu", "layer": plan["layers"][2]["name"]}
    assert layer_info.layer_info_list(record(plan))[2]["SparsityReason"] == "picked"


# ------------------------------------------------------------------------------------------------------------ profile


def test_profile_of_a_prediction_and_of_a_measurement():
    plan = record(example_plan())
    assert layer_info.profile(plan)[0] == {"count": 1, "batch": 8, "predicted": True}
    assert layer_info.profile(record(measured(example_plan())))[0] == {"count": 1, "batch": 8}
    times = [[i + extra for i in range(len(plan.plan.layers))] for extra in (1.0, 2.0, 6.0)]
    records = layer_info.profile(plan, times)
    assert records[0] == {"count": 3, "batch": 8}
    assert records[1] == {
        "name": plan.plan.layers[0].name,
        "timeMs": 0.009,
        "averageMs": 0.003,
        "medianMs": 0.002,
        "percentage": pytest.approx(100 * 9 / sum(map(sum, times)), abs=1e-4),
    }
    assert sum(r["percentage"] for r in records[1:]) == pytest.approx(100, abs=0.01)
    assert [r["name"] for r in records[1:]] == [entry["Name"] for entry in layer_info.layer_info_list(plan)]


@pytest.mark.parametrize("times", [[], [[]], [[1.0]] * 14, [[1.0] * 14, [1.0] * 13]])
def test_profile_wants_times_for_every_layer(times):
    with pytest.raises(ValueError, match="times_us"):
        layer_info.profile(record(example_plan()), times)


def test_profile_survives_json_and_zero_times():
    plan = example_plan()
    plan["layers"][1]["name"] = 'quote " backslash \\ newline \n'
    for entry in plan["layers"]:
        entry["time_us"] = 0
    records = json.loads(json.dumps(layer_info.profile(record(plan))))
    assert records[2]["name"] == 'quote " backslash \\ newline ?' and records[2]["percentage"] == 0
    assert "Total" in layer_info.trt_profile_text(records).splitlines()[-1]


# ------------------------------------------------------------------------------------------------------------- widths


def at_width(columns):
    plan, token = record(example_plan()), WIDTH.set(columns)
    try:
        return [report.plan_text(plan), wording.sparsity_text(plan), wording.explain_text(plan, plan.sparsity.rows)]
    finally:
        WIDTH.reset(token)


@pytest.mark.parametrize("columns", [64, 80, 100, 120])
def test_texts_are_as_wide_as_the_terminal(columns):
    """Where they fit, nothing is folded; where they do not, no word is broken that a cell could hold."""
    texts, wide = at_width(columns), at_width(200)
    assert max(len(line) for text in texts for line in text.splitlines() if not line.startswith("(Sparsity)")) <= columns
    assert re.search(r"conv_with_a_rather_long_name/Conv +conv .* conv_sparse24_hmma_sp_16832_128x128x64_w2x4_s3 ", wide[0])
    words = "us", "pointwise", *(("128x128x32_", "rather_", "hwc8") if columns >= 100 else ())
    assert all(text.count(word) == whole.count(word) for word in words for text, whole in zip(texts, wide, strict=True))


def test_a_profile_of_milliseconds_is_in_milliseconds():
    slow = {"name": "a", "timeMs": 2.5, "averageMs": 2.5, "medianMs": 2.5, "percentage": 99.9}
    fast = {"name": "b", "timeMs": 0.0021, "averageMs": 0.0021, "medianMs": 0.0021, "percentage": 0.1}
    text = layer_info.trt_profile_text([{"count": 1}, slow, fast])
    assert "Time(ms)" in text and "      2.5000" in text and "      0.0021" in text
    text = layer_info.trt_profile_text([{"count": 1}, fast])
    assert "Time(us)" in text and "        2.10" in text and "0.0021" not in text
