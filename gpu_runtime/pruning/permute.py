"""Reorders channels so that 2:4 keeps the most: searches each space of channels for the order with the least loss of its
readers.

A reader's loss is the sum, over its groups of 4 input channels, of the two smallest squares, as a share of all of its squares.
One step removes some channels, no two of them from one group of any reader, and reinserts them where they cost the least: if a1
<= a2 are the two smallest of the three remaining squares of a group, a channel x there loses a1 + min(a2, x). So the costs of
single places add up, and scipy's linear assignment finds the best reinsertion, which is never worse than the old order. For
weights with many rows the search uses an even sample of the rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper
from scipy.optimize import linear_sum_assignment

from gpu_runtime.frontend.files.check import inferred
from gpu_runtime.frontend.files.load import SMALL_BYTES, put_nodes, stored_tensors, to_array
from gpu_runtime.frontend.files.weights import Weight, put, seen, views_of_constants, weights
from gpu_runtime.progress import Listener, Progress, ignore
from gpu_runtime.pruning.channel_rules import channel_spaces
from gpu_runtime.pruning.channel_spaces import ConstantAxis, Space, Spaces
from gpu_runtime.pruning.channel_walk import integers

PASSES = 12  # the most passes over the channels of one space; a pass that gains less than WORTH of the loss is the last
WORTH = 1e-3
PLACES = 64  # channels removed at once; a step's time grows with their square
ROWS = 1024  # of a reader's weights that a search uses, evenly sampled
OTHERS = np.array([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]])  # the other channels of a group, for channel 0, 1, 2 or 3
CHUNK = 1 << 18  # elements of a table of minima: 1 MB, which fits caches
EXAMPLE = 224  # for a dynamic height or width, during shape inference


@dataclass(slots=True)
class _Reader:
    """The squares [rows, channels] of the weights on a constant's axis in their present order, normalized to the sum 1.

    `positions`: the places of the space's channels on that axis.
    """

    squares: np.ndarray
    positions: np.ndarray


def permute(
    proto: onnx.ModelProto,
    pruned: Sequence[Weight],
    shapes: Mapping[str, tuple[int, ...]],
    fixed: Collection[str] = (),
    progress: Listener = ignore,
) -> Spaces:
    """Reorders channels of the model in place so that pruning these weights loses less, and returns the spaces found.

    A space is a set of channels that may change places. `pruned`: the weights to prune; `shapes`: of inputs; `fixed`:
    weights whose input channels keep their order.
    """
    spaces = channel_spaces(proto.graph, tensor_shapes(proto, shapes))
    rng = np.random.default_rng(0)
    squares = _squares(proto.graph, {w.name: w for w in pruned}, rng)
    axes = {(w.name, w.axis) for w in weights(proto.graph) if w.name in fixed}
    sources = views_of_constants(proto.graph, dict(stored_tensors(proto.graph)))
    orders = []
    for i, space in enumerate(spaces.spaces):
        progress(Progress("order", f"{space.size} of {space.ports[0].constant.name}", i, len(spaces.spaces)))
        stays = any((sources[p.constant.name][0], p.constant.axis) in axes for p in space.ports)
        orders.append(np.arange(space.size) if stays else _search(space, squares, rng))
    apply(proto.graph, spaces, orders)
    return spaces


def tensor_shapes(proto: onnx.ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns tensor -> its inferred shape. `inputs`: the shapes of inputs; other dynamic sizes get example values."""
    small = onnx.ModelProto(ir_version=max(proto.ir_version, 4), opset_import=proto.opset_import)  # 3: initializers are inputs
    small.graph.name = proto.graph.name
    small.graph.node.extend(proto.graph.node)
    small.graph.output.extend(proto.graph.output)
    for v in proto.graph.input:
        copied = small.graph.input.add()
        copied.CopyFrom(v)
        for i, d in enumerate(copied.type.tensor_type.shape.dim):
            if i < len(inputs.get(v.name, ())):
                d.dim_value = inputs[v.name][i]
            elif not d.HasField("dim_value"):
                d.dim_value = EXAMPLE if i else 2  # two images, to reveal operators that join them with channels
    for t in proto.graph.initializer:
        if len(t.raw_data) > SMALL_BYTES:
            small.graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims))
        else:
            small.graph.initializer.append(t)
    stored = dict(stored_tensors(small.graph))
    folded = {name: a for name, a in integers(small.graph).items() if name not in stored}
    put_nodes(small.graph, (node for node in small.graph.node if folded.keys().isdisjoint(node.output)))
    small.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in folded.items())
    graph = inferred(small, data_prop=True).graph
    found = {}
    for v in (*graph.input, *graph.value_info, *graph.output):
        t = v.type.tensor_type
        if t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim):
            found[v.name] = tuple(d.dim_value for d in t.shape.dim)
    return found


def apply(graph: onnx.GraphProto, spaces: Spaces, orders: Sequence[np.ndarray]) -> None:
    """Reorders every constant that has channels of the spaces, in place: `orders`: for each space, place i gets the channel of
    place order[i].
    """
    stored = dict(stored_tensors(graph))
    sources = views_of_constants(graph, stored)
    moves: dict[str, list[tuple[ConstantAxis, np.ndarray, np.ndarray]]] = {}
    for space, order in zip(spaces.spaces, orders, strict=True):
        for port in space.ports if (order != np.arange(space.size)).any() else ():
            moves.setdefault(port.constant.name, []).append((port.constant, port.positions, port.positions[order]))
    for name, changes in moves.items():
        base, views = sources[name]
        values = seen(to_array(base, stored[base]), views).copy()
        for axis in sorted({key.axis for key, *_ in changes}, reverse=True):  # columns before the rows that split them
            source = np.moveaxis(values.copy(), axis, 0)
            target = np.moveaxis(values, axis, 0)
            for key, to, of in (c for c in changes if c[0].axis == axis):
                if key.parts == 1:
                    target[to] = source[of]
                else:
                    each = values.shape[0] // key.parts
                    rows = slice(key.part * each, (key.part + 1) * each)
                    target[to, rows] = source[of, rows]
        put(base, stored[base], views, values)


