"""How building grows with the graph: kinds of generated graphs from 1,000 nodes on, seconds by stage, ms per node, peak MB.

    python -m benchmarks.bench_scale [--nodes 1000 5000 20000] [--kinds chain fan ...] [--sparsity enable] [--device h200]

Each build runs in a process of its own, whose largest resident set is the peak. Times are predicted, so no GPU is needed;
seconds are the processor's, so that other programs count for little, and leave out Python's imports.
"""

import argparse
import importlib
import os
import platform
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks import processes

SIDE, CHANNELS = 8, 16
NODES = (1000, 5000, 20000)
# stage -> (module, function) whose time is the stage's, less the time of other stages inside it.
STAGES = {
    "import": ("gpu_runtime.frontend.importer", "load"),
    "sizes": ("gpu_runtime.frontend.importer", "sized"),
    "fuse": ("gpu_runtime.fusion.fuse", "fuse"),
    "lower": ("gpu_runtime.lowering.lower", "lower"),
    "ranges": ("gpu_runtime.precision.ranges", "fit"),
    "alternatives": ("gpu_runtime.building.settle", "alternatives"),
    "tabulate": ("gpu_runtime.planning.tables", "tabulate"),
    "solve": ("gpu_runtime.building.planner", "solve"),
    "rivals": ("gpu_runtime.planning.counterfactuals", "rivals"),
    "reasons": ("gpu_runtime.explain.reasons", "sparsity"),
    "assemble": ("gpu_runtime.assembly.assemble", "assemble"),
    "store": ("gpu_runtime.explain.what_if", "store"),
    "seal": ("gpu_runtime.building.build", "seal"),
}


