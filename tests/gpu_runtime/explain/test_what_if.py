"""An engine carries what its plan was chosen from: solving that again gives the plan, and answers what-if questions."""

import json
import re
from dataclasses import replace
from decimal import Decimal

import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from gpu_runtime.explain import what_if
from gpu_runtime.runtime.findings import Choices
from tactics import codec
from tactics.planner.graph import Graph
from tactics.planner.plan import solve
from tests.conftest import DIGITS


@pytest.fixture(scope="module")
def digits():
    return gr.build(DIGITS / "digits_sparse.onnx", sparsity="enable", device="h200", shapes={"x": (2048, 1, 8, 8)}).record


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """A residual, which either convolution may take, and a Concat in place."""
    net = Net("joined", (1, 64, 16, 16))
    a, b = net.conv("x", "a", 64), net.conv(net.add("Sigmoid", ["x"], "s", 64), "b", 64, r=1)
    y = net.add("Concat", [net.add("Add", [a, b], "add", 64), "x"], "cat", 128, axis=1)
    path = tmp_path_factory.mktemp("nets") / "joined.onnx"
    onnx.save(net.finish(y), path)
    return gr.build(path, sparsity="force", device="h200").record


@pytest.mark.parametrize("name", ["digits", "joined"])
def test_the_stored_graph_gives_the_plan_again(name, request):
    plan = request.getfixturevalue(name).plan
    stored = codec.from_json(Choices, json.loads(json.dumps(codec.to_json(Choices, plan.choices))))
    again = solve(what_if.graph(stored))
    assert round(again.us, 6) == round(plan.solution.total_us, 6) and again.status == "proven"
    ran = {layer.name: layer.tactic_name for layer in plan.layers if layer.type not in ("reformat", "noop")}
    assert {name: str(e.tactic) for name, e in again.entries.items() if e.tactic} == {
        name: tactic for name, tactic in ran.items() if tactic
    }


@pytest.mark.parametrize("name", ["digits", "joined"])
def test_the_other_choice_costs_what_the_reasons_say(name, request):
    record = request.getfixturevalue(name)
    asked = 0
    for row in record.sparsity.rows:
        if row.other:
            wish = "dense" if row.verdict == "sparse" else "sparse"
            found = what_if.what_if(record, {row.layer: wish})
            assert found.after_us - found.before_us == pytest.approx(row.other_cost_us, abs=1e-6)
            members = set(row.layer.split(" || "))  # siblings may come apart
            mine = [c.after for c in found.layers if c.after and members & set(c.name.split(" || "))]
            assert mine and all(("sparse24" in m.tactic) == (wish == "sparse") for m in mine)
            asked += 1
    assert asked >= 2


def test_what_is_the_case_moves_nothing(digits):
    picked = digits.sparsity.picked[0]
    found = what_if.what_if(digits, {picked: "sparse"})
    assert found.layers == found.reformats_new == found.reformats_gone == ()
    assert found.after_us == found.before_us and "Nothing changes" in what_if.text(digits, found)


def test_a_format_brings_its_reformats(digits):
    found = what_if.what_if(digits, {"stem/conv": "hwc8"})
    assert [(h.tensor, h.to) for h in found.reformats_new] == [("x", "fp16:hwc8")]
    change = found.layers[0]
    assert change.name == "stem/conv" and change.before.in_ == "fp32:chw" and change.after.in_ == "fp16:hwc8"
    text = what_if.text(digits, found)
    assert "reformat of x added" in text and "proven minimal" in text and text.isascii()
    assert max(map(len, text.splitlines())) <= 120
    both = what_if.what_if(digits, {"stem/conv": "chw->hwc8", "block1/conv1": "dense"})
    assert both.after_us > both.before_us and [c.name for c in both.layers] == ["block1/conv1"]


