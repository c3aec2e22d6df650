"""The timing cache, the race, and a child process that hangs, dies or talks nonsense: all without a GPU.

The child is a script below that plays a worker; nothing it says ever comes near a real cache.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_kernels import device as devices
from cuda_kernels.compile import CompileError
from tactics.candidates import candidates
from tactics.format import Format
from tactics.measure import timing
from tactics.measure.timing import ROUNDS, Cache, Key
from tactics.problems import codec
from tactics.tactic import Tactic, Tile
from tests.problems import RELU, conv_case

H200 = devices.named("h200")
PROBLEM = conv_case(1, 64, 8, 8, 64, 3, 3, pad=(1, 1, 1, 1), bias=True, act=RELU, sparse24=True)
HWC8, CHW = Format("fp16", "hwc8"), Format("fp16", "chw")
ROOT = Path(__file__).resolve().parents[3]
KEY = Key("gpu|driver", "source", "conv ...", "tactic")
NUMBERS = {"us": 5.0, "low_us": 4.5, "high_us": 6.0, "n": 30, "clock_mhz": 1980, "rel_error": 3e-4}

# Argument 1: {tactic name or "setup" or "start": what goes wrong}; argument 2: a file that gets a line per request.
FAKE_WORKER = """
import json, os, sys, time
how, log = json.loads(sys.argv[1]), open(sys.argv[2], "a", buffering=1)
def act(what):
    if what == "hang": time.sleep(60)
    if what == "crash": os.abort()
    if what == "killed": os.kill(os.getpid(), 9)
    if what == "leave": sys.exit("out of luck")
    if what == "garbage": print("Segmentation fault?", flush=True)
    if what == "list": print("[1, 2]", flush=True)
    if what == "other id": print(json.dumps({"id": -1, "us": []}), flush=True)
