"""Parallel linear branches of one tensor whose results are only added -> one convolution, offered beside them.

Networks that are trained with branches (RepVGG, MobileOne, FastViT) add a 3x3, a 1x1 and the input itself, each behind a
BatchNormalization. All of that is linear, so it is one convolution: kernels are aligned by their padding, put into the largest
window and added, in double precision. Merged or apart is a group of options, since merged weights seldom have the 2:4
pattern where a branch's may.

Example. y = relu(conv3x3(x) + conv1x1(x) + (x * s + t)), the 3x3 padded by 1: w = w3, w[:, :, 1, 1] += w1 + diag(s),
b = b3 + b1 + t, and y = relu(conv(x, w, b)), padded by 1.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from gpu_runtime.frontend.queries import attribute, name_of, shape_of
from gpu_runtime.fusion.chains import then
from gpu_runtime.fusion.layers import Layer, Links, of_channels
from gpu_runtime.network import APART, Group
from tactics.problems.pointwise_ops import ACTIVATIONS, NONE, Activation, Stage

MERGED = "merged"
MOST_MERGED = 32  # convolutions: the one's name has all of theirs
MOST_ON_THE_WAY = 4 * MOST_MERGED  # tensors of a sum: of each branch what a convolution, a scale and an addition give
MOST_GROWTH = 4  # of the number of weights, which a depthwise branch beside a dense one of few taps would multiply


@dataclass(frozen=True, slots=True)
class _Linear:
    """What a tensor is of `x`: a convolution with `w` [K, C/groups, R, S] and `b` [K], padded by `before` at the top and
    left. `terms`: how many were added; `convs`: the names of their convolutions, of so many
    `weights` in all; `via`: tensors on the way."""

    x: ir.Value
    w: np.ndarray
    b: np.ndarray
    groups: int
    stride: tuple[int, int]
    before: tuple[int, int]
    terms: int = 1
    convs: tuple[str, ...] = ()
    weights: int = 0
    via: tuple[ir.Value, ...] = ()


@dataclass(frozen=True, slots=True)
class _Joined:
    """A chain layer whose first `count` stages add linear branches up to `form`."""

    layer: Layer
    form: _Linear
    count: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A convolution of a sum: node `conv`, of `groups`; its weights as its kernel has them, [K, C/g, r, s] with the sum's g
    groups; their place in the window of the one convolution, (top, left)."""

    conv: str
    w: np.ndarray
    groups: int
    at: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sum:
    """Branches that may be one convolution with weights `w` [K, C/groups, R, S], FP64. `node`: the last of the chain that adds
    them; `itself`: (r, s) of the tap at which the sum has the input itself, None where it does not add it."""

    node: str
    branches: tuple[Branch, ...]
    w: np.ndarray
    groups: int
    itself: tuple[int, int] | None


def offer(layers: Sequence[Layer]) -> tuple[list[Layer], list[Group]]:
    """The layers, with each sum of branches also as one convolution, and the groups of that choice."""
    links, groups = Links(layers), list[Group]()
    under: dict[ir.Value, list[tuple[str, str]]] = {}  # what gives the tensor is under these options
    behind: dict[ir.Value, list[Layer]] = {}  # what follows the last layer that gives the tensor
    for joined in _sums(layers):
        found = _may_be_one(joined, links)
        if found is None:
            continue
        pads, inside = found
        end = _end(joined, links, inside)
        group = f"branches of {name_of(joined.layer.node)}"
        for t in dict.fromkeys((*inside, end.output)):
            under.setdefault(t, []).append((group, APART))
        covered = sorted((layer for t in inside for layer in links.makers[t]), key=links.place)
        behind.setdefault(end.output, []).extend(_convolution(joined, end, covered, pads, (group, MERGED)))
        groups.append((group, (APART, MERGED)))
    result = list[Layer]()
    for layer in layers:
        when = under.get(layer.output, ())
        result.append(replace(layer, when=(*layer.when, *when)) if when else layer)
        if layer.output in behind and layer is links.makers[layer.output][-1]:
            result += behind[layer.output]
    return result, groups


