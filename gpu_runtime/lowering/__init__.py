"""Layers to problems. Read lower.py first.

Enters: a fused graph of ONNX operators.
Leaves: a `Network`: ops that each compute one problem (tactics/problems) from named tensors of shape NCHW, with FP32 weights,
and groups of options where there is more than one way.

convolutions, moves, reductions, rare_operators: one kind of operator each; rearranged: Concats of a tensor's parts as moves of
it; lower: all of them, and which are only names.
"""
