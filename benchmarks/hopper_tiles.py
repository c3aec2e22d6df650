"""Hopper kernels before they are written: what bounds each tile, which tiles win where, and what networks would gain.

    python -m benchmarks.hopper_tiles [--write]

Everything is predicted from documented rates (tactics/families/hopper/figures.py, each with its source); figures that nobody has
published are swept. First each tile alone: clocks of a stage of 64 of K by what bounds it, and products per clock over the
dense peak, at the centre and over the sweep. Then, from benchmarks/hopper/found.json, which `--write` makes anew (minutes):
networks with tiles of Hopper kernels beside today's plans (benchmarks/hopper/plans.json) and a library's estimate
(tactics.peers), the tiles to be built, and our dense kernels with them beside cuBLAS's published times.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.bench_predictions import LONG_US, by_device, faster, judge, ours
from benchmarks.hopper import networks, plans
from tactics.families.hopper.figures import CENTRE, Figures, best, sweep, worst
from benchmarks.hopper.layers import boxes, estimate, num_boxes
from benchmarks.hopper.networks import Allowed
from tactics.families.hopper.tiles import Box, HopperTile, candidates, over_dense, ring, stage
from benchmarks.published_rows import FOLDER, Row, device_of, read
from cuda_kernels.device import Device, named
from tactics.problems.problem import ConvProblem

FOUND = Path(__file__).parent / "hopper" / "found.json"
LEAST_GAIN, MOST_TILES = 0.001, 14  # of a plan in the mean, below which no further tile is built
SHOWN_WINS, SHOWN_DEVICE, SHOWN_SHARE = 4, "h200", 0.05
STRIP14, STRIP14_ONE = Box(1, 14, 16, 3), Box(1, 14, 14, 1)
STRIP28, STRIP28_ONE, STRIP7 = Box(1, 8, 32, 3), Box(1, 8, 28, 1), Box(4, 7, 8, 3)
SHOWN = (
    HopperTile(128, 256),
    HopperTile(128, 256, shared="pixels"),
    HopperTile(128, 256, shared="weights"),
    HopperTile(128, 256, weights="registers", shared="pixels"),
    HopperTile(128, 256, weights="registers", loader="cp.async"),
    HopperTile(64, 256, pingpong=True, shared="pixels"),
    HopperTile(128, 128, pingpong=True, shared="pixels"),
    HopperTile(64, 192, pingpong=True, shared="pixels"),
    HopperTile(64, 64, groups=1),
    HopperTile(128, 128, True, shared="pixels"),
    HopperTile(128, 256, True, shared="pixels"),
    HopperTile(256, 128, True, shared="pixels"),
    HopperTile(128, 256, True, "registers", "pixels"),
    HopperTile(256, 128, True, "registers"),
    HopperTile(256, 128, True, "registers", "pixels"),
    HopperTile(128, 128, True, "registers", "pixels", pingpong=True),
    HopperTile(128, STRIP14.n, box=STRIP14),
    *(HopperTile(128, box.n, True, "registers", box=box) for box in (STRIP14, STRIP14_ONE, STRIP28, STRIP28_ONE, STRIP7)),
)
USEFUL = {
    "1x14x16": 14 / 16,
    "1x14x14+": 14 / 16,
    "1x8x32": 28 / 32,
    "1x8x28+": 28 / 30,
    "4x7x8": 7 / 8,
}  # of n, of those images
COLUMNS = {  # of the table of networks: what a plan may take
    "tma": Allowed(),
    "alone": Allowed(shared=False, cluster_sums=False),
    "no sums": Allowed(cluster_sums=False),
    "strips": Allowed(strips=True),
    "one copy": Allowed(strips=True, one_copy=True),
    "short K": Allowed(least_k=16),
    "cp.async": Allowed(loader="cp.async"),
}


def tile_rows() -> Iterator[str]:
    yield f"{'tile':<38} ring stages  tensor   port     L2 latency  bound   of the dense peak"
    for tile in SHOWN:
        at, part = stage(tile, CENTRE), USEFUL[str(tile.box)] if tile.box else 1.0
        over = [part * over_dense(tile, figures) for figures in sweep()]
        held = ring(tile) if tile.weights == "registers" else 0
        yield (
            f"{tile!s:<38} {held or '-':>4} {at.stages:>6} {at.tensor:>7.0f} {at.port:>6.0f} {at.l2:>6.0f} {at.latency:>7.0f}  "
            f"{at.bound:<7} {part * over_dense(tile, CENTRE):.2f} ({min(over):.2f} to {max(over):.2f})"
        )


def of_image(size: int, one_copy: bool) -> Sequence[tuple[HopperTile, float]]:
    """Strips of 2:4 tiles for 3x3 over images of that size, with the share of their columns that are pixels."""
    p = ConvProblem(32, 256, size, size, 256, 3, 3, pad=(1, 1, 1, 1), sparse24=True)
    found = []
    for box in boxes(p):
        if one_copy or box.copies > 1:
            useful = p.n * p.p * p.q / (num_boxes(p, box) * box.n)
            found += [
                (HopperTile(m, box.n, True, "registers", shared, box=box), useful)
                for m in (128, 256)
                for shared in ("", "pixels")
            ]
    return found


def ceilings() -> dict[str, tuple[float, float, float]]:
    """Of long loops of 2:4 tiles, products over the dense peak: (centre, least, most over the sweep) of the best tile."""
    sparse = [t for t in candidates() if t.sparse and t.loader == "tma"]
    groups: dict[str, Sequence[tuple[HopperTile, float]]] = {
        "both operands in shared memory": [(t, 1.0) for t in sparse if t.weights == "smem"],
        "from registers, blocks alone": [(t, 1.0) for t in sparse if t.weights != "smem" and not t.shared],
        "from registers, pixels x2": [(t, 1.0) for t in sparse if t.weights != "smem"],
        **{f"strip, {n} x {n}, a copy per column": of_image(n, False) for n in (7, 14, 28, 56)},
        **{f"strip, {n} x {n}, one copy": of_image(n, True) for n in (7, 14, 28, 56)},
    }

    def most(group: Sequence[tuple[HopperTile, float]], figures: Figures) -> float:
        return max(useful * over_dense(tile, figures) for tile, useful in group if ring(tile))

    result = {}
    for name, group in groups.items():
        swept = [most(group, figures) for figures in sweep()]
        result[name] = most(group, CENTRE), min(swept), max(swept)
    return result


def network_rows(found: dict[str, Any]) -> Iterator[str]:
    columns = " ".join(f"{name:>8}" for name in COLUMNS)
    yield f"{'':<32}    today  library | {columns} |    built  gain (worst, best)  moved sparse"
    for name, of in found["networks"].items():
        gains = [of["today"] / of[key]["us"] for key in ("built", "worst", "best")]
        columns = " ".join(f"{of[key]['us']:>8.1f}" for key in COLUMNS)
        yield (
            f"{name:<32} {of['today']:>8.1f} {of['library']:>8.1f} | {columns} | {of['built']['us']:>8.1f} {gains[0]:>5.2f} "
            f"({gains[1]:.2f}, {gains[2]:.2f})  {of['built']['moved']:>6} {of['sparse today']:>3} -> {of['built']['sparse']}"
        )


def published_us(row: Row, kinds: frozenset[str] | None, figures: Figures) -> float:
    """Our fastest dense kernel's estimate with Hopper tiles beside today's."""
    device, p = device_of(row), row.problem
    assert p is not None
    allowed = Allowed(sparse=False, kinds=kinds)
    found = (estimate(p, tile, device, figures) for tile in candidates() if not tile.sparse and allowed.allows(tile))
    return min([ours(row), *(e.us for e in found if e)])


def published(kinds: frozenset[str] | None) -> dict[str, dict[str, float]]:
    """By device: rows of LONG_US and more, and what our estimates are of the library's times, as bench_predictions --ours."""
    judged, result = [r for r in read(FOLDER)[0] if r.judged], {}
    for device, rows in by_device(judged, "gemm").items():
        if device not in plans.DEVICES:
            continue
        long = [r for r in rows if r.us >= LONG_US]
        peer, of = judge(long), {"rows": float(len(long))}
        for name, figures in (("", CENTRE), ("worst ", worst()), ("best ", best())):
            us = np.array([published_us(r, kinds, figures) for r in long])
            of[f"{name}of the library's time"] = round(float(np.exp(np.log(us / peer.published).mean())), 3)
            of[f"{name}more than 10 % faster"] = round(faster(us, peer.published), 4)
        result[device] = of
    return result


