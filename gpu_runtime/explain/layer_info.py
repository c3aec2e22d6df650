"""Layer information and profiles in TensorRT's schema, from the engine's plan (gpu_runtime.runtime.engine describes it)."""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Mapping, Sequence

from gpu_runtime.explain.wording import sentence
from gpu_runtime.text import fp32_reasons, is_predicted, printable
from tactics.format import LAYOUTS, TRT_TYPES, Format, strides, wording

SEPARATOR = "\u001e"  # between the ONNX nodes of one layer, as TensorRT writes it
MOVE_TYPES = {"window": "Slice", "upsample": "Resize", **dict.fromkeys(
    ("d2s_dcr", "d2s_crd", "s2d_dcr", "s2d_crd", "channels"), "Shuffle")}
TRT_ACTIVATIONS = {"none": "NONE", "relu": "RELU"}


def layer_info(plan: Mapping) -> dict:
    """TensorRT's detailed layer information: 10.x keys and 11.x keys side by side, our own facts as extra scalars."""
    bindings = [(t, "Input") for t in plan["inputs"]] + [(t, "Output") for t in plan["outputs"]]
    return {
        "Layers": layer_info_list(plan),
        "Bindings": [_clean(t["name"]) for t, _ in bindings],
        "I/O Tensors": [_io_tensor(t, mode) for t, mode in bindings],
        "ProfilingVerbosity": "detailed",
        "Engine Metadata": f"{plan['model']['name']} for {plan['device']['title']} ({plan['device']['sm']})",
        "Timing": plan["timing"]["label"],
        "TotalUs": plan["plan"]["total_us"],
        **_network_keys(plan["sparsity"].get("summary") or {}),
    }


def _network_keys(summary: Mapping) -> dict:
    names = {
        "layers": "SparsityLayers", "eligible": "SparsityEligibleLayers", "picked": "SparsityPickedLayers",
        "all_dense_us": "SparsityAllDenseUs", "saved_us": "SparsitySavedUs", "ceiling_us": "SparsityCeilingUs",
    }  # fmt: skip
    return {name: summary[key] for key, name in names.items() if summary.get(key) is not None}


def layer_info_list(plan: Mapping) -> list[dict]:
    """The list of layers alone, in execution order, reformats and NoOps included."""
    rows = {row["layer"]: row for row in plan["sparsity"]["rows"]}
    layers = []
    for name, layer in zip(_layer_names(plan), plan["layers"], strict=True):
        info = {
            "Name": name,
            "LayerType": _layer_type(layer),
            "Inputs": [_tensor(t) for t in layer["inputs"]],
            "Outputs": [_tensor(t) for t in layer["outputs"]],
        }
        info |= _parameters(layer, is_predicted(plan))
        if layer["tactic"]:
            info["TacticName"] = layer["tactic"]
        info["TacticValue"] = "0x" + hashlib.sha256((layer["tactic"] or "").encode()).hexdigest()[:16]
        info["StreamId"] = 0
        info["Metadata"] = SEPARATOR.join(f"[ONNX Layer: {_clean(node)}]" for node in layer["nodes"])
        info |= {"TimeUs": layer["time_us"], "Timing": plan["timing"]["label"]}
        if reasons := fp32_reasons(plan, layer):
            info["PrecisionReason"] = "; ".join(reasons)
        row = rows.get(layer.get("layer") or layer["name"])
        if row:
            info |= _sparsity_keys(layer, row, plan)
        layers.append(info)
    return layers


def profile(plan: Mapping, times_us: Sequence[Sequence[float]] | None = None) -> list[dict]:
    """trtexec's exported profile: {"count": iterations}, then five keys per layer in layer order, times in ms.

    `times_us[iteration][layer]`: measured times; without them the plan's own, one iteration, and if those are
    predictions the first record says `"predicted": true` (tools that take only measurements refuse it, rightly).
    Raises ValueError unless there is at least one iteration and each has a time for every layer.
    """
    layers = plan["layers"]
    runs = [[layer["time_us"] for layer in layers]] if times_us is None else [list(run) for run in times_us]
    if not runs or any(len(run) != len(layers) for run in runs):
        raise ValueError(
            f"times_us: expected one or more iterations of {len(layers)} layer times, got {len(runs)} iterations of "
            f"{sorted({len(run) for run in runs})}"
        )
    count, rows = len(runs), list(zip(*runs, strict=True))
    head = {"count": count}
    if times_us is None and is_predicted(plan):
        head["predicted"] = True
    total = sum(map(sum, rows))
    records = [
        {
            "name": name,
            "timeMs": _ms(sum(row)),
            "averageMs": _ms(sum(row) / count),
            "medianMs": _ms(statistics.median(row)),
            "percentage": round(100 * sum(row) / total, 4) if total else 0.0,
        }
        for name, row in zip(_layer_names(plan), rows, strict=True)
    ]
    return [head, *records]


