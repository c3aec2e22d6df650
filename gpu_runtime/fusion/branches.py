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
from typing import Any

import numpy as np

from gpu_runtime.fusion.convolutions import is_convolution
from gpu_runtime.fusion.steps import UNSCALED, Step, rest, scaled, steps
from gpu_runtime.network import Network, Op, Options, computes, unique
from tactics.problems.convolution import ConvProblem
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import ACTIVATIONS, NONE, Activation, Stage
from tactics.problems.problem import PointwiseProblem
from tactics.problems.protocol import Shape4

MERGED = "merged"
SIGNS = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}
MOST_MERGED = 32  # branches of a sum: the merged convolution's name contains all their names
MOST_ON_THE_WAY = 4 * MOST_MERGED  # tensors of a sum: a branch has three, the results of its convolution, scale and addition
MOST_GROWTH = 4  # times the branches' weights: a depthwise branch of many taps plus a dense 1x1 would have far more


@dataclass(frozen=True, slots=True)
class _Linear:
    """A tensor as a convolution of tensor `x`: weights `w` [K, C/groups, R, S], bias `b` [K], `before`: the padding at the top
    and left.

    `terms`: the number of added branches; `convs`: the names of their convolutions, which have `weights` weights in all; `via`:
    the tensors between `x` and the result.
    """

    x: str
    w: np.ndarray
    b: np.ndarray
    groups: int
    stride: tuple[int, int]
    before: tuple[int, int]
    terms: int = 1
    convs: tuple[str, ...] = ()
    weights: int = 0
    via: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Joined:
    """A chain whose first `count` stages add linear branches; `form` is their sum."""

    chain: Op[Any]
    form: _Linear
    count: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A convolution that is a term of a sum. `conv`: its node; `groups`: its own number of groups; `w`: its weights spread to
    the sum's g groups, [K, C/g, r, s]; `at`: (top, left) of its window inside the merged window.
    """

    conv: str
    w: np.ndarray
    groups: int
    at: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sum:
    """Branches that may become one convolution. `w`: the merged weights [K, C/groups, R, S], FP64; `node`: the last node of the
    chain that adds the branches; `itself`: (r, s) of the tap at which the sum adds the input itself, None if it does not.
    """

    node: str
    branches: tuple[Branch, ...]
    w: np.ndarray
    groups: int
    itself: tuple[int, int] | None


def offer(network: Network) -> Network:
    """Adds to each sum of branches the option of one convolution."""
    options = Options(network)
    for joined in _sums(network):
        found = _may_be_one(joined, network)
        if found is None:
            continue
        pads, inside = found
        end = _end(joined, network, inside)
        covered = sorted((op for t in inside for op in network.producers[t]), key=lambda op: network.place[op.output])
        gone = [op for t in (*inside, end[0]) for op in network.producers[t]]
        made = [(network.producers[end[0]][-1], op) for op in _convolution(joined, end, covered, pads, network)]
        options.either(f"branches of {joined.chain.nodes[-1]}", gone, made, MERGED)
    return options.network()


def sums(network: Network) -> list[Sum]:
    """Lists the sums of branches that `offer` can make one convolution."""
    own = {op.layer: form for op in network.ops if (form := _of_conv(op)) is not None}
    found = list[Sum]()
    for joined in _sums(network):
        form = joined.form
        if _may_be_one(joined, network) is None:
            continue
        (top, left), parts = form.before, list[Branch]()
        for name in dict.fromkeys(form.convs):
            b = own[name]
            parts.append(Branch(name, _regrouped(b, form.groups), b.groups, (top - b.before[0], left - b.before[1])))
        itself = form.before if form.terms > len(form.convs) else None
        found.append(Sum(joined.chain.nodes[-1], tuple(parts), form.w, form.groups, itself))
    return found


# ---- tensors as sums of convolutions


def _sums(network: Network) -> list[_Joined]:
    """Finds the chains that end a sum of branches, unless that sum is a branch of a larger one."""
    forms: dict[str, _Linear] = {}
    found, inner = dict[str, _Joined](), set[str]()
    for op in network.ops:
        if (form := _of_conv(op)) is not None:
            forms.setdefault(op.output, form)
        elif (joined := _of_chain(op, network, forms)) is not None:
            form = joined.form
            if _is_short(form) and joined.count == len(joined.chain.problem.stages):
                forms[op.output] = replace(form, via=(*form.via, op.output))
            if form.terms > 1 and form.convs:
                inner.update(form.via)
                if _is_short(form):
                    found[op.output] = joined
    return [joined for t, joined in found.items() if t not in inner]


def _is_short(form: _Linear) -> bool:
    """Whether a form is small enough to become one convolution; larger forms are dropped, so that each sum costs little."""
    return len(set(form.convs)) <= MOST_MERGED and len(form.via) <= MOST_ON_THE_WAY


def _of_conv(op: Op[Any]) -> _Linear | None:
    """Returns the linear form of a convolution without an epilogue, else None."""
    if not is_convolution(op) or not computes(op, ConvProblem):
        return None
    p, w = op.problem, op.weights["w"]  # converted to FP64 at the first scale or addition: most weights are never copied
    if p.prologue.needs or replace(p.epilogue, bias=False) != Epilogue() or p.dilation != (1, 1):
        return None
    b = op.weights.get("b", np.zeros(len(w))).astype(np.float64)
    form = _Linear(op.inputs[0], w, b, p.groups, p.stride, p.pad[:2])
    return replace(form, convs=(op.layer,), weights=w.size, via=(op.output,))


def _itself(x: str, network: Network) -> _Linear:
    """Returns the identity: tensor `x` as a 1x1 convolution of itself."""
    c = network.tensors[x][1]
    return _Linear(x, np.ones((c, 1, 1, 1)), np.zeros(c), c, (1, 1), (0, 0))


def _of_chain(op: Op[Any], network: Network, forms: Mapping[str, _Linear]) -> _Joined | None:
    """Finds how many leading stages of a chain are linear in one tensor: stages that scale by a constant, or add or subtract a
    constant or a linear form. Returns the form with the most branches, or None if not even the first stage is linear.
    """
    if not computes(op, PointwiseProblem) or op.problem.tensors[0] != "nchw":
        return None

    def ways(t: str) -> list[_Linear]:
        """Returns the linear forms of a tensor, the identity among them."""
        return [*([forms[t]] if t in forms else []), _itself(t, network)]

    now, count = ways(op.inputs[0]), 0  # the first form in which all branches read one tensor
    for step in steps(op, op.inputs[0]) or ():
        other = step.operand if isinstance(step.operand, str) else ""
        others = ways(other) if other and network.tensors[other] == op.problem.out_shape else []
        further = [more for way in now for more in _after(step, way, others)]
        if not further:
            break
        now, count = further, count + 1
    best = max(now, key=lambda way: way.terms, default=None)
    return _Joined(op, best, count) if best is not None and count else None


def _after(step: Step, form: _Linear, others: Sequence[_Linear]) -> Iterator[_Linear]:
    """Yields the linear forms that result from applying a step to a form. `others`: the linear forms of the step's operand."""
    if step.op in SIGNS:
        for other in others:
            summed = _added(*(_scaled(f, sign) for f, sign in zip((form, other), SIGNS[step.op], strict=True)))
            if summed is not None:
                yield summed
    affine = scaled(UNSCALED, step, "c", len(form.b))
    if affine is not None and all(np.isfinite(v).all() for v in affine):
        yield _scaled(form, *affine)


