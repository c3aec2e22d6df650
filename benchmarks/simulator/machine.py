"""The figures of the simulated SM, in clocks, each with its source; and the figures that nobody has published, which are swept.

The rate of tensor core products is the device table's (cuda_kernels/named_devices.py), never the spacing that ptxas gives them:
it spaces products 8 clocks apart on sm_80, sm_86 and sm_89 alike, where GA102 takes 16 and GeForce 32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from benchmarks.simulator.sass import GMMA, MMA, Instruction
from cuda_kernels.device import NAMED, Device
from cuda_kernels.rates import rates
from tactics.families.conv_bytes import of_bytes
from tactics.families.hopper import figures

SUB_CORES = 4  # of an SM, each with a scheduler and a tensor core
HUERTA = "arXiv 2503.20481"  # Huerta et al., Dissecting and Modeling the Architecture of Modern GPU Cores
SUN = "arXiv 2206.02874"  # Sun et al., Dissecting Tensor Cores via Microbenchmarks
LUO = "arXiv 2402.13499"  # Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture
GUIDE = "CUDA C++ Programming Guide, throughput of instructions"


@dataclass(frozen=True, slots=True)
class Machine:
    """An SM; clocks where no unit is given. SOURCES says where each figure comes from. Hashes of FP16's loops (shares.json)
    ignore `bytes_per_clk`.
    """

    device: str
    products_per_clk: float  # dense FP16 ones with FP32 sums, of a sub-core
    sparse_ratio: float  # 2:4 products per clock, zeros counted, over dense ones
    mma_depth: int  # from a product's last input to its result, beside its interval
    alu_interval: int
    fma_interval: int  # of FP32
    imad_interval: int
    xu_interval: int
    to_port: int  # from the issue of a memory instruction to its earliest request
    address_interval: int  # between two requests of a sub-core
    port_interval: int  # the least between two requests to the units that sub-cores share
    port_bytes: int  # per clock, of shared memory and L1 together
    shared_latency: int  # from a load's last wavefront to its result
    operands_read: int  # from issue until a load's address register may be overwritten
    copy_read: int  # the same of a copy
    l2_latency: int
    fill_bytes: int  # per clock, from L2
    constant_latency: int
    other_latency: int  # of S2R, MUFU and other instructions that a scoreboard waits for
    bytes_per_clk: float = field(repr=False)  # products of whole numbers of 8 bits, dense ones, of a sub-core


SOURCES: Mapping[str, str] = {
    "device": "whose figures the others are",
    "products_per_clk": "device.py: mma_fma_per_clk x mma_sync_share of its data sheets; A100: 1004 of 1024 measured by " + SUN,
    "sparse_ratio": f"rates.py, sparse_rate: 2: 1979 of 2048 measured on an A100, {SUN}, and assumed for the others; 1.3 on "
    "sm_90a, the most that was measured on an H100",
    "mma_depth": f"m16n8k16, m16n8k32 sparse and, of bytes, m16n8k32 and m16n8k64 sparse each complete in 24.7 clocks on an "
    f"A100, 8 of them its interval, {SUN}; on other devices assumed to be as deep",
    "alu_interval": f"64 results a clock and SM, {GUIDE}",
    "fma_interval": f"64 results a clock and SM on sm_80, 128 elsewhere, {GUIDE}",
    "imad_interval": f"64 results a clock and SM, {GUIDE}",
    "xu_interval": f"16 results a clock and SM, {GUIDE}",
    "to_port": f"the sixth load in a row issues when the first has left, 11 clocks behind it, table 1 of {HUERTA}",
    "address_interval": f"table 1 of {HUERTA}",
    "port_interval": f"table 1 of {HUERTA}",
    "port_bytes": f"128 bytes a clock and SM, {GUIDE} (32 banks of 4 bytes)",
    "shared_latency": f"LDS of 32, 64, 128 bits: 24, 24, 26 clocks, table 2 of {HUERTA}",
    "operands_read": f"table 2 of {HUERTA}: 9 (shared memory) to 11 (global memory)",
    "copy_read": f"table 2 of {HUERTA}: LDGSTS",
    "l2_latency": f"idle: A100 261, RTX 4090 273 (taken for sm_86 and sm_120 too), {LUO}; Hopper assumed as the A100",
    "fill_bytes": "64 bytes a clock and SM, GA100 whitepaper (L2 read bandwidth 5120 bytes a clock over 80 ports); "
    "assumed for the others",
    "constant_latency": f"table 2 of {HUERTA}",
    "other_latency": "assumed as that of shared memory",
    "bytes_per_clk": f"data sheets x mma_sync_share: twice FP16's, on GeForce 4 times. A100: 1986.5 of 2048 of an SM measured, "
    f"sparse 3961.5 of 4096, {SUN}; RTX 5090: 931 TOPS, 1024 at 2.67 GHz, kekzl/imp#254; RTX 4080: 409 TOPS, 1024 at 2.63 GHz, "
    "ReinForce-II/mmapeak#5. Hopper, B200: unpublished, mma.sync is assumed to have FP16's share of the best rate",
}

L2_LATENCY = {80: 261, 90: 261, 100: 261, 103: 261}


def machine(device: Device) -> Machine:
    """Returns the SM of a device."""
    return Machine(
        device=device.title,
        products_per_clk=device.mma_fma_per_clk * device.mma_sync_share / SUB_CORES,
        sparse_ratio=rates(device).sparse_rate,
        mma_depth=17,
        alu_interval=2,
        fma_interval=2 if device.cc == 80 else 1,
        imad_interval=2,
        xu_interval=8,
        to_port=11,
        address_interval=4,
        port_interval=2,
        port_bytes=128,
        shared_latency=11,
        operands_read=9,
        copy_read=13,
        l2_latency=L2_LATENCY.get(device.cc, 273),
        fill_bytes=64,
        constant_latency=29,
        other_latency=24,
        bytes_per_clk=2 * of_bytes(device).mma_fma_per_clk * device.mma_sync_share / SUB_CORES,
    )


def device_of(sm: str) -> Device:
    """Returns the named device that stands for an architecture if no device is given: the first at full rate. ValueError."""
    found = [d for d in NAMED.values() if d.sm == sm]
    if not found:
        raise ValueError(f"architecture {sm}: expected one of {', '.join(sorted({d.sm for d in NAMED.values()}))}")
    return max(found, key=lambda d: d.mma_fma_per_clk)


@dataclass(frozen=True, slots=True)
class Bulk:
    """Figures of asynchronous products and TMA's copies on Hopper. `l2`: bytes a clock that an SM draws from L2; `latency`:
    clocks from a stage's release to its first bytes; `write_port`: how often a byte that TMA writes crosses the port; `depth`:
    clocks from a product's last operands to its sums.
    """

    l2: float = figures.CENTRE.l2
    latency: float = figures.CENTRE.latency
    write_port: float = figures.CENTRE.write_port
    depth: int = 17


@dataclass(frozen=True, slots=True)
class Sweep:
    """Figures that nobody has published. `arbitration`: the warp of a sub-core that issues, if several may; all but "round
    robin" go on with the one that issued last. `copy`: clocks of the port for the request of a copy (LDGSTS), in addition to
    the write of its data; `hold`: the most clocks that these data wait while other requests take the port. `queue`: memory
    instructions that a sub-core holds. `barrier`: clocks from the last warp's arrival until the others go on. `l2_latency`: 0
    for the machine's. `shift`: 0, or a seed for the clocks at which blocks and warps begin and by which L2 answers later.
    Hashes of loops of mma.sync (shares.json) ignore the last three fields: their shares have none of them.
    """

    arbitration: str
    copy: int
    hold: int
    queue: int
    barrier: int
    bulk: Bulk = field(default=Bulk(), repr=False)
    l2_latency: int = field(default=0, repr=False)
    shift: int = field(default=0, repr=False)


YOUNGEST, OLDEST, ROUND_ROBIN = "greedy, then youngest", "greedy, then oldest", "round robin"
SWEPT: Mapping[str, tuple] = {
    "arbitration": (YOUNGEST, OLDEST, ROUND_ROBIN),
    "copies": ((4, 0), (2, 256)),
    "queue": (5, 8),
    "barrier": (10, 30),
}
SWEEP = tuple(Sweep(order, copy, hold, *rest) for order, (copy, hold), *rest in product(*SWEPT.values()))
CENTRE = Sweep(YOUNGEST, 2, 256, 5, 20)
LOADED = (400, 600)  # clocks of L2 latency
LOADED_SWEEP = tuple(replace(point, l2_latency=clocks) for clocks in LOADED for point in SWEEP)
# L2 latency -> sweeps with other starts, which show the noise of how warps follow each other; the machine's latency first.
SHIFTED = tuple(tuple(replace(CENTRE, l2_latency=n, shift=seed) for seed in range(1, 9)) for n in (0, *LOADED))
BULK_SWEPT: Mapping[str, tuple] = {"l2": (32, 41), "latency": (1500, 600), "write_port": (1, 0), "depth": (60, 17)}
BULK_SWEEP = tuple(replace(CENTRE, bulk=Bulk(*values)) for values in product(*BULK_SWEPT.values()))
BULK_SOURCES = {name: figures.SOURCES[name] for name in BULK_SWEPT if name != "depth"} | {
    "depth": "unpublished: as deep as mma.sync's, or 43 clocks deeper"
}
SWEEP_SOURCES: Mapping[str, str] = {
    "arbitration": f"the youngest, {HUERTA}, on GA102; the oldest and round robin are what simulators before it took",
    "copies": "unpublished: from the least that any request takes, data written when the port is free, to four clocks, one for "
    "each line of L2, and data first; at eight clocks CUTLASS's sparse loop would stay below its published rate",
    "queue": f"5 on GA102, table 1 of {HUERTA}; more is assumed to be possible elsewhere",
    "barrier": "unpublished",
}
LOADED_SOURCE = "unpublished: no less than idle; 600 is little more than twice that"


def interval(machine: Machine, i: Instruction) -> int:
    """Returns the clocks of a sub-core's tensor core that one product takes. ValueError for products that the table lacks."""
    if m := GMMA.match(i.opcode):
        return int(m["n"]) // 2  # m64nNk16, and m64nNk32 of 2:4 weights: LUO's table of wgmma
    m = MMA.match(i.opcode)
    if m is None or m["of"] == "F16":
        why = f"{i.opcode} at {i.address:#x}: no published rate is in the table"
        raise ValueError(f"{why}; expected HMMA with FP32 sums, IMMA of 8 bits and K = 32 (sparse 64), or HGMMA of FP16")
    products = 16 * 8 * int(m["shape"][3:])  # "16832": 16 x 8 x 32
    rate = machine.products_per_clk if m["of"] == "F32" else machine.bytes_per_clk
    return max(1, round(products / rate / (machine.sparse_ratio if m["sparse"] else 1)))


@dataclass(frozen=True, slots=True)
class Residency:
    """The load of an SM: `blocks` of `warps` each. `limit`: the resource that keeps another block out."""

    warps: int
    blocks: int
    limit: str = ""


def residency(device: Device, threads: int, registers: int, smem: int) -> Residency:
    """Returns the residency of blocks with `threads` of `registers` each and `smem` bytes of static and dynamic shared memory.
    ValueError if not one block fits.
    """
    warps = -(-threads // 32)
    per_warp = -(-registers // 8) * 8 * 32  # allocated by 256 registers of a warp
    fits = {
        "registers": device.regs_per_sm // SUB_CORES // per_warp * SUB_CORES // warps,
        "shared memory": device.smem_per_sm // (smem + 1024),
        "threads": device.max_threads_per_sm // (32 * warps),
        "blocks": device.max_blocks_per_sm,
    }
    limit = min(fits, key=lambda name: fits[name])
    if fits[limit] < 1:
        raise ValueError(f"{limit}: no block of {threads} threads of {registers} registers, {smem} bytes fits {device.title}")
    return Residency(warps, fits[limit], limit)
