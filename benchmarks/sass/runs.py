"""The kernels of `kernels`, executed by the emulator on one convolution, and its counts.

The convolution is 3x3 over 16 x 16 pixels, 256 output channels, 2:4 weights, small whole numbers: sums are exact in any order,
so all kernels must answer alike to the bit. Matrix products get the pixels of all taps gathered. Two depths are run: their
difference is the main loop's, without beginning and end.
"""

import ctypes as C
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.sass.kernels import DEVICES, HOPPER, Kernel, cutlass, triton
from cuda_kernels.compile import compile_kernel, virtual
from cuda_kernels.device import named
from cuda_kernels.emulator import Options, Stats
from cuda_kernels.launch import Emulated
from tactics.format import Format, from_memory, num_bytes, to_memory
from tactics.launches import launches, pack_weights
from tactics.problems.epilogue import Epilogue
from tactics.problems.problem import ConvProblem
from tactics.sampling.trial import Addresses, bind, scratch_for
from tactics.step import Launch
from tactics.tactic import Tactic
from tests.independent.cuda_programs import Device, aligned, cudart
from tests.independent.triton_runs import Run, execute, tiles

SIZE, CHANNELS, TAPS = 16, 256, 3
DEPTHS = (64, 256)  # input channels: K = 576 and 2304
HWC8 = Format("fp16", "hwc8")
CHECKED = Options()


def depths(kernel: Kernel) -> tuple[int, int]:
    """Returns the input channels of a kernel's two runs. CUTLASS's metadata for Hopper ends with a stage, and TMA reads zeros
    behind it, which the emulator refuses; so its depths are whole stages.
    """
    return DEPTHS if kernel.tile.k <= DEPTHS[0] else (2 * DEPTHS[0], DEPTHS[1])


@dataclass(frozen=True, slots=True)
class Operands:
    """x[pixels, channels], w[outputs, taps, channels] with 2:4 weights, and the expected y[pixels, outputs] in FP64."""

    x: np.ndarray
    w: np.ndarray
    y: np.ndarray

    @property
    def columns(self) -> np.ndarray:
        """Returns [pixels, taps x channels]: the pixels under each tap, next to each other."""
        c = self.x.shape[1]
        image = np.pad(self.x.reshape(SIZE, SIZE, c), ((1, 1), (1, 1), (0, 0)))
        under = [image[r : r + SIZE, s : s + SIZE] for r, s in np.ndindex(TAPS, TAPS)]
        return np.ascontiguousarray(np.stack(under, 2).reshape(SIZE * SIZE, -1))

    @property
    def rows(self) -> np.ndarray:
        """Returns the weights as [outputs, taps x channels]."""
        return self.w.reshape(CHANNELS, -1)


@dataclass(frozen=True, slots=True)
class Ran:
    """A launch: its PTX, threads of a block, bytes of dynamic shared memory, counters and answer [pixels, outputs]."""

    ptx: str
    entry: str
    threads: int
    smem: int
    stats: Stats
    answer: np.ndarray


