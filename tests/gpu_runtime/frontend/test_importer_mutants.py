"""Damaged models and engine files are refused with a sentence or read; nothing else happens (see mutants.py)."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpu_runtime.frontend import importer
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from tests import mutants
from tests.conftest import ROOT
from tests.small_models import small_models

WORKER = (sys.executable, "-m", "tests.mutants")
ONCE, CHUNK = 500, 125  # mutants that `make test` tries, and how many a worker is given at once
MANY, LARGE = 10_000, 500  # the same of `make test-long`


def outcomes(kind: str, first: int, count: int, folder: Path) -> dict[int, tuple[str, str]]:
    """Mutant -> (what was done to it, what came of it). The worker goes on behind a mutant that ended it."""
    found: dict[int, tuple[str, str]] = {}
    while len(found) < count:
        command = [*WORKER, kind, str(first + len(found)), str(count - len(found)), str(folder)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
        lines = [line.partition("\t") for line in run.stdout.splitlines()]
        begun, ended = ([row for row in lines if row[2].startswith('"') is end] for end in (False, True))
        assert begun, f"the worker did not begin: {run.stderr[-2000:]}"
        told = {int(n): text for n, _, text in begun}
        found |= {int(n): (told[int(n)], json.loads(text)) for n, _, text in ended}
        if len(ended) < len(begun):
            found[int(begun[-1][0])] = told[int(begun[-1][0])], f"ended its process ({run.returncode}): {run.stderr[-500:]}"
        elif run.stderr.strip():
            found[first + len(found) - 1] = "all of these", f"printed {run.stderr[-2000:]}"
        if len(ended) == len(begun):
            break
    return found


def check(kind: str, first: int, count: int, folder: Path) -> None:
    found = outcomes(kind, first, count, folder)
    assert len(found) == count
    bad = {n: row for n, row in found.items() if row[1].partition("\t")[0] not in ("fine", "refused")}
    assert not bad, "\n".join(f"{n} ({told}): {came}" for n, (told, came) in bad.items())
    for n, (told, came) in found.items():
        sentence = came.partition("\t")[2]
        assert came.startswith("fine") or len(re.findall(r"\w+", sentence.partition(": ")[2])) >= 4, (n, told, sentence)
        assert "Traceback" not in sentence and " object at 0x" not in sentence, (n, told, sentence)
    kinds = Counter(came.partition("\t")[0] for _, came in found.values())
    print(f"{kind} {first} to {first + count - 1}: {kinds['refused']} refused, {kinds['fine']} built")
    assert kinds["refused"] > count / 3, kinds
    assert kinds["fine"] > count / 40, kinds  # mutations are to reach every stage


def test_small_models_build_as_they_are(tmp_path):
    for i, proto in enumerate(small_models()):
        path = tmp_path / f"{i}.onnx"
        path.write_bytes(proto.SerializeToString())
        assert fuse.fuse(lower.lower(importer.read(path))).ops


def test_mutants_are_the_same_every_time(tmp_path):
    given = [(f"small{i}", m.SerializeToString()) for i, m in enumerate(small_models())]
    one, two = ([mutants.mutate_model(n, given, tmp_path) for n in range(40)] for _ in range(2))
    assert one == two and len({data for _, data in one}) > 35


@pytest.mark.parametrize("kind", ["dies", "hangs"])
def test_a_worker_that_ends_is_noticed(tmp_path, monkeypatch, kind):
    """The harness itself: what kills the worker is reported with its number, and the mutants behind it are still tried."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, signal, sys, time\n"
        "first, count = int(sys.argv[2]), int(sys.argv[3])\n"
        "for n in range(first, first + count):\n"
        "    print(f'{n}\\ttold', flush=True)\n"
        "    signal.alarm(1)\n"
        f"    if n == 2: {'os.abort()' if kind == 'dies' else 'time.sleep(60)'}\n"
        "    print(f'{n}\\t\"fine\\\\t\"', flush=True)\n"
    )
    monkeypatch.setitem(globals(), "WORKER", (sys.executable, str(worker)))
    found = outcomes("models", 0, 5, tmp_path)
    assert [found[n][1].partition("\t")[0] == "fine" for n in range(5)] == [True, True, False, True, True]
    assert "ended its process" in found[2][1]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ONCE, CHUNK))
def test_mutated_models(tmp_path, first):
    check("models", first, CHUNK, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("first", range(ONCE, MANY, LARGE))
def test_many_mutated_models(tmp_path, first):
    check("models", first, LARGE, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ONCE, 2 * CHUNK))
def test_mutated_engines(tmp_path, first):
    check("engines", first, 2 * CHUNK, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("first", range(ONCE, MANY, LARGE))
def test_many_mutated_engines(tmp_path, first):
    check("engines", first, LARGE, tmp_path)
