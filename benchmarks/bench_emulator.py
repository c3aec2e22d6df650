"""GFLOP/s per core of the emulator on the project's convolution kernels, with checks off and on.

`python benchmarks/bench_emulator.py [--require]`; with --require it fails below 6 (checks off) or 3 (on) on the dense kernel.
Sparse rates count the multiplications of the dense problem. CPU time of one thread is measured, so other load on the machine
slows the numbers only through shared caches and clocks; the best of several runs counts.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from cuda_kernels.launch import Emulated
from tactics.candidates import candidates
from tactics.format import num_bytes, to_memory
from tactics.launches import launches, pack_weights
from tactics.problems.epilogue import Epilogue
from tactics.problems.problem import ConvProblem
from tactics.sampling.data import random_data
from tactics.sampling.trial import Addresses, bind, scratch_for
from tactics.step import Launch
from tactics.tactic import Tile

PROBLEM = ConvProblem(1, 256, 28, 28, 256, 3, 3, pad=(1, 1, 1, 1), sparse24=True, epilogue=Epilogue(bias=True))
FLOP = 2 * 256 * 256 * 9 * 28 * 28
LEAST = {False: 6.0, True: 3.0}


def rate(tactic, repeats: int, **options) -> float:
    """Best GFLOP/s of one core over `repeats` runs of the tactic on PROBLEM."""
    gpu = Emulated(named("h200"), threads=1, **options)
    inputs, weights = random_data(PROBLEM)
    sections = pack_weights(PROBLEM, tactic, weights)
    image = to_memory(inputs[0], tactic.ins[0])
    places = {name: gpu.allocate(array.nbytes, constant=True) for name, array in sections.items()}
    x, out = gpu.allocate(image.nbytes), gpu.allocate(num_bytes(tactic.out, PROBLEM.out_shape))
    for address, array in zip([x, *places.values()], [image, *sections.values()], strict=True):
        gpu.write(address, array)
    (step,) = steps = [s for s in launches(PROBLEM, tactic) if isinstance(s, Launch)]
    scratch = scratch_for(gpu, steps)
    kernel = gpu.load(compile_kernel(step.kernel, dict(step.values), gpu.arch))
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        gpu.launch(kernel, step.grid, step.block, step.smem, bind(gpu, step.args, Addresses([x], out, places, scratch)))
        best = min(best, time.process_time() - start)
    return FLOP / best / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--require", action="store_true", help="exit 1 if the dense kernel is slower than promised")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    slow = False
    for sparse in (False, True):
        tactic = next(
            t
            for t in candidates(PROBLEM, named("h200"))
            if t.sparse == sparse
            and isinstance(t.tile, Tile)
            and (t.tile.threads, t.name.count("128x128"), t.name.count("hwc8")) == (256, 1, 2)
        )
        print(tactic.name)
        for checks in (False, True):
            for mode in ("eager", "late"):
                got = rate(tactic, args.repeats, checks=checks, async_mode=mode)
                print(f"  checks {'on ' if checks else 'off'}  cp.async {mode:5}  {got:6.2f} GFLOP/s per core")
                slow |= not sparse and mode == "eager" and got < LEAST[checks]
    return int(args.require and slow)


if __name__ == "__main__":
    sys.exit(main())
