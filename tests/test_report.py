"""Layer information as trex and TensorRT's tools need it, profiles, and the texts (golden files in tests/golden).

`UPDATE_GOLDEN=1 pytest tests/test_report.py` writes the golden files again; read the diff before committing it.
"""

import contextlib
import copy
import json
import os
import re
from pathlib import Path

import pytest

from gpu_runtime.explain import layer_info, report, wording
from tactics.format import Format, num_bytes

GOLDEN = Path(__file__).parent / "golden"
REASONS = (
    "picked", "dense_faster", "reformat_outweighs", "within_noise", "no_sparse_tactic", "pattern_violation",
    "channels_not_multiple_of_4", "grouped_conv",
)  # fmt: skip


def tensor(name, shape4, fmt, offset=0):
    return {"name": name, "shape4": list(shape4), "format": fmt, "offset": offset}


def bound(name, shape, dtype, fmt, shape4, offset):
    nbytes = num_bytes(Format.parse(fmt), tuple(shape4))
    return tensor(name, shape4, fmt, offset) | {"shape": list(shape), "dtype": dtype, "nbytes": nbytes}


def layer(name, kind, inputs, outputs, us, tactic, params=None, nodes=None, sparse=False, pattern=False, **counts):
    return {
        "name": name, "type": kind, "nodes": [name] if nodes is None else nodes, "layer": None, "problem": None,
        "params": params or {}, "inputs": inputs, "outputs": outputs, "tactic": tactic, "time_us": us,
        "sparse": sparse, "has_sparse_weights": pattern, "weights_count": counts.get("weights", 0),
        "bias_count": counts.get("bias", 0),
    }  # fmt: skip


