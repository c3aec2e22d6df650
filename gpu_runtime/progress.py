"""Reports the progress of a long call: to a listener, and to the logger `gpu_runtime`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cuda_kernels import files
from gpu_runtime.text import printable

LOGGER = logging.getLogger("gpu_runtime")
# fmt: off
STAGES = {
    "start": "starting", "export": "exporting", "import": "reading", "lower": "lowering", "range": "running once in FP32:",
    "time": "times of layers:", "tune": "timing tactics:",
    "network": "running as a whole:", "plan": "choosing the plan of",
    "explain": "comparing with other plans of", "compare": "comparing with FP32:", "pack": "packing weights of",
    "compile": "compiling kernels, which is done once:", "emulator": "compiling the emulator, which is done once,",
    "load": "loading", "run": "running", "device": "planning for", "write": "writing", "order": "ordering channels:",
    "trial": "running with layers pruned:", "onnxruntime": "onnxruntime on", "examine": "examining kernels:",
    "rate": "measuring", "wait": "waiting for", "cache": "timing cache",
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Progress:
    """A stage, and its item that begins now: `done` of `total` items are ready; total 0: unknown.

    `expected`: the probable number of items, where `total` is an upper limit.
    """

    stage: str
    detail: str = ""
    done: int = 0
    total: int = 0
    expected: int = 0

    def text(self, left: str = "") -> str:
        """Describes it in words; `left`: the time for the rest."""
        text = STAGES.get(self.stage, self.stage)
        if self.total:
            text += f" {self.done:,} of {'at most ' if self.expected else ''}{self.total:,}{left}" + (
                ":" if self.detail else ""
            )
        return printable(f"{text} {self.detail}".rstrip())


Listener = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """A listener that does nothing."""


def logged(listener: Listener) -> Listener:
    """Returns a listener that calls this one and the logger: stages as INFO, each item of a stage as DEBUG."""

    def tell(progress: Progress) -> None:
        level = logging.DEBUG if progress.total else logging.INFO
        if LOGGER.isEnabledFor(level):
            LOGGER.log(level, "%s", progress.text())
        listener(progress)

    return tell


def report(text: Callable[[], str]) -> None:
    """Sends the logger the text that a command prints at its end."""
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("%s", text())


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the line that called this package."""
    files.warn(printable(text), category)


def compiling(listener: Listener) -> Callable[[int, int], None]:
    """Returns a function that tells a listener how many of the kernels without a cache entry are compiled."""
    return lambda done, total: listener(Progress("compile", "", done, total))
