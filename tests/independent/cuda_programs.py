"""CUTLASS's examples with their own main() and their own host references, and CUB's kernels, run on the emulator.

    python -m tests.independent.cuda_programs NAME [--late] [--seed N] [-- ARGUMENTS]

nvcc compiles an example, changed only as `EXAMPLES` says, into a shared object that holds PTX and calls no libcudart;
cudart.cpp stands for that. The program decides itself whether the results are right, against its own loops on the host, and
main() returns 0 then. What was compiled is cached by content.
"""

from __future__ import annotations

import argparse
import ctypes as C
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cuda_kernels.emulator import EmulatorError, Memory, Options, Stats, launch, load
from cuda_kernels.emulator.run import parsed
from cuda_kernels.files import cache_dir, write
from tests.independent import faults, interpreter, packages
from tests.map_calls import MapCall, described, encoded

HERE = Path(__file__).parent
# fmt: off
FLAGS = ("-std=c++17", "-O1", "-w", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-shared", "-Xcompiler", "-fPIC",
         "-cudart", "none", "--compress-mode=none")
# fmt: on


@dataclass(frozen=True, slots=True)
class Example:
    """A source below CUTLASS's examples/, or `beside` this file: our main() that calls a library's kernels. `edits`: text ->
    its replacement, each found once. `capability`: the compute capability for which it is compiled, 10 x major + minor;
    `special`: the letter of a device's own instructions, as in sm_90a. `reads_ahead`: it loads shared memory that nobody has
    written, and does not use these bytes.
    """

    source: str
    edits: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False
    capability: int = 80
    special: str = ""
    reads_ahead: bool = False


# Types of A, B, and the sums -> sizes of example 15's instruction, and limits of the operands that it draws.
HALVES, BYTES = ("cutlass::half_t", "cutlass::half_t", "float"), ("int8_t", "int8_t", "int32_t")
SIGNLESS_B = ("int8_t", "uint8_t", "int32_t")
SPARSE_SHAPES = {"float": "16, 8, 32", "int32_t": "16, 8, 64"}
DRAWN = {"cutlass::half_t": (2, -2), "int8_t": (127, -128), "uint8_t": (255, 0)}


def sparse_gemm(tile: str, warp: str, stages: int, types: tuple[str, str, str] = HALVES) -> Example:
    """Returns example 15, written for 4-bit integers, with operands and sums of these types, and a size for an interpreter."""
    edits = {
        "GemmShape<128, 128, 256>": f"GemmShape<{tile}>",
        "GemmShape<64, 64, 256>": f"GemmShape<{warp}>",
        "GemmShape<16, 8, 128>": f"GemmShape<{SPARSE_SHAPES[types[2]]}>",
        "length_m = 512": "length_m = 256",
        "length_n = 512": "length_n = 256",
        "length_k = 1024": "length_k = 512",
        "NumStages = 3": f"NumStages = {stages}",
    }
    for operand, kind in zip("AB", types, strict=False):
        old, (high, low) = f"      ElementInput{operand}", DRAWN[kind]
        edits[f"using ElementInput{operand} = cutlass::int4b_t;"] = f"using ElementInput{operand} = {kind};"
        edits[f"{old}(2),\n{old}(-2),"] = f"{old}({high}),\n{old}({low}),"
    for name in ("ElementAccumulator", "ElementOutput"):
        edits[f"using {name} = int32_t;"] = f"using {name} = {types[2]};"
    return Example("15_ampere_sparse_tensorop_gemm/ampere_sparse_tensorop_gemm.cu", edits)


