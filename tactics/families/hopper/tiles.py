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
# Multiplying warpgroups -> registers of each of their threads: 255, the most, or as setmaxnreg gives; ptxas adds up to 65,536.
REGISTERS = {1: 255, 2: 232, 3: 160}
# A thread's registers in 2:4 loops, beside its sums: values and metadata for an m64 and 64 of K; others (ptxas 13.0: nothing
# spills).
OF_WEIGHTS, OTHERS = 8 + 2, 30
MOST_BATCH = 4  # of tiles that are no strips: by then an L2 latency is hidden
FEWEST_STAGES = 3


@dataclass(frozen=True, slots=True)
class Box:
    """The pixels of a strip: a tile of `rows` x `cols` outputs in each of `images` images, computed with an `r` x `s` window.

    For each of the window's `s` columns, 64 channels of the pixels and of the r - 1 further rows around them are copied to
    shared memory once, and serve the `r` taps of that column. Rows of each copy are a multiple of 8 apart.
    """

    images: int
    rows: int
    cols: int
    r: int = 3
    s: int = 3

    @property
    def n(self) -> int:
        """The columns of the product: the tile's pixels, each image's rounded up to a multiple of 8 (the extra ones are
        discarded).
        """
        return self.images * -(-self.rows * self.cols // 8) * 8

    @property
    def copied(self) -> int:
        """The number of pixels in one copy: the rows of outputs and the r - 1 rows around them, in all images."""
        return self.images * (self.rows + self.r - 1) * self.cols

    @property
    def per_tap(self) -> float:
        """The average number of pixels copied per tap (one position of the window): a copy serves `r` taps, so it may be a
        fraction.
        """
        return self.copied / self.r


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A tile of `m` output channels x `n` pixels.

    `weights`: where instructions read them: "smem" (shared memory, SS), "registers" (loaded straight from L2, RS) or "held"
    (RS, all of K loaded once for all tiles). `shared`: the operand that a cluster of two blocks copies once: "pixels",
    "weights" or "" for none. `groups`: the number of warpgroups that multiply; `pingpong`: each of them has a tile of its
    own. `box`: the pixels of a strip; None for a tile of any pixels.
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
        """The number of blocks of 64 rows (output channels) that one warpgroup multiplies."""
        return self.m // 64 // (1 if self.pingpong else self.groups)

    @property
    def sums(self) -> int:
        """The number of registers per thread that hold FP32 sums."""
        return self.m64 * self.n // 2


@dataclass(frozen=True, slots=True)
class Stage:
    """The clocks that one pipeline stage (64 of K) takes by each limit, and the number of stages that fit shared memory.

    `tensor`: the tensor cores; `port`: shared memory's port; `l2`: bytes from L2; `latency`: the part of a copy's latency
    that the other stages do not hide.
    """

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
    """Returns the bytes of one stage's weights for `m` rows: FP16 values, or for 2:4 half of them and a bit of metadata per
    logical value.
    """
    return m * K_STAGE * (9 / 8 if sparse else 2)


def held(tile: HopperTile) -> int:
    """Returns for how many blocks of 64 of K a thread's registers can hold weights in addition to its sums."""
    return (REGISTERS[tile.groups] - OTHERS - tile.sums) // (OF_WEIGHTS * tile.m64)


def batch(tile: HopperTile) -> int:
    """Returns how many blocks of 64 of K a thread loads the weights of together: a multiple of a strip's taps per column.

    Its registers hold two such batches. The larger these are, the less often the thread waits for L2's latency.
    """
    taps = tile.box.r if tile.box else 1
    least, most = (taps, 2 * taps) if tile.box else (2, MOST_BATCH)
    return max(least, min(most, held(tile) // 2) // taps * taps)


def copied_bytes(tile: HopperTile) -> float:
    """Returns the bytes of pixels that one stage (64 of K) writes to shared memory."""
    return (tile.box.per_tap if tile.box else tile.n) * K_STAGE * 2


def stages(tile: HopperTile) -> int:
    """Returns how many pipeline stages fit shared memory next to the epilogue's staging buffers.

    For a strip a stage is one tap: the number counts the taps whose pixels and weights fit.
    """
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
