"""The cache of compiled kernels and of the emulator: another's entry, a damaged or a malformed one is compiled again, a folder
that cannot be written is one warning, and what is compiled names no folder of the machine."""

import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from cuda_kernels import compile as compiling
from cuda_kernels import files
from cuda_kernels.compile import compile_kernel, cubin_path
from cuda_kernels.emulator import build
from tests.conftest import ROOT

KERNEL = ("flush_l2", {}, "sm_80")  # compiled in a third of a second


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a process that has kept and complained about nothing."""
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "_UNKEPT", {})
    monkeypatch.setattr(files, "_TOLD", set())
    return tmp_path / "cache"


@pytest.fixture
def compiled_again(monkeypatch, real) -> list[str]:
    """Grows by each kernel that would be compiled; what comes of it is `real`."""
    again: list[str] = []
    monkeypatch.setattr(compiling, "_nvrtc", lambda kernel, values, sm: again.append(kernel) or real)
    return again


@pytest.fixture(scope="module")
def real() -> tuple[str, bytes, str]:
    """PTX, machine code and log of KERNEL."""
    return compiling._nvrtc("flush_l2", (), "sm_80")


def forgeries(entry: bytes, cubin: bytes) -> dict[str, tuple[bytes, bytes]]:
    """Name -> (entry, machine code) as a crash, a bit flip, a hand or another kernel's entry may leave them."""
    meta = json.loads(entry)

    def but(**changes) -> bytes:
        return json.dumps(meta | changes).encode()

    other = meta | {"key": "0" * 64}
    other["sha256"] = compiling.entry_hash(other)
    old = {name: meta[name] for name in ("ptx", "log", "cubin_sha256")}
    return {
        "torn entry": (entry[:-9], cubin),
        "no entry": (b"", cubin),
        "torn code": (entry, cubin[:100]),
        "no code": (entry, b""),
        "other ptx": (but(ptx=meta["ptx"].replace("ret", "trap")), cubin),
        "other log": (but(log=""), cubin),
        "flipped code": (entry, bytes([cubin[0] ^ 1]) + cubin[1:]),
        "another kernel's": (json.dumps(other).encode(), cubin),
        "key alone": (but(key="0" * 64), cubin),
        "older format": (json.dumps(old).encode(), cubin),
        "list": (b"[]", cubin),
        "null": (b"null", cubin),
        "number": (b"7", cubin),
        "nested": (b"[" * 100_000, cubin),
        "digits": (b"9" * 10_000, cubin),
        "types": (but(ptx=7, log=None), cubin),
        "binary": (bytes(range(256)) * 9, cubin),
        "not utf-8": (entry.replace(b"ptx", b"\xff\xfe\xff"), cubin),
        "hashes": (but(sha256=7, cubin_sha256=[]), cubin),
    }


def test_whatever_is_not_the_entry_is_compiled_again(cache, compiled_again):
    again = compiled_again
    first = compile_kernel(*KERNEL)
    assert again == ["flush_l2"] and compile_kernel(*KERNEL) == first and len(again) == 1
    code = cubin_path(first)
    entry = code.with_suffix(".json")
    assert code.read_bytes() == first.cubin
    for name, (meta, cubin) in forgeries(entry.read_bytes(), code.read_bytes()).items():
        again.clear()
        entry.write_bytes(meta)
        code.write_bytes(cubin)
        assert compile_kernel(*KERNEL) == first and again, name
        assert compile_kernel(*KERNEL) == first and len(again) == 1, name
        assert cubin_path(first).read_bytes() == first.cubin
    for path in (entry, code):  # a folder, a pipe and a device in its place: nothing waits, and nothing there is replaced
        for make in (Path.mkdir, os.mkfifo, lambda p: p.symlink_to("/dev/zero")):
            path.unlink()
            make(path)
            compiling._UNKEPT.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert compile_kernel(*KERNEL) == first and cubin_path(first).read_bytes() == first.cubin
            assert not path.is_file()
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            compiling._UNKEPT.clear()
            assert compile_kernel(*KERNEL) == first and path.is_file()


def test_a_cubin_is_written_again_where_the_cache_holds_another(cache, compiled_again):
    first = compile_kernel(*KERNEL)
    for damage in (lambda p: p.write_bytes(first.cubin[:100]), Path.unlink):
        damage(cubin_path(first))
        assert cubin_path(first).read_bytes() == first.cubin


def unusable(cache: Path, how: str, patch) -> None:
    if how == "a file in its place":
        cache.write_bytes(b"mine")
    elif how == "a file above it":
        cache.parent.joinpath("file").touch()
        patch.setenv("GPU_RUNTIME_CACHE", str(cache.parent / "file" / "cache"))
    else:

        def refuse(*_):
            raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))

        patch.setattr(files, "_temporary", refuse)


HOWS = ("a file in its place", "a file above it", "EROFS", "ENOSPC", "EACCES", "EDQUOT")


