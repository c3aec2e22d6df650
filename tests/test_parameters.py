"""Functions of the source have few parameters: values that belong together are a record."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANY = 7  # parameters, without self and cls
MOST_FUNCTIONS = 17  # that have so many; only goes down


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
