"""Files are put in place whole or not at all, by the API as by the command line; what is no file is left alone."""

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import gpu_runtime as gr
from cuda_kernels import files
from gpu_runtime.frontend import importer
from gpu_runtime.pruning.result import Result
from tests import hostile
from tests.conftest import ROOT
from tests.gpu_runtime.test_engine import make

WRITERS = {  # name -> writes something to a path
    "write": lambda path: files.write(path, b"new"),
    "write_all": lambda path: files.write_all({path: b"new"}),
    "engine": lambda path: make().save(path),
    "pruned": lambda path: importer.save(path, b"new"),
    "prune": lambda path: Result(b"new", (), False).save(path),
}
ERRORS = (OSError, gr.EngineError)


def temporaries(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("how", WRITERS)
def test_devices_pipes_and_folders_are_never_replaced(tmp_path, how):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    for path, text in (
        (tmp_path / "pipe", "a device or a pipe"),
        (null, "a device or a pipe"),
        ("/dev/null", "a device or a pipe"),
        (tmp_path / "folder", "got a folder"),
        (f"{tmp_path}/new/", "got a folder"),
        (tmp_path / "file" / "x", "file"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / ("n" * 300), "too long"),
        (f"{tmp_path}/a\0b", "null byte"),
    ):
        with pytest.raises(ERRORS, match=text):
            WRITERS[how](path)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert (tmp_path / "folder").is_dir() and (tmp_path / "loop").is_symlink() and not temporaries(tmp_path)


@pytest.mark.parametrize("how", WRITERS)
def test_links_are_followed_and_modes_kept(tmp_path, how):
    before = os.umask(0o027)
    try:
        (tmp_path / "other").mkdir()
        old, new = tmp_path / "other" / "old", tmp_path / "new"
        old.write_bytes(b"old")
        old.chmod(0o604)
        (tmp_path / "link").symlink_to("other/old")
        (tmp_path / "dangling").symlink_to("other/made")
        for path in (tmp_path / "link", new, tmp_path / "dangling"):
            WRITERS[how](path)
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert old.read_bytes() == (tmp_path / "other" / "made").read_bytes() == new.read_bytes() != b"old"
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (old, new, tmp_path / "other" / "made")]
    assert modes == [0o604, 0o640, 0o640] and not temporaries(tmp_path) + temporaries(tmp_path / "other")


@pytest.mark.parametrize("how", [name for name in WRITERS if name != "write"])
def test_no_folder_is_made(tmp_path, how):
    """As by the commands, which refuse a name whose folder is misspelt."""
    with pytest.raises(ERRORS, match="none is no existing folder: create it first"):
        WRITERS[how](tmp_path / "none" / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_what_may_not_be_written_is_not_replaced(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(0o400)
    with pytest.raises(OSError, match="no permission"):
        files.write(path, b"new")
    assert path.read_bytes() == b"old"


KILLED = """
import os, signal, sys
from cuda_kernels import files
fill = files._fill
def killed(fd, data, path):
    fill(fd, data, path)
    print("filled", flush=True)
    signal.pause()
files._fill = killed
files.write(sys.argv[1], b"new")
"""


def test_what_a_killed_writer_leaves_is_swept_and_what_a_living_one_writes_is_not(tmp_path):
    def start(name: str) -> subprocess.Popen:
        line = [sys.executable, "-c", KILLED, str(tmp_path / name)]
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "filled\n"
        return process

    (tmp_path / ".gpu_runtime-mine.tmp").touch()  # not of the form: somebody else's
    dead, alive = start("a"), start("b")
    try:
        dead.send_signal(signal.SIGKILL)
        dead.communicate()
        assert len(temporaries(tmp_path)) == 3
        make().save(tmp_path / "model.engine")
        assert len(temporaries(tmp_path)) == 2
    finally:
        alive.kill()
        alive.communicate()
    files.write(tmp_path / "other", b"new")
    assert temporaries(tmp_path) == [".gpu_runtime-mine.tmp"]
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_full_disk_leaves_the_old_files(tmp_path):
    """A process that may write 100 bytes to a file stands for a disk with as many left."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"old")
    code = (
        "import sys; from cuda_kernels import files\n"
        "try: files.write_all({sys.argv[1]: b'new', sys.argv[2]: bytes(1000)})\n"
        "except OSError as e: print(e.filename, e.strerror)"
    )
    line = [sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")]
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, **limited)
    assert done.stdout == f"{tmp_path}/b File too large\n", done.stderr
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == b"old" and not temporaries(tmp_path)


def test_readers_see_one_file_or_the_other_while_several_write(tmp_path):
    """Threads of this process, each its own file of one letter; also the sweep of each must spare the others'."""
    path, stop, wrong = tmp_path / "file", threading.Event(), []
    files.write(path, b"a" * 100_000)

    def write(letter: bytes) -> None:
        try:
            for _ in range(40):
                files.write(path, letter * 100_000)
        except OSError as e:
            wrong.append(e)

    def read() -> None:
        while not stop.is_set():
            data = path.read_bytes()
            if len(data) != 100_000 or len(set(data)) != 1:
                wrong.append(data[:10])

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"b", b"c", b"d")]
    reader = threading.Thread(target=read)
    for t in (reader, *threads):
        t.start()
    for t in threads:
        t.join()
    stop.set()
    reader.join()
    assert not wrong and not temporaries(tmp_path)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    begin = time.monotonic()
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="expected a|Is a dir"):
            files.open_regular(path)
    assert time.monotonic() - begin < 1
    (tmp_path / "file").write_bytes(b"data")
    with files.open_regular(tmp_path / "file") as file:
        assert file.read() == b"data"


def test_the_api_refuses_what_the_command_line_refuses(tmp_path):
    """The pruned model's path is looked at before anything is built."""
    path = hostile.write("concat_axis_1", tmp_path)
    for target in ("/dev/null", tmp_path, f"{path}/x"):
        with pytest.raises(OSError, match="expected|not a folder"):
            gr.build(path, device="h200", sparsity="force", save_pruned=target, progress=lambda *_: pytest.fail("began"))


def test_a_warning_points_at_the_caller_s_line(tmp_path):
    """Through our frames, and those of contextlib and functools between them, to the first that is none of ours."""
    script = tmp_path / "theirs.py"
    script.write_text(
        "from cuda_kernels import files\n"
        'ours = compile(\'def inner(): files.warn("a sentence")\\n'
        "def outer():\\n with manager(): pass', 'ours.py', 'exec')\n"
        "import contextlib\n"
        "space = {'__name__': 'tactics.measure.x', 'files': files}\n"
        "exec(ours, space)\n"
        "space['manager'] = contextlib.contextmanager(eval('lambda: (inner(), (yield))', space))\n"
        "space['outer']()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert done.returncode == 0 and f"{script}:7: RuntimeWarning: a sentence" in done.stderr, done.stderr
