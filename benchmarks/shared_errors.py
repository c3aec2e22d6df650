"""How much of the errors of estimates is one error for all kernels of a device, by published times and simulated loops.

    python -m benchmarks.shared_errors

The first table: log errors (predicted over published) in groups of one device and one bound of kernels. `shared`: the deviation
of an error that all of a group have in common, around 0; `own`: of the errors left in a group; both by the analysis of variance
with random effects. `share`: the shared part of the variance, which SHARED in tactics/predict.py rests on, and its value if one
of the devices is left out.

The second: how often the published sum of 5 or 10 rows of one device, drawn at random, lies within the 80 % range that such a
share gives, with the errors that tactics/predict.py has for single rows.

The third: of our own loops, how the simulated gain of 2:4 goes together for pairs of tiles over the points of the sweep
(benchmarks/sass/found.json).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from pathlib import Path
from statistics import NormalDist

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.bench_predictions import by_device, judge, log_errors
from benchmarks.published_rows import FOLDER, Row, read
from tactics.planner.grouping import grouped
from tactics.predict import PUBLISHED, RANGE, REGIMES, SHARED

Floats = NDArray[np.float64]
Group = tuple[str, str]  # (device, bound of a kernel on it)
FOUND = Path(__file__).parent / "sass" / "found.json"
KINDS = {
    "layer": "layers of networks, with what products fitted",
    "gemm": "dense products, on the devices that they fitted",
    "pair": "gains of 2:4, on the devices that they fitted",
}
DRAWS, SUMMED = 2000, (5, 10)
REACH = NormalDist().inv_cdf((1 + RANGE) / 2)  # standard deviations to each side


def errors(kind: str, rows: Iterable[Row]) -> dict[Group, Floats]:
    """Returns group -> log errors of times, or of the gains of pairs."""
    found = grouped(((device, bound), e) for device, bound, e in log_errors(kind, rows))
    return {group: np.array(e) for group, e in found.items()}


def parts(groups: Mapping[Group, Floats]) -> tuple[float, float]:
    """Returns the variances (of the error that the rows of a group have in common, around 0; of each row's own error)."""
    several = [e for e in groups.values() if len(e) > 1]
    rows = sum(map(len, several))
    own = sum(float(((e - e.mean()) ** 2).sum()) for e in several) / (rows - len(several))
    between = sum(len(e) * float(e.mean()) ** 2 for e in several) / len(several)
    return max(0.0, (between - own) * len(several) / rows), own


def share(groups: Mapping[Group, Floats]) -> float:
    shared, own = parts(groups)
    return shared / (shared + own)


def left_out(groups: Mapping[Group, Floats]) -> list[float]:
    """Returns the share if one of the devices is left out, for each of them."""
    return [share({g: e for g, e in groups.items() if g[0] != device}) for device in {device for device, _ in groups}]


def variance(errors: Floats, bounds: NDArray[np.str_], shared: float) -> float:
    """Returns the variance of a sum of terms with these errors; terms with the same bound share a part of it."""
    groups = [errors[bounds == name] for name in REGIMES]
    return sum(shared * float(e.sum()) ** 2 + (1 - shared) * float((e**2).sum()) for e in groups)


def held(rows: Iterable[Row], kind: str, count: int, shared: float) -> float:
    """Returns how often the sum of `count` published times lies in its range, in the mean over devices."""
    shares = []
    for some in by_device(rows, kind).values():
        found, rng = judge(some), np.random.default_rng(0)
        error = found.us * [PUBLISHED[str(b)] for b in found.bound]
        drawn = [rng.choice(len(some), min(count, len(some)), replace=False) for _ in range(DRAWS)]
        off = (abs(found.us[i].sum() - found.published[i].sum()) for i in drawn)
        reach = (REACH * math.sqrt(variance(error[i], found.bound[i], shared)) for i in drawn)
        shares.append(np.mean([a <= b for a, b in zip(off, reach, strict=True)]))
    return float(np.mean(shares))


def loops(records: Iterable[Mapping]) -> Iterator[float]:
    """Yields, for each two pairs of a sparse and a dense tile of ours on sm_80, the correlation of their gains over the
    sweep.
    """
    mine = [r for r in records if r["sm"] == "sm_80" and r["share_of_peak"]]
    dense, sparse = (
        [np.log(r["share_of_peak"]["points"]) for r in mine if r["kernel"].startswith(f"ours {kernel}")]
        for kernel in ("conv_dense", "conv_sparse24")
    )
    for a, b in combinations([s - d for s, d in product(sparse, dense)], 2):
        yield float(np.corrcoef(a, b)[0, 1])


@click.command(help=__doc__)
def main() -> None:
    rows = read(FOLDER)[0]
    click.echo(f"{'log errors':<48} groups  rows  shared    own   share   one device left out")
    for kind, what in KINDS.items():
        found = errors(kind, rows)
        deviations = " ".join(f"{math.sqrt(v):>6.3f}" for v in parts(found))
        less = f"{min(left_out(found)):.2f} to {max(left_out(found)):.2f}"
        count = sum(map(len, found.values()))
        click.echo(f"{what:<48} {len(found):>6} {count:>5}  {deviations} {share(found):>7.2f}   {less}")
    click.echo(f"\n{'published sums within the range':<48} " + " ".join(f"{f'share {s:g}':>10}" for s in (0, SHARED, 1)))
    for kind, count in product(("layer", "gemm"), SUMMED):
        what = f"{count} {'layers of a network' if kind == 'layer' else 'dense products'}, wanted {RANGE:.0%}"
        judged = [r for r in rows if kind == "layer" or r.judged]
        click.echo(f"{what:<48} " + " ".join(f"{held(judged, kind, count, s):>10.1%}" for s in (0, SHARED, 1)))
    together = list(loops(json.loads(FOUND.read_text())["rows"]))
    low, high = min(together), max(together)
    click.echo(f"\nsimulated gains of our loops, two by two: correlation over the sweep {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
