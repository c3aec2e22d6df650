"""Turns a model into an engine. Read build.py first.

Enters: an ONNX model and `BuildOptions`.

Leaves: an `Engine`; of `plan`, the `Plans` of a model for several devices and batches.

options: the arguments of a build; target: the device and its timer; chosen_sizes: sizes and batches that get a plan; load: the
model, lowered; fit: its types; planner: tables and the best plan; settle: plans compared with FP32; in_network: plans run as a
whole; record: plans explained, as an engine stores them; deviations: a plan compared with FP32; plans: several, side by side.
"""
