"""Calls of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col by C++ programs, as tensor maps for the emulator."""

import ctypes as C
from collections.abc import Sequence

from cuda_kernels.tensor_maps import Map, encode


class MapCall(C.Structure):
    """The arguments of one call, in the C struct of map_calls.h."""

    _fields_ = [
        *((n, C.c_uint32) for n in ("im2col", "type", "rank", "interleave", "swizzle", "l2", "fill", "channels", "pixels")),
        ("address", C.c_uint64),
        ("dims", C.c_uint64 * 5),
        ("strides", C.c_uint64 * 4),
        ("box", C.c_int32 * 5),
        ("steps", C.c_int32 * 5),
        ("lower", C.c_int32 * 3),
        ("upper", C.c_int32 * 3),
    ]


# CUtensorMapDataType's number in cuda.h -> element type, for the types that the emulator supports.
ELEMENTS = dict(enumerate("uint8 uint16 uint32 int32 uint64 int64 float16 float32 float64 bfloat16".split())) | {11: "tfloat32"}
SWIZZLES = dict(enumerate((0, 32, 64, 128)))


def encode_tiled(
    element: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] = (),
    swizzle: int = 0,
    nan_fill: bool = False,
) -> bytes:
    """Returns the emulator's tensor map for the arguments of cuTensorMapEncodeTiled."""
    sizes = (tuple(dims), tuple(strides), tuple(box))
    return encode(Map(("in", 0), *sizes, (), (), 0, 0, tuple(element_strides), swizzle, element), address, nan_fill)


def encode_im2col(
    element: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    channels: int,
    pixels: int,
    element_strides: Sequence[int] = (),
    swizzle: int = 0,
    nan_fill: bool = False,
) -> bytes:
    """Returns the emulator's tensor map for the arguments of cuTensorMapEncodeIm2col."""
    sizes = (tuple(dims), tuple(strides), (), tuple(lower), tuple(upper), channels, pixels)
    return encode(Map(("in", 0), *sizes, tuple(element_strides), swizzle, element), address, nan_fill)


def encoded(m: MapCall) -> bytes:
    """Returns the emulator's tensor map for a call. Raises ValueError if a driver would refuse it or the emulator lacks it."""
    for name, known in (("type", ELEMENTS), ("interleave", {0}), ("swizzle", SWIZZLES), ("l2", {*range(4)}), ("fill", {0, 1})):
        if getattr(m, name) not in known:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, got {getattr(m, name)}")
    dims, strides, steps = m.dims[: m.rank], m.strides[: max(m.rank, 1) - 1], m.steps[: m.rank]
    around, how = (ELEMENTS[m.type], m.address, dims, strides), (steps, SWIZZLES[m.swizzle], bool(m.fill))
    if m.im2col:
        return encode_im2col(*around, m.lower[: m.rank - 2], m.upper[: m.rank - 2], m.channels, m.pixels, *how)
    return encode_tiled(*around, m.box[: m.rank], *how)


def described(m: MapCall) -> dict[str, object]:
    """Returns an im2col call as field of cuda_kernels.tensor_maps.Map -> value, without the element type."""
    lists = {"dims": m.dims[: m.rank], "strides": m.strides[: m.rank - 1], "element_strides": m.steps[: m.rank]}
    corners = {"lower": m.lower[: m.rank - 2], "upper": m.upper[: m.rank - 2]}
    return lists | corners | {"channels": m.channels, "pixels": m.pixels, "swizzle": SWIZZLES[m.swizzle]}
