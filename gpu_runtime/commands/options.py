"""The options that several commands have, records of options, and parsers of options' texts: sizes, pools, NAME=VALUE.

A parser raises click's UsageError, with the form that it expects, for a wrong text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cuda_kernels import device as devices
from gpu_runtime import installed_version
from gpu_runtime.commands.console import QUIET, json_bytes

if TYPE_CHECKING:
    from gpu_runtime.engine import Engine


def given(decorator: Callable[..., Any]) -> Any:
    """Returns a field of a record of options for an option that this decorator of click's defines."""
    return field(metadata={"click": lambda _, **__: decorator})


def argument(**settings: Any) -> Any:
    """Returns a field of a record of options for an argument, a file without an option's name before it. `settings`: as for
    click.argument.
    """
    return field(metadata={"click": partial(click.argument, type=click.Path(), **settings)})


def flag(*names: str, **settings: Any) -> Any:
    """Returns a field of a record of options for a click option. `names`, `settings`: as for click.option."""
    return field(metadata={"click": partial(click.option, *names, **settings)})


def part(record: type, **settings: Any) -> Any:
    """Returns a field of a record of options that holds another `record` of options. `settings`: of click.option, for each of
    them.
    """
    return field(metadata={"part": record, "settings": settings})


def gathered(record: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator for a command whose arguments and options are the fields of `record`, a class of `argument`, `flag`,
    `given` and `part`; the command is called with one argument, the filled record.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def called(**values: Any) -> Any:
            return command(_filled(record, values))

        return _decorated(record, called)

    return decorate


def _decorated(record: type, command: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Returns the command with the fields of `record`, and of records within it, as its click parameters, in their order."""
    for one in reversed(fields(record)):
        if inner := one.metadata.get("part"):
            command = _decorated(inner, command, **one.metadata["settings"])
        else:
            command = one.metadata["click"](one.name, **settings)(command)
    return command


def _filled(record: type, values: Mapping[str, Any]) -> Any:
    """Returns an instance of `record`, with the records within it, from the values of click's parameters by name."""
    parts = ((one.name, one.metadata.get("part")) for one in fields(record))
    return record(**{name: _filled(inner, values) if inner else values[name] for name, inner in parts})


def typed(*names: str) -> dict[str, str]:
    """Returns parameter -> the option or argument as users type it, for each parameter that the command line contains.

    `names`: the parameters to look for; without names all.
    """
    context = click.get_current_context()
    return {
        p.name: p.human_readable_name if isinstance(p, click.Argument) else p.opts[0]
        for p in context.command.params
        if p.name and p.expose_value and (not names or p.name in names)
        if context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    }


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
cubins_option = click.option("--allow-cubins", is_flag=True, help="Accept machine code inside the engine file.")
emulate_option = click.option("--emulate", is_flag=True, help="Run in the emulator even where there is a GPU.")
sizes_option = click.option(
    "--shapes", default="", metavar="SIZES", help="Sizes of dynamic inputs: input:1x3x224x224[,other:...]."
)
risk_option = click.option(
    "--risk",
    type=click.FloatRange(0.5, 1, max_open=True),
    default=0.6,
    show_default=True,
    help="With predicted times: choose a sparse kernel only if it is faster with at least this probability.",
)


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}  # click's context_settings


def _say_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"{ctx.find_root().info_name} {installed_version()}")
        ctx.exit()


version_option = click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_say_version, help="Show the version and exit."
)


def _be_quiet(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        QUIET.set()


quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_be_quiet,
    help="Print errors and warnings only: the result is in the files and the exit code.",
)


def labels_option(arrays: str) -> Any:
    """Returns the decorator for --labels. `arrays`: the option of the .npz file that may contain the labels."""
    return click.option(
        "--labels",
        metavar="NAME|FILE.npy",
        help=f"The class of each sample, for accuracy: an array in the file of {arrays}, or a file of its own.",
    )


