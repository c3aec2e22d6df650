"""The tests and records that show each family of kernels, and each path, to be right, as Markdown: a part of docs/proof.md.

    python -m benchmarks.pages.proof

Nothing is run. A test file is counted by its imports and names: for a kernel where it runs kernels, compares their outputs, and
has the kernel's name as a text, or takes all problems of tests/problems.py or cases of `doctor`; for a path where it has one of
the functions that take it. Files with tests marked `gpu` or `driver` run on the emulated CUDA driver (`make test-driver`);
those marked `gpu` would run on a GPU. Hardware has been reached where benchmarks/results has the files of `make gpu`.
"""

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_plan import markdown
from cuda_kernels.device import ARCHITECTURES, named
from gpu_runtime.doctor.cases import cases
from tactics.candidates import base_runner, candidates
from tactics.families.table import OF_KERNEL
from tests.independent.witnesses import HINT, record, witnessed
from tests.problems import PROBLEMS

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: path.name)
RECORD = ROOT / "tests" / "golden" / "compiled.json"
SPILLS = 2  # a row of the record of compiled kernels
DEVICE = named("h200")
MOST = 5  # test files named in a cell
ON_DRIVER = {"gpu", "driver"}  # marks
ALL_CASES, ALL_PROBLEMS = "gpu_runtime.doctor.cases.cases", "tests.problems.PROBLEMS"
WITNESSES = {"all": "all programs", "layouts": "CuTe's layouts", HINT: "none can: hints, which change no result", "": "none"}
PROGRAMS = {
    **{"scan": "CUB's scan", "conv_fprop": "CUTLASS's example 16", "conv_depthwise": "CUTLASS's example 46"},
    "conv_fprop_bytes": "CUTLASS's example 16 with bytes",
    "wgmma": "CuTe's products for Hopper",
    "conv_sm90": "CUTLASS's convolution for Hopper",
    **dict.fromkeys(("conv_sm90_1x2", "conv_sm90_2x1"), "CUTLASS's convolution for Hopper, in clusters"),
    "bulk_copies": "NVIDIA's wrappers for Hopper",
    "bulk_stores": "NVIDIA's wrappers for stores",
    "gemm_sm90_2x2": "CUTLASS's example 48, in clusters",
    "cluster_groups": "NVIDIA's cooperative groups",
}
COMPARES = {  # functions that run kernels and compare the results
    "tests.problems.assert_right",
    "tests.problems.check",
    "tests.problems.assert_written_once",
    "tactics.sampling.trial.trial",
    "tests.engines.check_engine",
    "tests.reference_run.check_against_ort",
}

