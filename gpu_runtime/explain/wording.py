"""Why layers run sparse or dense, in words: the sparsity log and the full account of a layer, from the engine's plan alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gpu_runtime.text import lost_text, printable, share_text, table, tactic_text, times_are, us_text, versus, wrap

PREDICTED = {"timing": {"kind": "predicted"}}  # whose times a measured plan marks all the same
ELIGIBLE_LINE = "(Sparsity) Layers eligible for sparse math:"
PICKED_LINE = "(Sparsity) TRT inference plan picked sparse implementation for layers:"
RESOURCES = {"mma": "tensor cores", "dram": "DRAM", "l2": "L2", "smem": "shared memory", "launch": "launch",
             "latency": "memory latency", "issue": "instruction issue", "alu": "arithmetic"}  # fmt: skip
SHOWN_US = 0.005  # what is less is not written as microseconds: two decimals show nothing of it
UNDECIDED = 0.1  # P(sparse faster) this close to a half is a toss
NO_GAIN = 1.05  # a smaller gain is not called worth retraining for


def sparsity_text(plan: Mapping) -> str:
    """The sparsity log: whose plan, TensorRT's two lines, a row per layer, and a sentence per layer in plain words."""
    sparsity, device = plan["sparsity"], plan["device"]
    whose = f"{plan['model']['name']} for {device['title']} ({device['sm']}), --sparsity={sparsity['mode']}"
    lines = _forced(sparsity) if sparsity["mode"] == "force" else []
    lines += [
        printable(f"Sparsity of {whose}; {times_are(plan)}"),
        f"{ELIGIBLE_LINE} {', '.join(map(printable, sparsity['eligible']))}".rstrip(),
        f"{PICKED_LINE} {', '.join(map(printable, sparsity['picked']))}".rstrip(),
        "",
    ]
    header = ["layer\n  verdict: reason", "best dense", "best sparse", "cost of the\nother choice"]
    rows = [
        [
            f"{printable(row['layer'])}\n  {row['verdict']}: {row['reason']}",
            _best(row.get("best_dense"), plan),
            _best(row.get("best_sparse"), plan),
            cost_text(row, plan),
        ]
        for row in sparsity["rows"]
    ]
    lines += table(header, rows, caps=(38, 32, 32, 12), right=(3,), gap=True)
    lines += ["", *network_lines(plan), ""]
    for row in sparsity["rows"]:
        lines += wrap(f"{printable(row['layer'])}: {sentence(row, plan)}")
    return "\n".join(lines).rstrip() + "\n"


def cost_text(row: Mapping, plan: Mapping) -> str:
    """What the plan would take more with the layer forced the other way."""
    cost = row.get("other_cost_us")
    return "-" if cost is None else "none" if abs(cost) < SHOWN_US else us_text(cost, plan, sign="+")


def _forced(sparsity: Mapping) -> list[str]:
    """What --sparsity=force did to the model: {pruned: [initializer], not_pruned: [(initializer, why)]}."""
    lines = ["--sparsity=force changed nothing: all weights that can have the 2:4 pattern have it"]
    if sparsity.get("pruned"):
        energy = sparsity.get("pruned_energy")
        taken = "" if energy is None else f", {lost_text(energy)} of their energy (the sum of their squares)"
        lines = wrap(
            f"--sparsity=force set the two smallest of each four weights to zero in {len(sparsity['pruned'])} "
            f"initializers{taken}: the outputs are not those of the model as it was given"
        )
    for name, why in sparsity.get("not_pruned") or ():
        lines += wrap(printable(f"not pruned: {name}: {why}"))
    return lines


def network_lines(plan: Mapping) -> list[str]:
    """The network in one sentence: eligible, picked, time saved, and what is the most there could be."""
    sparsity = plan["sparsity"]
    if not sparsity["eligible"]:
        return wrap(f"No layer is eligible for 2:4: the plan is dense and takes {us_text(plan['plan']['total_us'], plan)}")
    text = f"{len(sparsity['picked'])} of {len(sparsity['eligible'])} eligible layers run sparse"
    total, dense = plan["plan"]["total_us"], (plan["plan"].get("rivals") or {}).get("all_dense_us")
    if dense is not None:
        text += f"; the plan takes {us_text(total, plan)}, the best one without sparse tactics {us_text(dense, plan)}"
        text += f" ({versus(dense, total)})"
    ceiling = (sparsity.get("summary") or {}).get("ceiling_us")
    if ceiling is not None and dense:
        text += (
            ". With all eligible kernels at twice their dense speed, where launch and memory allow it, it would take "
            f"{us_text(ceiling, plan)} ({versus(ceiling, dense)})"
        )
    return wrap(text)


