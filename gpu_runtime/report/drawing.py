"""The places of the nodes and edges in a drawing of a plan's graph: nodes in rows by longest path, edges around the nodes.

Long edges are cut at every row that they pass; nodes and cuts of a row are ordered by the mean place of their neighbours (the
barycentre method of Sugiyama, Tagawa and Toda, 1981), then moved as near to this place as their order and widths allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROW, NODE, LANE, GAP = 72.0, 190.0, 14.0, 22.0  # pixels: height of a row, width of a node, of a passing edge, of a gap
SWEEPS, PLACING = 8, 40  # passes over all rows: to order each row, and to place its nodes and cuts
MOST_CUTS = 30_000  # in a graph with more cuts long edges are drawn straight


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn graph, in pixels. `nodes`: the centre (x, y) of each node; `edges`: the points (x, y) of each edge's line, from
    its first node to its second; `width`, `height`: of the drawing.
    """

    nodes: tuple[tuple[float, float], ...]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def draw(count: int, edges: Sequence[tuple[int, int]]) -> Drawing:
    """Returns the drawing of a graph with the nodes 0 to count - 1.

    `edges`: pairs of nodes; the first node is drawn above the second. Raises ValueError if the edges form a circle.
    """
    rows = _rows(count, edges)
    paths, row_of, joined = _cut(count, edges, rows)
    order = _ordered(row_of, joined)
    widths = [NODE if i < count else LANE for i in range(len(row_of))]
    x = _placed(order, joined, widths)
    left = min((at - w / 2 for at, w in zip(x, widths, strict=True)), default=0.0)
    points = [(round(at - left, 1), round((row + 0.5) * ROW, 1)) for at, row in zip(x, row_of, strict=True)]
    width = max((at - left + w / 2 for at, w in zip(x, widths, strict=True)), default=0.0)
    corners = tuple(_without_straight([points[i] for i in path]) for path in paths)
    return Drawing(tuple(points[:count]), corners, round(width, 1), (max(row_of, default=-1) + 1) * ROW)