print("started", file=log)
act(how.get("start"))
print(json.dumps({"device": how.get("device", "H200 SXM 141GB|sm_90a|132|62914560")}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(line.strip(), file=log)
    answer = {"id": request["id"]}
    if request["op"] == "problem":
        act(how.get("setup"))
        if how.get("setups", 9) <= open(sys.argv[2]).read().count('"op": "problem"') - 1: answer["error"] = "no device"
        if how.get("setup") == "error": answer["error"] = "out of memory"
    else:
        what = how.get(name := request["tactics"][0], 10.0)
        if isinstance(what, str): act(what)
        if what == "slow": time.sleep(0.4); what = 10.0
        if what == "error": answer["error"] = "RuntimeError: wrong: relative error 0.5"
        elif what == "fatal": answer |= {"error": "CUDARuntimeError: misaligned address", "fatal": True}
        elif what == "busy": answer |= {"error": "Overloaded: too busy", "passing": True}
        elif what == "few": answer["us"] = {name: []}
        elif what == "negative": answer["us"] = {name: [-1.0] * request["samples"]}
        else:
            us = [what + 0.01 * i for i in range(request["samples"])]
            answer |= {"us": {name: us}, "mhz": {name: [1755] * len(us)}, "rel_error": {name: 2e-4}, "slow": 0}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    """fake(how, **options) -> a timer whose child plays `how`; fake.log() -> the lines that its children wrote down."""
    script, log = tmp_path / "fake_worker.py", tmp_path / "log"
    script.write_text(FAKE_WORKER)
    log.touch()
    timers = []

    def make(how=None, path=tmp_path / "times.jsonl", **options):
        command = (sys.executable, str(script), json.dumps(how or {}), str(log))
        options = {"driver": "580", "command": command, "compile_first": False, "timeout_s": 20.0} | options
        timers.append(timing.measured(H200, Cache(path), **options))
        return timers[-1]

    make.log = lambda: log.read_text().splitlines()
    make.path = tmp_path / "times.jsonl"
    yield make
    for timer in timers:
        timer.close()


def tactics(count, out=HWC8, kernel="conv_dense"):
    return [Tactic(kernel, Tile(16 * (i + 1), 128, 64, 1, 4, 3), (HWC8,), out) for i in range(count)]


# ---- the cache


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


# ---- the race


def test_every_tactic_gets_a_time_and_a_second_timer_needs_no_child(fake):
    many = tactics(5)
    timer = fake({many[2].name: 40.0})
    times = timer(PROBLEM, many)
    assert set(times) == set(many) and not timer.failures
    assert times[many[2]].us > 40 > times[many[0]].high_us and times[many[0]].low_us <= times[many[0]].us
    lines = [json.loads(line) for line in fake.path.read_text().splitlines()]
    assert all(r["clock_mhz"] == 1755 and r["rel_error"] == 2e-4 and r["policy"] == timing.POLICY for r in lines)
    started = fake.log().count("started")
    assert fake()(PROBLEM, many) == times
    assert fake.log().count("started") == started == 1


def test_those_far_behind_their_cell_stop_early(fake):
    dense, sparse, linear = tactics(3), tactics(2, kernel="conv_sparse24"), tactics(1, out=CHW)
    slow = {dense[1].name: 30.0, dense[2].name: 12.0, sparse[0].name: 50.0, sparse[1].name: 100.0, linear[0].name: 90.0}
    timer = fake(slow)
    timer(PROBLEM, [*dense, *sparse, *linear])
    counts = {t.name: timer.cache.get(timer.key(PROBLEM, t))["n"] for t in [*dense, *sparse, *linear]}
    assert counts[dense[1].name] == counts[sparse[1].name] == ROUNDS[0]
    # The best of the dense cell and of the sparse one; alone in the cell of another output format.
    assert counts[dense[0].name] == counts[sparse[0].name] == counts[linear[0].name] == ROUNDS[-1]
    assert counts[dense[2].name] == ROUNDS[1]  # near the best, but not in doubt


def test_what_is_known_of_a_cell_counts_in_a_resumed_race(fake):
    first, second = tactics(2)
    fake()(PROBLEM, [first])
    timer = fake({second.name: 99.0})
    timer(PROBLEM, [first, second])
    assert timer.cache.get(timer.key(PROBLEM, second))["n"] == ROUNDS[0]


def test_another_driver_measures_again(fake):
    one = tactics(1)
    fake()(PROBLEM, one)
    fake(driver="581")(PROBLEM, one)
    assert len(fake.path.read_text().splitlines()) == 2


def test_another_problem_measures_again(fake):
    one, timer = tactics(1), fake()
    timer(PROBLEM, one)
    timer(replace(PROBLEM, n=2), one)
    assert sum('"problem"' in line and '"op": "problem"' in line for line in fake.log()) == 2
    assert fake.log().count("started") == 1


@pytest.mark.parametrize(
    ("what", "text", "restarts"),
    [
        ("hang", "no answer in 0.5 s: the process hung", True),
        ("crash", "ended with code -6", True),
        ("leave", "out of luck", True),
        ("garbage", "Segmentation fault?", True),
        ("list", "not a JSON answer", True),
        ("other id", "answered another request", True),
        ("few", "without 3 times", True),
        ("negative", "without 3 times", True),
        ("error", "wrong: relative error 0.5", False),
        ("fatal", "misaligned address", True),
    ],
)
def test_a_tactic_that_fails_is_recorded_and_the_rest_goes_on(fake, what, text, restarts):
    many = tactics(4)
    timer = fake({many[1].name: what}, timeout_s=0.5 if what == "hang" else 20.0)
    times = timer(PROBLEM, many)
    assert set(times) == {many[0], many[2], many[3]}
    assert text in timer.failures[str(PROBLEM), many[1].name]
    assert fake.log().count("started") == 1 + restarts
    again = fake()  # the failure stays in the cache and is not tried again
    assert again(PROBLEM, many) == times and text in again.failures[str(PROBLEM), many[1].name]
    assert fake.log().count("started") == 1 + restarts


@pytest.mark.parametrize(("what", "text"), [("busy", "too busy"), ("killed", "code -9, from outside")])
def test_a_failure_that_is_not_the_tactics_is_not_remembered(fake, what, text):
    many = tactics(2)
    timer = fake({many[0].name: what})
    assert set(timer(PROBLEM, many)) == {many[1]} and text in timer.failures[str(PROBLEM), many[0].name]
    assert set(fake()(PROBLEM, many)) == set(many)


def test_what_was_measured_before_a_problem_cannot_be_set_up_again_is_kept(fake):
    many = tactics(4)
    timer = fake({many[0].name: "fatal", "setups": 1})
    times = timer(PROBLEM, many)
    assert times and many[0] not in times and len(times) + len(timer.failures) == len(many)
    assert all("could not be set up" in text for (_, name), text in timer.failures.items() if name != many[0].name)
    assert set(fake()(PROBLEM, many)) == set(many[1:])


def test_a_tactic_that_does_not_compile_is_recorded(fake, monkeypatch):
    def compile_kernel(kernel, values, sm):
        if values["BM"] == 32:
            raise CompileError("conv_dense.cu(7): error: expected a ;")

    monkeypatch.setattr(timing, "compile_kernel", compile_kernel)
    many = tactics(3)
    timer = fake(compile_first=True)
    timer.prepare([(PROBLEM, many)])
    assert set(timer(PROBLEM, many)) == {many[0], many[2]}
    assert "expected a ;" in timer.failures[str(PROBLEM), many[1].name]


@pytest.mark.parametrize("what", ["error", "crash"])
def test_a_problem_that_cannot_be_set_up_fails_without_a_record(fake, what):
    many = tactics(2)
    timer = fake({"setup": what})
    assert timer(PROBLEM, many) == {}
    assert len(timer.failures) == 2 and "could not be set up" in timer.failures[str(PROBLEM), many[0].name]
    assert not fake.path.exists()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"start": "leave"}, "out of luck"),
        ({"start": "garbage"}, "Segmentation fault?"),
        ({"device": "RTX 4090|sm_89|128|1"}, "the current GPU is RTX 4090"),
    ],
)
def test_without_a_working_child_nothing_is_measured(fake, how, text):
    with pytest.raises(ValueError, match="nothing can be measured") as e:
        fake(how)(PROBLEM, tactics(1))
    assert text in str(e.value)


