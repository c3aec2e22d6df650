"""Which problems and tiles the Hopper convolutions refuse, and how their weights are packed: beside CuTe's layouts of shared
memory and of metadata."""

import random
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.device import named
from tactics.candidates import candidates, rejected
from tactics.families.conv_gemm import merged
from tactics.launches import pack_weights, packing_key, section_bytes
from tactics.problems.pointwise_ops import NONE
from tactics.problems.problem import ConvProblem
from tactics.step import linear
from tactics.tactic import Tactic
from tests.independent.layouts import places, table
from tests.problems import conv_case
from tests.tactics.families.hopper.cases import CASES, DENSE, DEVICE, HWC8, NAMES, SMALL, SPARSE, crafted, data, tactics


def why(problem: ConvProblem, kernel: str, device=DEVICE) -> dict[str, list[Tactic]]:
    """Reason -> the kernel's tactics that it is against; of the kernel as a whole none."""
    found: dict[str, list[Tactic]] = {}
    for name, reason in rejected(problem, device):
        if name == kernel or getattr(name, "kernel", "") == kernel:
            found.setdefault(str(reason), []).extend([name] if isinstance(name, Tactic) else [])
    return found


FAR = {"h": 300, "w": 300, "c": 64}
REFUSED = {
    "short K": ({"c": 40}, "K = 40: less than a stage of 64"),
    "depthwise": ({"groups": 72, "k": 72}, "depthwise"),
    "groups": ({"groups": 2, "c": 144, "k": 144}, "a group of 72 input channels: a stage of 64 would reach into the next one"),
    "taps": ({"r": 16, "s": 1, "pad": (8, 0, 8, 0)}, "15 x 15 at most"),
    "reach": (FAR | {"s": 2, "dilation": (1, 255), "pad": (0, 0, 0, 127)}, "reaches over at most 254 pixels, got 255"),
    "stride": (FAR | {"stride": (1, 9)}, "element_strides: expected 1 to 8"),
    "corner in front": (FAR | {"r": 3, "pad": (129, 0, 0, 0)}, "lower: expected numbers from -128 to 127"),
    "corner behind": (FAR | {"pad": (0, 0, 0, 128)}, "upper: expected numbers from -128 to 127"),
    "corner of a reach without padding": (FAR | {"r": 3, "dilation": (65, 1)}, "upper: expected numbers from -128 to 127"),
    "size": ({"n": 64, "c": 64, "h": 1024, "w": 1024}, "2**31 elements or more"),
}


