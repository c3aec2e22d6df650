"""Plans under other conditions: with a layer forced the other way, without merged branches, without sparse kernels, in one
format. The plan is solved again nowhere else: explanation reads these answers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cuda_kernels.rates import peers_are_timed, rates
from gpu_runtime.network import Network, Op
from gpu_runtime.planning import batch_pieces
from gpu_runtime.planning.entries import Times
from gpu_runtime.planning.tables import Table
from gpu_runtime.runtime.findings import Flip, LibraryPlan, OtherChoice, Rivals, SingleFormat
from tactics import peers
from tactics.format import HALF_FORMATS, Format, canonical
from tactics.kernels import ANY_FP16
from tactics.planner import forced_plans, plan
from tactics.planner.graph import Entry, Hop, to_us
from tactics.planner.grouping import grouped
from tactics.planner.reformats import hop_ps
from tactics.predict import published_range
from tactics.problems.problem import ConvProblem, Problem
from tactics.tactic import Tactic

Timed = tuple[Op, Times]


@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """The plan under other conditions.

    `rivals`: totals of plans to compare with; `other`: layer -> the best plan with the layer forced from sparse to dense or
    back, where one exists; `flip`: layer -> the speed of its kernels at which that plan would be as good, where any speed
    suffices; `apart_us`: op that merges branches -> the microseconds that the plan loses without the op. The latter is None if
    the op has sparse tactics: forcing these does not take the op out of the plan.
    """

    rivals: Rivals
    other: Mapping[str, OtherChoice]
    flip: Mapping[str, Flip]
    apart_us: Mapping[str, float | None]


def counterfactuals(table: Table, chosen: plan.Plan, *, only_dense: bool = False) -> Counterfactuals:
    """Computes the counterfactuals of all layers and branches from one elimination tree. `only_dense`: the rivals are only
    plans without sparse kernels.
    """
    wanted, merged, questions = _questions(table, chosen)
    found = forced_plans.forced(table.graph, chosen, questions)
    forced = {layer: answer for layer, answer in zip(wanted, found, strict=False) if answer is not None}
    able = {c.name for c in table.graph.choices if any(e.sparse for e in c.entries)}
    apart = {
        name: None if name in able or answer is None else to_us(answer.total_ps - chosen.total_ps)
        for name, answer in zip(merged, found[len(wanted) :], strict=True)
    }
    flips = {layer: _flip(answer) for layer, answer in forced.items() if answer.speedup < math.inf}
    found_rivals = rivals(table, chosen, only_dense=only_dense)
    return Counterfactuals(found_rivals, {x: _other(table, chosen, f) for x, f in forced.items()}, flips, apart)


def _questions(table: Table, chosen: plan.Plan) -> tuple[dict[str, bool], list[str], list[tuple[tuple[str, ...], bool]]]:
    """Returns (layer that could run either way -> whether to force it sparse; the ops that merge branches; the questions to
    forced_plans.forced about the layers, then the ops).
    """
    ops = [op for op in table.network.ops if op.layer and chosen.entry_of(op.name, op.when)]
    timed = alternatives(table, ops)
    kinds = {id(times): {t.sparse for t in times} for times in table.times}
    both = [op for op in ops if len(set().union(*(kinds[id(times)] for _, times in timed[op.layer]))) == 2]
    wanted = {op.layer: not chosen.entries[op.name].sparse for op in both}
    names = {layer: tuple(op.name for op in same) for layer, same in ops_by_layer(table.network, wanted).items()}
    merged = [op.name for op in ops if op.branches]
    questions = [(names[layer], sparse) for layer, sparse in wanted.items()]
    return wanted, merged, questions + [((name,), True) for name in merged]


def quoted(table: Table, chosen: plan.Plan) -> Iterator[tuple[Problem, Tactic]]:
    """Yields the problems and tactics whose times `counterfactuals` and the verdicts of layers quote, without the plan's own
    entries.

    These are the best dense and the best sparse tactic of each layer that has both, the changes of plans with a layer forced,
    and the rivals.
    """
    wanted, _, questions = _questions(table, chosen)
    ops = [op for op in table.network.ops if op.layer in wanted and chosen.entry_of(op.name, op.when)]
    for timed in alternatives(table, ops).values():
        for op, times in timed:
            best = {t.sparse: t for t in sorted(times, key=lambda t: -times[t].us)}
            yield from ((op.problem, t) for t in best.values())
    dense, single, greedy = _rival_plans(table, chosen)
    for rival in filter(None, (single and single[1], dense, greedy)):
        yield from launched(table, rival.options, rival.entries, rival.reformats)
    for f in filter(None, forced_plans.forced(table.graph, chosen, questions)):
        yield from launched(table, {**chosen.options, **f.change.options}, f.change.entries, f.change.new)


def launched(
    table: Table, options: Mapping[str, str], entries: Mapping[str, Entry | None], hops: Iterable[Hop]
) -> Iterator[tuple[Problem, Tactic]]:
    """Yields (problem, tactic) of each launch that these entries and reformats make in a plan with these options."""
    for op in table.network.ops:
        entry = entries.get(op.name)
        if entry and entry.tactic and plan.holds(op.when, options):
            yield op.problem, entry.tactic
    for problem in (table.hops[hop] for hop in hops if hop in table.hops):
        times = table.reformats[problem]
        yield problem, min(times, key=lambda t: (times[t].us, t.name))


def alternatives(table: Table, chosen: Iterable[Op]) -> dict[str, list[Timed]]:
    """Returns layer -> (op, times of its tactics) for all ops that hold the layer's weights.

    If one dense launch computes several layers, the ops of each layer alone, which may run sparse, are listed too.
    """
    found = grouped((op.layer, (op, times)) for op, times in zip(table.network.ops, table.times, strict=True) if op.layer)
    for op in chosen:
        if is_dense_together(op):
            found[op.layer] += [each for layer in op.layers if layer != op.layer for each in found.get(layer, ())]
    return found


def is_dense_together(op: Op) -> bool:
    """Whether an op computes several layers in one launch that cannot be sparse although a single layer could be: a
    squeeze-excite, or merged convolutions of which some lack the pattern.
    """
    merged = isinstance(op.problem, ConvProblem) and len(op.layers) > 1 and not op.problem.sparse24
    return merged or op.problem.only_dense


def ops_by_layer(network: Network, layers: Iterable[str]) -> dict[str, list[Op]]:
    """Returns layer -> all ops with its weights; for merged siblings, the ops of all of them."""
    able = [*{op.name: op for op in network.ops if op.layer}.values()]
    members: dict[str, set[str]] = {}  # layer -> all layers whose weights its ops hold
    holding: dict[str, set[int]] = {}  # layer -> the ops that hold weights of it
    for i, op in enumerate(able):
        members.setdefault(op.layer, set()).update(op.layers or (op.layer,))
        for m in op.layers or (op.layer,):
            holding.setdefault(m, set()).add(i)
    return {x: [able[i] for i in sorted(set().union(*(holding[m] for m in members.get(x, ()))))] for x in layers}


def rivals(table: Table, chosen: plan.Plan, *, only_dense: bool = False) -> Rivals:
    """Returns the totals of plans to compare with: the best plan without sparse kernels and, unless `only_dense`, the plan with
    one format everywhere and the plan of each layer's fastest kernel.
    """
    dense, single, greedy = (_dense_plan(table, chosen), None, None) if only_dense else _rival_plans(table, chosen)
    one = SingleFormat(single[0], single[1].us) if single else None
    whole = batch_pieces.without(table.graph)
    whole_us = plan.solve(whole).us if whole else None
    dense_plans = [dense]
    if whole:  # a library runs no pieces: fusions of the whole batch may be faster for it
        names = {c.name for c in whole.choices}
        force = {name: is_dense for name, is_dense in without_sparse(table.network).items() if name in names}
        dense_plans.append(plan.solve(whole, force=force))
    library = min(filter(None, (_library(table, d) for d in dense_plans)), key=lambda found: found.us, default=None)
    return Rivals(dense.us, one, greedy.us if greedy else None, library, whole_us=whole_us)


def _rival_plans(table: Table, chosen: plan.Plan) -> tuple[plan.Plan, tuple[Format, plan.Plan] | None, plan.Plan | None]:
    """Returns the plans behind `rivals`: (all dense, (format, plan) of one format everywhere, greedy)."""
    shapes = table.network.tensors.items()
    names = {
        f: {t: tuple(k for k in table.graph.formats[t] if k.format == canonical(f, shape)) for t, shape in shapes}
        for f in HALF_FORMATS
    }
    single = plan.best_single_format(table.graph, names)
    try:
        greedy = plan.greedy(table.graph)
    except ValueError:
        greedy = None
    return _dense_plan(table, chosen), single, greedy


def _dense_plan(table: Table, chosen: plan.Plan) -> plan.Plan:
    best_is_dense = not any(e.sparse for e in chosen.entries.values())
    if best_is_dense and not table.device.measured:  # measured plans may be chosen by their time as a whole
        return chosen
    return plan.solve(table.graph, force=without_sparse(table.network))


def without_sparse(network: Network) -> plan.Force:
    """Returns the planner's force by which no layer runs sparse."""
    return dict.fromkeys((op.name for op in network.ops if op.layer), lambda entry: not entry.sparse)


