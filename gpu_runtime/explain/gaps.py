"""The gap between the time of each launch of a plan and its floor, a lower bound: by kind of layer, and the worst layers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from gpu_runtime.explain.figures import RESOURCES, tactic_text, us_text
from gpu_runtime.runtime.plan_record import EngineRecord, Timing
from gpu_runtime.text import printable, table, wrap
from tactics.planner.grouping import grouped
from tactics.roofline import least_us

FAR, LONG_US = 5.0, 10.0  # time / floor, and microseconds: a launch above both is a defect of kernels or plan
MOST_ROWS = 12  # rows of the table of launches farthest above their floors
Of = TypeVar("Of")  # the key that the launches of a group share


@dataclass(frozen=True, slots=True)
class Gap:
    """One launch of a plan: the layer's name, type, problem and tactic, its time `us`, and `floor_us`, the least time at the
    GPU's peak rates.

    `bound`: the resource that determines this floor (tactics.roofline.least_us).
    """

    layer: str
    type: str
    problem: str
    tactic: str
    us: float
    floor_us: float
    bound: str

    @property
    def above_us(self) -> float:
        """The microseconds by which the time exceeds its floor."""
        return self.us - self.floor_us

    @property
    def times(self) -> float:
        """The time divided by its floor."""
        return self.us / self.floor_us

    @property
    def is_far(self) -> bool:
        """Whether the launch takes more than FAR times its floor and more than LONG_US."""
        return self.times > FAR and self.us > LONG_US


def gaps(record: EngineRecord) -> tuple[Gap, ...]:
    """Returns a Gap for each launch of the plan, in the order of execution."""
    found = []
    for layer in record.plan.layers:
        if layer.problem is not None and layer.tactic is not None:
            floor, bound = least_us(layer.problem, layer.tactic, record.device)
            found.append(
                Gap(layer.name, layer.type, str(layer.problem), tactic_text(layer.tactic), layer.time_us, floor, bound)
            )
    return tuple(found)


def text(record: EngineRecord) -> str:
    """Returns the gaps as text: a table of kinds of layers, a table of the launches farthest above their floors, and the number
    of launches that are far above theirs (Gap.is_far).
    """
    found, timing = gaps(record), record.timing
    total, floor = sum(g.us for g in found), sum(g.floor_us for g in found)
    head = (
        f"{record.model.name} on {record.device.title}, {timing.label}: the launches take {us_text(total, timing)}. Lower "
        f"bound: {us_text(floor, timing)}, if each product is computed and each byte is moved once at the GPU's peak rates"
    )
    kinds = [[kind, *_numbers(of, timing)] for kind, of in by_kind(found).items()]
    header = ["launches", "us", "floor us", "above us", "times"]
    lines = [*wrap(printable(head)), "", *table(["kind", *header], kinds, range(1, 6)), ""]
    rows = [
        [_names(of), of[0].type, *_numbers(of, timing), RESOURCES[of[0].bound], of[0].tactic] for of in alike(found)[:MOST_ROWS]
    ]
    lines += [*table(["farthest above the floor", "kind", *header, "floor is", "tactic"], rows, range(2, 7)), ""]
    far = sum(g.is_far for g in found)
    lines += wrap(f"{far} of {len(found)} launches take more than {FAR:g} times their floor and {LONG_US:g} us")
    return "\n".join(lines) + "\n"


def alike(found: Sequence[Gap]) -> list[list[Gap]]:
    """Returns the launches in groups of equal kernel, time and floor; the groups farthest above their floors come first."""
    return [*_grouped(found, lambda g: (g.type, g.tactic, round(g.us, 2), round(g.floor_us, 2))).values()]


def _names(of: Sequence[Gap]) -> str:
    return printable(of[0].layer + (f" and {len(of) - 1} alike" if len(of) > 1 else ""))


def _numbers(of: Sequence[Gap], timing: Timing) -> list[str]:
    """Returns the cells of a group of launches: their number, time, floor, time above the floor, and time / floor."""
    us, floor = sum(g.us for g in of), sum(g.floor_us for g in of)
    return [str(len(of)), *(us_text(t, timing, unit="") for t in (us, floor, us - floor)), f"{us / floor:.1f}"]


def by_kind(found: Sequence[Gap]) -> dict[str, list[Gap]]:
    """Returns kind of layer -> its launches; the kinds that are farthest above their floors in total come first."""
    return _grouped(found, lambda g: g.type)


def _grouped(found: Sequence[Gap], key: Callable[[Gap], Of]) -> dict[Of, list[Gap]]:
    """Returns key -> its launches; the groups that are farthest above their floors in total come first."""
    return dict(sorted(grouped((key(g), g) for g in found).items(), key=lambda item: -sum(g.above_us for g in item[1])))


def data(record: EngineRecord) -> dict[str, Any]:
    """Returns the gaps as a JSON object: "schema_version", "device" (its name), "timing" (the label of the times' origin) and
    "launches".

    "launches" has an object per launch, in the order of execution: the fields of Gap (times in microseconds), and "far",
    Gap.is_far.
    """
    rows = [asdict(g) | {"far": g.is_far} for g in gaps(record)]
    return {"schema_version": 1, "device": record.device.name, "timing": record.timing.label, "launches": rows}
