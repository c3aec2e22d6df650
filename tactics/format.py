"""Tensor formats: dtype x layout as a table, in TensorRT's words. One rule addresses all of them:

    element address = n*Ns + (c >> log2V)*Bs + pixel*Ps + (c & (V-1))        (units: elements; pixel = h*W + w)

Channels are padded to a multiple of V with zeros. Layouts after TensorRT's TensorFormat (NvInferRuntime.h).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.hashed import Hashed

Shape4 = tuple[int, int, int, int]
# Of 8 bits kernels read uint8 of network inputs as it is, and inside a network whole numbers (WHOLE); library functions read
# and write them and the types between.
DTYPES: dict[str, np.dtype[Any]] = {
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
    "int8": np.dtype(np.int8),
}
TRT_TYPES = {name: name.capitalize() for name in DTYPES} | {"fp16": "Half", "fp32": "Float", "uint8": "UInt8"}
TRT_NAMES = TRT_TYPES | {"fp16": "FP16", "fp32": "FP32", "bool": "BOOL", "int8": "INT8"}  # in the names of formats


@dataclass(frozen=True, slots=True)
class Layout:
    """`vector`: V; `blocked`: planes of V channels, one after the other (chwV); else all channels of a pixel together
    (hwcV).
    """

    vector: int
    blocked: bool
    enum: str
    wording: str


LAYOUTS = {
    "chw": Layout(1, True, "kLINEAR", "Row major linear {} format"),
    "chw2": Layout(2, True, "kCHW2", "Two wide channel vectorized row major {} format"),
    "hwc": Layout(1, False, "kHWC", "Channel major {} format"),
    "hwc8": Layout(8, False, "kHWC8", "Channel major {} format where channel % 8 == 0"),
    "hwc16": Layout(16, False, "kHWC16", "Channel major {} format where channel % 16 == 0"),
    "chw16": Layout(16, True, "kCHW16", "Sixteen wide channel vectorized row major {} format"),
    "chw32": Layout(32, True, "kCHW32", "Thirty-two wide channel vectorized row major {} format"),
}
CONV_LAYOUTS = ("chw", "hwc8", "hwc16", "chw32")


@dataclass(frozen=True, slots=True, order=True)
class Format(Hashed):
    """One dtype in one layout; prints and parses as `fp16:hwc8`."""

    dtype: str
    layout: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.layout not in LAYOUTS:
            raise ValueError(
                f"unknown format {self.dtype}:{self.layout}: expected one of {', '.join(DTYPES)} "
                f"and one of {', '.join(LAYOUTS)}, as in fp16:hwc8"
            )

    def __str__(self) -> str:
        return f"{self.dtype}:{self.layout}"

    @staticmethod
    def parse(text: str) -> Format:
        dtype, _, layout = text.partition(":")
        return Format(dtype, layout)


HALF_FORMATS = tuple(Format("fp16", layout) for layout in CONV_LAYOUTS)
WIDEST = Format("fp16", "chw32")  # the one of HALF_FORMATS with most padding


@dataclass(frozen=True, slots=True)
class Strides:
    """The address rule's constants for one tensor, in elements: `n`, `block`, `pixel`, and log2 of the vector width."""

    n: int
    block: int
    pixel: int
    log2v: int

    def channel(self, c: int) -> int:
        """Returns the elements from the beginning to channel c, of the first pixel."""
        return (c >> self.log2v) * self.block + (c & ((1 << self.log2v) - 1))