class _Net:
    """The nodes and weights of a graph that grows from input "x"; `add` returns the name of a new node's output."""

    def __init__(self, channels: int = CHANNELS):
        self.channels = channels
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def add(self, op: str, *inputs: str, **attributes) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"t{len(self.nodes)}"], f"n{len(self.nodes)}", **attributes))
        return self.nodes[-1].output[0]

    def conv(self, x: str, c: int = CHANNELS, k: int = CHANNELS, size: int = 3) -> str:
        """Adds a convolution of `c` to `k` channels, whose weights keep random activations at their size."""
        w = self.constant(self.rng.standard_normal((k, c, size, size)).astype(np.float32) / (c * size * size) ** 0.5)
        return self.add("Conv", x, w, pads=[size // 2] * 4)

    def constant(self, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def joined(self, tensors: list[str]) -> str:
        """Adds nodes that sum the tensors in pairs; returns the sum's name."""
        while len(tensors) > 1:
            pairs = [self.add("Add", a, b) for a, b in zip(tensors[::2], tensors[1::2], strict=False)]
            tensors = pairs + tensors[2 * len(pairs) :]
        return tensors[0]

    def model(self, y: str) -> onnx.ModelProto:
        shape = [1, self.channels, SIDE, SIDE]
        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, s) for name, s in (("x", shape), (y, None)))
        graph = helper.make_graph(self.nodes, "scale", [x], [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def chain(n: int) -> onnx.ModelProto:
    """Returns n elementwise nodes in a row."""
    net, x = _Net(), "x"
    for i in range(n):
        x = net.add(("Sigmoid", "Tanh")[i % 2], x)
    return net.model(x)


def branches(n: int) -> onnx.ModelProto:
    """Returns blocks of five nodes in a row: a 3x3, a 1x1 and their input are added, then a ReLU."""
    net, x = _Net(), "x"
    for _ in range(n // 5):
        x = net.add("Relu", net.add("Add", net.add("Add", net.conv(x), net.conv(x, size=1)), x))
    return net.model(x)


def fan(n: int) -> onnx.ModelProto:
    """Returns one tensor with n / 2 elementwise readers, whose results are added up."""
    net = _Net()
    return net.model(net.joined([net.add(("Sigmoid", "Tanh", "Softplus", "Softsign")[i % 4], "x") for i in range(n // 2)]))


def conv_fan(n: int) -> onnx.ModelProto:
    """Returns one tensor that n / 2 convolutions read, whose results are added up."""
    net = _Net()
    return net.model(net.joined([net.conv("x", size=1) for _ in range(n // 2)]))


def convs(n: int) -> onnx.ModelProto:
    """Returns convolutions of one shape in a row."""
    net, x = _Net(), "x"
    for _ in range(n):
        x = net.conv(x)
    return net.model(x)


def shapes(n: int) -> onnx.ModelProto:
    """Returns 1x1 convolutions and ReLUs in a row with 60 numbers of channels, so 60 distinct problems."""
    net, x, c = _Net(), "x", CHANNELS
    for i in range(n // 2):
        k = 8 + 8 * (i * 37 % 60)
        x, c = net.add("Relu", net.conv(x, c, k, 1)), k
    return net.model(x)


def ladder(n: int) -> onnx.ModelProto:
    """Returns residual blocks in a row: Conv, Add, ReLU."""
    net, x = _Net(), "x"
    for _ in range(n // 3):
        x = net.add("Relu", net.add("Add", net.conv(x), x))
    return net.model(x)


def concats(n: int) -> onnx.ModelProto:
    """Returns blocks in a row: a Split in two, an elementwise function on each half, a Concat."""
    net, x = _Net(), "x"
    halves = net.constant(np.array([CHANNELS // 2, CHANNELS // 2], np.int64))
    for i in range(n // 4):
        net.nodes.append(helper.make_node("Split", [x, halves], [f"a{i}", f"b{i}"], f"split{i}", axis=1))
        x = net.add("Concat", net.add("Sigmoid", f"a{i}"), net.add("Tanh", f"b{i}"), axis=1)
    return net.model(x)


def dense(n: int) -> onnx.ModelProto:
    """Returns DenseNet's blocks: six convolutions, each on the Concat of all tensors before it, then a 1x1 convolution back."""
    net, x = _Net(), "x"
    while len(net.nodes) < n:
        features = [x]
        for i in range(6):
            whole = net.add("Concat", *features, axis=1) if i else x
            features.append(net.add("Relu", net.conv(whole, CHANNELS + 8 * i, 8)))
        x = net.conv(net.add("Concat", *features, axis=1), CHANNELS + 48, CHANNELS, 1)
    return net.model(x)


def reshapes(n: int) -> onnx.ModelProto:
    """Returns pairs in a row: a Reshape that moves channels into rows or back, and an elementwise function."""
    net, x = _Net(), "x"
    ways = [net.constant(np.array(s, np.int64)) for s in ((1, CHANNELS // 2, SIDE * 2, SIDE), (1, CHANNELS, SIDE, SIDE))]
    for i in range(n // 2):
        x = net.add("Sigmoid", net.add("Reshape", x, ways[i % 2]))
    return net.model(x)


def split(nodes: int) -> onnx.ModelProto:
    """Returns a Split into `nodes` parts, and their Sum."""
    parts = " ".join(f"s{i}" for i in range(nodes))
    made = [helper.make_node("Split", ["x"], parts.split(), "split", axis=1, num_outputs=nodes)]
    made.append(helper.make_node("Sum", parts.split(), ["y"], "sum"))
    ends = [helper.make_tensor_value_info(name, 1, (1, 8 * n, 2, 2)) for name, n in (("x", nodes), ("y", 1))]
    graph = helper.make_graph(made, "split", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


KINDS: dict[str, Callable[[int], onnx.ModelProto]] = {
    f.__name__: f for f in (chain, branches, fan, conv_fan, convs, shapes, ladder, concats, dense, reshapes, split)
}


@contextmanager
def stage_seconds() -> Iterator[dict[str, float]]:
    """Yields stage -> the processor's seconds of each of STAGES inside the block, without the time of other stages that it
    calls.
    """
    spent, inner = dict.fromkeys(STAGES, 0.0), []

    def timed(stage: str, function: Callable) -> Callable:
        def call(*args, **options):
            start = time.process_time()
            inner.append(0.0)
            try:
                return function(*args, **options)
            finally:
                took = time.process_time() - start
                spent[stage] += took - inner.pop()
                if inner:
                    inner[-1] += took

        return call

    with ExitStack() as patches:
        for stage, (module, name) in STAGES.items():
            where = importlib.import_module(module)
            patches.enter_context(mock.patch.object(where, name, timed(stage, getattr(where, name))))
        yield spent


def run(kind: str, nodes: int, sparsity: str, device: str) -> dict:
    """Builds one graph in this process; returns {kind, nodes, layers, seconds, stages, ms_per_node, peak_mb}."""
    from gpu_runtime import build

    warnings.simplefilter("ignore", RuntimeWarning)
    with tempfile.TemporaryDirectory() as folder:
        path, warm = Path(folder, "scale.onnx"), Path(folder, "warm.onnx")
        onnx.save(KINDS[kind](nodes), path)
        onnx.save(chain(2), warm)
        build(warm, device=device)  # so that no stage pays for Python's imports
        with stage_seconds() as stages:
            start = time.process_time()
            engine = build(path, sparsity=sparsity, device=device)
            seconds = time.process_time() - start
    return {
        "kind": kind,
        "nodes": nodes,
        "layers": len(engine.plan.layers),
        "seconds": seconds,
        "stages": stages,
        "ms_per_node": 1e3 * seconds / nodes,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--sparsity", default="enable", choices=("disable", "enable", "force"))
    parser.add_argument("--device", default="h200")
    args = parser.parse_args()
    print("kind      nodes layers  total " + " ".join(f"{s[:7]:>7}" for s in STAGES) + " ms/node peak MB", flush=True)
    cases = [(kind, nodes) for kind in args.kinds for nodes in args.nodes]
    with processes.pool(1, 1) as pool:
        for row in pool.map(run, *zip(*cases, strict=True), repeat(args.sparsity), repeat(args.device)):
            stages = " ".join(f"{s:7.2f}" for s in row["stages"].values())
            print(
                f"{row['kind']:9} {row['nodes']:5} {row['layers']:6} {row['seconds']:6.1f} {stages} {row['ms_per_node']:7.2f} "
                f"{row['peak_mb']:7.0f}",
                flush=True,
            )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, Python {platform.python_version()}"
    print(f"{time.strftime('%Y-%m-%d')}: {machine}")


if __name__ == "__main__":
    main()
