"""What a plan says to people and to their tools: layer information and profiles in TensorRT's schema, tables as text.

Everything here reads the engine's plan (gpu_runtime.engine describes it) and returns plain data or plain ASCII text of
at most 120 columns (except TensorRT's two sparsity lines and the one before them). A predicted time never looks like a
measured one: in text it carries a `~`, and its device is named.
"""

from __future__ import annotations

import hashlib
import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence

from tactics.format import LAYOUTS, TRT_TYPES, Format, strides, wording

WIDTH = 120
SEPARATOR = "\u001e"  # between the ONNX nodes of one layer, as TensorRT writes it
ELIGIBLE_LINE = "(Sparsity) Layers eligible for sparse math:"
PICKED_LINE = "(Sparsity) TRT inference plan picked sparse implementation for layers:"
MOVE_TYPES = {"window": "Slice", "upsample": "Resize", **dict.fromkeys(
    ("d2s_dcr", "d2s_crd", "s2d_dcr", "s2d_crd", "channels"), "Shuffle")}
TRT_ACTIVATIONS = {"none": "NONE", "relu": "RELU"}


# ------------------------------------------------------------------------------------------------- TensorRT's schema


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
    }


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
        info |= _parameters(layer)
        if layer["tactic"]:
            info["TacticName"] = layer["tactic"]
        info["TacticValue"] = "0x" + hashlib.sha256((layer["tactic"] or "").encode()).hexdigest()[:16]
        info["StreamId"] = 0
        info["Metadata"] = SEPARATOR.join(f"[ONNX Layer: {_clean(node)}]" for node in layer["nodes"])
        info |= {"TimeUs": layer["time_us"], "Timing": plan["timing"]["label"]}
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
    if times_us is None and _is_predicted(plan):
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
    if kind == "move":
        return MOVE_TYPES.get(layer["params"].get("kind"), "Slice")
    return {
        "conv": "Convolution", "conv_transpose": "Deconvolution", "pool": "Pooling",
        "pointwise": "PointWiseV2", "concat": "Concatenation",
        "softmax": "SoftMax", "reformat": "Reformat", "noop": "NoOp",
    }.get(kind, kind)  # fmt: skip


def _parameters(layer: Mapping) -> dict:
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
        op, act = p.get("op", "copy"), str(p.get("act", "none"))
        return {
            "ParameterType": "PointWise",
            "ParameterSubType": "PointWiseExpression",
            "NbInputArgs": len(args),
            "InputArgs": args,
            "NbOutputVars": 1,
            "OutputVars": ["var0"],
            "NbOperations": 1,
            "Operations": [f"const auto var0 = {act}({op}({', '.join(args)}));"],
        }
    return {"Axes": 2, "HasLog": 0} if kind == "softmax" else {}  # Axes is a mask: bit 1 is C


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
        "Weights": {"Type": "Half", "Count": layer["weights_count"]},
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
    keys = {
        "SparsityEligible": int(row["verdict"] != "not_eligible"),
        "SparsityChosen": int(bool(layer["sparse"])),
        "SparsityReason": row["reason"],
        "SparsitySentence": _sentence(row, plan),
    }
    for key, best in (("SparseBestMs", row.get("best_sparse")), ("DenseBestMs", row.get("best_dense"))):
        if best:
            keys[key] = _ms(best["us"])
    return keys


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


# ----------------------------------------------------------------------------------------------------------- sparsity


def sparsity_text(plan: Mapping) -> str:
    """The sparsity log: whose plan, TensorRT's two lines, a row per layer, and a sentence per layer in plain words."""
    sparsity, device = plan["sparsity"], plan["device"]
    whose = f"{plan['model']['name']} for {device['title']} ({device['sm']}), --sparsity={sparsity['mode']}"
    lines = _forced(sparsity) if sparsity["mode"] == "force" else []
    lines += [
        _printable(f"Sparsity of {whose}; {_times_are(plan)}"),
        f"{ELIGIBLE_LINE} {', '.join(map(_printable, sparsity['eligible']))}".rstrip(),
        f"{PICKED_LINE} {', '.join(map(_printable, sparsity['picked']))}".rstrip(),
        "",
    ]
    header = ["layer\n  verdict: reason", "best dense", "best sparse", "cost of the\nother choice"]
    rows = [
        [
            f"{_printable(row['layer'])}\n  {row['verdict']}: {row['reason']}",
            _best(row.get("best_dense"), plan),
            _best(row.get("best_sparse"), plan),
            "-" if row.get("other_cost_us") is None else _us(row["other_cost_us"], plan, sign="+"),
        ]
        for row in sparsity["rows"]
    ]
    lines += _table(header, rows, caps=(38, 32, 32, 12), right=(3,), gap=True)
    lines += ["", *_sparsity_total(plan), ""]
    for row in sparsity["rows"]:
        lines += _wrap(f"{_printable(row['layer'])}: {_sentence(row, plan)}")
    return "\n".join(lines).rstrip() + "\n"


