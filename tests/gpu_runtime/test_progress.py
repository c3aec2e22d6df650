"""What is shown while something long goes on: nothing in the first second, then never nothing for five."""

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels import compile as compiling
from cuda_kernels.emulator import build
from gpu_runtime import cli as command_line
from gpu_runtime.commands import console, progress
from gpu_runtime.commands.progress import ProgressLine
from gpu_runtime.progress import Progress
from tests.conftest import ROOT
from tests.reference_run import model, node


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """What a terminal of 60 columns shows of what is written: its last line."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError

    @property
    def line(self) -> str:
        shown = ""
        for part in self.getvalue().replace("層", "層\0").split("\r"):  # which takes two columns
            shown = part + shown[len(part) :]
        return shown.rstrip()


def test_the_emulator_that_is_compiled_is_a_stage_and_no_line_of_the_log(capsys, caplog):
    clock, out = Clock(), io.StringIO()
    with ProgressLine(clock=clock, stream=out) as line:
        line(Progress("load", "net.engine"))
        build.LOG.warning("compiling")
        watched(line, clock, 1.2)
        line(Progress("run", "net.engine"))
        watched(line, clock, 4.2)
    assert out.getvalue() == "[1 s] compiling the emulator, which is done once, for this CPU\n[5 s] running net.engine\n"
    assert not caplog.records and capsys.readouterr().err == ""
    build.LOG.warning("compiling")
    assert len(caplog.records) == 1


def watched(line: ProgressLine, clock: Clock, seconds: float) -> None:
    """Ticks as the thread does."""
    for _ in range(round(seconds / progress.TICK_S)):
        clock.now += progress.TICK_S
        line.tick()


def test_nothing_is_shown_where_quiet_was_asked(monkeypatch):
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        line = ProgressLine(clock=clock, stream=stream)
        monkeypatch.setattr(console, "QUIET", threading.Event())
        console.QUIET.set()
        watched(line, clock, 10)
        assert stream.getvalue() == ""


def test_lines_where_there_is_no_terminal():
    clock, out = Clock(), io.StringIO()
    line = ProgressLine(clock=clock, stream=out)
    watched(line, clock, 0.8)
    assert out.getvalue() == ""
    line(Progress("import", "net\x1b[31m.onnx"))
    watched(line, clock, 10)
    for done in range(40):
        line(Progress("time", f"layer{done}", done, 40))
        watched(line, clock, 0.5)
    line(Progress("plan", "net"))
    watched(line, clock, 100)
    lines = out.getvalue().splitlines()
    assert lines[0] == "[1 s] reading net\\x1b[31m.onnx"
    assert re.fullmatch(r"\[13 s\] times of layers: 5 of 40, about 1[4-6] s left: layer5", lines[3])
    assert lines[-1].startswith("[2 min ") and lines[-1].endswith("] choosing the plan of net")


def test_it_is_never_silent_for_five_seconds(monkeypatch):
    """Whatever stage is slow, and however few words it has for that."""
    clock, said = Clock(), []
    line = ProgressLine(clock=clock, stream=io.StringIO())
    monkeypatch.setattr(line, "_write", lambda text: said.append(clock.now))
    for event in (Progress("import", "a"), Progress("time", "b", 0, 3), Progress("time", "c", 1, 3), Progress("other")):
        line(event)
        watched(line, clock, 23)
    gaps = [b - a for a, b in zip([100, *said], [*said, clock.now], strict=True)]
    assert max(gaps) < 5 and len(said) < 30


def test_one_line_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "WIDTH", 60)
    clock, out = Clock(), Terminal()
    line = ProgressLine(clock=clock, stream=out)
    line(Progress("time", "a", 0, 9))
    watched(line, clock, 0.8)
    assert out.getvalue() == ""
    for done, name in enumerate(("first", "x" * 200, "層" * 100, "é")):
        line(Progress("time", name, done, 9))
        watched(line, clock, 2)
        assert len(out.line) < 60 and out.line.startswith(f"[{2 * done + 3} s] times of layers: {done} of 9")
    assert re.fullmatch(r"\[9 s\] times of layers: 3 of 9, about 1[5-8] s left: é", out.line)
    assert "\n" not in out.getvalue() and "\x1b" not in out.getvalue()
    line.clear()
    assert out.line == ""
    watched(line, clock, 1)
    assert out.line.startswith("[10 s] times")


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    clock, out = Clock(), Terminal()
    line = ProgressLine(clock=clock, stream=out)
    watched(line, clock, 3)
    assert ("\n" in out.getvalue()) == (term == "dumb")


def test_kernels_are_announced_with_their_number_and_what_was_done_before_goes_on():
    clock, out = Clock(), io.StringIO()
    line = ProgressLine(clock=clock, stream=out)
    line(Progress("time", "conv1", 5, 10))
    for done in range(12):
        line(Progress("compile", "", done, 12))
        watched(line, clock, 1)
    line(Progress("compile", "", 12, 12))
    watched(line, clock, 5)
    lines = out.getvalue().splitlines()
    assert lines[0] == "[1 s] compiling kernels, which is done once: 0 of 12"
    assert re.fullmatch(r"\[5 s\] compiling kernels, which is done once: 4 of 12, about ([89]|10) s left", lines[1])
    assert lines[-1].startswith("[17 s] times of layers: 5 of 10, about 17 s left: conv1")


def test_only_kernels_that_no_cache_holds_are_counted(monkeypatch):
    told = []
    monkeypatch.setattr(compiling, "compile_kernel", lambda kernel, values, sm: kernel)
    monkeypatch.setattr(compiling, "is_kept", lambda kernel, values, sm: kernel < "c")
    requests = [(name, {}, "sm_80") for name in "abcde"]
    assert compiling.compile_many(requests, progress=lambda *at: told.append(at)) == list("abcde")
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert compiling.compile_many(requests[:2], progress=lambda *at: told.append(at)) == ["a", "b"] and len(told) == 4
    assert compiling.compile_many(requests) == list("abcde")


def test_what_is_said_meanwhile_stands_on_a_line_of_its_own(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    clock, out = Clock(), Terminal()
    with ProgressLine(clock=clock, stream=out) as line:
        clock.now += 2
        line.tick()
        assert out.line == "[2 s] starting"
        with console.OUTPUT:  # the thread draws nothing in between
            console.say("hello")
            assert out.line == "" and capsys.readouterr().out == "hello\n"
    assert out.line == "" and console.DRAWN == []


def test_a_closed_pipe_stops_it():
    out = io.StringIO()
    clock = Clock()
    with ProgressLine(clock=clock, stream=out) as line:
        out.close()
        clock.now += 9
        line.tick()
        line(Progress("plan"))


def test_a_build_with_a_slow_stage_tells_of_it(files, capsys, monkeypatch):
    """The real thread beside real work, everything 20 times as fast."""
    from gpu_runtime.planning import tables

    timed = tables._timed
    for name in ("FIRST_S", "BETWEEN_S", "TICK_S"):
        monkeypatch.setattr(progress, name, getattr(progress, name) / 20)
    monkeypatch.setattr(tables, "_timed", lambda *args: (time.sleep(0.4), timed(*args))[1])
    monkeypatch.chdir(files)
    command_line.main(["build", "tiny.onnx", "-o", "new.engine", "--device", "h200"])
    out, err = capsys.readouterr()
    assert re.search(r"^\[\d+ s\] times of layers: 1 of \d+(, about \d+ s left)?: second", err, re.M), err
    assert "times of layers" not in out and all(re.match(r"\[\d+ s\] ", line) for line in err.splitlines())


SLOW = """
import sys, time
from gpu_runtime import cli
from gpu_runtime.planning import tables
tables._timed = lambda *args: time.sleep(60)
cli.main(sys.argv[1:])
"""


def own_terminal() -> None:
    """Of a process whose stdin is a terminal: it gets that terminal's signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_control_c_leaves_the_terminal_clean(files):
    """In a real terminal, which shows ^C and sends the signal."""
    ours, theirs = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-c", SLOW, "build", "tiny.onnx", "-o", "new.engine", "--device", "h200"]
    with subprocess.Popen(
        line,
        cwd=files,
        env=env,
        stdout=subprocess.DEVNULL,
        stdin=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=own_terminal,
    ) as process:
        os.close(theirs)
        seen = b""
        while b"times of layers: 0 of" not in seen:
            seen += os.read(ours, 1000)
        os.write(ours, b"\x03")
        with contextlib.suppress(OSError):  # how a terminal ends
            while more := os.read(ours, 1000):
                seen += more
    os.close(ours)
    terminal = Terminal()
    terminal.write(seen.decode().partition("interrupted")[0])
    assert terminal.line == "" and "\x1b" not in seen.decode() and process.returncode == 130
    assert seen.decode().count("\n") == 2 and seen.decode().rstrip().endswith("nothing was written or overwritten")


