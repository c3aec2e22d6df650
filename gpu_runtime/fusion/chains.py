"""Finds the pointwise ops behind a tensor: scales and shifts, an activation, a function spelled in several ops, a chain.

A chain goes on while a single pointwise op reads its result: that saves a launch and a pass over memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu_runtime.fusion.spelled import LONGEST_SPELLING, SAMPLES, spelled
from gpu_runtime.fusion.steps import UNSCALED, Activated, Chain, Step, activation, along, steps
from gpu_runtime.lowering.pointwise import then
from gpu_runtime.network import Network, Op, unique
from tactics.problems.pointwise_ops import MAX_SOURCES, MAX_STAGES, POINTWISE, ROUNDING, Stage

Ops = tuple[Op[Any], ...]
Found = tuple[list[Step], Ops]  # (steps, the ops that spell them)
Scale = tuple[str, np.ndarray]  # (operation, its constant operand)


class Chains:
    """Finds scales, activations and chains behind the tensors of a network that has one op for each node and no options."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._functions: dict[str, Found | None] = {}

    def reader(self, tensor: str) -> Op[Any] | None:
        """Returns the only op that reads `tensor`, exactly once; None if `tensor` is a network output or has other readers."""
        op = self.network.only_reader(tensor)
        again = any(step.operand == tensor for step in steps(op, tensor) or ())
        return None if op is None or op.inputs.count(tensor) != 1 or again else op

    def size(self, tensor: str, axis: str) -> int:
        """Returns the tensor's size along an axis of nchw; 1 for axis ""."""
        return self.network.tensors[tensor]["nchw".index(axis)] if axis else 1

    # ---- scales, shifts, activations

    def scales_after(self, tensor: str, axis: str) -> tuple[list[Scale], Ops]:
        """Returns (the constants that scale or shift `tensor` along an axis, in order, each [size] or [1]; their ops). No other
        op reads the tensors between.
        """
        found, ops = list[Scale](), list[Op[Any]]()
        while (op := self.reader(tensor)) is not None and (more := self._scales(op, tensor, axis)):
            found += more
            ops.append(op)
            tensor = op.output
        return found, tuple(ops)

    def _scales(self, op: Op[Any], tensor: str, axis: str) -> list[Scale]:
        """Returns the constants by which an op scales or shifts `tensor`; [] if it does anything else."""
        found = list[Scale]()
        same = self.network.tensors[op.output] == self.network.tensors[tensor]
        for step in (steps(op, tensor) or ()) if same else ():
            c = along(step, axis, self.size(tensor, axis))
            if c is None or then(UNSCALED, step.op, c) is None:
                return []
            found.append((step.op, c))
        return found

    def activation_after(self, tensor: str, axis: str = "c") -> Activated | None:
        """Returns the activation that is the only reader of a tensor, in one op or in several; else None."""
        op = self.network.only_reader(tensor)
        found = self.function_of(tensor) or (self._of_one(op, tensor) if op is not None and op.inputs[0] == tensor else None)
        if found is None or len(found[0]) != 1:
            return None
        (step,), ops = found
        one = activation(step, axis, self.size(tensor, axis))
        return one and one._replace(ops=ops)

    # ---- functions in several ops

    def function_of(self, tensor: str) -> Found | None:
        """Returns the longest known function of `tensor` that two ops or more spell, if no other op reads `tensor` or the
        tensors between; else None.
        """
        if tensor not in self._functions:
            self._functions[tensor] = self._function(tensor, None)
        return self._functions[tensor]

    def _function(self, tensor: str, among: Op[Any] | None) -> Found | None:
        """Does the work of `function_of`. If `among` is given, the function must include this op, and other ops may read
        `tensor`.
        """
        order, known = self._evaluable(tensor)
        for last in reversed(order):
            stage = spelled(known[last.output])
            if stage is None:
                continue
            used = {id(last)}
            for op in reversed(order):
                if any(id(r) in used for r in self.network.readers[op.output]):
                    used.add(id(op))
            ops = (*(op for op in order if id(op) in used and op is not last), last)
            hidden = all(self._is_read_by(used, op.output) for op in ops[:-1])
            whole = self._is_read_by(used, tensor) if among is None else id(among) in used
            if len(used) > 1 and hidden and whole:
                return [Step(stage.op, None, stage.params)], ops
        return None

    def _is_read_by(self, only: set[int], tensor: str) -> bool:
        return tensor not in self.network.output_names and all(id(r) in only for r in self.network.readers[tensor])

    def _evaluable(self, tensor: str) -> tuple[list[Op[Any]], dict[str, np.ndarray]]:
        """Returns (the ops behind `tensor` that depend on no other tensor, in order; tensor -> its values at SAMPLES)."""
        order, known = list[Op[Any]](), {tensor: SAMPLES}
        todo = [*self.network.readers[tensor]]
        while todo and len(order) < LONGEST_SPELLING:
            op = todo.pop(0)
            y = None if op.output in known else self._evaluated(op, known)
            if y is not None:
                order.append(op)
                known[op.output] = y
                todo += self.network.readers[op.output]
        return order, known

    def _evaluated(self, op: Op[Any], known: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Returns an op's values at the samples; None unless each of its inputs is known or a scalar constant."""
        tensor = next((t for t in op.inputs if t in known), "")
        found = steps(op, tensor) if tensor else None
        if found is None:
            return None
        y = known[tensor]
        with np.errstate(all="ignore"):
            for name, other, params in found:
                if other is None:
                    y = Stage(name, "", params).apply(y)
                elif isinstance(other, str) and other in known:
                    y = POINTWISE[name].meaning(y, known[other])
                else:
                    return None
        return y

    # ---- chains

    def chain_at(self, op: Op[Any], stop: Callable[[Op[Any]], bool], last: Op[Any] | None = None) -> Chain:
        """Returns the chain that begins at a pointwise op; it ends before an op for which `stop` holds, or with op `last`."""
        tensor, found = self._first(op, stop)
        chain = Chain(tensor)
        while found is not None:
            more, ops = found
            longer = Chain(tensor, (*chain.ops, *ops), (*chain.steps, *more))
            full = len(longer.steps) > MAX_STAGES or len(longer.inputs) + len(longer.constants) > MAX_SOURCES
            if chain.ops and (full or any(map(stop, ops))):
                break
            chain = longer
            if ops[-1] is last or any(step.op in ROUNDING for step in more):  # whole numbers are a tensor of their own
                break
            found = self.function_of(chain.output) or self._of_one(self.reader(chain.output), chain.output)
        return chain

    def _first(self, op: Op[Any], stop: Callable[[Op[Any]], bool]) -> tuple[str, Found | None]:
        """Returns (the chain's input tensor, the function spelled in several ops with which a chain from `op` begins, or None
        if it begins with `op` alone).
        """
        for tensor in unique(op.inputs):
            found = self._function(tensor, op)
            if found and not any(stop(n) for n in found[1] if n is not op):
                return tensor, found
        return op.inputs[0], self._of_one(op, op.inputs[0])

    def _of_one(self, op: Op[Any] | None, tensor: str) -> Found | None:
        found = steps(op, tensor)
        return None if op is None or found is None else (found, (op,))
