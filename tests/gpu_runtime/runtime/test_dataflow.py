"""What layers read is what was written for them: proven by boxes in every build, element by element here, and both agree."""

import itertools
import random
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from cuda_kernels.device import DEFAULT_DEVICE, named
from gpu_runtime.assembly import assemble
from gpu_runtime.errors import InternalError
from gpu_runtime.network import Op
from gpu_runtime.planning import places, tables
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.runtime import dataflow
from gpu_runtime.runtime.plan_record import Bound, Container, Layer, Memory, TensorPlace
from tactics.format import DTYPES, Format, padded_channels, strides
from tactics.measure import timing
from tactics.planner import plan
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import ConcatProblem, ReformatProblem
from tactics.tactic import Tactic
from tests.conftest import model_path
from tests.drawn import ALL, MOVES, network
from tests.gpu_runtime.assembly.test_assemble_in_place import densenet
from tests.networks.test_drawn import emulated, feeds_of
from tests.ort_budget import run
from tests.reference_run import model, node
from tests.reference_run import network as lowered

LARGER = [pytest.param(n, marks=pytest.mark.long) for n in ("densenet121", "fastestdet", "deeplabv3_mnv2_257")]
NEVER, ZERO = -1, -2  # an element that no layer wrote; an element of a padded channel


# ---- the same proof, element by element


class Given(NamedTuple):
    """What a build hands to dataflow.prove: the plan, the layers that take the workspace, and what ops read and make."""

    data: assemble.Assembled
    using: list[int]
    network: dataflow.Network


def assembled(proto, monkeypatch) -> tuple[Given, dict[str, Op]]:
    """(what a build hands to the proof, whatever that says; the network's ops by name)."""
    seen = []
    monkeypatch.setattr(dataflow, "prove", lambda *given: seen.append(Given(*given)))
    net = alternatives(lowered(proto))
    io = {t.name: Format(t.dtype, "chw") for t in (*net.inputs, *net.outputs)}
    table = tables.tabulate(
        net, named(DEFAULT_DEVICE), timing.Predicted(named(DEFAULT_DEVICE)), io=io, how=tables.Considered(False)
    )
    assemble.assemble(table, plan.solve(table.graph))
    monkeypatch.undo()
    return seen[0], {op.name: op for op in net.ops if op.name in seen[0].network}


def proven(given: Given, network=True) -> tuple[str | None, list]:
    """(what the proof finds wrong, or None; of each layer, what nothing reads after it). `network`: it is at hand."""
    try:
        return None, dataflow.prove(given.data, given.using, given.network if network else None)
    except dataflow.Fault as e:
        return str(e), [()] * len(given.data.layers)


def bytes_of(record) -> np.ndarray:
    """The first byte of every element, [N, padded C, H, W], by the rule that tactics.format states."""
    fmt, (n, c, h, w), whole = record.format, record.shape4, record.whole
    s = strides(whole.format, whole.shape4)
    i, c, pixel = np.ogrid[:n, : padded_channels(fmt.layout, c), : h * w]
    at = i * s.n + (c >> s.log2v) * s.block + (c & ((1 << s.log2v) - 1)) + pixel * s.pixel
    return (record.offset + at * DTYPES[fmt.dtype].itemsize).reshape(n, -1, h, w)


class Arena:
    """Bytes, each with the number of the element that was last written there."""

    def __init__(self, nbytes: int):
        self.held, self.fresh = np.full(nbytes, NEVER), itertools.count(1)

    def _each(self, record) -> np.ndarray:
        item = DTYPES[record.format.dtype].itemsize
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


def wrong_element(given: Given, ops, tensor_of, frees) -> str | None:
    """The first layer that reads what was not written for it, by running the plan over numbers in place of values.
    `tensor_of`: name in a plan -> the network's tensor; `frees`: of each layer, what nothing reads after it."""
    data = given.data
    arena, values = Arena(data.memory.activation_bytes + 4096), {}
    scratch = [data.memory.workspace] if data.memory.workspace else []
    for edge in data.inputs:
        values[edge.name] = arena.new(edge.shape4)
        arena.write(edge, values[edge.name])
    for i, layer in enumerate(data.layers):
        op = computed(layer, ops)
        tensors = op.inputs if op else [tensor_of[layer.inputs[0].name]]
        for record, tensor in zip(layer.inputs, tensors, strict=True):
            if not arena.holds(record, values[tensor]):
                return f"{layer.name} reads {record.name}"
        if op:
            read = [values[t] for t in op.inputs]
            values[op.output] = arena.new(op.problem.out_shape) if layer.tactic else moved(op.problem, read)
        if layer.tactic:
            for offset, nbytes in scratch:
                if i in given.using:
                    arena.held[offset : offset + nbytes] = NEVER
            arena.write(layer.outputs[0], values[op.output if op else tensors[0]])
        for offset, nbytes in frees[i]:
            arena.held[offset : offset + nbytes] = NEVER
    for edge in (*data.inputs, *data.outputs):
        if not arena.holds(edge, values[edge.name]):
            return f"{edge.name} at the end"
    return None


