"""Messages for missing modules: the extra of this package, pip's argument, that contains each."""

from collections.abc import Iterator
from contextlib import contextmanager

WHERE = "in a clone of gpu_runtime, or of its wheel, 'FILE.whl[{extra}]'"  # it is on no package index
CUDA = f"pip install '.[cuda13]' {WHERE.format(extra='cuda13')} (for a driver of CUDA 12: cuda12)"
BUILD = f"reading, building and pruning models takes the extra build: pip install '.[build]' {WHERE.format(extra='build')}"
NVRTC = f"compiling kernels takes an extra with NVRTC: {CUDA}, or the extra emulator where there is no GPU"
RAY = f"timing on a cluster and serving by Ray take the extra ray: pip install '.[ray]' {WHERE.format(extra='ray')}"
TORCH = "gr.compile, gpu_runtime.ops.torch and training take it: pip install torch, as https://pytorch.org says for your GPU"
TRAIN = f"training the digits network takes the extra train: pip install '.[train]' {WHERE.format(extra='train')}"
# Module -> its package, and its use, with the cure.
EXTRAS = {
    "onnx": ("onnx", BUILD),
    "onnx_ir": ("onnx-ir", BUILD),
    "onnxscript": ("onnxscript", BUILD),
    "scipy": ("SciPy", BUILD),
    "cuda": ("cuda-bindings", NVRTC),
    "cupy": ("CuPy", f"running on a GPU takes it: {CUDA}"),
    "ray": ("Ray", RAY),
    "sklearn": ("scikit-learn", TRAIN),
    "torch": ("PyTorch", TORCH),
}


def why_missing(module: str | None) -> str | None:
    """Says that a module is missing, its use and the cure; None for a module of no extra."""
    if module is None or (found := EXTRAS.get(module.partition(".")[0])) is None:
        return None
    package, cure = found
    return f"{package} is not installed: {cure}"


@contextmanager
def named() -> Iterator[None]:
    """Replaces the error of a missing module by one that names the extra that contains it."""
    try:
        yield
    except ModuleNotFoundError as e:
        if (why := why_missing(e.name)) is None:
            raise
        raise ModuleNotFoundError(why, name=e.name, path=e.path) from None
