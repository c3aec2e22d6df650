"""Published measurements, as problems that can be estimated: the input of bench_predictions."""

import csv
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuda_kernels.device import Device, named
from tactics.peers import Work, work_of
from tactics.problems.epilogue import Epilogue
from tactics.problems.problem import ConvProblem

FOLDER = Path(__file__).parent / "published"
CYCLED = 5.0  # copies of the weights that aiconfigurator cycles through
# Microseconds that a launch on a stream takes longer than one in a graph, in vllmbench's times, fitted with the other
# constants. A product of 64 x 64 x 64 takes 9.4 us on an RTX 4090, 4.0 on an A100, where 0 fits best.
STREAM_US = {"rtx4090": 5.9}
# Device name in the files -> our name. T4 and other unknown devices keep their name, to be refused with the reason.
DEVICES = {
    "A100-PCIE-80GB": "a100_pcie",
    "A100-PCIE-40GB": "a100_40gb",
    "A100-80GB": "a100",
    "A100-40GB": "a100_40gb",
    "RTX3090": "rtx3090",
    "RTX3070": "rtx3070",
    "RTX4090": "rtx4090",
    "RTX5090": "rtx5090",
    "L40": "l40s",
    "RTX-A6000": "rtx_a6000",
}
CONV = re.compile(
    r"conv N(?P<n>\d+) C(?P<c>\d+) H(?P<h>\d+) W(?P<w>\d+) K(?P<k>\d+) R(?P<r>\d+) S(?P<s>\d+) stride(?P<stride>\d+) "
    r"pad(?P<pad>\d+) groups1(?: residual(?P<residual>[01]))? fp16"
)
OVERHEAD = re.compile(r"~([\d.]+) us/layer above")
HALF = re.compile(r"f16 accumulate|fp16 accumulation|FP16 accumulation|_f16f16_f16f16_f16_|_h16816|_h1688")
NETWORK = re.compile(r"(ResNet-18|ResNet-50|resnet18|resnet50|vgg16|vgg19|InceptionV3|inception_v3)\b.* N(\d+) ")


@dataclass(frozen=True, slots=True)
class Row:
    """One published time, `us`, with `sparse_us` beside it for a pair; `judged`: whether the row judges the fit and is kept
    from it. `work` has one problem, for a network one per convolution. `problem`: a convolution of ours that computes the same.
    `stream_us`: the part of both times that a launch on a stream adds.
    """

    kind: str  # gemm, pair, layer, network, sparse network, scale or kernel
    device: str
    label: str
    us: float
    judged: bool
    work: Work | None = None
    problem: ConvProblem | None = None
    sparse_us: float = 0.0
    note: str = ""
    stream_us: float = 0.0

    @property
    def accumulate(self) -> float:
        """The rate of the row's products relative to FP32 accumulation."""
        return 2.0 if self.device.startswith("rtx") and "pro" not in self.device and HALF.search(self.note) else 1.0


def read(folder: Path) -> tuple[list[Row], list[str]]:
    """Returns (rows, sentences on rows that were left out) of all CSV files in `folder`, whose kinds their columns tell."""
    rows: list[Row] = []
    left: list[str] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            kind = next((k for k, wanted in COLUMNS.items() if wanted <= columns), None)
            if kind is None:
                raise ValueError(f"{path.name}: expected the columns of one of {list(COLUMNS.values())}, got {sorted(columns)}")
            found = [READ[kind](record, judged(record)) for record in reader]
        rows += found
    usable = []
    for row in rows:
        try:
            named(row.device)
            usable.append(row)
        except ValueError as e:
            left.append(str(e))
    return usable, sorted(set(left))


def judged(record: dict[str, str]) -> bool:
    """Whether a row belongs to the half that judges: by a hash of its text."""
    return hashlib.sha256(",".join(record.values()).encode()).digest()[0] % 2 == 1


def _gemm(r: dict[str, str], judge: bool) -> Row:
    m, n, k = (int(r[x]) for x in "mnk")
    return Row("gemm", r["device"], f"{m}x{n}x{k}", float(r["us"]), judge, product(m, n, k, CYCLED), as_conv(m, n, k))


