"""The reading order of the code is also its import order: a module imports only modules named earlier in the list.

Imports inside functions are allowed downwards only too, except where a name says that it is a lazy edge.
"""

import ast
from pathlib import Path

import pytest

from cuda_kernels.compile import _with_headers, source_path

ROOT = Path(__file__).parents[1]
ORDER = """
cuda_kernels.device  cuda_kernels.sparse24  cuda_kernels.files  cuda_kernels.compile
cuda_kernels.emulator.*
cuda_kernels.launch
tactics.format  tactics.gather_problem  tactics.pointwise_ops  tactics.pointwise_facts  tactics.row_problem
tactics.conv_problem
tactics.library_functions  tactics.library_problem  tactics.problem  tactics.codec  tactics.tactic
tactics.step  tactics.roofline  tactics.conv_gemm  tactics.conv_grouped
tactics.conv_stem  tactics.conv_depthwise  tactics.conv_fp32  tactics.conv_transpose
tactics.back_to_back  tactics.squeeze_excite
tactics.movement  tactics.gather  tactics.matmul
tactics.pointwise  tactics.rows  tactics.library
tactics.families  tactics.launches  tactics.single  tactics.candidates  tactics.predict
tactics.timing_worker  tactics.timing_cache  tactics.timing  tactics.elimination_order  tactics.eliminate
tactics.graph  tactics.reformats  tactics.formulation  tactics.changes  tactics.plan
gpu_runtime.text  gpu_runtime.errors  gpu_runtime.onnx_load  gpu_runtime.onnx_check  gpu_runtime.onnx_weights
gpu_runtime.onnx_convert  gpu_runtime.onnx_respell  gpu_runtime.onnx_clean
gpu_runtime.onnx_import  gpu_runtime.onnx_sparsity  gpu_runtime.onnx_graph  gpu_runtime.chains
gpu_runtime.normalizations  gpu_runtime.fuse  gpu_runtime.moves  gpu_runtime.reductions  gpu_runtime.convolutions
gpu_runtime.library
gpu_runtime.lower  gpu_runtime.ranges  gpu_runtime.intervals  gpu_runtime.cliffs
gpu_runtime.space_to_depth  gpu_runtime.channel_orders
gpu_runtime.upsampling
gpu_runtime.inplace  gpu_runtime.siblings  gpu_runtime.squeeze_excite  gpu_runtime.back_to_back
gpu_runtime.io_formats  gpu_runtime.planning  gpu_runtime.reasons  gpu_runtime.memory
gpu_runtime.explain  gpu_runtime.layer_info  gpu_runtime.report  gpu_runtime.what_if
gpu_runtime.side_by_side  gpu_runtime.autotuning
gpu_runtime.derive  gpu_runtime.regions  gpu_runtime.verify
gpu_runtime.plan_schema  gpu_runtime.engine
gpu_runtime.dataflow  gpu_runtime.assemble  gpu_runtime.context  gpu_runtime.deviations
gpu_runtime.pipeline  gpu_runtime.onnx_backend
gpu_runtime.cli  gpu_runtime.__main__
""".split()
# A method that hands its object to a later floor imports it when it is called, never when the module loads.
LAZY = {("gpu_runtime.engine", "gpu_runtime.context")}


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
    raise AssertionError(f"{module} stands on no floor: add it to ORDER, and to the README's reading order")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write absolute imports"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("kernel", sorted(p.stem for p in (ROOT / "cuda_kernels").glob("*.cu")))
def test_every_kernel_waits_for_the_launch_ahead(kernel):
    """Launches may begin before the one ahead has ended; a kernel that does not wait would read what is not yet there."""
    text = "".join(path.read_text() for path in _with_headers(source_path(kernel)) if path.name != "ptx.cuh")
    assert "  wait_for_previous_launch();" in text and "  release_next_launch();" in text


def test_every_module_is_on_a_floor():
    names = modules()
    for name in names:
        floor(name)
    for name in ORDER:
        assert name.endswith(".*") or name in names, f"{name} is in ORDER, but there is no such file"


def test_imports_go_down():
    names = modules()
    for name, path in names.items():
        for other in imports(path) & set(names):
            same = floor(other) == floor(name)
            assert same or floor(other) < floor(name) or (name, other) in LAZY, f"{name} imports {other}, a later floor"


def test_only_import_and_fuse_see_onnx():
    names = ("load", "check", "weights", "convert", "respell", "clean", "import", "backend")
    stages = {"gpu_runtime.fuse", *(f"gpu_runtime.onnx_{name}" for name in names)}
    for name, path in modules().items():
        if name in stages:
            continue
        seen = {i for i in imports(path) if i.split(".")[0] in ("onnx", "onnx_ir", "onnxscript")}
        assert not seen, f"{name} imports {seen}"


def test_running_an_engine_needs_no_builder():
    names = modules()
    seen, todo = set(), ["gpu_runtime.context"]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = imports(names[name])
        assert not {i.split(".")[0] for i in found} & {"onnx", "onnx_ir", "onnxscript", "scipy"}, name
        todo += found & set(names)
    planner = {"tactics.plan", "tactics.eliminate", "gpu_runtime.pipeline", "gpu_runtime.planning", "gpu_runtime.lower"}
    assert not seen & planner, seen & planner


def test_the_readme_tells_the_same_order():
    text = (ROOT / "README.md").read_text()
    at = text.index("How to read this code")
    for name in ORDER:
        leaf = name.removesuffix(".*").rpartition(".")[2]
        assert f"`{leaf}`" in text[at:] or f"`{leaf}/`" in text[at:], f"README's reading order leaves out {name}"
