"""Why each layer runs as it does, for people and for tools. Read reasons.py first.

Enters: a table with its plan (reasons, autotuning), or an engine's plan record (all others).
Leaves: records, sentences, tables, TensorRT's layer information. Nothing here decides anything.

reasons: the record of every layer's verdict; reason_texts: what each reason means to people; facts: a layer of the plan in one
record; plan_facts: the plan as a whole, fact by fact; figures: times, ratios and the network in words. Views of these: wording,
the sparsity log and the account of a layer; log, what a build prints; layer_info, TensorRT's JSON; report, tables; points, the
plans for several batches; gaps, launches beside their floors. what_if: an engine's plan solved again; autotuning: the verbose
log.
"""
