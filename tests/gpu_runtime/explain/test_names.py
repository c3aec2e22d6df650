"""Many layers' names in little room, and layers found by names, patterns and misspelled names."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime.explain.names import grouped, matching

NAMES = [f"layer{a}.{b}/conv{c}" for a in (1, 2, 3, 4) for b in range(3) for c in (1, 2)]


def expanded(text: str) -> list[str]:
    """What braces stand for, by another way than the library's: one pair after the other, from the left."""
    found = re.search(r"\{([^{}]+)\}", text)
    if not found:
        return [text]
    values = []
    for item in found[1].split(","):
        a, dots, b = item.partition("..")
        values += map(str, range(int(a), int(b) + 1)) if dots else [item]
    return [name for v in values for name in expanded(text[: found.start()] + v + text[found.end() :])]


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (NAMES, ["layer{1..4}.{0..2}/conv{1,2}"]),
        ([*NAMES, "layer2.0/downsample"], ["layer{1..4}.{0..2}/conv{1,2}", "layer2.0/downsample"]),
        (["Conv_41", "Conv_42", "Conv_9"], ["Conv_{9,41,42}"]),
        (["Conv_1", "Conv_2", "Conv_3", "Conv_7"], ["Conv_{1..3,7}"]),
        (["a01", "a1", "a2"], ["a{01,1,2}"]),
        (["Conv_50 || Conv_53", "Conv_76 || Conv_79"], ["Conv_50 || Conv_53", "Conv_76 || Conv_79"]),
        (["stem/conv", "head/conv"], ["{stem,head}/conv"]),
        (["x{1}", "x{2}", "a..b", "a..c"], ["x{1}", "x{2}", "a..b", "a..c"]),
        ([], []),
        (["a", "a"], ["a"]),
        ([""], [""]),
    ],
)
def test_names_that_differ_in_one_part_are_written_once(names, texts):
    assert grouped(names) == texts


@given(st.lists(st.text("ab19_./", min_size=1, max_size=7).filter(lambda name: ".." not in name)))
def test_no_name_is_lost_and_none_is_added(names):
    found = [name for text in grouped(names) for name in expanded(text)]
    assert sorted(found) == sorted(set(names))


@given(st.sets(st.tuples(*[st.integers(0, 5)] * 3), min_size=1))
def test_what_is_grouped_is_found_again(numbers):
    every = [f"s{a}.b{b}/conv{c}" for a, b, c in product(range(6), repeat=3)]
    chosen = [f"s{a}.b{b}/conv{c}" for a, b, c in sorted(numbers)]
    found = [row for text in grouped(chosen) for row in matching(text, every, lambda row: (row,), "layer")]
    assert sorted(found) == sorted(chosen)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("layer1.0/conv1", ["layer1.0/conv1"]),
        ("layer3.*", NAMES[12:18]),
        ("layer[12].0/conv2", ["layer1.0/conv2", "layer2.0/conv2"]),
        ("layer{1,4}.0/conv1", ["layer1.0/conv1", "layer4.0/conv1"]),
        ("layer{2..3}.0/*1", ["layer2.0/conv1", "layer3.0/conv1"]),
        ("4.2/conv2", ["layer4.2/conv2"]),
    ],
)
def test_layers_by_name_pattern_or_part(wanted, found):
    assert matching(wanted, NAMES, lambda row: (row,), "layer") == found


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("layer2.0/con1", "'layer2.0/con1' is not a layer: did you mean layer2.0/conv1, "),
        ("zzzzz", "'zzzzz' is not a layer: expected one of layer1.0/conv1, layer1.0/conv2, layer1.1/conv1, .* and 20 more"),
        ("conv1", "'conv1' is part of the names of 12 layers: layer1.0/conv1, .* and 8 more; write '\\*conv1\\*' for all"),
        ("layer9.*", "'layer9.\\*' is not a layer: "),
        ("", "'' is part of the names of 24 layers"),
        ("{1..9999}{1..9999}{1..9999}", "is not a layer"),
        ("[", "is not a layer"),
        ("layer{1..3", r"'layer{1..3' is not a layer: a brace is not closed; did you mean "),
    ],
)
def test_what_is_no_layer_gets_a_sentence(wanted, sentence):
    with pytest.raises(ValueError, match=sentence):
        matching(wanted, NAMES, lambda row: (row,), "layer")


def test_as_many_names_are_listed_as_layers_are_counted():
    rows = [("b4/conv1 || b4/proj", "b4/conv1", "b4/proj"), ("b4/conv2 + b4/relu", "b4/conv2"), ("b5/conv1",)]
    with pytest.raises(ValueError, match=r"^'b4' is part of the names of 2 layers: b4/proj, b4/conv2; write '\*b4\*' for all$"):
        matching("b4", rows, lambda row: row, "layer")


def test_a_long_name_is_not_compared_with_long_names():
    with pytest.raises(ValueError, match="is not a layer"):
        matching("b" * 100_000, ["a" * 100_000] * 20, lambda row: (row,), "layer")
