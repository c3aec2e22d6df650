"""Offers squeeze-excite, its average and the two fully connected layers behind it, as one operator, and its scale, one value
per image and channel, as a part of the 1x1 convolutions that read the product: they multiply while they load.

A depthwise or grouped convolution ahead may take in all of it, the multiplication too. Each is a choice of the plan. Where
gates are in front, images are computed separately, which costs time where a small one fills no tile. The operators, of one
launch or two, are dense, also where the weights are 2:4: the log says so (one_launch).
"""

from dataclasses import replace
from typing import TypeGuard

from gpu_runtime.network import APART, Literal, Network, Op, Options, computes, group_between, joined
from tactics.families import conv_scaled
from tactics.families.squeeze_excite import reason_against
from tactics.problems.pointwise_ops import NONE, Activation
from tactics.problems.problem import ConvProblem, PointwiseProblem, PoolProblem, ScaledConvProblem, SqueezeExciteProblem
from tactics.problems.prologue import GATED_ACTS, Prologue
from tactics.problems.protocol import Feature, Problem

IN_FRONT, SCALED = "in front", "scaled"
TWIN = ", gated"  # the end of the name of an option that differs from another only by a gate in front
NO_GATE = frozenset({Feature.SCALED_INPUT, Feature.GATED_INPUT, Feature.MAX_POOL})  # they exclude a gate
Conv = Op[ConvProblem]


def offer(network: Network) -> Network:
    """Returns the network with the alternatives added; their `Op.layers` names both fully connected layers."""
    options = Options(network)
    for last in network.ops:
        ops = network.row(last, PoolProblem, ConvProblem, ConvProblem)
        if not ops or reason_against(*(op.problem for op in ops)):
            continue
        pool, first, second = ops
        layer = f"{first.layer} -> {second.layer}"
        one = joined(
            *ops,
            problem=SqueezeExciteProblem(pool.problem, first.problem, second.problem),
            inputs=pool.inputs,
            weights={**first.weights, **{f"{name}2": array for name, array in second.weights.items()}},
            layer=layer,
            layers=(first.layer, second.layer),
        )
        options.either(f"{layer} (squeeze-excite)", ops, [(second, one)])
    return options.network()


# ---- gates in front of convolutions


def gates(network: Network, decided: bool = False) -> Network:
    """Returns the network in which convolutions may multiply their input by the gate themselves, as alternatives to reading the
    product.

    `decided`: only if a group decides whether these convolutions read the product.
    """
    options, extended = Options(network), set[str]()
    for op in network.ops:
        if not computes(op, PointwiseProblem) or (act := _act(op.problem)) is None or op.output in network.output_names:
            continue
        if network.is_fp32(op.output) or len(network.producers[op.output]) > 1:  # the product must exist with all options
            continue
        readers = network.readers[op.output]
        takers = [reader for reader in readers if _takes(reader, op.output)]
        if takers and len(takers) == len(readers):
            if decided:
                continue
            made = [(taker, _gated(op, taker, act, taker.when)) for taker in takers]
            options.either(f"gate {op.name}", (op, *takers), made, IN_FRONT)
            continue
        others = [reader for reader in readers if not any(reader is taker for taker in takers)]
        if takers and (group := group_between(takers, others)) and group not in extended and not _has_twins(network, group):
            extended.add(group)
            options.twins(group, [op, *takers], [(taker, _gated(op, taker, act, taker.when)) for taker in takers], TWIN)
    return options.network()


def _has_twins(network: Network, group: str) -> bool:
    options = dict(network.groups)[group]
    return any(f"{option}{TWIN}" in options for option in options)


def _act(p: PointwiseProblem) -> Activation | None:
    """Returns the activation behind the product of a tensor and one value per image and channel; None if the chain computes
    something else.
    """
    spans = {"c", "nc"} if p.n == 1 else {"nc"}
    gated = len(p.tensors) == 2 and not p.constants and "nchw" in p.tensors and bool(spans & set(p.tensors)) and p.h * p.w > 1
    if not gated or not 0 < len(p.stages) <= 2 or (p.stages[0].op, p.stages[0].operand) != ("mul", "t1"):
        return None
    if len(p.stages) == 1:
        return NONE
    last = p.stages[1]
    return Activation(last.op, last.params) if last.op in GATED_ACTS and not last.operand else None


