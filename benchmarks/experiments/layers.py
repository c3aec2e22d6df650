"""Row `layers`: compute-bound layers of known networks, and how much 2:4 gains there.

    python -m benchmarks.experiments.layers --out FILE [--seconds 110] [--small] [LAYER ...]

Of each layer the MOST dense and the MOST 2:4 tactics that predictions put first, channels last, and its strips of 128 x 224 and
128 x 256 pixels where K has 36 stages and more. Dense tactics run on dense weights and 2:4 tactics on weights that are pruned,
each on data of its own, as a user's two networks would; samples of both alternate. Random normal data, medians of ROUNDS, L2 as
in a network (tactics/sampling/stopwatch.py). Each output is compared with the reference before it is timed.
"""

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.experiments.run import Experiment, begun, interleaved
from cuda_kernels.device import Device
from tactics.candidates import candidates
from tactics.launches import Binary, binaries
from tactics.measure.race import times_of
from tactics.measure.worker import Bench, Ready
from tactics.predict import predict_us
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import Activation
from tactics.problems.problem import ConvProblem
from tactics.tactic import Tactic

MOST, ROUNDS, SMALL_ROUNDS = 3, 11, 3
STRIPS, STRIP_STAGES, STAGE = ((128, 224), (128, 256)), 36, 64  # pixels; stages of K, and channels of one

# name: (images, input channels, height, width, output channels, height and width of the kernel). ResNet-50's at batch 256.
# In the order in which they are measured: one of each kind first, the longest to prepare last.
SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "vgg 56x56 256": (64, 256, 56, 56, 256, 3),
    "vae 64x64 512": (8, 512, 64, 64, 512, 3),
    "resnet 14x14 256": (256, 256, 14, 14, 256, 3),
    "unet 32x32 640": (16, 640, 32, 32, 640, 3),
    "realesr 1080x1920 64": (1, 64, 1080, 1920, 64, 3),
    "resnet 28x28 128": (256, 128, 28, 28, 128, 3),
    "vgg 28x28 512": (64, 512, 28, 28, 512, 3),
    "resnet 56x56 64": (256, 64, 56, 56, 64, 3),
    "unet 16x16 1280": (16, 1280, 16, 16, 1280, 3),
    "vae 256x256 256": (2, 256, 256, 256, 256, 3),
    "resnet 7x7 512": (256, 512, 7, 7, 512, 3),
    "vae 512x512 128": (1, 128, 512, 512, 128, 3),
    "1x1 8192 cubed": (1, 8192, 64, 128, 8192, 1),
}
SMALL = {"small 8x8 64": (2, 64, 8, 8, 64, 3), "small 1x1": (1, 64, 8, 8, 64, 1)}


class Entry(NamedTuple):
    """A tactic to time, on weights of its kind."""

    problem: ConvProblem
    tactic: Tactic


def shapes(small: bool) -> dict[str, tuple[int, int, int, int, int, int]]:
    return SMALL if small else SHAPES


