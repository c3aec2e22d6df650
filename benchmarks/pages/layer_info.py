"""The keys of exported layer information as Markdown: a part of docs/layer_info.md.

    python -m benchmarks.pages.layer_info

The keys and their types are read off an engine that has every kind of them; their meanings are here. A key without a
meaning, or a meaning without a key, is an error.
"""

from collections.abc import Mapping
from pathlib import Path

import gpu_runtime as gr
from benchmarks.bench_plan import markdown
from gpu_runtime.explain.figures import SURE
from gpu_runtime.explain.layer_info import camel
from tactics.predict import RANGE

DIGITS = Path(__file__).parents[1] / "digits"

NETWORK = {
    "Layers": "an object for each launch, in order of execution",
    "Bindings": "names of inputs, then outputs (TensorRT 10)",
    "I/O Tensors": "the same with types, sizes and formats (TensorRT 11)",
    "ProfilingVerbosity": "always `detailed` when layers are objects",
    "Engine Metadata": "the model's name and the device",
    "Batch": "the number of images of a run",
    "Points": "of an engine for several sizes, each plan: its inputs, images `first` to `batch`, microseconds, bytes",
    "Timing": "`measured`, or `predicted(DEVICE)`: how all times in the file came about",
    "TotalUs": "what the plan takes, microseconds",
    "LaunchesChecked": "whether every launch was checked to read what was written for it, and no more than that",
    "SparsityLayers": "layers with weights, each a node of the model, as in all counts of layers",
    "SparsityEligibleLayers": "those whose weights have the 2:4 pattern and whose kind has sparse kernels",
    "SparsityPickedLayers": "those that run sparse",
    **{
        f"SparsityPicked{camel(word)}": f"of these, those that are {word}, see [how to read a reason](reasons.md)"
        for word, _ in SURE
    },
    "SparsityAllDenseUs": "what the best plan without sparse kernels takes",
    "SparsitySavedUs": "the difference of both",
    "SparsitySavedLowUs": f"the least of where it lies with a probability of {100 * RANGE:.0f} %",
    "SparsitySavedHighUs": "the most",
    "SparsityCeilingUs": "what the network would take with all eligible kernels at twice their dense speed",
    "IfPrunedUs": "of weights that are not 2:4: the time of the plan with pruned ones, predicted",
    "IfPrunedNowUs": "the time of the plan with the weights as they are, predicted",
    "IfPrunedPickedLayers": "layers that would run sparse if pruned",
    "LibraryEstimateUs": "what the dense plan would take with a library's kernels (cuBLAS, CUTLASS), an estimate",
    "LibraryEstimateLowUs": f"the least of where it lies with a probability of {100 * RANGE:.0f} %",
    "LibraryEstimateHighUs": "the most",
    "LibraryEstimateSparseUs": "the same with the library's 2:4 kernels where weights have the pattern and they are faster",
    "LibraryEstimateLayers": "launches whose time is estimated",
    "LibraryEstimateOwn": "launches that count at this plan's time",
    "LibraryEstimateOwnUs": "what these take",
    "LibraryEstimateSource": "where the library's rates come from",
    "LibraryEstimateTimed": "1 where its products were timed on this device, 0 where its rates are taken from similar GPUs",
}
LAYER = {
    "TimeUs": "microseconds of this launch in the plan",
    "Timing": "as above",
    "Images": "of a layer that runs in pieces of the batch, the images of this piece, `8:16`",
    "PrecisionReason": "why the layer computes in FP32",
    "ActivationFunction": "the activation by name, where TensorRT says only `GENERIC`",
    "SparsityLayers": "the model's nodes whose weights these are",
    "SparsityEligibleLayers": "those of them that are eligible",
    "SparsityEligible": "1: the weights have the pattern, and the layer's kind has sparse kernels",
    "SparsityChosen": "1: a sparse kernel runs (`HasSparseWeights` says only that the weights have the pattern)",
    "SparsityReason": "one word, see [how to read a reason](reasons.md)",
    "SparsitySentence": "the same as a sentence with its numbers",
    "SparsityDetail": "what the reason rests on, if more is known",
    "SparsityInputChannelsPerGroup": "C / groups",
    "SparsityPatternGroups": "groups of 4 weights",
    "SparsityPatternShare": "the share of them that fits 2:4, in FP16",
    "SparsityPatternShareStored": "the same of the file's own values, where FP16 changes it",
    "SparsityLostEnergy": "the share of the squared weights that the nearest pattern would take away",
    "SparsityFirstViolation": "K, C, R, S: where the first group that does not fit begins",
    "SparsityFlipSpeedup": "how much faster the losing kind's kernels would have to be",
    "SparsityProbabilityFaster": "P(sparse faster), given the error of predictions",
    "SparsitySureness": f"of a layer that runs sparse, what that is called: {', '.join(word for word, _ in SURE)}",
    "SparseBest": "Ms, LowMs, HighMs, Tactic, Formats, Bound, Timed (0: no): the fastest sparse kernel, alone, in any formats",
    "DenseBest": "the same of the fastest dense one",
    "PredictedIfSparse": "the same of the best sparse kernel if the weights had the pattern, predicted",
    "PredictedIfDense": "Ms: the dense one beside it",
    "OtherChoice": "CostMs = KernelMs + ReformatMs + AroundMs, TotalMs, Reformats, Ms, Tactic, Formats, Kernels if several, "
    "PremiumMs if any: the plan with this layer forced the other way, and its kernels for the layer",
    "LibraryEstimate": "Ms, Bound, Error, SparseMs: a library's dense kernel, what limits it, the relative error, "
    "and its 2:4 kernel where the weights have the pattern",
    "Floor": "Bound, DenseMs, SparseMs, MmaMs, DramMs, L2Ms, LaunchMs: least times at the device's peak rates",
}
TENSOR = {
    "Strides": "elements from one to the next along N, channel blocks, H, W",
    "VectorSize": "V of the format's address rule, see [formats](formats.md)",
}
# Keys of TensorRT's own schema, 10.x and 11.x, with the same meaning there.
TENSORRT = {
    *"Name LayerType Inputs Outputs TacticName TacticValue StreamId Metadata ParameterType Kernel PaddingMode".split(),
    *"PrePadding PostPadding Stride Dilation OutMaps Groups Weights Bias HasBias HasReLU HasSparseWeights".split(),
    *"HasDynamicFilter HasDynamicBias HasResidual ConvXAsActInputIdx BiasAsActInputIdx ResAsActInputIdx Activation".split(),
    *"Origin PoolingType WindowSize BlendFactor AverageCountExcludesPadding ParameterSubType NbInputArgs InputArgs".split(),
    *"NbOutputVars OutputVars NbOperations Operations Axes HasLog Operation".split(),
    *"Location Dimensions Format/Datatype Format Datatype".split(),
}


