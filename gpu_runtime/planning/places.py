"""Places tensors inside others: the pieces of a Concat in its output, the parts of a Split in its input.

A place in an op is one more format of a tensor: a Key with a home. A tensor is produced in one key; another key, another place,
costs a copy. So the planner needs no special rule: running an op in place is an entry of no time that wants its tensors in its
places. A tensor in several Concats, or bound by the caller, is copied into all places but (at most) one.

An example: cat joins a of 16 channels and b of 64, one image each. In channels-last order an output pixel's 80 channels lie
together, of which a's are the first 16; where planes of one channel follow each other, a is the first 16 of them:

>>> cat = Op("cat", ConcatProblem((16, 64), (1, 4, 4)), ("a", "b"), "y")
>>> for ins, out in entries(cat):
...     print(*ins, "->", out)
fp16:last16@cat.0 fp16:last64@cat.1 -> fp16:last80
fp16:planes1@cat.0 fp16:planes1@cat.1 -> fp16:planes1

The memory of a place follows from the plan alone (`homes`): pieces lie in their op's output, which may be a piece of another op
again. A view's input lies there too if its output is such a piece, in one run of memory: so the heads of a detector, transposed
and reshaped to rows, write their rows of the table that joins them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, product

from gpu_runtime.network import Network, Op
from tactics.format import (
    DTYPES,
    LAYOUTS,
    CanonicalFormat,
    Format,
    Key,
    Shape4,
    canonical,
    num_elements,
    padded_channels,
    part_format,
    representative,
    strides,
)
from tactics.planner import plan
from tactics.planner.graph import Cell
from tactics.problems.batches import BatchPiecesProblem
from tactics.problems.gather import GatherProblem, ViewProblem
from tactics.problems.problem import ConcatProblem, MoveProblem
from tactics.problems.protocol import Problem

PIECES = tuple(Format("fp16", layout) for layout in LAYOUTS)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in one format and, where the key has a home, in one op's memory. Two names of one layout share a place."""

    tensor: str
    key: Key


def types(network: Network, op: Op) -> tuple[str, ...]:
    """Returns the types in which the op may move nothing: FP16, and first the 8-bit one that all of its tensors may have."""
    whole = {network.type(t).whole for t in (*op.inputs, op.output)}
    return (*filter(None, whole), "fp16") if len(whole) == 1 else ("fp16",)


def _formats(shape: Shape4, dtypes: Iterable[str]) -> Iterator[Format]:
    return chain.from_iterable(representative(shape, dtype) for dtype in dtypes)


def entries(op: Op, dtypes: tuple[str, ...] = ("fp16",)) -> Iterator[Cell]:
    """Yields (keys of the inputs, key of the output) for each format in which `op` needs no kernel; nothing for most ops."""
    problem = op.problem
    if isinstance(problem, ConcatProblem) and problem.axis == 1:
        firsts = (0, *accumulate(problem.sizes))
        for fmt in _formats(problem.out_shape, dtypes):
            parts = [part_format(fmt, problem.out_shape, first, c) for first, c in zip(firsts, problem.sizes, strict=False)]
            keys = tuple(Key(part, f"{op.name}.{i}") for i, part in enumerate(parts) if part is not None)
            if len(keys) == len(parts) and num_elements(fmt, problem.out_shape) < 2**31:  # kernels address with 32 bits
                yield keys, Key(canonical(fmt, problem.out_shape))
    elif isinstance(problem, MoveProblem) and problem.is_part:
        for fmt in _formats(problem.in_shapes[0], dtypes):
            part = part_format(fmt, problem.in_shapes[0], problem.start[0], problem.out[0])
            if part is not None:
                yield (Key(canonical(fmt, problem.in_shapes[0])),), Key(part, op.name)


def views(op: Op, dtypes: tuple[str, ...] = ("fp16",)) -> Iterator[tuple[CanonicalFormat, CanonicalFormat]]:
    """Yields (input's format, output's format) of each pair in which a view or a transposition moves nothing.

    Both tensors are dense then, and every element is in its place already.
    """
    p = op.problem
    if isinstance(p, ViewProblem):
        linear = Format("fp16", "chw")
        same = _formats(p.shape, dtypes) if p.shape[:2] == p.out[:2] else (linear,)  # pixels keep their order in any layout
        both = (*same, linear, Format("fp32", "chw"))
        yield from {(canonical(f, p.shape), canonical(f, p.out)): None for f in both}
    elif isinstance(p, GatherProblem) and p.is_transpose:
        last = (Format("fp16", "hwc"),)
        pairs = [*product((*representative(p.shape), *last), (*representative(p.out_shape), *last))]
        ends = [(Format(dtype, "chw"), Format(dtype, "hwc")) for dtype in ("fp32", "uint8")]  # of the network
        pairs += [*ends, *((last, linear) for linear, last in ends)]
        for x, y in pairs:
            steps, turned = _steps(x, p.shape), _steps(y, p.out_shape)
            if steps and turned and all(steps[a] == t or p.shape[a] == 1 for a, t in zip(p.perm, turned, strict=True)):
                yield canonical(x, p.shape), canonical(y, p.out_shape)