def rounded(outcome: networks.Outcome) -> dict[str, float]:
    return asdict(replace(outcome, us=round(outcome.us, 1)))


def _picked(pairs: Sequence[tuple[plans.Plan, Device]], allowed: Allowed) -> list[tuple[str, float]]:
    """Tiles to be built, at the centre, the worst and the best of the sweep alike."""
    tables = [networks.saved(pairs, allowed, figures) for figures in (CENTRE, worst(), best())]
    return networks.greedy(networks.beside(tables, len(pairs)), LEAST_GAIN, MOST_TILES)


def find() -> dict[str, Any]:
    """All of found.json."""
    every = [(name, plans.plan(name), named(name.split()[2])) for name in sorted(plans.stored()["plans"])]
    pairs = [(plan, device) for _, plan, device in every]
    strips = Allowed(strips=True)
    picked, implicit = (_picked(pairs, allowed) for allowed in (strips, Allowed()))
    kinds = frozenset(kind for kind, _ in picked)
    built = replace(strips, kinds=kinds)
    won = {name: networks.wins(plan, built, device, CENTRE) for name, plan, device in every}
    table: dict[str, Any] = {}
    for name, plan, device in every:
        row: dict[str, Any] = {"today": round(plan.us, 1), "library": round(networks.library_us(plan, device), 1)}
        row["sparse today"] = sum(layer.count for layer in plan.layers if "sparse" in layer.tactic)
        row |= {key: rounded(networks.outcome(plan, allowed, device, CENTRE)) for key, allowed in COLUMNS.items()}
        for key, figures in (("built", CENTRE), ("worst", worst()), ("best", best())):
            row[key] = rounded(networks.outcome(plan, built, device, figures))
        row["wins"] = won[name]
        row["stays"] = {why: round(us, 1) for why, us in networks.stays(plan).items() if why}
        table[name] = row
    counts = {kind: sum(of.get(kind, (0, 0.0))[0] for of in won.values()) for kind in kinds}
    tiles = [{"kind": kind, "saves": round(share, 4), "wins": counts[kind]} for kind, share in picked]
    return {
        "tiles": tiles,
        "without strips": [{"kind": kind, "saves": round(share, 4)} for kind, share in implicit],
        "networks": table,
        "published": published(kinds),
    }