def meaning(key: str, table: Mapping[str, str]) -> str | None:
    """Returns the row of a key: its own, or that of the longest stem with which it begins; None if there is none."""
    stems = [stem for stem in table if key.startswith(stem)]
    return table[max(stems, key=len)] if stems else None


def unknown(info: Mapping[str, object]) -> list[str]:
    """Returns the keys of layer information that this document does not describe."""
    layers = info["Layers"]
    assert isinstance(layers, list)
    tensors = [t for layer in layers for t in layer["Inputs"] + layer["Outputs"]]
    found = {key for key in info if key not in NETWORK}
    found |= {key for layer in layers for key in layer if key not in TENSORRT and meaning(key, LAYER) is None}
    return sorted(found | {key for t in tensors for key in t if key not in TENSORRT and key not in TENSOR})


def document() -> str:
    infos = [
        gr.build(DIGITS / f"digits_{kind}.onnx", sparsity=mode, device="rtx3090", shapes={"x": (256, 1, 8, 8)}).layer_info()
        for kind, mode in (("sparse", "enable"), ("dense", "enable"))
    ]
    if odd := sorted({key for info in infos for key in unknown(info)}):
        raise ValueError(f"keys without a meaning: {', '.join(odd)}")
    lines = []
    for title, table in (("Of the network", NETWORK), ("Of a layer", LAYER), ("Of a tensor", TENSOR)):
        lines += [f"### {title}", "", markdown(("key", "meaning"), [(f"`{key}`", text) for key, text in table.items()]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(document(), end="")
