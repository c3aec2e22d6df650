"""Convolution on Hopper's wgmma (conv_dense_sm90.cu) and wgmma.sp (conv_sparse24_sm90.cu), operands by TMA, for sm_90a only:
tiles, launches, packing, time.

K is (tap; channel). A stage has 64 channels of one tap, or, of strips, of a column of the window. Weights are packed by 64 rows
and stage: dense ones as tensor cores read them from shared memory, 2:4 ones as a warp's registers hold them. Pixels come by a
tensor map, an argument that follows from the input's place (tactics/families/hopper/maps.py).

Prediction: a stage takes the combined time of tensor cores, the port of shared memory, L2 and latency (figures published:
tactics/families/hopper/tiles.py); 2:4 weights take the time of their loads, a batch at a time. Blocks are persistent: copies of
the next tile run during an epilogue, and with ping-pong so do the other warpgroup's products, while outputs and residuals take
an SM's time. The time of a tile's end was measured on an H200.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from cuda_kernels import sparse24
from cuda_kernels.device import Device
from cuda_kernels.rates import rates
from cuda_kernels.tensor_maps import Map
from tactics.families import conv_gemm
from tactics.families.hopper import ends, maps
from tactics.families.hopper.ends import MOST_STAGES, ROWS, WINDOW_ROWS
from tactics.families.hopper.figures import CENTRE
from tactics.families.hopper.tiles import K_STAGE, SMEM, Box, HopperTile, batch, held, stage
from tactics.families.merged import merged
from tactics.format import HALF_FORMATS, Strides, padded_channels, strides, too_large
from tactics.kernels import KERNELS
from tactics.main_loops import UNTIMED
from tactics.problems.epilogue import RELU
from tactics.problems.problem import ConvProblem
from tactics.reason import Candidates, Reason, no_room, unsupported
from tactics.roofline import Counts, clusters_at_once, convolved, together
from tactics.step import NULL, Launch, Store, epilogue_instructions, ints, launch, linear
from tactics.tactic import Only, Tactic, Tile, changed, restrict, tactic_of
from tactics.tiles import in_parts

NAMES = ("conv_dense_sm90", "conv_sparse24_sm90")
COPYING = 128  # threads of the warpgroup that copies
WAYS = (2, 3, 4, 6, 8, 12, 16)
FEWEST_K = 16  # of one product: with a smaller K, most of a stage would be zeros
SHARING = ((1, 1, 1), (2, 1, 1), (1, 2, 1))  # clusters: none, blocks with the same pixels, with the same weights
PORTABLE_CLUSTER = 8  # blocks
# The end of a tile on an H200 (benchmarks/results/h200), fitted to one half of the timed problems (benchmarks/our_times.py).
OUTPUT_ALONE, OUTPUT_CLK = 0.05, 0.145  # clocks of an output beside instructions: of a warpgroup; of all of an SM together
RESIDUAL_CLK = 0.22  # clocks of an output with a residual, for all of an SM together
THREE_PARTS = 0.3  # share of RESIDUAL_CLK in ping-pong tiles with three parts, 64x192 (unexplained; both halves show it)
OVERLAPPED = 0.9  # share of a single warpgroup's products that does not run during the end
SHARED_L2 = 1.4  # bytes that L2 delivers, as a multiple of `rates`: neighbouring blocks read the same lines
SM_L2 = 64  # bytes per clock that an SM reads from L2 by TMA: 49 and more were measured with half of the SMs idle
CLUSTER_CLK = 700  # added to a launch of clusters: 0.36 us in the median of 81 tactics with and without
SAME_WEIGHTS_CLK = 1000  # added to this where a cluster's blocks share weights, not pixels
START_CLK = 1000  # added to the start of a kernel with TMA, by tactics below 7 us
MEETING_CLK = 413  # of a cluster's blocks in its barrier: 401 to 426 on an H200 (docs/hardware.md); of these sums not timed
SUMMED_CLK = 450  # of a load or a store of partial sums in L2, behind another one
LEAST_HELD = 128  # pixels of a tile whose weights stay: fewer take the issue of products, which is not priced
# (rows, pixels, warps of a tile, ping-pong).
SHAPES: Mapping[str, tuple[tuple[int, int, int, bool], ...]] = {
    NAMES[0]: (
        *((128, 256, 8, False), (128, 192, 8, False), (128, 128, 4, True), (64, 256, 4, True), (64, 192, 4, True)),
        *((64, 128, 4, True), (64, 64, 4, False), (64, 32, 4, False), (64, 16, 4, False)),
    ),
    NAMES[1]: (
        *((128, 256, 8, False), (128, 192, 8, False), (128, 128, 8, False), (64, 256, 4, True), (64, 128, 4, True)),
        *((64, 64, 4, False), (64, 32, 4, False), (64, 16, 4, False)),
    ),
}
STRIPS = ((64, 4, True), (64, 4, False), (128, 8, False))  # (rows, warps of a tile, ping-pong), dense and 2:4
COLUMNS = (8, 16, 24, 32, 48, 56, 64)
PRODUCTS = (32, 56, 64, 96, 112, 128, 192, 224, 256)  # pixels of an image, that an instruction multiplies
CASES = dict.fromkeys(
    NAMES,
    (
        ConvProblem(2, 72, 9, 7, 136, 3, 3, pad=(1, 1, 1, 1), epilogue=RELU, sparse24=True),
        ConvProblem(1, 200, 7, 10, 88, 1, 1, epilogue=replace(RELU, residual=True), sparse24=True),
    ),
)


def _tiles(kernel: str) -> Iterator[Tile]:
    """Yields each shape with as many stages as fit, alone and in clusters of two; 2:4 weights are not in shared memory, so no
    cluster shares them.
    """
    sparse = KERNELS[kernel].sparse
    for (m, n, warps, pingpong), cluster in product(SHAPES[kernel], SHARING):
        one = Tile(m, n, K_STAGE, warps, 1, 1, pingpong=pingpong, cluster=cluster)
        if not (sparse and cluster[1] > 1):
            yield replace(one, stages=min((SMEM - ends.rest_bytes(one)) // ends.stage_bytes(one, sparse), MOST_STAGES))


TILES = {kernel: tuple(_tiles(kernel)) for kernel in NAMES}


@lru_cache(maxsize=4096)
def boxes(p: ConvProblem) -> tuple[tuple[int, int, int], ...]:
    """Returns boxes (images, rows, columns) of output pixels: for each tile size the box that discards the least work and, of
    such, copies least.
    """
    if p.r != WINDOW_ROWS or p.groups > 1 or p.stride != (1, 1) or p.dilation != (1, 1) or p.c < K_STAGE:
        return ()
    found: dict[int, tuple[float, tuple[int, int, int]]] = {}
    for cols, rows, images in product(COLUMNS, range(1, min(p.p, 32) + 1), (1, 2, 4)):
        n = images * rows * cols
        alone = images == 1 or (rows == p.p and cols >= p.q and images <= p.n)
        if alone and rows * cols in PRODUCTS and n % 16 == 0 and n <= max(PRODUCTS):
            box = images, rows, cols
            cost = num_boxes(p, box) * (n + 0.25 * images * (rows + WINDOW_ROWS - 1) * cols * p.s / 9)
            size = -(-n // 64)
            found[size] = min(found.get(size, (math.inf, box)), (cost, box))
    return tuple(box for _, box in found.values())


def num_boxes(p: ConvProblem, box: tuple[int, ...]) -> int:
    images, rows, cols = box
    return -(-p.n // images) * -(-p.p // rows) * -(-p.q // cols)


def _strips(p: ConvProblem, kernel: str) -> Iterator[Tile]:
    """Yields tiles that are strips: by themselves, and in clusters of two blocks that each copy half of the box of pixels."""
    sparse = KERNELS[kernel].sparse
    for box, (m, warps, pingpong), cluster in product(boxes(p), STRIPS, SHARING):
        one = Tile(m, math.prod(box), K_STAGE, warps, 1, 1, pingpong=pingpong, cluster=cluster, box=box)
        halves = cluster[0] == 1 or (box[0] == 1 and box[1] % 2 == 0)
        fit = min((SMEM - ends.rest_bytes(one)) // ends.stage_bytes(one, sparse), MOST_STAGES)
        if halves and fit >= 2 and not (sparse and cluster[1] > 1):
            yield replace(one, stages=fit)


def candidates(p: ConvProblem, device: Device, only: Only = None) -> Candidates:
    """Yields (tactic, reason against it or None); where a kernel cannot run the problem with any tile, once (kernel name,
    reason). `only`: the tile, or the tiles, to consider; None: all."""
    for kernel in NAMES:
        if why := _refused(p, kernel):
            yield kernel, why
            continue
        tiles = restrict(kernel, (*TILES[kernel], *_strips(p, kernel)), _alone(only) if isinstance(only, Tile) else only)
        known: dict[tuple, tuple[str, tuple[Tile, ...]]] = {}
        for tile, x, y in product(tiles, HALF_FORMATS, HALF_FORMATS):
            ins = (x, *((y,) if p.epilogue.residual else ()))
            tactic = tactic_of(kernel, tile, ins, y)
            stored = tile, linear(y), _rows(p, tactic)
            if stored not in known:
                against = _tile_reason(p, tactic, device)
                known[stored] = against, () if against else tuple(_ways(p, tactic, device))
            against, ways = known[stored]
            if reason := _reason(p, tactic, against):
                yield tactic, unsupported(reason)
            else:
                yield from ((tactic_of(kernel, shared, ins, y), None) for shared in ways)


def _refused(p: ConvProblem, kernel: str) -> Reason | None:
    """Why no tactic of the kernel may run this problem; None if some may."""
    if 1 < p.groups == p.c:
        return unsupported(f"depthwise (groups = C = {p.c}): a matrix product would waste 7 of 8 multiplications")
    if p.prologue.needs:
        return unsupported("the input's scale and shift, gate or norm change pixels in registers: wgmma reads shared memory")
    one = merged(p).one
    if p.r * p.s * one.c < FEWEST_K:
        return unsupported(f"K = {p.r * p.s * one.c}: less than {FEWEST_K}")
    if p.groups > 1 and one.c % K_STAGE:
        return unsupported(f"a group of {one.c} input channels: a stage of {K_STAGE} would reach into the next one")
    if why := too_large(p.all_shapes, others=p.n * p.p * p.q):
        return unsupported(why)
    return conv_gemm.not_sparse(p) if KERNELS[kernel].sparse else None


def _reason(p: ConvProblem, tactic: Tactic, against: str) -> str:
    """Why the tactic cannot run the problem, or ""; `against`: the reason from its tile and output, if any."""
    x, t = tactic.ins[0], tactic.gemm
    if linear(x):
        return "linear input: a tensor map's rows are channels"
    copied = t.n // t.cluster[0], t.cluster[0], t.box
    return against or _no_map(p, strides(x, p.in_shapes[0]), *copied) or conv_gemm.problem_reason(p, tactic)


def _tile_reason(p: ConvProblem, tactic: Tactic, device: Device) -> str:
    """Why the tile cannot run, whatever the input's format, or ""."""
    t = tactic.gemm
    if ends.part(t) < 32 and linear(tactic.out):
        return f"linear output: a warpgroup stores rows of 32 pixels, {t.n} are no multiple"
    many = -(-_rows(p, tactic) // t.m), _columns(p, t)
    if any(blocks > 1 == tiles for blocks, tiles in zip(t.cluster, many, strict=False)):
        return f"{many[0]} x {many[1]} tiles: no two for a cluster to have side by side"
    return no_room(ends.smem(tactic), device)


@lru_cache(maxsize=4096)
def _no_map(p: ConvProblem, x: Strides, pixels: int, across: int, box: tuple[int, ...] | None) -> str:
    """Why the input has no tensor map, or "". Cached by the values that decide a map, which many tiles share."""
    try:
        _map(p, x, pixels, across, box)
    except ValueError as e:
        return f"no tensor map of the input: {e}"
    return ""


def _rows(p: ConvProblem, tactic: Tactic) -> int:
    """Returns the rows of a group's product that are stored, padded channels included."""
    m = merged(p)
    channels = padded_channels(tactic.out.layout, m.channels) if m.count == 1 else m.channels
    return p.epilogue.d2s**2 * channels


def _ways(p: ConvProblem, tactic: Tactic, device: Device) -> Iterator[Tile]:
    """Yields the tile with the ways to share its work: persistent blocks where there are more tiles than SMs, split K where
    there are few, stream-K where the last round leaves a tenth of the GPU's time idle.

    Sums of a split K meet in clusters where all of these run at once, else in memory: in clusters the same tiles took an H200
    2.6 to 3.8 us less.
    """
    t, units = tactic.gemm, _units(p, tactic)
    steps = k_stages(p) // ends.taps(t)
    blocks = math.prod(t.cluster)
    workers = device.num_sms // blocks
    yield changed(t, persist=workers * blocks) if units > workers else t
    if merged(p).count > 1:
        return
    fit = [s for s in WAYS if 2 * s <= steps and units * s <= 2 * workers] if 2 * units <= workers else []
    room = t.stages * ends.stage_bytes(t, tactic.sparse) >= t.m * t.n * 4  # for sums
    able = blocks == 1 and not t.pingpong and not linear(tactic.out) and room
    meet = [s for s in fit if able and s <= PORTABLE_CLUSTER and units <= clusters_at_once(device, s)]
    yield from (changed(t, cluster=(1, 1, s)) for s in meet)
    yield from (changed(t, split=s) for s in fit[-3:] if s not in meet)
    rounds = units / workers
    if rounds <= 8 and math.ceil(rounds) >= 1.1 * rounds and units * steps >= 2 * workers:
        yield changed(t, stream=workers * blocks)


def _alone(t: Tile) -> Tile:
    """The tile without the cluster that shares K, as in TILES."""
    return replace(t, cluster=(*t.cluster[:2], 1))


def _units(p: ConvProblem, tactic: Tactic) -> int:
    """The number of tiles of one group of the convolution, divided by the tiles that a cluster computes side by side."""
    t = tactic.gemm
    across, along, _ = t.cluster
    return -(-_rows(p, tactic) // (t.m * across)) * -(-_columns(p, t) // along)


def _columns(p: ConvProblem, t: Tile) -> int:
    """Returns the number of tiles side by side along pixels."""
    return num_boxes(p, t.box) if t.box else -(-merged(p).pixels // t.n)


@lru_cache(maxsize=4096)
def k_stages(p: ConvProblem) -> int:
    return p.r * p.s * tap_stages(p)


def tap_stages(p: ConvProblem) -> int:
    return -(-merged(p).one.c // K_STAGE)


def launches(
    p: ConvProblem, tactic: Tactic, store: Store | None = None, strided: tuple[Strides, ...] | None = None
) -> tuple[Launch, ...]:
    t, m, units = tactic.gemm, merged(p), _units(p, tactic)
    store = store or conv_gemm.own_store(p)
    across, along, deep = t.cluster
    shared = t.stream or t.split > 1
    blocks = t.stream or t.persist or units * t.split * across * along * deep
    x = strided[0] if strided else strides(tactic.ins[0], p.in_shapes[0])
    args = conv_gemm.arguments(p, tactic, store, strided)
    args |= ints(k_tiles=k_stages(p) // ends.taps(t), tap_stages=tap_stages(p), m16=_rows64(p, tactic) // 16, units=units)
    args |= {"map": ("map", _map(p, x, t.n // across, across, t.box))}
    args |= ints(im2col=not maps.pixels_in_order(p, x))
    if shared:
        args |= {"partial": ("workspace", 0), "counters": ("counters", 0), **ints(splits=t.split, tiles=units)}
    if deep > 1:
        args |= {"partial": NULL, "counters": NULL, **ints(splits=deep, tiles=units)}
    of_tile = t.threads // 128  # warpgroups
    sums = (blocks * (2 if t.stream else 1) * t.m * t.n * 4, units * across * along * of_tile * 4) if shared else (0, 0)
    end, smem, stored = ends.end(p, tactic, store, strided)
    args |= {name: ("map", of) for name, of in stored.items()}
    values = conv_gemm.values(p, tactic, store) | {
        **{"BM": ROWS, "BN": ends.part(t), "WARPS_M": 4, "WARPS_N": 1, "WGMMA": 1, "TILE_M": t.m, "TILE_N": t.n},
        **{"TEAMS": ends.teams(t), "PINGPONG": int(t.pingpong)},
        **{"CLUSTER": across * along, "CLUSTER_N": along, "CLUSTER_K": deep},
        **(_weights_values(p, tactic, bool(stored)) if tactic.sparse else {}),
        **({"SPLIT": 1} if deep > 1 else {}),
        **({} if tactic.sparse else {"K_STEPS": k_steps(p, tactic)}),
        **end,
        **dict(zip(("TAPS", "BOX_IMAGES", "BOX_ROWS", "BOX_COLS"), (ends.taps(t), *(t.box or (1, 1, 1))), strict=True)),
    }
    threads = ends.teams(t) * 128 + COPYING
    return (launch(tactic.kernel, values, (blocks, m.count, 1), threads, smem, args, *sums),)


def _map(p: ConvProblem, x: Strides, pixels: int, across: int, box: tuple[int, ...] | None) -> Map:
    """Returns the tensor map by which one block copies its `pixels` of the tile that its cluster shares. `across`: the number
    of blocks that share a box of input pixels, if `box` is given. Raises ValueError with the broken rule.
    """
    if not box:
        return maps.input_map(p, x, K_STAGE, pixels)
    images, rows, cols = box
    return maps.box_map(p, x, K_STAGE, (images, (rows + WINDOW_ROWS - 1) // across, cols))


def _model(t: Tile, sparse: bool) -> HopperTile:
    """The tile as tactics/families/hopper/tiles.py estimates it."""
    shared = "pixels" if t.cluster[0] > 1 else "weights" if t.cluster[1] > 1 else ""
    box = Box(*t.box) if t.box else None
    return HopperTile(t.m, t.n, sparse, "registers" if sparse else "smem", shared, ends.teams(t), t.pingpong, box=box)


def _weights_stay(p: ConvProblem, tactic: Tactic, by_tma: bool) -> bool:
    """Whether all tiles of a block have the same 2:4 weights, and these fit its registers with an end by TMA (threads that
    store need more): they are then loaded once.
    """
    t = tactic.gemm
    columns = -(-_rows(p, tactic) // (t.m * t.cluster[0]))
    same = t.persist > 0 and t.persist // math.prod(t.cluster) % columns == 0
    return tactic.sparse and by_tma and same and t.n >= LEAST_HELD and k_stages(p) <= held(_model(t, True))


def _weights_values(p: ConvProblem, tactic: Tactic, by_tma: bool) -> dict[str, int]:
    """Compile-time values of the loads of 2:4 weights."""
    if _weights_stay(p, tactic, by_tma):
        return {"BATCH": k_stages(p), "WEIGHTS_STAY": 1}
    return {"BATCH": min(batch(_model(tactic.gemm, True)), max(2, k_stages(p)))}


def _rows64(p: ConvProblem, tactic: Tactic) -> int:
    return -(-conv_gemm.num_rows(merged(p).one, tactic.out.layout) // ROWS) * ROWS


def pack(p: ConvProblem, tactic: Tactic, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Packs dense weights as [count][rows / 64][stage][row][chunk of 8 channels], where row r has chunk c at c ^ r % 8 (the
    swizzle of 128 bytes); 2:4 ones as [count][rows / 64][stage][k32 step][16 rows][lane][8], metadata as [..][stage][16
    rows][g][t % 2][k32 step]. Bias and slope are in the same rows.
    """
    stages = k_stages(p)
    flat, vectors = conv_gemm.matrix(p, tactic, weights, tap_stages(p) * K_STAGE, stages * K_STAGE, ROWS)
    if tactic.gemm.box:  # (64 channels; s; r; channel)
        flat = flat.reshape(*flat.shape[:2], p.r, p.s, -1, K_STAGE).transpose(0, 1, 4, 3, 2, 5)
    rows = np.ascontiguousarray(flat).reshape(-1, stages * K_STAGE)
    if not tactic.sparse:
        chunks = rows.reshape(-1, ROWS, stages, 8, 8).transpose(0, 2, 1, 3, 4)
        places = np.arange(8) ^ (np.arange(ROWS) % 8)[:, None]
        return {"w": np.take_along_axis(chunks, places[None, None, :, :, None], axis=3).reshape(-1)} | vectors
    kept, codes = sparse24.compress(rows)
    values = sparse24.pack_fragments(kept).reshape(-1, 4, 2 * stages, 32, 8)  # m64, m16, k32, lane
    words = sparse24.pack_metadata(codes).reshape(-1, 2, stages, 8, 2, 2, 2)  # m64, m32, stage, g, step, t % 2, m16
    ordered = values.transpose(0, 2, 1, 3, 4), words.transpose(0, 2, 1, 6, 3, 5, 4)
    return {name: np.ascontiguousarray(x).reshape(-1) for name, x in zip(("w", "meta"), ordered, strict=True)} | vectors


def section_bytes(p: ConvProblem, tactic: Tactic) -> dict[str, int]:
    """Returns the bytes of the sections that `pack` makes, from sizes alone."""
    count, rows = merged(p).count, _rows64(p, tactic)
    sections = sparse24.fragment_bytes(count, rows, k_stages(p) * K_STAGE, tactic.sparse)
    return sections | dict.fromkeys(p.epilogue.vectors, count * rows * 4)


def counts(p: ConvProblem, tactic: Tactic, device: Device) -> Counts:
    sections = section_bytes(p, tactic)
    weights = sections["w"] + sections.get("meta", 0)
    return convolved(p, tactic, weights, _limits(p, tactic, device), untimed=UNTIMED)


@lru_cache(maxsize=16384)
def _limits(p: ConvProblem, tactic: Tactic, device: Device) -> dict[str, float]:
    t, steps = tactic.gemm, k_stages(p)
    across, along, deep = t.cluster
    tiles = _units(p, tactic) * across * along * merged(p).count
    ways = t.split * deep
    blocks = t.stream or t.persist or tiles * ways
    per_clk = min(SM_L2, SHARED_L2 * rates(device).l2 / min(device.num_sms, blocks))
    clocks = _stage_clk(p, tactic, per_clk)
    each = together(clocks.values())
    end, rate = _end_clk(p, tactic, tiles, blocks, per_clk)
    of_tile = math.ceil(steps / ways) * each
    turns = math.ceil(tiles * ways / (deep * clusters_at_once(device, deep)))
    begun = conv_gemm.FILL_CLK + START_CLK + conv_gemm.once(device)
    begun += CLUSTER_CLK * (across * along * deep > 1) + SAME_WEIGHTS_CLK * (along > 1)
    begun += conv_gemm.EPILOGUE_CLK * ends.stored_by_tma(p, tactic)  # nobody waits for stores but the last ones
    if t.stream:
        clk = tiles * steps / blocks * each + end
    elif t.pingpong and t.persist:  # a block with one tile has nothing that runs during its end
        clk = (turns - 1) * max(OVERLAPPED * of_tile + rate, (of_tile + end) / 2) + of_tile + end
    else:
        clk = turns * (of_tile + end)
    begun *= 1 if t.persist or t.stream else turns
    return {max(clocks, key=clocks.__getitem__): (begun + clk) / device.clock_mhz}


def alike(p: ConvProblem, tactic: Tactic) -> Tactic:
    """Returns one tactic for all that take the same time and whose outputs are stored by the same means, TMA or threads."""
    same = conv_gemm.alike(p, tactic)
    return same if ends.stored_by_tma(p, same) == ends.stored_by_tma(p, tactic) else replace(same, out=tactic.out)


def _stage_clk(p: ConvProblem, tactic: Tactic, per_clk: float) -> dict[str, float]:
    """Returns limit -> clocks of a stage, where an SM reads `per_clk` bytes per clock from L2."""
    model = _model(tactic.gemm, tactic.sparse)
    stays = _weights_stay(p, tactic, ends.stored_by_tma(p, tactic))
    at = stage(replace(model, weights="held") if stays else model, CENTRE, per_clk)
    filled = k_steps(p, tactic) * 16 / K_STAGE  # the rest are zeros, which nobody draws or multiplies
    return {"mma": at.tensor * filled, "smem": at.port, "l2": at.l2 * filled, "latency": at.latency}


def k_steps(p: ConvProblem, tactic: Tactic) -> int:
    """Steps of 16 channels of a tap in a stage; with 2:4 weights always all of them."""
    return K_STAGE // 16 if tactic.sparse else min(K_STAGE // 16, -(-merged(p).one.c // 16))


def _end_clk(p: ConvProblem, tactic: Tactic, tiles: int, blocks: int, per_clk: float) -> tuple[float, float]:
    """Clocks of a tile's end: (of its own warpgroup, from the last product on; of the SM, shared with other products)."""
    t, deep = tactic.gemm, tactic.gemm.cluster[2]
    outputs = t.m * t.n
    copied = RESIDUAL_CLK * (THREE_PARTS if t.pingpong and t.n == 3 * ends.part(t) else 1) if p.epilogue.residual else 0
    rate = min(t.m, _rows(p, tactic)) * t.n * (OUTPUT_CLK * (4 if linear(tactic.out) else 1) + copied)
    rate += outputs * epilogue_instructions(p) / 128
    alone = conv_gemm.EPILOGUE_CLK + conv_gemm.epilogue_issue_clk(p, tactic) + conv_gemm.scattered_clk(p, tactic)
    alone += OUTPUT_ALONE * outputs / (1 if t.pingpong else ends.teams(t))
    faster = 1 if linear(tactic.out) else ends.BY_STMATRIX
    by_tma = ends.stored_by_tma(p, tactic)
    alone, rate = ends.clocks(p, tactic) if by_tma else (max(alone, rate) * faster, rate * faster)
    end = in_parts(alone, tactic, tiles, blocks, per_clk, SUMMED_CLK)
    if deep > 1:  # `storing` blocks of the cluster each read all others' sums of a part of the tile, and store it
        storing, again = min(deep, t.n // ends.part(t)), 0 if by_tma else conv_gemm.EPILOGUE_CLK
        end = (end + again * (storing - 1) + outputs * 4 * (deep - 1) / CENTRE.cluster_rate) / storing
        end += MEETING_CLK + CENTRE.cluster_latency
    return end, rate