def sums(layers: Sequence[Layer]) -> list[Sum]:
    """The sums of branches that `offer` offers as one convolution each."""
    own = {name_of(layer.node): form for layer in layers if (form := _of_conv(layer)) is not None}
    links, found = Links(layers), list[Sum]()
    for joined in _sums(layers):
        form = joined.form
        if _may_be_one(joined, links) is None:
            continue
        (top, left), parts = form.before, list[Branch]()
        for name in dict.fromkeys(form.convs):
            b = own[name]
            parts.append(Branch(name, _regrouped(b, form.groups), b.groups, (top - b.before[0], left - b.before[1])))
        itself = form.before if form.terms > len(form.convs) else None
        found.append(Sum(name_of(joined.layer.node), tuple(parts), form.w, form.groups, itself))
    return found


# ---- what is linear in what


def _sums(layers: Sequence[Layer]) -> list[_Joined]:
    """Chains that end a sum of branches: what they give is no branch of a larger one."""
    forms: dict[ir.Value, _Linear] = {}
    found, inner = dict[ir.Value, _Joined](), set[ir.Value]()
    for layer in layers:
        if (form := _of_conv(layer)) is not None:
            forms.setdefault(layer.output, form)
        elif (joined := _of_chain(layer, forms)) is not None:
            form = joined.form
            if _is_short(form) and joined.count == len(layer.stages):
                forms[layer.output] = replace(form, via=(*form.via, layer.output))
            if form.terms > 1 and form.convs:
                inner.update(form.via)
                if _is_short(form):
                    found[layer.output] = joined
    return [joined for t, joined in found.items() if t not in inner]


def _is_short(form: _Linear) -> bool:
    """Whether it may become one convolution. Of what is too many nothing is a form: so each sum costs little."""
    return len(set(form.convs)) <= MOST_MERGED and len(form.via) <= MOST_ON_THE_WAY


def _of_conv(layer: Layer) -> _Linear | None:
    """A convolution of an image alone, whose window the attributes of its node say."""
    plain = layer.op == "Conv" and "w" in layer.weights and layer.act == NONE and not (layer.residual or layer.prologue)
    if not plain or layer.pool is not None or layer.d2s != 1 or layer.weights["w"].ndim != 4:
        return None
    node, w = layer.node, layer.weights["w"]  # FP64 from the first scale or addition on: most are not copied
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or set(attribute(node, "dilations", (1, 1))) != {1}:
        return None
    top, left, *_ = attribute(node, "pads", (0, 0, 0, 0))
    rows, columns = attribute(node, "strides", (1, 1))
    b = layer.weights.get("b", np.zeros(len(w))).astype(np.float64)
    name, y = name_of(node), layer.output
    form = _Linear(layer.inputs[0], w, b, attribute(node, "group", 1), (rows, columns), (top, left))
    return replace(form, convs=(name,), weights=w.size, via=(y,))


def _itself(x: ir.Value) -> _Linear | None:
    """A tensor of images as a convolution of itself."""
    if len(shape_of(x)) != 4:
        return None
    c = shape_of(x)[1]
    return _Linear(x, np.ones((c, 1, 1, 1)), np.zeros(c), c, (1, 1), (0, 0))


def _of_chain(layer: Layer, forms: Mapping[ir.Value, _Linear]) -> _Joined | None:
    """How far a chain is linear in one tensor: each of its stages scales by, adds, or subtracts what is constant or linear."""
    if layer.op != "Chain" or len(shape_of(layer.output)) != 4 or shape_of(layer.inputs[0]) != shape_of(layer.output):
        return None
    tensors = {f"t{i}": t for i, t in enumerate(layer.inputs)}
    ways = _ways(layer.inputs[0], forms)  # the first in which all branches have one source
    count = 0
    for stage in layer.stages:
        further = [more for way in ways for more in _after(stage, way, tensors, layer, forms)]
        if not further:
            break
        ways, count = further, count + 1
    best = max(ways, key=lambda way: way.terms, default=None)
    return _Joined(layer, best, count) if best is not None and count else None


def _ways(t: ir.Value, forms: Mapping[ir.Value, _Linear]) -> list[_Linear]:
    return [form for form in (forms.get(t), _itself(t)) if form is not None]