def computed(layer, ops) -> Op | None:
    """The operation that a layer is; None of a reformat and of another name for the same bytes."""
    return None if layer.problem is None or isinstance(layer.problem, ReformatProblem) else ops.get(layer.name)


def tensors_of(data, ops) -> dict[str, str]:
    """Which of the network's tensors each name stands for, in a right plan."""
    tensor = {edge.name: edge.name for edge in data.inputs}
    for layer in data.layers:
        op = computed(layer, ops)
        tensor[layer.outputs[0].name] = op.output if op else tensor[layer.inputs[0].name]
    return tensor


# ---- views in joins


def batches(n: int, m: int, kind: str, at: int, channels: int) -> onnx.ModelProto:
    """A Reshape or Transpose from batch n to m, joined with another tensor; its source has another reader."""
    channels = channels if kind == "Reshape" else m
    shape = (m, n * channels // m, 2, 2)
    view = node("Reshape", "r s", "v") if kind == "Reshape" else node("Transpose", "r", "v", perm=(1, 0, 2, 3))
    joined = ["v a", "a v", "a v a"][at]
    nodes = [
        node("Relu", "x", "r"),
        view,
        node("Relu", "y", "a"),
        node("Concat", joined, "c", axis=1),
        node("Neg", "c", "z"),
        node("Neg", "r", "again"),
    ]
    weights = {"s": np.array(shape)} if kind == "Reshape" else {}
    return model(nodes, {"x": (n, channels, 2, 2), "y": shape}, "z again", weights)


def exact(proto, path) -> None:
    """Only moves and signs: every output is onnxruntime's, bit for bit."""
    feeds = feeds_of(proto)
    got, want = emulated(proto, feeds, path), run(proto, feeds)
    for name, y in want.items():
        assert np.array_equal(got[name], y), f"{name}: {np.mean(got[name] != y):.2f} of it differs"


@pytest.mark.slow
@pytest.mark.parametrize("n, m", [(1, 2), (1, 8), (2, 8), (8, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["Reshape", "Transpose"])
def test_a_view_of_another_batch_in_a_concat(n, m, kind, tmp_path):
    for at in range(3):
        exact(batches(n, m, kind, at, 8), tmp_path / "m.onnx")


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("inner", ["a b", "p q"])
def test_a_concat_under_a_view_in_a_concat(first, inner, tmp_path):
    """The inner Concat's pieces have its strides, and the view those of the outer one."""
    nodes = [
        node("Relu", "x", "a"),
        node("Neg", "x", "b"),
        node("Split", "b", "p q", axis=1, num_outputs=2),
        node("Concat", inner, "i", axis=1),
        node("Reshape", "i s", "v"),
        node("Relu", "y", "r"),
        node("Concat", "r v", "c", axis=1),
        node("Neg", "c", "z"),
        node("Neg", "a", "u"),
        node("Abs", "p", "w"),
    ]
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
    nodes = [
        node("Relu", "x", "r"),
        *steps,
        node("Relu", "y", "a"),
        node("Concat", "a v", "c", axis=1),
        node("Neg", "c", "z"),
        node("Neg", "r", "u"),
    ]
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
            given, ops = assembled(network(seed, rules), monkeypatch)
            said, frees = proven(given)
            assert (said, wrong_element(given, ops, tensors_of(given.data, ops), frees)) == (None, None), seed
            assert proven(given, network=False) == (None, frees), "from a file it is the same proof"


def spoil(data, pick: random.Random):
    """The plan with one mistake: a tensor elsewhere or with other strides, an input swapped, two layers in the wrong order."""
    places = [(i, k) for i, layer in enumerate(data.layers) for k in range(len(layer.tensors))]
    here = pick.choice(places)
    record = data.layers[here[0]].tensors[here[1]]
    kind = pick.choice(("offset", "offset", "other", "inside", "channel", "own", "order", "format"))
    tensors = {at: data.layers[at[0]].tensors[at[1]] for at in places}
    same = [at for at, t in tensors.items() if t.name == record.name] if pick.random() < 0.7 else [here]
    inside = [at for at, t in tensors.items() if t.inside]
    if kind in ("offset", "other"):
        to = record.offset + pick.choice((-16, 2, 16, 256)) if kind == "offset" else tensors[pick.choice(places)].offset
        return moved_to(data, same, max(to, 0))
    if kind in ("inside", "channel", "own") and inside:
        at = pick.choice(inside)
        around = tensors[at].inside
        n, c, h, w = around.shape4
        around = {
            "inside": replace(around, shape4=(n, c + 8, h, w)),
            "channel": replace(around, channel=max(0, around.channel - 8)),
            "own": None,
        }[kind]
        return with_tensors(data, {at: replace(tensors[at], inside=around)})
    if kind == "order" and len(data.layers) > 1:
        i, layers = pick.randrange(len(data.layers) - 1), list(data.layers)
        layers[i : i + 2] = layers[i + 1], layers[i]
        return replace(data, layers=tuple(layers))
    if kind == "format":
        fmt = Format.parse(pick.choice(("fp16:chw", "fp16:hwc8", "fp16:hwc16", "fp16:chw32")))
        return with_tensors(data, {here: replace(record, format=fmt)})
    return data


def moved_to(data, places, to: int):
    """Tensors at `places`, (layer, number of the tensor), begin at byte `to`, with what they lie in."""
    changed = {}
    for i, k in places:
        t = data.layers[i].tensors[k]
        around = t.inside and replace(t.inside, offset=t.inside.offset + to - t.offset)
        changed[i, k] = replace(t, offset=to, inside=around)
    return with_tensors(data, changed)


def with_tensors(data, changed):
    """`changed`: (layer, number of the tensor) -> the tensor."""
    layers = []
    for i, layer in enumerate(data.layers):
        found = [changed.get((i, k), t) for k, t in enumerate(layer.tensors)]
        layers.append(replace(layer, inputs=tuple(found[: len(layer.inputs)]), outputs=tuple(found[len(layer.inputs) :])))
    return replace(data, layers=tuple(layers))


@pytest.mark.slow
def test_no_spoilt_plan_passes(monkeypatch):
    """What the proof by elements refuses, that by boxes refuses; it finds most of the mistakes."""
    wrong = refused = 0
    for seed in range(20):
        given, ops = assembled(network(seed, MOVES if seed % 3 else ALL), monkeypatch)
        tensor_of = tensors_of(given.data, ops)
        pick = random.Random(seed)
        for _ in range(12):
            spoilt = given._replace(data=spoil(given.data, pick))
            said, frees = proven(spoilt)
            try:
                found = wrong_element(spoilt, ops, tensor_of, frees)
            except (IndexError, KeyError):
                found = "beyond the arena, or before it was made"
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
            {
                b.start + sum(k * s for k, (_, s) in zip(ks, b.dims, strict=True)) + r
                for ks in itertools.product(*(range(n) for n, _ in b.dims))
                for r in range(b.run)
            }
            for b in boxes
        ]
        assert dataflow._overlap(*boxes)[0] == bool(covered[0] & covered[1]), boxes
        seen.add(bool(covered[0] & covered[1]))
    assert seen == {True, False}


def test_a_plan_of_too_many_pieces_is_refused_soon():
    """Launches that write pieces of one tensor, all still to be read: each is compared with all before it."""
    count, chw = 5000, Format("fp16", "chw")
    whole = Container((1, count, 1, 1), chw, 256, 0)
    x = TensorPlace("x", (1, 1, 1, 1), chw, 0)
    pieces = [TensorPlace(f"p{i}", x.shape4, chw, 256 + 2 * i, replace(whole, channel=i)) for i in range(count)]
    tactic = Tactic("move", None, (chw,), chw)
    layers = [Layer(f"l{i}", None, tactic, (x,), (piece,), 0.0) for i, piece in enumerate(pieces)]
    joined = TensorPlace("y", whole.shape4, chw, 256)
    layers.append(Layer("join", ConcatProblem((1,) * count, (1, 1, 1)), None, tuple(pieces), (joined,), 0.0))
    edges = Bound("x", (1,), x.shape4, chw, 0), Bound("y", (count,), whole.shape4, chw, 256)
    begin = time.process_time()
    plan = SimpleNamespace(inputs=edges[:1], outputs=edges[1:], layers=layers, memory=Memory(0x3000, 0))
    with pytest.raises(dataflow.Fault, match="shares memory with too many tensors"):
        dataflow.prove(plan, ())
    assert time.process_time() - begin < 10


def test_a_layer_that_neither_reads_nor_launches_is_refused():
    y = TensorPlace("y", (1, 1, 1, 1), Format("fp16", "chw"), 0)
    layer = Layer("join", None, None, (), (y,), 0.0)
    with pytest.raises(dataflow.Fault, match=r"layers\[0\] \('join'\): launches nothing and reads nothing"):
        dataflow.prove(SimpleNamespace(inputs=(), outputs=(), layers=[layer], memory=Memory(256, 0)), ())


def test_a_wrong_plan_is_no_engine(tmp_path, monkeypatch):
    """The mistake that the proof was written after: a view from one image to several takes the place of a piece."""
    path = tmp_path / "m.onnx"
    onnx.save(batches(1, 4, "Reshape", 1, 8), path)
    through = places._inside_through_views

    def careless(network, found, runs, most, usable):
        runs |= {places.Place(t, key) for t, keys in found.items() for key in keys if key.format == ("fp16", True, 1)}
        through(network, found, runs, most, usable)

    monkeypatch.setattr(places, "_inside_through_views", careless)
    with pytest.raises(InternalError, match="launches nothing, but its output does not lie where its inputs do"):
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
    spent, prove = [], dataflow.prove

    def timed(*given):
        begin = time.process_time()
        found = prove(*given)
        spent.append(time.process_time() - begin)
        return found

    monkeypatch.setattr(dataflow, "prove", timed)
    begin = time.process_time()
    gr.build(path, device=DEFAULT_DEVICE)
    total = time.process_time() - begin
    print(f"{name}: {1e3 * sum(spent):.1f} ms of {total:.2f} s, {100 * sum(spent) / total:.2f} %")
    assert sum(spent) <= 0.05 * total