def conv(kernel, k, act="none", residual=False, groups=1, stride=1):
    return {
        "kernel": [kernel, kernel], "stride": [stride, stride], "pad": [kernel // 2] * 4, "dilation": [1, 1], "k": k,
        "groups": groups, "act": act, "bias": True, "residual": residual,
    }  # fmt: skip


def best(tactic, us, fmt="fp16:hwc8"):
    return {"tactic": tactic, "in": fmt, "out": fmt, "us": us, "low_us": us * 0.75, "high_us": us * 1.25, "bound": "smem"}


def other(tactic, us, kernel, reformat, around, fmt="fp16:hwc8"):
    """What forcing a layer the other way changes."""
    cost = kernel + reformat + around
    return {
        "total_us": 123 + cost, "cost_us": cost, "kernel_us": kernel, "reformat_us": reformat, "around_us": around,
        "reformats": 0, "tactic": tactic, "in": fmt, "out": fmt, "us": us,
    }  # fmt: skip


def floor(bound, mma=10.0, dram=2.0):
    times = {"mma_us": mma, "dram_us": dram, "l2_us": 1.5, "launch_us": 2.0, "bound": bound}
    return times | {"dense_us": 2 + max(mma, dram), "sparse_us": 2 + max(mma / 2, dram)}


def verdict(name, what, reason, dense=None, sparse=None, cost=None, **more):
    return {
        "layer": name, "layers": [name], "op": "Conv", "verdict": what, "reason": reason, "detail": None, "sentence": None,
        "pattern_share": 1.0, "first_violation": None, "best_dense": dense, "best_sparse": sparse,
        "other_cost_us": cost, "p_sparse_faster": None, "other": None, "flip_speedup": None, "lost_energy": 0.0,
        "if_sparse": None, "stored_share": 1.0,
        "c": 64, "k": 64, "groups": 1, "kernel": [3, 3], "pattern_groups": 9216, "floor": None,
    } | more  # fmt: skip


def example_plan():
    """A made-up plan with one layer of every type and one sparsity row of every reason."""
    big, mid, small = (8, 64, 56, 56), (8, 128, 28, 28), (8, 128, 1, 1)
    dense, sparse = "conv_dense_hmma_16816_128x128x32_w2x4_s4", "conv_sparse24_hmma_sp_16832_128x128x64_w2x4_s3"
    h8 = "fp16:hwc8"
    dense, sparse = (f"{name}__fp16.hwc8_fp16.hwc8" for name in (dense, sparse))
    stem = layer(
        "/stem/Conv", "conv", [tensor("x16", (8, 3, 112, 112), h8)], [tensor("a", big, h8)], 20.5, dense,
        conv(3, 64, "relu", stride=2), ["/stem/Conv", "/stem/Relu"], weights=1728, bias=64,
    )  # fmt: skip
    wide = "/layer1/layer1.0/conv_with_a_rather_long_name/Conv"
    layers = [
        layer("Reformatting CopyNode for Input Tensor 0 to /stem/Conv", "reformat",
              [tensor("image", (8, 3, 112, 112), "fp32:chw")], [tensor("x16", (8, 3, 112, 112), h8)], 5.25,
              "reformat_tile32", nodes=[]),
        stem,
        layer(wide, "conv", [tensor("a", big, h8)], [tensor("b", big, h8)], 31.25, sparse, conv(3, 64, "relu"),
              sparse=True, pattern=True, weights=36864, bias=64),
        layer("/layer1/conv2", "conv", [tensor("b", big, h8), tensor("a", big, h8)], [tensor("c", big, h8)], 30, dense,
              conv(3, 64, "clip(0,6)", residual=True), pattern=True, weights=36864, bias=64),
        layer("/pool/MaxPool", "pool", [tensor("c", big, h8)], [tensor("d", (8, 64, 28, 28), h8)], 4.5, "pool_v8",
              {"kind": "max", "kernel": [3, 3], "stride": [2, 2], "pad": [1, 1, 0, 0], "count_pad": False}),
        layer("Reformatting NoOp for Input Tensor 0 to /layer2/conv", "noop", [tensor("d", (8, 64, 28, 28), h8)],
              [tensor("d16", (8, 64, 28, 28), "fp16:hwc16")], 0, "", nodes=[]),
        layer("/layer2/conv", "conv", [tensor("d16", (8, 64, 28, 28), "fp16:hwc16")],
              [tensor("e", mid, "fp16:chw32")], 18.75, dense, conv(1, 128), pattern=True, weights=8192, bias=128),
        layer("/layer2/Mul", "pointwise", [tensor("e", mid, "fp16:chw32"), tensor("e", mid, "fp16:chw32")],
              [tensor("f", mid, "fp16:chw32")], 3.5, "pointwise_v8", {"stages": ["mul(t1)", "sigmoid"]}),
        layer("/gap/GlobalAveragePool", "pool", [tensor("f", mid, "fp16:chw32")], [tensor("g", small, h8)], 2.25,
              "pool_global", {"kind": "avg", "kernel": [28, 28], "stride": [1, 1], "pad": [0, 0, 0, 0]}),
        layer("/cat/Concat", "concat", [tensor("g", small, h8), tensor("g", small, h8)],
              [tensor("h", (8, 256, 1, 1), h8)], 1, "move_concat"),
        layer("/up/Resize", "move", [tensor("h", (8, 256, 1, 1), h8)], [tensor("u", (8, 256, 2, 2), h8)], 1,
              "move_gather", {"kind": "upsample"}),
        layer("/cut/Slice", "move", [tensor("u", (8, 256, 2, 2), h8)], [tensor("v", (8, 256, 1, 1), h8)], 1,
              "move_gather", {"kind": "window"}),
        layer("/fc/Gemm", "conv", [tensor("v", (8, 256, 1, 1), h8)], [tensor("z", (8, 10, 1, 1), h8)], 2.5, dense,
              conv(1, 10), weights=2560, bias=10),
        layer("/Softmax", "normalize", [tensor("z", (8, 10, 1, 1), h8)], [tensor("prob", (8, 10, 1, 1), "fp32:chw")],
              1.5, "softmax_warp", {"kind": "softmax", "axes": "c"}),
    ]  # fmt: skip
    rows = [
        verdict("/stem/Conv", "not_eligible", "channels_not_multiple_of_4", best(dense, 20.5), c=3, pattern_share=None,
                pattern_groups=None, lost_energy=None, stored_share=None),
        verdict(wide, "sparse", "picked", best(dense, 40.5), best(sparse, 31.25), 9.25,
                p_sparse_faster=0.93, other=other(dense, 40.5, 9.25, 0, 0), flip_speedup=1.296,
                floor=floor("mma")),
        verdict("/layer1/conv2", "dense", "dense_faster", best(dense, 30), best(sparse, 33.75), 3.75,
                other=other(sparse, 33.75, 3.75, 0, 0), flip_speedup=1.125, floor=floor("mma"), p_sparse_faster=0.45),
        verdict("/layer2/conv", "dense", "reformat_outweighs", best(dense, 18.75, "fp16:hwc16"),
                best(sparse, 17.5, "fp16:chw32"), 6.5, floor=floor("dram", 4.0, 9.0), p_sparse_faster=0.6,
                other=other(sparse, 17.5, -1.25, 6, 1.75, "fp16:chw32"), flip_speedup=1.591),
        verdict("/branch/tie", "dense", "within_noise", best(dense, 10), best(sparse, 9.9), -0.1),
        verdict("/branch/odd", "dense", "no_sparse_tactic", best(dense, 12), None, detail="C/g = 12, not 8 n"),
        verdict("/branch/grouped", "not_eligible", "grouped_conv", best(dense, 11), c=128, groups=64, pattern_share=None,
                detail="a group has 2 input channels, not a multiple of 4"),
        verdict("/fc/Gemm", "not_eligible", "pattern_violation", best(dense, 2.5), pattern_share=0.99996,
                first_violation=[3, 16, 0, 0], pattern_groups=25600, lost_energy=0.000123, stored_share=0.9992,
                if_sparse=best(sparse, 2.2) | {"dense_us": 2.5}, floor=floor("launch", 0.1, 0.1)),
    ]  # fmt: skip
    total = sum(entry["time_us"] for entry in layers)
    return {
        "producer": {"version": "0.1.0", "nvrtc": "13.0"},
        "model": {"name": "example.onnx", "sha256": "5" * 64},
        "device": {"name": "h200", "title": "H200 SXM 141GB", "sm": "sm_90a", "num_sms": 132, "clock_mhz": 1830},
        "timing": {"kind": "predicted", "label": "predicted(h200)"},
        "source_hash": "a" * 64,
        "flags": {"sparsity": "enable", "shapes": {"image": [8, 3, 112, 112]}},
        "inputs": [bound("image", (8, 3, 112, 112), "fp32", "fp32:chw", (8, 3, 112, 112), 0)],
        "outputs": [bound("prob", (8, 10), "fp32", "fp32:chw", (8, 10, 1, 1), 1 << 21)],
        "layers": layers,
        "steps": [
            {"kernel": "reformat", "values": {"V": 8}, "grid": [64, 1, 1], "block": [256, 1, 1], "smem": 0,
             "args": [["arena", 0], ["weights", 256], ["i32", 5], ["i64", 1 << 40], ["f32", 0.1]], "covers": [0]},
        ],
        "sparsity": {
            "mode": "enable", "rows": rows, "picked": [wide],
            "eligible": [row["layer"] for row in rows if row["verdict"] != "not_eligible"],
        },
        "plan": {
            "total_us": total, "status": "proven", "method": "variable elimination", "width": 2, "gap": 0,
            "rivals": {"all_dense_us": total + 9.25, "best_single_format": {"format": h8, "us": total + 20},
                       "greedy_us": total + 3.5},
        },
        "memory": {"activation_bytes": 9_633_792, "largest_live_bytes": 9_633_792, "weight_bytes": 196_608},
        "sections": [],
    }  # fmt: skip


def measured(plan):
    plan = copy.deepcopy(plan)
    plan["timing"] = {"kind": "measured", "label": "measured(NVIDIA H200)"}
    return plan


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
    text = getattr(wording if name == "sparsity_text" else report, name)(example_plan())
    golden(f"{name}.txt", text)
    assert text.isascii() and width(text) <= 120
    assert all(line == line.rstrip() for line in text.splitlines()) and text.endswith("\n")


def test_the_full_account_is_as_committed():
    plan = example_plan()
    text = wording.explain_text(plan, plan["sparsity"]["rows"])
    golden("explain_text.txt", text)
    assert text.isascii() and width(text) <= 120 and "None" not in text
    assert all(t.startswith(("~", "+")) for t in re.findall(r"([^\s(]*\d) us\b", text))
    rows = [row | {"if_sparse": None} for row in plan["sparsity"]["rows"]]  # what pruning would give was measured by nobody
    assert "~" not in wording.explain_text(measured(plan), rows)


def test_json_is_as_committed():
    plan = example_plan()
    golden("layer_info.json", json.dumps(layer_info.layer_info(plan), indent=1) + "\n")
    golden("profile.json", json.dumps(layer_info.profile(plan), indent=1) + "\n")
    golden("dump_profile.txt", layer_info.trt_profile_text(layer_info.profile(plan)))


# --------------------------------------------------------------------------------------------------- the sparsity log


def test_the_two_lines_are_literal():
    lines = wording.sparsity_text(example_plan()).splitlines()
    wide = "/layer1/layer1.0/conv_with_a_rather_long_name/Conv"
    eligible = f"{wide}, /layer1/conv2, /layer2/conv, /branch/tie, /branch/odd"
    assert lines[1] == f"(Sparsity) Layers eligible for sparse math: {eligible}"
    assert lines[2] == f"(Sparsity) TRT inference plan picked sparse implementation for layers: {wide}"
    assert "predicted(h200)" in lines[0]


def test_the_two_lines_without_layers():
    plan = example_plan()
    plan["sparsity"] |= {"eligible": [], "picked": [], "rows": []}
    lines = wording.sparsity_text(plan).splitlines()
    assert lines[1:3] == [wording.ELIGIBLE_LINE, wording.PICKED_LINE]
    plan["sparsity"]["mode"] = "disable"
    assert "--sparsity=disable; times" in wording.sparsity_text(plan).splitlines()[0]
    row = verdict("a", "dense", "no_sparse_tactic", detail="--sparsity=disable was given")
    assert wording.sentence(row, plan).endswith("pattern, but --sparsity=disable allows dense tactics only.")


def test_force_says_what_it_did():
    plan = example_plan()
    plan["sparsity"] |= {"mode": "force", "pruned": ["w1", "w2"], "not_pruned": [["stem.w", "C = 3"]]}
    text = wording.sparsity_text(plan)
    assert "in 2 initializers: the outputs are not those" in text and "not pruned: stem.w: C = 3\n" in text
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(wording.ELIGIBLE_LINE))
    assert "--sparsity=force; times are predicted(h200)" in lines[at - 1]