# ---- one layer


def sentence(row: Mapping, plan: Mapping) -> str:
    """Why a layer does or does not run sparse, in plain words, from a sparsity row's reason and numbers."""
    if row.get("sentence"):
        return row["sentence"]
    text = _REASONS.get(row["reason"], lambda row, plan: row["reason"])(row, plan)
    text = text[0].upper() + text[1:]
    text = text if text.endswith(".") else text + "."
    return text + _forced_text(row, plan) + _limit(row, plan)


def _time(best: Mapping | None, plan: Mapping) -> str:
    return us_text(best["us"], plan) if best else "an unknown time"


def _picked(row: Mapping, plan: Mapping) -> str:
    dense, sparse = row.get("best_dense"), row.get("best_sparse")
    text = f"runs sparse: the best sparse kernel takes {_time(sparse, plan)}, the best dense one {_time(dense, plan)}"
    if sparse and row.get("us") is not None and abs(row["us"] - sparse["us"]) >= SHOWN_US:
        text = f"runs sparse, in {us_text(row['us'], plan)} with the plan's formats: in any, {text.partition(': ')[2]}"
    if dense and sparse and dense["us"] > sparse["us"] > 0:
        text += f" ({dense['us'] / sparse['us']:.2f}x)"
    if dense and sparse and dense["us"] < sparse["us"]:
        text += ", but dense would need costlier formats around it"
    return text


def _dense_faster(row: Mapping, plan: Mapping) -> str:
    dense, sparse = row.get("best_dense"), row.get("best_sparse")
    if dense and sparse and dense["us"] == sparse["us"]:
        return f"could run sparse, but would gain nothing: both take {_time(dense, plan)}"
    return f"could run sparse, but dense is faster: {_time(dense, plan)} against {_time(sparse, plan)}"


def _reformat_outweighs(row: Mapping, plan: Mapping) -> str:
    dense, sparse, other = row.get("best_dense"), row.get("best_sparse"), row.get("other")
    text = f"sparse alone is faster ({_time(sparse, plan)} against {_time(dense, plan)}), but the formats it needs "
    if sparse:
        text += f"({sparse['in']} in, {sparse['out']} out) "
    if other and other["reformat_us"] <= 0 < other["around_us"]:
        return text + "make the layers around it slower by more than that"
    return text + "cost the plan more than that"


def _within_noise(row: Mapping, plan: Mapping) -> str:
    dense, sparse = row.get("best_dense"), row.get("best_sparse")
    return (
        f"sparse ({_time(sparse, plan)}) and dense ({_time(dense, plan)}) are closer than their spread (Q20 to Q80), so the "
        f"plan stays {row['verdict']}: neither choice would be wrong"
    )


def _no_sparse_tactic(row: Mapping, plan: Mapping) -> str:
    if plan["sparsity"]["mode"] == "disable":
        return "its weights have the 2:4 pattern, but --sparsity=disable allows dense tactics only"
    return f"its weights have the 2:4 pattern, but no sparse tactic can run it{_detail(row)}"


def _pattern_violation(row: Mapping, plan: Mapping) -> str:
    text, share, lost = "its weights do not have the 2:4 pattern", row.get("pattern_share"), row.get("lost_energy")
    if share is not None:
        text += f": {share_text(share)}{_as_stored(row)} of its groups of 4 input channels have two zeros or more"
        if row.get("first_violation"):
            text += ", the first that has not is at [k,c,r,s] = [{},{},{},{}]".format(*row["first_violation"])
    if lost is not None:
        text += f". Pruning to the nearest pattern (--sparsity=force) takes away {lost_text(lost)} of their energy"
    return text


def _channels(row: Mapping, plan: Mapping) -> str:
    return f"its input channels do not come in fours, which 2:4 is a pattern of{_detail(row)}"


def _grouped(row: Mapping, plan: Mapping) -> str:
    if row["groups"] == row["c"]:
        return "it is a depthwise convolution: each output has one input channel, and 2:4 is a pattern of four"
    return f"it is a grouped convolution whose groups no sparse tactic takes{_detail(row)}"


_REASONS = {
    "picked": _picked, "dense_faster": _dense_faster, "reformat_outweighs": _reformat_outweighs,
    "within_noise": _within_noise, "no_sparse_tactic": _no_sparse_tactic, "pattern_violation": _pattern_violation,
    "channels_not_multiple_of_4": _channels, "grouped_conv": _grouped,
}  # fmt: skip


def _detail(row: Mapping) -> str:
    return f" ({row['detail']})" if row.get("detail") else ""


