"""A tactic: one kernel, its tile and the formats it reads and writes. Its name contains all of these and parses back."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count
from typing import Literal

from cuda_kernels.hashed import Hashed
from tactics.format import Format
from tactics.kernels import KERNELS, SPARSE

IN_PLACE = "in_place"  # stands in place of a tactic's name where nothing is launched


@dataclass(frozen=True, slots=True, order=True)
class Tile(Hashed):
    """The block's tile m x n x k (output channels, pixels, logical K per stage), its warps along m and n, pipeline stages.

    `split` blocks share one output tile along K (split-K); or `stream` blocks share the K stages of all tiles (stream-K); or
    `persist` blocks go on from tile to tile, else each has one. Kernels with a warpgroup that copies, while warps m x n
    multiply: `pingpong`: two groups multiply, each a tile of its own; `cluster`: the blocks of a cluster along channels, pixels
    and K; `box`: the images, rows and columns that make up the tile's pixels, or ().
    """

    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    stages: int
    split: int = 1
    stream: int = 0
    persist: int = 0
    pingpong: bool = False
    cluster: tuple[int, int, int] = (1, 1, 1)
    box: tuple[int, ...] = ()

    def __str__(self) -> str:
        split = f"_k{self.split}" if self.split > 1 else f"_stream{self.stream}" if self.stream else ""
        how = "_b{}x{}x{}".format(*self.box) if self.box else ""
        how += "_pingpong" * self.pingpong + ("_c{}x{}x{}".format(*self.cluster) if max(self.cluster) > 1 else "")
        how += f"_p{self.persist}" if self.persist else ""
        return f"{self.m}x{self.n}x{self.k}_w{self.warps_m}x{self.warps_n}_s{self.stages}{how}{split}"

    @property
    def whole(self) -> Tile:
        """The tile without split-K, stream-K and persistent blocks."""
        return replace(self, split=1, stream=0, persist=0)

    @property
    def values(self) -> dict[str, int]:
        """The compile-time values of a tile."""
        return {"BM": self.m, "BN": self.n, "WARPS_M": self.warps_m, "WARPS_N": self.warps_n}

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


@dataclass(frozen=True, slots=True, order=True)
class Patch(Hashed):
    """The tile of depthwise kernels: the block's channels and patch of h x w output pixels, of which a thread computes th x tw.

    `mma`: on tensor cores, where a warp computes 16 of these th x tw tiles.
    """

    channels: int
    h: int
    w: int
    th: int
    tw: int
    mma: bool = False

    def __str__(self) -> str:
        return f"{self.channels}c{self.h}x{self.w}_t{self.th}x{self.tw}{'_mma' * self.mma}"


@dataclass(frozen=True, slots=True, order=True)
class Parts(Hashed):
    """The tile of squeeze-excite: an image's blocks, `slices` of its channels times `runs` of its pixels.

    `cluster`: the blocks form a cluster. `apart` > 0: the two layers are two launches, the first with this many times the
    blocks.
    """

    slices: int
    runs: int
    cluster: bool = False
    apart: int = 0

    def __str__(self) -> str:
        apart = f"_apart{self.apart}" if self.apart > 1 else "_apart" * self.apart
        return f"{self.slices}x{self.runs}{'_cluster' * self.cluster}{apart}"


def _tile(found: re.Match) -> Tile:
    *sizes, images, rows, cols, pingpong, across, along, deep, persist, split, stream = found.groups()[1:]
    m, n, k, warps_m, warps_n, stages = map(int, sizes)
    cluster = int(across or 1), int(along or 1), int(deep or 1)
    box = (int(images), int(rows), int(cols)) if images else ()
    shared = int(split or 1), int(stream or 0), int(persist or 0)
    return Tile(m, n, k, warps_m, warps_n, stages, *shared, bool(pingpong), cluster, box)


changed = lru_cache(maxsize=16384)(replace)  # makes a changed tile, one object for all problems
# A filter of a kernel's tiles: this one; "sparse": all, if the kernel has 2:4 weights; None: all.
Only = Tile | Patch | Parts | Literal["sparse"] | None


def restrict(kernel: str, tiles: tuple, only: Only) -> tuple:
    """Filters a kernel's tiles by `only`."""
    if only == "sparse":
        return tiles if kernel in SPARSE else ()
    return tiles if only is None else tuple(t for t in tiles if t == only)