def _layer_type(layer: Mapping) -> str:
    kind = layer["type"]
    if kind == "normalize":
        return "Normalization" if layer["params"]["kind"] == "standard" else "SoftMax"
    if kind == "move":
        return MOVE_TYPES.get(layer["params"].get("kind"), "Slice")
    return {
        "conv": "Convolution", "conv_transpose": "Deconvolution", "pool": "Pooling",
        "pointwise": "PointWiseV2", "concat": "Concatenation",
        "reduce": "Reduce", "reformat": "Reformat", "noop": "NoOp", "gather": "Gather", "resize": "Resize",
        "library": "Library",
    }.get(kind, kind)  # fmt: skip


def _parameters(layer: Mapping, predicted: bool) -> dict:
    kind, p = layer["type"], layer.get("params") or {}
    if kind in ("conv", "conv_transpose"):
        return _conv(layer, p)
    if kind == "pool":
        return {
            "ParameterType": "Pooling",
            "PoolingType": "MAX" if p["kind"] == "max" else "AVERAGE",
            "WindowSize": list(p["kernel"]),
            **_padding(p),
            "Stride": list(p["stride"]),
            "BlendFactor": 0.0,
            "AverageCountExcludesPadding": int(not p.get("count_pad", False)),
        }
    if kind == "reformat":
        return {"ParameterType": "Reformat", "Origin": "REFORMAT"}
    if kind == "pointwise":
        args = [f"arg{i}" for i in range(len(layer["inputs"]))]
        stages = p.get("stages") or ["copy"]
        lines = [_expression(i, str(stage), args) for i, stage in enumerate(stages)]
        return {
            "ParameterType": "PointWise",
            "ParameterSubType": "PointWiseExpression",
            "NbInputArgs": len(args),
            "InputArgs": args,
            "NbOutputVars": 1,
            "OutputVars": [f"var{len(stages) - 1}"],
            "NbOperations": len(stages),
            "Operations": lines,
        }
    if kind == "library":
        basis = "counted as each byte once, in one launch" if predicted else "measured"
        return {"ParameterType": "Library", "Function": p["function"], "TimeBasis": basis} | {
            f"Attribute_{name}": value for name, value in p["attributes"].items()}  # fmt: skip
    if kind in ("normalize", "reduce"):
        mask = {"Axes": sum(1 << "nchw".index(a) for a in p["axes"])}
        operation = {"HasLog": int(p["kind"] == "log_softmax")} if kind == "normalize" else {"Operation": p["kind"].upper()}
        return mask if p["kind"] == "standard" else mask | operation
    return {}


def _expression(i: int, stage: str, args: list[str]) -> str:
    """A stage such as clip(0,6) or add(t1) as one of TensorRT's operations, over what the one before it computed."""
    op, _, inside = stage.rstrip(")").partition("(")
    before = f"var{i - 1}" if i else args[0]
    inside = dict(zip((f"t{k}" for k in range(len(args))), args, strict=True)).get(inside, inside)
    return f"const auto var{i} = {op}({', '.join(filter(None, [before, *inside.split(',')]))});"


def _conv(layer: Mapping, p: Mapping) -> dict:
    act = str(p.get("act", "none"))
    return {
        "ParameterType": "Convolution" if layer["type"] == "conv" else "Deconvolution",
        "Kernel": list(p["kernel"]),
        **_padding(p),
        "Stride": list(p["stride"]),
        "Dilation": list(p["dilation"]),
        "OutMaps": p["k"],
        "Groups": p["groups"],
        "Weights": {"Type": "Float" if "_fp32_" in layer["tactic"] else "Half", "Count": layer["weights_count"]},
        "Bias": {"Type": TRT_TYPES[p.get("bias_dtype", "fp16")], "Count": layer["bias_count"]},
        "HasBias": int(p["bias"]),
        "HasReLU": int(act == "relu"),
        "HasSparseWeights": int(layer["has_sparse_weights"]),
        "HasDynamicFilter": 0,
        "HasDynamicBias": 0,
        "HasResidual": int(p["residual"]),
        "ConvXAsActInputIdx": -1,
        "BiasAsActInputIdx": -1,
        "ResAsActInputIdx": -1,
        "Activation": TRT_ACTIVATIONS.get(act, "GENERIC"),
        "ActivationFunction": act,
    }


def _padding(p: Mapping) -> dict:
    top, left, bottom, right = p["pad"]
    return {
        "PaddingMode": "kEXPLICIT_ROUND_UP" if p.get("ceil") else "kEXPLICIT_ROUND_DOWN",
        "PrePadding": [top, left],
        "PostPadding": [bottom, right],
    }


