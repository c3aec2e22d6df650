"""What layers read is what was written for them: proven by boxes in every build, element by element here, and both agree."""

from __future__ import annotations

import copy
import itertools
import random
import time

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import named
from gpu_runtime.assembly import assemble, dataflow
from gpu_runtime.errors import InternalError
from gpu_runtime.pipeline import DEFAULT_DEVICE, alternatives
from gpu_runtime.planning import places, tables
from tactics.format import DTYPES, Format, padded_channels, strides
from tactics.measure import timing
from tactics.planner import plan
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import ConcatProblem
from tests.conftest import model_path
from tests.drawn import ALL, MOVES, network
from tests.ort_budget import run
from tests.reference_run import model, node
from tests.reference_run import network as lowered
from tests.test_drawn import emulated, feeds_of
from tests.test_inplace import densenet

LARGER = [pytest.param(n, marks=pytest.mark.long) for n in ("densenet121", "fastestdet", "deeplabv3_mnv2_257")]
NEVER, ZERO = -1, -2  # what no layer wrote; a padded channel


# ---- the same proof, element by element


def assembled(proto, monkeypatch):
    """(plan data, the chosen ops by name, scratch): what a build hands to dataflow.fault, whatever that says."""
    seen = []
    monkeypatch.setattr(dataflow, "fault", lambda *given: seen.append(given))
    net = alternatives(lowered(proto))
    io = {t.name: Format(t.dtype, "chw") for t in (*net.inputs, *net.outputs)}
    table = tables.tabulate(net, named(DEFAULT_DEVICE), timing.predicted(named(DEFAULT_DEVICE)), sparse=False, io=io)
    assemble.assemble(table, plan.solve(table.graph))
    monkeypatch.undo()
    return seen[0]


def bytes_of(record) -> np.ndarray:
    """The first byte of every element, [N, padded C, H, W], by the rule that tactics.format states."""
    fmt, (n, c, h, w) = Format.parse(record["format"]), record["shape4"]
    whole = record.get("inside") or record
    s = strides(Format.parse(whole["format"]), tuple(whole["shape4"]))
    i, c, pixel = np.ogrid[:n, : padded_channels(fmt.layout, c), : h * w]
    at = i * s.n + (c >> s.log2v) * s.block + (c & ((1 << s.log2v) - 1)) + pixel * s.pixel
    return (record["offset"] + at * DTYPES[fmt.dtype].itemsize).reshape(n, -1, h, w)


class Arena:
    """Bytes, each with the number of the element that was last written there."""

    def __init__(self, nbytes: int):
        self.held, self.fresh = np.full(nbytes, NEVER), itertools.count(1)

    def _each(self, record) -> np.ndarray:
        item = DTYPES[Format.parse(record["format"]).dtype].itemsize
        return bytes_of(record)[..., None] + np.arange(item)

    def write(self, record, values: np.ndarray) -> None:
        at = self._each(record)
        padded = np.full(at.shape[:4], ZERO)
        padded[:, : values.shape[1]] = values
        self.held[at] = padded[..., None]

    def holds(self, record, values: np.ndarray) -> bool:
        found = self.held[self._each(record)]
        c = values.shape[1]
        return bool((found[:, :c] == values[..., None]).all() and (found[:, c:] == ZERO).all())

    def new(self, shape) -> np.ndarray:
        first = next(self.fresh) * 2**32
        return first + np.arange(np.prod(shape)).reshape(shape)


def moved(problem, values: list[np.ndarray]) -> np.ndarray:
    """What a layer that launches nothing makes of its inputs."""
    if isinstance(problem, ConcatProblem):
        return np.concatenate(values, axis=problem.axis)
    if isinstance(problem, ViewProblem):
        return values[0].reshape(problem.out)
    if isinstance(problem, GatherProblem):
        return values[0].transpose(problem.perm)
    return values[0][:, problem.start[0] : problem.start[0] + problem.out[0]]


