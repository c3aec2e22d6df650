"""Why each layer runs as it does, for people and for tools. Read reasons.py first.

Enters: a table with its plan (reasons, autotuning), or an engine's plan record (all others).
Leaves: records, sentences, tables, TensorRT's layer information. Nothing here decides anything.

reasons: the record of every layer's verdict; wording: the log's words; layer_info: TensorRT's JSON; report: tables; what_if:
an engine's plan solved again; side_by_side: several devices; autotuning: the verbose log.
"""
