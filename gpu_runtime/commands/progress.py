"""Progress of a command on stderr, after its first second: on a terminal one line that is drawn again and again, else a line
every few seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TextIO

import click

from gpu_runtime.commands import console
from gpu_runtime.progress import Progress
from gpu_runtime.text import printable

if TYPE_CHECKING:
    from gpu_runtime.progress import Listener

FIRST_S = 1.0  # seconds without progress lines; a shorter command shows none
BETWEEN_S = 4.0  # seconds between two lines where there is no terminal
TICK_S = 0.2  # seconds between two looks at the clock
MARK = "["  # the first character of all lines: "[12 s] "


TUNING = ("tune", "wait", "time", "plan", "compile")  # stages that alternate while a build times tactics


class ProgressLine:
    """A listener that shows the progress of a command on `stream`, stderr by default, while its `with` block lasts, also while
    it is not called.

    `verbose`: each call adds a line at once. `clock`: returns seconds; tests pass a clock of their own and call `tick`.
    """

    def __init__(self, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._verbose, self._clock = verbose, clock
        self._redrawn = self._stream.isatty() and os.environ.get("TERM") != "dumb" and not verbose
        self._began = self._said = clock()
        self._now = self._outer = Progress("start")  # _outer: the stage before _now, shown again when _now has ended
        self._since = {"start": self._began}  # stage -> the clock's time when it began
        self._width = 0  # columns of the drawn line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw_on, daemon=True)

    def __call__(self, progress: Progress) -> None:
        with console.OUTPUT:
            begins, ends = not progress.done, bool(progress.total) and progress.done == progress.total
            self._since[progress.stage] = self._clock() if begins else self._since.get(progress.stage, self._began)
            if progress.stage != self._now.stage:
                self._outer = self._now
            self._now = self._outer if ends else progress
            if self._verbose:
                self._line(f"[{progress.stage}] {progress.detail or f'{progress.done} of {progress.total}'}")

    def __enter__(self) -> ProgressLine:
        console.DRAWN.append(self.clear)
        _emulator_log().addFilter(self._heard)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Ends the display: clears the drawn line and draws no more."""
        _emulator_log().removeFilter(self._heard)
        self._ended.set()
        self._thread.join()
        self.clear()
        if self.clear in console.DRAWN:
            console.DRAWN.remove(self.clear)

    def tick(self) -> None:
        """Shows the present stage: on a terminal at each call, else BETWEEN_S after the last line; not in the first second."""
        with console.OUTPUT:
            now = self._clock()
            if now - self._began < FIRST_S or console.QUIET.is_set():
                return
            if self._redrawn:
                text = _cut(self._text(now), self._columns() - 1 - len("^C"))
                self._write(f"\r{text}{' ' * (self._width - _width(text))}")
                self._width = _width(text)
            elif now - self._said >= BETWEEN_S or self._said == self._began:
                self._line(self._text(now))

    def clear(self) -> None:
        """Removes the drawn line from the terminal, with the ^C that a terminal shows behind it."""
        with console.OUTPUT:
            if self._width:
                self._write(f"\r{' ' * (self._width + len('^C'))}\r")
                self._width = 0

    def _heard(self, record: object) -> bool:
        """Shows the emulator's compilation as a stage; a filter of its log that returns False, so that no line is printed."""
        self(Progress("emulator", "for this CPU"))
        return False

    def _draw_on(self) -> None:
        """Shows the present stage again and again, in a thread, until `end`."""
        while not self._ended.wait(TICK_S):
            self.tick()

    def _text(self, now: float) -> str:
        """Returns the line for the present stage at the clock's time `now`: seconds since the start, stage and time left."""
        p = self._now
        took = now - self._since[p.stage]
        rest = (p.expected or p.total) - p.done
        left = f", about {_span(took * rest / p.done)} left" if p.done and rest > 0 and took >= FIRST_S else ""
        return f"{MARK}{_span(now - self._began)}] {p.text(left)}"

    def _line(self, text: str) -> None:
        self._said = self._clock()
        self._write(printable(text) + "\n")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader is gone: a closed pipe, a closed stream
            self._ended.set()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or console.WIDTH
        except (OSError, ValueError):
            return console.WIDTH


class Interrupts:
    """A listener that handles Ctrl-C during a build while its `with` block lasts, in the main thread only; it passes each call
    on to `listener`.

    While tactics are timed, the first Ctrl-C ends the timing and the build goes on; any other Ctrl-C ends the command.
    `ended`: returns whether the time for timing tactics has passed.
    """

    def __init__(self, listener: Listener, ended: Callable[[], bool]):
        self._listener, self._ended = listener, ended
        self._tuning = self._pressed = False
        self._usual = signal.default_int_handler
        self._installed = False

    def __call__(self, progress: Progress) -> None:
        self._tuning = progress.stage in ("tune", "network") or (self._tuning and progress.stage in TUNING)
        self._listener(progress)

    def ended(self) -> bool:
        """Returns whether timing tactics must end: after Ctrl-C, or when the time for it has passed."""
        return self._pressed or self._ended()

    def __enter__(self) -> Interrupts:
        usual = signal.getsignal(signal.SIGINT) is self._usual  # a shell ignores SIGINT for commands in the background
        self._installed = usual and threading.current_thread() is threading.main_thread()
        if self._installed:
            signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._usual)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGINT: ends the timing of tactics, or raises KeyboardInterrupt the second time and at other stages."""
        if self._pressed or not self._tuning:
            self._usual(number, frame)
        self._pressed = True
        console.say("Ctrl-C: the best plan with the times so far is taken; once more ends the command", err=True)


def _emulator_log() -> logging.Logger:
    return logging.getLogger("cuda_kernels.emulator.build")


def listening(verbose: bool = False) -> ProgressLine:
    """Returns a listener that shows the progress of the running command until `end` is called or the command ends in any way.
    `verbose`: as for ProgressLine.
    """
    return click.get_current_context().with_resource(ProgressLine(verbose=verbose))


def _span(seconds: float) -> str:
    """Returns a duration as text.

    >>> _span(12.4), _span(75)
    ('12 s', '1 min 15 s')
    """
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


def _width(text: str) -> int:
    """Returns the number of columns that a text takes on a terminal; wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _cut(text: str, columns: int) -> str:
    """Returns a text cut to this number of columns, with an ellipsis at the end if characters were cut off."""
    if _width(text) <= columns:
        return text
    kept = len(text)
    while kept and _width(text[:kept]) > columns - 3:
        kept -= 1
    return text[:kept] + "..."[: max(columns, 0)]