def wrong_element(data, ops, scratch) -> str | None:
    """The first layer that reads what was not written for it, by running the plan over numbers in place of values."""
    arena, values = Arena(data["memory"]["activation_bytes"] + 4096), {}
    frees, last = dict(data["memory"]["frees"]), {}
    for i, step in enumerate(data["steps"]):
        last.update(dict.fromkeys(step["covers"], i))
    for edge in data["inputs"]:
        values[edge["name"]] = arena.new(edge["shape4"])
        arena.write(edge, values[edge["name"]])
    for i, layer in enumerate(data["layers"]):
        op = ops.get(layer["name"]) if layer["type"] != "reformat" and layer["problem"] else None
        tensors = op.inputs if op else [layer["inputs"][0]["tensor"]]
        for record, tensor in zip(layer["inputs"], tensors, strict=True):
            if not arena.holds(record, values[tensor]):
                return f"{layer['name']} reads {record['name']}"
        if op:
            given = [values[t] for t in op.inputs]
            values[op.output] = moved(op.problem, given) if layer["type"] == "noop" else arena.new(op.problem.out_shape)
        if layer["type"] != "noop":
            for offset, nbytes in scratch:
                if i in last and ["arena", offset] in data["steps"][last[i]]["args"]:
                    arena.held[offset : offset + nbytes] = NEVER
            arena.write(layer["outputs"][0], values[op.output if op else tensors[0]])
            for offset, nbytes in frees.get(last[i], ()):
                arena.held[offset : offset + nbytes] = NEVER
    for edge in (*data["inputs"], *data["outputs"]):
        if not arena.holds(edge, values[edge["name"]]):
            return f"{edge['name']} at the end"
    return None


def tell_tensors(data, ops) -> None:
    """Write into each copied tensor's record which of the network's it is, as names tell in a right plan."""
    tensor = {edge["name"]: edge["name"] for edge in data["inputs"]}
    for layer in data["layers"]:
        for record in layer["inputs"]:
            record["tensor"] = tensor[record["name"]]
        op = ops.get(layer["name"]) if layer["type"] != "reformat" and layer["problem"] else None
        tensor[layer["outputs"][0]["name"]] = op.output if op else layer["inputs"][0]["tensor"]


# ---- views in joins