def _scaled(form: _Linear, scale: float | np.ndarray, shift: float | np.ndarray = 0.0) -> _Linear:
    s = np.broadcast_to(np.asarray(scale, np.float64), form.b.shape)
    return replace(form, w=form.w * s[:, None, None, None], b=form.b * s + shift)


def _added(a: _Linear, b: _Linear) -> _Linear | None:
    """Returns the sum of two forms whose results have one shape; None if they read different tensors, or their strides
    differ.
    """
    if a.x != b.x or len(a.w) != len(b.w) or a.stride != b.stride:
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
    """Returns the form's weights [K, C/groups, R, S] for fewer, larger groups, with zeros for the channels of the other
    original groups.
    """
    if form.groups == groups:
        return form.w
    k, share, r, s = form.w.shape
    inner = form.groups // groups  # original groups in each new one
    w = np.zeros((k, share * inner, r, s))
    own = np.arange(k) // (k // form.groups) % inner
    for i in range(share):
        w[np.arange(k), own * share + i] = form.w[:, i]
    return w


# ---- the one convolution


def _may_be_one(joined: _Joined, network: Network) -> tuple[tuple[int, int, int, int], dict[str, None]] | None:
    """Returns (pads of the merged convolution, the tensors that vanish with it); None if it would have far more weights than
    the branches.
    """
    last, form = joined.chain, joined.form
    pads = _pads(form, network.tensors[form.x], last.problem.out_shape)
    if pads is None or form.w.size > MOST_GROWTH * form.weights:
        return None
    inside = _inside(form, last, network)
    # With fewer convolutions: one convolution and its own input, which its epilogue takes in as a residual.
    return (pads, inside) if len(inside) + joined.count >= 3 else None


