"""Where the real networks are, and GPU tests skip with the reason where there is no GPU."""

import os
import signal
from pathlib import Path

import pytest

from cuda_kernels.device import why_no_gpu

ROOT = Path(__file__).parents[1]
MODELS = Path(os.environ.get("GPU_RUNTIME_MODELS", ROOT.parent / "shared" / "models"))
DIGITS = ROOT / "benchmarks" / "digits"


def pytest_configure():
    """Processes that share the tests between cores start with SIGINT ignored, and so would all that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if gpu else ""
    for item in gpu:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def model_path(name: str) -> Path:
    """A real network's file; the test skips, saying so, where the folder is absent."""
    path = MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip(f"{path.name} not found in {MODELS}: set GPU_RUNTIME_MODELS to the folder of real networks")
    return path