def test_a_fusion_that_changes_is_shown(joined):
    adds = [layer for layer in joined.plan.layers if " + " in layer.name]
    assert len(adds) == 1  # the Add is in one of the two convolutions
    asked = {c.op: c for c in joined.plan.choices.choices}
    assert sum(" + " in name for name in asked) == 2 and isinstance(what_if.graph(joined.plan.choices), Graph)


def test_a_pattern_holds_all_layers_that_can_grant_the_wish(digits):
    """Those that cannot stay free: the stem has no sparse kernel."""
    named = {row.layer: "dense" for row in digits.sparsity.rows if row.layer.startswith("block1/")}
    assert len(named) == 2
    by_name, by_pattern = what_if.what_if(digits, named), what_if.what_if(digits, {"block1/conv*": "dense"})
    assert by_name.layers == by_pattern.layers and by_name.after_us == by_pattern.after_us
    everything = what_if.what_if(digits, {"*": "dense"})
    assert everything.after_us == pytest.approx(digits.solution.rivals.all_dense_us)
    assert what_if.what_if(digits, {"{stem,block1}/conv*": "sparse"}).status == "proven"


@pytest.mark.parametrize("wishes", [{"*": "dense"}, {"stem/conv": "hwc8"}, {"stem/conv": "chw->hwc8", "block2/*": "dense"}])
def test_what_moves_adds_up_to_what_is_shown(digits, wishes):
    found = what_if.what_if(digits, wishes)
    moved = sum((c.after.us if c.after else 0) - (c.before.us if c.before else 0) for c in found.layers)
    moved += sum(h.us for h in found.reformats_new) - sum(h.us for h in found.reformats_gone)
    assert moved == pytest.approx(found.after_us - found.before_us, abs=1e-6)
    text = what_if.text(digits, found)
    then, now, cost = (Decimal(us) for us in re.findall(r"~([+-]?\d+\.\d\d) us", text.partition("\n\n")[0])[:3])
    *rows, (now_sum, then_sum) = [
        [Decimal(us[1]) if (us := re.match(r"~(\d+\.\d\d) us", cell)) else Decimal(0) for cell in cells]
        for line in text.partition("---\n")[2].splitlines()
        if len(cells := re.split("  +", line)[1:]) == 2 and any(cell.startswith("~") for cell in cells)
    ]
    assert then - now == cost == then_sum - now_sum and len(rows) >= 1
    assert [sum(column) for column in zip(*rows, strict=True)] == [now_sum, then_sum]


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"nope": "sparse"}, "is not a layer of this engine: expected one of stem/conv"),
        ({"block1/con1": "sparse"}, "is not a layer of this engine: did you mean block1/conv1, "),
        ({"stem/*": "sparse"}, r"no sparse kernel can run this layer: channels_not_multiple_of_4 \(C = 1\)"),
        ({"stem/conv": "sparse"}, r"no sparse kernel can run this layer: channels_not_multiple_of_4 \(C = 1\)"),
        ({"stem/conv": "spars"}, "'spars': expected sparse, dense, .*; did you mean 'sparse' instead of 'spars'"),
        ({"stem/conv": "fp16:hwc9"}, "'fp16:hwc9': expected sparse, dense, a format like hwc8"),
        ({"stem/conv": "fp7:hwc8"}, "unknown format fp7:hwc8"),
        ({"stem/conv": "a b"}, "expected sparse, dense, a format like hwc8"),
        ({"block1/conv1": "chw2"}, "no kernel of this layer has these formats; it can have fp16:"),
    ],
)
def test_wishes_that_cannot_be(digits, wishes, sentence):
    with pytest.raises(ValueError, match=sentence):
        what_if.what_if(digits, wishes)


def test_an_engine_without_tables_says_so(digits):
    old = replace(digits, plans=(replace(digits.plan, choices=None),))
    with pytest.raises(gr.EngineError, match="does not contain the planner's tables"):
        what_if.what_if(old, {"stem/conv": "dense"})
