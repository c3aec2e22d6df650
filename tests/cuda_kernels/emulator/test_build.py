"""Where the emulator's library comes from: a wheel, the cache or a compiler; and what is said where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_kernels.emulator import build
from cuda_kernels.emulator.build import LEVEL, BuildError
from tests.conftest import ROOT

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No compiler, an empty cache, a CPU of the level: nothing but the wheel's library can be loaded, which is returned."""
    data = Path(build.library()._name).read_bytes()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "MARCH", "")
    monkeypatch.setattr(build, "has_level", lambda: True)
    path = build._path(build.PREBUILT, build._key(LEVEL), data)
    path.parent.mkdir()
    path.write_bytes(data)
    return path


def load():
    return build.library.__wrapped__()  # not the one that this process has


def test_the_library_of_a_wheel_needs_no_compiler(alone):
    assert load()._name == str(alone)


@pytest.fixture
def shadowed(alone, monkeypatch):
    """As in a clone, whose sources Python imports instead of those of the installed wheel: returns the wheel's library."""
    installed = alone.parent.parent / "site" / "cuda_kernels" / "emulator" / "prebuilt"
    installed.mkdir(parents=True)
    alone.rename(installed / alone.name)
    record = installed.parents[2] / "gpu_runtime-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-runtime\nVersion: 0.1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(record.parent)])
    return installed / alone.name


def test_a_clone_takes_the_library_of_an_installed_wheel_of_its_sources(shadowed):
    assert load()._name == str(shadowed)


def test_a_clone_of_other_sources_says_why_it_finds_no_emulator(shadowed):
    shadowed.rename(shadowed.with_name("emulator-0123456789abcdef0123-00000000.so"))
    text = f"once \\(install g\\+\\+, or set CXX, or run outside of {ROOT}, whose sources hide the installed gpu-runtime"
    with pytest.raises(BuildError, match=text):
        load()


def test_a_compilation_is_said_once_where_there_is_one(alone, monkeypatch, caplog):
    """On stderr, where nobody listens: a first run takes half a minute longer than all others."""
    load()
    assert not caplog.records
    monkeypatch.setattr(build, "PREBUILT", alone.parent / "none")
    monkeypatch.setattr(build, "compiler", lambda: "c++ -g")
    monkeypatch.setattr(build, "_compile", lambda cxx, march: alone.read_bytes())
    for _ in range(2):
        load()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "compiling the emulator for this CPU with c++ -g: it takes about half a minute and is done once")
    ]


@pytest.mark.parametrize("spoil", ["sources", "damage", "cpu", "march", "absent"])
def test_no_other_library_than_that_of_these_sources_for_this_cpu_is_loaded(alone, monkeypatch, tmp_path, spoil):
    if spoil == "sources":
        for path in (*build.SOURCES.glob("*.cpp"), *build.SOURCES.glob("*.h")):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "interp.cpp").write_text("// changed\n" + (tmp_path / "interp.cpp").read_text())
        monkeypatch.setattr(build, "SOURCES", tmp_path)
    elif spoil == "damage":
        alone.write_bytes(alone.read_bytes()[:-1] + b"?")
    elif spoil == "cpu":
        monkeypatch.setattr(build, "has_level", lambda: False)
    elif spoil == "march":
        monkeypatch.setattr(build, "MARCH", "x86-64-v2")
    else:
        alone.unlink()
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler found: .*\(install g\+\+, or set CXX\)$"):
        load()


def test_what_does_not_load_is_no_reason_to_fail(alone, monkeypatch):
    """Such as one that asks for a newer libstdc++ than there is: what is not a library stands for it."""
    data = b"no ELF file"
    alone.unlink()
    build._path(build.PREBUILT, build._key(LEVEL), data).write_bytes(data)
    with pytest.raises(BuildError, match="no C.. compiler"):
        load()


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        (V3 + " sse2 avx512f", True),
        (V3.replace("fma ", ""), False),
        (V3.replace("abm ", "abmx "), False),
        ("", False),
    ],
)
def test_what_a_cpu_has_is_what_the_system_says(tmp_path, flags, has):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: some {V3}\nflags\t\t: {flags}\nbugs\t\t: none\n\nprocessor\t: 1\n")
    assert build.has_level(path) == has
    assert not build.has_level(tmp_path / "none")


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (b"GLIBC_2.2.5 GLIBC_2.14", "manylinux_2_17_x86_64"),
        (b"GLIBC_2.34 GLIBCXX_3.4.21 GLIBCXX_3.4", "manylinux_2_34_x86_64"),
        (b"GLIBC_2.17 GLIBCXX_3.4.29", "manylinux_2_34_x86_64"),
        (b"GLIBC_2.17 GLIBCXX_3.4.99", "linux_x86_64"),
    ],
)
def test_a_wheel_is_tagged_for_the_platforms_that_have_its_symbols(symbols, tag):
    assert build.platform_of(b"\0".join(symbols.split())) == tag


def test_a_missing_compiler_is_one_sentence(files):
    (files / "nothing").mkdir()
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": str(files / "nothing"),
        "GPU_RUNTIME_CACHE": str(files / "cache"),
        "GPU_RUNTIME_EMULATOR_MARCH": "native",
    }
    env.pop("CXX", None)
    words = "run tiny.engine --input x=x.npy --output out.npz"
    done = subprocess.run(
        [sys.executable, "-m", "gpu_runtime", *words.split()], cwd=files, env=env, capture_output=True, text=True, timeout=300
    )
    told = [line for line in done.stderr.splitlines() if not line.startswith("[")]  # without progress
    assert done.returncode == 1 and not done.stdout and not (files / "out.npz").exists()
    assert told == ["error: no C++ compiler found: the emulator needs one with C++17, once (install g++, or set CXX)"]
