"""Texts that users read name things: none of the five patterns that hid them occurs in a string of the source."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Each stood in dozens of messages in place of a noun or a plain verb; the cure is the noun.
PATTERNS = {
    "what, in place of a noun": r"\bwhat\b(?! if\b)",
    "that of, those of, of those": r"\b(that|those) of\b|\bof (those|which)\b",
    "is none, are none": r"\b(is|are) none\b",
    "beside, apart": r"\b(beside|apart)\b",
    "told, tells of": r"\btold\b|\btells? of\b",
}

# Each began or hid the subject of dozens of docstrings; the cure is a sentence with the thing itself as its subject or object.
DIALECT = {
    "begins with Of": r"\AOf ",
    "begins with What, That or Those": r"\A(What|That|Those)\b",
    "of what, what it is": r"\b(of|by|for) what\b|\bwhat (it|they|is|are|was|were|the|a|an)\b",
    "alone, before its verb": r"\balone (reads?|gives?|knows?|adds?)\b|\bwhich alone\b",
    "so many, in place of a number": r"\b[Ss]o many\b",
    "an empty text, in place of a number or of ''": r"\ban empty text\b",
    "that of it, that of theirs": r"\bthat of (it|them|theirs)\b",
}


@cache
def texts(path: Path) -> list[tuple[int, str]]:
    """(line, text) of each string of a file that has several words and is no docstring, but for those that --help prints."""
    tree = ast.parse(path.read_text())
    holders = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and not is_command(n))
    docs = {id(n.body[0].value) for n in holders if n.body and isinstance(n.body[0], ast.Expr)}
    strings = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs)
    return [(n.lineno, n.value) for n in strings if " " in n.value.strip()]


def is_command(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("click.command" in ast.unparse(d) for d in node.decorator_list)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_text_hides_what_it_speaks_of(pattern):
    files = [path for folder in ("gpu_runtime", "tactics", "cuda_kernels") for path in (ROOT / folder).rglob("*.py")]
    found = [(path, line, text) for path in files for line, text in texts(path)]
    assert len(found) > 1000
    bad = [f"{path.relative_to(ROOT)}:{line}: {text}" for path, line, text in found if re.search(PATTERNS[pattern], text)]
    assert not bad, "\n".join(bad)


def test_the_patterns_match_what_they_are_for():
    hidden = ["names what it lacks", "is that of the file", "there is none", "stands beside it", "is told that"]
    assert [bool(re.search(p, text)) for p, text in zip(PATTERNS.values(), hidden, strict=True)] == [True] * 5
    assert not re.search(PATTERNS["what, in place of a noun"], "what if conv1 ran sparse")


@cache
def docstrings() -> list[tuple[str, str]]:
    """Returns (file: name, docstring) of every module, class and function that has one, outside of test files."""
    folders = ("gpu_runtime", "tactics", "cuda_kernels", "benchmarks", "tests")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py") if not p.name.startswith("test_")]
    holders = [
        (f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", ast.get_docstring(node) or "")
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    ]
    return [(name, text) for name, text in holders if text]


@pytest.mark.parametrize("pattern", DIALECT)
def test_no_docstring_hides_its_subject(pattern):
    assert len(docstrings()) > 2500
    bad = [f"{name}: {text.splitlines()[0]}" for name, text in docstrings() if re.search(DIALECT[pattern], text)]
    assert not bad, "\n".join(bad)


def test_the_patterns_of_docstrings_match_what_they_are_for():
    hidden = ["Of a pool", "What is said", "made of what it is", "the op that alone reads it", "for so many rows"]
    hidden += ["else an empty text", "or that of it"]
    assert [bool(re.search(p, text)) for p, text in zip(DIALECT.values(), hidden, strict=True)] == [True] * 7
