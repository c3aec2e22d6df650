"""`gpu-runtime cache list|merge|prune` on files with few lines."""

import json
import os
import subprocess
import sys
import time

import pytest

from cuda_kernels import device as devices
from cuda_kernels.compile import source_hash
from gpu_runtime.commands import cache as command
from tactics.measure import cache
from tactics.measure.cache import POLICY, Cache, Key
from tests.tactics.measure.scripted import tactics

GPU = "NVIDIA H200|sm_90a|132|62914560"
TACTIC = tactics(1)[0].name
KEY = Key(f"{GPU}|580.1", "source", "conv 1", TACTIC, f"{POLICY}, weights cold")
NUMBERS = {"us": 5.0, "low_us": 4.5, "high_us": 6.0, "n": 30, "over": True, "clock_mhz": 1980, "rel_error": 3e-4}
BEGUN = NUMBERS | {"n": 1, "over": False, "samples": [5.0]}


@pytest.fixture
def now(monkeypatch):
    """The sources of KEY are the present ones, and the driver is KEY's."""
    monkeypatch.setattr(cache, "source_key", lambda kernel: "source")
    monkeypatch.setattr(command, "this_gpu", lambda: KEY.device)


def write(path, *lines):
    """A cache of these (key, values)."""
    cache = Cache(path)
    for key, values in lines:
        cache.add(key, **values)
    cache.close()
    return path.read_bytes()


def keys(path):
    return [Key(*(json.loads(line)[f] for f in Key._fields)) for line in path.read_text().splitlines()]


def other(**fields):
    return KEY._replace(**fields)


def test_list_counts_by_device_and_policy(cli, tmp_path):
    write(tmp_path / "t", (KEY, NUMBERS), (KEY, NUMBERS), (other(tactic="b"), {"error": "hung"}), (other(tactic="c"), BEGUN))
    write(tmp_path / "t", (other(policy="v1"), NUMBERS))
    with (tmp_path / "t").open("a") as file:
        file.write("junk\n")
    code, out, _ = cli("cache list t")
    assert code == 0
    assert out.splitlines()[0] == "t: 5 lines, 4 keys, 1 line that is no measurement"
    assert f"  {GPU}|580.1; {KEY.policy}: 1 time, 1 failure, 1 unfinished race" in out.splitlines()
    assert f"  {GPU}|580.1; v1: 1 time" in out.splitlines()


def test_list_takes_the_default_cache_and_refuses_what_is_none(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path))
    write(tmp_path / "timings.jsonl", (KEY, NUMBERS))
    assert cli("cache list")[:2] == (0, cli(f"cache list {tmp_path / 'timings.jsonl'}")[1])
    (tmp_path / "x.npy").write_bytes(b"junk\njunk\n")
    code, out, err = cli("cache list x.npy")
    assert (code, out) == (1, "") and "x.npy: no timing cache: none of its 2 lines is a measurement" in err


def test_merge_keeps_the_last_line_of_each_key(cli, tmp_path):
    write(tmp_path / "a", (KEY, NUMBERS), (other(problem="2"), NUMBERS))
    write(tmp_path / "b", (KEY, NUMBERS | {"us": 5.5}), (other(problem="3"), BEGUN))
    with (tmp_path / "b").open("a") as file:
        file.write('{"torn')
    code, out, _ = cli("cache merge a b -o both")
    assert code == 0 and out == "Wrote both: 3 measurements of 2 files\n"
    found = Cache(tmp_path / "both")
    assert len(found) == 3 and found.malformed == 0
    record = found.get(KEY)
    assert record and record["us"] == 5.5


