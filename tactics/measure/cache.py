"""A file of measurements of tactics that builds share, so that no tactic is timed twice."""

import errno
import fcntl
import io
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from cuda_kernels import files
from cuda_kernels.compile import OPTIONS, nvrtc_version, source_hash
from cuda_kernels.files import open_regular
from tactics.kernels import KERNELS
from tactics.problems import array_functions

# How times are measured: in a CUDA graph; weights not in L2 unless the whole network fits there (Measured.key adds which of the
# two); inputs that come from a ReLU are half zeros; samples at a low clock are repeated.
POLICY = "graph, L2 by network, half zeros behind ReLU, samples of a full clock, v2"
MOST_BYTES = 1 << 28  # of a cache's file: about a million measurements
MOST_US = 1e9  # of a measurement: requests to the child process end long before


class Key(NamedTuple):
    """The facts on which a measurement depends. `device`: title|sm|SMs|L2 bytes|driver; `source`: a hash of the kernel, its
    headers and its compiler (source_key); `problem`, `tactic`: as text; `policy`: POLICY and its additions."""

    device: str
    source: str
    problem: str
    tactic: str
    policy: str = POLICY


@lru_cache(maxsize=64)
def source_key(kernel: str) -> str:
    """Returns a hash of all that decides a kernel's machine code but its compile-time values: sources, headers, options,
    compiler. For library functions it is a hash of array_functions.py and CuPy's version."""
    if kernel == "library":
        from importlib.metadata import version  # it brings half of package email

        return sha256(Path(array_functions.__file__).read_bytes() + version("cupy-cuda13x").encode()).hexdigest()[:24]
    sources = [source_hash(name) for name in KERNELS[kernel].sources]
    return sha256(json.dumps([*sources, OPTIONS, nvrtc_version()]).encode()).hexdigest()[:24]


class Cache:
    """A file of JSON lines, one measurement each, that only grows; the last line of a key counts.

    A line has Key's fields, then either `error`, the text of a failure, or us, low_us, high_us, n (samples), clock_mhz (of the
    last samples), rel_error, `slow` (the number of samples that count though the clock was low) and `over`: whether the tactic
    needs no more samples. Where it needs more, `samples` lists the ones so far, and a later build continues from them.

    Several processes may share the file: each call of add_all is one write() with O_APPEND under a shared lock, and a process
    that replaces the file holds an exclusive lock (`held`). A torn last line is ignored; other invalid lines are skipped and
    counted in `malformed`. If the file cannot be written, one RuntimeWarning says so, and measurements are kept in memory only,
    as with the path None. Raises OSError for a path that is no regular file, and for a file above MOST_BYTES.
    """

    def __init__(self, path: str | os.PathLike | None):
        self.path = Path(path or os.devnull)
        self.malformed = 0
        self._records: dict[Key, dict] = {}
        self._file: int | None = None
        self._lost = path is None
        self._inode, self._end = 0, 0  # of the file as it was last read: its number, and the end of its last whole line
        self._alike: dict[tuple[str, str], list[Key]] = {}
        self.refresh()
        for key in self._records:
            self._alike.setdefault((key.problem, key.tactic), []).append(key)

    def refresh(self) -> None:
        """Reads the lines appended since the last read; the whole file if it was replaced since."""
        if self._lost:
            return
        data, self._inode, begin = _read(self.path, self._inode, self._end)
        lines = data.split(b"\n")
        self._end = begin + len(data) - len(lines[-1])
        for i, line in enumerate(lines):
            if record := parse(line):
                self._records[key_of(record)] = record
            elif line.strip() and i < len(lines) - 1:
                self.malformed += 1

    def get(self, key: Key) -> dict | None:
        return self._records.get(key)

    def __len__(self) -> int:
        return len(self._records)

    def why_missing(self, key: Key) -> str:
        """Returns which of DIFFERENCES made the cache miss: the first one of the nearest measurement of this problem and
        tactic; "new" if the file had none when it was opened."""
        found = [
            [text for same, text in zip(_parts(key, other), DIFFERENCES, strict=True) if not same]
            for other in self._alike.get((key.problem, key.tactic), ())
        ]
        return min(found, key=len)[0] if found and all(found) else "new"

    def add(self, key: Key, **values: Any) -> None:
        """Appends one measurement, or one failure (`error=text`), for a key."""
        self.add_all({key: values})

    def add_all(self, items: Mapping[Key, Mapping[str, Any]]) -> None:
        """Appends several measurements in one write."""
        records = {key: {**key._asdict(), **values, "when": int(time.time())} for key, values in items.items()}
        lines = [json.dumps(record).encode() + b"\n" for record in records.values()]
        for line in lines:
            if parse(line) is None:
                raise ValueError(f"not a measurement: {line.decode().strip()}")
        self._records |= records
        if lines and not self._lost:
            try:
                self._append(b"".join(lines))
            except OSError as e:
                self._give_up(e)

    def _append(self, data: bytes) -> None:
        while True:
            file = self._file
            if file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
                file = self._file = os.open(self.path, flags, 0o666)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file).st_nlink:
                break
            os.close(file)  # replaced, as by `gpu-runtime cache prune`
            self._file = None
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                data = b"\n" + data  # behind a torn last line
            if os.write(file, data) != len(data):
                raise OSError(errno.ENOSPC, "a line was written in part; is the disk full?")
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)

    def _give_up(self, e: OSError) -> None:
        self._lost = True
        files.warn(
            f"the timing cache {self.path} cannot be written ({e.strerror or e}): measured times are lost when this process "
            "ends; name another file with --timingCacheFile, or set GPU_RUNTIME_CACHE to a folder that can be written"
        )

    def used_text(self, verdicts: Iterable[str]) -> str:
        """Returns a line on how many of the wanted times the cache had. `verdicts`: for each wanted time, "" if the cache had
        it, else the result of `why_missing`."""
        found = Counter(verdicts)
        used, total = found.pop("", 0), found.total()
        parts = [f"{count} {'not in it' if why == 'new' else f'measured with {why}'}" for why, count in found.items()]
        malformed = [f"{self.malformed} of its lines are no measurements"] if self.malformed else []
        return "; ".join([f"{self.path}: {used} of {used + total} times used", *parts, *malformed])

    def sync(self) -> None:
        """Forces the added lines to the disk."""
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