def _after(
    stage: Stage, form: _Linear, tensors: Mapping[str, ir.Value], layer: Layer, forms: Mapping[ir.Value, _Linear]
) -> Iterator[_Linear]:
    """What a stage makes of a linear form, in each way that it can be seen."""
    if stage.op in ("add", "sub", "rsub") and stage.operand in tensors:
        if shape_of(tensors[stage.operand]) != shape_of(layer.output):
            return
        for other in _ways(tensors[stage.operand], forms):
            signs = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}[stage.op]
            summed = _added(_scaled(form, signs[0]), _scaled(other, signs[1]))
            if summed is not None:
                yield summed
    elif stage.operand not in tensors and (c := of_channels(layer, stage, shape_of(layer.output))) is not None:
        affine = then((np.ones(1), np.zeros(1)), stage.op, c)
        if affine is not None and np.isfinite(c).all():
            yield _scaled(form, *affine)


def _scaled(form: _Linear, scale: float | np.ndarray, shift: float | np.ndarray = 0.0) -> _Linear:
    s = np.broadcast_to(np.asarray(scale, np.float64), form.b.shape)
    return replace(form, w=form.w * s[:, None, None, None], b=form.b * s + shift)


def _added(a: _Linear, b: _Linear) -> _Linear | None:
    """Both as one, of results that have the same shape; None where they read different tensors or step differently."""
    if a.x is not b.x or len(a.w) != len(b.w) or a.stride != b.stride:
        return None
    coarse, fine = sorted((a, b), key=lambda f: f.groups)
    if fine.groups % coarse.groups or any(len(f.w) % f.groups for f in (a, b)):
        return None
    top, left = (max(p) for p in zip(a.before, b.before, strict=True))
    rows, columns = (max(p - f.before[i] + f.w.shape[2 + i] for f in (a, b)) for i, p in enumerate((top, left)))
    w = np.zeros((len(a.w), coarse.w.shape[1], rows, columns))
    for f in (a, b):
        r, s = top - f.before[0], left - f.before[1]
        w[:, :, r : r + f.w.shape[2], s : s + f.w.shape[3]] += _regrouped(f, coarse.groups)
    convs, weights, via = (*a.convs, *b.convs), a.weights + b.weights, (*a.via, *b.via)
    return _Linear(a.x, w, a.b + b.b, coarse.groups, a.stride, (top, left), a.terms + b.terms, convs, weights, via)


def _regrouped(form: _Linear, groups: int) -> np.ndarray:
    """The weights over the channels of coarser groups, zeros where a channel belongs to another of the form's own."""
    if form.groups == groups:
        return form.w
    k, share, r, s = form.w.shape
    inner = form.groups // groups  # own groups in each coarse one
    w = np.zeros((k, share * inner, r, s))
    own = np.arange(k) // (k // form.groups) % inner
    for i in range(share):
        w[np.arange(k), own * share + i] = form.w[:, i]
    return w


# ---- the one convolution


def _may_be_one(joined: _Joined, links: Links) -> tuple[tuple[int, ...], set[ir.Value]] | None:
    """(pads of the one convolution, the tensors that do not exist with it), where there is to be one: not where it takes far
    more weights than the branches."""
    last, form = joined.layer, joined.form
    pads = _pads(form, shape_of(last.output)[2:])
    most = MOST_GROWTH * form.weights
    if pads is None or form.w.size > most:
        return None
    inside = _inside(form, last, links)
    # Fewer: a convolution's own input, which its epilogue takes in as a residual.
    return (pads, inside) if len(inside) + joined.count >= 3 else None


def _pads(form: _Linear, image: tuple[int, ...]) -> tuple[int, ...] | None:
    """Top, left, bottom, right of a convolution that gives `image`; None where its window would have to end inside of `x`."""
    behind = []
    for i, size in enumerate(shape_of(form.x)[2:]):
        reach = (image[i] - 1) * form.stride[i] + form.w.shape[2 + i] - form.before[i]
        if reach < size and (size + form.before[i] - form.w.shape[2 + i]) // form.stride[i] + 1 != image[i]:
            return None
        behind.append(max(reach - size, 0))
    return (*form.before, *behind)


