"""How long an engine's inferences take: measured on a GPU, as trtexec measures, or predicted. Read records.py first.

Enters: an engine, arrays and `Settings`. Leaves: a `Trace`, the times of every query, and a `Summary` of them.

records: plain data; summary: pure functions of lists of times; inputs: random arrays, and those of files; clocks: whether the
GPU's clock was held down; measure: the loop; wording: trtexec's block of text and its JSON files.
"""
