"""Predicts the time of a tactic on a named device, for machines without a GPU. Predictions are never shown as measured.

A kernel takes launch + the larger of DRAM, L2 and SMs, rounded where they meet (tactics.roofline); each family counts its bytes
and how long the SMs take. An H200 has timed ours (benchmarks/our_times.py): MEASURED holds the factors that families do not
count. benchmarks/bench_predictions finds how far others' kernels lie from the same hardware's estimates, by bound: SIGMA for
one time, SIGMA_RATIO for the quotient of a sparse and a dense one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from cuda_kernels.device import Device
from cuda_kernels.rates import KEPT_HALVES, KEPT_SEEN, rates
from tactics.problems.problem import ConvProblem, ConvTransposeProblem, MoveProblem, Problem
from tactics.roofline import Counts, predicted
from tactics.tactic import Tactic

# Measured over predicted on an H200, the median over tactics, of kernels whose warps wait for loads longer than is counted; of
# others nothing is known. `gather`, `reduce`, `conv_fp32` have changed since: the first two have factors of kernels like them,
# `conv_fp32` none (2 with half as many loads in flight). `move` took 0.63 of this alone; in networks none was timed.
MEASURED_ON = "sm_90a"
MEASURED = {
    **{"conv_grouped": 1.2, "conv_stem": 1.2, "squeeze_excite": 1.4},
    **{"gather": 3.0, "move": 2.0, "pool": 1.3, "pool_global": 2.0, "reduce": 1.4},
}

# Root mean squares of log errors, by the kernel's bound, in the half of the published rows that fits the constants: of dense
# products on six devices, and of the gain of 2:4 on two, where only three rows are short (bench_predictions --fit prints them).
# OURS is the error that our own main loops add: half the distance between the lowest and the highest share that their code is
# simulated at, in logarithms, root mean square over the tiles on sm_80 (cuda_kernels/shares.json).
REGIMES = ("launch", "l2", "dram", "math")
PUBLISHED = {"launch": 0.21, "l2": 0.12, "dram": 0.17, "math": 0.10}
PUBLISHED_RATIO = {"launch": 0.11, "l2": 0.11, "dram": 0.15, "math": 0.06}
OURS = 0.10
SIGMA = {regime: math.hypot(error, OURS) for regime, error in PUBLISHED.items()}
SIGMA_RATIO = {regime: math.hypot(error, OURS) for regime, error in PUBLISHED_RATIO.items()}
RISK = 0.6  # how likely a sparse kernel must be the faster one before a predicted plan takes it
# The part of the variance of published errors that all kernels with one bound on a device have in common: 0.46 for 60 layers of
# networks on three devices, whose times fitted nothing (benchmarks/shared_errors.py, which also says why pairs of sparse and
# dense products, on two devices that they fitted, show next to none). The other errors of a quotient are unknowns of the
# device, common to all of its kernels: OURS, the rate of mma.sp, a sparse kernel's fixed cost, a power limit.
SHARED = 0.5
RANGE = 0.8  # the probability that the time saved by sparse kernels lies in the displayed range


def regime(bound: str) -> str:
    """Returns the regime of a kernel's bound: every limit inside SMs counts as math."""
    return bound if bound in REGIMES else "math"


def sigmas(device: Device) -> dict[str, float]:
    """Returns regime -> the relative error of one predicted time on this device. In the math regime it also covers the range of
    clocks that a power limit may leave.

    SIGMA_RATIO has no such part, as both tactics of a quotient run at one clock.
    """
    return SIGMA | {"math": math.hypot(SIGMA["math"], rates(device).held_sigma)}


def sigma(problem: Problem, tactic: Tactic, device: Device) -> float:
    """The expected relative error of `predict_us`."""
    return sigmas(device)[regime(str(predict(problem, tactic, device)["bound"]))]


def sigma_ratio(bound: str, sparse_us: float, device: Device) -> float:
    """The expected error of log(sparse time / dense time): from its regime, from the rate of mma.sp, and from a sparse kernel's
    fixed cost, which weighs most in short kernels.
    """
    r = rates(device)
    rate = r.sparse_rate_sigma if regime(bound) == "math" else 0.0
    return math.hypot(SIGMA_RATIO[regime(bound)], rate, r.sparse_us_sigma / max(sparse_us, device.launch_us))


def p_faster(dense_us: float, sparse_us: float, bound: str, device: Device) -> float:
    """The probability that the sparse kernel is faster, if the quotient of the two predictions errs log-normally. `bound`: the
    sparse kernel's bound as `predict` names it, one of REGIMES or a limit inside SMs."""
    return NormalDist().cdf(math.log(dense_us / sparse_us) / sigma_ratio(bound, sparse_us, device))


def premium(problem: Problem, tactic: Tactic, device: Device, risk: float) -> float:
    """Returns the factor by which a predicted plan multiplies a tactic's time: 1 for dense tactics.

    For a sparse tactic it is the factor with which it equals a dense tactic that it beats with probability `risk`.
    """
    return _sparse_premium(problem, tactic, device, risk) if tactic.sparse else 1.0


@lru_cache(maxsize=65536)
def _sparse_premium(problem: Problem, tactic: Tactic, device: Device, risk: float) -> float:
    parts = predict(problem, tactic, device)
    return math.exp(NormalDist().inv_cdf(risk) * sigma_ratio(str(parts["bound"]), float(parts["total_us"]), device))


def kept_premium(problem: Problem, tactic: Tactic, device: Device) -> float:
    """The factor by which a plan multiplies the time of a tactic that runs pieces of a batch so that L2 keeps them.

    1 where times show how much the device's L2 keeps; elsewhere the L2 is taken to keep no more than the smallest share of its
    size that any measured L2 kept.
    """
    if device.model in KEPT_SEEN:
        return 1.0
    return max(1.0, predict_us(problem, tactic, _poor(device)) / predict_us(problem, tactic, device))


