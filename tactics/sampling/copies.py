"""Several copies of a problem's packed weights on the GPU, so that each launch of a sample reads weights that are not in L2."""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuda_kernels.launch import Cuda
from tactics.launches import pack_weights, packing_key
from tactics.problems.problem import Problem
from tactics.tactic import Tactic

BUDGET_BYTES = 1 << 30  # for the copies of all packings of a problem
ALIGNED = 256  # bytes


@dataclass
class Packed:
    """The copies of one packing of the weights, in one allocation `memory`. `sections`: for each copy, section name -> device
    address; `ready`: tactic -> an object (worker.Ready) that holds these addresses, and is released together with them."""

    memory: Any
    sections: list[dict[str, int]]
    ready: dict[Tactic, Any] = field(default_factory=dict)


class Copies:
    """The most recently used packings of a problem's weights on the GPU, as many as BUDGET_BYTES holds. `weights`: as
    random_data returns them."""

    def __init__(self, gpu: Cuda, problem: Problem, weights: Mapping[str, np.ndarray]) -> None:
        self.gpu, self.problem, self.weights = gpu, problem, weights
        self._held: dict[Hashable, Packed] = {}  # the last used comes last

    @property
    def nbytes(self) -> int:
        return sum(packed.memory.nbytes for packed in self._held.values())

    def of(self, tactic: Tactic, most_bytes: float, most: int, keep: Collection[Hashable]) -> Packed:
        """Returns the tactic's packing; tactics with the same packing_key share one.

        A new packing has at most `most` copies, and no more than are needed to exceed `most_bytes` in all; it has at least one,
        even beyond the budget. Packings whose keys are in `keep` are not released to make room.
        """
        key = packing_key(self.problem, tactic)
        if key not in self._held:
            places, host = self._pack(tactic)
            most = int(np.clip(1 + most_bytes // len(host), 1, most))
            for old in [k for k in self._held if k not in keep]:
                if self.nbytes + most * len(host) > BUDGET_BYTES:
                    del self._held[old]
            count = int(np.clip((BUDGET_BYTES - self.nbytes) // len(host), 1, most))
            memory = self.gpu.cupy.tile(self.gpu.cupy.asarray(host), count)
            starts = range(memory.data.ptr, memory.data.ptr + memory.nbytes, len(host))
            self._held[key] = Packed(memory, [{name: start + at for name, at in places.items()} for start in starts])
        self._held[key] = self._held.pop(key)
        return self._held[key]

    def _pack(self, tactic: Tactic) -> tuple[dict[str, int], np.ndarray]:
        """Returns (section name -> offset in bytes, the bytes of all sections as uint8); offsets are multiples of ALIGNED."""
        sections = pack_weights(self.problem, tactic, self.weights)
        places, end = {}, 0
        for name, array in sections.items():
            places[name] = end
            end += -(-array.nbytes // ALIGNED) * ALIGNED
        host = np.zeros(max(end, ALIGNED), np.uint8)
        for name, array in sections.items():
            host[places[name] : places[name] + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return places, host
