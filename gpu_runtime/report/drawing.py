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
    """Centres of nodes, the corners of each edge from its first node to its second, and the size of it all, in pixels."""

    nodes: tuple[tuple[float, float], ...]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def draw(count: int, edges: Sequence[tuple[int, int]]) -> Drawing:
    """`edges`: pairs of nodes 0 to count - 1, each from a lower row to a higher. ValueError where they form a circle."""
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
    """The longest path to each node; what nothing leads to stands just above what reads it first."""
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
    """(nodes and cuts along each edge, the row of each node and cut, what is joined to what)."""
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
    """What each is joined to above and below."""
    above: list[list[int]] = [[] for _ in range(size)]
    below: list[list[int]] = [[] for _ in range(size)]
    for a, b in joined:
        above[b].append(a)
        below[a].append(b)
    return above, below


def _ordered(row_of: Sequence[int], joined: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Each row's nodes and cuts from left to right."""
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
    """The x of each node and cut: near what it is joined to, in its row's order and without overlap."""
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
    """Places in the same order, without overlap, nearest to the `wanted` ones by least squares: isotonic regression of what
    is left after each takes off the widths before it, by pooling adjacent violators."""
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
    """How much two of these widths that are joined want to be in line: passing edges most, then nodes."""
    return 8.0 if a == b == LANE else 4.0 if a == b else 1.0


def _mean(weighted: Sequence[tuple[float, float]], default: float) -> float:
    """Of (value, weight)."""
    return sum(v * w for v, w in weighted) / sum(w for _, w in weighted) if weighted else default


def _without_straight(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The corners of a line whose inner points lie in rows: those with the same x before and after are left out."""
    kept = [
        p
        for i, p in enumerate(points)
        if i in (0, len(points) - 1) or not (abs(points[i - 1][0] - p[0]) < 0.5 and abs(points[i + 1][0] - p[0]) < 0.5)
    ]
    return tuple(kept)
