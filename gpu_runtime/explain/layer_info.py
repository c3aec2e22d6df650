"""Layer information and profiles in TensorRT's schema, from an engine's record (gpu_runtime.runtime.plan_record)."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from gpu_runtime.explain import points
from gpu_runtime.explain.facts import facts_of
from gpu_runtime.explain.figures import ms_of, sureness, surenesses, tactic_value
from gpu_runtime.explain.wording import sentence
from gpu_runtime.runtime.findings import Floor, KernelTime, LibraryKernel, OtherChoice, SparsityRow
from gpu_runtime.runtime.plan_record import Bound, EngineRecord, Layer, PlanRecord, TensorPlace, Timing
from gpu_runtime.text import printable, unused_name
from tactics import codec
from tactics.format import LAYOUTS, TRT_NAMES, TRT_TYPES, is_bytes, strides, wording
from tactics.problems.library_problem import LibraryProblem
from tactics.problems.pointwise_ops import NONE
from tactics.problems.problem import (
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    ReformatProblem,
)
from tactics.problems.reductions import NormalizeProblem, ReduceProblem

Keys = dict[str, object]  # an object of TensorRT's JSON

SEPARATOR = "\u001e"  # between the ONNX nodes of one layer, as TensorRT writes it
MOVE_TYPES = {
    "window": "Slice",
    "upsample": "Resize",
    **dict.fromkeys(("d2s_dcr", "d2s_crd", "s2d_dcr", "s2d_crd", "channels"), "Shuffle"),
}
TRT_ACTIVATIONS = {"none": "NONE", "relu": "RELU"}


def layer_info(record: EngineRecord) -> dict[str, object]:
    """Returns TensorRT's detailed layer information as a JSON object, with the keys of TensorRT 10 and 11.

    Facts that TensorRT has no keys for are extra scalars of the layers and of the object.
    """
    plan = record.plan
    bindings = [(t, "Input") for t in plan.inputs] + [(t, "Output") for t in plan.outputs]
    return {
        "Layers": layer_info_list(record),
        "Bindings": [_clean(t.name) for t, _ in bindings],
        "I/O Tensors": [_io_tensor(t, mode) for t, mode in bindings],
        "ProfilingVerbosity": "detailed",
        "Engine Metadata": f"{record.model.name} for {record.device.title} ({record.device.sm})",
        "Batch": record.batch,
        "Timing": record.timing.label,
        "TotalUs": plan.solution.total_us,
        **({"Points": [asdict(p) for p in points.points(record)]} if record.profiles else {}),
        **_network_keys(plan),
        **({"LeftOut": "; ".join(f"{what}: {why}" for what, why in record.device.left_out)} if record.device.left_out else {}),
    }


def limited(info: dict[str, object], verbosity: str) -> dict[str, object]:
    """Returns the part of the layer information that `verbosity` of --profilingVerbosity keeps.

    "detailed": all keys; "layer_names_only": the names of layers and bindings; "none": the names of bindings only.
    """
    layers: Any = info["Layers"] if verbosity == "layer_names_only" else ()
    return info if verbosity == "detailed" else {"Layers": [layer["Name"] for layer in layers], "Bindings": info["Bindings"]}


def _network_keys(plan: PlanRecord) -> Keys:
    sparsity, library = plan.sparsity, plan.solution.rivals.library
    summary = sparsity.summary
    if summary is None:
        return {}
    estimates, pruned = asdict(library) if library else {}, plan.if_pruned
    low, high = summary.saved_range_us or (None, None)
    return _known(
        {
            "SparsityLayers": summary.layers,
            "SparsityEligibleLayers": summary.eligible,
            "SparsityPickedLayers": summary.picked,
            **{f"SparsityPicked{camel(word)}": count for word, count in surenesses(sparsity).items()},
            "SparsityAllDenseUs": summary.all_dense_us,
            "SparsitySavedUs": summary.saved_us,
            "SparsitySavedLowUs": low,
            "SparsitySavedHighUs": high,
            "SparsityCeilingUs": summary.ceiling_us,
            "IfPrunedUs": pruned.solution.total_us if pruned else None,
            "IfPrunedNowUs": pruned.now_us if pruned else None,
            "IfPrunedPickedLayers": len(pruned.sparsity.picked) if pruned else None,
            **{f"LibraryEstimate{camel(key)}": value for key, value in estimates.items()},
        }
    )


def camel(word: str) -> str:
    """Returns the name of a field as a JSON key in CamelCase: "best_dense" becomes "BestDense"."""
    return word.replace("_", "-").title().replace("-", "")


def _known(keys: Mapping[str, object]) -> Keys:
    """Returns the keys whose value is not None."""
    return {key: value for key, value in keys.items() if value is not None}


def layer_info_list(record: EngineRecord) -> list[Keys]:
    """Returns a JSON object for each layer, in execution order, including reformats and layers that launch nothing (NoOp)."""
    layers = []
    for name, facts in zip(_layer_names(record.plan), facts_of(record), strict=True):
        layer = facts.layer
        info: Keys = {
            "Name": name,
            "LayerType": _layer_type(layer),
            "Inputs": [_tensor(t) for t in layer.inputs],
            "Outputs": [_tensor(t) for t in layer.outputs],
        }
        if layer.tactic:
            info |= _parameters(layer, record.timing) | {"TacticName": layer.tactic_name}
        info["TacticValue"] = tactic_value(layer.tactic_name)
        info["StreamId"] = 0
        info["Metadata"] = SEPARATOR.join(f"[ONNX Layer: {_clean(node)}]" for node in layer.nodes)
        info |= {"TimeUs": layer.time_us, "Timing": record.timing.label}
        if layer.images:
            info["Images"] = f"{layer.images[0]}:{sum(layer.images)}"
        if facts.wide:
            info["PrecisionReason"] = "; ".join(facts.wide)
        if facts.row and (against := record.plan.int8.get(facts.row.layer)) is not None:
            info |= {"Int8": int(not against), **({"Int8Reason": against} if against else {})}
        if facts.row:
            info |= _sparsity_keys(layer, facts.row, record)
        layers.append(info)
    return layers


def profile(record: EngineRecord, times_us: Sequence[Sequence[float]] | None = None) -> list[Keys]:
    """Returns trtexec's exported profile: {"count": iterations, "batch": images}, then an object per layer with times in ms.

    The objects of layers have five keys and are in layer order. `times_us[iteration][layer]`: measured times; None: the plan's
    own times as one iteration. If the plan's times are predictions the first object has `"predicted": true`, because tools that
    take only measurements must refuse the profile. Raises ValueError unless there is at least one iteration and each has a
    time for every layer.
    """
    layers = record.plan.layers
    runs = [[layer.time_us for layer in layers]] if times_us is None else [list(run) for run in times_us]
    if not runs or any(len(run) != len(layers) for run in runs):
        raise ValueError(
            f"times_us: expected one or more iterations of {len(layers)} layer times, got {len(runs)} iterations of "
            f"{sorted({len(run) for run in runs})}"
        )
    count, rows = len(runs), list(zip(*runs, strict=True))
    head: Keys = {"count": count, "batch": record.batch}
    if times_us is None and record.timing.is_predicted:
        head["predicted"] = True
    total = sum(map(sum, rows))
    records: list[Keys] = [
        {
            "name": name,
            "timeMs": ms_of(sum(row)),
            "averageMs": ms_of(sum(row) / count),
            "medianMs": ms_of(statistics.median(row)),
            "percentage": round(100 * sum(row) / total, 4) if total else 0.0,
        }
        for name, row in zip(_layer_names(record.plan), rows, strict=True)
    ]
    return [head, *records]


def _layer_type(layer: Layer) -> str:
    kind = layer.type
    p = layer.problem.parts[0] if layer.problem else None
    if layer.tactic and isinstance(p, NormalizeProblem):
        return "Normalization" if p.kind == "standard" else "SoftMax"
    if layer.tactic and isinstance(p, MoveProblem):
        return MOVE_TYPES.get(p.kind, "Slice")
    return {
        "conv": "Convolution",
        "conv_transpose": "Deconvolution",
        "pool": "Pooling",
        "pointwise": "PointWiseV2",
        "concat": "Concatenation",
        "reduce": "Reduce",
        "reformat": "Reformat",
        "noop": "NoOp",
        "gather": "Gather",
        "resize": "Resize",
        "library": "Library",
    }.get(kind, kind)


# ---- parameters, by the layer's problem


def _parameters(layer: Layer, timing: Timing) -> Keys:
    """Returns the JSON keys of a launched layer's parameters: TensorRT's keys, and our own where TensorRT has none."""
    p: Any = layer.problem
    if p and p.PARTS and isinstance(chain := p.parts[-1], PointwiseProblem):
        stages = _pointwise(chain, len(chain.tensors))
        return _parameters(replace(layer, problem=p.parts[0]), timing) | {k: stages[k] for k in ("NbOperations", "Operations")}
    if layer.type in ("conv", "conv_transpose"):
        return _conv(layer, p)
    if isinstance(p, PoolProblem):
        return _pool(p)
    if isinstance(p, ReformatProblem):
        return {"ParameterType": "Reformat", "Origin": "REFORMAT"}
    if isinstance(p, PointwiseProblem):
        return _pointwise(p, len(layer.inputs))
    if isinstance(p, LibraryProblem):
        basis = "estimated as one launch that moves each byte once" if timing.is_predicted else "measured"
        reason = "kernels take constant weights and biases" if p.function == "Conv" else "no kernel computes it"
        return {"ParameterType": "Library", "Function": p.function, "Reason": reason, "TimeBasis": basis} | {
            f"Attribute_{name}": codec.plain(value) for name, value in sorted(p.attributes)
        }
    if isinstance(p, NormalizeProblem):
        return _axes(p.axes) if p.kind == "standard" else _axes(p.axes) | {"HasLog": int(p.kind == "log_softmax")}
    return _axes(p.axes) | {"Operation": p.kind.upper()} if isinstance(p, ReduceProblem) else {}


def _axes(axes: str) -> Keys:
    return {"Axes": sum(1 << "nchw".index(a) for a in axes)}


def _pool(p: PoolProblem) -> Keys:
    return {
        "ParameterType": "Pooling",
        "PoolingType": "MAX" if p.kind == "max" else "AVERAGE",
        "WindowSize": [p.r, p.s],
        **_padding(p.pad),
        "Stride": list(p.stride),
        "BlendFactor": 0.0,
        "AverageCountExcludesPadding": int(not p.count_pad),
    }


def _pointwise(p: PointwiseProblem, num_inputs: int) -> Keys:
    args = [f"arg{i}" for i in range(num_inputs)]
    stages = [str(s) for s in p.stages] or ["copy"]
    return {
        "ParameterType": "PointWise",
        "ParameterSubType": "PointWiseExpression",
        "NbInputArgs": len(args),
        "InputArgs": args,
        "NbOutputVars": 1,
        "OutputVars": [f"var{len(stages) - 1}"],
        "NbOperations": len(stages),
        "Operations": [_expression(i, stage, args) for i, stage in enumerate(stages)],
    }


def _expression(i: int, stage: str, args: list[str]) -> str:
    """Returns operation i of a pointwise kernel as TensorRT writes it, a C++ line that defines var{i} from var{i - 1}.

    `stage`: such as clip(0,6) or add(t1); `args`: the names of the kernel's inputs t0, t1, ...
    """
    op, _, inside = stage.rstrip(")").partition("(")
    before = f"var{i - 1}" if i else args[0]
    inside = dict(zip((f"t{k}" for k in range(len(args))), args, strict=True)).get(inside, inside)
    return f"const auto var{i} = {op}({', '.join(filter(None, [before, *inside.split(',')]))});"


def _conv(layer: Layer, p: Any) -> Keys:
    """Returns the keys of a convolution with problem `p`. For two convolutions in one launch: padding, stride and dilation of
    the first, output channels of the second.
    """
    reads = p.parts[0]
    act = " ".join(str(act) for act in (p.epilogue.act, p.epilogue.last) if act != NONE) or "none"
    return {
        "ParameterType": "Deconvolution" if isinstance(p, ConvTransposeProblem) else "Convolution",
        "Kernel": [p.r, p.s],
        **_padding(_pad(reads)),
        "Stride": list(reads.stride),
        "Dilation": list(reads.dilation),
        "OutMaps": p.k,
        "Groups": p.groups,
        "Weights": {
            "Type": TRT_TYPES[_weights_type(layer)],
            "Count": layer.weights_count,
        },
        "Bias": {"Type": "Half", "Count": p.k if p.epilogue.bias else 0},
        "HasBias": int(p.epilogue.bias),
        "HasReLU": int(act == "relu"),
        "HasSparseWeights": int(p.sparse24),
        "HasDynamicFilter": 0,
        "HasDynamicBias": 0,
        "HasResidual": int(p.epilogue.residual),
        "ConvXAsActInputIdx": -1,
        "BiasAsActInputIdx": -1,
        "ResAsActInputIdx": -1,
        "Activation": TRT_ACTIVATIONS.get(act, "GENERIC"),
        "ActivationFunction": act,
    }


def _weights_type(layer: Layer) -> str:
    if layer.tactic and is_bytes(layer.tactic.ins[0]):
        return "int8"
    return "fp32" if layer.tactic and layer.tactic.kernel.endswith("fp32") else "fp16"


def _pad(p: ConvProblem | ConvTransposeProblem) -> tuple[int, ...]:
    """Returns the padding (top, left, bottom, right) of a convolution; of a transposed one, the pixels cut from each side of
    the output.

    The output padding of a transposed convolution reduces bottom and right.
    """
    if isinstance(p, ConvProblem):
        return p.pad
    ends = zip((p.h, p.w), p.stride, (p.r, p.s), p.dilation, p.pad, p.out, strict=True)
    return (*p.pad, *((i - 1) * s + (r - 1) * d + 1 - before - o for i, s, r, d, before, o in ends))


def _padding(pad: Sequence[int]) -> Keys:
    top, left, bottom, right = pad
    return {"PaddingMode": "kEXPLICIT_ROUND_DOWN", "PrePadding": [top, left], "PostPadding": [bottom, right]}


def _sparsity_keys(layer: Layer, row: SparsityRow, record: EngineRecord) -> Keys:
    """Returns the layer's sparsity row as JSON keys with scalar values; keys without a value are left out."""
    keys: dict[str, object] = {
        "SparsityLayers": len(row.layers),
        "SparsityEligibleLayers": len(row.able),
        "SparsityEligible": int(row.verdict != "not_eligible"),
        "SparsityChosen": int(layer.is_sparse),
        "SparsityReason": row.reason,
        "SparsitySentence": sentence(row, record),
        "SparsityDetail": row.detail,
        "SparsityInputChannelsPerGroup": row.c // row.groups,
        "SparsityPatternGroups": row.pattern_groups,
        "SparsityPatternShare": row.pattern_share,
        "SparsityPatternShareStored": row.stored_share,
        "SparsityLostEnergy": row.lost_energy,
        "SparsityFlipSpeedup": row.flip and round(row.flip.speedup, 4),
        "SparsityProbabilityFaster": row.p_sparse_faster,
        "SparsitySureness": sureness(row) or None,
    }
    keys |= zip((f"SparsityFirstViolation{i}" for i in "KCRS"), row.first_violation or (), strict=False)
    keys |= {"OtherChoiceCostMs": None if row.other_cost_us is None else ms_of(row.other_cost_us)}
    for prefix, found in (
        ("SparseBest", row.best_sparse),
        ("DenseBest", row.best_dense),
        ("PredictedIfSparse", row.if_sparse),
        ("OtherChoice", row.other),
        ("LibraryEstimate", row.library),
        ("Floor", row.floor),
    ):
        keys |= _scalars(prefix, found)
    if row.if_sparse:
        keys["PredictedIfDenseMs"] = keys.pop("PredictedIfSparseDenseMs")
    return _known(keys)


