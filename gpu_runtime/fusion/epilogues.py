"""Convolutions and chains take over the ops behind them, in one pass from the network's inputs to its outputs.

Always fused: scales and shifts by constants (BatchNormalization, Mul, Add, ...) into the convolution before them, in double
precision, and the activation after it. A residual Add can go into either of its producers: those are alternatives, and the plan
chooses. Each such Add is a group of options, "apart" or "into <convolution>".

Depth-to-space after a convolution becomes that convolution's store, so that a residual Add behind it can be fused as well.
Space-to-depth and channel shuffles stay ops: whether weights absorb them is an option (rewrites.blocks, rewrites.channels).

Pointwise ops that read only each other always become one op, a chain: apart they cost more launches and bytes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpu_runtime.fusion import convolutions
from gpu_runtime.fusion.chains import Chains
from gpu_runtime.fusion.convolutions import Conv, fits_last, followed, is_convolution, started
from gpu_runtime.fusion.steps import UNSCALED, Activated, Chain
from gpu_runtime.lowering.pointwise import Affine, then
from gpu_runtime.network import APART, Literal, Network, Op, Options, adds_tensors, computes
from tactics.problems.epilogue import MaxPool
from tactics.problems.gather import ViewProblem
from tactics.problems.pointwise_ops import NONE, ROUNDING, Activation
from tactics.problems.problem import ConvProblem, PointwiseProblem, PoolProblem

STEM_CHANNELS = 4  # the problems of tactics/families/conv_stem.py, the only family whose epilogue pools


def fused(network: Network) -> Network:
    """Returns the network with all fusible ops in the epilogues and chains that absorb them. `network`: one op for each
    node.
    """
    return _Epilogues(network).run()


class _Epilogues:
    """The pass over the network. `covered`: ids of the ops that another op has absorbed; `convs`: id of an op -> its
    convolution before fusion; `ends`: the outputs of convolutions and of views of them; `waiting`: tensor -> (original op,
    convolution) of each convolution that only a residual Add reads.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.chains = Chains(network)
        self.options = Options(network)
        self.convs = {id(op): started(network, op) for op in network.ops if is_convolution(op)}
        self.ends = {c.output for c in self.convs.values() if all(isinstance(move.problem, ViewProblem) for move in c.tail)}
        self.covered = {id(move) for conv in self.convs.values() for move in (*conv.head, *conv.tail)}
        self.waiting: dict[str, tuple[Op[Any], Conv]] = {}

    def run(self) -> Network:
        for op in self.network.ops:
            if id(op) in self.covered:
                continue
            if id(op) in self.convs:
                self._convolution(self.convs[id(op)])
            elif adds_tensors(op) and (waiting := [self.waiting[t] for t in op.inputs if t in self.waiting]):
                self._residual(op, waiting)
            elif computes(op, PointwiseProblem):
                chain = self.chains.chain_at(op, self._is_taken)
                self._place(chain, chain.ops[-1])
        return self.options.network()

    # ---- the fused ops

    def _cover(self, *ops: Op[Any]) -> None:
        self.covered.update(map(id, ops))
        self.options.without(*ops)

    def _place(self, chain: Chain, at: Op[Any], *when: Literal) -> None:
        """Puts a chain, as one op, at the position of `at`, one of the chain's ops."""
        self._cover(*chain.ops)
        self.options.instead(at, replace(chain.op(self.network.tensors), when=when))

    # ---- rules

    def _convolution(self, conv: Conv) -> None:
        first, chains = conv.op, self.chains
        self._cover(first, *conv.head, *conv.tail)
        conv = convolutions.with_depth_to_space(convolutions.with_scales(conv, chains), chains)
        if self._residual_after(conv) is not None:
            return self._wait(first, conv)
        before, conv = conv, convolutions.with_activation(conv, chains)
        acts, end = conv is not before, conv.op.problem.epilogue
        if acts and end.act.name in ROUNDING:
            conv = self._dequantized(conv)
            acts = conv.op.problem.epilogue.affine
        elif acts and end.d2s == first.problem.epilogue.d2s:  # no depth-to-space is absorbed yet
            conv = convolutions.with_depth_to_space(convolutions.with_affine(conv, chains), chains)
        add = self._residual_after(conv) if acts and computes(conv.op, ConvProblem) else None
        after = None if add is None else chains.activation_after(add.output)
        if add is not None and (after is None or fits_last(after.act, end.act)):
            return self._wait(first, followed(conv, (), act_first=True))
        conv = convolutions.with_last(conv, chains) if acts else conv
        self._cover(*conv.used)
        pool = _pool_after(conv, chains)
        if pool is None:
            self.options.before(first, *conv.ops())
        else:
            self._pooled(conv, first, pool)

    def _dequantized(self, conv: Conv) -> Conv:
        """Absorbs the scale behind whole numbers; returns the same convolution where these are a tensor of their own, which
        others read, or the convolution behind the scale can.
        """
        scaled = convolutions.with_affine(conv, self.chains)
        return conv if any(map(is_convolution, self.network.readers[scaled.output])) else scaled

    def _wait(self, first: Op[Any], conv: Conv) -> None:
        """Keeps the convolution until the pass reaches the residual Add that reads it."""
        self._cover(*conv.used)
        self.waiting[conv.output] = first, conv

    def _pooled(self, conv: Conv, first: Op[Any], pool: Op[Any]) -> None:
        """Offers a convolution and its max pool as two ops, and as one."""
        option, q = f"into {conv.op.layer}", pool.problem
        one = followed(conv, [pool], pool=MaxPool((q.r, q.s), q.stride, q.pad[:2], q.out))
        self.options.before(first, *conv.ops((pool.name, APART)))
        self.covered.add(id(pool))
        self.options.either(pool.name, [pool], [(pool, op) for op in one.ops()], option)

    def _residual(self, add: Op[Any], convs: list[tuple[Op[Any], Conv]]) -> None:
        """Offers a residual Add as an op of its own, and fused into each of the convolutions that wait for it."""
        act, slope, used = self.chains.activation_after(add.output) or Activated()
        affine, quantize, more = self._quantized_after(act, (add, *used)[-1].output, [conv for _, conv in convs])
        used = (*used, *more)
        chain = self.chains.chain_at(add, lambda op: id(op) in self.covered, (add, *used)[-1])
        options = (APART, *(f"into {conv.op.layer}" for _, conv in convs))
        self.options.group(add.name, *options)
        for (first, conv), option in zip(convs, options[1:], strict=True):
            others = ((add.name, other) for other in options if other != option)
            self.options.before(first, *followed(conv, (), act_first=False).ops(*others))
            one = conv if slope is None else convolutions.weighted(conv, slope=convolutions.spread(conv, slope))
            end = conv.op.problem.epilogue
            first_act, last = (end.act, act) if end.act_first else (act, NONE)
            if more:
                scales, shifts = (np.broadcast_to(v, len(one.op.weights["w"])) for v in affine)
                one = convolutions.weighted(one, scales=scales, shifts=shifts)
            one = followed(
                one, chain.ops, residual=True, act=first_act, last=quantize if more else last, affine=end.affine or bool(more)
            )
            inputs = (one.op.inputs[0], next(t for t in add.inputs if t != conv.output))
            self.options.before(add, *replace(one, op=replace(one.op, inputs=inputs)).ops((add.name, option)))
        self._place(chain, add, (add.name, APART))

    def _quantized_after(
        self, act: Activation, tensor: str, convs: Sequence[Conv]
    ) -> tuple[Affine, Activation, tuple[Op[Any], ...]]:
        """Returns (the scale and shift, the bounds, the ops) of a QuantizeLinear, the only reader of a tensor, the result of an
        activation: these convolutions' epilogues can do it behind a residual; no ops if there is none.
        """
        free = act.name not in ROUNDING and not any(conv.op.problem.epilogue.act_first for conv in convs)
        found, used = self.chains.scales_after(tensor, "") if free else ([], ())
        end = self.chains.activation_after(used[-1].output if used else tensor) if free else None
        if end is None or end.act.name not in ROUNDING or not fits_last(end.act, act):
            return UNSCALED, NONE, ()
        affine = UNSCALED
        for op, c in found:
            affine = then(affine, op, c) or affine
        return affine, end.act, (*used, *end.ops)

    # ---- conditions

    def _residual_after(self, conv: Conv) -> Op[Any] | None:
        """Returns the residual Add that is the convolution's only reader and may be fused into its epilogue, else None."""
        add = self.chains.reader(conv.output)
        return add if not conv.tail and adds_tensors(add) and id(add) not in self.covered else None

    def _is_taken(self, op: Op[Any]) -> bool:
        """Whether a chain must not absorb an op: another op has absorbed it, or a convolution's epilogue may."""
        if id(op) in self.covered or any(t in self.waiting for t in op.inputs):
            return True
        return adds_tensors(op) and any(self._ends_convolution(t, (op,)) for t in op.inputs)

    def _ends_convolution(self, tensor: str, readers: tuple[Op[Any], ...]) -> bool:
        """Whether `tensor` is a convolution's result, with or without pointwise ops behind it, that only `readers` read."""
        while True:
            op = self.network.producer(tensor)
            alone = all(any(r is reader for reader in readers) for r in self.network.readers[tensor])
            if op is None or tensor in self.network.output_names or not alone:
                return False
            if tensor in self.ends:
                return True
            if not computes(op, PointwiseProblem) or len((chain := self.chains.chain_at(op, lambda _: False, op)).inputs) != 1:
                return False
            tensor, readers = chain.tensor, chain.ops


def _pool_after(conv: Conv, chains: Chains) -> Op[Any] | None:
    """Returns the max pool that is the only reader of the network's first convolution and that this convolution's kernel can
    compute; else None.
    """
    pool, p = chains.reader(conv.output), conv.op.problem
    if not computes(pool, PoolProblem) or pool.problem.kind != "max" or not isinstance(p, ConvProblem):
        return None
    few = not (conv.head or conv.tail) and p.epilogue.d2s == 1 and p.groups == 1 and p.c <= STEM_CHANNELS
    return pool if few and pool.problem.dilation == (1, 1) else None
