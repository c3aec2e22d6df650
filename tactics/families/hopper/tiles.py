"""Tiles of Hopper kernels and the clocks of one pipeline stage: 64 of K, of the weights' m rows and the pixels' n.

    tensor cores   N / 2 for an m64nNk16, and for an m64nNk32 of 2:4 weights (arXiv 2402.13499, table of wgmma)
    port           128 bytes a clock: pixels once for each 64 rows of weights, weights in shared memory or loaded to registers,
                   and TMA's writes; for a dense instruction alone max(N / 2, (2048 + 32 N) / 128), as in that table
    L2             the stage's bytes; half of those that a cluster of two shares
    latency        of copies that the stages do not hide; of a batch of weights on its way to registers while the one before it
                   is multiplied, and no other

A block has one to three warpgroups that multiply and one that copies: 128 threads each. setmaxnreg redistributes its registers:
168 each of 384 threads, then 40 and 232.
"""

from dataclasses import dataclass
from functools import lru_cache

from tactics.families.hopper.figures import Figures

K_STAGE = 64
SMEM = 227 * 1024
BARRIERS = 1024  # bytes: mbarriers, and alignment to the 1,024 of a swizzle's atom
STAGING = 8 * 1024  # of the epilogue of a warpgroup: 64 x 64 outputs
# By the number of multiplying warpgroups, of each of their threads: all, or what setmaxnreg can give; ptxas adds up to 65,536.
REGISTERS = {1: 255, 2: 232, 3: 160}
# A thread's registers in 2:4 loops, beside its sums: values and metadata for an m64 and 64 of K; others (ptxas 13.0: nothing
# spills).
OF_WEIGHTS, OTHERS = 8 + 2, 30
MOST_BATCH = 4  # of tiles that are no strips: by then an L2 latency is hidden
FEWEST_STAGES = 3


@dataclass(frozen=True, slots=True)
class Box:
    """A strip's pixels: `rows` x `cols` outputs of each of `images`, with the rows around them.

    64 channels are copied once for each of the window's `s` columns: rows of each copy are a multiple of 8 apart.
    """

    images: int
    rows: int
    cols: int
    r: int = 3
    s: int = 3

    @property
    def n(self) -> int:
        """Columns of the product, including those that are discarded between rows."""
        return self.images * -(-self.rows * self.cols // 8) * 8

    @property
    def copied(self) -> int:
        """Pixels of one copy."""
        return self.images * (self.rows + self.r - 1) * self.cols

    @property
    def per_tap(self) -> float:
        """The number of pixels that are copied for each tap."""
        return self.copied / self.r


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A tile of `m` output channels x `n` pixels.

    `weights`: smem (SS), registers (RS, straight from L2), or held (RS, all of K, loaded once for all tiles). `shared`: the
    operand that a cluster of two blocks copies once: pixels, weights or "". `groups`: warpgroups that multiply; `pingpong`:
    each of them has its own tile. `box`: the pixels of a strip, else None.
    """

    m: int
    n: int
    sparse: bool = False
    weights: str = "smem"
    shared: str = ""
    groups: int = 2
    pingpong: bool = False
    box: Box | None = None

    @property
    def m64(self) -> int:
        """Blocks of 64 rows of a warpgroup."""
        return self.m // 64 // (1 if self.pingpong else self.groups)

    @property
    def sums(self) -> int:
        """Registers of a thread for sums."""
        return self.m64 * self.n // 2


@dataclass(frozen=True, slots=True)
class Stage:
    """Clocks of a stage by limit, and the number of stages that fit shared memory."""

    tensor: float
    port: float
    l2: float
    latency: float
    stages: int

    @property
    def clocks(self) -> float:
        return max(self.tensor, self.port, self.l2, self.latency)

    @property
    def bound(self) -> str:
        return max(("tensor", "port", "l2", "latency"), key=lambda name: getattr(self, name))


def weight_bytes(m: int, sparse: bool) -> float:
    """Bytes of a stage's weights: FP16, or for 2:4 half of the values and a bit of metadata for each."""
    return m * K_STAGE * (9 / 8 if sparse else 2)


def held(tile: HopperTile) -> int:
    """The number of 64s of K for which a thread's registers hold weights in addition to its sums."""
    return (REGISTERS[tile.groups] - OTHERS - tile.sums) // (OF_WEIGHTS * tile.m64)


def batch(tile: HopperTile) -> int:
    """The number of 64s of K, whole stages, whose weights a thread loads together.

    Its registers hold two batches. The larger these are, the less often it waits for L2's latency.
    """
    taps = tile.box.r if tile.box else 1
    least, most = (taps, 2 * taps) if tile.box else (2, MOST_BATCH)
    return max(least, min(most, held(tile) // 2) // taps * taps)


def copied_bytes(tile: HopperTile) -> float:
    """Bytes of pixels that are written to shared memory in a stage."""
    return (tile.box.per_tap if tile.box else tile.n) * K_STAGE * 2


def stages(tile: HopperTile) -> int:
    """Stages that fit shared memory with the epilogue's staging. For a strip: taps whose pixels and weights fit."""
    weights = weight_bytes(tile.m, tile.sparse) if tile.weights == "smem" else 0.0
    room = SMEM - BARRIERS - STAGING * tile.groups
    if not tile.box:
        return int(room // (tile.n * K_STAGE * 2 + weights))
    taps = tile.box.r  # that a copy serves
    return int(room // (tile.box.copied * K_STAGE * 2 + min(taps, 2) * weights)) * taps


@lru_cache(maxsize=65536)
def stage(tile: HopperTile, figures: Figures, l2: float = 0.0) -> Stage:
    """Returns the clocks of a stage. `l2`: bytes per clock that this SM reads, if other SMs leave it more or less than
    `figures` says; 0: as in `figures`.
    """
    step = 32 if tile.sparse else 16
    blocks, steps = tile.m // 64, K_STAGE // step
    pixels, weights = copied_bytes(tile), 0.0 if tile.weights == "held" else weight_bytes(tile.m, tile.sparse)
    read = float(blocks * steps * tile.n * step * 2)  # once for each 64 rows
    if tile.weights == "smem":  # an instruction's A, once for each image of a strip, and metadata by threads
        times = tile.box.images if tile.box else 1
        read += times * blocks * steps * 2048 + (tile.m * K_STAGE / 8 if tile.sparse else 0)
    written = (pixels + (weights if tile.weights == "smem" else 0)) * figures.write_port
    loaded = weights * figures.register_port if tile.weights == "registers" else 0
    once = {"pixels": (figures.shared_copy, 1.0), "weights": (1.0, figures.shared_copy), "": (1.0, 1.0)}[tile.shared]
    tensor = blocks * steps * tile.n / 2
    fit = stages(tile)
    latency = figures.latency / max(1, fit - 1)
    per_clk = l2 or figures.l2
    if tile.weights == "registers":
        latency = max(latency, figures.register_latency / batch(tile) + weights / per_clk)
    drawn = (pixels * once[0] + weights * once[1]) / per_clk
    return Stage(tensor, (read + written + loaded) / figures.port, drawn, latency, fit)