TILED = (
    r"([a-z0-9_]+?)(?:_(\d+)x(\d+)x(\d+)_w(\d+)x(\d+)_s(\d+)"
    r"(?:_b(\d+)x(\d+)x(\d+))?(_pingpong)?(?:_c(\d+)x(\d+)x(\d+))?(?:_p(\d+))?(?:_k(\d+))?(?:_stream(\d+))?)?"
)
TILES = {"tile": Tile, "patch": Patch, "parts": Parts, "": type(None)}


@dataclass(frozen=True, order=True)
class Tactic(Hashed):
    """A kernel with its tile. `ins`: formats of the problem's inputs (a residual has the output's); `out`: format of its
    output.
    """

    kernel: str
    tile: Tile | Patch | Parts | None
    ins: tuple[Format, ...]
    out: Format

    @cached_property
    def kind(self) -> int:
        """A number shared by all tactics that differ in their tiles alone: a key that costs nothing to hash."""
        return _KINDS.setdefault((self.kernel, self.ins, self.out), next(_NUMBERS))

    @property
    def runner(self) -> str:
        """The kernel, its instruction and its tile: the name without the formats."""
        parts = self.kernel, KERNELS[self.kernel].mark, str(self.tile or "")
        return "_".join(filter(None, parts))

    @cached_property
    def name(self) -> str:
        formats = [*(str(f) for f in self.ins), str(self.out)]
        return f"{self.runner}__{'_'.join(formats).replace(':', '.')}"

    @property
    def gemm(self) -> Tile:
        """The tile of a kernel on tensor cores. Raises TypeError for another kernel."""
        if not isinstance(self.tile, Tile):
            raise TypeError(f"{self.kernel} has no tile of a matrix product")
        return self.tile

    @property
    def patch(self) -> Patch:
        """The patch of a depthwise kernel. Raises TypeError for another kernel."""
        if not isinstance(self.tile, Patch):
            raise TypeError(f"{self.kernel} has no patch")
        return self.tile

    @property
    def parts(self) -> Parts:
        """How blocks share an image. Raises TypeError for a kernel other than squeeze-excite's."""
        if not isinstance(self.tile, Parts):
            raise TypeError(f"{self.kernel} has no parts of images")
        return self.tile

    @property
    def sparse(self) -> bool:
        return self.kernel in SPARSE

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def parse(name: str) -> Tactic:
        """Parses a tactic's name. Raises ValueError where it names none."""
        head, _, formats = name.partition("__")
        patch = re.fullmatch(r"([a-z0-9_]+?)_(\d+)c(\d+)x(\d+)_t(\d+)x(\d+)(_mma)?", head)
        parts = re.fullmatch(r"([a-z0-9_]+?)_(\d+)x(\d+)(?:(_cluster)|(_apart)(\d*))?", head)
        found = re.fullmatch(TILED, head)
        try:
            *ins, out = [Format.parse(f.replace(".", ":")) for f in formats.split("_")]
            tile: Tile | Patch | Parts | None = None
            if patch:
                channels, h, w, th, tw = map(int, patch.groups()[1:6])
                kernel, tile = patch[1], Patch(channels, h, w, th, tw, bool(patch[7]))
            elif parts:
                apart = int(parts[6] or 1) if parts[5] else 0
                kernel, tile = parts[1], Parts(int(parts[2]), int(parts[3]), bool(parts[4]), apart)
            elif found:
                kernel, tile = found[1], _tile(found) if found[2] else None
            else:
                raise ValueError(head)
            kernel = next((k.name for k in KERNELS.values() if k.mark and kernel == f"{k.name}_{k.mark}"), kernel)
            tactic = Tactic(kernel, tile, tuple(ins), out)
        except (TypeError, ValueError):
            raise ValueError(f"not a tactic's name: {name!r}") from None
        if kernel not in KERNELS or type(tile) is not TILES[KERNELS[kernel].tile] or tactic.name != name:
            raise ValueError(f"not a tactic's name: {name!r}")
        return tactic


_KINDS: dict[tuple[str, tuple[Format, ...], Format], int] = {}
_NUMBERS = count()  # atomic: two threads never draw one number


@lru_cache(maxsize=1 << 17)
def tactic_of(kernel: str, tile: Tile | Patch | Parts | None, ins: tuple[Format, ...], out: Format) -> Tactic:
    """Makes a tactic, one object for all problems: a network at two batches has most of its tactics in common."""
    return Tactic(kernel, tile, ins, out)


def on_kernel(kernel: str, tactic: Tactic) -> Tactic:
    """Returns the tactic with the same tile and formats for another kernel."""
    return tactic_of(kernel, tactic.tile, tactic.ins, tactic.out)
