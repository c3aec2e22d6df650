"""Row `layers`: compute-bound layers of known networks, and how much 2:4 gains there.

    python -m benchmarks.experiments.layers --out FILE [--seconds 110] [--small] [LAYER ...]

Of each layer the MOST dense and the MOST 2:4 tactics that predictions put first, channels last, and its strips of 128 x 224 and
128 x 256 pixels where K has 36 stages and more; of the layers in BYTES also tactics that read and write INT8. Dense tactics run
on dense weights and 2:4 tactics on weights that are pruned, each on data of its own, as a user's networks would; samples of all
alternate. Random normal data, medians of ROUNDS, L2 as in a network (tactics/sampling/stopwatch.py). Each output is compared
with the reference before it is timed.
"""

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from benchmarks.experiments.run import Experiment, begun, interleaved
from cuda_kernels.device import Device
from tactics.candidates import candidates
from tactics.format import Format
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
    "resnet 56x56 64>256": (256, 64, 56, 56, 256, 1),
    "unet 16x16 1280": (16, 1280, 16, 16, 1280, 3),
    "vae 256x256 256": (2, 256, 256, 256, 256, 3),
    "resnet 7x7 512": (256, 512, 7, 7, 512, 3),
    "vae 512x512 128": (1, 128, 512, 512, 128, 3),
    "1x1 8192 cubed": (1, 8192, 64, 128, 8192, 1),
}
SMALL = {"small 8x8 64": (2, 64, 8, 8, 64, 3), "small 1x1": (1, 64, 8, 8, 64, 1)}
BYTES = {"vgg 56x56 256", "resnet 14x14 256", "resnet 56x56 64", "resnet 56x56 64>256", "1x1 8192 cubed", "small 1x1"}


class Kind(NamedTuple):
    """The format of inputs and outputs, and whether the weights are 2:4."""

    format: Format
    sparse: bool


HALVES, WHOLE = Format("fp16", "hwc8"), Format("int8", "hwc16")
PAIRS = (("dense", "2:4"), ("INT8", "INT8 2:4"))
KINDS = {"dense": Kind(HALVES, False), "2:4": Kind(HALVES, True), "INT8": Kind(WHOLE, False), "INT8 2:4": Kind(WHOLE, True)}


class Entry(NamedTuple):
    """A tactic to time, on weights of its kind."""

    problem: ConvProblem
    tactic: Tactic


def shapes(small: bool) -> dict[str, tuple[int, int, int, int, int, int]]:
    return SMALL if small else SHAPES


def kinds(name: str) -> list[str]:
    """Returns the kinds of tactics that are tried on a layer."""
    return [kind for kind, of in KINDS.items() if of.format == HALVES or name in BYTES]


def problem(name: str, kind: str = "dense") -> ConvProblem:
    """Returns a layer as a convolution with bias and ReLU, quantised or with weights pruned to 2:4 if its kind says so."""
    (n, c, h, w, k, r), (of, sparse) = (SHAPES | SMALL)[name], KINDS[kind]
    whole = of == WHOLE
    end = Epilogue(bias=True, act=Activation("quantize", (0.0, 127.0)) if whole else Activation("relu"), multiplied=whole)
    return ConvProblem(n, c, h, w, k, r, r, pad=(r // 2,) * 4, epilogue=end, sparse24=sparse)


def entries(name: str, device: Device, kind: str, most: int = MOST) -> list[Entry]:
    """Returns the `most` best predicted tactics of a kind, and the best strip of each size in STRIPS where K is long."""
    p, (of, sparse) = problem(name, kind), KINDS[kind]
    offered = candidates(p, device, (of.dtype,) * 2 if of == WHOLE else ())
    able = [t for t in offered if t.sparse == sparse and t.ins[0] == t.out == of]
    able.sort(key=lambda t: (predict_us(p, t, device), t.name))
    stages = p.r * p.s * p.c // STAGE
    strips = [t for t in able if stages >= STRIP_STAGES and t.gemm.box and (t.gemm.m, t.gemm.n) in STRIPS]
    best_strips = [next((t for t in strips if (t.gemm.m, t.gemm.n) == size), None) for size in STRIPS]
    return [Entry(p, t) for t in dict.fromkeys([*able[:most], *filter(None, best_strips)])]


def every(name: str, device: Device, small: bool) -> Iterator[tuple[str, Entry]]:
    """Yields (kind, tactic) of all tactics that this row times on a layer."""
    for kind in kinds(name):
        yield from ((kind, entry) for entry in entries(name, device, kind, 1 if small else MOST))


def kernels(device: Device, small: bool) -> list[Binary]:
    """Returns the kernels that this row launches, without the reference's."""
    found = (e for name in shapes(small) for _, e in every(name, device, small))
    return list(dict.fromkeys(b for e in found for b in binaries(e.problem, e.tactic)))


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


def told(kind: str, entry: Entry, taken: Sequence[tuple[float, float]], error: float, device: Device) -> dict[str, Any]:
    """Returns a tactic's row of the result; `taken`: its samples."""
    times = times_of([us for us, _ in taken], 3)
    return {
        "tactic": entry.tactic.name,
        "kind": kind,
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
    contest, errors, kind_of = Contest(x.device), {}, {}
    row: dict[str, Any] = {"layer": name, "problem": str(problem(name)), "tactics": [], "failed": {}}
    x.data.setdefault("layers", []).append(row)
    for kind, entry in every(name, x.device, x.small):
        try:
            errors[entry], kind_of[entry] = contest.add(entry), kind
        except RuntimeError as e:
            row["failed"][entry.tactic.name] = str(e)[:500]
            x.data["errors"][f"{name}: {entry.tactic.name}"] = str(e)[:500]
    for entry, taken in contest.samples(SMALL_ROUNDS if x.small else ROUNDS).items():
        row["tactics"].append(told(kind_of[entry], entry, taken, errors[entry], x.device))
    print(next(table({"layers": [row]}, head=False)), flush=True)


def best_of(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns the fastest tactic of a kind in a layer's row; {} if there is none."""
    return min((t for t in row["tactics"] if t["kind"] == kind), key=lambda t: t["us"], default={})


def table(data: dict[str, Any], head: bool = True) -> Iterator[str]:
    """Yields a line of the result for each layer and each type of its inputs: the best dense and the best 2:4 tactic, each
    beside its prediction, and the gain of 2:4.
    """
    if head:
        yield f"{'layer':28}" + "".join(f" {k:>9} {'TFLOP/s':>8} {'predicted':>9}" for k in ("dense", "2:4")) + f" {'gain':>6}"
    for row, (dense, sparse) in product(data.get("layers", ()), PAIRS):
        if any(best := [best_of(row, dense), best_of(row, sparse)]):
            us, tflops, predicted = ([of.get(key, math.nan) for of in best] for key in ("us", "tflops", "predicted_us"))
            cells = "".join(f" {us[i]:9.1f} {tflops[i]:8.0f} {predicted[i]:9.1f}" for i in (0, 1))
            yield f"{row['layer'] + dense.removeprefix('dense').rjust(6):28}{cells} {us[0] / us[1]:6.2f}"


def main(argv: list[str] | None = None) -> int:
    x = begun(__doc__ or "", argv)
    for name in x.words or shapes(x.small):
        x.step(name, partial(measured, name, x), 6.0)
    return x.done()


if __name__ == "__main__":
    sys.exit(main())
