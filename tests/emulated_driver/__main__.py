"""Run a command on the emulated driver: `python -m tests.emulated_driver [--order eager] [--device a100] COMMAND...`"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from cuda_kernels.compile import CompileError
from cuda_kernels.emulator.build import BuildError
from tests.emulated_driver.build import environment
from tests.emulated_driver.settings import ORDERS, Settings, device_names, from_json


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.emulated_driver", description=__doc__.partition(":")[0] + ".")
    parser.add_argument("--order", choices=ORDERS, help="run queued work as late as CUDA allows (default), or at once")
    parser.add_argument("--device", help=f"one name or several with commas: {', '.join(device_names())} (default h200)")
    parser.add_argument("--seed", type=int, help="of the clock's noise")
    parser.add_argument("--settings", help="a JSON file, or JSON: faults, noise and the rest; see README.md")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, for instance: python -m pytest -m gpu")
    given = parser.parse_args()
    given.command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not given.command:
        parser.error("expected a command to run")
    return given


def settings(given: argparse.Namespace) -> Settings:
    text = given.settings or "{}"
    made = from_json(text if text.lstrip().startswith("{") else Path(text).read_text())
    changes: dict = {} if given.order is None else {"order": given.order}
    changes |= {} if given.seed is None else {"seed": given.seed}
    changes |= {} if given.device is None else {"devices": tuple(given.device.split(","))}
    return replace(made, **changes)


def main() -> None:
    given = arguments()
    try:
        env = environment(settings(given))
        program = shutil.which(given.command[0], path=env["PATH"])
        if program is None:
            raise ValueError(f"{given.command[0]}: no such command")
        os.execve(program, given.command, env)
    except (BuildError, CompileError, ValueError, TypeError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
