"""Which problems and tiles the Hopper convolutions refuse, and how their weights are packed: beside CuTe's layouts of shared
memory and of metadata."""

import random
from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.device import named
from tactics.candidates import candidates, rejected
from tactics.families.merged import merged
from tactics.launches import pack_weights, packing_key, section_bytes
from tactics.problems.pointwise_ops import NONE
from tactics.problems.problem import ConvProblem
from tactics.step import linear
from tactics.tactic import Tactic, Tile
from tests.independent.layouts import places, table
from tests.problems import conv_case
from tests.tactics.families.hopper.cases import BOX, CASES, DENSE, DEVICE, HWC8, NAMES, SMALL, SPARSE, crafted, data, tactics


def why(problem: ConvProblem, kernel: str, device=DEVICE) -> dict[str, list[Tactic]]:
    """Reason -> the kernel's tactics that it is against; of the kernel as a whole none."""
    found: dict[str, list[Tactic]] = {}
    for name, reason in rejected(problem, device):
        if name == kernel or getattr(name, "kernel", "") == kernel:
            found.setdefault(str(reason), []).extend([name] if isinstance(name, Tactic) else [])
    return found


FAR = {"h": 300, "w": 300, "c": 64}
REFUSED = {
    "short K": ({"c": 8}, "K = 8: less than 16"),
    "depthwise": ({"groups": 72, "k": 72}, "depthwise"),
    "groups": ({"groups": 2, "c": 144, "k": 144}, "a group of 72 input channels: a stage of 64 would reach into the next one"),
    "taps": ({"r": 16, "s": 1, "pad": (8, 0, 8, 0)}, "15 x 15 at most"),
    "reach": (FAR | {"s": 2, "dilation": (1, 255), "pad": (0, 0, 0, 127)}, "reaches over at most 254 pixels, got 255"),
    "stride": (FAR | {"stride": (1, 9)}, "element_strides: expected 1 to 8"),
    "corner in front": (FAR | {"r": 2, "pad": (129, 0, 0, 0)}, "lower: expected numbers from -128 to 127"),
    "corner behind": (FAR | {"pad": (0, 0, 0, 128)}, "upper: expected numbers from -128 to 127"),
    "corner of a reach without padding": (FAR | {"r": 3, "dilation": (65, 1)}, "upper: expected numbers from -128 to 127"),
    "size": ({"n": 64, "c": 64, "h": 1024, "w": 1024}, "2**31 elements or more"),
}


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
        {"pad": (128, 128, 127, 127), "r": 2, "s": 3}, {"r": 15, "s": 15}, {"c": 128, "groups": 2, "k": 144},
    ):  # fmt: skip
        problem = conv_case(**{"n": 1, "k": 40, "r": 1, "s": 1} | FAR | changes)
        assert any(t.kernel == DENSE for t in candidates(problem, DEVICE)), changes


def test_a_tactic_is_refused_with_its_reason():
    problem = ConvProblem(2, 72, 7, 9, 40, 1, 1)
    assert [r.code for name, r in rejected(problem, DEVICE) if name == SPARSE] == ["pattern_violation"]
    found = why(problem, DENSE)
    assert {linear(t.ins[0]) for t in found["linear input: a tensor map's rows are channels"]} == {True}
    narrow = found["linear output: a warpgroup stores rows of 32 pixels, 16 are no multiple"]
    assert {(t.gemm.n, linear(t.out)) for t in narrow} == {(16, True)}
    clusters = [
        t for reason, refused in found.items() if "no two for a cluster to have side by side" in reason for t in refused
    ]
    assert {t.gemm.cluster for t in clusters} == {(2, 1, 1), (1, 2, 1)}
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


