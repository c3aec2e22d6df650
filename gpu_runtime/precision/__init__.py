"""Which tensors FP16 cannot hold or must not round. Read ranges.py first.

Enters and leaves: a `Network`, with exponents, formats and FP32 tensors decided.

execution: a network run in FP32, and what that may cost; constants: what they alone put into tensors, masks above all; ranges:
what FP16 cannot hold is stored times a power of two, or in FP32; sample: a network for smaller inputs, which is run in place of
a large one; intervals: what values can be; cliffs: operators that rounding ruins, and what is kept in FP32 for them.
"""
