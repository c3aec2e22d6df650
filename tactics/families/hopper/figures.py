"""What the model of Hopper kernels takes for known, and what it sweeps because nobody has published it.

`CENTRE` is what estimates use; `SWEPT` has the least and the most of each figure that is unpublished or only measured through
something else; `SOURCES` says where each comes from. No figure is fitted to our own kernels: none was ever timed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes, clocks and shares of one SM.

    `port`: bytes a clock of shared memory and L1, which are one SRAM; `l2`: bytes a clock that one SM draws; `shared_copy`: of
    the L2 traffic of an operand that a cluster of two copies to both, each block's part; `register_port`, `write_port`: how
    often a byte of weights that a thread loads, and one that TMA writes, crosses the port; `latency`: clocks from a copy's
    issue to its bytes in shared memory, `register_latency`: of a thread's load of weights that the copying warpgroup has
    prefetched to L2; `held`: the share of the clock that the power limit leaves to dense products, `sparse_clock`: to all of an
    SM in a 2:4 loop; `start`: clocks that a block with TMA takes longer to begin (tensor maps, mbarriers, setmaxnreg, a
    cluster's barrier); `output`: instructions of an output in the epilogue; `cp_async`: the share of the dense peak that loops
    of cp.async and wgmma reach; `cluster_rate`, `cluster_latency`: bytes a clock and SM, and clocks, of shared memory in
    another block.
    """

    port: float = 128
    l2: float = 38
    shared_copy: float = 0.5
    register_port: float = 1
    write_port: float = 1
    latency: float = 1080
    register_latency: float = 600
    held: float = 0.81
    sparse_clock: float = 1
    start: float = 200
    output: float = 10
    cp_async: float = 0.41
    cluster_rate: float = 13
    cluster_latency: float = 180


CENTRE = Figures()
SWEPT: Mapping[str, tuple[float, float]] = {
    "l2": (32, 41),
    "shared_copy": (0.75, 0.5),
    "register_port": (2, 1),
    "write_port": (1, 0),
    "latency": (1500, 600),
    "register_latency": (1080, 263),
    "held": (0.81, 1.0),
    "sparse_clock": (0.81, 1.0),
    "start": (600, 0),
    "output": (10, 5),
    "cp_async": (0.29, 0.41),
    "cluster_rate": (8, 26),
    "cluster_latency": (360, 180),
}  # worst first
OF_A_LOOP = ("l2", "shared_copy", "register_port", "write_port")  # what bounds a loop in a steady state
SOURCES = {
    "port": "128 bytes a clock and SM: CUDA C++ Programming Guide, throughput of instructions",
    "l2": "H200 38, A100 35 bytes a clock to one SM: gpu-benches; 32 to 39 by fits to products",
    "shared_copy": "half: one request for two blocks; no measurement of the traffic itself: from half to three quarters",
    "register_port": "unpublished: once, or twice if a line is written to L1 before it is read",
    "write_port": "unpublished: TMA writes take the port's clocks, or none",
    "latency": "1080: fit to products on an A100 for loads of weights behind others; TMA's under load is unpublished",
    "register_latency": "263 idle for an L2 hit, arXiv 2402.13499; under load unpublished",
    "held": "794 of 989 TFLOP/s in the best BF16 product of an H100 SXM (MAMF finder), 797.8 by cuBLAS at 8192^3 (fast.cu); "
    "1: a card without a limit",
    "sparse_clock": "1: CUTLASS's 128x128 loop, whose ceiling here is 0.97 of the dense peak, was measured at 0.95 to 0.97 on "
    "an H100 SXM (cuSPARSELt, 1.2 of dense) and at 0.96 on a PCIe card; 0.81: as of dense products",
    "start": "unpublished",
    "output": "10: the epilogue that our mma.sync kernels have; 5: stmatrix and a TMA store",
    "cp_async": "409 of 989 TFLOP/s with one group in flight, 290 with none (cutlass#2706)",
    "cluster_rate": "3.3 TB/s over 132 SMs in clusters of two, arXiv 2402.13499 (from memory, not read again): half to double",
    "cluster_latency": "180 clocks, arXiv 2402.13499 (from memory, not read again); a barrier of the cluster takes as long",
}


def sweep(names: tuple[str, ...] = OF_A_LOOP) -> Iterator[Figures]:
    """Every combination of the least and the most of these figures, the others at the centre."""
    for values in product(*(SWEPT[name] for name in names)):
        yield replace(CENTRE, **dict(zip(names, values, strict=True)))


def worst() -> Figures:
    return replace(CENTRE, **{name: values[0] for name, values in SWEPT.items()})


def best() -> Figures:
    return replace(CENTRE, **{name: values[1] for name, values in SWEPT.items()})
