"""`python -m tests.where gpu_runtime/planning/tables.py ...`: the test files of a module, by their names and imports.

A test file is named after its module, in the folder of tests that mirrors the module's: test_tables.py, or with its subject
test_tables_of_pieces.py. Other test files import the module. Test files in FOLDERS test several modules together, as the
folder's name says; those in `tests` itself test the source tree.

Without arguments it prints how many modules have a test file of their name, the test files named after no module, and the
modules that no test imports.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("cuda_kernels", "tactics", "gpu_runtime", "benchmarks")
FOLDERS = ("networks", "package", "driver", "independent", "servers", "cuda_kernels/emulator")  # each judges a whole
SOURCES = (".cu", ".cuh", ".cpp", ".h")


@cache
def imported(path: Path) -> frozenset[str]:
    """Returns the dotted names of all modules that a file imports, and of all names that it imports from modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def own(module: Path) -> list[Path]:
    """Returns the test files named after a module, the one without a subject first. `module`: its path from the root."""
    folder = ROOT / "tests" / module.parent
    return [*folder.glob(f"test_{module.stem}.py"), *sorted(folder.glob(f"test_{module.stem}_*.py"))]


def unnamed() -> list[Path]:
    """Returns the test files in mirrored folders that are not named after a module."""
    kernels = (p.relative_to(ROOT) for p in (ROOT / "cuda_kernels").rglob("*") if p.suffix in SOURCES)
    named = {path for module in (*modules(), *kernels) for path in own(module)}
    folders = [ROOT / "tests" / folder for folder in FOLDERS]
    mirrored = (path for path in test_files() if not any(path.is_relative_to(folder) for folder in folders))
    return [path for path in mirrored if path not in named and path.parent != ROOT / "tests"]


def importing(module: Path) -> Iterator[Path]:
    name = ".".join(module.with_suffix("").parts)
    return (path for path in test_files() if name in imported(path))


def tests_of(module: Path) -> list[Path]:
    """Returns the module's own test files, then the test files that import it."""
    mine = own(module)
    return [*mine, *(path for path in importing(module) if path not in mine)]


def modules() -> list[Path]:
    found = (p.relative_to(ROOT) for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    return sorted(p for p in found if p.name != "__init__.py")


def main(names: list[str]) -> int:
    if not names:
        everything = modules()
        print(f"{sum(bool(own(m)) for m in everything)} of {len(everything)} modules have a test file of their name")
        print("\n".join(f"{path.relative_to(ROOT)}: named after no module" for path in unnamed()))
        for module in everything:
            if not tests_of(module):
                print(f"{module}: no test file imports it")
        return 0
    known = modules()
    for name in names:
        module = Path(name)
        if module not in known:
            raise SystemExit(f"{name}: expected a module below {', '.join(PACKAGES)}, as gpu_runtime/planning/tables.py")
        found = tests_of(module)
        print("\n".join(str(path.relative_to(ROOT)) for path in found) or f"{name}: no test file imports it")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
