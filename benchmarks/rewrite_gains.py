"""The networks in which each rewrite fires, and its gain: each plan beside the plan without that rewrite.

    python -m benchmarks.rewrite_gains [--device h200] [--sparsity enable] [--fires] NAME[:shape] ...
    python -m benchmarks.rewrite_gains --table

Writes benchmarks/rewrite_gains.json, where other networks stay. Of each network: the predicted time of the plan
with all rewrites, and for each rewrite that changes the network how many ops it changes, and by how many percent the plan
without it takes longer; or why the network cannot be built without it. A rewrite that is not listed changes nothing. `--fires`
plans nothing, and looks only at rewrites of a Network. NAME: as benchmarks.bench_plan has it; "all": the networks of
benchmarks.plan_records. `--table` prints a line of the file for each rewrite.
"""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click

from benchmarks.bench_plan import find
from benchmarks.plan_records import by_line, everything
from cuda_kernels.device import named
from gpu_runtime.building.fit import fit
from gpu_runtime.building.load import lowered
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.building.planner import Planner
from gpu_runtime.building.target import make_timer
from gpu_runtime.errors import ModelError
from gpu_runtime.frontend import importer
from gpu_runtime.network import Network
from gpu_runtime.planning import io_formats
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.progress import ignore
from gpu_runtime.runtime.findings import Sparsity

RESULTS = Path(__file__).with_suffix(".json")


def same(given: Any, *_: object, **__: object) -> Any:
    """Returns its argument: stands in place of a rewrite that returns another form, or changes a model in place."""
    return given


# fmt: off
# Rewrites of a Network: name -> (module, function that is replaced).
OFFERS = {
    "attention": "offer", "blocks": "offer", "channels": "offer", "upsampling": "offer", "shared_concats": "share",
    "siblings": "merge", "pieces": "offer", "squeeze_excite": "offer", "back_to_back": "offer", "chained": "offer",
    "norms": "offer", "windows": "offer", "transposed": "offer",
}
WITHOUT: dict[str, tuple[str, str, Callable[..., Any]]] = {
    **{name: (f"gpu_runtime.rewrites.{name}", function, same) for name, function in OFFERS.items()},
    "gates": ("gpu_runtime.rewrites.squeeze_excite", "gates", same),
    "scaled": ("gpu_runtime.rewrites.squeeze_excite", "scaled", same),
    "padded_channels": ("gpu_runtime.padded_channels.padding", "offer", same),
    "padded_channels sums": ("gpu_runtime.padded_channels.padding", "summed", same),
}
# Rewrites of an ONNX graph, and of the network while it is lowered and fused.
IMPORTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "pads_into_windows": ("gpu_runtime.frontend.normalize", "pads_into_windows", same),
    "softmax_where_it_lies": ("gpu_runtime.frontend.normalize", "softmax_where_it_lies", same),
    "channels_first": ("gpu_runtime.frontend.channels_first", "products", same),
    "split_attention": ("gpu_runtime.frontend.split_attention", "of_two", same),
    "branches": ("gpu_runtime.fusion.branches", "offer", same),
    "concats": ("gpu_runtime.fusion.concats", "into_convolutions", same),
    "prologues": ("gpu_runtime.fusion.prologues", "offer", same),
    "depth to space": ("gpu_runtime.fusion.convolutions", "with_depth_to_space", same),
    "affine behind": ("gpu_runtime.fusion.convolutions", "with_affine", same),
    "second activation": ("gpu_runtime.fusion.convolutions", "with_last", same),
    "max pool": ("gpu_runtime.fusion.epilogues", "_pool_after", lambda conv, chains: None),
    "spelled functions": ("gpu_runtime.fusion.chains", "spelled", lambda y: None),
    "norms in nodes": ("gpu_runtime.lowering.lower", "normalization_at", lambda node: None),
    "group norms in nodes": ("gpu_runtime.lowering.lower", "group_normalization_at", lambda node: None),
    "shuffles in nodes": ("gpu_runtime.lowering.lower", "shuffle_at", lambda node: None),
    "moves once": ("gpu_runtime.fusion.moves", "once", same),
    "windows of windows": ("gpu_runtime.fusion.moves", "windows", same),
}
# fmt: on


