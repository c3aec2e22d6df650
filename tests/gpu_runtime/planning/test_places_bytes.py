"""Whole numbers of 8 bits that lie inside other tensors, and ops that move nothing of them."""

from gpu_runtime.network import Network, Op, TensorInfo, Type
from gpu_runtime.planning.places import entries, images, keys_inside, types, views
from tactics.format import canonical
from tactics.problems.batches import BatchPiecesProblem
from tactics.problems.gather import ViewProblem
from tactics.problems.problem import ConcatProblem, MoveProblem

CAT = Op("cat", ConcatProblem((16, 32), (1, 4, 4)), ("a", "b"), "y")
SHAPES = {"a": (1, 16, 4, 4), "b": (1, 32, 4, 4), "y": (1, 48, 4, 4)}


def network(*whole: str) -> Network:
    ends = [TensorInfo(t, shape, "fp16", shape) for t, shape in SHAPES.items()]
    return Network("n", tuple(ends[:2]), (ends[2],), dict(SHAPES), (CAT,), types={t: Type(whole="int8") for t in whole})


def printed(op: Op, *dtypes: str) -> list[str]:
    return [" ".join(map(str, (*ins, "->", out))) for ins, out in entries(op, dtypes)]


def test_pieces_begin_at_multiples_of_16_bytes():
    assert printed(CAT, "int8") == [
        "int8:last16@cat.0 int8:last32@cat.1 -> int8:last48"
    ]  # of chw32, 16 channels are half a vector
    eights = Op("cat", ConcatProblem((24, 24), (1, 4, 4)), ("a", "b"), "y")
    assert not printed(eights, "uint8") and printed(eights, "fp16")
    planes = Op("cat", ConcatProblem((64, 32), (1, 4, 4)), ("a", "b"), "y")
    assert "uint8:planes32@cat.0 uint8:last32@cat.1 -> uint8:planes32" in printed(planes, "uint8")
    part = Op("part", MoveProblem(1, 64, 4, 4, "window", (16, 4, 4), start=(32, 0, 0)), ("x",), "y")
    assert "int8:last64 -> int8:last16@part" in [f"{ins[0]} -> {out}" for ins, out in entries(part, ("int8",))]


def test_only_tensors_of_one_type_of_whole_numbers():
    usable = {t: {canonical(f, SHAPES[t]) for f in network("a", "b", "y").formats(t)} for t in SHAPES}
    for whole, expected in ((("a", "b", "y"), True), (("a", "y"), False), ((), False)):
        made = network(*whole)
        assert types(made, CAT) == (("int8", "fp16") if expected else ("fp16",))
        found = {str(key) for keys in keys_inside(made, 4, usable).values() for key in keys}
        assert ("int8:last16@cat.0" in found) is expected and "fp16:last16@cat.0" in found


def test_views_and_pieces_of_a_batch_move_no_bytes():
    rows = Op("view", ViewProblem((2, 32, 4, 4), (2, 32, 16, 1)), ("x",), "y")
    assert ("int8:last32", "int8:last32") in [(str(x), str(y)) for x, y in views(rows, ("int8", "fp16"))]
    assert not [x for x, _ in views(rows) if x.dtype == "int8"]
    turned = Op("view", ViewProblem((2, 32, 4, 4), (2, 16, 4, 8)), ("x",), "y")
    assert not [x for x, _ in views(turned, ("int8", "fp16")) if x.dtype == "int8"]  # channels are not those of the input
    split = Op("split", BatchPiecesProblem((4, 20, 3, 3), (2, 2), True), ("x",), "y")
    assert "int8:last32" in [str(x) for x, _ in images(split, ("int8",))]