def _sparsity_keys(layer: Mapping, row: Mapping, plan: Mapping) -> dict:
    """The sparsity row as scalars, the keys without a value left out."""
    keys = {
        "SparsityEligible": int(row["verdict"] != "not_eligible"),
        "SparsityChosen": int(bool(layer["sparse"])),
        "SparsityReason": row["reason"],
        "SparsitySentence": sentence(row, plan),
        "SparsityDetail": row.get("detail"),
        "SparsityInputChannelsPerGroup": row["c"] // row["groups"] if row.get("c") else None,
        "SparsityPatternGroups": row.get("pattern_groups"),
        "SparsityPatternShare": row.get("pattern_share"),
        "SparsityPatternShareStored": row.get("stored_share"),
        "SparsityLostEnergy": row.get("lost_energy"),
        "SparsityFlipSpeedup": row.get("flip_speedup"),
        "SparsityProbabilityFaster": row.get("p_sparse_faster"),
    }
    keys |= zip((f"SparsityFirstViolation{i}" for i in "KCRS"), row.get("first_violation") or (), strict=False)
    for kind in ("Sparse", "Dense"):
        best = row.get(f"best_{kind.lower()}")
        if best:
            keys |= {f"{kind}BestMs": _ms(best["us"]), f"{kind}BestTactic": best["tactic"]}
            keys |= {f"{kind}BestFormats": f"{best['in']} -> {best['out']}", f"{kind}BestBound": best.get("bound")}
            if None not in (best.get("low_us"), best.get("high_us")):
                keys |= {f"{kind}BestLowMs": _ms(best["low_us"]), f"{kind}BestHighMs": _ms(best["high_us"])}
    if would := row.get("if_sparse"):
        keys |= {"PredictedIfSparseMs": _ms(would["us"]), "PredictedIfDenseMs": _ms(would["dense_us"])}
        keys |= {"PredictedIfSparseTactic": would["tactic"]}
    other, floor = row.get("other"), row.get("floor")
    if row.get("other_cost_us") is not None:
        keys["OtherChoiceCostMs"] = _ms(row["other_cost_us"])
    if other:
        keys |= {f"OtherChoice{name}Ms": _ms(other[f"{name.lower()}_us"]) for name in ("Kernel", "Reformat", "Around")}
        keys |= {"OtherChoiceTactic": other["tactic"], "OtherChoiceFormats": f"{other['in']} -> {other['out']}"}
    if floor:
        keys |= {"FloorBound": floor["bound"], "FloorDenseMs": _ms(floor["dense_us"]), "FloorSparseMs": _ms(floor["sparse_us"])}
        keys |= {f"Floor{name}Ms": _ms(floor[f"{name.lower()}_us"]) for name in ("Mma", "Dram", "L2", "Launch")}
    return {key: value for key, value in keys.items() if value is not None}


def _tensor(t: Mapping) -> dict:
    fmt = Format.parse(t["format"])
    s = strides(fmt, tuple(t["shape4"]))
    return {
        "Name": _clean(t["name"]),
        "Location": "Device",
        "Dimensions": list(t["shape4"]),
        "Format/Datatype": wording(fmt),
        "Format": wording(fmt),
        "Datatype": TRT_TYPES[fmt.dtype],
        "Strides": [s.n, s.block, t["shape4"][3] * s.pixel, s.pixel],
        "VectorSize": 1 << s.log2v,
    }


def _io_tensor(t: Mapping, mode: str) -> dict:
    fmt, shape = Format.parse(t["format"]), list(t["shape"])
    layout = LAYOUTS[fmt.layout]
    return {
        "Name": _clean(t["name"]),
        "IOMode": mode,
        "DataType": TRT_TYPES[fmt.dtype],
        "Dimensions": shape,
        "Location": "Device",
        "IsShapeInferenceIO": False,
        "ProfileInfo": [
            {
                "MinShape": shape,
                "OptShape": shape,
                "MaxShape": shape,
                "Format": f"{layout.wording.format(fmt.dtype.upper())} ({layout.enum})",
            }
        ],
    }


def _clean(name: str) -> str:
    """A name that graph viewers can draw: without markup, control characters and TensorRT's shape-profile suffix."""
    name = re.sub(r"\[profile +(\d+)\]", r"(profile \1)", name)
    name = name.translate(str.maketrans({"<": "(", ">": ")", "&": "+", "|": "/"}))
    return "".join(c if c.isprintable() else "?" for c in name)


def _layer_names(plan: Mapping) -> list[str]:
    """The layers' names, drawable and unique: the same in layer information and profile."""
    names: list[str] = []
    seen: set[str] = set()
    for layer in plan["layers"]:
        base = name = _clean(layer["name"])
        number = 1
        while name in seen:
            number += 1
            name = f"{base}_{number}"
        seen.add(name)
        names.append(name)
    return names


def _ms(us: float) -> float:
    return round(us * 1e-3, 9)


def trt_profile_text(records: Sequence[Mapping]) -> str:
    """A profile as trtexec's --dumpProfile prints it."""
    head, layers = records[0], records[1:]
    mark = " predicted times, nothing was run" if head.get("predicted") else ""
    columns = ("timeMs", "averageMs", "medianMs", "percentage")
    lines = [
        f"=== Profile ({head['count']} iterations ) ==={mark}",
        "    Time(ms)     Avg.(ms)   Median(ms)   Time(%)   Layer",
    ]
    total = {"name": "Total"} | {key: sum(r[key] for r in layers) for key in columns}
    for r in [*layers, total]:
        lines.append(
            f"{r['timeMs']:12.4f} {r['averageMs']:12.4f} {r['medianMs']:12.4f} {r['percentage']:9.1f}   "
            + printable(r["name"])
        )
    return "\n".join(lines) + "\n"
