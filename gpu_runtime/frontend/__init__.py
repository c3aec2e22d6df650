"""ONNX in. Read importer.py first.

Enters: an ONNX file, sizes of its open dimensions, whether weights are to be pruned to 2:4.
Leaves: `fuse.FusedGraph`: checked, converted to one opset, folded, respelled, with weights and fusion alternatives.
Nothing behind this folder and lowering/ sees onnx.
"""