def test_every_reason_has_its_sentence():
    plan = example_plan()
    rows = plan["sparsity"]["rows"]
    assert sorted(row["reason"] for row in rows) == sorted(REASONS)
    sentences = [wording.sentence(row, plan) for row in rows]
    assert len(set(sentences)) == len(rows)
    for row, text in zip(rows, sentences, strict=True):
        assert row["reason"] not in text and text[0].isupper() and text.rstrip().endswith(".") and "None" not in text
        bare = verdict(row["layer"], row["verdict"], row["reason"])
        assert "None" not in wording.sentence(bare, plan)


def test_a_sentence_in_the_plan_wins():
    plan = example_plan()
    plan["sparsity"]["rows"][0]["sentence"] = "Because I say so."
    assert "/stem/Conv: Because I say so." in wording.sparsity_text(plan)
    assert layer_info.layer_info_list(plan)[1]["SparsitySentence"] == "Because I say so."


@pytest.mark.parametrize("name", ["sparsity_text", "plan_text", "inspect_text"])
def test_predicted_times_are_always_marked(name):
    text = getattr(wording if name == "sparsity_text" else report, name)(example_plan())
    times = re.findall(r"([^\s(]*\d) us\b", text)
    assert times and all(t.startswith("~") for t in times)
    plan = measured(example_plan())
    if name != "plan_text":  # what pruning would give was measured by nobody
        text = getattr(wording if name == "sparsity_text" else report, name)(plan)
        assert "predicted to take ~2.20 us instead of ~2.50 us" in " ".join(text.split()) and text.count("~") == 2
    for row in plan["sparsity"]["rows"]:
        row["if_sparse"] = None
    unmarked = getattr(wording if name == "sparsity_text" else report, name)(plan)
    assert "~" not in unmarked and "predicted" not in unmarked and "measured(NVIDIA H200)" in unmarked


