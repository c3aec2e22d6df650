"""Copies between host and device on one stream, through reused pinned memory.

Only copies from or to pinned memory are ordered by the stream alone. For other memory the driver's synchronization depends on
the size (CUDA Runtime API, "API synchronization behavior").
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from cupy.cuda import Event, Stream

BLOCK = 2 << 20  # bytes that are copied at a time: the host fills or empties one block while the other travels
BLOCKS = 2
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


class Block(NamedTuple):
    """Pinned memory; a copy from or to it is under way until `copied`."""

    data: np.ndarray
    copied: Event


class Staging:
    """Copies through reused blocks of pinned memory; `cupy`: the module.

    Blocks are allocated when first needed, and freed with this object, which must outlive the queued copies.
    """

    def __init__(self, cupy: Any, stream: Stream) -> None:
        self._cupy, self._stream = cupy, stream
        self._blocks: deque[Block] = deque()  # the one used longest ago comes first

    def upload(self, address: int, data: np.ndarray) -> None:
        """Queues a copy of flat uint8 `data` to the device; the caller may change `data` at once."""
        for at in range(0, data.nbytes, BLOCK):
            piece = data[at : at + BLOCK]
            block = self._next()
            block.data[: piece.nbytes] = piece
            self._copy(block, address + at, block.data.ctypes.data, piece.nbytes, TO_DEVICE)

    def download(self, out: np.ndarray, address: int) -> None:
        """Fills flat uint8 `out` from `address` after the work queued so far; waits for it."""
        under_way: deque[tuple[Block, np.ndarray]] = deque()
        for at in range(0, out.nbytes, BLOCK):
            if len(under_way) == BLOCKS:  # this empties the next block
                self._empty(*under_way.popleft())
            block, piece = self._next(), out[at : at + BLOCK]
            self._copy(block, block.data.ctypes.data, address + at, piece.nbytes, TO_HOST)
            under_way.append((block, piece))
        while under_way:
            self._empty(*under_way.popleft())

    def _next(self) -> Block:
        """Returns the next block, after its last copy has ended."""
        if len(self._blocks) < BLOCKS:
            memory = self._cupy.cuda.alloc_pinned_memory(BLOCK)
            block = Block(np.frombuffer(memory, np.uint8, BLOCK), self._cupy.cuda.Event(disable_timing=True))
        else:
            block = self._blocks.popleft()
        self._blocks.append(block)
        block.copied.synchronize()
        return block

    def _copy(self, block: Block, to: int, source: int, nbytes: int, kind: int) -> None:
        self._cupy.cuda.runtime.memcpyAsync(to, source, nbytes, kind, self._stream.ptr)
        block.copied.record(self._stream)

    def _empty(self, block: Block, piece: np.ndarray) -> None:
        block.copied.synchronize()
        piece[:] = block.data[: piece.nbytes]