def _squares(
    graph: onnx.GraphProto, pruned: Mapping[str, Weight], rng: np.random.Generator
) -> dict[tuple[str, int, int], np.ndarray]:
    """Returns (constant as it is read, axis, part) -> squares [rows, channels] of the weights to prune along that axis."""
    found = {}
    sources = views_of_constants(graph, dict(stored_tensors(graph)))
    for name, (base, views) in sources.items():
        w = pruned.get(base)
        if w is None or views != w.views or (values := w.values) is None or not values.size:
            continue
        largest = float(np.abs(values).max()) or 1.0  # squares of weights beyond 1e19 exceed FP32
        squares = np.square((values / np.asarray(largest, values.dtype)).astype(np.float32))
        squares /= max(float(squares.sum(dtype=np.float64)), 1e-30)
        parts = 1 if w.node.op_type != "Conv" else next((a.i for a in w.node.attribute if a.name == "group"), 1)
        if parts < 1 or values.shape[0] % parts:
            continue  # onnx's own check reports it
        each = values.shape[0] // parts
        for part in range(parts):
            rows = squares if parts == 1 else squares[part * each : (part + 1) * each]
            moved = np.moveaxis(rows, w.axis, -1)
            flat = moved.reshape(-1, moved.shape[-1])
            drawn = flat if len(flat) <= ROWS else flat[np.sort(rng.choice(len(flat), ROWS, replace=False))]
            found[name, w.axis, part] = np.ascontiguousarray(drawn) * np.float32(len(flat) / len(drawn))
    return found


def _search(space: Space, squares: Mapping[tuple[str, int, int], np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Returns the best order found for a space; afterwards the readers' squares are in this order."""
    readers = []
    for port in space.ports:
        of = squares.get((port.constant.name, port.constant.axis, port.constant.part))
        if of is not None:
            readers.append(_Reader(of, port.positions))
    order = np.arange(space.size)
    for _ in range(PASSES if readers else 0):
        lost, saved, left = 0.0, 0.0, rng.permutation(space.size)
        while len(places := _places_in_other_groups(readers, left)[:PLACES]) > 1:
            found = _step(readers, order, places)
            lost, saved, left = lost + found[0], saved + found[1], np.setdiff1d(left, places, assume_unique=True)
            left = rng.permutation(left)
        if saved <= WORTH * lost:
            break
    return order


def _places_in_other_groups(readers: Sequence[_Reader], tried: np.ndarray) -> np.ndarray:
    """Returns as many places as possible, tried in the order `tried`, no two of them in one group of 4 of any reader."""
    taken: list[set[int]] = [set() for _ in readers]
    shared = {id(r.squares): taken[i] for i, r in reversed(list(enumerate(readers)))}
    found = []
    groups = [(shared[id(r.squares)], (r.positions // 4).tolist()) for r in readers]
    for place in tried.tolist():
        mine = [(used, of[place]) for used, of in groups]
        if all(g not in used for used, g in mine) and len({(id(used), g) for used, g in mine}) == len(mine):
            found.append(place)
            for used, g in mine:
                used.add(g)
    return np.array(found, np.int64)


def _step(readers: Sequence[_Reader], order: np.ndarray, places: np.ndarray) -> tuple[float, float]:
    """Reassigns the channels at these places in place. Returns (the readers' loss in these groups before, the loss saved)."""
    cost, least = np.zeros((len(places), len(places))), 0.0  # [channel, place]
    for r in readers:
        at = r.positions[places]
        a, b, c = (r.squares[:, others] for others in (at // 4 * 4 + OTHERS[at % 4].T))
        low, high = np.minimum(a, b), np.maximum(a, b)
        cost += _minima(r.squares[:, at], np.maximum(low, np.minimum(high, c)))
        least += float(np.minimum(low, c).sum(dtype=np.float64))
    now = float(np.trace(cost))
    what, where = linear_sum_assignment(cost)
    new = float(cost[what, where].sum())
    if not new < now:
        return now + least, 0.0
    source = np.empty(len(places), np.int64)
    source[where] = what
    order[places] = order[places[source]]
    for r in readers:
        at = r.positions[places]
        r.squares[:, at] = r.squares[:, at[source]]
    return now + least, now - new


def _minima(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Returns an [n, n] table: the sum over rows of min(x[:, channel], a[:, place]) for each channel and place."""
    n = x.shape[1]
    total, rows = np.zeros((n, n)), max(1, CHUNK // (n * n))
    for i in range(0, len(x), rows):
        total += np.minimum(x[i : i + rows, :, None], a[i : i + rows, None, :]).sum(axis=0, dtype=np.float64)
    return total


def unmoved(spaces: Spaces, weights: Sequence[Weight]) -> dict[str, str]:
    """Returns stored weight -> the reason why none of its input channels can move, for the weights of which this is so."""
    moving = {(p.constant.name, p.constant.axis) for space in spaces.spaces for p in space.ports}
    why = {(key.name, key.axis): text for key, text in spaces.pins.items()}
    return {w.name: why[w.name, w.axis] for w in weights if (w.name, w.axis) in why.keys() - moving}