def _takes(reader: Op[Problem], tensor: str) -> TypeGuard[Conv]:
    """Whether the reader is a convolution that can multiply its input by the gate while it loads."""
    if not computes(reader, ConvProblem) or reader.inputs[0] != tensor or reader.inputs.count(tensor) > 1:
        return False
    p = reader.problem
    return (p.r, p.s) == (1, 1) and p.groups < max(p.c, 2) and not any(p.pad) and not p.needs & NO_GATE


def _gated(product: Op[PointwiseProblem], conv: Conv, act: Activation, when: tuple[Literal, ...]) -> Conv:
    x, gate = product.inputs if product.problem.tensors[0] == "nchw" else reversed(product.inputs)
    problem = replace(conv.problem, prologue=Prologue(gated=True, act=act))
    return joined(product, conv, problem=problem, inputs=(x, *conv.inputs[1:], gate), when=when)


# ---- all of it behind the convolution ahead


def scaled(network: Network) -> Network:
    """Returns the network in which a convolution, the squeeze-excite of its output and the product of both may be one op."""
    options = Options(network)
    for product in network.ops:
        if not computes(product, PointwiseProblem) or (act := _act(product.problem)) is None:
            continue
        x, gate = product.inputs if product.problem.tensors[0] == "nchw" else reversed(product.inputs)
        makers, gone = network.producers.get(x, ()), _only_for(network, product, x, gate)
        excite = next((op for op in gone if computes(op, SqueezeExciteProblem) and op.inputs == (x,)), None)
        if excite is None or network.is_fp32(product.output):
            continue
        conv = next((op for op in makers if computes(op, ConvProblem) and not _against(op, excite, act)), None)
        if conv is None:
            continue
        decided = {g for g, _ in product.when}  # if a gate may be in front of the same readers, one group decides about both
        gate_of = next((g for g in decided if dict(network.groups)[g] == (APART, IN_FRONT) and len(decided) == 1), "")
        group, before = gate_of or f"scale {product.name}", (APART, IN_FRONT) if gate_of else (APART,)
        options.group(group, *((SCALED,) if gate_of else (APART, SCALED)))
        for op in (*makers, *gone, *(() if gate_of else (product,))):
            options.limit(op, group, *before)
        for reader in network.readers[product.output]:
            if (group, APART) in reader.when:
                options.limit(reader, group, SCALED)
        when = (*conv.when, *(() if gate_of else product.when), (group, SCALED))
        options.behind(product, _scaled(conv, excite, product, act, when))
    return options.network()


def _against(conv: Op[ConvProblem], excite: Op[SqueezeExciteProblem], act: Activation) -> str:
    return conv_scaled.reason_against(conv.problem, excite.problem, act)


def _only_for(network: Network, product: Op[PointwiseProblem], x: str, gate: str) -> tuple[Op[Problem], ...]:
    """Returns the ops between x and the gate, if only they and the product read x and these ops' outputs; else ()."""
    found, tensors = list[Op[Problem]](), [gate]
    for tensor in tensors:
        for op in network.producers.get(tensor, ()):
            found.append(op)
            tensors += [t for t in op.inputs if t != x and t not in tensors]
    used = {id(op) for op in found} | {id(op) for op in network.readers[gate] if x in op.inputs}
    inside = all(id(op) in used for t in (x, *tensors) for op in network.readers.get(t, ()))
    hidden = not {x, *tensors} & network.output_names and not any(map(network.is_fp32, (x, *tensors)))
    return tuple(found) if inside and hidden and all(network.producers.get(t) for t in tensors) else ()


def _scaled(
    conv: Conv, excite: Op[SqueezeExciteProblem], product: Op[PointwiseProblem], act: Activation, when: tuple[Literal, ...]
) -> Op[ScaledConvProblem]:
    return joined(
        conv,
        excite,
        product,
        problem=ScaledConvProblem(conv.problem, excite.problem, act),
        inputs=conv.inputs,
        weights={**conv.weights, **{f"{name}2": array for name, array in excite.weights.items()}},
        layer=f"{conv.layer} -> {excite.layer}",
        layers=(conv.layer, *excite.layers),
        when=when,
    )
