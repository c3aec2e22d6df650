"""Numbers that several commands show, or that a plan states of itself, are the same and are true: over real networks."""

import re
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_runtime as gr
from benchmarks.bench_plan import SIZES
from gpu_runtime.explain import wording
from gpu_runtime.explain.figures import summing
from gpu_runtime.explain.reason_texts import NO_GAIN
from gpu_runtime.frontend.files.load import load_whole
from gpu_runtime.frontend.summaries import pattern
from gpu_runtime.runtime.plan_record import Outlook
from gpu_runtime.text import lost_text, several, share_text
from tests.conftest import MODELS, model_path
from tests.example_plan import example_plan, record

QUICK = ("mnist8", "resnet20_cifar10", "super_resolution_10")
OTHERS = sorted(path.stem for path in MODELS.glob("*.onnx") if path.stem not in QUICK)
NETWORKS = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


@cache
def plans(name: str) -> tuple[Outlook, Outlook]:
    """The network planned with its own weights, and pruned to 2:4."""
    path, size = model_path(name), SIZES.get(name)
    shapes = {load_whole(path).graph.input[0].name: tuple(map(int, size.split("x")))} if size else None
    own, pruned = (gr.plan(path, ["h200"], sparsity=mode, shapes=shapes)[0] for mode in ("enable", "force"))
    return own, pruned


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_no_layer_gains_more_than_was_said_when_it_is_pruned(name):
    """What explain predicts of a layer's pruned kernel is what the pruned network's plan has for it, and within the bound."""
    own, pruned = plans(name)
    after = {r.op: r for r in pruned.sparsity.rows}
    seen = 0
    for row in own.sparsity.rows:
        then, would = after.get(row.op), row.if_sparse
        if row.reason != "pattern_violation" or then is None or then.best_sparse is None:
            continue  # the pruned plan fuses this layer otherwise: its kernels are not these
        if then.reason == "one_launch":
            continue  # a squeeze-excite: no sparse kernel computes both of its layers
        seen += 1
        gain = then.best_dense.us / then.best_sparse.us
        assert (would.tactic, would.us) == (then.best_sparse.tactic, then.best_sparse.us), row.layer
        assert would.dense_us == then.best_dense.us, row.layer
        assert gain <= row.best_dense.us / row.floor.sparse_us, row.layer
        text = wording.sentence(row, own)
        assert ("would gain nothing" in text) == (gain <= 1) and ("if that is worth it" in text) == (gain >= NO_GAIN)
        assert gain <= 1 or f"({gain:.2f}x, limited by" in text, text
    assert seen or not any(r.reason == "pattern_violation" for r in own.sparsity.rows)


@pytest.mark.parametrize("name", NETWORKS)
def test_no_kernel_and_no_plan_beats_what_is_said_to_be_the_most(name):
    for plan in plans(name):
        for row in plan.sparsity.rows:
            if row.floor:
                for best, least in ((row.best_dense, row.floor.dense_us), (row.best_sparse, row.floor.sparse_us)):
                    assert best is None or best.us >= least - 0.005, (row.layer, best)
        summary = plan.sparsity.summary
        assert summary.total_us >= summary.ceiling_us and summary.saved_us >= 0


@pytest.mark.parametrize("name", NETWORKS)
def test_all_commands_show_one_weight_energy(name):
    """inspect-sparsity, explain and the log of --sparsity=force speak of the weights as the file has them."""
    rows = {r["layer"]: r for r in pattern.inspect(model_path(name))}
    own, pruned = plans(name)
    for row in (*own.sparsity.rows, *pruned.sparsity.rows):  # the energy that pruning would take, then the energy that it took
        parts = [rows[layer] for layer in row.layers]
        if None in (lost := [p["lost_energy"] for p in parts]):
            assert row.lost_energy is None and row.stored_share is None
            continue
        energy = [p["energy"] for p in parts]
        assert row.lost_energy == pytest.approx(sum(a * b for a, b in zip(lost, energy, strict=True)) / sum(energy))
    for row in own.sparsity.rows:
        if row.reason == "pattern_violation" and row.lost_energy is not None:
            assert f"loses {lost_text(row.lost_energy)} of" in wording.sentence(row, own)
            assert share_text(row.stored_share) in wording.sentence(row, own)
    changed = {r["weight"]: r for r in rows.values() if r["verdict"] in ("dense", "sparse, not 2:4")}
    assert tuple(changed) == pruned.sparsity.pruned
    if changed:
        whole = sum(r["lost_energy"] * r["energy"] for r in changed.values()) / sum(r["energy"] for r in changed.values())
        assert whole == pytest.approx(pruned.sparsity.pruned_energy)
        assert f"initializers, {lost_text(whole)} of their energy" in " ".join(wording.sparsity_text(pruned).split())
        told = f"would prune {several(len(changed), 'initializer')}, which would lose {lost_text(whole)} of their energy"
        assert told in pattern.pruning(list(rows.values()))
    assert all(r.stored_share in (None, 1.0) for r in pruned.sparsity.rows), "what is pruned has the pattern"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_page_of_networks_has_the_plan_s_numbers(name):
    """docs/networks.md whole is written by a command that takes long; each row's times are held to the plan one by one."""
    page = (Path(__file__).parents[2] / "docs" / "networks.md").read_text()
    cells = re.search(rf"^\| {name} \|.*$", page, re.M)[0].strip("| ").split(" | ")
    plan, rivals = plans(name)[1], plans(name)[1].solution.rivals
    single, sparsity = rivals.best_single_format, plan.sparsity
    assert cells[5] == f"{len(sparsity.picked)} / {len(sparsity.eligible)}"
    times = plan.solution.total_us, rivals.all_dense_us, single.us, rivals.greedy_us
    assert [c.split()[0] for c in cells[7:]] == [f"{us:.1f}" for us in times] and cells[9].endswith(str(single.format))


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=6))
def test_shown_parts_add_up_to_the_shown_total(parts):
    """In hundredths, and none of them is off by a hundredth or more."""
    shown = summing(sum(parts), parts)
    assert round(100 * sum(shown)) == round(100 * round(sum(parts), 2))
    assert all(abs(a - b) < 0.01 + 1e-9 for a, b in zip(shown, parts, strict=True))
    assert summing(1.0, [7.0, 8.004]) == [7.0, 8.0]  # no parts of that


@pytest.mark.parametrize("name", ["explain", "sentence"])
def test_the_cost_of_the_other_choice_is_the_sum_of_what_is_shown(name):
    plan = example_plan()
    row = plan["sparsity"]["rows"][3]
    row["other"] |= {"kernel_us": 0.104, "reformat_us": 0.104, "around_us": 0.104, "cost_us": 0.312}
    row["other_cost_us"] = 0.312
    made = record(plan)
    told = made.sparsity.rows[3]
    text = " ".join((wording.layer_text(told, made) if name == "explain" else wording.sentence(told, made)).split())
    parts = [Decimal(us) for us in re.findall(r"(?:kernel|reformats|it) ~([+-]\d\.\d\d) us", text)]
    assert parts[:3] == [Decimal("0.11"), Decimal("0.10"), Decimal("0.10")] and re.search(r"(plan ~\+|take ~)0\.31 us", text)