def fitted(path: Path, shapes: Any, prune: bool = False) -> Network:
    """Returns the network of a model, lowered and fitted to FP16's range, before rewrites. `prune`: its weights become 2:4."""
    loaded = importer.load(path, prune=prune)
    return fit(loaded, lowered(loaded, shapes), None, ignore)[0]


def planner_of(network: Network, device: str, sparsity: Sparsity = "disable") -> Planner:
    """Returns a planner with predicted times; inputs and outputs are linear."""
    ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
    return Planner(named(device), make_timer(named(device)), BuildOptions(sparsity=sparsity), ends)


def gains(path: Path, shapes: Any, device: str, sparsity: Sparsity, fires: bool = False) -> dict[str, Any]:
    """Returns the row of one network; `fires`: without plans."""

    def total(network: Network) -> float:
        return planner_of(network, device, sparsity)(network)[1].total_ps / 1e6

    read = partial(fitted, path, shapes, sparsity == "force")
    plain = read()
    whole = alternatives(plain)
    us = 0.0 if fires else total(whole)
    rows: dict[str, Any] = {}
    for name, (module, function, instead) in (WITHOUT if fires else WITHOUT | IMPORTS).items():
        try:
            with mock.patch(f"{module}.{function}", instead):
                other = alternatives(plain if name in WITHOUT else read())
            if changed := _different(whole, other):
                rows[name] = {"ops": changed} | ({} if fires else {"gain_percent": round(100 * (total(other) / us - 1), 2)})
        except ModelError as e:
            rows[name] = {"ops": 0, "needed": str(e).splitlines()[-1].strip()}
    return {"rewrites": rows} if fires else {"total_us": round(us, 2), "rewrites": rows}


def _different(network: Network, other: Network) -> int:
    """Returns the number of ops that only one of the two networks has, of the network with more of them."""
    ops = [{(op.name, op.problem, op.inputs, op.output, op.when) for op in each.ops} for each in (network, other)]
    return max(len(ops[0] - ops[1]), len(ops[1] - ops[0]))


def known(path: Path, asked: dict[str, str]) -> dict[str, Any]:
    """Returns network -> row of a file that `keep` wrote; {} without a file. Raises UsageError for other plans than `asked`."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {**asked, "networks": {}}
    if any(found[option] != value for option, value in asked.items()):
        raise click.UsageError(f"{path} has plans for {found['device']}, {found['sparsity']}: give another --out")
    return dict(found["networks"])


def keep(path: Path, networks: dict[str, Any], device: str, sparsity: str) -> None:
    head = f'"device": "{device}", "sparsity": "{sparsity}", "times": "predicted"'
    path.write_text(f'{{{head},\n"networks": {by_line(networks)}}}\n')


def table(networks: dict[str, Any]) -> Iterator[str]:
    """Yields a line per rewrite: the number of networks in which it fires, and its largest gains in percent."""
    for name in (*WITHOUT, *IMPORTS):
        rows = {network: row["rewrites"][name] for network, row in networks.items() if name in row["rewrites"]}
        found = {network: row["gain_percent"] for network, row in rows.items() if "gain_percent" in row}
        most = sorted(found, key=found.__getitem__, reverse=True)[:3]
        told = [f"{network} {found[network]:.2f}" for network in most]
        told += [f"{network} needs it" for network, row in rows.items() if "needed" in row]
        yield f"| {name} | {len(rows)} | {len(found)} | {', '.join(told)} |"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--device", default="h200", show_default=True)
@click.option("--sparsity", type=click.Choice(["disable", "enable", "force"]), default="enable", show_default=True)
@click.option("--fires", is_flag=True, help="Plan nothing: only which rewrites change the network.")
@click.option("--table", "only_table", is_flag=True, help="Print what the file says of each rewrite.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(names: Sequence[str], device: str, sparsity: Sparsity, fires: bool, only_table: bool, out: Path) -> None:
    networks = known(out, {} if only_table else {"device": device, "sparsity": sparsity})
    for name in () if only_table else everything() if names == ("all",) else names:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            networks[name] = gains(*find(name, Path(folder)), device, sparsity, fires)
        keep(out, networks, device, sparsity)
        click.echo(f"{name}: {networks[name]}", err=True)
    click.echo("| rewrite | fires in | planned without it | gains most there, % |\n| --- | --- | --- | --- |")
    click.echo("\n".join(table(networks)))


if __name__ == "__main__":
    main()
