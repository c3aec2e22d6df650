"""The rules of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col, one by one, and maps as arguments of launches."""

from dataclasses import replace

import numpy as np
import pytest

from cuda_kernels.compile import compile_kernel
from cuda_kernels.device import NAMED
from cuda_kernels.launch import Emulated, fill_params
from cuda_kernels.tensor_maps import Map, encode
from tests.copied_boxes import CASES, SOURCE, check
from tests.map_calls import encode_im2col, encode_tiled

TILED = {"element": "float16", "address": 1 << 20, "dims": (64, 9, 5), "strides": (128, 1152), "box": (64, 4, 2)}
IM2COL = {
    **{"element": "float16", "address": 1 << 20, "dims": (64, 9, 5, 2), "strides": (128, 1152, 5760), "lower": (-1, -1)},
    **{"upper": (-1, -1), "channels": 64, "pixels": 128},
}
WRONG_TILED = [
    ("element", "float8"),
    ("address", (1 << 20) + 8),
    ("address", 0),
    ("dims", ()),
    ("dims", (64,) * 6),
    ("dims", (64, 0, 5)),
    ("dims", (64, (1 << 32) + 1, 5)),
    ("strides", (128,)),
    ("strides", (136, 1152)),
    ("strides", (128, 1 << 40)),
    ("box", (64, 4)),
    ("box", (64, 0, 2)),
    ("box", (64, 257, 2)),
    ("box", (63, 4, 2)),
    ("element_strides", (1, 9, 1)),
    ("element_strides", (1, 0, 1)),
    ("element_strides", (1, 1)),
    ("swizzle", 16),
]
WRONG_IM2COL = [
    ("dims", (64, 9)),
    ("lower", (-129, 0)),
    ("upper", (0, 128)),
    ("lower", (0,)),
    ("upper", (-9, -11)),
    ("channels", 0),
    ("channels", 257),
    ("channels", 60),
    ("pixels", 0),
    ("pixels", 1025),
    ("element_strides", (1, 9, 1, 1)),
]


def test_maps_are_128_bytes_and_tell_all_arguments_apart():
    maps = [encode_tiled(**TILED), encode_im2col(**IM2COL)]
    tiles = {"swizzle": 128, "nan_fill": True, "element_strides": (1, 2, 1), "box": (64, 4, 3)}
    columns = {"lower": (-1, -2), "upper": (0, -1), "pixels": 64, "channels": 32, "element": "bfloat16"}
    maps += [encode_tiled(**{**TILED, name: value}) for name, value in tiles.items()]
    maps += [encode_im2col(**{**IM2COL, name: value}) for name, value in columns.items()]
    assert len(set(maps)) == len(maps) and {len(m) for m in maps} == {128}


@pytest.mark.parametrize("name, value", WRONG_TILED)
def test_a_rule_of_tiles(name, value):
    told = {"dims": "dims|strides|box"}.get(name, name)
    with pytest.raises(ValueError, match=f"^({told}): expected"):
        encode_tiled(**{**TILED, name: value})


@pytest.mark.parametrize("name, value", WRONG_IM2COL)
def test_a_rule_of_columns(name, value):
    told = "box" if value == 60 else name
    with pytest.raises(ValueError, match=f"^{told}: expected"):
        encode_im2col(**{**IM2COL, name: value})


@pytest.mark.parametrize("swizzle", [32, 64])
def test_a_row_fits_the_swizzle(swizzle):
    with pytest.raises(ValueError, match=f"^box: expected rows of at most {swizzle} bytes"):
        encode_tiled(**TILED, swizzle=swizzle)
    with pytest.raises(ValueError, match=f"^box: expected rows of at most {swizzle} bytes"):
        encode_im2col(**IM2COL, swizzle=swizzle)


def test_corners_have_fewer_bits_with_more_dimensions():
    three = {**IM2COL, "dims": (64, 9, 5), "strides": (128, 1152)}
    encode_im2col(**{**three, "lower": (-200,), "upper": (0,)})
    five = {**IM2COL, "dims": (64, 9, 5, 2, 2), "strides": (128, 1152, 5760, 11520)}
    encode_im2col(**{**five, "lower": (-16, 0, 0), "upper": (0, 0, 0)})
    with pytest.raises(ValueError, match="^lower: expected numbers from -16 to 15"):
        encode_im2col(**{**five, "lower": (-17, 0, 0), "upper": (0, 0, 0)})


def test_only_numbers_have_nan():
    with pytest.raises(ValueError, match="^nan_fill"):
        encode_tiled(**{**TILED, "element": "uint16"}, nan_fill=True)


# ---- as arguments of launches


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_copies_a_box_of_a_tensor(case):
    for options in ({}, {"async_mode": "late"}):
        check(Emulated(NAMED["h200"], **options), case)


def test_a_map_is_all_but_an_address():
    tiled = Map(("in", 0), TILED["dims"], TILED["strides"], box=TILED["box"])
    columns = Map(("out", 0), *(IM2COL[name] for name in ("dims", "strides")), (), *((-1, -1),) * 2, channels=64, pixels=128)
    assert encode(tiled, TILED["address"]) == encode_tiled(**TILED)
    assert encode(columns, IM2COL["address"]) == encode_im2col(**IM2COL)
    other = replace(columns, swizzle=128, element_strides=(1, 2, 2, 1), element="bfloat16")
    given = {"swizzle": 128, "element_strides": (1, 2, 2, 1), "element": "bfloat16"}
    assert encode(other, IM2COL["address"]) == encode_im2col(**IM2COL | given)
    assert len({tiled, columns, other, replace(tiled)}) == 3, "hashable: launches are kept by their arguments"


@pytest.mark.parametrize("change", [{"strides": (136, 1152)}, {"box": (64, 257, 2)}, {"swizzle": 64}, {"dims": (64, 9)}])
def test_no_map_breaks_a_rule(change):
    with pytest.raises(ValueError, match="^(strides|box): expected"):
        replace(Map(("in", 0), TILED["dims"], TILED["strides"], box=TILED["box"]), **change)


def test_where_a_map_ends():
    x = np.zeros((5, 9, 64), np.float16)
    assert Map(("in", 0), (64, 9, 5), (128, 1152), box=(64, 4, 2)).nbytes == x.nbytes
    inner = x[:, 2:7, 8:56]
    given = Map(("in", 0), inner.shape[::-1], inner.strides[1::-1], box=(16, 4, 2))
    assert given.nbytes == np.lib.array_utils.byte_bounds(inner)[1] - np.lib.array_utils.byte_bounds(inner)[0]
    assert Map(("in", 0), (64,), (), box=(64,)).nbytes == 128


def test_the_address_is_its_tensors(monkeypatch):
    gpu, given = Emulated(NAMED["h200"]), Map(("in", 1), TILED["dims"], TILED["strides"], box=TILED["box"])
    packed = fill_params(gpu, (("in", 0), ("map", given), ("i32", 5)), lambda arg: {0: 16, 1: 1 << 20}[arg[1]])
    assert packed[64:192] == encode_tiled(**TILED) and packed[:8] == (16).to_bytes(8, "little") and packed[192] == 5
    with pytest.raises(ValueError, match="^address: expected a multiple of 16"):
        fill_params(gpu, (("map", given),), lambda _: 8)


def test_the_compiler_gives_the_struct_as_many_bytes():
    gpu = Emulated(NAMED["h200"])
    assert gpu.load(compile_kernel(SOURCE, {"IM2COL": 1}, gpu.arch)).param_bytes == 256
