"""The files that a command writes: checked before its work, and written all or none after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from cuda_kernels import files
from gpu_runtime import file_kinds

WRITTEN: list[str] = []  # files that this process has put in place
KEPT: list[str] = []  # sentences on other things that an interrupted command leaves behind


# Kind of file -> (its name in messages, whether a file with these first bytes may be of this kind).
KINDS: Mapping[str, tuple[str, Callable[[bytes], bool]]] = {
    "engine": ("an engine", file_kinds.is_engine),
    "onnx": ("an ONNX model", file_kinds.is_onnx),
    "npz": ("a .npz file", lambda head: head.startswith(b"PK")),
    "npy": ("a .npy file", lambda head: head.startswith(b"\x93NUMPY")),
    "text": ("a text", lambda head: b"\0" not in head and not file_kinds.is_onnx(head)),
}


def _of_another_kind(path: Path, kind: str) -> str | None:
    """Returns why an existing file must not be overwritten: it is not of `kind`, a key of KINDS. Returns None if it may be
    overwritten.
    """
    what, fits = KINDS[kind]
    if not path.is_file() or not (head := file_kinds.head_of(path)) or fits(head):
        return None
    return f"is an existing file of another kind, which {what} would overwrite: give another name, or remove the file"


def _unmade(path: Path) -> str | None:
    """Returns why no file can be made in the folder of `path`, None if one can: permissions do not show that /proc takes none,
    even from root.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as e:
        return f"no file can be made in {path.parent}: {e.strerror}; choose another folder"


def check_targets(
    targets: Mapping[str, str | None], sources: Iterable[str], kinds: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Path]:
    """Returns option -> the real path of each file to write; options without a file are left out.

    `targets`: option -> the name of its file as typed, None if the option was not given; `sources`: files that are read, which
    must not be overwritten; `kinds`: option -> its kind, a key of KINDS, by default "text". Raises ValueError, before any work
    is done, for a file that cannot be written.
    """
    found: dict[str, Path] = {}
    for option, name in targets.items():
        if name is None:
            continue
        path = Path(os.path.realpath(name))
        twin = next((o for o, other in found.items() if other == path), None)
        if name.startswith("="):  # -o=FILE
            problem: str | None = "expected the name of a file: write it after a space, or as --option=FILE"
        elif name == "-":
            problem = "nothing is written to standard output: give the name of a file, or ./- for one of that name"
        elif problem := files.fault(name) or _unmade(path):
            pass
        elif any(os.path.exists(s) and os.path.samefile(s, name) for s in sources if path.exists()):
            problem = "is a file that this command reads: give another name"
        elif twin:
            problem = f"is also the file of {twin}: give two names"
        else:
            found[option] = path
            continue
        raise ValueError(f"{option} {name}: {problem}" if name else f"{option}: {problem}")
    for option, path in found.items():
        if problem := _of_another_kind(path, kinds.get(option, "text")):
            raise ValueError(f"{option} {targets[option]}: {problem}")
    return found


def write_all(contents: Mapping[str | os.PathLike[str], bytes]) -> None:
    """Writes every file or none. `contents`: path -> bytes. Raises ValueError with the problem and the files that this process
    had already written.
    """
    try:
        files.write_all(contents, WRITTEN)
    except OSError as e:
        raise ValueError(
            f"{e.filename}: could not be written: {e.strerror}; {written()}. Check that its folder is writable and has space"
        ) from None


def written() -> str:
    """Returns the words for messages on the files that this process has written, or that it has written none."""
    return f"already written: {', '.join(WRITTEN)}" if WRITTEN else "nothing was written or overwritten"