def _forced(sparsity: Mapping) -> list[str]:
    """What --sparsity=force did to the model: {pruned: [initializer], not_pruned: [(initializer, why)]}."""
    lines = ["--sparsity=force changed nothing: all weights that can have the 2:4 pattern have it"]
    if sparsity.get("pruned"):
        lines = _wrap(
            f"--sparsity=force set the two smallest of each four weights to zero in {len(sparsity['pruned'])} "
            "initializers: the outputs are not those of the model as it was given"
        )
    for name, why in sparsity.get("not_pruned", []):
        lines += _wrap(_printable(f"not pruned: {name}: {why}"))
    return lines


def sentence(row: Mapping, plan: Mapping) -> str:
    """Why a layer does or does not run sparse, in plain words, from a sparsity row's reason and numbers."""

    def us(value: float | None) -> str:
        return "an unknown time" if value is None else _us(value, plan)

    dense = (row.get("best_dense") or {}).get("us")
    sparse = (row.get("best_sparse") or {}).get("us")
    cost, chance, share = row.get("other_cost_us"), row.get("p_sparse_faster"), row.get("pattern_share")
    detail = f" ({row['detail']})" if row.get("detail") else ""
    text = {
        "picked": f"runs sparse: the best sparse tactic takes {us(sparse)}, the best dense one {us(dense)}",
        "dense_faster": f"could run sparse, but would gain nothing: both take {us(dense)}"
        if dense == sparse
        else f"could run sparse, but dense is faster: {us(dense)} against {us(sparse)}",
        "reformat_outweighs": f"sparse alone is faster ({us(sparse)} against {us(dense)}), but the formats it needs "
        "cost the plan more than that",
        "within_noise": f"sparse ({us(sparse)}) and dense ({us(dense)}) are closer than their spread (Q20 to Q80), "
        f"so the plan stays {row['verdict']}",
        "no_sparse_tactic": f"its weights have the 2:4 pattern, but no sparse tactic can run it{detail}",
        "pattern_violation": "its weights do not have the 2:4 pattern",
        "channels_not_multiple_of_4": f"its input channels do not come in fours, which 2:4 is a pattern of{detail}",
        "grouped_conv": f"it is a grouped convolution, for which there is no sparse tactic{detail}",
    }.get(row["reason"], row["reason"])
    if row["reason"] == "picked" and dense is not None and sparse is not None and dense > sparse > 0:
        text += f" ({dense / sparse:.2f}x)"
    if row["reason"] == "picked" and dense is not None and sparse is not None and dense < sparse:
        text += ", but dense would need costlier formats around it"
    if row["reason"] == "pattern_violation" and share is not None:
        text += f": {_share(share)} of its groups of 4 input channels have two zeros or more"
        if row.get("first_violation"):
            text += ", the first that has not is at [k,c,r,s] = [{},{},{},{}]".format(*row["first_violation"])
    if row["reason"] == "no_sparse_tactic" and plan["sparsity"]["mode"] == "disable":
        text = "its weights have the 2:4 pattern, but --sparsity=disable allows dense tactics only"
    text = text[0].upper() + text[1:] + "."
    if cost is not None and row["verdict"] in ("sparse", "dense"):
        other = "dense" if row["verdict"] == "sparse" else "sparse"
        text += f" Forced {other}, the whole plan would take {us(abs(cost))} {'more' if cost >= 0 else 'less'}."
    if chance is not None:
        text += f" The chance that sparse is faster is put at {100 * chance:.0f} %."
    return text


def _sentence(row: Mapping, plan: Mapping) -> str:
    return row.get("sentence") or sentence(row, plan)