EXAMPLES = {
    "sparse_gemm": sparse_gemm("128, 128, 64", "64, 64, 64", 3),
    "sparse_gemm_small_tile": sparse_gemm("64, 128, 128", "32, 64, 128", 4),
    "sparse_gemm_bytes": sparse_gemm("128, 128, 128", "64, 64, 128", 3, BYTES),
    "sparse_gemm_bytes_small_tile": sparse_gemm("64, 64, 128", "32, 32, 128", 4, BYTES),
    "sparse_gemm_unsigned": sparse_gemm("64, 128, 128", "32, 64, 128", 3, SIGNLESS_B),
    "conv_fprop": Example("16_ampere_tensorop_conv2dfprop/ampere_tensorop_conv2dfprop.cu"),
    "conv_fprop_bytes": Example(
        "16_ampere_tensorop_conv2dfprop/ampere_tensorop_conv2dfprop.cu",
        {
            "using ElementAccumulator = float; ": "using ElementAccumulator = int32_t; ",
            "using ElementInputA = cutlass::half_t;": "using ElementInputA = int8_t;",
            "using ElementInputB = cutlass::half_t;": "using ElementInputB = int8_t;",
            "GemmShape<128, 128, 64>": "GemmShape<128, 128, 128>",
            "GemmShape<64, 64, 64>": "GemmShape<64, 64, 128>",
            "GemmShape<16, 8, 16>": "GemmShape<16, 8, 32>",
            "cutlass::arch::OpMultiplyAdd,": "cutlass::arch::OpMultiplyAddSaturate,",  # the one that this kernel has of bytes
            "ElementInputA(7),\n      ElementInputA(-8),": "ElementInputA(127),\n      ElementInputA(-128),",
            "ElementInputB(7),\n      ElementInputB(-8),": "ElementInputB(127),\n      ElementInputB(-128),",
        },
    ),
    "gemm_stream_k": Example("47_ampere_gemm_universal_streamk/ampere_gemm_universal_streamk.cu"),
    "conv_depthwise": Example("46_depthwise_simt_conv2dfprop/depthwise_simt_conv2dfprop.cu"),
    "two_convs": Example(
        "13_two_tensor_op_fusion/fused_two_convs_f16_sm80_shmem.cu",
        {  # one image of 9 x 7, not 32 of 56 x 56
            "{32, 56, 56, 64},    // input size (NHWC)\n    {64,": "{1, 9, 7, 64},\n    {64,",
            "{32, 56, 56, 64},    // input size (NHWC)\n    {256,": "{1, 9, 7, 64},\n    {256,",
            "{32, 56, 56, 64}     // output": "{1, 9, 7, 64}  //",
            "{32, 56, 56, 256}     // output": "{1, 9, 7, 256}  //",
        },
    ),
    "scan": Example("scan.cu", beside=True),
    "grid_sync": Example("grid_sync.cu", beside=True),
    "cluster_groups": Example("cluster_groups.cu", beside=True, capability=90),
    "bulk_copies": Example("bulk_copies.cu", beside=True, capability=90, special="a"),
    "bulk_stores": Example("bulk_stores.cu", beside=True, capability=90, special="a"),
    "divergence": Example("divergence.cu", beside=True),
    "merge_sort": Example("merge_sort.cu", beside=True, capability=90, reads_ahead=True),
    "wgmma": Example("wgmma.cu", beside=True, capability=90, special="a"),
    "sparse_gemm_sm90": Example(
        "62_hopper_sparse_gemm/62_hopper_sparse_gemm.cu", {"Shape<_1,_2,_1>": "Shape<_1,_1,_1>"}, capability=90, special="a"
    ),
    "conv_sm90": Example("conv_sm90.cu", beside=True, capability=90, special="a"),
    **{  # blocks that share filters, or pixels
        f"conv_sm90_{x}x{y}": Example(
            "conv_sm90.cu",
            {"Cluster = Shape<_1, _1, _1>": f"Cluster = Shape<_{x}, _{y}, _1>"},
            beside=True,
            capability=90,
            special="a",
        )
        for x, y in ((2, 1), (1, 2))
    },
    "sparse_gemm_sm90_1x2": Example("62_hopper_sparse_gemm/62_hopper_sparse_gemm.cu", capability=90, special="a"),
    "gemm_sm90_2x2": Example(
        "48_hopper_warp_specialized_gemm/48_hopper_warp_specialized_gemm.cu",
        {
            "using         ElementA    = float;": "using         ElementA    = cutlass::half_t;",
            "using         ElementB    = float;": "using         ElementB    = cutlass::half_t;",
            "Shape<_4,_2,_1>": "Shape<_2,_2,_1>",  # of the emulated device's four SMs
        },
        capability=90,
        special="a",
    ),
    "conv_grouped": Example("42_ampere_tensorop_group_conv/ampere_tensorop_group_conv.cu"),
}