def parse_shapes(text: str, option: str = "--shapes") -> dict[str, tuple[int, ...]]:
    """Returns the shapes in a text, by input. `option`: for messages. Raises UsageError.

    >>> parse_shapes("x:1x3x224x224,y:1x10")
    {'x': (1, 3, 224, 224), 'y': (1, 10)}
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for item in text.split(",") if text else ():
        name, _, dims = item.rpartition(":")
        name = name.strip("'\" ")
        if not name or not re.fullmatch(r"[1-9][0-9]{0,18}(x[1-9][0-9]{0,18})*", dims.strip().lower()):
            least = "; sizes are at least 1" if name and re.fullmatch(r"-?\d+(x-?\d+)*", dims) else ""
            got = f"{item!r}{least}" if name or len(text) > 100 else f"{text!r}"
            raise click.UsageError(f"{option}: expected name:1x3x224x224 (several with commas), got {got}")
        shape = tuple(map(int, dims.lower().split("x")))
        if shapes.setdefault(name, shape) != shape:
            raise click.UsageError(f"{option}: two sizes for input {name!r}: give one, since sizes are fixed in an engine")
    return shapes


SIZES = ("--shapes", "--minShapes", "--optShapes", "--maxShapes")


def profiles(args: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Returns (a command's arguments without --profile=N and the sizes behind it, for each N in order these sizes as
    {option: text}).

    --profile is an option of trtexec. Raises UsageError for other numbers than 0, 1, ..., each once, or sizes before the first.

    >>> profiles(["m.onnx", "--profile=0", "--shapes=x:1x8", "--fp16", "--profile=1", "--shapes", "x:1x9"])
    (['m.onnx', '--fp16'], [{'--shapes': 'x:1x8'}, {'--shapes': 'x:1x9'}])
    """
    rest: list[str] = []
    found: dict[int, dict[str, str]] = {}
    current: dict[str, str] | None = None
    left = iter(args)
    for arg in left:
        name, equals, value = arg.partition("=")
        if name == "--profile":
            number = value if equals else next(left, "")
            if not re.fullmatch(r"[0-9]{1,2}", number) or int(number) in found:
                raise click.UsageError(f"--profile: expected a number of its own for each profile, from 0 on, got {number!r}")
            current = found[int(number)] = {}
        elif current is not None and name in SIZES:
            current[name] = value if equals else next(left, "")
        else:
            rest.append(arg)
    if found and sorted(found) != list(range(len(found))):
        raise click.UsageError(f"--profile: expected the numbers 0 to {len(found) - 1}, got {', '.join(map(str, found))}")
    if found and any(arg.partition("=")[0] in SIZES for arg in rest):
        raise click.UsageError(f"{', '.join(SIZES)}: expected behind the --profile=N that they belong to")
    return rest, [found[number] for number in sorted(found)]


