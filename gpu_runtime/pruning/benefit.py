"""The time that each layer's 2:4 kernel saves in the plan of the pruned network, and the weight energy that pruning removes."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cuda_kernels.device import relative
from gpu_runtime.accuracy.errors import finite
from gpu_runtime.building import build as building
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.building.target import pick_device
from gpu_runtime.errors import ModelError
from gpu_runtime.explain import wording
from gpu_runtime.explain.figures import (
    dense_us,
    fastest_dense_us,
    gain_text,
    library_text,
    pruned_outlook,
    pruning_text,
    us_text,
)
from gpu_runtime.frontend.files.source import ModelLike
from gpu_runtime.progress import Listener, ignore
from gpu_runtime.runtime.fields import Shown
from gpu_runtime.runtime.plan_record import Outlook
from gpu_runtime.text import lost_text, one_line, shapes_text, table, wrap

NO_DEVICE = "none"
TELLS = "--device NAME tells the gain of pruning them"


@dataclass(frozen=True, slots=True)
class Benefit:
    """The benefit of 2:4 weights in the layers that one launch computes.

    `saved_us`: microseconds that the plan of the pruned network loses if these layers are held dense; 0 if the plan runs them
    dense, for the `reason`. `lost_energy`: the share of the file's squared weights that pruning removes.
    """

    layers: tuple[str, ...]
    saved_us: float
    lost_energy: float = 0.0
    reason: str = ""

    @property
    def us_per_percent(self) -> float:
        """Microseconds saved per percent of energy lost; infinite if no energy is lost."""
        return self.saved_us / (100 * self.lost_energy) if self.lost_energy else math.inf if self.saved_us else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Forecast(Shown):
    """The predicted gain of pruning.

    `outlook`: the predicted plan of the model with all weights pruned that can be; None if no forecast was requested, or for
    the reason `unknown`. `now`: the predicted plan of the model as it is. `default`: the device is the default one, because
    none was named and this machine has none.
    """

    outlook: Outlook | None = None
    unknown: str = ""
    now: Outlook | None = None
    default: bool = False

    @property
    def gain(self) -> str:
        """The gain over the fastest dense plan known, in words; "" without an outlook."""
        return gain_text(self.outlook) or "gains nothing: no layer can run sparse" if self.outlook else ""

    @property
    def gain_over_now(self) -> float | None:
        """How many times as fast the pruned plan is as the plan of the model as it is; None without an outlook."""
        found = self.data()
        return found["gain_over_now"] if found else None

    def data(self) -> dict[str, Any] | None:
        """Returns the numbers for JSON: microseconds of the plans at this batch, and their ratios; None without an outlook."""
        outlook = self.outlook
        if outlook is None:
            return None
        total, library = outlook.solution.total_us, outlook.solution.rivals.library
        now = self.now.solution.total_us if self.now else dense_us(outlook)
        return {
            "device": outlook.device.name,
            "timing": outlook.timing.label,
            "batch": outlook.batch,
            "shapes": outlook.shapes,
            "total_us": total,
            "now_us": now,
            "dense_us": dense_us(outlook),
            "library_us": library.us if library else None,
            "fastest_dense_us": fastest_dense_us(outlook, dense_us(outlook)),
            "gain_over_now": now / total if total else None,
            "gain_over_library": library.us / total if library and total else None,
            "gain": self.gain,
        }


def forecast(
    model: ModelLike, device: str | None, shapes: Mapping[str, tuple[int, ...]] | None, progress: Listener = ignore
) -> Forecast:
    """Plans the pruned model and returns its predicted gain.

    `device`: the name of a GPU; None: the one most like the GPU at hand, or the default one; NO_DEVICE: no forecast.
    `shapes`: of dynamic inputs. A model that cannot be planned gives a Forecast with the reason, but raises the errors of
    `plan` for a named GPU.
    """
    if device == NO_DEVICE:
        return Forecast()
    here = pick_device(device)
    name = device or relative(here).name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes that were guessed are in the texts, FP16's range is no matter of times
            options = BuildOptions(sparsity="enable", shapes=shapes, progress=progress)
            now = building.plan(model, name, (), options)[0]
            return Forecast(pruned_outlook(now) or now, now=now, default=not device and not here.measured)
    except ModelError as e:
        if device:
            raise
        return Forecast(None, str(e))


def verdict(found: Forecast, missing: Sequence[str], unknown: str = "") -> str:
    """Returns the text that precedes a report: what pruning would gain, or the option that shows it; "" if all weights are 2:4.

    `missing`: the weights that are not 2:4; `unknown`: why no engine can be built of the model, which then is the text.
    """
    if found.now and (text := pruning_text(found.now)):
        return "\n".join([*wrap(text), "", ""])
    if not missing or found.now:
        return ""
    why = f"no engine can be built of this model: {one_line(unknown)}" if unknown else TELLS
    return "\n".join([*wrap(f"weights are not 2:4; {why}"), "", ""])


def benefits(pruned: Outlook) -> dict[str, Benefit]:
    """Returns layer -> its benefit. `pruned`: the plan with all weights pruned. Layers of one launch share one benefit."""
    found: dict[str, Benefit] = {}
    for row in pruned.sparsity.rows:
        us = max(row.other_cost_us or 0.0, 0.0) if row.verdict == "sparse" else 0.0
        reason = "" if row.verdict == "sparse" else wording.sentence(row, pruned)
        found |= dict.fromkeys(row.layers, Benefit(row.layers, us, reason=reason))
    return found


def paying(found: Forecast) -> frozenset[str]:
    """Returns the layers that the forecast's plan runs sparse. Raises ModelError if there is no plan."""
    if found.outlook is None:
        raise ModelError(found.unknown)
    return frozenset(layer for layer, benefit in benefits(found.outlook).items() if not benefit.reason)