# The programs' arguments, of sizes for an interpreter; the emulator's options for the scan.
CONV = "--ref-check --iterations=1 --n=2 --h=9 --w=11 --c=72 --k=136".split()
CONV_BYTES = "--ref-check --iterations=1 --n=2 --h=9 --w=11 --c=80 --k=144".split()
SMALL = "--ref-check --iterations=1 --n=1 --h=8 --w=8 --c=64 --k=64 --r=1 --s=1".split()
GROUPED = "--ref-check --iterations=1 --n=1 --h=7 --w=9 --c=64 --k=64 --g=4".split()
SPARSE_SM90 = "--m=256 --n=128 --k=256 --iterations=0".split()
GEMM_SM90 = "--m=512 --n=256 --k=512 --iterations=0".split()  # two tiles of each block, more steps than stages
DEPTHWISE = "--ref-check --iterations=1 --n=1 --h=9 --w=11 --c=32 --k=32 --g=32".split()
BEGINS, UNMADE = "main begins", 3  # the line ahead of all that a program prints; the exit status where no fault can be made
ALL_AT_ONCE = ("--resident", "32")  # the scan's 23 blocks wait for those before them, and a seed starts them in any order


def run(name: str, arguments: Sequence[str] = (), *options: str) -> tuple[str, int]:
    """Runs a program in a process of its own; returns (its stdout, its exit status: main()'s, if it did not end before)."""
    command = [sys.executable, "-m", "tests.independent.cuda_programs", name, *options, "--", *arguments]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=600)
    return done.stdout + done.stderr, done.returncode


# ---- compiling


def cached(text: str, name: str, make: Callable[[Path], None]) -> Path:
    """Returns a file of the cache under the hash of `text`, made if need be."""
    path = cache_dir() / "independent" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="gpu_runtime-") as folder:
            made = Path(folder) / "made.so"
            make(made)
            write(path, made.read_bytes())
    return path


