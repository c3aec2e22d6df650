"""Why each layer runs as it does, for people and for tools. Read reasons.py first.

Enters: a table with its plan (reasons, autotuning), or an engine's plan record (all others).
Leaves: records, sentences, tables, TensorRT's layer information. Nothing here decides anything.
"""
