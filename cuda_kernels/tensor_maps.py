"""Tensor maps: their fields before the address is known, and their 128 bytes, made by the driver or for the emulator.

The driver's bytes are opaque; `encode` makes the emulator's by the same arguments and rules as cuTensorMapEncodeTiled and
cuTensorMapEncodeIm2col (CUDA driver API, "Tensor Map Object Managment"; cuda.h 13.0).

The innermost dimension comes first in every tuple. Interleaved layouts and types that flush subnormal numbers are refused, as
no other program shows their meaning. Errors are ValueErrors that name the argument that breaks a rule.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuda_kernels.driver import check_status

SIZES = {  # bytes of each element type; its position is its number in a map
    **{"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8},
    **{"float16": 2, "float32": 4, "float64": 8, "bfloat16": 2, "tfloat32": 4},
}
FLOATS = ("float16", "float32", "float64", "bfloat16", "tfloat32")
SWIZZLES = {0: 1, 32: 2, 64: 4, 128: 8}  # bytes of a pattern's row -> 16-byte units
CORNERS = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}  # rank -> the corners of an im2col box lie in [-n, n)
MAGIC = 0x70616D726F736E74
TILED, IM2COL = 0, 1
LAYOUT = struct.Struct("<QQ4Q5I5H3h3hHH5B6B23x")  # emulator/tensor_map.h mirrors it
assert LAYOUT.size == 128


@dataclass(frozen=True, slots=True)
class Map:
    """A launch's tensor map without its address, which is the address of the argument `of` (tactics.step.Arg).

    With a `box` it copies boxes. Without one it copies columns of `pixels` with `channels` each, of a tensor C, W, H, D, N: a
    column's pixels begin in the box between the corners `lower` (relative to the first pixel) and `upper` (relative to the
    last). `strides`: bytes, of all dimensions but the innermost; `element_strides`: every n-th element or pixel is copied, from
    the first on; `swizzle`: 0, 32, 64 or 128 bytes. Raises ValueError for a field that breaks a rule.
    """

    of: tuple[str, Any]
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...] = ()
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    channels: int = 0
    pixels: int = 0
    element_strides: tuple[int, ...] = ()
    swizzle: int = 0
    element: str = "float16"

    def __post_init__(self) -> None:
        encode(self, 16)

    @property
    def nbytes(self) -> int:
        """Bytes from the address to the end of the last element."""
        size = SIZES[self.element]
        return size + sum((d - 1) * s for d, s in zip(self.dims, (size, *self.strides), strict=True))


def encode(m: Map, address: int, nan_fill: bool = False) -> bytes:
    """Encodes a map for the emulator; `nan_fill`: elements outside the tensor are NaN instead of 0.

    Raises ValueError naming the argument that breaks a rule.
    """
    dims, steps = m.dims, m.element_strides or (1,) * len(m.dims)
    row = (_box(m) if m.box else _columns(m)) * SIZES.get(m.element, 0)
    _check(m.element in SIZES, "element", f"one of {', '.join(SIZES)}", m.element)
    _check(address % 16 == 0 and 0 < address < 1 << 64, "address", "a multiple of 16", address)
    _check(all(1 <= d <= 1 << 32 for d in dims), "dims", "sizes from 1 to 2^32", dims)
    _check(len(m.strides) == len(dims) - 1, "strides", "one for each dimension but the innermost", m.strides)
    _check(all(s % 16 == 0 and 0 <= s < 1 << 40 for s in m.strides), "strides", "multiples of 16 below 2^40", m.strides)
    _check(len(steps) == len(dims) and all(1 <= s <= 8 for s in steps), "element_strides", "1 to 8 for each dimension", steps)
    _check(m.swizzle in SWIZZLES, "swizzle", "0, 32, 64 or 128", m.swizzle)
    _check(row % 16 == 0, "box", "rows of a multiple of 16 bytes", row)
    _check(not m.swizzle or row <= m.swizzle, "box", f"rows of at most {m.swizzle} bytes, the swizzle's", row)
    _check(not nan_fill or m.element in FLOATS, "nan_fill", "a type that has NaN", m.element)

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[0] * (count - len(values))]

    return LAYOUT.pack(
        MAGIC,
        address,
        *padded(m.strides, 4),
        *padded([d - 1 for d in dims], 5),
        *padded(m.box, 5),
        *padded(m.lower, 3),
        *padded(m.upper, 3),
        m.channels,
        m.pixels,
        *padded(steps, 5),
        TILED if m.box else IM2COL,
        len(dims),
        SIZES[m.element],
        SWIZZLES[m.swizzle],
        nan_fill,
        list(SIZES).index(m.element),
    )


def _box(m: Map) -> int:
    """Checks the sizes of a box; returns the number of elements in its row."""
    _check(1 <= len(m.dims) <= 5, "dims", "1 to 5 dimensions", m.dims)
    _check(len(m.box) == len(m.dims), "box", "a size for each dimension", m.box)
    _check(all(1 <= b <= 256 for b in m.box), "box", "sizes from 1 to 256", m.box)
    return m.box[0]


def _columns(m: Map) -> int:
    """Checks the sizes of columns; returns the number of elements in a row."""
    _check(3 <= len(m.dims) <= 5, "dims", "3 to 5 dimensions", m.dims)
    most = CORNERS[len(m.dims)]
    for name, corner in (("lower", m.lower), ("upper", m.upper)):
        _check(len(corner) == len(m.dims) - 2, name, "a number for each dimension but the first and last", corner)
        _check(all(-most <= c < most for c in corner), name, f"numbers from {-most} to {most - 1}", corner)
    box = [d - 1 + b - a for d, a, b in zip(m.dims[1:-1], m.lower, m.upper, strict=True)]
    _check(min(box) >= 0, "upper", "a box that is not empty", m.upper)
    _check(1 <= m.channels <= 256, "channels", "1 to 256", m.channels)
    _check(1 <= m.pixels <= 1024, "pixels", "1 to 1024", m.pixels)
    return m.channels


def _check(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def encode_by_driver(m: Map, address: int) -> bytes:
    """Encodes a map for hardware. Raises DriverError for a map that the driver refuses.

    The driver's function is called by its address, because cuda-bindings' function does not always align the map to the 64
    bytes that the driver needs (NVIDIA/cuda-python#1692).
    """
    from cuda.bindings import driver

    kind = "Tiled" if m.box else "Im2col"
    status, function, _ = driver.cuGetProcAddress(f"cuTensorMapEncode{kind}".encode(), 12000, 0)
    check_status("cuGetProcAddress", status, f"for cuTensorMapEncode{kind}")
    u32, u64, s32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
    room = ctypes.create_string_buffer(LAYOUT.size + 63)
    out = ctypes.addressof(room) + -ctypes.addressof(room) % 64

    def array(number: Any, values: Sequence[int]) -> Any:
        return (number * len(values))(*values)

    element = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{m.element.upper()}")
    swizzle = getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{m.swizzle}B' if m.swizzle else 'NONE'}")
    columns = array(s32, m.lower), array(s32, m.upper), u32(m.channels), u32(m.pixels)
    args = (
        *(ctypes.c_void_p(out), s32(element), u32(len(m.dims))),
        *(ctypes.c_void_p(address), array(u64, m.dims), array(u64, m.strides)),
        *((array(u32, m.box),) if m.box else columns),
        array(u32, m.element_strides or [1] * len(m.dims)),
        s32(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        s32(swizzle),
        s32(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),  # as CUTLASS has it
        s32(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    status = ctypes.CFUNCTYPE(s32, *map(type, args))(int(function))(*args)
    check_status(f"cuTensorMapEncode{kind}", driver.CUresult(status), f"for {m} at address {address:#x}")
    return ctypes.string_at(out, LAYOUT.size)
