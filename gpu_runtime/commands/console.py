"""Printing by commands: text and JSON on stdout, messages on stderr, and exit codes."""

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

WIDTH, LEAST_WIDTH = 120, 40  # columns without a terminal, and least columns that are assumed for a terminal
NOT_PASSED, INTERRUPTED = 5, 130  # exit codes
QUIET = threading.Event()  # set by --quiet: only errors and warnings are printed
OUTPUT = threading.RLock()  # held by the thread that writes
DRAWN: list[Callable[[], None]] = []  # functions that clear a line which a thread draws again and again
UNWRITTEN: list[OSError] = []  # errors of writing to stdout: nothing is printed to it after the first


def is_terminal() -> bool:
    """Returns whether stdout counts as a terminal: it is one, or the environment has COLUMNS."""
    return "COLUMNS" in os.environ or sys.stdout.isatty()


def columns() -> int:
    """Returns the width of stdout's terminal in columns; WIDTH without a terminal."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if is_terminal() else WIDTH


def say(text: str, err: bool = False, nl: bool = True) -> None:
    """Prints a text. It may contain names from files: characters that control a terminal are replaced.

    `err`: to stderr instead of stdout; `nl`: a newline follows. With --quiet, and after stdout failed, only stderr is written.
    """
    if (QUIET.is_set() or UNWRITTEN) and not err:
        return
    with OUTPUT:
        for clear in DRAWN:
            clear()
        try:
            click.echo(printable(text, keep="\n"), err=err, nl=nl)
        except OSError as e:  # the reader is gone, or no space is left: the command goes on and writes its files
            if not err:
                UNWRITTEN.append(e)
                _discard_stdout()


def _discard_stdout() -> None:
    """Redirects stdout to nothing, so that buffered text does not fail again when the process ends."""
    with suppress(OSError):  # in a test, stdout may have no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stdout_problem() -> str:
    """Returns the error that kept text from stdout; "" if all text was printed, or if the reader of a pipe (such as `head`)
    closed it.
    """
    found = [e for e in UNWRITTEN if e.errno != errno.EPIPE]
    return f"standard output cannot be written: {found[0].strerror}" if found else ""


def answer(as_json: bool, data: Callable[[], object], text: Callable[[], str]) -> None:
    """Prints the result of a command: what `data` returns as one JSON document if `as_json`, else the text that `text` returns,
    which ends with a newline.
    """
    say(json.dumps(data(), indent=1) if as_json else text(), nl=as_json)


def end_now(code: int, text: str) -> NoReturn:
    """Prints an error and ends the process without waiting for its threads."""
    say(text, err=True)
    sys.stdout.flush()
    os._exit(code)


def nonfinite_text(layers: Sequence[str]) -> str:
    """Returns the sentence, with the cure, on these layers, which wrote infinite values or NaN although inputs are finite."""
    text = f"{len(layers)} layers wrote infinite values or NaN (FP16's maximum is 65504): {', '.join(layers)}"
    return f"{text}; build with --calibration=FILE.npz of typical inputs, which scales such tensors or stores them in FP32"


def not_passed() -> NoReturn:
    """Ends the command with the exit code for a check that did not pass."""
    click.get_current_context().exit(NOT_PASSED)


def json_bytes(data: object) -> bytes:
    """Returns the bytes of a JSON file, which ends with a newline."""
    return (json.dumps(data, indent=1) + "\n").encode()