def problem(name: str, sparse: bool) -> ConvProblem:
    """Returns a layer as a convolution with bias and ReLU. `sparse`: its weights are pruned to 2:4."""
    n, c, h, w, k, r = (SHAPES | SMALL)[name]
    end = Epilogue(bias=True, act=Activation("relu"))
    return ConvProblem(n, c, h, w, k, r, r, pad=(r // 2,) * 4, epilogue=end, sparse24=sparse)


def entries(name: str, device: Device, most: int = MOST) -> list[Entry]:
    """Returns the `most` best predicted dense tactics of the dense problem, then of the 2:4 tactics of the pruned one."""
    found = []
    for sparse in (False, True):
        p = problem(name, sparse)
        able = [t for t in candidates(p, device) if t.sparse == sparse and t.ins[0].layout == t.out.layout == "hwc8"]
        able.sort(key=lambda t: (predict_us(p, t, device), t.name))
        stages = p.r * p.s * p.c // STAGE
        strips = [t for t in able if stages >= STRIP_STAGES and t.gemm.box and (t.gemm.m, t.gemm.n) in STRIPS]
        best_strips = [next((t for t in strips if (t.gemm.m, t.gemm.n) == size), None) for size in STRIPS]
        found += [Entry(p, t) for t in dict.fromkeys([*able[:most], *filter(None, best_strips)])]
    return found


def kernels(device: Device, small: bool) -> list[Binary]:
    """Returns the kernels that this row launches, without the reference's."""
    every = (e for name in shapes(small) for e in entries(name, device, 1 if small else MOST))
    return list(dict.fromkeys(b for e in every for b in binaries(e.problem, e.tactic)))


class Contest:
    """Tactics of several problems, each verified and ready on its own data; their samples alternate."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.benches: dict[ConvProblem, Bench] = {}
        self.ready: dict[Entry, Ready] = {}

    def add(self, entry: Entry) -> float:
        """Verifies a tactic and makes it ready; returns the error of its output. RuntimeError if the output is wrong."""
        if entry.problem not in self.benches:
            self.benches[entry.problem] = Bench(self.device)
            self.benches[entry.problem].set_problem(entry.problem)
        self.ready[entry] = self.benches[entry.problem].prepare(entry.tactic)
        return self.ready[entry].error

    def sample(self, entry: Entry) -> tuple[float, float]:
        """Returns (microseconds, MHz of the SM)."""
        ready = self.ready[entry]
        return self.benches[entry.problem].stopwatch.sample(ready.before, ready.timed, ready.count)

    def samples(self, rounds: int) -> dict[Entry, list[tuple[float, float]]]:
        return interleaved({entry: partial(self.sample, entry) for entry in self.ready}, rounds)


def told(entry: Entry, taken: Sequence[tuple[float, float]], error: float, device: Device) -> dict[str, Any]:
    """Returns a tactic's row of the result; `taken`: its samples."""
    times = times_of([us for us, _ in taken], 3)
    return {
        "tactic": entry.tactic.name,
        "sparse": entry.tactic.sparse,
        **times,
        "predicted_us": round(predict_us(*entry, device), 3),
        "tflops": round(2e-6 * entry.problem.macs / times["us"], 1),  # the dense layer's, also if dense tactics are left out
        "mhz": round(statistics.median(mhz for _, mhz in taken)),
        "rel_error": error,
    }


def measured(name: str, x: Experiment) -> None:
    """Measures all tactics of a layer: one row each. If a tactic is refused or wrong, its row says so, and the others are
    timed.
    """
    contest, errors = Contest(x.device), {}
    row: dict[str, Any] = {"layer": name, "problem": str(problem(name, False)), "tactics": [], "failed": {}}
    x.data.setdefault("layers", []).append(row)
    for entry in entries(name, x.device, 1 if x.small else MOST):
        try:
            errors[entry] = contest.add(entry)
        except RuntimeError as e:
            row["failed"][entry.tactic.name] = str(e)[:500]
            x.data["errors"][f"{name}: {entry.tactic.name}"] = str(e)[:500]
    for entry, taken in contest.samples(SMALL_ROUNDS if x.small else ROUNDS).items():
        row["tactics"].append(told(entry, taken, errors[entry], x.device))
    best = {kind: best_of(row, kind) for kind in (False, True)}
    if best[False] and best[True]:
        row["gain"] = round(best[False]["us"] / best[True]["us"], 3)
    print(line(row), flush=True)


def best_of(row: dict[str, Any], sparse: bool) -> dict[str, Any]:
    """Returns the fastest tactic of that kind in a layer's row; {} if there is none."""
    return min((t for t in row["tactics"] if t["sparse"] == sparse), key=lambda t: t["us"], default={})


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['layer']:24}"]
    for sparse, title in ((False, "dense"), (True, "2:4")):
        best = best_of(row, sparse)
        cells.append(f"{title} {best['us']:8.1f} us {best['tflops']:6.0f} TFLOP/s" if best else f"{title} none")
    return "  ".join([*cells, f"gain {row['gain']:.2f}" if "gain" in row else "no gain"])


def table(data: dict[str, Any]) -> Iterator[str]:
    """Yields a line of the result for each layer: the best tactic of each kind beside its prediction."""
    yield f"{'layer':24} {'dense':>9} {'TFLOP/s':>8} {'predicted':>9} {'2:4':>9} {'TFLOP/s':>8} {'predicted':>9} {'gain':>6}"
    for row in data.get("layers", ()):
        cells = f"{row['layer']:24}"
        for best in (best_of(row, False), best_of(row, True)):
            for key, width, digits in (("us", 9, 1), ("tflops", 8, 0), ("predicted_us", 9, 1)):
                cells += f" {best.get(key, math.nan):{width}.{digits}f}"
        yield f"{cells} {row.get('gain', math.nan):6.2f}"


def main(argv: list[str] | None = None) -> int:
    x = begun(__doc__ or "", argv)
    for name in x.words or shapes(x.small):
        x.step(name, partial(measured, name, x), 6.0)
    return x.done()


if __name__ == "__main__":
    sys.exit(main())
