"""gpu-runtime doctor as it is typed, on a machine without a GPU: what is printed, written and refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cuda_kernels.files import cache_dir
from gpu_runtime import cli
from gpu_runtime.doctor import examine, host
from tests.conftest import ROOT


def run(capsys, *args):
    code: int | str | None = 0
    try:
        cli.main(["doctor", *args])
    except SystemExit as e:
        code = e.code
    return code, *capsys.readouterr()


def test_without_a_gpu_it_says_so_and_checks_the_rest(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, _ = run(capsys, "--output", str(tmp_path / "report.json"))
    assert code == 5 and out.startswith("No GPU: ") and "There is no GPU to examine" in out
    assert re.search(r"^compiler +passed", out, re.M) and re.search(r"^conv_sparse24 +untested", out, re.M)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["no_gpu"] and not data["well"] and {f["verdict"] for f in data["families"]} == {"untested"}


@pytest.mark.slow
def test_json_is_one_document_without_private_names(capsys):
    code, out, _ = run(capsys, "--emulate", "rtx4090", "--kernels", "pool,library", "--json")
    data = json.loads(out)
    assert code == 0 and data["well"] and [f["verdict"] for f in data["families"]] == ["passed", "passed"]
    assert data["device"]["name"] == "rtx4090" and data["versions"]["NVRTC"]
    for private in (str(Path.home()), str(ROOT), str(cache_dir()), os.uname().nodename):
        assert private not in out


@pytest.mark.parametrize(
    "args, words",
    [
        (["--emulate", "gtx480"], "unknown device"),
        (["--kernels", "conv"], "unknown family 'conv'"),
        (["--time-limit", "0"], "--time-limit"),
        (["--time-limit", "nan"], "--time-limit"),
    ],
)
def test_wrong_usage(capsys, args, words):
    code, out, err = run(capsys, *args)
    assert code == 2 and words in err and not out


def test_output_that_cannot_be_written_is_refused_before_any_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(examine, "examine", lambda *a, **b: pytest.fail("work was done"))
    code, _, err = run(capsys, "--output", str(tmp_path / "none" / "x.json"))
    assert code == 1 and "no existing folder" in err


def test_narrow_terminals_have_their_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "--emulate", "h200", "--kernels", "pool")
    assert max(map(len, out.splitlines())) <= 60


@pytest.mark.parametrize(
    "text, left",
    [
        ("no /home/someone/.cache/gpu_runtime/kernels/ab/cd.json", "no cd.json"),
        ("File '/usr/lib/python3/x.py', line 3", "File 'x.py', line 3"),
        ("12 s/launch and 3/4 of it, sm_90a", "12 s/launch and 3/4 of it, sm_90a"),
    ],
)
def test_folders_are_left_out_of_texts(text, left):
    assert host.without_folders(text) == left


def test_a_family_of_another_architecture_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--emulate", "rtx4090", "--kernels", "pool,conv_dense_sm90"])
    assert stopped.value.code == 1
    assert "conv_dense_sm90 needs sm_90a, but GeForce RTX 4090 is sm_89: leave out conv_dense_sm90" in capsys.readouterr().err


def test_a_home_that_cannot_be_written_is_said_with_the_cure(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "cache", "/proc/1/cache"):  # no folder can be made there, not even by root
        monkeypatch.setenv("GPU_RUNTIME_CACHE", str(folder))
        found = host.caches()
        assert found.status == "failed" and "set GPU_RUNTIME_CACHE to a writable one" in found.words, found


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_kernels_that_compile(tmp_path):
    """Sent while kernels of a cold cache compile in threads, for which the interpreter waits at its end: 8 s before."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "emulator").symlink_to(cache_dir() / "emulator")
    line = [sys.executable, "-m", "gpu_runtime", "doctor", "--emulate", "h200"]
    env = os.environ | {"GPU_RUNTIME_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            ended = time.monotonic() + 60
            while len(list(cache.glob("kernels/*/*.cubin"))) < 3 and time.monotonic() < ended:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130 and "interrupted: nothing was written" in err and "no verdict" in err, err
    assert time.monotonic() - sent < 3, "1 s, on a machine with other work"
