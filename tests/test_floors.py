"""The reading order of the code is also its import order: a module imports only modules named earlier in the list.

Imports inside functions go down, too.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from cuda_kernels.compile import source_path, sources

ROOT = Path(__file__).parents[1]


def reading_order() -> list[str]:
    """Dotted names in the order of floors.txt: a folder, then its modules; "*" are all of a folder."""
    return [f"{folder}/{name}".replace("/", ".") for folder, *names in ROWS for name in names]


ROWS = [line.split() for line in (ROOT / "tests" / "floors.txt").read_text().splitlines()]
ORDER = reading_order()
# Models are read and written there.
ONNX = ("gpu_runtime.frontend.", "gpu_runtime.accuracy.", "gpu_runtime.pruning.", "gpu_runtime.ops.graph")
MOST_FILES = 16  # of Python in one folder


def modules() -> dict[str, Path]:
    found = {}
    for package in ("cuda_kernels", "tactics", "gpu_runtime"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            if not name.endswith("__init__"):
                found[name] = path
    return found


def floor(module: str) -> int:
    for i, name in enumerate(ORDER):
        if module == name or (name.endswith(".*") and module.startswith(name[:-1])):
            return i
    raise AssertionError(f"{module} stands on no floor: add it to tests/floors.txt")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write absolute imports"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("kernel", sorted(p.stem for p in (ROOT / "cuda_kernels").glob("*.cu")))
def test_every_kernel_waits_for_the_launch_ahead(kernel):
    """Launches may begin before the one ahead has ended; a kernel that does not wait would read what is not yet there."""
    text = "".join(path.read_text() for path in sources(source_path(kernel)) if path.name != "ptx.cuh")
    assert "  wait_for_previous_launch();" in text and "  release_next_launch();" in text


def test_a_folder_is_one_floor():
    """So no two folders import each other. Modules of the two packages' roots are read by themselves."""
    folders = [folder for folder, *_ in ROWS if folder not in ("gpu_runtime", "tactics")]
    assert len(folders) == len(set(folders)), [folder for folder in set(folders) if folders.count(folder) > 1]


def test_every_module_is_on_a_floor():
    names = modules()
    for name in names:
        floor(name)
    for name in ORDER:
        assert name.endswith(".*") or name in names, f"{name} is in ORDER, but there is no such file"


@pytest.mark.slow
def test_imports_go_down():
    names = modules()
    for name, path in names.items():
        for other in imports(path) & set(names):
            assert floor(other) <= floor(name), f"{name} imports {other}, a later floor"


def test_running_an_engine_does_not_explain_it():
    """Also inside functions: explain reads what runtime defines, and nothing there reads explain."""
    for name, path in modules().items():
        if name.startswith("gpu_runtime.runtime."):
            assert not {i for i in imports(path) if i.startswith("gpu_runtime.explain")}, name


@pytest.mark.slow
def test_only_what_reads_and_writes_models_sees_onnx():
    for name, path in modules().items():
        if name.startswith(ONNX):
            continue
        seen = {i for i in imports(path) if i.split(".")[0] in ("onnx", "onnx_ir", "onnxscript")}
        assert not seen, f"{name} imports {seen}"


LIGHT = ("runtime.context", "explain.wording", "explain.report", "explain.layer_info", "explain.what_if")


def test_an_engine_is_run_and_explained_without_its_builder():
    """By what is really imported, also inside functions of other modules as they load; the first module that does is named."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    roots = {m.split('.')[0] for m in sys.modules}\n"
        "    print(name, *roots & {'onnx', 'onnx_ir', 'onnxscript', 'scipy', 'onnxruntime'})\n"
    )
    names = [f"gpu_runtime.{module}" for module in LIGHT]
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == names


def test_folders_are_small_and_say_what_they_do():
    for folder in {path.parent for path in modules().values()}:
        names = list(folder.glob("*.py"))
        assert len(names) <= MOST_FILES, f"{folder}: {len(names)} files, at most {MOST_FILES}"
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert text, f"{folder}/__init__.py: say what enters, what leaves, which file to read first"


def test_running_an_engine_needs_no_builder():
    names = modules()
    seen, todo = set(), ["gpu_runtime.runtime.context"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = imports(names[name])
        assert not {i.split(".")[0] for i in found} & {"onnx", "onnx_ir", "onnxscript", "scipy"}, name
        todo += found & set(names)
    builders = "tactics.planner.plan tactics.planner.eliminate gpu_runtime.planning.tables gpu_runtime.lowering.lower"
    planner = {"gpu_runtime.pipeline", *builders.split()}
    assert not seen & planner, seen & planner


def test_functions_and_files_of_the_packages_are_short():
    functions, files = {}, {}
    for name, path in modules().items():
        files[name] = len(path.read_text().splitlines())
        defined = (n for n in nodes(path) if isinstance(n, ast.FunctionDef))
        functions |= {f"{name}.{n.name}": n.end_lineno - n.lineno + 1 for n in defined}
    assert len(functions) > 1000 and not [name for name, lines in functions.items() if lines >= 60]
    assert not [name for name, lines in files.items() if lines > 450]


def test_a_test_file_is_about_one_thing():
    long = {path.name: lines for path in (ROOT / "tests").rglob("*.py") if (lines := len(path.read_text().splitlines())) > 450}
    assert not long, f"{long}: at most 450 lines"
