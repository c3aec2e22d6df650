"""An independent formulation of the planner's question, as a plain integer program, has the same answer."""

import re

import pytest
from click.testing import CliRunner

from benchmarks.bench_planner import main, plain_highs, text
from tactics.planner.plan import solve
from tests.planner_graphs import conv_net, faster, merging_graph, runs, small_graph


def answer(graph) -> float | None:
    try:
        return solve(graph).total_ps / 1e6
    except ValueError:
        return None


@pytest.mark.parametrize("make", [small_graph, merging_graph])
def test_plain_program_agrees_on_small_graphs(make):
    agreed = 0
    for seed in range(60):
        graph = faster(make(seed), (), False, 1.0)  # in microseconds: HiGHS rounds times below a millionth
        found, _, proven = plain_highs(graph, 20.0)
        best = answer(graph)
        if best is None:
            assert found is None, seed
        elif runs(graph, solve(graph).options) and found is not None:
            assert proven
            # It knows nothing of cycles: a plan that cannot run may cost it less.
            assert found <= best + 1e-6 if make is merging_graph else found == pytest.approx(best, abs=1e-6), seed
            agreed += 1
    assert agreed > 30


def test_plain_program_agrees_on_a_network():
    graph = conv_net(0, (1, 1), formats=("chw", "hwc8", "chw32"))
    found, seconds, proven = plain_highs(graph, 60.0)
    assert proven and found == pytest.approx(answer(graph), abs=1e-6)
    row = {
        "network": "n",
        "ops": 1,
        "plan_ms": 1.0,
        "us": 2.0,
        "status": "proven",
        "method": "elimination",
        "width": 1,
        "greedy_us": 3.0,
        "single_us": None,
        "highs_us": found,
        "highs_s": seconds,
        "highs_optimal": True,
    }
    assert "greedy 1.500x" in text(row) and "one format none" in text(row)


def test_the_command_on_one_convolution():
    done = CliRunner().invoke(main, ["conv512", "--limit", "5", "--device", "a100"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("conv512 ") and "HiGHS 1.000x" in done.output
    # The fastest kernel of all writes vectors, which a reformat then makes planes; a split K writes those itself.
    assert 1.05 < float(re.search(r"greedy ([\d.]+)x", done.output)[1]) < 1.5
