"""A clean graph to layers. Read fuse.py first.

Enters: what frontend/ leaves, an onnx-ir graph in one spelling.
Leaves: `fuse.Fused`: layers with weights, and fusion alternatives as groups of options. Nothing behind lowering/ sees onnx.

chains of pointwise nodes; normalizations in nodes; layers what leaves; shuffles of elements; branches that are added;
concats of convolutions; fuse alternatives, not decisions.
"""