def images(op: Op, dtypes: tuple[str, ...] = ("fp16",)) -> Iterator[tuple[CanonicalFormat, CanonicalFormat]]:
    """Yields (input's format, output's format) for an op that splits a tensor into pieces of its images, or joins such pieces.

    In these formats images begin at multiples of 16 bytes, so that a piece is a tensor by itself.
    """
    p = op.problem
    if isinstance(p, BatchPiecesProblem):
        edges = (Format(dtype, layout) for dtype in ("fp32", "uint8") for layout in ("chw", "hwc"))
        for f in (*_formats(p.shape, dtypes), Format("fp16", "chw"), *edges):
            if strides(f, p.shape).n * DTYPES[f.dtype].itemsize % 16 == 0:
                yield canonical(f, p.in_shapes[0]), canonical(f, p.out_shape)


def formats_beside(network: Network, io: Mapping[str, tuple[Format, ...]]) -> dict[str, tuple[Format, ...]]:
    """Returns tensor -> additional formats in which a view, a transposition to or from channels last, or an op that splits or
    joins images moves nothing.

    For example an output of NHWC FP32: the tensor ahead of the transposition may be stored as "fp32:hwc", without padding
    between pixels, whose bytes are the output's. `io`: the formats of the network's inputs and outputs; their types are taken.
    """
    found: dict[str, tuple[Format, ...]] = {}
    for op in network.ops:
        p, (x, *_), y = op.problem, op.inputs or ("",), op.output
        known = ("fp32",) if y in io else ("fp32", "uint8")  # types that kernels write, and read
        asked = {t: {f.dtype: None for f in io.get(t, ()) if f.layout == "chw" and f.dtype in known} for t in (x, y)}
        if isinstance(p, BatchPiecesProblem):
            found |= {t: io[other] for t, other in ((x, y), (y, x)) if other in io}
        elif isinstance(p, ViewProblem):
            found[x] = tuple(Format(dtype, "chw") for dtype in asked[y])
        elif isinstance(p, GatherProblem) and p.is_transpose and p.perm in ((0, 2, 3, 1), (0, 3, 1, 2)):
            turned, outside = (x, asked[y]) if p.perm == (0, 2, 3, 1) else (y, asked[x])
            found[turned] = tuple(Format(dtype, "hwc") for dtype in {"fp16": None} | outside)
    return {t: fmts for t, fmts in found.items() if not network.type(t).fixed}


def _steps(fmt: Format, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int] | None:
    """Returns the distance in elements between neighbouring indices along each axis; None if a distance varies or channels are
    padded.
    """
    lay, s = LAYOUTS[fmt.layout], strides(fmt, shape)
    if padded_channels(fmt.layout, shape[1]) != shape[1] or (lay.blocked and 1 < lay.vector < shape[1]):
        return None
    return s.n, (1 if lay.vector > 1 else s.block), shape[3] * s.pixel, s.pixel


def keys_inside(network: Network, most: int, usable: Mapping[str, Collection[CanonicalFormat]]) -> dict[str, tuple[Key, ...]]:
    """Returns tensor -> its keys that have a home in an op, at most `most` of them (each doubles the planner's tables).

    `usable`: the formats that each tensor may have, between which reformats are timed.
    """
    found: dict[str, dict[Key, None]] = {t: {} for t in network.tensors}
    runs: set[Place] = set()  # places whose memory is contiguous
    formats = {t: {canonical(f, shape) for f in network.formats(t)} for t, shape in network.tensors.items()}
    for op in network.ops:
        tensors, shape = (*op.inputs, op.output), op.problem.out_shape
        linear = Key(canonical(Format("fp16", "chw"), shape))
        for ins, out in entries(op, types(network, op)):
            ends = [*zip(tensors, (*ins, out), strict=True)]
            if any(not key.home and key.format not in formats[t] for t, key in ends):
                continue
            for t, key in ends:
                if key.home and len(found[t]) < most:
                    found[t][key] = None
                    if shape[0] == 1 and out == linear:  # with several images, a piece is contiguous only within each image
                        runs.add(Place(t, key))
    _inside_through_views(network, found, runs, most, usable)
    return {t: tuple(keys) for t, keys in found.items()}