def _library(table: Table, dense: plan.Plan) -> LibraryPlan | None:
    """Returns the dense plan with a library's estimated times for its FP16 convolutions; None if no time can be estimated."""
    launched = [(op, entry) for op in table.network.ops if (entry := dense.entry_of(op.name, op.when)) and entry.tactic]
    found = [
        (entry.us, known)
        for op, entry in launched
        if entry.tactic
        and entry.tactic.kernel not in ANY_FP16
        and (known := peers.time_of(batch_pieces.whole(op), table.device))
    ]
    if not found:
        return None
    own_us, times = dense.us - sum(us for us, _ in found), [known for _, known in found]
    low, high = published_range([t.us for t in times], [t.bound for t in times])
    total, sparse = (sum(of) for of in ([t.us for t in times], [min(t.us, t.sparse_us or t.us) for t in times]))
    return LibraryPlan(
        us=round(own_us + total, 6),
        low_us=round(own_us + low, 6),
        high_us=round(own_us + high, 6),
        sparse_us=round(own_us + sparse, 6) if any(t.sparse_us for t in times) else None,
        layers=len(found),
        own=len(launched) + len(dense.reformats) - len(found),
        own_us=round(own_us, 6),
        source=rates(table.device).library.source,
        timed=int(peers_are_timed(table.device)),
    )


