"""What a kernel is launched with is named, and held to the parameter struct in its source."""

import re
from itertools import product
from pathlib import Path

import pytest

from cuda_kernels.compile import ROOT, compile_kernel, virtual
from cuda_kernels.device import NAMED, named
from cuda_kernels.launch import KINDS, Emulated, fill_params
from cuda_kernels.params import Member, arrange, members
from tactics import kernels as tactic_kernels
from tactics.candidates import candidates
from tactics.launches import launches
from tests.problems import PROBLEMS

A10 = NAMED["a10"]
KERNELS = {path.stem for path in ROOT.glob("*.cu")}
OF_THE_WORKER = ("flush_l2", "reference_conv")  # which no plan launches


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_every_kernels_parameters_are_read(kernel):
    values = (("OPS", 1), ("SOURCES", 1)) if kernel == "pointwise" else ()
    found = members(kernel, values)
    assert len({m.name for m in found}) == len(found) and {m.kind for m in found} <= set(KINDS)
    assert kernel in OF_THE_WORKER or found[0].name.endswith("nonfinite")


@pytest.mark.full
def test_bytes_are_what_the_compiler_makes_of_the_struct():
    """Of each kernel the launches with the fewest and with the most members, so under #if and in arrays too."""
    found = {}
    for problem, device in product(PROBLEMS.values(), (A10, named("a100"), named("h200"))):  # an A100 has room for larger tiles
        for tactic in candidates(problem, device):
            for step in launches(problem, tactic):
                found.setdefault(step.kernel, {}).setdefault(len(step.args), step)
    fp32 = {"conv_fp32", "matmul_fp32"}  # which no tensor of FP16 leads to
    assert set(found) == KERNELS - set(OF_THE_WORKER) - fp32
    for kernel, steps in found.items():
        for step in {steps[min(steps)], steps[max(steps)]}:
            clustered = dict(step.values).get("CLUSTER", 1) != 1
            sm = tactic_kernels.KERNELS[kernel].sm or (named("h200") if clustered else A10).sm
            ptx = compile_kernel(kernel, dict(step.values), virtual(sm)).ptx
            size = int(re.search(rf"{kernel}_param_0\[(\d+)\]", ptx)[1])
            packed = fill_params(Emulated(A10), step.args, lambda _: 256)
            assert len(packed) == -(-size // 8) * 8, (kernel, step.values)


NAMED_ARGS = {"data": ("ptr", 1), "sink": ("ptr", 2), "words": ("i64", 3), "clocks": ("i64", 4)}


def test_arguments_are_put_in_the_structs_order():
    backwards = dict(reversed(NAMED_ARGS.items()))
    assert arrange("flush_l2", (), backwards) == tuple(NAMED_ARGS.values())
    assert arrange("flush_l2", (), NAMED_ARGS | {"sink": ("i64", 0)})[1] == ("i64", 0), "a null pointer"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"words": None}, "'words' is missing"),
        ({"bytes": ("i64", 3)}, "'bytes' is not a member"),
        ({"words": None, "bytes": ("i64", 3)}, "FlushParams, but 'words' is missing; 'bytes' is not a member"),
        ({"words": ("i32", 3)}, r"'words' is of type i64, got \('i32', 3\)"),
        ({"words": ("in", 0)}, "'words' is of type i64"),
        ({"sink": ("i64", 8)}, "'sink' is of type ptr"),
        ({"sink": ("map", None)}, "'sink' is of type ptr"),
    ],
)
def test_arguments_that_are_not_the_structs_are_named(change, says):
    given = {name: value for name, value in (NAMED_ARGS | change).items() if value is not None}
    with pytest.raises(ValueError, match=says):
        arrange("flush_l2", (), given)


STRUCT = """
#define MANY 1
struct Inner {
  int a, b;  // two, in one line
  __device__ int both() const { if (a) { return b; } return a; }
};
constexpr int N = count(DIGITS, 10);
struct Params {
  const X<2>::type *x, *y;
  Inner inner[2];
#if MANY
  long long big;
#if DIGITS
  u32 more[N][2];
#endif
#endif
  float last[N ? N : 1];
  TensorMap map;
};
extern "C" __global__ void k(const __grid_constant__ Params p) {}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "k.cu"
    path.write_text(text)
    return str(path)


def test_conditions_arrays_and_structs_within(tmp_path):
    kernel = written(tmp_path, STRUCT)
    inner = [Member(f"inner[{i}].{name}", "i32") for i in range(2) for name in "ab"]
    pointers, big = [Member("x", "ptr"), Member("y", "ptr")], Member("big", "i64")
    assert members(kernel, (("MANY", 0),)) == (*pointers, *inner, Member("last[0]", "f32"), Member("map", "map"))
    assert members(kernel, ()) == (*pointers, *inner, big, Member("last[0]", "f32"), Member("map", "map"))
    more = [Member(f"more[{i}][{j}]", "i32") for i in range(2) for j in range(2)]
    last = [Member(f"last[{i}]", "f32") for i in range(2)]
    assert members(kernel, (("DIGITS", 34),)) == (*pointers, *inner, big, *more, *last, Member("map", "map"))


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("  long long big;", "  double big;", "member 'big' is of type double, expected a struct, a pointer"),
        ("  int a, b;", "  int a, b; TensorMap map;", "struct Inner: member 'map': expected a TensorMap among the kernel's"),
        ("#if MANY", "#if MANY > 1", "'#if MANY > 1': expected #if of one macro"),
        ("  int a, b;", "  int a : 3;", "cannot read 'a : 3'"),
        ("[N][2]", "[M][2]", "array length 'M'"),
        ("__grid_constant__ Params", "Params", "expected one __global__ function"),
    ],
)
def test_a_source_that_is_not_understood_is_an_error(tmp_path, old, new, says):
    kernel = written(tmp_path, STRUCT.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(says)):
        members(kernel, (("DIGITS", 34),))