def test_long_and_odd_names_stay_in_the_table():
    plan = example_plan()
    name = "/a" * 90 + "\n\x1b[31m"
    plan["layers"][1]["name"] = plan["sparsity"]["rows"][0]["layer"] = name
    for text in (wording.sparsity_text(plan), report.plan_text(plan), report.inspect_text(plan)):
        assert "\x1b" not in text
        assert width(text) <= 120


# ------------------------------------------------------------------------------------------------------- plan's text


def test_plan_text_shows_all_layers_and_what_is_proven():
    plan = example_plan()
    text = report.plan_text(plan)
    assert "proven minimal" in text and "not proven" not in text
    assert text.count("Reformatting") == 2 and "noop" in text
    plan["plan"] |= {"status": "time_limit", "gap": 0.0125}
    assert "not proven minimal: one that takes up to 1.25 % less may exist" in report.plan_text(plan)
    plan["plan"] |= {"gap": None, "rivals": {}, "measured_us": 150.0}
    text = report.plan_text(plan)
    assert "not proven minimal" in text and "rivals" not in text and "150.00 us measured end to end" in text


def test_an_empty_plan_has_a_text():
    plan = example_plan() | {"layers": []}
    plan["plan"] = {"total_us": 0, "status": "proven"}
    assert "proven" in report.plan_text(plan) and report.inspect_text(plan)


