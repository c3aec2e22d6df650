"""`gpu-runtime plan MODEL --devices=NAMES`: the plans of one model for several GPUs, and for several batches."""

from dataclasses import dataclass

import click

from cuda_kernels import device
from gpu_runtime.commands.console import answer, say
from gpu_runtime.commands.options import argument, flag, gathered, given, json_option, parse_shapes, risk_option, sizes_option
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.targets import check_targets, write_all
from gpu_runtime.pipeline import plan


@dataclass(frozen=True, slots=True)
class Asked:
    """The argument and options of plan."""

    model: str = argument()
    devices: str = flag(
        "--devices",
        required=True,
        metavar="NAMES",
        help=f"Names with commas, as l4,rtx4090 or as nvidia-smi prints them: {', '.join(device.NAMED)}.",
    )
    batches: str | None = flag(
        "--batches", metavar="NUMBERS", help="Batches with commas, such as 1,8,32,128: a row for each, times per image."
    )
    sparsity: str = flag("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="enable", show_default=True)
    shapes: str = given(sizes_option)
    risk: float = given(risk_option)
    report: str | None = flag(
        "--report", type=click.Path(), metavar="FILE.html", help="With --batches: also draw the table as a page."
    )
    as_json: bool = given(json_option)


@click.command("plan")
@gathered(Asked)
def plan_command(asked: Asked) -> None:
    """Plan MODEL for several GPUs with predicted times: which layers run sparse where, and why they differ. With --batches,
    plan it for several batches on each, and compare the time of an image with a library's."""
    sizes, counts, report = parse_shapes(asked.shapes), parse_batches(asked.batches), asked.report
    if report and not counts:
        raise click.UsageError("--report needs --batches=NUMBERS: `gpu-runtime report` draws the plan of an engine")
    if counts and any(shape[0] not in counts for shape in sizes.values()):
        say("ignored: the batch in --shapes: --batches gives the batches", err=True)
    paths = check_targets({"--report": report}, [asked.model])
    progress = listening()
    names = [name.strip() for name in asked.devices.split(",")]
    try:
        names = [device.named(name).name for name in names]
    except ValueError as e:
        raise click.UsageError(f"--devices: {e}") from None
    plans = plan(asked.model, names, batches=counts, sparsity=asked.sparsity, shapes=sizes, risk=asked.risk, progress=progress)
    progress.end()
    if report:
        write_all({paths["--report"]: plans.page()})
    answer(asked.as_json, plans.to_dict, plans.__str__)
    if report:
        say(f"Wrote {report} (--report)", err=asked.as_json)


def parse_batches(text: str | None) -> tuple[int, ...]:
    """Returns the batches in the value of --batches, each once, in their order; () for None. Raises UsageError for other texts
    than whole numbers from 1 on with commas.
    """
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if bad := [word for word in words if not (word.isascii() and word.isdecimal() and 0 < int(word) < 2**31)]:
        raise click.UsageError(f"--batches: expected whole numbers of at least 1 with commas between them, got {bad[0]!r}")
    return tuple(dict.fromkeys(map(int, words)))
