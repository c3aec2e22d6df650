"""Estimates against what others measured and published.

    python -m benchmarks.bench_predictions [FOLDER] [--fit] [--ours] [--write]

Reads every CSV file in FOLDER (benchmarks/published) and ends with one line per device and regime: rows, bias and standard
deviation of log(predicted / published), mean |log error|, Spearman's rank correlation; for pairs of dense and sparse products
the gain's error and the share of decisions that are confirmed; for networks the ratio. A hash of each row decides which half it
belongs to: `--fit` prints constants fitted on one, everything else is judged on the other. `--ours`: also how our own kernels'
predictions stand to the library's times. `--write` draws the plots of docs/predictions.md into docs/predictions.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.pages.scatter import svg
from benchmarks.published_rows import FOLDER, Row, device_of, read, together
from cuda_kernels.device import Device
from cuda_kernels.rates import Library, rates
from tactics import peers
from tactics.families import conv_gemm
from tactics.families.hopper import conv_wgmma
from tactics.format import Format
from tactics.planner.grouping import grouped
from tactics.predict import predict_us
from tactics.roofline import moved_us
from tactics.roofline import together as limits

HWC8 = Format("fp16", "hwc8")
SHORT_US, GAIN_US = 4.0, 20.0  # the least times of products, and of pairs, that are held to the requirements
LONG_US = 10.0  # the least times of products, for predictions of our own kernels
PLOTS = Path(__file__).parents[1] / "docs" / "predictions"
NEAR = 0.4, 2.0  # the range of bytes, as shares of L2, in which the part that L2 keeps decides
STEP = 0.5, 0.5001  # as if L2 kept everything up to half of its size, and nothing of larger data
MISFITS = 6  # the most rows of a device that are shown
FIT = ("math_share", "sm_l2", "l2", "fill_clk", "block_clk", "dram_share")
LEAST = np.array([0.4, 15.0, 500.0, 0.0, 0.0, 0.5])
MOST = np.array([1.0, 128.0, 12000.0, 4000.0, 4000.0, 1.0])
FIT_PAIRS = ("math_share", "sparse_rate", "sparse_us", "dram_share")
LEAST_PAIRS, MOST_PAIRS = np.array([0.4, 1.2, 0.0, 0.5]), np.array([1.1, 2.0, 4.0, 1.0])
MOST_STREAM_US = 10.0
KINDS = {"times": "gemm", "gains": "pair"}  # kinds of rows by what they tell of
FIXED = {"a100": ("l2",), "l40s": ("l2",)}  # published: L2 as gpu-benches measured it


@dataclass(frozen=True, slots=True)
class Judged:
    """Rows with their predictions in microseconds, and the limit (bound) of each."""

    rows: Sequence[Row]
    us: np.ndarray
    bound: np.ndarray

    @property
    def published(self) -> np.ndarray:
        return np.array([r.us for r in self.rows])

    @property
    def error(self) -> np.ndarray:
        return np.log(self.us / self.published)


def by_device(rows: Iterable[Row], kind: str) -> dict[str, list[Row]]:
    return grouped((row.device, row) for row in rows if row.kind == kind and row.work is not None)


def judge(rows: Sequence[Row], sparse: bool = False, library: Library | None = None) -> Judged:
    """Returns the library's estimates for rows of one device; each row has one problem, launched as it was when it was
    published.
    """
    device = device_of(rows[0])
    us, bound = np.zeros(len(rows)), np.full(len(rows), "launch")
    for rate in {r.accumulate for r in rows}:
        at = [i for i, r in enumerate(rows) if r.accumulate == rate]
        work = together([rows[i] for i in at])
        found, bound[at] = peers.estimate(work, device, library or rates(device).library, sparse, rate)
        us[at] = found + [rows[i].stream_us for i in at]
    return Judged(rows, us, bound)


def fit(rows: Sequence[Row]) -> Library:
    """Returns the library's constants of FIT with the least mean |log error| of dense products; products under SHORT_US count a
    third.
    """
    device = device_of(rows[0])
    start, work, published = rates(device).library, together(rows), np.array([r.us for r in rows])
    weight = np.where(published < SHORT_US, 0.3, 1.0)
    at = [i for i, name in enumerate(FIT) if name not in FIXED.get(device.name, ())]
    names = [FIT[i] for i in at]

    def loss(x: np.ndarray) -> float:
        us = peers.estimate(work, device, _with(start, names, x))[0]
        return float(np.average(np.abs(np.log(us / published)), weights=weight))

    return _with(start, names, _least(loss, _values(start, names), LEAST[at], MOST[at]))


def fit_pairs(rows: Sequence[Row]) -> tuple[Library, float]:
    """Returns (the library's constants of FIT_PAIRS with the least errors of dense products and of the gain of 2:4, the
    microseconds that a launch on a stream adds to each time).
    """
    device, start = device_of(rows[0]), rates(device_of(rows[0])).library
    work, published, sparse = together(rows), np.array([r.us for r in rows]), np.array([r.sparse_us for r in rows])

    def loss(x: np.ndarray) -> float:
        *values, stream_us = x
        library = _with(start, FIT_PAIRS, values)
        dense = np.log((peers.estimate(work, device, library)[0] + stream_us) / published)
        gain = dense - np.log((peers.estimate(work, device, library, sparse=True)[0] + stream_us) / sparse)
        return float(np.abs(dense).mean() + np.abs(gain).mean())

    first = np.append(_values(start, FIT_PAIRS), rows[0].stream_us)
    *values, stream_us = _least(loss, first, np.append(LEAST_PAIRS, 0.0), np.append(MOST_PAIRS, MOST_STREAM_US))
    return _with(start, FIT_PAIRS, values), float(stream_us)


def fit_kept(rows: Sequence[Row]) -> tuple[float, float]:
    """Returns the two limits, in twentieths of L2 from 0.3 on, with the least squares of log errors of scale kernels."""
    device, published = device_of(rows[0]), np.array([r.us for r in rows])

    def loss(kept: tuple[float, float]) -> float:
        return float(np.square(np.log([memory_us(device, r, kept) for r in rows] / published)).sum())

    return min(((low / 20, high / 20) for low in range(6, 21) for high in range(low + 2, 41)), key=loss)


def _values(library: Library, names: Sequence[str]) -> np.ndarray:
    return np.array([getattr(library, name) for name in names])


def _with(library: Library, names: Sequence[str], values: Iterable[float]) -> Library:
    changed: Any = zip(names, map(float, values), strict=True)
    return replace(library, **dict(changed))


def _least(loss: Callable[[np.ndarray], float], start: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Returns the constants between `least` and `most` with the least loss, by Nelder and Mead's search over the logits of
    their places.
    """
    from scipy.optimize import minimize
    from scipy.special import expit, logit

    def constants(x: np.ndarray) -> np.ndarray:
        return least + (most - least) * expit(x)

    x = logit(np.clip((start - least) / (most - least), 0.02, 0.98))
    for _ in range(3):
        x = minimize(lambda x: loss(constants(x)), x, method="Nelder-Mead", options={"maxiter": 400, "adaptive": True}).x
    return constants(x)


