"""The sparsity log: which layers could run 2:4 sparse, which do, and why, in words; read from the engine's plan alone."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_runtime.text import printable, share_text, table, tactic_text, times_are, us_text, versus, wrap

ELIGIBLE_LINE = "(Sparsity) Layers eligible for sparse math:"
PICKED_LINE = "(Sparsity) TRT inference plan picked sparse implementation for layers:"


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
            "-" if row.get("other_cost_us") is None else us_text(row["other_cost_us"], plan, sign="+"),
        ]
        for row in sparsity["rows"]
    ]
    lines += table(header, rows, caps=(38, 32, 32, 12), right=(3,), gap=True)
    lines += ["", *_sparsity_total(plan), ""]
    for row in sparsity["rows"]:
        lines += wrap(f"{printable(row['layer'])}: {sentence(row, plan)}")
    return "\n".join(lines).rstrip() + "\n"


def _forced(sparsity: Mapping) -> list[str]:
    """What --sparsity=force did to the model: {pruned: [initializer], not_pruned: [(initializer, why)]}."""
    lines = ["--sparsity=force changed nothing: all weights that can have the 2:4 pattern have it"]
    if sparsity.get("pruned"):
        lines = wrap(
            f"--sparsity=force set the two smallest of each four weights to zero in {len(sparsity['pruned'])} "
            "initializers: the outputs are not those of the model as it was given"
        )
    for name, why in sparsity.get("not_pruned", []):
        lines += wrap(printable(f"not pruned: {name}: {why}"))
    return lines


def sentence(row: Mapping, plan: Mapping) -> str:
    """Why a layer does or does not run sparse, in plain words, from a sparsity row's reason and numbers."""

    if row.get("sentence"):
        return row["sentence"]

    def us(value: float | None) -> str:
        return "an unknown time" if value is None else us_text(value, plan)

    dense = (row.get("best_dense") or {}).get("us")
    sparse = (row.get("best_sparse") or {}).get("us")
    cost, chance, share = row.get("other_cost_us"), row.get("p_sparse_faster"), row.get("pattern_share")
    detail = f" ({row['detail']})" if row.get("detail") else ""
    text = {
        "picked": f"runs sparse: the best sparse tactic takes {us(sparse)}, the best dense one {us(dense)}",
        "dense_faster": f"could run sparse, but would gain nothing: both take {us(dense)}"
        if dense == sparse
        else f"could run sparse, but dense is faster: {us(dense)} against {us(sparse)}",
        "reformat_outweighs": f"sparse alone is faster ({us(sparse)} against {us(dense)}), but the formats it needs "
        "cost the plan more than that",
        "within_noise": f"sparse ({us(sparse)}) and dense ({us(dense)}) are closer than their spread (Q20 to Q80), "
        f"so the plan stays {row['verdict']}",
        "no_sparse_tactic": f"its weights have the 2:4 pattern, but no sparse tactic can run it{detail}",
        "pattern_violation": "its weights do not have the 2:4 pattern",
        "channels_not_multiple_of_4": f"its input channels do not come in fours, which 2:4 is a pattern of{detail}",
        "grouped_conv": f"it is a grouped convolution, for which there is no sparse tactic{detail}",
    }.get(row["reason"], row["reason"])
    if row["reason"] == "picked" and dense is not None and sparse is not None and dense > sparse > 0:
        text += f" ({dense / sparse:.2f}x)"
    if row["reason"] == "picked" and dense is not None and sparse is not None and dense < sparse:
        text += ", but dense would need costlier formats around it"
    if row["reason"] == "pattern_violation" and share is not None:
        text += f": {share_text(share)} of its groups of 4 input channels have two zeros or more"
        if row.get("first_violation"):
            text += ", the first that has not is at [k,c,r,s] = [{},{},{},{}]".format(*row["first_violation"])
    if row["reason"] == "no_sparse_tactic" and plan["sparsity"]["mode"] == "disable":
        text = "its weights have the 2:4 pattern, but --sparsity=disable allows dense tactics only"
    text = text[0].upper() + text[1:] + "."
    if cost is not None and row["verdict"] in ("sparse", "dense"):
        other = "dense" if row["verdict"] == "sparse" else "sparse"
        text += f" Forced {other}, the whole plan would take {us(abs(cost))} {'more' if cost >= 0 else 'less'}."
    if chance is not None:
        text += f" The chance that sparse is faster is put at {100 * chance:.0f} %."
    return text


def _sparsity_total(plan: Mapping) -> list[str]:
    sparsity = plan["sparsity"]
    text = f"{len(sparsity['picked'])} of {len(sparsity['eligible'])} eligible layers run sparse"
    total, dense = plan["plan"]["total_us"], (plan["plan"].get("rivals") or {}).get("all_dense_us")
    if dense is not None:
        text += f"; the plan takes {us_text(total, plan)}, the best one without sparse tactics {us_text(dense, plan)}"
        text += f" ({versus(dense, total)})"
    return wrap(text)


def _best(best: Mapping | None, plan: Mapping) -> str:
    if not best:
        return "-"
    return f"{us_text(best['us'], plan)} {best['in']}->{best['out']}\n{tactic_text(best['tactic'])}"