def _other_choice(row: Mapping) -> str:
    return "dense" if row["verdict"] == "sparse" else "sparse"


def _forced_text(row: Mapping, plan: Mapping) -> str:
    cost, other = row.get("other_cost_us"), row.get("other")
    if cost is None:
        return ""
    change = f"{us_text(abs(cost), plan)} {'more' if cost > 0 else 'less'}" if abs(cost) >= SHOWN_US else "the same time"
    text = f" Forced {_other_choice(row)}, the whole plan would take {change}"
    best = row.get(f"best_{_other_choice(row)}")
    if other and best and abs(other["us"] - best["us"]) >= SHOWN_US:
        which = "a kernel of" if other.get("kernels", 1) == 1 else "kernels of together"
        text += f", with {which} {us_text(other['us'], plan)} for the formats around it"
    if other and (abs(other["reformat_us"]) >= SHOWN_US or abs(other["around_us"]) >= SHOWN_US):
        text += f" ({_parts(other, plan)})"
    return text + "."


def _parts(other: Mapping, plan: Mapping) -> str:
    """Where the cost of the other choice lies: its parts, those that are nothing left out."""
    named = (("its own kernel", "kernel_us"), ("reformats", "reformat_us"), ("the layers around it", "around_us"))
    parts = [f"{what} {us_text(other[key], plan, sign='+')}" for what, key in named if abs(other[key]) >= SHOWN_US]
    return ", ".join(parts) or "no part changes"


def _flip(row: Mapping) -> str:
    """What would have to change for the other choice, and how likely the predictions have it wrong."""
    kind, speedup, chance = _other_choice(row), row["flip_speedup"], row.get("p_sparse_faster")
    if (row["other_cost_us"] or 0) <= 0:
        text = f"the {kind} choice costs no more"
    elif speedup is None:
        text = f"no speed of its {kind} kernels would do: what surrounds them costs more than they save"
    elif speedup < 1.5:
        text = f"its {kind} kernels would have to be {100 * (speedup - 1):.2g} % faster"
    else:
        text = f"its {kind} kernels would have to be {speedup:.2f}x as fast"
    if chance is not None:
        text += f"; P(sparse kernel faster) = {100 * chance:.0f} %, given the error of predictions"
        if abs(chance - 0.5) < UNDECIDED:
            text += ": too close to call without measuring"
    return text


def _limit(row: Mapping, plan: Mapping) -> str:
    """What 2:4 would give a layer that does without, and the most that it could, where a reader would ask that next."""
    floor, dense = row.get("floor"), row.get("best_dense")
    if not floor or not dense or row["reason"] not in ("dense_faster", "no_sparse_tactic", "pattern_violation"):
        return ""
    most = dense["us"] / floor["sparse_us"]
    if row.get("if_sparse"):
        return _would(row, most)
    if most < NO_GAIN:
        return f" 2:4 has next to nothing to give here: no sparse kernel could be more than {_up(most)} as fast as that."
    if row["reason"] == "dense_faster":
        bound = RESOURCES[floor["bound"]]
        return f" No sparse kernel could be more than {_up(most)} as fast as that dense one (bound by {bound})."
    if row["reason"] == "pattern_violation" and len(row.get("layers") or ()) > 1:
        return " Pruned to 2:4, each of its layers would have a launch of its own: --sparsity=force shows what that would take."
    return ""


def _up(ratio: float) -> str:
    """Rounded up, as a bound must be."""
    return f"{math.ceil(100 * ratio - 1e-9) / 100:.2f}x"


def _would(row: Mapping, most: float) -> str:
    """The predictions for a layer's best kernels with and without the pattern, whatever the plan's times are."""
    would, pruned = row["if_sparse"], row["reason"] == "pattern_violation"
    sparse, dense, gain = f"~{would['us']:.2f} us", f"~{would['dense_us']:.2f} us", would["dense_us"] / would["us"]
    head = "Pruned to 2:4" if pruned else "With --sparsity=enable"
    if gain <= 1:
        return f" {head} it would gain nothing: its kernel is predicted to take {sparse} sparse and {dense} dense."
    text = f" {head} its kernel is predicted to take {sparse} instead of {dense} ({gain:.2f}x, limited by "
    text += f"{RESOURCES[would['bound']]}); no sparse kernel could be more than {_up(most)} as fast"
    if gain >= NO_GAIN:
        return text + (": prune and retrain it if that is worth it." if pruned else ".")
    return text + ("; a larger batch or image would give the tensor cores more to do." if would["bound"] == "launch" else ".")


def _best(best: Mapping | None, plan: Mapping) -> str:
    if not best:
        return "-"
    return f"{us_text(best['us'], plan)} {best['in']}->{best['out']}\n{tactic_text(best['tactic'])}"


