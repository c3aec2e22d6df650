"""Nodes to problems. Read lower.py first.

Enters: an onnx-ir graph in one spelling, from frontend/.
Leaves: a `Network`: ops that each compute one problem (tactics/problems) from named tensors of shape NCHW, with weights as
stored or FP64. Nothing behind it sees onnx.

units: the nodes that lower together, one or several (normalizations, shuffles); convolutions, pointwise, moves, reductions,
rare_operators: one kind of operator each; lower: all of them, and which are only names.
"""
