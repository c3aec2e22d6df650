"""Concats of parts of one tensor that are all of it in another order: one move, however written, against onnxruntime."""

import itertools

import numpy as np
import pytest

from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import ConcatProblem, MoveProblem
from tests.conftest import MODELS
from tests.reference_run import check_against_ort, model, node

CASE = MODELS.parent / "cases" / "unfold_slices.onnx"
BIG = 2**31 - 1


class Net:
    """Nodes and constants of a model while it is written down; methods return the name of their output."""

    def __init__(self):
        self.nodes, self.weights = [], {}

    def op(self, kind: str, inputs: str, *constants, **attributes) -> str:
        name = f"t{len(self.nodes)}"
        for i, value in enumerate(constants):
            self.weights[f"{name}.{i}"] = np.array(value, np.int64)
            inputs += f" {name}.{i}"
        self.nodes.append(node(kind, inputs, name, **attributes))
        return name

    def slice(self, x: str, axis: int, start: int, end: int, step: int = 1) -> str:
        return self.op("Slice", x, [start], [end], [axis], [step])

    def of(self, y: str, shape, reader="Relu", **inputs):
        """The model, in which an operator reads what was made."""
        self.nodes.append(node(reader, y, "y"))
        return model(self.nodes, {"x": shape, **inputs}, "y", self.weights, opset=17)


def moving(net) -> list[str]:
    """Kinds of the problems that move data, without views."""
    problems = [op.problem for op in net.ops if isinstance(op.problem, (MoveProblem, GatherProblem, ConcatProblem))]
    return [getattr(p, "kind", type(p).__name__) for p in problems]


def corners(net: Net, size: tuple[int, int], order, x: str = "x") -> list[str]:
    """The pixels at each place of blocks of that size, a Slice along each axis."""
    return [net.slice(net.slice(x, 2, i, BIG, size[0]), 3, j, BIG, size[1]) for i, j in order]


def test_an_exported_unfold_is_one_move():
    """Eight Slices, Transposes and Unsqueezes of rows, then as many of columns."""
    net = check_against_ort(CASE)
    assert moving(net) == ["s2d_dcr"]


@pytest.mark.parametrize("seed", range(16))
def test_blocks_of_any_size_joined_along_any_axis(seed):
    """Every corner of the blocks once, as it is or with an axis of its own, in the order of rows or of columns."""
    rng, net = np.random.default_rng(seed), Net()
    n, c, b, d = (int(rng.integers(1, 4)) for _ in range(4))
    size = (b + 1, d + 1)
    shape = (n, c, 4 * size[0], 3 * size[1])
    order = [*itertools.product(range(size[0]), range(size[1]))]
    order = order if seed % 2 else sorted(order, key=lambda at: at[::-1])
    parts, axis = corners(net, size, order), int(rng.integers(1, 5))
    if seed % 4 < 2:
        parts = [net.op("Unsqueeze", p, [axis]) for p in parts]
    elif seed % 8 < 4:
        parts = [net.op("Reshape", p, [n, 1, c, 12]) for p in parts]
    axis = min(axis, 3)
    made = moving(check_against_ort(net.of(net.op("Concat", " ".join(parts), axis=axis), shape)))
    assert len(made) == 1 or len(made) == (2 if 2 * len(parts) >= 32 else len(parts) + 1), made


@pytest.mark.parametrize("kind, columns", [("s2d_dcr", False), ("s2d_crd", False), ("GatherProblem", True)])
def test_of_one_channel_or_many(kind, columns):
    """Corners by rows are SpaceToDepth, of each channel by itself too; by columns, of one channel, a transpose."""
    net, c, order = Net(), 1 if columns else 3, [*itertools.product(range(4), range(4))]
    order = sorted(order, key=lambda at: at[::-1]) if columns else order
    each = [net.slice("x", 1, k, k + 1) for k in range(c)] if kind == "s2d_crd" else ["x"]
    parts = [part for x in each for part in corners(net, (4, 4), order, x)]
    proto = net.of(net.op("Concat", " ".join(parts), axis=1), (1 if columns else 2, c, 8, 12))
    assert moving(check_against_ort(proto)) == [kind]


