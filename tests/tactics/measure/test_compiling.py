"""Kernels compiled beside the measuring: nobody waits before a tactic is asked for, and errors wait for that too."""

import threading
import time

import pytest

from cuda_kernels.compile import CompileError
from tactics.measure import compiling
from tactics.measure.compiling import Compiling
from tests.tactics.measure.scripted import PROBLEM, tactics

ITEMS = [("a", (("BM", m),)) for m in (16, 32, 48)]


@pytest.fixture
def gate(monkeypatch):
    """What compiles waits for it. `gate.done`: what was compiled; the one of BM 32 does not compile."""
    event = threading.Event()
    event.done = []

    def compile_kernel(kernel, values, sm):
        assert event.wait(20)
        event.done.append(values["BM"])
        if values["BM"] == 32:
            raise CompileError("expected a ;")

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    monkeypatch.setattr(compiling, "is_kept", lambda *_: False)
    yield event
    event.set()


def test_to_begin_is_not_to_wait(gate):
    work = Compiling("sm_90a", None)
    work.begin(ITEMS)
    work.begin(ITEMS)
    assert gate.done == []
    gate.set()
    assert [work.log([item]) for item in ITEMS] == ["", "expected a ;", ""]
    assert work.log(ITEMS) == "expected a ;" and sorted(gate.done) == [16, 32, 48]
    work.close()


def test_who_waits_is_told_how_many_are_compiled(gate):
    told = []
    work = Compiling("sm_90a", lambda *at: told.append(at))
    work.begin(ITEMS)
    assert told == []
    threading.Timer(0.2, gate.set).start()
    work.log(ITEMS[:1])
    assert told[0] == (0, 3)
    work.close()


def test_what_was_given_up_is_compiled_when_it_is_asked_for_again(gate, monkeypatch):
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 2)
    work = Compiling("sm_90a", None)
    work.begin(ITEMS)
    work.close()
    gate.set()
    assert [work.log([item]) for item in ITEMS] == ["", "expected a ;", ""]
    work.close()


def test_a_timer_prepares_beside_its_measuring(gate, fake):
    """Times of compiled kernels come while others are still compiled."""
    first, second = tactics(2)
    timer = fake(compile_first=True)
    begun = time.monotonic()
    timer.prepare([(PROBLEM, [first]), (PROBLEM, [second])])
    assert time.monotonic() - begun < 5 and gate.done == [] and not fake.log()
    gate.set()
    assert set(timer(PROBLEM, [first])) == {first}
    assert timer(PROBLEM, [second]) == {} and "expected a ;" in timer.failures[str(PROBLEM), second.name]
