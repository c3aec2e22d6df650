"""Plans of one model for several GPUs and batches, as a sequence, a table and a page."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from cuda_kernels import files
from gpu_runtime.report import curves, outlooks
from gpu_runtime.runtime.fields import Shown
from gpu_runtime.runtime.plan_record import Outlook


@dataclass(frozen=True, slots=True, repr=False)
class Plans(Shown, Sequence[Outlook]):
    """The plans of one model: one for each batch, if any were requested, on each device, in that order; `print` shows them side
    by side.
    """

    plans: tuple[Outlook, ...]
    batches: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, at: int) -> Outlook: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Outlook]: ...

    def __getitem__(self, at: int | slice) -> Outlook | Sequence[Outlook]:
        return self.plans[at]

    def __str__(self) -> str:
        return outlooks.text(self, self.batches)

    def to_dict(self) -> list[dict[str, Any]]:  # type: ignore[override]  # JSON of a sequence is a list
        """The data that `gpu-runtime plan --json` prints."""
        return [plan.to_dict() for plan in self.plans]

    def page(self) -> bytes:
        """Returns an HTML page of the time per image by batch. Raises ValueError without batches."""
        if not self.batches:
            raise ValueError("batches: a page draws times by batch: plan with batches=(1, 8, 32)")
        return curves.page(self)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the HTML page of `page` to a path."""
        files.write_all({path: self.page()})
