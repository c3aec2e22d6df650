"""Requirements on our main loops beside CUTLASS's, and on the simulation beside measured times: required, found, met."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.bench_predictions import LONG_US, faster, ours
from benchmarks.published_rows import Row as PublishedRow
from benchmarks.published_rows import product, together
from benchmarks.sass.clocks import Simulated
from benchmarks.sass.kernels import HOPPER, Kernel
from benchmarks.sass.published import Timed, estimates, few, verdict
from cuda_kernels.device import Device, named
from cuda_kernels.rates import rates

WORST, SPARSE_WORST, CENTRE, SPARSE_AIM = 0.92, 0.97, 1.0, 1.05
# cutlass#408: 16384^3 in FP16 on an A100 at 1410 MHz, 484 TFLOP/s sparse and 302 dense, by CUTLASS's own kernels.
CUBE, SPARSE_TFLOPS, DENSE_TFLOPS, WITHIN = 16384, 484, 302, 0.08
MOST_ERROR, MOST_BIAS, MOST_FASTER = {"a100": 0.15, "l40s": 0.20}, 0.07, 0.05


BESIDE, CALIBRATION, EVIDENCE = "beside", "calibration", "evidence"
KINDS = {  # kind of a line -> its meaning
    BESIDE: "ours beside CUTLASS's, simulated alike; +-: the noise of phase locking, within which neither is the faster",
    CALIBRATION: "calibration: what the centre of the sweep and the clocks were chosen to meet",
    EVIDENCE: "evidence: published times by which nothing was chosen",
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """One line: `what` is judged, the `required` and the `found` value in words, and whether it is met; `kind`: one of KINDS;
    `undecided`: the value is within the noise of the required one or, if nothing is required, of a tie.
    """

    what: str
    required: str
    found: str
    met: bool | None  # None: nothing is required, or undecided
    kind: str
    undecided: bool = False

    def __str__(self) -> str:
        met = "within noise" if self.undecided else "-" if self.met is None else "yes" if self.met else "no"
        return f"{self.what:<82} {self.required:>10} {self.found:>20}  {met}"


HEADER = f"{'':<82} {'required':>10} {'found':>20}  met"


def listed(found: Sequence[Requirement]) -> str:
    """Returns the lines of each kind, below a line that describes the kind."""
    parts = ((words, [str(r) for r in found if r.kind == kind]) for kind, words in KINDS.items())
    return "\n".join(line for words, lines in parts if lines for line in (f"\n{words}", HEADER, *lines))


def ratios(mine: Simulated, theirs: Sequence[Simulated]) -> Iterator[tuple[float, float]]:
    """Yields (our share of the peak over the best of theirs, the noise of both): at the centre, and at the sweep's worst
    point.
    """
    best = [max(each) for each in zip(*(t.shares for t in theirs), strict=True)]
    over = [a / b for a, b in zip(mine.shares, best, strict=True)]
    for point in (0, over.index(min(over))):
        yield over[point], mine.noise(point) + max(t.noise(point) for t in theirs)


def compared(what: str, ratio: float, noise: float, least: float | None) -> Requirement:
    """Returns the requirement that a ratio be at least `least`; None: nothing is required."""
    undecided = abs(math.log(ratio / (least or 1))) <= noise
    met = None if undecided or least is None else ratio >= least
    asked = "nothing" if least is None else f">= {least:g}"
    return Requirement(what, asked, f"{ratio:.3f} +-{noise:.1%}", met, BESIDE, undecided)


def beside(found: Mapping[tuple[Kernel, str], Simulated]) -> Iterator[Requirement]:
    """Yields each of our tiles against CUTLASS's with the same block, with any number of stages; `found`: (kernel,
    architecture) -> its results.
    """
    for (kernel, sm), mine in found.items():
        theirs = [s for (k, at), s in found.items() if k.maker == "CUTLASS" and at == sm and _same(k, kernel)]
        if kernel.maker != "ours" or not theirs:
            continue
        centre, worst = ratios(mine, theirs)
        name, hopper = f"{sm} {kernel.name} {_block(kernel)} over CUTLASS", sm in HOPPER
        more = f", {str(kernel.tile).partition('_')[2]}" if hopper else f" (aim {SPARSE_AIM:g})" if kernel.sparse else ""
        yield compared(f"{name}, centre{more}", *centre, None if hopper else CENTRE)
        more = f"worst{more}" if hopper else "worst of the sweep"
        yield compared(f"{name}, {more}", *worst, None if hopper else SPARSE_WORST if kernel.sparse else WORST)


def _same(a: Kernel, b: Kernel) -> bool:
    return a.sparse == b.sparse and _block(a) == _block(b) and a.tile.threads == b.tile.threads


def _block(kernel: Kernel) -> str:
    return f"{kernel.tile.m}x{kernel.tile.n}x{kernel.tile.k}"


def cube(dense: Sequence[Timed], sparse: Sequence[Timed]) -> Iterator[Requirement]:
    """Yields CUTLASS's gain from 2:4 on the product with published times, at the clock that was locked; and the two rates."""
    device, work, what = named("a100"), product(CUBE, CUBE, CUBE, 1.0), f"sm_80 CUTLASS's product of {CUBE}^3, "
    tiles = {"sparse": sparse, "dense": dense}
    rate = {kind: 2e-6 * CUBE**3 / float(estimates(work, device, of).min()) for kind, of in tiles.items()}
    measured = SPARSE_TFLOPS / DENSE_TFLOPS
    found = rate["sparse"] / rate["dense"]
    yield Requirement(
        f"{what}sparse over dense, measured {measured:.2f}",
        f"within {WITHIN:.0%}",
        f"{found:.2f} ({found / measured - 1:+.1%})",
        abs(found / measured - 1) <= WITHIN,
        CALIBRATION,
    )
    for kind, tflops in (("sparse", SPARSE_TFLOPS), ("dense", DENSE_TFLOPS)):
        words = f"{rate[kind]:.0f} ({rate[kind] / tflops - 1:+.1%})"
        yield Requirement(f"{what}{kind} TFLOP/s, measured {tflops}", "nothing", words, None, CALIBRATION)


