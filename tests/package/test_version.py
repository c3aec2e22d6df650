"""--version, help and shell completion, of both programs."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

import gpu_runtime as gr
from gpu_runtime import cli as command_line
from tests.conftest import ROOT

START = {"gpu-runtime": "main", "build-engine": "build_engine"}


def program(name: str, *args: str, **variables: str) -> subprocess.CompletedProcess:
    """The installed script of that name, without its installation."""
    code = f"import sys; sys.argv[0] = {name!r}; from gpu_runtime.cli import {START[name]}; {START[name]}()"
    env = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "args", [("gpu-runtime", "--version"), ("gpu-runtime", "build", "--version"), ("build-engine", "--version")]
)
def test_version(args):
    done = program(*args)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{args[0]} {gr.installed_version()}\n", "")


def test_it_is_that_of_the_installation(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", lambda name: {"gpu-runtime": "1.2.3"}[name])
    assert gr.installed_version() == "1.2.3"
    monkeypatch.setattr(metadata, "version", absent)
    assert gr.installed_version() == "uninstalled"


def test_build_engine_has_the_help_and_errors_of_its_own_name(monkeypatch, capsys):
    done = program("build-engine", "-h")
    assert done.returncode == 0 and done.stdout.startswith("Usage: build-engine [OPTIONS] [MODEL]\n")
    monkeypatch.setattr(sys, "argv", ["build-engine", "--plugins=x"])
    with pytest.raises(SystemExit) as e:
        command_line.build_engine()
    assert e.value.code == 2 and capsys.readouterr().err.startswith("Usage: build-engine [OPTIONS] [MODEL]\n")


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("gpu-runtime", "gpu-runtime ins", {"plain,inspect", "plain,inspect-sparsity"}),
        ("build-engine", "build-engine --spar", {"plain,--sparsity"}),
        ("gpu-runtime", "gpu-runtime build --sparsity en", {"plain,enable"}),
        ("build-engine", "build-engine --loadE", {"plain,--loadEngine"}),
        ("build-engine", "build-engine --plug", set()),
    ],
)
def test_shell_completion(name, line, expected):
    """As bash asks for it; what trtexec has and this has not is not offered."""
    variable = f"_{name.replace('-', '_').upper()}_COMPLETE"
    done = program(name, **{variable: "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)})
    assert set(done.stdout.split()) == expected, done.stderr
    script = program(name, **{variable: "bash_source"})
    assert script.returncode == 0 and f"complete -o nosort -F _{name.replace('-', '_')}_completion {name}" in script.stdout
