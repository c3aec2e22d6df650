"""`python -m tests.size`: lines of source by folder, and whether they are within the budget that pyproject.toml states.

The budget only goes down, or up in a commit that says why.
"""

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("gpu_runtime", "tactics", "cuda_kernels")
SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".js", ".css", ".html"}


def lines_by_folder() -> Counter[str]:
    """Lines of every source file that is committed or new, by folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: Counter[str] = Counter()
    for name in set(listed.stdout.splitlines()):  # a file with a merge conflict is listed several times
        path = ROOT / name
        if path.suffix in SUFFIXES and path.exists():
            found[str(Path(name).parent)] += len(path.read_text().splitlines())
    return found


def budget() -> int:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]["lines"]


def main() -> int:
    found = lines_by_folder()
    for folder, lines in sorted(found.items()):
        print(f"{lines:7,} {folder}")
    total, most = found.total(), budget()
    print(f"{total:7,} in all, at most {most:,} ([tool.size] of pyproject.toml)")
    return int(total > most)


if __name__ == "__main__":
    sys.exit(main())
