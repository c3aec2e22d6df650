"""The times of an engine's inferences: measured on a GPU, as trtexec measures them, or predicted. Read records.py first.

Enters: an engine, arrays and `Settings`. Leaves: a `Trace`, the times of every query, and a `Summary` of them.

records: plain data; summary: pure functions of lists of times; inputs: random arrays, and arrays from files; clocks: whether
the GPU's clock was held down; measure: the loop; attend: threads for work that may hang; wording: trtexec's block of text and
its JSON files.
"""