@click.command(help=__doc__)
@click.option("--write", is_flag=True, help="Estimate networks and published products again.")
def main(write: bool) -> None:
    if write:
        FOUND.write_text(json.dumps(find(), indent=1) + "\n")
    found = json.loads(FOUND.read_text())
    click.echo("one tile on an SM, clocks of a stage of 64 of K by what bounds it (predicted)")
    click.echo("\n".join(tile_rows()))
    click.echo("\nlong loops of the best 2:4 tile over the dense peak, and over dense loops within the power limit (predicted)")
    for name, (centre, least, most) in ceilings().items():
        click.echo(f"{name:<36} {centre:.2f} ({least:.2f} to {most:.2f})  {centre / CENTRE.held:.2f}")
    click.echo(
        "\ntiles to be built: what each saves of a plan beside those above it, in the mean over all plans at the centre, the"
    )
    click.echo("worst and the best of the sweep; layers that it wins at the centre (predicted)")
    for tile in found["tiles"]:
        click.echo(f"{tile['kind']:<28} {tile['saves']:>6.2%} {tile['wins']:>5} layers")
    listed = ", ".join(f"{tile['kind']} {tile['saves']:.2%}" for tile in found["without strips"])
    click.echo(f"without strips: {listed}")
    click.echo("\nnetworks, us (predicted): with any tile of these kinds, and with those to be built")
    click.echo("\n".join(network_rows(found)))
    click.echo(f"\nwhere they win on {SHOWN_DEVICE}, layers and us, and what cannot move (predicted)")
    for name, of in found["networks"].items():
        if SHOWN_DEVICE in name:
            wins = list(of["wins"].items())[:SHOWN_WINS]
            click.echo(f"{name:<32} " + ", ".join(f"{kind} {n} ({us:.0f})" for kind, (n, us) in wins))
            if stays := [f"{why} {us:.0f}" for why, us in of["stays"].items() if us > SHOWN_SHARE * of["today"]]:
                click.echo(f"{'':<32} cannot move: {', '.join(stays)}")
    click.echo(f"\nour dense kernels beside cuBLAS's published times, products of {LONG_US:g} us and more (predicted)")
    for device, of in found["published"].items():
        low, centre, high = (of[f"{key}of the library's time"] for key in ("best ", "", "worst "))
        click.echo(
            f"{device:<6} {of['rows']:.0f} rows: of the library's time {centre:.2f} ({low:.2f} to {high:.2f}); more than 10 % "
            f"faster {of['more than 10 % faster']:.1%}"
        )


if __name__ == "__main__":
    main()