def rows_of(problem: ConvProblem, w: np.ndarray, strip: bool) -> np.ndarray:
    """[group][row, to a multiple of 64][64 of K][64]: which weight a row multiplies a channel by. K is (tap; 64 channels), of
    strips (64 channels; column of the window; row of it)."""
    m = merged(problem)
    per_tap = -(-m.one.c // 64)
    out = np.zeros((m.count, -(-m.one.k // 64) * 64, problem.r * problem.s * per_tap, 64), np.float16)
    kg, cg = problem.k // problem.groups, problem.c // problem.groups
    for k, c, r, s in np.ndindex(w.shape):
        group, own = k // kg, k // kg % m.groups
        part, channel = divmod(own * cg + c, 64)
        stage = (part * problem.s + s) * problem.r + r if strip else (r * problem.s + s) * per_tap + part
        out[group // m.groups, own * kg + k % kg, stage, channel] = w[k, c, r, s]
    return out


PACKED = [*((name, SMALL) for name in ("parts_of_a_stage", "long_k", "groups", "gemm", "asymmetric")), ("long_k", BOX)]


def packed_and_expected(name: str, kernel: str, tile: Tile) -> tuple[dict[str, np.ndarray], np.ndarray]:
    problem, weights = CASES[name], data(CASES[name])[1]
    expected = rows_of(problem, weights["w"].astype(np.float16), bool(tile.box))
    assert np.count_nonzero(expected) > 100
    return pack_weights(problem, crafted(kernel, tile, problem), weights), expected


@pytest.mark.parametrize("name, tile", PACKED, ids=str)
def test_dense_weights_lie_where_cute_has_them(name, tile):
    """64 rows of 64 channels are K-major with the swizzle of 128 bytes."""
    packed, expected = packed_and_expected(name, DENSE, tile)
    at = table()["k-major, 128 bytes"]["at"].reshape(64, 64)
    count, rows, stages, _ = expected.shape
    found = packed["w"].view(np.float16).reshape(count, rows // 64, stages, 4096)[..., at]
    np.testing.assert_array_equal(found.transpose(0, 1, 3, 2, 4).reshape(expected.shape), expected)


@pytest.mark.parametrize("name, tile", PACKED, ids=str)
def test_sparse_weights_and_metadata_lie_where_cute_has_them(name, tile):
    """Of a k32 step and 16 rows a lane loads 16 bytes of kept values, and both steps' words of metadata at 16g + 8(t % 2) of
    128 bytes, whose codes say which columns these are."""
    packed, expected = packed_and_expected(name, SPARSE, tile)
    count, height, stages, _ = expected.shape
    kept = packed["w"].view(np.float16).reshape(count, height // 64, stages, 2, 128, 4, 2)  # step, thread, run of four columns
    words = packed["meta"].view(np.uint32).reshape(count, height // 64, stages, 4, 16, 2)  # warp, word, step
    codes = np.zeros((count, height, stages, 16), np.uint8)
    row, column = places("wgmma.sp metadata")
    for thread in [thread for thread in range(128) if thread % 4 < 2]:  # selector 0 reads these
        for step, nibble in np.ndindex(2, 8):
            word = words[:, :, :, thread // 32, thread % 32 // 4 * 2 + thread % 2, step]
            m, group = row[thread, 4 * nibble], 8 * step + column[thread, 4 * nibble] // 4
            codes[:, m::64, :, group] = word >> np.uint32(4 * nibble) & 15
    assert ((codes & 3) < (codes >> 2)).all(), "codes ascend"
    found = np.zeros_like(expected)
    row, column = places("wgmma.sp A")
    for thread, step, run in np.ndindex(128, 2, 4):
        m, group = row[thread, 4 * run], 8 * step + column[thread, 4 * run] // 4
        code, values = codes[:, m::64, :, group], kept[:, :, :, step, thread, run]
        index = np.stack([code & 3, code >> 2], axis=-1).astype(np.int64)
        np.put_along_axis(found[:, m::64, :, 4 * group : 4 * group + 4], index, values, axis=-1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("name", ["groups", "d2s", "tail"])
def test_sizes_are_known_and_tiles_share_what_is_packed(name, kernel):
    problem, weights = CASES[name], data(CASES[name])[1]
    by_key: dict[object, list[Tactic]] = {}
    for tactic in tactics(problem, kernel):
        by_key.setdefault(packing_key(problem, tactic), []).append(tactic)
    packed = []
    for found in by_key.values():
        first, *others = (pack_weights(problem, t, weights) for t in (found[0], *random.Random(name).sample(found, 8)))
        assert {n: a.nbytes for n, a in first.items()} == section_bytes(problem, found[0])
        for other in others:
            assert first.keys() == other.keys() and all(np.array_equal(a, other[n]) for n, a in first.items())
        packed.append(first["w"].tobytes())
    assert len(set(packed)) >= 2 - (name == "groups"), "strips have an order of their own"


def test_bias_stands_in_the_rows_of_weights():
    problem, weights = CASES["groups"], data(CASES["groups"])[1]
    packed = pack_weights(problem, crafted(DENSE, SMALL, problem, HWC8), weights)
    rows = packed["b"].reshape(2, 128)
    np.testing.assert_array_equal(rows[:, :72], weights["b"].reshape(2, 72))
    assert not rows[:, 72:].any()