def _pads(form: _Linear, x: Shape4, out: Shape4) -> Shape4 | None:
    """Returns (top, left, bottom, right) with which the convolution of `x` gives shape `out`; None if its window would have to
    end inside of `x`.
    """
    behind = []
    for i, size in enumerate(x[2:]):
        reach = (out[2 + i] - 1) * form.stride[i] + form.w.shape[2 + i] - form.before[i]
        if reach < size and (size + form.before[i] - form.w.shape[2 + i]) // form.stride[i] + 1 != out[2 + i]:
            return None
        behind.append(max(reach - size, 0))
    return *form.before, behind[0], behind[1]


def _inside(form: _Linear, last: Op[Any], network: Network) -> dict[str, None]:
    """Lists, in order, the tensors of the branches that only the sum reads: they vanish in the merged convolution."""
    inside = {t: None for t in form.via if t != last.output and t not in network.output_names}
    waiting = list(inside)
    while waiting:
        t = waiting.pop()
        if t in inside and any(r.output not in inside and r.output != last.output for r in network.readers[t]):
            del inside[t]  # another op reads it: its producer still runs, and keeps its own inputs
            waiting += [u for op in network.producers[t] for u in op.inputs if u in inside]
    return inside


End = tuple[str, Activation, Op[Any] | None]  # (the epilogue's last tensor, its activation, a further op that it absorbs)


def _end(joined: _Joined, network: Network, inside: dict[str, None]) -> End:
    """Returns the end of the merged convolution's epilogue: the ops behind the sum that it can absorb."""
    last, stages = joined.chain, joined.chain.problem.stages[joined.count :]
    if stages:
        return last.output, _activation(stages), None
    tail = network.only_reader(last.output)
    act = _activation(tail.problem.stages) if computes(tail, PointwiseProblem) and len(tail.inputs) == 1 else NONE
    if tail is None or act == NONE or tail.when:
        return last.output, NONE, None
    inside[last.output] = None
    return tail.output, act, tail


def _activation(stages: Sequence[Stage]) -> Activation:
    """Returns the stage as an activation if it is the only one and epilogues support it, else NONE."""
    if len(stages) != 1 or stages[0].operand or stages[0].op not in ACTIVATIONS:
        return NONE
    return Activation(stages[0].op, stages[0].params)


def _convolution(joined: _Joined, end: End, covered: Iterable[Op[Any]], pads: Shape4, network: Network) -> Iterator[Op[Any]]:
    """Yields the merged convolution, then a chain of the stages that its epilogue cannot compute, if there are any."""
    form, last, (y, act, tail) = joined.form, joined.chain, end
    convs, left = unique(form.convs), act == NONE and last.problem.stages[joined.count :]
    name = " + ".join(convs if len(convs) > 1 else (*convs, last.nodes[-1]))  # a new name: the weights are no layer's
    nodes = unique(n for op in (*covered, last, tail) if op is not None for n in op.nodes)
    title = " + ".join(nodes)
    if left:
        title += " (sum)" if title == last.name else ""  # the chain behind it may have the output's name already
        y = f"{last.output} before {left[0]}"
    bias = bool(np.any(form.b))
    weights = {"w": form.w, "b": form.b} if bias else {"w": form.w}
    k, _, r, s = form.w.shape
    sizes = (*network.tensors[form.x], k, r, s)
    problem = ConvProblem(*sizes, form.stride, pads, groups=form.groups, epilogue=Epilogue(bias, act=act))
    yield Op(title, problem, (form.x,), y, weights, nodes, layer=name, layers=convs, branches=True)
    if left:
        yield rest(network, last, joined.count, y)
