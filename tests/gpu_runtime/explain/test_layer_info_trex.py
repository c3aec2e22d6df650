"""Layer information and profiles as trex requires them."""

import contextlib
import json
import re

import numpy as np
import onnx
import pytest

from gpu_runtime.explain import layer_info
from tests.example_plan import example_plan, record
from tests.reference_run import model, node
from tests.small_models import small_models

# fmt: off
TREX_FORMATS = {  # of trex/activations.py, those that this runtime can name
    "Row major linear FP16 format", "Two wide channel vectorized row major FP16 format",
    "Channel major FP16 format where channel % 8 == 0", "Channel major FP16 format where channel % 16 == 0",
    "Sixteen wide channel vectorized row major FP16 format", "Channel major FP16 format", "Row major linear FP32",
    "Thirty-two wide channel vectorized row major FP16 format", "Channel major FP32 format",
    "Thirty-two wide channel vectorized row major FP32 format", "Row major linear Int32", "Row major linear Int64 format",
    "Row major linear BOOL", "Row major linear UInt8 format", "Channel major UInt8 format",
}
# fmt: on


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
        own = [v for key, v in entry.items() if key not in ("Inputs", "Outputs")]  # attributes of its ONNX graph
        nested = [v for v in own if isinstance(v, list) and any(isinstance(x, (list, dict)) for x in v)]
        need(not nested and {} not in own and [] not in own, "flat")
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
    plan = record(make())
    info = json.loads(json.dumps(layer_info.layer_info(plan)))
    records = json.loads(json.dumps(layer_info.profile(plan)))
    assert trex_complaints(info, records) == []
    assert info["Layers"] == json.loads(json.dumps(layer_info.layer_info_list(plan)))


def images() -> onnx.ModelProto:
    """Pixels in, a convolution that FP16 cannot hold, a depthwise one, a volume, integers and truth values out: all types."""
    w = {
        "w": np.full((8, 3, 3, 3), 3e4),
        "d": np.full((8, 1, 3, 3), 0.1),
        "v": np.full((4, 1, 2, 2, 2), 0.1),
    }
    nodes = [
        node("Cast", "x", "f", to=1),
        node("Conv", "f w", "a", pads=[1] * 4),
        node("Tanh", "a", "t"),
        node("Conv", "t d", "e", group=8, pads=[1] * 4),
        node("ArgMax", "e", "best", axis=1),
        node("Unsqueeze", "e one", "u"),
        node("Conv", "u v", "y"),
        node("Greater", "e zero", "above"),
    ]
    stored = {k: a.astype(np.float32) for k, a in w.items()} | {"one": np.int64([1]), "zero": np.float32([0])}
    proto = model(nodes, {"x": (1, 3, 8, 8)}, "best y above", stored)
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    types = (onnx.TensorProto.INT64, onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL)
    for output, elem_type in zip(proto.graph.output, types, strict=True):
        output.type.tensor_type.elem_type = elem_type
    return proto


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(small_models()) + 1))
def test_trex_finds_nothing_to_complain_of_in_what_the_command_writes(index, tmp_path, cli):
    """Of every kind of node, and of every type that a tensor may have."""
    onnx.save([*small_models(), images()][index], tmp_path / "m.onnx")
    code, _, err = cli("build m.onnx --device a100 --exportLayerInfo=info.json --exportProfile=profile.json")
    assert code == 0, err
    info, records = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("info", "profile"))
    no_tensor_core = [e for e in info["Layers"] if e.get("ParameterType") == "Convolution" and "hmma" not in e["TacticName"]]
    for entry in no_tensor_core:
        entry["TacticName"] += "_hmma"  # for these alone trex is right: they run on CUDA cores
    assert trex_complaints(info, records) == []
    assert all("fp32" in e["TacticName"] or e["Groups"] > 1 for e in no_tensor_core), [e["TacticName"] for e in no_tensor_core]


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
        "flat": on(conv_at, "Extra", [[1]]),
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
    plan = record(example_plan())
    info, records = json.loads(json.dumps(layer_info.layer_info(plan))), layer_info.profile(plan)
    mutations()[what](info, records)
    with contextlib.suppress(KeyError, TypeError):  # as loud as trex itself would be
        assert what in trex_complaints(info, records)


def test_an_estimate_among_measured_times_is_marked():
    """`Timed` is 0 there, and absent where the kernel was timed or everything is predicted."""
    plan = example_plan()
    row = next(r for r in plan["sparsity"]["rows"] if r["best_sparse"])
    row["best_sparse"]["timed"] = False
    layers = {layer["Name"]: layer for layer in layer_info.layer_info(record(plan))["Layers"]}
    marked = [name for name, layer in layers.items() if "SparseBestTimed" in layer]
    assert marked == [row["layer"]] and layers[row["layer"]]["SparseBestTimed"] == 0