class Told(list):
    def __call__(self, progress: Progress) -> None:
        self.append(progress)


@pytest.mark.parametrize("last", ["tune", "network"])
def test_the_first_interrupt_ends_the_timing_and_the_second_the_command(capsys, last):
    with progress.Interrupts(Told(), lambda: False) as told:
        for stage in ("import", "time", "tune", "compile", last):
            told(Progress(stage))
        assert not told.ended()
        signal.raise_signal(signal.SIGINT)
        assert told.ended() and "the best plan with the times so far is taken" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stages", [["import"], ["time"], ["tune", "explain"], ["tune", "plan", "pack"]])
def test_an_interrupt_that_meets_no_timing_ends_the_command(stages):
    with progress.Interrupts(Told(), lambda: False) as told:
        for stage in stages:
            told(Progress(stage))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_most_that_may_be_done_and_what_is_expected():
    clock, stream = Clock(), Terminal()
    line = ProgressLine(clock=clock, stream=stream)
    line(Progress("tune", "", 0, 8236, 824))
    clock.now += 20
    line(Progress("tune", "", 412, 8236, 824))
    line.tick()
    assert "timing tactics: 412 of at most 8,236, about 20 s left" in stream.getvalue()


def test_a_warning_points_at_the_line_that_called():
    """However deep in the package it arises, of a build and of a run."""
    proto = model([node("Relu", "x", "y")], {"x": (1, 8, 4, 4)}, "y", {})
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    with pytest.warns(UserWarning, match="is dynamic and set to 1") as built:
        engine = gr.build(proto)
    with engine.context(device="emulator") as ctx, pytest.warns(RuntimeWarning, match="holds infinity") as ran:
        ctx.run({"x": np.full((1, 8, 4, 4), np.inf, np.float32)})
    assert {found.filename for found in (*built, *ran)} == {__file__}
