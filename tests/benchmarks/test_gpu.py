"""The table of `make gpu`: what runs, what is skipped, what a killed row leaves; all without a GPU."""

import importlib.util
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu, hardware, processes
from benchmarks.experiments import kernels, pack
from cuda_kernels import device as devices
from tactics.measure import timing

H200 = replace(devices.named("h200"), measured=True)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(codes, *words): `make gpu` with rows that are Python programs, {name: program}; the summary's rows by name."""
    monkeypatch.setattr(timing, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(gpu, "current", lambda: H200)
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "")
    monkeypatch.setattr(pack, "unpack", lambda: (0, {"rows": dict.fromkeys("abcd", 1)}))

    def ran(codes: dict[str, str], *words: str, seconds: int = 30, needs: tuple[str, ...] = ()) -> dict:
        rows = [gpu.Row("", name, seconds, "whether it runs", f"{name}.json", needs, "nothing") for name in codes]
        monkeypatch.setattr(gpu, "ROWS", rows)
        monkeypatch.setattr(
            gpu, "command", lambda row, folder, *_: [sys.executable, "-c", codes[row.name], str(folder / row.file)]
        )
        ran.code = gpu.main(["--out", str(tmp_path), "--rows", ",".join(codes), *words])
        return json.loads((tmp_path / "summary.json").read_text())["rows"]

    return ran


WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{}')"


def test_the_table_is_whole():
    """Each row has a name, a file, kernels to be packed and a module; what it needs is known. The first call's come first."""
    rows = gpu.ROWS
    assert len({row.name for row in rows}) == len({row.file for row in rows}) == len(rows)
    assert {row.name for row in rows} == set(kernels.OF_ROW) and {need for row in rows for need in row.needs} <= set(gpu.NEEDS)
    assert all(importlib.util.find_spec(row.words.split()[0]) for row in rows)
    assert [row.number for row in rows[:10]] == ["0", "1", "3", "6", "2", "1", "5", "7", "8", "4"]
    packed = {"measured": kernels.MEASURED, "measured-1": kernels.MEASURED_1, "compiled": kernels.MEASURED_OTHERS}
    for row in rows:  # each row builds the kernels that are packed for it
        assert all(":".join(item.split(":")[:2]) in row.words for item in packed.get(row.name, ()))
        words = gpu.command(row, Path("results"), 50.0, True)
        assert f"results/{row.file}" in words and not any("{" in word for word in words)


@pytest.mark.slow
def test_a_row_that_dies_or_hangs_loses_only_itself(run, capsys):
    rows = run(
        {"a": WRITES, "b": "import os; os.kill(os.getpid(), 9)", "c": "import time; time.sleep(60)", "d": WRITES},
        "--seconds", "30", seconds=4,
    )  # fmt: skip
    assert [rows[name]["status"] for name in "abcd"] == ["ok", "failed (-9)", "time limit", "ok"]
    assert run.code == 1 and "time limit" in capsys.readouterr().out


@pytest.mark.slow
def test_the_time_is_kept(run):
    """A row is ended at the whole's limit, with what it started; rows behind it are not begun."""
    code = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)']); time.sleep(90)"
    )
    begun = time.monotonic()
    rows = run({"a": code, "b": WRITES}, "--seconds", "8.5", seconds=10)
    assert 7 < time.monotonic() - begun < 13.5
    assert rows["a"]["status"] == "time limit" and rows["b"]["status"] == "left out: no time"


def test_a_second_call_goes_on_where_the_first_ended(run, monkeypatch, tmp_path):
    """What is answered with the kernels of now is skipped; what failed, or lost its file, runs again."""
    codes = {"a": WRITES, "b": "raise SystemExit(3)", "c": WRITES}
    first = run(codes)
    assert [first[name]["status"] for name in "abc"] == ["ok", "partly: its time ended", "ok"] and run.code == 0
    (tmp_path / "c.json").unlink()
    second = run(codes | {"b": WRITES})
    assert second["a"] == first["a"] and second["b"]["status"] == second["c"]["status"] == "ok"
    monkeypatch.setattr(gpu, "source_hash", lambda: "of other kernels")
    assert "ok, " in "\n".join(gpu.listed(tmp_path, False)) and "of other kernels" in "\n".join(gpu.listed(tmp_path, False))
    third = run(codes | {"b": WRITES})
    assert all(third[name]["kernels"] == "of other kernels" for name in "abc")


def test_a_damaged_pack_loses_nothing_but_itself(run, monkeypatch, capsys):
    def damaged():
        raise ValueError("00_right.tar.xz: expected an archive")

    monkeypatch.setattr(gpu, "compile_row", lambda *_: 0)
    monkeypatch.setattr(pack, "unpack", damaged)
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{}')"
    monkeypatch.setattr(gpu, "run", lambda command, seconds: (0, ""))
    rows = run({"a": code})
    assert rows["a"]["status"] == "ok" and "out/gpu is not used: 00_right.tar.xz" in capsys.readouterr().out


def test_a_small_run_answers_nothing(run):
    small = run({"a": WRITES}, "--small")
    assert small["a"]["small"] and not run({"a": WRITES})["a"]["small"]


@pytest.mark.parametrize("need", gpu.NEEDS)
def test_what_is_missing_leaves_its_row_out_with_the_reason(run, monkeypatch, need):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(processes.shutil, "which", lambda name: None)
    monkeypatch.setattr(processes, "glob", lambda pattern: [])
    rows = run({"a": WRITES}, needs=(need,))
    cure = "pip install torch" if need == "torch" else f"{need} is neither on PATH nor"
    assert rows["a"]["status"].startswith("left out: ") and cure in rows["a"]["status"] and run.code == 0


def test_the_list_says_what_is_open(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: "no driver")
    assert gpu.main(["--list", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out.splitlines()
    assert len(text) == 1 + len(gpu.ROWS) and all(line.endswith("open") for line in text[1:])


@pytest.mark.parametrize("words", [["--rows", "layers,nonsense"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_wrong_arguments_are_refused(words, capsys):
    with pytest.raises(SystemExit) as e:
        gpu.main(words)
    assert e.value.code == 2 and "expected" in capsys.readouterr().err


def test_results_have_a_folder_for_each_gpu():
    assert hardware.folder_of(H200).name == "h200"
    assert hardware.folder_of(replace(H200, title="NVIDIA H100 80GB HBM3")).name == "h100"
    assert hardware.folder_of(replace(H200, title="NVIDIA L4")).name == "nvidia_l4"