def padded_channels(layout: str, c: int) -> int:
    v = LAYOUTS[layout].vector
    return -(-c // v) * v


def strides(fmt: Format, shape: Shape4) -> Strides:
    """Returns the constants of the address rule for an NCHW `shape` in this format."""
    _, c, h, w = shape
    lay = LAYOUTS[fmt.layout]
    cp = padded_channels(fmt.layout, c)
    log2v = lay.vector.bit_length() - 1
    if lay.blocked:
        return Strides(cp * h * w, h * w * lay.vector, lay.vector, log2v)
    return Strides(cp * h * w, lay.vector, cp, log2v)


def num_elements(fmt: Format, shape: Shape4) -> int:
    n, c, h, w = shape
    return n * padded_channels(fmt.layout, c) * h * w


def too_large(shapes: Iterable[Shape4], formats: Iterable[Format] = repeat(WIDEST), others: int = 0) -> str:
    """Why kernels cannot address tensors of these shapes in these formats, or ""; `others`: another count of elements to
    check.
    """
    if others < 2**31 and all(num_elements(f, s) < 2**31 for s, f in zip(shapes, formats, strict=False)):
        return ""
    return "a tensor of 2**31 elements or more: kernels address with 32 bits"


def num_bytes(fmt: Format, shape: Shape4) -> int:
    return num_elements(fmt, shape) * DTYPES[fmt.dtype].itemsize


class CanonicalFormat(NamedTuple):
    """The memory layout of a tensor: planes of `channels` channels each (`planes`), or all `channels` of a pixel together,
    their padding included.

    Prints and parses as `fp16:planes8`, `fp16:last64`. (A tuple, as the planner hashes and compares millions of them.)
    """

    dtype: str
    planes: bool
    channels: int

    def __str__(self) -> str:
        return f"{self.dtype}:{'planes' if self.planes else 'last'}{self.channels}"

    @staticmethod
    def parse(text: str) -> CanonicalFormat:
        """Raises ValueError where `text` names no canonical format."""
        found = re.fullmatch(r"([a-z0-9]+):(planes|last)(\d+)", text)
        if found is None:
            raise ValueError(f"not a canonical format: {text!r}; expected one like fp16:last64 or fp16:planes8")
        return CanonicalFormat(found[1], found[2] == "planes", int(found[3]))


class Key(NamedTuple):
    """The planner's identity of a tensor's format: its memory layout, and `home` for a tensor inside another tensor's memory.

    `home`: the name of its place there (gpu_runtime.planning.places), or "" for memory of its own. Prints and parses as
    `fp16:last64`, `fp16:last64@cat.1`.
    """

    format: CanonicalFormat
    home: str = ""

    def __str__(self) -> str:
        return f"{self.format}@{self.home}" if self.home else str(self.format)

    @staticmethod
    def parse(text: str) -> Key:
        """Raises ValueError where `text` names no key."""
        fmt, _, home = text.partition("@")
        return Key(CanonicalFormat.parse(fmt), home)


@lru_cache(maxsize=65536)
def canonical(fmt: Format, shape: Shape4) -> CanonicalFormat:
    """The canonical format: equal for two formats exactly when they place every element of `shape`, padding included, alike.

    hwc8 and hwc16 coincide when C % 16 == 0; chw32 coincides with channels-last padded to 32 when C <= 32; any layout of a 1 x
    1 image is just its padded channels.
    """
    _, c, h, w = shape
    lay = LAYOUTS[fmt.layout]
    cp = padded_channels(fmt.layout, c)
    if h * w == 1 or not lay.blocked or c <= lay.vector:
        return CanonicalFormat(fmt.dtype, False, cp)
    return CanonicalFormat(fmt.dtype, True, lay.vector)


# Several formats may place a tensor's elements at the same addresses: the first one in this order stands for all.
PREFERRED = ("hwc8", "hwc16", "chw32", "chw")
WHOLE = ("int8", "uint8")  # as which a tensor of whole numbers may be stored in place of FP16
BYTE_LAYOUTS = ("hwc16", "chw32")  # with vectors of 16 bytes and more, as TensorRT's kHWC16 and kCHW32 of INT8
assert set(PREFERRED) == set(CONV_LAYOUTS)


def is_bytes(fmt: Format) -> bool:
    """Whether it stores whole numbers of 8 bits in vectors, as kernels do inside a network."""
    return fmt.dtype in WHOLE and fmt.layout in BYTE_LAYOUTS


@lru_cache(maxsize=4096)
def representative(shape: Shape4, dtype: str = "fp16") -> tuple[Format, ...]:
    """The formats of an NCHW shape that differ in memory, one name for each memory layout."""
    found: dict[CanonicalFormat, Format] = {}
    for layout in BYTE_LAYOUTS if dtype in WHOLE else PREFERRED:
        fmt = Format(dtype, layout)
        found.setdefault(canonical(fmt, shape), fmt)
    return tuple(found.values())


def part_format(fmt: Format, whole: Shape4, first: int, c: int) -> CanonicalFormat | None:
    """The canonical format of channels first .. first + c of a tensor of shape `whole` in `fmt`, seen as a tensor inside it.

    None where these channels cannot be a tensor: they begin or end inside a vector, so that 16-byte accesses would be
    misaligned or a store would reach into the next part. Only the last part ends with, and owns, the padding of the whole.
    """
    n, channels, h, w = whole
    lay = LAYOUTS[fmt.layout]
    least = 16 // DTYPES[fmt.dtype].itemsize if fmt.dtype in WHOLE else 8
    unit = lay.vector if lay.blocked else min(lay.vector, least)
    last = first + c == channels
    if first % unit or (c % unit and not last):
        return None
    padded = padded_channels(fmt.layout, channels) - first if last else c
    shape = (n, c, h, w)
    found = canonical(fmt, shape) if lay.blocked else CanonicalFormat(fmt.dtype, False, padded)
    for f in representative(shape, fmt.dtype):  # kernels know the part by that name, and take vectors of its width
        if canonical(f, shape) == found and (LAYOUTS[f.layout].vector < 8) == (lay.vector < 8):
            return found
    return None


def to_memory(x: np.ndarray, fmt: Format, xp: Any = np) -> np.ndarray:
    """Converts an NCHW array to its flat memory image in a format, padded channels zero. `xp`: the array's library, NumPy or
    CuPy.
    """
    n, c, h, w = x.shape
    lay = LAYOUTS[fmt.layout]
    cp = padded_channels(fmt.layout, c)
    full = xp.zeros((n, cp, h, w), DTYPES[fmt.dtype])
    full[:, :c] = x
    if lay.blocked:
        full = full.reshape(n, cp // lay.vector, lay.vector, h, w).transpose(0, 1, 3, 4, 2)
    else:
        full = full.transpose(0, 2, 3, 1)
    return xp.ascontiguousarray(full).reshape(-1)


def from_memory(flat: np.ndarray, fmt: Format, shape: Shape4, padding: bool = False, xp: Any = np) -> np.ndarray:
    """Converts a flat memory image back to an NCHW array of `shape`; with `padding`, keeps the padded channels."""
    n, c, h, w = shape
    lay = LAYOUTS[fmt.layout]
    cp = padded_channels(fmt.layout, c)
    if lay.blocked:
        full = flat.reshape(n, cp // lay.vector, h, w, lay.vector).transpose(0, 1, 4, 2, 3).reshape(n, cp, h, w)
    else:
        full = flat.reshape(n, h, w, cp).transpose(0, 3, 1, 2)
    return xp.ascontiguousarray(full if padding else full[:, :c])


def wording(fmt: Format) -> str:
    """TensorRT's sentence for the format, as its layer information prints it: FP32, int32 and bool linear ones end without
    "format".
    """
    text = LAYOUTS[fmt.layout].wording.format(TRT_NAMES[fmt.dtype])
    return text.removesuffix(" format") if fmt.layout == "chw" and fmt.dtype in ("fp32", "int32", "bool") else text
