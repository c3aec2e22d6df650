"""Every kernel that a row of `make gpu` loads: compiled before the row begins, or by `make gpu-pack` where there is no GPU.

`OF_ROW[name](device, small, out)` -> binaries. A build with measured times decides by its measurements which tactics it times;
its kernels are taken from REHEARSALS builds whose times are predictions with random errors (DOUBT, as hardware showed them).
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np

import gpu_runtime as gr
from benchmarks import bench_conv, gpu_networks
from benchmarks.bench_networks import KINDS, model_of, row_of
from benchmarks.experiments import changed, counters, layers, operators, right, stored
from benchmarks.hardware import NEWEST
from cuda_kernels.device import Device
from gpu_runtime.runtime.plan_record import EngineRecord
from gpu_runtime.runtime.point import kernel_keys
from tactics.launches import Binary, binaries
from tactics.measure.lazy import LEVELS, Lazy
from tactics.measure.timing import Predicted, Time
from tactics.problems.convolution import ConvProblem
from tactics.problems.pointwise_ops import ACTIVATIONS
from tactics.problems.problem import Problem
from tactics.step import epilogue_values
from tactics.tactic import Tactic

REHEARSALS, DOUBT, SHIFT = 3, 0.15, 0.1  # the number of builds; the deviation, and the mean, of the errors' logarithms
LEVEL = 3  # the optimization level of a build without that option
FLUSH: Binary = ("flush_l2", ())
Pairs = Iterable[tuple[Problem, Tactic]]


class Rehearsed(Predicted):
    """A timer whose times are predictions with errors; `timed` has every tactic that was asked for. `us_of`: (problem, tactic,
    predicted microseconds) -> the time.
    """

    def __init__(self, device: Device, us_of: Callable[[Problem, Tactic, float], float]) -> None:
        super().__init__(device)
        self.us_of, self.timed = us_of, dict[tuple[Problem, Tactic], Time]()

    def __call__(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        tactics = tuple(tactics)
        new = [t for t in tactics if (problem, t) not in self.timed]
        for tactic, time in super().__call__(problem, new).items():
            us = self.us_of(problem, tactic, time.us)
            self.timed[problem, tactic] = Time(us, us, us)
        return {t: self.timed[problem, t] for t in tactics}

    def known(self, problem: Problem, tactics: Iterable[Tactic]) -> dict[Tactic, Time]:
        return {}


def random_errors(seed: int) -> Callable[[Problem, Tactic, float], float]:
    rng = np.random.default_rng(seed)
    return lambda _problem, _tactic, us: us * math.exp(rng.normal(SHIFT, DOUBT))


def launched(pairs: Pairs) -> Iterator[Binary]:
    for problem, tactic in pairs:
        yield from binaries(problem, tactic)


def of_builds(items: Sequence[str], device: Device) -> Iterator[Binary]:
    """Yields the kernels that measured builds of these NAME:BATCH:KINDS may time."""
    for row in (row_of(item, "dense") for item in items):
        for kind in row.kinds:
            model, shapes = model_of(row.name, row.batch)
            for seed in range(REHEARSALS):
                timer = Rehearsed(device, random_errors(seed))
                lazy = Lazy(timer, device, LEVELS[LEVEL])
                with gpu_networks.fewer_tactics(False, lambda *_, lazy=lazy, **__: lazy), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    gr.build(model, **KINDS[kind], device=device, shapes=shapes)
                yield from launched(timer.timed)


def of_record(record: EngineRecord) -> Iterator[Binary]:
    """Yields the kernels that an engine loads: its steps, and the reformats of inputs in other formats."""
    for plan in record.plans:
        yield from kernel_keys(plan, on_gpu=True)


def of_plans(device: Device) -> Iterator[Binary]:
    """Yields the kernels of every plan that is packed for the device."""
    for path in sorted(stored.folder(device.name).glob("*.plan")) if stored.is_current() else ():
        yield from of_record(stored.record_of(path.read_bytes()))


def of_tests(device: Device) -> Iterator[Binary]:
    """Yields the kernels of `pytest -m gpu`: every tactic of the tests' problems; of large problems only the channels-last
    ones, which the naive kernel judges.
    """
    from tests.driver.test_gpu import LARGE
    from tests.problems import CONVS, pairs

    yield from launched((p, t) for _, p, t in pairs(device))
    for p in LARGE.values():
        yield from launched((p, t) for t in bench_conv.tactics(p, device))
    yield from references(p for p in (*CONVS.values(), *LARGE.values()) if isinstance(p, ConvProblem))


def references(problems: Iterable[ConvProblem]) -> Iterator[Binary]:
    """Yields the kernels that compute the expected outputs of these convolutions, and the stopwatch's."""
    yield FLUSH
    plain = [{"ACT": act, "RES": residual} for act, residual in product(range(len(ACTIVATIONS)), range(3))]
    for values in (*plain, *map(epilogue_values, problems)):
        yield "reference_conv", tuple(values.items())