def _scalars(prefix: str, found: KernelTime | OtherChoice | LibraryKernel | Floor | None) -> Keys:
    """Returns the fields of a record that differ from their defaults, as JSON keys that begin with `prefix`; {} for None.

    Times become milliseconds; the formats of input and output become one text.
    """
    keys: Keys = {}
    for field in fields(found) if found else ():
        name, value = field.name, getattr(found, field.name)
        if value == field.default or name in ("in_", "out"):
            continue
        if name.endswith("us"):
            keys[f"{prefix}{camel(name.removesuffix('us'))}Ms"] = ms_of(value)
        elif name == "tactic":
            keys[f"{prefix}Tactic"] = value.name
        else:
            keys[f"{prefix}{camel(name)}"] = int(value) if isinstance(value, bool) else value
    if isinstance(found, KernelTime | OtherChoice):
        keys[f"{prefix}Formats"] = f"{found.in_} -> {found.out}"
    return keys


def _tensor(t: TensorPlace) -> Keys:
    s = strides(t.format, t.shape4)
    return {
        "Name": _clean(t.name),
        "Location": "Device",
        "Dimensions": list(t.shape4),
        "Format/Datatype": wording(t.format),
        "Format": wording(t.format),
        "Datatype": TRT_TYPES[t.format.dtype],
        "Strides": [s.n, s.block, t.shape4[3] * s.pixel, s.pixel],
        "VectorSize": 1 << s.log2v,
    }


