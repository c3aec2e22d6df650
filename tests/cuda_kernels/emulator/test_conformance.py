"""Single instructions on hardware: the emulator's own tests of lanes, fragments and memory, run on the GPU instead.

What the emulator was taught from the ISA's text is thereby held against the machine. Counters and schedules are the
emulator's alone and are not compared here.
"""

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel, cubin_path
from cuda_kernels.device import current, why_no_gpu
from cuda_kernels.launch import Cuda
from tests.cuda_kernels.emulator import test_emulator, test_emulator_alu
from tests.cuda_kernels.emulator import test_emulator_bytes as bytes_

WHY = why_no_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY), reason=WHY)]

CASES = [
    (test_emulator.test_shuffles_and_votes, ()),
    (test_emulator.test_divergence, (0,)),
    (test_emulator.test_dense_mma_layout, ()),
    *((test_emulator.test_sparse_mma_layout, (f"sparse_{s}", s, seed)) for s in (0, 1) for seed in range(6)),
    *((test, (other, 0)) for test in (bytes_.test_the_dense_wrapper, bytes_.test_the_sparse_wrapper) for other in ("s8", "u8")),
    (test_emulator.test_columns_a_sparse_row_drops_are_not_multiplied, ()),
    (test_emulator.test_ldmatrix_and_movmatrix, ()),
    (test_emulator_alu.test_32_bit_integers, ()),
]


class Anything:
    """Stands for the emulator's counters, which hardware does not have."""

    def __getattr__(self, name):
        return Anything()

    def __eq__(self, other):
        return True


class Hardware:
    """`program` and `run` as the emulator's tests call them, on the GPU at hand."""

    def __init__(self):
        self.gpu = Cuda(current())

    def program(self, file: str, kernel: str, **values):
        compiled = compile_kernel(str(test_emulator.HERE / file), values, self.gpu.device.sm)
        return self.gpu.cupy.RawModule(path=str(cubin_path(compiled))).get_function(kernel)

    def run(self, kernel, block, args, *, grid=1, smem=0, options=None):
        values, placed = [], []
        for a in args:
            if isinstance(a, np.ndarray):
                placed.append((self.gpu.allocate(a.nbytes), a))
                self.gpu.write(placed[-1][0], a)
                values.append(np.uint64(placed[-1][0]))
            else:
                values.append(np.int32(a))
        kernel((grid, 1, 1), (block, 1, 1), tuple(values), shared_mem=smem, stream=self.gpu.stream)
        after = [self.gpu.read(address, a.nbytes).view(a.dtype).reshape(a.shape) for address, a in placed]
        for address, _ in placed:
            self.gpu.free(address)
        return Anything(), after


@pytest.fixture(scope="module")
def hardware():
    return Hardware()


@pytest.mark.parametrize("case,arguments", CASES, ids=lambda v: getattr(v, "__name__", None) or "-".join(map(str, v)) or "once")
def test_hardware_passes_the_emulators_tests(case, arguments, hardware, monkeypatch):
    monkeypatch.setattr(test_emulator, "program", hardware.program)
    monkeypatch.setattr(test_emulator, "run", hardware.run)

    def run_alu(kernel: str, columns: int, *arrays) -> np.ndarray:
        out = np.zeros(columns * test_emulator_alu.N, np.uint32)
        function = hardware.program("golden_alu.cu", kernel)
        _, after = hardware.run(function, 128, [*arrays, out, test_emulator_alu.N], grid=3)
        return after[-1].reshape(columns, test_emulator_alu.N)

    monkeypatch.setattr(test_emulator_alu, "run", run_alu)
    case(*arguments)