# ------------------------------------------------------------------------------------------------- what trex requires


TREX_FORMATS = {  # of trex/activations.py, those that this runtime can name
    "Row major linear FP16 format", "Two wide channel vectorized row major FP16 format",
    "Channel major FP16 format where channel % 8 == 0", "Channel major FP16 format where channel % 16 == 0",
    "Sixteen wide channel vectorized row major FP16 format", "Channel major FP16 format", "Row major linear FP32",
    "Thirty-two wide channel vectorized row major FP16 format", "Channel major FP32 format",
    "Thirty-two wide channel vectorized row major FP32 format",
}  # fmt: skip


def trex_complaints(info, records):
    """Every requirement that trex 0.2.1 has been found to make of the two files, as code."""
    bad = []

    def need(ok, what):
        if not ok:
            bad.append(what)

    need(isinstance(info, dict) and isinstance(info.get("Layers"), list) and info["Layers"], "Layers")
    need(bool(info.get("Bindings")) and all(isinstance(b, str) for b in info["Bindings"]), "Bindings")
    tensors, names = set(), []
    for entry in info["Layers"]:
        need(all(k in entry for k in ("Name", "LayerType", "Inputs", "Outputs")) and entry["Outputs"], "layer keys")
        names.append(entry["Name"])
        need(not re.search(r"\[profile +\d", entry["Name"]), "profile suffix")
        for t in entry["Inputs"] + entry["Outputs"]:
            need(all(k in t for k in ("Name", "Dimensions", "Format/Datatype")), "tensor keys")
            need(t["Format/Datatype"] in TREX_FORMATS, "format")
            need(not re.search(r"[<>&|]", t["Name"]), "drawable tensor")
            tensors.add(t["Name"])
        kind = entry.get("ParameterType", entry["LayerType"])
        if kind == "Convolution":
            need(len(entry["Inputs"][0]["Dimensions"]) == len(entry["Outputs"][0]["Dimensions"]) == 4, "4-D")
            need(len(entry["Kernel"]) == 2 and entry["Groups"] >= 1, "Kernel, Groups")
            need(entry["Weights"]["Type"] in ("Half", "Float", "Int8", "Int32"), "Weights.Type")
            need(re.search("imma|hmma|xmma|i88|884", entry["TacticName"]), "tactic name")
        if kind == "Reformat":
            need("Origin" in entry and entry["Inputs"] and entry["Outputs"], "Reformat")
        need(isinstance(entry.get("Metadata", ""), str), "Metadata is text")
        need(not re.search(r"[<>&|]", entry["Name"] + entry.get("Metadata", "")), "drawable name")
        need(all(v is not None for v in entry.values()), "null")
    need(len(set(names)) == len(names), "unique names")
    need(set(info["Bindings"]) <= tensors, "Bindings are tensors")
    timed = [r for r in records if len(r) in (4, 5)]
    need([r["name"] for r in timed] == names, "profile order")
    need(all(set(r) == {"name", "timeMs", "averageMs", "medianMs", "percentage"} for r in timed), "five keys")
    need(len(records) == len(timed) + 1 and "count" in records[0], "count")
    return bad


