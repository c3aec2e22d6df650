"""Tells the kind of a file by its first bytes: an engine, an ONNX model, or another of KINDS, with the cure for these."""

import os
import re
from dataclasses import dataclass
from typing import Any

from cuda_kernels.files import open_regular

HEAD_BYTES = 1 << 16  # the first bytes of a file, which show its kind


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file. `magic`: its bytes at `offset`; `what` it is and its `cure`, as parts of a sentence."""

    offset: int
    magic: bytes
    what: str
    cure: str


FROM_ONNX = "build an engine of the ONNX model that it was made from: build-engine model.onnx -o model.engine"
TORCH = "export it in PyTorch, with torch.onnx.export"
TENSORRT = FileKind(0, b"ftrt", "an engine of TensorRT, which only TensorRT reads", FROM_ONNX)
KINDS = (
    TENSORRT,
    FileKind(4, b"ORTM", "a model of onnxruntime's own format (.ort)", "give the ONNX model that it was made from"),
    FileKind(4, b"TFL3", "a TensorFlow Lite model", "convert it to ONNX, with tf2onnx"),
    FileKind(0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it", "convert it to ONNX, with tf2onnx"),
    FileKind(0, b"\x93NUMPY", "a NumPy array (.npy)", "give a model; arrays are given with --input NAME=FILE.npy"),
    FileKind(0, b"PK\x03\x04", "a zip archive, as PyTorch (.pt), Keras and NumPy (.npz) write it", TORCH),
    FileKind(0, b"\x80\x02", "a pickle, as older PyTorch writes it", TORCH),
    FileKind(0, b"version https://git-lfs", "a pointer of Git LFS in place of the file", "fetch the file itself: git lfs pull"),
    FileKind(0, b"<!DOCTYPE", "a web page", "download the file itself"),
    FileKind(0, b"<html", "a web page", "download the file itself"),
    FileKind(0, b"\x1f\x8b", "compressed with gzip", "decompress it first"),
    FileKind(0, b"\x7fELF", "a program or library (ELF)", "give an ONNX model"),
)


def head_of(path: str | os.PathLike[str]) -> bytes:
    """Returns the file's first bytes. Raises OSError, or ValueError for an impossible name."""
    with open_regular(path) as file:
        return file.read(HEAD_BYTES)


def in_memory(given: Any, expected: str) -> bytes:
    """Returns the bytes of bytes or of an open file, from its current position.

    Raises TypeError, which names the `expected` forms, for anything else and for a file opened for text.
    """
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    data = given.read() if hasattr(given, "read") else None
    if not isinstance(data, bytes):
        got = type(given).__name__ if data is None else f"a file that reads {type(data).__name__}: open it with mode 'rb'"
        raise TypeError(f"expected {expected}, got {got}")
    return data


def recognized(head: bytes) -> str:
    """Names the kind of a file with this beginning, and the cure, as a part of a sentence; "" for a model, an engine and
    unknown files.
    """
    if is_engine(head):
        return ""
    if head.find(TENSORRT.magic, 4) == 4 + int.from_bytes(head[:4], "little"):
        kind: FileKind | None = TENSORRT  # as Ultralytics writes it, after JSON and its length
    else:
        kind = next((k for k in KINDS if head[k.offset : k.offset + len(k.magic)].lower() == k.magic.lower()), None)
    return f"it is {kind.what}: {kind.cure}" if kind else ""


def is_engine(head: bytes) -> bool:
    """Whether a file with this beginning is an engine, whole or damaged: safetensors begins with the length of a JSON object,
    then the object.
    """
    return head[8:9] == b"{"


def is_onnx(head: bytes) -> bool:
    """Whether a file begins as exporters write a ModelProto: with its ir_version, then a name, the graph or the opset."""
    return re.match(rb"\x08[\x03-\x1f][\x12\x1a\x22\x3a\x42]", head) is not None
