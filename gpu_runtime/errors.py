"""The exceptions that callers meet. Each message says the problem, the expected and actual value, and the cure.

Messages quote names out of files: unprintable characters in them, such as a terminal's control sequences, are shown escaped.
"""

import errno
import gc
import os
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from cuda_kernels import extras
from cuda_kernels.compile import CompileError
from gpu_runtime.text import printable, suggest


class ModelError(ValueError):
    """The ONNX model (or the sizes given for it) cannot be used."""

    def __init__(self, message: object = ""):
        super().__init__(printable(str(message), keep="\n"))


class EngineError(ValueError):
    """An engine file cannot be used: torn, altered, of another format, or for another device."""

    def __init__(self, message: object = ""):
        super().__init__(printable(str(message), keep="\n"))


class _Missing(FileNotFoundError):
    """The base of errors for a path without a file: the message, `errno` and `filename`."""

    def __init__(self, message: object = "", filename: object = None):
        super().__init__(printable(str(message), keep="\n"))
        self.errno, self.filename = errno.ENOENT, filename

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.filename)


class NoModelError(_Missing, ModelError):
    """There is no such file of a model."""


class NoEngineError(_Missing, EngineError):
    """There is no such file of an engine."""


class QueueFullError(RuntimeError):
    """A context has as many queued runs as it takes (`max_queued`): nothing was queued."""


class InternalError(RuntimeError):
    """gpu_runtime made a result that it knows to be wrong, and keeps it back. This is a defect of gpu_runtime: no other model,
    option or kernel source is the cure, so it is none of the errors above, for which callers have a cure.
    """


def check_options(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises TypeError if an option of `given` is not `known` to the function; the message proposes those spelt like it."""
    if unknown := [name for name in given if name not in known]:
        raise TypeError(printable(f"{function} has no option {', '.join(map(repr, unknown))}{suggest(unknown, known)}"))


P = ParamSpec("P")
R = TypeVar("R")


def bounded(function: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorates a function whose first argument is a model to raise ModelError for a model that memory or the stack cannot
    hold.

    Meanwhile Python's collector of cycles rests: it would walk through all tactics again and again, a sixth of the time of a
    build.
    """

    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @wraps(function)
    def run(model: Any, *args: P.args, **options: P.kwargs) -> R:
        name = model if isinstance(model, (str, os.PathLike)) else f"the {type(model).__name__}"
        check_options(f"gpu_runtime.{function.__name__}", options, known)
        enabled = gc.isenabled()
        gc.disable()
        try:
            with extras.named():
                return function(model, *args, **options)
        except MemoryError:
            cure = "free memory, or give smaller sizes with --shapes"
            raise ModelError(f"{name}: it needs more memory than is available: {cure}") from None
        except RecursionError:
            raise ModelError(f"{name}: it is nested more deeply than any exporter writes: export it again") from None
        finally:
            if enabled:
                gc.enable()

    return run


__all__ = ["CompileError", "EngineError", "InternalError", "ModelError", "QueueFullError", "bounded"]