def ranking(rows: Sequence[Mapping[str, Any]], pruned: Outlook) -> list[Benefit]:
    """Returns the benefits of layers whose weights can be 2:4, ordered by time saved per energy lost, the largest first.

    `rows`: from pattern.inspect, a row per layer; `pruned`: the plan with all weights pruned.
    """
    able = {r["layer"]: r for r in rows if r["fit"] is not None}
    found = {}
    for benefit in benefits(pruned).values():
        mine = [able[layer] for layer in benefit.layers if layer in able]
        energy = sum(r["energy"] for r in mine)
        if mine:
            lost = sum(r["lost_energy"] * r["energy"] for r in mine) / energy if energy else 0.0
            found[benefit.layers] = replace(benefit, lost_energy=lost)
    return sorted(found.values(), key=lambda b: (-b.us_per_percent, -b.saved_us, b.lost_energy))


def data(ranked: Sequence[Benefit]) -> list[dict[str, Any]]:
    return [asdict(b) | {"us_per_percent": finite(b.us_per_percent)} for b in ranked]


def text(ranked: Sequence[Benefit], pruned: Outlook) -> str:
    """Returns a table of the layers that save time, and the names of the others."""
    if not ranked:
        return "\nNo weights can be 2:4: there is nothing to rank\n"
    paid, others = ([b for b in ranked if bool(b.saved_us) == pays] for pays in (True, False))
    total = pruned.sparsity.summary
    lines = [
        *wrap(f"With all these weights pruned, on {pruned.device.title}, {pruned.timing.label}, {shapes_text(pruned.shapes)}:"),
        "",
    ]
    if paid:
        rows = [
            [
                ", ".join(b.layers),
                us_text(b.saved_us, pruned.timing, unit=""),
                lost_text(b.lost_energy),
                "free" if math.isinf(b.us_per_percent) else f"{b.us_per_percent:.3f}",
            ]
            for b in paid
        ]
        lines += [*table(["layer", "us saved", "energy lost", "us per % lost"], rows, range(1, 4)), ""]
    if others:
        lines += wrap(f"Saves nothing: {', '.join(layer for b in others for layer in b.layers)}")
    if not paid:
        lines += ["No layer is faster sparse on this GPU: pruning for it would cost accuracy and gain nothing"]
    elif total and total.saved_us is not None:
        lines += wrap(
            f"us saved: time added if this layer alone runs dense (plan: {us_text(total.total_us, pruned.timing)}). Without "
            f"sparse kernels: {us_text(total.saved_us, pruned.timing)} more"
        )
    if gain := gain_text(pruned):
        lines += [*wrap(f"All of it together {gain}"), *wrap(library_text(pruned))]
    return "\n".join(["", *lines]) + "\n"