def batches(n: int, m: int, kind: str, at: int, channels: int) -> onnx.ModelProto:
    """A Reshape or Transpose from batch n to m, joined with another tensor; its source has another reader."""
    channels = channels if kind == "Reshape" else m
    shape = (m, n * channels // m, 2, 2)
    view = node("Reshape", "r s", "v") if kind == "Reshape" else node("Transpose", "r", "v", perm=(1, 0, 2, 3))
    joined = ["v a", "a v", "a v a"][at]
    nodes = [node("Relu", "x", "r"), view, node("Relu", "y", "a"), node("Concat", joined, "c", axis=1), node("Neg", "c", "z"),
             node("Neg", "r", "again")]  # fmt: skip
    weights = {"s": np.array(shape)} if kind == "Reshape" else {}
    return model(nodes, {"x": (n, channels, 2, 2), "y": shape}, "z again", weights)


def exact(proto, path) -> None:
    """Only moves and signs: every output is onnxruntime's, bit for bit."""
    feeds = feeds_of(proto)
    got, want = emulated(proto, feeds, path), run(proto, feeds)
    for name, y in want.items():
        assert np.array_equal(got[name], y), f"{name}: {np.mean(got[name] != y):.2f} of it differs"


@pytest.mark.parametrize("n, m", [(1, 2), (1, 8), (2, 8), (8, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["Reshape", "Transpose"])
def test_a_view_of_another_batch_in_a_concat(n, m, kind, tmp_path):
    for at in range(3):
        exact(batches(n, m, kind, at, 8), tmp_path / "m.onnx")


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("inner", ["a b", "p q"])
def test_a_concat_under_a_view_in_a_concat(first, inner, tmp_path):
    """The inner Concat's pieces have its strides, and the view those of the outer one."""
    nodes = [node("Relu", "x", "a"), node("Neg", "x", "b"), node("Split", "b", "p q", axis=1, num_outputs=2),
             node("Concat", inner, "i", axis=1), node("Reshape", "i s", "v"), node("Relu", "y", "r"),
             node("Concat", "r v", "c", axis=1), node("Neg", "c", "z"), node("Neg", "a", "u"),
             node("Abs", "p", "w")]  # fmt: skip
    count = 16 if inner == "a b" else 8
    proto = model(nodes, {"x": (1, 8, 3, 4), "y": (1, first, 1, 12)}, "z u w", {"s": np.array([1, count, 1, 12])}, opset=18)
    exact(proto, tmp_path / "m.onnx")


@pytest.mark.parametrize("shape", [(1, 2, 2, 2), (1, 3, 2, 4), (1, 8, 3, 3)])
@pytest.mark.parametrize("last", ["Reshape", "Transpose"])
def test_rows_that_begin_between_vectors(shape, last, tmp_path):
    """What a view puts behind a piece of odd length begins at no multiple of 16 bytes."""
    n, c, h, w = shape
    rows = [1, 4, 1, c * h * w // 4]
    steps = [node("Transpose", "r", "t", perm=(0, 2, 3, 1)), node("Reshape", "t s", "v")]
    steps = steps if last == "Transpose" else [node("Reshape", "r s", "v")]
    nodes = [node("Relu", "x", "r"), *steps, node("Relu", "y", "a"), node("Concat", "a v", "c", axis=1), node("Neg", "c", "z"),
             node("Neg", "r", "u")]  # fmt: skip
    exact(model(nodes, {"x": shape, "y": (1, 1, 1, rows[3])}, "z u", {"s": np.array(rows)}), tmp_path / "m.onnx")


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("group", range(3))
def test_drawn_moves(group, tmp_path):
    """Views that change the batch, Concat, Split and several readers in random topologies."""
    for seed in range(10 * group, 10 * group + 10):
        proto = network(seed, MOVES)
        feeds = feeds_of(proto)
        got, want = emulated(proto, feeds, tmp_path / "m.onnx"), run(proto, feeds)
        for name, y in want.items():
            assert np.allclose(got[name], y, rtol=2e-3, atol=2e-3), f"seed {seed}: {name}"


# ---- the two proofs


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("group", range(3))
def test_drawn_plans_are_right_element_by_element(group, monkeypatch):
    for seed in range(8 * group, 8 * group + 8):
        for rules in (MOVES, ALL):
            data, ops, scratch = assembled(network(seed, rules), monkeypatch)
            tell_tensors(data, ops)
            assert (dataflow.fault(data, ops, scratch), wrong_element(data, ops, scratch)) == (None, None), seed


def spoil(data, pick: random.Random) -> None:
    """One mistake in a plan: a tensor elsewhere or with other strides, an input swapped, two layers in the wrong order, memory
    given back too early."""
    layer = pick.choice(data["layers"])
    record = pick.choice((*layer["inputs"], *layer["outputs"]))
    kind = pick.choice(("offset", "offset", "other", "inside", "channel", "own", "order", "frees", "format"))
    everywhere = [t for one in data["layers"] for t in (*one["inputs"], *one["outputs"])]
    same = [t for t in everywhere if t["name"] == record["name"]] if pick.random() < 0.7 else [record]
    inside = [t for t in everywhere if "inside" in t]
    if kind in ("offset", "other"):
        to = record["offset"] + pick.choice((-16, 2, 16, 256)) if kind == "offset" else pick.choice(everywhere)["offset"]
        for t in same:
            if "inside" in t:
                t["inside"] = t["inside"] | {"offset": t["inside"]["offset"] + max(to, 0) - t["offset"]}
            t["offset"] = max(to, 0)
    elif kind == "inside" and inside:
        t = pick.choice(inside)
        n, c, h, w = t["inside"]["shape4"]
        t["inside"] = t["inside"] | {"shape4": [n, c + 8, h, w]}
    elif kind == "channel" and inside:
        t = pick.choice(inside)
        t["inside"] = t["inside"] | {"channel": max(0, t["inside"]["channel"] - 8)}
    elif kind == "own" and inside:
        pick.choice(inside).pop("inside")
    elif kind == "order" and len(data["layers"]) > 1:
        i = pick.randrange(len(data["layers"]) - 1)
        data["layers"][i : i + 2] = data["layers"][i + 1], data["layers"][i]
    elif kind == "frees" and data["memory"]["frees"]:
        step, rows = pick.choice(data["memory"]["frees"])
        others = (f for f in data["memory"]["frees"] if f[0] not in (step, step - 1))
        data["memory"]["frees"] = [[max(0, step - 1), rows], *others]
    elif kind == "format":
        record["format"] = pick.choice(("fp16:chw", "fp16:hwc8", "fp16:hwc16", "fp16:chw32"))


@pytest.mark.slow
def test_no_spoilt_plan_passes(monkeypatch):
    """What the proof by elements refuses, that by boxes refuses; it finds most of the mistakes."""
    wrong = refused = 0
    for seed in range(20):
        data, ops, scratch = assembled(network(seed, MOVES if seed % 3 else ALL), monkeypatch)
        tell_tensors(data, ops)
        pick = random.Random(seed)
        for _ in range(12):
            spoilt = copy.deepcopy(data)
            spoil(spoilt, pick)
            try:
                found = wrong_element(spoilt, ops, scratch)
            except (IndexError, KeyError):
                found = "beyond the arena, or before it was made"
            said = dataflow.fault(spoilt, ops, scratch)
            assert said or not found, f"seed {seed}: {found}"
            wrong, refused = wrong + bool(found), refused + bool(said)
    print(f"{wrong} spoilt plans read wrong elements, {refused} refused")
    assert wrong > 50 and refused >= wrong


def test_boxes_overlap_where_their_bytes_do():
    pick = random.Random(3)
    seen = set()
    for _ in range(3000):
        boxes = []
        for _ in range(2):
            dims = [(pick.randint(1, 4), pick.choice((1, 2, 3, 4, 6, 8, 12, 16, 24))) for _ in range(pick.randint(0, 3))]
            boxes.append(dataflow._box(pick.randint(0, 40), dims, pick.randint(1, 4)))
        covered = [
            {b.start + sum(k * s for k, (_, s) in zip(ks, b.dims, strict=True)) + r
             for ks in itertools.product(*(range(n) for n, _ in b.dims)) for r in range(b.run)}
            for b in boxes
        ]  # fmt: skip
        assert dataflow._overlap(*boxes) == bool(covered[0] & covered[1]), boxes
        seen.add(bool(covered[0] & covered[1]))
    assert seen == {True, False}


def test_a_wrong_plan_is_no_engine(tmp_path, monkeypatch):
    """The mistake that the proof was written after: a view from one image to several takes the place of a piece."""
    path = tmp_path / "m.onnx"
    onnx.save(batches(1, 4, "Reshape", 1, 8), path)
    through = places._inside_through_views

    def careless(network, found, runs, most):
        runs |= {places.Place(t, key) for t, keys in found.items() for key in keys if key.format == ("fp16", True, 1)}
        through(network, found, runs, most)

    monkeypatch.setattr(places, "_inside_through_views", careless)
    with pytest.raises(InternalError, match="launches nothing, but its output is not where its inputs are"):
        gr.build(path, device=DEFAULT_DEVICE)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet11_fp16", "yolox_nano", *LARGER])
def test_the_proof_costs_little(name, tmp_path, monkeypatch):
    """CPU time of the proof against that of the build around it."""
    path = tmp_path / "m.onnx"
    if name == "densenet121":
        onnx.save(densenet((6, 12, 24, 16), 32, 64, 64), path)
    else:
        path = model_path(name)
    spent, fault = [], dataflow.fault

    def timed(*given):
        begin = time.process_time()
        found = fault(*given)
        spent.append(time.process_time() - begin)
        return found

    monkeypatch.setattr(dataflow, "fault", timed)
    begin = time.process_time()
    gr.build(path, device=DEFAULT_DEVICE)
    total = time.process_time() - begin
    print(f"{name}: {1e3 * spent[0]:.1f} ms of {total:.2f} s, {100 * spent[0] / total:.2f} %")
    assert spent[0] <= 0.05 * total
