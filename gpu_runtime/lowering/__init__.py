"""Nodes to problems. Read lower.py first.

Enters: what frontend/ leaves, an onnx-ir graph in one spelling.
Leaves: a `Network`: ops that each compute one problem (tactics/problems) from named tensors of shape NCHW, with weights as
stored or FP64. Nothing behind it sees onnx.

units: what lowers as one, a node or several (normalizations, shuffles); convolutions, pointwise, moves, reductions,
rare_operators: one kind of operator each; lower: all of them, and which are only names.
"""
