"""Placement: no two blocks share a byte while both are alive, sizes are near the bound, answers repeat."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.assembly.memory import Block, place
from gpu_runtime.runtime.fields import ALIGN, padded


@st.composite
def block_lists(draw):
    rows = draw(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 8)), max_size=14))
    return [Block(f"t{i}", nbytes, first, first + length) for i, (nbytes, first, length) in enumerate(rows)]


@settings(max_examples=300, deadline=None)
@given(block_lists())
def test_no_overlap_while_alive(blocks):
    placed = place(blocks)
    top = 0
    for step in range(25):
        owner = {}
        for b in blocks:
            if b.first <= step <= b.last:
                offset = placed.offsets[b.name]
                assert offset >= 0 and offset % ALIGN == 0
                top = max(top, offset + b.nbytes)
                for name, (lo, hi) in owner.items():
                    assert offset >= hi or offset + b.nbytes <= lo or b.nbytes == 0 or lo == hi, (b.name, name, step)
                owner[b.name] = (offset, offset + b.nbytes)
    assert top <= placed.total_bytes
    assert placed.largest_live_bytes <= placed.total_bytes <= sum(padded(b.nbytes) for b in blocks)
    live = [sum(padded(b.nbytes) for b in blocks if b.first <= s <= b.last) for s in range(25)]
    assert placed.largest_live_bytes == max(live)
    assert list(placed.offsets) == [b.name for b in blocks]
    assert place(list(blocks)) == placed


def test_bytes_are_painted_once():
    """The same property by painting bytes, on one crowded case."""
    rng = random.Random(3)
    blocks = []
    for i in range(40):
        first = rng.randrange(30)
        blocks.append(Block(f"t{i}", rng.randrange(1, 60), first, min(29, first + rng.randrange(6))))
    placed = place(blocks)
    for step in range(30):
        painted = bytearray(placed.total_bytes)
        for b in blocks:
            if b.first <= step <= b.last:
                cells = slice(placed.offsets[b.name], placed.offsets[b.name] + b.nbytes)
                assert not any(painted[cells])
                painted[cells] = b"\1" * b.nbytes


def test_chain_needs_two_buffers():
    chain = [Block(f"t{i}", 1000, i, i + 1) for i in range(20)]
    placed = place(chain)
    assert placed.total_bytes == placed.largest_live_bytes == 2048


def test_residual_network_reaches_the_bound():
    blocks, step = [], 0
    for stage, nbytes in enumerate([64 << 10, 32 << 10, 16 << 10]):
        for unit in range(3):
            blocks += [
                Block(f"s{stage}u{unit}a", nbytes, step, step + 1),
                Block(f"s{stage}u{unit}b", nbytes // 4, step + 1, step + 2),
                Block(f"s{stage}u{unit}y", nbytes, step + 2, step + 5),
            ]
            step += 3
    placed = place(blocks)
    assert placed.total_bytes == placed.largest_live_bytes


def test_random_graphs_stay_close_to_the_bound():
    worst, total, bound = 0.0, 0, 0
    for seed in range(40):
        rng = random.Random(seed)
        blocks = []
        for i in range(60):
            length = min(59, i + 1 + int(rng.expovariate(0.4)))
            blocks.append(Block(f"t{i}", rng.choice([1, 2, 3, 5, 8, 13]) * 1024, i, length))
        placed = place(blocks)
        worst = max(worst, placed.total_bytes / placed.largest_live_bytes)
        total, bound = total + placed.total_bytes, bound + placed.largest_live_bytes
    assert worst < 1.15 and total < 1.04 * bound


def test_edges():
    assert place([]).total_bytes == 0
    one = place([Block("x", 1, 0, 0)])
    assert dict(one.offsets) == {"x": 0} and one.total_bytes == 256
    assert place([Block("x", 0, 0, 3), Block("y", 0, 0, 3)]).total_bytes == 0
