"""Where the nodes and edges of a plan's graph are drawn: in rows by longest path, edges bent around what they pass.

Long edges are cut at every row they pass; nodes and cuts of a row are ordered by the mean place of what they are joined to
(the barycentre method of Sugiyama, Tagawa and Toda, 1981), then moved as near to it as their order and widths allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROW, NODE, LANE, GAP = 72.0, 190.0, 14.0, 22.0  # height of a row, widths of a node and of a passing edge, space between
SWEEPS, PLACING = 8, 40  # over all rows, to order them and to place what they hold
MOST_CUTS = 30_000  # with more, long edges are drawn straight


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn graph, in pixels: the centre (x, y) of each node, the corners of each edge from its first node to its second, and
    the size.
    """

    nodes: tuple[tuple[float, float], ...]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def draw(count: int, edges: Sequence[tuple[int, int]]) -> Drawing:
    """Returns the drawing of a graph with the nodes 0 to count - 1.

    `edges`: pairs of nodes; the first one is drawn in a higher row than the second one. Raises ValueError if the edges form
    a circle.
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
    """Returns each node's row: the length of the longest path to it. A node without predecessors is in the row above its first
    reader.
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
    """Cuts each edge at every row that it passes. Returns (the nodes and cuts along each edge, the row of each node and cut,
    the pairs of nodes and cuts that are joined). Cuts have the numbers after the nodes.
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
    """Returns two lists per node or cut: the ones that it is joined to in the row above, and in the row below. `size`: their
    number.
    """
    above: list[list[int]] = [[] for _ in range(size)]
    below: list[list[int]] = [[] for _ in range(size)]
    for a, b in joined:
        above[b].append(a)
        below[a].append(b)
    return above, below


def _ordered(row_of: Sequence[int], joined: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Returns each row's nodes and cuts from left to right."""
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
    """Returns the x of each node and cut: near the mean x of its neighbours, in its row's order, without overlap of the
    widths.
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
    """Returns the places nearest to the `wanted` ones (least squares) in the same order, such that the widths do not overlap.

    This is isotonic regression of the places minus the widths before them, by pooling adjacent violators.
    """
    offsets, at = [], 0.0
    for i, width in enumerate(widths):
        at += (widths[i - 1] + width) / 2 + GAP if i else 0.0
        offsets.append(at)
    pools: list[tuple[float, int]] = []  # mean, how many
    for want, offset in zip(wanted, offsets, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] > mean:
            before, n = pools.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _pull(a: float, b: float) -> float:
    """Returns the weight of a joint between two things of these widths: how strongly it is drawn in line. Cuts of edges have
    the largest.
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
