"""The instructions of our kernels that programs by others witness: they would notice if the emulator computed something else.

    python -m tests.independent.witnesses                 writes witnesses.json anew: some minutes
    python -m tests.independent.witnesses INSTRUCTION ... asks for these and for those that the record lacks

The record says for each instruction which kernels of ours use it, and which program notices its fault: "" where none does, and
HINT where none can.
"""

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import FrameType

from cuda_kernels.compile import compile_kernel, virtual
from cuda_kernels.device import named
from cuda_kernels.emulator import EmulatorError, Options
from gpu_runtime.doctor.cases import Case, cases
from tactics.launches import launches
from tactics.step import Call
from tests.independent import cuda_programs, faults, packages
from tests.independent.cuda_programs import ALL_AT_ONCE, CONV, CONV_BYTES, DEPTHWISE, GEMM_SM90
from tests.independent.products import MOVMATRIX, Mma, moved_wrong, wrong
from tests.independent.triton_programs import COMMITTED, Triton, all_kernels, committed, installed
from tests.independent.triton_runs import worst

RECORD = Path(__file__).parent / "witnesses.json"
DEVICE = named("h200")
SECONDS = 8  # a fault may make a loop endless
HINT = "hint"
# Programs over cudart.cpp, asked where no kernel of Triton's notices: their arguments, and options of cuda_programs.
CUDA: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "scan": ([], ALL_AT_ONCE),
    "conv_fprop": (CONV, ()),
    "conv_fprop_bytes": (CONV_BYTES, ()),
    "conv_depthwise": (DEPTHWISE, ()),
    "wgmma": ([], ()),
    "conv_sm90": ([], ()),
    "conv_sm90_2x1": ([], ()),
    "conv_sm90_1x2": ([], ()),
    "gemm_sm90_2x2": (GEMM_SM90, ()),
    "cluster_groups": ([], ()),
    "bulk_copies": ([], ()),
    "bulk_stores": ([], ()),
}
BYTES = [Mma(k, "s8", "s32", k == 64, other=b) for k in (32, 64) for b in ("s8", "u8")]
MATRICES = {f"layouts: {m.opcode}": m for m in (Mma(16, "f16"), Mma(32, "f16", sparse=True), *BYTES)}
LAYOUTS = {faults.form(m.opcode): name for name, m in MATRICES.items()}
LAYOUTS["movmatrix.sync.m8n8.trans.b16"] = "layouts: movmatrix"


class TooLong(Exception):
    """A program does not end."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def kind(case: Case) -> tuple:
    """Returns a case's kernel, and along which sides its tile has clusters, which take other instructions."""
    cluster = getattr(case.tactic.tile, "cluster", ())
    return case.kernel, *(blocks > 1 for blocks in (cluster if isinstance(cluster, tuple) else (1 + cluster,)))


def our_instructions(some: bool = False) -> dict[str, list[str]]:
    """Returns form -> kernels with instructions of this form, for the cases of `doctor`: all families and tiles that are
    offered, or with `some` one tile of a kind.
    """
    found: dict[str, set[str]] = defaultdict(set)
    known: dict = {}
    examined = cases(DEVICE)
    for case in {kind(c): c for c in examined}.values() if some else examined:
        for step in launches(case.problem, case.tactic):
            if isinstance(step, Call):
                continue
            key = step.kernel, step.values
            if key not in known:
                known[key] = faults.forms(compile_kernel(step.kernel, dict(step.values), virtual(DEVICE.sm)).ptx)
            for form in known[key]:
                found[form].add(case.kernel)
    return {form: sorted(kernels) for form, kernels in sorted(found.items())}


def notices(kernel: Triton, form: str) -> bool:
    """Whether this program goes wrong, is refused or never ends, if the emulator gives `form` a wrong meaning."""
    broken = replace(kernel, ptx=faults.faulty(kernel.ptx, form, kernel.entry))
    try:
        with limited():
            return worst(broken, Options()) > 1
    except (EmulatorError, TooLong):
        return True


def layout_notices(name: str, form: str) -> bool:
    """Whether CuTe's table shows a wrong meaning: of an mma, or of movmatrix beside ldmatrix."""
    if name not in MATRICES:
        return moved_wrong(faults.faulty(MOVMATRIX, form, "micro")) > 0
    m = MATRICES[name]
    return wrong(m, text=faults.faulty(m.ptx, form, "micro")) > 0


def program_notices(name: str, form: str) -> bool:
    """Whether a CUDA program fails, by its own check or by ending in any other way, or never ends. Raises ValueError if there
    is no such fault, RuntimeError if the program did not begin.
    """
    arguments, options = CUDA[name]
    try:
        out, code = cuda_programs.run(name, arguments, *options, "--fault", form)
    except subprocess.TimeoutExpired:
        return True
    if cuda_programs.BEGINS not in out:
        refusal = ValueError if code == cuda_programs.UNMADE else RuntimeError
        raise refusal(f"{name} has not run with a fault in {form}:\n{out}")
    return code != 0


@lru_cache
def sound(name: str) -> bool:
    """Whether the program is right without a fault."""
    arguments, options = CUDA[name]
    return cuda_programs.run(name, arguments, *options)[1] == 0


def witness(form: str, programs: dict[str, Triton]) -> str:
    """Returns the first program that notices, or ""."""
    if form in faults.HINTS:
        return HINT
    if form.split(".")[0] in faults.STEERS:
        return "triton: all"
    for name, kernel in programs.items():
        if form in faults.forms(kernel.ptx):
            with suppress(ValueError):
                if notices(kernel, form):
                    return f"triton: {name}"
    name = LAYOUTS.get(form, "")
    if name and layout_notices(name, form):
        return name
    for name in CUDA:
        if form in faults.forms(cuda_programs.ptx(name)):
            if not sound(name):
                raise RuntimeError(f"{name} is wrong without a fault")
            with suppress(ValueError):
                if program_notices(name, form):
                    return f"cuda: {name}"
    return ""


def record() -> dict[str, dict]:
    return json.loads(RECORD.read_text())


def witnessed(rows: dict[str, dict]) -> list[str]:
    return [form for form, row in rows.items() if row["witness"] not in ("", HINT)]


def why_not() -> str:
    """Says why not all programs can be run, or ""."""
    return packages.missing(packages.CUTLASS, *packages.TOOLKIT) if installed() else "Triton is not installed: make truth"


def main(named: Sequence[str]) -> None:
    if reason := why_not():
        raise SystemExit(reason)
    programs = {name: committed(name) for name in COMMITTED} | all_kernels()
    kept, ours = record() if named else {}, our_instructions()
    if unknown := set(named) - set(ours):
        raise SystemExit(f"no kernel uses {', '.join(sorted(unknown))}; they use {', '.join(ours)}")
    rows = {}
    for form, kernels in ours.items():
        asked = form in named or form not in kept
        rows[form] = {"witness": witness(form, programs) if asked else kept[form]["witness"], "kernels": kernels}
        if asked:
            print(f"{form}: {rows[form]['witness'] or 'none'}", flush=True)
    RECORD.write_text("{\n" + ",\n".join(f"{json.dumps(form)}: {json.dumps(row)}" for form, row in rows.items()) + "\n}\n")
    print(f"{len(rows)} instructions, {len(witnessed(rows))} with a witness")


if __name__ == "__main__":
    main(sys.argv[1:])
