"""Every option of trtexec, v8.6 to v11.1, and what becomes of it here: `build` accepts it, ignores it and says so, or refuses
it with the alternative. The names are those that its parser takes (samples/common/sampleOptions.cpp of NVIDIA/TensorRT).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import click

from gpu_runtime.commands import options
from gpu_runtime.commands.console import say

Verdict = Literal["accepted", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class TrtexecFlag:
    """An option of trtexec. `sentence`: of an ignored one, why; of a refused one, why not and what to do; {value} in it is the
    value given. Of an accepted one it is empty where the option means what it means to trtexec, else says what always holds."""

    name: str
    takes_value: bool
    verdict: Verdict
    sentence: str = ""


LOOP = (
    "for the inferences that are timed on a GPU, after a build (unless --skipInference) or with --loadEngine; "
    "gpu-runtime bench has the same option"
)
AS_TIMED = "layers and inferences are always timed this way"
NO_DLA = "kernels run on GPUs only, not on a DLA: leave it out"
NO_PLUGINS = "there are no plugins: every layer runs a kernel of this package; export the model in ONNX's own operators"
NO_INT8 = (
    "kernels compute in FP16 with FP32 accumulation: leave it out, and give the model before quantization "
    "(without QuantizeLinear and DequantizeLinear)"
)
NO_LOW = "kernels compute in FP16 with FP32 accumulation, and in FP32 where values exceed FP16's range: leave it out"
OBEYED = (
    "fp32 is obeyed or refused, by prefer too, and without --precisionConstraints; a name is a node's or an output's, with * "
    "for any characters"
)
NO_REFIT = "weights are packed into the engine: build it again, which is quick with the timing cache"
NO_PROFILES = "each run takes the profile that its inputs fit: leave it out; gpu-runtime inspect ENGINE shows all"
NO_TUNER = "give --builderOptimizationLevel=5, which times every tactic, or --exhaustive"
NO_VERSIONS = "an engine runs on one architecture and with the gpu_runtime that built it: build it again on the target"
NO_SAFE = "there is no safety runtime or restricted build: leave it out"
NO_DEBUG = "an engine keeps no debug tensors: Context.trace in Python returns the output of every layer"
NO_CAFFE = "models are read from ONNX only: export the network to ONNX and give --onnx=FILE"
NO_CALIBRATION = "kernels compute in FP16, not INT8: leave it out, or give inputs for the range with --calibration=FILE.npz"
NO_BATCH = "the batch is part of the input's size: give --shapes=NAME:{value}x3x224x224 with the input's name and size"
NO_ACCURACY = "a build compares no outputs: gpu-runtime compare MODEL ENGINE compares them with onnxruntime, layer by layer"
ONE_STREAM = "layers run on one stream"
ALWAYS_TIMED = "every tactic that may be the fastest is timed, until its times agree; --builderOptimizationLevel times fewer"
OWN_KERNELS = "all tactics are kernels of this package"
STATIC = "memory is placed when the engine is built"


def _rows(verdict: Verdict, sentence: str, names: str) -> Iterator[TrtexecFlag]:
    """Options of one verdict; a name that ends with = takes a value."""
    for name in names.split():
        yield TrtexecFlag(name.removesuffix("="), name.endswith("="), verdict, sentence)


# fmt: off
TRTEXEC_FLAGS: tuple[TrtexecFlag, ...] = (
    *_rows("accepted", "", "--onnx= --saveEngine= --shapes= --minShapes= --optShapes= --maxShapes= --profile= "
           "--inputIOFormats= --outputIOFormats= --memPoolSize= --fp16 --sparsity= --timingCacheFile= --device= --verbose "
           "--builderOptimizationLevel= "
           "--profilingVerbosity= --dumpLayerInfo --dumpProfile --exportLayerInfo= --exportProfile= --loadEngine= "
           "--skipInference --buildOnly --help --noBuilderCache --errorOnTimingCacheMiss"),
    *_rows("accepted", OBEYED, "--precisionConstraints= --layerPrecisions= --layerPrecision= --layerOutputTypes="),
    *_rows("accepted", LOOP, "--iterations= --warmUp= --duration= --sleepTime= --idleTime= --infStreams= --streams= --threads "
           "--noCudaGraph --noDataTransfers --noSpinWait --avgRuns= --percentile= --loadInputs= --dumpOutput --exportOutput= "
           "--exportTimes="),
    *_rows("accepted", AS_TIMED, "--separateProfileRun --useCudaGraph --useSpinWait --includeDataTransfers --exposeDMA"),
    *_rows("accepted", "no kernel computes in TF32", "--noTF32"),
    *_rows("accepted", "batches are explicit in ONNX", "--explicitBatch"),
    *_rows("ignored", "inputs and outputs are copied from and to pinned memory", "--useManagedMemory"),
    *_rows("ignored", "only inferences and layers are timed", "--timeDeserialize --timeRefit --asyncFileReader"),
    *_rows("ignored", ONE_STREAM, "--maxAuxStreams="),
    *_rows("ignored", ALWAYS_TIMED, "--avgTiming= --minTiming= --maxTactics= --heuristic"),
    *_rows("ignored", OWN_KERNELS, "--tacticSources= --preview= --tilingOptimizationLevel= --l2LimitForTiling="),
    *_rows("ignored", STATIC, "--allocationStrategy= --persistentCacheRatio= --monitorMemory"),
    *_rows("ignored", "all kernels compute in FP16 with FP32 accumulation", "--best --stronglyTyped --explicitPrecision"),
    *_rows("ignored", "kernels and times are kept in the cache folder; --timingCacheFile=FILE keeps the times elsewhere",
           "--noCompilationCache --tempdir= --tempfileControls="),
    *_rows("ignored", "there is one runtime, and it is not stored in the engine", "--useRuntime= --leanDLLPath= "
           "--excludeLeanRuntime"),
    *_rows("ignored", "normalizations have kernels of their own", "--pi --pluginInstanceNorm --nativeInstanceNorm --ni"),
    *_rows("ignored", "kernels run on GPUs only", "--allowGPUFallback"),
    *_rows("ignored", "there are no plugins", "--ignoreParsedPluginLibs"),
    *_rows("refused", NO_INT8, "--int8"),
    *_rows("refused", NO_LOW, "--bf16 --fp8 --int4"),
    *_rows("refused", NO_CALIBRATION, "--calib= --calibProfile= --minShapesCalib= --optShapesCalib= --maxShapesCalib="),
    *_rows("refused", NO_DLA, "--useDLACore= --buildDLAStandalone --layerDeviceTypes= --adjustForDLA --reportCapabilityDLA "
           "--uint8AsymmetricQuantizationDLA"),
    *_rows("refused", NO_PLUGINS, "--plugins= --staticPlugins= --dynamicPlugins= --setPluginsToSerialize= --safetyPlugins= "
           "--enablePluginOverride --decomposableAttentions="),
    *_rows("refused", "give --exportOutput=FILE", "--dumpRawBindingsToFile"),
    *_rows("refused", "gpu-runtime inspect ENGINE shows which version built it", "--getPlanVersionOnly"),
    *_rows("refused", NO_REFIT, "--refit --dumpRefit --refitFromOnnx= --stripWeights --stripAllWeights --weightless "
           "--allowWeightStreaming --weightStreamingBudget="),
    *_rows("refused", NO_PROFILES, "--useProfile= --dumpOptimizationProfile"),
    *_rows("refused", NO_VERSIONS, "--versionCompatible --vc --hardwareCompatibilityLevel= --runtimePlatform="),
    *_rows("refused", NO_SAFE, "--safe --restricted --consistency --std --serialized= --dumpKernelText"),
    *_rows("refused", NO_DEBUG, "--markDebug= --markUnfusedTensorsAsDebugTensors --saveDebugTensors= --saveAllDebugTensors="),
    *_rows("refused", NO_TUNER, "--tuneBuildRoutes= --tuneBuildRouteFile= --tuningSearch= --tuningCacheFile= "
           "--tuningResultFile= --tuningTimeOut= --continue --dryRun --helpBuildRoute --setBuildRoute= --saveAllEngines "
           "--remoteAutoTuningConfig= --distributiveIndependence"),
    *_rows("refused", NO_ACCURACY, "--loadRefOutputs= --refPair= --accuracyAlgorithm= --accuracyThreshold= --atol= --rtol="),
    *_rows("refused", "give the formats of inputs and outputs with --inputIOFormats and --outputIOFormats", "--directIO"),
    *_rows("refused", "give --device=NAME: it plans for a GPU that is not here, with predicted times", "--cpuOnly --cpu"),
    *_rows("refused", "give --memPoolSize=workspace:{value}", "--workspace="),
    *_rows("refused", "give --profilingVerbosity=detailed, layer_names_only or none", "--nvtxMode="),
    *_rows("refused", NO_BATCH, "--batch= --maxBatch="),
    *_rows("refused", NO_CAFFE, "--model= --deploy= --output= --uff= --uffInput= --uffNHWC"),
)
# fmt: on
BY_NAME = {flag.name: flag for flag in TRTEXEC_FLAGS}
PROFILES = "gpu_runtime.profiles"  # in the context's meta: the sizes behind each --profile=N
SEEN = "gpu_runtime.trtexec_ignored"  # in the context's meta: what was given and ignored, as typed
WRITES = ("--save", "--export", "--timingCacheFile")  # of options that name a file to write


class TrtexecCommand(click.Command):
    """A command that also knows the options of trtexec that it does not have, and one dash in place of two."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        own = {name for p in self.params for name in p.opts}
        self.params += [_option(flag) for flag in TRTEXEC_FLAGS if flag.name not in own and flag.name != "--help"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = [name for p in self.params for name in p.opts]
        _check_dashes(args, known)
        args, ctx.meta[PROFILES] = options.profiles(["--ray=" if arg == "--ray" else arg for arg in args])
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            raise click.NoSuchOption(e.option_name, possibilities=_offered(e.option_name, known), ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Say what was ignored, in one line for each reason, and go on."""
        reasons: dict[str, list[str]] = {}
        for name, typed in ctx.meta.get(SEEN, ()):
            reasons.setdefault(BY_NAME[name].sentence, []).append(typed)
        for sentence, typed in reasons.items():
            say(f"ignored: {', '.join(typed)}: {sentence}", err=True)
        return super().invoke(ctx)


def _option(flag: TrtexecFlag) -> click.Option:
    """The hidden option that accepts, ignores or refuses; each may be given several times."""

    def met(ctx: click.Context, _: click.Parameter, given: Any) -> None:
        typed = [f"{flag.name}={value}" for value in given] if flag.takes_value else [flag.name] if given else []
        if typed and flag.verdict == "refused":
            value = given[-1] if flag.takes_value else ""
            raise click.UsageError(f"{typed[-1]}: {flag.sentence.format(value=value)}", ctx)
        if flag.verdict == "ignored":
            ctx.meta.setdefault(SEEN, []).extend((flag.name, text) for text in typed)

    shape: dict[str, Any] = {"multiple": True} if flag.takes_value else {"is_flag": True}
    refused = flag.verdict == "refused"  # told before anything else that is wrong
    name = flag.name.strip("-").lower()
    return click.Option(
        [flag.name, f"trtexec_{name}"], hidden=True, expose_value=False, is_eager=refused, callback=met, **shape
    )


def _check_dashes(args: Iterable[str], known: Iterable[str]) -> None:
    """UsageError for -onnx=FILE: one dash would begin options of one letter, -o with the file nnx=FILE."""
    long = {name for name in known if name.startswith("--")}
    for arg in args:
        found = re.match(r"-([A-Za-z][A-Za-z0-9-]+)(?==|$)", arg)
        if found and f"--{found[1]}" in long:
            raise click.UsageError(f"{arg}: expected two dashes before a name: -{arg}")


def _offered(typed: str, known: Iterable[str]) -> list[str]:
    """What to offer for an option that does not exist: none that is refused or ignored, and one that writes a file only to who
    typed the beginning of its name, --saveEngin."""
    own = [name for name in known if name not in BY_NAME or BY_NAME[name].verdict == "accepted"]
    return [name for name in own if not name.startswith(WRITES) or name[:6] == typed[:6]]
