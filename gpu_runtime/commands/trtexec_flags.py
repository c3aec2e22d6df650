"""The options of trtexec, v8.6 to v11.1: `build` accepts each, ignores it with a message, or refuses it with the alternative.

The names are from trtexec's parser (samples/common/sampleOptions.cpp of NVIDIA/TensorRT). First come the options of timed
inferences, which `build` and `bench` have.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import click

from gpu_runtime.benchmark.records import Settings
from gpu_runtime.commands import options
from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import flag, typed
from tactics.planner.grouping import grouped

if TYPE_CHECKING:
    from cuda_kernels.device import Device

PERCENTILES = "90,95,99"


# ---- values of options: click's callbacks, which return the value of an option or raise UsageError


def _time(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Returns a finite time from 0 on."""
    if not 0 <= value < math.inf:
        raise click.UsageError(f"{parameter.opts[0]}: expected a time from 0 on, got {value:g}", context)
    return value


def _duration(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Returns a time from 0 on; infinity for -1."""
    return math.inf if value == -1 else _time(context, parameter, value)


def _patience(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Returns a finite time above 0."""
    if not 0 < value < math.inf:
        raise click.UsageError(f"{parameter.opts[0]}: expected a time above 0, got {value:g}", context)
    return value


def _percents(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    """Returns the numbers from 0 to 100 in a text with commas."""
    try:
        found = tuple(map(float, value.split(",")))
    except ValueError:
        found = (math.nan,)
    if all(0 <= p <= 100 for p in found):
        return found
    raise click.UsageError(f"{parameter.opts[0]}: expected numbers from 0 to 100, as {PERCENTILES}, got {value!r}", context)


MS: dict[str, Any] = {"type": float, "metavar": "MS", "callback": _time}


# fmt: off
@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of timed inferences, named as trtexec's."""

    warm_up: float = flag("--warmUp", default=200, show_default=True, **MS, help="Run for this long before the measurement.")
    iterations: int = flag("--iterations", type=click.IntRange(min=1), default=10, show_default=True,
                           help="Measure at least this many inferences of each stream.")
    duration: float = flag("--duration", type=float, default=3, show_default=True, metavar="SECONDS", callback=_duration,
                           help="Measure for at least this long; -1: until Ctrl-C.")
    streams: int = flag("--streams", "--infStreams", type=click.IntRange(1, 64), default=1, show_default=True,
                        help="Contexts that run at once, each on a stream of its own.")
    threads: bool = flag("--threads", is_flag=True, help="Each stream in a host thread of its own.")
    no_graph: bool = flag("--noCudaGraph", is_flag=True, help="Launch kernels one by one. Default: as one CUDA graph.")
    no_transfers: bool = flag("--noDataTransfers", is_flag=True, help="Copy the inputs once, before the first inference. "
                              "Default: each inference copies inputs and outputs from and to pinned memory.")
    no_spin: bool = flag("--noSpinWait", is_flag=True, help="Let the host sleep while it waits. Default: it spins.")
    sleep: float = flag("--sleepTime", default=0, **MS, help="Sleep before the first inference.")
    idle: float = flag("--idleTime", default=0, **MS, help="Sleep after each inference.")
    runs: int | None = flag("--avgRuns", type=click.IntRange(min=1), metavar="N", help="Also print the mean times of every N "
                            "inferences.")
    percents: tuple[float, ...] = flag("--percentile", default=PERCENTILES, show_default=True, metavar="P,...",
                                       callback=_percents, help="Percentiles to print (nearest rank).")
    inputs: str = flag("--loadInputs", default="", metavar="NAME:FILE,...", help="Inputs from raw files, as numpy's tofile() "
                       "writes them, or .npy files. Other inputs are random, with a fixed seed.")
    dump: bool = flag("--dumpOutput", is_flag=True, help="Print the outputs, every value.")
    output: str | None = flag("--exportOutput", type=click.Path(), metavar="FILE", help="Write the outputs (trtexec's JSON).")
    times: str | None = flag("--exportTimes", type=click.Path(), metavar="FILE", help="Write the times of every inference "
                             "(trtexec's JSON).")
    patience: float = flag("--timeout", type=float, default=60, show_default=True, metavar="SECONDS", callback=_patience,
                           help="Give up if no inference ends for this long.")
    # fmt: on

    @property
    def settings(self) -> Settings:
        """The settings of a benchmark with these options."""
        counted = self.warm_up, self.iterations, self.duration, self.streams, self.threads
        how = not self.no_graph, not self.no_transfers, not self.no_spin
        return Settings(*counted, *how, self.sleep, self.idle, self.patience)

    @property
    def typed(self) -> list[str]:
        """The options of timed inferences that the command line contains, as typed."""
        return [*typed(*(f.name for f in fields(self))).values()]

    @property
    def targets(self) -> dict[str, str | None]:
        """Option -> the file that it writes, None where the option is not given."""
        return {"--exportTimes": self.times, "--exportOutput": self.output}

    @property
    def sources(self) -> list[str]:
        """The files that --loadInputs reads."""
        return [item.rpartition(":")[2] for item in self.inputs.split(",") if item]

    @property
    def results(self) -> list[str]:
        """The options on the command line that only a run can fulfil, as typed."""
        return [name for name in self.typed if name in ("--exportTimes", "--exportOutput", "--dumpOutput", "--loadInputs")]


# ---- inferences after a build


def is_timed(target: Device, skip: bool, wanted: Wanted, away: bool) -> bool:
    """Returns whether inferences are timed after the build, as by trtexec.

    `target`: the GPU that the engine is for; `skip`: --skipInference; `away`: this machine has no such GPU. If no inference is
    timed, it warns of options without effect, and raises UsageError for options that need a run.
    """
    if away:
        unused(wanted, f"this machine has no {target.title}", "gpu-runtime bench ENGINE times inferences on one")
    elif skip:
        unused(wanted, "--skipInference runs none", "leave it out")
    elif not target.measured:
        cure = "gpu-runtime run ENGINE gives outputs, gpu-runtime bench ENGINE times, with --predict predicted ones"
        unused(wanted, "none is run when times are predicted", cure, kept="")
    return target.measured and not skip and not away


def unused(wanted: Wanted, why: str, cure: str, kept: str = "--iterations") -> None:
    """Warns of options of timed inferences on the command line, which have no effect. Raises UsageError for options that need a
    run's results.

    `why`, `cure`: for the message; `kept`: an option that has an effect all the same, by default --iterations, which counts for
    measured profiles.
    """
    if wanted.results:
        raise click.UsageError(f"{', '.join(wanted.results)}: for timed inferences, but {why}: {cure}")
    if ignored := [name for name in wanted.typed if name != kept]:
        say(f"ignored: {', '.join(ignored)}: for timed inferences, but {why}: {cure}", err=True)


NOT_LOADED = ("engine_path", "save_pruned", "export_onnx", "model", "onnx")  # parameters that a build needs
# fmt: off
OF_LOADED = ("engine_to_load", "skip_inference", "device", "verbosity", "dump_layers", "dump_profile", "export_layers",
             "export_profile", "export_trace", "verbose", "fp16", "shapes")
# fmt: on


def check_loaded(wanted: Wanted, limited: bool) -> None:
    """Checks the options on a command line with --loadEngine.

    Raises UsageError for options that need a build: a model, a file to write, or, if `limited`, --memPoolSize with a limit of
    activations. Warns of other options of a build, which have no effect.
    """
    given_options = typed()
    if refused := [o for name, o in given_options.items() if name in NOT_LOADED or (name == "pools" and limited)]:
        raise click.UsageError(f"--loadEngine reads an engine and builds none: leave out {', '.join(refused)}")
    if ignored := [option for name, option in given_options.items() if name not in OF_LOADED and option not in wanted.typed]:
        say(f"ignored: {', '.join(ignored)}: --loadEngine builds nothing", err=True)


# ---- every option of trtexec

Verdict = Literal["accepted", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class TrtexecFlag:
    """An option of trtexec, and whether it is accepted, ignored or refused here.

    `sentence`: for an ignored option the reason; for a refused option the reason and the alternative, with {value} for its
    value; for an accepted option the difference from trtexec, "" without any.
    """

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
NO_LOW = "kernels compute in FP16 with FP32 accumulation, and in FP32 where values exceed FP16's range: leave it out"
NO_REFIT = "weights are packed into the engine: build it again, which is quick with the timing cache"
NO_PROFILES = "each run takes the profile that its inputs fit: leave it out; gpu-runtime inspect ENGINE shows all"
NO_TUNER = "give --builderOptimizationLevel=5, which times every tactic, or --exhaustive"
NO_VERSIONS = "an engine runs on one architecture and with the gpu_runtime that built it: build it again on the target"
NO_SAFE = "there is no safety runtime or restricted build: leave it out"
NO_DEBUG = "an engine keeps no debug tensors: Context.trace in Python returns the output of every layer"
NO_CAFFE = "models are read from ONNX only: export the network to ONNX and give --onnx=FILE"
NO_CALIBRATION = (
    "scales of INT8 come from the model's QuantizeLinear: quantize it with onnxruntime or ModelOpt; "
    "--calibration=FILE.npz gives inputs for FP16's range"
)
NO_BATCH = "the batch is part of the input's size: give --shapes=NAME:{value}x3x224x224 with the input's name and size"
NO_ACCURACY = "a build compares no outputs: gpu-runtime compare MODEL ENGINE compares them with onnxruntime, layer by layer"
ALWAYS_TIMED = "every tactic that may be the fastest is timed, until its times agree; --builderOptimizationLevel times fewer"
OWN_KERNELS = "all tactics are kernels of this package"
STATIC = "memory is placed when the engine is built"


def _rows(verdict: Verdict, sentence: str, names: str) -> Iterator[TrtexecFlag]:
    """Yields the options in `names`, which spaces separate, with one verdict and sentence; a name with = at its end takes a
    value.
    """
    for name in names.split():
        yield TrtexecFlag(name.removesuffix("="), name.endswith("="), verdict, sentence)


# fmt: off
TRTEXEC_FLAGS: tuple[TrtexecFlag, ...] = (
    *_rows("accepted", "", "--onnx= --saveEngine= --shapes= --minShapes= --optShapes= --maxShapes= --profile= "
           "--inputIOFormats= --outputIOFormats= --memPoolSize= --fp16 --sparsity= --timingCacheFile= --device= --verbose "
           "--builderOptimizationLevel= "
           "--profilingVerbosity= --dumpLayerInfo --dumpProfile --exportLayerInfo= --exportProfile= --loadEngine= "
           "--skipInference --buildOnly --help --noBuilderCache --errorOnTimingCacheMiss"),
    *_rows("accepted", "fp32 is obeyed or refused, by prefer too, and without --precisionConstraints; a name is a node's or an "
           "output's, with * for any characters",
           "--precisionConstraints= --layerPrecisions= --layerPrecision= --layerOutputTypes="),
    *_rows("accepted", LOOP, "--iterations= --warmUp= --duration= --sleepTime= --idleTime= --infStreams= --streams= --threads "
           "--noCudaGraph --noDataTransfers --noSpinWait --avgRuns= --percentile= --loadInputs= --dumpOutput --exportOutput= "
           "--exportTimes="),
    *_rows("accepted", AS_TIMED, "--separateProfileRun --useCudaGraph --useSpinWait --includeDataTransfers --exposeDMA"),
    *_rows("accepted", "no kernel computes in TF32", "--noTF32"),
    *_rows("accepted", "batches are explicit in ONNX", "--explicitBatch"),
    *_rows("ignored", "inputs and outputs are copied from and to pinned memory", "--useManagedMemory"),
    *_rows("ignored", "only inferences and layers are timed", "--timeDeserialize --timeRefit --asyncFileReader"),
    *_rows("ignored", "layers run on one stream", "--maxAuxStreams="),
    *_rows("ignored", ALWAYS_TIMED, "--avgTiming= --minTiming= --maxTactics= --heuristic"),
    *_rows("ignored", OWN_KERNELS, "--tacticSources= --preview= --tilingOptimizationLevel= --l2LimitForTiling="),
    *_rows("ignored", STATIC, "--allocationStrategy= --persistentCacheRatio= --monitorMemory"),
    *_rows("ignored", "kernels compute in FP16, those between QuantizeLinear and DequantizeLinear in INT8, too, where that is "
           "faster", "--best --stronglyTyped --explicitPrecision"),
    *_rows("ignored", "kernels and times are kept in the cache folder; --timingCacheFile=FILE keeps the times elsewhere",
           "--noCompilationCache --tempdir= --tempfileControls="),
    *_rows("ignored", "there is one runtime, and it is not stored in the engine", "--useRuntime= --leanDLLPath= "
           "--excludeLeanRuntime"),
    *_rows("ignored", "normalizations have kernels of their own", "--pi --pluginInstanceNorm --nativeInstanceNorm --ni"),
    *_rows("ignored", "kernels run on GPUs only", "--allowGPUFallback"),
    *_rows("ignored", "there are no plugins", "--ignoreParsedPluginLibs"),
    *_rows("ignored", "layers between QuantizeLinear and DequantizeLinear run in INT8 where that is faster; other layers have "
           "no scales: quantize the model first, docs/quantization.md", "--int8"),
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
SEEN = "gpu_runtime.trtexec_ignored"  # in the context's meta: (name, text as typed) of each option that is ignored
REPEATED = "gpu_runtime.repeated"  # in the context's meta: options of one value that were given several times
WRITES = ("--save", "--export", "--timingCacheFile")  # how options begin that name a file to write


class TrtexecCommand(click.Command):
    """A click command that also has the options of trtexec that it does not define, hidden: each is accepted, ignored with a
    message, or refused. An option with one dash in place of two gets an error of its own.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        own = {name for p in self.params for name in p.opts}
        self.params += [_option(flag) for flag in TRTEXEC_FLAGS if flag.name not in own and flag.name != "--help"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments as click does; notes profiles and repeated options in the context. Raises click's errors, with a
        proposal for an unknown option or value.
        """
        known = [name for p in self.params for name in p.opts]
        _check_dashes(args, known)
        args, ctx.meta[PROFILES] = options.profiles(["--ray=" if arg == "--ray" else arg for arg in args])
        try:
            _, _, order = self.make_parser(ctx).parse_args([*args])
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            raise click.NoSuchOption(e.option_name, possibilities=_offered(e.option_name, known), ctx=ctx) from None
        except click.BadOptionUsage as e:
            kinds = [p.type for p in self.params if e.option_name in p.opts and isinstance(p.type, click.Choice)]
            expected = "".join(f" Expected one of {', '.join(kind.choices)}" for kind in kinds)
            raise click.BadOptionUsage(e.option_name, f"{e.message}{expected}", ctx) from None
        ctx.meta[REPEATED] = [p.opts[0] for p, n in Counter(order).items() if n > 1 and _keeps_last(p)]
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Prints the ignored options, in one line for each reason, then runs the command."""
        reasons = grouped((BY_NAME[name].sentence, text) for name, text in ctx.meta.get(SEEN, ()))
        if repeated := ctx.meta[REPEATED]:
            reasons["each is given more than once"] = [f"all but the last {option}" for option in repeated]
        for sentence, texts in reasons.items():
            say(f"ignored: {', '.join(texts)}: {sentence}", err=True)
        return super().invoke(ctx)


class OfEngine(click.Command):
    """A click command that reads an engine; an option of trtexec that it does not define raises UsageError with the reason."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            if (flag := BY_NAME.get(e.option_name)) is None:
                raise
            text = flag.sentence.format(value="N") or "an option of builds: an engine runs as it was built"
            raise click.UsageError(f"{flag.name}: {text}", ctx) from None


def _keeps_last(p: click.Parameter) -> bool:
    """Returns whether a parameter is an option with one value; of several values on the command line the last counts."""
    return isinstance(p, click.Option) and not p.multiple and not p.is_flag


def _option(flag: TrtexecFlag) -> click.Option:
    """Returns the hidden click option that accepts, ignores or refuses this option of trtexec; it may be given several
    times.
    """

    def met(ctx: click.Context, _: click.Parameter, given: Any) -> None:
        texts = [f"{flag.name}={value}" for value in given] if flag.takes_value else [flag.name] if given else []
        if texts and flag.verdict == "refused":
            value = given[-1] if flag.takes_value else ""
            raise click.UsageError(f"{texts[-1]}: {flag.sentence.format(value=value)}", ctx)
        if flag.verdict == "ignored":
            ctx.meta.setdefault(SEEN, []).extend((flag.name, text) for text in texts)

    shape: dict[str, Any] = {"multiple": True} if flag.takes_value else {"is_flag": True}
    refused = flag.verdict == "refused"  # an error that precedes all other errors
    name = flag.name.strip("-").lower()
    return click.Option(
        [flag.name, f"trtexec_{name}"], hidden=True, expose_value=False, is_eager=refused, callback=met, **shape
    )


def _check_dashes(args: Iterable[str], known: Iterable[str]) -> None:
    """Raises UsageError for an option with one dash in place of two: click would read -onnx=FILE as -o with the file nnx=FILE.
    `known`: the names of all options.
    """
    long = {name for name in known if name.startswith("--")}
    for arg in args:
        found = re.match(r"-([A-Za-z][A-Za-z0-9-]+)(?==|$)", arg)
        if found and f"--{found[1]}" in long:
            raise click.UsageError(f"{arg}: expected two dashes before a name: -{arg}")


def _offered(typed: str, known: Iterable[str]) -> list[str]:
    """Returns the option to propose for the unknown option `typed`: of the accepted ones, the most similar name; else [].

    `known`: the names of all options. An option that writes a file is proposed only if its first six characters are typed, as
    in --saveEngin.
    """
    own = [name for name in known if name not in BY_NAME or BY_NAME[name].verdict == "accepted"]
    return difflib.get_close_matches(typed, [name for name in own if not name.startswith(WRITES) or name[:6] == typed[:6]], 1)
