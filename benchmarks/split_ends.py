"""What the ends of split sums take of a plan, and would take if more than a tile's last block added them.

    python -m benchmarks.split_ends [--device a100,h200,l4,rtx4090] [--batch 1] [NAME ...]

Of each layer whose K is split: the clocks of its end by the model (epilogue_clk of tactics/families/conv_gemm.py), beside two
others. A second launch reads all slices at the rate of the whole GPU; it costs a launch that begins early, and one more pass of
latency. Blocks that wait for each other (a cooperative launch) add a share of the tile each; they wait one pass of latency
more. NAME: as benchmarks.bench_networks has it. Times are predicted.
"""

import warnings

import click

import gpu_runtime as gr
from benchmarks.bench_networks import model_of
from cuda_kernels.device import Device, named
from cuda_kernels.rates import rates
from gpu_runtime.runtime.plan_record import Layer
from gpu_runtime.text import table
from tactics.families.conv_gemm import L2_LATENCY_CLK, num_tiles
from tactics.problems.convolution import ConvProblem
from tactics.roofline import sm_l2
from tactics.tactic import Tile
from tactics.tiles import KEPT_SUMS

NAMES = ("resnet50", "tv_efficientnet_b0", "tv_convnext_tiny")


def ends(layer: Layer, device: Device) -> tuple[float, float, float]:
    """Microseconds of a split layer's end: by the last block, by a second launch, by blocks that wait."""
    tile, tactic = layer.tactic.tile if layer.tactic else None, layer.tactic
    if tactic is None or not isinstance(layer.problem, ConvProblem) or not isinstance(tile, Tile) or tile.split < 2:
        return 0.0, 0.0, 0.0
    tiles, parts = num_tiles(layer.problem, tactic), tile.split
    per_clk = sm_l2(device, tiles * parts)
    slice_clk = tile.m * tile.n * 4 / per_clk
    read = parts - (tile.m * tile.n <= KEPT_SUMS * tile.threads)
    last = (3 + read) * L2_LATENCY_CLK + (1 + read) * slice_clk
    everywhere = tiles * parts * tile.m * tile.n * 4 / rates(device).l2
    launch = (device.launch_us - rates(device).early_us) * device.clock_mhz
    second = slice_clk + launch + 2 * L2_LATENCY_CLK + everywhere
    waiting = 5 * L2_LATENCY_CLK + 2 * slice_clk
    return last / device.clock_mhz, second / device.clock_mhz, waiting / device.clock_mhz


@click.command()
@click.argument("names", nargs=-1)
@click.option("--device", "devices", default="a100,h200,l4,rtx4090", show_default=True)
@click.option("--batch", default=1, show_default=True)
def main(names: tuple[str, ...], devices: str, batch: int) -> None:
    rows = []
    for name in names or NAMES:
        model, shapes = model_of(name, batch)
        for device in map(named, devices.split(",")):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                plan = gr.build(model, device=device.name, shapes=shapes, sparsity="disable").plan
            found = [each for each in (ends(layer, device) for layer in plan.layers) if each[0]]
            last, second, waiting = (sum(each[i] for each in found) for i in range(3))
            best = sum(min(each) for each in found)
            total = plan.solution.total_us
            rows.append([name, device.name, f"{total:.0f}", str(len(found)), f"{last:.1f}", f"{second:.1f}", f"{waiting:.1f}"])
            rows[-1].append(f"{100 * (last - best) / total:.1f} %")
    header = ["network", "GPU", "plan us", "split layers", "ends", "second launch", "waiting blocks", "most gained"]
    click.echo("\n".join(table(header, rows, right=range(2, len(header)))))


if __name__ == "__main__":
    main()
