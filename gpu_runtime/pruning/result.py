"""The result of `prune`: a row for each weight, the effect on the outputs, and the model."""

import os
from dataclasses import asdict, dataclass
from typing import Any

from cuda_kernels import files
from gpu_runtime.accuracy.errors import Accuracy, finite
from gpu_runtime.pruning.benefit import Forecast
from gpu_runtime.pruning.calibrate import Calibrated
from gpu_runtime.runtime.fields import Told
from gpu_runtime.stored_pattern import Stored, together


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result for one stored weight.

    `layers`: its readers; `verdict`: pruned, 2:4 (already), restored (by the calibration), skipped (by the caller) or kept (it
    cannot be 2:4), with the `reason`. `lost_energy`: the share of its squares that pruning sets to zero; `unpermuted`: that
    share in the file's order; `unmoved`: why none of its input channels could change places. `sum`: the node of the sum with
    whose other branches it shares its pattern; `by_itself`: its loss without them. `snr_db`, `agreement`, `score`: of the
    outputs with only this weight, and the others of its sum, pruned.
    """

    weight: str
    layers: tuple[str, ...]
    shape: tuple[int, ...] | None
    verdict: str
    reason: str = ""
    stored: Stored | None = None
    unpermuted: float | None = None
    unmoved: str = ""
    sum: str = ""
    by_itself: float | None = None
    snr_db: float | None = None
    agreement: float | None = None
    score: float | None = None

    @property
    def lost_energy(self) -> float | None:
        return self.stored.lost_energy if self.stored else None


@dataclass(frozen=True, slots=True)
class Shared:
    """Branches of a sum that may run as one convolution, by layer.

    `lost_energy`: the share of that convolution's squared weights that their common pattern sets to zero; None without a common
    pattern: each branch is pruned separately, for `reason`.
    """

    node: str
    layers: tuple[str, ...]
    lost_energy: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Result(Told):
    """The result of `prune`; `print` shows all of it as `gpu-runtime prune` does.

    `model`: the file's bytes; `rows`: one for each stored weight of a layer; `permuted`: channels were reordered;
    `accuracy`: the effect on outputs, None without calibration; `sums`: branches that may run as one convolution; `unknown`:
    why the search for sums failed, else ""; `separate`: the caller asked for separate patterns; `forecast`: the predicted
    gain of 2:4.
    """

    model: bytes
    rows: tuple[Pruned, ...]
    permuted: bool = False
    accuracy: Calibrated | None = None
    sums: tuple[Shared, ...] = ()
    unknown: str = ""
    separate: bool = False
    forecast: Forecast = Forecast()

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `gpu-runtime prune --json` prints; null stands for an infinite SNR (no difference at all)."""
        rows = [
            {
                "weight": r.weight,
                "layers": r.layers,
                "shape": r.shape,
                "verdict": r.verdict,
                "reason": r.reason,
                "lost_energy": r.lost_energy,
                "lost_energy_unpermuted": r.unpermuted,
                "channels_in_place": r.unmoved or None,
                "sum": r.sum or None,
                "lost_energy_by_itself": r.by_itself,
                **_effect(r),
            }
            for r in self.rows
        ]
        return {
            "schema_version": 1,
            "forecast": self.forecast.data(),
            "lost_energy": self.lost_energy,
            "lost_energy_unpermuted": self.unpermuted,
            "branches": "separate" if self.separate else "common",
            "branches_unknown": self.unknown or None,
            "sums": [asdict(s) for s in self.sums],
            "accuracy": _accuracy(self.accuracy) if self.accuracy else None,
            "weights": rows,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the pruned model."""
        files.write_all({path: self.model})

    @property
    def lost_energy(self) -> float:
        """The share, 0 to 1, of the pruned layers' squared weights that pruning set to zero."""
        return together(r.stored for r in self.rows if r.verdict == "pruned" and r.stored).lost_energy

    @property
    def unpermuted(self) -> float:
        """The share of the squared weights, 0 to 1, that all pruned layers would lose without the permutation of channels."""
        found = [(r.unpermuted, r.stored.energy) for r in self.rows if r.verdict == "pruned" and r.stored]
        total = sum(energy for _, energy in found)
        return sum((share or 0.0) * energy for share, energy in found) / total if total else 0.0


def _accuracy(a: Calibrated) -> dict[str, Any]:
    return {
        "samples": a.samples,
        "restored": a.restored,
        "reached": a.reached,
        "metric": a.judge.name if a.judge else None,
        "score": a.score,
        "kept": _effect(a.kept),
        "all": _effect(a.all),
    }


def _effect(of: Pruned | Accuracy) -> dict[str, float | None]:
    return {"snr_db": finite(of.snr_db), "agreement": of.agreement, "score": of.score}
