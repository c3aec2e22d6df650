"""What faster main loops bring: the table of the loops as they were, and one network planned with either."""

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import onnx
import pytest

from benchmarks.cycles import TILES
from benchmarks.loop_gains import BEFORE, WITHOUT, planned, row
from benchmarks.networks import NETWORKS
from cuda_kernels import shares


def test_the_table_of_before_has_each_tile_of_today():
    """Estimates find the newest rows of a kernel: there is one compiler's."""
    (kernels,) = json.loads(BEFORE.read_text()).values()
    for kernel, tiles in TILES.items():
        assert set(kernels[kernel]["shares"]) == {str(t) for t in tiles}
        for tile, loops in kernels[kernel]["shares"].items():
            assert {"sm_80/1024", "sm_90a/1366"} <= set(loops["vectors"]), tile
            old, new = loops["vectors"]["sm_80/1024"], shares.rows(kernel)[tile]["vectors"]["sm_80/1024"]
            assert old[0] != new[0], f"{tile}: the loop of before is today's"


@pytest.mark.slow
def test_a_network_is_planned_with_either(tmp_path):
    """In processes of their own: this one's table stays. Before, no layer could be a strip."""
    path = tmp_path / "conv512.onnx"
    onnx.save(NETWORKS["conv512"](), path)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        before, now, again = (pool.submit(planned, path, None, "a100", then).result() for then in (WITHOUT, (), WITHOUT))
    assert again == before and now.us < before.us
    assert row("conv512", before, now).startswith(f"| conv512 | {before.us:.1f} | {now.us:.1f} | ")