def finished(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def program(name: str) -> Path:
    """Returns the compiled example; compiling takes half a minute."""
    example, source = EXAMPLES[name], packages.cutlass()
    original = HERE / example.source if example.beside else source / "examples" / example.source
    text = original.read_text()
    for old, new in example.edits.items():
        if text.count(old) != 1:
            raise RuntimeError(f"{original}: '{old}' stands there {text.count(old)} times, expected once")
        text = text.replace(old, new)
    return shared_object(
        name, text, (source / "examples/common", original.parent), capability=f"{example.capability}{example.special}"
    )


def shared_object(
    name: str, text: str, folders: Sequence[Path] = (), values: Mapping[str, int] | None = None, capability: int | str = 80
) -> Path:
    """Compiles a CUDA source with its headers beside CUTLASS's, and with `values` as macros; returns the file."""
    virtual = f"compute_{capability}"
    flags = (*FLAGS, "-gencode", f"arch={virtual},code={virtual}")
    source, defines = packages.cutlass(), [f"-D{macro}={value}" for macro, value in (values or {}).items()]
    libraries = source / "include", source / "tools/util/include"
    include = (*libraries, *folders, HERE / "include", packages.toolkit() / "include/cccl")

    def make(out: Path) -> None:
        (out.parent / "example.cu").write_text(text)
        compiler = str(packages.toolkit() / "bin" / "nvcc")
        finished([compiler, *flags, *defines, *(f"-I{f}" for f in include), str(out.parent / "example.cu"), "-o", str(out)])

    random = (HERE / "include" / "curand_kernel.h").read_text()
    return cached("\0".join([text, random, packages.CUTLASS, *packages.TOOLKIT, *flags, *defines]), name, make)


def cudart() -> Path:
    source = HERE / "cudart.cpp"
    include = f"-I{packages.toolkit() / 'include'}"

    def make(out: Path) -> None:
        finished(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", include, str(source), "-o", str(out)])

    return cached(source.read_text() + (HERE.parent / "map_calls.h").read_text() + packages.TOOLKIT[2], "cudart", make)


def fat_binary_texts(data: bytes) -> list[str]:
    """Returns the PTX texts in an uncompressed fat binary."""
    return [m[0].decode() for m in re.finditer(rb"\.version \d[^\0]*", data)]


def aligned(text: str) -> str:
    """Returns the PTX with shared memory that begins at a multiple of 1,024 bytes, which CUTLASS's kernels for Hopper need but
    do not declare.
    """
    return text.replace(".extern .shared .align 16 .b8", ".extern .shared .align 1024 .b8")


def ptx(name: str) -> str:
    """Returns all PTX of an example."""
    return "\n".join(fat_binary_texts(program(name).read_bytes()))


# ---- running

ALLOCATE, RELEASE = C.CFUNCTYPE(C.c_uint64, C.c_uint64), C.CFUNCTYPE(None, C.c_uint64)
IMAGE, KERNEL = C.CFUNCTYPE(None, C.c_void_p), C.CFUNCTYPE(None, C.c_void_p, C.c_char_p)
LAUNCH = C.CFUNCTYPE(C.c_int, C.c_void_p, C.POINTER(C.c_uint32), C.POINTER(C.c_void_p), C.c_uint64, C.c_int)


ENCODE = C.CFUNCTYPE(C.c_int, C.POINTER(MapCall), C.c_void_p)


class Hooks(C.Structure):
    _fields_ = [
        ("allocate", ALLOCATE),
        ("release", RELEASE),
        ("image", IMAGE),
        ("kernel", KERNEL),
        ("launch", LAUNCH),
        ("capability", C.c_int),
        ("encode", ENCODE),
    ]


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch that ended: its kernel's PTX and name in it, sizes, `shared` bytes of dynamic memory, and its counters."""

    ptx: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stats: Stats


class Device:
    """The device for cudart.cpp; `change`: a function that changes each PTX text before it is loaded."""

    def __init__(self, options: Options, capability: int = 80, change: Callable[[str], str] = str) -> None:
        self.options, self.change = options, change
        self.memory, self.texts, self.names, self.mma = Memory(), list[str](), dict[int, str](), 0
        self.launched: list[Launched] = []
        self.workspace = self.memory.alloc(64, fill=0, name="cooperative groups")
        self.hooks = Hooks(
            ALLOCATE(self.allocate),
            RELEASE(self.release),
            IMAGE(self.image),
            KERNEL(self.kernel),
            LAUNCH(self.launch),
            capability,
            ENCODE(self.encode),
        )

    def allocate(self, size: int) -> int:
        return self.memory.alloc(size, name=f"cudaMalloc of {size}")

    def release(self, address: int) -> None:
        self.memory.free(address)

    def image(self, address: int) -> None:
        header = C.string_at(address, 16)  # magic, version, bytes of the header, bytes behind it
        size = int.from_bytes(header[6:8], "little") + int.from_bytes(header[8:16], "little")
        for text in fat_binary_texts(C.string_at(address, size)):  # the driver's registers hold the address of a grid's barrier
            text = text.replace("%envreg1", str(self.workspace >> 32)).replace("%envreg2", str(self.workspace & 0xFFFFFFFF))
            self.texts.append(self.change(text))

    def kernel(self, host: int, name: bytes) -> None:
        self.names[host] = name.decode()

    def encode(self, pointer: C._Pointer[MapCall], out: int) -> int:
        try:
            made = encoded(call := pointer.contents)
            if call.im2col:
                print("im2col", json.dumps(described(call)), flush=True)
        except ValueError as e:
            print(f"tensor map refused: {e}", flush=True)
            return 1
        C.memmove(out, made, len(made))
        return 0

    def launch(self, host: int, sizes: Sequence[int], arguments: Sequence[int], shared: int, dependent: int) -> int:
        try:
            name = self.names[host]
            text = next(t for t in self.texts if re.search(rf"\.entry\s+{re.escape(name)}\b", t))
            params = bytearray()
            for i, p in enumerate(parsed(text).functions[name].params):
                params += b"\0" * (-len(params) % p.align) + C.string_at(arguments[i], p.size)
            x, y, z, threads_x, threads_y, threads_z = sizes[:6]
            grid, block = (x, y, z), (threads_x, threads_y, threads_z)
            cluster = (sizes[6], sizes[7], sizes[8]) if sizes[6] else None
            options = replace(self.options, dependent=bool(dependent), cluster=cluster)
            stats = launch(load(text, name), grid, block, shared, bytes(params), self.memory, options=options)
            self.memory.check_red_zones()
        except (EmulatorError, ValueError) as e:
            print(f"launch refused: {re.sub(r'kernel _Z[A-Za-z0-9_]*', 'kernel', str(e))}", flush=True)
            return 1
        self.mma += stats.mma + stats.mma_sp
        self.launched.append(Launched(text, name, grid, block, shared, stats))
        return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(EXAMPLES))
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resident", type=int, default=0, help="places for blocks; 0: as many as cores")
    parser.add_argument("--fault", help="an instruction's form that the emulator is to take for something else (faults.py)")
    parser.add_argument("--emulator", type=Path, help="a folder with the interpreter's sources, to run on that one")
    parser.add_argument("--replace", help="JSON: a text in the PTX -> what stands for it, to see that the example notices")
    own, words = sys.argv[1:], []
    if "--" in own:
        own, words = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser.parse_args(own)
    if given.emulator:
        interpreter.use(given.emulator)
    if given.fault and given.fault not in faults.forms(ptx(given.name)):
        raise SystemExit(f"{given.name} has no {given.fault}; it has {', '.join(sorted(faults.forms(ptx(given.name))))}")

    def change(text: str) -> str:
        text = aligned(text) if EXAMPLES[given.name].special else text
        for old, new in json.loads(given.replace or "{}").items():
            text = re.sub(old, new, text)
        try:
            wrong = given.fault in faults.forms(text)
            return faults.faulty(text, given.fault, *re.findall(r"\.entry\s+(\w+)", text)) if wrong else text
        except ValueError as e:
            print(e, flush=True)
            os._exit(UNMADE)  # an exception would end in the program that has registered its kernels

    mode = "late" if given.late else "eager"
    example = EXAMPLES[given.name]
    options = Options(
        async_mode=mode, seed=given.seed, resident_blocks=given.resident, uninitialised_shared=not example.reads_ahead
    )
    device = Device(options, example.capability, change)
    C.CDLL(str(cudart()), mode=C.RTLD_GLOBAL).set_hooks(C.byref(device.hooks))
    argv = (C.c_char_p * (len(words) + 2))(given.name.encode(), *(w.encode() for w in words), None)
    loaded = C.CDLL(str(program(given.name)))
    print(BEGINS, flush=True)
    code = loaded.main(len(words) + 1, argv)
    C.CDLL(None).fflush(None)
    print(f"main returned {code} after {device.mma} products of tensor cores", flush=True)
    os._exit(code & 255)  # without the program's destructors, which would call into a Python that ends


if __name__ == "__main__":
    main()