def _pair(r: dict[str, str], judge: bool) -> Row:
    m, n, k = (int(r[x]) for x in "mnk")
    return Row(
        "pair",
        r["device"],
        f"{m}x{n}x{k}",
        float(r["dense_us"]),
        judge,
        product(m, n, k, 1.0),
        as_conv(m, n, k),
        float(r["sparse_us"]),
        stream_us=STREAM_US.get(r["device"], 0.0),
    )


def _scale(r: dict[str, str], judge: bool) -> Row:
    """Returns the row of a kernel that reads and writes equally many doubles; it reads the array that the kernel before
    wrote.
    """
    n = int(r["doubles"])
    work = Work(*(np.array([float(v)]) for v in (0, 0, 0, 8 * n, 0, 8 * n, 1, 1)))
    return Row("scale", r["device"], f"{n} doubles", 16e-3 * n / float(r["gbps"]), judge, work)


def _published(r: dict[str, str], judge: bool) -> Row:
    device, us, note = DEVICES.get(r["device"], r["device"].lower()), float(r["time_us"]), f"{r['peer']}; {r['notes']}"
    if found := CONV.fullmatch(r["problem"]):
        n, c, h, w, k, taps, s, step, pad = (int(found[x]) for x in ("n", "c", "h", "w", "k", "r", "s", "stride", "pad"))
        end = Epilogue(residual=found["residual"] == "1")
        p = ConvProblem(n, c, h, w, k, taps, s, (step, step), (pad, pad, pad, pad), epilogue=end)
        overhead = OVERHEAD.search(note)
        us -= float(overhead[1]) if overhead else 0.0
        out = 4 if "f32 output" in note else 2
        return Row("layer", device, r["problem"], us, judge, work_of([p], out_bytes=out), p, note=note)
    if r["kind"] == "network" and (net := NETWORK.match(r["problem"])):
        name, kind = re.sub("[-_]", "", net[1].lower()), "sparse network" if r["sparse"] == "1" else "network"
        return Row(kind, device, r["problem"], us, judge, network(name, int(net[2])), note=note)
    return Row("kernel" if r["kind"] == "kernel" else "other", device, r["problem"], us, judge, note=note)


COLUMNS = {
    "pair": {"device", "m", "n", "k", "dense_us", "sparse_us"},
    "gemm": {"device", "m", "n", "k", "us"},
    "scale": {"device", "doubles", "gbps"},
    "published": {"kind", "device", "problem", "sparse", "time_us", "peer", "notes"},
}
READ = {"pair": _pair, "gemm": _gemm, "scale": _scale, "published": _published}


def product(m: int, n: int, k: int, copies: float) -> Work:
    """Returns the work of a plain matrix product of 16-bit types."""
    return Work(*(np.array([float(v)]) for v in (m, n, k, 2 * m * k, 2 * n * k, 2 * m * n, copies, 1.0)))


def as_conv(m: int, n: int, k: int) -> ConvProblem:
    """Returns the product as a 1x1 convolution of m pixels, k input and n output channels."""
    return ConvProblem(1, k, 1, m, n, 1, 1)


def together(rows: Sequence[Row]) -> Work:
    """Returns the work of several rows, one after the other."""
    works = [row.work for row in rows if row.work is not None]
    parts = ([getattr(w, name) for w in works] for name in ("m", "n", "k", "x", "w", "y", "copies", "drawn"))
    return Work(*(np.concatenate(part) for part in parts))


def network(name: str, batch: int) -> Work:
    """Returns the work of a network's convolutions at 224 x 224, of InceptionV3's at 299 x 299, with additions and activations
    in their epilogues.
    """
    of = {"vgg": _vgg, "res": resnet, "inc": _inception_v3}[name[:3]]
    return work_of([*of(name, batch)])


