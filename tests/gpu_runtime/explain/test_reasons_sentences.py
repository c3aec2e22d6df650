"""What sentences say of drawn plans follows from the times that are printed in them, premiums for doubt (--risk) included."""

import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from cuda_kernels.device import named
from gpu_runtime.explain import figures, reasons, wording
from gpu_runtime.planning import tables
from gpu_runtime.planning.counterfactuals import counterfactuals
from gpu_runtime.runtime.findings import Solution, SparsityRow
from gpu_runtime.runtime.plan_record import Model, Outlook, Timing
from tactics.format import Format
from tactics.measure.timing import Time
from tactics.planner import plan
from tactics.problems.problem import ConvProblem, ReformatProblem
from tests.example_plan import example_plan, record
from tests.gpu_runtime.explain.test_reasons import W24, network

SEEDS = range(120)
FLIP = re.compile(
    r"its (?P<kind>\w+) kernels would have to be (?:(?P<percent>\S+) % faster|(?P<ratio>\S+)x as fast), ~(?P<needed>\S+) us "
    r"instead of ~(?P<us>\S+) us(?: \(--risk adds ~(?P<doubt>\S+) us to the sparse time\))?"
)
UNCERTAIN = re.compile(
    r"\(~(\S+) us against ~(\S+) us\), but not with enough certainty: P\(faster\) = \d+ %; --risk therefore adds ~(\S+) us"
)


@cache
def drawn(seed: int) -> Outlook:
    """Two convolutions with 2:4 weights in a row, planned for times that are drawn, with a --risk that is drawn."""
    rng, device, base = random.Random(seed), named("h200"), network(W24)
    problem = ConvProblem(1, 64, 8, 8, 64, 1, 1, sparse24=True)
    first = replace(base.ops[0], problem=problem, output="m")
    ops = first, replace(first, name="next", layer="next", inputs=("m",), output="y")
    net = replace(base, tensors={**base.tensors, "m": (1, 64, 8, 8)}, ops=ops)
    gain, risk = rng.uniform(0.9, 1.2), rng.choice((0.5, 0.6, 0.8, 0.95))

    def times(problem, tactics):
        low, high = (0.1, 3.0) if isinstance(problem, ReformatProblem) else (20, 24)
        us = {t: round(rng.uniform(low, high) / (gain if t.sparse else 1), 3) for t in tactics}
        return {t: Time(v, v, v) for t, v in us.items()}

    times.prepare = lambda work: None
    io = {t.name: Format("fp16", rng.choice(("chw", "hwc8"))) for t in (*net.inputs, *net.outputs)}
    table = tables.tabulate(net, device, times, io=io, how=tables.Considered(True, risk=risk))
    chosen = plan.solve(table.graph)
    others = counterfactuals(table, chosen)
    found = reasons.sparsity(reasons.Known(table, chosen, others, "enable", measured=False))
    solution = Solution(chosen.us, chosen.status, chosen.method, rivals=others.rivals)
    return Outlook(Model("drawn"), device, Timing("predicted", "predicted(h200)", 0.2), found, solution, risk)


def rows() -> list[tuple[SparsityRow, Outlook]]:
    return [(row, outlook) for outlook in map(drawn, SEEDS) for row in outlook.sparsity.rows]


def changes_alone(row: SparsityRow) -> bool:
    """Whether forcing the layer the other way changes its own kernel only."""
    return row.other is not None and abs(row.other.reformat_us) + abs(row.other.around_us) < 0.001


@pytest.mark.slow
def test_what_sparse_kernels_save_is_the_difference_of_the_totals_and_the_middle_of_its_range():
    told = [" ".join(" ".join(figures.network_lines(drawn(seed))).split()) for seed in SEEDS]
    totals = r"takes ~(\S+) us; without sparse kernels ~(\S+) us \((?:no difference|(\S+) % slower)\)"
    ranged = 0
    for text in told:
        total, dense, percent = (float(v or 0) for v in re.search(totals, text).groups())
        assert 100 * (dense / total - 1) == pytest.approx(percent, abs=0.1), text
        assert ("save" in text) == ("none run" not in text)
        if found := re.search(r"save ~(\S+) us, given the .*, 80 % likely between ~(\S+) us and ~(\S+) us", text):
            saved, low, high = map(float, found.groups())
            assert saved == pytest.approx(dense - total, abs=0.016) and low + high == pytest.approx(2 * saved, abs=0.021), text
            ranged += 1
    assert 20 < ranged < len(told)


