"""Timers whose children follow a script."""

import json
import sys

import pytest

from tactics.measure import timing
from tactics.measure.cache import Cache
from tests.tactics.measure.scripted import FAKE_WORKER, H200


@pytest.fixture
def fake(tmp_path):
    """Returns a function: fake(how, **options) -> a timer whose child plays `how`; fake.log() -> the lines that its children
    wrote.
    """
    script, log = tmp_path / "fake_worker.py", tmp_path / "log"
    script.write_text(FAKE_WORKER)
    log.touch()
    timers = []

    def make(how=None, path=tmp_path / "times.jsonl", **options):
        command = (sys.executable, str(script), json.dumps(how or {}), str(log))
        options = {"driver": "580", "command": command, "compile_first": False, "timeout_s": 20.0} | options
        timers.append(timing.Measured(H200, Cache(path), **options))
        return timers[-1]

    make.log = lambda: log.read_text().splitlines()
    make.path = tmp_path / "times.jsonl"
    yield make
    for timer in timers:
        timer.close()