def _io_tensor(t: Bound, mode: str) -> Keys:
    shape, layout = list(t.shape), LAYOUTS[t.format.layout]
    return {
        "Name": _clean(t.name),
        "IOMode": mode,
        "DataType": TRT_TYPES[t.dtype],
        "Dimensions": shape,
        "Location": "Device",
        "IsShapeInferenceIO": False,
        "ProfileInfo": [
            {
                "MinShape": shape,
                "OptShape": shape,
                "MaxShape": shape,
                "Format": f"{layout.wording.format(TRT_NAMES[t.dtype])} ({layout.enum})",
            }
        ],
    }


def _clean(name: str) -> str:
    """Returns a name that graph viewers can draw: without markup, control characters and the brackets of TensorRT's suffix for
    a shape profile.
    """
    name = re.sub(r"\[profile +(\d+)\]", r"(profile \1)", name)
    name = name.translate(str.maketrans("<>&|", "()+/"))
    return "".join(c if c.isprintable() else "?" for c in name)


def _layer_names(plan: PlanRecord) -> list[str]:
    """Returns a drawable, unique name for each layer; layer information and profile use the same names."""
    names: dict[str, None] = {}
    for layer in plan.layers:
        names[unused_name(_clean(layer.name), names)] = None
    return list(names)


def trt_profile_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text that trtexec's --dumpProfile prints. `records`: a profile, as `profile` returns it.

    Times are in microseconds if every layer takes less than a millisecond, because four decimals of ms would show few digits.
    """
    head, layers = records[0], records[1:]
    mark = " predicted times, nothing was run" if head.get("predicted") else ""
    unit, scale, digits = ("us", 1000, 2) if all(r["averageMs"] < 1 for r in layers) else ("ms", 1, 4)
    lines = [
        f"=== Profile ({head['count']} iterations ) ==={mark}",
        f"    Time({unit})     Avg.({unit})   Median({unit})   Time(%)   Layer",
    ]
    columns = ("timeMs", "averageMs", "medianMs", "percentage")
    total = {"name": "Total"} | {key: sum(r[key] for r in layers) for key in columns}
    for r in [*layers, total]:
        times = " ".join(f"{scale * r[key]:12.{digits}f}" for key in columns[:3])
        lines.append(f"{times} {r['percentage']:9.1f}   {printable(r['name'])}")
    return "\n".join(lines) + "\n"