def _other(table: Table, chosen: plan.Plan, forced: forced_plans.Forced) -> OtherChoice:
    """Describes the change of the plan when the layer is forced."""
    tactic = forced.after[0].tactic
    if tactic is None:
        raise RuntimeError("planner: a layer with weights was forced into an entry that launches nothing")
    entries = {**chosen.entries, **forced.change.entries}
    total_us = to_us(forced.total_ps - sum(e.premium_ps for e in entries.values() if e is not None))
    us, cost_us = sum(e.us for e in forced.after), total_us - chosen.us
    kernel_us = us - sum(e.us for e in forced.before)
    gone, new = ([hop_ps(table.graph, hop) for hop in hops] for hops in (forced.change.gone, forced.change.new))
    reformat_us = to_us(sum(new) - sum(gone))
    return OtherChoice(
        total_us=total_us,
        cost_us=cost_us,
        kernel_us=kernel_us,
        reformat_us=reformat_us,
        around_us=cost_us - kernel_us - reformat_us,
        reformats=sum(map(bool, new)) - sum(map(bool, gone)),
        tactic=tactic,
        in_=tactic.ins[0],
        out=tactic.out,
        us=us,
        kernels=len(forced.after),
        premium_us=to_us(sum(e.premium_ps for e in forced.after)),
    )


def _flip(forced: forced_plans.Forced) -> Flip:
    """Describes the speed at which the layer's other kind would be as good."""
    us, by = sum(e.us for e in forced.flipped), forced.speedup
    doubt = sum(to_us(e.premium_ps) for e in forced.flipped) / by + sum(to_us(e.premium_ps) for e in forced.before)
    return Flip(us, us / by, doubt)
