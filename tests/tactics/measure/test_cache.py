"""The timing cache: lines that are found again, torn, malformed, replaced, or cannot be written."""

import json
import os
import subprocess
import sys

import pytest

from tactics.measure.cache import Cache, Key, is_over
from tests.tactics.measure.scripted import ROOT

KEY = Key("gpu|driver", "source", "conv ...", "tactic")
NUMBERS = {"us": 5.0, "low_us": 4.5, "high_us": 6.0, "n": 30, "clock_mhz": 1980, "rel_error": 3e-4}


def test_what_was_added_is_found_by_another_cache_on_the_file(tmp_path):
    cache = Cache(tmp_path / "deep" / "times.jsonl")
    cache.add(KEY, **NUMBERS)
    cache.add(KEY._replace(tactic="other"), error="hung")
    cache.close()
    found = Cache(cache.path)
    assert len(found) == 2 and found.malformed == 0
    assert {k: found.get(KEY)[k] for k in NUMBERS} == NUMBERS
    assert found.get(KEY._replace(tactic="other"))["error"] == "hung"
    assert json.loads(cache.path.read_text().splitlines()[0])["clock_mhz"] == 1980


def test_reading_writes_nothing(tmp_path):
    assert len(Cache(tmp_path / "times.jsonl")) == 0
    assert not (tmp_path / "times.jsonl").exists()


@pytest.mark.parametrize("field", Key._fields)
def test_any_other_key_is_a_miss(tmp_path, field):
    cache = Cache(tmp_path / "times.jsonl")
    cache.add(KEY, **NUMBERS)
    assert cache.get(KEY) and cache.get(KEY._replace(**{field: "x"})) is None


def test_the_last_of_several_counts(tmp_path):
    cache = Cache(tmp_path / "times.jsonl")
    cache.add(KEY, error="hung")
    cache.add(KEY, **NUMBERS)
    assert Cache(cache.path).get(KEY)["us"] == 5.0


def test_a_torn_last_line_is_ignored_and_the_next_one_starts_afresh(tmp_path):
    path = tmp_path / "times.jsonl"
    cache = Cache(path)
    cache.add(KEY, **NUMBERS)
    whole = path.read_bytes()
    for cut in range(1, len(whole)):  # a crash can tear the line anywhere
        path.write_bytes(whole + whole[:cut])
        torn = Cache(path)
        assert len(torn) == 1 and torn.malformed == 0
    torn.add(KEY._replace(tactic="next"), **NUMBERS)
    after = Cache(path)
    assert after.get(KEY._replace(tactic="next")) and len(after) == 2


def test_lines_that_are_no_measurement_are_counted_and_ignored(tmp_path):
    path = tmp_path / "times.jsonl"
    good = KEY._asdict() | NUMBERS
    broken = [good | {"us": True}, good | {"us": 10**400, "high_us": 10**400}, good | {"low_us": -1, "us": 0}]
    broken += [good | {name: value} for name in ("us", "high_us") for value in (None, [5.0], {}, 1e300, -5.0)]
    broken += [good | {"us": -1}, good | {"us": "5"}, good | {"us": float("nan")}, {"us": 5.0}, good | {"tactic": 3}]
    bad = [b"true", b"[" * 100_000, b'{"us":' * 100_000, b"9" * 5000, bytes(range(11, 256)), b"\0" * 1000]
    bad += [b"nonsense", b"[]", b"null", b"\xff\xfe", *(json.dumps(b).encode() for b in broken)]
    path.write_bytes(b"\n".join([*bad, b"", json.dumps(good).encode(), b""]))
    cache = Cache(path)
    assert cache.malformed == len(bad) and len(cache) == 1


def test_only_measurements_can_be_added(tmp_path):
    cache = Cache(tmp_path / "times.jsonl")
    for values in ({}, {"us": 1.0}, NUMBERS | {"us": float("nan")}, NUMBERS | {"low_us": 7.0}):
        with pytest.raises(ValueError, match="not a measurement"):
            cache.add(KEY, **values)
    assert not cache.path.exists()


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "times.jsonl")
    with pytest.warns(RuntimeWarning, match="file/times.jsonl cannot be written .* GPU_RUNTIME_CACHE") as told:
        for tactic in ("a", "b"):
            cache.add(KEY._replace(tactic=tactic), **NUMBERS)
        cache.sync()
    assert len(told) == 1 and len(cache) == 2 and cache.get(KEY._replace(tactic="b"))["us"] == 5.0
    cache.close()


