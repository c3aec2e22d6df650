"""Rates and latencies of an SM in the model of Hopper's tiles: `CENTRE`, and the source of each figure in `SOURCES`.

No figure is fitted to our own kernels.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes, clocks and shares of one SM.

    `port`: bytes per clock of shared memory and L1, which are one SRAM; `l2`: bytes per clock that one SM reads; `shared_copy`:
    each block's part of the L2 traffic of an operand that a cluster of two copies to both; `register_port`, `write_port`: how
    often a byte of weights crosses the port if a thread loads it, and if TMA writes it; `latency`: clocks from a copy's issue
    to its bytes in shared memory; `register_latency`: clocks of a thread's load of weights that the copying warpgroup has
    prefetched to L2; `cluster_rate`, `cluster_latency`: bytes per clock and SM, and clocks, of shared memory in another block.
    """

    port: float = 128
    l2: float = 38
    shared_copy: float = 0.5
    register_port: float = 1
    write_port: float = 1
    latency: float = 1080
    register_latency: float = 600
    cluster_rate: float = 13
    cluster_latency: float = 180


CENTRE = Figures()
SOURCES = {
    "port": "128 bytes a clock and SM: CUDA C++ Programming Guide, throughput of instructions",
    "l2": "H200 38, A100 35 bytes a clock to one SM: gpu-benches; 32 to 39 by fits to products",
    "shared_copy": "half: one request for two blocks; no measurement of the traffic itself: from half to three quarters",
    "register_port": "unpublished: once, or twice if a line is written to L1 before it is read",
    "write_port": "unpublished: TMA writes take the port's clocks, or none",
    "latency": "1080: fit to products on an A100 for loads of weights behind others; TMA's under load is unpublished",
    "register_latency": "263 idle for an L2 hit, arXiv 2402.13499; under load unpublished",
    "cluster_rate": "3.3 TB/s over 132 SMs in clusters of two, arXiv 2402.13499 (from memory, not read again): half to double",
    "cluster_latency": "180 clocks, arXiv 2402.13499 (from memory, not read again); a barrier of the cluster takes as long",
}
