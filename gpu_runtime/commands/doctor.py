"""`gpu-runtime doctor`: the correctness and speed of this machine's GPU."""

import click

from cuda_kernels import device as devices
from gpu_runtime.commands.console import INTERRUPTED, answer, end_now, json_bytes, not_passed
from gpu_runtime.commands.progress import listening
from gpu_runtime.commands.targets import check_targets, write_all, written
from gpu_runtime.doctor import examine, wording
from tactics.kernels import KERNELS


@click.command("doctor")
@click.option("--emulate", metavar="DEVICE", help="Run a few cases of each family for this named GPU in the CPU emulator.")
@click.option("--kernels", default="", metavar="NAMES", help="Only these families, with commas: conv_dense,move.")
@click.option(
    "--time-limit",
    "limit_s",
    type=click.IntRange(1, 3600),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Stop after this time; report the kernels not examined by then as untested.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document for a bug report, without names of folders.")
@click.option("--output", type=click.Path(), metavar="FILE", help="Write the JSON document to this file.")
def doctor_command(emulate: str | None, kernels: str, limit_s: int, as_json: bool, output: str | None) -> None:
    """Examine this machine: driver, versions, graphs and dependent launches. Compare the results of each family of kernels on
    small problems, with every tile for the GPU, with the reference, and clocks, bandwidth and launch time with the tables.

    Exits with 5 unless all was tested and is right; rates, which other work changes, do not count. The kernels that failed on a
    GPU are recorded in the cache folder, and plans exclude them.
    """
    paths = check_targets({"--output": output}, [])
    names = [name.strip() for name in kernels.split(",") if name.strip()]
    if unknown := [name for name in names if name not in KERNELS]:
        raise click.UsageError(f"--kernels: unknown family {unknown[0]!r}: expected some of {', '.join(KERNELS)}")
    try:
        planned = devices.named(emulate or devices.DEFAULT_DEVICE)
    except ValueError as e:
        raise click.UsageError(f"--emulate: {e}") from None
    progress = listening()
    try:
        found = examine.examine(planned, emulated=bool(emulate), kernels=names, limit_s=limit_s, progress=progress)
    except KeyboardInterrupt:
        progress.end()
        end_now(INTERRUPTED, f"interrupted: {written()}; no verdict")  # an orderly end waits for threads that compile
    progress.end()
    data = wording.data(found)
    write_all({path: json_bytes(data) for path in paths.values()})
    answer(as_json, lambda: data, lambda: wording.text(found))
    if not found.well:
        not_passed()
