"""The table of floors: it has every network, and a reason for each launch that is far from its floor."""

import json

from benchmarks import floor_gaps, light, topologies
from benchmarks.networks import NETWORKS


def test_every_network_is_in_the_table():
    networks = json.loads(floor_gaps.RESULTS.read_text())["networks"]
    assert {*NETWORKS, *light.NAMES, *topologies.NAMES} <= set(networks)
    assert all(us >= floor for row in networks.values() for us, floor in row["kinds"].values())


def test_every_far_launch_has_a_reason():
    networks = json.loads(floor_gaps.RESULTS.read_text())["networks"]
    assert {far["tactic"] for row in networks.values() for far in row["far"]} <= set(floor_gaps.WHY)


def test_a_network_is_measured(tmp_path):
    row = floor_gaps.measure("conv512", "h200", "enable")
    recorded = json.loads(floor_gaps.RESULTS.read_text())["networks"]["conv512"]
    assert row == recorded
    lines = list(floor_gaps.table({"conv512": row}))
    assert lines[2].startswith(f"| conv512 | {row['launches']} | ") and len(lines) == 6
