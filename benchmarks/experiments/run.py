"""The frame of a row: a file that grows step by step, and a time at which it must end."""

import argparse
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import hardware
from cuda_kernels.device import Device, current
from cuda_kernels.driver import is_fatal
from tactics.measure import timing

K = TypeVar("K")
V = TypeVar("V")
WHOLE, PARTLY = 0, 3  # exit statuses: all steps were reached, or the time ended before


@dataclass(slots=True)
class Experiment:
    """A row that runs. `end`: the time.monotonic() at which it must end; `data`: the contents of its file beside the header;
    `words`: further arguments.
    """

    out: Path
    end: float
    small: bool
    words: list[str]
    device: Device
    data: dict[str, Any] = field(default_factory=lambda: {"left_out": [], "errors": {}})

    def save(self) -> None:
        hardware.write(self.out, hardware.header(self.device) | {"small": self.small} | self.data)

    @property
    def left(self) -> float:
        """Returns the seconds that are left."""
        return self.end - time.monotonic()

    def has_time(self, seconds: float = 2.0) -> bool:
        return self.left > seconds

    def step(self, name: str, do: Callable[[], None], seconds: float = 2.0) -> None:
        """Runs one step; left out if there is no time for it; if it fails, its error is recorded. An error that ends the CUDA
        context ends the row. The file is written in any case.
        """
        if not self.has_time(seconds):
            self.data["left_out"].append(name)
        else:
            try:
                do()
            except Exception as e:  # one step's failure leaves the others
                self.data["errors"][name] = f"{type(e).__name__}: {e}"[:1500]
                print(f"{name}: {self.data['errors'][name]}"[:300], flush=True)
                if is_fatal(e):
                    self.save()
                    raise
        self.save()

    def done(self) -> int:
        """Returns the exit status: 1 if a step failed, PARTLY if one was left out."""
        self.save()
        return 1 if self.data["errors"] else PARTLY if self.data["left_out"] else WHOLE


def interleaved(contestants: Mapping[K, Callable[[], V]], rounds: int) -> dict[K, list[V]]:
    """Returns the samples of each contestant: one in each round, which has an order of its own."""
    taken: dict[K, list[V]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in random.sample(list(contestants), len(contestants)):
            taken[name].append(contestants[name]())
    return taken


def begun(title: str, argv: list[str] | None = None) -> Experiment:
    parser = argparse.ArgumentParser(description=title.splitlines()[0])
    parser.add_argument("words", nargs="*", help="what the row is asked for, where it can be asked for parts")
    parser.add_argument("--out", type=Path, required=True, help="the file of results")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin nothing that ends later (default: %(default)g)")
    parser.add_argument("--small", action="store_true", help="a small size; always so on the emulated driver")
    args, end = parser.parse_args(argv), time.monotonic()
    return Experiment(args.out, end + args.seconds, args.small or timing.is_emulated(), args.words, current())
