"""Shares of the tensor cores' peak that our main loops reach, from a committed table: simulating one takes seconds.

shares.json: {version of NVRTC: {kernel: {"source": hash of its sources, "shares": {tile: {architecture: [low, centre,
high]}}}}}, written by `python -m benchmarks.cycle_shares`. A row is believed while the kernel's sources are the table's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from cuda_kernels.compile import source_hash
from cuda_kernels.cycles.simulate import Share

TABLE = Path(__file__).parent / "shares.json"


@lru_cache(maxsize=1)
def table() -> Mapping[str, Mapping]:
    """As committed; empty where there is none."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def share(kernel: str, tile: str, sm: str) -> Share | None:
    """Of the loop of `kernel` with a tile of that name, with bias and ReLU, on that architecture at its full rate of products;
    of the newest compiler that the table has. None where its sources are others now, or it has no such row."""
    for version in sorted(table(), key=_numbers, reverse=True):
        rows = table()[version].get(kernel)
        if rows and rows["source"] == source_hash(kernel) and (found := rows["shares"].get(tile, {}).get(sm)):
            return Share(*found)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
