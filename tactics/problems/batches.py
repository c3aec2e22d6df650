"""Problems at another batch, for networks whose batch is computed in pieces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tactics.problems import problem as kinds
from tactics.problems.protocol import Problem, Shape4

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True, slots=True)
class BatchPiecesProblem(Problem):
    """The split of a tensor of shape `shape` into pieces of `sizes` images (`apart`), or the join of such pieces to one tensor.

    Nothing is launched: images follow each other in memory. `us`: microseconds that DRAM takes for the part of the whole tensor
    that does not fit in L2. Only the planner uses this problem; engines have a Gather for each piece, and a Concat to join
    them.
    """

    shape: Shape4
    sizes: tuple[int, ...]
    apart: bool
    us: float = 0.0

    def __str__(self) -> str:
        return f"{'pieces of' if self.apart else 'pieces to'} {'x'.join(map(str, self.shape))} in {self.sizes}"

    @property
    def in_shapes(self) -> tuple[Shape4, ...]:
        return (self.shape if self.apart else (self.sizes[0], *self.shape[1:]),)

    @property
    def out_shape(self) -> Shape4:
        return (self.sizes[0], *self.shape[1:]) if self.apart else self.shape


def sizes_of(images: int, pieces: int) -> tuple[int, ...]:
    """Returns the sizes of `pieces` pieces of a batch, which differ by at most one, the larger ones first.

    >>> sizes_of(50, 4)
    (13, 13, 12, 12)
    """
    least, more = divmod(images, pieces)
    return (least + 1,) * more + (least,) * (pieces - more)


def at_batch(problem: P, n: int) -> P | None:
    """Returns the problem at batch `n`; None if an image's result depends on other images, or if a tensor's first axis is not
    the batch.
    """
    kind, images = type(problem), problem.out_shape[0]
    if any(shape[0] != images for shape in problem.all_shapes):
        return None
    rule = _parts if problem.PARTS else _RULES.get(kind, lambda *_: None)
    found: P | None = rule(problem, n)
    return found


def _parts(p: Any, n: int) -> Any:
    found = {name: at_batch(getattr(p, name), n) for name in p.PARTS}
    return None if None in found.values() else replace(p, **found)


_RULES: Mapping[type[Problem], Callable[[Any, int], Any]] = {
    **dict.fromkeys(
        (kinds.ConvProblem, kinds.ConvTransposeProblem, kinds.PoolProblem, kinds.MoveProblem, kinds.ResizeProblem),
        lambda p, n: replace(p, n=n),
    ),
    **dict.fromkeys(
        (kinds.ReduceProblem, kinds.NormalizeProblem),
        lambda p, n: None if "n" in p.axes or "n" in p.affine else replace(p, n=n),
    ),
    kinds.PointwiseProblem: lambda p, n: None if any("n" in axes for axes in p.constants) else replace(p, n=n),
    kinds.ConcatProblem: lambda p, n: None if p.axis == 0 else replace(p, rest=(n, *p.rest[1:])),
    kinds.ViewProblem: lambda p, n: replace(p, shape=(n, *p.shape[1:]), out=(n, *p.out[1:])),
    kinds.GatherProblem: lambda p, n: None if p.perm[0] or p.index[0] else replace(p, shape=(n, *p.shape[1:])),
    kinds.MatmulProblem: lambda p, n: replace(p, a_batch=(n, p.a_batch[1]), b_batch=(n, p.b_batch[1])),
}