def shapes_of(texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns the argument `shapes` of `build` for the texts of --shapes, and of trtexec's --minShapes, --optShapes and
    --maxShapes.

    `texts`: option -> its text. The result is input -> its shape, or (smallest, shown, largest) for a range of batches.
    --optShapes without the other two means --shapes, as in trtexec. Raises UsageError if only some of the three are given.

    >>> shapes_of({"--minShapes": "x:1x8", "--optShapes": "x:4x8", "--maxShapes": "x:9x8"})
    {'x': ((1, 8), (4, 8), (9, 8))}
    """
    exact, low, opt, high = (parse_shapes(texts.get(option, ""), option) for option in SIZES)
    found: dict[str, Any] = {}
    for name in dict.fromkeys((*exact, *low, *opt, *high)):
        three = [sizes[name] for sizes in (low, opt, high) if name in sizes]
        given = {*three, *([exact[name]] if name in exact else [])}
        if len(given) > 1 and (len(three) < 3 or name in exact):
            typed = [option for option, sizes in zip(SIZES, (exact, low, opt, high), strict=True) if name in sizes]
            text = "expected --minShapes, --optShapes and --maxShapes for a range of batches, or --shapes for one size"
            raise click.UsageError(f"input {name!r}: {text}, got {', '.join(typed)}")
        found[name] = tuple(three) if len(given) > 1 else given.pop()
    return found


shown_at = click.option(
    "--shapes",
    "shown",
    default="",
    metavar="SIZES|BATCH",
    help="Of an engine for several sizes: the plan for these inputs, x:8x3x224x224, or for this batch. Default: --optShapes.",
)


def sizes_of(text: str) -> int | dict[str, tuple[int, ...]]:
    """Returns the value of --shapes as Engine.at takes it: a batch for a number, else shapes by input. Raises UsageError.

    >>> sizes_of("8"), sizes_of("x:8x10")
    (8, {'x': (8, 10)})
    """
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) else parse_shapes(text)


def parse_pools(texts: Iterable[str]) -> dict[str, int]:
    """Returns pool -> its limit in bytes, as `build` takes it, from the values of --memPoolSize; numbers without a unit are
    MiB. Raises UsageError.

    >>> parse_pools(["activations:1.5G,workspace:512K"]), parse_pools(["workspace:64"])
    ({'activations': 1610612736, 'workspace': 524288}, {'workspace': 67108864})
    """
    pools: dict[str, int] = {}
    for text in (part for given in texts if given for part in given.split(",")):
        found = re.fullmatch(r"(workspace|activations):([0-9]{1,19}(?:\.[0-9]{1,19})?)(B|K|M|G)?(?:i?B)?", text, re.I)
        if not found:
            raise click.UsageError(
                "--memPoolSize: expected workspace:MIB or activations:MIB, as workspace:512K or activations:64, got "
                f"{text!r}; other pools do not exist here"
            )
        if (name := found[1].lower()) in pools:
            raise click.UsageError(f"--memPoolSize: {name} is given twice")
        pools[name] = int(float(found[2]) * {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[(found[3] or "M").upper()])
    return pools


# Option -> (type that it takes -> value of `build`'s argument `precisions`).
PRECISIONS = {
    "--layerPrecisions": {"fp32": "fp32", "fp16": "fp16"},
    "--layerOutputTypes": {"fp32": "fp32_output", "fp16": "fp16"},
}


def parse_precisions(texts: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the argument `precisions` of `build`, by node, for the text of each option. Raises UsageError.

    If a node is fp32 in both options, --layerPrecisions counts.

    >>> parse_precisions({"--layerPrecisions": "conv1:fp32", "--layerOutputTypes": "conv1:fp32,fc:fp32"})
    {'conv1': 'fp32', 'fc': 'fp32_output'}
    """
    found: dict[str, str] = {}
    for option, text in texts.items():
        for part in text.split(",") if text is not None else ():
            name, _, given = part.rpartition(":")
            if not name or given not in PRECISIONS[option]:
                types = " or ".join(PRECISIONS[option])
                raise click.UsageError(
                    f"{option}: expected NAME:TYPE[,NAME:TYPE...], TYPE {types}, got {part!r}; kernels compute in FP16 with "
                    "FP32 sums, or in FP32"
                )
            if found.get(name) != "fp32":
                found[name] = PRECISIONS[option][given]
    return found


def checked_device(name: str | None, *others: str) -> str | None:
    """Returns the name of a GPU as tables have it; None for None, and `name` if it is among `others`. Raises UsageError for the
    name of no known GPU.
    """
    try:
        return name if name is None or name in others else devices.named(name).name
    except ValueError as e:
        raise click.UsageError(f"--device: {e}") from None


def named(
    option: str, items: Iterable[str], expected: str, split: Callable[[str, str], tuple[str, str, str]]
) -> dict[str, str]:
    """Parses the values NAME=VALUE of an option into {NAME: VALUE}. Raises UsageError.

    `expected`: the form of a value, for messages; `split`: str.partition if VALUE may contain an equals sign, str.rpartition if
    NAME may.
    """
    found: dict[str, str] = {}
    for item in items:
        name, _, value = split(item, "=")
        if not name or not value:
            raise click.UsageError(f"{option}: expected {expected}, got {item!r}")
        if name in found:
            raise click.UsageError(f"{option}: {name!r} is given twice, as {found[name]} and as {value}")
        found[name] = value
    return found


# ---- files for viewers of other formats, which `build` and `inspect` write

TRACE, ONNX = "--exportTrace", "--exportOnnx"


trace_option = click.option(
    TRACE,
    "export_trace",
    type=click.Path(),
    help="Write the launches on a timeline (Chrome's trace format, for ui.perfetto.dev).",
)
onnx_option = click.option(
    ONNX,
    "export_onnx",
    type=click.Path(),
    help="Write the model with each layer's tactic, formats, time and verdict at its nodes (for Netron).",
)


def exported(
    engine: Engine, model: str | None, times: Sequence[Sequence[float]] | None = None, verbosity: str = "detailed"
) -> dict[str, Callable[[], bytes]]:
    """Returns option -> a function that returns the bytes of its file, for options that describe an engine's layers.

    `model`: the ONNX file that the engine was built from; `times[iteration][layer]`: measured times in microseconds, None for
    the plan's own times; `verbosity`: the value of --profilingVerbosity.
    """
    from gpu_runtime.explain import layer_info
    from gpu_runtime.report import notes

    record = engine.record
    return {
        "--exportProfile": lambda: json_bytes(layer_info.profile(record, times)),
        "--exportLayerInfo": lambda: json_bytes(layer_info.limited(engine.layer_info(), verbosity)),
        TRACE: lambda: json_bytes(notes.trace(record, times)),
        ONNX: lambda: notes.annotated(record, model or ""),
    }