@lru_cache
def operands(channels: int) -> Operands:
    rng = np.random.default_rng(channels)
    x = rng.integers(-2, 3, (SIZE * SIZE, channels)).astype(np.float16)
    w = rng.choice([-2.0, -1.0, 1.0, 2.0], (CHANNELS, TAPS * TAPS, channels // 4, 4)).astype(np.float16)
    w[rng.permuted(np.broadcast_to(np.arange(4) < 2, w.shape), axis=-1)] = 0
    made = Operands(x, w.reshape(CHANNELS, TAPS * TAPS, channels), np.empty(0))
    y = made.columns.astype(np.float64) @ made.rows.astype(np.float64).T
    if np.abs(y).max() > 2048:
        raise ValueError(f"sums up to {np.abs(y).max()}: expected at most 2048, above which FP16 rounds whole numbers")
    return Operands(made.x, made.w, y)


def run(kernel: Kernel, channels: int, options: Options = CHECKED, sm: str = "sm_80") -> Ran:
    """Runs one launch. Raises EmulatorError or RuntimeError if the kernel does not end well."""
    return {"ours": _ours, "CUTLASS": _cutlass, "Triton": _triton}[kernel.maker](kernel, operands(channels), options, sm)


# ---- ours


def _ours(kernel: Kernel, data: Operands, options: Options, sm: str) -> Ran:
    c = data.x.shape[1]
    p = ConvProblem(1, c, SIZE, SIZE, CHANNELS, TAPS, TAPS, pad=(1, 1, 1, 1), sparse24=True, epilogue=Epilogue())
    tactic = Tactic(kernel.name, kernel.tile, (HWC8,), HWC8)
    gpu = Emulated(
        DEVICES[sm] if sm in HOPPER else named("a100"), checks=options.checks, async_mode=options.async_mode, seed=options.seed
    )
    weights = data.w.astype(np.float32).reshape(CHANNELS, TAPS, TAPS, c).transpose(0, 3, 1, 2)
    image = to_memory(data.x.reshape(1, SIZE, SIZE, c).transpose(0, 3, 1, 2), HWC8)
    places = {}
    for name, array in pack_weights(p, tactic, {"w": np.ascontiguousarray(weights)}).items():
        places[name] = gpu.allocate(array.nbytes, constant=True)
        gpu.write(places[name], array)
    x, y = gpu.allocate(image.nbytes), gpu.allocate(num_bytes(HWC8, p.out_shape))
    gpu.write(x, image)
    (step,) = launches(p, tactic)
    if not isinstance(step, Launch):
        raise TypeError(f"{kernel} is no launch")
    made = compile_kernel(step.kernel, dict(step.values), virtual(sm))
    params = bind(gpu, step.args, Addresses([x], y, places, scratch_for(gpu, (step,))))
    gpu.launch(gpu.load(made), step.grid, step.block, step.smem, params)
    answer = from_memory(gpu.read(y, num_bytes(HWC8, p.out_shape)).view(np.float16), HWC8, p.out_shape)
    return Ran(made.ptx, step.kernel, step.block[0], step.smem, gpu.stats[0], answer[0].reshape(CHANNELS, -1).T)


# ---- CUTLASS's

_DEVICE: list[Device] = []  # one for the process: programs hold its address


def _device(options: Options, kernel: Kernel) -> Device:
    if not _DEVICE:
        _DEVICE.append(Device(options))
    _DEVICE[0].hooks.capability = DEVICES[kernel.sms[0]].cc
    _DEVICE[0].change = aligned if kernel.sms == HOPPER else str
    C.CDLL(str(cudart()), mode=C.RTLD_GLOBAL).set_hooks(C.byref(_DEVICE[0].hooks))
    _DEVICE[0].options = options
    return _DEVICE[0]


def _cutlass(kernel: Kernel, data: Operands, options: Options, sm: str) -> Ran:
    device, c = _device(options, kernel), data.x.shape[1]
    memory, m, n, k = device.memory, SIZE * SIZE, CHANNELS, TAPS * TAPS * c
    run = C.CDLL(str(cutlass(kernel))).run
    y, before = memory.alloc(2 * m * n, name="y"), len(device.launched)
    arrays: tuple[np.ndarray, np.ndarray]
    numbers: tuple[int, ...]
    if kernel.name.startswith("conv"):
        arrays, numbers = (data.x, data.w), (1, SIZE, c, n, TAPS)
    elif not kernel.sparse:
        arrays, numbers = (data.columns, data.rows), (m, n, k)
    elif kernel.sms == HOPPER:  # it compresses by itself
        arrays, numbers = (data.rows, data.columns), (n, m, k)
    else:
        arrays, numbers = (kept(data.rows), data.columns), (n, m, k)
    taken = [memory.upload(array, name) for array, name in zip(arrays, ("first", "second"), strict=True)]
    taken.append(y)
    if kernel.sparse and kernel.sms == HOPPER:
        up = -(-k // 256) * 256
        taken += [memory.alloc(n * up, name="values"), memory.alloc(n * up // 8, name="metadata")]
    elif kernel.sparse:
        taken += [memory.upload(places(data.rows), "metadata"), memory.alloc(n * k // 8, name="reordered")]
    status = run(*map(C.c_void_p, taken), *map(C.c_int, numbers))
    if status or len(device.launched) - before != 1 + (kernel.name == "sparse_gemm_sm90"):
        raise RuntimeError(f"{kernel}: cutlass::Status {status} after {len(device.launched) - before} launches")
    memory.check_red_zones()
    answer = memory.read(y, 2 * m * n).view(np.float16)
    for address in taken:
        memory.free(address)
    done = device.launched[-1]
    answer = answer.reshape(n, m).T if kernel.sparse else answer.reshape(m, n)
    return Ran(done.ptx, done.entry, done.block[0], done.shared, done.stats, answer)


def kept(rows: np.ndarray) -> np.ndarray:
    """Returns [m, k / 2]: of each four values of a row the two that are not zero."""
    groups = rows.reshape(len(rows), -1, 4)
    return np.ascontiguousarray(np.take_along_axis(groups, _which(groups), -1).reshape(len(rows), -1))


def places(rows: np.ndarray) -> np.ndarray:
    """Returns [m, k / 16] words of 16 bits: two bits for the place of each kept value, the first lowest."""
    which = _which(rows.reshape(len(rows), -1, 4)).reshape(len(rows), -1, 8).astype(np.uint32)
    return (which << np.arange(0, 16, 2, dtype=np.uint32)).sum(-1).astype(np.uint16)


def _which(groups: np.ndarray) -> np.ndarray:
    return np.argsort(groups == 0, axis=-1, kind="stable")[..., :2]


# ---- Triton's


def _triton(kernel: Kernel, data: Operands, options: Options, sm: str) -> Ran:
    made, t = triton()[kernel.tile], kernel.tile
    a, b, m, n = data.rows, data.columns, CHANNELS, SIZE * SIZE
    k = a.shape[1]
    scalars = {"M": m, "N": n, "K": k, "a_m": k, "b_n": k}
    launch = Run((tiles(m, t.m), tiles(n, t.n), 1), {"a": a, "b": b}, "c", data.y.T, scalars)
    answer, stats = execute(made, launch, options)
    return Ran(made.ptx, made.entry, 32 * made.warps, made.shared, stats, answer.T)


# ---- counts


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a main loop for each tensor-core instruction, by the emulator: PTX instructions, loads from shared memory
    (ldmatrix and ld.shared), copies to it (cp.async), loads to registers, bytes and wavefronts of shared memory. `excess` and
    `excess_end`: wavefronts that bank conflicts cost, in the deeper launch's longer loop and outside it.
    """

    instructions: float
    loads: float
    copies: float
    global_loads: float
    shared_bytes: float
    wavefronts: float
    excess: int
    excess_end: int


def counts(shallow: Stats, deep: Stats) -> Counts:
    products = deep.mma + deep.mma_sp - shallow.mma - shallow.mma_sp
    asked = _requests(deep)
    asked.subtract(_requests(shallow))

    def each(value: int) -> float:
        return value / products

    grown = deep.excess_wavefronts - shallow.excess_wavefronts
    return Counts(
        each(deep.instructions - shallow.instructions),
        each(asked["loads"]),
        each(asked["copies"]),
        each(asked["global"]),
        each(deep.shared_bytes - shallow.shared_bytes),
        each(deep.wavefronts - shallow.wavefronts),
        grown,
        deep.excess_wavefronts - grown,
    )


def _requests(stats: Stats) -> Counter[str]:
    """Returns the number of requests by kind."""
    found: Counter[str] = Counter()
    for line in stats.lines:
        if line.opcode.startswith("cp.async"):
            found["copies"] += line.requests
        elif line.opcode.startswith(("ldmatrix", "ld.shared")):
            found["loads"] += line.requests
        elif line.opcode.startswith("ld.global"):
            found["global"] += line.requests
    return found
