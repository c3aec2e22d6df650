"""Atomic writes of engines, exports and cache files, and reads of regular files only.

A file is written next to its target, forced to the disk and renamed over it, so a reader of the target sees either the old or
the new bytes. Its writer holds a lock on the temporary file. The temporary file of a killed process has no lock, and the next
writer in that folder removes it.
"""

import errno
import fcntl
import os
import re
import signal
import stat
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

TEMPORARY = re.compile(r"\.gpu_runtime-[0-9a-f]{32}\.tmp")
Name = str | os.PathLike


def fault(name: Name, make_folders: bool = False) -> str | None:
    """Why a file cannot be written under that name, as far as can be known before, or None.

    `make_folders`: missing folders are no reason, see write.
    """
    try:
        path, kind = Path(os.path.realpath(name)), 0
        with suppress(FileNotFoundError, NotADirectoryError):
            kind = os.stat(name).st_mode
    except (OSError, ValueError) as e:  # a link to itself, too long a name, one with a zero byte
        return getattr(e, "strerror", None) or str(e)
    if not os.fspath(name):
        return "expected the name of a file, got none"
    if stat.S_ISDIR(kind) or os.fspath(name).endswith("/"):
        return "expected a file, got a folder: add a file name"
    if kind and not stat.S_ISREG(kind):
        return "expected a regular file, got a device or a pipe"
    folder = path.parent
    while make_folders and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is {'not a folder' if folder.exists() else 'no existing folder: create it first'}"
    if not os.access(folder, os.W_OK | os.X_OK) or (kind and not os.access(path, os.W_OK)):
        return "no permission to write it: choose another place, or change the permissions"
    return None


def write(name: Name, data: bytes) -> None:
    """Writes one file, and makes its folder if needed; see write_all."""
    with suppress(OSError, ValueError):  # write_all raises the error, with its reason
        Path(os.path.realpath(name)).parent.mkdir(parents=True, exist_ok=True)
    write_all({name: data})


def write_all(files: Mapping[Name, bytes], written: list[str] | None = None) -> None:
    """Writes every file, or none if one cannot be written; `written` gets the name of each written file.

    Links are followed; an existing file keeps its mode, a new file gets the umask's. Raises OSError with the name of the faulty
    file and a sentence; devices, pipes and folders are never replaced.
    """
    staged: list[tuple[int, Path, Path]] = []
    name: Name = ""
    try:
        for name, data in files.items():
            if problem := fault(name):
                raise OSError(errno.EINVAL, problem, os.fspath(name))
            path = Path(os.path.realpath(name))
            fd, temp = _temporary(path.parent)
            staged.append((fd, temp, path))
            _fill(fd, data, path)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # not between two renames
        try:
            for _, temp, path in staged:
                os.replace(temp, path)
                if written is not None:
                    written.append(str(path))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for folder in {path.parent for *_, path in staged}:
            _sync(folder)
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), os.fspath(name)) from None
    finally:
        for fd, temp, _ in staged:
            with suppress(OSError):
                temp.unlink()
            os.close(fd)


def _temporary(folder: Path) -> tuple[int, Path]:
    """Makes a new file in `folder`, open and locked: (descriptor, path). Removes files left by dead processes."""
    with os.scandir(folder) as entries:
        for stale in [folder / e.name for e in entries if TEMPORARY.fullmatch(e.name)]:
            with suppress(OSError):  # its writer lives, or it is another user's
                _remove_unlocked(stale)
    while True:
        temp = folder / f".gpu_runtime-{os.urandom(16).hex()}.tmp"
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # a file system without locks: nothing is removed there
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, temp
        os.close(fd)  # removed before it was locked


def _remove_unlocked(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(fd)


def _fill(fd: int, data: bytes, path: Path) -> None:
    """Write the bytes and force them to the disk; give the file the owner and mode of the file that it replaces."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(fd, rest[: 1 << 30]) :]
    with suppress(FileNotFoundError):
        old = path.stat()
        if (old.st_uid, old.st_gid) != (os.fstat(fd).st_uid, os.fstat(fd).st_gid):
            with suppress(OSError):  # another user's file: it becomes ours, like any new file
                os.fchown(fd, old.st_uid, old.st_gid)
        os.fchmod(fd, stat.S_IMODE(old.st_mode) & 0o777)
    os.fsync(fd)


def _sync(folder: Path) -> None:
    """Force the renames to the disk, where the file system can."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def open_regular(name: Name) -> BinaryIO:
    """Opens a regular file for reading. Raises OSError for another kind, without waiting: pipes never open, devices never
    end.
    """
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "expected a file, got a folder", os.fspath(name))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "expected a regular file, got a device or a pipe", os.fspath(name))
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


# ---- the cache


def cache_dir() -> Path:
    """The folder of compiled kernels, the emulator and timings: GPU_RUNTIME_CACHE, or the user's cache folder."""
    root = os.environ.get("GPU_RUNTIME_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu_runtime"


_TOLD: set[Path] = set()  # cache folders that this process has complained about


def keep(path: Path, data: bytes) -> bool:
    """Puts a file into the cache and returns whether it is there.

    Nothing depends on the cache, so an unwritable folder (read-only, full, missing) only gives one RuntimeWarning.
    """
    try:
        write(path, data)
        return True
    except OSError as e:
        warn_once(e)
        return False


OURS = ("gpu_runtime", "tactics", "cuda_kernels", "contextlib", "functools")  # the last two run our decorators


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns at the caller's line that led here. From Python 3.12 on warnings.warn has `skip_file_prefixes` for this."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_once(e: OSError) -> None:
    """Warns that the cache cannot be written, once for each folder and process."""
    root = cache_dir()
    if root not in _TOLD:
        _TOLD.add(root)
        warn(
            f"the cache folder {root} cannot be written ({e.strerror or e}): compiled kernels and measured times are lost when "
            "this process ends; set GPU_RUNTIME_CACHE to a folder that can be written"
        )