@contextmanager
def held(name: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yields a cache file's bytes under an exclusive lock, so that no process appends until the `with` block ends. Raises
    OSError."""
    while True:
        with open_regular(name) as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # else another process has just replaced it
                yield file.read()
                return


def key_of(record: Mapping[str, Any]) -> Key:
    return Key(*(record[field] for field in Key._fields))


def is_over(record: Mapping[str, Any] | None) -> bool:
    """Returns whether a cache line (None: there is no line) is final: it has an error, or all samples that the tactic needs."""
    return record is not None and record.get("over") is not False


DIFFERENCES = ("another GPU", "another driver", "other kernel sources", "another policy")


def _parts(key: Key, other: Key) -> Iterator[bool]:
    """Yields, for each of DIFFERENCES, whether the two keys agree in it."""
    (gpu, _, driver), (other_gpu, _, other_driver) = key.device.rpartition("|"), other.device.rpartition("|")
    return iter((gpu == other_gpu, driver == other_driver, key.source == other.source, key.policy == other.policy))


def _read(path: Path, inode: int, begin: int) -> tuple[bytes, int, int]:
    """Returns (bytes of the file from an offset on, the file's inode, that offset): the offset is `begin`, or 0 if the path now
    names another file than `inode`. Returns (b"", 0, 0) for a missing or unreadable file. Raises OSError above MOST_BYTES."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if (size := status.st_size) > MOST_BYTES:
                raise OSError(errno.EFBIG, f"expected a timing cache, at most {MOST_BYTES} bytes long, got {size}", str(path))
            begin = begin if status.st_ino == inode and begin <= size else 0
            file.seek(begin)
            return file.read(), status.st_ino, begin
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return b"", 0, 0


def whole_lines(data: bytes) -> dict[Key, bytes]:
    """Returns key -> its last line, from a cache file's bytes, in the order of those lines; a torn last line is ignored. Raises
    ValueError for any other invalid line.
    """
    found: dict[Key, bytes] = {}
    for number, line in enumerate(io.BytesIO(data), 1):
        if record := parse(line):
            found.pop(key_of(record), None)
            found[key_of(record)] = line.rstrip(b"\n") + b"\n"
        elif line.strip() and (line.endswith(b"\n") or not found):
            got = line[:60].decode(errors="replace").strip()
            raise ValueError(f"line {number}: expected a measurement of a timing cache, got {got!r}")
    return found


def parse(line: bytes) -> dict | None:
    """Returns the fields of a cache line as a dict; None if the line is no measurement."""
    try:
        record = json.loads(line)
        if not all(isinstance(record[f], str) for f in Key._fields):
            return None
        if isinstance(record.get("error"), str):
            return record
        low, us, high = (record[f] for f in ("low_us", "us", "high_us"))
        samples = record["samples"] if record.get("over") is False else [us]
        count = record.get("n", 1)
        whole = type(count) is int and count > 0 and type(record.get("slow") or 0) is int
        good = are_times([low, us, high, *samples]) and len(samples) > 0 and whole
        return record if good and low <= us <= high else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def are_times(values: object) -> bool:
    """Returns whether `values` is a list of times in microseconds: int or float (bool is neither here), above 0, below
    MOST_US."""
    return isinstance(values, list) and all(type(v) in (int, float) and 0 < v < MOST_US for v in values)