def errors(rows: Sequence[Row]) -> dict[str, dict[str, tuple[float, int]]]:
    """Returns {"times", "gains"} -> bound -> (root mean square of the log errors, number of rows), of dense products and of
    pairs.
    """
    found = {what: grouped((bound, e) for _, bound, e in log_errors(kind, rows)) for what, kind in KINDS.items()}
    return {what: {b: (float(np.sqrt(np.mean(np.square(e)))), len(e)) for b, e in of.items()} for what, of in found.items()}


def log_errors(kind: str, rows: Iterable[Row]) -> Iterator[tuple[str, str, float]]:
    """Yields (device, bound, log error) of each time, or of the gain of each pair."""
    for device, some in by_device(rows, kind).items():
        found = judge(some)
        error, bounds = found.error, found.bound
        if kind == "pair":
            sparse = judge(some, sparse=True)
            error, bounds = np.log(found.us / sparse.us) - _log_gain(some), sparse.bound
        yield from ((device, str(bound), float(e)) for bound, e in zip(bounds, error, strict=True))


def _log_gain(rows: Sequence[Row]) -> np.ndarray:
    return np.log([r.us / r.sparse_us for r in rows])


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Returns Spearman's rank correlation; equal values rank in order of appearance."""
    if len(a) < 3:
        return float("nan")
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def line(device: str, regime: str, us: np.ndarray, published: np.ndarray) -> str:
    e = np.log(us / published)
    return (
        f"{device:<13} {regime:<10} {len(e):>5} {e.mean():>+7.3f} {e.std():>6.3f} {np.abs(e).mean():>6.3f} "
        f"{rank_correlation(us, published):>6.3f}"
    )


HEADER = f"{'device':<13} {'regime':<10} {'rows':>5} {'bias':>7} {'sd':>6} {'|err|':>6} {'rank':>6}"


