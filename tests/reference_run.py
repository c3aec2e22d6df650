"""Execute a lowered network in NumPy, problem by problem: the meaning that every other execution must agree with."""

from __future__ import annotations

import itertools

import numpy as np

from gpu_runtime.lower import Network, exists
from tactics.problem import ConvProblem, PointwiseProblem


def run(network: Network, feeds: dict, choice: dict | None = None, fp16: bool = False) -> dict[str, np.ndarray]:
    """{input: array of its ONNX shape} -> {output: FP32 array of its ONNX shape}.

    `choice` names one option per fusion group (default: the first, "apart"); `fp16` rounds every tensor to FP16.
    """
    choice = {group: options[0] for group, options in network.groups} | (choice or {})
    rounded = (lambda a: a.astype(np.float16).astype(np.float32)) if fp16 else (lambda a: a)
    tensors = {t.name: rounded(np.asarray(feeds[t.name], np.float32).reshape(t.shape4)) for t in network.inputs}
    for op in network.ops:
        if not exists(op, choice):
            continue
        assert op.output not in tensors, f"{op.name} writes {op.output} again"
        xs = [tensors[name] for name in op.inputs]
        for x, shape in zip(xs, op.problem.in_shapes, strict=True):
            assert x.shape == tuple(shape), f"{op.name}: {x.shape} is not {shape}"
        w = op.weights
        if isinstance(op.problem, ConvProblem):
            y = op.problem.reference(xs[0], w["w"], w.get("b"), xs[1] if op.problem.residual else None, w.get("slope"))
        elif isinstance(op.problem, PointwiseProblem):
            operand = xs[1] if op.problem.operand == "tensor" else w.get("operand")
            y = op.problem.reference(xs[0], operand, w.get("slope"))
        else:
            y = op.problem.reference(*xs)
        assert y.shape == op.problem.out_shape == network.tensors[op.output], op.name
        tensors[op.output] = rounded(y.astype(np.float32))
    return {t.name: tensors[t.name].reshape(t.shape) for t in network.outputs}


def choices(network: Network, limit: int = 8) -> list[dict[str, str]]:
    """Every combination of fusion options; past `limit`, a set that takes each option of each group at least once."""
    names = [group for group, _ in network.groups]
    options = [o for _, o in network.groups]
    if np.prod([len(o) for o in options], dtype=float) <= limit:
        return [dict(zip(names, pick, strict=True)) for pick in itertools.product(*options)]
    most = max(len(o) for o in options)
    return [{n: o[(k + i) % len(o)] for i, (n, o) in enumerate(zip(names, options, strict=True))} for k in range(most)]
