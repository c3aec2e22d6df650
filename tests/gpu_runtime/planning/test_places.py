"""Keys of tensors that lie inside others: which formats they may have there."""

from tests.engines import check_engine
from tests.reference_run import model, node


def test_a_piece_behind_a_transposition_has_a_format_that_reformats_know(tmp_path):
    """Transposed to rows, the pieces of `t` are runs of memory, in which `r` would have channels last without padding. No
    reformat between that format and the others of `r` is timed, so `r` is copied there."""
    nodes = [
        node("Relu", "x", "r"),
        node("Transpose", "r", "p", perm=[2, 0, 3, 1]),
        node("Concat", "p p", "t", axis=1),
        node("Concat", "r r", "s", axis=0),
    ]
    shapes = {"x": (1, 14, 1, 16)}
    engine = check_engine(tmp_path, model(nodes, shapes, "t s"))
    assert {tuple(o.shape) for o in engine.plan.outputs} == {(1, 2, 16, 14), (2, 14, 1, 16)}
