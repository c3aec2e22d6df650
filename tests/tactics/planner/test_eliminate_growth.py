"""Long chains and wide splits cost steps in proportion: a tensor split into 1,000 parts whose sum is taken has both."""

import sys

import numpy as np
import pytest

from gpu_runtime.padded_channels.layouts import ChannelSlices, Link
from tactics.format import Key
from tactics.planner.eliminate import minimise
from tactics.planner.factors import NEVER
from tactics.planner.graph import Choice, Entry, Graph
from tactics.planner.grouping import Together
from tactics.planner.plan import solve

SAME = np.array([[0, NEVER], [NEVER, 0]])


def chain(n: int) -> None:
    """Variables of which each determines the one before."""
    alone = [((v,), np.array([1, v % 3])) for v in range(n)]
    found = minimise([2] * n, [*alone, *(((v, v + 1), SAME) for v in range(n - 1))])
    assert found.cost == min(n, sum(v % 3 for v in range(n)))


def followers(n: int) -> None:
    """Each thing united with the one behind it, then the roots of all."""
    together: Together[int] = Together()
    for i in reversed(range(n)):
        together.unite(i, i + 1)
    for i in range(n):
        together.unite(-1 - i, -i)
    assert {together.root(i) for i in range(-n, n + 1)} == {-n}


def parts(n: int) -> None:
    """A tensor of which each part is another tensor."""
    slices = ChannelSlices(
        [Link("x", 2 * i, f"y{i}", 0, 2) for i in range(n)], {"x": 2 * n, **{f"y{i}": 2 for i in range(n)}}, {}
    )
    assert slices.starts("x") == [*range(0, 2 * n, 2)]


def one_format(n: int) -> None:
    """A tensor of which each part is another one, joined again; no tensor has a second format."""
    key, ys = Key.parse("fp16:last8"), tuple(f"y{i}" for i in range(n))
    parts = [Choice(y, ("x",), y, (Entry(None, (key,), key, 1),)) for y in ys]
    join = Choice("join", ys, "z", (Entry(None, (key,) * n, key, 5),))
    ends = {"x": key}, ("x",), ("z",), dict.fromkeys(("x", "z", *ys), (key,))
    assert solve(Graph((*parts, join), (), *ends, lambda *hop: None)).total_ps == n + 5


def lines_of(function, n: int) -> int:
    """Lines that Python executes, comprehensions included."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(n)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("function", [chain, followers, parts, one_format])
def test_twice_the_parts_are_about_twice_the_steps(function):
    assert lines_of(function, 200) < 2.5 * lines_of(function, 100)