def _sparsity_total(plan: Mapping) -> list[str]:
    sparsity = plan["sparsity"]
    text = f"{len(sparsity['picked'])} of {len(sparsity['eligible'])} eligible layers run sparse"
    total, dense = plan["plan"]["total_us"], (plan["plan"].get("rivals") or {}).get("all_dense_us")
    if dense is not None:
        text += f"; the plan takes {_us(total, plan)}, the best one without sparse tactics {_us(dense, plan)}"
        text += f" ({_versus(dense, total)})"
    return _wrap(text)


def _best(best: Mapping | None, plan: Mapping) -> str:
    if not best:
        return "-"
    return f"{_us(best['us'], plan)} {best['in']}->{best['out']}\n{_tactic(best['tactic'])}"


# --------------------------------------------------------------------------------------------------------------- plan


def plan_text(plan: Mapping) -> str:
    """The plan as a table, a row per layer in execution order, then its total, its rivals and its memory."""
    total = plan["plan"]["total_us"]
    rows = [
        [
            str(i),
            _printable(layer["name"]),
            layer["type"],
            _formats(layer),
            _tactic(layer["tactic"]),
            _us(layer["time_us"], plan, unit=""),
            f"{100 * layer['time_us'] / total:.1f}" if total else "-",
        ]
        for i, layer in enumerate(plan["layers"])
    ]
    lines = [f"Plan of {plan['model']['name']} for {plan['device']['title']}, {_times_are(plan)}", ""]
    header = ["#", "layer", "type", "formats", "tactic", "us", "%"]
    lines += _table(header, rows, caps=(4, 28, 9, 24, 32, 9, 5), right=(0, 5, 6))
    return "\n".join([*lines, "", *_totals(plan)]) + "\n"


def _totals(plan: Mapping) -> list[str]:
    p, memory = plan["plan"], plan["memory"]
    reformats = [layer["time_us"] for layer in plan["layers"] if layer["type"] == "reformat"]
    noops = sum(layer["type"] == "noop" for layer in plan["layers"])
    method = ", ".join(
        str(part) for part in (p.get("method"), f"width {p['width']}" if p.get("width") is not None else None) if part
    )
    if p.get("status") == "proven":
        verdict = "proven minimal for serial execution and these times"
    elif p.get("gap") is not None:
        verdict = f"not proven minimal: one that takes up to {100 * p['gap']:.2f} % less may exist"
    else:
        verdict = "not proven minimal"
    lines = _wrap(
        f"total    {_us(p['total_us'], plan)}, {verdict}{f' ({method})' if method else ''}; "
        f"reformats: {len(reformats)}, together {_us(sum(reformats), plan)}; free NoOps: {noops}"
    )
    measured = p.get("measured_us")
    if measured is not None:
        lines.append(f"whole    {measured:.2f} us measured end to end, {_versus(measured, p['total_us'])} than the sum")
    rivals = p.get("rivals") or {}
    single = rivals.get("best_single_format")
    named = [
        ("without sparse tactics", rivals.get("all_dense_us")),
        (f"one format, {single['format']}" if single else "", single["us"] if single else None),
        ("layer by layer", rivals.get("greedy_us")),
    ]
    texts = [f"{what} {_us(us, plan)} ({_versus(us, p['total_us'])})" for what, us in named if us is not None]
    if texts:
        lines += _wrap("rivals   " + "; ".join(texts))
    bound = memory.get("largest_live_bytes")
    lines.append(
        f"memory   activations {_size(memory['activation_bytes'])}"
        + (f" (at least {_size(bound)} live at once)" if bound is not None else "")
        + f", weights {_size(memory['weight_bytes'])}"
    )
    return lines