@pytest.mark.slow
def test_how_much_faster_a_kernel_would_have_to_be_follows_from_the_times_beside_it():
    """Where the layer's kernel is all that changes, its time, the premium and the time that is needed are one sum, too."""
    seen = Counter()
    for row, outlook in rows():
        text = dict(wording.layer_facts(row, outlook)).get("to flip", "")
        if not (found := FLIP.search(text)):
            continue
        needed, us, doubt = (float(found[name] or 0) for name in ("needed", "us", "doubt"))
        factor = float(found["ratio"]) if found["ratio"] else 1 + float(found["percent"]) / 100
        assert found["kind"] == ("dense" if row.verdict == "sparse" else "sparse")
        assert us / needed == pytest.approx(factor, rel=0.006), text
        if changes_alone(row) and abs(row.other.us - us) < 0.01:
            mine, theirs = (row.us + doubt, needed) if row.verdict == "sparse" else (row.us, needed + doubt)
            assert mine == pytest.approx(theirs, abs=0.016), text
            seen[row.verdict, doubt > 0] += 1
    assert min(seen[verdict, doubt] for verdict in ("sparse", "dense") for doubt in (True, False)) >= 5, seen


@pytest.mark.slow
def test_the_ratio_of_a_pick_and_the_premium_of_what_is_uncertain_follow_from_the_times_beside_them():
    picked = uncertain = 0
    for row, outlook in rows():
        text = wording.sentence(row, outlook)
        if found := re.search(r"sparse kernel takes ~(\S+) us, the best dense one ~(\S+) us \((\S+)x\)", text):
            sparse, dense, ratio = map(float, found.groups())
            assert dense / sparse == pytest.approx(ratio, abs=0.006)
            picked += 1
        if row.reason == "uncertain":
            sparse, dense, doubt = map(float, UNCERTAIN.search(text).groups())
            assert sparse < dense and dict(wording.layer_facts(row, outlook))["to flip"].startswith("lower --risk")
            if changes_alone(row) and abs(row.other.us - sparse) < 0.01:
                assert sparse + doubt > row.us - 0.016, text
                uncertain += 1
    assert picked > 20 and uncertain > 4


def test_why_a_sparse_kernel_gains_little():
    """From the counts of its prediction, whatever limits it; and never that it could gain more than 2:4 can give."""
    row = next(r for r in record(example_plan()).sparsity.rows if r.reason == "dense_faster")
    plan = record(example_plan())
    tactic = row.best_sparse.tactic
    size = {"k": 512, "c": 256, "groups": 1, "kernel": (3, 3)}
    deep = replace(row, floor=replace(row.floor, dram_us=10.0, l2_us=4.0), **size)
    for bound, changes, text in (
        ("dram", {}, f"DRAM moves {10 * plan.device.dram_gbps / 1e3:.3g} MB: 2:4 shrinks the 2.4 MB of weights alone"),
        ("l2", {}, "L2 moves "),
        ("launch", {}, "a kernel so short takes hardly longer than its launch"),
        ("latency", {}, f"it waits for memory in {256 * 9 // tactic.tile.k} stages, which 2:4 does not shorten"),
        ("mma", {"c": 64, "groups": 16}, f"groups of 4 channels are padded to a tile of {tactic.tile.k}"),
        ("mma", {"c": 32}, f"its 32 input channels are padded to a tile of {tactic.tile.k}"),
        ("mma", {"k": 8}, f"its 8 output channels are padded to a tile of {tactic.tile.m}"),
        ("smem", {}, "shared memory limits it, which 2:4 relieves little"),
    ):
        slow = replace(deep, best_sparse=replace(row.best_sparse, bound=bound), **changes)
        assert f", since {text}" in wording.sentence(slow, plan), bound
    assert ", since" not in wording.sentence(replace(deep, best_sparse=replace(row.best_sparse, bound="mma")), plan)
    found = [float(x) for r in plan.sparsity.rows for x in re.findall(r"be more than ([\d.]+)x", wording.sentence(r, plan))]
    assert found and max(found) <= 2.0
