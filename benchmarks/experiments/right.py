"""Row `right`: `gpu-runtime doctor`, and the tests' problems for the kernels that no GPU has run since they changed.

    python -m benchmarks.experiments.right --out FILE [--seconds 60] [--small] [KERNEL ...]

A kernel's source with its headers has a hash. kernels.json beside the results of each GPU has the hash of each kernel that was
right there: {kernel: [hash, tactics, date]}. A kernel is right where the tactics that are drawn for it, at most MOST, agree
with the FP32 reference; row `tests` runs all of them.
"""

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import hardware
from benchmarks.experiments.run import Experiment, begun
from cuda_kernels.compile import source_hash
from cuda_kernels.device import Device
from cuda_kernels.launch import Cuda
from gpu_runtime.doctor.cases import cases
from tactics.kernels import KERNELS
from tactics.launches import Binary, binaries
from tactics.problems.problem import Problem
from tactics.sampling.data import random_data, reference
from tactics.tactic import Tactic

LEDGER = "kernels.json"
DOCTOR_SHARE = 0.6  # of the time
SMALL_KERNELS = ("pool", "resize")
MOST, SMALL_MOST = 40, 2  # tactics of a kernel: one with a thousand would take the time of all that follow


def digest(kernel: str) -> str:
    """Returns a hash of all sources that the kernel launches; "" for a library function, which has none."""
    sources = () if kernel == "library" else KERNELS[kernel].sources
    return hashlib.sha256("".join(map(source_hash, sources)).encode()).hexdigest()[:24]


def known(folders: list[Path]) -> dict[str, str]:
    """Returns kernel -> the hash of its newest sources that some GPU ran right."""
    dated: dict[str, tuple[str, str]] = {}
    for folder in folders:
        path = folder / LEDGER
        for kernel, (sources, _, date) in (json.loads(path.read_bytes()) if path.exists() else {}).items():
            dated[kernel] = max(dated.get(kernel, ("", "")), (date, sources))
    return {kernel: sources for kernel, (_, sources) in dated.items()}


def changed(out: Path) -> list[str]:
    """Returns the kernels whose present sources no GPU has run, in the order of their table."""
    ran = known([out, *(path for path in hardware.DEFAULT.glob("*") if path.is_dir())])
    return [kernel for kernel in KERNELS if ran.get(kernel) != digest(kernel)]


def asked(device: Device, names: list[str], small: bool) -> dict[str, list[tuple[Problem, Tactic]]]:
    """Returns kernel -> problems of the tests with its tactics, drawn; the doctor's if the tests have none."""
    from tests.problems import pairs

    found: dict[str, list[tuple[Problem, Tactic]]] = {name: [] for name in names}
    for _, problem, tactic in pairs(device):
        if tactic.kernel in found:
            found[tactic.kernel].append((problem, tactic))
    for name in [name for name, of in found.items() if not of]:
        found[name] = [(case.problem, case.tactic) for case in cases(device) if case.kernel == name]
    drawn = {name: random.Random(name).sample(of, min(SMALL_MOST if small else MOST, len(of))) for name, of in found.items()}
    return {name: sorted(of, key=lambda pair: str(pair[0])) for name, of in drawn.items()}


def kernels(device: Device, small: bool, out: Path) -> list[Binary]:
    """Returns the kernels that this row launches."""
    names = list(SMALL_KERNELS) if small else changed(out)
    every = [pair for of in asked(device, names, small).values() for pair in of]
    every += [(case.problem, case.tactic) for case in cases(device) if not small or case.kernel in SMALL_KERNELS]
    return list(dict.fromkeys(b for problem, tactic in every for b in binaries(problem, tactic)))


def doctor(x: Experiment, names: list[str]) -> None:
    """Runs `gpu-runtime doctor`; its document goes beside the row's file. RuntimeError if it does not end with 0."""
    seconds = max(10, round(x.left * DOCTOR_SHARE))
    path = x.out.with_name("doctor.json")
    command = [sys.executable, "-m", "gpu_runtime", "doctor", "--time-limit", str(seconds), "--output", str(path)]
    done = subprocess.run([*command, *(["--kernels", ",".join(names)] if names else [])], capture_output=True, text=True)
    x.data["doctor"] = done.stdout[-3000:]
    print(done.stdout[-600:], flush=True)
    if done.returncode:
        raise RuntimeError(f"gpu-runtime doctor ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")


def right(kernel: str, pairs: list[tuple[Problem, Tactic]], x: Experiment, gpu: Cuda) -> None:
    """Compares every tactic with the reference; if all are right, adds the kernel to the ledger. RuntimeError names the tactics
    that differ.
    """
    from tests.problems import assert_right, execute

    wrong, data = [], dict[Problem, Any]()
    for done, (problem, tactic) in enumerate(pairs):
        if not x.has_time(1.0):
            x.data["left_out"].append(f"{kernel}: {len(pairs) - done} of {len(pairs)} tactics")
            return
        if problem not in data:
            inputs, weights = random_data(problem)
            data = {problem: (inputs, weights, reference(problem, inputs, weights))}
        inputs, weights, expected = data[problem]
        try:
            assert_right(problem, tactic, execute(gpu, problem, tactic, inputs, weights), expected)
        except AssertionError as e:
            wrong.append(f"{problem}: {tactic.name}: {e}"[:300])
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(pairs)} tactics are wrong: {'; '.join(wrong[:5])}")
    x.data.setdefault("right", {})[kernel] = len(pairs)
    if not x.small:
        learn(x.out.with_name(LEDGER), {kernel: len(pairs)})


def learn(path: Path, right: Mapping[str, int]) -> None:
    """Adds these kernels, with the hash of their present sources, to the ledger."""
    rows = json.loads(path.read_bytes()) if path.exists() else {}
    hardware.write(path, rows | {kernel: [digest(kernel), count, hardware.now("minutes")] for kernel, count in right.items()})


def main(argv: list[str] | None = None) -> int:
    x = begun(__doc__ or "", argv)
    names = x.words or (list(SMALL_KERNELS) if x.small else changed(x.out.parent))
    x.data["changed"] = names
    x.step("doctor", partial(doctor, x, list(SMALL_KERNELS) if x.small else []), 10.0)
    gpu = Cuda(x.device)
    for kernel, pairs in asked(x.device, names, x.small).items():
        x.step(kernel, partial(right, kernel, pairs, x, gpu))
    print(f"right: {', '.join(f'{k} ({n})' for k, n in x.data.get('right', {}).items()) or 'no kernel'}", flush=True)
    return x.done()


if __name__ == "__main__":
    sys.exit(main())
