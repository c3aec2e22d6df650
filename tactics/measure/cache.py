"""Measurements of tactics in a file that builds share: what was timed once is not timed again."""

import errno
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from cuda_kernels.files import open_regular

POLICY = "graph, activations warm, weights cold, random data, v1"
MOST_BYTES = 1 << 28  # of a cache's file: about a million measurements
MOST_US = 1e9  # of a measurement: requests to the child process end long before


class Key(NamedTuple):
    """What decides a measurement. `device`: title, sm, SMs, L2 bytes, driver; `source`: kernel, headers, compiler."""

    device: str
    source: str
    problem: str
    tactic: str
    policy: str = POLICY


class Cache:
    """Measurements in a file of JSON lines, one each, only ever appended to; of several for one key the last counts.

    A line: Key's fields, then either us, low_us, high_us, n, clock_mhz, rel_error or `error`, the text of a failure. Each
    is one write() to a file opened with O_APPEND, so several processes may share it. A torn last line is ignored, other
    lines that are no measurement are too, and counted in `malformed`. Another driver, GPU or source is a miss. Where the file
    cannot be written, one RuntimeWarning says so, and measurements last as long as the process. Raises OSError for a path
    that is no regular file, or one that is longer than any cache gets.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.malformed = 0
        self._records: dict[Key, dict] = {}
        self._file: int | None = None
        self._lost = False
        lines = _read(self.path).split(b"\n")
        for i, line in enumerate(lines):
            record = _parse(line)
            if record:
                self._records[Key(*(record[f] for f in Key._fields))] = record
            elif line.strip() and i < len(lines) - 1:
                self.malformed += 1

    def get(self, key: Key) -> dict | None:
        return self._records.get(key)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, key: Key, **values: Any) -> dict[str, Any]:
        """Append one measurement, or one failure (`error=text`)."""
        record = {**key._asdict(), **values, "when": int(time.time())}
        line = json.dumps(record).encode() + b"\n"
        if _parse(line) is None:
            raise ValueError(f"not a measurement: {line.decode().strip()}")
        self._records[key] = record
        if not self._lost:
            try:
                self._append(line)
            except OSError as e:
                self._give_up(e)
        return record

    def _append(self, line: bytes) -> None:
        file = self._file
        if file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line  # behind a torn last line
        if os.write(file, line) != len(line):
            raise OSError(errno.ENOSPC, "a line was written in part; is the disk full?")

    def _give_up(self, e: OSError) -> None:
        self._lost = True
        warnings.warn(
            f"the timing cache {self.path} cannot be written ({e.strerror or e}): measured times are lost when this process "
            "ends; name another file with --timingCacheFile, or set GPU_RUNTIME_CACHE to a folder that can be written",
            RuntimeWarning,
            stacklevel=4,
        )

    def sync(self) -> None:
        """Force what was added to the disk."""
        if self._file is not None and not self._lost:
            try:
                os.fsync(self._file)
            except OSError as e:
                self._give_up(e)

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None


def _read(path: Path) -> bytes:
    """The file's bytes; none where it cannot be read, as one of another user."""
    try:
        with open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
                raise OSError(errno.EFBIG, f"expected a timing cache, at most {MOST_BYTES} bytes long, got {size}", str(path))
            return file.read()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return b""


def _parse(line: bytes) -> dict | None:
    """The record on a line of the cache, or None."""
    try:
        record = json.loads(line)
        if not all(isinstance(record[f], str) for f in Key._fields):
            return None
        if isinstance(record.get("error"), str):
            return record
        times = [record[f] for f in ("low_us", "us", "high_us")]
        if any(type(v) not in (int, float) for v in times):  # a bool is an int too
            return None
        low, us, high = times
        return record if 0 < low <= us <= high < MOST_US else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