@pytest.mark.parametrize("how", HOWS)
def test_a_cache_that_cannot_be_written_is_one_warning(cache, compiled_again, monkeypatch, how):
    again = compiled_again
    unusable(cache, how, monkeypatch)
    told = f"the cache folder {re.escape(str(files.cache_dir()))} cannot be written .* set GPU_RUNTIME_CACHE to a folder"
    with pytest.warns(RuntimeWarning, match=told) as warned:
        first = compile_kernel(*KERNEL)
        assert compile_kernel(*KERNEL) == first and again == ["flush_l2"]  # from memory
        assert compile_kernel("flush_l2", {}, "sm_90a").ptx == first.ptx
        path = cubin_path(first)
    assert path.read_bytes() == first.cubin and len(warned) == 1
    assert how[0] != "E" or os.strerror(getattr(errno, how)) in str(warned[0].message)
    assert how != "a file in its place" or cache.read_bytes() == b"mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_cache_of_another_user_is_read(cache, compiled_again):
    again = compiled_again
    first = compile_kernel(*KERNEL)
    for folder in (cache, *(p for p in cache.rglob("*") if p.is_dir())):
        folder.chmod(0o500)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        assert compile_kernel(*KERNEL) == first and len(again) == 1
        compile_kernel("flush_l2", {}, "sm_90a")
    for folder in (cache, *(p for p in cache.rglob("*") if p.is_dir())):
        folder.chmod(0o700)


MANY = """
import sys
from cuda_kernels import compile as c
ptx, cubin, log = sys.argv[1] * 1000, sys.argv[1].encode() * 100_000, sys.argv[1] * 10
c._nvrtc = lambda *_: (ptx, cubin, log)
for _ in range(60):
    found = c.compile_kernel("flush_l2", {}, "sm_80")
    assert len({found.ptx[0], chr(found.cubin[0]), found.log[0]}) == 1 and len(found.cubin) == 100_000, "mixed"
    path = c.cache_path("flush_l2", (), "sm_80")
    path.unlink(missing_ok=True)
"""


def test_processes_that_write_one_entry_never_mix_it(cache):
    """Each "compiles" something else and removes the entry again: what is read is one of them, whole."""
    running = [subprocess.Popen([sys.executable, "-c", MANY, letter], cwd=ROOT, stderr=subprocess.PIPE) for letter in "abc"]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert not any(process.returncode for process in running), errors


# ---- compiled kernels are the same everywhere


def test_two_checkouts_compile_the_same_bytes(tmp_path):
    """Two copies of the sources at paths of different length, each cold, each from another folder; and one of them warm."""
    code = (
        "import sys, hashlib; from cuda_kernels import compile as c\n"
        "for values, sm in (({'VEC': 8, 'AVG': 1}, 'sm_80'), ({'VEC': 8, 'AVG': 1}, 'compute_90a')):\n"
        "    f = c.compile_kernel('pool', values, sm)\n"
        "    assert str(c.ROOT).startswith(sys.argv[1]) and sys.argv[1].encode() not in f.cubin + f.ptx.encode()\n"
        "    print(hashlib.sha256(f.cubin).hexdigest(), hashlib.sha256(f.ptx.encode()).hexdigest())\n"
    )
    found = []
    for name, cwd in (("a", "."), ("another_much_longer_name", "/"), ("a", "/")):
        root = tmp_path / name
        if not root.exists():
            shutil.copytree(ROOT / "cuda_kernels", root / "cuda_kernels", ignore=shutil.ignore_patterns("__pycache__"))
        env = os.environ | {"PYTHONPATH": str(root), "GPU_RUNTIME_CACHE": str(root / "cache")}
        line = [sys.executable, "-c", code, str(root)]
        done = subprocess.run(line, env=env, cwd=tmp_path / cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1] == found[2] and len(found[0].split()) == 4


def test_sources_are_named_as_they_lie_in_the_project():
    ptx, _, _ = compiling._nvrtc("pool", (("AVG", 1), ("VEC", 8)), "compute_90a")
    names = re.findall(r'\.file\t\d+ "([^"]*)"', ptx)
    assert names[0] == "/cuda_kernels/pool.cu" and "/cuda_kernels/include/tensor.cuh" in names
    assert all((ROOT / name[1:]).exists() for name in names)


# ---- the emulator's library


@pytest.fixture(scope="module")
def built() -> bytes:
    """The emulator's library, from the user's cache if it is there."""
    return Path(build.library()._name).read_bytes()


@pytest.fixture
def library(built, cache, monkeypatch) -> Path:
    """The emulator's library in a cache of its own."""
    monkeypatch.setattr(build, "_compile", lambda cxx, march: built)
    loaded = build._load(["c++"], "native", "k" * 20)
    (path,) = (cache / "emulator").iterdir()
    assert loaded._name == str(path) and path.read_bytes() == built
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: os.truncate(p, 4096),
        lambda p: os.truncate(p, p.stat().st_size - 1),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(p.read_bytes()[:-1] + b"x"),
        Path.unlink,
        lambda p: (p.unlink(), p.symlink_to("/dev/zero")),
        lambda p: (p.unlink(), p.mkdir()),
    ],
    ids=["cut", "cut by one", "empty", "altered", "absent", "device", "folder"],
)
def test_a_damaged_emulator_is_built_again_and_never_mapped(library, damage, monkeypatch):
    data = library.read_bytes()
    mapped, loader = [], ctypes.CDLL

    def load(name):
        mapped.append(Path(name).read_bytes())
        return loader(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    damage(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build._load(["c++"], "native", "k" * 20)
    assert mapped == [data]


@pytest.mark.parametrize("how", HOWS)
def test_the_emulator_runs_without_a_cache(library, monkeypatch, cache, how):
    shutil.rmtree(cache)
    unusable(cache, how, monkeypatch)
    with pytest.warns(RuntimeWarning, match="set GPU_RUNTIME_CACHE"):
        assert build._load(["c++"], "native", "k" * 20).emu_names(None, 0) > 0