def awkward_plan():
    plan = example_plan()
    plan["layers"][2]["name"] = 'a<b> & "c" | d [profile 3]\x1e'
    plan["layers"][3]["name"] = plan["layers"][4]["name"] = "/pool/MaxPool"
    plan["layers"][2]["nodes"] = ["n<1>&", "n|2"]
    plan["inputs"][0]["name"] = plan["layers"][0]["inputs"][0]["name"] = "in<0>"
    return plan


@pytest.mark.parametrize("make", [example_plan, awkward_plan])
def test_trex_finds_nothing_to_complain_of(make):
    plan = make()
    info = json.loads(json.dumps(layer_info.layer_info(plan)))
    records = json.loads(json.dumps(layer_info.profile(plan)))
    assert trex_complaints(info, records) == []
    assert info["Layers"] == json.loads(json.dumps(layer_info.layer_info_list(plan)))


def mutations():
    def on(index, key, value=None):
        def change(info, records):
            if value is None:
                del info["Layers"][index][key]
            else:
                info["Layers"][index][key] = value

        return change

    conv_at, reformat_at = 1, 0
    return {
        "Layers": lambda i, r: i["Layers"].clear(),
        "Bindings": lambda i, r: i["Bindings"].clear(),
        "layer keys": on(conv_at, "LayerType"),
        "tensor keys": lambda i, r: i["Layers"][conv_at]["Inputs"][0].pop("Dimensions"),
        "format": lambda i, r: i["Layers"][1]["Inputs"][0].update({"Format/Datatype": "Eight wide FP16"}),
        "4-D": lambda i, r: i["Layers"][conv_at]["Inputs"][0].update(Dimensions=[8, 3]),
        "Kernel, Groups": on(conv_at, "Kernel", [3]),
        "Weights.Type": on(conv_at, "Weights", {"Type": "half", "Count": 1}),
        "tactic name": on(conv_at, "TacticName", "conv_dense"),
        "Reformat": on(reformat_at, "Origin"),
        "Metadata is text": on(conv_at, "Metadata", 3),
        "profile suffix": on(conv_at, "Name", "x [profile 1]"),
        "drawable name": on(conv_at, "Name", "a<b"),
        "unique names": lambda i, r: i["Layers"][2].update(Name=i["Layers"][1]["Name"]),
        "profile order": lambda i, r: r.reverse(),
        "five keys": lambda i, r: r[1].update(other=r[1].pop("medianMs")),
        "count": lambda i, r: r.pop(0),
    }


@pytest.mark.parametrize("what", mutations())
def test_the_trex_check_notices(what):
    """The check above is not vacuous: each requirement, once broken, is found."""
    plan = example_plan()
    info, records = json.loads(json.dumps(layer_info.layer_info(plan))), layer_info.profile(plan)
    mutations()[what](info, records)
    with contextlib.suppress(KeyError, TypeError):  # as loud as trex itself would be
        assert what in trex_complaints(info, records)


