"""Plans a network as if all weights that can be were 2:4, to tell whether pruning them would pay.

A kernel's time depends on the pattern of weights and not on their values, so no weights are ranked: some two of each four are
set to zero, along the axis along which the file's weights would be pruned. Rewrites then find which of their forms keep the
pattern, as they do for a pruned model.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from cuda_kernels import sparse24
from gpu_runtime.building.planner import PlannedNetwork, Planner
from gpu_runtime.building.record import fp32_reasons, solution_of
from gpu_runtime.building.target import make_timer
from gpu_runtime.errors import ModelError
from gpu_runtime.explain import reasons
from gpu_runtime.frontend import importer
from gpu_runtime.fusion.convolutions import is_convolution
from gpu_runtime.network import Network, Op
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.planning.counterfactuals import counterfactuals
from gpu_runtime.runtime.findings import IfPruned

ZEROS = ((2, 3), (1, 3), (0, 3), (1, 2), (0, 2), (0, 1))  # channels of the four of group g in row k: those at (k + g) % 6
PRODUCTS = ("Gemm", "MatMul")  # operators with the pattern along all elements of a flattened image


def with_pruned(loaded: importer.Loaded, planned: PlannedNetwork, planner: Planner) -> PlannedNetwork:
    """Returns the plan with the predicted one with 2:4 weights beside it; without that one unless --sparsity=enable, if no
    weights could become 2:4, or if no such plan has the allowed memory.

    `planned`: the plan as it is, whose formats at the network's edge the other one has.
    """
    network = planned.fitted
    changed = layers_to_prune(loaded, network) if network and planner.options.sparsity == "enable" else ()
    if network is None or not changed:
        return planned
    target = replace(planner.target, measured=False)
    ends = {t: (fmt,) for t, fmt in planned.table.io.items()}
    tell = planner.options.progress
    options = replace(planner.options, progress=lambda p: tell(replace(p, detail=f"{p.detail}, with all weights 2:4")))
    other = Planner(target, make_timer(target), options, ends)
    try:
        found = other.settled(*other(alternatives(pruned(loaded, network, changed))), planned.reached)
        now = other.settled(*other(planned.table.network), planned.reached) if planner.target.measured else planned
    except ModelError:
        return planned
    others = counterfactuals(found.table, found.chosen, only_dense=True)
    facts = reasons.Known(
        found.table,
        found.chosen,
        others,
        "enable",
        measured=False,
        single=fp32_reasons(found),
        stored=loaded.stored,
    )
    solution = replace(solution_of(found.chosen), rivals=others.rivals)
    answer = IfPruned((now.own or now.chosen).us, changed, reasons.sparsity(facts), solution)
    return replace(planned, if_pruned=answer, pruned_table=None if planner.target.measured else found.table)


def layers_to_prune(loaded: importer.Loaded, network: Network) -> tuple[str, ...]:
    """Lists the layers whose stored weights can be 2:4 and are not."""
    layers = dict.fromkeys(layer for op in network.ops for layer in (op.layers or (op.layer,)) if layer)
    return tuple(layer for layer in layers if layer in loaded.stored and not loaded.stored[layer].fits)


def pruned(loaded: importer.Loaded, network: Network, layers: tuple[str, ...]) -> Network:
    """Returns the network with 2:4 weights in these layers."""
    products = {node.name for node in loaded.proto.graph.node if node.op_type in PRODUCTS}
    known: dict[str, tuple[np.ndarray, bool]] = {}  # all alternatives of a layer share one array

    def changed(op: Op[Any]) -> Op[Any]:
        if not is_convolution(op) or not {*(op.layers or (op.layer,))} & {*layers}:
            return op
        if op.layer not in known:
            w = op.weights["w"]
            flat = w.reshape(len(w), -1) if op.layer in products else w
            marked = w if flat.shape[1] % 4 else _with_zeros(flat).reshape(w.shape)
            known[op.layer] = marked, w.shape[1] % 4 == 0 and (flat.ndim == w.ndim or sparse24.is_sparse(marked))
        w, fits = known[op.layer]
        return replace(op, problem=replace(op.problem, sparse24=fits), weights={**op.weights, "w": w})

    return replace(network, ops=tuple(map(changed, network.ops)))


def _with_zeros(w: np.ndarray) -> np.ndarray:
    """Returns weights [K, C, ...] with two zeros in each four consecutive channels.

    Their places vary, so that the pattern is lost where a rewrite takes channels in another order, as a ranked one would be.
    """
    found, count = w.copy(), len(ZEROS)
    for row, group in itertools.product(range(count), repeat=2):
        for place in ZEROS[(row + group) % count]:
            found[row::count, 4 * group + place :: 4 * count] = 0
    return found
