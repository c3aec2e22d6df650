"""The failures that `gpu-runtime doctor` found on a device, in a cache file: builds read it and leave these kernels out of
plans.

Each device model, as the timing cache identifies it, has a file with a record per driver and version of the kernels' sources; a
record is valid only for its driver and sources. Other content of a file is ignored with a warning.
"""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cuda_kernels import files
from cuda_kernels.compile import OPTIONS, nvrtc_version, source_hash
from cuda_kernels.device import Device
from gpu_runtime.progress import warn
from gpu_runtime.text import first_of
from tactics import codec
from tactics.codec import Check
from tactics.kernels import KERNELS
from tactics.measure.timing import driver_version

VERSION = 1  # of the file's format
MOST_BYTES = 1 << 20  # of a file
MOST_RECORDS = 8  # of a file: the newest are kept
MOST_TEXT = 500  # characters of a reason
AGAIN = "run `gpu-runtime doctor` again"

Text = Annotated[str, Check(f"a printable text of at most {MOST_TEXT} characters", lambda v: _is_text(v))]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()


def _is_known(value: object) -> bool:
    """Returns whether a text is a kernel's name, which "_" and its instruction or tile may follow."""
    return _is_text(value) and any(value == k or str(value).startswith(k + "_") for k in KERNELS)


@dataclass(frozen=True, slots=True)
class Failure:
    """A kernel, or a kernel with one of its tiles, that builds must leave out (`what`), and its failure in words (`why`)."""

    what: Annotated[str, Check("a kernel, or one with its tile", _is_known)]
    why: Text


@dataclass(frozen=True, slots=True)
class Findings:
    """The failures on a device with one driver and one version of the kernels' sources (`source`, a hash)."""

    device: Text
    driver: Text
    source: Text
    failed: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    """The content of a device model's file. `version`: of the format; `records`: the newest first."""

    version: int
    records: tuple[Findings, ...]


def key_of(device: Device) -> Findings:
    """Returns the key of the present findings, a record without failures: device model, present driver and present sources."""
    source = hashlib.sha256(json.dumps([source_hash(), OPTIONS, nvrtc_version()]).encode()).hexdigest()[:24]
    return Findings(device.key, driver_version(), source)


def path_of(device: Device) -> Path:
    """Returns the path of the file with the findings on this device model."""
    return files.cache_dir() / "doctor" / f"{hashlib.sha256(device.key.encode()).hexdigest()[:16]}.json"


def keep(device: Device, failed: tuple[Failure, ...]) -> bool:
    """Write the failures to the device's file, in place of an earlier record of the same driver and sources.

    Returns whether the file was written.
    """
    mine = replace(key_of(device), failed=failed)
    others = [r for r in read(path_of(device)) if replace(r, failed=()) != replace(mine, failed=())]
    found = _File(VERSION, (mine, *others)[:MOST_RECORDS])
    return files.keep(path_of(device), json.dumps(codec.to_json(_File, found), indent=1).encode() + b"\n")


def read(path: Path) -> tuple[Findings, ...]:
    """Returns the records of a file; () for a missing file, and with a warning for a file with other content."""
    try:
        with files.open_regular(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > MOST_BYTES:
                raise ValueError(f"it has {size} bytes, expected {MOST_BYTES} at most")
            found = codec.from_json(_File, json.loads(file.read()))
        if found.version != VERSION:
            raise ValueError(f"version {found.version}, expected {VERSION}")
        return found.records
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as e:
        reason = getattr(e, "strerror", None) or "".join(c if c.isprintable() else "?" for c in str(e))[:200]
        warn(f"{path}: not written by `gpu-runtime doctor`: {reason}; it is ignored: {AGAIN}, or remove the file")
        return ()


def of(device: Device) -> tuple[Failure, ...]:
    """Returns the failures that are recorded for this device with the present driver and sources.

    Warns if failures are recorded only for another driver or other sources, which no longer count.
    """
    here, found = key_of(device), read(path_of(device))
    mine = [r for r in found if replace(r, failed=()) == here]
    if not mine and (stale := next((r for r in found if r.device == here.device and r.failed), None)):
        changed = f"driver {stale.driver}, now {here.driver}" if stale.driver != here.driver else "other kernel sources"
        text = f"`gpu-runtime doctor` saw {len(stale.failed)} kernels or tiles fail on {device.title}, with {changed}"
        warn(f"{text}: ignored; {AGAIN}")
    return mine[0].failed if mine else ()


def applied(device: Device) -> Device:
    """Returns the device without the kernels that failed on it (`left_out`), and warns of these kernels."""
    failed = of(device)
    if failed:
        text = f"plans exclude these kernels because they failed on {device.title}: {first_of([f.what for f in failed], 4)}"
        warn(f"{text}. After a driver update run `gpu-runtime doctor` again, or delete {path_of(device)}")
    return replace(device, left_out=tuple((f.what, f.why) for f in failed))
