"""Reformats, slices and pieces of Concat: whole sectors on both sides, few instructions, enough bytes in flight."""

import itertools
from types import SimpleNamespace

import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import named
from gpu_runtime.runtime.feeds import reformats
from tactics.candidates import candidates
from tactics.format import Format, num_bytes
from tactics.launches import launches
from tactics.problems.problem import ConcatProblem, MoveProblem, ReformatProblem
from tactics.roofline import LATENCY_CLK, resident, sm_l2
from tests.compiled import measured
from tests.problems import check

DEVICE = named("h200")
FORMATS = ("fp16:chw", "fp16:hwc8", "fp16:chw32", "fp32:chw", "fp32:hwc")
REFORMATS = {
    f"{src} {dst}": ReformatProblem(1, 64, 16, 12, src, dst)
    for src, dst in itertools.permutations(FORMATS, 2)
    if not (src.startswith("fp32") and dst.startswith("fp32"))
} | {
    "image": ReformatProblem(1, 3, 32, 20, "fp32:chw", "fp16:chw"),
    "bytes": ReformatProblem(1, 3, 32, 20, "uint8:chw", "fp16:chw"),
    "bytes as vectors": ReformatProblem(1, 3, 32, 20, "uint8:chw", "fp16:hwc8"),
    "small planes": ReformatProblem(8, 24, 7, 7, "fp16:chw", "fp32:chw"),
    "classes": ReformatProblem(4, 1000, 1, 1, "fp16:chw", "fp32:chw"),
    "classes of vectors": ReformatProblem(4, 1000, 1, 1, "fp16:hwc8", "fp32:chw"),
}
MOVES = {
    "slice": MoveProblem(1, 128, 8, 12, "window", (64, 8, 12), start=(32, 0, 0)),
    "shuffle": MoveProblem(1, 256, 4, 6, "d2s_dcr", (64, 8, 12), step=(1, 2, 2)),
    "unshuffle": MoveProblem(1, 64, 8, 12, "s2d_dcr", (256, 4, 6), step=(1, 2, 2)),
    "piece": ConcatProblem((16, 48), (2, 8, 12)),
}


PLANES = {
    "in the middle": MoveProblem(2, 21, 4, 6, "window", (7, 4, 6), start=(5, 0, 0)),
    "one in three": MoveProblem(2, 21, 4, 6, "window", (7, 4, 6), start=(1, 0, 0), step=(3, 1, 1)),
    "backwards": MoveProblem(2, 21, 4, 6, "window", (21, 4, 6), start=(20, 0, 0), step=(-1, 1, 1)),
    "padded": MoveProblem(2, 12, 4, 6, "window", (20, 4, 6), start=(-4, 0, 0), fill=1.5),
    "pieces": ConcatProblem((5, 16, 3), (2, 4, 6)),
    "pieces of odd planes": ConcatProblem((5, 16, 3), (2, 3, 3)),
}


@pytest.mark.parametrize("name", PLANES)
def test_whole_planes_are_rows_of_elements(name):
    """Which the kernel moves as channels of a pixel, where they are eights; from and to other layouts all the same."""
    for tactic in candidates(PLANES[name], DEVICE):
        if tactic.kernel == "move" and {f.layout for f in (*tactic.ins, tactic.out)} <= {"chw", "hwc8"}:
            check(PLANES[name], tactic, DEVICE)


def tactics(problem):
    """A reformat's own; of others those between vectors, and between planes where these stay as they are."""
    pairs = [("hwc8", "hwc8"), ("hwc16", "chw32"), *([] if "2s" in str(problem) or "2d" in str(problem) else [("chw", "chw")])]
    found = candidates(problem, DEVICE)
    if isinstance(problem, ReformatProblem):
        return found
    return [t for t in found if t.kernel == "move" and (t.ins[-1].layout, t.out.layout) in pairs and len({*t.ins}) == 1]


@pytest.mark.parametrize("name", [*REFORMATS, *MOVES])
def test_each_sector_is_touched_once(name):
    """By one request of one warp. What a slice leaves out is not touched."""
    problem = (REFORMATS | MOVES)[name]
    for tactic in tactics(problem):
        sizes = [num_bytes(f, s) for f, s in zip((*tactic.ins, tactic.out), problem.all_shapes, strict=True)]
        least = 2 * sizes[-1] if name == "slice" else sum(sizes)
        if isinstance(problem, ConcatProblem):  # a launch each; the counters are the last one's
            least = 2 * num_bytes(tactic.ins[1], problem.in_shapes[1])
        _, stats = check(problem, tactic, DEVICE)
        assert stats.sectors * 32 <= 1.02 * least, f"{tactic}: {stats.sectors * 32 / least:.2f} of the bytes"


LARGE = {
    "vectors": ("fp16:chw32", "fp16:hwc8", 150),
    "to planes": ("fp16:hwc8", "fp16:chw", 190),
    "from planes": ("fp16:chw", "fp16:hwc8", 150),
    "planes": ("fp16:chw", "fp32:chw", 190),
    "image": ("fp32:chw", "fp16:chw", 190),
}


@pytest.mark.parametrize("name", LARGE)
def test_enough_is_on_its_way(name):
    """Of a batch of 32, on a full SM: as many bytes as L2 sends it while a load waits. Of a thread's item the machine code has
    few instructions: an SM issues 128 a clock, and L2 sends it 38 bytes."""
    source, out, most = LARGE[name]
    problem = ReformatProblem(32, 64, 56, 56, source, out)
    (step,) = launches(problem, candidates(problem, DEVICE)[0])
    values = dict(step.values)
    code = measured(compile_kernel("move", step.values, DEVICE.sm))
    item = 8 if name == "planes" else 16  # bytes that are read: of FP32 outputs, four elements
    flying = resident(DEVICE, 256, code.regs, 0) * 256 * item * values["ITEMS"]
    assert flying >= LATENCY_CLK * sm_l2(DEVICE, DEVICE.num_sms) and code.instructions / values["ITEMS"] <= most


@pytest.mark.parametrize("layout, shape", [("hwc8", (4, 1000, 1, 1)), ("hwc", (4, 1, 8, 8)), ("hwc8", (4, 16, 8, 8))], ids=str)
def test_arrays_of_a_caller_begin_anywhere(layout, shape):
    """Their side is linear, at a multiple of its elements only: no access there is wider than one."""
    end = SimpleNamespace(name="x", dtype="fp16", format=Format("fp16", layout), shape4=shape)
    for (_, inward), step in reformats(SimpleNamespace(inputs=(end,), outputs=(end,))).items():
        values = dict(step.values)
        assert not values["IN_VEC" if inward else "OUT_VEC"]
        assert values["OUT_VEC" if inward else "IN_VEC"] == (layout == "hwc8")