@pytest.mark.parametrize("verb", ["merge a bad -o out", "prune a bad"])
@pytest.mark.parametrize(
    ("text", "number"), [("junk\n", 1), ("junk", 1), ("\n\0\n", 2), ("GOOD\n{}\n", 2), ("GOOD\njunk\nGOOD\n", 2)]
)
def test_a_file_that_is_no_cache_is_named_with_its_first_bad_line(cli, tmp_path, verb, text, number, now):
    good = write(tmp_path / "a", (KEY, NUMBERS))
    (tmp_path / "bad").write_bytes(text.encode().replace(b"GOOD", good.strip()))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code, _, err = cli(f"cache {verb}")
    assert (
        code == 1
        and f"error: bad: line {number}: expected a measurement of a timing cache, got " in err
        and "nothing was written" in err
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("verb", ["list no", "merge a no -o out", "prune no"])
def test_no_file(cli, tmp_path, verb):
    write(tmp_path / "a", (KEY, NUMBERS))
    code, _, err = cli(f"cache {verb}")
    assert code == 1 and "no: no such file" in err


def test_merge_does_not_write_what_it_reads(cli, tmp_path):
    write(tmp_path / "a", (KEY, NUMBERS))
    code, _, err = cli("cache merge a -o a")
    assert code == 1 and "is a file that this command reads" in err


def test_prune_drops_what_no_build_here_reads(cli, tmp_path, now):
    lines = [
        (KEY, NUMBERS),
        (KEY, NUMBERS | {"us": 5.5}),
        (other(policy="v1"), NUMBERS),
        (other(source="x"), NUMBERS),
        (other(device=f"{GPU}|570.2"), NUMBERS),
        (other(device="NVIDIA A100|sm_80|108|1|570.2"), NUMBERS),
        (other(tactic="nonsense"), NUMBERS),
    ]
    write(tmp_path / "t", *lines)
    code, out, _ = cli("cache prune t")
    assert code == 0 and keys(tmp_path / "t") == [KEY, lines[5][0]], "those of another GPU stay"
    assert out == "t: kept 2 of 6 measurements; dropped 2 of other kernel sources, 1 of another policy, 1 of another driver\n"
    before = (tmp_path / "t").stat().st_mtime_ns
    assert cli("cache prune t")[1] == "t: kept 2 of 2 measurements\n" and (tmp_path / "t").stat().st_mtime_ns == before


def test_times_of_whole_networks_stay_while_no_kernel_changes(cli, tmp_path):
    whole = other(source=source_hash()[:24], problem="network abc", tactic="layer 3", policy=POLICY)
    write(tmp_path / "t", (whole, NUMBERS), (whole._replace(source="x"), NUMBERS))
    assert "kept 1 of 2 measurements; dropped 1 of other kernel sources" in cli("cache prune t")[1]
    assert keys(tmp_path / "t") == [whole]


def test_prune_by_age(cli, tmp_path, now, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(time, "time", lambda: 1e9)
        write(tmp_path / "t", (KEY, NUMBERS))
    write(tmp_path / "t", (other(problem="2"), NUMBERS))
    assert "kept 2 of 2" in cli("cache prune t")[1]
    assert "kept 1 of 2 measurements; dropped 1 older than 30 days" in cli("cache prune --older-than=30 t")[1]


def test_a_build_goes_on_in_a_pruned_file(cli, tmp_path, now):
    """It holds the file open; what it adds later is found in the new one."""
    build = Cache(tmp_path / "t")
    build.add(other(policy="v1"), **NUMBERS)
    build.add(KEY, **NUMBERS)
    assert cli("cache prune t")[0] == 0
    build.add(other(problem="2"), **NUMBERS)
    assert keys(tmp_path / "t") == [KEY, other(problem="2")]


def test_without_nvrtc_or_a_gpu_their_lines_stay(cli, tmp_path, monkeypatch):
    def missing(kernel):
        raise ModuleNotFoundError("No module named 'cupy'")

    monkeypatch.setattr(cache, "source_key", missing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    write(tmp_path / "t", (KEY, NUMBERS), (other(device=f"{GPU}|570.2"), NUMBERS), (other(policy="v1"), NUMBERS))
    assert "kept 2 of 3 measurements; dropped 1 of another policy" in cli("cache prune t")[1]


def test_a_folder_and_a_pipe_are_no_caches(cli, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        code, _, err = cli(f"cache list {name}")
        assert code == 1 and f"error: {name}: expected a" in err


WRITER = """
import json, sys, time
from tactics.measure.cache import Cache, Key
cache, key, numbers = Cache(sys.argv[1]), Key(*json.loads(sys.argv[2])), json.loads(sys.argv[3])
for i in range(200):
    cache.add(key._replace(problem=f"conv {i}"), **numbers)
    time.sleep(0.002)
"""


@pytest.mark.slow
def test_prune_beside_a_build_loses_nothing(cli, tmp_path, now, monkeypatch):
    """Another process adds measurements while prune has read the file and not yet replaced it."""
    old, written = other(policy="v1"), command.write_all

    def late(contents):
        time.sleep(0.02)
        written(contents)

    monkeypatch.setattr(command, "write_all", late)
    write(tmp_path / "t", (old, NUMBERS))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [str(tmp_path / "t"), json.dumps(KEY), json.dumps(NUMBERS)]
    with subprocess.Popen([sys.executable, "-c", WRITER, *arguments], env=environment) as writer:
        prunes = 0
        while writer.poll() is None:
            write(tmp_path / "t", (old, NUMBERS))  # so that each has something to drop
            assert cli("cache prune t")[0] == 0
            prunes += 1
    assert writer.returncode == 0 and prunes > 5
    assert {key.problem for key in keys(tmp_path / "t")} == {f"conv {i}" for i in range(200)}
    assert cli("cache prune t t")[0] == 0, "a file named twice is locked once"