def of_sanitizer(device: Device) -> Iterator[Binary]:
    from tests.problems import sanitize_cases

    return launched((p, t) for _, p, t in sanitize_cases(device))


def of_networks(device: Device, small: bool, _: Path) -> Iterator[Binary]:
    """Yields the kernels of the networks of benchmarks.gpu_networks, and of the expected outputs of their layers."""
    with tempfile.TemporaryDirectory() as folder:
        work = gpu_networks.work(device, small, Path(folder))
    yield from launched((p, t) for p, tactics in work for t in (gpu_networks.few(tactics) if small else tactics))
    yield from references(p for p, _ in work if isinstance(p, ConvProblem))


def of_layers(device: Device, small: bool) -> Iterator[Binary]:
    yield from layers.kernels(device, small)
    yield from references(layers.problem(name, kind) for name in layers.shapes(small) for kind in layers.kinds(name))


def of_conv(device: Device) -> Iterator[Binary]:
    for name in bench_conv.SHAPES:
        problem = bench_conv.problem(name, 32)
        yield from launched((problem, t) for t in bench_conv.tactics(problem, device))


MEASURED = ("resnet50:32:dense,sparse",)
MEASURED_1 = ("resnet50:1:dense",)
MEASURED_OTHERS = ("resnet50:32:dense", "tv_efficientnet_b0:32:dense", "tv_convnext_tiny:32:dense")
SMALL_BUILD = ("two_layers:1:dense",)
OF_ROW: dict[str, Callable[[Device, bool, Path], Iterable[Binary]]] = {
    "right": right.kernels,
    **dict.fromkeys(("early", "batches", "int8", "known"), lambda device, small, _: [] if small else of_plans(device)),
    "layers": lambda device, small, _: of_layers(device, small),
    "measured": lambda device, small, _: [] if small else of_builds(MEASURED, device),
    "peers": lambda device, small, _: of_layers(device, small),
    "untimed": lambda device, small, _: launched(changed.untimed(NEWEST, device, small)),
    "ends-1": lambda device, small, _: launched(changed.ends_1(device, small)),
    "facts": lambda *_: [],
    "counters": lambda device, small, _: counters.kernels(device, small),
    "measured-1": lambda device, small, _: [] if small else of_builds(MEASURED_1, device),
    "tests": lambda device, small, _: [] if small else of_tests(device),
    "changed": lambda device, small, out: launched(changed.pairs(out, device, small)),
    "sanitizer": lambda device, small, _: [] if small else of_sanitizer(device),
    "compiled": lambda device, small, _: [] if small else of_builds(MEASURED_OTHERS, device),
    "networks": of_networks,
    "conv": lambda device, small, _: [] if small else of_conv(device),
    "operators": lambda device, small, _: operators.kernels(device, small),
}


def of_row(name: str, device: Device, small: bool, out: Path) -> list[Binary]:
    """Returns the kernels of a row, each once, in the order in which they are found."""
    return list(dict.fromkeys((kernel, tuple(sorted(values))) for kernel, values in OF_ROW[name](device, small, out)))
