"""The rules of cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col, one by one."""

import pytest

from cuda_kernels.tensor_maps import encode_im2col, encode_tiled

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