def test_convolution_keys_stand_in_tensorrt_s_order():
    expected = [
        "Name", "LayerType", "Inputs", "Outputs", "ParameterType", "Kernel", "PaddingMode", "PrePadding", "PostPadding",
        "Stride", "Dilation", "OutMaps", "Groups", "Weights", "Bias", "HasBias", "HasReLU", "HasSparseWeights",
        "HasDynamicFilter", "HasDynamicBias", "HasResidual", "ConvXAsActInputIdx", "BiasAsActInputIdx",
        "ResAsActInputIdx", "Activation", "TacticName", "TacticValue", "StreamId", "Metadata",
    ]  # fmt: skip
    info = layer_info.layer_info_list(example_plan())[1]
    assert [k for k in info if k in expected] == expected
    assert info["HasReLU"] == 1 and info["Activation"] == "RELU" and info["PrePadding"] == [1, 1]
    assert info["Metadata"] == "[ONNX Layer: /stem/Conv]\u001e[ONNX Layer: /stem/Relu]"
    assert re.fullmatch(r"0x[0-9a-f]{16}", info["TacticValue"])


def test_layer_info_values():
    plan = example_plan()
    info = layer_info.layer_info(plan)
    picked, refused = info["Layers"][2], info["Layers"][3]
    assert (picked["SparsityEligible"], picked["SparsityChosen"], picked["SparsityReason"]) == (1, 1, "picked")
    assert picked["SparseBestMs"] == 0.03125 and picked["DenseBestMs"] == 0.0405 and picked["HasSparseWeights"] == 1
    assert (refused["SparsityEligible"], refused["SparsityChosen"]) == (1, 0) and refused["Activation"] == "GENERIC"
    assert refused["HasResidual"] == 1 and len(refused["Inputs"]) == 2
    assert info["Layers"][1]["SparsityEligible"] == 0 and "SparseBestMs" not in info["Layers"][1]
    assert all(entry["Timing"] == "predicted(h200)" for entry in info["Layers"])
    assert [e["LayerType"] for e in info["Layers"]] == [
        "Reformat", "Convolution", "Convolution", "Convolution", "Pooling", "NoOp", "Convolution", "PointWiseV2",
        "Pooling", "Concatenation", "Resize", "Slice", "Convolution", "SoftMax",
    ]  # fmt: skip
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
    assert layer_info.layer_info_list(plan)[2]["SparsityReason"] == "picked"


# ------------------------------------------------------------------------------------------------------------ profile


def test_profile_of_a_prediction_and_of_a_measurement():
    plan = example_plan()
    assert layer_info.profile(plan)[0] == {"count": 1, "predicted": True}
    assert layer_info.profile(measured(plan))[0] == {"count": 1}
    times = [[i + extra for i in range(len(plan["layers"]))] for extra in (1.0, 2.0, 6.0)]
    records = layer_info.profile(plan, times)
    assert records[0] == {"count": 3}
    assert records[1] == {
        "name": plan["layers"][0]["name"], "timeMs": 0.009, "averageMs": 0.003, "medianMs": 0.002,
        "percentage": pytest.approx(100 * 9 / sum(map(sum, times)), abs=1e-4),
    }  # fmt: skip
    assert sum(r["percentage"] for r in records[1:]) == pytest.approx(100, abs=0.01)
    assert [r["name"] for r in records[1:]] == [entry["Name"] for entry in layer_info.layer_info_list(plan)]


@pytest.mark.parametrize("times", [[], [[]], [[1.0]] * 14, [[1.0] * 14, [1.0] * 13]])
def test_profile_wants_times_for_every_layer(times):
    with pytest.raises(ValueError, match="times_us"):
        layer_info.profile(example_plan(), times)


def test_profile_survives_json_and_zero_times():
    plan = example_plan()
    plan["layers"][1]["name"] = 'quote " backslash \\ newline \n'
    for entry in plan["layers"]:
        entry["time_us"] = 0
    records = json.loads(json.dumps(layer_info.profile(plan)))
    assert records[2]["name"] == 'quote " backslash \\ newline ?' and records[2]["percentage"] == 0
    assert "Total" in layer_info.trt_profile_text(records).splitlines()[-1]
