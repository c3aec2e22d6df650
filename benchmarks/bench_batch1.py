"""ResNet-50's distinct convolutions at batch 1: predicted time of the best dense and the best sparse tactic beside the floor.

    python -m benchmarks.bench_batch1 [--device h200]

The floor (tactics/roofline.py) is a launch and the largest of products, DRAM and L2 at the device's peak rates. Inner layers
read and write fp16:hwc8, the stem reads the image as it comes. Times are predicted, in microseconds; nothing runs.
"""

import click

from benchmarks.bench_conv import SHAPES, problem
from cuda_kernels.device import named
from tactics.candidates import candidates
from tactics.predict import predict_us
from tactics.roofline import floors


@click.command()
@click.option("--device", default="h200", show_default=True)
def main(device: str) -> None:
    gpu, within = named(device), 0
    click.echo(f"{gpu}, all times predicted({gpu.name}), us")
    click.echo(f"{'layer':20} {'floor':>6} {'dense':>7} {'sparse':>7} {'x floor':>8}  best dense")
    for shape in SHAPES:
        p = problem(shape, 1)
        best: dict[bool, tuple[float, str]] = {}
        for t in candidates(p, gpu):
            if t.out.layout == "hwc8" and str(t.ins[0]) == ("fp32:chw" if p.c < 8 else "fp16:hwc8"):
                best[t.sparse] = min(best.get(t.sparse, (1e9, "")), (predict_us(p, t, gpu), t.name.partition("__")[0]))
        floor, (dense, name) = float(floors(p, gpu)["dense_us"]), best[False]
        sparse = f"{best[True][0]:7.2f}" if True in best else f"{'-':>7}"
        click.echo(f"{shape:20} {floor:6.2f} {dense:7.2f} {sparse} {dense / floor:8.2f}  {name}")
        within += dense <= 1.5 * floor + 1.5
    click.echo(f"in all {within} of {len(SHAPES)} dense layers within 1.5 x floor + 1.5 us")


if __name__ == "__main__":
    main()
