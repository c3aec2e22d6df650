"""Explanations of a plan, with the reasons for each layer's tactic, for people and for tools. Read reasons.py first.

Enters: a table of times with its plan (reasons, autotuning), or an engine's plan record (all other modules).
Leaves: records, sentences, tables, TensorRT's layer information. No module of this folder decides anything.

reasons: the record of every layer's verdict; reason_texts: the texts for each reason; facts: a layer of the plan in one record;
plan_facts: the plan as a whole, fact by fact; figures: times, ratios and the network in words. Views of these: wording, the
sparsity log and the account of a layer; log, the text that a build prints; layer_info, TensorRT's JSON; report, tables; points,
the plans for several batches; gaps, launches compared with their floors. what_if: an engine's plan solved again under
conditions; model_info: an ONNX model; names: names of layers; autotuning: the verbose log.
"""
