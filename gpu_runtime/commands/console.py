"""What commands print, and the JSON that they print or write."""

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import click

from gpu_runtime.text import printable

WIDTH, LEAST_WIDTH = 120, 40  # columns of what is no terminal; fewer than the second are taken for as many
NOT_PASSED, INTERRUPTED = 5, 130  # exit codes
QUIET = threading.Event()  # set by --quiet: only errors and warnings are printed
OUTPUT = threading.RLock()  # held by who writes
DRAWN: list[Callable[[], None]] = []  # what clears a line that a thread draws again and again
UNWRITTEN: list[OSError] = []  # why stdout took no more: nothing is printed to it after the first


def is_terminal() -> bool:
    """Returns whether a person reads stdout: it is a terminal, or COLUMNS is set."""
    return "COLUMNS" in os.environ or sys.stdout.isatty()


def columns() -> int:
    """Returns the width of stdout's terminal in columns; WIDTH without a terminal."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if is_terminal() else WIDTH


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Prints a text, which may contain names from files: no character of it commands the terminal.

    `err`: to stderr instead of stdout; `nl`: a newline follows.
    """
    if (QUIET.is_set() or UNWRITTEN) and not err:
        return
    with OUTPUT:
        for clear in DRAWN:
            clear()
        try:
            click.echo(printable(text, keep="\n"), err=err, nl=nl)
        except OSError as e:  # nobody reads any more, or no space is left: what the command is for goes on
            if not err:
                UNWRITTEN.append(e)
                _discard_stdout()


def _discard_stdout() -> None:
    """Redirects stdout to nothing, so that buffered text does not fail again when the process ends."""
    with suppress(OSError):  # a stream of a test is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdout_problem() -> str:
    """Returns why not everything could be printed, "" if it was, or if the reader of a pipe (such as `head`) closed it."""
    found = [e for e in UNWRITTEN if e.errno != errno.EPIPE]
    return f"standard output cannot be written: {found[0].strerror}" if found else ""


def answer(as_json: bool, data: Callable[[], object], text: Callable[[], str]) -> None:
    """Prints `data` as one JSON document if `as_json`, else `text`, which ends with a newline."""
    say(json.dumps(data(), indent=1) if as_json else text(), nl=as_json)


def end_now(code: int, text: str) -> NoReturn:
    """Prints an error and ends the process without waiting for its threads."""
    say(text, err=True)
    sys.stdout.flush()
    os._exit(code)


def nonfinite_text(layers: Sequence[str]) -> str:
    """Returns the sentence on layers that wrote infinite values or NaN although inputs are finite, with the cure."""
    text = f"{len(layers)} layers wrote infinite values or NaN (FP16's maximum is 65504): {', '.join(layers)}"
    return f"{text}; build with --calibration=FILE.npz of typical inputs, which scales such tensors or stores them in FP32"


def not_passed() -> NoReturn:
    """Ends the command with the exit code for a check that did not pass."""
    click.get_current_context().exit(NOT_PASSED)


def json_bytes(data: object) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode()
