"""A tactic: one kernel, its tile and the formats it reads and writes. Its name says all of it and parses back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tactics.format import Format

# What marks a kernel's instruction in its name, as TensorRT's names do; tools look for "hmma".
MARKS = {"conv_dense": "hmma_16816", "conv_sparse24": "hmma_sp_16832"}
KERNELS = (*MARKS, "move", "pointwise", "pool", "pool_global", "softmax")


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    """The block's tile m x n x k (output channels, pixels, logical K per stage), its warps along m and n, pipeline stages."""

    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    stages: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}_w{self.warps_m}x{self.warps_n}_s{self.stages}"

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


@dataclass(frozen=True, slots=True, order=True)
class Tactic:
    """`ins`: formats of the problem's inputs (a residual has the output's); `out`: format of its output."""

    kernel: str
    tile: Tile | None
    ins: tuple[Format, ...]
    out: Format

    @property
    def name(self) -> str:
        mark = f"_{MARKS[self.kernel]}" if self.kernel in MARKS else ""
        tile = f"_{self.tile}" if self.tile else ""
        formats = [*(str(f) for f in self.ins), str(self.out)]
        return f"{self.kernel}{mark}{tile}__{'_'.join(formats).replace(':', '.')}"

    @property
    def sparse(self) -> bool:
        return self.kernel == "conv_sparse24"

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def parse(name: str) -> Tactic:
        """The tactic of that name. Raises ValueError where it is none."""
        head, _, formats = name.partition("__")
        found = re.fullmatch(r"([a-z0-9_]+?)(?:_(\d+)x(\d+)x(\d+)_w(\d+)x(\d+)_s(\d+))?", head)
        try:
            *ins, out = [Format.parse(f.replace(".", ":")) for f in formats.split("_")]
            kernel = found[1]
            for k, mark in MARKS.items():
                kernel = k if kernel == f"{k}_{mark}" else kernel
            tactic = Tactic(kernel, Tile(*map(int, found.groups()[1:])) if found[2] else None, tuple(ins), out)
        except (TypeError, ValueError):
            raise ValueError(f"not a tactic's name: {name!r}") from None
        if tactic.name != name or tactic.kernel not in KERNELS or (tactic.tile is None) != (tactic.kernel not in MARKS):
            raise ValueError(f"not a tactic's name: {name!r}")
        return tactic
