"""Unique bytes: 32 x the distinct sectors a launch, or each block, touches; every expectation below is counted by hand."""

import numpy as np
import pytest

from cuda_kernels.emulator import Options
from tests.cuda_kernels.emulator.test_emulator import program, run


def unique(kernel, x, grid, last, block=32, out=None, **options):
    """(touched, loaded, stored) bytes per launch, then summed over blocks."""
    out = np.zeros(grid * block, np.float32) if out is None else out
    prog = program("golden_sectors.cu", kernel)
    s, _ = run(prog, block, [x, out, last], grid=grid, smem=16 * block, options=Options(**options))
    launch = (s.launch_unique_bytes, s.launch_unique_load_bytes, s.launch_unique_store_bytes)
    return launch, (s.block_unique_bytes, s.block_unique_load_bytes, s.block_unique_store_bytes)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", [0, 2])
def test_coalesced_accesses_touch_what_they_ask_for(threads, seed):
    got = unique("strided", np.zeros(128, np.float32), 4, 1, threads=threads, seed=seed)
    assert got == ((1024, 512, 512), (1024, 512, 512))


@pytest.mark.parametrize("stride,loaded", [(2, 1024), (8, 4096), (16, 4096), (0, 32)])
def test_a_stride_touches_whole_sectors(stride, loaded):
    launch, blocks = unique("strided", np.zeros(max(1, 128 * stride), np.float32), 4, stride)
    assert launch == (loaded + 512, loaded, 512)
    each = loaded if stride else 4 * 32  # at stride 0 every block reads the same sector
    assert blocks == (each + 512, each, 512)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_halo_counts_once_per_launch_and_again_per_block(threads):
    # 4 blocks of 32 floats are 4 sectors each; 3 inner borders are read across from both sides
    launch, blocks = unique("halo", np.zeros(128, np.float32), 4, 128, threads=threads)
    assert launch == (1024, 512, 512)
    assert blocks == (1024 + 6 * 32, 512 + 6 * 32, 512)


def test_vectors_that_start_inside_a_sector():
    # 32 x 16 bytes from byte 16 on: 17 sectors per block; neighbouring blocks share one
    launch, blocks = unique("vectors", np.zeros(4 * 65, np.float32), 2, 1)
    assert launch == (33 * 32 + 256, 33 * 32, 256)
    assert blocks == (2 * 17 * 32 + 256, 2 * 17 * 32, 256)


@pytest.mark.parametrize("mode", ["eager", "late"])
def test_sources_of_cp_async(mode):
    # 11 threads x 16 bytes: 6 sectors; both blocks read the same ones
    launch, blocks = unique("copies", np.zeros(128, np.float32), 2, 11, async_mode=mode)
    assert launch == (6 * 32 + 256, 6 * 32, 256)
    assert blocks == (2 * 6 * 32 + 256, 2 * 6 * 32, 256)


def test_loaded_and_stored_sectors_count_once():
    launch, blocks = unique("in_place", np.zeros(64, np.float32), 2, 0, out=np.zeros(1, np.float32))
    assert launch == (256 + 32, 256 + 32, 256 + 32)
    assert blocks == (256 + 64, 256 + 64, 256 + 64)


def test_without_checks_nothing_is_counted():
    assert unique("strided", np.zeros(128, np.float32), 4, 1, checks=False) == ((0, 0, 0), (0, 0, 0))