def test_a_full_disk_is_one_warning(tmp_path):
    cache = Cache(tmp_path / "times.jsonl")
    cache.add(KEY, **NUMBERS)
    os.close(cache._file)
    cache._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.warns(RuntimeWarning, match="No space left on device") as told:
        for tactic in ("a", "b"):
            cache.add(KEY._replace(tactic=tactic), **NUMBERS)
    assert len(told) == 1 and len(cache) == 3 and len(Cache(cache.path)) == 1


def test_two_processes_may_append_at_once(tmp_path):
    code = (
        "import sys; from tactics.measure.timing import Cache, Key\n"
        "cache = Cache(sys.argv[1])\n"
        "for i in range(300): cache.add(Key('gpu', 's' * 200, sys.argv[2], str(i)), us=1.0, low_us=1.0, high_us=1.0)\n"
        "cache.close()"
    )
    path = tmp_path / "times.jsonl"
    both = [subprocess.Popen([sys.executable, "-c", code, str(path), who], cwd=ROOT) for who in "ab"]
    assert [p.wait(60) for p in both] == [0, 0]
    cache = Cache(path)
    assert len(cache) == 600 and cache.malformed == 0


BEGUN = NUMBERS | {"n": 2, "over": False, "samples": [4.5, 5.5]}


def test_a_race_that_is_not_over_is_kept_with_its_samples(tmp_path):
    cache = Cache(tmp_path / "times.jsonl")
    cache.add(KEY, **BEGUN)
    assert Cache(cache.path).get(KEY)["samples"] == [4.5, 5.5] and not is_over(Cache(cache.path).get(KEY))
    for wrong in ({"samples": []}, {"samples": [True]}, {"samples": ["5"]}, {"samples": [-1.0]}, {"samples": 3}, {"n": 0}):
        with pytest.raises(ValueError, match="not a measurement"):
            cache.add(KEY, **(BEGUN | wrong))


def test_what_another_process_appended_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "times.jsonl"
    one, other = Cache(path), Cache(path)
    one.add(KEY, **NUMBERS)
    assert other.get(KEY) is None
    other.refresh()
    assert other.get(KEY)["us"] == 5.0
    line = json.dumps(KEY._replace(tactic="b")._asdict() | NUMBERS).encode() + b"\n"
    with path.open("ab") as file:
        file.write(line[:50])
    other.refresh()
    with path.open("ab") as file:
        file.write(line[50:])
    other.refresh()
    assert len(other) == 2 and other.malformed == 0


def test_a_line_behind_one_that_another_process_tore_stays_whole(tmp_path):
    path = tmp_path / "times.jsonl"
    cache = Cache(path)
    cache.add(KEY, **NUMBERS)
    with path.open("ab") as file:
        file.write(b'{"torn')
    cache.add(KEY._replace(tactic="b"), **NUMBERS)
    assert len(Cache(path)) == 2


def test_a_file_that_was_replaced_is_read_and_written_anew(tmp_path):
    path = tmp_path / "times.jsonl"
    cache = Cache(path)
    cache.add(KEY, **NUMBERS)
    (tmp_path / "new").write_bytes(json.dumps(KEY._replace(tactic="b")._asdict() | NUMBERS).encode() + b"\n")
    os.replace(tmp_path / "new", path)
    cache.add(KEY._replace(tactic="c"), **NUMBERS)
    cache.refresh()
    assert cache.get(KEY._replace(tactic="b")) and len(Cache(path)) == 2


def test_a_cache_without_a_file_lasts_as_long_as_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = Cache(None)
    cache.add(KEY, **NUMBERS)
    cache.refresh()
    assert cache.get(KEY) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("device", "gpu|other", "another driver"),
        ("device", "other|driver", "another GPU"),
        ("source", "x", "other kernel sources"),
        ("policy", "v1", "another policy"),
        ("tactic", "x", "new"),
    ],
)
def test_a_miss_says_what_was_different(tmp_path, field, value, why):
    cache = Cache(tmp_path / "times.jsonl")
    cache.add(KEY, **NUMBERS)
    assert Cache(cache.path).why_missing(KEY._replace(**{field: value})) == why