def test_channels_taken_in_turn_are_a_transpose():
    net = Net()
    parts = [net.slice("x", 1, g, BIG, 4) for g in range(4)]
    found = check_against_ort(net.of(net.op("Concat", " ".join(parts), axis=1), (2, 24, 5, 3)))
    assert moving(found) == ["GatherProblem"] and found.ops[0].problem == ViewProblem((2, 24, 5, 3), (2, 6, 4, 15))


def test_pixels_of_channels_are_depth_to_space():
    net = Net()
    rows = []
    for i in range(2):
        cut = [net.op("Unsqueeze", net.slice("x", 1, 2 * i + j, BIG, 4), [4]) for j in range(2)]
        rows.append(net.op("Unsqueeze", net.op("Concat", " ".join(cut), axis=4), [3]))
    whole = net.op("Reshape", net.op("Concat", " ".join(rows), axis=3), [2, 3, 10, 12])
    assert moving(check_against_ort(net.of(whole, (2, 12, 5, 6)))) == ["d2s_crd"]


def test_all_parts_in_order_are_the_tensor_itself():
    for reader in ("Relu", "Identity"):  # Identity: as the network's output
        net = Net()
        parts = [net.slice("x", 3, 2 * i, 2 * i + 2) for i in range(6)]
        assert moving(check_against_ort(net.of(net.op("Concat", " ".join(parts), axis=3), (2, 3, 4, 12), reader))) == []


def test_parts_and_tensors_between_that_others_read_are_there():
    net = Net()
    parts = corners(net, (2, 2), itertools.product(range(2), range(2)))
    joined = net.op("Concat", " ".join(parts), axis=1)
    turned = net.op("Transpose", joined, perm=(0, 2, 3, 1))
    sums = net.op("Add", f"{parts[1]} {net.op('Relu', parts[2])}")
    both = net.op("ReduceSum", net.op("Relu", joined), [1], keepdims=1)
    y = net.op("Add", f"{net.op('Transpose', turned, perm=(0, 3, 1, 2))} {net.op('Add', f'{sums} {both}')}")
    check_against_ort(net.of(y, (2, 1, 6, 8)))


MISSES = {
    "one twice": [(0, 0), (0, 1), (1, 0), (0, 1)],
    "one missing": [(0, 0), (0, 1), (1, 0)],
    "no order of blocks": [(0, 0), (1, 1), (1, 0), (0, 1)],
    "backwards": [(1, 1), (1, 0), (0, 1), (0, 0)],
}


@pytest.mark.parametrize("order", MISSES.values(), ids=[*MISSES])
def test_what_is_no_rearrangement_stays(order):
    net = Net()
    proto = net.of(net.op("Concat", " ".join(corners(net, (2, 2), order)), axis=1), (1, 1, 6, 8))
    found = check_against_ort(proto)
    assert len(moving(found)) == len(order) + 1


@pytest.mark.parametrize("case", ["another tensor", "overlapping", "padded", "unequal", "rolled"])
def test_what_only_looks_like_it_stays(case):
    net, more, axis = Net(), {}, 3
    parts = [net.slice("x", 3, 4 * i, 4 * i + 4) for i in range(3)]
    if case == "another tensor":
        more, parts = {"z": (2, 3, 4, 12)}, [*parts[:2], net.slice("z", 3, 8, 12)]
    elif case == "overlapping":
        parts = [*parts[:2], net.slice("x", 3, 7, 11)]
    elif case == "padded":
        parts = [*parts[:2], net.op("Pad", net.slice("x", 3, 9, 12), [0, 0, 0, 0, 0, 0, 0, 1])]
    elif case == "unequal":
        parts = [parts[1], net.slice("x", 3, 0, 4), net.slice("x", 3, 8, 10), net.slice("x", 3, 10, 12)]
    else:
        parts = [net.slice("x", 3, 5, 12), net.slice("x", 3, 0, 5)]
    found = check_against_ort(net.of(net.op("Concat", " ".join(parts), axis=axis), (2, 3, 4, 12), **more))
    assert "ConcatProblem" in moving(found)