@pytest.mark.xfail(strict=True, reason="refused as 'no gate of its input', and so on, before the family says why")
@pytest.mark.parametrize("how", [{"scaled": True}, {"gated": NONE}, {"norm": 1e-5}], ids=str)
def test_what_changes_pixels_in_registers_is_refused_with_that_reason(how):
    problem = conv_case(2, 72, 7, 9, 40, 1, 1, **how)
    assert not any(t.kernel in NAMES for t in candidates(problem, DEVICE))
    assert any(
        "change pixels in registers: wgmma reads shared memory" in str(reason) for _, reason in rejected(problem, DEVICE)
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_problem_is_refused_with_its_reason(name):
    changes, word = REFUSED[name]
    problem = conv_case(**{"n": 2, "c": 72, "h": 7, "w": 9, "k": 40, "r": 1, "s": 1} | changes)
    assert not any(t.kernel == DENSE for t in candidates(problem, DEVICE))
    of_vectors = [
        reason for reason, found in why(problem, DENSE).items() if not all(linear(t.ins[0]) for t in found) or not found
    ]
    assert of_vectors and any(word in reason for reason in of_vectors), of_vectors


def test_what_is_just_allowed():
    for changes in (
        {"s": 2, "dilation": (1, 254), "pad": (0, 0, 0, 127)}, {"stride": (8, 8)},
        {"pad": (128, 128, 127, 127), "r": 3, "s": 3}, {"r": 15, "s": 15}, {"c": 128, "groups": 2, "k": 144},
    ):  # fmt: skip
        problem = conv_case(**{"n": 1, "k": 40, "r": 1, "s": 1} | FAR | changes)
        assert any(t.kernel == DENSE for t in candidates(problem, DEVICE)), changes


def test_a_tactic_is_refused_with_its_reason():
    problem = ConvProblem(2, 72, 7, 9, 40, 1, 1)
    assert [r.code for name, r in rejected(problem, DEVICE) if name == SPARSE] == ["pattern_violation"]
    found = why(problem, DENSE)
    assert {linear(t.ins[0]) for t in found["linear input: a tensor map's rows are channels"]} == {True}
    narrow = found["linear output: a warpgroup stores rows of 32 pixels, the tile has 16"]
    assert {(t.gemm.n, linear(t.out)) for t in narrow} == {(16, True)}
    clusters = [t for reason, refused in found.items() if "a cluster has 2 side by side" in reason for t in refused]
    assert clusters and {t.gemm.cluster for t in clusters} == {2}
    planes = [
        t
        for reason, refused in found.items()
        if "expected all of a pixel together, got planes of 32" in reason
        for t in refused
    ]
    assert planes and {t.ins[0].layout for t in planes} == {"chw32"}
    assert {t.ins[0].layout for t in candidates(problem, DEVICE) if t.kernel == DENSE} == {"hwc8", "hwc16"}
    small = replace(DEVICE, smem_per_block=100 * 1024)
    assert any("bytes of shared memory" in reason for reason in why(problem, DENSE, small))


@pytest.mark.parametrize("device", ["a100", "rtx4090", "h100", "b200"])
def test_another_architecture_has_none(device):
    problem, there = CASES["residual"], named(device)
    known = there.sm == "sm_90a"
    assert any(t.kernel in NAMES for t in candidates(problem, there)) == known
    assert any(why(problem, kernel, there) for kernel in NAMES) == known


# ---- packing


def rows_of(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """[group][row, to a multiple of 64][stage][64]: which weight a row multiplies a stage's channel by."""
    m = merged(problem)
    per_tap = -(-m.one.c // 64)
    out = np.zeros((m.count, -(-m.one.k // 64) * 64, problem.r * problem.s * per_tap, 64), np.float16)
    kg, cg = problem.k // problem.groups, problem.c // problem.groups
    for k, c, r, s in np.ndindex(w.shape):
        group, own = k // kg, k // kg % m.groups
        out[group // m.groups, own * kg + k % kg, (r * problem.s + s) * per_tap + (own * cg + c) // 64, (own * cg + c) % 64] = (
            w[k, c, r, s]
        )
    return out


def in_stages(packed: np.ndarray, shape: tuple[int, ...], width: int) -> np.ndarray:
    """What a stage's rows of `width` halfs are, by CuTe's K-major layout of as many bytes: [group][row][stage][width]."""
    at = table()[f"k-major, {2 * width} bytes"]["at"].reshape(64, 64)[:, :width]
    assert sorted(at.reshape(-1)) == list(range(64 * width)), "the first columns of the table are a tile of their own"
    count, rows, stages, _ = shape
    return (
        packed.view(np.float16)
        .reshape(count, rows // 64, stages, 64 * width)[..., at]
        .transpose(0, 1, 3, 2, 4)
        .reshape(count, rows, stages, width)
    )


PACKED = ("parts_of_a_stage", "long_k", "groups", "gemm", "asymmetric")


@pytest.mark.parametrize("name", PACKED)
def test_dense_weights_lie_where_cute_has_them(name):
    problem, weights = CASES[name], data(CASES[name])[1]
    expected = rows_of(problem, weights["w"].astype(np.float16))
    packed = pack_weights(problem, crafted(DENSE, SMALL, problem), weights)
    np.testing.assert_array_equal(in_stages(packed["w"], expected.shape, 64), expected)
    assert np.count_nonzero(expected) > 100


@pytest.mark.parametrize("name", PACKED)
def test_sparse_weights_and_metadata_lie_where_cute_has_them(name):
    """Lane 4g + t of warp w finds its word of a k32 step among the 64 bytes of these 16 rows: at 8g + 4(t % 2). Its codes say
    which columns the kept values are."""
    problem, weights = CASES[name], data(CASES[name])[1]
    expected = rows_of(problem, weights["w"].astype(np.float16))
    packed = pack_weights(problem, crafted(SPARSE, SMALL, problem), weights)
    kept = in_stages(packed["w"], expected.shape, 32)
    count, height, stages, _ = expected.shape
    words = packed["meta"].view(np.uint32).reshape(count, height // 64, stages, 4, 2, 16)  # warp, step, word
    row, column = places("wgmma.sp metadata")
    found = np.zeros_like(expected)
    for lane in [lane for lane in range(128) if lane % 4 < 2]:  # selector 0 reads these
        for step, nibble in np.ndindex(2, 8):
            m, group = row[lane, 4 * nibble], (32 * step + column[lane, 4 * nibble]) // 4
            code = words[:, :, :, lane // 32, step, lane % 32 // 4 * 2 + lane % 2] >> np.uint32(4 * nibble) & 15
            assert ((code & 3) < (code >> 2)).all(), "codes ascend"
            for which, index in enumerate((code & 3, code >> 2)):
                at, value = found[:, m::64, :, 4 * group : 4 * group + 4], kept[:, m::64, :, 2 * group + which]
                np.put_along_axis(at, index[..., None].astype(np.int64), value[..., None], axis=-1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("name", ["groups", "d2s", "tail"])
def test_sizes_are_known_and_tiles_share_what_is_packed(name, kernel):
    problem, weights = CASES[name], data(CASES[name])[1]
    by_key: dict[object, list[Tactic]] = {}
    for tactic in tactics(problem, kernel):
        by_key.setdefault(packing_key(problem, tactic), []).append(tactic)
    assert len(by_key) <= 4
    for found in by_key.values():
        first, other = (pack_weights(problem, t, weights) for t in (found[0], random.Random(name).choice(found)))
        assert {n: a.nbytes for n, a in first.items()} == section_bytes(problem, found[0])
        assert first.keys() == other.keys() and all(np.array_equal(a, other[n]) for n, a in first.items())


def test_bias_stands_in_the_rows_of_weights():
    problem, weights = CASES["groups"], data(CASES["groups"])[1]
    packed = pack_weights(problem, crafted(DENSE, SMALL, problem, HWC8), weights)
    rows = packed["b"].reshape(2, 128)
    np.testing.assert_array_equal(rows[:, :72], weights["b"].reshape(2, 72))
    assert not rows[:, 72:].any()