def inspect_text(plan: Mapping) -> str:
    """What `gpu-runtime inspect` prints: the file's facts, then the plan, then the sparsity log."""
    producer, device = plan.get("producer") or {}, plan["device"]
    flags = " ".join(f"--{k}={_flag(v)}" for k, v in sorted((plan.get("flags") or {}).items()) if v not in ({}, None))
    coded = sum(s["kind"] == "cubin" for s in plan["sections"])
    facts = [
        ("model", f"{plan['model']['name']}, sha256 {plan['model']['sha256'][:16]}"),
        ("device", f"{device['title']} ({device['sm']}, {device.get('num_sms')} SMs, {device.get('clock_mhz')} MHz)"),
        ("times", plan["timing"]["label"]),
        ("made by", f"gpu_runtime {producer.get('version')}, NVRTC {producer.get('nvrtc')}"),
        ("format", f"{plan['format_version']}" if "format_version" in plan else "not saved yet"),
        (
            "kernels",
            f"sources {plan['source_hash'][:16]}, " + (f"{coded} embedded" if coded else "compiled on loading"),
        ),
        ("flags", flags or "-"),
        *(("input", _io_text(t)) for t in plan["inputs"]),
        *(("output", _io_text(t)) for t in plan["outputs"]),
    ]
    lines = [line for key, value in facts for line in _wrap(f"{key:8} {_printable(value)}", indent=9)]
    return "\n".join([*lines, "", plan_text(plan), sparsity_text(plan)]).rstrip() + "\n"


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
            + _printable(r["name"])
        )
    return "\n".join(lines) + "\n"


def _flag(value) -> str:
    """A flag's value as the command line takes it: sizes as `x:1x3x224x224`."""
    if not isinstance(value, Mapping):
        return str(value)
    return ",".join(f"{name}:{'x'.join(map(str, dims))}" for name, dims in value.items())


def _formats(layer: Mapping) -> str:
    def joined(tensors: Sequence[Mapping]) -> str:
        return ",".join(dict.fromkeys(t["format"] for t in tensors))

    return f"{joined(layer['inputs'])} -> {joined(layer['outputs'])}"


def _io_text(t: Mapping) -> str:
    return f"{t['name']}: {t['dtype']}[{','.join(map(str, t['shape']))}], in memory {t['format']}"


# --------------------------------------------------------------------------------------------------------------- text


def _tactic(name: str | None) -> str:
    """A tactic's name without the formats at its end: tables have a column for them."""
    return (name or "-").partition("__")[0]


def _is_predicted(plan: Mapping) -> bool:
    return plan["timing"]["kind"] == "predicted"


def _times_are(plan: Mapping) -> str:
    label = plan["timing"]["label"]
    return f"times are {label}{', marked ~' if _is_predicted(plan) else ''}"


def _us(us: float, plan: Mapping, sign: str = "", unit: str = " us") -> str:
    return f"{'~' if _is_predicted(plan) else ''}{us:{sign}.2f}{unit}"


def _versus(us: float, base: float) -> str:
    if not base:
        return "no comparison"
    change = 100 * (us / base - 1)
    return f"{abs(change):.1f} % {'slower' if change >= 0 else 'faster'}"


def _share(share: float) -> str:
    """A share in percent, rounded down: 100 means all."""
    return f"{math.floor(share * 10_000) / 100:.2f} %"


def _size(nbytes: int) -> str:
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:.1f} KiB"
    return f"{nbytes / (1 << 20):.1f} MiB"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _wrap(text: str, width: int = WIDTH, indent: int = 2) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False) or [""]


def _fold(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at blanks; a longer word after `/` or `_`; the rest is indented."""
    indent = "    " if text.startswith(" ") else "  "
    lines = [""]
    for word in re.findall(r" *[^ ]+", text):
        longer = len(word.strip()) > width - len(indent)
        for part in re.findall(rf" *[^/_ ]{{1,{width // 2}}}[/_]*| *[/_]+", word) if longer else [word]:
            if lines[-1].strip() and len(lines[-1]) + len(part) > width:
                lines.append(indent)
                part = part.lstrip()
            lines[-1] += part
    return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], caps, right=(), gap: bool = False) -> list[str]:
    """Aligned columns two spaces apart, none wider than its cap: cells are folded. `gap`: empty lines between rows."""
    cells = [
        [[part for line in cell.split("\n") for part in _fold(line, cap)] for cell, cap in zip(row, caps, strict=True)]
        for row in [header, *rows]
    ]
    widths = [max(len(line) for row in cells for line in row[i]) for i in range(len(caps))]
    out = []
    for i, row in enumerate(cells):
        for k in range(max(map(len, row))):
            texts = [cell[k] if k < len(cell) else "" for cell in row]
            texts = [t.rjust(widths[c]) if c in right else t.ljust(widths[c]) for c, t in enumerate(texts)]
            out.append("  ".join(texts).rstrip())
        if i == 0:
            out.append("  ".join("-" * w for w in widths))
        elif gap and i < len(rows):
            out.append("")
    return out