def _inside(form: _Linear, last: Layer, links: Links) -> set[ir.Value]:
    """The tensors on the way that nothing else reads: with the one convolution they do not exist."""
    inside = {t for t in form.via if t is not last.output and not t.is_graph_output()}
    waiting = list(inside)
    while waiting:
        t = waiting.pop()
        if t in inside and any(r.output not in inside and r.output is not last.output for r in links.readers.get(t, ())):
            inside.remove(t)  # so what gives it still runs, and reads what it reads
            waiting += [u for layer in links.makers[t] for u in layer.inputs if u in inside]
    return inside


@dataclass(frozen=True, slots=True)
class _End:
    """What follows the sum in the convolution's epilogue, up to `output`; `stages` are left for a chain behind it."""

    output: ir.Value
    act: Activation = NONE
    slope: np.ndarray | None = None
    stages: tuple[Stage, ...] = ()
    tail: Layer | None = None  # the layer behind the sum that the epilogue does, too


def _end(joined: _Joined, links: Links, inside: set[ir.Value]) -> _End:
    last, stages = joined.layer, joined.layer.stages[joined.count :]
    if stages:
        act = _activation(stages)
        return _End(last.output, act) if act else _End(last.output, stages=stages)
    tail = links.only_reader(last.output)
    act = _activation(tail.stages) if tail is not None and tail.op == "Chain" and len(tail.inputs) == 1 else None
    if tail is not None and act:
        inside.add(last.output)
        return _End(tail.output, act, tail=tail)
    return _End(last.output)


def _activation(stages: Sequence[Stage]) -> Activation | None:
    """The one stage, where an epilogue has it."""
    if len(stages) != 1 or stages[0].operand or stages[0].op not in ACTIVATIONS:
        return None
    return Activation(stages[0].op, stages[0].params)


def _convolution(
    joined: _Joined, end: _End, covered: Iterable[Layer], pads: Sequence[int], literal: tuple[str, str]
) -> list[Layer]:
    """The convolution, and behind it a chain with the stages that its epilogue does not do."""
    form, last = joined.form, joined.layer
    convs = tuple(dict.fromkeys(form.convs))
    x = ir.Value(name=form.x.name, shape=form.x.shape, type=form.x.type)  # as the graph's own, without a use of it
    _, _, r, s = form.w.shape
    window = {"kernel_shape": (r, s), "strides": form.stride, "pads": pads}
    name = " + ".join(convs if len(convs) > 1 else (*convs, name_of(last.node)))  # no other layer's: the weights are others
    node = ir.node("Conv", [x], {"group": form.groups, **window}, name=name)
    used = [layer for layer in (*covered, last, end.tail) if layer is not None]
    nodes = tuple(dict.fromkeys(n for layer in used for n in layer.nodes))
    y, title = end.output, " + ".join(nodes)
    if end.stages:
        title += " (sum)" if title == last.label else ""  # the chain behind it may have that name
        y = ir.Value(name=f"{name_of(last.output)} before {end.stages[0]}", shape=last.output.shape, type=last.output.type)
    weights = {"w": form.w, "b": form.b} if np.any(form.b) else {"w": form.w}
    conv = Layer(
        "Conv",
        node,
        title,
        nodes,
        (form.x,),
        y,
        weights,
        end.act,
        when=(literal,),
        merged=convs,
    )
    if not end.stages:
        return [conv]
    read = [f"t{i}" for i in range(1, len(last.inputs)) if any(stage.operand == f"t{i}" for stage in end.stages)]
    renamed = {t: f"t{i}" for i, t in enumerate(read, 1)}
    stages = tuple(replace(stage, operand=renamed.get(stage.operand, stage.operand)) for stage in end.stages)
    kept = {name: a for name, a in last.weights.items() if any(stage.operand == name for stage in stages)}
    inputs = (y, *(last.inputs[int(t[1:])] for t in read))
    return [conv, replace(last, inputs=inputs, stages=stages, weights=kept, when=(literal,))]
