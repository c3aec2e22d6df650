"""`gpu-runtime cache list|merge|prune`: counts, joins and shortens timing caches, which are files of measured times."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache

import click

from cuda_kernels import device as devices
from cuda_kernels.compile import CompileError, source_hash
from cuda_kernels.files import cache_dir, open_regular
from gpu_runtime.commands.console import say
from gpu_runtime.commands.options import HELP
from gpu_runtime.commands.targets import check_targets, write_all
from gpu_runtime.text import several
from tactics.measure import cache
from tactics.measure.cache import Key, is_over, key_of, parse
from tactics.measure.timing import driver_version
from tactics.tactic import Tactic

FILES = click.argument("names", metavar="FILE...", nargs=-1, required=True, type=click.Path())


@click.group("cache", context_settings=HELP)
def cache_command() -> None:
    """Files of measured times, which builds on a GPU read and extend: --timingCacheFile, or timings.jsonl in the cache
    folder."""


@cache_command.command("list", short_help="Count the times in files.")
@click.argument("names", metavar="[FILE]...", nargs=-1, type=click.Path())
def list_command(names: tuple[str, ...]) -> None:
    """Count the times in each FILE, by GPU, driver and policy of measuring. Without one: in timings.jsonl of the cache folder,
    which GPU_RUNTIME_CACHE names, else ~/.cache/gpu_runtime."""
    for name in names or [str(cache_dir() / "timings.jsonl")]:
        lines = [line for line in _read(name).split(b"\n") if line.strip()]
        records = {key_of(record): record for record in map(parse, lines) if record}
        good = sum(parse(line) is not None for line in lines)
        text = f"{name}: {several(good, 'line')}, {several(len(records), 'key')}"
        bad = len(lines) - good
        if bad and not good:
            raise ValueError(f"{name}: no timing cache: none of its {several(bad, 'line')} is a measurement")
        say(
            text
            + (f", {several(bad, 'line')} that {'is no measurement' if bad == 1 else 'are no measurements'}" if bad else "")
        )
        kinds: dict[tuple[str, str], Counter[str]] = {}
        for key, record in records.items():
            kind = "failure" if "error" in record else "time" if is_over(record) else "unfinished race"
            kinds.setdefault((key.device, key.policy), Counter())[kind] += 1
        for (device, policy), found in kinds.items():
            counts = [several(found[kind], kind) for kind in ("time", "failure", "unfinished race") if found[kind]]
            say(f"  {device}; {policy}: {', '.join(counts)}")


@cache_command.command("merge", short_help="Write one file with the measurements of several.")
@FILES
@click.option("-o", "--output", required=True, type=click.Path(), help="Write all measurements to this file.")
def merge_command(names: tuple[str, ...], output: str) -> None:
    """Write one file with the measurements of every FILE; of several for one key that of the last FILE counts."""
    paths = check_targets({"--output": output}, names)
    found: dict[Key, bytes] = {}
    for name in names:
        found |= _lines(name, _read(name))
    write_all({paths["--output"]: b"".join(found.values())})
    say(f"Wrote {output}: {several(len(found), 'measurement')} of {several(len(names), 'file')}")


@cache_command.command("prune", short_help="Drop the lines that no build reads here any more.")
@FILES
@click.option("--older-than", "days", type=click.IntRange(1), metavar="DAYS", help="Drop older times too.")
def prune_command(names: tuple[str, ...], days: int | None) -> None:
    """Drop from each FILE the lines that no build reads here any more: of another policy of measuring, of other kernel
    sources, or of this GPU with another driver."""
    since = 0.0 if days is None else time.time() - 86400 * days
    contents: dict[str | os.PathLike[str], bytes] = {}
    told = []
    with ExitStack() as stack:  # builds append again once all files are written
        for _, name in sorted({os.path.realpath(name): name for name in names}.items()):
            with _readable(name):
                data = stack.enter_context(cache.held(name))
            kept, text = _kept(name, data, since, days)
            if kept != data:
                contents[check_targets({"FILE": name}, [])["FILE"]] = kept
            told.append(text)
        write_all(contents)
    say("\n".join(told))


def _kept(name: str, data: bytes, since: float, days: int | None) -> tuple[bytes, str]:
    """Returns (the lines of a cache file that stay, a sentence with the number of lines that stay and of those dropped).

    `name`, `data`: the file and its content; `since`: in seconds since 1970, older measurements are dropped; `days`: the same
    limit as an age, None without a limit.
    """
    lines = _lines(name, data)
    why = {key: _why_dropped(key) for key in lines}
    for key, line in lines.items():
        when = json.loads(line).get("when")
        if not why[key] and not (isinstance(when, int) and when >= since):
            why[key] = f"older than {days} days" if days else ""
    kept = [line for key, line in lines.items() if not why[key]]
    parts = [f"{count} {reason}" for reason, count in Counter(filter(None, why.values())).most_common()]
    dropped = f"; dropped {', '.join(parts)}" if parts else ""
    return b"".join(kept), f"{name}: kept {len(kept)} of {several(len(lines), 'measurement')}{dropped}"


def _why_dropped(key: Key) -> str:
    """Returns why no build on this machine reads the measurement with this key; "" if builds read it."""
    if not key.policy.startswith(cache.POLICY):
        return "of another policy"
    if _source(key.tactic) not in (key.source, None):
        return "of other kernel sources"
    gpu, _, driver = this_gpu().rpartition("|")
    return "of another driver" if gpu and key.device.startswith(f"{gpu}|") and key.device != f"{gpu}|{driver}" else ""


def _read(name: str) -> bytes:
    with _readable(name), open_regular(name) as file:
        return file.read()


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """A context in which errors of opening or reading the file `name` become ValueError with the cure."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file; expected a timing cache, as a build on a GPU writes it") from None
    except OSError as e:
        raise ValueError(f"{name}: {e.strerror}") from None


def _lines(name: str, data: bytes) -> dict[Key, bytes]:
    """Returns key -> its last line in a cache file. `data`: the content of the file `name`. Raises ValueError for a file that
    is no timing cache.
    """
    try:
        return cache.whole_lines(data)
    except ValueError as e:
        raise ValueError(f"{name}: {e}: nothing was written") from None


def _source(tactic: str) -> str | None:
    """Returns the hash of the present sources of a tactic's kernel, as keys have it; None if the compiler is not installed.

    `tactic`: its name; for another text, the key of the time of a whole network, the hash is of all kernels' sources.
    """
    try:
        return cache.source_key(Tactic.parse(tactic).kernel)
    except ValueError:
        return source_hash()[:24]
    except (CompileError, ModuleNotFoundError):
        return None


@lru_cache(maxsize=1)
def this_gpu() -> str:
    """Returns this machine's GPU and driver as keys have them, joined by "|"; "" without a GPU."""
    return f"{devices.current().key}|{driver_version()}" if devices.has_gpu() else ""
