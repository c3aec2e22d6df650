"""What a machine must not decide: the instruction set that the emulator is compiled for. (`make test-blas`: the BLAS.)"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = (
    "test_emulator",
    "test_emulator_alu",
    "test_emulator_blocks",
    "test_emulator_checks",
    "test_emulator_sectors",
    "test_kernels",
)


@pytest.mark.long
def test_the_emulator_answers_alike_without_this_cpus_instructions():
    """Compiled for plain x86-64: no FMA, no AVX, other vector widths; every test of instructions and checks passes."""
    if os.uname().machine != "x86_64":
        pytest.skip(f"x86-64 instruction sets on {os.uname().machine}")
    files = [f"tests/{name}.py" for name in TESTS]
    line = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *files, "-m", "not long and not slow"]
    env = os.environ | {"GPU_RUNTIME_EMULATOR_MARCH": "x86-64"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
