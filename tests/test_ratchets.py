"""Counts that only go down: functions with many parameters, imports inside of functions, files that name a composite problem.

Values that belong together are a record. An import stands at the top of its file unless it keeps a heavy package or module out
of programs that do not need it (tests/package/test_startup.py).
"""

import ast
import re
from pathlib import Path

import pytest

from tactics.kernels import KERNELS

ROOT = Path(__file__).parents[1]
MANY = 7  # parameters, without self and cls
MOST_FUNCTIONS = 12  # with that many
MOST_LATE_IMPORTS = 75  # (file, function, module), of cuda_kernels, tactics and gpu_runtime
MOST_NAMING = 5  # product files that name one composite problem
COMPOSITES = sorted({kind.__name__ for kernel in KERNELS.values() for kind in kernel.problems if kind.PARTS})


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    of = function.args
    return sum(a.arg not in ("self", "cls") for a in (*of.posonlyargs, *of.args, *of.kwonlyargs))


def with_many(text: str) -> list[str]:
    defined = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [n.name for n in defined if parameters(n) >= MANY]


def test_self_is_no_parameter_and_keywords_are():
    six = "def f(self, a, /, b, c, *d, e, f, g, **h): ..."
    assert with_many(six) == [] and with_many(six.replace("*d", "*d, i")) == ["f"]


def test_few_functions_have_many_parameters():
    packages = (ROOT / name for name in ("cuda_kernels", "tactics", "gpu_runtime", "benchmarks"))
    paths = sorted(path for package in packages for path in package.rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}: {name}" for path in paths for name in with_many(path.read_text())]
    assert len(paths) > 300 and len(found) <= MOST_FUNCTIONS, f"{len(found)}: {found}"


def late_imports(text: str) -> set[tuple[str, str]]:
    """(function, module) of each import inside of a function."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [(f.name, n) for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(name, n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name) for name, n in found}


def test_imports_at_the_top_do_not_count():
    assert late_imports("import a\ndef f():\n    from b import c\n    import d.e") == {("f", "b"), ("f", "d.e")}


def test_few_imports_stand_inside_of_functions():
    paths = sorted(path for name in ("cuda_kernels", "tactics", "gpu_runtime") for path in (ROOT / name).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}: {name} {module}" for path in paths for name, module in late_imports(path.read_text())]
    assert len(found) <= MOST_LATE_IMPORTS, f"{len(found)}: {found}"


@pytest.mark.parametrize("name", COMPOSITES)
def test_few_files_name_a_composite_problem(name):
    """The others take a composite's parts."""
    paths = (path for folder in ("cuda_kernels", "tactics", "gpu_runtime") for path in (ROOT / folder).rglob("*.py"))
    found = sorted(str(path.relative_to(ROOT)) for path in paths if re.search(rf"\b{name}\b", path.read_text()))
    assert 0 < len(found) <= MOST_NAMING, found
