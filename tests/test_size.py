"""The count of code, and raises of its limits."""

import subprocess

import pytest

from tests import size
from tests.size import code_lines, raises

LOG = """\0abc1234
A kernel more

Budget: sums in clusters, +12 lines

diff --git a/pyproject.toml b/pyproject.toml
@@ -90,2 +90,2 @@
-cuda_kernels = 1_000
-tactics = 500
+cuda_kernels = 1_012
+tactics = 490
\0def5678
Another

diff --git a/pyproject.toml b/pyproject.toml
@@ -91 +91 @@
-tactics = 490
+tactics = 495
"""


@pytest.mark.parametrize(
    "text,suffix,lines",
    [
        ('"""Says\nwhat it is."""\n\nx = 1  # one\n# comment\ndef f():\n    """Doc."""\n    return """a\nb"""\n', ".py", 4),
        ("int a; // one\n// two\n\n/* three\n four */ int b;\n", ".cu", 2),
        ('const url = "https://example.org";\n', ".js", 1),
        ("<!-- a\nb -->\n<p>\n", ".html", 1),
    ],
)
def test_comments_docstrings_and_blank_lines_are_free(text, suffix, lines):
    assert code_lines(text, suffix) == lines


def test_a_raise_is_found_with_the_line_that_allows_it():
    first, second = raises(LOG)
    assert (first.commit, first.folder, first.before, first.after) == ("abc1234", "cuda_kernels", 1000, 1012)
    assert first.budget == "Budget: sums in clusters, +12 lines"
    assert (second.commit, second.folder, second.budget) == ("def5678", "tactics", "")


@pytest.mark.parametrize("merged,budget", [(115, "Budget: other, +10 lines"), (116, "")])
def test_a_merge_raises_by_its_branch_and_no_more(merged, budget, tmp_path, monkeypatch):
    """Two branches raise limits; the merge has no line of its own, and the sum or one line more."""

    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path, check=True, capture_output=True
        )

    def commit(lines: int, *words: str) -> None:
        (tmp_path / "pyproject.toml").write_text(f"[tool.size]\ntactics = {lines}\n")
        git("commit", "-qa", "-m", *words)

    git("init", "-qb", "main")
    (tmp_path / "pyproject.toml").touch()
    git("add", ".")
    commit(100, "first")
    git("checkout", "-qb", "other")
    commit(110, "ten more\n\nBudget: other, +10 lines")
    git("checkout", "-q", "main")
    commit(105, "five more\n\nBudget: main, +5 lines")
    git("merge", "-q", "-s", "ours", "--no-commit", "other")
    commit(merged, "both")
    monkeypatch.setattr(size, "ROOT", tmp_path)
    main = (100, 105, "Budget: main, +5 lines")
    assert [(r.before, r.after, r.budget) for r in size.history()] == [(105, merged, budget), main]


@pytest.mark.skipif(not (size.ROOT / ".git").exists(), reason="not a clone: no history")
def test_every_raise_of_this_history_is_allowed():
    assert [r for r in size.history() if not r.budget] == []
