"""`python -m tests.size [--history]`: lines of code by folder, and whether each top folder is within its limit.

Comments, docstrings and blank lines do not count. [tool.size] of pyproject.toml has the limits. A limit may be lowered at any
time, and raised in a commit whose body has a line `Budget: ALLOWANCE, +N lines`; --history prints each raise, and exits with 1
if one has no such line.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMENTS = re.compile(r"/\*.*?\*/|(?<![:\"'])//[^\n]*|<!--.*?-->", re.DOTALL)  # of C++, CUDA, JavaScript, CSS, HTML
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".js", ".css", ".html"}
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
LIMIT = re.compile(r"([-+])([a-z_]+) = ([\d_]+)")


def code_lines(text: str, suffix: str) -> int:
    r"""Returns the number of lines that hold code.

    >>> code_lines('"Docstring."\n\n# Comment.\nx = (1,\n  2)\n', ".py"), code_lines("/*\n b */ int c;\n// d\n", ".cu")
    (2, 1)
    """
    if suffix != ".py":
        return sum(bool(line.strip()) for line in COMMENTS.sub("", text).splitlines())
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def lines_by_folder(packages: tuple[str, ...]) -> Counter[str]:
    """Returns folder -> lines of code of its source files, committed or new."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *packages]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: Counter[str] = Counter()
    for name in set(listed.stdout.splitlines()):  # a file with a merge conflict is listed several times
        path = ROOT / name
        if path.suffix in SUFFIXES and path.exists():
            found[str(Path(name).parent)] += code_lines(path.read_text(), path.suffix)
    return found


def limits() -> dict[str, int]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]


@dataclass(frozen=True, slots=True)
class Raise:
    """A commit that raised the limit of a top folder; `budget`: the line of its body that allows it, "" if there is none."""

    commit: str
    folder: str
    before: int
    after: int
    budget: str


def raises(log: str) -> Iterator[Raise]:
    """Yields each raise of a limit. `log`: git's log, for each commit a line of NUL and its hash, its body, and its diff of
    pyproject.toml without context.
    """
    for part in log.split("\0")[1:]:
        commit, _, rest = part.partition("\n")
        body, _, change = rest.partition("\ndiff --git ")
        budget = next((line for line in body.splitlines() if line.startswith("Budget: ")), "")
        rows = LIMIT.findall(change)
        before, after = ({name: int(n) for sign, name, n in rows if sign == which} for which in "-+")
        for folder in limits():
            if folder in before and folder in after and after[folder] > before[folder]:
                yield Raise(commit, folder, before[folder], after[folder], budget)


def history(commits: str = "HEAD") -> list[Raise]:
    """Returns the raises by the commits of this branch; a merge counts as one commit with all of its changes.

    A merge without a line of its own takes that of the raises on the branch that it merges, if these sum to its raise.
    """
    command = ["git", "log", "--first-parent", "-m", "-p", "-U0", "--format=%x00%h%n%B", commits, "--", "pyproject.toml"]
    found = list(raises(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout))
    return [r if r.budget else replace(r, budget=_merged_budget(r)) for r in found]


def _merged_budget(merge: Raise) -> str:
    """Returns the line `Budget: ` of the branch behind a merge's second parent, "" if its raises do not reach the merge's."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{merge.commit}^2"]
    if subprocess.run(command, cwd=ROOT, capture_output=True).returncode:
        return ""
    merged = [r for r in history(f"{merge.commit}^1..{merge.commit}^2") if r.folder == merge.folder and r.budget]
    return merged[0].budget if sum(r.after - r.before for r in merged) >= merge.after - merge.before else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--history", action="store_true", help="print each raise of a limit, with what allowed it")
    if parser.parse_args().history:
        found = history()
        for r in found:
            print(f"{r.commit} {r.folder:12} {r.before:7,} to {r.after:7,}  {r.budget or 'no line `Budget: ` in its body'}")
        return int(not all(r.budget for r in found))
    most = limits()
    found_lines = lines_by_folder(tuple(most))
    for folder, lines in sorted(found_lines.items()):
        print(f"{lines:7,} {folder}")
    totals = {name: sum(n for folder, n in found_lines.items() if folder.split("/")[0] == name) for name in most}
    for name, total in totals.items():
        print(f"{total:7,} in all of {name}, at most {most[name]:,} ([tool.size] of pyproject.toml)")
    return int(any(total > most[name] for name, total in totals.items()))


if __name__ == "__main__":
    sys.exit(main())
