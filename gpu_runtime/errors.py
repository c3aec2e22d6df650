"""The exceptions a caller meets. Each message says what, expected, got, and the cure."""

from cuda_kernels.compile import CompileError


class ModelError(ValueError):
    """The ONNX model (or the sizes given for it) cannot be used."""


class EngineError(ValueError):
    """An engine file cannot be used: torn, altered, of a newer format, or for another device."""


__all__ = ["CompileError", "EngineError", "ModelError"]