@lru_cache
def _poor(device: Device) -> Device:
    """Returns the device with an L2 that keeps only the smallest share that any measured L2 kept."""
    share = KEPT_HALVES[1] / max(KEPT_HALVES[1], rates(device).kept[1])
    return replace(device, l2_bytes=round(device.l2_bytes * share))


@dataclass(frozen=True, slots=True)
class Pick:
    """A sparse kernel of a plan: its time `us`, its `bound`, the time `saved_us` against the best dense kernel, and that
    kernel's bound.
    """

    us: float
    bound: str
    saved_us: float
    dense_bound: str


def saved_range(saved_us: float, picks: Sequence[Pick], device: Device) -> tuple[float, float]:
    """The range in which the microseconds saved by all sparse kernels together lie with probability RANGE.

    A kernel's dense time is d exp(e), its sparse time s exp(e + q), with the common error e (`sigmas`) and the error q of their
    quotient (`sigma_ratio`). To first order it saves (d - s) e - s q more than predicted. e and q are independent; errors of
    several kernels correlate as SHARED says.
    """
    r = rates(device)
    own, variance = [regime(p.bound) for p in picks], 0.0
    for name in REGIMES:  # as published
        of_ratio = [p.us * PUBLISHED_RATIO[name] for p in picks if regime(p.bound) == name]
        of_both = [p.saved_us * PUBLISHED[name] for p in picks if regime(p.dense_bound) == name]
        variance += sum(SHARED * sum(errors) ** 2 + (1 - SHARED) * sum(e * e for e in errors) for errors in (of_ratio, of_both))
    whole = (  # one unknown of the device each
        [p.us * OURS for p in picks],
        [p.saved_us * OURS for p in picks],
        [p.us * r.sparse_rate_sigma for p, at in zip(picks, own, strict=True) if at == "math"],
        [p.us * r.sparse_us_sigma / max(p.us, device.launch_us) for p in picks],
        [p.saved_us * r.held_sigma for p in picks if regime(p.dense_bound) == "math"],
    )
    variance += sum(sum(errors) ** 2 for errors in whole)
    reach = NormalDist().inv_cdf((1 + RANGE) / 2) * math.sqrt(variance)
    return saved_us - reach, saved_us + reach


def published_range(us: Sequence[float], bounds: Sequence[str]) -> tuple[float, float]:
    """The range in which the sum of these estimates of a library's kernels lies with probability RANGE.

    The errors are those of PUBLISHED by each kernel's bound; all kernels of a regime share part SHARED of the variance.
    """
    variance = 0.0
    for name, error in PUBLISHED.items():
        of = [error * t for t, bound in zip(us, bounds, strict=True) if regime(bound) == name]
        variance += SHARED * sum(of) ** 2 + (1 - SHARED) * sum(e * e for e in of)
    reach, total = NormalDist().inv_cdf((1 + RANGE) / 2) * math.sqrt(variance), sum(us)
    return total - reach, total + reach


def predict_us(problem: Problem, tactic: Tactic, device: Device) -> float:
    """Microseconds of all launches of `tactic` on `device`, inside a CUDA graph."""
    return float(predict_alike(like(problem, tactic), alike(problem, tactic), device)["total_us"])


def predict(problem: Problem, tactic: Tactic, device: Device) -> dict[str, float | str]:
    """Returns the parts of the prediction in microseconds, `total_us`, and `bound`, the name of its limit."""
    return dict(predict_alike(like(problem, tactic), alike(problem, tactic), device))


def like(problem: Problem, tactic: Tactic) -> Problem:
    """Returns one problem for all that take the same time: parts of a tensor that begin at the same channel modulo 8, and for
    dense tactics weights with and without the 2:4 pattern.
    """
    if isinstance(problem, (ConvProblem, ConvTransposeProblem)) and problem.sparse24 and not tactic.sparse:
        return replace(problem, sparse24=False)
    if isinstance(problem, MoveProblem) and problem.is_part and problem.start[0] >= 16:
        return replace(problem, start=(8 + problem.start[0] % 8, 0, 0))
    return problem


def alike(problem: Problem, tactic: Tactic) -> Tactic:
    """Returns one tactic for all that differ in formats alone and take the same time, where the family knows such tactics."""
    family = _family(tactic.kernel)
    return family.alike(problem, tactic) if hasattr(family, "alike") else tactic


@lru_cache
def _family(kernel: str) -> Any:
    from tactics.families import table  # all of them, which take long to import

    return table.OF_KERNEL[kernel]


@lru_cache(maxsize=65536)
def predict_alike(problem: Problem, tactic: Tactic, device: Device) -> Mapping[str, float | str]:
    """`predict` for a problem and a tactic that `like` and `alike` returned."""
    counts = _family(tactic.kernel).counts(problem, tactic, device)
    one_by_one = [counts] if isinstance(counts, Counts) else counts  # launches, one after the other
    parts = [predicted(device, _measured(of, of.kernel or tactic.kernel, device)) for of in one_by_one]
    if len(parts) == 1:
        return parts[0]
    slowest = max(parts, key=lambda part: float(part["total_us"]))
    total = {k: sum(float(part.get(k, 0.0)) for part in parts) for k in slowest if k != "bound"}
    return {**total, "bound": slowest["bound"]}


def _measured(counts: Counts, kernel: str, device: Device) -> Counts:
    factor = MEASURED.get(kernel, 1.0) if device.sm == MEASURED_ON else 1.0
    return counts if factor == 1.0 else replace(counts, untimed=counts.untimed * factor)
