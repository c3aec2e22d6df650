"""What `gpu-runtime doctor` saw fail on a device, in a file of the cache that builds read: what failed there no plan may hold.

A file for each kind of device, as the timing cache tells them apart, with a record for each driver and version of the kernels'
sources: a finding says nothing of others. Whatever a file holds that is no such record is ignored, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cuda_kernels import files
from cuda_kernels.compile import OPTIONS, nvrtc_version, source_hash
from cuda_kernels.device import Device
from tactics import codec
from tactics.codec import Check
from tactics.kernels import KERNELS
from tactics.measure.timing import driver_version

VERSION = 1  # of the file
MOST_BYTES = 1 << 20
MOST_RECORDS = 8  # of other drivers and sources: the newest are kept
MOST_TEXT = 500  # characters of a reason
AGAIN = "run `gpu-runtime doctor` again"

Text = Annotated[str, Check(f"a printable text of at most {MOST_TEXT} characters", lambda v: _is_text(v))]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()


def _is_known(value: object) -> bool:
    """Whether a text is a kernel's name, or begins with one and goes on with its instruction or tile."""
    return _is_text(value) and any(value == k or str(value).startswith(k + "_") for k in KERNELS)


@dataclass(frozen=True, slots=True)
class Failure:
    """`what`: a kernel, or a kernel with its tile; `why`: what it did instead, in words."""

    what: Annotated[str, Check("a kernel, or one with its tile", _is_known)]
    why: Text


@dataclass(frozen=True, slots=True)
class Findings:
    """What failed on a device under one driver and with one version of the sources."""

    device: Text
    driver: Text
    source: Text
    failed: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class _File:
    version: int
    records: tuple[Findings, ...]


def key_of(device: Device) -> Findings:
    """Findings of nothing, for this device, driver and sources."""
    source = hashlib.sha256(json.dumps([source_hash(), OPTIONS, nvrtc_version()]).encode()).hexdigest()[:24]
    return Findings(device.key, driver_version(), source)


def path_of(device: Device) -> Path:
    """The file of this kind of device."""
    return files.cache_dir() / "doctor" / f"{hashlib.sha256(device.key.encode()).hexdigest()[:16]}.json"


def keep(device: Device, failed: tuple[Failure, ...]) -> bool:
    """Write down what failed, in place of what was written for the same driver and sources -> whether it is there."""
    mine = replace(key_of(device), failed=failed)
    others = [r for r in read(path_of(device)) if replace(r, failed=()) != replace(mine, failed=())]
    found = _File(VERSION, (mine, *others)[:MOST_RECORDS])
    return files.keep(path_of(device), json.dumps(codec.to_json(_File, found), indent=1).encode() + b"\n")


def read(path: Path) -> tuple[Findings, ...]:
    """The records of a file, none where there is no file. Warns of one that is something else, and has none then."""
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
        warnings.warn(
            f"{path}: not written by `gpu-runtime doctor`: {reason}; it is ignored: {AGAIN}, or remove the file",
            RuntimeWarning,
            stacklevel=3,
        )
        return ()


def of(device: Device) -> tuple[Failure, ...]:
    """What failed on this device, with this driver and these sources. Warns of failures under others: they count no more."""
    here, found = key_of(device), read(path_of(device))
    mine = [r for r in found if replace(r, failed=()) == here]
    if not mine and (stale := next((r for r in found if r.device == here.device and r.failed), None)):
        changed = f"driver {stale.driver}, now {here.driver}" if stale.driver != here.driver else "other kernel sources"
        warnings.warn(
            f"`gpu-runtime doctor` saw {len(stale.failed)} kernels or tiles fail on {device.title}, with {changed}: ignored; "
            f"{AGAIN}",
            RuntimeWarning,
            stacklevel=3,
        )
    return mine[0].failed if mine else ()


def applied(device: Device) -> Device:
    """The device, denied what failed there; warns of that."""
    failed = of(device)
    if failed:
        named = ", ".join(f.what for f in failed[:4]) + (f" and {len(failed) - 4} more" if len(failed) > 4 else "")
        warnings.warn(
            f"left out of plans, since `gpu-runtime doctor` saw them fail on {device.title}: {named}; {AGAIN} when the driver "
            f"has changed, or remove {path_of(device)}",
            RuntimeWarning,
            stacklevel=3,
        )
    return replace(device, left_out=tuple((f.what, f.why) for f in failed))