def resnet(name: str, n: int) -> Iterator[ConvProblem]:
    deep = name == "resnet50"
    yield ConvProblem(n, 3, 224, 224, 64, 7, 7, stride=(2, 2), pad=(3,) * 4)
    c, size = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3) if deep else (2, 2, 2, 2)):
        width = 64 << stage
        out = 4 * width if deep else width
        for b in range(blocks):
            stride = 2 if b == 0 and stage else 1
            if b == 0 and (stride > 1 or c != out):
                yield ConvProblem(n, c, size, size, out, 1, 1, stride=(stride, stride))
            if deep:
                yield ConvProblem(n, c, size, size, width, 1, 1)
            yield ConvProblem(n, width if deep else c, size, size, width, 3, 3, stride=(stride, stride), pad=(1,) * 4)
            size //= stride
            last = Epilogue(residual=True)
            yield (
                ConvProblem(n, width, size, size, out, 1, 1, epilogue=last)
                if deep
                else ConvProblem(n, width, size, size, out, 3, 3, pad=(1,) * 4, epilogue=last)
            )
            c = out
    yield ConvProblem(n, c, 1, 1, 1000, 1, 1)


def _vgg(name: str, n: int) -> Iterator[ConvProblem]:
    c, size = 3, 224
    for stage, count in enumerate((2, 2, 4, 4, 4) if name == "vgg19" else (2, 2, 3, 3, 3)):
        for _ in range(count):
            width = min(512, 64 << stage)
            yield ConvProblem(n, c, size, size, width, 3, 3, pad=(1,) * 4)
            c = width
        size //= 2
    for c, k in ((25088, 4096), (4096, 4096), (4096, 1000)):
        yield ConvProblem(n, c, 1, 1, k, 1, 1)


# (input channels, size, branches); a convolution in a branch: (output channels, rows, columns[, stride, if not padded]).
# fmt: off
INCEPTION_V3 = (
    *((c, 35, (((64, 1, 1),), ((48, 1, 1), (64, 5, 5)), ((64, 1, 1), (96, 3, 3), (96, 3, 3)), ((pool, 1, 1),)))
      for c, pool in ((192, 32), (256, 64), (288, 64))),
    (288, 35, (((384, 3, 3, 2),), ((64, 1, 1), (96, 3, 3), (96, 3, 3, 2)))),
    *((768, 17, (((192, 1, 1),), ((w, 1, 1), (w, 1, 7), (192, 7, 1)),
                 ((w, 1, 1), (w, 7, 1), (w, 1, 7), (w, 7, 1), (192, 1, 7)), ((192, 1, 1),))) for w in (128, 160, 160, 192)),
    (768, 17, (((192, 1, 1), (320, 3, 3, 2)), ((192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3, 2)))),
    *((c, 8, (((320, 1, 1),), ((384, 1, 1), (384, 1, 3)), ((384, 3, 1),), ((448, 1, 1), (384, 3, 3), (384, 1, 3)),
              ((384, 3, 1),), ((192, 1, 1),))) for c in (1280, 2048)),
)
# fmt: on


def _inception_v3(name: str, n: int) -> Iterator[ConvProblem]:
    stem = (3, 299, 32, 3, 2, 0), (32, 149, 32, 3, 1, 0), (32, 147, 64, 3, 1, 1), (64, 73, 80, 1, 1, 0), (80, 73, 192, 3, 1, 0)
    for c, size, k, r, stride, pad in stem:
        yield ConvProblem(n, c, size, size, k, r, r, stride=(stride, stride), pad=(pad,) * 4)
    for first, size, branches in INCEPTION_V3:
        for branch in branches:
            c = 384 if branch == ((384, 3, 1),) else first  # this branch reads the same 384 channels as the 1 x 3 convolution
            for k, r, s, *valid in branch:
                step, above, left = (valid[0], 0, 0) if valid else (1, r // 2, s // 2)
                yield ConvProblem(n, c, size, size, k, r, s, stride=(step, step), pad=(above, left, above, left))
                c = k
    yield ConvProblem(n, 2048, 1, 1, 1000, 1, 1)


def device_of(row: Row) -> Device:
    return named(row.device)