def held(device: Device, tiles: Sequence[Timed]) -> float:
    """Returns the share of the data sheet's clock at which the best tile's main loop is as fast as the fastest published
    products on the card: the difference counts as the power limit's.
    """
    return min(1.0, rates(device).sync_share / max(peak(device, t) for t in tiles))


def peak(device: Device, timed: Timed) -> float:
    """Returns the share of the tensor cores' peak that a tile's main loop reaches on a full SM."""
    t = timed.tile
    return t.m * t.n * t.k * timed.blocks / (timed.stage[-1] * device.mma_fma_per_clk)


def against_cublas(device: Device, tiles: Sequence[Timed], rows: Sequence[PublishedRow]) -> Iterator[Requirement]:
    """Yields CUTLASS's tiles, the best one for each row, and our own kernels' predictions, on published rows."""
    work, us, clock = together(rows), np.array([r.us for r in rows]), held(device, tiles)
    found = estimates(work, device, tiles, clock)
    apart = few(work, device, [tiles[i].tile for i in found.argmin(0)])
    best, most = found.min(0), MOST_ERROR[device.name]
    name = f"{device.title}, CUTLASS's best tile against cuBLAS, "
    of = verdict(best[~apart], us[~apart])
    scatter = f"{name}{of.rows} rows, mean |log error|"
    yield Requirement(scatter, f"<= {most:.2f}", f"{of.error:.3f}", of.error <= most, EVIDENCE)
    within = abs(of.bias) <= MOST_BIAS
    yield Requirement(f"{name}bias (clock {clock:.0%})", f"within {MOST_BIAS:.0%}", f"{of.bias:+.3f}", within, CALIBRATION)
    if apart.any():
        of = verdict(best[apart], us[apart])
        words = f"{of.error:.3f}, bias {of.bias:+.3f}"
        yield Requirement(f"{name}{of.rows} rows of few tiles", "nothing", words, None, EVIDENCE)
    long = [r for r in rows if r.us >= LONG_US]
    share = faster(np.array([ours(r) for r in long]), np.array([r.us for r in long]))
    yield Requirement(
        f"{device.title}, ours predicted > 10 % faster than cuBLAS, {len(long)} rows",
        f"<= {MOST_FASTER:.0%}",
        f"{share:.1%}",
        share <= MOST_FASTER,
        EVIDENCE,
    )
