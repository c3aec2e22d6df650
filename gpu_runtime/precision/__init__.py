"""Finds the tensors that exceed FP16's range or that FP16 must not round. Read ranges.py first.

Enters and leaves: a `Network`, with exponents, formats and FP32 tensors decided.

execution: run a network in FP32 within a budget; constants: values that constants alone put into tensors, mainly masks; ranges:
store tensors beyond FP16 times a power of two, or in FP32; sample: the same network for smaller inputs, to run instead of a
large one; intervals: possible values; cliffs: operators that rounding ruins, and the tensors kept in FP32 for them; rules:
tensors that stay FP32 by their operators alone.
"""