# A use of CUDA by the runtime -> names of which a test of it uses one or, with "+", all.
PATHS = {
    "launch of a kernel, `cuLaunchKernel`": ("cuda_kernels.launch.Cuda",),
    "launch that may begin early, `cuLaunchKernelEx`": ("launch_dependent", "dependent launches"),
    "CUDA graphs: capture and replay": ("begin_capture", "in_a_graph", "replay"),
    "copies between host and device": ("cuda_kernels.staging.Staging", "alloc_pinned_memory", "memcpyAsync"),
    "the caller's streams, CuPy and DLPack arrays": ("from_dlpack", "toDlpack", "follow", "Stream"),
    "several contexts and threads": ("Thread+context", "ThreadPoolExecutor+context", "Thread+Cuda"),
    "timing, in a child process": ("Measured", "tactics.measure.timing.Measured", "Bench", "WORKER"),
    "times of inferences, `gpu-runtime bench`": ("--exportTimes=t.json", "gpu_runtime.benchmark.summary.summarize"),
    "a network built with measured times": ("build+why_no_gpu", "build+measured"),
    "library functions of CuPy": ("tactics.problems.problem.LibraryProblem", "run_call"),
    "faults of the driver, lost contexts": ("DriverError", "why_fatal", "fatal_code"),
    "`gpu-runtime doctor`, and what builds read of it": ("gpu_runtime.doctor.examine", "doctor"),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A test file. `words`: its names, attributes and texts, and the names that it imports, with their modules; `on_driver`:
    whether it has tests that run on the emulated driver.
    """

    name: str
    words: frozenset[str]
    on_driver: bool

    def has(self, wanted: str) -> bool:
        return self.words.issuperset(wanted.split("+"))


def seen(path: Path) -> Seen:
    tree, words = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            words |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words |= {node.value, re.split(r"_hmma_|__", node.value)[0]}  # a tactic's name begins with its kernel
    marks = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "pytest.mark"}
    return Seen(path.stem.removeprefix("test_"), frozenset(words), bool(marks & ON_DRIVER))


def taking(files: Iterable[Seen], names: Iterable[str], on_driver: bool) -> str:
    """Lists the files that use one of the names."""
    names = tuple(names)
    return cell([f.name for f in files if f.on_driver == on_driver and any(f.has(name) for name in names)])


def cell(files: list[str]) -> str:
    """Returns the names of test files, the first few of them."""
    more = f" and {len(files) - MOST} more" if len(files) > MOST else ""
    return ", ".join(f"`{f}`" for f in files[:MOST]) + more if files else "none"


def hardware(kernel: str = "") -> str:
    """Names the GPUs whose `doctor` results are kept, with the number of a kernel's cases that were right; the emulated driver
    does not count.
    """
    found = []
    for path in sorted((ROOT / "benchmarks" / "results").rglob("doctor.json")):
        kept = json.loads(path.read_bytes())
        if not kept["emulated"]:
            of = [f" {f['right']} of {f['cases']}" for f in kept["families"] if f["kernel"] == kernel]
            found += [kept["device"]["title"] + text for text in (of if kernel else [""])]
    return ", ".join(dict.fromkeys(found)) or "not yet"


def reach(kernel: str) -> tuple[int, int]:
    """Returns how many (problems, tiles) of tests/problems.py a kernel runs."""
    problems, tiles = 0, set()
    for problem in PROBLEMS.values():
        single = ("fp32",) * (len(problem.in_shapes) + 1)
        mine = [t for t in (*candidates(problem, DEVICE), *candidates(problem, DEVICE, single)) if t.kernel == kernel]
        problems += bool(mine)
        tiles |= {base_runner(t) for t in mine}
    return problems, len(tiles)


def families(files: list[Seen]) -> str:
    examined, able = cases(DEVICE), [f for f in files if f.words & COMPARES]
    shown = "problems, tiles", "cases of `doctor`", "emulator beside the reference", "witnessed", "emulated driver", "hardware"
    rows = []
    for kernel in OF_KERNEL:
        problems, tiles = reach(kernel)
        names = (kernel, ALL_CASES, *([ALL_PROBLEMS] if problems else []))
        here, driven = (taking(able, names, on_driver) for on_driver in (False, True))
        tried = sum(c.kernel == kernel for c in examined)
        rows.append((f"`{kernel}`", f"{problems}, {tiles}", tried, here, noticed(kernel), driven, hardware(kernel)))
    return markdown(("kernel", *shown), rows)


def noticed(kernel: str) -> str:
    """Returns how many of a kernel's instructions, without hints, a program by others witnesses."""
    rows = {form: row for form, row in record().items() if kernel in row["kernels"] and row["witness"] != HINT}
    return f"{len(witnessed(rows))} of {len(rows)}" if rows else "none used"


def instructions() -> str:
    """Returns each instruction of our kernels with its witnesses."""
    by_witness: dict[str, list[str]] = {}
    for form, row in record().items():
        kind, _, name = row["witness"].partition(": ")
        if kind == "cuda":
            what = PROGRAMS[name]
        else:
            what = f"Triton's `{name}`" if kind == "triton" and name != "all" else WITNESSES[kind if kind != "triton" else name]
        by_witness.setdefault(what, []).append(f"`{form}`")
    rows = [(what, ", ".join(forms)) for what, forms in by_witness.items()]
    return markdown(("witness", "instructions"), sorted(rows, key=lambda r: (r[0] in (WITNESSES[""], WITNESSES[HINT]), r[0])))


def paths(files: list[Seen]) -> str:
    rows = [(path, *(taking(files, names, driven) for driven in (False, True)), hardware()) for path, names in PATHS.items()]
    return markdown(("path", "without a driver", "emulated driver", "hardware"), rows)


def compiled() -> str:
    """Returns ptxas' results for the kernels, as recorded."""
    ((version, kernels),) = json.loads(RECORD.read_text()).items()
    variants = [by_sm for kernel in kernels.values() for by_sm in kernel["variants"].values()]
    spilled = sum(sizes[SPILLS] > 0 for by_sm in variants for sizes in by_sm.values())
    return (
        f"`ptxas` of NVRTC {version} compiles {len(kernels)} kernels for {', '.join(ARCHITECTURES)}: {len(variants)} variants "
        f"are on record (`tests/golden/compiled.json`), of whose binaries {spilled} spill registers."
    )


def main() -> None:
    files = [seen(path) for path in TESTS]
    tables = {"Families of kernels": families(files), "Instructions": instructions(), "Paths": paths(files)}
    text = [line for title, table in tables.items() for line in (f"### {title}", "", table, "")]
    print("\n".join([*text, compiled()]))


if __name__ == "__main__":
    main()