def _inside_through_views(
    network: Network,
    found: dict[str, dict[Key, None]],
    runs: set[Place],
    most: int,
    usable: Mapping[str, Collection[CanonicalFormat]],
) -> None:
    """Adds to `found` the keys of inputs of views whose outputs are pieces of a Concat; `runs`: all places whose memory is
    contiguous.

    Kernels access formats with vectors by 16 bytes, so tensors that may begin elsewhere are linear.
    """
    askew = _askew(network)
    for op in reversed(network.ops):
        for (x, y), key in product(views(op), tuple(found[op.output])):
            source = op.inputs[0]
            vectors = any(LAYOUTS[f.layout].vector > 1 and canonical(f, network.tensors[source]) == x for f in PIECES)
            fits = y == key.format and Place(op.output, key) in runs and not (vectors and op.output in askew)
            if fits and x in usable[source] and len(found[source]) < most:
                found[source][Key(x, key.home)] = None
                runs.add(Place(source, Key(x, key.home)))


def _askew(network: Network) -> set[str]:
    """Returns the tensors that may begin between two multiples of 16 bytes where they lie inside a linear FP16 tensor."""
    found: set[str] = set()
    for op in reversed(network.ops):
        if isinstance(op.problem, ConcatProblem) and op.problem.axis == 1:
            _, _, h, w = op.problem.out_shape
            firsts = zip(op.inputs, (0, *accumulate(op.problem.sizes)), strict=False)
            found |= {t for t, first in firsts if first * h * w % 8 or op.output in found}
        elif op.output in found and any(views(op)):
            found.add(op.inputs[0])
    return found


def through_views(op: Op, inside: Mapping[str, tuple[Key, ...]]) -> Iterator[tuple[Key, Key]]:
    """Yields (key of the input, key of the output) for each way in which a view's output, and with it the view's input, lies in
    another op's memory.

    `inside`: tensor -> its keys that have a home.
    """
    for (x, y), key in product(views(op), inside[op.output]):
        if y == key.format and Key(x, key.home) in inside[op.inputs[0]]:
            yield Key(x, key.home), key


def homes(network: Network, chosen: plan.Plan) -> Mapping[Place, tuple[Place, int]]:
    """Returns place -> (the place whose strides it has, its first channel there), for all pieces of Concats and parts of
    Splits.

    The place whose strides it has lies in no other one, or a view makes it a piece: then it has strides of its own (see
    `aliases`).
    """
    inside: dict[Place, tuple[Place, int]] = {}
    for p, ins, out in _without_launch(network, chosen):
        if isinstance(p, ConcatProblem) and p.axis == 1:
            inside.update((x, (out, c)) for x, c in zip(ins, (0, *accumulate(p.sizes)), strict=False))
        elif isinstance(p, MoveProblem):
            inside[out] = ins[0], p.start[0]

    def root(place: Place) -> tuple[Place, int]:
        channel = 0
        while place in inside:
            place, first = inside[place]
            channel += first
        return place, channel

    return {place: root(place) for place in inside}


def _without_launch(network: Network, chosen: plan.Plan) -> Iterator[tuple[Problem, list[Place], Place]]:
    """Yields (problem, places of the inputs, place of the output) of the plan's ops that launch nothing."""
    for op in network.ops:
        entry = chosen.entry_of(op.name, op.when)
        if entry is not None and entry.tactic is None:
            yield op.problem, [Place(t, k) for t, k in zip(op.inputs, entry.ins, strict=True)], Place(op.output, entry.out)


def aliases(network: Network, chosen: plan.Plan) -> Mapping[Place, tuple[Place, int]]:
    """Returns place -> (the place that contains it, the image at which it begins), for views and transpositions that move
    nothing, and for pieces of a batch. Each of these places has strides of its own.

    A view's output lies in its input's memory; but if the output is a piece of a Concat, the input lies in the output's. A
    piece of a batch lies in the place of all images.
    """
    found: dict[Place, tuple[Place, int]] = {}
    for p, ins, out in _without_launch(network, chosen):
        if isinstance(p, ConcatProblem) and p.axis == 0:
            found |= {x: (out, first) for x, first in zip(ins, (0, *accumulate(p.sizes)), strict=False)}
        elif isinstance(p, GatherProblem) and p.index[0]:
            found[out] = ins[0], p.index[0][0]
        elif isinstance(p, (ViewProblem, GatherProblem)):
            found |= {ins[0]: (out, 0)} if out.key.home else {out: (ins[0], 0)}
    return found