def regimes(device: str, found: Judged) -> Iterator[str]:
    """Yields a line for each regime, then one for all rows of SHORT_US and more."""
    for regime in ("launch", "l2", "dram", "math"):
        at = found.bound == regime
        if at.any():
            yield line(device, regime, found.us[at], found.published[at])
    at = found.published >= SHORT_US
    if at.any():
        yield line(device, f">= {SHORT_US:g} us", found.us[at], found.published[at])


def scaled(device: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yields two lines on rows that move 0.4 to 2 times the L2: in the first, all activations come from DRAM if they exceed
    half of L2; in the second, a share that grows between the limits of the device's rates.
    """
    d = device_of(rows[0])
    near = [r for r in rows if r.work and NEAR[0] <= (r.work.x + r.work.y)[0] / d.l2_bytes <= NEAR[1]]
    for name, kept in (("step", STEP), ("graded", rates(d).kept)):
        yield line(device, name, np.array([memory_us(d, r, kept) for r in near]), np.array([r.us for r in near]))


def memory_us(device: Device, row: Row, kept: tuple[float, float]) -> float:
    """Returns the microseconds of a row that only moves bytes."""
    if row.work is None:
        raise ValueError(f"{row.label}: nothing is known of its bytes")
    return device.launch_us + limits(moved_us(device, row.work.x[0], row.work.y[0], kept=kept).values())


def pairs(device: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yields the error of the gain of long pairs, and how many decisions sparse or dense are confirmed."""
    dense, sparse = judge(rows), judge(rows, sparse=True)
    gain, seen = dense.us / sparse.us, np.exp(_log_gain(rows))
    error = np.log(gain / seen)
    confirmed = (gain > 1) == (seen > 1)
    long = dense.published >= GAIN_US
    for name, at in ((f"< {GAIN_US:g} us", ~long), (f">= {GAIN_US:g} us", long)):
        if at.any():
            yield (
                f"{device:<13} {name:<10} {at.sum():>5} gain {np.exp(np.log(seen[at]).mean()):.2f} predicted "
                f"{np.exp(np.log(gain[at]).mean()):.2f}: error {error[at].mean():+.3f}, sd {error[at].std():.3f}; "
                f"decisions confirmed {confirmed[at].mean():.1%}"
            )
    for i in map(int, np.flatnonzero(np.abs(error) > 0.3)):
        yield f"{device:<13} {rows[i].label:<20} dense {rows[i].us:>8.1f} us, gain {seen[i]:.2f}, predicted {gain[i]:.2f}"


def misfits(found: Judged, most: float = 0.5) -> Iterator[str]:
    """Yields the rows whose estimate is off by more than e ** `most`, the worst first."""
    for i in map(int, np.argsort(-np.abs(found.error))):
        if abs(found.error[i]) > most and found.rows[i].us >= SHORT_US:
            r = found.rows[i]
            yield f"{r.device:<13} {r.label:<20} {r.us:>8.1f} us published, predicted {found.us[i]:>8.1f} ({found.bound[i]})"


def ours(row: Row) -> float:
    """Returns the predicted microseconds of our fastest dense kernel for the row's problem, channels last."""
    device, p = device_of(row), row.problem
    if p is None:
        raise ValueError(f"{row.label}: no convolution of ours computes it")
    families = conv_gemm, *((conv_wgmma,) if device.sm == "sm_90a" else ())
    found = (t for family in families for t, why in family.candidates(p, device) if not why)
    alike = (t for t in found if not t.sparse and {*t.ins, t.out} == {HWC8})
    return min((predict_us(p, t, device) for t in alike), default=math.inf)


def our_kernels(device: str, rows: Sequence[Row]) -> str:
    """Describes how our predictions compare with the library's times and estimates, and the share of rows that promise to beat
    them by 10 %.
    """
    long = [r for r in rows if r.us >= LONG_US]
    us, peer = np.array([ours(r) for r in long]), judge(long)
    return (
        f"{device:<13} {len(long):>5} rows: of the library's time {np.exp(np.log(us / peer.published).mean()):.2f}, of its "
        f"estimate {np.exp(np.log(us / peer.us).mean()):.2f}; more than 10 % faster than it "
        f"{faster(us, peer.published):.1%}"
    )


def faster(us: np.ndarray, published: np.ndarray) -> float:
    """The share of rows whose estimate is more than 10 % below the published time."""
    return float((us < 0.9 * published).mean())


def below_bounds(rows: Iterable[Row]) -> list[str]:
    """Lists the rows with times below the bound by peak rates: there should be none."""
    found = []
    for row in rows:
        if row.work is not None:
            device = device_of(row)
            least = float(peers.least(row.work, device, rates(device).boost, row.accumulate).sum())
            if row.us < least:
                found.append(f"{row.device} {row.label}: published {row.us:.2f} us, bound {least:.2f} us")
    return found


def network_us(row: Row) -> float:
    """Returns the sum of the network's convolutions; in a sparse network each has the faster one of its two kernels."""
    device, work = device_of(row), together([row])
    us = peers.estimate(work, device, rates(device).library, accumulate=row.accumulate)[0]
    if row.kind == "sparse network":
        us = np.minimum(us, peers.estimate(work, device, rates(device).library, True, row.accumulate)[0])
    return float(us.sum())


def networks(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        us, what = network_us(row), f"{row.label}{', 2:4' if row.kind == 'sparse network' else ''}"
        yield f"{row.device:<13} {what:<44} {row.us:>9.0f} us published, predicted {us:>9.0f}: {us / row.us:.2f}"


def draw(judged: Sequence[Row]) -> None:
    """Draws a plot for each device with dense products."""
    PLOTS.mkdir(exist_ok=True)
    for device, rows in by_device(judged, "gemm").items():
        found = judge(rows)
        points = list(zip(found.published.tolist(), found.us.tolist(), found.bound.tolist(), strict=True))
        (PLOTS / f"{device}.svg").write_text(svg(device_of(rows[0]).title, "dense products", points))


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=FOLDER)
@click.option("--fit", "fitting", is_flag=True, help="Print the constants that fit the half which is not judged.")
@click.option("--ours", "own", is_flag=True, help="Also how our own kernels' predictions stand to the library's times.")
@click.option("--write", is_flag=True, help="Draw predicted against published times, judged rows, into docs/predictions.")
def main(folder: Path, fitting: bool, own: bool, write: bool) -> None:
    rows, left = read(folder)
    for sentence in left:
        click.echo(f"left out: {sentence}")
    if fitting:
        for device, found in by_device([r for r in rows if not r.judged], "gemm").items():
            library = fit(found)
            click.echo(f"{device}: " + ", ".join(f"{name} {getattr(library, name):.4g}" for name in FIT))
        for device, found in by_device([r for r in rows if not r.judged], "pair").items():
            library, stream_us = fit_pairs(found)
            values = ", ".join(f"{name} {getattr(library, name):.4g}" for name in FIT_PAIRS)
            click.echo(f"{device}: {values}, stream_us {stream_us:.2g}")
        for device, found in by_device([r for r in rows if not r.judged], "scale").items():
            click.echo(f"{device}: kept {fit_kept(found)}")
        for what, of in errors([r for r in rows if not r.judged]).items():
            click.echo(f"errors of {what}: " + ", ".join(f"{bound} {e:.3f} ({n} rows)" for bound, (e, n) in of.items()))
        return
    for sentence in below_bounds(rows):
        click.echo(f"beats its bound: {sentence}")
    judged = [r for r in rows if r.judged]
    click.echo(f"{len(rows)} rows, {len(judged)} judged\n\nnetworks, sums of the library's convolutions")
    for kind in ("network", "sparse network"):
        for found in by_device(rows, kind).values():
            click.echo("\n".join(networks(found)))
    click.echo("\npairs of dense and 2:4 sparse products")
    for device, found in by_device(judged, "pair").items():
        click.echo("\n".join(pairs(device, found)))
    click.echo(f"\nconvolutions of libraries\n{HEADER}")
    for device, found in by_device(judged, "layer").items():
        result = judge(found)
        click.echo("\n".join(regimes(device, result)))
        click.echo(
            f"{device:<13} sum {result.us.sum() / result.published.sum():.3f} of the published, within 25 %: "
            f"{(np.abs(result.us / result.published - 1) < 0.25).mean():.0%}"
        )
    click.echo(f"\nsteps near the size of L2\n{HEADER}")
    for device, found in by_device(judged, "scale").items():
        click.echo("\n".join(scaled(device, found)))
    if write:
        draw(judged)
    if own:
        click.echo(f"\nour dense kernels, products of {LONG_US:g} us and more")
        for device, found in by_device(judged, "gemm").items():
            click.echo(our_kernels(device, found))
    click.echo("\nwhat did not fit: products off by more than half")
    products = {device: judge(found) for device, found in by_device(judged, "gemm").items()}
    for result in products.values():
        for misfit in list(misfits(result))[:MISFITS]:
            click.echo(misfit)
    click.echo(f"\ndense products of libraries\n{HEADER}")
    for device, result in products.items():
        click.echo("\n".join(regimes(device, result)))


if __name__ == "__main__":
    main()
