"""Digests of each network as it is lowered, and with the alternatives of all rewrites: a change of form must leave them equal.

    python -m benchmarks.network_records [--write] [--jobs 2] [NAME ...]
    python -m benchmarks.network_records --lines NAME      all lines that the digests are of, to compare two versions

Planning sees a Network and nothing else, so equal digests mean equal plans, in a minute instead of the ten of plan_records. A
line is an op with a digest of each of its weights, or the network's groups, tensors, types or ends. `lowered`: the network as
it comes; `alternatives`: with all options. Records: tests/golden/networks.json. Names are those of benchmarks.plan_records;
weights that are products of others depend on NumPy's BLAS as there.
"""

import hashlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from benchmarks.bench_plan import find
from benchmarks.plan_records import digest, held
from gpu_runtime.building.load import load, lowered
from gpu_runtime.frontend.files.source import source_of
from gpu_runtime.network import Network, Op
from gpu_runtime.planning.alternatives import alternatives

RECORDS = Path(__file__).parents[1] / "tests" / "golden" / "networks.json"


def lines(network: Network) -> Iterator[str]:
    """Yields a line for each op, then lines for the network's groups, tensors, types and ends."""
    seen: dict[int, tuple[np.ndarray, str]] = {}  # an array that several ops share is hashed once
    for op in network.ops:
        yield _line(op, seen)
    yield f"groups {network.groups}"
    yield f"tensors {sorted(network.tensors.items())}"
    fixed = [(name, str(network.formats(name)[0])) for name, of in network.types.items() if of.fixed]
    wide = [name for name, of in network.types.items() if of.copies]
    yield f"formats {sorted(fixed)}"
    yield f"types wide {sorted(wide)} reads {sorted(network.exact_outputs)}"
    yield f"ends {network.inputs} {network.outputs}"


def _line(op: Op, seen: dict[int, tuple[np.ndarray, str]]) -> str:
    weights = []
    for name, array in sorted(op.weights.items()):
        if id(array) not in seen:
            data = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]
            seen[id(array)] = array, f"{data} {array.dtype}{array.shape}"
        weights.append(f"{name}={seen[id(array)][1]}")
    facts = op.problem, op.inputs, op.output, op.nodes, op.when, op.layer, op.layers, op.branches, op.batch_pieces, op.images
    return " | ".join([op.name, *map(str, facts), *weights])


def networks(name: str) -> dict[str, Network]:
    """Returns {"lowered": the network as it is lowered, "alternatives": with all options}."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        path, shapes = find(name, Path(folder))
        loaded, (sizes,) = load(source_of(path), lambda model: [shapes], False)
        plain = lowered(loaded, sizes)
        return {"lowered": plain, "alternatives": alternatives(plain)}


def found(name: str) -> dict[str, dict[str, object]]:
    """Returns a form's name -> the number of ops and the digest of that form of the network."""
    facts: dict[str, object] = {}
    for form, network in networks(name).items():
        facts |= {form: digest(lines(network)), f"{form} ops": len(network.ops)}
    return {name: facts}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--write", is_flag=True, help="Take what is found as the record.")
@click.option("--jobs", default=2, show_default=True, help="Networks at a time.")
@click.option("--lines", "shown", is_flag=True, help="Print the lines of these networks instead.")
def main(names: tuple[str, ...], write: bool, jobs: int, shown: bool) -> None:
    if shown:
        for name in names:
            for form, network in networks(name).items():
                click.echo(f"==== {name} {form}")
                click.echo("\n".join(lines(network)))
    elif held(RECORDS, found, names, write, jobs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