# ---- the full account


def layer_text(row: Mapping, plan: Mapping) -> str:
    """Everything known about one layer's choice, a line per fact."""
    facts = [("why", sentence(row, plan)), ("weights", _weights(row))]
    for key in ("dense", "sparse"):
        facts.append((key, _kernel(row.get(f"best_{key}"), plan)))
    if row.get("if_sparse"):
        facts.append(("if 2:4", f"{_kernel(row['if_sparse'], PREDICTED)}; predicted"))
    other = row.get("other")
    if other:
        kernel = f"{us_text(other['us'], plan)} {other['in']}->{other['out']} {tactic_text(other['tactic'])}"
        cost = us_text(other["cost_us"], plan, sign="+")
        facts.append((f"as {_other_choice(row)}", f"{kernel}; plan {cost}: {_parts(other, plan)}"))
        facts.append(("to flip", _flip(row)))
    floor = row.get("floor")
    if floor:
        times = ", ".join(f"{RESOURCES[key]} {us_text(floor[f'{key}_us'], plan)}" for key in ("mma", "dram", "l2", "launch"))
        least = [us_text(floor[f"{kind}_us"], plan) for kind in ("dense", "sparse")]
        facts.append((
            "bound", f"{RESOURCES[floor['bound']]}; at the device's peak: {times}. Forming every product, no dense kernel "
            f"could take less than {least[0]}, no sparse one less than {least[1]}",
        ))  # fmt: skip
    lines = [f"{printable(row['layer'])}   {row['verdict']}: {row['reason']}"]
    for key, value in facts:
        lines += wrap(f"  {key:9} {printable(value)}", indent=12)
    return "\n".join(lines) + "\n"


def _weights(row: Mapping) -> str:
    if row.get("c") is None:
        return "unknown"
    text = f"[{row['k']},{row['c'] // row['groups']},{row['kernel'][0]},{row['kernel'][1]}], groups {row['groups']}; "
    if row.get("pattern_share") is None:
        return text + f"{row['c'] // row['groups']} input channels per group are no multiple of 4"
    text += f"2:4: {share_text(row['pattern_share'])}{_as_stored(row)} of {row['pattern_groups']} groups of 4 fit"
    if row.get("first_violation"):
        text += ", first that does not: [k,c,r,s] = [{},{},{},{}]".format(*row["first_violation"])
        if row.get("lost_energy") is not None:
            text += f"; the nearest pattern loses {lost_text(row['lost_energy'])} of the energy"
    return text


def _as_stored(row: Mapping) -> str:
    """The file's own share of fitting groups, where FP16 has turned tiny weights into zeros and so changed it."""
    stored = row.get("stored_share")
    if stored is None or share_text(stored) == share_text(row["pattern_share"]):
        return ""
    return f" in FP16 ({share_text(stored)} as stored)"


def _kernel(best: Mapping | None, plan: Mapping) -> str:
    if not best:
        return "no kernel"
    text = f"{us_text(best['us'], plan)} {best['in']}->{best['out']} {tactic_text(best['tactic'])}"
    if None not in (best.get("low_us"), best.get("high_us")):
        text += f" ({us_text(best['low_us'], plan)} to {us_text(best['high_us'], plan)})"
    return text + (f", limited by {RESOURCES.get(best['bound'], best['bound'])}" if best.get("bound") else "")


def rows_of(plan: Mapping, layers: Sequence[str] = ()) -> list[Mapping]:
    """The sparsity rows of these layers, in the plan's order; all of them where none is named. A name may be a layer's, an
    op's, or any part of a layer's that only one has. ValueError where it is none."""
    rows = plan["sparsity"]["rows"]
    wanted = []
    for name in layers:
        exact = [r for r in rows if name in (r["layer"], r["op"])]
        found = exact or [r for r in rows if name in r["layer"]]
        if len(found) != 1:
            those = ", ".join(printable(r["layer"]) for r in found or rows)
            few = "is in the names of several layers" if found else "is no layer with weights"
            raise ValueError(f"{name!r} {few}: expected one of {those}")
        wanted += found
    return [r for r in rows if not layers or r in wanted]


def explain_text(plan: Mapping, rows: list[Mapping]) -> str:
    """The account of these layers, after a line on whose plan it is and the network's sentence."""
    device, mode = plan["device"], plan["sparsity"]["mode"]
    head = f"{plan['model']['name']} for {device['title']} ({device['sm']}), --sparsity={mode}; {times_are(plan)}"
    return "\n".join([*wrap(printable(head)), *network_lines(plan), "", *(layer_text(row, plan) for row in rows)])
