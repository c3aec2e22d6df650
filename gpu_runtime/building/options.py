"""The arguments of a build, and the checks of their values."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias, get_args

from gpu_runtime.progress import Listener, ignore
from gpu_runtime.runtime.fields import LARGEST
from gpu_runtime.runtime.findings import Sparsity
from tactics import predict

if TYPE_CHECKING:
    from cuda_kernels.device import Device
    from gpu_runtime.planning.io_formats import Spec
    from tactics.measure.spread import Spread

Shape = Sequence[int]
Shapes: TypeAlias = Mapping[str, Shape | Sequence[Shape]]  # of dynamic inputs: a shape, or the smallest, optimal and largest
Target: TypeAlias = str | os.PathLike | BinaryIO
PRECISIONS = ("fp32", "fp32_output", "fp16")  # of an operator: all of it in FP32, only its result in FP32, the default
SPARSITY: tuple[Sparsity, ...] = get_args(Sparsity)
LEVEL, MOST_LEVEL = 3, 5  # of optimization: as a rule, and at most


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The arguments of pipeline.build, which describes them, without the model. The planner and the timer read them after
    `checked`. `forced`, of gpu_runtime.ops alone: layers that can run sparse do, however long they take.
    """

    example_inputs: Sequence[Any] | None = None
    sparsity: Sparsity = "disable"
    device: str | Device | None = None
    shapes: Shapes | Sequence[Shapes] | None = None
    batch_invariant: bool = False
    timing_cache: str | os.PathLike | Literal[False] | None = None
    only_cached_times: bool = False
    save_pruned: Target | None = None
    embed_cubins: bool = False
    input_formats: Spec | None = None
    output_formats: Spec | None = None
    exhaustive: bool = False
    optimization_level: int = LEVEL
    tuning_time: float | Callable[[], bool] | None = None
    workspace: int | None = None
    activations: int | None = None
    risk: float = predict.RISK
    calibration: Mapping[str, Any] | None = None
    precisions: Mapping[str, str] | None = None
    log: Callable[[str], None] | None = None
    ray: str | bool | Spread | None = None
    progress: Listener = ignore
    forced: bool = False

    def checked(self) -> BuildOptions:
        """Returns these options, with `tuning_time` as a function. Raises TypeError and ValueError for a wrong type or
        value.
        """
        level, seconds, cache = self.optimization_level, self.tuning_time, self.timing_cache
        for name in ("workspace", "activations"):
            if isinstance(nbytes := getattr(self, name), int) and not 0 <= nbytes <= LARGEST:
                raise ValueError(f"{name}: expected 0 to {LARGEST} bytes, got {nbytes}")
        for name, wanted, fits in (
            ("timing_cache", "a path, None or False", cache is None or cache is False or isinstance(cache, (str, os.PathLike))),
            *(
                (n, "a number of bytes or None", type(getattr(self, n)) in (int, type(None)))
                for n in ("workspace", "activations")
            ),
            ("precisions", f"names or patterns and one of {', '.join(PRECISIONS)} each, or None", self._has_precisions()),
            ("log", "a function of a text, such as print, or None", self.log is None or callable(self.log)),
            ("progress", "a function of a gpu_runtime.progress.Progress", callable(self.progress)),
        ):
            if not fits:
                raise TypeError(f"{name}: expected {wanted}, got {getattr(self, name)!r}")
        if type(level) is not int or not 0 <= level <= MOST_LEVEL:
            raise ValueError(f"optimization_level: expected a whole number from 0 to {MOST_LEVEL}, got {level!r}")
        if self.sparsity not in SPARSITY:
            raise ValueError(f"sparsity: expected one of {', '.join(SPARSITY)}, got {self.sparsity!r}")
        if not isinstance(self.risk, (int, float)) or not 0.5 <= self.risk < 1:
            raise ValueError(f"risk: expected a probability from 0.5 to below 1, got {self.risk!r}")
        # One tactic for several plans at once is not chosen step by step: every tactic is timed, or none.
        level = MOST_LEVEL if self.batch_invariant and level else level
        return replace(self, optimization_level=level, tuning_time=None if seconds is None else deadline(seconds))

    def _has_precisions(self) -> bool:
        if not isinstance(self.precisions, Mapping):
            return self.precisions is None
        return all(isinstance(name, str) and name and kind in PRECISIONS for name, kind in self.precisions.items())

    @property
    def spread(self) -> Spread | None:
        """The cluster whose GPUs time tactics, once target.placed has connected to it."""
        return None if isinstance(self.ray, (str, bool)) else self.ray

    def ended(self) -> bool:
        """Whether the time for timing tactics is over."""
        return callable(self.tuning_time) and self.tuning_time()

    @property
    def sigmas(self) -> float:
        """The number of standard deviations by which the bound of an untimed tactic lies below its estimate."""
        from tactics.measure import lazy

        return lazy.LEVELS[self.optimization_level].sigmas if self.optimization_level in lazy.LEVELS else 0.0


DEFAULTS = BuildOptions()


def deadline(seconds: float | Callable[[], bool] | None) -> Callable[[], bool]:
    """Returns a function that says whether this time is over; the seconds begin at its first call. Raises ValueError."""
    if callable(seconds):
        return seconds
    if seconds is None:
        return lambda: False
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise ValueError(f"tuning_time: expected seconds, more than 0, got {seconds!r}")
    ends: list[float] = []

    def ended() -> bool:
        ends.extend([] if ends else [time.monotonic() + seconds])
        return time.monotonic() >= ends[0]

    return ended