def test_a_child_that_died_between_two_calls_is_replaced(fake):
    timer = fake()
    first, second = tactics(2)
    timer(PROBLEM, [first])
    os.kill(timer._worker._child._process.pid, signal.SIGKILL)
    timer._worker._child._process.wait()
    assert set(timer(PROBLEM, [first, second])) == {first, second} and not timer.failures


BUILD = """
import sys; sys.path.insert(0, {root!r})
from tests.tactics.measure.test_timing import *
timer = timing.measured(H200, Cache({path!r}), driver="580", command={command!r}, compile_first=False)
try:
    for n in range(1, 30):
        timer(replace(PROBLEM, n=n), tactics(3))
except KeyboardInterrupt:
    print("interrupted")
    timer.close()
"""


def build(tmp_path, fake):
    """A process of its own that measures 29 problems of 3 slow tactics each; returned once some are in its cache."""
    command = fake({t.name: "slow" for t in tactics(3)})._worker._command
    code = BUILD.format(root=str(ROOT), path=str(fake.path), command=command)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (fake.path.exists() and fake.path.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_resumes_where_it_stopped(tmp_path, fake, sign):
    """Killed in the middle of a batch of three: what was measured is kept, and only the rest is measured after."""
    process = build(tmp_path, fake)
    process.send_signal(sign)
    out, _ = process.communicate(timeout=30)
    assert out == ("interrupted\n" if sign == signal.SIGINT else "")
    kept = Cache(fake.path)
    assert len(kept) >= 2 and kept.malformed == 0
    before = len(fake.log())
    timer = fake()
    problems = [replace(PROBLEM, n=n) for n in (1, 2)]
    for problem in problems:
        assert set(timer(problem, tactics(3))) == set(tactics(3))
    asked = [json.loads(line) for line in fake.log()[before:] if line.startswith("{")]
    current = None
    for request in asked:
        if request["op"] == "problem":
            current = codec.from_json(request["problem"])
        else:
            assert kept.get(timer.key(current, Tactic.parse(request["tactics"][0]))) is None, "measured twice"


@pytest.mark.slow
def test_the_child_ends_when_its_parent_is_killed(tmp_path, fake):
    """The end of standard input is enough for a child that is not hung."""
    process = build(tmp_path, fake)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate(timeout=10)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{c}").exists() for c in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert children and not any(Path(f"/proc/{c}").exists() for c in children)


# ---- predictions


def test_predictions_have_a_band_and_are_never_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Cache, "add", lambda *_, **__: pytest.fail("a prediction was written"))
    timer = timing.predicted(H200)
    some = candidates(PROBLEM, H200)
    times = timer(PROBLEM, some)
    assert set(times) == set(some) and timer(PROBLEM, some) == times and not timer.failures
    assert all(0 < t.low_us < t.us < t.high_us for t in times.values())
    assert list(tmp_path.iterdir()) == []


# ---- the pieces of the child


def test_quantiles_are_ordered():
    assert timing.quantiles([3.0]) == (3.0, 3.0, 3.0)
    assert timing.quantiles(list(range(1, 12))) == (3, 6, 9)