def _rows(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Returns each node's row, 0 at the top: the length of the longest path to the node. A node without predecessors is in the
    row above its first successor. Raises ValueError if the edges form a circle.

    >>> _rows(4, [(0, 1), (1, 2), (3, 2)])
    [0, 1, 2, 1]
    """
    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for a, b in edges:
        after[a].append(b)
        waits[b] += 1
    rows, ready, done = [0] * count, [i for i in range(count) if not waits[i]], 0
    sources = list(ready)
    while ready:
        a = ready.pop()
        done += 1
        for b in after[a]:
            rows[b] = max(rows[b], rows[a] + 1)
            waits[b] -= 1
            if not waits[b]:
                ready.append(b)
    if done < count:
        raise ValueError("the edges of a plan's graph form a circle")
    for i in sources:
        rows[i] = min((rows[b] - 1 for b in after[i]), default=0)
    return rows


def _cut(
    count: int, edges: Sequence[tuple[int, int]], rows: Sequence[int]
) -> tuple[list[list[int]], list[int], list[tuple[int, int]]]:
    """Cuts each edge at every row that it passes; cuts have the numbers after the nodes, `count` and more.

    Returns (the numbers of the nodes and cuts along each edge, the row of each node and cut, the pairs of nodes and cuts that a
    piece of an edge joins).

    >>> _cut(2, [(0, 1)], [0, 2])
    ([[0, 2, 1]], [0, 2, 1], [(0, 2), (2, 1)])
    """
    row_of, joined = list(rows), list[tuple[int, int]]()
    paths: list[list[int]] = []
    straight = sum(rows[b] - rows[a] - 1 for a, b in edges) > MOST_CUTS
    for a, b in edges:
        between = range(0) if straight else range(rows[a] + 1, rows[b])
        path = [a, *range(len(row_of), len(row_of) + len(between)), b]
        row_of.extend(between)
        paths.append(path)
        joined += zip(path, path[1:], strict=False)
    return paths, row_of, joined


def _neighbours(size: int, joined: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns (the neighbours in the row above, the neighbours in the row below) of all nodes and cuts, each a list per node or
    cut. `size`: the number of nodes and cuts; `joined`: as _cut returns them.
    """
    above: list[list[int]] = [[] for _ in range(size)]
    below: list[list[int]] = [[] for _ in range(size)]
    for a, b in joined:
        above[b].append(a)
        below[a].append(b)
    return above, below


def _ordered(row_of: Sequence[int], joined: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Returns the nodes and cuts of each row from left to right, in an order with few crossing edges."""
    order: list[list[int]] = [[] for _ in range(max(row_of, default=-1) + 1)]
    for i, row in enumerate(row_of):
        order[row].append(i)
    above, below = _neighbours(len(row_of), joined)
    place = [0.0] * len(row_of)
    for these in order:
        for at, i in enumerate(these):
            place[i] = float(at)
    for sweep in range(SWEEPS):
        sides, rows = (above, order) if sweep % 2 == 0 else (below, order[::-1])
        for these in rows:
            wanted = {i: _mean([(place[j], 1.0) for j in sides[i]], place[i]) for i in these}
            these.sort(key=lambda i: (wanted[i], place[i]))
            for at, i in enumerate(these):
                place[i] = at - (len(these) - 1) / 2
    return order


def _placed(order: Sequence[list[int]], joined: Sequence[tuple[int, int]], widths: Sequence[float]) -> list[float]:
    """Returns the x of the centre of each node and cut: near the mean x of its neighbours, in the order of its row, without
    overlap of the widths.
    """
    above, below = _neighbours(len(widths), joined)
    x = [0.0] * len(widths)
    for row in order:
        for i, at in zip(row, _spread([0.0] * len(row), [widths[i] for i in row]), strict=True):
            x[i] = at
    for sweep in range(PLACING):
        for row in order if sweep % 2 == 0 else order[::-1]:
            wanted = [_mean([(x[j], _pull(widths[i], widths[j])) for j in (*above[i], *below[i])], x[i]) for i in row]
            for i, at in zip(row, _spread(wanted, [widths[i] for i in row]), strict=True):
                x[i] = at
    return x


def _spread(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Returns the places nearest to the `wanted` places (least squares) in the same order, GAP apart or more.

    This is isotonic regression of the places minus the widths before them, by pooling adjacent violators.

    >>> _spread([0.0, 100.0], [10.0, 10.0]), _spread([0.0, 0.0], [10.0, 10.0])
    ([0.0, 100.0], [-16.0, 16.0])
    """
    offsets, at = [], 0.0
    for i, width in enumerate(widths):
        at += (widths[i - 1] + width) / 2 + GAP if i else 0.0
        offsets.append(at)
    pools: list[tuple[float, int]] = []  # (mean, number of places)
    for want, offset in zip(wanted, offsets, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] > mean:
            before, n = pools.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _pull(a: float, b: float) -> float:
    """Returns the weight of a neighbour in the mean place of a node or cut, by the widths of both: 8 between two cuts, which
    keeps long edges straight, 4 between two nodes, else 1.
    """
    return 8.0 if a == b == LANE else 4.0 if a == b else 1.0


def _mean(weighted: Sequence[tuple[float, float]], default: float) -> float:
    """Returns the weighted mean of pairs (value, weight); `default` if there are none."""
    return sum(v * w for v, w in weighted) / sum(w for _, w in weighted) if weighted else default


def _without_straight(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns the corners of a line without the inner points whose neighbours on both sides have the same x."""
    kept = [
        p
        for i, p in enumerate(points)
        if i in (0, len(points) - 1) or not (abs(points[i - 1][0] - p[0]) < 0.5 and abs(points[i + 1][0] - p[0]) < 0.5)
    ]
    return tuple(kept)
